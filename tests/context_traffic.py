"""Jobs on real gloo processes for tests/test_context_communication.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from recompute_jobs import SENT
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import batch, tiny

from autoshard import autoshard
from autoshard.activations import measured
from autoshard.report import GRADIENTS, PRESENT, step_collectives

#: Sizes of a Llama with four heads of queries on as many of keys, for long sequences.
LONG = {"max_position_embeddings": 1024, "num_key_value_heads": 4}
KINDS = SENT | {"all_to_all_single": "all_to_all"}


class BytesSent(TorchDispatchMode):
    """Counts the bytes that a rank sends meanwhile, by kind: functional collectives as a ring or
    pairs of ranks would send them, and what is really sent to one rank."""

    def __init__(self):
        super().__init__()
        self.sent: dict[str, int] = {}

    def __enter__(self):
        self.send = dist.isend
        dist.isend = self._counted
        return super().__enter__()

    def __exit__(self, *error):
        dist.isend = self.send
        return super().__exit__(*error)

    def _counted(self, tensor, *args, **kwargs):
        self._add("ring", tensor.nbytes)
        return self.send(tensor, *args, **kwargs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("_c10d_functional::")
        if name in KINDS:
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            ranks, size = group.size(), args[0].nbytes
            times = {"all_gather": ranks, "all_reduce": 2}.get(KINDS[name], 1)
            self._add(KINDS[name], times * size * (ranks - 1) // ranks)
        return func(*args, **(kwargs or {}))

    def _add(self, kind: str, size: int) -> None:
        self.sent[kind] = self.sent.get(kind, 0) + size


def sent(mesh, dtype: torch.dtype, mode: str, sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Bytes sent in a step of a small Llama, all but the gradients of parameters, by kind; and
    those that the table of collectives counts."""
    sharded = autoshard(
        tiny("llama", **sizes).to(dtype), mesh, batch(), zero=0, context_parallel=mode
    )
    with BytesSent() as counted:
        sharded.train_step(**batch())
    own = dict(zip(sharded.program.hints, batch()["input_ids"].shape, strict=True))
    table: dict[str, int] = {}
    for c in step_collectives(sharded.program):
        if c.why not in (GRADIENTS, PRESENT):
            kind = "ring" if c.kind == "ring_back" else c.kind
            table[kind] = table.get(kind, 0) + _number(c.bytes, own)
    return {"sent": counted.sent, "table": table}


def _number(form: Any, sizes: dict[Any, int]) -> int:
    if isinstance(form, int):
        return form
    values = dict(zip(("batch", "sequence"), sizes.values(), strict=True))
    return int(form.subs({s: values[s.name] for s in form.free_symbols}))


def saved(mesh, mode: str, length: int) -> int:
    """Bytes that forward saves for backward on this rank."""
    given = batch(b=2, s=length)
    sharded = autoshard(tiny("llama", **LONG), mesh, given, zero=0, context_parallel=mode)
    sharded.train_step(**given)
    return measured(sharded, **given)
