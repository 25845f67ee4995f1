"""A step whose backward runs in two parts, on one rank or on real gloo processes."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
from gloo import build, detached, local_rows, shard
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.emit import bound, loss_graph
from autoshard.outline import outlined
from autoshard.runtime import wire
from autoshard.runtime.split import Queue, deferring

#: Kernels of products, of lookups' gradients, and of convolutions' gradients.
PRODUCTS = (
    "mm addmm bmm baddbmm _grouped_mm convolution convolution_backward embedding_dense_backward"
).split()


class Counting(TorchDispatchMode):
    """Meanwhile ``calls`` counts ops by name; those on the meta device compute nothing."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not any(isinstance(a, torch.Tensor) and a.is_meta for a in args):
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> Counter[str]:
        return Counter({name: self.calls[name] for name in PRODUCTS if self.calls[name]})


def deferring_graph(program: Any, graph: Any) -> Any:
    trained = {key for key, p in program.values.items() if p.trainable}
    deferring(graph, trained, program.values.keys() - trained)
    return graph


def split_module(sharded: Any) -> torch.fx.GraphModule:
    """The loss, by a graph that leaves gradients of weights to a queue."""
    program, root = sharded.running, nn.Module()
    named = {**program.attentions, **sharded._running.loads}
    held = {name: f"unit_{i}" for i, name in enumerate(sharded.units)}
    held |= {name: name for name in named}
    for name, what in {**sharded.units, **named}.items():
        setattr(root, held[name], what)
    groups = {axes: group.group_name for axes, group in sharded._groups.items()}
    place = (program.mesh, sharded.rank_index, groups, sharded._device, held)
    graph = bound(loss_graph(program), *place)
    return outlined(deferring_graph(program, graph), root)


class Step:
    """One micro-batch of a module: forward when made, then ``inputs()`` and ``weights()``."""

    def __init__(self, sharded: Any, module: Any, rows: Any, split: bool = True):
        self.queue = Queue()
        arguments = sharded.arguments((), rows)
        opened = self.queue.open() if split else contextlib.nullcontext()
        with Counting() as self.forward, sharded._gathering(own_loss=True), opened:
            self.out = module(*arguments)
        self.loss = self.out[0].detach()

    def inputs(self) -> Step:
        """Backward of the loss."""
        with Counting() as self.first:
            torch.autograd.backward(self.out[0])
        del self.out
        return self

    def weights(self) -> Step:
        with Counting() as self.second:
            self.queue.run()
        return self


def gradients(sharded: Any) -> dict[str, torch.Tensor | None]:
    return {n: p.grad for n, p in sharded.named_parameters()}


def without_gradients(sharded: Any) -> Any:
    for parameter in sharded.parameters():
        parameter.grad = None
    return sharded


class Sent:
    """What this rank sends, in order: stands for `torch.distributed` in `runtime.wire`."""

    def __init__(self, monkey: Any):
        self.kinds: list[str] = []
        for name in ("all_gather", "reduce_scatter"):
            setattr(monkey, name, self._noted(name, getattr(monkey, name)))

    def _noted(self, name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            self.kinds.append(name)
            return function(*args)

        return call


def two_batches(mesh, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Gradients of two micro-batches that are alive at once, in one part and in two; and what was
    sent meanwhile, after each part."""
    model, inputs = build(name)
    sharded = shard(mesh, model, inputs, **options)
    batches = [local_rows(mesh, {k: v.roll(i, 1) for k, v in inputs.items()}) for i in (0, 1)]
    with sharded.no_sync():
        sharded.train_step(**batches[0])
    sharded.train_step(**batches[1])
    want = detached(sharded.full_gradients())
    module, sent, parts = split_module(without_gradients(sharded)), Sent(wire), []
    steps = [Step(sharded, module, rows) for rows in batches]
    for step in steps:
        sent.kinds.clear()
        step.inputs()
        parts.append((list(sent.kinds), sharded._store.gathered))
    early = [n for n, p in sharded.named_parameters() if p.grad is not None]
    for i, step in enumerate(steps):
        sent.kinds.clear()
        with sharded.no_sync() if i == 0 else contextlib.nullcontext():
            step.weights()
        parts.append((list(sent.kinds), sharded._store.gathered))
    got = detached(sharded.full_gradients())
    return {"want": want, "got": got, "early": early, "parts": parts}
