"""Train a Hugging Face Llama on any mesh of pipeline, data, context and tensor parallel ranks.

On eight GPUs (NCCL), or on four processes of one CPU machine (gloo):

    torchrun --nproc-per-node 8 examples/train_llama.py --dp 2 --tp 4
    torchrun --nproc-per-node 4 examples/train_llama.py --dp 2 --tp 2 --small
    torchrun --nproc-per-node 4 examples/train_llama.py --dp 4 --small --zero 3 --bf16 \\
        --recompute block --checkpoint run
    torchrun --nproc-per-node 4 examples/train_llama.py --pp 2 --tp 2 --small --schedule zb

Three lines are about ranks: the mesh, the call to `autoshard`, and the rows each data rank reads.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from autoshard import autoshard

VOCAB = 256  # bytes


def config(small: bool) -> LlamaConfig:
    """About 100 M parameters, or with ``small`` about 1 M, for a try on CPUs."""
    sizes = (128, 384, 4, 8, 4) if small else (768, 2048, 14, 12, 4)
    hidden, ffn, layers, heads, kv_heads = sizes
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        use_cache=False,
    )


def start() -> torch.device:
    """Join the process group that torchrun describes; returns this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


class Text:
    """Python's own help pages as bytes; put your data set here."""

    def __init__(self, device: torch.device):
        text = "\n\n".join(pydoc_data.topics.topics.values()).encode()
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.device = device

    def batch(self, seed: int, rows: int, length: int) -> dict[str, torch.Tensor]:
        """Random rows; the model shifts the labels itself. The same seed gives the same rows."""
        chosen = torch.Generator().manual_seed(seed)
        start = torch.randint(len(self.data) - length, (rows, 1), generator=chosen)
        ids = self.data[start + torch.arange(length)].to(self.device)
        return {"input_ids": ids, "labels": ids.clone()}


def train(arguments: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
    """Build, shard, go on from a checkpoint if there is one, train, and save."""
    torch.manual_seed(0)  # every rank starts from the same weights
    model = LlamaForCausalLM(config(arguments.small)).to(device)

    text, dp_rank = Text(device), mesh["dp"].get_local_rank()
    rows, length = arguments.rows // arguments.dp, arguments.length
    # Data ranks read different rows; the tensor parallel peers of one data rank read the same.
    batches = (
        text.batch(step * arguments.dp + dp_rank, rows, length) for step in range(arguments.steps)
    )

    sharded = autoshard(
        model,
        mesh,
        example_inputs=text.batch(0, rows, length),
        zero=arguments.zero,
        recompute=arguments.recompute,
        schedule=arguments.schedule,
        microbatches=arguments.microbatches,
        param_dtype=torch.bfloat16 if arguments.bf16 else None,
    )
    del model  # whose weights nothing keeps now
    if dist.get_rank() == 0:
        print(sharded, sharded.table("collectives"), sep="\n\n", flush=True)

    optimizer = torch.optim.AdamW(sharded.parameters(), lr=arguments.lr)
    if arguments.checkpoint and os.path.isdir(arguments.checkpoint):
        sharded.load_checkpoint(arguments.checkpoint, optimizer)  # saved on this mesh or another
    for step, batch in enumerate(batches, 1):
        loss = sharded.train_step(**batch)
        norm = sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == 1):
            print(f"step {step:>5}  loss {float(loss):.4f}  norm {float(norm):.3f}", flush=True)

    if arguments.checkpoint:
        sharded.save_checkpoint(arguments.checkpoint, optimizer)
    if arguments.save:
        sharded.save_pretrained(arguments.save)  # as transformers reads it


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages, a rank each")
    parser.add_argument("--dp", type=int, default=1, help="data parallel ranks")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share out a row's tokens")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=16, help="rows of the global batch")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--small", action="store_true", help="a model for CPUs")
    parser.add_argument("--zero", type=int, default=1, choices=range(4), help="the stage")
    parser.add_argument("--recompute", default="none", choices=("none", "block"))
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline")
    parser.add_argument("--microbatches", type=int, help="of a rank's rows, for the pipeline")
    parser.add_argument("--checkpoint", metavar="DIR", help="where to go on from, and save to")
    parser.add_argument("--save", metavar="DIR", help="where to put the trained weights")
    arguments = parser.parse_args()
    if arguments.rows % arguments.dp:
        parser.error(f"--rows {arguments.rows} is not a multiple of --dp {arguments.dp}")
    return arguments


def main() -> None:
    arguments = parse()
    device = start()
    try:
        names = ("pp", "dp", "cp", "tp")  # from the slowest links to the fastest
        shape = tuple(getattr(arguments, name) for name in names)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        train(arguments, mesh, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
