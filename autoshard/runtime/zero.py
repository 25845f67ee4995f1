"""Weights that a rank holds in part: gathered where they are read, gradients reduced to the part.

A rank's parameters are its shards. A `Unit` of them is gathered in one collective: the shards lie
side by side in a *section*, the sections of all ranks make up the *flat* weights. Backward returns
the same way: gradients are laid out flat, and their sum is scattered by sections.

Emitted graphs call `start_gather` (ahead of use), `wait_gather` (at the first use) and
`release` (after the last). Stages differ in what these do. Where a unit is *kept* (stages 0 to 2)
its weights stay, and are gathered again after parameters have changed. Otherwise (stage 3) they go
at `release`, and what autograd has saved of them is a note of where it lay: backward gathers once
more when the first note of a segment is read, and the segment before it ahead of use.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoshard.errors import ShardingError, message
from autoshard.mesh import SubMesh
from autoshard.meta import on_device
from autoshard.outline import RECOMPUTE
from autoshard.program import Parameter, Program, Unit
from autoshard.runtime import optimizers, wire
from autoshard.runtime.gather import (
    Piece,
    local_value,
    shard_bounds,
    slice_pieces,
    slice_shape,
    view_of,
)

# --- where things lie ---


@dataclass
class Entry:
    """One parameter in a unit. ``shape``: of its slice; ``rows``: of dim 0 in every section (the
    last may be short); ``start``, ``gradient_start``: where it begins in a section of weights, and
    of gradients; ``bounds``: this rank's rows. Of its gradient, ``before`` are pieces of the slice
    summed over further axes before it is scattered, ``after`` the axes summed over afterwards."""

    key: str
    parameter: Parameter
    shape: tuple[int, ...]
    rows: int
    bounds: tuple[int, int]
    before: tuple[Piece, ...]
    after: tuple[str, ...]
    start: int = 0
    gradient_start: int = 0

    @property
    def rest(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def numel(self) -> int:
        return self.rows * self.rest

    @property
    def shard_shape(self) -> tuple[int, ...]:
        low, high = self.bounds
        return (high - low, *self.shape[1:]) if self.shape else ()


def entries(unit: Unit, program: Program, rank: int) -> list[Entry]:
    """The parameters of a unit as one rank sees them, in the order of the unit's keys."""
    mesh, out, start = program.mesh, [], 0
    for key in unit.keys:
        parameter = program.values[key]
        shape = slice_shape(parameter, mesh, rank)
        rows = -(-shape[0] // mesh.size(unit.axes)) if shape else 1
        found = slice_pieces(parameter, mesh, rank) if parameter.trainable else []
        left = {p: tuple(m for m in p[3] if m not in unit.axes) for p, _ in found}
        before = tuple((*p[:3], axes) for p, axes in left.items() if axes and p[2] >= 0)
        after = next((axes for p, axes in left.items() if p[2] < 0), ())
        bounds = shard_bounds(parameter, mesh, rank)
        out.append(Entry(key, parameter, shape, rows, bounds, before, after, start))
        start += out[-1].numel
    at = 0
    for entry in trainable(out):
        entry.gradient_start = at
        at += entry.numel
    return out


def trainable(found: list[Entry]) -> list[Entry]:
    """Those that have a gradient; what is summed over the same further axes lies together."""
    return sorted((e for e in found if e.parameter.trainable), key=lambda e: e.after)


def pack(found: list[Entry], shards: Sequence[torch.Tensor], section: torch.Tensor) -> torch.Tensor:
    """Put the shards into a section. What lies behind short ones is never read."""
    places = [section[e.start : e.start + s.numel()] for e, s in zip(found, shards, strict=True)]
    filled = [(p, s) for p, s in zip(places, shards, strict=True) if s.numel()]
    if filled:
        into, held = zip(*((p, s.detach().reshape(-1)) for p, s in filled), strict=True)
        torch._foreach_copy_(list(into), list(held), non_blocking=True)
    return section


def unpack(
    found: list[Entry],
    flat: torch.Tensor,
    ranks: int,
    into: Sequence[torch.Tensor],
    filled: int | None = None,
) -> None:
    """Fill whole slices from flat weights; ``filled``: the rank whose part is there already."""
    table = flat.view(ranks, -1)
    for entry, whole in zip(found, into, strict=True):
        for first, part, piece in _rows(entry, table, entry.start, whole):
            if filled is None or not first <= filled < first + len(part):
                piece.copy_(part)
            else:
                at = filled - first
                piece[:at].copy_(part[:at])
                piece[at + 1 :].copy_(part[at + 1 :])


def pack_gradients(
    found: list[Entry], grads: Sequence[torch.Tensor | None], flat: torch.Tensor, ranks: int
) -> torch.Tensor:
    """Lay gradients of whole slices out flat, zeros where there is none. ``found``: `trainable`."""
    table = flat.view(ranks, -1)
    for entry, grad in zip(found, grads, strict=True):
        if grad is None:
            at = entry.gradient_start
            table[:, at : at + entry.numel].zero_()
            continue
        for _, part, piece in _rows(entry, table, entry.gradient_start, grad):
            part.copy_(piece)
    return flat


def _rows(
    entry: Entry, table: torch.Tensor, start: int, whole: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Where the rows of a whole slice lie in a table of sections: both as views of one shape, whose
    first dimension is that of ranks; and the first of these."""
    if not whole.numel():
        return
    if not entry.shape:
        yield 0, table[:1, start], whole.unsqueeze(0)
        return
    rows, inner = entry.rows, entry.shape[1:]
    full, short = divmod(entry.shape[0], rows)
    part = table[:, start : start + entry.numel].unflatten(1, (rows, *inner))
    if full:
        yield 0, part[:full], whole[: full * rows].unflatten(0, (full, rows))
    if short:
        yield full, part[full:, :short][:1], whole[full * rows :].unsqueeze(0)


def shard_of(
    entry: Entry, section: torch.Tensor, start: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """The view of a section that is a parameter's shard."""
    return section[start : start + math.prod(shape)].view(shape)


def weights_of(program: Program, store: Store) -> dict[str, Weights]:
    """What a program gathers together, by name, on the rank of the store."""
    found = {name: Weights(unit, store, program) for name, unit in program.units.items()}
    for node in program.graph.find_nodes(op="call_function", target=wait_gather):
        found[node.args[2]].again = RECOMPUTE in node.meta
    return found


def gradient_axes(program: Program, rank: int) -> tuple[str, ...]:
    """The mesh axes over which some gradient of a unit is summed."""
    found = set()
    for unit in program.units.values():
        for entry in trainable(entries(unit, program, rank)):
            found |= {*unit.axes, *entry.after, *(m for piece in entry.before for m in piece[3])}
    return tuple(m for m in program.mesh.axes if m in found)


def groups_of(program: Program, rank: int) -> set[tuple[str, ...]]:
    """Every set of mesh axes that the collectives of the units run over."""
    found = {gradient_axes(program, rank)} if program.units else set()
    for unit in program.units.values():
        found.add(unit.axes)
        for entry in trainable(entries(unit, program, rank)):
            found |= {entry.after, *(piece[3] for piece in entry.before)}
    return found - {()}


# --- the calls in emitted graphs ---


def start_gather(shards: list[torch.Tensor], link: Any, unit: Any) -> Any:
    """Have the weights of a unit gathered, without waiting for them: they set out when those that
    the graph waits for next have arrived, so that no more than two segments are there at a time.
    ``unit``: a `Weights`."""
    return unit.start(shards)


def wait_gather(gathering: Any, link: Any, unit: Any, shards: list[torch.Tensor]) -> Any:
    """The weights of a unit, by the order of its shards. Their gradients are reduced."""
    grad = torch.is_grad_enabled()
    trains = grad and any(s.requires_grad for s in shards)
    witness = _witness(shards[0].device)[0] if trains else None
    return _Read.apply(gathering, grad, witness, *shards)


def release(gathering: Any, link: Any, unit: Any) -> None:
    """The weights have been read for the last time in forward."""
    gathering.release()


CALLS = (start_gather, wait_gather, release)
torch.fx.node._side_effectful_functions.add(release)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathering: Any, grad: bool, witness: Any, *shards: torch.Tensor) -> Any:
        ctx.gathering, ctx.device = gathering, shards[0].device
        ctx.set_materialize_grads(False)
        weights = gathering.read(grad)
        entries = gathering.weights.entries
        frozen = [not e.parameter.trainable for e in entries]
        ctx.mark_non_differentiable(*itertools.compress(weights, frozen))
        return tuple(weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if _asked_for(ctx.device):
            return None, None, None, *ctx.gathering.reduced(grads)
        ctx.gathering.reduce(grads)
        return (None,) * (3 + len(grads))


@functools.cache
def _witness(device: torch.device) -> tuple[torch.Tensor, Any]:
    """A leaf of no meaning that every `_Read` takes, and the node that accumulates its gradient."""
    leaf = torch.zeros((), device=device, requires_grad=True)
    return leaf, leaf.view_as(leaf).grad_fn.next_functions[0][0]


def _asked_for(device: torch.device) -> bool:
    """Whether this backward is of `torch.autograd.grad`, or has ``inputs``: it then runs only what
    leads to these, and nobody asks for the witness."""
    return not torch._C._will_engine_execute_node(_witness(device)[1])


# --- one rank's weights ---


class Weights:
    """A unit on one rank: how to gather its weights and to reduce their gradients."""

    def __init__(self, unit: Unit, store: Store, program: Program):
        self.unit, self.store = unit, store
        self.mesh, self.rank = program.mesh, store.rank
        self.entries = entries(unit, program, self.rank)
        self.trainable = trainable(self.entries)
        self.ranks = self.mesh.size(unit.axes)
        self.index = self.mesh.index(self.rank, unit.axes)
        self.numel = sum(e.numel for e in self.entries)
        self.gradient_numel = sum(e.numel for e in self.trainable)
        self.names = [e.parameter.name for e in self.entries]
        self.again = False  # backward reads them as forward did

    def __repr__(self) -> str:
        return f"Weights({self.unit.name!r})"

    def start(self, shards: list[torch.Tensor]) -> Gathering:
        gathering = Gathering(self, shards, self.store.running)
        if not self.unit.keep or any(name in self.store.stale for name in self.names):
            gathering.forward.queue.append(gathering)
        return gathering

    def gather(self, shards: list[torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
        """Flat weights that are on their way, and what to wait for."""
        device = self.store.device or shards[0].device
        flat = wire.scratch.take(self.ranks * self.numel, self.unit.dtype, device)
        pack(self.entries, shards, flat.view(self.ranks, -1)[self.index])
        if self.ranks == 1:
            return flat, []
        return flat, wire.all_gather(flat, self.store.groups[self.unit.axes])

    def wholes(self, flat: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The weights as whole slices, and the one tensor whose views they are."""
        if self.ranks == 1 or (len(self.entries) == 1 and self.entries[0].shape):
            return flat, self.views(flat)
        buffer = flat.new_empty(sum(math.prod(e.shape) for e in self.entries))
        views = self.views(buffer)
        unpack(self.entries, flat, self.ranks, views)
        return buffer, views

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Whole slices that lie one behind the other in a buffer."""
        out, start = [], 0
        for entry in self.entries:
            size = math.prod(entry.shape)
            out.append(buffer[start : start + size].view(entry.shape))
            start += size
        return out

    def scatter(self, flat: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """Sum flat gradients over the ranks: gives None while a collective runs, at last this
        rank's section."""
        section: torch.Tensor | None = flat
        if self.ranks > 1:
            scattering = wire.reduce_scatter(flat, self.store.groups[self.unit.axes])
            while (section := next(scattering)) is None:
                yield None
            scattering.close()
            wire.scratch.give(flat)
        assert section is not None
        works = []
        for axes, start, stop in self._further_sums():
            group = self.store.groups[axes]
            works.append(dist.all_reduce(section[start:stop], group=group, async_op=True))
        if works:
            yield None
            for work in works:
                work.wait()
        yield section

    def _further_sums(self) -> list[tuple[tuple[str, ...], int, int]]:
        """Runs of a section of gradients that are still to be summed, and over which axes."""
        runs: list[tuple[tuple[str, ...], int, int]] = []
        for entry in self.trainable:
            start, stop = entry.gradient_start, entry.gradient_start + entry.numel
            if runs and runs[-1][0] == entry.after:
                start = runs.pop()[1]
            runs.append((entry.after, start, stop))
        return [run for run in runs if run[0]]


class Gathering:
    """The weights of a unit in one forward, and in its backward."""

    def __init__(self, weights: Weights, shards: list[torch.Tensor], forward: Forward):
        self.weights, self.shards, self.forward = weights, shards, forward
        self.unit = weights.unit
        self.versions = [s._version for s in shards]
        self.saved = False  # backward reads the weights
        self.seen = False  # a second time, a block is computed again in backward
        self.flat: torch.Tensor | None = None  # on their way
        self.works: list[Any] = []
        self.buffer: torch.Tensor | None = None  # here
        self.views: list[torch.Tensor] = []

    def start(self) -> None:
        if self.flat is None and self.buffer is None:
            self.flat, self.works = self.weights.gather(self.shards)
            self._count(self.flat.nbytes)

    def _count(self, size: int) -> None:
        store = self.weights.store
        store.gathered += size
        store.peak = max(store.peak, store.gathered)

    def _arrived(self) -> torch.Tensor:
        self.start()
        flat, works, self.flat, self.works = self.flat, self.works, None, []
        for work in works:
            work.wait()
        assert flat is not None
        return flat

    def read(self, grad: bool) -> list[torch.Tensor]:
        """The weights, for an op of the graph; once more when a block is computed again."""
        again, self.seen = self.seen, True
        if grad and not again:
            self.forward.order.append(self)
        if self.unit.keep:
            weights = self._kept()
            self.forward.set_out()
            return weights
        if again:
            self.forward.reopen(self)
        else:
            self.open()
            self.forward.set_out()
        assert self.buffer is not None
        if grad and not again:
            address = self.buffer.untyped_storage().data_ptr()
            self.forward.live[address] = self
            self.forward.weights.add(address)
        return [v.detach() for v in self.views]

    def _kept(self) -> list[torch.Tensor]:
        store, weights = self.weights.store, self.weights
        wholes = [store.kept[name] for name in weights.names]
        if any(name in store.stale for name in weights.names):
            targets = [store.written(name) for name in weights.names]
            own = weights.index if store.aliases.issuperset(weights.names) else None
            unpack(weights.entries, flat := self._arrived(), weights.ranks, targets, own)
            self._count(-flat.nbytes)
            wire.scratch.give(flat)
            store.stale.difference_update(weights.names)
        return [w.detach() for w in wholes]

    def open(self) -> None:
        if self.buffer is None:
            flat = self._arrived()
            self.buffer, self.views = self.weights.wholes(flat)
            if self.buffer is not flat:
                self._count(self.buffer.nbytes)
                self._count(-flat.nbytes)
                wire.scratch.give(flat)

    def release(self) -> None:
        if self.buffer is not None and not self.unit.keep:
            self.forward.live.pop(self.buffer.untyped_storage().data_ptr(), None)
            self.close()

    def close(self) -> None:
        if self.buffer is not None:
            self._count(-self.buffer.nbytes)
        self.buffer, self.views = None, []

    def drop(self) -> None:
        """Backward is over: what was gathered for it may go."""
        if self.flat is not None:
            self._count(-self._arrived().nbytes)
        self.close()

    def unchanged(self) -> None:
        """Raise where a parameter was written between forward and backward."""
        changed = [
            name
            for name, shard, version in zip(
                self.weights.names, self.shards, self.versions, strict=True
            )
            if shard._version != version
        ]
        if changed:
            raise ShardingError(
                message(
                    "backward",
                    f"parameters {', '.join(changed)}",
                    "they were changed after forward had read them",
                    "backward needs the values that forward had, and would gather the new ones",
                    "call backward before the optimizer's step",
                )
            )

    def reduced(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The shards' gradients, at once."""
        by_key = {e.key: g for e, g in zip(self.weights.entries, grads, strict=True)}
        asked = [by_key[e.key] for e in self.weights.trainable]
        parts = self.forward.store.reductions.at_once(self, asked)
        found = {
            e.key: part
            for e, part in zip(self.weights.trainable, parts, strict=True)
            if by_key[e.key] is not None
        }
        self.close()
        return [found.get(e.key) for e in self.weights.entries]

    def reduce(self, grads: Sequence[torch.Tensor | None]) -> None:
        by_key = {e.key: g for e, g in zip(self.weights.entries, grads, strict=True)}
        self.close()
        self.forward.store.reductions.add(self, [by_key[e.key] for e in self.weights.trainable])


@dataclass
class _Note:
    """In place of a weight that autograd saves: whose it is, and which view."""

    gathering: Gathering
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Forward:
    """One forward, and the backwards through it: the units in the order in which they were read."""

    def __init__(self, store: Store, alone: bool):
        self.store = store
        self.alone = alone  # the loss is the graph's own: ranks have gradients for the same weights
        self.order: list[Gathering] = []
        self.queue: list[Gathering] = []  # asked for, not yet on their way
        self.live: dict[int, Gathering] = {}  # by the address of their weights
        self.weights: set[int] = set()  # all these addresses
        self._at = -1  # the segment that backward is in

    def set_out(self) -> None:
        """Begin to gather what is asked for next."""
        queue, self.queue = self.queue, []
        for gathering in queue:
            if not gathering.seen:
                gathering.start()

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps for a tensor that it saves."""
        if not self.live or not tensor.numel() or tensor.layout is not torch.strided:
            return tensor
        gathering = self.live.get(tensor.untyped_storage().data_ptr())
        if gathering is None or tensor.dtype != gathering.unit.dtype:
            return tensor
        gathering.saved = True
        return _Note(gathering, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, _Note):
            return kept
        self.reopen(kept.gathering)
        assert kept.gathering.buffer is not None
        return kept.gathering.buffer.as_strided(kept.size, kept.stride, kept.offset)

    def reopen(self, gathering: Gathering) -> None:
        """Have weights gathered again in backward, and those that it needs next on their way."""
        here = gathering.unit.segment
        if gathering.buffer is None:
            gathering.unchanged()
            for other in self.order:
                if other.unit.segment > here:
                    other.close()
            gathering.open()
        if here == self._at:
            return
        self._at = here
        earlier = [
            g
            for g in self.order
            if g.unit.segment < here and (g.saved or g.weights.again) and not g.unit.keep
        ]
        ahead = max((g.unit.segment for g in earlier), default=-1)
        for other in earlier:
            if other.unit.segment == ahead:
                other.start()


class Store:
    """The weights of one rank's module, in whichever graph reads them.

    ``kept``: whole slices by parameter name, of units that are kept; ``stale``: those that are out
    of date; ``groups``: process groups by mesh axes.
    """

    def __init__(self, program: Program, rank: int, device: torch.device | None):
        self.rank, self.device = rank, device
        self.groups: dict[tuple[str, ...], Any] = {}
        self.kept: dict[str, torch.Tensor] = {}
        self.stale: set[str] = set()
        self.shards: dict[str, nn.Parameter] = {}
        self.aliases: set[str] = set()  # parameters that are views of what is kept
        self.running = Forward(self, False)
        self.reductions = Reductions(self)
        self.syncing = True
        #: whether weights are freed between forward and backward
        self.reshards = bool(program.graph.find_nodes(op="call_function", target=release))
        self.gradient_axes = gradient_axes(program, rank)
        self._seen: list[int] = []
        self.gathered = self.peak = 0  # bytes of gathered weights, now and at most
        self.dtype = {
            program.values[key].name: unit.dtype
            for unit in program.units.values()
            if unit.keep
            for key in unit.keys
        }

    def hold(
        self, parameter: Parameter, mesh: SubMesh, offload: bool, whole: torch.Tensor | None
    ) -> nn.Parameter:
        """This rank's part of a parameter. ``whole``: its value, where that is on meta; without
        one, a module that runs holds NaN."""
        name, working = parameter.name, self.dtype.get(parameter.name)
        value = parameter.value if whole is None else whole
        if working == value.dtype and not offload:
            unshared = replace(parameter, zero=())
            self.kept[name] = self._here(local_value(unshared, mesh, self.rank, whole))
            self.aliases.add(name)
            own = self.kept[name][slice(*shard_bounds(parameter, mesh, self.rank))]
        else:
            own = local_value(parameter, mesh, self.rank, whole)
            if working is not None:
                shape, device = slice_shape(parameter, mesh, self.rank), self.device or own.device
                self.kept[name] = torch.empty(shape, dtype=working, device=device)
                self.stale.add(name)
            own = self._on_host(own) if offload else self._here(own)
        shard = nn.Parameter(own, parameter.trainable)
        if working is not None or parameter.zero or offload:
            self.shards[name] = shard
        return shard

    def _here(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.device is None else on_device(value, self.device)

    def _on_host(self, value: torch.Tensor) -> torch.Tensor:
        if self.device is None and value.is_meta:
            return value
        host = on_device(value, torch.device("cpu"))
        on_cuda = self.device is not None and self.device.type == "cuda"
        return host.pin_memory() if on_cuda else host

    def settle(self) -> None:
        """All parameters are held: what changes from now on makes kept weights out of date."""
        self._seen = self._changes()

    def _changes(self) -> list[int]:
        """What differs after an optimizer's step, also of one that writes to ``.data``."""
        return [optimizers.taken, *(shard._version for shard in self.shards.values())]

    def written(self, name: str) -> torch.Tensor:
        """Kept weights, to be written. A parameter that is a view of them counts its own changes
        and not this one."""
        return self.kept[name].data if name in self.aliases else self.kept[name]

    @contextlib.contextmanager
    def forward(self, alone: bool) -> Iterator[None]:
        """Meanwhile a graph runs. ``alone``: its result is the loss itself."""
        if self.kept and self._seen != (seen := self._changes()):
            self._seen = seen
            self.stale.update(self.kept)
        for gathering in self.running.order:
            gathering.close()  # of a forward whose backward is still to come, if it comes
        self.running = Forward(self, alone)
        if not self.reshards or not torch.is_grad_enabled():
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self.running.pack, self.running.unpack):
            yield


class Reductions:
    """The gradients of all units, on their way to the shards."""

    def __init__(self, store: Store):
        self.store = store
        self._task = -1  # the backward that is being reduced, by autograd's number of it
        self._pending: deque[Iterator[Any]] = deque()
        self._ready: dict[int, list[torch.Tensor | None]] = {}
        self._forwards: dict[int, tuple[Forward, list[Gathering]]] = {}
        #: whole gradients summed so far without a reduction, and what `.grad` was then
        self._whole: dict[str, tuple[torch.Tensor, torch.Tensor, int, bool]] = {}
        self._late: list[tuple[str, torch.Tensor]] = []
        self._present: set[str] = set()
        self._to_host: list[tuple[nn.Parameter, torch.Tensor]] = []

    def add(self, gathering: Gathering, grads: list[torch.Tensor | None]) -> None:
        """Gradients of a unit are complete; called in backward, in the same order on all ranks."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # an earlier backward that raised may have left things half done
            self._task = task
            self._pending.clear()
            self._ready.clear()
            self._forwards.clear()
            self._late.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        weights = gathering.weights
        if gathering.unit.whole_gradients and not self.store.syncing:
            for entry, grad in zip(weights.trainable, grads, strict=True):
                if grad is not None:
                    self._accumulate(gathering, entry, grad)
            return
        forward = gathering.forward
        if id(forward) not in self._forwards:
            order = [g for g in reversed(forward.order) if g.weights.trainable]
            self._forwards[id(forward)] = forward, order
        self._ready[id(gathering)] = grads
        order = self._forwards[id(forward)][1]
        while order and id(order[0]) in self._ready:
            first = order.pop(0)
            self._launch(first, self._ready.pop(id(first)))

    def _accumulate(self, gathering: Gathering, entry: Entry, grad: torch.Tensor) -> None:
        name, shard = entry.parameter.name, self.store.shards[entry.parameter.name]
        dtype = gathering.unit.reduce_dtype or shard.dtype
        whole = self._accumulated(name)
        if whole is None:
            whole, own = grad.to(dtype, copy=True), shard.grad is None
        else:
            whole, own = whole.add_(grad), self._whole[name][3]
        if own:
            mine = whole[slice(*entry.bounds)] if entry.shape else whole
            shard.grad = mine.to(shard.device, shard.dtype)
        assert shard.grad is not None
        self._whole[name] = whole, shard.grad, shard.grad._version, own

    def accumulated(self) -> list[torch.Tensor]:
        """Whole gradients that wait for a reduction."""
        return [whole for whole, *_ in self._whole.values()]

    def _accumulated(self, name: str) -> torch.Tensor | None:
        """The whole gradient summed so far; None where it was set to zero in the meantime."""
        if name not in self._whole:
            return None
        whole, mark, version, _ = self._whole[name]
        grad = self.store.shards[name].grad
        if grad is mark and grad._version == version:
            return whole
        if grad is not None and bool(grad.any()):
            raise ShardingError(
                message(
                    "no_sync",
                    f"the gradient of {name}",
                    "it was changed before it was reduced",
                    "what no_sync() accumulates is whole, and .grad is this rank's part of it",
                    "change gradients after the backward outside of no_sync()",
                )
            )
        del self._whole[name]
        return None

    @torch.no_grad()
    def _launch(self, gathering: Gathering, grads: list[torch.Tensor | None]) -> None:
        self._advance()
        reduction = self._reduce(gathering, grads)
        if next(reduction, self) is not self:
            self._pending.append(reduction)

    def _advance(self) -> None:
        self._pending = deque(r for r in self._pending if next(r, self) is not self)

    @torch.no_grad()
    def at_once(self, gathering: Gathering, grads: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """The summed gradients of a unit's shards, of these alone."""
        parts = next(p for p in self._sum(gathering, grads) if p is not None)
        shards = [self.store.shards[e.parameter.name] for e in gathering.weights.trainable]
        return [part.to(shard.device) for part, shard in zip(parts, shards, strict=True)]

    def _reduce(self, gathering: Gathering, grads: list[torch.Tensor | None]) -> Iterator[None]:
        """Reduce the gradients of a unit, giving way while a collective runs."""
        weights, store = gathering.weights, self.store
        present = []
        for i, entry in enumerate(weights.trainable):
            name = entry.parameter.name
            whole = self._accumulated(name)
            if whole is not None:
                grads[i] = whole if grads[i] is None else whole.add_(grads[i])
                if self._whole.pop(name)[3]:
                    store.shards[name].grad = None
            present.append(grads[i] is not None)
        summing = self._sum(gathering, grads)
        while (parts := next(summing)) is None:
            yield
        for entry, part, here in zip(weights.trainable, parts, present, strict=True):
            name = entry.parameter.name
            if here:
                self._present.add(name)
                self._take(store.shards[name], part)
            elif not gathering.forward.alone:
                self._late.append((name, part))

    def _sum(
        self, gathering: Gathering, grads: list[torch.Tensor | None]
    ) -> Iterator[list[torch.Tensor] | None]:
        """Sum whole gradients over the ranks: None while a collective runs, then the shards'."""
        weights, store = gathering.weights, self.store
        for i, entry in enumerate(weights.trainable):
            if entry.before:
                grads[i] = self._sum_pieces(gathering, entry, grads[i])
        shards = [store.shards[e.parameter.name] for e in weights.trainable]
        dtype = gathering.unit.reduce_dtype or shards[0].dtype
        device = next((g.device for g in grads if g is not None), store.device)
        flat = wire.scratch.take(weights.ranks * weights.gradient_numel, dtype, device)
        pack_gradients(weights.trainable, grads, flat, weights.ranks)
        grads.clear()
        scattering = weights.scatter(flat)
        del flat
        while (section := next(scattering)) is None:
            yield None
        yield [
            shard_of(e, section, e.gradient_start, e.shard_shape).to(shard.dtype)
            for e, shard in zip(weights.trainable, shards, strict=True)
        ]

    def _sum_pieces(
        self, gathering: Gathering, entry: Entry, grad: torch.Tensor | None
    ) -> torch.Tensor:
        """A whole gradient, parts of which are summed over further axes (of a fused linear of
        which a part is replicated)."""
        device, dtype = self.store.device, gathering.unit.reduce_dtype or gathering.unit.dtype
        if grad is None:
            summed = torch.zeros(entry.shape, dtype=dtype, device=device)
        else:
            summed = grad.to(dtype, copy=True)
        for piece in entry.before:
            part = view_of(summed, piece).contiguous()
            dist.all_reduce(part, group=self.store.groups[piece[3]])
            view_of(summed, piece).copy_(part)
        return summed

    def _take(self, shard: nn.Parameter, part: torch.Tensor) -> None:
        """Add a summed gradient to that of a shard; where that is in host memory, it sets out."""
        if shard.device != part.device:
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            self._to_host.append((shard, host.copy_(part, non_blocking=True)))
        else:
            _give(shard, part)

    @torch.no_grad()
    def _finish(self) -> None:
        outside = [f for f, _ in self._forwards.values() if not f.alone]
        for forward, order in self._forwards.values():
            for gathering in order:
                grads = self._ready.pop(id(gathering), None)
                # a loss of the caller's own may give gradients to other weights on another rank
                if grads is None and (not forward.alone or self._waits(gathering)):
                    grads = [None] * len(gathering.weights.trainable)
                if grads is not None:
                    self._launch(gathering, grads)
            for gathering in forward.order:
                gathering.drop()
        while self._pending:
            self._advance()
        if outside:
            self._add_late(outside[0])
        if self._to_host:
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
            for shard, host in self._to_host:
                _give(shard, host)
        wire.scratch.trim()
        self._to_host.clear()
        self._late.clear()
        self._present.clear()
        self._forwards.clear()
        self._task = -1

    def _waits(self, gathering: Gathering) -> bool:
        """Whether gradients of a unit were accumulated before and not reduced yet."""
        return any(e.parameter.name in self._whole for e in gathering.weights.trainable)

    def _add_late(self, forward: Forward) -> None:
        """Give a shard without a gradient on this rank the one that other ranks have. Only a rank
        that lacks one looks at what the others have: no other waits for the device."""
        store = self.store
        names = sorted({e.parameter.name for g in forward.order for e in g.weights.trainable})
        has = [float(name in self._present) for name in names]
        flags = torch.tensor(has, device=store.device)
        axes = store.gradient_axes
        if axes:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=store.groups[axes])
        if not self._late:
            return
        anyone = {name for name, flag in zip(names, flags.tolist(), strict=True) if flag}
        for name, part in self._late:
            if name in anyone:
                self._take(store.shards[name], part)


def _give(shard: nn.Parameter, part: torch.Tensor) -> None:
    if shard.grad is None:
        shard.grad = part
    else:
        shard.grad.add_(part)
    for hook in (getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(shard)
