"""Which boxes of a whole tensor a rank holds, and which of them it is the one to write."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoshard.mesh import SubMesh
from autoshard.program import Parameter
from autoshard.runtime import gather

#: Along one dimension: start in the whole tensor, start in the local one, length.
Run = tuple[int, int, int]


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor that a rank holds in one piece: where it begins in the whole tensor
    (``offsets``) and in the local one (``starts``), and how long it is, per dimension. Of a tensor
    in a stack, ``starts`` begins with its position in the local stack."""

    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The box's view of the local tensor."""
        row = len(self.starts) - len(self.sizes)
        return part_of(local[self.starts[:row]] if row else local, self.starts[row:], self.sizes)


def part_of(tensor: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A view of the tensor that begins at ``starts`` and has the shape ``sizes``."""
    for at, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(at, start, size)
    return tensor


def held(parameter: Parameter, mesh: SubMesh, rank: int) -> list[Box]:
    """All that a rank holds of a parameter, in boxes. None are empty."""
    if not parameter.held_by(mesh, rank):
        return []
    if parameter.place is not None:
        stack, at = parameter.place
        return _in_stack(held(stack, mesh, rank), at)
    return _product(_runs(parameter, mesh, rank))


def written(parameter: Parameter, mesh: SubMesh, rank: int, number: int) -> list[Box]:
    """What a rank writes of a parameter: over all ranks every element once. Of the ranks that hold
    the same, it is one by turns: copy ``number`` modulo their count, those of the first stage that
    holds it before those of others."""
    if parameter.place is not None:
        stack, at = parameter.place
        return _in_stack(written(stack, mesh, rank, number), at)
    if not parameter.held_by(mesh, rank):
        return []
    stages = parameter.holders or range(mesh.mesh.size("pp"))
    runs, out = _runs(parameter, mesh, rank), []
    for (at, start, length, _), cut in gather.pieces(parameter, mesh, rank):
        # what has no dimensions is held whole wherever it is held
        alike = tuple(m for m in mesh.axes if m not in cut or not parameter.value.ndim)
        copy = stages.index(mesh.stage(rank)) * mesh.size(alike) + mesh.index(rank, alike)
        if copy != number % (len(stages) * mesh.size(alike)):
            continue
        mine = list(runs)
        if length >= 0:
            mine[at] = [run for each in runs[at] if (run := _clipped(each, start, start + length))]
        out += _product(mine)
    return out


def _in_stack(found: list[Box], at: int) -> list[Box]:
    """Of the boxes of a stack what is of the tensor at a position of its dim 0."""
    out = []
    for box in found:
        row = at - box.offsets[0]
        if 0 <= row < box.sizes[0]:
            starts = (box.starts[0] + row, *box.starts[1:])
            out.append(Box(box.offsets[1:], starts, box.sizes[1:]))
    return out


def fill(
    parameter: Parameter, mesh: SubMesh, rank: int, local: torch.Tensor, whole: torch.Tensor
) -> None:
    """Copy what a rank holds of a parameter out of the whole tensor into the local one."""
    for box in held(parameter, mesh, rank):
        box.of(local).copy_(part_of(whole, box.offsets, box.sizes))


def _runs(parameter: Parameter, mesh: SubMesh, rank: int) -> list[list[Run]]:
    """Per dimension the runs of consecutive positions that a rank holds."""
    found = gather.positions(parameter, mesh, rank)
    found += [None] * (parameter.value.ndim - len(found))
    return [
        [(0, 0, size)] if here is None else _consecutive(here)
        for here, size in zip(found, parameter.value.shape, strict=True)
    ]


def _consecutive(positions: torch.Tensor) -> list[Run]:
    if not len(positions):
        return []
    breaks = (positions.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    stops = [*starts[1:], len(positions)]
    return [(int(positions[a]), a, b - a) for a, b in zip(starts, stops, strict=True)]


def _clipped(run: Run, start: int, stop: int) -> Run | None:
    """The part of a run between two local positions."""
    offset, local, length = run
    first, last = max(local, start), min(local + length, stop)
    return (offset + first - local, first, last - first) if first < last else None


def _product(runs: list[list[Run]]) -> list[Box]:
    boxes = [
        Box(tuple(r[0] for r in each), tuple(r[1] for r in each), tuple(r[2] for r in each))
        for each in itertools.product(*runs)
    ]
    return [box for box in boxes if 0 not in box.sizes]
