"""Jobs on real gloo processes for tests/test_pipeline_traffic.py."""

from __future__ import annotations

import weakref
from typing import Any

import handwritten as hw
import torch
import torch.distributed as dist
from recompute_jobs import SENT
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard import autoshard
from autoshard.report import SAVED, TABLES, Sizes, step_collectives
from autoshard.runtime import wire

# --- memory ---


class _Kept:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()  # a result that is saved would hold the graph that holds it


class SavedBytes(saved_tensors_hooks):
    """Meanwhile ``peak`` are the most bytes that autograd has saved at one time, without those of
    ``held`` tensors; a storage counts once."""

    def __init__(self, held: Any):
        self.peak = 0
        self._held = {t.untyped_storage().data_ptr() for t in held}
        self._alive: weakref.WeakSet[_Kept] = weakref.WeakSet()
        super().__init__(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        self._alive.add(kept)
        storages = {k.tensor.untyped_storage().data_ptr(): k.tensor for k in self._alive}
        own = (t for address, t in storages.items() if address not in self._held)
        self.peak = max(self.peak, sum(t.untyped_storage().nbytes() for t in own))
        return kept


class Layers(torch.nn.Module):
    """Layers that are alike, and a loss without parameters."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.layers = torch.nn.ModuleList(hw.Block(width, 4, 2 * width) for _ in range(count))

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(x.flatten(0, 1), target.flatten())


def peak(mesh, schedule: str, count: int, width: int = 32, length: int = 16, rows: int = 2):
    """Bytes saved on this rank at the peak of a step of ``count`` micro-batches of so many rows, in
    a step of one of them, and what the table of memory says of the first."""
    torch.manual_seed(0)
    shape = rows * count, length
    batch = {"x": torch.randn(*shape, width), "target": torch.randint(0, width, shape)}
    found, stages = {}, mesh["pp"].size()
    for name, many in (("peak", count), ("one", 1)):
        given = {key: value[: rows * many] for key, value in batch.items()}
        model = Layers(stages, width)
        sharded = autoshard(model, mesh, given, schedule=schedule, microbatches=many, zero=0)
        sharded.train_step(**given)
        with (saved := SavedBytes([*sharded.parameters(), *given.values()])):
            sharded.train_step(**given)
        found[name] = saved.peak
        if name == "peak":
            table = TABLES["memory"](sharded.program, position=mesh["pp"].get_local_rank())
            told = {row[0]: row[2] for row in table.rows}
            found["predicted"] = told[SAVED]
    return found


# --- traffic ---


class BytesSent(TorchDispatchMode):
    """Bytes that a rank sends meanwhile, and how often, by kind: to other stages over their groups,
    and in collectives as a ring sends them."""

    PATCHED = ("isend", "all_reduce", "broadcast")

    def __init__(self, stages: list[Any]):
        super().__init__()
        self.stages, self.sent = stages, dict[str, tuple[int, int]]()

    def __enter__(self):
        self.real = {name: getattr(dist, name) for name in self.PATCHED}
        self.wired = wire.all_gather, wire.reduce_scatter
        dist.isend, dist.all_reduce = self._isend, self._all_reduce
        dist.broadcast = self._broadcast
        wire.all_gather, wire.reduce_scatter = self._all_gather, self._reduce_scatter
        return super().__enter__()

    def __exit__(self, *error):
        for name, real in self.real.items():
            setattr(dist, name, real)
        wire.all_gather, wire.reduce_scatter = self.wired
        return super().__exit__(*error)

    def _isend(self, tensor, *args, **options):
        if any(group in args for group in self.stages):
            self._add("send", tensor.nbytes)
        return self.real["isend"](tensor, *args, **options)

    def _all_reduce(self, tensor, *args, group=None, **options):
        self._add_ring("all_reduce", 2 * tensor.nbytes, group)
        return self.real["all_reduce"](tensor, *args, group=group, **options)

    def _broadcast(self, tensor, *args, **options):
        self._add("broadcast", tensor.nbytes)
        return self.real["broadcast"](tensor, *args, **options)

    def _all_gather(self, flat, group):
        self._add_ring("all_gather", flat.nbytes, group)
        return self.wired[0](flat, group)

    def _reduce_scatter(self, flat, group):
        self._add_ring("reduce_scatter", flat.nbytes, group)
        return self.wired[1](flat, group)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("_c10d_functional::")
        if name in SENT:
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            times = {"all_gather": group.size(), "all_reduce": 2}.get(SENT[name], 1)
            self._add_ring(SENT[name], times * args[0].nbytes, group)
        return func(*args, **(kwargs or {}))

    def _add_ring(self, kind: str, size: int, group: Any) -> None:
        ranks = dist.get_world_size(group)
        self._add(kind, -(-size * (ranks - 1) // ranks))

    def _add(self, kind: str, size: int) -> None:
        count, total = self.sent.get(kind, (0, 0))
        self.sent[kind] = count + 1, total + size


def traffic(mesh, layers: int, rows: int, **options: Any):
    """What this rank sends in its second step, by kind: how often and how many bytes; and what the
    table of collectives counts."""
    batch = hw.tokens(rows)
    torch.manual_seed(0)
    sharded = autoshard(hw.GPT(layers=layers, tied=True), mesh, batch, **options)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for _ in range(2):
        with BytesSent(sharded.wire.lanes) as counted:
            sharded.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()
    sizes, table = Sizes(sharded.program), dict[str, tuple[int, int]]()
    for c in step_collectives(sharded.program, position=mesh["pp"].get_local_rank()):
        count, total = table.get(c.kind, (0, 0))
        table[c.kind] = count + c.count, total + sizes.number(c.bytes)
    return {"sent": counted.sent, "table": table}
