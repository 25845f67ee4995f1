"""Rows of experts whose width is cut: each rank of tp brings those of its own tokens, and all
compute, each with its part of the width, the rows of all.

`share_rows` puts the ranks' rows together, sorted by expert; `own_rows` adds up what the ranks have
made of each row, and leaves every rank its own. Each is the other's backward. How many rows a rank
brings only the data tell, but for experts with a capacity: short ones are padded on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from autoshard.collectives import pad_to
from autoshard.runtime.dispatch import Plan, packed, together, unpacked

c10d = torch.ops._c10d_functional


@dataclass(frozen=True, eq=False)
class Shared:
    """Rows of all ranks of ``link``: ``rows`` in all, ``own`` of this rank's, on the wire
    ``longest`` of each; ``sorting[rows]``: where in what is gathered they lie, by expert."""

    link: Any
    own: int
    longest: int
    rows: int
    sorting: torch.Tensor


def share_rows(arrived: tuple[Any, ...], link: Any) -> tuple[Any, ...]:
    """What `at_experts` gives, of the rows of all ranks of ``link``; the plan is a `Shared`."""
    *rows, offsets, plan = arrived
    shared, ends = _shared(rows[0].shape[0], offsets, plan, link)
    return (*_ShareRows.apply(shared, *rows), ends, shared)


def own_rows(rows: torch.Tensor, link: Any, shared: Shared) -> torch.Tensor:
    """Of summands ``rows[n, e]`` of all ranks' rows, this rank's rows of the sum."""
    return _OwnRows.apply(shared, rows)


def _shared(own: int, offsets: torch.Tensor, plan: Plan, link: Any) -> tuple[Shared, torch.Tensor]:
    counts = torch.diff(offsets.long(), prepend=offsets.new_zeros(1))
    if isinstance(offsets, FakeTensor) or plan.alike:
        lengths = [own] * link.size
    else:
        counts = c10d.wait_tensor(c10d.all_gather_into_tensor(counts, link.size, link.group))
        lengths = counts.view(link.size, -1).sum(1).tolist()
    if len(counts) == len(offsets):
        counts = counts.repeat(link.size)  # all ranks have as many
    longest, total, mine = max(lengths), sum(lengths), len(offsets)
    device = offsets.device
    ids = torch.arange(mine, device=device).repeat(link.size)
    ids = torch.repeat_interleave(ids, counts, output_size=total)
    starts = [r * longest for r in range(link.size)]
    spans = [torch.arange(s, s + n, device=device) for s, n in zip(starts, lengths, strict=True)]
    sorting = torch.cat(spans)[torch.sort(ids, stable=True).indices]
    ends = counts.view(link.size, mine).sum(0).cumsum(0, dtype=torch.int32)
    return Shared(link, own, longest, total, sorting), ends


def shared_alike(arrived: tuple[Any, ...], link: Any) -> tuple[Any, ...]:
    """What `share_rows` gives on the meta device: shapes, as if all ranks had as many rows."""
    *rows, offsets, plan = arrived
    total = plan.rows * link.size
    made = [x.new_empty(total, *x.shape[1:]) for x in rows]
    return (*made, offsets, Shared(link, plan.rows, plan.rows, total, offsets))


def _gathered(shared: Shared, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rows of all ranks, by expert."""
    out: list[Any] = [None] * len(tensors)
    link = shared.link
    for group in together(tensors):
        own = [tensors[i] for i in group]
        sent = pad_to(packed(own), 0, shared.longest).contiguous()
        if isinstance(sent, FakeTensor):
            whole = sent.repeat(link.size, 1)
        else:
            whole = c10d.all_gather_into_tensor(sent, link.size, link.group)
            whole = c10d.wait_tensor(whole)
        shapes = [x.shape[1:] for x in own]
        for i, x in zip(group, unpacked(whole, shapes, shared.sorting), strict=True):
            out[i] = x
    return out


def _summed(shared: Shared, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's rows of the sum over the ranks."""
    out: list[Any] = [None] * len(tensors)
    link = shared.link
    for group in together(tensors):
        own = [tensors[i] for i in group]
        rows = packed(own)
        table = rows.new_zeros(link.size * shared.longest, rows.shape[1])
        table = table.index_copy_(0, shared.sorting, rows)
        if isinstance(table, FakeTensor):
            part = table[: shared.longest]
        else:
            part = c10d.reduce_scatter_tensor(table, "sum", link.size, link.group)
            part = c10d.wait_tensor(part)
        shapes = [x.shape[1:] for x in own]
        for i, x in zip(group, unpacked(part[: shared.own], shapes, None), strict=True):
            out[i] = x
    return out


class _ShareRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: Shared, *rows: torch.Tensor) -> Any:
        ctx.shared = shared
        return tuple(_gathered(shared, list(rows)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *_summed(ctx.shared, list(grads))


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: Shared, rows: torch.Tensor) -> torch.Tensor:
        ctx.shared = shared
        return _summed(shared, [rows])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, _gathered(ctx.shared, [grad])[0]
