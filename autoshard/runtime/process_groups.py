"""Process groups of a module's ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from autoshard.program import Program


def timeout_of(device: torch.device) -> Any:
    """How long the default process group waits for a rank; a new group would wait half an hour."""
    world: Any = dist.group.WORLD
    return world._get_backend(device).options._timeout


def make_groups(
    program: Program,
    rank: int,
    wanted: Iterable[tuple[str, ...]],
    known: dict[Any, Any],
    device: torch.device,
    purpose: str = "",
) -> dict[tuple[str, ...], Any]:
    """This rank's process group for every set of mesh axes that is wanted. Only a group's own ranks
    make it, in one order of axes: no rank waits for groups that it is not in. ``known`` keeps them
    by ``purpose`` and ranks, for the next program. They wait as long for a rank as the default
    group does."""
    mine = {}
    for axes in wanted:
        ranks = tuple(program.mesh.peers(rank, axes))
        mine[axes] = make_group(ranks, known, device, purpose)
    return mine


def make_group(
    ranks: tuple[int, ...], known: dict[Any, Any], device: torch.device, purpose: str = ""
) -> Any:
    """A process group of some ranks, as `make_groups` makes them."""
    if (purpose, ranks) not in known:
        known[purpose, ranks] = dist.new_group(
            list(ranks), timeout=timeout_of(device), use_local_synchronization=True
        )
    return known[purpose, ranks]
