"""recompute: blocks keep their inputs for backward, and compute the rest again there.

Requires: a partitioned graph; runs after `zero` where there is one. Gives: the same graph, in which
every op of a block carries the block's name in ``node.meta["recompute"]``; runs of them become
submodules when the graph is bound to a rank (`autoshard.outline`).

    before:  h = linear(x, w1); z = gelu(h); y = linear(z, w2)            keeps x, h, z
    after:   y = recomputed(block, x, w1, w2)                             keeps x

A block that is called several times is as many blocks. One in which nothing is made that is used
there only (a single op) frees nothing, and is left as it is. A sum over ranks at its start is of
what came before: it is done once, and the sum is kept in place of the summands. What gathers
weights (`wait_gather`) starts the part that is computed again: backward gathers them again.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autoshard.chain import Pass
from autoshard.errors import ShardingError, message
from autoshard.outline import RECOMPUTE
from autoshard.program import Program, shallow
from autoshard.runtime.zero import start_gather, wait_gather
from autoshard.segments import Segment, begins, call_of, segments


@dataclass(frozen=True)
class Recompute(Pass):
    name: ClassVar[str] = "recompute"

    def __call__(self, program: Program) -> Program:
        program = shallow(program)
        if not program.layouts:
            raise ShardingError(
                message(
                    "recompute",
                    "the graph",
                    f"{len(program.dims)} values with axes, none with a layout",
                    "blocks are marked in the graph of one rank, and partition has not run",
                    "put recompute after partition",
                )
            )
        marked = 0
        for segment in segments(program.graph):
            if segment.block:
                marked += sum(_mark(program, *call) for call in _calls(program, segment))
        if not marked:
            program.notes.append(
                "recompute: the model has no blocks (layers that repeat), so nothing is recomputed"
            )
        return program


def _calls(program: Program, segment: Segment) -> list[tuple[str, list[fx.Node]]]:
    """The calls of a block, each with a name: ``layers.0``, ``layers.0@1``. Weights are gathered
    for the segment as a whole: one that waits for some is one call, from there on."""
    kept = {name for name, unit in program.units.items() if unit.keep}
    nodes = [n for n in segment.nodes if n.op == "call_function" and not _stays_outside(n, kept)]
    waits = [i for i, n in enumerate(nodes) if n.target is wait_gather]
    if waits:
        return [(segment.name, nodes[waits[0] :])]
    if nodes:
        nodes = nodes[nodes.index(begins(Segment(segment.name, True, nodes))) :]
    calls: dict[str, list[fx.Node]] = {}
    name = segment.name
    for node in nodes:
        name = call_of(node, segment.name) or name  # sizes and the like belong where they stand
        calls.setdefault(name, []).append(node)
    return list(calls.items())


def _stays_outside(node: fx.Node, kept: set[str]) -> bool:
    """Whether a node gathers ahead for a later segment, or gives weights that are kept anyway."""
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is wait_gather:
        return node.args[2] in kept
    return node.target is start_gather


def _mark(program: Program, name: str, nodes: list[fx.Node]) -> int:
    own = set(nodes)
    inside = [n for n in nodes if n in program.dims and n.users and own.issuperset(n.users)]
    for node in nodes if inside else ():
        node.meta[RECOMPUTE] = name
    return len(nodes) if inside else 0
