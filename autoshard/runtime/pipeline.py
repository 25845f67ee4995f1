"""The stages of one position along pp, run on micro-batches in the order of a schedule.

A `Runner` knows nothing of processes: it runs actions on the ranks of this process (one of a live
mesh; all of a stage where `verify` runs every rank in one process), takes what earlier stages have
handed over, and hands over what it makes. A `Wire` carries that between processes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from autoshard.pipeline import Piece, Plan
from autoshard.runtime import rng, turns
from autoshard.runtime.split import Queue
from autoshard.schedule import Action

#: The values of one name, a tensor (or number) for each rank of this process.
Each = list[Any]


class Carrier(Protocol):
    """What brings values from stage to stage. ``back``: gradients of what came that way."""

    def put(self, source: int, target: int, turn: int, back: bool, values: list[Each]) -> None:
        """Hand values over, in the order of the route."""

    def take(self, source: int, target: int, turn: int, back: bool) -> list[Each]:
        """What was handed over, waiting for it where it must be waited for."""


class Engine(Protocol):
    """How this process runs graphs on its ranks."""

    ranks: int

    def body(self, stage: int, arguments: list[list[Any]]) -> list[Sequence[Any]]:
        """Run a stage on ``arguments[rank]``; the results of each rank."""

    def node(self, node: fx.Node, envs: list[dict[fx.Node, Any]]) -> list[Any]:
        """Run one node of a graph that runs in lockstep over micro-batches."""

    def graphs(self, stage: int) -> tuple[fx.Graph, fx.Graph]:
        """What a stage runs before and after all micro-batches."""

    def last(self, stage: int) -> contextlib.AbstractContextManager[None]:
        """Meanwhile the last backward of a stage runs in this step."""


@dataclass
class Alive:
    """One stage in one micro-batch, between its forward and its backward. ``received``: what came
    and needs gradients; ``edges``: where backward starts, by name; ``ones``: the gradient of what a
    micro-batch adds to the loss, where it is made here; ``queue``: what is left for the gradients
    of weights."""

    received: dict[int, list[Each]]
    edges: dict[str, list[Any]]
    ones: Each | None
    queue: Queue | None


@dataclass
class Step:
    """One run of all micro-batches. ``held``: by rank, the tensors of placeholders; ``inputs``: by
    micro-batch and rank, those of inputs."""

    held: list[dict[str, Any]]
    inputs: list[list[dict[str, Any]]]
    seed: int | None
    grad: bool
    early: dict[str, Each] = field(default_factory=dict)
    values: dict[tuple[str, int], Each] = field(default_factory=dict)
    alive: dict[tuple[int, int], Alive] = field(default_factory=dict)
    grads: dict[tuple[int, int], dict[str, Each]] = field(default_factory=dict)
    late: dict[int, dict[str, list[Each]]] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        return len(self.inputs)


class Runner:
    """The stages of one position along pp in one plan."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[int],
        engine: Engine,
        carrier: Carrier,
        clock: Callable[[], Any] = time.perf_counter,
    ):
        self.plan, self.own, self.engine, self.carrier = plan, tuple(stages), engine, carrier
        self.step: Step | None = None
        self.clock = clock
        self.began: Any = None  # when the last action had all it needs

    # --- a step ---

    def begin(
        self,
        held: list[dict[str, Any]],
        inputs: list[list[dict[str, Any]]],
        seed: int | None,
        grad: bool,
    ) -> None:
        """Begin a step; ``seed``: of its random numbers, None where there are none."""
        self.step = Step(held, inputs, seed, grad)
        for stage in self.own:
            self._before(stage)

    def run(self, action: Action, last: bool = False, splits: bool = False) -> None:
        """Run one action; ``last``: no backward of its stage is to come in this step; ``splits``:
        backward is in two parts."""
        stage, turn = action.stage, action.microbatch
        with self._at(stage, turn):
            if action.kind == "F":
                self._forward(stage, turn, splits)
            else:
                with self.engine.last(stage) if last else contextlib.nullcontext():
                    self._backward(stage, turn, action.kind)

    def end(self) -> dict[str, list[Each]]:
        """What the graph gives that is made here, by name, in every micro-batch."""
        step, found = self._step, dict[str, list[Each]]()
        for stage in self.own:
            if stage in step.late:
                found |= step.late[stage]
                continue
            with torch.no_grad(), self._at(stage, 0):
                found |= self._after(stage)
        ranks, every = range(self.engine.ranks), range(step.turns)
        for name, at in self.plan.made.items():
            if name not in found and at in self.own:
                found[name] = [[self._value(name, turn, r) for r in ranks] for turn in every]
        self.step = None
        return found

    def drop(self) -> None:
        """Keep nothing of a step that did not come to its end."""
        self.step = None

    @property
    def _step(self) -> Step:
        assert self.step is not None
        return self.step

    @contextlib.contextmanager
    def _at(self, stage: int, turn: int) -> Iterator[None]:
        """Meanwhile this process is at one micro-batch, with random numbers of its own."""
        turns.turn = turn
        seed = self._step.seed
        try:
            with rng.stream(seed, stage) if seed is not None else contextlib.nullcontext():
                yield
        finally:
            turns.turn = 0

    # --- what all micro-batches make together ---

    def _before(self, stage: int) -> None:
        piece = self.plan.stages[stage].before
        if not piece.gives:
            return
        graph, _ = self.engine.graphs(stage)
        with torch.no_grad():
            results = self._in_lockstep(graph, piece)
        for at, name in enumerate(piece.gives):
            self._step.early[name] = [of_rank[at] for of_rank in results[0]]

    def _after(self, stage: int) -> dict[str, list[Each]]:
        """Results that are made of all micro-batches, by name, in every one."""
        piece = self.plan.stages[stage].after
        if not piece.gives:
            return {}
        _, graph = self.engine.graphs(stage)
        results = self._in_lockstep(graph, piece)
        return {
            name: [[of_rank[at] for of_rank in of_turn] for of_turn in results]
            for at, name in enumerate(piece.gives)
        }

    def _in_lockstep(self, graph: fx.Graph, piece: Piece) -> list[list[Any]]:
        """``[turn][rank]``: the results of a piece that runs on all micro-batches at once."""
        arguments = [self._arguments(piece, turn) for turn in range(self._step.turns)]
        return turns.in_lockstep(graph, arguments, self.engine.node, self.engine.ranks)

    def _arguments(self, piece: Piece, turn: int) -> list[list[Any]]:
        """``[rank]``: what a piece takes in one micro-batch."""
        return [[self._value(n, turn, r) for n in piece.takes] for r in range(self.engine.ranks)]

    def _join(self, stage: int) -> None:
        """All forwards are done: the loss, and its gradients by what the bodies gave."""
        step = self._step
        if stage in step.late:
            return
        piece = self.plan.stages[stage].after
        with torch.enable_grad():
            found = self._after(stage)
            torch.autograd.backward(found[self.plan.seed][0])
        step.late[stage] = {
            name: [[_detached(x) for x in each] for each in by_turn]
            for name, by_turn in found.items()
        }
        made = self.plan.stages[stage].body.gives
        for name in made:
            for turn in range(step.turns if name in piece.takes else 0):
                each = step.values[name, turn]  # leaves, as is what other stages sent
                if all(map(_needs_grad, each)):
                    self._add(stage, turn, name, [_grad_of(x) for x in each])

    # --- one micro-batch ---

    def _forward(self, stage: int, turn: int, splits: bool) -> None:
        step, what = self._step, self.plan.stages[stage]
        received: dict[int, list[Each]] = {}
        for source, names in what.receives.items():
            received[source] = self.carrier.take(source, stage, turn, back=False)
            for name, each in zip(names, received[source], strict=True):
                step.values[name, turn] = each
        self.began = self.clock()
        arguments = self._arguments(what.body, turn)
        queue = Queue() if splits and step.grad else None
        opened = queue.open() if queue is not None else contextlib.nullcontext()
        with torch.set_grad_enabled(step.grad), opened:
            results = self.engine.body(stage, arguments)
        del arguments
        made = {
            name: [of_rank[at] for of_rank in results] for at, name in enumerate(what.body.gives)
        }
        late = set(what.after.takes)
        for names in what.receives.values():
            for name in names:
                if name not in late:
                    step.values.pop((name, turn))
        for target, names in what.sends.items():
            asked = what.returns[target]
            given = [made[n] if n in asked else [_detached(x) for x in made[n]] for n in names]
            self.carrier.put(stage, target, turn, False, given)
        for name, each in made.items():
            if name in late or name in self.plan.made:
                step.values[name, turn] = [_detached(x) for x in each]
                if self.plan.joint and name in late:
                    for x, y in zip(step.values[name, turn], each, strict=True):
                        x.requires_grad_(_needs_grad(y))
        if step.grad:
            edges = {
                name: [get_gradient_edge(x) for x in each]
                for name, each in made.items()
                if all(map(_needs_grad, each))
            }
            ones = made.get(self.plan.seed)
            if ones is None or self.plan.joint or (self.plan.once and turn):
                ones = None
            else:
                ones = [torch.ones_like(x) for x in ones]
            step.alive[stage, turn] = Alive(received, edges, ones, queue)

    def _backward(self, stage: int, turn: int, kind: str) -> None:
        step, what = self._step, self.plan.stages[stage]
        alive = step.alive[stage, turn]
        if kind == "W":
            self.began = self.clock()
            self._weights(stage, turn)
            return
        if self.plan.joint and self.plan.made[self.plan.results[0]] == stage:
            self._join(stage)
        for target in what.sends:
            names = [n for n in what.returns[target] if n in alive.edges]
            if names:
                grads = self.carrier.take(stage, target, turn, back=True)
                for name, each in zip(names, grads, strict=True):
                    self._add(stage, turn, name, each)
        self.began = self.clock()
        if alive.ones is not None:
            self._add(stage, turn, self.plan.seed, alive.ones)
        found = step.grads.pop((stage, turn), {})
        roots, seeds = list[Any](), list[Any]()
        for name, edges in alive.edges.items():
            if name in found:
                roots += edges
                seeds += found[name]
        alive.edges = {}
        if roots:
            torch.autograd.backward(roots, seeds)
        for source, values in alive.received.items():
            back = [each for each in values if all(map(_needs_grad, each))]
            if back:
                grads = [[_grad_of(x) for x in each] for each in back]
                self.carrier.put(source, stage, turn, True, grads)
        alive.received = {}
        if kind == "B":
            self._weights(stage, turn)

    def _weights(self, stage: int, turn: int) -> None:
        """What is left for the gradients of weights; nothing is then kept of the micro-batch."""
        alive = self._step.alive[stage, turn]
        if alive.queue is not None:
            alive.queue.run()
        del self._step.alive[stage, turn]

    def _add(self, stage: int, turn: int, name: str, grads: Each) -> None:
        known = self._step.grads.setdefault((stage, turn), {})
        if name in known:
            grads = [a + b for a, b in zip(known[name], grads, strict=True)]
        known[name] = grads

    def _value(self, name: str, turn: int, rank: int) -> Any:
        step = self._step
        if (name, turn) in step.values:
            return step.values[name, turn][rank]
        if name in step.early:
            return step.early[name][rank]
        here = step.inputs[turn][rank]
        return here[name] if name in here else step.held[rank][name]


def cut_off(x: Any) -> Any:
    """A value as it is when it has travelled: a leaf, which needs a gradient where it did."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _needs_grad(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _grad_of(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
