"""overlap_experts: while tokens travel to experts and back, what needs neither is computed.

Requires: a partitioned graph; runs before `zero`. Gives: the same graph, in which what does not
depend on a mixture of experts (shared experts, which every token goes to) stands between what sends
its rows and what waits for them: half of its products on the way there, the rest on the way back.
The gradients of these rows travel while that of the same nodes is computed, as autograd goes back
in the order of the graph.

    before:  s = shared(x); sent = to_experts(x); rows = at_experts(sent); y = experts(rows)
             back = to_tokens(y); z = at_tokens(back) + s
    after:   sent = to_experts(x); s1 = shared.up(x); rows = at_experts(sent); y = experts(rows)
             back = to_tokens(y); s = shared.down(s1); z = at_tokens(back) + s
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autoshard.chain import Pass
from autoshard.program import Program, shallow
from autoshard.rules import op_name
from autoshard.runtime import rng
from autoshard.runtime.dispatch import at_experts, at_tokens, to_experts, to_tokens
from autoshard.segments import segments

PRODUCTS = frozenset("linear mm addmm bmm baddbmm matmul einsum convolution".split())


@dataclass(frozen=True)
class OverlapExperts(Pass):
    name: ClassVar[str] = "overlap_experts"

    def __call__(self, program: Program) -> Program:
        program = shallow(program)
        for segment in segments(program.graph):
            nodes = segment.nodes
            for send in [n for n in nodes if n.target is to_experts and n.args[1]]:
                nodes = _filled(nodes, send)
            if nodes is not segment.nodes:
                last = segment.nodes[0].prev
                for node in nodes:
                    last.append(node)
                    last = node
        program.graph_module.recompile()
        return program


def _filled(nodes: list[fx.Node], send: fx.Node) -> list[fx.Node]:
    """The nodes of a block in another order: what a mixture does not depend on, nor it on the
    mixture, fills the gaps."""
    place = {n: i for i, n in enumerate(nodes)}
    arrive = next(u for u in send.users if u.target is at_experts)
    after = _following(nodes, arrive)
    back, home = (
        next((n for n in nodes if n in after and n.target is target), None)
        for target in (to_tokens, at_tokens)
    )
    if back is None or home is None:
        return nodes
    early = nodes[place.get(send.args[0], -1) + 1 : place[send]]  # type: ignore[call-overload]
    late = nodes[place[arrive] + 1 :]
    free = _unneeded(early, send, place) | _independent(late, after)
    found = [n for n in nodes if n in free]
    if not any(op_name(n.target) in PRODUCTS for n in found):
        return nodes
    there = _first_half(found, {n for n in nodes[: place[back]] if n not in free})
    gaps = {arrive: found[:there], home: found[there:]}
    return [each for n in nodes if n not in free for each in (*gaps.get(n, ()), n)]


def _following(nodes: list[fx.Node], node: fx.Node) -> set[fx.Node]:
    """What depends on a node, of those that stand in order."""
    found = {node}
    for each in nodes[nodes.index(node) + 1 :]:
        if not found.isdisjoint(each.all_input_nodes):
            found.add(each)
    return found


def _unneeded(nodes: list[fx.Node], send: fx.Node, place: dict[fx.Node, int]) -> set[fx.Node]:
    """Of the nodes before it, what neither it nor anything else before it reads."""
    free: set[fx.Node] = set()
    for node in reversed(nodes):
        later = all(u in free or place.get(u, len(place)) > place[send] for u in node.users)
        if later and _movable(node):
            free.add(node)
    return free


def _independent(nodes: list[fx.Node], after: set[fx.Node]) -> set[fx.Node]:
    """Of the nodes after the rows have come, what can be computed before."""
    fixed: set[fx.Node] = set()
    for node in nodes:
        if node in after or not _movable(node) or not fixed.isdisjoint(node.all_input_nodes):
            fixed.add(node)
    return set(nodes) - fixed


def _movable(node: fx.Node) -> bool:
    """Random numbers are drawn in the order of the model."""
    return node.op == "call_function" and node.target is not rng.draw


def _first_half(found: list[fx.Node], readers: set[fx.Node]) -> int:
    """How many of the nodes have half of the products, or more where ``readers`` read them."""
    products = [op_name(n.target) in PRODUCTS for n in found]
    half = itertools.accumulate(products)
    count = next(i for i, sofar in enumerate(half, 1) if 2 * sofar >= sum(products))
    read = [i for i, n in enumerate(found, 1) if not readers.isdisjoint(n.users)]
    return max(count, *read, 0)
