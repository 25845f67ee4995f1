"""When each stage will run what: predicted from the work and the bytes of each, or from seconds
that were measured.

A stage's forward takes its work (`autoshard.flow`: FLOPs of its products, and an equivalent for the
bytes that its other ops move) divided by a rate; the gradients of its inputs and those of its
weights take as long each (two products for one), and what backward computes again comes on top. A
transfer takes its bytes divided by a rate. Collectives inside a stage take no time.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

from autoshard.activations import backward_runs
from autoshard.batches import captured_with, each, microbatch_count, of_microbatch
from autoshard.cost import BYTES_PER_SECOND, FLOPS_PER_SECOND
from autoshard.errors import ShardingError, message
from autoshard.flow import Flow
from autoshard.program import STAGE, Program
from autoshard.schedule import Costs, dry_run
from autoshard.timeline import ACTIONS, Timeline
from autoshard.traffic import routes, step_plan
from autoshard.words import Sizes


def forecast(
    program: Program,
    microbatches: int | None = None,
    flops_per_second: float = FLOPS_PER_SECOND,
    bytes_per_second: float = BYTES_PER_SECOND,
    costs: Costs | None = None,
    processors: int | None = None,
) -> Timeline:
    """A training step of rank 0's line along pp, predicted by `autoshard.schedule.dry_run`.

    ``microbatches``: into how many the captured rows are cut (None: as a step of them is).
    ``costs``: seconds to be taken in place of those that the rates give, as `costs_of` finds them.
    ``processors``: at most so many ranks compute at once.

    Raises ShardingError for a program without pp, and for numbers that make no step.
    """
    if program.pipeline is None:
        raise ShardingError(
            message(
                "forecast",
                "stages",
                f"mesh {program.mesh.mesh}",
                "without pp there is one, and nothing to predict of its order",
                'compile for a mesh with pp, such as "pp=4,dp=2"',
            )
        )
    rates = {"flops_per_second": flops_per_second, "bytes_per_second": bytes_per_second}
    wrong = [f"{name}={value!r}" for name, value in rates.items() if not value > 0]
    if microbatches is not None and (type(microbatches) is not int or microbatches < 1):
        wrong.append(f"microbatches={microbatches!r}")
    if wrong:
        raise ShardingError(
            message(
                "forecast",
                ", ".join(wrong),
                f"mesh {program.mesh.mesh}",
                "rates are above 0, and micro-batches a positive integer",
                "leave them out, or give what this machine does",
            )
        )
    count = microbatches or microbatch_count(program)
    costs = costs or stage_costs(program, count, **rates)
    plan, edges = program.pipeline.scheduled(count), step_plan(program).edges
    return dry_run(plan, costs, edges, processors=processors)


def stage_costs(
    program: Program,
    count: int | None = None,
    flops_per_second: float = FLOPS_PER_SECOND,
    bytes_per_second: float = BYTES_PER_SECOND,
) -> Costs:
    """Seconds of each stage for one of ``count`` micro-batches, from its work, and of transfers
    over pp from their bytes."""
    count, sizes = count or microbatch_count(program), Sizes(program)
    forward, again = stage_work(program, count)
    transfers = {}
    for route in (r for r in routes(program) if r.travels):
        there, back = (
            sizes.number(sizes.local(each(program, form, count))) / bytes_per_second
            for form in (route.bytes, route.bytes_back)
        )
        transfers[route.source, route.target] = there
        transfers[route.target, route.source] = back
    return Costs(
        tuple(w / flops_per_second for w in forward),
        tuple((w + a) / flops_per_second for w, a in zip(forward, again, strict=True)),
        tuple(w / flops_per_second for w in forward),
        transfers,
    )


def stage_work(program: Program, count: int | None = None) -> tuple[list[int], list[int]]:
    """The work of each stage in one of ``count`` micro-batches, in FLOPs: forward, and what of it
    backward does once more."""
    flow = Flow(captured_with(program, of_microbatch(program, count)))
    repeated, _ = backward_runs(program)
    forward, again = ([0] * program.pipeline.stages for _ in range(2))
    for node in flow.nodes:
        if STAGE in node.meta:
            forward[node.meta[STAGE]] += flow.cost(node)
            again[node.meta[STAGE]] += flow.cost(node) if node.name in repeated else 0
    return forward, again


def costs_of(timeline: Timeline) -> Costs:
    """The seconds of a timeline that was measured: medians of each stage's actions. A backward that
    is not split counts half to each part.

    A transfer between stages that follow each other is what lies between the end of what made the
    data and the begin of what reads it, where that rank had nothing else to do meanwhile: the
    median again, and 0 where no rank was waiting.
    """
    spent: dict[tuple[int, str], list[float]] = defaultdict(list)
    actions = [event for event in timeline.events if event.kind in ACTIONS]
    for event in actions:
        spent[event.stage, event.kind].append(event.end - event.start)
    stages = 1 + max((event.stage for event in actions), default=-1)

    def of(stage: int, kind: str) -> float:
        halves = statistics.median(spent.get((stage, "B"), [0.0])) / 2
        return statistics.median(spent[stage, kind]) if (stage, kind) in spent else halves

    return Costs(
        tuple(statistics.median(spent[s, "F"]) for s in range(stages)),
        tuple(of(s, "I") for s in range(stages)),
        tuple(of(s, "W") for s in range(stages)),
        _transfers(timeline, stages),
    )


def _transfers(timeline: Timeline, stages: int) -> dict[tuple[int, int], float]:
    """Seconds between neighbouring stages on different ranks, there and back."""
    actions = sorted((e for e in timeline.events if e.kind in ACTIONS), key=lambda e: e.start)
    of = {(e.stage, "B" if e.kind == "I" else e.kind, e.microbatch): e for e in actions}
    before: dict[int, float] = {}  # by rank, the end of its last action
    gaps: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in actions:
        kind = "B" if event.kind == "I" else event.kind
        source = event.stage + (-1 if kind == "F" else 1)
        made = of.get((source, kind, event.microbatch)) if kind != "W" else None
        if made is not None and made.rank != event.rank:
            waited = before.get(event.rank, 0.0) <= made.end
            gaps[source, event.stage] += [max(0.0, event.start - made.end)] if waited else []
        before[event.rank] = event.end
    edges = [(a, b) for s in range(stages - 1) for a, b in ((s, s + 1), (s + 1, s))]
    return {edge: statistics.median(gaps[edge]) if gaps[edge] else 0.0 for edge in edges}
