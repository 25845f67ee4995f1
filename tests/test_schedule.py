"""Pipeline schedules: legal for every size, bubbles as published, both ends of transfers agree."""

import collections
import itertools
import json
import random
import xml.etree.ElementTree as ElementTree

import pytest

from autoshard.errors import AutoshardError, ShardingError
from autoshard.schedule import (
    NAMES,
    Action,
    Costs,
    Schedule,
    Transfer,
    activation_bytes,
    activations,
    adjacent,
    bubble,
    bubble_line,
    check,
    chunks_of,
    dry_run,
    formula,
    peaks,
    schedule,
    steps,
)
from autoshard.timeline import Event, Timeline, compare

SIZES = list(itertools.product(range(2, 9), range(1, 17)))
#: Seconds of F, I, W; W is no longer than the others, as ZB-H1's bubble has it.
TIMES = [(1, 1, 1), (2, 3, 1), (3, 2, 2)]


def even(plan, F=1, I=1, W=1, **more):  # noqa: E741
    """Costs of stages that are all alike."""
    return Costs(*((seconds,) * plan.stages for seconds in (F, I, W)), **more)


def random_edges(stages, choose):
    """A chain with skips over several stages; gradients return along some of them."""
    pairs = list(itertools.combinations(range(stages), 2))
    edges = sorted({*adjacent(stages), *choose.sample(pairs, min(len(pairs), stages))})
    back = [e for e in edges if e in adjacent(stages) or choose.random() < 0.5]
    return edges, back


# --- texts ---


def test_actions_and_transfers_as_text():
    for text in ("2F0", "3B1", "3I1", "1W2", "10F12"):
        assert str(Action.parse(text)) == text
    assert Action.parse("10F12") == Action(10, "F", 12)
    for text in ("send 2F0 to 3", "receive 3I1 to 0"):
        assert str(Transfer.parse(text)) == text
    assert Transfer.parse("receive 3I1 to 0") == Transfer(False, Action(3, "I", 1), 0)


@pytest.mark.parametrize("text", ["F0", "2X0", "2F", "2F0 3F0", "-1F0"])
def test_no_action(text):
    with pytest.raises(ShardingError, match=r"2F0\n?"):
        Action.parse(text)


@pytest.mark.parametrize("text", ["2F0 to 3", "send 2F0", "send 2X0 to 3"])
def test_no_transfer(text):
    with pytest.raises(ShardingError, match="fix:"):
        Transfer.parse(text)


@pytest.mark.parametrize("name", NAMES)
def test_schedules_as_text(name):
    for ranks, microbatches in ((1, 1), (2, 5), (4, 3)):
        plan = schedule(name, ranks, microbatches)
        assert Schedule.parse(str(plan)) == plan
        assert str(plan).count("\n") == ranks


def test_no_schedule():
    good = str(schedule("1f1b", 2, 2))
    for text in ("", good.replace("rank 1", "rank 2"), good.splitlines()[0], good[5:]):
        with pytest.raises(ShardingError, match="one line for each rank"):
            Schedule.parse(text)


GOLDEN = {
    ("gpipe", 2, 3): """
        gpipe: ranks=2 microbatches=3 place=0,1
        rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
        rank 1: 1F0 1F1 1F2 1B0 1B1 1B2""",
    ("1f1b", 3, 4): """
        1f1b: ranks=3 microbatches=4 place=0,1,2
        rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3""",
    ("interleaved", 2, 2): """
        interleaved: ranks=2 microbatches=2 place=0,1,0,1
        rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1""",
    ("zb", 3, 4): """
        zb: ranks=3 microbatches=4 place=0,1,2
        rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1: 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        rank 2: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3""",
    ("dualpipev", 2, 4): """
        dualpipev: ranks=2 microbatches=4 place=0,1,1,0
        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3""",
}


@pytest.mark.parametrize("size", GOLDEN, ids=str)
def test_orders(size):
    lines = GOLDEN[size].strip().splitlines()
    assert str(schedule(*size)).splitlines() == [line.strip() for line in lines]


def test_grid():
    rows = schedule("zb", 3, 4).grid("tsv").splitlines()
    cells = [[cell.strip() for cell in row.split("\t")] for row in rows]
    assert cells[0] == ["rank", *map(str, range(14))]
    assert cells[3][1:7] == ["", "", "2F0", "2I0", "2F1", "2I1"]
    whole = schedule("1f1b", 2, 1).grid("tsv").splitlines()[1].split("\t")
    assert [cell.strip() for cell in whole] == ["0", "0F0", "", "", "", "0B0", ".."]


# --- names and sizes ---


def test_stages_a_rank():
    assert [chunks_of(name) for name in NAMES] == [1, 1, 2, 1, 2]
    assert chunks_of("interleaved", 3) == schedule("interleaved", 2, 2, 3).chunks == 3
    assert schedule("dualpipev", 3, 2).place == (0, 1, 2, 2, 1, 0)
    assert schedule("interleaved", 3, 2).place == (0, 1, 2, 0, 1, 2)
    assert [schedule(name, 2, 2).splits for name in NAMES] == [False, False, False, True, True]


@pytest.mark.parametrize(
    "wanted, words",
    [
        (("zigzag", 2, 2), "'zigzag'.*no such schedule"),
        (("1f1b", 2, 2, 2), "chunks=2.*always 1"),
        (("dualpipev", 2, 2, 1), "chunks=1.*always 2"),
        (("interleaved", 2, 2, 0), "chunks=0.*at least 1"),
        (("gpipe", 0, 2), "ranks=0, microbatches=2"),
        (("gpipe", 2, 0), "ranks=2, microbatches=0"),
    ],
)
def test_no_such_schedule(wanted, words):
    with pytest.raises(ShardingError, match=f"(?s){words}.*fix:"):
        schedule(*wanted)


@pytest.mark.parametrize("name, chunks", [*((n, None) for n in NAMES), ("interleaved", 3)])
def test_every_size_is_legal(name, chunks):
    for ranks, microbatches in ((1, 1), (1, 4), *SIZES):
        check(schedule(name, ranks, microbatches, chunks))


# --- the bubble ---


@pytest.mark.parametrize(
    "name, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb", 1)]
)
def test_bubbles_are_the_published_ones(name, chunks):
    exact = 0
    for (ranks, microbatches), times in zip(SIZES, itertools.cycle(TIMES), strict=False):
        plan = schedule(name, ranks, microbatches, chunks)
        published = formula(name, ranks, microbatches, chunks, *times)
        measured = bubble(dry_run(plan, even(plan, *times)))
        if published.exact:
            assert measured == pytest.approx(published.share), (ranks, microbatches, times)
            exact += 1
        else:
            assert measured >= published.share - 1e-9
    assert exact > len(SIZES) / 2


def test_formulas_by_hand():
    assert formula("1f1b", 4, 8).share == formula("gpipe", 4, 8).share == 3 / 11
    assert formula("interleaved", 4, 8, 2).share == 3 / 19
    # ZB-H1 of 4 ranks, unit times: 3 (1 + 1 - 1) idle beside 8 * 3 of work.
    assert formula("zb", 4, 8).share == pytest.approx(3 / 27)
    # DualPipe of 8 stages, unit times: (8/2 - 1) (3 + 2 - 3) idle beside 10 * 2 * 3 of work.
    assert formula("dualpipev", 4, 10, 2).share == pytest.approx(6 / 66)
    assert formula("1f1b", 1, 3).share == 0
    with pytest.raises(ShardingError, match="'zigzag'"):
        formula("zigzag", 2, 2)


def with_pairs_as_one(plan, F, I, W):  # noqa: E741
    """The time of a DualPipe in which an F and the B behind it are one block: it begins when both
    may, and what it makes is there when it ends. Shares no code with the dry run."""
    seconds = {"F": F, "B": I + W, "I": I, "W": W}
    rows = []
    for actions in plan.actions:
        blocks = []
        for action in actions:
            if action.kind == "B" and blocks[-1][-1].kind == "F":
                blocks[-1].append(action)
            else:
                blocks.append([action])
        rows.append(blocks)
    # The first pair of the last rank is none: its B would keep the first ranks waiting for its F.
    at = next(i for i, block in enumerate(rows[-1]) if len(block) == 2)
    rows[-1][at : at + 1] = [[action] for action in rows[-1][at]]

    def needs(s, kind, m):
        if kind == "F":
            return [(s - 1, "F", m)] if s else []
        if kind == "W":
            return [(s, "gradient", m)]
        return [(s, "F", m)] + ([(s + 1, "gradient", m)] if s + 1 < plan.stages else [])

    there, free = {}, [0] * plan.ranks
    queues = [collections.deque(blocks) for blocks in rows]
    while any(queues):
        left = sum(map(len, queues))
        for rank, queue in enumerate(queues):
            block = queue[0] if queue else []
            wanted = [need for a in block for need in needs(a.stage, a.kind, a.microbatch)]
            if not block or any(need not in there for need in wanted):
                continue
            start = max([free[rank], *(there[need] for need in wanted)])
            free[rank] = start + sum(seconds[a.kind] for a in queue.popleft())
            for a in block:
                made = "F" if a.kind == "F" else "gradient"
                there.setdefault((a.stage, made, a.microbatch), free[rank])
        assert sum(map(len, queues)) < left
    return max(free)


LONG = [(ranks, m) for ranks, m in SIZES if m >= 2 * ranks]


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (4, 4, 3)])
def test_dualpipev_is_the_published_one(times):
    """Its amount holds where F = I >= W, and F&B is as long as both."""
    for ranks, microbatches in LONG:
        total = with_pairs_as_one(schedule("dualpipev", ranks, microbatches), *times)
        published = formula("dualpipev", ranks, microbatches, 2, *times)
        idle = 1 - 2 * microbatches * sum(times) / total
        assert idle == pytest.approx(published.share), (ranks, microbatches)


@pytest.mark.parametrize("times", [*TIMES, (2, 2, 1), (3, 2, 1)])
def test_dualpipev_without_blocks(times):
    """Where others need not wait for both of a pair it is no worse, and where I <= F <= 2I it is as
    good as ZB-H1 on stages of half the size."""
    for ranks, microbatches in LONG:
        plan = schedule("dualpipev", ranks, microbatches)
        measured = bubble(dry_run(plan, even(plan, *times)))
        assert measured <= formula("dualpipev", ranks, microbatches, 2, *times).share + 1e-9
        if times[0] >= times[1]:
            halves = formula("zb", ranks, 2 * microbatches, 1, *times)
            assert measured == pytest.approx(halves.share), (ranks, microbatches)


def test_bubble_beside_its_formula():
    plan = schedule("1f1b", 4, 8)
    assert bubble_line(dry_run(plan, even(plan))) == ("bubble 27.3%; formula (p-1)/(m+p-1) = 27.3%")
    few = schedule("zb", 4, 2)
    assert bubble_line(dry_run(few, even(few))).endswith("% (for m >= p, W <= F, W <= I)")
    assert bubble_line(Timeline((), 2, "zb")) == "bubble 0.0%"
    other = Timeline((Event(0, "F", "0F0", 0, 0, 0.0, 1.0),), 2, "handmade")
    assert bubble_line(other) == "bubble 50.0%"


# --- memory ---


def test_activations():
    for ranks, microbatches in SIZES:
        most = {name: activations(schedule(name, ranks, microbatches)) for name in NAMES}
        assert most["gpipe"] == (microbatches,) * ranks
        assert most["1f1b"] == tuple(min(microbatches, ranks - rank) for rank in range(ranks))
        assert most["zb"] == (max(most["1f1b"]),) * ranks
        assert max(most["dualpipev"]) <= 2 * ranks + 1  # of half the size: PP + 1 of its table
        first = (2 - 1) * ranks + 2 * (ranks - 1) + 1
        if microbatches % ranks == 0:
            assert max(most["interleaved"]) == min(2 * microbatches, first)


def test_bytes_of_activations():
    plan = schedule("interleaved", 2, 2)
    assert activation_bytes(plan, even(plan, activation=(1, 10, 100, 1000))) == (202, 1020)
    with pytest.raises(ShardingError, match="activation of 0 stages.*\n.*4 stages"):
        activation_bytes(plan, even(plan))


# --- transfers ---


def rendezvous(lists, place):
    """Run lists where a send waits for its receive and a receive for its send; the actions run."""
    queues = [collections.deque(row) for row in lists]
    ran = []
    while any(queues):
        before = len(ran), sum(map(len, queues))
        for rank, queue in enumerate(queues):
            while queue and isinstance(queue[0], Action):
                ran.append(queue.popleft())
            if not queue or not queue[0].sends:
                continue
            other = queues[place[queue[0].to]]
            if other and other[0] == Transfer(False, queue[0].of, queue[0].to):
                assert place[queue[0].to] != rank
                queue.popleft()
                other.popleft()
        assert before != (len(ran), sum(map(len, queues))), "deadlock"
    return ran


@pytest.mark.parametrize("name", NAMES)
def test_transfers(name):
    choose = random.Random(name)
    for ranks, microbatches in ((2, 1), (2, 4), (2, 5), (3, 2), (4, 6), (4, 8), (5, 3)):
        for chunks in (2, 3) if name == "interleaved" else (None,):
            plan = schedule(name, ranks, microbatches, chunks)
            for skips in (False, True):
                edges = back = adjacent(plan.stages)
                if skips:
                    edges, back = random_edges(plan.stages, choose)
                lists = steps(plan, edges, back)
                assert sorted(rendezvous(lists, plan.place)) == sorted(
                    itertools.chain(*plan.actions)
                )
                agree(plan, lists, edges, back)


def agree(plan, lists, edges, back):
    """Every rank keeps its order; every value crosses once, before it is read; both ends agree."""
    between = collections.defaultdict(list)
    for rank, row in enumerate(lists):
        assert tuple(step for step in row if isinstance(step, Action)) == plan.of_rank(rank)
        at = {step: i for i, step in enumerate(row)}
        assert len(at) == len(row)
        for step in row:
            if isinstance(step, Action):
                continue
            maker, m = step.of.stage, step.of.microbatch
            assert (maker, step.to) in edges if step.of.kind == "F" else (step.to, maker) in back
            peer = plan.place[step.to if step.sends else maker]
            between[rank, peer].append((step.of, step.to))
            if step.sends:
                assert at[step.of] < at[step]
                continue
            kinds = "F" if step.of.kind == "F" else "BI"
            reader = [Action(step.to, kind, m) for kind in kinds]
            assert any(at.get(action, -1) > at[step] for action in reader)
    assert all(between[a, b] == between[b, a] for a, b in list(between))
    crossing = sum(plan.place[a] != plan.place[b] for a, b in (*edges, *back))
    assert sum(map(len, between.values())) == 2 * crossing * plan.microbatches


def test_same_peer_both_ways():
    lists = steps(schedule("interleaved", 2, 1))
    assert [str(step) for step in lists[0]] == [
        *("0F0", "send 0F0 to 1", "receive 1F0 to 2", "2F0", "send 2F0 to 3"),
        *("receive 3B0 to 2", "2B0", "send 2B0 to 1", "receive 1B0 to 0", "0B0"),
    ]


def test_no_transfer_on_one_rank():
    lists = steps(schedule("dualpipev", 2, 4))
    crossing = {
        (step.of.stage, step.to) for row in lists for step in row if isinstance(step, Transfer)
    }
    assert crossing == {(0, 1), (2, 3), (1, 0), (3, 2)}  # stages 1 and 2 are on one rank


def test_gradients_return_along_some_edges():
    plan = schedule("1f1b", 2, 1)
    lists = steps(plan, [(0, 1)], [])
    assert [str(step) for step in lists[0]] == ["0F0", "send 0F0 to 1", "0B0"]
    assert [str(step) for step in lists[1]] == ["receive 0F0 to 1", "1F0", "1B0"]


# --- what is refused ---


def test_deadlock():
    plan = Schedule.parse(
        """stuck: ranks=3 microbatches=2 place=0,1,2
        rank 0: 0F0 0B0 0F1 0B1
        rank 1: 1F1 1F0 1B0 1B1
        rank 2: 2F0 2B0 2F1 2B1"""
    )
    for run in (check, steps, Schedule.grid, lambda plan: dry_run(plan, even(plan))):
        with pytest.raises(ShardingError) as error:
            run(plan)
        text = str(error.value)
        assert "schedule stuck: 3 of 3 ranks" in text
        assert "rank 0 is stuck at 0B0, waiting for 1B0 of rank 1" in text
        assert "rank 1 is stuck at 1F1, waiting for 0F1 of rank 0" in text
        assert "rank 2 is stuck at 2F0, waiting for 1F0 of rank 1" in text
        assert "why:" in text and "fix:" in text


def test_wrong_actions():
    plan = Schedule.parse(
        """wrong: ranks=2 microbatches=4 place=0,1
        rank 0: 0F0 0F1 0F2 0F3 0F3 1B1 0W0 0B1 0W1 0I2 0B3 7F0
        rank 1: 1F0 1F1 1F2 1B0 1B2 1B3"""
    )
    with pytest.raises(ShardingError) as error:
        check(plan)
    listed = str(error.value).split("\n")[0].split(": ", 2)[2].split("; ")
    assert listed == [
        "1B1 on rank 0, where rank 1 holds stage 1",
        "7F0 on rank 0, where there are 2 stages and 4 micro-batches",
        "0F3 2 times",
        "0W0 without 0I0",
        "0B1 beside 0W1",
        "0I2 without 0W2",
        "no 1F3",
    ]
    with pytest.raises(ShardingError, match="1 rows for 2 ranks"):
        check(Schedule("short", 2, 1, (0, 1), plan.actions[:1]))


@pytest.mark.parametrize("name", NAMES)
def test_loss_that_is_no_sum(name):
    plan = schedule(name, 3, 4)
    if name == "gpipe":
        return check(plan, joint=True)
    with pytest.raises(ShardingError, match=f"schedule {name}: .* is stuck at ") as error:
        check(plan, joint=True)
    text = str(error.value)
    assert "waiting for" in text and "no sum over micro-batches" in text
    assert "fix: use schedule gpipe" in text


def test_wrong_edges():
    with pytest.raises(ShardingError) as error:
        steps(schedule("1f1b", 3, 2), [(0, 1), (2, 1), (1, 3)], [(0, 1), (0, 2)])
    text = str(error.value)
    assert "edge 2 to 1; edge 1 to 3; gradients of 0 to 2, which is no edge" in text
    assert "of 0 to 2" in text


# --- predicted times ---


def naive(plan, costs, edges, back):
    """Ends of actions, by going round until nothing changes; shares no code with the dry run."""
    place, end = plan.place, {}
    kinds = {(a.stage, a.microbatch): a.kind for row in plan.actions for a in row if a.kind in "BI"}
    for _ in range(4 * plan.stages * plan.microbatches):
        before = dict(end)
        for row in plan.actions:
            free = 0
            for a in row:
                s, m = a.stage, a.microbatch
                needs = [Action(s, "F", m)]
                needs += [Action(y, kinds[y, m], m) for x, y in back if x == s]
                if a.kind == "F":
                    needs = [Action(x, "F", m) for x, y in edges if y == s]
                if a.kind == "W":
                    needs = [Action(s, "I", m)]
                delays = [
                    costs.transfer.get((n.stage, s), 0) if place[n.stage] != place[s] else 0
                    for n in needs
                ]
                arrivals = [end.get(n, 0) + d for n, d in zip(needs, delays, strict=True)]
                spent = {"F": costs.forward[s], "I": costs.inputs[s], "W": costs.weights[s]}
                spent["B"] = spent["I"] + spent["W"]
                free = end[a] = max([free, *arrivals]) + spent[a.kind]
        if end == before:
            return end
    raise AssertionError("no end")


@pytest.mark.parametrize("name", NAMES)
def test_dry_run_of_uneven_stages(name):
    choose = random.Random(name)
    for ranks, microbatches in ((2, 3), (3, 5), (4, 4)):
        plan = schedule(name, ranks, microbatches)
        edges, back = random_edges(plan.stages, choose)
        seconds = [tuple(choose.randint(1, 9) for _ in plan.place) for _ in range(3)]
        crossing = {e: choose.randint(0, 3) for pair in edges for e in (pair, pair[::-1])}
        costs = Costs(*seconds, crossing)
        made = dry_run(plan, costs, edges, back)
        expected = naive(plan, costs, edges, back)
        found = {Action.parse(e.label): e.end for e in made.events if e.kind in "FBIW"}
        assert found == expected
        assert made == dry_run(plan, Costs(*seconds, crossing.__getitem__), edges, back)


def test_transfers_take_time():
    plan = schedule("1f1b", 2, 1)
    made = dry_run(plan, even(plan, 1, 2, 3, transfer={(0, 1): 10, (1, 0): 100}))
    spans = {(e.rank, e.kind, e.label): (e.start, e.end) for e in made.events}
    assert spans == {
        (0, "F", "0F0"): (0, 1),
        (0, "send", "0F0 to 1"): (1, 11),
        (1, "receive", "0F0 to 1"): (1, 11),
        (1, "F", "1F0"): (11, 12),
        (1, "B", "1B0"): (12, 17),
        (1, "send", "1B0 to 0"): (17, 117),
        (0, "receive", "1B0 to 0"): (17, 117),
        (0, "B", "0B0"): (117, 122),
    }
    assert bubble(made) == pytest.approx(1 - 12 / 244)


def test_fewer_processors_than_ranks():
    plan = schedule("1f1b", 4, 6)
    totals = []
    for processors in (1, 2, 3, 4, None):
        made = dry_run(plan, even(plan), processors=processors)
        edges = sorted({e.start for e in made.events})
        at_once = max(sum(e.start <= t < e.end for e in made.events) for t in edges)
        assert at_once <= (processors or 4)
        totals.append(made.total)
    assert totals[0] == 4 * 6 * 3  # one after the other
    assert totals == sorted(totals, reverse=True) and totals[3] == totals[4] == 9 * 3
    assert totals[1] >= 4 * 6 * 3 / 2
    with pytest.raises(ShardingError, match="processors=0"):
        dry_run(plan, even(plan), processors=0)


def test_first_come_first_served():
    """Rank 1 becomes ready at 1, while rank 0 could go on: both wait for the one processor."""
    plan = schedule("gpipe", 2, 2)
    made = dry_run(plan, even(plan), processors=1)
    order = [e.label for e in sorted(made.events, key=lambda e: e.start)]
    assert order == ["0F0", "0F1", "1F0", "1F1", "1B0", "0B0", "1B1", "0B1"]


def test_costs_of_other_stages():
    plan = schedule("1f1b", 3, 2)
    with pytest.raises(ShardingError, match="forward of 2 stages, weights of 1 stages"):
        dry_run(plan, Costs((1, 1), (1, 1, 1), (1,)))


# --- timelines ---


def test_busy_counts_once_what_is_at_once():
    events = (
        Event(0, "F", "0F0", 0, 0, 0.0, 2.0),
        Event(0, "reduce", "bucket 0", -1, -1, 1.0, 3.0),
        Event(0, "receive", "1B0 to 0", 1, 0, 3.0, 4.0),
        Event(0, "idle", "", -1, -1, 3.0, 4.0),
    )
    made = Timeline(events, 1, "1f1b")
    assert made.total == 4 and made.busy(0) == 3 and bubble(made) == 0.25


def measured(name, **more):
    plan = schedule(name, 2, 3)
    return dry_run(plan, even(plan, 1e-3, 2e-3, 1e-3, **more))


@pytest.mark.parametrize("name", NAMES)
def test_picture(name, tmp_path):
    made = measured(name, transfer=lambda edge: 5e-4)
    made.save(tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    root = ElementTree.fromstring(text)
    tag = "{http://www.w3.org/2000/svg}"
    hints = [title.text for rect in root.iter(f"{tag}rect") for title in rect]
    assert len(hints) == len(made.events)
    words = [text.text for text in root.iter(f"{tag}text")]
    assert {"rank 0", "rank 1", "0F0", "F: forward", " ms", bubble_line(made)} <= set(words)
    assert ("I: gradients of inputs" in words) == schedule(name, 2, 3).splits
    # Self-contained: the name space is the only address in it.
    assert text.count("http") == 1 and "href" not in text


def test_shades_tell_stages_of_a_rank_apart():
    root = ElementTree.fromstring(measured("interleaved").svg())
    fills = collections.defaultdict(set)
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        for title in rect:
            kind, label = title.text.split(":")[0].split()
            fills[kind, int(label[0]) // 2].add(rect.get("fill"))
    assert all(len(colours) == 1 for colours in fills.values())
    assert len(set.union(*fills.values())) == len(fills) == 4


def test_pictures_of_odd_timelines():
    for events in ((), (Event(0, "F", "<&>", 0, 0, 0.0, 3.0), Event(0, "B", "", 0, 0, 3.0, 3.0))):
        ElementTree.fromstring(Timeline(events, 2, "a & b", "<measured>").svg())


def test_trace(tmp_path):
    made = measured("zb", transfer={(0, 1): 1e-3})
    made.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    whole = [e for e in events if e["ph"] == "X"]
    assert {(e["tid"], e["name"], e["ts"], e["dur"]) for e in whole} >= {(0, "0F0", 0, 1000)}
    assert len(whole) == 2 * 3 * 3
    opened, closed = ([e["id"] for e in events if e["ph"] == ph] for ph in "be")
    assert len(set(opened)) == 2 * 3 and opened == closed
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"rank 0", "rank 1"}


def test_no_such_file(tmp_path):
    with pytest.raises(AutoshardError, match="step.png.*\n.*suffix"):
        measured("zb").save(tmp_path / "step.png")


def test_table_of_ranks():
    lines = measured("1f1b").table("tsv").splitlines()
    cells = [[cell.strip() for cell in line.split("\t")] for line in lines]
    assert cells == [
        ["rank", "F (s)", "B (s)", "idle (s)", "idle"],
        ["0", "0.003", "0.009", "0.004", "25.0%"],
        ["1", "0.003", "0.009", "0.004", "25.0%"],
    ]


def test_compare():
    fast, slow = measured("1f1b"), measured("1f1b", transfer=lambda edge: 1e-3)
    lines = compare(fast, slow, "tsv").splitlines()
    cells = [[cell.strip() for cell in line.split("\t")] for line in lines]
    assert cells[0] == ["", "predicted", "measured", "measured / predicted"]
    assert cells[1] == ["total (s)", "0.016", f"{slow.total:.4g}", f"{slow.total / 0.016:.3f}"]
    assert cells[2][1:] == ["0.012", "0.012", "1.000"]
    assert cells[3][1] == "25.0%"


# --- what is kept, by stage; grids in several parts ---


def test_peaks_say_of_which_stages_micro_batches_are_kept():
    plan = schedule("interleaved", 2, 4)
    for rank, held in enumerate(peaks(plan)):
        assert sum(held.values()) == activations(plan)[rank]
        assert {plan.place[stage] for stage in held} == {rank}
    # where one stage keeps next to nothing, the peak is when the other one keeps most
    heavy = peaks(plan, lambda stage: 1.0 if stage == 2 else 1e-9)
    assert heavy[0][2] == max(held[2] for held in peaks(plan, lambda s: float(s == 2)))


def test_a_grid_in_parts_has_the_cells_of_the_whole():
    plan = schedule("1f1b", 3, 5)
    parts = plan.grid(units=6).split("\n\n")
    heads = [part.splitlines()[0].split()[1:] for part in parts]
    assert [len(head) for head in heads[:-1]] == [6] * (len(heads) - 1)
    assert sum(heads, []) == plan.grid().splitlines()[0].split()[1:]
    for rank in range(3):
        whole = plan.grid().splitlines()[2 + rank].split()[1:]
        assert sum((part.splitlines()[2 + rank].split()[1:] for part in parts), []) == whole
