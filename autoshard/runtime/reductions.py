"""Gradients of units on their way to the shards: laid out flat, summed, scattered by sections.

A backward completes the units one after the other, in the same order on all ranks. The reduction of
one runs while backward computes the next; it is waited for before that one's begins.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoshard.errors import ShardingError, message
from autoshard.runtime import wire
from autoshard.runtime.gather import view_of
from autoshard.runtime.sections import Entry, pack_gradients, shard_of


class Reductions:
    """The gradients of all units, on their way to the shards."""

    def __init__(self, store: Any):
        self.store = weakref.proxy(store)
        #: whether no_sync accumulated gradients of a caller's own loss, which may differ by rank
        self.open_question = False
        self._task = -1  # the backward that is being reduced, by autograd's number of it
        self.reached = False  # whether the last backward of a pipeline's stage has added to any
        #: whether the last reductions of a backward are waited for when the next one has some, or
        #: the step ends: in a pipeline, gradients for other stages set out before
        self.lags, self._lagging = False, False
        self._pending: deque[Iterator[Any]] = deque()
        self._ready: dict[int, list[torch.Tensor | None]] = {}
        self._forwards: dict[int, tuple[Any, list[Any]]] = {}
        #: whole gradients summed so far without a reduction, and what `.grad` was then
        self._whole: dict[str, tuple[torch.Tensor, torch.Tensor, int, bool]] = {}
        self._late: list[tuple[str, torch.Tensor]] = []
        self._present: set[str] = set()
        self._ones = torch.empty(0)
        self._to_host: list[tuple[nn.Parameter, torch.Tensor]] = []

    def add(self, gathering: Any, grads: list[torch.Tensor | None]) -> None:
        """Gradients of a unit are complete; called in backward, in the same order on all ranks."""
        self.reached = True
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self.settle()  # of a pipeline's last backward
            self._reset()  # an earlier backward that raised may have left things half done
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        weights = gathering.weights
        if gathering.unit.whole_gradients and not self.store.syncing:
            for entry, grad in zip(weights.trainable, grads, strict=True):
                if grad is not None and self.store.shards[entry.parameter.name].requires_grad:
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

    def complete(self, gatherings: list[Any]) -> None:
        """Reduce what was accumulated of these, in order, where the backward that was to do so has
        added to nothing."""
        if self.reached:
            return
        for gathering in gatherings:
            if self._waits(gathering):
                self._launch(gathering, [None] * len(gathering.weights.trainable))
        self._finish()

    def _reset(self) -> None:
        self._task, self._lagging = -1, False
        for left in (self._pending, self._ready, self._forwards, self._late, self._to_host):
            left.clear()
        self._present.clear()

    def _accumulate(self, gathering: Any, entry: Entry, grad: torch.Tensor) -> None:
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

    def refuse_unreduced(self, who: str) -> None:
        """Raise ShardingError while there are gradients that only this rank has summed."""
        names = [n for n in self._whole if self.store.shards[n].grad is self._whole[n][1]]
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ShardingError(
                message(
                    who,
                    f"gradients of {', '.join(names[:5])}{more}",
                    "they were accumulated under no_sync()",
                    "they are this rank's alone until a backward outside of it reduces them",
                    "leave the last backward of a step out of no_sync()",
                )
            )

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
    def _launch(self, gathering: Any, grads: list[torch.Tensor | None]) -> None:
        self._advance()
        reduction = self._reduce(gathering, grads)
        if next(reduction, self) is not self:
            self._pending.append(reduction)

    def _advance(self) -> None:
        self._pending = deque(r for r in self._pending if next(r, self) is not self)

    @torch.no_grad()
    def at_once(self, gathering: Any, grads: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """The summed gradients of a unit's shards, of these alone."""
        parts = next(p for p in self._sum(gathering, grads) if p is not None)
        shards = [self.store.shards[e.parameter.name] for e in gathering.weights.trainable]
        return [part.to(shard.device) for part, shard in zip(parts, shards, strict=True)]

    def _reduce(self, gathering: Any, grads: list[torch.Tensor | None]) -> Iterator[None]:
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
            elif self.open_question or not gathering.forward.own_loss:
                self._late.append((name, part))

    def _sum(
        self, gathering: Any, grads: list[torch.Tensor | None]
    ) -> Iterator[list[torch.Tensor] | None]:
        """Sum whole gradients over the ranks: None while a collective runs, then the shards'."""
        weights, store = gathering.weights, self.store
        for i, entry in enumerate(weights.trainable):
            if entry.before:
                grads[i] = self._sum_pieces(gathering, entry, grads[i])
        shards = [store.shards[e.parameter.name] for e in weights.trainable]
        dtype = gathering.unit.reduce_dtype or shards[0].dtype
        device = next((g.device for g in grads if g is not None), store.device)
        make = wire.scratch.take if weights.ranks > 1 else torch.empty
        flat = make(weights.ranks * weights.gradient_numel, dtype=dtype, device=device)
        pack_gradients(weights.trainable, grads, flat, weights.ranks)
        grads.clear()
        scattering = _scatter(weights, flat)
        del flat
        while (section := next(scattering)) is None:
            yield None
        yield [
            shard_of(e, section, e.gradient_start, e.shard_shape).to(shard.dtype)
            for e, shard in zip(weights.trainable, shards, strict=True)
        ]

    def _sum_pieces(self, gathering: Any, entry: Entry, grad: torch.Tensor | None) -> torch.Tensor:
        """A whole gradient, parts of which are summed over further axes (of a fused linear of
        which a part is replicated)."""
        device, dtype = self.store.device, gathering.unit.reduce_dtype or gathering.unit.dtype
        if grad is None:
            summed = torch.zeros(entry.shape, dtype=dtype, device=device)
        else:
            summed = grad.to(dtype, copy=True)
        for piece in entry.before:
            part = view_of(summed, piece).contiguous()
            dist.all_reduce(part, group=self.store.sums[piece[3]])
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
        outside = [f for f, _ in self._forwards.values() if not f.own_loss]
        asked = bool(outside) or self.open_question
        for forward, order in self._forwards.values():
            for gathering in order:
                grads = self._ready.pop(id(gathering), None)
                # a loss of the caller's own may give gradients to other weights on another rank
                if grads is None and (asked or self._waits(gathering)):
                    grads = [None] * len(gathering.weights.trainable)
                if grads is not None:
                    self._launch(gathering, grads)
            forward.finish()
        if self.lags and not asked:
            self._lagging, self._task = True, -1
            self._ready.clear()
            self._forwards.clear()
            return
        while self._pending:
            self._advance()
        if asked and self._forwards:
            self._add_late(next(iter(self._forwards.values()))[0])
            self.open_question = False
        self._give_all()

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for what a backward has left under way: gradients are then the sums."""
        if self._lagging:
            while self._pending:
                self._advance()
            self._give_all()

    def _give_all(self) -> None:
        if self._to_host:
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
            for shard, host in self._to_host:
                _give(shard, host)
        wire.scratch.trim()
        self._reset()

    def _waits(self, gathering: Any) -> bool:
        """Whether gradients of a unit were accumulated before and not reduced yet."""
        return any(e.parameter.name in self._whole for e in gathering.weights.trainable)

    def _add_late(self, forward: Any) -> None:
        """Give a shard without a gradient on this rank the one that other ranks have. Only a rank
        that lacks one looks at what the others have: no other waits for the device."""
        store = self.store
        names = sorted({e.parameter.name for g in forward.order for e in g.weights.trainable})
        has = [name in self._present for name in names]
        if self._ones.numel() != len(has) or self._ones.device != store.device:
            self._ones = torch.ones(len(has), device=store.device)
        flags = self._ones if all(has) else self._ones.new_tensor(has)  # ones stay ones
        axes = store.gradient_axes
        if axes:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=store.sums[axes])
        if not self._late:
            return
        anyone = {name for name, flag in zip(names, flags.tolist(), strict=True) if flag}
        for name, part in self._late:
            if name in anyone:
                self._take(store.shards[name], part)


def _give(shard: nn.Parameter, part: torch.Tensor) -> None:
    if not shard.requires_grad:  # it was frozen after the module was made
        return
    if shard.grad is None:
        shard.grad = part.data  # a view of a section, whose changes are counted by themselves
    else:
        shard.grad.add_(part)


def _scatter(weights: Any, flat: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """Sum flat gradients over the ranks: gives None while a collective runs, at last this
    rank's section."""
    section: torch.Tensor | None = flat
    if weights.ranks > 1:
        scattering = wire.reduce_scatter(flat, weights.store.sums[weights.unit.axes])
        while (section := next(scattering)) is None:
            yield None
        scattering.close()
        wire.scratch.give(flat)
    assert section is not None
    works = []
    for axes, start, stop in _further_sums(weights.trainable):
        group = weights.store.sums[axes]
        works.append(dist.all_reduce(section[start:stop], group=group, async_op=True))
    if works:
        yield None
        for work in works:
            work.wait()
    yield section


def _further_sums(found: list[Entry]) -> list[tuple[tuple[str, ...], int, int]]:
    """Runs of a section of gradients that are still to be summed, and over which axes."""
    runs: list[tuple[tuple[str, ...], int, int]] = []
    for entry in found:
        start, stop = entry.gradient_start, entry.gradient_start + entry.numel
        if runs and runs[-1][0] == entry.after:
            start = runs.pop()[1]
        runs.append((entry.after, start, stop))
    return [run for run in runs if run[0]]
