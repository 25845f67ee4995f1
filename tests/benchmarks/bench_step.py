"""Step time against hand-written Megatron-style code, torch's parallelize_module, DDP and FSDP2.

For cp=2 the floor is the model with ring attention written by hand (`bench_ring`) under DDP.

Two gloo processes with one thread each train the same Llama-like model; the modes take turns step
by step, and medians are compared: what else the machine does falls on all of them alike::

    python tests/benchmarks/bench_step.py
    python tests/benchmarks/bench_step.py --clock cpu    # where other work shares the processors

A step is forward, backward, and every reduction of gradients; in the groups of ZeRO stages also
that of an optimizer (``--optimizer``), after which weights are gathered. ``A/A`` is a mode
against a second copy of itself: what this machine can tell apart. All modes of a mesh must agree in
the loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from turns import compared, on_two_processes, parser_of, timed

TARGETS = {
    "tp=2": 1.05,
    "tp=2 sequence": 1.05,
    "dp=2": 1.02,
    "zero=1": 1.05,
    "zero=3": 1.0,
    "cp=2": 1.10,
}
SIZE = {
    "width": 512,
    "ffn": 1376,
    "heads": 8,
    "kv_heads": 4,
    "layers": 4,
    "vocab": 4096,
    "batch": 4,
    "length": 128,
}
Step = Callable[[], torch.Tensor]


# --- the model, as a user writes it ---


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.dim = width // heads
        self.q = nn.Linear(width, heads * self.dim, bias=False)
        self.k = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.v = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.o = nn.Linear(heads * self.dim, width, bias=False)
        self.attend = attend

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, self.dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    def __init__(self, width: int, ffn: int):
        super().__init__()
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, ffn: int):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attn, self.mlp = Attention(width, heads, kv_heads), MLP(width, ffn)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Returns the loss of the next tokens, ``labels``, which are shifted already."""

    def __init__(self, size: argparse.Namespace):
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, size.kv_heads, size.ffn) for _ in range(size.layers)
        )
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        cos, sin = rope_tables(size)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids, labels):
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def rope_tables(size: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    dim = size.width // size.heads
    rates = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.outer(torch.arange(size.length), rates)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def attend(q, k, v):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# --- the floor: Megatron-LM's operators and layout (sequence first), written out ---


def reduced(x):
    x = x.contiguous()
    dist.all_reduce(x)
    return x


def gathered(x):
    out = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_single(out, x.contiguous())
    return out


def scattered(x):
    out = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_single(out, x.contiguous())
    return out


class CopyToRegion(torch.autograd.Function):
    """Megatron's f: nothing forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return reduced(grad)


class ReduceFromRegion(torch.autograd.Function):
    """Megatron's g: all-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx, x):
        return reduced(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class GatherSequence(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx, x):
        return gathered(x)

    @staticmethod
    def backward(ctx, grad):
        return scattered(grad)


class ScatterSequence(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx, x):
        return scattered(x)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad)


class VocabularyLoss(torch.autograd.Function):
    """Cross entropy of logits cut over the vocabulary: three numbers a token travel."""

    @staticmethod
    def forward(ctx, logits, labels):
        start = dist.get_rank() * logits.shape[-1]
        top = logits.max(dim=-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        logits = logits - top.unsqueeze(-1)
        mine = (labels >= start) & (labels < start + logits.shape[-1])
        index = (labels - start).clamp(0, logits.shape[-1] - 1)
        picked = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1) * mine
        weights = logits.exp_()
        total = weights.sum(dim=-1)
        dist.all_reduce(picked)
        dist.all_reduce(total)
        ctx.save_for_backward(weights.div_(total.unsqueeze(-1)), index, mine)
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx, grad):
        weights, index, mine = ctx.saved_tensors
        weights.scatter_add_(-1, index.unsqueeze(-1), -mine.to(weights.dtype).unsqueeze(-1))
        return weights.mul_(grad / index.numel()), None


class Megatron(nn.Module):
    """The rank's part of a `Llama`; ``sequence`` cuts what lies between the linears too."""

    def __init__(self, model: Llama, sequence: bool):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.enter, self.leave = (
            (GatherSequence.apply, ScatterSequence.apply)
            if sequence
            else (CopyToRegion.apply, ReduceFromRegion.apply)
        )
        self.dim, self.sequence = model.blocks[0].attn.dim, sequence
        self.start = rank * (model.tokens.num_embeddings // world)
        self.weights = nn.ParameterDict()
        for name, value in model.named_parameters():
            cut = 1 if name.endswith(("o.weight", "down.weight")) else 0
            piece = value if "norm" in name else value.chunk(world, dim=cut)[rank]
            self.weights[name.replace(".", "/")] = nn.Parameter(piece.detach().clone())
        self.register_buffer("cos", model.cos)
        self.register_buffer("sin", model.sin)
        self.layers = len(model.blocks)
        self.norms = [w for name, w in self.weights.items() if "norm" in name]

    def attention(self, layer: int, x):
        q, k, v = (
            F.linear(x, self.weights[f"blocks/{layer}/attn/{n}/weight"])
            .unflatten(-1, (-1, self.dim))
            .permute(1, 2, 0, 3)
            for n in "qkv"
        )
        cos, sin = self.cos[: x.shape[0]], self.sin[: x.shape[0]]
        y = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return F.linear(
            y.permute(2, 0, 1, 3).flatten(2), self.weights[f"blocks/{layer}/attn/o/weight"]
        )

    def mlp(self, layer: int, x):
        gate, up, down = (
            self.weights[f"blocks/{layer}/mlp/{n}/weight"] for n in ("gate", "up", "down")
        )
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def norm(self, name: str, x):
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}/weight"], eps=1e-5)

    def embed(self, ids):
        table = self.weights["tokens/weight"]
        index = ids - self.start
        away = (index < 0) | (index >= table.shape[0])
        x = F.embedding(index.masked_fill(away, 0), table).masked_fill(away.unsqueeze(-1), 0.0)
        return self.leave(x)

    def forward(self, ids, labels):
        x = self.embed(ids.t())
        for layer in range(self.layers):
            h = self.enter(self.norm(f"blocks/{layer}/norm1", x))
            x = x + self.leave(self.attention(layer, h))
            h = self.enter(self.norm(f"blocks/{layer}/norm2", x))
            x = x + self.leave(self.mlp(layer, h))
        logits = F.linear(self.enter(self.norm("norm", x)), self.weights["head/weight"])
        return VocabularyLoss.apply(logits, labels.t())

    def step(self, ids, labels):
        loss = self(ids, labels)
        loss.backward()
        if self.sequence:  # the norms saw a part of the tokens: one bucket, once a step
            bucket = torch.cat([w.grad for w in self.norms])
            dist.all_reduce(bucket)
            pieces = bucket.split([w.numel() for w in self.norms])
            torch._foreach_copy_([w.grad for w in self.norms], list(pieces))
        return loss


# --- modes: each gives the parameters to clear, and one step ---


def megatron(size, mesh, batch, sequence: bool):
    model = Megatron(Llama(size), sequence)
    return list(model.parameters()), lambda: model.step(**batch)


def with_autoshard(size, mesh, batch, sequence: bool):
    from autoshard import autoshard

    sharded = autoshard(Llama(size), mesh, example_inputs=batch, sequence_parallel=sequence)
    return list(sharded.parameters()), lambda: sharded.train_step(**batch)


def parallelized(size, mesh, batch, sequence: bool):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    between = Shard(1) if sequence else Replicate()
    rows = RowwiseParallel(output_layouts=between)
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    for i in range(size.layers):
        plan |= {f"blocks.{i}.attn.{n}": ColwiseParallel() for n in "qkv"}
        plan |= {f"blocks.{i}.mlp.{n}": ColwiseParallel() for n in ("gate", "up")}
        plan |= {f"blocks.{i}.attn.o": rows, f"blocks.{i}.mlp.down": rows}
    if sequence:
        plan["norm"] = SequenceParallel()
        for i in range(size.layers):
            plan[f"blocks.{i}.norm1"] = plan[f"blocks.{i}.norm2"] = SequenceParallel()
            plan[f"blocks.{i}.attn"] = PrepareModuleInput(
                input_layouts=(Shard(1), None, None),
                desired_input_layouts=(Replicate(), None, None),
            )
            plan[f"blocks.{i}.mlp"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
    model = parallelize_module(Llama(size), mesh, plan)

    def step():
        with loss_parallel():
            loss = model(**batch)
            loss.backward()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    return list(model.parameters()), step


def ddp(size, mesh, batch):
    model = nn.parallel.DistributedDataParallel(Llama(size))

    def step():
        loss = model(**batch)
        loss.backward()
        return loss

    return list(model.parameters()), step


class RingLlama(Llama):
    """This rank's tokens of a `Llama`, in zigzag order, with attention round a ring by hand."""

    def __init__(self, size: argparse.Namespace):
        super().__init__(size)
        for block in self.blocks:
            block.attn.attend = ring
        self.cos, self.sin = own_tokens(self.cos, 0), own_tokens(self.sin, 0)

    def forward(self, ids, labels):
        return super().forward(own_tokens(ids, 1), own_tokens(labels, 1))


def own_tokens(x, dim: int):
    runs, rank = x.chunk(4, dim), dist.get_rank()
    return torch.cat([runs[rank], runs[3 - rank]], dim)


def ring(q, k, v):
    from bench_ring import HandWritten

    return HandWritten.apply(q, k, v, q.shape[-1] ** -0.5)


def ring_ddp(size, mesh, batch):
    model = nn.parallel.DistributedDataParallel(RingLlama(size))

    def step():
        loss = model(**batch)
        loss.backward()
        return loss

    return list(model.parameters()), step


def fully_sharded(size, mesh, batch):
    from torch.distributed.fsdp import fully_shard

    model = Llama(size)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step():
        loss = model(**batch)
        loss.backward()
        return loss

    return list(model.parameters()), step


def data_autoshard(size, mesh, batch, **options):
    from autoshard import autoshard

    sharded = autoshard(Llama(size), mesh, example_inputs=batch, **options)
    return list(sharded.parameters()), lambda: sharded.train_step(**batch)


def trained(build, **options):
    """A mode whose step ends with that of an optimizer."""

    def built(size, mesh, batch):
        parameters, step = build(size, mesh, batch, **options)
        optimizer = OPTIMIZERS[size.optimizer](parameters)

        def whole_step():
            loss = step()
            optimizer.step()
            return loss

        return parameters, whole_step

    return built


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


def modes_of(group: str) -> dict[str, Callable]:
    """The modes that take turns in a group; the first is the floor, A/A its second copy."""
    if group == "dp=2":
        return {"DDP": ddp, "A/A": ddp, "autoshard": partial(data_autoshard, zero=0)}
    if group == "cp=2":
        ours = partial(data_autoshard, zero=0)
        return {"hand-written": ring_ddp, "A/A": ring_ddp, "autoshard": ours}
    if group == "zero=1":
        ours = trained(data_autoshard, zero=1)
        return {"DDP": trained(ddp), "A/A": trained(ddp), "autoshard": ours}
    if group == "zero=3":
        floor = trained(fully_sharded)
        ours = trained(data_autoshard, zero=3)
        return {"FSDP2": floor, "A/A": floor, "DDP": trained(ddp), "autoshard": ours}
    sequence = "sequence" in group
    builders = {
        "hand-written": megatron,
        "A/A": megatron,
        "autoshard": with_autoshard,
        "parallelize_module": parallelized,
    }
    return {
        name: lambda *args, build=build: build(*args, sequence) for name, build in builders.items()
    }


# --- measuring ---


def measure(group: str, size: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every step on this rank, per mode."""
    axis = group[:2] if group[:2] in ("tp", "cp") else "dp"
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, size.vocab, (size.batch, size.length + 1), generator=g)
    if axis == "dp":
        ids = ids.chunk(2)[dist.get_rank()]
    batch = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    steps: dict[str, tuple[list, Step]] = {}
    for name, build in modes_of(group).items():
        if name in size.skip:
            continue
        torch.manual_seed(0)
        steps[name] = build(size, mesh, batch)
    assert_same_loss({name: step() for name, (_, step) in steps.items()})

    def without_gradients(name: str) -> None:
        for parameter in steps[name][0]:
            parameter.grad = None

    calls = {name: step for name, (_, step) in steps.items()}
    return timed(calls, size, size.clock, without_gradients)


def assert_same_loss(losses: dict[str, torch.Tensor]) -> None:
    """All modes compute one thing. Data ranks hold equally many tokens: their mean is the loss."""
    values = {}
    for name, loss in losses.items():
        value = loss.detach().clone().reshape(1)
        dist.all_reduce(value)
        values[name] = value.item() / dist.get_world_size()
    floor = next(iter(values.values()))
    wrong = {name: v for name, v in values.items() if abs(v - floor) > 1e-4 * abs(floor)}
    assert not wrong, f"modes differ in their loss: {values}"


def run(rank: int, folder: str, size: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    rows = []
    for group in size.groups:
        times = measure(group, size)
        floor = next(iter(times.values()))
        for name, seconds in times.items():
            target = TARGETS[group] if name == "autoshard" else None
            rows.append([group, name, *compared(seconds, floor, target)])
    if rank == 0:
        from tabulate import tabulate

        headers = ["mesh", "mode", "median ms", "25 %", "75 %", "ratio", "at most", ""]
        print(tabulate(rows, headers, floatfmt=("", "", ".1f", ".1f", ".1f", ".3f", ".2f", "")))
        tokens = f"{size.steps} steps of {size.batch} x {size.length} tokens"
        print(f"\n{tokens}, {size.clock} time; {describe(size)}")
    dist.barrier()
    dist.destroy_process_group()


def describe(size: argparse.Namespace) -> str:
    return (
        f"{size.layers} layers, width {size.width}, ffn {size.ffn}, {size.heads} heads on "
        f"{size.kv_heads}, vocabulary {size.vocab}; torch {torch.__version__}"
    )


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0], SIZE)
    parser.add_argument("--groups", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="of ZeRO stages")
    parser.add_argument("--skip", nargs="*", default=[], help="modes to leave out, by name")
    on_two_processes(run, parser.parse_args())


if __name__ == "__main__":
    main()
