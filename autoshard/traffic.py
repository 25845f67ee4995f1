"""What passes between the stages of a pipeline, and how often a rank's collectives run in a step.

Bytes are closed forms in the rows that they are sent for (`autoshard.batches.each`: of those of one
micro-batch). A rank is told by its position along pp; on a mesh without pp all are at position 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
from torch import fx

from autoshard.activations import Given, stage_forwards
from autoshard.batches import each, microbatch_count, of_microbatch
from autoshard.cost import local_shape, shard_numel
from autoshard.pipeline import Plan, plan_of
from autoshard.program import Conversion, Parameter, Program
from autoshard.runtime.turns import common
from autoshard.shapes import closed_forms


def positions(program: Program) -> int:
    """Positions along pp; 1 without it."""
    return 1 if program.pipeline is None else program.pipeline.ranks


def stages_at(program: Program, position: int) -> list[int]:
    """The stages at a position along pp; without pp the whole model is stage 0."""
    return [0] if program.pipeline is None else program.pipeline.of_position(position)


def step_plan(program: Program) -> Plan:
    """The plan of what a training step runs; of the whole forward where there is no loss."""
    return plan_of(program, program.loss is not None)


# --- from stage to stage ---


@dataclass(frozen=True)
class Route:
    """What one stage sends to a later one in a micro-batch: the values, and those whose gradients
    come back. ``bytes``, ``bytes_back``: of the tensors of one rank; ``travels``: whether the
    stages are on different ranks."""

    source: int
    target: int
    values: tuple[fx.Node, ...]
    back: tuple[fx.Node, ...]
    bytes: Any
    bytes_back: Any
    travels: bool


def routes(program: Program) -> list[Route]:
    """What passes between the stages in a training step, in their order; nothing without pp. Where
    the stages cannot be run on fake tensors, all gradients are taken to come back."""
    if program.pipeline is None:
        return []
    nodes, given = {n.name: n for n in program.graph.nodes}, _Values(program)
    place, found = program.pipeline.place, []
    for source, stage in enumerate(step_plan(program).stages):
        for target, names in sorted(stage.sends.items()):
            values = [nodes[name] for name in names]
            returns = stage.returns[target]
            back = [n for n in values if n.name in returns and given.comes_back(source, n)]
            found.append(
                Route(
                    source,
                    target,
                    tuple(values),
                    tuple(back),
                    sum(given.bytes(source, node) for node in values),
                    sum(given.bytes(source, node) for node in back),
                    place[source] != place[target],
                )
            )
    return found


class _Values:
    """What is known of the values that stages give."""

    def __init__(self, program: Program):
        self.program, self.known = program, stage_forwards(program)
        self.sizes = of_microbatch(program)

    @cached_property
    def forms(self) -> dict[fx.Node, tuple[Any, ...]]:
        return closed_forms(self.program)

    def comes_back(self, stage: int, node: fx.Node) -> bool:
        """Whether the gradient of a value that a stage gives comes back to it."""
        if self.known is None:
            return True
        return node.name in self.known[stage].gives and self.known[stage].gives[node.name].grad

    def bytes(self, stage: int, node: fx.Node) -> Any:
        """Bytes of a value; what is no tensor has none."""
        if self.known is None:
            return ITEMSIZE * math.prod(self.forms.get(node, ()))
        given = self.known[stage].gives.get(node.name)
        return given.dtype.itemsize * math.prod(self._shape(node, given)) if given else 0

    def _shape(self, node: fx.Node, given: Given) -> tuple[Any, ...]:
        """The shape as closed forms that give what was found; else what was found."""
        dims, layout = self.program.dims.get(node), self.program.layouts.get(node)
        if isinstance(dims, tuple) and isinstance(layout, dict):
            stated = tuple(local_shape(dims, layout, self.program.mesh))
            if self._at(stated) == given.shape:
                return stated
        found = self.forms.get(node, ())
        return found if self._at(found) == given.shape else given.shape

    def _at(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(sympy.sympify(size).xreplace(self.sizes) for size in shape)


#: Bytes of a number where nothing says.
ITEMSIZE = 4


def loss_bytes(program: Program) -> int:
    """Bytes of the loss."""
    plan, known = step_plan(program), stage_forwards(program) or []
    last = plan.stages[plan.made[plan.results[0]] or 0]
    given = [each.gives[n] for each in known for n in last.after.takes if n in each.gives]
    return max((g.dtype.itemsize for g in given if g.dtype.is_floating_point), default=ITEMSIZE)


# --- tied weights ---


def ties(program: Program, position: int) -> dict[tuple[int, ...], list[Parameter]]:
    """The trainable parameters that ranks at this position along pp and at others hold, by the
    positions of all their holders: their gradients are summed once a step."""
    found: dict[tuple[int, ...], list[Parameter]] = {}
    for parameter in program.parameters().values():
        holders = parameter.holders or ()
        if parameter.trainable and len(holders) > 1 and position in holders:
            found.setdefault(holders, []).append(parameter)
    return dict(sorted(found.items()))


def tied_bytes(program: Program, tied: Iterable[Parameter]) -> list[int]:
    """Bytes of the gradients that a rank adds up of tied parameters, in one all-reduce a type: each
    with a number that says whether there is one."""
    sizes: Counter[Any] = Counter()
    for parameter in tied:
        value = parameter.value
        sizes[value.dtype] += (1 + shard_numel(parameter, program.mesh)) * value.element_size()
    return list(sizes.values())


# --- how often ---


class Runs:
    """How often the collectives of a graph run in a step, on ranks at one position along pp."""

    def __init__(self, program: Program, position: int = 0):
        self.program, self.count = program, microbatch_count(program)
        self.piped = program.pipeline is not None
        if self.piped:
            own = stages_at(program, position)
            self.step, self.outputs = (
                _times(plan, own, self.count)
                for plan in (step_plan(program), plan_of(program, False))
            )

    def of(self, conversion: Conversion) -> tuple[int, int]:
        """How often a conversion runs forward, and backward."""
        if not self.piped:
            return 1, 1
        (forward, backward), (for_outputs, _) = self.step, self.outputs
        there = forward[conversion.node] or for_outputs[conversion.node]
        back = backward[conversion.node]
        unit = self.program.units.get(conversion.value)
        if unit is None or conversion.kind not in UNIT_KINDS:
            return there, back
        # weights that are kept are gathered once, and gradients kept whole are reduced once
        return (
            there // self.count if unit.keep else there,
            back // self.count if unit.whole_gradients else back,
        )

    def bytes(self, times: int, form: Any) -> Any:
        """Bytes of so many runs, each of one micro-batch, of what sends ``form`` for all rows."""
        if not self.piped:
            return form * times
        return times * each(self.program, form, self.count)


def _times(plan: Plan, stages: list[int], count: int) -> tuple[Counter[str], Counter[str]]:
    """How often each op runs in some stages, by name, and how often backward comes to it: once a
    micro-batch in every stage that has it, but for what is the same in all of them. Backward starts
    behind what all micro-batches make together, unless it is joint."""
    forward, backward = Counter[str](), Counter[str]()
    for stage in (plan.stages[s] for s in stages):
        for piece in stage.pieces:
            once = common(piece.graph) if piece is not stage.body else set()
            for node in (n for n in piece.graph.nodes if n.op == "call_function"):
                times = 1 if node in once else count
                forward[node.name] += times
                if piece is stage.body or (plan.joint and piece is stage.after):
                    backward[node.name] += times
    return forward, backward


#: Conversions of a unit of weights.
UNIT_KINDS = ("start_gather", "wait_gather", "sum_gradients")


def summed(forms: Iterable[Any]) -> Any:
    """The sum of closed forms, multiplied out."""
    total = sympy.expand(sum(forms))
    return int(total) if total.is_Integer else total
