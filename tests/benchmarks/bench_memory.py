"""What a rank holds, on four gloo processes: while a model is built from the meta device, and while
it trains::

    python tests/benchmarks/bench_memory.py build
    python tests/benchmarks/bench_memory.py train

Both on a Llama of 54 million float32 parameters on ``dp=4``. ``build``, at ZeRO stage 3: ``peak``
are the bytes of all tensors that lived at once during the call, counted one by one; ``shards``
those of this rank's parameters, ``block`` those of the largest set of weights that is gathered at
once, ``module`` those of the largest module alone. ``resident`` is what the process grew by at its
largest, and so holds the compiler as well; ``again`` is a second build's, when the compiler has run
before.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command = commands.add_parser("build", help="the peak while building from the meta device")
    command.set_defaults(run=build)
    training = commands.add_parser("train", help="what a rank holds between steps")
    training.set_defaults(run=train)
    for name, value in gloo_meta.DEEP.items():
        for each in (command, training):
            each.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    command.add_argument("--zero", type=int, default=3, help="the stage")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
