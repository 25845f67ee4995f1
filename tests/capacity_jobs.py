"""A mixture of experts that drops tokens by itself, on one device, and the same on ranks."""

from __future__ import annotations

import math
from typing import Any

import gloo
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.errors import MeshError
from autoshard.runtime import dispatch

EXPERTS, K, WIDTH, INNER = 4, 2, 16, 24


def root(x: torch.Tensor) -> torch.Tensor:
    """It has no gradient at zero."""
    return x.abs().sqrt()


class Mixture(nn.Module):
    """``factor``: an expert takes at most so many times its even part of each of ``groups`` equal
    groups of tokens, those of the largest weights; ``shared``: an expert for every token."""

    activation = staticmethod(F.gelu)

    def __init__(self, factor: float | None, groups: int, shared: bool):
        super().__init__()
        self.factor, self.groups = factor, groups
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)
        wide, narrow = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.shared = nn.Sequential(wide, nn.GELU(), narrow) if shared else None

    def forward(self, x: torch.Tensor, scores: torch.Tensor | None = None) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        scores = self.router(tokens) if scores is None else scores.reshape(-1, EXPERTS)
        weights, chosen = scores.softmax(-1).topk(K, -1)
        if self.factor is not None:
            weights = weights * self.kept(weights, chosen)
        rows = tokens.repeat_interleave(K, 0).unsqueeze(1)
        inner = self.activation(torch.bmm(rows, self.up[chosen.reshape(-1)]))
        out = torch.bmm(inner, self.down[chosen.reshape(-1)]).squeeze(1) * weights.reshape(-1, 1)
        out = out.view(-1, K, WIDTH).sum(1)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x)

    @torch.no_grad()
    def kept(self, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        kept = torch.ones_like(weights)
        size = len(weights) // self.groups
        most = math.ceil(round(self.factor * size * K / EXPERTS, 9))
        for group in range(self.groups):
            own = torch.arange(group * size, (group + 1) * size)
            for expert in range(EXPERTS):
                slots = [(own[t], i) for t, i in (chosen[own] == expert).nonzero().tolist()]
                for t, i in sorted(slots, key=lambda s: (-weights[s], s[0]))[most:]:
                    kept[t, i] = 0
        return kept


class Model(nn.Module):
    def __init__(self, factor: float | None = None, groups: int = 1, shared: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(32, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Mixture(factor, groups, shared) for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)

    def rooted(self) -> Model:
        for layer in self.layers:
            layer.activation = root
        return self

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Skipping(nn.Module):
    """Experts of which a token may choose none: most have chosen so, with large weights."""

    def __init__(self, experts: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.router = nn.Linear(WIDTH, experts + 1)
        with torch.no_grad():
            self.router.weight[experts].fill_(1.0)
            self.router.bias[experts] = 1.0

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).topk(1, -1)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out = out.index_add(0, token, expert(tokens[token]) * weights[token, slot, None])
        return {"loss": (x + out.view_as(x)).square().mean()}


def tokens(rows: int = 4, length: int = 6) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {n: torch.randint(32, (rows, length), generator=g) for n in ("ids", "labels")}


def one_device(
    factor: float | None, groups: int, rooted: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the model that drops by itself."""
    model = Model(factor, groups).double()
    model = model.rooted() if rooted else model
    loss = model(**tokens())
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def step(mesh: Any, factor: float | None, rooted: bool = False) -> dict[str, Any]:
    """Loss, whole gradients and loads of one step on ranks."""
    model = Model().double()
    model = model.rooted() if rooted else model
    sharded = gloo.shard(mesh, model, tokens(), expert_capacity=factor, zero=0)
    loss = sharded.train_step(**gloo.local_rows(mesh, tokens()))
    gradients = gloo.detached(sharded.full_gradients())
    return {"loss": loss, "gradients": gradients, "load": sharded.expert_load()}


def modes(mesh: Any) -> list[Any]:
    """What loads are told: before any step, after one, in evaluation, after a forward there, and
    in training again."""
    sharded = gloo.shard(mesh, Model().double(), tokens(), zero=0)
    found = [sharded.expert_load()]
    sharded.train_step(**gloo.local_rows(mesh, tokens()))
    found.append(sharded.expert_load())
    sharded.eval()
    found.append(sharded.expert_load())
    with torch.no_grad():
        sharded(**gloo.local_rows(mesh, tokens(rows=2)))
    found.append(sharded.expert_load())
    sharded.train()
    return [*found, sharded.expert_load()]


class Balanced(nn.Module):
    """Experts that are given as many tokens each: token t goes to t and t + 1."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.mixture = Mixture(None, 1, False)
        self.mixture.router = None

    def forward(self, ids, labels, scores):
        x = self.mixture(self.embed(ids), scores)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def balanced(rows: int = 8) -> dict[str, torch.Tensor]:
    """Two rows of eight tokens for each of four ranks."""
    g = torch.Generator().manual_seed(1)
    given = {n: torch.randint(32, (rows, 8), generator=g) for n in ("ids", "labels")}
    first = torch.arange(8) % EXPERTS
    scores = F.one_hot(first, EXPERTS).double() * 2 + F.one_hot((first + 1) % EXPERTS, EXPERTS)
    return given | {"scores": scores.expand(rows, 8, EXPERTS).contiguous()}


def sent(mesh: Any) -> tuple[list[int], list[int]]:
    """Bytes of rows that a step sends to other ranks, one transfer after the other; and what its
    load says."""
    sharded = gloo.shard(mesh, Balanced().double(), balanced(), zero=0)
    found, exchange = [], dispatch._exchange

    def counts(x: torch.Tensor, link: Any, sent: Any, got: Any) -> torch.Tensor:
        if x.ndim > 1:
            found.append((sum(sent) - sent[link.index]) * x.shape[1] * x.element_size())
        return exchange(x, link, sent, got)

    dispatch._exchange = counts
    try:
        sharded.train_step(**gloo.local_rows(mesh, balanced()))
    finally:
        dispatch._exchange = exchange
    return found, [load.sent[mesh.get_rank()] for load in sharded.expert_load()]


def departures(mesh: Any, recompute: str) -> tuple[dict[str, Any], list[int]]:
    """Loss and gradients of a step of a model with shared experts; and how many transfers of rows
    set out, how many were waited for, and how many of them twice."""
    options = {"zero": 0, "recompute": recompute}
    sharded = gloo.shard(mesh, Model(shared=True).double(), tokens(), **options)
    under_way: list[torch.Tensor] = []
    counts = [0, 0, 0]
    exchange, waited = dispatch._exchange, dispatch._waited

    def sets_out(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        sent = exchange(x, *rest)
        under_way.append(sent)
        counts[0] += 1
        return sent

    def arrives(x: torch.Tensor) -> torch.Tensor:
        known = any(x is each for each in under_way)
        counts[1 if known else 2] += 1
        under_way[:] = [each for each in under_way if each is not x]
        return waited(x)

    dispatch._exchange, dispatch._waited = sets_out, arrives
    try:
        loss = sharded.train_step(**gloo.local_rows(mesh, tokens()))
    finally:
        dispatch._exchange, dispatch._waited = exchange, waited
    return {"loss": loss, **gloo.detached(sharded.full_gradients())}, counts


def uneven(mesh: Any) -> str:
    """What ranks with different numbers of rows are told."""
    sharded = gloo.shard(mesh, Model().double(), tokens(), expert_capacity=1.0)
    try:
        sharded.train_step(**gloo.local_rows(mesh, tokens(), [1, 3]))
    except MeshError as error:
        return str(error)
    return "nothing was raised"


def order(mesh: Any) -> list[str]:
    """What happens in a step of a model with shared experts, one after the other: rows set out and
    are waited for, and the shared expert of the first layer has computed."""
    sharded = gloo.shard(mesh, Model(shared=True).double(), tokens(), zero=0)
    happened: list[str] = []
    exchange, waited = dispatch._exchange, dispatch._waited

    def sets_out(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        happened.extend(["out"] if x.ndim > 1 else [])
        return exchange(x, *rest)

    def arrives(x: torch.Tensor) -> torch.Tensor:
        happened.extend(["in"] if x.ndim > 1 else [])
        return waited(x)

    parameters = dict(sharded.named_parameters())
    for name, what in (("0.weight", "up"), ("2.weight", "down")):
        weight = parameters[f"layers.0.shared.{name}"]
        weight.register_post_accumulate_grad_hook(lambda _, what=what: happened.append(what))
    dispatch._exchange, dispatch._waited = sets_out, arrives
    try:
        loss = sharded.train_step(**gloo.local_rows(mesh, tokens()))
    finally:
        dispatch._exchange, dispatch._waited = exchange, waited
    assert loss.isfinite()
    return happened
