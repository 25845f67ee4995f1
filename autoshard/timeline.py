"""What ran when on each rank, predicted or measured: pictures, traces, tables, and the bubble.

Times are seconds from the start of the step. The bubble is the share of time in which ranks do
nothing; `formula` gives the size that the paper of a schedule states for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Kinds of events in which a rank computes: forward, backward, its halves, sums of gradients.
BUSY = ("F", "B", "I", "W", "reduce")


@dataclass(frozen=True)
class Event:
    """Something that one rank does from ``start`` to ``end``, in seconds.

    ``kind``: "F", "B", "I", "W", "send", "receive", "reduce", "idle". ``stage`` and ``microbatch``
    are -1 where there is none.
    """

    rank: int
    kind: str
    label: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Events of a step on so many ranks; ``name`` is that of its schedule."""

    events: tuple[Event, ...]
    ranks: int
    name: str

    @property
    def total(self) -> float:
        """Seconds from 0 to the end of the last event."""
        return max((event.end for event in self.events), default=0.0)

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes; times in which it does two things count once."""
        spans = ((e.start, e.end) for e in self.events if e.rank == rank and e.kind in BUSY)
        return _union(spans)


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def bubble(timeline: Timeline) -> float:
    """The share of time in which ranks do nothing: idle time / (ranks * total time)."""
    whole = timeline.ranks * timeline.total
    busy = sum(timeline.busy(rank) for rank in range(timeline.ranks))
    return 1 - busy / whole if whole else 0.0
