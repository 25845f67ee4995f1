"""Experts over ranks: routings of all kinds, what one device makes of them, and what ranks do."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from attention_jobs import link_of

from autoshard.layout import piece_bounds
from autoshard.runtime.dispatch import Capacity, at_experts, at_tokens, to_experts, to_tokens
from autoshard.runtime.experts import expert_rows, grouped_product

WIDTH, INNER = 6, 5


class Case(NamedTuple):
    """``tokens``: of each rank, the first so many of four; ``only``: experts that are chosen;
    ``capacity``: the factor, if any; ``skips``: so many more that may be chosen, and are none."""

    experts: int
    k: int
    tokens: tuple[int, ...]
    only: tuple[int, ...] = ()
    capacity: float | None = None
    skips: int = 0


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
    "capacity": Case(4, 2, (6, 6, 6, 6), capacity=1.0),
    "capacity of less": Case(4, 2, (6, 6, 6, 6), capacity=0.4),
    "capacity of one expert a token": Case(4, 1, (7, 7, 7, 7), capacity=1.25),
    "capacity of six on four": Case(6, 2, (5, 5, 5, 5), capacity=1.0),
    "capacity, all to one rank": Case(4, 2, (4, 4, 4, 4), only=(0, 1), capacity=1.0),
    "capacity of more than there are": Case(4, 2, (3, 3, 3, 3), capacity=9.0),
    "capacity of ranks with fewer": Case(4, 2, (1, 5, 2, 5), capacity=0.9),
    "capacity, a rank without tokens": Case(4, 2, (0, 5, 0, 5), capacity=1.0),
    "capacity, no tokens": Case(4, 2, (0, 0, 0, 0), capacity=1.0),
    "skips": Case(4, 2, (5, 3, 4, 6), skips=2),
    "skips of one expert a token": Case(4, 1, (5, 3, 4, 6), skips=1),
    "skips of five on four": Case(5, 1, (5, 3, 4, 6), skips=4),
    "all skip": Case(4, 2, (5, 3, 4, 6), only=(4, 5), skips=2),
    "skips and a capacity": Case(4, 2, (6, 6, 6, 6), capacity=0.5, skips=2),
    "all skip, and a capacity": Case(4, 2, (3, 3, 3, 3), only=(4, 5), capacity=1.0, skips=2),
}


def inputs(case: Case, ranks: int) -> dict[str, torch.Tensor]:
    """Of all ranks' tokens, the first ``ranks`` of them."""
    g = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g).requires_grad_()

    tokens, experts = sum(case.tokens[:ranks]), case.experts
    chosen = torch.tensor(case.only or range(experts + case.skips))
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


def dropped(given: dict[str, torch.Tensor], case: Case, ranks: int) -> set[tuple[int, int]]:
    """(token, expert) of those that an expert has no room for, of every rank's tokens: the ones of
    the smallest weights."""
    if case.capacity is None:
        return set()
    found, first, weights = set(), 0, given["weights"].detach()
    largest = max(case.tokens[:ranks])
    for tokens in case.tokens[:ranks]:
        most = math.ceil(round(case.capacity * largest * case.k / case.experts, 9))
        for expert in range(case.experts):
            asked = [
                (-float(weights[t, i]), t)
                for t in range(first, first + tokens)
                for i in range(case.k)
                if given["index"][t, i] == expert
            ]
            found |= {(t, expert) for _, t in sorted(asked)[most:]}
        first += tokens
    return found


def on_one_device(
    given: dict[str, torch.Tensor], left_out: Collection[tuple[int, int]] = ()
) -> dict[str, torch.Tensor]:
    """Every token at each of its experts, one by one; and the gradients."""
    rows = []
    tokens = zip(given["x"], given["weights"], given["index"], strict=True)
    for t, (x, weights, index) in enumerate(tokens):
        out = x * 0
        for w, e in zip(weights, index.tolist(), strict=True):
            if (t, e) in left_out or e >= len(given["up"]):
                continue
            inner = torch.tanh(x @ given["up"][e] + given["bias"][e])
            out = out + w * (inner @ given["down"][e])
        rows.append(out)
    out = torch.stack(rows) if rows else given["x"] * 1
    names = [n for n, v in given.items() if v.requires_grad]
    grads = torch.autograd.grad(
        out, [given[n] for n in names], given["grad"], materialize_grads=True
    )
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


def computed(own: dict[str, torch.Tensor], link: Any, case: Case) -> torch.Tensor:
    """What a rank computes with its part."""
    limit: tuple[Any, ...] = (None, 0, 0, None)
    if case.capacity is not None:
        tokens = max(case.tokens[: link.size if link else 1])
        limit = (Capacity(case.capacity, 1), tokens, tokens, own["weights"])
    limit = (*limit, case.skips > 0)
    scalars = [own["weights"]]
    sent = to_experts(own["x"], link, own["index"], scalars, case.experts, None, *limit)
    rows, weights, offsets, plan = at_experts(sent)
    inner = grouped_product(rows, own["up"], offsets) + expert_rows(own["bias"], offsets, plan)
    out = grouped_product(torch.tanh(inner), own["down"], offsets) * weights[:, None]
    return at_tokens(to_tokens(out, link, plan))


def with_gradients(own: dict[str, torch.Tensor], link: Any, case: Case) -> dict[str, Any]:
    out = computed(own, link, case)
    out.backward(own["grad"])
    return {"out": out.detach()} | {n: v.grad for n, v in own.items() if v.requires_grad}


@functools.cache
def links(ranks: int) -> Any:
    return link_of(ranks, False)


def experts_on_ranks(mesh: Any, ranks: int, name: str) -> dict[str, Any]:
    """This rank's results and gradients."""
    case, link = CASES[name], links(ranks)
    own = part(inputs(case, ranks), case, ranks, link.index)
    return with_gradients(own, link, case)
