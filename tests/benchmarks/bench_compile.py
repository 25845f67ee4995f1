"""What compiling costs: seconds and memory, against the targets; one fresh process per row::

    python tests/benchmarks/bench_compile.py

``export`` is the time inside ``torch.export``; ``after`` is everything else that `autoshard` does
until one rank's module stands; ``tables`` is the time to write all tables. How time grows with
depth and with ranks is told by ``cpu``: processor seconds of everything but the export, which other
work on the machine does not stretch. Memory is the process's peak resident size, the imports (a row
of their own) included. Models are on the meta device, so no weights are counted.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

TABLES = ("axes", "params", "graph", "collectives", "passes", "memory")
LLAMA_1K = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
LLAMA_405B = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
DEPTHS, DATA_RANKS = (8, 16, 32, 64), (1, 16, 256)
WIDEST = 4096  # data ranks of the largest mesh


def megabytes_peak() -> float:
    """This process's own peak. (``ru_maxrss`` would start from the parent's size.)"""
    try:
        with open("/proc/self/status") as status:
            line = next(text for text in status if text.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)


def clocked_export() -> list[tuple[float, float]]:
    """Wrap ``torch.export.export``; the list gathers the seconds of every call, also the
    processor's."""
    import torch

    seconds: list[tuple[float, float]] = []
    original = torch.export.export

    def export(*args: Any, **kwargs: Any) -> Any:
        begin, cpu = time.perf_counter(), time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            seconds.append((time.perf_counter() - begin, time.process_time() - cpu))

    torch.export.export = export
    return seconds


def measure(config: dict[str, int] | None, mesh: dict[str, int]) -> dict[str, float]:
    """Compile one Llama in this process. Without a config: only the imports."""
    import torch
    import transformers

    torch.set_num_threads(2)
    exports = clocked_export()
    from autoshard import MeshSpec, autoshard

    if config is None:
        from transformers import LlamaForCausalLM  # noqa: F401

        return {"megabytes": megabytes_peak()}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).train()
        ids = torch.zeros(2, 128, dtype=torch.long)
    begin, cpu = time.perf_counter(), time.process_time()
    sharded = autoshard(
        model, MeshSpec(**mesh), example_inputs={"input_ids": ids, "labels": ids.clone()}
    )
    last = MeshSpec(**mesh).world_size - 1
    part = sharded.rank(last)
    built = time.perf_counter()
    rows = {name: len(part.table(name).splitlines()) for name in TABLES}
    done, cpu = time.perf_counter(), time.process_time() - cpu
    export, export_cpu = (sum(part) for part in zip(*exports, strict=True))
    assert min(rows.values()) > 2, rows
    return {
        "export": export,
        "after": built - begin - export,
        "tables": done - built,
        "cpu": cpu - export_cpu,
        "total": done - begin,
        "megabytes": megabytes_peak(),
    }


def in_fresh_process(config: dict[str, int] | None, mesh: dict[str, int]) -> dict[str, float]:
    job = json.dumps({"config": config, "mesh": mesh})
    command = [sys.executable, __file__, "--one", job]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def verdict(value: float, limit: float) -> str:
    return f"{value:.2f} of {limit:g}: {'met' if value <= limit else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--no-405b", action="store_true", help="leave out the large model")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(**json.loads(options.one))))
        return
    from tabulate import tabulate

    rows: list[list[Any]] = []

    def row(name: str, config: dict[str, int] | None, mesh: dict[str, int]) -> dict[str, float]:
        figures = in_fresh_process(config, mesh)
        shape = ",".join(f"{axis}={size}" for axis, size in mesh.items())
        keys = ("export", "after", "tables", "total", "cpu", "megabytes")
        rows.append([name, shape, *(figures.get(key) for key in keys)])
        print(f"... {name} {shape}", file=sys.stderr)
        return figures

    row("imports only", None, {})
    small = row("1k, 8 layers", LLAMA_1K, {"dp": 2, "tp": 4})
    deep = [
        row(f"1k, {n} layers", {**LLAMA_1K, "num_hidden_layers": n}, {"dp": 2, "tp": 4})["cpu"]
        for n in DEPTHS
    ]
    wide = [row("1k, 8 layers", LLAMA_1K, {"dp": n, "tp": 4})["cpu"] for n in (*DATA_RANKS, WIDEST)]
    # Linear: a layer of the deepest model costs what a layer of the shallowest does.
    slopes = [
        (b - a) / (n - m) for a, b, m, n in zip(deep, deep[1:], DEPTHS, DEPTHS[1:], strict=False)
    ]
    claims = [
        ["1k, 8 layers, seconds after capture", verdict(small["after"], 3)],
        ["cpu a layer, deepest to shallowest", verdict(slopes[-1] / slopes[0], 1.3)],
        [f"cpu of dp={WIDEST} to dp={DATA_RANKS[1]}", verdict(wide[-1] / wide[1], 1.3)],
    ]
    if not options.no_405b:
        large = row("405B, 126 layers", LLAMA_405B, {"dp": 256, "tp": 8})
        claims.append(["405B, seconds with tables", verdict(large["total"], 60)])
        claims.append(["405B, GB at the peak", verdict(large["megabytes"] / 1000, 2)])
    headers = ["model", "mesh", "export s", "after s", "tables s", "total s", "cpu s", "peak MB"]
    print(tabulate(rows, headers, floatfmt=".2f"))
    print()
    print(tabulate(claims, ["claim", "measured"]))


if __name__ == "__main__":
    main()
