"""Tokens on their way to experts and back.

A token becomes a *slot* for each of its k experts (slot ``t * k + i``). `to_experts` sorts a rank's
slots by expert and sends every rank those of its experts; `at_experts` waits for what comes and
sorts it by expert. `to_tokens` and `at_tokens` are the way back, on which the slots of a token are
added up; what stands between the two of a way runs while rows travel. The gradients of one way
travel as the rows of the other. Ranks hold experts as evenly as may be (`layout.piece_lengths`).

Without a capacity every slot travels, and the host waits for how many rows do: the only numbers it
ever waits for. With one, every rank sends every expert as many rows; of more slots, those of the
smallest weights are dropped, which means that they add nothing. Where there are fewer, the rows of
some are sent again rather than zeros, at which an expert may have no gradient; nothing reads what
becomes of them. A slot whose index is no expert's adds nothing either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import _StopRecomputationError

from autoshard.layout import piece_lengths

c10d = torch.ops._c10d_functional


@dataclass(frozen=True, eq=False)
class Plan:
    """How the slots of one rank travel, over ``link`` (``()``: they stay).

    ``taken[s]``: the slot of each row that leaves, by expert; ``back[t k]``: of every slot the row
    that comes back. ``sent``, ``got``: rows to and from each rank; ``rows``: at this rank's experts
    in all. ``sorting[rows]``: the order by expert of rows that come, ``unsorting`` its inverse.
    ``empty[s]``: rows that nothing reads, which stand for no slot; ``dropped[t k]``: slots that add
    nothing. ``alike``: all ranks send every expert as many rows (with a capacity).
    """

    k: int
    link: Any
    rows: int
    taken: torch.Tensor
    back: torch.Tensor
    sent: tuple[int, ...] = ()
    got: tuple[int, ...] = ()
    sorting: torch.Tensor | None = None
    unsorting: torch.Tensor | None = None
    empty: torch.Tensor | None = None
    dropped: torch.Tensor | None = None
    alike: bool = False


@dataclass(frozen=True)
class Capacity:
    """The most slots of one rank that an expert takes: ``factor`` times what each would get of
    ``tokens`` if all got as many, of which every rank has one of ``ranks`` parts."""

    factor: float
    ranks: int

    def slots(self, tokens: int, held: int, k: int, experts: int) -> int:
        """Of each expert; of ``tokens`` with ``k`` experts each, of which a rank holds at most
        ``held``. The same on all ranks."""
        each = Fraction(self.factor).limit_denominator(10**6) * tokens * k / self.ranks / experts
        return min(math.ceil(each), held)  # a token takes one of an expert's


torch.fx.graph._register_custom_builtin(
    "Capacity", "from autoshard.runtime.dispatch import Capacity", Capacity
)


#: The flights of the recomputed block that runs, if one does.
_flights: ContextVar[list[Flight] | None] = ContextVar("_flights", default=None)


@dataclass(eq=False)
class Flight:
    """Rows that travel one way: to experts, or home to their tokens; their gradients, the other.
    ``parcels``: what is under way."""

    plan: Plan
    outward: bool
    offsets: torch.Tensor | None = None
    parcels: list[_Parcel] = field(default_factory=list)

    def __post_init__(self) -> None:
        flights = _flights.get()
        if flights is not None:
            flights.append(self)


@dataclass(frozen=True, eq=False)
class _Parcel:
    """Columns that travel in one transfer: which tensors they are of, and the shapes of a row."""

    positions: list[int]
    columns: torch.Tensor
    shapes: list[torch.Size]


def to_experts(
    x: torch.Tensor,
    link: Any,
    index: torch.Tensor,
    scalars: list[torch.Tensor],
    experts: int,
    load: Any = None,
    capacity: Capacity | None = None,
    tokens: int = 0,
    held: int = 0,
    weights: torch.Tensor | None = None,
    skips: bool = False,
) -> Any:
    """Send off this rank's tokens ``x[t, d]`` and their ``scalars[t, k]`` to the ``experts`` that
    ``index[t, k]`` names; for `at_experts`. ``load``: the `runtime.loads.Load` that takes note;
    ``tokens``, ``held``: of `Capacity.slots`; ``weights[t, k]``: the smallest are dropped first;
    ``skips``: whether there may be indices from ``experts`` on, of slots that add nothing."""
    if capacity is None:
        plan, counts, offsets = _all_slots(index, link, experts, skips)
    else:
        most = capacity.slots(tokens, held, index.shape[1], experts)
        plan, counts, offsets = _most_slots(index, link, experts, most, weights)
    if load is not None:
        rows = [x, *scalars]
        each = sum(r.element_size() * (r.shape[1] if r is x else 1) for r in rows)
        others = sum(plan.sent) - plan.sent[link.index] if link else 0
        over = None if capacity is None else plan.dropped
        if over is not None and skips:  # those of no expert are not over what one takes
            over = over & (index.reshape(-1) < experts)
        load.take(counts, plan.rows, others * each, over)
    flight = Flight(plan, True, offsets)
    return flight, _Depart.apply(flight, x, *scalars)


def at_experts(sent: Any) -> tuple[Any, ...]:
    """What has come for this rank's experts, as `autoshard.experts.dispatch` says: rows sorted by
    expert, those of the scalars, where the rows of each expert end, and the plan."""
    flight, ticket = sent
    return (*_Arrive.apply(flight, ticket), flight.offsets, flight.plan)


def to_tokens(rows: torch.Tensor, link: Any, plan: Plan) -> Any:
    """Send off the ``rows[n, e]`` of this rank's experts; for `at_tokens`."""
    flight = Flight(plan, False)
    return flight, _Depart.apply(flight, rows)


def at_tokens(sent: Any) -> torch.Tensor:
    """``[t, e]``: of every token of this rank the sum of its rows."""
    return _Arrive.apply(*sent)[0]


# plans


def counted(slots: torch.Tensor, experts: int) -> torch.Tensor:
    """``[experts + 1]``: how many slots each expert has, and no expert."""
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=slots.device)
    expert = slots.long().clamp(max=experts)
    return counts.scatter_add(0, expert, torch.ones_like(expert))


def _all_slots(
    index: torch.Tensor, link: Any, experts: int, skips: bool
) -> tuple[Plan, torch.Tensor, torch.Tensor]:
    """The plan, the slots of each expert, and the ends of the rows of this rank's experts."""
    slots, k = index.reshape(-1), index.shape[1]
    order = torch.sort(slots, stable=True).indices
    counts, back = counted(slots, experts)[:-1], _inverse(order)
    if not link:
        offsets = counts.cumsum(0, dtype=torch.int32)
        if not skips:
            return Plan(k, link, len(slots), order, back), counts, offsets
        # how many they are only the device knows: the last expert computes them for nothing
        offsets = torch.cat([offsets[:-1], torch.full_like(offsets[-1:], len(slots))])
        dropped = slots >= experts
        plan = Plan(k, link, len(slots), order, back, empty=dropped[order], dropped=dropped)
        return plan, counts, offsets
    own = piece_lengths(experts, link.size)
    mine = own[link.index]
    got = _waited(_exchange(counts, link, own, [mine] * link.size)).view(link.size, mine)
    if isinstance(index, FakeTensor):  # no numbers: as if every expert got as many
        sent = [len(slots) * n // experts for n in own]
        sent[0] += len(slots) - sum(sent)
        came = [len(slots) * mine // experts] * link.size
        came[0] += len(slots) * mine * link.size // experts - sum(came)
    else:
        numbers = torch.cat([_by_rank(counts, link.size), got.sum(1)]).tolist()
        sent, came = numbers[: link.size], numbers[link.size :]
    total, leaving, dropped = sum(came), sum(sent), None
    if leaving < len(slots):  # the last ones in order are of no expert
        order, dropped = order[:leaving], back >= leaving
        back = back.masked_fill(dropped, 0)
    ids = torch.arange(mine, device=slots.device).repeat(link.size)
    ids = torch.repeat_interleave(ids, got.reshape(-1), output_size=total)
    sorting = torch.sort(ids, stable=True).indices
    plan = Plan(
        k,
        link,
        total,
        order,
        back,
        tuple(sent),
        tuple(came),
        sorting,
        _inverse(sorting),
        dropped=dropped,
    )
    return plan, counts, got.sum(0).cumsum(0, dtype=torch.int32)


def _by_rank(counts: torch.Tensor, ranks: int) -> torch.Tensor:
    """The sums of `layout.piece_bounds`: the first pieces are longer by one."""
    step, longer = divmod(len(counts), ranks)
    first, rest = counts.split([longer * (step + 1), (ranks - longer) * step])
    return torch.cat([first.view(longer, step + 1).sum(1), rest.view(ranks - longer, step).sum(1)])


def _most_slots(
    index: torch.Tensor, link: Any, experts: int, most: int, weights: torch.Tensor | None
) -> tuple[Plan, torch.Tensor, torch.Tensor]:
    """As `_all_slots`, where a rank sends each expert ``most`` rows, whatever it has for it."""
    slots, device = index.reshape(-1), index.device
    counts, n = counted(slots, experts), slots.numel()
    starts, counts = counts.cumsum(0) - counts, counts[:-1]
    first = torch.arange(n, device=device)
    if weights is not None:
        first = torch.sort(weights.detach().reshape(-1), stable=True, descending=True).indices
    order = first[torch.sort(slots[first], stable=True).indices]
    expert = slots[order].long().clamp(max=experts)
    place = torch.arange(n, device=device) - starts[expert]
    over, cells = (place >= most) | (expert == experts), experts * most
    cell = (expert * most + place).masked_fill(over, cells)  # one more, for what is dropped
    taken = order.new_zeros(cells + 1).scatter(0, cell, order)[:cells]
    empty = torch.ones(cells + 1, dtype=torch.bool, device=device).scatter(0, cell, False)[:cells]
    if most:  # an expert's first slot again; of an expert that has none, the first of all
        again = taken.view(experts, most)[:, :1].expand(experts, most).reshape(-1)
        taken = torch.where(empty, again, taken)
    back = torch.empty_like(order).scatter(0, order, cell.masked_fill(over, 0))
    dropped = torch.empty_like(over).scatter(0, order, over)
    ranks, at = (link.size, link.index) if link else (1, 0)
    own = piece_lengths(experts, ranks)
    mine = own[at]
    sent, got = tuple(e * most for e in own), (mine * most,) * ranks
    sorting = torch.arange(ranks * mine * most, device=device).view(ranks, mine, most)
    sorting = sorting.transpose(0, 1).reshape(-1)
    ends = torch.arange(1, mine + 1, device=device, dtype=torch.int32) * (ranks * most)
    plan = Plan(
        index.shape[1],
        link,
        len(sorting),
        taken,
        back,
        sent,
        got,
        sorting if link else None,
        _inverse(sorting) if link else None,
        empty,
        dropped,
        alike=True,
    )
    return plan, counts, ends


def _inverse(order: torch.Tensor) -> torch.Tensor:
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


# transfers


def _exchange(x: torch.Tensor, link: Any, sent: Any, got: Any) -> torch.Tensor:
    """Rows for each rank, rows from each rank: to be waited for."""
    if isinstance(x, FakeTensor):
        return x.new_empty(sum(got), *x.shape[1:])
    return c10d.all_to_all_single(x.contiguous(), list(got), list(sent), link.group)


def _waited(x: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, FakeTensor) else c10d.wait_tensor(x)


def meeting_all(body: Callable[..., Any]) -> Callable[..., Any]:
    """``body``, for `checkpoint`: what it runs again it stops at the last tensor that backward
    needs, which may stand between a departure and its arrival. Such rows are waited for too."""

    def run(*inputs: Any) -> Any:
        flights: list[Flight] = []
        token = _flights.set(flights)
        try:
            return body(*inputs)
        except _StopRecomputationError:
            for flight in flights:
                for parcel in flight.parcels if flight.plan.link else ():
                    _waited(parcel.columns)
                flight.parcels = []
            raise
        finally:
            _flights.reset(token)

    return run


def together(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Positions of tensors that travel in one transfer: those of one dtype."""
    found: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(i)
    return list(found.values())


def packed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """[n, width in all] of [n, width] and [n]."""
    columns = [x if x.ndim > 1 else x[:, None] for x in tensors]
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


def unpacked(
    table: torch.Tensor, shapes: list[torch.Size], order: torch.Tensor | None
) -> list[torch.Tensor]:
    """What `packed` put together, each laid out by itself, its rows taken in ``order``."""
    columns = table.split([math.prod(shape) for shape in shapes], 1)
    if order is None:
        taken = [x.contiguous() for x in columns]
    else:
        taken = [x.index_select(0, order) for x in columns]
    return [x if shape else x[:, 0] for x, shape in zip(taken, shapes, strict=True)]


def _depart(
    plan: Plan, outward: bool, tensors: Sequence[torch.Tensor], gradients: bool = False
) -> list[_Parcel]:
    """Send off tokens ``[t, d]`` and scalars ``[t, k]``, or rows ``[n, ...]`` of experts;
    ``gradients``: of these."""
    rows = _rows(plan, *tensors) if outward else tensors
    if gradients and outward:
        rows = [_blank(x, plan.empty) for x in rows]
    parcels = []
    for group in together(rows) if plan.link else [[i] for i in range(len(rows))]:
        own = [rows[i] for i in group]
        sent = packed(own)
        if plan.link:
            order = None if outward else plan.unsorting
            sent = sent if order is None else sent.index_select(0, order)
            ways = (plan.sent, plan.got) if outward else (plan.got, plan.sent)
            sent = _exchange(sent, plan.link, *ways)
        parcels.append(_Parcel(group, sent, [x.shape[1:] for x in own]))
    return parcels


def _land(plan: Plan, outward: bool, parcels: list[_Parcel]) -> list[torch.Tensor]:
    """Wait for what `_depart` sent off: rows at experts, or sums and scalars of tokens."""
    order, found = plan.sorting if outward else plan.back, dict[int, torch.Tensor]()
    for parcel in parcels:
        came = _waited(parcel.columns) if plan.link else parcel.columns
        if not outward and not len(came):  # a row for slots that are all dropped
            came = came.new_zeros(1, came.shape[1])
        taken = unpacked(came, parcel.shapes, order)
        found.update(zip(parcel.positions, taken, strict=True))
    rows = [found[i] for i in range(len(found))]
    return rows if outward else _by_token(plan, rows)


def _rows(plan: Plan, x: torch.Tensor, *scalars: torch.Tensor) -> list[torch.Tensor]:
    """Rows of tokens ``x[t, d]`` and of their ``scalars[t, k]``, as they leave."""
    leaving = len(plan.taken)
    if leaving and not len(x):  # all ranks send as many, and this one has none
        return [x.new_zeros(leaving, x.shape[1]), *(s.new_zeros(leaving) for s in scalars)]
    rows = [x.index_select(0, plan.taken // plan.k)]
    return rows + [s.reshape(-1).index_select(0, plan.taken) for s in scalars]


def _by_token(plan: Plan, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of slots: ``[t, e]``, the sum of a token's, of the first tensor; ``[t, k]`` of others."""
    first, *others = (_blank(x, plan.dropped) for x in rows)
    tokens = len(plan.back) // plan.k
    summed = first.view(tokens, plan.k, first.shape[1]).sum(1) if plan.k > 1 else first
    return [summed, *(x.view(tokens, plan.k) for x in others)]


def _blank(x: torch.Tensor, where: torch.Tensor | None) -> torch.Tensor:
    """Zeros in some rows of a tensor that nothing else holds."""
    if where is None:
        return x
    return x.masked_fill_(where if x.ndim == 1 else where[:, None], 0)


class _Depart(torch.autograd.Function):
    """What goes through autograd is an empty tensor: it stands for what is under way."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.flight = flight
        flight.parcels = _depart(flight.plan, flight.outward, tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket: torch.Tensor) -> Any:
        flight = ctx.flight
        parcels, flight.parcels = flight.parcels, []
        return None, *_land(flight.plan, not flight.outward, parcels)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, ticket: torch.Tensor) -> Any:
        ctx.flight = flight
        parcels, flight.parcels = flight.parcels, []
        return tuple(_land(flight.plan, flight.outward, parcels))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        flight = ctx.flight
        flight.parcels = _depart(flight.plan, not flight.outward, grads, gradients=True)
        return None, grads[0].new_empty(0)


# shapes


def balanced(
    x: torch.Tensor, link: Any, index: torch.Tensor, scalars: list[torch.Tensor], experts: int,
    load: Any = None, capacity: Capacity | None = None, tokens: int = 0, held: int = 0,
    weights: Any = None, skips: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """What `at_experts` gives on the meta device, of the arguments of `to_experts`: shapes, as if
    every expert got as many rows."""
    slots, (ranks, at) = index.numel(), (link.size, link.index) if link else (1, 0)
    mine = piece_lengths(experts, ranks)[at]
    k = index.shape[1]
    rows = slots * ranks * mine // experts
    if capacity is not None:
        rows = ranks * mine * capacity.slots(tokens, held, k, experts)
    order = index.new_empty(slots)
    plan = Plan(k, link, rows, order, order)
    made = [x.new_empty(rows, x.shape[1]), *(s.new_empty(rows) for s in scalars)]
    return (*made, index.new_empty(mine, dtype=torch.int32), plan)
