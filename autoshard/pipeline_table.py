"""The table of a pipeline: what each stage holds, computes and sends, and its schedule."""

from __future__ import annotations

import dataclasses
from collections import Counter

from autoshard.activations import stage_forwards
from autoshard.batches import each, microbatch_count
from autoshard.cost import local_numel
from autoshard.forecast import stage_costs, stage_work
from autoshard.groups import groups, listed
from autoshard.program import Program, stages_of_parameters
from autoshard.schedule import Costs, bubble_line, dry_run, peaks
from autoshard.traffic import Route, routes, step_plan
from autoshard.words import Sizes, Table

#: Units of time that stand beside each other in the grid.
UNITS = 24
HEADERS = ["stage", "pp", "ranks", "what is in it", "FLOPs share"]
HEADERS += ["parameters, bytes", "activations, bytes", "alive", "alive, bytes", "sends", "bytes"]
NUMBERS = ("FLOPs share", *HEADERS[5:9], "bytes")


def pipeline_table(program: Program) -> Table:
    """A row for each stage: its position along pp, its ranks, what is in it, its share of the work
    (see `autoshard.flow`), bytes of the parameters that one rank computes with, bytes that one rank
    keeps of a micro-batch from forward to backward, of how many it keeps them when it keeps most,
    and what it sends forward to which stages. Activations, and what is sent, are those of one
    micro-batch; where backward is split they are taken to be kept until W, which is the most there
    can be. Below: the order of the schedule, and the share of time in which ranks do nothing.
    """
    if program.pipeline is None:
        return Table(["pipeline", "why"], [["none", f"mesh {program.mesh.mesh} has no pp"]])
    sizes, place = Sizes(program), program.pipeline.place
    (work, _), held, saved = stage_work(program), alive(program), stage_forwards(program)
    parameters, sent = _parameter_bytes(program), routes(program)
    count, texts = microbatch_count(program), (program.stages or "").split("|")
    rows = []
    for stage, position in enumerate(place):
        one = saved[stage].saved if saved is not None else None
        kept = held[position][stage]
        own = [route for route in sent if route.source == stage]
        forms = [each(program, route.bytes, count) for route in own]
        rows.append(
            [
                stage,
                position,
                _ranks(program, position),
                texts[stage],
                f"{work[stage] / (sum(work) or 1):.1%}",
                parameters[stage],
                "-" if one is None else one,
                kept,
                "-" if one is None else kept * one,
                "; ".join(map(_sends, own)) or "-",
                sum(sizes.number(sizes.local(form)) for form in forms),
            ]
        )
    return Table(HEADERS, rows, NUMBERS, {"what is in it": 40}, _below(program, sizes))


def _ranks(program: Program, position: int) -> str:
    """The ranks at a position along pp."""
    return listed([[line[position] for line in groups(program.mesh, ("pp",))]])


def _sends(route: Route) -> str:
    count = len(route.values)
    return f"{count} value{'s' * (count > 1)} to {route.target}"


def _parameter_bytes(program: Program) -> list[int]:
    """Bytes of the slices that one rank computes with, by stage; tied ones count in each."""
    found = [0] * program.pipeline.stages
    units = {key: unit.dtype for unit in program.units.values() for key in unit.keys}
    for key, stages in stages_of_parameters(program).items():
        parameter = program.values[key]
        size = units.get(key, parameter.value.dtype).itemsize
        for stage in stages if not parameter.buffer else ():
            found[stage] += local_numel(parameter, program.mesh) * size
    return found


def alive(program: Program) -> tuple[Counter[int], ...]:
    """By position along pp, how many micro-batches of each of its stages a rank keeps for backward
    when it keeps most."""
    plan, saved = program.pipeline.scheduled(microbatch_count(program)), stage_forwards(program)
    return peaks(plan) if saved is None else peaks(plan, lambda stage: saved[stage].saved)


def _below(program: Program, sizes: Sizes) -> str:
    count = microbatch_count(program)
    plan, edges = program.pipeline.scheduled(count), step_plan(program).edges
    one = (1.0,) * plan.stages
    even = bubble_line(dry_run(plan, Costs(one, one, one), edges))
    costs = dataclasses.replace(stage_costs(program), transfer={})
    own = bubble_line(dry_run(plan, costs, edges)).partition(";")[0]
    told = f"One micro-batch is one of {count}" if count > 1 else "One micro-batch, the whole batch"
    at = f", of {sizes.captured()}" if sizes.captured() else ""
    return "\n".join(
        [
            f"{told}{at}. Bytes are those of one rank.",
            "",
            f"{plan.name}, in units of time of which F, I and W take one and B two:",
            "",
            plan.grid(units=UNITS),
            "",
            f"even stages: {even}",
            f"these stages: {own}",
        ]
    )
