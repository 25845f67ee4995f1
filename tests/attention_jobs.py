"""Attentions of all kinds on one device, in plain float64; and what ranks do of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autoshard.attention import Attention
from autoshard.collectives import Link
from autoshard.runtime.attention import gathered_attention, ring_attention


class Case(NamedTuple):
    """An attention and the vectors that its score takes, made for heads, queries and keys."""

    attention: Attention
    make: Callable[[int, int, int], list[torch.Tensor]] = lambda h, i, j: []
    sinks: bool = False


BATCH = 2
QUERIES, KEYS, BOTH, NEITHER = (True, False), (False, True), (True, True), (False, False)


def positions(h: int, i: int, j: int) -> list[torch.Tensor]:
    return [torch.arange(i).view(1, 1, i, 1), torch.arange(j).view(1, 1, 1, j)]


def window(s, rows, columns):
    return s.masked_fill((columns > rows) | (columns <= rows - 3), -math.inf)


def alibi(s, slopes, rows, columns):
    return s + slopes * (columns - rows)


def with_slopes(h: int, i: int, j: int) -> list[torch.Tensor]:
    slopes = torch.linspace(0.1, 0.5, h, dtype=torch.float64).view(1, h, 1, 1).requires_grad_()
    return [slopes, *positions(h, i, j)]


def padding(h: int, i: int, j: int) -> list[torch.Tensor]:
    """Of the first sequence the last keys are missing, of the second all."""
    mask = torch.ones(BATCH, 1, 1, j, dtype=torch.bool)
    mask[0, ..., j - j // 3 :] = False
    mask[1] = False
    return [mask]


def causal_and_padding(h: int, i: int, j: int) -> list[torch.Tensor]:
    """As models write it that add the lowest number: a row that reads nothing reads all alike."""
    mask = padding(h, i, j)[0] & torch.ones(i, j, dtype=torch.bool).tril()
    return [torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, lowest())]


def lowest() -> float:
    return torch.finfo(torch.float64).min


def bias(h: int, i: int, j: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return [
        torch.randn(1, h, i, j, dtype=torch.float64, generator=g).requires_grad_(),
        torch.randn(BATCH, 1, 1, j, dtype=torch.float64, generator=g).requires_grad_(),
        torch.randn(1, 1, i, 1, dtype=torch.float64, generator=g).requires_grad_(),
    ]


def biased(s, both, columns, rows):
    return s * (1 + 0.1 * rows) + both * columns.sigmoid()


def softcap(s):
    return 2 * torch.tanh(s / 2)


SCALE = 0.4
ALL_POSITIONS = (QUERIES, KEYS)
CASES = {
    "full": Case(Attention(SCALE)),
    "causal": Case(Attention(SCALE, causal=True, ahead=False)),
    "causal, sinks": Case(Attention(SCALE, causal=True, ahead=False, sinks=True), sinks=True),
    "window": Case(Attention(SCALE, ahead=False, score=window, varies=ALL_POSITIONS), positions),
    "window, sinks": Case(
        Attention(SCALE, ahead=False, score=window, varies=ALL_POSITIONS, sinks=True),
        positions,
        True,
    ),
    "alibi": Case(
        Attention(SCALE, causal=True, ahead=False, score=alibi, varies=(NEITHER, QUERIES, KEYS)),
        with_slopes,
    ),
    "padding": Case(
        Attention(SCALE, score=lambda s, m: s.masked_fill(~m, -math.inf), varies=(KEYS,)), padding
    ),
    "padding, sinks": Case(
        Attention(
            SCALE, score=lambda s, m: s.masked_fill(~m, -math.inf), varies=(KEYS,), sinks=True
        ),
        padding,
        True,
    ),
    "padding, lowest": Case(
        Attention(SCALE, score=lambda s, m: s.masked_fill(~m, lowest()), varies=(KEYS,)), padding
    ),
    "mask added": Case(
        Attention(SCALE, score=lambda s, m: s + m, varies=(BOTH,)), causal_and_padding
    ),
    "softcap": Case(Attention(SCALE, causal=True, ahead=False, score=softcap)),
    "bias": Case(Attention(SCALE, score=biased, varies=(BOTH, KEYS, QUERIES)), bias),
    "bias, causal": Case(
        Attention(SCALE, causal=True, ahead=False, score=biased, varies=(BOTH, KEYS, QUERIES)),
        bias,
    ),
}


def inputs(
    case: Case,
    size_q: int,
    size_k: int,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (4, 4),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Any]:
    """Leaves q, k, v, sinks and vectors, whole, and the gradient of the result."""
    (h, n), (d, e) = heads, dims
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        # laid out as models do: heads behind positions
        b, i, j, k = shape
        x = torch.randn(b, j, i, k, dtype=torch.float64, generator=g).to(dtype)
        return x.transpose(1, 2).requires_grad_()

    out = {"q": random(BATCH, h, size_q, d), "k": random(BATCH, n, size_k, d)}
    out |= {"v": random(BATCH, n, size_k, e), "grad": random(BATCH, h, size_q, e).detach()}
    sinks = torch.randn(h, dtype=torch.float64, generator=g).to(dtype).requires_grad_()
    return out | {
        "sinks": sinks if case.sinks else None,
        "vectors": case.make(h, size_q, size_k),
    }


def leaves(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What has a gradient."""
    named = {name: given[name] for name in ("q", "k", "v", "sinks")}
    named |= {f"vector {n}": x for n, x in enumerate(given["vectors"])}
    return {name: x for name, x in named.items() if x is not None and x.requires_grad}


def reference(attention: Attention, given: dict[str, Any]) -> torch.Tensor:
    """The definition, as plain as it gets."""
    q, k, v = given["q"], given["k"], given["v"]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = attention.scale * (q @ k.mT)
    if attention.score is not None:
        s = attention.score(s, *given["vectors"])
    if attention.causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if given["sinks"] is not None:
        s = torch.cat([s, given["sinks"].view(1, -1, 1, 1).expand(*s.shape[:3], 1)], 3)
    p = torch.softmax(s, 3).masked_fill((s == -math.inf).all(3, keepdim=True), 0.0)
    return p[..., : k.shape[2]] @ v


def solved(attention: Attention, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The result and all gradients, on one device."""
    out, wanted = reference(attention, given), leaves(given)
    found = torch.autograd.grad(out, list(wanted.values()), given["grad"])
    return {"out": out.detach()} | dict(zip(wanted, found, strict=True))


def local(x: torch.Tensor, link: Any, size: int, dim: int = 2) -> torch.Tensor:
    """A rank's part of a whole tensor."""
    if not link:
        return x
    return torch.cat([x.narrow(dim, a, b - a) for a, b in link.pieces(size)], dim)


def rank_vectors(attention: Attention, given: dict[str, Any], link: Any, size_q: int) -> list:
    return [
        local(x, link, size_q) if queries else x
        for x, (queries, _) in zip(given["vectors"], attention.varies, strict=True)
    ]


def gathered_on(attention: Attention, given: dict[str, Any], link: Any) -> torch.Tensor:
    """The rows that a rank computes from whole keys."""
    q, k, v = given["q"], given["k"], given["v"]
    sizes = q.shape[2], k.shape[2]
    vectors = rank_vectors(attention, given, link, sizes[0])
    rows = local(q, link, sizes[0])
    return gathered_attention(rows, link, k, v, given["sinks"], vectors, attention, *sizes)


def link_of(cp: int, zigzag: bool) -> Link:
    """This rank's link in rings of so many ranks; those of the world side by side."""
    shape = dist.get_world_size() // cp, cp
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    group = mesh.get_group("cp")
    return Link(("cp",), group.group_name, cp, dist.get_rank(group), zigzag)


def rings(
    mesh, cp: int, zigzag: bool, runs: list[tuple[str, int, int, dict]]
) -> list[dict[str, Any]]:
    """Ring attention of this rank's parts: its rows of the result and of gradients (a sum over
    ranks for what is whole), and how many bytes it sent forward and backward."""
    link = link_of(cp, zigzag)
    sent: list[int] = []
    send = dist.isend

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return send(tensor, *args, **kwargs)

    dist.isend = counted
    try:
        return [_ring(link, sent, *run) for run in runs]
    finally:
        dist.isend = send


def ring_with_dropout(mesh, cp: int, name: str, size: int) -> tuple[float, float]:
    """This rank's parts of two sums that are the same: of the result times its gradient, and, as it
    is linear in the values, of them times theirs."""
    case, link = CASES[name], link_of(cp, True)
    attention = replace(case.attention, dropout=0.5)
    given = inputs(case, size, size)
    q, k, v, grad = (local(given[n], link, size).detach() for n in ("q", "k", "v", "grad"))
    vectors = rank_vectors(attention, given, link, size)
    v.requires_grad_()
    torch.manual_seed(7)
    out = ring_attention(q, link, k, v, given["sinks"], vectors, attention, size, size)
    (found,) = torch.autograd.grad(out, v, grad)
    return (out * grad).sum().item(), (v * found).sum().item()


def _ring(link: Link, sent: list[int], name: str, i: int, j: int, more: dict) -> dict[str, Any]:
    case = CASES[name]
    given = inputs(case, i, j, **more)
    parts = {n: local(given[n], link, i).detach().requires_grad_() for n in ("q",)}
    parts |= {n: local(given[n], link, j).detach().requires_grad_() for n in ("k", "v")}
    vectors = [
        x.detach().requires_grad_(whole.requires_grad)
        for x, whole in zip(
            rank_vectors(case.attention, given, link, i), given["vectors"], strict=True
        )
    ]
    sinks, attention = given["sinks"], case.attention
    sent.clear()
    out = ring_attention(parts["q"], link, parts["k"], parts["v"], sinks, vectors, attention, i, j)
    forward = list(sent)
    sent.clear()
    out.backward(local(given["grad"], link, i))
    grads = {n: x.grad for n, x in parts.items()}
    grads |= {} if sinks is None else {"sinks": sinks.grad}
    grads |= {f"vector {n}": x.grad for n, x in enumerate(vectors) if x.requires_grad}
    return {"out": out.detach(), "forward": forward, "backward": list(sent)} | grads
