"""Axes of a graph: runs every op's rule once, in graph order."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autoshard.axes import Axis, atoms, leaves, make_opaque, repeated, same_size, size_of, unify
from autoshard.errors import ShardingError, message
from autoshard.program import Program, module_path, tensor_results
from autoshard.rules import Typer, Typing, op_name, rule_for
from autoshard.rules.attention import ATTENTIONS


def expression(size: Any) -> Any:
    """A tensor size as an int or a sympy expression."""
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    expr = node.expr if node is not None else sympy.sympify(size)
    return int(expr) if expr.is_Integer else expr


def infer_axes(program: Program) -> dict[fx.Node, Typing]:
    """Fill ``program.dims`` and the parameters' dims; return what each op's rule stated."""
    dims, typings = program.dims, {}
    typer = Typer(dims, expression)
    typer.attentions = program.attentions
    program.fallbacks.clear()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            _placeholder(program, typer, node)
        elif node.op == "call_function" and tensor_results(node):
            if node.target is operator.getitem:
                dims[node] = dims[node.args[0]][node.args[1]]
                continue
            typing = _type(program, typer, node)
            dims[node] = typing.out
            typings[node] = typing
    for dim in (d for each in dims.values() for d in _all_dims(each)):
        make_opaque(repeated(dim))
    _roles(program)
    _names(program, typings)
    return typings


def _placeholder(program: Program, typer: Typer, node: fx.Node) -> None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return
    program.dims[node] = typer.new(value)
    if node.name in program.values:
        program.values[node.name].dims = program.dims[node]
        return
    for axis in [a for d in program.dims[node][:2] for a in d]:
        axis.rigid = True
    if not typer.rows and value.ndim and not isinstance(size := expression(value.shape[0]), int):
        typer.rows[size] = program.dims[node][0]
    for other in program.graph.nodes:  # inputs of equal leading size share the batch
        if other is node:
            break
        known = program.dims.get(other)
        if other.name in program.inputs and known and program.dims[node]:
            a, b = known[0], program.dims[node][0]
            if a and b and same_size(size_of(a), size_of(b)):
                unify(a, b)


def _type(program: Program, typer: Typer, node: fx.Node) -> Typing:
    rule = rule_for(node.target)
    if rule is not None:
        try:
            return rule(typer, node)
        except GuardOnDataDependentSymNode as error:
            raise ShardingError(
                message(
                    f"{op_name(node.target)} {module_path(node)}",
                    f"result {node.name}",
                    str(error).split("\n")[0],
                    "a size here depends on the data, so its layout is not known before the step",
                    "write this part with fixed sizes: a mask in place of a selection",
                )
            ) from error
    program.fallbacks.append(op_name(node.target))
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    whole = [
        d for n in node.all_input_nodes if n in program.dims for d in _all_dims(program.dims[n])
    ]
    value = node.meta["val"]
    several = not isinstance(value, torch.Tensor)
    out: Any = (
        [typer.new(v) if isinstance(v, torch.Tensor) else () for v in value]
        if several
        else typer.new(value)
    )
    return Typing(out, whole=whole, random=random)


def _all_dims(dims: Any) -> list[Any]:
    if isinstance(dims, list):
        return [d for each in dims for d in each]
    return list(dims)


def _roles(program: Program) -> None:
    """``batch`` is dim 0 of the first input, and of every input with as many rows; ``sequence`` the
    query axis of attention, or dim 1."""
    rows = None
    for node, dims in program.dims.items():
        if node.op != "placeholder" or node.name not in program.inputs or not dims:
            continue
        size = size_of(dims[0])
        size = size if isinstance(size, int) else size.subs(program.hints)
        rows = size if rows is None else rows
        if size != rows:
            continue
        for axis in atoms(dims[0]):
            axis.role, axis.name = "batch", "batch"
        if len(dims) > 1 and not tensor_results(node)[0].is_floating_point():
            for axis in atoms(dims[1]):
                axis.role, axis.name = axis.role or "sequence", "sequence"


def _name(dims: Any, *names: str) -> None:
    axes = leaves(dims)
    if len(names) == len(axes):
        for axis, name in zip(axes, names, strict=True):
            axis.name = axis.name or name


def _names(program: Program, typings: dict[fx.Node, Typing]) -> None:
    """Readable names, for tables only: nothing decides by them."""
    dims = program.dims
    for node in typings:
        kind = op_name(node.target)
        if kind in ATTENTIONS:
            q, k, v = (dims[n] for n in node.args[:3])
            _name(q[-3], "heads")
            _name(q[-3], "kv", "group")
            _name(k[-3], "kv")
            _name(q[-2], "sequence")
            _name(v[-1], "v_dim") if leaves(v[-1]) != leaves(q[-1]) else None
            _name(q[-1], "head_dim")
        elif kind == "cross_entropy_loss":
            _name(dims[node.args[0]][1 if len(dims[node.args[0]]) > 1 else 0], "vocab")
        elif kind == "embedding":
            _name(dims[node.args[0]][1], "embed")
        elif kind.endswith("grouped_mm") or kind == "grouped_mm_fallback":
            _name(dims[node.args[1]][0], "experts")
    for node, _ in typings.items():
        if op_name(node.target) == "embedding":
            _name(dims[node.args[0]][0], "rows")
    for parameter in program.values.values():
        for position, dim in enumerate(parameter.dims):
            for axis in atoms(dim):
                if not axis.name and not parameter.buffer and len(parameter.dims) > 1:
                    axis.name = "hidden" if position == 0 else "width"


def derived(program: Program) -> set[fx.Node]:
    """The results that depend on a parameter."""
    found: set[fx.Node] = set()
    parameters = program.parameters()
    for node in program.graph.nodes:
        if any(n in found or n.name in parameters for n in node.all_input_nodes):
            found.add(node)
    return found


def batch_axes(program: Program) -> list[Axis]:
    """The axes that carry samples."""
    found: dict[int, Axis] = {}
    for node, dims in program.dims.items():
        if node.op == "placeholder" and node.name in program.inputs and dims:
            found.update({id(a): a for a in atoms(dims[0]) if a.role == "batch"})
    return list(found.values())


def sequence_axes(program: Program) -> list[Axis]:
    """The axes that carry tokens."""
    found: dict[int, Axis] = {}
    for dims in program.dims.values():
        for dim in _all_dims(dims):
            for axis in atoms(dim):
                if axis.role == "sequence":
                    found[id(axis)] = axis
    return list(found.values())
