"""Weights that a rank holds in part: gathered where they are read, gradients reduced to the part.

A rank's parameters are its shards. A `Unit` of them is gathered in one collective
(`runtime.sections` says how they lie), and their gradients are reduced in one
(`runtime.reductions`).

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
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autoshard.errors import ShardingError, message
from autoshard.mesh import SubMesh
from autoshard.meta import on_device
from autoshard.outline import RECOMPUTE
from autoshard.program import Parameter, Program, Unit
from autoshard.runtime import optimizers, wire
from autoshard.runtime.gather import (
    local_value,
    shard_bounds,
    slice_shape,
)
from autoshard.runtime.reductions import Reductions
from autoshard.runtime.sections import entries, gradient_axes, pack, trainable, unpack

# --- the calls in emitted graphs ---


def start_gather(shards: list[torch.Tensor], link: Any, unit: Any) -> Any:
    """Have the weights of a unit gathered, without waiting for them: they set out when those that
    the graph waits for next have arrived, so that no more than two segments are there at a time.
    ``unit``: a `Weights`."""
    return unit.start()


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
        if torch.is_grad_enabled():
            raise ShardingError(
                message(
                    "backward",
                    "create_graph=True",
                    f"weights {ctx.gathering.unit.name}",
                    "gradients of gathered weights are reduced by collectives without a gradient",
                    "use zero=0 and no param_dtype for gradients of gradients",
                )
            )
        if _asked_for(ctx.device) or ctx.gathering.hooked:
            return None, None, None, *ctx.gathering.reduced(grads)
        ctx.gathering.reduce(grads)
        return (None,) * (3 + len(grads))


@functools.cache
def _witness(device: torch.device) -> tuple[torch.Tensor, Any]:
    """A leaf of no meaning that every `_Read` takes, and the node that accumulates its gradient."""
    with unset_fake_temporarily():
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
        self.unit, self.store = unit, weakref.proxy(store)  # which lives as long as its module
        self.mesh, self.rank = program.mesh, store.rank
        self.entries = entries(unit, program, self.rank)
        self.trainable = trainable(self.entries)
        self.ranks = self.mesh.size(unit.axes)
        self.index = self.mesh.index(self.rank, unit.axes)
        self.numel = sum(e.numel for e in self.entries)
        self.gradient_numel = sum(e.numel for e in self.trainable)
        self.names = [e.parameter.name for e in self.entries]
        #: a single parameter: what arrives is the weight
        self.alone = len(self.entries) == 1 and bool(self.entries[0].shape) and not unit.keep
        self.again = False  # backward reads them as forward did

    def __repr__(self) -> str:
        return f"Weights({self.unit.name!r})"

    def start(self) -> Gathering:
        gathering = Gathering(self, self.store.running)
        gathering.forward.all.append(gathering)
        if not self.unit.keep or any(name in self.store.stale for name in self.names):
            gathering.forward.queue.append(gathering)
        return gathering

    def gather(self, shards: list[torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
        """Flat weights that are on their way, and what to wait for."""
        device = self.store.device or shards[0].device
        stays = self.ranks == 1 or self.alone
        make = torch.empty if stays else wire.scratch.take
        flat = make(self.ranks * self.numel, dtype=self.unit.dtype, device=device)
        pack(self.entries, shards, flat.view(self.ranks, -1)[self.index])
        if self.ranks == 1:
            return flat, []
        return flat, wire.all_gather(flat, self.store.groups[self.unit.axes])

    def wholes(self, flat: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The weights as whole slices, and the one tensor whose views they are."""
        if self.ranks == 1 or self.alone:
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


class Gathering:
    """The weights of a unit in one forward, and in its backward."""

    def __init__(self, weights: Weights, forward: Forward):
        self.weights, self.forward = weights, forward
        self.unit = weights.unit
        self.versions = [s._version for s in self.shards]
        self.saved = False  # backward reads the weights
        self.seen = False  # a second time, a block is computed again in backward
        self.flat: torch.Tensor | None = None  # on their way
        self.works: list[Any] = []
        self.buffer: torch.Tensor | None = None  # here
        self.views: list[torch.Tensor] = []

    @property
    def hooked(self) -> bool:
        """Whether the caller has hooks on parameters, which must see what is accumulated."""
        return any(s._backward_hooks or s._post_accumulate_grad_hooks for s in self.shards)

    @property
    def shards(self) -> list[nn.Parameter]:
        """The parameters; not kept here, as autograd's graph keeps this."""
        return [self.weights.store.shards[name] for name in self.weights.names]

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
        for whole in wholes if self.unit.for_step else ():
            if not whole.untyped_storage().nbytes():
                whole.untyped_storage().resize_(whole.nbytes)
        if any(name in store.stale for name in weights.names):
            targets = [store.written(name) for name in weights.names]
            own = weights.index if store.are_views(weights.names) else None
            unpack(weights.entries, flat := self._arrived(), weights.ranks, targets, own)
            self._count(-flat.nbytes)
            if weights.ranks > 1:
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
        asked = self._of_trainable(grads)
        there = [grad is not None for grad in asked]
        parts = self.forward.store.reductions.at_once(self, asked)
        found = {
            e.key: part
            for e, part, here in zip(self.weights.trainable, parts, there, strict=True)
            if here
        }
        self.close()
        torch.autograd.Variable._execution_engine.queue_callback(self.forward.finish)
        return [found.get(e.key) for e in self.weights.entries]

    def reduce(self, grads: Sequence[torch.Tensor | None]) -> None:
        self.close()
        self.forward.store.reductions.add(self, self._of_trainable(grads))

    def _of_trainable(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the weights that have one, in the order in which they lie in a section."""
        by_key = {e.key: g for e, g in zip(self.weights.entries, grads, strict=True)}
        return [by_key[e.key] for e in self.weights.trainable]


@dataclass
class _Note:
    """In place of a weight that autograd saves: whose it is, and which view."""

    gathering: Gathering
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


#: Behind the last segment.
_END = 2**31


class Forward:
    """One forward, and the backwards through it: the units in the order in which they were read."""

    def __init__(self, store: Store, own_loss: bool):
        self.store = weakref.proxy(store)
        self.own_loss = own_loss  # then all ranks have gradients for the same weights
        self.all: list[Gathering] = []
        self.order: list[Gathering] = []  # those that backward may come to, as they were read
        self.queue: list[Gathering] = []  # asked for, not yet on their way
        self.live: dict[int, Gathering] = {}  # by the address of their weights
        self.weights: set[int] = set()  # all these addresses
        self._task, self._at = -1, _END  # the backward that runs, and the segment that it is in

    def set_out(self) -> None:
        """Begin to gather what is asked for next."""
        queue, self.queue = self.queue, []
        for gathering in queue:
            if not gathering.seen:
                gathering.start()

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps for a tensor that it saves."""
        # a result that is kept itself would hold the graph that holds it
        if not self.live or not tensor.numel() or tensor.layout is not torch.strided:
            return tensor.detach()
        gathering = self.live.get(tensor.untyped_storage().data_ptr())
        if gathering is None or tensor.dtype != gathering.unit.dtype:
            return tensor.detach()
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
        task = torch._C._current_graph_task_id()
        if task not in (self._task, -1):
            self._task, self._at = task, _END
            # of a part of a backward (`runtime.split`) that reduces no gradients, too
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        if not self.own_loss:
            self._pass_by(here)
        if gathering.buffer is None:
            gathering.unchanged()
            for other in self.order:
                if other.unit.segment > here:
                    other.close()
            gathering.open()
        if here < self._at:
            self._at = here
            for other in self._next(here):
                other.start()

    def _next(self, before: int) -> list[Gathering]:
        """What backward reads next, when it comes from a segment."""
        earlier = [
            g
            for g in self.order
            if g.unit.segment < before and (g.saved or g.weights.again) and not g.unit.keep
        ]
        ahead = max((g.unit.segment for g in earlier), default=-1)
        return [g for g in earlier if g.unit.segment == ahead]

    def _pass_by(self, until: int) -> None:
        """Gather what this rank's backward leaves out, down to a segment, and let it go. A loss of
        the caller's own may read it on another rank, and all gather in one order."""
        while left := [g for g in self._next(self._at) if g.unit.segment > until]:
            self._at = left[0].unit.segment
            for gathering in left:
                gathering.start()
            for gathering in self._next(self._at):
                gathering.start()
            for gathering in left:
                gathering.drop()

    def finish(self) -> None:
        """Backward is over."""
        if not self.own_loss and self._task == torch._C._current_graph_task_id():
            self._pass_by(-1)
        for gathering in self.all:
            gathering.drop()


class Store:
    """The weights of one rank's module, in whichever graph reads them.

    ``kept``: whole slices by parameter name, of units that are kept; ``stale``: those that are out
    of date; ``groups``, ``sums``: process groups by mesh axes, of weights and of gradients, which
    are in an order each, and not in one.
    """

    def __init__(self, program: Program, rank: int, device: torch.device | None):
        self.rank, self.device = rank, device
        self.groups: dict[tuple[str, ...], Any] = {}
        self.sums: dict[tuple[str, ...], Any] = {}
        self.kept: dict[str, torch.Tensor] = {}
        self.stale: set[str] = set()
        self.shards: dict[str, nn.Parameter] = {}
        self.aliases: set[str] = set()  # parameters that are views of what is kept
        self.running = Forward(self, own_loss=False)
        self.reductions = Reductions(self)
        self.syncing = True
        #: whether weights are freed between forward and backward
        self.reshards = bool(program.graph.find_nodes(op="call_function", target=release))
        self.gradient_axes = gradient_axes(program, rank)
        self._seen: list[int] = []
        optimizers.stores.add(self)
        self.gathered = self.peak = 0  # bytes of gathered weights, now and at most
        self.offload = program.offload
        self.in_units = {program.values[key].name for key in program.in_units}
        self.for_step = {
            program.values[key].name
            for unit in program.units.values()
            if unit.for_step
            for key in unit.keys
        }
        self.dtype = {
            program.values[key].name: unit.dtype
            for unit in program.units.values()
            if unit.keep
            for key in unit.keys
        }

    def hold(
        self,
        parameter: Parameter,
        mesh: SubMesh,
        value_of: Callable[[Parameter], torch.Tensor] | None,
    ) -> nn.Parameter:
        """This rank's part of a parameter. ``value_of``: gives values, where these are on meta;
        without any, a module that runs holds NaN."""
        name, working = parameter.name, self.dtype.get(parameter.name)
        if working == parameter.value.dtype and not self.offload and name not in self.for_step:
            unshared = replace(parameter, zero=())
            self.kept[name] = self._here(local_value(unshared, mesh, self.rank, value_of))
            self.aliases.add(name)
            own = self.kept[name][slice(*shard_bounds(parameter, mesh, self.rank))]
        else:
            own = local_value(parameter, mesh, self.rank, value_of)
            if working is not None:
                shape, device = slice_shape(parameter, mesh, self.rank), self.device or own.device
                self.kept[name] = torch.empty(shape, dtype=working, device=device)
                self.stale.add(name)
                self._empty([name] if name in self.for_step else [])
            own = self._on_host(own) if self.offload else self._here(own)
        shard = nn.Parameter(own, parameter.trainable)
        if name in self.in_units:
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

    def complete(self, stage: int, weights: Iterable[Weights]) -> None:
        """Reduce what is accumulated of a stage's units, where its last backward has added to
        none."""
        units = [w for w in weights if w.unit.stage == stage and w.trainable]
        forward = Forward(self, own_loss=True)
        self.reductions.complete([Gathering(w, forward) for w in reversed(units)])

    def end_step(self) -> None:
        """All micro-batches are done: weights that were kept for them go."""
        self._empty(self.for_step & self.kept.keys())
        self.stale |= self.for_step & self.kept.keys()

    def _empty(self, names: Iterable[str]) -> None:
        for name in names:
            self.kept[name].untyped_storage().resize_(0)

    def settle(self) -> None:
        """All parameters are held: what changes from now on makes kept weights out of date."""
        self._seen = self._changes()

    def _changes(self) -> list[int]:
        """What differs after an optimizer's step, also of one that writes to ``.data``."""
        found = [optimizers.taken]
        for shard in self.shards.values():
            found += [shard._version, shard.data_ptr()]
        return found

    def are_views(self, names: list[str]) -> bool:
        """Whether parameters still are views of what is kept, and their own rows there up to
        date: ``p.data = x`` makes another tensor of one."""
        return self.aliases.issuperset(names) and all(
            self.shards[n].untyped_storage().data_ptr() == self.kept[n].untyped_storage().data_ptr()
            for n in names
        )

    def written(self, name: str) -> torch.Tensor:
        """Kept weights, to be written. A parameter that is a view of them counts its own changes
        and not this one."""
        return self.kept[name].data if name in self.aliases else self.kept[name]

    @contextlib.contextmanager
    def forward(self, own_loss: bool) -> Iterator[None]:
        """Meanwhile a graph runs. ``own_loss``: its result is the loss itself."""
        if self.kept and self._seen != (seen := self._changes()):
            self._seen = seen
            self.stale.update(self.kept)
        for gathering in self.running.all:
            gathering.drop()  # of a forward whose backward is still to come, if it comes
        self.running = Forward(self, own_loss)
        if not self.syncing and not own_loss and torch.is_grad_enabled():
            self.reductions.open_question = True
        if not torch.is_grad_enabled():
            yield
            for gathering in self.running.all:
                gathering.drop()
            # the optimizer may write to what is still being read
            if self.offload and torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
            return
        if not self.reshards:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self.running.pack, self.running.unpack):
            yield


def weights_of(program: Program, store: Store) -> dict[str, Weights]:
    """What a program gathers together, by name, on the rank of the store."""
    here = program.pipeline.of_position(program.mesh.stage(store.rank)) if program.pipeline else [0]
    found = {
        name: Weights(unit, store, program)
        for name, unit in program.units.items()
        if unit.stage in here
    }
    for node in program.graph.find_nodes(op="call_function", target=wait_gather):
        if node.args[2] in found:
            found[node.args[2]].again = RECOMPUTE in node.meta
    return found
