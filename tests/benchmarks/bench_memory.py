"""What a rank holds, on four gloo processes: while a model is built from the meta device, while it
trains, and what a pipeline keeps for backward::

    python tests/benchmarks/bench_memory.py build
    python tests/benchmarks/bench_memory.py train
    python tests/benchmarks/bench_memory.py pipeline

The first two are on a Llama of 54 million float32 parameters on ``dp=4``. ``build``, at ZeRO stage
3: ``peak`` are the bytes of all tensors that lived at once during the call, counted one by one;
``shards`` those of this rank's parameters, ``block`` those of the largest set of weights that is
gathered at once, ``module`` those of the largest module alone. ``resident`` is what the process
grew by at its largest, and so holds the compiler as well; ``again`` is a second build's, when the
compiler has run before.

``pipeline``: equal layers on ``pp=4``, and the bytes that autograd has saved at one time at most in
a step, against those of a step of one micro-batch and against the table of memory. Where backward
is split (``--schedules zb``) that is the most there can be: between its halves less is kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import gloo
import gloo_meta
import pipeline_traffic
import zero_jobs
from tabulate import tabulate

RANKS = 4
COLUMNS = ("whole", "shards", "block", "module", "peak", "after", "resident", "again")


def build(arguments: argparse.Namespace) -> None:
    """Print the peak of every rank, and how it stands to shards + one block + 10 %."""
    sizes = {name: getattr(arguments, name) for name in gloo_meta.DEEP}
    options = {"zero": arguments.zero}
    jobs = {name: (partial(gloo_meta.build_peak, **options), sizes) for name in ("first", "second")}
    with tempfile.TemporaryDirectory() as folder:
        gloo.launch({"dp": RANKS}, jobs, Path(folder))
        results = gloo.results_in(Path(folder), {"dp": RANKS})
    rows = []
    for rank, result in enumerate(results):
        if isinstance(result["first"], str):
            raise SystemExit(f"rank {rank}:\n{result['first']}")
        got = result["first"] | {"again": result["second"]["resident"]}
        # before ZeRO shares it out, a block stands in no unit: then the largest module counts
        most = got["shards"] + (got["block"] or got["module"])
        rows.append([rank, *(f"{got[c] / 2**20:.1f}" for c in COLUMNS), got["peak"] / most])
    print(tabulate(rows, ["rank", *(f"{c} MiB" for c in COLUMNS), "peak / (shards + block)"]))
    worst = max(row[-1] for row in rows)
    print(f"\npeak at most {worst:.3f} of shards + block; {'met' if worst <= 1.1 else 'MISSED'}")


#: Of ``train``: options, and the multiples of Ψ in float32 that a rank holds at N = `RANKS`.
STAGES = {
    "zero=0": ({"zero": 0}, 4 + 4 + 8),
    "zero=1": ({"zero": 1}, 4 + 4 + 8 / RANKS),
    "zero=2": ({"zero": 2}, 4 + 4 / RANKS + 8 / RANKS),
    "zero=3": ({"zero": 3}, (4 + 4 + 8) / RANKS),
}


def train(arguments: argparse.Namespace) -> None:
    """Print what every stage holds between steps (stage 1: while gradients accumulate), against
    the formulas of `autoshard.memory`."""
    sizes = {name: getattr(arguments, name) for name in gloo_meta.DEEP}
    rows = []
    for name, (options, times) in STAGES.items():
        with tempfile.TemporaryDirectory() as folder:  # one stage at a time: memory is scarce
            job = partial(zero_jobs.memory, **options)
            gloo.launch({"dp": RANKS}, {name: (job, sizes)}, Path(folder))
            got = [result[name] for result in gloo.results_in(Path(folder), {"dp": RANKS})]
        if isinstance(got[0], str):
            raise SystemExit(got[0])
        when = "accumulating" if options["zero"] == 1 else "between"
        held, block = max(g[when] for g in got), got[0]["block"]
        formula = times * got[0]["elements"]
        fine = formula * 0.98 <= held <= formula * 1.02 + block
        peak = max(g["peak"] for g in got)
        numbers = [f"{n / 2**20:.1f}" for n in (formula, block, held, peak)]
        rows.append([name, *numbers, held / formula, "met" if fine else "MISSED"])
    headers = ["stage", "formula MiB", "block MiB", "held MiB", "peak MiB", "held / formula", ""]
    print(tabulate(rows, headers))
    print("\nat most 2 % and one block above the formula")


def pipeline(arguments: argparse.Namespace) -> None:
    """Print what every rank of a pipeline keeps for backward at its peak, in micro-batches."""
    from autoshard.schedule import activations, schedule

    count, names = arguments.microbatches, arguments.schedules
    sizes = arguments.width, arguments.length, arguments.rows
    jobs = {name: (pipeline_traffic.peak, name, count, *sizes) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        gloo.launch({"pp": RANKS}, jobs, Path(folder))
        results = gloo.results_in(Path(folder), {"pp": RANKS})
    rows = []
    for name in names:
        plan = schedule(name, RANKS, count)
        expected = activations(plan)
        for rank, result in enumerate(results):
            if isinstance(result[name], str):
                raise SystemExit(f"rank {rank}:\n{result[name]}")
            one, peak, table = (result[name][key] for key in ("one", "peak", "predicted"))
            over = peak - expected[rank] * one
            fine = over <= 0.001 * peak and (plan.splits or -over <= 0.001 * peak)
            numbers = [f"{n / 2**20:.3f}" for n in (one, peak, table)]
            times = peak / one
            rows.append([name, rank, *numbers, times, expected[rank], "met" if fine else "MISSED"])
    headers = ["schedule", "rank", "one MiB", "peak MiB", "table MiB", "peak / one", "schedule's"]
    print(tabulate(rows, [*headers, ""], floatfmt=("", "", "", "", "", ".3f", "", "")))
    print(f"\n{count} micro-batches of {arguments.rows} x {arguments.length} x {arguments.width}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command = commands.add_parser("build", help="the peak while building from the meta device")
    command.set_defaults(run=build)
    training = commands.add_parser("train", help="what a rank holds between steps")
    training.set_defaults(run=train)
    piped = commands.add_parser("pipeline", help="what a pipeline keeps for backward")
    piped.set_defaults(run=pipeline)
    piped.add_argument("--microbatches", type=int, default=8)
    piped.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"])
    for name, value in {"width": 128, "length": 64, "rows": 2}.items():
        piped.add_argument(f"--{name}", type=int, default=value)
    for name, value in gloo_meta.DEEP.items():
        for each in (command, training):
            each.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    command.add_argument("--zero", type=int, default=3, help="the stage")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
