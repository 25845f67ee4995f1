"""A pipeline between processes: this rank's stages, what carries values to others, and a step.

Both ends of a transfer post it at the same place of one order of all actions
(`autoshard.schedule.steps`), receives ahead of use. What is sent is described once for every shape
of the inputs: a header that says types, shapes, and what needs gradients goes ahead of it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autoshard.mesh import SubMesh
from autoshard.outline import draws
from autoshard.pipeline import joined, plan_of, split_inputs
from autoshard.program import Program
from autoshard.runtime import rng
from autoshard.runtime.pipeline import Each, Runner
from autoshard.runtime.turns import on_one_rank
from autoshard.schedule import Action, Transfer, steps
from autoshard.timeline import Event, Timeline

#: How many sends may be under way for each rank of pp before the oldest is waited for.
UNDER_WAY = 2
#: Tensors of one route that have tags of their own.
TAGS = 64


def along_pipeline(mesh: SubMesh, rank: int) -> list[int]:
    """The ranks that differ from one only in their position along pp, by position."""
    own = mesh.mesh.coordinate(rank)
    return [mesh.mesh.rank({**own, "pp": p}) for p in range(mesh.mesh.size("pp"))]


class Wire:
    """Carries values between the stages of a rank and those of others, over one process group."""

    def __init__(self, group: Any, place: tuple[int, ...], position: int, device: torch.device):
        self.group, self.place, self.here, self.device = group, place, position, device
        self.ranks = dist.get_process_group_ranks(group)
        self.headers: dict[Any, list[Any]] = {}
        self.signatures: list[Any] = []  # of every micro-batch, what the shapes depend on
        self.outbox: dict[Any, list[torch.Tensor]] = {}
        self.inbox: dict[Any, tuple[list[Any], list[Any]]] = {}
        self.sent: list[tuple[Any, torch.Tensor]] = []

    def begin(self, signatures: list[Any]) -> None:
        """Begin a step; nothing of an earlier one that failed is left."""
        self.signatures = signatures
        self.outbox.clear()
        self.inbox.clear()

    def put(self, source: int, target: int, turn: int, back: bool, values: list[Each]) -> None:
        key = source, target, turn, back
        given = [x for (x,) in values]
        if self.place[source] == self.place[target]:
            self.inbox[key] = [_cut_off(x) for x in given], []
        else:
            if not back:
                self.headers[key] = [_described(x) for x in given]
            self.outbox[key] = [x.detach() for x in given if isinstance(x, torch.Tensor)]

    def take(self, source: int, target: int, turn: int, back: bool) -> list[Each]:
        values, works = self.inbox.pop((source, target, turn, back))
        for work in works:
            work.wait()
        return [[x] for x in values]

    def post(self, transfer: Transfer) -> None:
        """Set a transfer out, at this end."""
        made, back = transfer.of, transfer.of.kind != "F"
        route = (transfer.to, made.stage) if back else (made.stage, transfer.to)
        key = *route, made.microbatch, back
        other = self.ranks[self.place[transfer.to if transfer.sends else made.stage]]
        tag = (made.microbatch * len(self.place) + made.stage) * len(self.place) + transfer.to
        if transfer.sends:
            self._send(key, other, tag * TAGS)
        else:
            self._receive(key, other, tag * TAGS)

    def _send(self, key: Any, other: int, tag: int) -> None:
        values = self.outbox.pop(key, [])
        if not key[3] and self._is_new(key, header := self.headers.pop(key)):
            dist.send_object_list([header], other, group=self.group, device=self.device)
        for i, x in enumerate(values):
            x = x.contiguous()
            self.sent.append((dist.isend(x, other, self.group, tag + i), x))
        while len(self.sent) > UNDER_WAY * len(self.ranks) * max(len(values), 1):
            self.sent.pop(0)[0].wait()

    def _receive(self, key: Any, other: int, tag: int) -> None:
        source, target, turn, back = key
        known = self.headers.get((source, target, self.signatures[turn]))
        if back:
            assert known is not None
            known = [each for each in known if each[0] == "tensor" and each[3]]
        elif known is None or any(each[0] != "tensor" for each in known):
            got: list[Any] = [None]
            dist.recv_object_list(got, other, group=self.group, device=self.device)
            self._is_new(key, known := got[0])
        values, works = list[Any](), list[Any]()
        at = 0
        for kind, what, dtype, grad in known:
            if kind != "tensor":
                values.append(what)
                continue
            x = torch.empty(what, dtype=dtype, device=self.device)
            works.append(dist.irecv(x, other, self.group, tag + at))
            values.append(x.requires_grad_(grad and not back))
            at += 1
        if values:
            self.inbox[key] = values, works

    def _is_new(self, key: Any, header: list[Any]) -> bool:
        """Take note of what is sent; whether the other end cannot know it."""
        source, target, turn, _ = key
        about = source, target, self.signatures[turn]
        new = about not in self.headers or any(each[0] != "tensor" for each in header)
        self.headers[about] = header
        return new

    def finish(self) -> None:
        """All that was sent has left."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


def _cut_off(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def _described(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return "tensor", tuple(x.shape), x.dtype, x.requires_grad
    return "object", x, None, False


class OneRank:
    """Runs graphs on this process's rank."""

    ranks = 1

    def __init__(self, module: Any, lines: dict[int, Any], for_loss: bool):
        self.module, self.lines, self.for_loss = module, lines, for_loss
        self.syncing = True

    def body(self, stage: int, arguments: list[list[Any]]) -> list[Any]:
        with self.module._gathering(own_loss=self.for_loss):
            return [self.lines[stage].body(*arguments[0])]

    def node(self, node: fx.Node, envs: list[dict[fx.Node, Any]]) -> list[Any]:
        return on_one_rank(node, envs)

    def graphs(self, stage: int) -> tuple[fx.Graph, fx.Graph]:
        return self.lines[stage].before, self.lines[stage].after

    @contextlib.contextmanager
    def last(self, stage: int) -> Iterator[None]:
        """Gradients of a stage are reduced: this is the last backward that adds to them."""
        self.module.set_syncing(self.syncing, stage)
        try:
            yield
        finally:
            self.module.set_syncing(False)


class Line:
    """One graph of one mode on this rank, in stages."""

    def __init__(self, module: Any, program: Program, lines: dict[int, Any], for_loss: bool):
        self.module, self.program, self.for_loss = module, program, for_loss
        self.plan, self.pipeline = plan_of(program, for_loss), program.pipeline
        self.position = program.mesh.stage(module.rank_index)
        self.engine = OneRank(module, lines, for_loss)
        own = self.pipeline.of_position(self.position)
        clock = functools.partial(_now, module._device)
        self.runner = Runner(self.plan, own, self.engine, module.wire, clock)
        self.random = any(draws(n) for s in self.plan.stages for n in s.body.graph.nodes)
        self._orders: dict[int, tuple[bool, list[tuple[Action | Transfer, bool]]]] = {}
        #: of the last run: actions, when each began and when it ended
        self.spans: list[tuple[Action, Any, Any]] = []

    def order(self, count: int) -> tuple[bool, list[tuple[Action | Transfer, bool]]]:
        """Whether backward is in two parts, and what this rank does; of every action, whether no
        backward of its stage follows."""
        if count not in self._orders:
            made = self.pipeline.scheduled(count)
            mine = list(steps(made, self.plan.edges)[self.position])
            if not self.for_loss:
                mine = [s for s in mine if (s.of if isinstance(s, Transfer) else s).kind == "F"]
            last = {s.stage: at for at, s in enumerate(mine) if isinstance(s, Action)}
            found = [
                (s, isinstance(s, Action) and last[s.stage] == at) for at, s in enumerate(mine)
            ]
            self._orders[count] = made.splits, found
        return self._orders[count]

    def run(self, inputs: dict[str, Any], count: int, syncing: bool) -> dict[str, Any]:
        """All micro-batches through this rank's stages; the results made here, by name."""
        module, wire = self.module, self.module.wire
        parts = split_inputs(self.program, inputs, count)
        wire.begin([(self.for_loss, *(_shape(x) for x in part.values())) for part in parts])
        seed = rng.number() if self.random else None
        grad = self.for_loss
        self.engine.syncing = syncing
        module.set_syncing(False)
        splits, order = self.order(count)
        self.spans = []
        try:
            held = [module.held_tensors()]
            self.runner.begin(held, [[part] for part in parts], seed, grad)
            del held
            for step, last in order:
                if isinstance(step, Transfer):
                    wire.post(step)
                    continue
                self.runner.run(step, last, splits)
                self.spans.append((step, self.runner.began, self.runner.clock()))
            found = self.runner.end()
            wire.finish()
        finally:
            module.set_syncing(syncing)
            module._store.end_step()
        return {
            name: joined(self.program, name, [x for (x,) in by_turn])
            if not self.for_loss
            else by_turn[0][0]
            for name, by_turn in found.items()
        }

    def timeline(self) -> Timeline:
        """When the ranks along pp ran what in the last run; all of them call it, and wait. Times
        are seconds from the first begin; clocks of other hosts are taken to agree."""
        ends = [(str(a), *_seconds(begin, end, self.spans[0][1])) for a, begin, end in self.spans]
        wire = self.module.wire
        told: list[Any] = [None] * len(wire.ranks)
        dist.all_gather_object(told, ends, group=wire.group)
        first = min(begin for of_rank in told for _, begin, _ in of_rank)
        events = []
        for rank, of_rank in enumerate(told):
            for text, begin, end in of_rank:
                a = Action.parse(text)
                about = a.stage, a.microbatch, begin - first, end - first
                events.append(Event(rank, a.kind, text, *about))
        return Timeline(tuple(events), len(told), self.pipeline.schedule, "measured")


def _shape(x: Any) -> Any:
    return tuple(x.shape) if isinstance(x, torch.Tensor) else x


def _now(device: torch.device) -> Any:
    """The time; on a GPU beside it an event that will know when the work so far is done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return time.perf_counter(), event


def _seconds(begin: Any, end: Any, first: Any) -> tuple[float, float]:
    """When an action began and ended: on a GPU by the device's time since the first one did."""
    if isinstance(begin, float):
        return begin, end
    end[1].synchronize()
    origin, event = first
    return (
        origin + event.elapsed_time(begin[1]) / 1000,
        origin + event.elapsed_time(end[1]) / 1000,
    )
