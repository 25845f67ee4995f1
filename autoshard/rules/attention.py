"""Scaled dot product attention, and `attend`, the one op that every attention can become."""

from __future__ import annotations

from typing import Any

from torch import fx

from autoshard.attention import Attention
from autoshard.axes import leaves
from autoshard.layout import R
from autoshard.rules.core import Dims, Typer, Typing, argument, broadcast, fresh, size_of, unify
from autoshard.runtime.attention import gathered_attention, ring_attention


def attention(t: Typer, node: fx.Node) -> Typing:
    """q[b, heads, i, d], k[b, heads, j, d], v[b, heads, j, e], mask -> [b, heads, i, e]"""
    q, k, v = (t.dims(n) for n in node.args[:3])
    mask = argument(node, 3, "attn_mask")
    grouped = bool(argument(node, 6, "enable_gqa", False))
    unify(q[-1], k[-1])
    unify(k[-2], v[-2])
    lead = broadcast([q[:-2], *([] if grouped else [k[:-2], v[:-2]])])
    if grouped:
        unify(k[-3], v[-3])
        unify(q[-4] if len(q) > 3 else (), k[-4] if len(k) > 3 else ())
        unify(q[-4] if len(q) > 3 else (), v[-4] if len(v) > 3 else ())
        ratio = size_of(q[-3]) // size_of(k[-3])
        unify(q[-3], (*k[-3], *fresh(ratio)))
    out = (*lead, q[-2], v[-1])
    whole = [k[-2], q[-1], v[-1]]  # fused kernels want whole heads
    if isinstance(mask, fx.Node):
        broadcast([t.dims(mask)[:-1], out[:-1]])
        if t.dims(mask)[-1]:
            unify(t.dims(mask)[-1], k[-2])
    _give_roles(q)
    dropout = argument(node, 4, "dropout_p", 0.0)
    return Typing(out, whole=whole, random=bool(dropout), flops=_flops(q, k, v, out))


def attend(t: Typer, node: fx.Node) -> Typing:
    """q[b, h, i, d], k[b, g, j, d], v[b, g, j, e], sinks[h], vectors[b, h, i, j] (any of them 1)
    -> [b, h, i, e]"""
    q, k, v = (t.dims(n) for n in node.args[:3])
    sinks, vectors, key = node.args[3:]
    spec = t.attentions[key]
    unify(q[-1], k[-1])
    unify(k[-2], v[-2])
    unify(k[-3], v[-3])
    unify(q[0], k[0])
    unify(q[0], v[0])
    unify(q[-3], (*k[-3], *fresh(size_of(q[-3]) // size_of(k[-3]))))
    if sinks is not None:
        unify(t.dims(sinks)[0], q[-3])
    for vector, (queries, keys) in zip(vectors, spec.varies, strict=True):
        dims = t.dims(vector)
        broadcast([dims[:2], q[:2]])
        if queries:
            unify(dims[2], q[-2])
        if keys:
            unify(dims[3], k[-2])
    out = (*q[:-1], v[-1])
    _give_roles(q)
    return Typing(
        out,
        whole=[q[-1], v[-1]],
        apart=(q[-2], k[-2]),
        random=bool(spec.dropout),
        localize=_attend(spec),
        flops=_flops(q, k, v, out),
    )


def _attend(spec: Attention) -> Any:
    """Where cp cuts the queries, each rank's meet the keys of all: round a ring, or gathered."""

    def localize(local: Any) -> Any:
        q, k, v, sinks, vectors, key = local.node.args
        queries, keys = local.read[q].dims[2], local.read[k].dims[2]
        over = local.cutting([queries])
        rings = spec.transport == "ring" and local.assigned(keys, over)
        here = dict.fromkeys(over, leaves(keys)[0]) if rings else dict.fromkeys(over, R)
        operands = [local.value(0), *(local.held(n, here) for n in (k, v))]
        sink = None if sinks is None else local.mapped(sinks)
        parts = [
            local.mapped(vector) if by_query else local.held(vector, dict.fromkeys(over, R))
            for vector, (by_query, _) in zip(vectors, spec.varies, strict=True)
        ]
        sizes = [local.p.size_node(size_of(d)) for d in (queries, keys)]
        seed = local.seed() if spec.dropout else None
        call = ring_attention if rings else gathered_attention
        out = local.emit(call, operands[0], over, *operands[1:], sink, parts, key, *sizes, seed)
        if rings:
            local.note_ring(out, (k, v), here)
        return out

    return localize


def _give_roles(q: Dims) -> None:
    for axes, role in ((q[-3] if len(q) > 2 else (), "heads"), (q[-2], "sequence")):
        for axis in leaves(axes):
            axis.role = role


def _flops(q: Dims, k: Dims, v: Dims, out: Dims) -> Any:
    return 2 * size_of(sum(out[:-1], ())) * size_of(k[-2]) * (size_of(q[-1]) + size_of(v[-1]))


#: The ops that are an attention.
ATTENTIONS = ("scaled_dot_product_attention", "attend")
RULES: list[Any] = [("scaled_dot_product_attention", attention), ("attend", attend)]
