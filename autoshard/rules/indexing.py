"""Ops that look up or write by index."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.axes import atoms, leaves, same_size
from autoshard.errors import ShardingError, message
from autoshard.program import module_path
from autoshard.rules.core import Dim, Typer, Typing, argument, broadcast, size_of, unify
from autoshard.rules.elementwise import elementwise

aten = torch.ops.aten


def embedding(t: Typer, node: fx.Node) -> Typing:
    """weight[rows, dim], ids[...] -> [..., dim]; cut rows give a partial sum (zeros elsewhere)."""
    weight, ids = t.dims(node.args[0]), t.dims(node.args[1])
    for axis in leaves(weight[0]):
        axis.role = axis.role or "rows"
    return Typing((*ids, weight[1]), summed=[weight[0]], localize=_embedding(weight[0]))


def _embedding(rows: Dim) -> Any:
    def localize(local: Any) -> Any:
        node, cut = local.node, local.cutting([rows])
        padding = argument(node, 2, "padding_idx", -1)
        tokens = [d for d in local.out_dims() if local.cutting([d])]
        if argument(node, 3, "scale_grad_by_freq", False) and (cut or tokens):
            raise ShardingError(
                message(
                    f"embedding {module_path(node)}",
                    "scale_grad_by_freq",
                    f"tokens over {', '.join(local.cutting(tokens)) or 'whole'}",
                    "a rank counts its own tokens only",
                    "set scale_grad_by_freq=False",
                )
            )
        if not cut:
            return local.default()
        weight, ids = local.value(0), local.value(1)
        inside, shifted = local.own_range(ids, rows, cut)
        if isinstance(padding, fx.Node) or padding >= 0:  # that row's place here: outside on most
            padding = local.minus(local.mapped(padding), local.start(rows, cut))
        found = local.emit(aten.embedding.default, weight, shifted, padding)
        outside = local.emit(aten.logical_not.default, inside)
        outside = local.emit(aten.unsqueeze.default, outside, -1)
        return local.emit(aten.masked_fill.Scalar, found, outside, 0)

    return localize


def index(t: Typer, node: fx.Node) -> Typing:
    """x[i, j, ...] with tensors of indices: the indexed dimensions whole."""
    dims, indices = t.dims(node.args[0]), node.args[1]
    used = [i for i, v in enumerate(indices) if v is not None]
    chosen = broadcast([t.dims(indices[i]) for i in used])
    if any(indices[i].meta["val"].dtype is torch.bool for i in used):
        whole = [*dims, *(d for i in used for d in t.dims(indices[i]))]
        return Typing(t.new(node.meta["val"]), whole=whole)
    rest = [d for i, d in enumerate(dims) if i not in used]
    together = used == list(range(used[0], used[-1] + 1))
    at = used[0] if together else 0
    out = (*rest[:at], *chosen, *rest[at:])
    pointing = tuple(indices[i] for i in used)
    whole = [dims[i] for i in used]
    return Typing(out, whole=whole, linear="first", per_row=True, positions=pointing)


def index_select(t: Typer, node: fx.Node) -> Typing:
    dims, at = list(t.dims(node.args[0])), node.args[1]
    whole = dims[at]
    dims[at] = t.dims(node.args[2])[0] if t.dims(node.args[2]) else ()
    return Typing(tuple(dims), whole=[whole], linear="first")


def index_put(t: Typer, node: fx.Node) -> Typing:
    dims, indices = t.dims(node.args[0]), node.args[1]
    used = [i for i, v in enumerate(indices) if v is not None]
    rest = [d for i, d in enumerate(dims) if i not in used]
    values = t.dims(node.args[2])
    whole = [dims[i] for i in used]
    for i in used:
        whole.extend(t.dims(indices[i]))
    trailing = values[max(0, len(values) - len(rest)) :] if used == list(range(len(used))) else ()
    if trailing:
        for a, b in zip(rest[len(rest) - len(trailing) :], trailing, strict=True):
            unify(a, b) if b else None
        whole.extend(values[: len(values) - len(trailing)])
    else:
        whole.extend([*rest, *values])
    pointing = tuple(indices[i] for i in used)
    return Typing(dims, whole=whole, linear="all", per_row=True, positions=pointing)


def gather(t: Typer, node: fx.Node) -> Typing:
    """gather(x, dim, index): other dimensions go along where the sizes are equal."""
    x, at, chosen = t.dims(node.args[0]), node.args[1], t.dims(node.args[2])
    whole = [x[at]] if x else []
    whole += _along(x, chosen, at)
    return Typing(chosen, whole=whole, linear="first")


def _along(x: Any, other: Any, at: int) -> list[Dim]:
    """Unify two tensors' dims except ``at``; what differs in size must be whole."""
    whole: list[Dim] = []
    for i, (a, b) in enumerate(zip(x, other, strict=True)):
        if i == at % len(x):
            continue
        if same_size(size_of(a), size_of(b)):
            unify(a, b)
        else:
            whole.extend([a, b])
    return whole


def scatter(t: Typer, node: fx.Node) -> Typing:
    """scatter(x, dim, index, src or value)"""
    x, at, chosen = t.dims(node.args[0]), node.args[1], t.dims(node.args[2])
    whole = [x[at], chosen[at]] if x else []
    whole += _along(x, chosen, at)
    if isinstance(node.args[3], fx.Node):
        source = t.dims(node.args[3])
        if source:
            whole.append(source[at])
            whole += _along(x, source, at)
    return Typing(x, whole=whole)


def index_add(t: Typer, node: fx.Node) -> Typing:
    """index_add(x, dim, index, source): the source's rows are summed into those of x."""
    x, at, source = t.dims(node.args[0]), node.args[1], t.dims(node.args[3])
    unify(t.dims(node.args[2])[0], source[at])
    whole = [x[at], *_along(x, source, at)]
    return Typing(
        x,
        whole=whole,
        summed=[source[at]],
        linear="all",
        per_row=True,
        positions=(node.args[2],),
        localize=_index_add(x, source[at]),
    )


def _index_add(x: Any, summed: Dim) -> Any:
    """Rows that are cut and do not come out: added to zeros, summed over the ranks, then to x."""
    own = {id(a) for d in x for a in atoms(d)}

    def localize(local: Any) -> Any:
        if all(m not in local.cutting([summed]) or id(s) in own for m, s in local.modes.items()):
            return local.default()
        into, *rest = (local.mapped(a) for a in local.node.args)
        zeros = local.emit(aten.zeros_like.default, into)
        part = local.emit(local.node.target, zeros, *rest, **local.mapped(local.node.kwargs))
        return local.then_add(part, local.node.args[0])

    return localize


def one_hot(t: Typer, node: fx.Node) -> Typing:
    new = t.new(node.meta["val"])
    return Typing((*t.dims(node.args[0]), new[-1]))


def nonzero(t: Typer, node: fx.Node) -> Typing:
    whole = [d for n in node.all_input_nodes if n in t._dims for d in t.dims(n)]
    several = isinstance(node.meta["val"], (list, tuple))
    out: Any = [t.new(v) for v in t.results(node)] if several else t.new(node.meta["val"])
    return Typing(out, whole=whole)


def where(t: Typer, node: fx.Node) -> Typing:
    """where(condition, x, y); of a condition alone, the positions where it holds"""
    return nonzero(t, node) if len(node.args) == 1 else elementwise(t, node)


def masked_scatter(t: Typer, node: fx.Node) -> Typing:
    dims = broadcast([t.dims(node.args[0]), t.dims(node.args[1])])
    return Typing(dims, whole=[*dims, *t.dims(node.args[2])])


def searchsorted(t: Typer, node: fx.Node) -> Typing:
    first, second = (t.dims(n) for n in node.args[:2])
    bounds, values = (first, second) if "searchsorted" in str(node.target) else (second, first)
    return Typing(values, whole=list(bounds))


RULES = [
    ("embedding", embedding),
    ("index", index),
    ("index_select", index_select),
    ("index_put _unsafe_index_put", index_put),
    ("gather", gather),
    ("scatter scatter_add scatter_reduce", scatter),
    ("index_add", index_add),
    ("one_hot", one_hot),
    ("nonzero", nonzero),
    ("where", where),
    ("masked_scatter", masked_scatter),
    ("bucketize searchsorted", searchsorted),
]
