"""Layouts: what a rank holds of a value, per mesh axis, and sizes and slices that follow.

States: ``I`` invariant, ``R`` replicate, ``P`` partial, and sharded, written as the cut `Axis`
itself. Their gradients are I, P, R and sharded alike.
"""

from __future__ import annotations

from typing import Any

import torch

from autoshard.axes import Axis, Dim, leaves, size_of
from autoshard.mesh import SubMesh

I, R, P = "I", "R", "P"  # noqa: E741
State = Any  # "I" | "R" | "P" | Axis
Layout = dict[str, State]  # sub-axis of the mesh -> State


def cut_axes(layout: Layout, axis: Axis) -> tuple[str, ...]:
    """The mesh axes that cut a logical axis, outermost first."""
    return tuple(m for m, state in layout.items() if state is axis)


def piece_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of piece ``index`` when ``size`` is cut like ``torch.chunk`` (last ones
    short)."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


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
    by = cut_axes(layout, axis)
    if not by:
        return torch.arange(axis.size)
    return torch.arange(*piece_bounds(axis.size, mesh.size(by), mesh.index(rank, by)))


def local_length(dim: Dim, layout: Layout, mesh: SubMesh, rank: int) -> int:
    """How many positions of a dimension ``rank`` holds. Sizes must be integers."""
    out = 1
    for axis in leaves(dim):
        if axis.parts is not None:
            out *= sum(local_length(part, layout, mesh, rank) for part in axis.parts)
        elif by := cut_axes(layout, axis):
            start, stop = piece_bounds(axis.size, mesh.size(by), mesh.index(rank, by))
            out *= stop - start
        else:
            out *= axis.size
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
