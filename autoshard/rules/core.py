"""What a rule sees (`Typer`) and what it states (`Typing`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.attention import Attention
from autoshard.axes import Axis, Dim, axis_dim, size_of, unify

Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class Window:
    """Element i of ``out`` reads those of ``source`` from i - ``before`` to i + ``after``; outside
    there are zeros. ``at``: the dimension of the operand."""

    source: Dim
    out: Dim
    at: int
    before: Any
    after: Any


@dataclass
class Typing:
    """What one op says of the axes of its operands and results.

    out: dims of the result, or a list of dims for several results.
    whole: dimensions that must not be cut in this op.
    summed: dimensions contracted away: cut, they leave a partial sum.
    reduced: dimensions whose ranks' parts the local form itself adds up.
    fresh: dimensions that only the result has and that may be cut all the same (broadcasts).
    linear: a partial sum passes: ``"all"``: when every operand is one; ``"one"``: when one operand
        is; ``"first"``: when the first is. `passes.partition` sees that it occurs once.
    localize: writes the local form of the op; see `autoshard.local.Local`. None: the op itself.
    shapes: argument positions that hold result shapes.
    random: draws random numbers.
    per_row: an order or choice among tokens that each rank may make among its own rows: samples
        need not be whole even where ``whole`` names them.
    selects: takes parts of a dimension: what tells the parts apart must be whole.
    positions: operands that must be positions among this rank's own rows where the rows they
        point at are cut (an order made here, not numbers given as input).
    apart: dimensions that only context parallelism may cut here: the local form sees to it that
        every element meets those of other ranks that it needs (in attention, in a `Window`), and to
        axes that occur twice in a tensor.
    window: how far along ``apart`` an element reads.
    as_is: operands that speak of this rank's own rows (offsets of its sorted tokens): never reduced
        over the data axes.
    decide: changes, per mesh axis, what the op does: ``decide(partitioner, node, modes)``.
    """

    out: Any
    whole: list[Dim] = field(default_factory=list)
    summed: list[Dim] = field(default_factory=list)
    reduced: list[Dim] = field(default_factory=list)
    fresh: list[Dim] = field(default_factory=list)
    linear: str = ""
    localize: Callable[..., Any] | None = None
    shapes: int | None = None
    random: bool = False
    per_row: bool = False
    selects: bool = False
    positions: tuple[fx.Node, ...] = ()
    as_is: tuple[fx.Node, ...] = ()
    apart: tuple[Dim, ...] = ()
    window: Window | None = None
    decide: Callable[[Any, fx.Node, dict[str, Any]], None] | None = None
    flops: Any = 0


Rule = Callable[["Typer", fx.Node], Typing]


class Typer:
    """Axes of the graph so far: what a rule asks."""

    def __init__(self, dims: dict[fx.Node, Any], size: Callable[[Any], Any]):
        self._dims, self._size = dims, size
        self.attentions: dict[str, Attention] = {}  # of the program
        self.rows: dict[Any, Dim] = {}  # the dynamic number of rows of the inputs -> the batch

    def dims(self, node: fx.Node) -> Dims:
        return self._dims[node]

    def shape(self, value: torch.Tensor) -> tuple[Any, ...]:
        return tuple(self._size(s) for s in value.shape)

    def new(self, value: torch.Tensor) -> Dims:
        """Fresh dimensions for a tensor."""
        return tuple(self.fresh(s) for s in self.shape(value))

    def fresh(self, size: Any) -> Dim:
        """A fresh dimension; the batch where the size is the number of rows."""
        return self.rows[size] if size in self.rows else axis_dim(size)

    def results(self, node: fx.Node) -> list[torch.Tensor]:
        value = node.meta["val"]
        return [value] if isinstance(value, torch.Tensor) else list(value)

    def size(self, value: Any) -> Any:
        return self._size(value)


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node, in order, each once."""
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def is_tensor(arg: Any) -> bool:
    return isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), torch.Tensor)


def broadcast(dims: list[Dims]) -> Dims:
    """The dims of a broadcast result; dimensions that meet are unified."""
    rank = max((len(d) for d in dims), default=0)
    out: list[Dim] = []
    for position in range(-rank, 0):
        met = [d[position] for d in dims if len(d) >= -position and d[position]]
        for other in met[1:]:
            unify(met[0], other)
        out.append(met[0] if met else ())
    return tuple(out)


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a node, given by position or name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def fresh(size: Any) -> Dim:
    return axis_dim(size)


__all__ = [
    "Axis", "Dim", "Dims", "Rule", "Typer", "Typing", "Window", "argument", "broadcast", "fresh",
    "is_tensor", "operands", "size_of", "unify",
]  # fmt: skip
