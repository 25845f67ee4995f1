"""Ring attention against a minimal one written by hand for its case, and what its sends cost.

Two gloo processes with one thread each hold a sequence in zigzag order and run causal attention,
forward and backward; the modes take turns, and medians are compared::

    python tests/benchmarks/bench_ring.py
    python tests/benchmarks/bench_ring.py --clock cpu    # where other work shares the processors

``A/A`` is the hand-written one against a second copy of itself: what this machine can tell apart.
The other table, always of wall time, is of sends that arrive ``--delay`` milliseconds after they
set out: how much longer that takes, and how much where each is waited for at once. Of the three
hops of a step (keys and values forward, once more backward, then gradients) the second has nothing
to run beside: one in three is what theory leaves.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from turns import compared, on_two_processes, parser_of, quartiles, timed

sys.path.insert(0, str(Path(__file__).parents[1]))
from gloo import join

from autoshard.attention import Attention
from autoshard.collectives import Link
from autoshard.runtime import attention as engine

TARGET = 1.05
SIZE = {"batch": 1, "heads": 8, "kv_heads": 4, "dim": 64, "length": 2048}
HOPS, EXPOSED = 3, 0.5  # at most: half of the delays, of which a third has nothing beside it
aten = torch.ops.aten
Inputs = dict[str, torch.Tensor]


# --- by hand: two ranks, causal, zigzag ---


class HandWritten(torch.autograd.Function):
    """Rank 0 holds runs 0 and 3 of the sequence, rank 1 runs 1 and 2: of the other's keys, all rows
    of rank 1 read the first run, and the last of rank 0 reads both."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        packed = torch.stack([k, v])
        other = torch.empty_like(packed)
        works = exchange(packed, other, 0)
        out, lse = kernel(q, k, v, 0.0, True, scale=scale)
        for work in works:
            work.wait()
        rows, keys = seen(q.shape[2])
        part, part_lse = kernel(q[:, :, rows], *other[:, :, :, keys], 0.0, False, scale=scale)
        weight = torch.sigmoid(part_lse - lse[:, :, rows])[..., None]
        out[:, :, rows] = torch.lerp(out[:, :, rows], part, weight)
        lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], part_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        q, k, v, out, lse = ctx.saved_tensors
        packed = torch.stack([k, v])
        other = torch.empty_like(packed)
        for work in exchange(packed, other, 0):
            work.wait()
        rows, keys = seen(q.shape[2])
        cut = (x[:, :, rows] for x in (grad, q))
        kv, stats = other[:, :, :, keys], (x[:, :, rows] for x in (out, lse))
        dq_part, *found = kernel(*cut, *kv, *stats, 0.0, False, scale=ctx.scale)
        away = torch.zeros_like(packed)
        away[0][:, :, keys], away[1][:, :, keys] = found
        works = exchange(away, other, 1)
        dq, dk, dv = kernel(grad, q, k, v, out, lse, 0.0, True, scale=ctx.scale)
        dq[:, :, rows] += dq_part
        for work in works:
            work.wait()
        return dq, dk + other[0], dv + other[1], None


def seen(length: int) -> tuple[slice, slice]:
    """Which of this rank's rows read which of the other's keys."""
    half = length // 2
    return (slice(half, None), slice(None)) if dist.get_rank() == 0 else (slice(None), slice(half))


def exchange(sent: torch.Tensor, into: torch.Tensor, tag: int) -> list[Any]:
    other = 1 - dist.get_rank()
    return [dist.isend(sent, other, tag=tag), dist.irecv(into, other, tag=tag)]


def by_hand(given: Inputs, scale: float, whole: int) -> torch.Tensor:
    return HandWritten.apply(given["q"], given["k"], given["v"], scale)


def ours(given: Inputs, scale: float, whole: int) -> torch.Tensor:
    link = Link(("cp",), dist.group.WORLD.group_name, 2, dist.get_rank(), True)
    attention = Attention(scale, causal=True, ahead=False)
    q, k, v = (given[n] for n in "qkv")
    return engine.ring_attention(q, link, k, v, None, [], attention, whole, whole)


MODES = {"hand-written": by_hand, "A/A": by_hand, "ring_attention": ours}


# --- measuring ---


def inputs(size: argparse.Namespace) -> Inputs:
    """This rank's q, k, v and gradient, laid out as a model does."""
    g = torch.Generator().manual_seed(dist.get_rank())
    heads = {"q": size.heads, "k": size.kv_heads, "v": size.kv_heads, "grad": size.heads}
    shape = size.batch, size.length // 2
    drawn = {n: torch.randn(*shape, h, size.dim, generator=g) for n, h in heads.items()}
    return {n: x.transpose(1, 2).requires_grad_(n != "grad") for n, x in drawn.items()}


def step(attend: Callable, given: Inputs, whole: int) -> list[torch.Tensor]:
    """The result and all gradients."""
    out = attend(given, given["q"].shape[3] ** -0.5, whole)
    return [out, *torch.autograd.grad(out, [given[n] for n in "qkv"], given["grad"])]


class Late:
    """What to wait for, no earlier than some seconds after it began."""

    def __init__(self, works: list[Any], seconds: float):
        self.works, self.until = works, time.perf_counter() + seconds

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        time.sleep(max(0.0, self.until - time.perf_counter()))


def with_delay(seconds: float, at_once: bool, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, with sends that arrive late, and that are waited for where they begin or not."""
    shift = engine.shift

    def late(*args):
        work = Late(shift(*args), seconds)
        if not at_once:
            return [work]
        work.wait()
        return []

    def run():
        engine.shift = late
        try:
            return call()
        finally:
            engine.shift = shift

    return run


def show(
    times: dict[str, list[float]], late: dict[str, list[float]], size: argparse.Namespace
) -> None:
    from tabulate import tabulate

    floor, rows = times["hand-written"], []
    for name, seconds in times.items():
        target = TARGET if name == "ring_attention" else None
        rows.append([name, *compared(seconds, floor, target)])
    headers = ["mode", "median ms", "25 %", "75 %", "ratio", "at most", ""]
    print(tabulate(rows, headers, floatfmt=("", ".1f", ".1f", ".1f", ".3f", ".2f", "")))
    rows, start = [], statistics.median(late["on time"])
    for name, seconds in late.items():
        share = (statistics.median(seconds) - start) / (HOPS * size.delay / 1e3)
        target = EXPOSED if name == "late" else None
        verdict = "" if target is None else "met" if share <= target else "MISSED"
        rows.append([name, *quartiles(seconds), share, target, verdict])
    headers = ["sends", "median ms", "25 %", "75 %", "of delays", "at most", ""]
    print("\n" + tabulate(rows, headers, floatfmt=("", ".1f", ".1f", ".1f", ".2f", ".2f", "")))
    shape = f"{size.heads} heads on {size.kv_heads} of {size.dim}, {size.length} positions"
    print(f"\n{size.steps} steps of {size.batch} x {shape}, {size.clock} time above;", end=" ")
    print(f"{HOPS} hops, {size.delay} ms late; torch {torch.__version__}")


def run(rank: int, folder: str, size: argparse.Namespace) -> None:
    join(rank, 2, folder, 120)
    given = inputs(size)
    calls = {n: lambda f=f: step(f, given, size.length) for n, f in MODES.items()}
    for found, wanted in zip(calls["ring_attention"](), calls["hand-written"](), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    times = timed(calls, size, size.clock)
    mine, delay = calls["ring_attention"], size.delay / 1e3
    sends = {
        "on time": mine,
        "late": with_delay(delay, False, mine),
        "late, waited for": with_delay(delay, True, mine),
    }
    late = timed(sends, size, "wall")
    if rank == 0:
        show(times, late, size)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0], SIZE)
    parser.add_argument("--delay", type=float, default=12.0, help="milliseconds")
    on_two_processes(run, parser.parse_args())


if __name__ == "__main__":
    main()
