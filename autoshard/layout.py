"""Layouts: what a rank holds of a value, per mesh axis, and sizes and slices that follow.

States: ``I`` invariant, ``R`` replicate, ``P`` partial, and sharded, written as the cut `Axis`
itself. Their gradients are I, P, R and sharded alike.
"""

from __future__ import annotations

from typing import Any

import torch

from autoshard.axes import Axis, Dim, atoms, leaves, size_of
from autoshard.mesh import DATA_AXES, SubMesh

I, R, P = "I", "R", "P"  # noqa: E741
State = Any  # "I" | "R" | "P" | Axis
Layout = dict[str, State]  # sub-axis of the mesh -> State


def cut_axes(layout: Layout, axis: Axis) -> tuple[str, ...]:
    """The mesh axes that cut a logical axis, outermost first."""
    return tuple(m for m, state in layout.items() if state is axis)


def piece_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of piece ``index`` when ``size`` is cut as evenly as may be: the first ones
    are one longer (6 in 4 pieces: 2, 2, 1, 1)."""
    step, longer = divmod(size, parts)
    return index * step + min(index, longer), (index + 1) * step + min(index + 1, longer)


def piece_lengths(size: int, parts: int) -> list[int]:
    """How long each piece is when ``size`` is cut as evenly as may be."""
    bounds = (piece_bounds(size, parts, index) for index in range(parts))
    return [stop - start for start, stop in bounds]


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of piece ``index`` when ``size`` is cut like ``torch.chunk`` (last ones
    short): all others are of one length, and so views of one table."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def pieces(size: int, parts: int, index: int, zigzag: bool) -> tuple[tuple[int, int], ...]:
    """Start and stop of what piece ``index`` holds of ``size``: one run or, in zigzag order, two.

    Those are, of twice as many runs, the one at ``index`` from the front and the one at ``index``
    from the back: causal attention over such pieces is equal work (later queries read more keys).
    """
    if not zigzag:
        return (piece_bounds(size, parts, index),)
    last = 2 * parts - 1
    return piece_bounds(size, 2 * parts, index), piece_bounds(size, 2 * parts, last - index)


def first_cut(dims: tuple[Dim, ...], layout: Layout) -> list[Layout]:
    """The layout as each dimension of a tensor has it: an axis that occurs in several of them (keys
    and queries of one sequence) is cut in the first only."""
    found, seen = [], set[int]()
    for dim in dims:
        own = {id(a) for a in atoms(dim)}
        again = {m: I for m, s in layout.items() if id(s) in own & seen}
        found.append(layout | again)
        seen |= own
    return found


def levels(layout: Layout, axis: Axis) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that cut a logical axis, in groups that cut what the group before left.

    The data axes cut together, and so do the parts of tp; each part of cp cuts by itself: a
    sequence first, so that a gather over tp makes one of its pieces whole, any other axis last.
    """
    groups: dict[str, list[str]] = {}
    for m in cut_axes(layout, axis):
        name = m.partition(".")[0]
        together = "data" if name in DATA_AXES else m if name == "cp" else name
        groups.setdefault(together, []).append(m)
    found = [tuple(group) for group in groups.values()]
    context = [group for group in found if group[0].partition(".")[0] == "cp"]
    rest = [group for group in found if group not in context]
    return tuple(context + rest if axis.role == "sequence" else rest + context)


def runs(
    size: int, over: tuple[tuple[str, ...], ...], mesh: SubMesh, rank: int
) -> list[tuple[int, int]]:
    """Start and stop of the runs of an axis that ``rank`` holds, in order of its own positions;
    ``over``: the groups of mesh axes that cut it, see `levels`."""
    held = [(0, size)]
    for group in over:
        length = sum(stop - start for start, stop in held)
        cut = []
        parts, index = mesh.size(group), mesh.index(rank, group)
        for first, last in pieces(length, parts, index, mesh.zigzag(group)):
            for start, stop in held:
                low, high = max(first, 0), min(last, stop - start)
                if low < high:
                    cut.append((start + low, start + high))
                first, last = first - (stop - start), last - (stop - start)
        held = cut
    return held


def local_indices(dim: Dim, layout: Layout, mesh: SubMesh, rank: int) -> torch.Tensor:
    """Positions along the whole dimension that ``rank`` holds, in order. Sizes must be integers."""
    out = torch.zeros(1, dtype=torch.long)
    for axis in leaves(dim):
        out = (out[:, None] * axis.size + _axis_indices(axis, layout, mesh, rank)).flatten()
    return out


def _axis_indices(axis: Axis, layout: Layout, mesh: SubMesh, rank: int) -> torch.Tensor:
    if axis.parts is not None:
        start, pieces = 0, []
        for part in axis.parts:
            pieces.append(local_indices(part, layout, mesh, rank) + start)
            start += size_of(part)
        return torch.cat(pieces)
    held = runs(axis.size, levels(layout, axis), mesh, rank)
    return torch.cat([torch.arange(0), *(torch.arange(*run) for run in held)])


def local_length(dim: Dim, layout: Layout, mesh: SubMesh, rank: int) -> int:
    """How many positions of a dimension ``rank`` holds. Sizes must be integers."""
    out = 1
    for axis in leaves(dim):
        if axis.parts is not None:
            out *= sum(local_length(part, layout, mesh, rank) for part in axis.parts)
        else:
            held = runs(axis.size, levels(layout, axis), mesh, rank)
            out *= sum(stop - start for start, stop in held)
    return out


def describe_layout(layout: Layout, names: dict[Axis, str] | None = None) -> str:
    """``dp:S(batch) tp:P``; axes where the value is invariant are left out. ``names``: what axes
    are called instead."""
    words = []
    for m, state in layout.items():
        if isinstance(state, Axis):
            words.append(f"{m}:S({(names or {}).get(state) or state.name or state.size})")
        elif state != I:
            words.append(f"{m}:{state}")
    return " ".join(words) or "I"
