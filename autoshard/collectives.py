"""The conversions between layouts, as functions with the backward that the layouts imply.

Every call in an emitted graph is ``kind(x, link, dim, size)``: ``link`` names the mesh axes until
the graph is bound to a rank, then it is that rank's `Link`; ``dim`` is the tensor dimension that is
cut and ``size`` its whole size (where they matter). Pieces are those of ``torch.chunk``: the last
may be short, and is padded on the wire only.

| kind | from -> to | forward | backward |
|---|---|---|---|
| replicate | I -> R | nothing | all-reduce |
| all_reduce | P -> I | all-reduce | nothing |
| all_reduce_replicate | P -> R | all-reduce | all-reduce |
| reduce_scatter | P -> S | reduce-scatter | all-gather |
| all_gather | S -> R | all-gather | reduce-scatter |
| all_gather_invariant | S -> I | all-gather | slice |
| shard | I -> S | slice | all-gather |
| shard_replicated | R -> S | slice | pad with zeros |
| invariant | R -> I | nothing | zero except on the first rank |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autoshard.layout import piece_bounds

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Link:
    """A rank's end of a process group: ``axes`` of the mesh, group name, size and own position."""

    axes: tuple[str, ...]
    group: str
    size: int
    index: int


#: kind -> (forward primitive, backward primitive)
KINDS = {
    "replicate": ("identity", "sum"),
    "all_reduce": ("sum", "identity"),
    "all_reduce_replicate": ("sum", "sum"),
    "reduce_scatter": ("scatter_sum", "gather"),
    "all_gather": ("gather", "scatter_sum"),
    "all_gather_invariant": ("gather", "slice"),
    "shard": ("slice", "gather"),
    "shard_replicated": ("slice", "unslice"),
    "invariant": ("identity", "first"),
}


def _identity(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "sum", link.group))


def _gather(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    step = -(-size // link.size)
    if step * link.size != size:
        x = pad_to(x, dim, step)
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), link.size, link.group))
    if dim != 0:
        whole = whole.view(link.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)
    return whole if step * link.size == size else whole.narrow(dim, 0, size)


def _scatter_sum(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    step = -(-size // link.size)
    if step * link.size != size:
        x = pad_to(x, dim, step * link.size)
    if dim != 0:
        x = x.unflatten(dim, (link.size, step)).movedim(dim, 0).flatten(0, 1)
    out = c10d.wait_tensor(c10d.reduce_scatter_tensor(x.contiguous(), "sum", link.size, link.group))
    if dim != 0:
        out = out.view(x.shape[0] // link.size, *x.shape[1:])
    if step * link.size == size:
        return out
    start, stop = piece_bounds(size, link.size, link.index)
    return out.narrow(dim, 0, stop - start)


def _slice(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    start, stop = piece_bounds(size, link.size, link.index)
    return x.narrow(dim, start, stop - start)


def _unslice(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    start, stop = piece_bounds(size, link.size, link.index)
    whole = x.new_zeros(*x.shape[:dim], size, *x.shape[dim + 1 :])
    whole.narrow(dim, start, stop - start).copy_(x)
    return whole


def _first(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    return x if link.index == 0 else torch.zeros_like(x)


PRIMITIVES = {
    "identity": _identity,
    "sum": _sum,
    "gather": _gather,
    "scatter_sum": _scatter_sum,
    "slice": _slice,
    "unslice": _unslice,
    "first": _first,
}


def pad_to(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """``x`` with zeros appended along ``dim`` up to ``size``."""
    missing = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str, link: Link, dim: int, size: int) -> Any:
        ctx.call = kind, link, dim, size
        return PRIMITIVES[KINDS[kind][0]](x, link, dim, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        kind, link, dim, size = ctx.call
        return PRIMITIVES[KINDS[kind][1]](grad, link, dim, size), None, None, None, None


def replicate(x: torch.Tensor, link: Any, dim: int = 0, size: int = 0) -> torch.Tensor:
    return _Convert.apply(x, "replicate", link, dim, size)


def all_reduce(x: torch.Tensor, link: Any, dim: int = 0, size: int = 0) -> torch.Tensor:
    return _Convert.apply(x, "all_reduce", link, dim, size)


def all_reduce_replicate(x: torch.Tensor, link: Any, dim: int = 0, size: int = 0) -> torch.Tensor:
    return _Convert.apply(x, "all_reduce_replicate", link, dim, size)


def reduce_scatter(x: torch.Tensor, link: Any, dim: int, size: int) -> torch.Tensor:
    return _Convert.apply(x, "reduce_scatter", link, dim, size)


def all_gather(x: torch.Tensor, link: Any, dim: int, size: int) -> torch.Tensor:
    return _Convert.apply(x, "all_gather", link, dim, size)


def all_gather_invariant(x: torch.Tensor, link: Any, dim: int, size: int) -> torch.Tensor:
    return _Convert.apply(x, "all_gather_invariant", link, dim, size)


def shard(x: torch.Tensor, link: Any, dim: int, size: int) -> torch.Tensor:
    return _Convert.apply(x, "shard", link, dim, size)


def shard_replicated(x: torch.Tensor, link: Any, dim: int, size: int) -> torch.Tensor:
    return _Convert.apply(x, "shard_replicated", link, dim, size)


def invariant(x: torch.Tensor, link: Any, dim: int = 0, size: int = 0) -> torch.Tensor:
    return _Convert.apply(x, "invariant", link, dim, size)


def all_reduce_max(x: torch.Tensor, link: Any, dim: int = 0, size: int = 0) -> torch.Tensor:
    """The maximum over the ranks; has no gradient (a softmax does not depend on its shift)."""
    return c10d.wait_tensor(c10d.all_reduce(x.detach().contiguous(), "max", link.group))


def local_size(size: int, link: Any) -> int:
    """How much of ``size`` this rank holds."""
    start, stop = piece_bounds(size, link.size, link.index)
    return stop - start


def local_start(size: int, link: Any) -> int:
    """Where this rank's piece of ``size`` begins."""
    return piece_bounds(size, link.size, link.index)[0]


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``x``; its gradient times ``factor``."""
    return _ScaleGradient.apply(x, factor)


CONVERSIONS = {globals()[kind]: kind for kind in KINDS}
LOCAL = (local_size, local_start)


torch.fx.graph._register_custom_builtin("Link", "from autoshard.collectives import Link", Link)
