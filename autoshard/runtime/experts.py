"""Tokens on their way to experts and back, and what experts compute with.

A token becomes a *slot* for each of its k experts (slot ``t * k + i``). `to_experts` sorts a rank's
slots by expert, sends every rank those of its experts, and sorts what has come by expert;
`to_tokens` is the way back, on which the slots of a token are added up. Each is the other's
backward. Ranks hold the experts as `torch.chunk` cuts them. The only numbers that the host waits
for are how many rows travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from autoshard.layout import piece_bounds

c10d = torch.ops._c10d_functional


@dataclass(frozen=True, eq=False)
class Plan:
    """How the slots of one rank travel. ``order[t k]``: slots, sorted by expert; ``back``: its
    inverse. ``sent``, ``got``: rows to and from each rank of ``link``. ``sorting[rows]``: of the
    rows that come, the order by expert, and ``unsorting`` its inverse; None where nothing travels.
    """

    k: int
    rows: int
    order: torch.Tensor
    back: torch.Tensor
    link: Any = None
    sent: tuple[int, ...] = ()
    got: tuple[int, ...] = ()
    sorting: torch.Tensor | None = None
    unsorting: torch.Tensor | None = None


def to_experts(
    x: torch.Tensor, link: Any, index: torch.Tensor, scalars: list[torch.Tensor], experts: int
) -> tuple[Any, ...]:
    """What `autoshard.experts.dispatch` says, of this rank's tokens ``x[t, d]`` and all other's of
    ``link`` (``()``: nobody's): the rows of this rank's experts, and where each of these ends."""
    plan, offsets = planned(index, link, experts)
    return (*_ToExperts.apply(plan, x, *scalars), offsets, plan)


def to_tokens(rows: torch.Tensor, link: Any, plan: Plan) -> torch.Tensor:
    """``[t, e]``: of every token of this rank the sum of its rows, which lie with their experts."""
    return _ToTokens.apply(plan, rows)


def planned(index: torch.Tensor, link: Any, experts: int) -> tuple[Plan, torch.Tensor]:
    """The way of the slots ``index[t, k]``, and the ends of the rows of this rank's experts."""
    slots = index.reshape(-1)
    order = torch.sort(slots, stable=True).indices
    counts = torch.zeros(experts, dtype=torch.int64, device=slots.device)
    counts = counts.scatter_add(0, slots.long(), torch.ones_like(slots, dtype=torch.int64))
    k, back = index.shape[1], _inverse(order)
    if not link:
        return Plan(k, len(slots), order, back), counts.cumsum(0, dtype=torch.int32)
    bounds = [piece_bounds(experts, link.size, r) for r in range(link.size)]
    own = [high - low for low, high in bounds]
    mine = own[link.index]
    got = _exchanged(counts, link, own, [mine] * link.size).view(link.size, mine)
    by_rank = [part.sum() for part in counts.split(own)]
    if isinstance(index, FakeTensor):  # no numbers: as if every expert got as many
        sent = [len(slots) * n // experts for n in own]
        sent[0] += len(slots) - sum(sent)
        came = [len(slots) * mine // experts] * link.size
        came[0] += len(slots) * mine * link.size // experts - sum(came)
    else:
        numbers = torch.stack([*by_rank, *got.sum(1)]).tolist()
        sent, came = numbers[: link.size], numbers[link.size :]
    total = sum(came)
    ids = torch.arange(mine, device=slots.device).repeat(link.size)
    ids = torch.repeat_interleave(ids, got.reshape(-1), output_size=total)
    sorting = torch.sort(ids, stable=True).indices
    plan = Plan(k, total, order, back, link, tuple(sent), tuple(came), sorting, _inverse(sorting))
    return plan, got.sum(0).cumsum(0, dtype=torch.int32)


def balanced(
    x: torch.Tensor, link: Any, index: torch.Tensor, scalars: list[torch.Tensor], experts: int
) -> tuple[Any, ...]:
    """What `to_experts` gives on the meta device: shapes, as if every expert got as many rows."""
    slots, ranks, mine = index.numel(), 1, experts
    if link is not None:
        low, high = piece_bounds(experts, link.size, link.index)
        ranks, mine = link.size, high - low
    rows = slots * ranks * mine // experts
    order = index.new_empty(slots)
    plan = Plan(index.shape[1], rows, order, order, link)
    made = [x.new_empty(rows, x.shape[1]), *(s.new_empty(rows) for s in scalars)]
    return (*made, index.new_empty(mine, dtype=torch.int32), plan)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def _exchanged(x: torch.Tensor, link: Any, sent: Any, got: Any) -> torch.Tensor:
    """Rows for each rank, rows from each rank."""
    if isinstance(x, FakeTensor):
        return x.new_empty(sum(got), *x.shape[1:])
    out = c10d.all_to_all_single(x.contiguous(), list(got), list(sent), link.group)
    return c10d.wait_tensor(out)


def _together(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Positions of tensors that travel in one transfer: those of one dtype."""
    found: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(i)
    return list(found.values())


def _packed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """[n, width in all] of [n, width] and [n]."""
    columns = [x if x.ndim > 1 else x[:, None] for x in tensors]
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


def _unpacked(
    packed: torch.Tensor, like: list[torch.Tensor], order: torch.Tensor | None
) -> list[torch.Tensor]:
    """What `_packed` put together, each laid out by itself, its rows taken in ``order``."""
    widths = [x.shape[1] if x.ndim > 1 else 1 for x in like]
    columns = packed.split(widths, 1)
    if order is None:
        taken = [x.contiguous() for x in columns]
    else:
        taken = [x.index_select(0, order) for x in columns]
    return [x if one.ndim > 1 else x[:, 0] for x, one in zip(taken, like, strict=True)]


def _travelled(
    tensors: list[torch.Tensor],
    link: Any,
    sent: tuple[int, ...],
    got: tuple[int, ...],
    before: torch.Tensor | None,
    after: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Rows of several tensors, taken in the order ``before``, exchanged, and taken in ``after``."""
    out: list[Any] = [None] * len(tensors)
    for group in _together(tensors):
        own = [tensors[i] for i in group]
        packed = _packed(own)
        packed = packed if before is None else packed.index_select(0, before)
        came = _exchanged(packed, link, sent, got)
        for i, x in zip(group, _unpacked(came, own, after), strict=True):
            out[i] = x
    return out


def _out(plan: Plan, x: torch.Tensor, scalars: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rows of tokens ``x[t, d]`` and of their ``scalars[t, k]``, at the experts."""
    token = plan.order // plan.k
    rows = [x.index_select(0, token)]
    rows += [s.reshape(-1).index_select(0, plan.order) for s in scalars]
    if plan.sorting is None:
        return rows
    return _travelled(rows, plan.link, plan.sent, plan.got, None, plan.sorting)


def _back(plan: Plan, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """``[t, e]``, the sum of a token's slots, of the first of these; ``[t, k]`` of the others."""
    if plan.sorting is None:
        slots = [x.index_select(0, plan.back) for x in rows]
    else:
        slots = _travelled(rows, plan.link, plan.got, plan.sent, plan.unsorting, plan.back)
    first, *others = slots
    tokens = len(plan.order) // plan.k
    summed = first.view(tokens, plan.k, first.shape[1]).sum(1) if plan.k > 1 else first
    return [summed, *(x.view(tokens, plan.k) for x in others)]


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, x: torch.Tensor, *scalars: torch.Tensor) -> Any:
        ctx.plan = plan
        return tuple(_out(plan, x, list(scalars)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *_back(ctx.plan, list(grads))


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, rows: torch.Tensor) -> torch.Tensor:
        ctx.plan = plan
        return _back(plan, [rows])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, _out(ctx.plan, grad, [])[0]


def expert_rows(table: torch.Tensor, offsets: torch.Tensor, plan: Plan) -> torch.Tensor:
    """``[n, ...]``: for every row what its expert has in ``table[experts, ...]``."""
    if table.is_meta:
        return table.new_empty(plan.rows, *table.shape[1:])
    return _ExpertRows.apply(table, offsets, plan.rows)


class _ExpertRows(torch.autograd.Function):
    """Backward adds up by segments: no atomics, the same sum every time."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(counts := torch.diff(offsets.long(), prepend=offsets.new_zeros(1)))
        return table.repeat_interleave(counts, 0, output_size=rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (counts,) = ctx.saved_tensors
        summed = torch.segment_reduce(grad.contiguous(), "sum", lengths=counts, axis=0, unsafe=True)
        return summed, None, None


#: Widths that torch's kernel of products by groups takes are multiples of so many numbers.
ALIGNED = 8


def grouped_product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``x[n, k]`` by groups of rows, which end at ``offsets[e]``, times ``weight[e, k, m]``:
    ``[n, m]``."""
    aligned = all(size % ALIGNED == 0 and size for size in weight.shape[1:])
    if x.is_cuda and x.dtype is torch.bfloat16 and aligned and len(x) and len(weight):
        return torch._grouped_mm(x, weight, offs=offsets)
    return _GroupedProduct.apply(x, weight, offsets)


class _GroupedProduct(torch.autograd.Function):
    """One product for each group that has rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight, offsets)
        out = x.new_zeros(x.shape[0], weight.shape[2])
        for i, start, stop in _spans(offsets):
            torch.mm(x[start:stop], weight[i], out=out[start:stop])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        to_x, to_weight = torch.zeros_like(x), torch.zeros_like(weight)
        for i, start, stop in _spans(offsets):
            to_x[start:stop] = grad[start:stop] @ weight[i].T
            to_weight[i] = x[start:stop].T @ grad[start:stop]
        return to_x, to_weight, None


def _spans(offsets: torch.Tensor) -> list[tuple[int, int, int]]:
    """(group, start, stop) of the groups that have rows."""
    if isinstance(offsets, FakeTensor) or offsets.is_meta:
        return []
    ends = offsets.tolist()
    spans = zip([0, *ends], ends, strict=False)
    return [(i, start, stop) for i, (start, stop) in enumerate(spans) if start < stop]
