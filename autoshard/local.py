"""Local: what an op rule writes the local form of its op with."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from autoshard import collectives
from autoshard.axes import Axis, Dim, atoms, axis_dim, leaves, size_of
from autoshard.errors import ShardingError, message
from autoshard.layout import I, Layout, R
from autoshard.program import module_path, tensor_results
from autoshard.rules import Typing, Window, op_name
from autoshard.runtime import rng
from autoshard.writer import Value

aten = torch.ops.aten

#: Ops whose numbers are sizes.
SIZED = frozenset("arange linspace tril_indices triu_indices randperm eye".split())


class Local:
    """What a rule's ``localize`` writes with: the local form of one op."""

    def __init__(
        self,
        partitioner: Any,
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
        self.moved: dict[str, Axis] = {}
        self.results = len(outs)

    def mapped(self, arg: Any) -> Any:
        """An argument with its nodes replaced by local ones."""
        return fx.map_arg(arg, self._node)

    def _node(self, node: fx.Node) -> Any:
        if node in self.read:
            value = self.read[node]
            wanted = self.p.wanted(value, self.modes)
            if node in self.typing.as_is:
                own = {m for m, s in value.layout.items() if getattr(s, "role", "") == "ragged"}
                wanted |= {m: value.layout[m] for m in own.union(self.p.batch_axes)}
            return self.p.convert(value, wanted)
        return self.p._raw(node)

    def held(self, node: fx.Node, layout: Layout) -> fx.Node:
        """An operand in the layout that the op reads it in, but along these mesh axes as given."""
        value = self.read[node]
        return self.p.convert(value, self.p.wanted(value, self.modes) | layout)

    def assigned(self, dim: Dim, over: tuple[str, ...]) -> bool:
        """Whether a dimension is one axis that some mesh axes, one at least, may all cut."""
        axes = leaves(dim)
        ranked = [self.p.assigned[m] for m in over]
        return bool(over) and len(axes) == 1 and all(id(axes[0]) in known for known in ranked)

    def seed(self) -> fx.Node:
        """A number to seed a generator with, of this rank's own stream for what it computes."""
        cut = tuple(m for m, mode in self.modes.items() if isinstance(mode, Axis))
        return self.emit(rng.draw, rng.number, cut)

    def note_ring(self, node: fx.Node, sent: tuple[fx.Node, ...], here: Layout) -> None:
        """Put keys and values that travel round a ring into the tables."""
        values = [self.read[n] for n in sent]
        layout = self.p.wanted(values[0], self.modes) | here
        sizes = [[self.p.local_expression(d, layout) for d in v.dims] for v in values]
        numel = sum(math.prod(each, start=1) for each in sizes)
        self.p.note("ring_attention", node, values[0], node.args[1], numel)

    def note_rows(
        self,
        kind: str,
        node: fx.Node,
        value: Value,
        over: tuple[str, ...],
        sizes: list[Any],
        times: Any = 1,
    ) -> None:
        """Put rows of these dimensions, that travel to experts or back, into the tables;
        ``times``: how many times as many travel."""
        layout = dict(self.modes)
        each = [math.prod(self.p.local_expression(d, layout) for d in dims) for dims in sizes]
        self.p.note(kind, node, value, over, sum(each) * times)

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
                args[i] = self._global_number(arg, args[i], str(of.type) == "Tensor")

    def _global_number(self, node: fx.Node, number: Any, as_tensor: bool) -> Any:
        """A number computed from sizes, over the rows of all data ranks: exact also when they hold
        different numbers of rows."""
        value = node.meta.get("val")
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            return number
        expr = value.node.expr
        rows = [a.size for a in self.p.rows.values() if expr.has(a.size)]
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
                    f"{op_name(self.node.target)} {module_path(self.node)}",
                    f"the number {node.name}",
                    f"{expr} with {rows[0]} rows over {','.join(self.p.batch_axes)}",
                    "the number of rows of the global batch cannot be put in here",
                    "use a mean instead of a sum divided by a size",
                )
            )
        mine = self.p.size_node(rows[0])
        count = self.count_rows(mine)
        per_row = self.p.graph.call_function(operator.truediv, (count, mine))
        ratio = self.emit(aten.pow.Tensor_Scalar, per_row, int(power))
        return self.emit(aten.mul.Tensor, ratio, number)

    def shape(self) -> list[Any]:
        """The result's local shape, as a literal."""
        layout, dims = self.layout(), list(self.outs[0])
        ragged = [i for i, d in enumerate(dims) if any(a.role == "ragged" for a in leaves(d))]
        known = tuple(() if i in ragged else d for i, d in enumerate(dims))
        sizes = list(self.p.sizes_of(known, layout))
        return [-1 if i in ragged else size for i, size in enumerate(sizes)]

    def size(self, dim: Dim) -> Any:
        return self.p.size(dim, self._modes_layout())

    def _modes_layout(self) -> Layout:
        return dict(self.modes)

    def offset(self, dim: Dim, start: int) -> Any:
        """Where a piece that starts at ``start`` of the whole dimension starts locally."""
        axes = leaves(dim)
        if start == 0 or not axes:
            return 0
        parts, rest = axes[0].parts, axes[1:]
        if parts is None:  # found equal since: a product now, of a count and what was one part
            k = next(k for k in range(1, len(axes) + 1) if start % size_of(axes[k:]) == 0)
            parts, rest = ((),) * size_of(axes[:k]), axes[k:]
        inner = size_of(rest)
        before: list[Dim] = []
        position, total = 0, 0
        for part in parts:
            if position * inner >= start:
                break
            before.append(part)
            position += size_of(part)
        for part in before:
            size = self.size((*part, *rest))
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

    def spanned(self, window: Window | None) -> tuple[str, ...]:
        """The mesh axis that cuts what a window moves along here, if any."""
        return () if window is None else self.cutting([window.source])

    def fetch(self, window: Window) -> fx.Node:
        """For each run of ``window.out`` that this rank holds, what it reads of the operand: the
        result is cut along ``window.out``."""
        (over,) = self.spanned(window)
        value, (out,) = self.read[self.node.args[0]], leaves(window.out)
        reach = window.before, window.after
        before, after = (self.p.size_node(sympy.sympify(n)) for n in reach)
        whole = size_of(window.source), size_of(window.out)
        sizes = tuple(self.p.size_node(size) for size in whole)
        ranks, zigzag = self.p.mesh.size(over), self.p.mesh.zigzag((over,))
        sent = axis_dim(collectives.most_rows(ranks, zigzag, reach, whole))
        dims = tuple(sent if i == window.at else d for i, d in enumerate(value.dims))
        local = self.value(0)
        self.moved[over] = out
        return self.p.emit_collective(
            "halo",
            local,
            (over,),
            (window.at, before, after),
            sizes,
            replace(value, dims=dims),
            dict(self.modes),
        )

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
        if self.p.mesh.zigzag(cut):
            places = self.emit(collectives.local_places, index, cut, whole)
            outside = self.emit(aten.lt.Scalar, places, 0)
            inside = self.emit(aten.logical_not.default, outside)
            return inside, self.emit(aten.masked_fill.Scalar, places, outside, 0)
        if len({m.partition(".")[0] for m in cut}) > 1:
            raise ShardingError(
                message(
                    f"{op_name(self.node.target)} {module_path(self.node)}",
                    "classes or rows that are tokens",
                    f"cut over {','.join(cut)}",
                    "the pieces of several mesh axes lie inside each other",
                    "pass sequence_parallel=False",
                )
            )
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
        local = self._number(count)
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

    def _number(self, count: Any) -> fx.Node:
        """A number as a tensor. It reads no tensor: what counts rows needs nothing but inputs."""
        device = tensor_results(self.node)[0].device
        return self.emit(aten.full.default, [], count, dtype=self.count_dtype(), device=device)

    def local_numel(self, node: fx.Node, drop: int) -> fx.Node:
        dims = [d for i, d in enumerate(self.read[node].dims) if i != drop]
        count: Any = 1
        for dim in dims:
            count = self.p._times(count, self.size(dim))
        return self._number(count)

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
