"""Step time of experts over ep=2 against expert parallelism written by hand.

Two gloo processes with one thread each train the same model: a Llama with a mixture of experts in
every block, half of the batch and half of the experts on each. The modes take turns step by step,
and medians are compared::

    python tests/benchmarks/bench_experts.py
    python tests/benchmarks/bench_experts.py --clock cpu    # where other work shares the processors

By hand, tokens are sorted by expert and sent by an all-to-all, each local expert computes its rows,
and they go back; the gradients of all other parameters are summed by DDP while backward runs, those
of experts are whole as they are. ``A/A`` is that against a second copy of itself: what this machine
can tell apart. All modes must agree in the loss and in what an expert's gradient adds up to.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers.integrations.moe  # registers the products by groups
from bench_step import Llama
from torch import nn
from turns import on_two_processes, parser_of, show, timed

sys.path.insert(0, str(Path(__file__).parents[1]))
from gloo import join

assert transformers.integrations.moe

TARGET = 1.10
SIZE = {
    "width": 512,
    "ffn": 704,
    "heads": 8,
    "kv_heads": 4,
    "layers": 3,
    "vocab": 2048,
    "experts": 8,
    "chosen": 2,
    "batch": 8,
    "length": 128,
}


# --- the model, as a user writes it ---


class Mixture(nn.Module):
    """Experts stacked in two parameters, and products by groups of rows sorted by expert."""

    def __init__(self, size: argparse.Namespace):
        super().__init__()
        self.chosen, self.experts = size.chosen, size.experts
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(size.experts, size.width, 2 * size.ffn) / 32)
        self.down = nn.Parameter(torch.randn(size.experts, size.ffn, size.width) / 32)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.chosen, -1)
        slots = chosen.flatten()
        order = slots.argsort(stable=True)
        ends = F.one_hot(slots, self.experts).sum(0).cumsum(0).to(torch.int32)
        rows = tokens[order // self.chosen]
        gate, up = grouped_mm(rows, self.gate_up, ends).chunk(2, -1)
        out = grouped_mm(F.silu(gate) * up, self.down, ends)
        out = out * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // self.chosen, out).view_as(x)


def grouped_mm(rows, weight, ends):
    """As models of transformers call it; torch's own is for bfloat16 only where nothing runs."""
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)


class MixtureLlama(Llama):
    def __init__(self, size: argparse.Namespace):
        super().__init__(size)
        for block in self.blocks:
            block.mlp = Mixture(size)


# --- the floor: by hand ---


class Way(NamedTuple):
    """``order``: slots (k for each token) sorted by expert; ``arrived``: rows as they came, sorted
    by expert; and their inverses. ``sent``, ``came``: rows to and from each rank."""

    k: int
    order: torch.Tensor
    back: torch.Tensor
    arrived: torch.Tensor
    unsorted: torch.Tensor
    sent: list[int]
    came: list[int]


def out_to_experts(tokens: torch.Tensor, way: Way) -> torch.Tensor:
    rows = tokens.index_select(0, way.order // way.k)
    return exchanged(rows, way.sent, way.came).index_select(0, way.arrived)


def back_to_slots(rows: torch.Tensor, way: Way) -> torch.Tensor:
    rows = exchanged(rows.index_select(0, way.unsorted), way.came, way.sent)
    return rows.index_select(0, way.back).view(-1, way.k, rows.shape[1])


def exchanged(rows: torch.Tensor, sent: list[int], came: list[int]) -> torch.Tensor:
    out = rows.new_empty(sum(came), rows.shape[1])
    dist.all_to_all_single(out, rows, came, sent)
    return out


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, way):
        ctx.way = way
        return out_to_experts(tokens, way)

    @staticmethod
    def backward(ctx, grad):
        return back_to_slots(grad, ctx.way).sum(1), None


class Combine(torch.autograd.Function):
    """Of every token the sum of its rows, by its ``weights[t, k]``."""

    @staticmethod
    def forward(ctx, rows, weights, way):
        slots = back_to_slots(rows, way)
        ctx.save_for_backward(slots, weights)
        ctx.way = way
        return torch.bmm(weights.unsqueeze(1), slots).squeeze(1)

    @staticmethod
    def backward(ctx, grad):
        slots, weights = ctx.saved_tensors
        way = ctx.way
        to_weights = torch.bmm(slots, grad.unsqueeze(2)).squeeze(2)
        rows = (grad.unsqueeze(1) * weights.unsqueeze(2)).flatten(0, 1).index_select(0, way.order)
        rows = exchanged(rows, way.sent, way.came).index_select(0, way.arrived)
        return rows, to_weights, None


class Expert(nn.Module):
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor):
        super().__init__()
        self.gate_up = nn.Parameter(gate_up.detach().T.contiguous())
        self.down = nn.Parameter(down.detach().T.contiguous())

    def forward(self, rows):
        gate, up = F.linear(rows, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)


class OwnExperts(nn.Module):
    """This rank's experts of a mixture."""

    def __init__(self, mixture: Mixture):
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.k, self.count, self.ranks = mixture.chosen, mixture.experts, ranks
        self.router = mixture.router
        mine = zip(mixture.gate_up.chunk(ranks)[rank], mixture.down.chunk(ranks)[rank], strict=True)
        self.own = nn.ModuleList(Expert(*weights) for weights in mine)

    def way(self, chosen: torch.Tensor) -> tuple[Way, list[int]]:
        """And how many rows each of this rank's experts gets."""
        slots = chosen.flatten()
        order = slots.argsort(stable=True)
        counts = torch.bincount(slots, minlength=self.count)
        got = torch.empty_like(counts)
        dist.all_to_all_single(got, counts)
        got = got.view(self.ranks, -1)
        sent, came = counts.view(self.ranks, -1).sum(1).tolist(), got.sum(1).tolist()
        expert = torch.arange(len(self.own)).repeat(self.ranks).repeat_interleave(got.flatten())
        arrived = expert.argsort(stable=True)
        way = Way(self.k, order, order.argsort(), arrived, arrived.argsort(), sent, came)
        return way, got.sum(0).tolist()

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.k, -1)
        way, counts = self.way(chosen)
        rows = Dispatch.apply(tokens, way).split(counts)
        out = torch.cat([expert(own) for expert, own in zip(self.own, rows, strict=True)])
        return Combine.apply(out, weights, way).view_as(x)


def summed(_, bucket):
    """The loss is divided by the ranks already: so are the gradients of experts."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def by_hand(size, mesh, batch):
    model = MixtureLlama(size)
    for block in model.blocks:
        block.mlp = OwnExperts(block.mlp)
    experts = [name for name, _ in model.named_parameters() if ".own." in name]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    # buffers are the same on all ranks and stay it
    wrapped = nn.parallel.DistributedDataParallel(
        model, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    wrapped.register_comm_hook(None, summed)

    def step():
        loss = wrapped(**batch)
        (loss / dist.get_world_size()).backward()
        return loss

    return model, step


def ours(size, mesh, batch):
    from autoshard import autoshard

    sharded = autoshard(MixtureLlama(size), mesh, example_inputs=batch, zero=0)
    assert not sharded.program.unfused, "experts were not found"
    return sharded, lambda: sharded.train_step(**batch)


MODES = {"hand-written": by_hand, "A/A": by_hand, "autoshard": ours}


# --- measuring ---


def assert_alike(modes: dict[str, tuple[nn.Module, Any]]) -> None:
    """One step of each: the loss over all ranks; the norms of a dense gradient, of all experts'."""
    values = {}
    for name, (model, step) in modes.items():
        loss = step().detach().reshape(1)
        squares = {True: torch.zeros(1), False: torch.zeros(1)}
        for key, parameter in model.named_parameters():
            experts = ".mlp." in key and "router" not in key
            squares[experts] += parameter.grad.square().sum()
        numbers = torch.cat([loss / dist.get_world_size(), squares[True], squares[False]])
        dist.all_reduce(numbers)
        values[name] = numbers
    floor = next(iter(values.values()))
    for name, found in values.items():
        torch.testing.assert_close(found, floor, rtol=1e-3, atol=0, msg=f"{name}: {values}")


def run(rank: int, folder: str, size: argparse.Namespace) -> None:
    join(rank, 2, folder, 120)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, size.vocab, (size.batch, size.length + 1), generator=g).chunk(2)[rank]
    batch = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    modes = {}
    for name, build in MODES.items():
        torch.manual_seed(0)
        modes[name] = build(size, mesh, batch)
    assert_alike(modes)
    times = timed(
        {name: step for name, (_, step) in modes.items()},
        size,
        size.clock,
        lambda name: modes[name][0].zero_grad(set_to_none=True),
    )
    if rank == 0:
        show_steps(times, size)
    dist.barrier()
    dist.destroy_process_group()


def show_steps(times: dict[str, list[float]], size: argparse.Namespace) -> None:
    show(times, TARGET)
    print(
        f"\n{size.steps} steps of {size.batch} x {size.length} tokens, {size.clock} time;", end=" "
    )
    print(
        f"{size.layers} layers, width {size.width}, {size.experts} experts of {size.ffn},", end=" "
    )
    print(f"{size.chosen} for each token; torch {torch.__version__}")


def main() -> None:
    on_two_processes(run, parser_of(__doc__.splitlines()[0], SIZE).parse_args())


if __name__ == "__main__":
    main()
