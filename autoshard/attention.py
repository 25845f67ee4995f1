"""What one attention computes, written once for all the forms that models write it in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, eq=False)
class Attention:
    """softmax(score(scale * q k^T, *vectors)) v, over keys; ``q[b, h, i, d]``, ``k[b, g, j, d]``,
    ``v[b, g, j, e]`` with h a multiple of g: every g serves h / g successive heads.

    scale: of the products. causal: query i reads keys up to i only (counted from 0 on both sides).
    ahead: whether some query may read a later key; if not, blocks of later keys are left out.
    score: takes the scaled products of a block and the vectors' parts for it, gives the scores
    (masked ones -inf or very negative); None: the products are the scores. It is elementwise: an
    element of its result depends on that element only. ``vectors``: tensors of four dimensions that
    broadcast to the scores ``[b, h, i, j]``.
    varies: for each vector, whether it has queries (dim 2) and keys (dim 3), or one of them.
    sinks: whether there is one more score a head, that no value belongs to.
    dropout: probability, of the softmax's results. dtype: what the softmax is computed in, None for
    the products' own (float32 at least).
    transport: where tokens are cut, how keys of other ranks come to a query: round a "ring", or by
    an "allgather" before.
    """

    scale: float
    causal: bool = False
    ahead: bool = True
    score: fx.GraphModule | None = None
    varies: tuple[tuple[bool, bool], ...] = ()
    sinks: bool = False
    dropout: float = 0.0
    dtype: Any = None
    transport: str = "ring"


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    vectors: list[torch.Tensor],
    key: str,
) -> torch.Tensor:
    """The attention that ``program.attentions[key]`` says: ``[b, h, i, e]``, of ``v``'s dtype.
    ``sinks[h]``. It stands in the graph until the ranks' own attention takes its place."""
    raise NotImplementedError(f"{key} is to be replaced before the graph runs")
