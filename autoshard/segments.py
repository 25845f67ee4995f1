"""The graph in segments: its blocks (layers that repeat), and what stands between them.

Memory moves by segments: the weights of one are gathered together, and a block is what is computed
again in backward. A block is an element of an outermost list of modules (``layers.3``), or, where
there is no list, one of several sibling modules of one class that have parts of their own.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from torch import fx

from autoshard.collectives import CONVERSIONS, TABLE


@dataclass
class Segment:
    """Nodes that follow each other in the graph. ``name``: the block's module path, or where the
    rest stands (``before layers.0``); ``block``: whether it is one."""

    name: str
    block: bool
    nodes: list[fx.Node] = field(default_factory=list)


def segments(graph: fx.Graph) -> list[Segment]:
    """The segments of a graph, in its order. Every node that computes is in one, the output too;
    the placeholders are in none."""
    block_of = _Blocks(graph)
    out: list[Segment] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        name = block_of(node)
        if name is None and out:  # sizes and the like belong where they stand
            name = out[-1].name
        if not out or out[-1].name != (name or ""):
            out.append(Segment(name or "", bool(name)))
        out[-1].nodes.append(node)
    for i, segment in enumerate(out):
        if not segment.block:
            following = out[i + 1].name if i + 1 < len(out) else ""
            segment.name = f"before {following}" if following else "the rest"
    return out


def begins(segment: Segment) -> fx.Node:
    """The node that a block begins with: a sum over ranks of what was made before it is not its
    own."""
    own = set(segment.nodes)
    for node in segment.nodes:
        kind = TABLE.get(CONVERSIONS.get(node.target, ""))  # type: ignore[call-overload]
        if kind is None or kind.source != "P" or not own.isdisjoint(node.all_input_nodes):
            return node
    return segment.nodes[0]


def call_of(node: fx.Node, path: str) -> str | None:
    """Which call of the module at ``path`` a node is of, as torch.export numbers them: the path,
    ``path@1`` of the second. None where the node does not say."""
    for key, (inner, _) in (node.meta.get("nn_module_stack") or {}).items():
        if inner.removeprefix("L['self'].").partition(".")[2] == path:
            _, at, number = key.rpartition("@")
            return f"{path}@{number}" if at else path
    return None


class _Blocks:
    """Tells the block of a node: its path; "" for none; None where the node does not say."""

    def __init__(self, graph: fx.Graph):
        #: module path -> class -> the paths of its children of that class that have children
        siblings: dict[str, dict[str, set[str]]] = {}
        self.stacks = {node: modules(node) for node in graph.nodes if node.op == "call_function"}
        parents = {path.rpartition(".")[0] for stack in self.stacks.values() for path, _ in stack}
        for stack in self.stacks.values():
            for path, kind in stack:
                if path and path in parents:
                    parent = path.rpartition(".")[0]
                    siblings.setdefault(parent, collections.defaultdict(set))[kind].add(path)
        self.repeated = {
            path
            for kinds in siblings.values()
            for paths in kinds.values()
            if len(paths) > 1
            for path in paths
        }

    def __call__(self, node: fx.Node) -> str | None:
        stack = self.stacks.get(node)
        if stack is None:
            return "" if node.op == "output" else None
        if not stack:
            return None
        for path, _ in stack:
            if path.rpartition(".")[2].isdigit():
                return path
        return next((path for path, _ in stack if path in self.repeated), "")


def modules(node: fx.Node) -> list[tuple[str, str]]:
    """The modules around a node, outermost first: path in the model, and class."""
    found = []
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        inner = path.removeprefix("L['self'].").partition(".")[2]
        found.append((inner, kind if isinstance(kind, str) else kind.__qualname__))
    return found
