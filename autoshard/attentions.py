"""The attentions of a partitioned graph: how queries meet keys, what that sends, and how much work
is left to each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.attention import Attention
from autoshard.axes import Axis, Dim, atoms
from autoshard.collectives import CONVERSIONS, Link
from autoshard.mesh import SubMesh
from autoshard.program import Conversion, Program
from autoshard.rules import op_name
from autoshard.rules.core import argument
from autoshard.runtime.attention import gathered_attention, pairs, ring_attention
from autoshard.shapes import Misfit, interpret

#: Ops between an attention and the collectives that bring its operands or take its result.
VIEWS = frozenset(
    """view reshape flatten unflatten transpose permute t contiguous clone to squeeze
    unsqueeze""".split()
)


@dataclass
class Call:
    """One attention of the graph.

    how: what is cut in it, and over which mesh axes: ("ring" or "allgather", tokens), ("ulysses",
    heads over parts of cp), ("heads", heads over others); none where it is whole.
    heads: of queries and of keys, on a rank. mask: which keys a query reads. tokens: "whole",
    "zigzag" or "contiguous".
    flops: of the two products forward, for every rank along the axes that cut the tokens.
    sent: its own collectives over cp.
    """

    node: fx.Node
    how: tuple[tuple[str, tuple[str, ...]], ...]
    mask: str
    tokens: str
    heads: tuple[int, int] | None = None
    flops: list[int] = field(default_factory=list)
    sent: list[Conversion] = field(default_factory=list)


def calls(program: Program, sizes: dict[Any, int]) -> list[Call]:
    """The attentions of a partitioned program, in its order; ``sizes``: dynamic sizes, as one rank
    has them. Where shapes depend on data, heads and flops are not known. A collective that serves
    several attentions (keys that layers share) is sent by the first."""
    nodes = [n for n in program.graph.nodes if is_attention(n)]
    needed = {m for n in nodes for m in n.all_input_nodes}
    known = _values(program, sizes, needed) if nodes else {}
    by_node = {c.node: c for c in program.conversions}
    taken: set[str] = set()
    found = []
    for node in nodes:
        call = _call(program, node, known)
        for name in (n for n in _own(node) if n in by_node and n not in taken):
            if all(m.partition(".")[0] == "cp" for m in by_node[name].axes):
                taken.add(name)
                call.sent.append(by_node[name])
        found.append(call)
    return found


def is_attention(node: fx.Node) -> bool:
    """Whether a node is one of torch's own attentions, or of ours that take their place."""
    if node.op != "call_function":
        return False
    fused = node.target in (ring_attention, gathered_attention)
    return fused or op_name(node.target) == "scaled_dot_product_attention"


def _values(program: Program, sizes: dict[Any, int], needed: set[fx.Node]) -> dict[fx.Node, Any]:
    found = {}
    try:
        for node, value in interpret(program, sizes):
            if node in needed:
                found[node] = value
    except Misfit:
        pass  # values up to here
    return found


def _call(program: Program, node: fx.Node, known: dict[fx.Node, Any]) -> Call:
    mesh = program.mesh
    fused = node.target in (ring_attention, gathered_attention)
    over = node.args[1] if fused else ()
    spec = program.attentions[node.args[6]] if fused else _plain(node)
    vectors = len(node.args[5]) if fused else int(argument(node, 3, "attn_mask") is not None)
    how = [("ring" if node.target is ring_attention else "allgather", over)] if over else []
    dims, layout = program.dims[node], program.layouts[node]
    heads = _cutting(dims[-3], layout) if len(dims) > 2 else ()
    for name in ("ulysses", "heads"):
        cut = tuple(m for m in heads if (m.partition(".")[0] == "cp") == (name == "ulysses"))
        how += [(name, cut)] if cut else []
    tokens = "whole" if not over else "zigzag" if mesh.zigzag(over) else "contiguous"
    call = Call(node, tuple(how), _mask(spec, vectors), tokens)
    q, k, _ = _operands(node, known)
    if q is not None and k is not None:
        call.heads = _heads(q), _heads(k)
    call.flops = flops(program, node, known)
    return call


def flops(program: Program, node: fx.Node, known: dict[fx.Node, Any]) -> list[int]:
    """FLOPs of an attention's two products forward, for every rank along the axes that cut its
    tokens, from what is ``known`` of what it reads; none where that is too little."""
    q, k, v = _operands(node, known)
    if q is None or k is None or v is None:
        return []
    fused = node.target in (ring_attention, gathered_attention)
    sizes = [known.get(n, n) for n in node.args[7:9]] if fused else [q.shape[-2], k.shape[-2]]
    if not all(isinstance(n, int) for n in sizes):
        return []
    spec = program.attentions[node.args[6]] if fused else _plain(node)
    each = 2 * math.prod(q.shape[:-2]) * (q.shape[-1] + v.shape[-1])
    return [each * n for n in _pairs(spec, program.mesh, node.args[1] if fused else (), *sizes)]


def _operands(node: fx.Node, known: dict[fx.Node, Any]) -> list[Any]:
    """What is known of an attention's queries, keys and values."""
    fused = node.target in (ring_attention, gathered_attention)
    return [known.get(n) for n in (node.args[0], *node.args[2 if fused else 1 :][:2])]


def _heads(x: torch.Tensor) -> int:
    return x.shape[-3] if x.ndim > 2 else 1


def _pairs(
    spec: Attention, mesh: SubMesh, over: tuple[str, ...], size_q: int, size_k: int
) -> list[int]:
    """Pairs of query and key for every rank along the axes that cut queries: the others hold other
    heads or samples, as many."""
    links = [Link.of(mesh, rank, over) for rank in mesh.peers(0, over)] if over else [None]
    return [pairs(spec, link, size_q, size_k) for link in links]


def _plain(node: fx.Node) -> Attention:
    """What torch's own attention computes, as far as the table tells."""
    causal = bool(argument(node, 5, "is_causal", False))
    return Attention(1.0, causal, not causal, dropout=float(argument(node, 4, "dropout_p", 0.0)))


def _cutting(dim: Dim, layout: dict[str, Any]) -> tuple[str, ...]:
    """The mesh axes that cut a dimension."""
    own = {id(a) for a in atoms(dim)}
    return tuple(m for m, state in layout.items() if isinstance(state, Axis) and id(state) in own)


def _mask(spec: Attention, vectors: int) -> str:
    words = ["causal"] if spec.causal else []
    if spec.score is not None or vectors:
        words.append(f"function of {vectors} vector{'s' * (vectors != 1)}")
        if not (spec.ahead or spec.causal):
            words.append("no later keys")
    words += ["sinks"] if spec.sinks else []
    words += ["dropout"] if spec.dropout else []
    return ", ".join(words if spec.causal or spec.score or vectors else ["full", *words])


def _own(node: fx.Node) -> Iterator[str]:
    """The names of the attention, and of what it reads and what reads it through views and
    conversions."""
    yield node.name
    seen = {node}
    for near in (lambda n: n.all_input_nodes, lambda n: n.users):
        ahead = list(near(node))
        while ahead:
            at = ahead.pop()
            if at not in seen and _passes(at):
                seen.add(at)
                yield at.name
                ahead += near(at)


def _passes(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return node.target in CONVERSIONS or op_name(node.target) in VIEWS
