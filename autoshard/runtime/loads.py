"""How the tokens of a step were spread over experts and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.layout import piece_lengths
from autoshard.mesh import SubMesh
from autoshard.runtime import turns


@dataclass(frozen=True)
class Mixture:
    """One mixture of experts of a partitioned graph. ``where``: its module; ``over``: the mesh axes
    that cut its experts; ``tokens``: those that cut its tokens; ``shared``: those whose ranks all
    compute, each with a part of the width, the rows that any of them is sent; ``capacity``: the
    factor, if any.
    """

    where: str
    experts: int
    k: int
    over: tuple[str, ...]
    tokens: tuple[str, ...]
    shared: tuple[str, ...] = ()
    capacity: float | None = None

    def experts_of_ranks(self, mesh: SubMesh) -> list[int]:
        """How many experts each rank of ``over`` has."""
        return piece_lengths(self.experts, mesh.size(self.over))


@dataclass(frozen=True)
class ExpertLoad:
    """The load of one mixture in one step, of all ranks together.

    ``tokens``: how many slots (a token's choice of an expert) each expert was chosen for; ``rows``:
    how many rows the experts of each rank computed: with a capacity also those that stand for no
    slot, and where experts are cut by width those of all ranks that have a part of them; ``sent``:
    bytes that each rank sent to experts on other ranks (as many rows return); ``dropped``: slots
    over the capacity.
    """

    where: str
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    sent: tuple[int, ...]
    dropped: int

    @property
    def expert_imbalance(self) -> float:
        """The tokens of the expert with the most over the mean; 1 is even, and so is nothing."""
        return _imbalance(self.tokens)

    @property
    def rank_imbalance(self) -> float:
        """The rows of the rank with the most over the mean."""
        return _imbalance(self.rows)


def _imbalance(numbers: Sequence[int]) -> float:
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if total else 1.0


@dataclass(frozen=True, eq=False)
class Taken:
    """What a rank took note of in one micro-batch; see `Load.take`."""

    counts: torch.Tensor
    rows: int
    sent: int
    dropped: torch.Tensor | None


class Load:
    """What one rank took note of when it last ran a mixture, in all micro-batches of a step: on its
    device, nothing is waited for."""

    def __init__(self, mixture: Mixture):
        self.mixture = mixture
        self.taken: dict[int, Taken] = {}  # by micro-batch: one that is computed again counts once

    def begin(self) -> None:
        """A step of several micro-batches begins: nothing of an earlier one is left."""
        self.taken.clear()

    def take(
        self, counts: torch.Tensor, rows: int, sent: int, dropped: torch.Tensor | None = None
    ) -> None:
        """``counts[experts]``: slots of this rank's tokens; ``rows`` that came to its experts;
        bytes ``sent`` to other ranks; ``dropped[slots]``: which are."""
        over = None if dropped is None else dropped.detach().sum()
        self.taken[turns.turn] = Taken(counts.detach(), rows, sent, over)

    def share(self, mesh: SubMesh, rank: int, device: Any = None) -> torch.Tensor:
        """One row of numbers, whose sum over all ranks `loads_of` reads."""
        ranks, mixture = mesh.mesh.world_size, self.mixture
        out = torch.zeros(mixture.experts + 2 * ranks + 1, dtype=torch.int64, device=device)
        coordinate = mesh.coordinate(rank)
        first = all(coordinate[m] == 0 for m in mesh.axes if m not in mixture.tokens)
        for taken in self.taken.values():
            if first:  # ranks of the same tokens count them once
                out[: mixture.experts] += taken.counts
                out[-1] += 0 if taken.dropped is None else taken.dropped
            out[mixture.experts + rank] += taken.rows
            out[mixture.experts + ranks + rank] += taken.sent
        return out


def share_of(loads: Iterable[Load], mesh: SubMesh, rank: int, device: Any = None) -> torch.Tensor:
    """A rank's numbers of several mixtures, one behind the other; none of none."""
    shares = [load.share(mesh, rank, device) for load in loads]
    return torch.cat(shares) if shares else torch.zeros(0, dtype=torch.int64, device=device)


def loads_of(
    mixtures: Mapping[str, Mixture], shares: torch.Tensor, mesh: SubMesh
) -> list[ExpertLoad]:
    """The loads that the sum of all ranks' `share_of` tells."""
    ranks, numbers, found = mesh.mesh.world_size, shares.tolist(), []
    for mixture in mixtures.values():
        tokens, rest = tuple(numbers[: mixture.experts]), numbers[mixture.experts :]
        groups = [mesh.peers(r, mixture.shared) if mixture.shared else [r] for r in range(ranks)]
        rows = tuple(sum(rest[r] for r in group) for group in groups)
        sent = tuple(rest[ranks : 2 * ranks])
        found.append(ExpertLoad(mixture.where, tokens, rows, sent, rest[2 * ranks]))
        numbers = rest[2 * ranks + 1 :]
    return found
