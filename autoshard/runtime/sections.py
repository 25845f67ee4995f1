"""How the parameters of a unit lie in one contiguous tensor.

Each is cut along dim 0 into as many pieces as there are ranks, of equally many rows (the last may
be short). A *section* has one rank's pieces, one behind the other; all sections, one behind the
other, are the *flat* tensor, of which a collective gathers or sums and scatters the sections.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from autoshard.layout import I
from autoshard.program import Parameter, Program, Unit
from autoshard.runtime.gather import Piece, shard_bounds, slice_pieces, slice_shape


@dataclass
class Entry:
    """One parameter in a unit. ``shape``: of its slice; ``rows``: of dim 0 in every section (the
    last may be short); ``start``, ``gradient_start``: where it begins in a section of weights, and
    of gradients; ``bounds``: this rank's rows. Of its gradient, ``before`` are pieces of the slice
    summed over further axes before it is scattered, ``after`` the axes summed over afterwards;
    ``counts``: whether this rank's is part of the sum (ranks that all have the sum add up one)."""

    key: str
    parameter: Parameter
    shape: tuple[int, ...]
    rows: int
    bounds: tuple[int, int]
    before: tuple[Piece, ...]
    after: tuple[str, ...]
    start: int = 0
    gradient_start: int = 0
    counts: bool = True

    @property
    def rest(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def numel(self) -> int:
        return self.rows * self.rest

    @property
    def shard_shape(self) -> tuple[int, ...]:
        low, high = self.bounds
        return (high - low, *self.shape[1:]) if self.shape else ()


def entries(unit: Unit, program: Program, rank: int) -> list[Entry]:
    """The parameters of a unit as one rank sees them, in the order of the unit's keys."""
    mesh, out, start = program.mesh, [], 0
    for key in unit.keys:
        parameter = program.values[key]
        shape = slice_shape(parameter, mesh, rank)
        rows = -(-shape[0] // mesh.size(unit.axes)) if shape else 1
        found = slice_pieces(parameter, mesh, rank) if parameter.trainable else []
        left = {p: tuple(m for m in p[3] if m not in unit.axes) for p, _ in found}
        before = tuple((*p[:3], axes) for p, axes in left.items() if axes and p[2] >= 0)
        after = next((axes for p, axes in left.items() if p[2] < 0), ())
        bounds = shard_bounds(parameter, mesh, rank)
        alike = tuple(m for m in unit.axes if parameter.layout.get(m) == I)
        first = not alike or mesh.index(rank, alike) == 0
        made = Entry(key, parameter, shape, rows, bounds, before, after, start, counts=first)
        out.append(made)
        start += out[-1].numel
    at = 0
    for entry in trainable(out):
        entry.gradient_start = at
        at += entry.numel
    return out


def trainable(found: list[Entry]) -> list[Entry]:
    """Those that have a gradient; what is summed over the same further axes lies together."""
    return sorted((e for e in found if e.parameter.trainable), key=lambda e: e.after)


def pack(found: list[Entry], shards: Sequence[torch.Tensor], section: torch.Tensor) -> torch.Tensor:
    """Put the shards into a section. What lies behind short ones is never read."""
    places = [section[e.start : e.start + s.numel()] for e, s in zip(found, shards, strict=True)]
    filled = [(p, s) for p, s in zip(places, shards, strict=True) if s.numel()]
    if filled:
        into, held = zip(*((p, s.detach().reshape(-1)) for p, s in filled), strict=True)
        torch._foreach_copy_(list(into), list(held), non_blocking=True)
    return section


def unpack(
    found: list[Entry],
    flat: torch.Tensor,
    ranks: int,
    into: Sequence[torch.Tensor],
    filled: int | None = None,
) -> None:
    """Fill whole slices from flat weights; ``filled``: the rank whose part is there already."""
    table = flat.view(ranks, -1)
    for entry, whole in zip(found, into, strict=True):
        for first, part, piece in _rows(entry, table, entry.start, whole):
            if filled is None or not first <= filled < first + len(part):
                piece.copy_(part)
            else:
                at = filled - first
                piece[:at].copy_(part[:at])
                piece[at + 1 :].copy_(part[at + 1 :])


def pack_gradients(
    found: list[Entry], grads: Sequence[torch.Tensor | None], flat: torch.Tensor, ranks: int
) -> torch.Tensor:
    """Lay gradients of whole slices out flat, zeros where there is none that counts. ``found``:
    `trainable`."""
    table = flat.view(ranks, -1)
    for entry, grad in zip(found, grads, strict=True):
        if grad is None or not entry.counts:
            at = entry.gradient_start
            table[:, at : at + entry.numel].zero_()
            continue
        for _, part, piece in _rows(entry, table, entry.gradient_start, grad):
            part.copy_(piece)
    return flat


def _rows(
    entry: Entry, table: torch.Tensor, start: int, whole: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Where the rows of a whole slice lie in a table of sections: both as views of one shape, whose
    first dimension is that of ranks; and the first of these."""
    if not whole.numel():
        return
    if not entry.shape:
        yield 0, table[:1, start], whole.unsqueeze(0)
        return
    rows, inner = entry.rows, entry.shape[1:]
    full, short = divmod(entry.shape[0], rows)
    part = table[:, start : start + entry.numel].unflatten(1, (rows, *inner))
    if full:
        yield 0, part[:full], whole[: full * rows].unflatten(0, (full, rows))
    if short:
        yield full, part[full:, :short][:1], whole[full * rows :].unsqueeze(0)


def shard_of(
    entry: Entry, section: torch.Tensor, start: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """The view of a section that is a parameter's shard."""
    return section[start : start + math.prod(shape)].view(shape)


def gradient_axes(program: Program, rank: int) -> tuple[str, ...]:
    """The mesh axes over which some gradient of a unit is summed."""
    found = set()
    for unit in program.units.values():
        for entry in trainable(entries(unit, program, rank)):
            found |= {*unit.axes, *entry.after, *(m for piece in entry.before for m in piece[3])}
    return tuple(m for m in program.mesh.axes if m in found)


def gradient_groups(program: Program, rank: int) -> set[tuple[str, ...]]:
    """Every set of mesh axes over which gradients of units are summed, or compared."""
    found = {gradient_axes(program, rank)} if program.units else set()
    for unit in program.units.values():
        found.add(unit.axes)
        for entry in trainable(entries(unit, program, rank)):
            found |= {entry.after, *(piece[3] for piece in entry.before)}
    return found - {()}
