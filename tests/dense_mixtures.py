"""Mixtures of which every expert computes every token, and loops that give a token one expert, as
they are written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Every(nn.Module):
    """Experts stacked in parameters, or a module each; ``form``: what is done with them."""

    def __init__(self, form: str, experts: int = 4, k: int = 2, width: int = 16, inner: int = 24):
        super().__init__()
        self.form, self.k, self.experts = form, k, experts
        self.router = nn.Linear(width, experts, bias=False)
        if form in LOOPS:
            each = (feed_forward(width, inner) for _ in range(experts))
            self.each = nn.ModuleList(each)
            return
        self.up = nn.Parameter(torch.randn(experts, width, inner) / 4)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / 4)
        self.up_bias = nn.Parameter(torch.randn(experts, inner) / 4)
        self.down_bias = nn.Parameter(torch.randn(experts, width) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x if self.form in WITH_ROWS else x.reshape(-1, x.shape[-1])
        return getattr(self, self.form)(tokens, self.router(tokens)).view_as(x)

    def chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """[tokens, experts], zero but for the chosen ones."""
        weights, chosen = scores.softmax(-1).topk(self.k, -1)
        return torch.zeros_like(scores).scatter(-1, chosen, weights)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(torch.einsum("td,edh->teh", x, self.up))

    def summed(self, hidden: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return torch.einsum("teh,ehd,te->td", hidden, self.down, given)

    # rewritten

    def batched(self, x, scores):
        """Products by expert, with biases."""
        given = self.chosen(scores)
        rows = x.unsqueeze(0).expand(self.experts, -1, -1)
        hidden = F.silu(torch.bmm(rows, self.up) + self.up_bias[:, None])
        out = torch.bmm(hidden, self.down) + self.down_bias.unsqueeze(1)
        return (out * given.t().unsqueeze(-1)).sum(0)

    def broadcast(self, x, scores):
        """One matmul; a weight for each place of a token, by one_hot."""
        weights, chosen = scores.softmax(-1).topk(self.k, -1)
        given = (F.one_hot(chosen, self.experts) * weights[..., None]).sum(1)
        out = torch.matmul(F.relu(torch.matmul(x[None], self.up)).pow(2), self.down)
        return (out.transpose(0, 1) * given.unsqueeze(-1)).sum(1)

    def gated(self, x, scores):
        """Weights are a softmax over those that are chosen; experts with gates and a norm."""
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen = chosen.scatter(1, scores.topk(self.k, -1).indices, True)
        given = scores.masked_fill(~chosen, float("-inf")).softmax(-1)
        gate, up = torch.einsum("td,edh->teh", x, self.up).chunk(2, -1)
        hidden = F.silu(gate) * up
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)
        out = torch.einsum("teh,ehd->ted", hidden, self.down[:, : self.down.shape[1] // 2])
        return torch.bmm(given.unsqueeze(1), out).squeeze(1)

    def weighted_inputs(self, x, scores):
        """Weights on what experts are given: they make zero of zero."""
        weights, chosen = scores.topk(self.k, -1)
        given = torch.full_like(scores, float("-inf")).scatter(1, chosen, weights).sigmoid()
        rows = x.repeat(self.experts, 1) * given.transpose(0, 1).reshape(-1, 1)
        rows = rows.view(self.experts, -1, x.shape[1])
        return torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down).sum(0)

    def in_rows(self, x, scores):
        """Tokens of two dimensions."""
        hidden = F.gelu(torch.einsum("bsd,edh->bseh", x, self.up) + self.up_bias)
        return torch.einsum("bseh,ehd,bse->bsd", hidden, self.down, self.chosen(scores))

    def folded(self, x, scores):
        """Experts side by side in one width."""
        up = self.up.permute(0, 2, 1).reshape(-1, x.shape[1])
        hidden = F.gelu(F.linear(x, up)).view(x.shape[0], self.experts, -1)
        hidden = hidden * self.chosen(scores)[..., None]
        return hidden.flatten(1) @ self.down.reshape(-1, x.shape[1])

    def square(self, x, scores):
        """A layer as wide as the tokens."""
        out = torch.einsum("td,edf->tef", x, self.up)
        return x + torch.einsum("te,ted->td", self.chosen(scores), F.relu(out))

    def types(self, x, scores):
        """Sums in other types than what is summed."""
        hidden = self.hidden(x)
        scale = hidden.square().mean(-1, keepdim=True, dtype=torch.float64) + 1e-5
        hidden = (hidden.double() * scale.rsqrt()).to(x.dtype)
        out = torch.einsum("teh,ehd->ted", hidden, self.down) * self.chosen(scores)[..., None]
        return out.sum(1, dtype=torch.float64).to(x.dtype)

    def best(self, x, scores):
        """One expert a token."""
        given = F.one_hot(scores.argmax(-1), self.experts) * scores.softmax(-1)
        return self.summed(self.hidden(x), given)

    def loop(self, x, scores):
        given, out = self.chosen(scores), F.gelu(x)
        for e, expert in enumerate(self.each):
            out = out + expert(x) * given[:, e, None]
        return out

    def loop_in_rows(self, x, scores):
        given = self.chosen(scores)
        return sum(expert(x) * given[..., e : e + 1] for e, expert in enumerate(self.each))

    def loop_compared(self, x, scores):
        weights, chosen = scores.softmax(-1).topk(self.k, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.each):
            out = out + expert(x) * (weights * (chosen == e)).sum(-1, keepdim=True)
        return out

    def stacked(self, x, scores):
        out = torch.stack([expert(x) for expert in self.each], 1)
        return torch.einsum("ted,te->td", out, self.chosen(scores))

    # loops of which an expert computes its own tokens

    def argmax(self, x, scores):
        weights = scores.softmax(-1)
        chosen = weights.argmax(-1)
        weights = weights.gather(1, chosen[:, None])[:, 0]
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.each):
            own = chosen == e
            out[own] = expert(x[own]) * weights[own, None]
        return out

    def maximum(self, x, scores):
        weights, chosen = scores.softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.each):
            (own,) = torch.where(chosen == e)
            out.index_add_(0, own, expert(x[own]) * weights[own].unsqueeze(-1))
        return out

    def one_place(self, x, scores):
        """Ids that stay [tokens, 1]."""
        weights, chosen = scores.softmax(-1).topk(1, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.each):
            own = (chosen == e).squeeze(-1)
            out[own] += expert(x[own]) * weights[own]
        return out

    def hot(self, x, scores):
        """Masks by one_hot."""
        weights, chosen = scores.softmax(-1).topk(self.k, -1)
        mask, out = F.one_hot(chosen, self.experts).permute(2, 1, 0), torch.zeros_like(x)
        for e, expert in enumerate(self.each):
            place, token = torch.where(mask[e])
            out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return out

    def detached(self, x, scores):
        """Weights that learn nothing."""
        weights, chosen = scores.softmax(-1).topk(self.k, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.each):
            own = (chosen == e).any(-1)
            given = (weights * (chosen == e)).sum(-1).detach()
            out[own] += expert(x[own]) * given[own, None]
        return out

    def skipping(self, x, scores):
        """A choice that no expert belongs to."""
        weights, chosen = scores.softmax(-1).topk(self.k, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.each[:-1]):
            token, place = torch.where(chosen == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return out

    # left as they are

    def two_sums(self, x, scores):
        """Experts and parts of what they give are added up at once."""
        hidden = torch.einsum("td,edh->teh", x, self.up)
        hidden = hidden.unflatten(2, (2, -1)) * self.chosen(scores)[..., None, None]
        return hidden.sum((1, 2)) @ self.down[0, :12]

    def soft(self, x, scores):
        return self.summed(self.hidden(x), scores.softmax(-1))

    def nearly_zero(self, x, scores):
        """Zero only as long as scores are small."""
        return self.summed(self.hidden(x), self.chosen(scores) + F.relu(scores - 20))

    def straight_through(self, x, scores):
        """Weights that are zero, and have a gradient."""
        soft = scores.softmax(-1)
        hard = torch.zeros_like(soft).scatter(-1, soft.topk(self.k, -1).indices, 1.0)
        return self.summed(self.hidden(x), hard - soft.detach() + soft)

    def biased_inputs(self, x, scores):
        """Experts that make something of zero."""
        rows = x[:, None] * self.chosen(scores)[..., None]
        hidden = F.gelu(torch.einsum("ted,edh->teh", rows, self.up) + self.up_bias)
        return torch.einsum("teh,ehd->td", hidden, self.down)

    def other_experts(self, x, scores):
        """Tokens with the weights of other experts."""
        return self.summed(self.hidden(x), self.chosen(scores).flip(-1))

    def competing(self, x, scores):
        """Experts that see each other."""
        hidden = torch.einsum("td,edh->teh", x, self.up).softmax(1)
        return self.summed(hidden, self.chosen(scores))


DENSE_LOOPS = ("loop", "loop_in_rows", "loop_compared", "stacked")
OWN_TOKENS = ("argmax", "maximum", "one_place", "hot", "skipping")
LOOPS = (*DENSE_LOOPS, *OWN_TOKENS, "detached")
WITH_ROWS = ("in_rows", "loop_in_rows")
DENSE = (
    *(
        "types",
        "batched",
        "broadcast",
        "gated",
        "weighted_inputs",
        "in_rows",
        "folded",
        "square",
        "best",
    ),
    *DENSE_LOOPS,
)
#: What is said of those that are left.
LEFT = {
    "two_sums": "a sum over experts and over what they give",
    "soft": "experts that all have a weight for every token",
    "nearly_zero": "experts that count for tokens that have not chosen them",
    "straight_through": "experts that count for tokens that have not chosen them",
    "biased_inputs": "experts that count for tokens that have not chosen them",
    "other_experts": "experts that count for tokens that have not chosen them",
    "competing": "softmax over tokens or experts",
}


def feed_forward(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class Expert(nn.Module):
    """One expert of a loop; ``form``: what is uncommon about it."""

    def __init__(self, form: str, width: int = 16, inner: int = 24):
        super().__init__()
        self.form = form
        self.up = nn.Parameter(torch.randn(width, inner) / 4)
        self.bias = nn.Parameter(torch.randn(1, inner) / 4)
        self.down = nn.Linear(inner, width)
        self.scale = nn.Parameter(torch.rand(1) + 1)
        self.shift = nn.Parameter(torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.form)(x)

    def factors(self, x):
        """A product and what is added to it, each times a number."""
        return self.down(F.silu(torch.addmm(self.bias, x, self.up, beta=2, alpha=0.5)))

    def added(self, x):
        return self.down(F.silu(torch.addmm(self.bias[0], x, self.up)))

    def between(self, x):
        """A dimension of one between rows and what they hold."""
        return self.down(F.silu(x[:, None] @ self.up + self.bias[0])).squeeze(1)

    def numbers(self, x):
        """Parameters of one number."""
        return self.down(F.silu(x @ self.up) * self.scale) + self.shift


UNCOMMON = ("factors", "added", "between", "numbers")


class Routed(nn.Module):
    """Loops over experts that differ in how what was chosen is read; ``form``: how."""

    def __init__(self, form: str, experts: int = 4, k: int = 2, width: int = 16, inner: int = 24):
        super().__init__()
        self.form, self.k, self.experts = form, k, experts
        self.router = nn.Linear(width, experts, bias=False)
        self.each = nn.ModuleList(feed_forward(width, inner) for _ in range(experts))
        banks = experts if form == "two_banks" else 0
        self.other = nn.ModuleList(feed_forward(width, inner) for _ in range(banks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.k, -1)
        return getattr(self, self.form)(tokens, weights, chosen).view_as(x)

    def any_slot(self, x, weights, chosen):
        """Positions of tokens by a mask; weights in another type than they are summed in."""
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.each):
            hit = chosen == e
            token = torch.where(hit.any(-1))[0]
            given = (weights * hit).sum(-1).to(x.dtype)
            out = out.index_add(0, token, expert(x[token]) * given[token, None])
        return out

    def two_banks(self, x, weights, chosen):
        """Two layers of experts, by the same choice."""
        weights = weights.to(x.dtype)
        for bank in (self.each, self.other):
            out = torch.zeros_like(x)
            for e, expert in enumerate(bank):
                token, slot = torch.where(chosen == e)
                out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
            x = x + out
        return x


ROUTED = {"any_slot": 1, "two_banks": 2}
