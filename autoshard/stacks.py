"""Parameters that a model keeps one by one and a graph reads stacked are kept as one stack.

    before:  w = stack([t(w0), t(w1), ...])      after:  w = transpose(w*, 1, 2)

The stack is cut like any other parameter, over ep by expert; see `autoshard.program.Parameter` for
how it bears the names of what it stacks. A stack of all parts of one tensor, ``stack([w[0], w[1],
...])``, is that tensor.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoshard.program import Parameter, Program, module_path
from autoshard.routing import shape_of
from autoshard.rules import op_name
from autoshard.rules.core import argument
from autoshard.runtime.experts import expert_rows, grouped_product

aten = torch.ops.aten

#: Ops that do to a stack what they do to each tensor in it, with dimensions moved on.
EACH = frozenset("t numpy_T transpose permute to _to_copy contiguous clone detach alias".split())

#: The nodes of what is stacked, one for each place in the stack.
Nodes = tuple[fx.Node, ...]


class Unstacked(Exception):
    """Why parameters that are read stacked stay as they are."""


def keep_stacked(program: Program) -> None:
    """Change ``program``, and its graph, so that parameters which products by expert read stacked,
    and nothing else reads, are one parameter. ``program.notes`` tells where that cannot be."""
    ways: dict[fx.Node, list[Nodes]] = {}
    why: dict[fx.Node, str] = {}
    for stack in _stacks(program.graph):
        try:
            ways[stack] = _way(program, stack)
        except Unstacked as error:
            why[stack] = str(error)
    for stack, others in _read_elsewhere(program, ways).items():
        why[stack] = others
        del ways[stack]
    program.notes += [
        f"fuse_experts: {module_path(stack) or 'the model'}: parameters stay as the model has "
        f"them, all on every rank of ep, and are stacked in each step: {text}"
        for stack, text in why.items()
    ]
    made = _merged(program, list(dict.fromkeys(way[-1] for way in ways.values())))
    for stack, way in ways.items():
        with program.graph.inserting_before(stack):
            whole = made[way[-1]]
            for nodes in way[-2::-1]:
                whole = _of_stack(nodes[0], whole)
        stack.replace_all_uses_with(whole)
        for nodes in (stack,), *way[:-1]:
            for node in dict.fromkeys(nodes):
                if not node.users:
                    program.graph.erase_node(node)
    for nodes in made:
        for node in nodes:
            program.graph.erase_node(node)


def join_parts(graph: fx.Graph) -> None:
    """Products by expert read a tensor itself instead of a stack of all its parts along dim 0."""
    for stack in _stacks(graph):
        layers: list[Nodes] = [tuple(stack.args[0])]  # type: ignore[arg-type]
        try:
            whole = _joined(layers[-1])
            while whole is None:
                layers.append(_below(layers[-1]))
                whole = _joined(layers[-1])
        except Unstacked:
            continue
        with graph.inserting_before(stack):
            for nodes in layers[-2::-1]:
                whole = _of_stack(nodes[0], whole)
        stack.replace_all_uses_with(whole)


def _joined(nodes: Nodes) -> fx.Node | None:
    """The tensor of which nodes are all the parts, in order."""
    parts = [_part(node) for node in nodes]
    whole = parts[0][0] if parts[0] else None
    if whole is None or shape_of(whole)[0] != len(nodes):
        return None
    return whole if parts == [(whole, i) for i in range(len(nodes))] else None


def _part(node: fx.Node) -> tuple[fx.Node, int] | None:
    """(x, i) of ``x[i]``."""
    kind, source = op_name(node.target), node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(source, fx.Node):
        return None
    if node.target is operator.getitem:
        if op_name(source.target) != "unbind" or argument(source, 1, "dim", 0) != 0:
            return None
        return source.args[0], node.args[1]  # type: ignore[return-value]
    first = kind == "select" and list(node.args[1:]) == [0, 0]
    if first or (kind == "squeeze" and shape_of(node) == shape_of(source)[1:]):
        part = _part_of_one(source)
        if part is not None:
            return part
    if kind != "select" or node.args[1] != 0 or not isinstance(node.args[2], int):
        return None
    size, at = shape_of(source)[0], node.args[2]
    return (source, at % size) if isinstance(size, int) else None


def _part_of_one(node: fx.Node) -> tuple[fx.Node, int] | None:
    """(x, i) of ``x[i : i + 1]``."""
    if shape_of(node)[:1] != (1,) or not node.args:
        return None
    if node.target is operator.getitem:
        cut, at = node.args
        if op_name(cut.target) not in ("split", "split_with_sizes", "chunk"):  # type: ignore
            return None
        whole = cut.args[0]  # type: ignore[union-attr]
        plain = argument(cut, 2, "dim", 0) == 0 and shape_of(whole)[0] == len(cut.meta["val"])  # type: ignore
        return (whole, at) if plain else None  # type: ignore[return-value]
    if op_name(node.target) != "slice" or argument(node, 1, "dim", 0) != 0:
        return None
    whole, start = node.args[0], argument(node, 2, "start", 0)
    size = shape_of(whole)[0]  # type: ignore[arg-type]
    if not isinstance(size, int) or not isinstance(start, int):
        return None
    return whole, start % size  # type: ignore[return-value]


def _stacks(graph: fx.Graph) -> list[fx.Node]:
    """The stacks along dim 0 that products by expert, or their rows, are made of."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.target not in (grouped_product, expert_rows):
            continue
        whole = node.args[1 if node.target is grouped_product else 0]
        while _is_each(whole):
            whole = whole.args[0]
        if op_name(whole.target) == "stack" and argument(whole, 1, "dim", 0) == 0:
            found[whole] = None
    return list(found)


def _is_each(node: fx.Node) -> bool:
    return node.op == "call_function" and op_name(node.target) in EACH


def _way(program: Program, stack: fx.Node) -> list[Nodes]:
    """What a stack joins, what that is made of, and so on down to parameters."""
    way: list[Nodes] = [tuple(stack.args[0])]  # type: ignore[arg-type]
    while any(node.op != "placeholder" for node in way[-1]):
        way.append(_below(way[-1]))
    found = [program.values.get(node.name) for node in way[-1]]
    if any(p is None or p.buffer for p in found):
        raise Unstacked("they are not all parameters")
    tied = next((p for at, p in enumerate(found) if any(p is q for q in found[:at])), None)
    if tied is not None:
        raise Unstacked(f"{' and '.join(tied.names[:2])} are tied")
    if len({p.trainable for p in found if p}) > 1:
        raise Unstacked(f"some of {_some(found)} are frozen, and others not")
    if len({(p.value.dtype, p.value.device) for p in found if p}) > 1:
        raise Unstacked(f"{_some(found)} are of several types, or on several devices")
    return way


def _below(nodes: Nodes) -> Nodes:
    """What nodes turn or convert, all alike."""
    first = nodes[0]
    for node in nodes:
        if not _is_each(node):
            what = op_name(node.target) if node.op == "call_function" else node.name
            raise Unstacked(f"they are made by {what}")
        call = (node.target, node.args[1:], node.kwargs)
        if call != (first.target, first.args[1:], first.kwargs):
            raise Unstacked("they are not turned or converted alike")
    return tuple(node.args[0] for node in nodes)  # type: ignore[misc]


def _some(parameters: Sequence[Parameter | None]) -> str:
    names = [p.name for p in parameters if p is not None]
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _read_elsewhere(program: Program, ways: dict[fx.Node, list[Nodes]]) -> dict[fx.Node, str]:
    """The stacks of parameters that something else reads too, or another stack in another order."""
    readers: dict[fx.Node, set[fx.Node]] = {}
    of: dict[fx.Node, set[Nodes]] = {}
    for stack, way in ways.items():
        for above, nodes in zip([(stack,) * len(way[0]), *way], way, strict=False):
            for reader, node in zip(above, nodes, strict=True):
                readers.setdefault(node, set()).add(reader)
        for node in way[-1]:
            of.setdefault(node, set()).add(way[-1])
    found: dict[fx.Node, str] = {}
    for stack, way in ways.items():
        for at, source in enumerate(way[-1]):
            others = any({*nodes[at].users} - readers[nodes[at]] for nodes in way)
            if others or len(of[source]) > 1:
                found[stack] = f"{program.values[source.name].name} is read elsewhere too"
                break
    if found:  # what shares parameters with these has to stay too
        left = {stack: way for stack, way in ways.items() if stack not in found}
        found |= _read_elsewhere(program, left)
    return found


def _merged(program: Program, groups: list[Nodes]) -> dict[Nodes, fx.Node]:
    """A placeholder, and a parameter, in place of those of each group: where its first one is.
    Their own placeholders are left in the graph for what still reads them."""
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    made: dict[Nodes, fx.Node] = {}
    new: dict[str, tuple[str, Parameter]] = {}  # by the placeholder in whose place it is
    taken = {p.name for p in program.values.values()}
    for nodes in sorted(groups, key=lambda group: min(map(order.__getitem__, group))):
        stacked = tuple(program.values[node.name] for node in nodes)
        name = _joint_name([p.name for p in stacked], taken)
        taken.add(name)
        first = min(nodes, key=order.__getitem__)
        with program.graph.inserting_before(first):
            key = re.sub(r"\W", "_", f"p_{name.replace('*', 'all')}")
            node = made[nodes] = program.graph.placeholder(key)
        node.target = node.name
        shape, value = (len(nodes), *stacked[0].value.shape), stacked[0].value.detach()
        # of its shape, type and device, and of one number's memory
        standing = value.new_empty(()).expand(shape)
        new[first.name] = (
            node.name,
            Parameter((name,), standing, stacked[0].trainable, stacked=stacked),
        )
        known = nodes[0].meta["val"]
        node.meta["val"] = known.detach().new_empty(shape).requires_grad_(known.requires_grad)
    gone = {node.name for nodes in groups for node in nodes}
    values: dict[str, Parameter] = {}
    for key, parameter in program.values.items():
        if key in new:
            values[new[key][0]] = new[key][1]
        if key not in gone:
            values[key] = parameter
    program.values = values
    return made


def _joint_name(names: list[str], taken: set[str]) -> str:
    """One name for all, ``*`` in place of what differs; numbered where that is taken."""
    paths = [name.split(".") for name in names]
    if len({len(path) for path in paths}) == 1:
        words = [w[0] if len({*w}) == 1 else "*" for w in zip(*paths, strict=True)]
    else:
        head = os.path.commonprefix(paths)  # type: ignore[type-var]
        tail = os.path.commonprefix([path[len(head) :][::-1] for path in paths])  # type: ignore[type-var]
        words = [*head, "*", *tail[::-1]]
    name, number = ".".join(words), 2
    while name in taken:
        name = ".".join(f"*{number}" if word == "*" else word for word in words)
        number += 1
    return name


def _of_stack(node: fx.Node, whole: fx.Node) -> fx.Node:
    """What a node does to one tensor, done to a stack of such."""
    target, args, kind = node.target, node.args[1:], op_name(node.target)
    ndim = whole.meta["val"].ndim

    def moved(dim: Any) -> int:
        return dim + 1 if dim >= 0 else dim

    if kind in ("t", "numpy_T"):
        target = aten.permute.default
        args = ([0, *range(1, ndim)[::-1]],)
    elif kind == "transpose":
        target, args = aten.transpose.int, tuple(map(moved, args))
    elif kind == "permute":
        args = ([0, *(moved(dim) % ndim for dim in args[0])],)
    new = whole.graph.call_function(target, (whole, *args), node.kwargs)
    copied = ("nn_module_stack", "stack_trace")
    new.meta.update({key: node.meta[key] for key in copied if key in node.meta})
    given, named = fx.map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
    new.meta["val"] = target(*given, **named)
    return new
