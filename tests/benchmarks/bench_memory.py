"""What a rank holds while a model is built from the meta device, on four gloo processes::

    python tests/benchmarks/bench_memory.py build

A Llama of 54 million float32 parameters on ``dp=4`` at ZeRO stage 3. ``peak`` are the bytes of all
tensors that lived at once during the call, counted one by one; ``shards`` those of this rank's
parameters, ``block`` those of the largest set of weights that is gathered at once, ``module`` those
of the largest module alone. ``resident`` is what the process grew by at its largest, and so holds
the compiler as well; ``again`` is a second build's, when the compiler has run before.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command = commands.add_parser("build", help="the peak while building from the meta device")
    command.set_defaults(run=build)
    for name, value in gloo_meta.DEEP.items():
        command.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    command.add_argument("--zero", type=int, default=3, help="the stage")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
