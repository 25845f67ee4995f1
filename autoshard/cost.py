"""Closed forms: bytes on the wire, bytes held. Per rank and step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import sympy

from autoshard.axes import Axis, leaves
from autoshard.collectives import ON_WIRE, TABLE
from autoshard.layout import cut_axes
from autoshard.mesh import SubMesh
from autoshard.program import Conversion, Parameter, Program, stages_of_parameters
from autoshard.runtime.buckets import BUCKET_BYTES, in_order_of_gradients
from autoshard.runtime.gather import Piece, reductions

#: What each conversion does on the wire, forward and backward.
WIRE = {
    name: (ON_WIRE.get(kind.forward, ""), ON_WIRE.get(kind.backward, ""))
    for name, kind in TABLE.items()
} | {
    "all_reduce_max": ("all_reduce", ""),
    "start_gather": ("all_gather", ""),  # and in backward once more, where weights are not kept
    "wait_gather": ("", "reduce_scatter"),
    "sum_gradients": ("", "all_reduce"),
    "ring_attention": ("ring", "ring_back"),
    "to_experts": ("all_to_all", "all_to_all"),
    "to_tokens": ("all_to_all", "all_to_all"),
    "share_rows": ("all_gather", "reduce_scatter"),
    "own_rows": ("reduce_scatter", "all_gather"),
}


def wire_bytes(kind: str, whole_bytes: Any, ranks: int) -> Any:
    """Bytes a rank sends in a ring collective over ``ranks`` on a tensor of ``whole_bytes`` in all:
    all_reduce 2 (n-1)/n of it, all_gather, reduce_scatter and all_to_all (n-1)/n (Thakur et al.
    2005; Patarasuk and Yuan 2009). So do blocks that travel round a ring. A halo is counted as what
    is sent."""
    if not kind:
        return 0
    if kind == "halo":
        return whole_bytes
    times = (2 if kind == "all_reduce" else 1) * (ranks - 1)
    if isinstance(whole_bytes, int) or whole_bytes.is_Integer:
        return -(-times * int(whole_bytes) // ranks)  # no part of a byte travels
    return sympy.Rational(times, ranks) * whole_bytes


#: What a GPU of today does of products in bfloat16 (so measured; its data sheet says more), and
#: what goes from node to node over one port.
FLOPS_PER_SECOND, BYTES_PER_SECOND = 3e14, 2.5e10

#: Bytes of the smallest type that sums of gradients are kept in, on their way round a ring.
SUMMED = 4


def conversion_bytes(conversion: Conversion, mesh: SubMesh) -> tuple[Any, Any]:
    """Bytes a rank sends forward and backward, as closed forms in batch and sequence. Exact where
    the pieces are equal; where they are not, short ones are padded on the wire to the longest. Of a
    halo it is the most that any rank sends (`collectives.most_rows`).

    What travels round a ring does so once more in backward, and with it the sums of its gradients,
    which are float32 for keys of a half type.
    """
    ranks = mesh.size(conversion.axes)
    # of rows that are shared the numbers are those of one rank's own
    gathers = WIRE[conversion.kind][0] in ("all_gather", "ring") or conversion.kind == "own_rows"
    numel, size = conversion.numel * (ranks if gathers else 1), conversion.itemsize
    forward, backward = WIRE[conversion.kind]
    back = size + max(size, SUMMED) if backward == "ring_back" else size
    return (
        wire_bytes(forward, numel * size, ranks),
        wire_bytes(backward, numel * back, ranks) if conversion.backward else 0,
    )


#: Bytes of the number that says whether a rank has a parameter's gradient.
FLAG_BYTES = 4


@dataclass
class GradientBucket:
    """Gradients of a ``stage`` that are summed together: over which mesh axes, their bytes on a
    rank, and the placeholders of the parameters with a part in it."""

    stage: int | None
    axes: tuple[str, ...]
    bytes: int = 0
    keys: set[str] = field(default_factory=set)


def gradient_buckets(program: Program, position: int = 0) -> list[GradientBucket]:
    """The buckets that `runtime.buckets.Reducer` fills on the first rank at a position along
    pp."""
    buckets: list[GradientBucket] = []
    last: dict[Any, GradientBucket] = {}
    stages = stages_of_parameters(program)
    for key in in_order_of_gradients(program):
        parameter = program.values[key]
        if not held_at(parameter, position):
            continue
        own = [s for s in stages.get(key, ()) if program.pipeline.place[s] == position]
        stage = min(own, default=None)
        for piece in reductions(parameter, program.mesh):
            kind = stage, piece[3], parameter.value.dtype, parameter.value.device
            bucket = last.get(kind)
            if bucket is None or bucket.bytes >= BUCKET_BYTES:
                bucket = last[kind] = GradientBucket(stage, piece[3])
                buckets.append(bucket)
            numel = _piece_numel(parameter, piece, program.mesh)
            bucket.bytes += numel * parameter.value.element_size()
            bucket.keys.add(key)
    return buckets


def held_at(parameter: Parameter, position: int) -> bool:
    """Whether ranks at a position along pp hold any of a parameter."""
    return parameter.holders is None or position in parameter.holders


def _piece_numel(parameter: Parameter, piece: Piece, mesh: SubMesh) -> int:
    """Elements of one piece of a parameter's gradient, see `runtime.gather.pieces`."""
    at, _, length, _ = piece
    numel = local_numel(parameter, mesh)
    return numel // _local(parameter.dims[at], parameter, mesh) * length if length >= 0 else numel


def local_numel(parameter: Parameter, mesh: SubMesh) -> int:
    """Elements of a parameter that a rank holds (the most any rank does)."""
    return math.prod(_local(dim, parameter, mesh) for dim in parameter.dims)


def shard_shape(parameter: Parameter, mesh: SubMesh) -> list[int]:
    """The shape of what a rank holds of a parameter (the most any rank does)."""
    shape = local_shape(parameter.dims, parameter.layout, mesh)
    return [-(-shape[0] // mesh.size(parameter.zero)), *shape[1:]] if shape else []


def shard_numel(parameter: Parameter, mesh: SubMesh) -> int:
    """Elements of what a rank holds of a parameter (the most any rank does)."""
    return math.prod(shard_shape(parameter, mesh))


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
    """A tensor's local shape as closed forms, the most any rank holds; a dynamic number of samples
    already is this data rank's."""
    return [_local_size(dim, layout, mesh) for dim in dims]


def _local_size(dim: Any, layout: Any, mesh: SubMesh) -> Any:
    out: Any = 1
    for axis in leaves(dim):
        size = axis.size
        by = cut_axes(layout, axis)
        if axis.parts is not None:
            size = sum(_local_size(p, layout, mesh) for p in axis.parts)
        elif by and isinstance(size, int):
            size = -(-size // mesh.size(by))
        elif by and axis.role != "batch":
            size = sympy.Rational(1, mesh.size(by)) * size
        out = out * size
    return out


def is_cut(layout: Any) -> bool:
    """Whether some mesh axis cuts a value of this layout."""
    return any(isinstance(state, Axis) for state in layout.values())
