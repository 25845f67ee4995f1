"""Small models of blocks, for pipelines: what one block hands to another, and what the loss is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, CLASSES, BLOCKS = 8, 5, 4


def rows(count: int = 8) -> dict[str, torch.Tensor]:
    """Vectors, and a class for each."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(count, WIDTH, generator=g)
    return {"x": x, "target": torch.randint(CLASSES, (count,), generator=g)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Blocks, and a head. ``body(model, x)``: what they make of the input; ``loss(model, y, target,
    x)``: of the head's result. ``outputs(model, y, target, x)``: what else is returned."""

    def __init__(
        self,
        body: Callable[..., Any] | None = None,
        loss: Callable[..., Any] | None = None,
        block: type[nn.Module] = Block,
        outputs: Callable[..., dict[str, Any]] | None = None,
        blocks: int = BLOCKS,
    ):
        super().__init__()
        self.body, self.loss = body or in_turn, loss or mean_of_tokens
        self.outputs = outputs
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x, target):
        y = self.head(self.body(self, x))
        more = self.outputs(self, y, target, x) if self.outputs else {}
        return {"loss": self.loss(self, y, target, x), "y": y, **more}


class Headless(Chain):
    """The same without a loss of its own."""

    def forward(self, x):
        return self.head(self.body(self, x))


# --- bodies ---


def in_turn(m, x):
    for block in m.blocks:
        x = block(x)
    return x


def skips(m, x):
    """As a U-Net: what the first blocks make is read by the last ones."""
    first, second, third, fourth = m.blocks
    a = first(x)
    b = second(a)
    return fourth(third(b) + b) + a * x


def first_in_all(m, x):
    first, *others = m.blocks
    h = a = first(x)
    for block in others:
        h = block(h + a)
    return h


def integers_and_masks(m, x):
    first, second, third, fourth = m.blocks
    a = first(x)
    best, positive = a.argmax(-1), a > 0
    b = third(second(a))
    b = torch.where(positive, b, b * 0.5) + F.one_hot(best, WIDTH).to(b.dtype)
    return fourth(b)


def one_block_twice(m, x):
    first, second, third, fourth = m.blocks
    for block in (first, second, third, first, fourth):
        x = block(x)
    return x


def parts_of_one_split(m, x):
    """Parts of one op's result are read in several stages."""
    parts = (torch.cat([x, 2 * x, 3 * x, x], -1) * m.scale).split(WIDTH, -1)
    for block, part in zip(m.blocks, parts, strict=True):
        x = block(x + part)
    return x


def written_in_place(m, x):
    first, second, third, fourth = m.blocks
    h = first(x)
    h += 1
    h = second(h)
    h.mul_(0.5)
    g = third(h)
    g[:, 0] = 0
    return fourth(g)


class Halves(nn.Module):
    """Gives two values, as a block that keeps a cache does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        return self.linear(x).chunk(2, -1)


def two_values(m, x):
    a, b = m.blocks[0](x)
    c, d = m.blocks[1](a)
    e, f = m.blocks[2](c + b)
    g, h = m.blocks[3](e * d)
    return g + h + f + b


class Best(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        return self.linear(x).topk(WIDTH, -1)


def values_and_places(m, x):
    places: Any = 0
    for block in m.blocks:
        values, at = block(x)
        x, places = values + 0.01 * places, at.to(x.dtype)
    return x


# --- blocks that keep something ---


class Normed(nn.Module):
    """Batch norm: every row is made of the statistics of all."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + self.norm(self.linear(x))


class Counting(nn.Module):
    """Buffers are read, and written with a mean over all rows and a number of steps."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        y = torch.tanh(self.linear(x)) - self.mean
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * y.mean(0))
            self.steps += 1
        return y


class Routed(nn.Module):
    """Four experts; what forward adds to a router's scores depends on how often each was chosen by
    all tokens, as in DeepSeek-V3."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(0.3 * torch.randn(4, WIDTH, WIDTH))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x):
        scores = self.router(x).sigmoid()
        ids = (scores + self.bias).topk(2, -1).indices
        chosen = F.one_hot(ids, 4).to(x.dtype)
        with torch.no_grad():
            counts = chosen.sum((0, 1))
            self.bias += 0.1 * torch.sign(counts.mean() - counts)
        gates = (chosen * scores.gather(-1, ids)[..., None]).sum(1)
        return x + torch.einsum("te,eij,ti->tj", gates, self.experts, x)


# --- losses ---


def mean_of_tokens(m, y, target, x):
    return F.cross_entropy(y, target)


def logsumexp_of_layers(m, y, target, x):
    """A term of every block's result, as the z-loss of routers."""
    terms = [F.cross_entropy(y, target)]
    for block in m.blocks:
        x = block(x)
        terms.append(0.1 * x.logsumexp(-1).square().mean())
    return torch.stack(terms).sum()


#: Losses that are sums over micro-batches; of these every one begins backward at once.
SUMS: dict[str, Callable[..., torch.Tensor]] = {
    "mean over tokens": mean_of_tokens,
    "squares": lambda m, y, t, x: F.mse_loss(y[:, 0], t.to(y.dtype)),
    "mean of losses": lambda m, y, t, x: F.cross_entropy(y, t, reduction="none").mean(),
    "sum over a number": lambda m, y, t, x: F.cross_entropy(y, t, reduction="sum") / t.shape[0],
    "of some rows": lambda m, y, t, x: (
        (F.cross_entropy(y, t, reduction="none") * (t > 1)).sum() / (t > 1).sum()
    ),
    "smoothed, and a mean": lambda m, y, t, x: (
        F.cross_entropy(y, t, label_smoothing=0.1) - 0.5 * y.mean()
    ),
    "weighed classes": lambda m, y, t, x: F.cross_entropy(
        y, t, weight=torch.arange(1, 1 + CLASSES, dtype=y.dtype)
    ),
    "decay of all weights": lambda m, y, t, x: (
        F.cross_entropy(y, t) + 0.1 * sum(p.square().sum() for p in m.parameters())
    ),
    "decay of the first weights": lambda m, y, t, x: (
        F.cross_entropy(y, t) + 0.1 * m.blocks[0].up.weight.square().sum()
    ),
    "times a parameter": lambda m, y, t, x: F.cross_entropy(y, t) * m.scale,
    "over a parameter, and more": lambda m, y, t, x: (
        F.cross_entropy(y, t) / m.scale.exp() + m.scale
    ),
    "terms of all layers": logsumexp_of_layers,
}
#: Losses that are none, and the op by which they are not.
PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "a root": (lambda m, y, t, x: y.square().mean().sqrt(), "sqrt"),
    "a variance": (lambda m, y, t, x: y.var(), "var"),
    "a product of means": (
        lambda m, y, t, x: F.cross_entropy(y, t) + (y.mean(0) * y.square().mean(0)).sum(),
        "mul",
    ),
    "over a sum": (
        lambda m, y, t, x: F.cross_entropy(y, t, reduction="sum") / y.detach().abs().sum(),
        "div",
    ),
}


def contrastive(m, y, target, x):
    return F.cross_entropy(y @ y.T, torch.arange(y.shape[0]))
