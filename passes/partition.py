"""partition: from assigned axes to the per-rank graph.

Requires: axes inferred and assigned. Gives: a graph over local tensors in which every edge's
layouts agree, conversions are collectives, and shape literals are local; parameters know their
layout.

    before:  h = linear(x, w1); y = linear(h, w2)          ffn -> tp
    after:   x' = replicate(x, tp); h = linear(x', w1); z = linear(h, w2); y = all_reduce(z, tp)
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard import collectives
from autoshard.axes import Axis, Dim, atoms, leaves, size_of
from autoshard.chain import Pass
from autoshard.errors import ShardingError, message
from autoshard.infer import expression, infer_axes
from autoshard.layout import I, Layout, P, R, cut_axes
from autoshard.mesh import DATA_AXES
from autoshard.program import Conversion, Program, module_path, shallow, tensor_results
from autoshard.rules import Typing, op_name
from autoshard.rules.core import operands
from autoshard.runtime import rng

aten = torch.ops.aten

#: The conversions between whole states, by these.
CONVERSION_KIND = {
    (kind.source, kind.target): name
    for name, kind in collectives.TABLE.items()
    if "S" not in (kind.source, kind.target)
}


#: Ops whose numbers are sizes.
SIZED = frozenset("arange linspace tril_indices triu_indices randperm eye".split())

#: Ops that read positions as positions.
POINTING = frozenset(
    """index index_select gather index_put _unsafe_index_put index_add scatter scatter_add
    scatter_reduce""".split()
)

#: What happens to the parts of a concatenation that the axis does not cut (they are replicated
#: there)
UNCUT_PART = {
    "all_gather_invariant": "invariant",
    "reduce_scatter": "all_reduce_replicate",
    "shard": "replicate",
}


@dataclass
class Value:
    """A tensor of the new graph: its node, logical dims, layout; ``grad``: a gradient flows to it;
    ``derived``: depends on a parameter."""

    node: fx.Node
    dims: tuple[Dim, ...]
    layout: Layout
    grad: bool
    derived: bool
    itemsize: int
    parameter: str = ""
    readers: int = 1
    positions: bool = False  # its numbers are positions among this rank's own rows
    converted: dict[Any, fx.Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Partition(Pass):
    name: ClassVar[str] = "partition"

    def __call__(self, program: Program) -> Program:
        return Partitioner(shallow(program)).run()


class Partitioner:
    """Rewrites one graph, node by node."""

    def __init__(self, program: Program):
        self.program, self.mesh = program, program.mesh
        self.axes = program.mesh.axes
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.typings = infer_axes(program) if not program.dims else program.typings
        self.symbols: dict[Any, fx.Node] = {}
        self.sizes: dict[Any, Any] = {}
        self.read_replicated: set[tuple[str, str]] = set()
        self.invariant_reads: list[tuple[fx.Node, str, str]] = []
        self._positions = False  # of the op that is being rewritten
        self.source: Any = None  # the node that is being rewritten
        self.dims: dict[fx.Node, Any] = {}
        self.layouts: dict[fx.Node, Any] = {}
        self.order = {m: program.assigned(m) for m in self.axes}
        self.batch_axes = [m for m in self.axes if m.partition(".")[0] in DATA_AXES]
        #: axes of which the inputs hold this rank's rows only: no rank ever has them whole
        self.rows = {
            id(a.axis): a.axis
            for m in self.batch_axes
            for a in self.order[m]
            if not isinstance(a.axis.size, int)
        }
        self.assigned = {
            m: {id(a.axis): (a.priority, -i) for i, a in enumerate(self.order[m])}
            for m in self.axes
        }

    # -- the walk ------------------------------------------------------------------------------

    def run(self) -> Program:
        placeholders = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        for node in placeholders:
            self.source = node
            self._placeholder(node)
        self._bind_symbols(placeholders)
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
        self._settle_parameters()
        self.graph.eliminate_dead_code()
        self.graph.lint()
        program = self.program
        program.conversions = [c for c in program.conversions if self._alive(c)]
        program.graph_module = fx.GraphModule(torch.nn.Module(), self.graph)
        program.dims, program.layouts = self.dims, self.layouts
        return program

    def _alive(self, conversion: Conversion) -> bool:
        alive = getattr(self, "_names", None)
        if alive is None:
            alive = self._names = {n.name for n in self.graph.nodes}
        return conversion.node in alive

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
        if is_input and m not in self.batch_axes:
            return None
        ranked = self.assigned[m]
        found = [a for d in dims for a in atoms(d) if id(a) in ranked and not a.opaque]
        if not is_input:
            found = [a for a in found if a.role not in ("batch", "sequence")]
            found = [a for a in found if not _repeated(dims, a)]
        return max(found, key=lambda a: ranked[id(a)], default=None)

    def _bind_symbols(self, placeholders: list[fx.Node]) -> None:
        """Where each dynamic size can be read off the inputs."""
        for node in placeholders:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or node.name not in self.program.inputs:
                continue
            for at, size in enumerate(value.shape):
                expr = expression(size)
                if isinstance(expr, sympy.Symbol) and expr not in self.symbols:
                    self.symbols[expr] = self.graph.call_function(
                        aten.sym_size.int, (self.env[node].node, at)
                    )

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

    # -- one op --------------------------------------------------------------------------------

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
        local = Local(self, node, typing, read, modes, outs)
        made = typing.localize(local) if typing.localize else local.default()
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
        named = (a for d in typing.whole for a in atoms(d))
        whole = {id(a) for a in named}
        tensors = [v.dims for v in values] + outs
        if typing.per_row:
            whole -= self._among_own_rows(whole, typing, outs)
        banned = {id(a) for dims in tensors for a in _repeats(dims)}
        for dim in typing.summed:
            banned |= {id(a) for a in atoms(dim) if not _throughout(dim, a)}
        space: dict[int, Axis] = {}
        for dims in [v.dims for v in values] + [tuple(typing.fresh)]:
            for dim in dims:
                for axis in atoms(dim):
                    if not axis.opaque and id(axis) not in whole and id(axis) not in banned:
                        space[id(axis)] = axis
        rows = {id(a): a for dims in tensors for d in dims for a in atoms(d) if id(a) in self.rows}
        if rows:
            self._rows_stay_apart(rows, whole, banned)
        derived = any(v.derived for v in values)
        modes: dict[str, Any] = {}
        for m in self.axes:
            own = (
                [a for i, a in rows.items() if i in self.assigned[m]]
                if m in self.batch_axes
                else []
            )
            modes[m] = own[0] if own else self._mode(m, typing, values, outs, space, derived)
        self._join_siblings(modes)
        return modes

    def _among_own_rows(self, whole: set[int], typing: Typing, outs: list[Any]) -> set[int]:
        """The rows that an order or a choice of tokens may treat as all there are: they come out
        again, or are summed, and what points at them was made from this rank's own rows."""
        kept = {id(a) for dims in outs for d in dims for a in atoms(d)}
        kept |= {id(a) for d in typing.summed for a in atoms(d)}
        local = all(self.env[n].positions for n in typing.positions if self._points_at_rows(n))
        return {i for i in whole & set(self.rows) if i in kept and local}

    def _points_at_rows(self, index: fx.Node) -> bool:
        """Whether an index points at rows: the dimension it indexes has some."""
        node = self.source
        dims = self.env[node.args[0]].dims
        if isinstance(node.args[1], (list, tuple)):
            pointed = [dims[i] for i, n in enumerate(node.args[1]) if n is index]
        else:
            pointed = [dims[node.args[1]]]
        return any(id(a) in self.rows for d in pointed for a in atoms(d))

    def _are_positions(self, node: fx.Node, values: list[Value], outs: list[Any]) -> bool:
        """Whether an op's numbers are positions among this rank's own rows: an order of them, a
        count along them, or integers made of such. Raises where they are read as other numbers."""
        has_rows = any(id(a) in self.rows for dims in outs for d in dims for a in atoms(d))
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
                    f"rows counted from 0 on each of the ranks along {','.join(self.batch_axes)}",
                    "the numbers of the rows of the whole batch are not known on one rank",
                    "number the rows in the data, and give that as an input",
                )
            )
        return False

    def _rows_stay_apart(self, rows: dict[int, Axis], whole: set[int], banned: set[int]) -> None:
        """No op may need the rows of other data ranks: they are not here, nor is their number
        known."""
        needed = [a for i, a in rows.items() if i in whole or i in banned]
        if needed:
            raise ShardingError(
                message(
                    f"{op_name(self.source.target)} {module_path(self.source)}",
                    f"result {self.source.name}",
                    f"batch of {needed[0].size} rows over {','.join(self.batch_axes)}",
                    "this op mixes rows of the batch, and a data rank holds its own rows only",
                    "drop the data axes, or give static sizes with a batch that they divide",
                )
            )

    def _mode(
        self, m: str, typing: Typing, values: list[Value], outs: Any, space: Any, derived: bool
    ) -> Any:
        states = [v.layout[m] for v in values]
        if P in states and self._stays_partial(m, typing, values, states):
            return P
        ranked = self.assigned[m]
        data = m in self.batch_axes
        found = [a for i, a in space.items() if i in ranked]
        if not derived and not data:  # made of inputs and constants only: cheap, stays whole
            found = [a for a in found if any(s is a for s in states)]
        if found:
            held = {id(a): sum(s is a for s in states) for a in found}
            return max(found, key=lambda a: (ranked[id(a)][0], held[id(a)], ranked[id(a)]))
        # over the data axes a parameter's gradient is summed once a step, not where it is read
        replicated = [s == R or (data and v.parameter) for s, v in zip(states, values, strict=True)]
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
        others do not cut one of lower rank (a sequence) but replicate."""
        for m, mode in modes.items():
            siblings = [
                s for s in self.axes if s != m and s.partition(".")[0] == m.partition(".")[0]
            ]
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
            elif id(mode) in own:
                layout[m] = mode
            else:
                layout[m] = P if id(mode) in summed else R
        return layout

    # -- conversions -----------------------------------------------------------------------------

    def wanted(self, value: Value, modes: dict[str, Any]) -> Layout:
        """The layout in which an op reads an operand."""
        own = {id(a) for d in value.dims for a in atoms(d)}
        target: Layout = {}
        for m, mode in modes.items():
            if isinstance(mode, Axis):
                target[m] = mode if id(mode) in own else R
            elif mode == P:
                target[m] = P if value.layout[m] == P else R
            else:
                target[m] = mode
        return target

    def convert(self, value: Value, target: Layout) -> fx.Node:
        """The value in another layout; made once per target."""
        if value.parameter:
            return self._read_parameter(value, target)
        if not value.grad:  # no gradient: invariant and replicated are the same thing
            target = {
                m: value.layout[m] if {s, value.layout[m]} <= {I, R} else s
                for m, s in target.items()
            }
        key = tuple(id(s) if isinstance(s, Axis) else s for s in target.values())
        if key not in value.converted:
            value.converted[key] = self._convert(value, target)
        return value.converted[key]

    def _read_parameter(self, value: Value, target: Layout) -> fx.Node:
        """A parameter read by cut work is R (its gradient is reduced once, later); read by
        invariant work it is I. Which of the two, or both, is settled after the walk."""
        node, layout, invariant = value.node, dict(value.layout), []
        for m, state in target.items():
            if layout[m] == state:
                if state == I and value.grad:
                    invariant.append(m)
            elif layout[m] == I and state == R:
                layout[m] = R
                self.read_replicated.add((value.parameter, m))
        for m in invariant:
            key = ("invariant", m, tuple(id(n) for n in [node]))
            if key not in value.converted:
                new = self.emit_collective("invariant", node, (m,), 0, 0, value, layout)
                self.invariant_reads.append((new, value.parameter, m))
                value.converted[key] = new
            node = value.converted[key]
        if all(layout[m] is s or layout[m] == s for m, s in target.items()):
            return node
        temporary = Value(node, value.dims, layout, value.grad, True, value.itemsize)
        return self._convert(temporary, target)

    def _settle_parameters(self) -> None:
        for node, name, m in self.invariant_reads:
            if (name, m) not in self.read_replicated:
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)
        for node, value in self.env.items():
            if isinstance(value, Value) and value.parameter and node.op == "placeholder":
                layout = dict(value.layout)
                for m in self.axes:
                    if (value.parameter, m) in self.read_replicated:
                        layout[m] = R
                self.program.values[value.parameter].layout = layout
                self.layouts[value.node] = layout

    def _convert(self, value: Value, target: Layout) -> fx.Node:
        """Gather what is to be whole, cut what is to be cut, then change what remains. All the mesh
        axes that cut a logical axis act at once: pieces of pieces would have other bounds."""
        node, layout = value.node, dict(value.layout)
        for axis in reversed(_cut_in(layout)):
            if cut_axes(layout, axis) != cut_axes(target, axis):
                node = self._gather(node, value, layout, target, axis)
        for axis in _cut_in(target):
            if cut_axes(layout, axis) != cut_axes(target, axis):
                node = self._cut(node, value, layout, axis, cut_axes(target, axis))
        steps = [m for m in self.axes if not _same(layout[m], target[m])]
        node = self._change(node, value, layout, target, steps)
        if node is not value.node:
            self.dims[node], self.layouts[node] = value.dims, layout
        return node

    def _gather(
        self, node: fx.Node, value: Value, layout: Layout, target: Layout, axis: Axis
    ) -> fx.Node:
        over = cut_axes(layout, axis)
        state = R if any(target[m] == R for m in over) else I
        kind = "all_gather" if state == R else "all_gather_invariant"
        node = self._along(kind, node, value, layout, axis, over)
        layout.update(dict.fromkeys(over, state))
        return node

    def _cut(
        self, node: fx.Node, value: Value, layout: Layout, axis: Axis, over: tuple[str, ...]
    ) -> fx.Node:
        states = {layout[m] for m in over}
        if states == {P}:
            kind = "reduce_scatter"
        elif states == {I} or (states <= {I, R} and not value.grad):
            kind = "shard"
        else:
            kind = "shard_replicated"
            steps = [m for m in over if layout[m] != R]
            node = self._change(node, value, layout, layout | dict.fromkeys(steps, R), steps)
        layout.update(dict.fromkeys(over, axis))
        return self._along(kind, node, value, layout, axis, over)

    def _change(
        self, node: fx.Node, value: Value, layout: Layout, target: Layout, steps: list[str]
    ) -> fx.Node:
        """Between whole states; neighbouring mesh axes that change alike are converted together."""
        while steps:
            first = steps[0]
            group = [
                m
                for m in steps
                if _same(layout[m], layout[first]) and _same(target[m], target[first])
            ]
            steps = [m for m in steps if m not in group]
            old, new = layout[first], target[first]
            if (old, new) not in CONVERSION_KIND:
                raise ShardingError(
                    message(
                        f"partition of {self.source}",
                        f"a value {old} over {','.join(group)}",
                        f"wanted as {new}",
                        "there is no conversion between these layouts",
                        "report this model",
                    )
                )
            kind = CONVERSION_KIND[old, new]
            layout.update(dict.fromkeys(group, new))
            if value.grad or kind not in ("replicate", "invariant"):
                node = self.emit_collective(kind, node, group, 0, 0, value, layout)
        return node

    def _along(
        self, kind: str, node: fx.Node, value: Value, layout: Layout, axis: Axis, group: Any
    ) -> fx.Node:
        """A collective along one logical axis, wherever it sits in the tensor's dimensions."""
        at = next(i for i, d in enumerate(value.dims) if axis in set(atoms(d)))
        gathers = kind.startswith("all_gather")
        inner = {**layout}
        if not gathers:  # layout already names the result; the operand is whole over the group
            for m in group:
                inner[m] = I
        return self._along_dim(kind, node, value, inner, axis, group, at, value.dims[at])

    def _along_dim(
        self,
        kind: str,
        node: fx.Node,
        value: Value,
        layout: Layout,
        axis: Axis,
        group: Any,
        at: int,
        dim: Dim,
    ) -> fx.Node:
        axes = leaves(dim)
        if axes == (axis,):
            rest = {**layout, **dict.fromkeys(group, I)}
            size = self.size((axis,), rest)
            return self.emit_collective(kind, node, group, at, size, value, layout)
        if len(axes) == 1:  # a concatenation: piece by piece
            parts = axes[0].parts or ()
            sizes = [self.size(p, layout) for p in parts]
            pieces = self.emit(self.source, aten.split_with_sizes.default, node, sizes, at)
            done = []
            for i, part in enumerate(parts):
                item = self.emit(self.source, operator.getitem, pieces, i)
                dims = (*value.dims[:at], part, *value.dims[at + 1 :])
                piece = replace(value, dims=dims)  # its own number of elements, for the tables
                if axis in set(atoms(part)):
                    item = self._along_dim(kind, item, piece, layout, axis, group, at, part)
                elif kind in UNCUT_PART and value.grad:
                    item = self.emit_collective(UNCUT_PART[kind], item, group, 0, 0, piece, layout)
                done.append(item)
            return self.emit(self.source, aten.cat.default, done, at)
        sizes = [self.size((a,), layout) for a in axes]
        place = next(i for i, a in enumerate(axes) if axis in set(atoms((a,))))
        node = self.emit(self.source, aten.unflatten.int, node, at, sizes)
        dims = (*value.dims[:at], *((a,) for a in axes), *value.dims[at + 1 :])
        split = replace(value, dims=dims)
        node = self._along_dim(kind, node, split, layout, axis, group, at + place, (axes[place],))
        return self.emit(self.source, aten.flatten.using_ints, node, at, at + len(axes) - 1)

    def emit_collective(
        self,
        kind: str,
        node: fx.Node,
        group: Any,
        dim: int,
        size: Any,
        value: Value,
        layout: Layout,
    ) -> fx.Node:
        function = getattr(collectives, kind)
        new = self.emit(self.source, function, node, tuple(group), dim, size)
        numel = math.prod((self.local_expression(d, layout) for d in value.dims), start=1)
        if isinstance(node.meta.get("numel"), (int, sympy.Expr)):
            numel = node.meta["numel"]
        self.program.conversions.append(
            Conversion(
                kind,
                new.name,
                value.node.name,
                tuple(group),
                self._why(),
                numel,
                value.itemsize,
                value.grad,
            )
        )
        return new

    def _why(self) -> str:
        assert self.source is not None
        called = self.source.op == "call_function"
        kind = op_name(self.source.target) if called else self.source.op
        return f"{kind} {module_path(self.source)}".strip()

    def emit(self, like: fx.Node | None, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = self.graph.call_function(target, args, kwargs)
        if like is not None:
            for key in ("nn_module_stack", "stack_trace"):
                if key in like.meta:
                    new.meta[key] = like.meta[key]
            new.meta["origin"] = like.name
        return new

    # -- sizes ---------------------------------------------------------------------------------

    def size_node(self, expr: Any) -> Any:
        """A size as an int or a node that computes it from the inputs' sizes."""
        if isinstance(expr, int) or expr.is_Integer:
            return int(expr)
        if expr in self.symbols:
            return self.symbols[expr]
        if expr not in self.sizes:
            self.sizes[expr] = self._compute(expr)
        return self.sizes[expr]

    def _compute(self, expr: Any) -> Any:
        call = self.graph.call_function
        if isinstance(expr, (sympy.Add, sympy.Mul)):
            combine = operator.add if isinstance(expr, sympy.Add) else operator.mul
            args = [self.size_node(a) for a in expr.args]
            out = args[0]
            for other in args[1:]:
                out = call(combine, (out, other))
            return out
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return call(operator.pow, (self.size_node(expr.base), int(expr.exp)))
        if expr.is_Rational and not expr.is_Integer:
            raise ShardingError(
                message("partition", "a size", str(expr), "not whole", "use static sizes")
            )
        name = type(expr).__name__
        binary = {
            "FloorDiv": operator.floordiv,
            "Mod": operator.mod,
            "PythonMod": operator.mod,
            "Max": max,
            "Min": min,
        }
        if name in binary:
            return call(binary[name], tuple(self.size_node(a) for a in expr.args))
        raise ShardingError(
            message(
                "partition",
                "a dynamic size",
                str(expr),
                f"{name} is not supported",
                "capture with static sizes",
            )
        )

    def global_number(self, local: Local, node: fx.Node, number: Any, as_tensor: bool) -> Any:
        """A number computed from sizes, over the rows of all data ranks: exact also when they hold
        different numbers of rows."""
        value = node.meta.get("val")
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            return number
        expr = value.node.expr
        rows = [a.size for a in self.rows.values() if expr.has(a.size)]
        if not rows:
            return number
        plain = expr.replace(
            lambda e: type(e).__name__ == "IntTrueDiv", lambda e: e.args[0] / e.args[1]
        )
        plain = plain.replace(lambda e: type(e).__name__ == "ToFloat", lambda e: e.args[0])
        power = sympy.simplify(sympy.diff(plain, rows[0]) * rows[0] / plain)
        if len(rows) > 1 or not power.is_Integer or not as_tensor:
            raise ShardingError(
                message(
                    f"{op_name(self.source.target)} {module_path(self.source)}",
                    f"the number {node.name}",
                    f"{expr} with {rows[0]} rows over {','.join(self.batch_axes)}",
                    "the number of rows of the global batch cannot be put in here",
                    "use a mean instead of a sum divided by a size",
                )
            )
        mine = self.size_node(rows[0])
        count = local.count_rows(mine)
        per_row = self.graph.call_function(operator.truediv, (count, mine))
        ratio = self.emit(self.source, aten.pow.Tensor_Scalar, per_row, int(power))
        return self.emit(self.source, aten.mul.Tensor, ratio, number)

    def size(self, dim: Dim, layout: Layout) -> Any:
        """This rank's size of a dimension: an int where all ranks agree, else a node."""
        out: Any = 1
        for axis in leaves(dim):
            out = self._times(out, self._axis_size(axis, layout))
        return out

    def _times(self, a: Any, b: Any) -> Any:
        if a == 1 and isinstance(a, int):
            return b
        if b == 1 and isinstance(b, int):
            return a
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        return self.graph.call_function(operator.mul, (a, b))

    def _axis_size(self, axis: Axis, layout: Layout) -> Any:
        if axis.parts is not None:
            out: Any = 0
            for part in axis.parts:
                size = self.size(part, layout)
                both = isinstance(out, int) and isinstance(size, int)
                out = out + size if both else self.graph.call_function(operator.add, (out, size))
            return out
        by = cut_axes(layout, axis)
        if not by:
            return self.size_node(axis.size)
        if not isinstance(axis.size, int) and all(m in self.batch_axes for m in by):
            return self.size_node(axis.size)  # inputs are already this rank's rows
        ranks = self.mesh.size(by)
        if isinstance(axis.size, int) and axis.size % ranks == 0:
            return axis.size // ranks
        key = (axis, by)
        if key not in self.sizes:
            self.sizes[key] = self.graph.call_function(
                collectives.local_size, (self.size_node(axis.size), by)
            )
        return self.sizes[key]

    def local_expression(self, dim: Dim, layout: Layout) -> Any:
        """The rank's size of a dimension as a closed form, for tables."""
        out: Any = 1
        for axis in leaves(dim):
            if axis.parts is not None:
                out = out * sum(self.local_expression(p, layout) for p in axis.parts)
                continue
            by = cut_axes(layout, axis)
            natural = not isinstance(axis.size, int) and all(m in self.batch_axes for m in by)
            out = out * (
                axis.size
                if natural
                else sympy.Rational(1, self.mesh.size(by)) * axis.size
                if by
                else axis.size
            )
        return out

    # -- outputs -------------------------------------------------------------------------------

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


class Local:
    """What a rule's ``localize`` writes with: the local form of one op."""

    def __init__(
        self,
        partitioner: Partitioner,
        node: fx.Node,
        typing: Typing,
        read: Any,
        modes: Any,
        outs: Any,
    ):
        self.p, self.node, self.typing, self.modes, self.outs = (
            partitioner,
            node,
            typing,
            modes,
            outs,
        )
        self.read = read
        self.settled: set[str] = set()
        self.results = len(outs)

    def mapped(self, arg: Any) -> Any:
        """An argument with its nodes replaced by local ones."""
        return fx.map_arg(arg, self._node)

    def _node(self, node: fx.Node) -> Any:
        if node in self.read:
            value = self.read[node]
            wanted = self.p.wanted(value, self.modes)
            if node in self.typing.as_is:
                wanted |= {m: value.layout[m] for m in self.p.batch_axes}
            return self.p.convert(value, wanted)
        return self.p._raw(node)

    def value(self, position: int) -> fx.Node:
        return self._node(self.node.args[position])

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.p.emit(self.node, target, *args, **kwargs)

    def layout(self, index: int = 0) -> Layout:
        return self.p._result_layout(self.modes, self.outs[index], self.typing, self)

    def out_dims(self, index: int = 0) -> Any:
        return self.outs[index]

    def default(self) -> fx.Node:
        """The op itself on local operands, its shape literal localised."""
        args = list(self.mapped(self.node.args))
        if self.typing.shapes is not None:
            args[self.typing.shapes] = self.shape()
        kwargs = self.mapped(self.node.kwargs)
        self._count_all_rows(args)
        if self.node.target is aten.view.default:  # a local piece may have other strides
            return self.emit(aten.reshape.default, *args, **kwargs)
        if self.typing.random:
            cut = tuple(m for m, mode in self.modes.items() if isinstance(mode, Axis))
            return self.emit(rng.draw, self.node.target, cut, *args, **kwargs)
        return self.emit(self.node.target, *args, **kwargs)

    def _count_all_rows(self, args: list[Any]) -> None:
        """A size used as a number (``x.sum() / len(x)``) means the global batch: it is counted."""
        schema = getattr(self.node.target, "_schema", None)
        if schema is None or not self.p.rows or op_name(self.node.target) in SIZED:
            return
        for i, (arg, of) in enumerate(zip(self.node.args, schema.arguments, strict=False)):
            if str(of.type) in ("Tensor", "number", "Scalar") and isinstance(arg, fx.Node):
                args[i] = self.p.global_number(self, arg, args[i], str(of.type) == "Tensor")

    def shape(self) -> list[Any]:
        """The result's local shape, as a literal."""
        layout = self.layout()
        return [self.p.size(d, layout) for d in self.outs[0]]

    def size(self, dim: Dim) -> Any:
        return self.p.size(dim, self._modes_layout())

    def _modes_layout(self) -> Layout:
        return dict(self.modes)

    def offset(self, dim: Dim, start: int) -> Any:
        """Where a piece that starts at ``start`` of the whole dimension starts locally."""
        axes = leaves(dim)
        if start == 0 or not axes:
            return 0
        inner = size_of(axes[1:])
        before, position, total = [], 0, 0
        for part in axes[0].parts or ():
            if position * inner >= start:
                break
            before.append(part)
            position += size_of(part)
        for part in before:
            size = self.size((*part, *axes[1:]))
            both = isinstance(total, int) and isinstance(size, int)
            total = (
                total + size if both else self.p.graph.call_function(operator.add, (total, size))
            )
        return total

    def cutting(self, dims: list[Dim]) -> tuple[str, ...]:
        """The mesh axes on which this op cuts one of these dimensions."""
        own = {id(a) for d in dims for a in atoms(d)}
        return tuple(m for m, s in self.modes.items() if isinstance(s, Axis) and id(s) in own)

    def summed_cut(self) -> tuple[str, ...]:
        return self.cutting(self.typing.summed)

    def resolved(self, axes: tuple[str, ...]) -> None:
        """The op has reduced over these mesh axes itself: its result is invariant there."""
        self.settled.update(axes)

    def convert_raw(
        self,
        kind: str,
        node: fx.Node,
        axes: tuple[str, ...],
        dims: tuple[Dim, ...] = (),
        grad: bool = True,
    ) -> fx.Node:
        """A collective inside the op's own local form, on a tensor of dimensions ``dims``."""
        value = next(iter(self.read.values()))
        temporary = Value(node, dims, dict(self.modes), value.grad and grad, True, value.itemsize)
        return self.p.emit_collective(kind, node, axes, 0, 0, temporary, dict(self.modes))

    def start(self, dim: Dim, cut: tuple[str, ...]) -> fx.Node:
        """Where this rank's piece of a dimension begins."""
        whole = self.p.size_node(size_of(dim))
        return self.p.graph.call_function(collectives.local_start, (whole, cut))

    def own_range(self, index: fx.Node, dim: Dim, cut: tuple[str, ...]) -> tuple[fx.Node, fx.Node]:
        """(whether an index falls into this rank's piece of ``dim``, its position there or 0)"""
        whole = self.p.size_node(size_of(dim))
        start = self.start(dim, cut)
        length = self.p.graph.call_function(collectives.local_size, (whole, cut))
        shifted = self.emit(aten.sub.Tensor, index, start)
        above = self.emit(aten.ge.Scalar, shifted, 0)
        below = self.emit(aten.lt.Scalar, shifted, length)
        inside = self.emit(aten.logical_and.default, above, below)
        outside = self.emit(aten.logical_not.default, inside)
        return inside, self.emit(aten.masked_fill.Scalar, shifted, outside, 0)

    def whole_size(self, dims: list[Dim]) -> Any:
        """The number of elements of dimensions of the global batch: a number, or, where samples are
        cut, a tensor counted over the ranks (they may hold different numbers of rows)."""
        data = tuple(m for m in self.cutting(dims) if m in self.p.batch_axes)
        layout = {m: s if m in data else I for m, s in self.modes.items()}
        count: Any = 1
        for dim in dims:
            count = self.p._times(count, self.p.size(dim, layout))
        return self._over_ranks(count, data) if data else count

    def minus(self, size: Any, less: Any) -> Any:
        """A number of elements (see `whole_size`) less a number."""
        if isinstance(size, fx.Node) and size.target in collectives.CONVERSIONS:
            return self.emit(aten.sub.Tensor, size, less)
        if isinstance(size, fx.Node) or isinstance(less, fx.Node):
            return self.p.graph.call_function(operator.sub, (size, less))
        return size - less

    def divided(self, total: fx.Node, count: Any) -> fx.Node:
        """total / count, in the op's own type; the count is not rounded to it."""
        dtype = tensor_results(self.node)[0].dtype
        out = self.emit(aten.div.Tensor, total, count)
        return self.emit(aten.to.dtype, out, dtype) if dtype != self.count_dtype() else out

    def count_rows(self, mine: Any) -> fx.Node:
        """The number of rows of the global batch, a tensor."""
        return self._over_ranks(mine, tuple(self.p.batch_axes))

    def _over_ranks(self, count: Any, axes: tuple[str, ...]) -> fx.Node:
        local = self.emit(aten.new_full.default, self._first(), [], count, dtype=self.count_dtype())
        local.meta["numel"] = 1
        return self.p.emit_collective(
            "all_reduce", local, axes, 0, 0, self._scalar_value(local), dict(self.modes)
        )

    def count_dtype(self) -> Any:
        """What counts are kept in: a count does not fit into half precision."""
        dtype = tensor_results(self.node)[0].dtype
        return dtype if dtype in (torch.float32, torch.float64) else torch.float32

    def _scalar_value(self, node: fx.Node) -> Value:
        return Value(node, (), dict(self.modes), False, False, 4)

    def _first(self) -> fx.Node:
        node = next(iter(self.read))
        return self._node(node)

    def local_numel(self, node: fx.Node, drop: int) -> fx.Node:
        dims = [d for i, d in enumerate(self.read[node].dims) if i != drop]
        count: Any = 1
        for dim in dims:
            count = self.p._times(count, self.size(dim))
        return self.emit(aten.new_full.default, self._first(), [], count, dtype=self.count_dtype())

    def then_add(
        self, product: fx.Node, bias: fx.Node, shape: tuple[int, ...] | None = None
    ) -> Value:
        """product + bias, the bias added once: the partial sum is reduced first."""
        p = self.p
        inputs = list(self.read.values())
        tensor = tensor_results(self.node)[0]
        grad = any(v.grad for v in inputs)
        first = p._value(product, self.outs[0], self.layout(), grad, True, tensor.element_size())
        second = self.read[bias]
        dims = second.dims if shape is None else (second.dims[0], *([()] * (len(shape) - 1)))
        typing = Typing(self.outs[0])
        typed = Value(
            second.node, dims, second.layout, second.grad, True, second.itemsize, second.parameter
        )
        modes = p._modes(typing, [first, typed], [self.outs[0]])
        left = p.convert(first, p.wanted(first, modes))
        right = p.convert(second, p.wanted(second, modes))
        if shape is not None:
            right = self.emit(aten.reshape.default, right, list(shape))
        out = self.emit(aten.add.Tensor, left, right)
        own = {id(a) for d in self.outs[0] for a in atoms(d)}
        layout = {
            m: (R if isinstance(s, Axis) and id(s) not in own else s) for m, s in modes.items()
        }
        return p._value(out, self.outs[0], layout, grad, True, tensor.element_size())


def _cut_in(layout: Layout) -> list[Axis]:
    """The logical axes that a layout cuts, by their outermost mesh axis."""
    found = {id(s): s for s in layout.values() if isinstance(s, Axis)}
    return list(found.values())


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, str) and a == b)


def _repeated(dims: Any, axis: Axis) -> bool:
    return sum(axis in set(atoms(d)) for d in dims) > 1


def _repeats(dims: Any) -> list[Axis]:
    """Axes that occur in more than one dimension of a tensor."""
    seen: dict[int, int] = {}
    axes: dict[int, Axis] = {}
    for dim in dims:
        for axis in set(atoms(dim)):
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
