"""Blocks that are computed again in backward, as submodules of the emitted graph.

The graph stays flat until it is bound to a rank: ``node.meta[RECOMPUTE]`` names the block that a
node belongs to. `outlined` makes of every run of such nodes a submodule and one call of
`runtime.recompute.recomputed`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from autoshard.runtime import rng
from autoshard.runtime.dispatch import to_experts, to_tokens
from autoshard.runtime.recompute import recomputed

#: The key of ``node.meta`` under which the name of a recomputed block stands.
RECOMPUTE = "recompute"

#: Arguments by which a random op says that it draws nothing, and the value that says so.
DRAWS_NOTHING = {"p": 0, "dropout_p": 0, "train": False, "training": False}


@dataclass
class Run:
    """Nodes that follow each other in a graph, all of one recomputed block or all of none."""

    block: str | None
    nodes: list[fx.Node] = field(default_factory=list)

    def reads(self) -> list[fx.Node]:
        """What the run takes from before it, in order of use."""
        own = set(self.nodes)
        found = (n for node in self.nodes for n in node.all_input_nodes if n not in own)
        return list(dict.fromkeys(found))

    def gives(self) -> list[fx.Node]:
        """What is read after it."""
        own = set(self.nodes)
        return [node for node in self.nodes if not own.issuperset(node.users)]


def runs(graph: fx.Graph) -> list[Run]:
    """A graph as runs, in its order: every node is in one."""
    out: list[Run] = []
    for node in graph.nodes:
        block = node.meta.get(RECOMPUTE)
        if not out or out[-1].block != block:
            out.append(Run(block))
        out[-1].nodes.append(node)
    return out


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers: dropout of probability 0 does not."""
    op: Any = node.target
    args, kwargs = node.args, node.kwargs
    if op is rng.draw:
        op, args = args[0], args[2:]
    if op is rng.number:
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    names = [a.name for a in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    return not any(
        name in names and {**defaults, **given}.get(name) == value
        for name, value in DRAWS_NOTHING.items()
    )


def outlined(graph: fx.Graph, root: nn.Module | None = None) -> fx.GraphModule:
    """The module of a graph in which every run of a recomputed block is a submodule of its own.
    Changes the graph; one without such blocks stays as it is. ``root`` holds what the graph gets by
    name: blocks take that as an input."""
    root = nn.Module() if root is None else root
    if any(RECOMPUTE in node.meta for node in graph.nodes):
        _get_first(graph)
    for run in runs(graph):
        if run.block is not None and run.gives():
            _outline(graph, run, root)
    graph.lint()
    return fx.GraphModule(root, graph)


def _get_first(graph: fx.Graph) -> None:
    """Move what gets an attribute to the start: inside a run, it would cut that in two."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        if node is not first:
            first.prepend(node)


def _outline(graph: fx.Graph, run: Run, root: nn.Module) -> None:
    reads, gives = run.reads(), run.gives()
    inner = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in reads:
        copies[node] = inner.placeholder(node.name)
        copies[node].meta.update(node.meta)
    for node in run.nodes:
        copies[node] = inner.node_copy(node, lambda n: copies[n])
    results = tuple(copies[node] for node in gives)
    inner.output(results[0] if len(results) == 1 else results)
    name = _free_name(root, run.block or "")
    root.add_module(name, fx.GraphModule(nn.Module(), inner))
    with graph.inserting_before(run.nodes[0]):
        body = graph.get_attr(name)
        random = any(draws(node) for node in run.nodes)
        sends = any(node.target in (to_experts, to_tokens) for node in run.nodes)
        call = graph.call_function(recomputed, (body, random, sends, *reads))
        made = [call]
        if len(gives) > 1:
            made = [graph.call_function(operator.getitem, (call, i)) for i in range(len(gives))]
    for old, new in zip(gives, made, strict=True):
        new.meta.update(old.meta)
        old.replace_all_uses_with(new)
    for node in reversed(run.nodes):
        graph.erase_node(node)


def _free_name(root: nn.Module, block: str) -> str:
    """An attribute name for a block: ``layers_0`` for ``layers.0``."""
    name = "".join(c if c.isalnum() else "_" for c in block)
    name = name if name[:1].isalpha() else f"block_{name}"
    number, free = 1, name
    while hasattr(root, free):
        number += 1
        free = f"{name}_{number}"
    return free


def code_of(module: fx.GraphModule) -> str:
    """The Python text of an emitted graph, and below it that of its recomputed blocks."""
    inner = [(n, m.code) for n, m in module.named_children() if isinstance(m, fx.GraphModule)]
    return "\n\n".join([module.code, *(f"# {name}:\n{code}" for name, code in inner)])


def code_of_stage(stage: int, before: fx.Graph, body: fx.GraphModule, after: fx.Graph) -> str:
    """The Python text of what a stage of a pipeline runs; graphs that make nothing are left out."""
    texts = {
        "before all micro-batches": _text(before),
        "in each micro-batch": code_of(body),
        "after all micro-batches": _text(after),
    }
    return "\n\n".join(f"# stage {stage}, {when}:\n{text}" for when, text in texts.items() if text)


def _text(graph: fx.Graph) -> str:
    return graph.python_code("self").src if graph.output_node().args[0] else ""
