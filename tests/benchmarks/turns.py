"""What benchmarks of a few processes share: modes that take turns, and rows of a table."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def timed(
    modes: dict[str, Callable[[], Any]],
    size: argparse.Namespace,
    clock: str,
    before: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Seconds of every step on this rank, per mode: the modes take turns, and who begins changes.
    ``before`` a mode's step, something that does not count."""
    times: dict[str, list[float]] = {name: [] for name in modes}
    names, now = list(modes), CLOCKS[clock]
    for turn in range(size.warmup + size.steps):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before(name)
            dist.barrier()
            begin = now()
            modes[name]()
            if turn >= size.warmup:
                times[name].append(now() - begin)
    return times


def quartiles(seconds: list[float]) -> list[float]:
    """Milliseconds: the median, and where the middle half of the steps lies."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return [median * 1e3, low * 1e3, high * 1e3]


def compared(seconds: list[float], floor: list[float], target: float | None) -> list[Any]:
    """Quartiles, the ratio of medians, what it is to be at most, and whether it is."""
    ratio = statistics.median(seconds) / statistics.median(floor)
    verdict = "" if target is None else "met" if ratio <= target else "MISSED"
    return [*quartiles(seconds), ratio, target, verdict]


def show(times: dict[str, list[float]], target: float) -> None:
    """Print the modes beside the hand-written one; ``target``: the most that the ratio of autoshard
    is to be."""
    floor = times["hand-written"]
    rows = [
        [name, *compared(seconds, floor, target if name == "autoshard" else None)]
        for name, seconds in times.items()
    ]
    headers = ["mode", "median ms", "25 %", "75 %", "ratio", "at most", ""]
    print(tabulate(rows, headers, floatfmt=("", ".1f", ".1f", ".1f", ".3f", ".2f", "")))


def parser_of(
    description: str, size: dict[str, int], parser: argparse.ArgumentParser | None = None
) -> argparse.ArgumentParser:
    """Options of sizes, of how often to measure, and of the clock; those of a command are added to
    its ``parser``."""
    parser = parser or argparse.ArgumentParser(description=description)
    for name, value in size.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what is counted")
    return parser


def on_two_processes(run: Callable[..., None], size: argparse.Namespace) -> None:
    """``run(rank, folder, size)`` on two ranks, which meet in the folder."""
    on_processes(run, size, 2)


def on_processes(run: Callable[..., None], size: argparse.Namespace, count: int) -> None:
    """The same on ``count`` ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (folder, size), nprocs=count)


def of_slowest(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Seconds of every step until its last rank was done, per mode."""
    out = {}
    for name, seconds in times.items():
        most = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        out[name] = most.tolist()
    return out
