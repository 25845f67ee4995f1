"""``autoshard demo``: a small GPT trained on four ranks and, beside them, on one device.

The ranks are processes with the gloo backend on a mesh dp=2, tp=2. Both sides start from the same
weights and see the same batches, so their loss curves must be one curve. In the end the ranks take
one step more, from the trained weights, with the layers in two stages.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import queue
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from autoshard import autoshard
from autoshard.timeline import bubble_line

MESH = {"dp": 2, "tp": 2}
#: Of the last step, and in how many micro-batches its stages take their rows.
STAGES_MESH, MICROBATCHES = {"pp": 2, "tp": 2}, 4
RANKS = 4
ROWS, LENGTH, VOCAB = 16, 64, 256
LEARNING_RATE, MAX_NORM = 2e-3, 1.0
#: Both sides compute in float32 and add in another order: so much relative difference of losses,
#: and of the weights after the last step, is rounding (5e-6 and 1e-3 were seen after 150 steps).
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-4, 1e-2
TABLES = ("params", "collectives", "memory")


class Attention(nn.Module):
    """Causal self-attention with q, k and v in one weight."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, dim=-1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """An ordinary single-device GPT over bytes: nothing in it knows of ranks.

    ``labels`` are the ids that follow ``input_ids``, both of shape (batch, length).
    """

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 4):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(place)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def build() -> tuple[GPT, dict[str, Tensor]]:
    """The demo's model and first batch; the same on every call.

    >>> model, batch = build()
    >>> batch["input_ids"].shape
    torch.Size([16, 64])
    """
    torch.manual_seed(0)
    return GPT(), Text().batch(0)


class Text:
    """The English help texts that every Python ships, as bytes."""

    def __init__(self) -> None:
        topics = pydoc_data.topics.topics
        joined = "\n\n".join(topics[name] for name in sorted(topics))
        self.data = torch.frombuffer(bytearray(joined.encode()), dtype=torch.uint8).long()

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of a step: random places of the text, the same for whoever asks."""
        chosen = torch.Generator().manual_seed(step)
        start = torch.randint(len(self.data) - LENGTH, (ROWS, 1), generator=chosen)
        rows = self.data[start + torch.arange(LENGTH + 1)]
        return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def _quiet() -> None:
    """One thread a process, as there are more of them than cores; no advice about torch."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")


# --- one of the four ranks -----------------------------------------------------------------------


def _rank(rank: int, steps: int, folder: str, reports: Any) -> None:
    """A rank's whole life; rank 0 puts ``(kind, value)`` pairs into ``reports``."""
    _quiet()
    meeting = (Path(folder) / "meeting").as_uri()  # a file, so no port is needed
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    try:
        _train_rank(rank, steps, Path(folder), reports)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _train_rank(rank: int, steps: int, folder: Path, reports: Any) -> None:
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    model, batch = build()
    text, dp = Text(), mesh["dp"].get_local_rank()

    sharded = autoshard(model, mesh, example_inputs=_part(batch, dp))
    if rank == 0:
        reports.put(("tables", [str(sharded), *(sharded.table(name) for name in TABLES)]))

    optimizer = _optimizer(sharded.parameters())
    for step in range(steps):
        loss = sharded.train_step(**_part(text.batch(step), dp))
        sharded.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            reports.put(("loss", float(loss)))

    weights = sharded.full_state_dict()  # every rank takes part in it
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
        reports.put(("weights", str(folder / "weights.pt")))
    loss, told = _step_in_stages(weights, text.batch(steps))
    if rank == 0:
        reports.put(("stages", (loss, told)))


def _step_in_stages(weights: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[float, str]:
    """The loss of one step from these weights on a mesh with pp, and what it did in time."""
    mesh = init_device_mesh("cpu", tuple(STAGES_MESH.values()), mesh_dim_names=tuple(STAGES_MESH))
    sharded = autoshard(build()[0], mesh, example_inputs=batch, microbatches=MICROBATCHES)
    sharded.load_full_state_dict(weights)
    return float(sharded.train_step(**batch)), bubble_line(sharded.timeline())


def _part(batch: dict[str, Tensor], dp: int) -> dict[str, Tensor]:
    """A data rank's rows of the global batch."""
    return {name: rows.chunk(MESH["dp"])[dp] for name, rows in batch.items()}


# --- one device, and what is shown ---------------------------------------------------------------


@dataclass
class OneDevice:
    """The same training without autoshard, a step at a time."""

    model: GPT = field(default_factory=lambda: build()[0])
    text: Text = field(default_factory=Text)
    steps: int = 0

    def __post_init__(self) -> None:
        self.optimizer = _optimizer(self.model.parameters())

    def step(self) -> float:
        """Train on the next batch; returns its loss."""
        loss = self.model(**self.text.batch(self.steps))["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.item()


def run(steps: int = 100) -> bool:
    """Run the demo and print what it does; returns whether the ranks trained as one device does."""
    _quiet()
    began = time.perf_counter()
    single = OneDevice()
    _print_opening(single, steps)
    curves: list[tuple[float, float]] = []
    drift, staged = float("nan"), (float("nan"), "")
    for kind, value in _reports(steps):
        if kind == "tables":
            print(f"\nCompiled in {time.perf_counter() - began:.1f} s.", *value, sep="\n\n")
            print("\nTraining on four ranks, and on one device beside them:")
        elif kind == "loss":
            curves.append((value, single.step()))
            _print_progress(curves, steps)
        elif kind == "stages":
            staged = value
        else:
            drift = _drift(torch.load(value), single.model.state_dict())
    print("\n" + plot(curves), columns(curves), sep="\n\n")
    return _print_verdict(curves, drift, (*staged, single.step()), time.perf_counter() - began)


def _reports(steps: int) -> Iterator[tuple[str, Any]]:
    """What rank 0 reports, until every rank has ended. A rank that fails ends them all, and its
    error is raised here."""
    reports = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory(prefix="autoshard-demo-") as folder:
        arguments = (steps, folder, reports)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        ranks = mp.start_processes(_rank, arguments, RANKS, join=False, daemon=True)
        ended = False
        while True:
            ended = ended or ranks.join(timeout=0)
            try:
                yield reports.get(timeout=0.5)
            except queue.Empty:
                if ended:
                    return


def _print_opening(single: OneDevice, steps: int) -> None:
    count = sum(p.numel() for p in single.model.parameters())
    mesh = ", ".join(f"{name}={size}" for name, size in MESH.items())
    print(
        f"A GPT of {count:,} parameters, written for one device, on {RANKS} ranks: {mesh} (gloo)."
    )
    print(f"Text: Python's own help pages, {len(single.text.data):,} bytes. Steps: {steps}.")
    print("Starting the ranks; each captures the model and compiles its part of it ...", flush=True)


def _print_progress(curves: list[tuple[float, float]], steps: int) -> None:
    """One line that is written over and over on a terminal, and one in ten steps elsewhere."""
    done, live = len(curves), sys.stdout.isatty()
    if not live and done % 10 and done not in (1, steps):
        return
    ranks, single = curves[-1]
    line = f"  step {done:>4} of {steps}   four ranks {ranks:.6f}   one device {single:.6f}"
    print(f"\r{line}" if live else line, end="" if live and done < steps else "\n", flush=True)


def _drift(weights: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of a weight, relative to the largest weight of its tensor."""
    if weights.keys() != wanted.keys():
        return float("inf")
    return max(
        ((weights[name] - value).abs().max() / value.abs().max()).item()
        for name, value in wanted.items()
    )


def plot(curves: list[tuple[float, float]], width: int = 64, height: int = 12) -> str:
    """Both loss curves as text: ``o`` four ranks, ``x`` one device, ``*`` both in one place.

    >>> print(plot([(3.0, 3.0), (2.0, 1.0)], width=2, height=3))
     3.00 |*
     2.00 | o
     1.00 | x
    """
    low, high = min(map(min, curves)), max(map(max, curves))
    width = min(width, len(curves))
    grid = [[" "] * width for _ in range(height)]
    for column in range(width):
        point = curves[column * (len(curves) - 1) // max(width - 1, 1)]
        rows = [round((high - loss) / ((high - low) or 1) * (height - 1)) for loss in point]
        grid[rows[0]][column] = "o"
        grid[rows[1]][column] = "*" if rows[0] == rows[1] else "x"
    values = [high - (high - low) * row / max(height - 1, 1) for row in range(height)]
    return "\n".join(
        f"{value:5.2f} |{''.join(line).rstrip()}" for value, line in zip(values, grid, strict=True)
    )


def columns(curves: list[tuple[float, float]], rows: int = 8) -> str:
    """The two curves in columns, at up to ``rows`` evenly spread steps."""
    last = len(curves) - 1
    chosen = sorted({last * i // max(rows - 1, 1) for i in range(rows)})
    body = [(i + 1, *curves[i], abs(curves[i][0] - curves[i][1])) for i in chosen]
    headers = ("step", "four ranks", "one device", "difference")
    return tabulate(body, headers, floatfmt=("d", ".6f", ".6f", ".1e"))


def _print_verdict(
    curves: list[tuple[float, float]],
    drift: float,
    staged: tuple[float, str, float],
    seconds: float,
) -> bool:
    """Say whether the two trainings were one; returns it. ``staged``: the loss of a step in stages,
    what it did in time, and the loss on one device."""
    loss, bubble, alone = staged
    apart = max(abs(ranks - single) / abs(single) for ranks, single in [*curves, (loss, alone)])
    same = apart <= LOSS_TOLERANCE and drift <= WEIGHT_TOLERANCE
    mesh = ", ".join(f"{name}={size}" for name, size in STAGES_MESH.items())
    print(f"\nOne step more in two stages, {mesh}, {MICROBATCHES} micro-batches of rows:")
    print(f"  loss {loss:.6f}, on one device {alone:.6f}; {bubble}.")
    print(f"\n  * where the curves coincide, o four ranks, x one device; {seconds:.0f} s in all.")
    print(f"  Losses differ by at most {apart:.1e} relative (rounding: {LOSS_TOLERANCE:.0e}),")
    print(f"  the trained weights by at most {drift:.1e} (rounding: {WEIGHT_TOLERANCE:.0e}).")
    if same:
        print("\nVerdict: PASS. The four ranks trained the model as one device does.")
    else:
        print("\nVerdict: FAIL. The four ranks and one device trained differently.")
    return same
