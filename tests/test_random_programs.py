"""Small models made at random, on meshes chosen at random, against one device.

A model is a list of steps, printed with every failure: ``agrees(Case([("mlp", 4, "gelu")], ...))``
brings one back. Steps change every day; ``AUTOSHARD_DAY=2026-01-31`` brings a day back, and
``AUTOSHARD_EXAMPLES`` makes more of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import CONTEXTS

from autoshard import verify
from autoshard.errors import AutoshardError

DAY = date.fromisoformat(os.environ.get("AUTOSHARD_DAY", date.today().isoformat()))
EXAMPLES = int(os.environ.get("AUTOSHARD_EXAMPLES", "40"))
GROUPS = 2  # tests that share the examples

ROWS, LENGTH, VOCAB = 4, 8, 24
MESHES = ["dp=2", "dp=4", "tp=2", "tp=4", "tp=3", "dp=2,tp=2", "dp=2,tp=4"]
CONTEXT_MESHES = ["cp=2", "cp=2,tp=2", "cp=4", "dp=2,cp=2"]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "kink": lambda x: torch.where(x > 0, x, 0.1 * x),
    "clamp": lambda x: x.clamp(-0.9, 1.1),
}
#: Reductions, written so that what they give has the shape of what they read.
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "center": lambda x: x - x.mean(-1, keepdim=True),
    "center over positions": lambda x: x - x.mean(1, keepdim=True),
    "by norm": lambda x: x / (1 + x.square().sum(-1, keepdim=True)).sqrt(),
    "by deviation": lambda x: x / (1 + x.var(-1, keepdim=True)),
    "by the largest": lambda x: x / (1 + x.abs().amax(-1, keepdim=True)),
    "by logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "cumulated": lambda x: x.cumsum(1) / LENGTH,
    "softmax over positions": lambda x: x.softmax(1) * x,
    "gram": lambda x: (x @ x.mT).softmax(-1) @ x,
    "pooled": lambda x: x + x.amax(1, keepdim=True),
}
#: Views that give back the width they read, which is even.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shuffle": lambda x: x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
    "swap halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "rotate half": lambda x: torch.cat(
        [-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1
    ),
    "one half active": lambda x: torch.cat([x.chunk(2, -1)[0].tanh(), x.chunk(2, -1)[1]], -1),
    "shift": lambda x: F.pad(x[:, :-1], (0, 0, 1, 0)),
    "flip": lambda x: x.flip(-1),
    "repeat": lambda x: x.chunk(2, -1)[0].repeat(1, 1, 2),
    "stack": lambda x: torch.stack(x.chunk(2, -1), -1).sum(-1).repeat_interleave(2, -1),
    "expand": lambda x: x[:, :1].expand_as(x) + x,
}


class Linear(nn.Module):
    def __init__(self, width: int, to: int, bias: bool):
        super().__init__()
        self.weight = nn.Linear(width, to, bias=bias)

    def forward(self, x):
        return self.weight(x)


class MLP(nn.Module):
    def __init__(self, width: int, times: int, activation: str, gated: bool):
        super().__init__()
        self.act, self.up = ACTIVATIONS[activation], nn.Linear(width, times * width)
        self.gate = nn.Linear(width, times * width, bias=False) if gated else None
        self.down = nn.Linear(times * width, width)

    def forward(self, x):
        hidden = self.act(self.up(x))
        return self.down(hidden if self.gate is None else hidden * self.gate(x))


class FusedGate(nn.Module):
    def __init__(self, width: int, activation: str):
        super().__init__()
        self.act, self.up = ACTIVATIONS[activation], nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return self.down(self.act(gate) * up)


class Attention(nn.Module):
    def __init__(
        self, width: int, heads: int, kv: int, fused: bool, written_out: bool, causal: bool
    ):
        super().__init__()
        self.sizes, self.written_out, self.causal = (heads, kv, width // heads), written_out, causal
        own, other = width, kv * (width // heads)
        self.widths = [own, other, other]
        self.qkv = nn.Linear(width, sum(self.widths)) if fused else None
        if not fused:
            self.q, self.k, self.v = (nn.Linear(width, w, bias=False) for w in self.widths)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        parts = (
            self.qkv(x).split(self.widths, -1)
            if self.qkv is not None
            else (self.q(x), self.k(x), self.v(x))
        )
        heads, kv, size = self.sizes
        q, k, v = (
            p.unflatten(-1, (n, size)).transpose(1, 2)
            for p, n in zip(parts, (heads, kv, kv), strict=True)
        )
        k, v = (t.repeat_interleave(heads // kv, 1) if kv < heads else t for t in (k, v))
        if self.written_out:
            scores = q @ k.mT / size**0.5
            if self.causal:
                length = x.shape[1]
                mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
                scores = scores.masked_fill(~mask, float("-inf"))
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(-2))


class Scored(nn.Module):
    """Attention with masks of several kinds, written as models write it.

    ``masks``: of "causal", "window" and "padding" (keys, by what the input says there). ``change``
    of the scores: "alibi", "softcap", or "". ``how``: "sdpa" with all of it in a mask, "where", or
    "added".
    """

    def __init__(
        self, width: int, heads: int, kv: int, masks: tuple[str, ...], change: str, how: str
    ):
        super().__init__()
        self.sizes, self.masks, self.change = (heads, kv, width // heads), masks, change
        self.how = "where" if how == "sdpa" and change == "softcap" else how
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * kv * (width // heads), bias=False)
        self.out = nn.Linear(width, width, bias=False)
        slopes = torch.tensor([0.5 ** (h + 1) for h in range(heads)])
        self.register_buffer("slopes", slopes.view(1, heads, 1, 1))

    def allowed(self, x):
        at = torch.arange(x.shape[1], device=x.device)
        rows, columns = at[:, None], at[None, :]
        out = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)[None, None]
        if "causal" in self.masks:
            out = out & (columns <= rows)
        if "window" in self.masks:
            out = out & ((rows - columns).abs() < 3)
        if "padding" in self.masks:
            out = out & (x.detach()[..., 0] > -0.5)[:, None, None, :]
        # torch's own kernel of the CPU gives rows that read nothing a wrong gradient of queries
        return out | (rows == columns) if self.how == "sdpa" else out

    def forward(self, x):
        heads, kv, size = self.sizes
        q = self.q(x).unflatten(-1, (heads, size)).transpose(1, 2)
        k, v = (p.unflatten(-1, (kv, size)).transpose(1, 2) for p in self.kv(x).chunk(2, -1))
        k, v = (
            p[:, :, None].expand(-1, -1, heads // kv, -1, -1).flatten(1, 2) if kv < heads else p
            for p in (k, v)
        )
        low = torch.finfo(x.dtype).min  # where nothing may be read, all is, and alike
        at = torch.arange(x.shape[1], device=x.device)
        bias = self.slopes * (at[None, :] - at[:, None]) if self.change == "alibi" else 0.0
        added = torch.zeros_like(x[:1, :1, :1, None]).masked_fill(~self.allowed(x), low)
        if self.how == "sdpa":
            mask = (added + bias).to(x.dtype)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = torch.matmul(q, k.transpose(2, 3)) * size**-0.5 + bias
            scores = 2 * torch.tanh(scores / 2) if self.change == "softcap" else scores
            if self.how == "where":
                scores = torch.where(self.allowed(x), scores, low)
            else:
                scores = scores + added
            y = F.softmax(scores, -1).to(x.dtype) @ v
        return self.out(y.transpose(1, 2).flatten(-2))


class Norm(nn.Module):
    def __init__(self, width: int, kind: str):
        super().__init__()
        self.norm = nn.LayerNorm(width) if kind == "layer" else nn.RMSNorm(width)

    def forward(self, x):
        return self.norm(x)


class Scale(nn.Module):
    """A parameter of the width, or of one number, used once or twice."""

    def __init__(self, width: int, scalar: bool, twice: bool):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()) if scalar else torch.rand(width))
        self.twice = twice

    def forward(self, x):
        return (x * self.scale).tanh() + self.scale if self.twice else x * self.scale


class Positions(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * LENGTH, width) / 4)

    def forward(self, x):
        return x + self.table[: x.shape[1]]


class Bilinear(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.left, self.right = nn.Linear(width, inner), nn.Linear(width, inner)
        self.back = nn.Parameter(torch.randn(inner, width) / inner**0.5)

    def forward(self, x):
        return torch.einsum("bsi,io->bso", self.left(x) * self.right(x).sigmoid(), self.back)


class Apply(nn.Module):
    def __init__(self, width: int, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Repeat(nn.Module):
    """A linear that is used twice."""

    def __init__(self, width: int, activation: str):
        super().__init__()
        self.linear, self.act = nn.Linear(width, width), ACTIVATIONS[activation]

    def forward(self, x):
        return self.linear(self.act(self.linear(x)))


STEPS: dict[str, Callable[..., nn.Module]] = {
    "linear": Linear,
    "mlp": MLP,
    "fused gate": FusedGate,
    "attention": Attention,
    "scored": Scored,
    "norm": Norm,
    "scale": Scale,
    "positions": Positions,
    "bilinear": Bilinear,
    "twice": Repeat,
    "act": lambda width, name: Apply(width, ACTIVATIONS[name]),
    "reduce": lambda width, name: Apply(width, REDUCTIONS[name]),
    "view": lambda width, name: Apply(width, VIEWS[name]),
}

LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross entropy": lambda y, ids: F.cross_entropy(y.flatten(0, 1), ids.flatten(), ignore_index=0),
    "mean square": lambda y, ids: y.square().mean(),
    "sum over positions": lambda y, ids: y.sum(1).square().mean(),
    "last position": lambda y, ids: y[:, -1].logsumexp(-1).mean(),
    "log softmax": lambda y, ids: -y.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).mean(),
}


@dataclass(frozen=True)
class Case:
    """``steps``: kind, residual or not, and the arguments of the kind. ``eager``: tensor
    parallelism takes every axis that it can, whatever that costs."""

    steps: tuple[tuple[Any, ...], ...]
    mesh: str
    width: int = 16
    loss: str = "mean square"
    sequence_parallel: bool = True
    tied: bool = False
    eager: bool = False
    zero: int = 0
    recompute: str = "none"
    context: str = "ring"


class Model(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        width = case.width
        self.embed = nn.Embedding(VOCAB, width)
        self.steps, self.residual = nn.ModuleList(), []
        for kind, residual, *arguments in case.steps:
            self.steps.append(STEPS[kind](width, *arguments))
            if kind == "linear":
                width, residual = arguments[0], residual and arguments[0] == width
            self.residual.append(residual)
        self.head = nn.Linear(width, VOCAB, bias=not case.tied)
        if case.tied and width == case.width:
            self.head.weight = self.embed.weight
        self.loss = LOSSES[case.loss]

    def forward(self, ids):
        x = self.embed(ids)
        for step, residual in zip(self.steps, self.residual, strict=True):
            x = x + step(x) if residual else step(x)
        y = self.head(x)
        return {"loss": self.loss(y, ids), "logits": y}


def random_case(chance: random.Random, meshes: Sequence[str] = MESHES) -> Case:
    base = chance.choice([16, 24, 32])
    width, steps = base, []
    pick: dict[str, Callable[[], tuple[Any, ...]]] = {
        "linear": lambda: (chance.choice([16, 24, 32]), chance.random() < 0.5),
        "mlp": lambda: (chance.choice([2, 4]), activation(), chance.random() < 0.5),
        "fused gate": lambda: (activation(),),
        "attention": lambda: (*heads(), *(chance.random() < 0.5 for _ in range(3))),
        "scored": lambda: (*heads(), masks(), *changes()),
        "norm": lambda: (chance.choice(["layer", "rms"]),),
        "scale": lambda: (chance.random() < 0.3, chance.random() < 0.3),
        "positions": lambda: (),
        "bilinear": lambda: (chance.choice([16, 48]),),
        "twice": lambda: (activation(),),
        "act": lambda: (activation(),),
        "reduce": lambda: (chance.choice(list(REDUCTIONS)),),
        "view": lambda: (chance.choice(list(VIEWS)),),
    }

    def activation() -> str:
        return chance.choice(list(ACTIVATIONS))

    def heads() -> tuple[int, int]:
        return chance.choice([(4, 4), (4, 2), (4, 1), (2, 2), (8, 4)])

    def masks() -> tuple[str, ...]:
        return tuple(m for m in ("causal", "window", "padding") if chance.random() < 0.5)

    def changes() -> tuple[str, str]:
        return chance.choice(["", "alibi", "softcap"]), chance.choice(["sdpa", "where", "added"])

    for _ in range(chance.randint(2, 6)):
        kind = chance.choice([*pick, "mlp", "attention", "scored", "reduce", "view"])
        arguments = pick[kind]()
        steps.append((kind, chance.random() < 0.5, *arguments))
        width = arguments[0] if kind == "linear" else width
    return Case(
        tuple(steps),
        chance.choice(meshes),
        base,
        chance.choice(list(LOSSES)),
        chance.random() < 0.6,
        chance.random() < 0.2,
        chance.random() < 0.4,
        chance.choice([0, 3]),
        chance.choice(["none", "block"]),
        chance.choice(CONTEXTS),
    )


def outcome(case: Case) -> str:
    """Nothing where the ranks agree with one device, "refused: why" where they say that they
    cannot, else what differs."""
    from passes import tensor_parallel

    torch.manual_seed(0)
    model = Model(case)
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH))
    for row in range(ROWS):
        ids[row, : 2 * row] = 0  # rows count differently: a mean of means is wrong
    threshold = tensor_parallel.THRESHOLD
    try:
        tensor_parallel.THRESHOLD = 0 if case.eager else threshold
        report = verify(
            model,
            case.mesh,
            example_inputs={"ids": ids},
            steps=1,
            sequence_parallel=case.sequence_parallel,
            zero=case.zero,
            recompute=case.recompute,
            context_parallel=case.context,
        )
    except AutoshardError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        tensor_parallel.THRESHOLD = threshold
    return "" if report.ok else f"{report.verdict}"


def agrees(case: Case) -> bool:
    found = outcome(case)
    return not found or found.startswith("refused")


def smallest(case: Case) -> Case:
    """A case with fewer steps and plainer options that still disagrees."""
    for _ in range(20):
        plainer = [
            replace(case, steps=case.steps[:i] + case.steps[i + 1 :])
            for i in range(len(case.steps))
        ]
        plainer += [replace(case, tied=False)] if case.tied else []
        plainer += [replace(case, eager=False)] if case.eager else []
        plainer += [replace(case, sequence_parallel=False)] if case.sequence_parallel else []
        plainer += [replace(case, zero=0)] if case.zero else []
        plainer += [replace(case, recompute="none")] if case.recompute != "none" else []
        plainer += [replace(case, context="ring")] if case.context != "ring" else []
        plainer += [replace(case, loss="mean square")] if case.loss != "mean square" else []
        plainer += [
            replace(case, steps=(*case.steps[:i], (s[0], False, *s[2:]), *case.steps[i + 1 :]))
            for i, s in enumerate(case.steps)
            if s[1]
        ]
        found = next((c for c in plainer if not agrees(c)), None)
        if found is None:
            return case
        case = found
    return case


def refusals(cases: list[Case], record) -> list[str]:
    """Why some cases are refused, where all others agree with one device."""
    found = {case: outcome(case) for case in cases}
    refused = [text for text in found.values() if text.startswith("refused")]
    record("refused", len(refused))
    wrong = [case for case, text in found.items() if text and text not in refused]
    if wrong:
        least = smallest(wrong[0])
        lines = [f"{case}\n    {found[case][:300]}" for case in wrong]
        pytest.fail(f"AUTOSHARD_DAY={DAY}, least: {least}\n{outcome(least)}\n\n" + "\n".join(lines))
    return refused


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_programs_train_like_one_device(group, record_property):
    chance = random.Random(DAY.toordinal())
    cases = [random_case(chance) for _ in range(EXAMPLES)][group::GROUPS]
    refused = refusals(cases, record_property)
    assert len(refused) < 0.2 * len(cases), "\n".join(refused)


#: Why cp may refuse a random program.
REASONS = ("scans", "heads of")


def test_random_programs_whose_tokens_are_cut_train_like_one_device(record_property):
    """Refused are only scans over tokens, and heads that there are too few of."""
    chance = random.Random(-DAY.toordinal())
    cases = [random_case(chance, CONTEXT_MESHES) for _ in range(EXAMPLES // 2)]
    refused = refusals(cases, record_property)
    assert all(any(why in text for why in REASONS) for text in refused), "\n".join(refused)
    assert len(refused) < 0.5 * len(cases), "\n".join(refused)
