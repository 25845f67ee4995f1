"""A pipeline between processes: this rank's stages, what carries values to others, and a step.

Both ends of a transfer post it at the same place of one order of all actions
(`autoshard.schedule.steps`), receives ahead of use. What is sent is described once for every shape
of the inputs: a header that says types, shapes, and what may need gradients goes ahead of it.

A receive that is posted for other numbers than are sent would end the process, or be half filled:
the first time that inputs have some shapes, the ranks that are to have the same inputs wait for
each other (`failures.agree`), and tags tell tensors of different shapes apart.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autoshard.errors import MeshError, ShardingError, message
from autoshard.mesh import SubMesh
from autoshard.outline import draws
from autoshard.pipeline import joined, plan_of, split_inputs
from autoshard.program import Program
from autoshard.runtime import failures, rng
from autoshard.runtime.pipeline import Each, Runner, cut_off
from autoshard.runtime.process_groups import Groups, timeout_of
from autoshard.runtime.turns import on_one_rank
from autoshard.schedule import Action, Transfer, steps
from autoshard.timeline import Event, Timeline

#: How many transfers like the last one may be under way before the oldest is waited for.
UNDER_WAY = 4


def along_pipeline(mesh: SubMesh, rank: int) -> list[int]:
    """The ranks that differ from one only in their position along pp, by position."""
    own = mesh.mesh.coordinate(rank)
    return [mesh.mesh.rank({**own, "pp": p}) for p in range(mesh.mesh.size("pp"))]


_numbers = itertools.count()


class Wire:
    """Carries values between the stages of a rank and those of others.

    Over several process groups of the same ranks: NCCL may do all that a rank sends and receives
    in one group in the order posted, and what is not made yet would hold up the rest. To higher
    positions along pp and to lower ones, and to and from either neighbour, are four.
    """

    def __init__(self, made: Groups, ranks: tuple[int, ...], place: tuple[int, ...], position: int):
        self.made, self.place, self.here, self.device = made, place, position, made.device
        self.lanes = [made.of(ranks, f"stages, lane {lane}") for lane in range(4)]
        self.group, self.ranks = self.lanes[0], ranks  # the group of what all of them do together
        self._met: set[tuple[int, int]] = set()  # pairs of positions that are connected
        self.running = False
        self.last: Any = None  # on a GPU, the event behind the last step
        self.headers: dict[Any, list[Any]] = {}
        self.signatures: list[Any] = []  # of every micro-batch, what the shapes depend on
        self.outbox: dict[Any, list[torch.Tensor]] = {}
        self.inbox: dict[Any, tuple[list[Any], list[Any]]] = {}
        self.sent: list[tuple[Any, torch.Tensor]] = []
        #: by source and target, for each value whether its gradient comes back
        self.back: dict[tuple[int, int], tuple[bool, ...]] = {}
        #: by source and target, what has sizes that depend on the data
        self.varying: set[tuple[int, int]] = set()
        self.asked: dict[Any, list[bool]] = {}  # of what comes back, what has a reader
        #: by source, target and micro-batch, the header of what was sent
        self.told: dict[tuple[int, int, int], list[Any]] = {}
        #: see `failures.agree`: by which number this is known; of the step that runs
        self.number, self.timeout = next(_numbers), timeout_of(made.device)
        self.agreed: set[Any] = set()
        self.agreements = 0
        self.shapes: dict[str, list[int]] = {}

    def meet(self, edges: Iterable[tuple[int, int]]) -> None:
        """Connect all pairs of ranks with an edge between their stages, in one order: NCCL does so
        when two ranks first send, and both wait for it. In the order of a step, ranks could wait
        for each other in a circle."""
        pairs = {(self.place[a], self.place[b]) for a, b in edges}
        pairs = {(min(pair), max(pair)) for pair in pairs if len({*pair}) == 2} - self._met
        self._met |= pairs
        for low, high in sorted(pair for pair in pairs if self.here in pair):
            number = torch.zeros(1, device=self.device)
            for source, target in ((low, high), (high, low)):
                if self.here == source:
                    dist.send(number, self.ranks[target], self.lane(source, target))
                else:
                    dist.recv(number, self.ranks[source], self.lane(source, target))

    def stands(self) -> bool:
        """Whether a step runs, or a GPU still has some of it to do. Called by another thread."""
        return self.running or (self.last is not None and not self.last.query())

    def lane(self, source: int, target: int) -> Any:
        """The group over which one position along pp sends to another."""
        return self.lanes[2 * (source > target) + min(source, target) % 2]

    def begin(self, signatures: list[Any], back: dict[tuple[int, int], tuple[bool, ...]]) -> None:
        """Begin a step. Raises MeshError behind one that failed. ``signatures``: of every
        micro-batch what shapes depend on; ``back``: by stages that send something to another,
        whether gradients of each value come back."""
        if self.made.broken:
            raise MeshError(
                message(
                    "a step in stages",
                    "transfers along pp",
                    "an earlier step ended with an error half way through",
                    "what was posted then would be taken for what is sent now",
                    "start all ranks again, and load the last checkpoint",
                )
            )
        self.signatures, self.back = signatures, back

    def clear(self) -> None:
        """Keep nothing of a step."""
        for left in (self.outbox, self.inbox, self.asked, self.told, self.sent):
            left.clear()

    def put(self, source: int, target: int, turn: int, back: bool, values: list[Each]) -> None:
        key = source, target, turn, back
        given = [x for (x,) in values]
        if self.place[source] == self.place[target]:
            self.inbox[key] = [cut_off(x) for x in given], []
        else:
            if not back:
                wanted = self.back[source, target]
                header = [_described(x, w) for x, w in zip(given, wanted, strict=True)]
                self.headers[key] = header
                self.asked[key] = [
                    x.requires_grad for x, (*_, w) in zip(given, header, strict=True) if w
                ]
            self.outbox[key] = [x.detach() for x in given if isinstance(x, torch.Tensor)]

    def take(self, source: int, target: int, turn: int, back: bool) -> list[Each]:
        values, works = self.inbox.pop((source, target, turn, back))
        for work in works:
            work.wait()
        if back and (asked := self.asked.pop((source, target, turn, False), None)) is not None:
            values = list(itertools.compress(values, asked))
        return [[x] for x in values]

    def post(self, transfer: Transfer) -> None:
        """Set a transfer out, at this end."""
        made, back = transfer.of, transfer.of.kind != "F"
        route = (transfer.to, made.stage) if back else (made.stage, transfer.to)
        key = *route, made.microbatch, back
        source, target = self.place[made.stage], self.place[transfer.to]
        group = self.lane(source, target)
        if transfer.sends:
            self._send(key, self.ranks[target], group)
        else:
            self._receive(key, self.ranks[source], group)

    def _send(self, key: Any, other: int, group: Any) -> None:
        values = self.outbox.pop(key, [])
        if not key[3]:
            self.told[key[:3]] = header = self.headers.pop(key)
            if self._is_new(key, header):
                dist.send_object_list([header], other, group=group, device=self.device)
        for i, x in enumerate(values):
            x = x.contiguous()
            self.sent.append((dist.isend(x, other, group, _tag(key, i, x)), x))
        while len(self.sent) > UNDER_WAY * max(len(values), 1):
            self.sent.pop(0)[0].wait()

    def _receive(self, key: Any, other: int, group: Any) -> None:
        source, target, turn, back = key
        known = self.headers.get((source, target, self.signatures[turn]))
        if back:
            sent = self.told.pop((source, target, turn))
            known = [each for each in sent if each[0] == "tensor" and each[3]]
        elif known is None or self._varies(source, target, known):
            got: list[Any] = [None]
            dist.recv_object_list(got, other, group=group, device=self.device)
            self._is_new(key, known := got[0])
        values, works = list[Any](), list[Any]()
        at = 0
        for kind, what, dtype, grad in known:
            if kind != "tensor":
                values.append(what)
                continue
            x = torch.empty(what, dtype=dtype, device=self.device)
            works.append(dist.irecv(x, other, group, _tag(key, at, x)))
            values.append(x.requires_grad_(grad and not back))
            at += 1
        if values:
            self.inbox[key] = values, works

    def _is_new(self, key: Any, header: list[Any]) -> bool:
        """Take note of what is sent; whether the other end cannot know it."""
        source, target, turn, _ = key
        about = source, target, self.signatures[turn]
        new = about not in self.headers or self._varies(source, target, header)
        self.headers[about] = header
        return new

    def _varies(self, source: int, target: int, header: list[Any]) -> bool:
        """Whether what is sent may be of another kind or size for inputs of the same shapes."""
        return (source, target) in self.varying or any(each[0] != "tensor" for each in header)

    def finish(self) -> None:
        """All that was sent has left, and what nobody took has come."""
        for work, _ in self.sent:
            work.wait()
        for _, works in self.inbox.values():
            for work in works:
                work.wait()


def _described(x: Any, back: bool) -> Any:
    """``back``: whether a gradient comes back of what can have one: also while what it is made of
    is frozen, as the other end is told once."""
    if isinstance(x, torch.Tensor):
        back = back and (x.is_floating_point() or x.is_complex())
        return "tensor", tuple(x.shape), x.dtype, back
    return "object", x, None, False


def _tag(key: Any, at: int, x: torch.Tensor) -> int:
    """A tag that only the same tensor of a transfer has, of this shape. Two that are under way may
    have one by chance: both ends post them in the same order."""
    return zlib.crc32(repr((key, at, tuple(x.shape), x.dtype)).encode()) >> 1


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
            if self.syncing:
                self.module.complete(stage)
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
        graphs = [piece.graph for s in self.plan.stages for piece in s.pieces]
        self.random = any(draws(n) for graph in graphs for n in graph.nodes)
        self.back = {
            (at, to): tuple(name in stage.returns[to] for name in names)
            for at, stage in enumerate(self.plan.stages)
            for to, names in stage.sends.items()
        }
        module.wire.varying |= {
            (at, to) for at, stage in enumerate(self.plan.stages) for to in stage.varying
        }
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
        mode: Any = self.program.training, self.for_loss
        if self.for_loss:
            self._refuse_inputs_with_gradients(inputs)
            self._refuse_hooks(count)
        failures.agree(module, {self.program.inputs[k]: x for k, x in inputs.items()}, mode)
        parts = split_inputs(self.program, inputs, count)
        mode = *mode, _autocast(module._device)
        wire.begin([(mode, *(_shape(x) for x in part.values())) for part in parts], self.back)
        for load in module._running.loads.values():
            load.begin()
        seed = rng.number() if self.random else None
        grad = self.for_loss
        self.engine.syncing = syncing
        splits, order = self.order(count)
        module.set_syncing(False)
        self.spans = []
        failures.take_back()
        wire.made.broken = True  # until the caller has what it wants of the others
        wire.running = True
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
            module.settle()
            wire.last = _now(module._device) if module._device.type == "cuda" else None
        finally:
            wire.running = False
            self.runner.drop()
            wire.clear()
            module.set_syncing(syncing)
            module._store.end_step()
        return {
            name: joined(self.program, name, [x for (x,) in by_turn])
            if not self.for_loss
            else by_turn[0][0]
            for name, by_turn in found.items()
        }

    def _refuse_inputs_with_gradients(self, inputs: dict[str, Any]) -> None:
        asked = [n for n, x in inputs.items() if isinstance(x, torch.Tensor) and x.requires_grad]
        if asked:
            raise ShardingError(
                message(
                    "train_step",
                    f"inputs {', '.join(self.program.inputs[n] for n in asked)}",
                    "they require gradients",
                    "every rank along pp is given the inputs, and their gradients are not summed",
                    "pass them detached, or use a mesh without pp",
                )
            )

    def _refuse_hooks(self, count: int) -> None:
        """The caller's hooks on parameters would see the gradients of each micro-batch."""
        held, module = self.module.held_parameters(), self.module
        reduced = module._reducer.of if module._reducer is not None else {}
        hooked = []
        for key, parameter in held.items() if count > 1 else ():
            tensor = module.tensor(key)
            after = len(tensor._post_accumulate_grad_hooks or ())
            if tensor._backward_hooks or after > (key in reduced):
                hooked.append(parameter.name)
        if hooked:
            more = f" and {len(hooked) - 5} more" if len(hooked) > 5 else ""
            raise ShardingError(
                message(
                    "train_step",
                    f"hooks on {', '.join(hooked[:5])}{more}",
                    f"{count} micro-batches",
                    "a hook on a gradient would run for every micro-batch, on its summand alone",
                    "change gradients between train_step and the optimizer's step, or pass "
                    "microbatches=1",
                )
            )

    def _ends(self) -> tuple[list[tuple[str, float, float]], float]:
        """When the actions of the last run began and ended, and the time now. A GPU tells how long
        before now: the host only knows when it has asked for the work."""
        now = _now(self.module._device)
        if isinstance(now, float):
            return [(str(a), begin, end) for a, begin, end in self.spans], now
        now.synchronize()
        at = time.perf_counter()

        def seconds(event: Any) -> float:
            return at - event.elapsed_time(now) / 1000

        return [(str(a), seconds(begin), seconds(end)) for a, begin, end in self.spans], at

    def timeline(self) -> Timeline:
        """When the ranks along pp ran what in the last run; all of them call it, and wait. Times
        are seconds from the first begin; clocks of several hosts are set by a barrier."""
        wire = self.module.wire
        told: list[Any] = [None] * len(wire.ranks)
        dist.barrier(wire.group)
        ends, now = self._ends()
        mine = socket.gethostname(), now, ends
        dist.all_gather_object(told, mine, group=wire.group)
        several = len({host for host, *_ in told}) > 1
        told = [
            [(a, b - now * several, e - now * several) for a, b, e in of_rank]
            for _, now, of_rank in told
        ]
        first = min(begin for of_rank in told for _, begin, _ in of_rank)
        events = []
        for rank, of_rank in enumerate(told):
            for text, begin, end in of_rank:
                a = Action.parse(text)
                about = a.stage, a.microbatch, begin - first, end - first
                events.append(Event(rank, a.kind, text, *about))
        return Timeline(tuple(events), len(told), self.pipeline.schedule, "measured")


def _autocast(device: torch.device) -> Any:
    """What decides on the types of results beside those of inputs."""
    on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None


def _shape(x: Any) -> Any:
    return tuple(x.shape) if isinstance(x, torch.Tensor) else x


def _now(device: torch.device) -> Any:
    """The time; on a GPU an event that will know when the work so far is done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
