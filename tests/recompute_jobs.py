"""Jobs on real gloo processes for tests/test_recompute.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from gloo import build, detached, local_rows, shard
from torch import nn

from autoshard import collectives
from autoshard.activations import measured
from autoshard.report import GRADIENTS, PRESENT, memory_table, step_collectives

#: Ops of c10d that send, as the tables name them.
SENT = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}


class DroppingBlock(nn.Module):
    def __init__(self, p: float):
        super().__init__()
        self.up, self.down, self.p = nn.Linear(32, 64), nn.Linear(64, 32), p

    def forward(self, x):
        return x + F.dropout(self.down(F.dropout(self.up(x).relu(), self.p)), self.p)


class DroppingStack(nn.Module):
    def __init__(self, p: float = 0.5):
        super().__init__()
        self.layers = nn.ModuleList(DroppingBlock(p) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


class Counting:
    """Stands for `torch.ops._c10d_functional` and counts the calls."""

    def __init__(self, ops: Any):
        self.ops, self.calls = ops, Counter()

    def __getattr__(self, name: str) -> Any:
        if name in SENT:
            self.calls[SENT[name]] += 1
        return getattr(self.ops, name)


def saved_in_table(program: Any) -> int:
    """Bytes of activations that the table of memory says a rank saves for backward."""
    rows = {row[0]: row[2] for row in memory_table(program).rows}
    return rows["activations saved for backward"]


def step(mesh, name: str, recompute: str) -> dict[str, Any]:
    """A step: loss, gradients, collectives called and in the table, bytes saved and predicted."""
    model, inputs = build(name)
    rows = local_rows(mesh, inputs)
    sharded = shard(mesh, model, rows, recompute=recompute, zero=0)
    ops = collectives.c10d
    collectives.c10d = counting = Counting(ops)
    try:
        loss = sharded.train_step(**rows)
    finally:
        collectives.c10d = ops
    table = Counter()
    entries = step_collectives(sharded.program)
    for c in entries:
        if c.why not in (GRADIENTS, PRESENT):  # those are not functional collectives
            table[c.kind] += c.count
    return {
        "loss": loss.clone(),
        "gradients": detached(sharded.full_gradients()),
        "called": dict(counting.calls),
        "table": dict(table),
        "again": sum(c.count for c in entries if c.when == "recompute"),
        "measured": measured(sharded, **rows),
        "predicted": saved_in_table(sharded.program),
    }


def dropout(mesh) -> dict[str, bool]:
    """Whether gradients through dropout, of whole values and of parts, are equal to the bit."""
    inputs = {"x": torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(0)).double()}
    found = {}
    for recompute in ("none", "block"):
        torch.manual_seed(0)
        sharded = shard(mesh, DroppingStack().double(), inputs, recompute=recompute)
        torch.manual_seed(3)
        sharded.train_step(**local_rows(mesh, inputs))
        found[recompute] = detached(sharded.full_gradients())
    return {k: torch.equal(v, found["block"][k]) for k, v in found["none"].items()}
