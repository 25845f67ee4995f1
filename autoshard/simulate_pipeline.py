"""The stages of all ranks in one process: the runner that a live rank has, on a mailbox.

Each position along pp runs its stages on all its ranks in lockstep (`autoshard.simulate`), and
actions run in the order in which they end on a machine where each takes as long as any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from torch import fx

from autoshard.mesh import MeshSpec, SubMesh
from autoshard.pipeline import Plan
from autoshard.program import Program
from autoshard.runtime.loads import Load
from autoshard.runtime.pipeline import Each, Runner, cut_off
from autoshard.schedule import Action, Costs, check, dry_run
from autoshard.simulate import run_node, simulate


def stage_mesh(mesh: SubMesh) -> SubMesh:
    """The mesh of the ranks at one position along pp."""
    sizes = {name: size for name, size in mesh.mesh.sizes if name != "pp"}
    return dataclasses.replace(mesh, mesh=MeshSpec(sizes))


class Mailbox:
    """Hands values from stage to stage in one process."""

    def __init__(self) -> None:
        self.letters: dict[Any, list[Each]] = {}

    def put(self, source: int, target: int, turn: int, back: bool, values: list[Each]) -> None:
        self.letters[source, target, turn, back] = [[cut_off(x) for x in each] for each in values]

    def take(self, source: int, target: int, turn: int, back: bool) -> list[Each]:
        return self.letters.pop((source, target, turn, back))


class Lockstep:
    """Runs graphs on all ranks of a position along pp."""

    def __init__(self, program: Program, plan: Plan, units: list[dict[str, Any]]):
        self.plan, self.mesh, self.units = plan, stage_mesh(program.mesh), units
        self.named = program.attentions
        self.ranks = len(units)

    def body(self, stage: int, arguments: list[list[Any]]) -> Any:
        graph = self.plan.stages[stage].body.graph
        return simulate(graph, self.mesh, arguments, self.units, self.named)

    def node(self, node: fx.Node, envs: list[dict[fx.Node, Any]]) -> list[Any]:
        return run_node(node, self.mesh, envs, [{**own, **self.named} for own in self.units])

    def graphs(self, stage: int) -> tuple[fx.Graph, fx.Graph]:
        return self.plan.stages[stage].before.graph, self.plan.stages[stage].after.graph

    def last(self, stage: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def simulate_pipeline(
    program: Program,
    plan: Plan,
    held: list[dict[str, Any]],
    inputs: list[list[dict[str, Any]]],
    units: list[dict[str, Any]],
    grad: bool,
) -> list[dict[str, Each]]:
    """Run all stages on all ranks, and backward when ``grad``. By rank: ``held``, the tensors of
    its placeholders; ``inputs``, those of its inputs in every micro-batch; ``units``, what its
    graphs name. Gives, by rank, the results that it has, by name and micro-batch."""
    pipeline = program.pipeline
    assert pipeline is not None
    count, turns = len(held) // pipeline.ranks, len(inputs[0])
    order = pipeline.scheduled(turns)
    check(order, plan.edges, joint=bool(plan.joint))
    for load in (x for own in units for x in own.values() if isinstance(x, Load)):
        load.begin()
    mailbox, runners = Mailbox(), list[Runner]()
    for position in range(pipeline.ranks):
        own = slice(position * count, (position + 1) * count)
        engine = Lockstep(program, plan, units[own])
        runner = Runner(plan, pipeline.of_position(position), engine, mailbox)
        by_turn = [[of_rank[turn] for of_rank in inputs[own]] for turn in range(turns)]
        runner.begin(held[own], by_turn, None, grad)
        runners.append(runner)
    one = (1.0,) * pipeline.stages
    events = dry_run(order, Costs(one, one, one), plan.edges).events
    for event in sorted(events, key=lambda e: (e.end, e.rank)):
        action = Action(event.stage, event.kind, event.microbatch)
        if grad or action.kind == "F":
            runners[event.rank].run(action, splits=order.splits)
    found: list[dict[str, Each]] = []
    for runner in runners:
        results = runner.end()
        found += [
            {name: [each[r] for each in by_turn] for name, by_turn in results.items()}
            for r in range(count)
        ]
    return found
