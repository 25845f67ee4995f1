"""Process groups of the ranks of a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from autoshard.errors import MeshError, message
from autoshard.mesh import MeshSpec
from autoshard.program import Program


def timeout_of(device: torch.device | None = None) -> Any:
    """How long the default process group waits for a rank; a new group would wait half an hour."""
    world: Any = dist.group.WORLD
    return world._get_backend(device or world._device_types[0]).options._timeout


class Groups:
    """The process groups that were made on one mesh, for all modules on it.

    Every rank makes the group it is in at the same time as all others make theirs, and waits for no
    other: names of groups count those before, and NCCL may split the communicator of the world, in
    which all its ranks take part. A group waits as long for a rank as the default one does.

    ``broken``: a step runs, or ended half way, and what a rank posted in it would be taken for what
    another one sends next. ``world``: the default group that they were made in.
    """

    def __init__(self, device: torch.device, number: int):
        self.device, self.number, self.broken = device, number, False
        self.world: Any = dist.group.WORLD
        self._made: dict[tuple[str, tuple[int, ...]], Any] = {}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Meanwhile this rank sends what others wait for; it is ``broken`` where that raises, and
        stays so: what came behind may have been taken for what was left."""
        before, self.broken = self.broken, True
        yield
        self.broken = before

    def of(self, ranks: tuple[int, ...], purpose: str = "") -> Any:
        """The group of some ranks, one for each purpose."""
        if (purpose, ranks) not in self._made:
            self._made[purpose, ranks] = dist.new_group(
                list(ranks), timeout=timeout_of(self.device), use_local_synchronization=True
            )
        return self._made[purpose, ranks]

    def along(
        self, program: Program, rank: int, wanted: Iterable[tuple[str, ...]], purpose: str = ""
    ) -> dict[tuple[str, ...], Any]:
        """The rank's group for every set of mesh axes that is wanted."""
        return {axes: self.of(tuple(program.mesh.peers(rank, axes)), purpose) for axes in wanted}


def even_out() -> None:
    """Let all ranks of the world be in as many groups, before they make some together: torch names
    a group by how many its ranks are in. Ranks that are in fewer make groups of their own. Raises
    MeshError under NCCL with ``device_id``, where all ranks have to take part in each."""
    world: Any = dist.group.WORLD
    own, counts = len(dist.distributed_c10d._world.pg_names), [0] * dist.get_world_size()
    dist.all_gather_object(counts, own)
    fewer = [r for r, count in enumerate(counts) if count != max(counts)]
    if fewer and world.bound_device_id is not None:
        raise MeshError(
            message(
                "process groups",
                f"ranks {fewer[:8]} are in fewer than others",
                f"{min(counts)} groups there, {max(counts)} elsewhere",
                "NCCL makes a group of ranks with all others taking part, and torch names it by "
                "how many there are",
                "make groups of your own so that every rank is in as many (with ranks that are "
                "not in one, one of that rank alone), or after autoshard and the first eval",
            )
        )
    for _ in range(max(counts) - own):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


_world: Any = None
_of_mesh: dict[Any, Groups] = {}


def groups_of(mesh: MeshSpec, device: torch.device) -> Groups:
    """The groups of a live mesh in this world. They last as long as it does: torch gives back what
    a group holds only when all its ranks destroy it at once, which modules that come and go do
    not. A mesh of other ranks or sizes has its own, as all ranks have to make the same ones; and
    modules that are made after a step was broken off on some rank have others than those before.
    Every rank of the world calls it, and waits for the others."""
    global _world
    if dist.group.WORLD is not _world:
        _world = dist.group.WORLD
        _of_mesh.clear()
    ranks = tuple(mesh.device_mesh.mesh.flatten().tolist())
    sizes = tuple((name, mesh.size(name)) for name in mesh.names)
    key = device.type, sizes, ranks, timeout_of(device)
    known = _of_mesh.get(key)
    numbers: list[Any] = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, 0 if known is None else known.number + known.broken)
    if known is None or known.number < max(numbers):
        known = _of_mesh[key] = Groups(device, max(numbers))
    return known
