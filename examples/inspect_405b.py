"""Compile Llama-3 405B for 2,048 ranks on a laptop: no GPU, no process group, no weights.

The model is built on the meta device, so that only its shapes exist. What is printed is what each
of the ranks would run: its share of every parameter, and every collective with its bytes.

    python examples/inspect_405b.py
    python examples/inspect_405b.py --layers 4 --table graph
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autoshard import MeshSpec, autoshard
from autoshard.progress import show

TABLES = ("axes", "params", "collectives", "memory", "passes")


def config(layers: int) -> LlamaConfig:
    """The published sizes of Llama-3.1 405B."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=16_384,
        intermediate_size=53_248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8_192,
        },
        tie_word_embeddings=False,
        use_cache=False,
    )


def example_inputs(rows: int, length: int) -> dict[str, torch.Tensor]:
    """The global batch, as shapes only."""
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}


def peak_memory_gb() -> float:
    """The most memory this process has held, in GB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mesh", default="dp=256,tp=8", help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=126, help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="global batch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=8192, help="tokens (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=0, help="whose module (default: %(default)s)")
    parser.add_argument("--table", action="append", help=f"(default: {', '.join(TABLES)})")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    mesh = MeshSpec.parse(arguments.mesh)
    with torch.device("meta"):
        model = LlamaForCausalLM(config(arguments.layers))
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e9:.1f} billion parameters, {mesh.world_size} ranks: {mesh}", flush=True)

    began = time.perf_counter()
    with show():  # on stderr, what is being done
        sharded = autoshard(
            model, mesh, example_inputs=example_inputs(arguments.rows, arguments.length)
        )
    module = sharded.rank(arguments.rank) if arguments.rank else sharded
    print(module)
    for name in arguments.table or TABLES:
        print(f"\n# {name}\n\n{module.table(name)}")
    seconds = time.perf_counter() - began
    print(f"\nall in {seconds:.1f} s; peak memory {peak_memory_gb():.2f} GB")


if __name__ == "__main__":
    main()
