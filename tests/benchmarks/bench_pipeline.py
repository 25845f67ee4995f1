"""A pipeline of stages against one written by hand, and against what a dry run predicts.

``step``: two gloo processes with one thread each train the same Llama, half of its blocks on each,
with a schedule of one forward, one backward over micro-batches, and then an optimizer's step. The
modes take turns step by step, and medians are compared::

    python tests/benchmarks/bench_pipeline.py step
    python tests/benchmarks/bench_pipeline.py step --skip autoshard    # the floor alone

By hand, receives are posted before they are needed, into buffers that are used again; sends go on
while the next micro-batch is computed; the loss is a sum over the tokens of a micro-batch divided
by the count of all. ``A/A`` is that against a second copy of itself: what this machine can tell
apart. All modes must agree in loss and gradients with the model on one device. The clock is wall
time: most of what a pipeline can lose is waiting.

``predict``: four processes run a pipeline, and the time of a step is compared with that of
`autoshard.schedule.dry_run`, which is given the seconds of each action (`costs_of`: from steps of a
single micro-batch, in which never two stages work at once, so that no stage waits for a processor
while it is timed)::

    python tests/benchmarks/bench_pipeline.py predict
    python tests/benchmarks/bench_pipeline.py predict --work products

Work of kind ``spin`` watches the clock until a time is over, and does not sleep. It lets others
have the processor meanwhile, so that four processes keep time on fewer processors: what it shows is
that order, sends and waits are those of the schedule, and nothing about computing. Work of kind
``products`` multiplies matrices, and the dry run is told how many processors there are: nothing
else may run on these.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_step import OPTIMIZERS, Llama
from torch import nn
from turns import of_slowest, on_processes, parser_of, quartiles, show, timed

sys.path.insert(0, str(Path(__file__).parents[1]))
from gloo import join

TARGET, WITHIN = 1.05, 0.05
SIZE = {
    "width": 512,
    "ffn": 1376,
    "heads": 8,
    "kv_heads": 8,
    "layers": 8,
    "vocab": 8192,
    "batch": 4,
    "length": 256,
    "microbatches": 4,
}
WORK_SIZE = {"stages": 4, "microbatches": 8, "width": 256, "spin_ms": 50}
ROWS = {"spin": 64, "products": 4096}  # few, so that a stage spins for nearly all of its time
PROCESSORS = len(os.sched_getaffinity(0))
Span = tuple[int, str, float]  # stage, F or B, seconds


# --- the floor: one forward, one backward, by hand ---


class LlamaStage(nn.Module):
    """A rank's blocks of a `Llama`; the first has the embedding, the last norm and head."""

    def __init__(self, model: Llama, rank: int, ranks: int):
        super().__init__()
        each = len(model.blocks) // ranks
        own = range(rank * each, (rank + 1) * each)
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in own})
        self.tokens = model.tokens if rank == 0 else nn.Identity()
        self.norm, self.head = (
            (model.norm, model.head) if rank == ranks - 1 else (nn.Identity(), nn.Identity())
        )
        self.register_buffer("cos", model.cos)
        self.register_buffer("sin", model.sin)

    def forward(self, x):
        x = self.tokens(x)
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class Inbox:
    """Receives from one rank, ``depth`` of them posted ahead into as many buffers."""

    def __init__(self, rank: int, shape: tuple[int, ...], depth: int, count: int):
        self.rank, self.count = rank, count
        self.buffers = [torch.empty(shape) for _ in range(min(depth, count))]
        self.works: deque[Any] = deque()

    def open(self) -> None:
        self.posted = 0
        for _ in self.buffers:
            self.post()

    def post(self) -> None:
        """Receive the next one, into the buffer that has been free for longest."""
        if self.posted < self.count:
            buffer = self.buffers[self.posted % len(self.buffers)]
            self.works.append((dist.irecv(buffer, self.rank), buffer))
            self.posted += 1

    def take(self) -> torch.Tensor:
        work, buffer = self.works.popleft()
        work.wait()
        return buffer


class Outbox:
    """Sends to one rank; what is sent is kept until it has left, and no longer than needed."""

    def __init__(self, rank: int):
        self.rank = rank
        self.works: deque[Any] = deque()

    def put(self, x: torch.Tensor) -> None:
        self.works.append((dist.isend(x, self.rank), x))
        if len(self.works) > 2:
            self.works.popleft()[0].wait()

    def close(self) -> None:
        while self.works:
            self.works.popleft()[0].wait()


class Pipeline:
    """One stage a rank. A rank runs as many forwards ahead as ranks come after it, then a forward
    and a backward in turn. ``shape``: of what travels for one micro-batch.

    ``step`` gives the loss of all micro-batches, on every rank, and adds gradients to ``.grad``.
    ``spans``: what the last step took on this rank.
    """

    def __init__(self, stage: nn.Module, microbatches: int, shape: tuple[int, ...]):
        self.stage, self.count = stage, microbatches
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.first, self.last = self.rank == 0, self.rank == self.ranks - 1
        self.ahead = min(self.ranks - 1 - self.rank, microbatches)
        if not self.first:
            # the rank before may be so far ahead of this one, see `ahead`
            self.inputs = Inbox(self.rank - 1, shape, self.ahead + 2, microbatches)
            self.to_previous = Outbox(self.rank - 1)
        if not self.last:
            self.gradients = Inbox(self.rank + 1, shape, 2, microbatches)
            self.to_next = Outbox(self.rank + 1)
        self.held: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.spans: list[Span] = []

    def step(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self.first:
            self.inputs.open()
        if not self.last:
            self.gradients.open()
        self.spans.clear()
        self.total = torch.zeros(1)
        parts = list(zip(x.chunk(self.count), labels.chunk(self.count), strict=True))
        tokens = (labels != -100).sum() if self.last else None
        for x, target in parts[: self.ahead]:
            self.forward(x, target, tokens)
        for x, target in parts[self.ahead :]:
            self.forward(x, target, tokens)
            self.backward()
        for _ in range(self.ahead):
            self.backward()
        if not self.first:
            self.to_previous.close()
        if not self.last:
            self.to_next.close()
        dist.broadcast(self.total, self.ranks - 1)
        return self.total

    def forward(self, x: torch.Tensor, target: torch.Tensor, tokens: Any) -> None:
        if not self.first:
            x = self.inputs.take().detach().requires_grad_()
        begin = time.perf_counter()
        y = self.stage(x)
        if self.last:
            y = F.cross_entropy(y.flatten(0, -2), target.flatten(), reduction="sum") / tokens
            self.total += y.detach()
        self.spans.append((self.rank, "F", time.perf_counter() - begin))
        if not self.last:
            self.to_next.put(y.detach())
        self.held.append((x, y))

    def backward(self) -> None:
        x, y = self.held.popleft()
        grad = None if self.last else self.gradients.take()
        begin = time.perf_counter()
        torch.autograd.backward(y, grad)
        self.spans.append((self.rank, "B", time.perf_counter() - begin))
        if not self.last:
            self.gradients.post()
        if not self.first:
            self.to_previous.put(x.grad)
            self.inputs.post()


# --- modes: each gives a module with the rank's parameters, and one step that returns the loss ---


def by_hand(size, mesh, batch):
    stage = LlamaStage(Llama(size), dist.get_rank(), dist.get_world_size())
    rows = size.batch // size.microbatches
    pipeline = Pipeline(stage, size.microbatches, (rows, size.length, size.width))
    return stage, lambda: pipeline.step(**{"x": batch["ids"], "labels": batch["labels"]})


def ours(size, mesh, batch):
    from autoshard import autoshard

    sharded = autoshard(
        Llama(size),
        mesh,
        example_inputs=batch,
        microbatches=size.microbatches,
        schedule="1f1b",
        zero=0,
    )
    return sharded, lambda: sharded.train_step(**batch)


MODES = {"hand-written": by_hand, "A/A": by_hand, "autoshard": ours}


def tokens(size: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Ids and labels; row r does not count its first r eighths: a mean of means would show."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, size.vocab, (size.batch, size.length + 1), generator=g)
    labels = ids[:, 1:].clone()
    for r in range(size.batch):
        labels[r, : r * size.length // (2 * size.batch)] = -100
    return {"ids": ids[:, :-1].contiguous(), "labels": labels}


def seeded(size: argparse.Namespace) -> Llama:
    torch.manual_seed(0)
    return Llama(size)


def assert_alike(modes: dict[str, Any], size: argparse.Namespace, batch: dict[str, Any]) -> None:
    """One step of each against one device: the loss; every gradient of what is written by hand, and
    the norm of all gradients."""
    alone = seeded(size)
    loss = alone(**batch)
    loss.backward()
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    norm = torch.stack([g.square().sum() for g in wanted.values()]).sum()
    for name, (module, step) in modes.items():
        got = step().detach().flatten()
        torch.testing.assert_close(got, loss.detach().flatten(), rtol=1e-5, atol=0, msg=name)
        if isinstance(module, LlamaStage):
            for key, p in module.named_parameters():
                close = torch.allclose(p.grad, wanted[key], rtol=1e-3, atol=1e-6)
                assert close, f"{name}: gradient of {key}"
        own = [p.grad.square().sum() for p in module.parameters() if p.grad is not None]
        squares = torch.stack(own).sum()
        dist.all_reduce(squares)
        torch.testing.assert_close(squares, norm, rtol=1e-4, atol=0, msg=f"{name}: gradients")


def run_steps(rank: int, folder: str, size: argparse.Namespace) -> None:
    join(rank, 2, folder, 120)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    batch, modes = tokens(size), {}
    for name, build in MODES.items():
        if name not in size.skip:
            torch.manual_seed(0)
            modes[name] = build(size, mesh, batch)
    assert_alike(modes, size, batch)
    optimizers = {
        name: OPTIMIZERS[size.optimizer](module.parameters()) for name, (module, _) in modes.items()
    }

    def stepping(name: str) -> Callable[[], None]:
        def whole_step() -> None:
            modes[name][1]()
            optimizers[name].step()

        return whole_step

    times = of_slowest(
        timed(
            {name: stepping(name) for name in modes},
            size,
            size.clock,
            lambda name: optimizers[name].zero_grad(set_to_none=True),
        )
    )
    if rank == 0:
        show_steps(times, size)
    dist.barrier()
    dist.destroy_process_group()


def show_steps(times: dict[str, list[float]], size: argparse.Namespace) -> None:
    show(times, TARGET)
    print(
        f"\n{size.steps} steps of {size.batch} x {size.length} tokens in {size.microbatches} "
        f"micro-batches, {size.clock} time, {size.optimizer}; {size.layers} layers, width "
        f"{size.width}, vocabulary {size.vocab}; torch {torch.__version__}"
    )


# --- work whose time is known ---


@torch.library.custom_op("bench_pipeline::spin", mutates_args=(), tags=torch.Tag.pointwise)
def spin(x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
    """A copy of ``x``, not before so many seconds are over; its gradient takes its own."""
    end = time.perf_counter() + forward
    while time.perf_counter() < end:
        os.sched_yield()  # others may have the processor: the clock runs on
    return x.clone()


@spin.register_fake
def _(x, forward, backward):
    return torch.empty_like(x)


def _spun(ctx, inputs, output):
    ctx.seconds = inputs[2]


def _spin_back(ctx, grad):
    return spin(grad, ctx.seconds, 0.0), None, None


spin.register_autograd(_spin_back, setup_context=_spun)


class Spinning(nn.Module):
    def __init__(self, width: int, seconds: float):
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x):
        return spin(self.linear(x), self.seconds, 2 * self.seconds)


class Products(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Work(nn.Module):
    """Equal blocks, two for each stage, and a loss over as many classes as ``x`` is wide."""

    def __init__(self, size: argparse.Namespace):
        super().__init__()
        count = 2 * size.stages
        self.blocks = nn.ModuleList(
            Spinning(size.width, size.spin_ms / 2e3)
            if size.work == "spin"
            else Products(size.width)
            for _ in range(count)
        )

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x, labels)


# --- predictions ---


def work_by_hand(size, mesh, batch, microbatches: int):
    """A step, and what it gives: the spans of this rank."""
    rank, rows = dist.get_rank(), len(batch["x"]) // microbatches
    stage = nn.Sequential(*Work(size).blocks[2 * rank : 2 * rank + 2])
    pipeline = Pipeline(stage, microbatches, (rows, size.width))

    def step() -> None:
        stage.zero_grad(set_to_none=True)
        pipeline.step(**batch)

    return step, lambda: pipeline.spans


def work_by_autoshard(size, mesh, batch, microbatches: int):
    from autoshard import autoshard

    sharded = autoshard(
        Work(size), mesh, batch, microbatches=microbatches, schedule=size.schedule, zero=0
    )

    def step() -> None:
        sharded.zero_grad(set_to_none=True)
        sharded.train_step(**batch)

    def spans() -> list[Span]:
        own = [e for e in sharded.timeline().events if e.rank == dist.get_rank()]
        return [(e.stage, e.kind, e.end - e.start) for e in own if e.kind in "FBIW"]

    return step, spans


WORKERS = {"hand-written": work_by_hand, "autoshard": work_by_autoshard}


def costs_of(spans: list[Span], one: list[float], plan: Any) -> Any:
    """`autoshard.schedule.Costs` of one micro-batch, from steps of a single one: medians of their
    actions. What is left of such a step when these are taken off is transfers, as many as values go
    from rank to rank and gradients back."""
    from autoshard.schedule import Costs, adjacent

    found: dict[tuple[int, str], list[float]] = {}
    for stage, kind, seconds in spans:
        found.setdefault((stage, kind), []).append(seconds)

    def of(kinds: str) -> tuple[float, ...]:
        given = [[found[s, k] for k in kinds if (s, k) in found] for s in range(plan.stages)]
        return tuple(sum(map(statistics.median, each)) for each in given)

    edges = [(a, b) for a, b in adjacent(plan.stages) if plan.place[a] != plan.place[b]]
    left = statistics.median(one) - sum(of("F") + of("BIW"))
    each = max(0.0, left) / (2 * len(edges))
    transfers = {edge: each for a, b in edges for edge in ((a, b), (b, a))}
    return Costs(of("F"), of("BI"), of("W"), transfers)


def measured(build: Callable, size, mesh, batch, plan: Any) -> tuple[Any, list[float]]:
    """Costs, and seconds of a step until its last rank is done; what is calibrated from and what is
    predicted take turns."""
    rows = size.batch // size.microbatches
    rows_of_one = {name: value[:rows].contiguous() for name, value in batch.items()}
    made = {}
    for name, given, count in (("one", rows_of_one, 1), ("all", batch, size.microbatches)):
        torch.manual_seed(0)
        made[name] = build(size, mesh, given, count)
    notes: list[list[Span]] = []

    def note(name: str) -> None:
        if name == "all":  # of "one", which has run before, in this turn or in the last
            notes.append(list(made["one"][1]()))

    made["one"][0]()
    modes = {name: step for name, (step, _) in made.items()}
    times = of_slowest(timed(modes, size, size.clock, note))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sum(notes[size.warmup :], []))
    return costs_of(sum(everyone, []), times["one"], plan), times["all"]


def run_predictions(rank: int, folder: str, size: argparse.Namespace) -> None:
    from autoshard.schedule import dry_run, schedule

    join(rank, size.stages, folder, 120)
    mesh = dist.device_mesh.init_device_mesh("cpu", (size.stages,), mesh_dim_names=("pp",))
    g = torch.Generator().manual_seed(1)
    batch = {
        "x": torch.randn(size.batch, size.width, generator=g),
        "labels": torch.randint(0, size.width, (size.batch,), generator=g),
    }
    processors = PROCESSORS if size.work == "products" else None
    rows = []
    for name, build in WORKERS.items():
        if name in size.skip:
            continue
        plan = schedule(
            "1f1b" if build is work_by_hand else size.schedule, size.stages, size.microbatches
        )
        costs, seconds = measured(build, size, mesh, batch, plan)
        expected = dry_run(plan, costs, processors=processors).total
        rows.append([name, plan.name, costs, expected, seconds])
    if rank == 0:
        show_predictions(rows, size)
    dist.barrier()
    dist.destroy_process_group()


def show_predictions(rows: list[list[Any]], size: argparse.Namespace) -> None:
    from tabulate import tabulate

    shown = []
    for name, plan, costs, expected, seconds in rows:
        backward = map(sum, zip(costs.inputs, costs.weights, strict=True))
        stages = [" ".join(f"{s * 1e3:.1f}" for s in each) for each in (costs.forward, backward)]
        transfer = max(costs.transfer.values()) * 1e3
        ratio = statistics.median(seconds) / expected
        verdict = "met" if abs(ratio - 1) <= WITHIN else "MISSED"
        times = [expected * 1e3, *quartiles(seconds)]
        shown.append([name, plan, *stages, transfer, *times, ratio, verdict])
    headers = ["mode", "schedule", "F ms", "B ms", "transfer ms", "predicted ms", "median ms"]
    headers += ["25 %", "75 %", "ratio", f"within {WITHIN:.0%}"]
    formats = ("", "", "", "", ".2f", ".1f", ".1f", ".1f", ".1f", ".3f", "")
    print(tabulate(shown, headers, floatfmt=formats))
    print(
        f"\n{size.steps} steps of {size.microbatches} micro-batches on {size.stages} ranks and "
        f"{PROCESSORS} processors, work {size.work}; torch {torch.__version__}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    step = parser_of("", SIZE, commands.add_parser("step"))
    step.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    predict = parser_of("", WORK_SIZE, commands.add_parser("predict"))
    predict.add_argument("--work", choices=ROWS, default="spin")
    predict.add_argument("--batch", type=int, help=f"rows (default: {ROWS})")
    predict.add_argument("--schedule", default="1f1b", help="of autoshard; by hand it is 1f1b")
    for command in (step, predict):
        command.add_argument("--skip", nargs="*", default=[], help="modes to leave out, by name")
    size = parser.parse_args()
    if size.what == "step":
        on_processes(run_steps, size, 2)
    else:
        size.batch = size.batch or ROWS[size.work]
        on_processes(run_predictions, size, size.stages)


if __name__ == "__main__":
    main()
