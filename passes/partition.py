"""partition: from assigned axes to the per-rank graph.

Requires: axes inferred and assigned. Gives: a graph over local tensors in which every edge's
layouts agree, conversions are collectives, and shape literals are local; parameters know their
layout.

    before:  h = linear(x, w1); y = linear(h, w2)          ffn -> tp
    after:   x' = replicate(x, tp); h = linear(x', w1); z = linear(h, w2); y = all_reduce(z, tp)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard import collectives
from autoshard.axes import Axis, Dim, atoms, leaves, same_size, size_of
from autoshard.chain import Pass
from autoshard.convert import Converter
from autoshard.errors import ShardingError, message
from autoshard.infer import expression
from autoshard.layout import I, Layout, P, R
from autoshard.local import Local
from autoshard.program import Program, module_path, shallow, tensor_results
from autoshard.rules import Typing, op_name, rule_for
from autoshard.rules.core import operands
from autoshard.writer import Value

#: Ops that read positions as positions.
POINTING = frozenset(
    """index index_select gather index_put _unsafe_index_put index_add scatter scatter_add
    scatter_reduce""".split()
)


@dataclass(frozen=True)
class Partition(Pass):
    name: ClassVar[str] = "partition"

    def __call__(self, program: Program) -> Program:
        return Partitioner(shallow(program)).run()


class Partitioner(Converter):
    """Rewrites one graph, node by node."""

    def __init__(self, program: Program):
        super().__init__(program)
        if not program.dims:
            raise ShardingError(
                message("partition", "axes", "none", "infer_axes has not run", "put it before")
            )
        self.typings = program.typings
        self._positions = False  # of the op that is being rewritten
        self.modes: dict[fx.Node, dict[str, Any]] = {}  # what each op did, per mesh axis
        self.moved: dict[fx.Node, dict[str, Axis]] = {}  # and what it cut in place of that
        self.order = {m: program.assigned(m) for m in self.axes}
        #: axes of which the inputs hold this rank's rows only: no rank ever has them whole
        self.rows = {
            id(a.axis): a.axis
            for m in self.batch_axes
            for a in self.order[m]
            if not isinstance(a.axis.size, int) and a.axis.role != "ragged"
        }
        self.assigned = {
            m: {id(a.axis): (a.priority, -i) for i, a in enumerate(self.order[m])}
            for m in self.axes
        }

    def run(self) -> Program:
        placeholders = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        for node in placeholders:
            self.source = node
            self._placeholder(node)
        self.bind_sizes(placeholders)
        for node in self.program.graph.nodes:
            self.source = node
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._output(node)
            elif node.op == "get_attr":
                raise ShardingError(
                    message(
                        "partition", node.name, str(node.target), "a nested graph", "export it flat"
                    )
                )
        self.settle_parameters()
        self.graph.eliminate_dead_code()
        self.graph.lint()
        program = self.program
        alive = {n.name for n in self.graph.nodes}
        program.conversions = [c for c in program.conversions if c.node in alive]
        program.graph_module = fx.GraphModule(torch.nn.Module(), self.graph)
        program.dims, program.layouts = self.dims, self.layouts
        return program

    def _placeholder(self, node: fx.Node) -> None:
        new = self.graph.placeholder(node.name)
        new.meta.update(node.meta)
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            self.env[node] = new
            return
        dims = self.program.dims[node]
        parameter = self.program.values.get(node.name)
        layout: Layout = dict.fromkeys(self.axes, I)
        for m in self.axes:
            axis = self._home(m, dims, parameter is None)
            if axis is not None:
                layout[m] = axis
        trainable = parameter is not None and parameter.trainable
        derived = parameter is not None and not parameter.buffer
        known = node.name if parameter is not None else ""
        self.env[node] = self._value(
            new, dims, layout, trainable, derived, value.element_size(), known
        )

    def _home(self, m: str, dims: tuple[Dim, ...], is_input: bool) -> Axis | None:
        """The axis that a parameter (or, over the data axes, an input) is stored cut on."""
        if m in self.context_axes or (is_input and m not in self.batch_axes):
            return None
        ranked = self.assigned[m]
        found = [a for d in dims for a in atoms(d) if id(a) in ranked and not a.opaque]
        if not is_input:
            found = [a for a in found if a.role not in ("batch", "sequence")]
            found = [a for a in found if not _repeated(dims, a)]
        return max(found, key=lambda a: ranked[id(a)], default=None)

    def _value(
        self,
        node: fx.Node,
        dims: Any,
        layout: Layout,
        grad: bool,
        derived: bool,
        itemsize: int,
        name: str = "",
    ) -> Value:
        self.dims[node], self.layouts[node] = dims, layout
        readers = len(self.source.users) if self.source is not None else 1
        return Value(node, dims, layout, grad, derived, itemsize, name, readers, self._positions)

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem and isinstance(self.env[node.args[0]], list):
            self.env[node] = self.env[node.args[0]][node.args[1]]
            return
        if not tensor_results(node):
            self.env[node] = self._scalar(node)
            return
        self.env[node] = self._apply(node, self.typings[node])

    def _scalar(self, node: fx.Node) -> Any:
        """Size arithmetic means the global size (of this data rank's rows)."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            expr = expression(value)
            free = set() if isinstance(expr, int) else expr.free_symbols
            if isinstance(expr, int) or free <= set(self.symbols):
                return self.size_node(expr)
        new = self.graph.call_function(
            node.target, fx.map_arg(node.args, self._raw), fx.map_arg(node.kwargs, self._raw)
        )
        new.meta.update(node.meta)
        return new

    def _raw(self, node: fx.Node) -> Any:
        value = self.env[node]
        return value.node if isinstance(value, Value) else value

    def _apply(self, node: fx.Node, typing: Typing) -> Any:
        self._positions = False
        read = {n: self.env[n] for n in operands(node)}
        outs = typing.out if isinstance(typing.out, list) else [typing.out]
        modes = self._modes(typing, list(read.values()), outs)
        if typing.decide is not None:
            typing.decide(self, node, modes)
        local = Local(self, node, typing, read, modes, outs)
        made = typing.localize(local) if typing.localize else local.default()
        self.modes[node], self.moved[node] = modes, local.moved
        if isinstance(made, Value):
            return made
        self._positions = self._are_positions(node, list(read.values()), outs)
        layouts = [self._result_layout(modes, dims, typing, local) for dims in outs]
        derived = any(v.derived for v in read.values())
        grad = any(v.grad for v in read.values()) and "detach" not in op_name(node.target)
        tensors = tensor_results(node)
        if isinstance(node.meta["val"], torch.Tensor):
            grad = grad and tensors[0].is_floating_point()
            return self._value(made, outs[0], layouts[0], grad, derived, tensors[0].element_size())
        if not isinstance(made, list):
            made = [self.emit(node, operator.getitem, made, i) for i in range(len(outs))]
        values = []
        for i, (item, dims, layout) in enumerate(zip(made, outs, layouts, strict=True)):
            tensor = node.meta["val"][i]
            flows = grad and isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            size = tensor.element_size() if isinstance(tensor, torch.Tensor) else 0
            values.append(self._value(item, dims, layout, flows, derived, size))
            values[-1].positions &= op_name(node.target) != "sort" or i == 1
        return values

    def _modes(self, typing: Typing, values: list[Value], outs: list[Any]) -> dict[str, Any]:
        """Per mesh axis, what this op does: cut an `Axis`, or run as I, R or P."""
        whole = _ids([typing.whole])
        tensors = [v.dims for v in values] + outs
        if typing.per_row:
            whole -= self._among_own_rows(whole, typing, outs)
        apart = _ids([typing.apart])
        banned = {id(a) for dims in tensors for a in _repeats(dims)} - apart
        if typing.selects:
            banned |= _ids([v.dims for v in values]) - _ids(outs)
        for dim in [*typing.summed, *typing.reduced]:  # an uncut part would count on every rank
            banned |= {id(a) for a in atoms(dim) if not _throughout(dim, a)}
        space: dict[int, Axis] = {}
        for dims in [v.dims for v in values] + [tuple(typing.fresh)]:
            for dim in dims:
                for axis in atoms(dim):
                    if not axis.opaque and id(axis) not in whole and id(axis) not in banned:
                        space[id(axis)] = axis
        rows = {id(a): a for dims in tensors for d in dims for a in atoms(d) if id(a) in self.rows}
        if rows:
            self._rows_stay_apart(rows, whole | _ids([typing.apart[:1]]), banned)
        derived = any(v.derived for v in values)
        modes: dict[str, Any] = {}
        for m in self.axes:
            own = (
                [a for i, a in rows.items() if i in self.assigned[m]]
                if m in self.batch_axes
                else []
            )
            meets = self._meets(m, typing, space)
            over = _ids([typing.apart[:1]]) if meets else set()
            seen = {i: a for i, a in space.items() if i in over or i not in apart}
            modes[m] = own[0] if own else self._mode(m, typing, values, seen, derived)
        self._join_siblings(modes)
        return modes

    def _meets(self, m: str, typing: Typing, space: dict[int, Axis]) -> bool:
        """Whether a mesh axis may cut the dimensions that an op states as apart: a part of cp that
        cuts no heads here."""
        if (
            m not in self.context_axes[:1]
            or len(leaves(typing.apart[0] if typing.apart else ())) != 1
        ):
            return False
        ranked = self.assigned[m]
        cut = typing.apart if typing.window else typing.apart[:1]
        return all(id(a) in ranked for dim in cut for a in leaves(dim)) and all(
            a.role == "sequence" for i, a in space.items() if i in ranked
        )

    def _among_own_rows(self, whole: set[int], typing: Typing, outs: list[Any]) -> set[int]:
        """The rows that an order or a choice of tokens may treat as all there are: they come out
        again, or are summed, and what points at them was made from this rank's own rows."""
        kept = _ids([*outs, typing.summed])
        local = all(map(self._points_at_own_rows, typing.positions))
        return {i for i in whole & set(self.rows) if i in kept and local}

    def _points_at_own_rows(self, index: fx.Node) -> bool:
        """Whether what an index points at are no rows, or positions among this rank's own in the
        order that the dimension it indexes has them in (k of a token together, or all first)."""
        node = self.source
        dims = self.env[node.args[0]].dims
        if isinstance(node.args[1], (list, tuple)):
            pointed = [dims[i] for i, n in enumerate(node.args[1]) if n is index]
        else:
            pointed = [dims[node.args[1]]]
        if _ids([pointed]).isdisjoint(self.rows):
            return True
        value = self.env[index]
        turned = any(self._turned(one, other) for one in value.dims for other in pointed)
        return value.positions and not turned

    def _turned(self, one: Dim, other: Dim) -> bool:
        """Whether two dimensions of one size have rows of the batch at other strides."""
        if not same_size(size_of(one), size_of(other)):
            return False
        strides = [
            {id(a): size_of(leaves(dim)[i + 1 :]) for i, a in enumerate(leaves(dim))}
            for dim in (one, other)
        ]
        rows = set(self.rows).intersection(*strides)
        return any(not same_size(strides[0][i], strides[1][i]) for i in rows)

    def _are_positions(self, node: fx.Node, values: list[Value], outs: list[Any]) -> bool:
        """Whether an op's numbers are positions among this rank's own rows: an order of them, a
        count along them, or integers made of such. Raises where they are read as other numbers."""
        has_rows = not _ids(outs).isdisjoint(self.rows)
        kind = op_name(node.target)
        if kind in ("sort", "argsort", "arange"):
            return has_rows
        made = tensor_results(node)
        if not any(v.positions for v in values) or made[0].dtype is torch.bool:
            return False
        if not made[0].is_floating_point():
            return True
        if kind not in POINTING and has_rows:
            raise ShardingError(
                message(
                    f"{kind} {module_path(node)}",
                    f"result {node.name}",
                    f"rows counted from 0 in each part along {','.join(self.batch_axes)}",
                    f"the numbers of the rows of the whole batch are not known where "
                    f"{self.rows_are_of[0]} holds its own",
                    "number the rows in the data, and give that as an input",
                )
            )
        return False

    def _rows_stay_apart(self, rows: dict[int, Axis], whole: set[int], banned: set[int]) -> None:
        """No op may need the rows of other data ranks: they are not here, nor is their number
        known."""
        needed = [a for i, a in rows.items() if i in whole or i in banned]
        if needed:
            who, remedy = self.rows_are_of
            why = f"this op mixes rows of the batch, and {who} holds its own rows only"
            if rule_for(self.source.target) is None:
                why = "this op has no rule, so it is taken to need the whole batch at once"
                remedy += ", define it with tags=torch.Tag.pointwise if it works element by element"
            for experts in self.program.unfused[:1]:  # what they select is what needs the batch
                why = f"experts are not recognised in {experts}; so {why}"
            raise ShardingError(
                message(
                    f"{op_name(self.source.target)} {module_path(self.source)}",
                    f"result {self.source.name}",
                    f"batch of {needed[0].size} rows over {','.join(self.batch_axes)}",
                    why,
                    f"{remedy}, or write it with other ops",
                )
            )

    def _mode(self, m: str, typing: Typing, values: list[Value], space: Any, derived: bool) -> Any:
        states = [v.layout[m] for v in values]
        context = m in self.context_axes
        if P in states and self._stays_partial(m, typing, values, states):
            return P
        ranked = self.assigned[m]
        data = m in self.batch_axes
        found = [a for i, a in space.items() if i in ranked]
        if not derived and not data:  # made of inputs and constants only: cheap, stays whole
            found = [a for a in found if any(s is a for s in states)]
        if context and not any(isinstance(s, Axis) for s in states):  # heads: cut for tokens only
            found = [a for a in found if a.role == "sequence"]
        if found:
            held = {id(a): sum(s is a for s in states) for a in found}
            return max(found, key=lambda a: (ranked[id(a)][0], held[id(a)], ranked[id(a)]))
        # over the data axes, and cp, a parameter's gradient is summed once a step, not where it is
        # read
        once = data or context
        replicated = [s == R or (once and v.parameter) for s, v in zip(states, values, strict=True)]
        grad = [v.grad for v in values]
        return (
            R
            if P not in states and any(r and g for r, g in zip(replicated, grad, strict=True))
            else I
        )

    def _stays_partial(
        self, m: str, typing: Typing, values: list[Value], states: list[Any]
    ) -> bool:
        """Whether an op on summands gives summands: it is linear in what is a summand, which
        stands once among its arguments."""
        if not typing.linear:
            return False
        if len(values) > 1 and not self._read_once(values, states):
            return False
        if typing.linear == "all":
            return all(s == P for s in states)
        if states.count(P) != 1:
            return False
        partial = operands(self.source)[states.index(P)]
        arguments = pytree.arg_tree_leaves(*self.source.args, **self.source.kwargs)
        if sum(a is partial for a in arguments) != 1:
            return False
        if typing.linear == "first" and self.source.args[0] is not partial:
            return False
        return self._passes(m, values, states)

    def _read_once(self, values: list[Value], states: list[Any]) -> bool:
        """A sum that others read too is reduced now; one that nobody else reads may travel on."""
        return all(v.readers == 1 for v, s in zip(values, states, strict=True) if s == P)

    def _passes(self, m: str, values: list[Value], states: list[Any]) -> bool:
        """A partial sum goes through a product only with a factor that is smaller than it."""
        partial = values[states.index(P)]
        covered = {id(a) for d in partial.dims for a in atoms(d)}
        others = [v for v, s in zip(values, states, strict=True) if s != P]
        for other in others:
            axes = {id(a) for d in other.dims for a in atoms(d)}
            if not axes < covered or isinstance(other.layout[m], Axis):
                return False
        return True

    def _join_siblings(self, modes: dict[str, Any]) -> None:
        """Sub-axes of one mesh axis act together: where one cuts an axis of higher rank, the
        others do not cut one of lower rank (a sequence) but replicate. Those of cp each act by
        themselves: one may cut tokens and another heads."""
        for m, mode in modes.items():
            name = m.partition(".")[0]
            siblings = [s for s in self.axes if s != m and s.partition(".")[0] == name != "cp"]
            cut = [modes[s] for s in siblings if isinstance(modes[s], Axis)]
            if not cut:
                continue
            best = max(self._priority(s, modes[s]) for s in siblings if isinstance(modes[s], Axis))
            if mode == I or (isinstance(mode, Axis) and self._priority(m, mode) < best):
                modes[m] = R

    def _priority(self, m: str, axis: Axis) -> int:
        return self.assigned[m][id(axis)][0]

    def _result_layout(
        self, modes: dict[str, Any], dims: Any, typing: Typing, local: Local
    ) -> Layout:
        layout: Layout = {}
        own = {id(a) for d in dims for a in atoms(d)}
        summed = {id(a) for d in typing.summed for a in atoms(d)}
        for m, mode in modes.items():
            if not isinstance(mode, Axis):
                layout[m] = mode
            elif m in local.settled:
                layout[m] = I
            elif m in local.moved:
                layout[m] = local.moved[m]
            elif id(mode) in own:
                layout[m] = mode
            else:
                layout[m] = P if id(mode) in summed else R
        return layout

    def _output(self, node: fx.Node) -> None:
        results = []
        count = len(self.program.output_names)
        held = {
            n.name: v.layout
            for n, v in self.env.items()
            if n.op == "placeholder" and isinstance(v, Value)
        }
        buffers = {i: held[name] for name, i in self.program.buffer_updates.items()}
        for i, item in enumerate(node.args[0]):
            value = self.env[item] if isinstance(item, fx.Node) else item
            if not isinstance(value, Value):
                results.append(value)
                continue
            keeps = i != self.program.loss and i < count
            target = {m: self._output_state(m, value.layout[m], keeps) for m in self.axes}
            target = buffers.get(i, target)  # a buffer is written as it is held
            out = self.convert(value, target)
            cut = [m for m in self.axes if isinstance(target[m], Axis)]
            if cut and value.grad:
                out = self.emit(
                    node, collectives.scale_gradient, out, 1 / self.mesh.size(tuple(cut))
                )
            self.dims[out], self.layouts[out] = value.dims, target
            results.append(out)
        self.graph.output(tuple(results))

    def _output_state(self, m: str, state: Any, keeps: bool) -> Any:
        return state if keeps and m in self.batch_axes and isinstance(state, Axis) else I


def _repeated(dims: Any, axis: Axis) -> bool:
    return sum(axis in set(atoms(d)) for d in dims) > 1


def _ids(tensors: Any) -> set[int]:
    """Every axis in the dimensions of some tensors, by id."""
    return {id(a) for dims in tensors for dim in dims for a in atoms(dim)}


def _repeats(dims: Any) -> list[Axis]:
    """Axes that occur in more than one dimension of a tensor, or as two factors of one."""
    seen: dict[int, int] = {}
    axes: dict[int, Axis] = {}
    for factor in (factor for dim in dims for factor in leaves(dim)):
        for axis in set(atoms((factor,))):
            seen[id(axis)] = seen.get(id(axis), 0) + 1
            axes[id(axis)] = axis
    return [axes[i] for i, count in seen.items() if count > 1]


def _throughout(dim: Dim, axis: Axis) -> bool:
    """Whether an axis cuts all of a dimension (in a concatenation: every part)."""
    for a in leaves(dim):
        if a is axis:
            return True
        if a.parts is not None and all(_throughout(p, axis) for p in a.parts):
            return True
    return False
