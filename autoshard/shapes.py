"""Rank 0's part of the graph on tensors without values: the local shape of every node."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import fx

from autoshard import collectives
from autoshard.axes import Axis, Dim, leaves
from autoshard.collectives import CONVERSIONS, KINDS, LOCAL, Link, all_reduce_max
from autoshard.layout import Layout, cut_axes, first_cut, levels, runs
from autoshard.mesh import DATA_AXES
from autoshard.program import Program
from autoshard.runtime import gather, rng, zero
from autoshard.runtime.attention import gathered_attention, ring_attention
from autoshard.runtime.dispatch import at_experts, at_tokens, balanced, to_experts, to_tokens
from autoshard.runtime.shared_rows import own_rows, share_rows, shared_alike


class Misfit(Exception):
    """An op does not take the local tensors that it is given: the node, and what it said."""

    def __init__(self, node: fx.Node, error: Exception):
        super().__init__(str(error).split("\n")[0])
        self.node = node


def interpret(
    program: Program,
    sizes: dict[Any, int] | None = None,
    guess: Callable[[fx.Node, dict[fx.Node, Any]], Any] | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Every node with its result on the meta device, on rank 0, in order. ``sizes``: the dynamic
    sizes, else those captured. Ends at a result whose size depends on the data; raises `Misfit`.
    With ``guess`` it does neither: that tells the result, of the node and of those before it."""
    sizes = program.hints if sizes is None else sizes
    env: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            return
        if node.op == "placeholder":
            value, shape = node.meta.get("val"), stated(program, node, sizes)
            if shape is not None and isinstance(value, torch.Tensor):
                value = torch.empty(shape, dtype=value.dtype, device="meta")
            env[node] = value
        else:
            try:
                env[node] = _run(node, program, env)
            except Exception as error:  # whatever an op raises on shapes that do not fit
                if guess is not None:
                    env[node] = guess(node, env)
                elif isinstance(error, NotImplementedError):
                    return
                else:
                    raise Misfit(node, error) from error
        yield node, env[node]


def closed_forms(program: Program) -> dict[fx.Node, tuple[Any, ...]]:
    """The local shape of every node with one tensor as its result: numbers, and closed forms
    of the dynamic sizes, found by making one of them larger at a time. What cannot be told is left
    out."""
    symbols = list(program.hints)
    base = _shapes(program, program.hints)
    longer = {s: _shapes(program, {**program.hints, s: program.hints[s] * FACTOR}) for s in symbols}
    found = {}
    for node, shape in base.items():
        others = {s: shapes.get(node, ()) for s, shapes in longer.items()}
        if all(len(other) == len(shape) for other in others.values()):
            forms = [
                _form(size, {s: other[i] for s, other in others.items()}, program.hints)
                for i, size in enumerate(shape)
            ]
            if None not in forms:
                found[node] = tuple(forms)
    return found


#: How much larger a size is made to see what grows with it.
FACTOR = 4


def _shapes(program: Program, sizes: dict[Any, int]) -> dict[fx.Node, tuple[int, ...]]:
    found = {}
    try:
        for node, value in interpret(program, sizes):
            if isinstance(value, torch.Tensor):
                found[node] = tuple(value.shape)
    except Misfit:
        pass  # shapes up to here
    return found


def _form(size: int, grown: dict[Any, int], hints: dict[Any, int]) -> Any:
    """The size as a number times powers of dynamic sizes, or as one of those plus a number; None
    where it is no such thing."""
    changed = {s: other for s, other in grown.items() if other != size}
    form = sympy.Integer(size)
    for symbol, other in changed.items():
        power = next((p for p in (1, 2, 3) if size * FACTOR**p == other), None)
        if power is None:
            plus_one = len(changed) == 1 and other - size == hints[symbol] * (FACTOR - 1)
            return symbol + size - hints[symbol] if plus_one else None
        form *= (symbol / hints[symbol]) ** power
    return int(form) if form.is_Integer else form


def stated(
    program: Program, node: fx.Node, sizes: dict[Any, int] | None = None
) -> tuple[int, ...] | None:
    """The local shape on rank 0 that a node's dimensions and layout say; None where not known."""
    dims, layout = program.dims.get(node), program.layouts.get(node)
    if not isinstance(dims, tuple) or not isinstance(layout, dict):
        return None
    sizes = program.hints if sizes is None else sizes
    layouts = first_cut(dims, layout)
    found = [_Sizes(program, sizes, of).of(d) for d, of in zip(dims, layouts, strict=True)]
    parameter = program.values.get(node.name) if node.op == "placeholder" else None
    if parameter is not None and parameter.zero:
        low, high = gather.shard_bounds(parameter, program.mesh, 0)
        found[0] = high - low
    return None if None in found else tuple(found)  # type: ignore[arg-type]


class _Sizes:
    """Rank 0's sizes of dimensions in one layout; None where they are not known."""

    def __init__(self, program: Program, sizes: dict[Any, int], layout: Layout):
        self.mesh, self.sizes, self.layout = program.mesh, sizes, layout

    def of(self, dim: Dim) -> int | None:
        found = [self._axis(axis) for axis in leaves(dim)]
        return None if None in found else math.prod(found)  # type: ignore[arg-type]

    def _axis(self, axis: Axis) -> int | None:
        if axis.parts is not None:
            found = [self.of(part) for part in axis.parts]
            return None if None in found else sum(found)  # type: ignore[arg-type]
        if axis.role == "ragged":
            return None  # the data tell
        by = cut_axes(self.layout, axis)
        size = axis.size
        if not isinstance(size, int):
            size = self.sizes[size] if size in self.sizes else size.subs(self.sizes)
            if not isinstance(size, int) and not size.is_Integer:
                return None
            size = int(size)
            if by and all(m.partition(".")[0] in DATA_AXES for m in by):
                return size  # inputs are this rank's rows already
        held = runs(size, levels(self.layout, axis), self.mesh, 0)
        return sum(stop - start for start, stop in held)


def _run(node: fx.Node, program: Program, env: dict[fx.Node, Any]) -> Any:
    mesh = program.mesh
    if node.target in (zero.start_gather, zero.release):
        return None
    if node.target is zero.wait_gather:
        unit = program.units[node.args[2]]
        return [
            torch.empty(
                gather.slice_shape(program.values[key], mesh, 0), dtype=unit.dtype, device="meta"
            )
            for key in unit.keys
        ]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
    target: Any = node.target
    if target in CONVERSIONS:
        link = Link.of(mesh, 0, args[1])
        return _converted(KINDS[CONVERSIONS[target]][0], link, args[0], *args[2:])
    if target is all_reduce_max:
        return args[0]
    if target in (ring_attention, gathered_attention):
        return args[0].new_empty(*args[0].shape[:3], args[3].shape[3])
    if target is to_experts:
        return balanced(args[0], Link.of(mesh, 0, args[1]) if args[1] else None, *args[2:])
    if target in (at_experts, at_tokens):
        return args[0]  # as what was sent
    if target is share_rows:
        return shared_alike(args[0], Link.of(mesh, 0, args[1]))
    if target is own_rows:
        return args[0].new_empty(args[2].own, *args[0].shape[1:])
    if target is to_tokens:
        return args[0].new_empty(len(args[2].back) // args[2].k, *args[0].shape[1:])
    if target is rng.draw and args[0] is rng.number:
        return 0
    if target in LOCAL:
        return target(args[0], Link.of(mesh, 0, args[1]))
    if target in (collectives.runwise, collectives.local_places):
        args = (args[0], Link.of(mesh, 0, args[1]), *args[2:])
    if target is rng.draw:
        target, args = args[0], args[2:]
    args = tuple("meta" if isinstance(a, torch.device) else a for a in args)
    kwargs = {k: "meta" if isinstance(v, torch.device) else v for k, v in kwargs.items()}
    with torch.no_grad():
        return target(*args, **kwargs)


def _converted(
    primitive: str, link: Link, x: torch.Tensor, dim: Any = 0, size: Any = 0
) -> torch.Tensor:
    """What a conversion makes of a shape."""
    if primitive in ("identity", "sum"):
        return x
    if primitive == "fetch":
        found = collectives.windows(link, 0, dim, size)
        dim, made = dim[0], sum(max(b - a, 0) for a, b in found)
        return x.new_empty(*x.shape[:dim], made, *x.shape[dim + 1 :])
    if primitive == "exchange":
        (whole, cut), (long, other) = dim, size
        shape = list(x.shape)
        shape[whole], shape[cut] = long, link.length(other)
        return x.new_empty(shape)
    made = size if primitive in ("gather", "unslice") else link.length(size)
    return x.new_empty(*x.shape[:dim], made, *x.shape[dim + 1 :])
