"""Experts over ranks: routings of all kinds, what one device makes of them, and what ranks do."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from attention_jobs import link_of

from autoshard.layout import piece_bounds
from autoshard.runtime.dispatch import at_experts, at_tokens, to_experts, to_tokens
from autoshard.runtime.experts import expert_rows, grouped_product

WIDTH, INNER = 6, 5


class Case(NamedTuple):
    """``tokens``: of each rank, the first so many of four; ``only``: experts that are chosen."""

    experts: int
    k: int
    tokens: tuple[int, ...]
    only: tuple[int, ...] = ()


CASES = {
    "plain": Case(4, 2, (5, 3, 4, 6)),
    "one expert a token": Case(4, 1, (5, 3, 4, 6)),
    "six on four": Case(6, 2, (5, 3, 4, 6)),
    "ranks without experts": Case(5, 2, (2, 2, 2, 2)),
    "more than a rank has": Case(4, 3, (4, 4, 4, 4)),
    "all": Case(4, 4, (3, 3, 3, 3)),
    "all to the last": Case(4, 1, (3, 4, 5, 6), only=(3,)),
    "all to one rank": Case(4, 2, (3, 4, 5, 6), only=(0, 1)),
    "one token": Case(4, 2, (1, 1, 1, 1)),
    "a rank without tokens": Case(4, 2, (0, 3, 0, 2)),
    "a single expert": Case(1, 1, (2, 3, 1, 2)),
}


def inputs(case: Case, ranks: int) -> dict[str, torch.Tensor]:
    """Of all ranks' tokens, the first ``ranks`` of them."""
    g = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g).requires_grad_()

    tokens, experts = sum(case.tokens[:ranks]), case.experts
    chosen = torch.tensor(case.only or range(experts))
    order = torch.rand(tokens, len(chosen), generator=g).argsort(1)[:, : case.k]
    return {
        "x": numbers(tokens, WIDTH),
        "weights": numbers(tokens, case.k),
        "grad": numbers(tokens, WIDTH).detach(),
        "index": chosen[order],
        "up": numbers(experts, WIDTH, INNER),
        "bias": numbers(experts, INNER),
        "down": numbers(experts, INNER, WIDTH),
    }


def on_one_device(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every token at each of its experts, one by one; and the gradients."""
    rows = []
    for x, weights, index in zip(given["x"], given["weights"], given["index"], strict=True):
        out = torch.zeros(WIDTH, dtype=torch.float64)
        for w, e in zip(weights, index.tolist(), strict=True):
            inner = torch.tanh(x @ given["up"][e] + given["bias"][e])
            out = out + w * (inner @ given["down"][e])
        rows.append(out)
    out = torch.stack(rows)
    names = [n for n, v in given.items() if v.requires_grad]
    grads = torch.autograd.grad(out, [given[n] for n in names], given["grad"])
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


def part(given: dict[str, torch.Tensor], case: Case, ranks: int, rank: int) -> dict[str, Any]:
    """What a rank holds: its tokens, its experts."""
    low, high = piece_bounds(case.experts, ranks, rank)
    first = sum(case.tokens[:rank])
    own = slice(first, first + case.tokens[rank])
    cut = dict.fromkeys(("up", "bias", "down"), slice(low, high))
    return {
        n: v.detach()[cut.get(n, own)].requires_grad_(v.requires_grad) for n, v in given.items()
    }


def computed(own: dict[str, torch.Tensor], link: Any, experts: int) -> torch.Tensor:
    """What a rank computes with its part."""
    sent = to_experts(own["x"], link, own["index"], [own["weights"]], experts)
    rows, weights, offsets, plan = at_experts(sent)
    inner = grouped_product(rows, own["up"], offsets) + expert_rows(own["bias"], offsets, plan)
    out = grouped_product(torch.tanh(inner), own["down"], offsets) * weights[:, None]
    return at_tokens(to_tokens(out, link, plan))


def with_gradients(own: dict[str, torch.Tensor], link: Any, experts: int) -> dict[str, Any]:
    out = computed(own, link, experts)
    out.backward(own["grad"])
    return {"out": out.detach()} | {n: v.grad for n, v in own.items() if v.requires_grad}


@functools.cache
def links(ranks: int) -> Any:
    return link_of(ranks, False)


def experts_on_ranks(mesh: Any, ranks: int, name: str) -> dict[str, Any]:
    """This rank's results and gradients."""
    case, link = CASES[name], links(ranks)
    own = part(inputs(case, ranks), case, ranks, link.index)
    return with_gradients(own, link, case.experts)
