"""Closed forms: bytes on the wire, bytes held. Per rank and step."""

from __future__ import annotations

import math
from typing import Any

import sympy

from autoshard.axes import Axis, atoms, leaves, size_of
from autoshard.layout import cut_axes
from autoshard.mesh import SubMesh
from autoshard.program import Conversion, Parameter

#: What each conversion does on the wire, forward and backward.
WIRE = {
    "replicate": ("", "all-reduce"),
    "all_reduce": ("all-reduce", ""),
    "all_reduce_replicate": ("all-reduce", "all-reduce"),
    "reduce_scatter": ("reduce-scatter", "all-gather"),
    "all_gather": ("all-gather", "reduce-scatter"),
    "all_gather_invariant": ("all-gather", ""),
    "shard": ("", "all-gather"),
    "shard_replicated": ("", ""),
    "invariant": ("", ""),
    "all_reduce_max": ("all-reduce", ""),
}


def wire_bytes(kind: str, whole_bytes: Any, ranks: int) -> Any:
    """Bytes a rank sends for a ring collective over ``ranks`` on a tensor of ``whole_bytes`` in all
    (Thakur et al. 2005): all-reduce 2 (n-1)/n, all-gather and reduce-scatter (n-1)/n."""
    share = sympy.Rational(ranks - 1, ranks) * whole_bytes
    return {"": 0, "all-reduce": 2 * share}.get(kind, share)


def conversion_bytes(conversion: Conversion, mesh: SubMesh) -> tuple[Any, Any]:
    """Bytes a rank sends forward and backward, as closed forms in batch and sequence."""
    ranks = mesh.size(conversion.axes)
    gathers = conversion.kind.startswith("all_gather")
    whole = conversion.numel * conversion.itemsize * (ranks if gathers else 1)
    forward, backward = WIRE[conversion.kind]
    return (
        wire_bytes(forward, whole, ranks),
        wire_bytes(backward, whole, ranks) if conversion.backward else 0,
    )


def local_numel(parameter: Parameter, mesh: SubMesh) -> int:
    """Elements of a parameter that a rank holds (the most any rank does)."""
    return math.prod(_local(dim, parameter, mesh) for dim in parameter.dims)


def _local(dim: Any, parameter: Parameter, mesh: SubMesh) -> int:
    out = 1
    for axis in leaves(dim):
        if axis.parts is not None:
            out *= sum(_local(p, parameter, mesh) for p in axis.parts)
            continue
        by = cut_axes(parameter.layout, axis)
        out *= -(-axis.size // mesh.size(by)) if by else axis.size
    return out


def local_shape(dims: Any, layout: Any, mesh: SubMesh) -> list[Any]:
    """A tensor's local shape as closed forms; samples are this data rank's rows."""
    out = []
    for dim in dims:
        size: Any = size_of(dim)
        for axis in set(atoms(dim)):
            by = cut_axes(layout, axis)
            if by and (isinstance(axis.size, int) or axis.role != "batch"):
                size = size * sympy.Rational(1, mesh.size(by))
        out.append(size)
    return out


def is_cut(layout: Any) -> bool:
    return any(isinstance(s, Axis) for s in layout.values())
