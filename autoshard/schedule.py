"""Pipeline schedules: which stage each rank runs for which micro-batch, in what order.

A schedule is data. It prints as text that parses back, `check` says whether it can run, `steps`
adds the transfers between ranks, and `dry_run` predicts its times from costs a stage.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tabulate import tabulate

from autoshard.errors import ShardingError, message
from autoshard.timeline import Event, Formula, Timeline, bubble, bubble_line, formula

__all__ = [
    "NAMES",
    "Action",
    "Costs",
    "Formula",
    "Schedule",
    "Transfer",
    "activation_bytes",
    "activations",
    "adjacent",
    "bubble",
    "bubble_line",
    "check",
    "chunks_of",
    "dry_run",
    "formula",
    "peaks",
    "schedule",
    "steps",
]

NAMES = ("gpipe", "1f1b", "interleaved", "zb", "dualpipev")

#: Kinds of actions, and their times in a grid.
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}

Edges = Sequence[tuple[int, int]]


@dataclass(frozen=True, order=True)
class Action:
    """One stage's work on one micro-batch. As text: "2F0" is stage 2, forward, micro-batch 0.

    ``kind``: F forward, B backward, I the part of backward that gives gradients of the inputs,
    W the part that gives those of the weights (B is I, then W).

    >>> Action.parse("2F0")
    Action(stage=2, kind='F', microbatch=0)
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action of a text; ShardingError where it is none."""
        found = re.fullmatch(r"(\d+)([FBIW])(\d+)", text.strip())
        if not found:
            raise ShardingError(
                message(
                    "parse",
                    "an action",
                    repr(text),
                    "an action is a stage, one of F B I W, and a micro-batch",
                    "write it like 2F0",
                )
            )
        return cls(int(found[1]), found[2], int(found[3]))


@dataclass(frozen=True)
class Transfer:
    """One end of a transfer between stages on different ranks.

    ``of`` is the action that made the data: F (its values go to a later stage), B or I (its
    gradients go to an earlier stage). ``to`` is the stage that reads them.

    >>> str(Transfer(True, Action.parse("2F0"), 3))
    'send 2F0 to 3'
    """

    sends: bool
    of: Action
    to: int

    def __str__(self) -> str:
        return f"{'send' if self.sends else 'receive'} {self.of} to {self.to}"

    @classmethod
    def parse(cls, text: str) -> Transfer:
        """The transfer of a text; ShardingError where it is none."""
        found = re.fullmatch(r"(send|receive) (\w+) to (\d+)", text.strip())
        if not found:
            raise ShardingError(
                message(
                    "parse",
                    "a transfer",
                    repr(text),
                    "a transfer says which end it is, the action that made the data, and a stage",
                    'write it like "send 2F0 to 3" or "receive 2F0 to 3"',
                )
            )
        return cls(found[1] == "send", Action.parse(found[2]), int(found[3]))


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in the order in which it runs them.

    ``place`` is the rank of each stage; ``actions`` has one tuple a rank.
    """

    name: str
    ranks: int
    microbatches: int
    place: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.place)

    @property
    def chunks(self) -> int:
        """Stages a rank."""
        return self.stages // self.ranks

    @cached_property
    def splits(self) -> bool:
        """Whether some backward is split into I and W."""
        return any(action.kind in "IW" for rank in self.actions for action in rank)

    def of_rank(self, rank: int) -> tuple[Action, ...]:
        """The actions of one rank, in order."""
        return self.actions[rank]

    def grid(self, format: str = "simple", units: int | None = None) -> str:
        """Ranks down, units of time across, where F, I and W take one unit and B two; blank where a
        rank is idle. ``format`` is one of tabulate's; no more than so many ``units`` stand beside
        each other, the next ones below. ShardingError where some rank gets stuck.

        >>> print(schedule("1f1b", 2, 2).grid("plain"))
        rank    0    1    2    3    4    5    6    7    8
        0       0F0  0F1            0B0  ..        0B1  ..
        1            1F0  1B0  ..   1F1  1B1  ..
        """
        spans = _run(_Routes(self, None, None), _units)
        length = int(max((end for _, end in spans.values()), default=0))
        rows = [[str(rank)] + [""] * length for rank in range(self.ranks)]
        for action, (start, end) in spans.items():
            cells = [str(action), *[".."] * (int(end - start) - 1)]
            rows[self.place[action.stage]][1 + int(start) : 1 + int(end)] = cells
        headers, tables = ["rank", *map(str, range(length))], []
        for start in range(1, max(length, 1) + 1, units or max(length, 1)):
            part = slice(start, start + units if units else None)
            shown = [[row[0], *row[part]] for row in rows]
            head = [headers[0], *headers[part]]
            tables.append(tabulate(shown, head, tablefmt=format, disable_numparse=True))
        return "\n\n".join(tables)

    def __str__(self) -> str:
        place = ",".join(map(str, self.place))
        head = f"{self.name}: ranks={self.ranks} microbatches={self.microbatches} place={place}"
        rows = (
            f"rank {rank}: {' '.join(map(str, actions))}".rstrip()
            for rank, actions in enumerate(self.actions)
        )
        return "\n".join((head, *rows))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule of a text, as `str` writes it; ShardingError where it is none."""
        head, *rows = text.strip().splitlines() or [""]
        found = re.fullmatch(r"(.+): ranks=(\d+) microbatches=(\d+) place=([\d,]+)", head.strip())
        cut = [re.fullmatch(r"rank (\d+):(.*)", row.strip()) for row in rows]
        numbers = [int(row[1]) if row else None for row in cut]
        if not found or numbers != list(range(int(found[2]))):
            raise ShardingError(
                message(
                    "parse",
                    "a schedule",
                    repr(text if len(text) < 200 else f"{text[:200]}..."),
                    "it needs a first line with name, ranks, micro-batches and places, and then "
                    "one line for each rank, in order",
                    'write "NAME: ranks=2 microbatches=2 place=0,1", then "rank 0: 0F0 0F1 ..."',
                )
            )
        return cls(
            found[1],
            int(found[2]),
            int(found[3]),
            tuple(map(int, found[4].split(","))),
            tuple(tuple(map(Action.parse, row[2].split())) for row in cut if row),
        )


def chunks_of(name: str, chunks: int | None = None) -> int:
    """Stages a rank of a schedule: 1 for gpipe, 1f1b and zb, 2 for dualpipev, and 2 for interleaved
    unless given. ShardingError for a name or a number that does not exist."""
    if name not in NAMES:
        raise ShardingError(
            message(
                "schedule",
                "its name",
                repr(name),
                "no such schedule is known",
                f"use one of {', '.join(NAMES)}",
            )
        )
    usual = 2 if name in ("interleaved", "dualpipev") else 1
    if chunks is None or chunks == usual:
        return usual
    if name == "interleaved" and chunks >= 1:
        return chunks
    raise ShardingError(
        message(
            f"schedule {name}",
            "stages a rank",
            f"chunks={chunks}",
            f"{name} has {'at least 1' if name == 'interleaved' else f'always {usual}'}",
            "leave chunks out, or use schedule interleaved with chunks of at least 1",
        )
    )


def schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A schedule of so many ranks and micro-batches, both at least 1.

    Raises ShardingError for names and numbers that do not exist.

    >>> print(schedule("1f1b", 2, 3))
    1f1b: ranks=2 microbatches=3 place=0,1
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    chunks = chunks_of(name, chunks)
    if ranks < 1 or microbatches < 1:
        raise ShardingError(
            message(
                f"schedule {name}",
                "its size",
                f"ranks={ranks}, microbatches={microbatches}",
                "there is nothing to run on no rank, or for no micro-batch",
                "give at least 1 of both",
            )
        )
    place = tuple(_place(name, stage, ranks) for stage in range(ranks * chunks))
    order = ORDERS[name]
    actions = tuple(tuple(order(rank, ranks, microbatches, chunks)) for rank in range(ranks))
    return Schedule(name, ranks, microbatches, place, actions)


def _place(name: str, stage: int, ranks: int) -> int:
    """The rank of a stage: round and round, or in a V down and up again."""
    if name == "dualpipev" and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def _paired(forwards: list[Action], backwards: list[Action], ahead: int) -> Iterator[Action]:
    """``ahead`` forwards, then a forward and a backward in turn, then the rest of the backwards."""
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield from (forward, backward)
    yield from backwards[max(0, len(forwards) - ahead) :]


def _one_stage(stage: int, microbatches: int, ahead: int) -> Iterator[Action]:
    """One stage a rank, which runs so many forwards before its first backward."""
    forwards = [Action(stage, "F", m) for m in range(microbatches)]
    backwards = [Action(stage, "B", m) for m in range(microbatches)]
    return _paired(forwards, backwards, ahead)


def _gpipe(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    return _one_stage(rank, microbatches, microbatches)


def _1f1b(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """As many forwards as ranks come after this one, then one forward, one backward in turn
    (Narayanan et al. 2019, PipeDream; with a flush, arXiv:2104.04473, section 2.2.1)."""
    return _one_stage(rank, microbatches, ranks - 1 - rank)


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Micro-batches in groups; a group runs through all of a rank's stages before the next one
    begins (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2).

    There a group has one micro-batch a rank. Groups may be larger, which takes a longer warm-up,
    but not smaller, or ranks wait between stages: hence as many groups as have at least one a rank.
    """
    count = max(1, microbatches // ranks)
    cuts = [-(-i * microbatches // count) for i in range(count + 1)]
    groups = [range(*cut) for cut in itertools.pairwise(cuts)]
    stages = range(rank, ranks * chunks, ranks)
    forwards = [Action(s, "F", m) for group in groups for s in stages for m in group]
    backwards = [Action(s, "B", m) for group in groups for s in reversed(stages) for m in group]
    return _paired(forwards, backwards, (chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank))


def _zb(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """1F1B with backward split: gradients of inputs at once, those of weights so many
    micro-batches later as ranks come before this one (ZB-H1 of Qi et al. 2023, arXiv:2401.10241).

    Ranks then hold as many micro-batches as the first rank of 1F1B.
    """
    for action in _1f1b(rank, ranks, microbatches, chunks):
        m = action.microbatch
        yield Action(rank, "F" if action.kind == "F" else "I", m)
        if action.kind == "B" and m >= rank:
            yield Action(rank, "W", m - rank)
    for m in range(max(0, microbatches - rank), microbatches):
        yield Action(rank, "W", m)


def _dualpipev(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Stages down and up again, each rank with one of either way, so that the last stage is on the
    first rank (DualPipe of DeepSeek-V3, arXiv:2412.19437, section 3.2.1; in its form for half the
    ranks, which Sea AI Lab calls cut in half)."""
    full = max(microbatches, 2 * ranks)  # of fewer, those that lack are left out
    after = ranks - 1 - rank
    down, up = rank, 2 * ranks - 1 - rank
    order = [
        *[(down, "F")] * (2 * after),
        *[(down, "F"), (up, "F")] * (rank + 1),
        *[(up, "I"), (-1, "W"), (up, "F")] * after,
        *[(down, "F"), (up, "B"), (up, "F"), (down, "B")] * (full - 2 * ranks + rank + 1),
        *[(up, "B"), (up, "F"), (down, "B")] * after,
        *([(up, "B"), (down, "B")] * (rank + 1))[: rank + 1],
        *([(up, "I"), (down, "I")] * (rank + 1))[rank + 1 :],
        *[(-1, "W"), (down, "I")] * after,
        *[(-1, "W")] * (rank + 1),
    ]
    done: Counter[tuple[int, bool]] = Counter()
    halves: list[Action] = []
    for stage, kind in order:
        if kind == "W":
            action = replace(halves.pop(0), kind="W")
        else:
            action = Action(stage, kind, done[stage, kind == "F"])
            done[stage, kind == "F"] += 1
        if kind == "I":
            halves.append(action)
        if action.microbatch < microbatches:
            yield action


ORDERS: dict[str, Callable[[int, int, int, int], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zb": _zb,
    "dualpipev": _dualpipev,
}


# --- what an action needs ---


def adjacent(stages: int) -> tuple[tuple[int, int], ...]:
    """The edges of a chain: every stage is read by the next.

    >>> adjacent(3)
    ((0, 1), (1, 2))
    """
    return tuple(itertools.pairwise(range(stages)))


class _Routes:
    """Which actions must be done before one: edges between stages, applied to a schedule."""

    def __init__(
        self, plan: Schedule, edges: Edges | None, back: Edges | None, joint: bool = False
    ) -> None:
        edges = adjacent(plan.stages) if edges is None else edges
        back = edges if back is None else back
        _check_edges(plan, edges, back)
        self.plan = plan
        self.joint = joint
        self.all = {action for rank in plan.actions for action in rank}
        # Per stage, those whose values it reads, and those that read its own.
        self.sources, self.readers = _ends(edges)
        # Per stage, those to which its gradients go, and those from which it gets gradients.
        self.back_to, self.back_from = _ends(back)

    def backward(self, stage: int, microbatch: int) -> Action:
        """The action that gives the gradients of a stage's inputs: I where it is split, else B."""
        split = Action(stage, "I", microbatch)
        return split if split in self.all else Action(stage, "B", microbatch)

    def needs(self, action: Action) -> list[Action]:
        """The actions that an action waits for, on whatever rank."""
        s, m = action.stage, action.microbatch
        if action.kind == "F":
            return [Action(a, "F", m) for a in self.sources[s]]
        if action.kind == "W":
            return [Action(s, "I", m)]
        needed = [Action(s, "F", m), *(self.backward(t, m) for t in self.back_from[s])]
        if not self.joint:
            return needed
        last = self.plan.stages - 1
        return needed + [Action(last, "F", n) for n in range(self.plan.microbatches)]

    def targets(self, action: Action) -> list[int]:
        """The stages that read what an action makes."""
        if action.kind == "W":
            return []
        return (self.readers if action.kind == "F" else self.back_to)[action.stage]


def _ends(edges: Edges) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The starts of the edges into each stage, and the ends of those out of it, in order."""
    starts: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for a, b in sorted(set(edges)):
        starts[b].append(a)
        ends[a].append(b)
    return starts, ends


def _check_edges(plan: Schedule, edges: Edges, back: Edges) -> None:
    """Raise ShardingError unless edges go forward between stages, and gradients along them."""
    stages = range(plan.stages)
    wrong = [
        f"edge {a} to {b}" for a, b in edges if a not in stages or b not in stages or a >= b
    ] + [f"gradients of {a} to {b}, which is no edge" for a, b in sorted(set(back) - set(edges))]
    if wrong:
        raise ShardingError(
            message(
                f"schedule {plan.name}",
                "edges between stages",
                "; ".join(wrong),
                f"an edge goes from a stage to a later one, of 0 to {plan.stages - 1}, and "
                "gradients return along some of the edges",
                "give edges as (stage that makes a value, later stage that reads it)",
            )
        )


# --- what is legal, and when it runs ---


def check(
    plan: Schedule, edges: Edges | None = None, back: Edges | None = None, joint: bool = False
) -> None:
    """Raise ShardingError unless every rank can run all its actions.

    ``edges``: (stage that makes a value, later stage that reads it), by default those of a chain.
    ``back``: those of them along which gradients return, all by default. ``joint``: the loss is no
    sum over micro-batches, so that no backward begins before the last stage has run all forwards.

    The error lists all actions that are missing, superfluous or on a rank that does not hold their
    stage; else all ranks that are stuck, at which action, and what it waits for.
    """
    _run(_Routes(plan, edges, back), _units)
    if joint:
        _run(_Routes(plan, edges, back, joint), _units)


def _units(action: Action) -> int:
    return UNITS[action.kind]


def _run(
    routes: _Routes,
    cost: Callable[[Action], float],
    delay: Callable[[Action, Action], float] = lambda made, reader: 0,
    processors: int | None = None,
) -> dict[Action, tuple[float, float]]:
    """Start and end of every action: each rank starts its next one when it is free and what that
    needs has arrived. ShardingError where the actions are wrong, or ranks get stuck.

    Actions start in the order in which they become ready. That is known without looking back: one
    whose needs have not run yet becomes ready after any that is ready now.
    """
    _check_actions(routes.plan)
    actions = routes.plan.actions
    spans: dict[Action, tuple[float, float]] = {}
    done = [0] * len(actions)
    free: list[float] = [0] * len(actions)
    cores: list[float] = [0] * (processors or len(actions))
    waiting: dict[Action, list[int]] = defaultdict(list)
    ready: list[tuple[float, int]] = []

    def look(rank: int) -> None:
        """Note when a rank can start its next action, or the first thing that it still lacks."""
        if done[rank] == len(actions[rank]):
            return
        action = actions[rank][done[rank]]
        needs = routes.needs(action)
        missing = next((need for need in needs if need not in spans), None)
        if missing is not None:
            waiting[missing].append(rank)
            return
        arrivals = (spans[need][1] + delay(need, action) for need in needs)
        heapq.heappush(ready, (max([free[rank], *arrivals]), rank))

    for rank in range(len(actions)):
        look(rank)
    while ready:
        when, rank = heapq.heappop(ready)
        action = actions[rank][done[rank]]
        start = max(when, heapq.heappop(cores))
        free[rank] = start + cost(action)
        spans[action] = start, free[rank]
        heapq.heappush(cores, free[rank])
        done[rank] += 1
        for each in (rank, *waiting.pop(action, ())):
            look(each)
    stuck = {rank: row[done[rank]] for rank, row in enumerate(actions) if done[rank] < len(row)}
    if stuck:
        raise _stuck(routes, stuck, spans)
    return spans


def _stuck(
    routes: _Routes, stuck: dict[int, Action], spans: Mapping[Action, object]
) -> ShardingError:
    """The error of ranks that cannot go on at an action."""
    plan, lines = routes.plan, []
    for rank, action in stuck.items():
        waits = [need for need in routes.needs(action) if need not in spans]
        shown = ", ".join(f"{need} of rank {plan.place[need.stage]}" for need in waits[:4])
        more = f" and {len(waits) - 4} more" if len(waits) > 4 else ""
        lines.append(f"rank {rank} is stuck at {action}, waiting for {shown}{more}")
    why = "what each waits for comes later on its own rank, or on a rank that is stuck"
    remedy = "put the actions that are waited for earlier on their ranks"
    if routes.joint:
        why = (
            "the loss is no sum over micro-batches: no backward begins before the last stage has "
            "run all forwards"
        )
        remedy = "use schedule gpipe, which runs all forwards first"
    ranks = f"{len(stuck)} of {plan.ranks} ranks"
    return ShardingError(message(f"schedule {plan.name}", ranks, "; ".join(lines), why, remedy))


def _check_actions(plan: Schedule) -> None:
    """Raise ShardingError unless each stage runs once for each micro-batch, on its rank."""
    wrong = list(_wrong_actions(plan))
    if wrong:
        raise ShardingError(
            message(
                f"schedule {plan.name}",
                "its actions",
                "; ".join(wrong),
                "each stage runs, on its own rank and once for each micro-batch, F and then either "
                "B or both I and W",
                "add, remove or move these actions",
            )
        )


def _wrong_actions(plan: Schedule) -> Iterator[str]:
    """In words, what a schedule has too much, and then what it lacks."""
    if len(plan.actions) != plan.ranks or not set(plan.place) <= set(range(plan.ranks)):
        yield f"stages on ranks {plan.place} and {len(plan.actions)} rows for {plan.ranks} ranks"
        return
    size = f"{plan.stages} stages and {plan.microbatches} micro-batches"
    times: Counter[Action] = Counter()
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            times[action] += 1
            s, m = action.stage, action.microbatch
            if s not in range(plan.stages) or m not in range(plan.microbatches):
                yield f"{action} on rank {rank}, where there are {size}"
            elif action.kind not in UNITS:
                yield f"{action} on rank {rank}, which is none of {' '.join(UNITS)}"
            elif plan.place[s] != rank:
                yield f"{action} on rank {rank}, where rank {plan.place[s]} holds stage {s}"
    yield from (f"{action} {n} times" for action, n in times.items() if n > 1)
    for stage, m in itertools.product(range(plan.stages), range(plan.microbatches)):
        f, b, i, w = (Action(stage, kind, m) for kind in "FBIW")
        if f not in times:
            yield f"no {f}"
        if b not in times and i not in times and w not in times:
            yield f"no {b}"
        elif b in times and (i in times or w in times):
            yield f"{b} beside {i if i in times else w}"
        elif b not in times and i not in times:
            yield f"{w} without {i}"
        elif b not in times and w not in times:
            yield f"{i} without {w}"


# --- transfers ---


def steps(
    plan: Schedule, edges: Edges | None = None, back: Edges | None = None
) -> tuple[tuple[Action | Transfer, ...], ...]:
    """What each rank does in order, transfers included; a tuple a rank.

    ``edges`` and ``back`` are as in `check`, whose errors it raises too.

    There is one order of all actions, that in which they end where F, I and W take one unit of time
    and B two. Both ends of a transfer stand right behind the action that made its data; each rank's
    list is its part of that order. So all ranks post transfers in the same order, which cannot
    deadlock even where a send waits for its receive, and a receive stands before what reads it.
    """
    routes = _Routes(plan, edges, back)
    spans = _run(routes, _units)
    lists: list[list[Action | Transfer]] = [[] for _ in range(plan.ranks)]
    for action in sorted(spans, key=lambda each: (spans[each][1], plan.place[each.stage])):
        here = plan.place[action.stage]
        lists[here].append(action)
        for to in routes.targets(action):
            if plan.place[to] != here:
                lists[here].append(Transfer(True, action, to))
                lists[plan.place[to]].append(Transfer(False, action, to))
    found = tuple(map(tuple, lists))
    _check_transfers(routes, found)
    return found


def _check_transfers(routes: _Routes, lists: Sequence[Sequence[Action | Transfer]]) -> None:
    """Assert that both ends of each pair of ranks agree, and that data comes before its reader."""
    place = routes.plan.place
    between: dict[tuple[int, int], list[tuple[Action, int]]] = defaultdict(list)
    for rank, row in enumerate(lists):
        there: set[tuple[Action, int]] = set()
        for step in row:
            if isinstance(step, Transfer):
                peer = place[step.to if step.sends else step.of.stage]
                between[rank, peer].append((step.of, step.to))
                if not step.sends:
                    there.add((step.of, step.to))
                continue
            for need in routes.needs(step):
                assert place[need.stage] == rank or (need, step.stage) in there, (rank, step, need)
    for rank, peer in between:
        assert between[rank, peer] == between[peer, rank], (rank, peer)


# --- time and memory ---


@dataclass(frozen=True)
class Costs:
    """Seconds that each stage takes for one micro-batch, one number a stage.

    ``inputs`` and ``weights`` are the two halves of backward; B takes their sum. ``transfer`` gives
    the seconds from one stage to another on another rank, as (stage that made it, stage that reads
    it): a function of that pair, or a mapping, which means 0 where it lacks one. ``activation``:
    bytes that a stage holds for one micro-batch from forward to backward.
    """

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    transfer: Callable[[tuple[int, int]], float] | Mapping[tuple[int, int], float] = field(
        default_factory=dict
    )
    activation: tuple[float, ...] = ()

    def of(self, action: Action) -> float:
        """Seconds of one action."""
        s = action.stage
        both = {"F": self.forward[s], "I": self.inputs[s], "W": self.weights[s]}
        return both["I"] + both["W"] if action.kind == "B" else both[action.kind]

    def seconds(self, edge: tuple[int, int]) -> float:
        """Seconds of a transfer between two stages on different ranks."""
        if callable(self.transfer):
            return self.transfer(edge)
        return self.transfer.get(edge, 0)


def _fitting(plan: Schedule, costs: Costs, *kinds: str) -> None:
    """Raise ShardingError unless the costs have one number a stage."""
    wrong = [kind for kind in kinds if len(getattr(costs, kind)) != plan.stages]
    if wrong:
        raise ShardingError(
            message(
                f"schedule {plan.name}",
                "costs",
                ", ".join(f"{kind} of {len(getattr(costs, kind))} stages" for kind in wrong),
                f"the schedule has {plan.stages} stages",
                "give one number for each stage",
            )
        )


def dry_run(
    plan: Schedule,
    costs: Costs,
    edges: Edges | None = None,
    back: Edges | None = None,
    processors: int | None = None,
) -> Timeline:
    """Predict when each action runs, from costs.

    A rank runs its actions in order, each as soon as the rank is free and all that it needs has
    arrived. Transfers take time but hold nobody up. ``processors``: at most so many ranks compute
    at once, first come, first served (a host with fewer cores than ranks). ``edges`` and ``back``
    are as in `check`, whose errors it raises too.
    """
    _fitting(plan, costs, "forward", "inputs", "weights")
    if processors is not None and processors < 1:
        raise ShardingError(
            message(
                f"schedule {plan.name}",
                "the dry run",
                f"processors={processors}",
                "no rank could ever compute",
                "give at least 1, or None for one a rank",
            )
        )
    place = plan.place

    def delay(made: Action, reader: Action) -> float:
        edge = made.stage, reader.stage
        return 0 if place[edge[0]] == place[edge[1]] else costs.seconds(edge)

    routes = _Routes(plan, edges, back)
    events = []
    for action, (start, end) in _run(routes, costs.of, delay, processors).items():
        s, m, here = action.stage, action.microbatch, place[action.stage]
        events.append(Event(here, action.kind, str(action), s, m, start, end))
        for to in routes.targets(action):
            seconds = 0 if place[to] == here else costs.seconds((s, to))
            if seconds:
                label = f"{action} to {to}"
                events += [
                    Event(rank, kind, label, s, m, end, end + seconds)
                    for rank, kind in ((here, "send"), (place[to], "receive"))
                ]
    return Timeline(tuple(events), plan.ranks, plan.name, "predicted")


def peaks(
    plan: Schedule, size: Callable[[int], float] = lambda stage: 1
) -> tuple[Counter[int], ...]:
    """For each rank, how many micro-batches of each of its stages it holds when it holds most;
    ``size``: of one micro-batch of a stage. F adds one; B takes it away, or W where backward is
    split (at most: what W does not need goes with I).

    >>> peaks(schedule("1f1b", 2, 4))
    (Counter({0: 2}), Counter({1: 1}))
    """
    found = []
    for actions in plan.actions:
        held: Counter[int] = Counter()
        most, at_most = 0.0, Counter[int]()
        for action in actions:
            held[action.stage] += {"F": 1, "I": 0}.get(action.kind, -1)
            total = sum(n * size(stage) for stage, n in held.items())
            if total > most:
                most, at_most = total, +held
        found.append(at_most)
    return tuple(found)


def activations(plan: Schedule) -> tuple[int, ...]:
    """The most micro-batches that each rank holds at once, see `peaks`."""
    return tuple(sum(held.values()) for held in peaks(plan))


def activation_bytes(plan: Schedule, costs: Costs) -> tuple[float, ...]:
    """As `activations`, in bytes of `Costs.activation`."""
    _fitting(plan, costs, "activation")
    size = costs.activation.__getitem__
    return tuple(sum(n * size(s) for s, n in held.items()) for held in peaks(plan, size))
