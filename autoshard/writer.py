"""The graph that is being written: ops, collectives, and sizes as this rank has them."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from autoshard import collectives
from autoshard.axes import Axis, Dim, leaves
from autoshard.errors import ShardingError, message
from autoshard.infer import expression
from autoshard.layout import Layout, cut_axes, first_cut, levels
from autoshard.mesh import DATA_AXES, MICROBATCHES
from autoshard.program import Conversion, Program, module_path
from autoshard.rules import op_name

aten = torch.ops.aten


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


class Writer:
    """A graph in the making. ``source`` is the node of the old graph that is being rewritten."""

    def __init__(self, program: Program):
        self.program, self.mesh = program, program.mesh
        self.axes = program.mesh.axes
        self.batch_axes = [m for m in self.axes if m.partition(".")[0] in DATA_AXES]
        self.context_axes = [m for m in self.axes if m.partition(".")[0] == "cp"]
        self.graph = fx.Graph()
        self.source: Any = None
        self.env: dict[fx.Node, Any] = {}  # node of the old graph -> Value, number or list of them
        self.symbols: dict[Any, fx.Node] = {}
        self.sizes: dict[Any, Any] = {}

    @property
    def rows_are_of(self) -> tuple[str, str]:
        """Who has rows of its own only, and what to change so that there are all rows."""
        data = ",".join(m for m in self.batch_axes if m != MICROBATCHES)
        if not data:
            return "a micro-batch", "pass microbatches=1"
        several = MICROBATCHES in self.batch_axes
        return "a data rank", f"drop {data} from the mesh{' and pass microbatches=1' * several}"

    def emit(self, like: fx.Node | None, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = self.graph.call_function(target, args, kwargs)
        if like is not None:
            for key in ("nn_module_stack", "stack_trace"):
                if key in like.meta:
                    new.meta[key] = like.meta[key]
            new.meta["origin"] = like.name
        return new

    def emit_collective(
        self,
        kind: str,
        node: fx.Node,
        group: Any,
        dim: Any,
        size: Any,
        value: Value,
        layout: Layout,
    ) -> fx.Node:
        function = getattr(collectives, kind)
        new = self.emit(self.source, function, node, tuple(group), dim, size)
        numel = math.prod((self.local_expression(d, layout) for d in value.dims), start=1)
        if isinstance(node.meta.get("numel"), (int, sympy.Expr)):
            numel = node.meta["numel"]
        self.note(kind, new, value, tuple(group), numel)
        return new

    def note(
        self, kind: str, node: fx.Node, value: Value, group: tuple[str, ...], numel: Any
    ) -> None:
        """Put a collective into the tables."""
        about = (group, self._why(), numel, value.itemsize, value.grad)
        self.program.conversions.append(Conversion(kind, node.name, value.node.name, *about))

    def _why(self) -> str:
        assert self.source is not None
        called = self.source.op == "call_function"
        kind = op_name(self.source.target) if called else self.source.op
        return f"{kind} {module_path(self.source)}".strip()

    def bind_sizes(self, placeholders: list[fx.Node]) -> None:
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

    def sizes_of(self, dims: tuple[Dim, ...], layout: Layout) -> list[Any]:
        """This rank's sizes of a tensor: of an axis that occurs twice in it the first is cut."""
        return [self.size(d, of) for d, of in zip(dims, first_cut(dims, layout), strict=True)]

    def size(self, dim: Dim, layout: Layout, largest: bool = False) -> Any:
        """This rank's size of a dimension, or what no rank's is larger than: an int where all ranks
        agree, else a node."""
        out: Any = 1
        for axis in leaves(dim):
            out = self._times(out, self._axis_size(axis, layout, largest))
        return out

    def _times(self, a: Any, b: Any) -> Any:
        if a == 1 and isinstance(a, int):
            return b
        if b == 1 and isinstance(b, int):
            return a
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        return self.graph.call_function(operator.mul, (a, b))

    def _axis_size(self, axis: Axis, layout: Layout, largest: bool) -> Any:
        if axis.parts is not None:
            out: Any = 0
            for part in axis.parts:
                size = self.size(part, layout, largest)
                both = isinstance(out, int) and isinstance(size, int)
                out = out + size if both else self.graph.call_function(operator.add, (out, size))
            return out
        if axis.role == "ragged":
            raise ShardingError(
                message(
                    f"{op_name(self.source.target)} {module_path(self.source)}",
                    "rows of tokens at their experts",
                    "as many as the routing of a step sends",
                    "this op between routing and experts needs their number, or all of them",
                    "compute on each row by itself, or drop ep and cp from the mesh",
                )
            )
        held: Any = self.size_node(axis.size)
        key: tuple[Any, ...] = (axis, largest)
        for group in levels(layout, axis):
            if not isinstance(axis.size, int) and group[0] in self.batch_axes:
                continue  # inputs are already this rank's rows
            key = (*key, group)
            if key not in self.sizes:
                self.sizes[key] = self._piece(held, group, largest)
            held = self.sizes[key]
        return held

    def _piece(self, size: Any, group: tuple[str, ...], largest: bool) -> Any:
        """This rank's part of a size that mesh axes cut, or the largest."""
        runs = self.mesh.size(group) * (2 if self.mesh.zigzag(group) else 1)
        if isinstance(size, int) and size % runs == 0:
            return size // self.mesh.size(group)
        function = collectives.largest_size if largest else collectives.local_size
        return self.graph.call_function(function, (size, group))

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
