"""MeshSpec: ordered, named mesh axes; rank <-> coordinate; sub-axes; process groups."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autoshard.errors import MeshError, message

#: Mesh axes from outermost to innermost (slowest to fastest links).
AXIS_ORDER = ("pp", "dp", "cp", "ep", "tp")
#: Micro-batches: an axis in time. One rank runs all of its positions, one after the other.
MICROBATCHES = "mb"
#: Axes that carry samples.
DATA_AXES = ("dp", "ep", MICROBATCHES)
#: Axes along which dense parameters are replicated: over these ZeRO may share them out.
REPLICATING_AXES = ("dp", "cp", "ep")


@dataclass(frozen=True, init=False)
class MeshSpec:
    """A mesh of ranks, e.g. ``MeshSpec(dp=2, tp=4)``: 8 ranks, tp innermost.

    ``sizes`` maps each axis to its size, outermost first. Raises MeshError for unknown names and
    sizes below one.

    >>> MeshSpec(tp=4, dp=2).coordinate(5)
    {'dp': 1, 'tp': 1}
    """

    sizes: tuple[tuple[str, int], ...]
    device_mesh: Any = field(default=None, compare=False, repr=False)

    def __init__(self, sizes: dict[str, int] | None = None, device_mesh: Any = None, **axes: int):
        sizes = {**(sizes or {}), **axes}
        unknown = [name for name in sizes if name not in AXIS_ORDER]
        bad = {n: s for n, s in sizes.items() if not isinstance(s, int) or s < 1}
        if unknown:
            raise MeshError(
                message(
                    "mesh",
                    f"axes {', '.join(unknown)}",
                    f"got {dict(sizes)}",
                    f"axis names are {', '.join(AXIS_ORDER)}",
                    "rename these axes",
                )
            )
        if bad:
            raise MeshError(
                message(
                    "mesh",
                    f"the size of {', '.join(bad)}",
                    f"got {', '.join(f'{n}={s!r}' for n, s in bad.items())}",
                    "sizes are positive integers",
                    "give the number of ranks along the axis, or leave an axis of one out",
                )
            )
        ordered = tuple((n, sizes[n]) for n in AXIS_ORDER if n in sizes)
        object.__setattr__(self, "sizes", ordered)
        object.__setattr__(self, "device_mesh", device_mesh)

    @staticmethod
    def parse(text: str) -> MeshSpec:
        """Read ``"dp=2,tp=4"``."""
        sizes: dict[str, int] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, size = item.partition("=")
            if name in sizes:
                raise MeshError(
                    message(
                        "mesh", f"axis {name}", f"got {text!r}", "it is named twice", "drop one"
                    )
                )
            if not size.isdigit():
                raise MeshError(
                    message(
                        "mesh", f"axis {name}", f"got {item!r}", "not NAME=SIZE", "write e.g. tp=2"
                    )
                )
            sizes[name] = int(size)
        return MeshSpec(sizes)

    @staticmethod
    def of(mesh: Any) -> MeshSpec:
        """A MeshSpec from a MeshSpec, a dict, text, or a live ``torch`` DeviceMesh."""
        if isinstance(mesh, MeshSpec):
            return mesh
        if isinstance(mesh, str):
            return MeshSpec.parse(mesh)
        if isinstance(mesh, dict):
            return MeshSpec(mesh)
        if not hasattr(mesh, "mesh_dim_names"):
            raise MeshError(
                message(
                    "mesh",
                    "its type",
                    f"got {type(mesh).__name__} {mesh!r:.80}",
                    "it must be a DeviceMesh, a MeshSpec, a dict or text",
                    'write e.g. MeshSpec(dp=2, tp=2), {"dp": 2, "tp": 2} or "dp=2,tp=2"',
                )
            )
        names = mesh.mesh_dim_names
        if not names:
            raise MeshError(
                message(
                    "mesh",
                    "dimension names",
                    f"got {mesh!r}",
                    "a DeviceMesh needs a name per dimension to say which strategy it serves",
                    'init_device_mesh(..., mesh_dim_names=("dp", "tp"))',
                )
            )
        if len(set(names)) != len(names):
            raise MeshError(
                message(
                    "mesh", f"axes {names}", f"got {names}", "an axis is named twice", "rename one"
                )
            )
        spec = MeshSpec(dict(zip(names, mesh.mesh.shape, strict=True)), device_mesh=mesh)
        if tuple(names) != spec.names:
            raise MeshError(
                message(
                    "mesh",
                    f"axes {names}",
                    f"got the order {names}",
                    f"axes go from outermost to innermost as {spec.names}",
                    "build the DeviceMesh in that order",
                )
            )
        return spec

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.sizes)

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.sizes)

    def size(self, name: str) -> int:
        """Ranks along an axis; 1 for an axis the mesh does not have."""
        return dict(self.sizes).get(name, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The rank's position along every axis."""
        out = {}
        for name, size in reversed(self.sizes):
            out[name] = rank % size
            rank //= size
        return {name: out[name] for name in self.names}

    def rank(self, coordinate: dict[str, int]) -> int:
        """The rank at a position."""
        rank = 0
        for name, size in self.sizes:
            rank = rank * size + coordinate[name]
        return rank

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in self.sizes)


@dataclass(frozen=True)
class SubMesh:
    """The mesh as layouts see it: an axis may be factored, e.g. tp=8 into tp.0=2 and tp.1=4.

    ``parts[name]`` lists ``(sub-axis, size)``, major first. Axes of size one are left out, and pp:
    its ranks hold other layers, and nothing is cut over it.
    ``folded``: sub-axes that hold what they cut in zigzag order, see `autoshard.layout.pieces`.
    ``microbatches``: samples are cut in time too, over the axis `MICROBATCHES`, which is innermost.
    One rank has all of its positions, so it counts as one: what is summed over it, who runs the
    graph sums over the micro-batches.
    """

    mesh: MeshSpec
    factors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    folded: tuple[str, ...] = ()
    microbatches: bool = False

    def parts(self, name: str) -> tuple[tuple[str, int], ...]:
        size = self.mesh.size(name)
        if size == 1:
            return ()
        sizes = dict(self.factors).get(name, (size,))
        if len(sizes) == 1:
            return ((name, size),)
        return tuple((f"{name}.{i}", s) for i, s in enumerate(sizes))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Every sub-axis, outermost first."""
        return tuple(self._sizes)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        names = [name for name in self.mesh.names if name != "pp"]
        sizes = {part: size for name in names for part, size in self.parts(name)}
        return sizes | ({MICROBATCHES: 1} if self.microbatches else {})

    @cached_property
    def _strides(self) -> dict[str, int]:
        """By how much the rank grows along each sub-axis."""
        steps = list(itertools.accumulate(reversed(self._sizes.values()), int.__mul__, initial=1))
        return dict(zip(reversed(self.axes), steps, strict=False))

    def zigzag(self, axes: tuple[str, ...]) -> bool:
        """Whether the pieces along these sub-axes are in zigzag order."""
        return len(axes) == 1 and axes[0] in self.folded

    def size(self, axes: str | tuple[str, ...]) -> int:
        """Ranks along one or several sub-axes together."""
        if isinstance(axes, tuple):
            return math.prod(self._sizes[a] for a in axes)
        return self._sizes[axes]

    def coordinate(self, rank: int) -> dict[str, int]:
        """The rank's position along every sub-axis."""
        out = {}
        for name, position in self.mesh.coordinate(rank).items():
            for part, size in reversed(self.parts(name)):
                out[part] = position % size
                position //= size
        return out | ({MICROBATCHES: 0} if self.microbatches else {})

    def stage(self, rank: int) -> int:
        """The rank's position along pp."""
        return self.mesh.coordinate(rank).get("pp", 0)

    def index(self, rank: int, axes: tuple[str, ...]) -> int:
        """The rank's position along several sub-axes taken together, first axis major."""
        coordinate, index = self.coordinate(rank), 0
        for axis in axes:
            index = index * self.size(axis) + coordinate[axis]
        return index

    def peers(self, rank: int, axes: tuple[str, ...]) -> list[int]:
        """The ranks that differ from ``rank`` only along ``axes``, in the order of ``index``."""
        mine, strides = self.coordinate(rank), self._strides
        found = [rank - sum(mine[a] * strides[a] for a in axes)]
        for a in axes:
            found = [r + i * strides[a] for r in found for i in range(self._sizes[a])]
        return found
