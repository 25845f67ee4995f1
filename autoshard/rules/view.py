"""Ops that rearrange: views, transposes, slices, joins."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.axes import concat_dims, leaves, quotient, same_size, slice_dim
from autoshard.rules.core import (
    Dim,
    Dims,
    Typer,
    Typing,
    Window,
    argument,
    fresh,
    size_of,
    unify,
)


def regroup(t: Typer, dims: Dims, shape: tuple[Any, ...]) -> Dims:
    """Dims of a view: runs of old and new dimensions with the same product are unified."""
    new: list[Dim] = [fresh(s) for s in shape]
    i = j = 0
    while i < len(dims) or j < len(new):
        left, right = [], []
        if i < len(dims):
            left, i = [dims[i]], i + 1
        if j < len(new):
            right, j = [new[j]], j + 1
        while True:
            a, b = _product(left), _product(right)
            if same_size(a, b):
                break
            if i < len(dims) and (j >= len(new) or _less(a, b)):
                left.append(dims[i])
                i += 1
            elif j < len(new):
                right.append(new[j])
                j += 1
            else:
                break
        unify(sum(left, ()), sum(right, ()))
    return tuple(new)


def _product(dims: list[Dim]) -> Any:
    return size_of(sum(dims, ()))


def _less(a: Any, b: Any) -> bool:
    """Whether a is the smaller product; a symbolic one counts as smaller when it divides the
    other."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    return quotient(b, a) is not None


def view(t: Typer, node: fx.Node) -> Typing:
    out = regroup(t, t.dims(node.args[0]), t.shape(node.meta["val"]))
    shapes = 1 if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else None
    return Typing(
        out, linear="one", shapes=shapes, localize=_as_reshape if shapes is None else None
    )


def _as_reshape(local: Any) -> Any:
    """flatten, unflatten and the like, written as a reshape to the local shape."""
    return local.emit(torch.ops.aten.reshape.default, local.value(0), local.shape())


def permute(t: Typer, node: fx.Node) -> Typing:
    dims = t.dims(node.args[0])
    return Typing(tuple(dims[d] for d in node.args[1]), linear="one")


def transpose(t: Typer, node: fx.Node) -> Typing:
    dims = list(t.dims(node.args[0]))
    a, b = (node.args[1], node.args[2]) if len(node.args) > 2 else (-2, -1)
    if len(dims) > 1:
        dims[a], dims[b] = dims[b], dims[a]
    return Typing(tuple(dims), linear="one")


def move(t: Typer, node: fx.Node) -> Typing:
    """movedim(x, from, to)"""
    dims = t.dims(node.args[0])
    marked = torch.empty(tuple(range(len(dims))), device="meta")  # sizes say where they were
    return Typing(tuple(dims[d] for d in torch.movedim(marked, *node.args[1:]).shape), linear="one")


def reverse_dims(t: Typer, node: fx.Node) -> Typing:
    return Typing(tuple(reversed(t.dims(node.args[0]))), linear="one")


def unsqueeze(t: Typer, node: fx.Node) -> Typing:
    dims = list(t.dims(node.args[0]))
    at = node.args[1]
    dims.insert(at if at >= 0 else len(dims) + 1 + at, ())
    return Typing(tuple(dims), linear="one")


def squeeze(t: Typer, node: fx.Node) -> Typing:
    dims, shape = t.dims(node.args[0]), t.shape(node.args[0].meta["val"])
    drop = argument(node, 1, "dim")
    drop = range(len(dims)) if drop is None else [drop] if isinstance(drop, int) else drop
    drop = {d % len(dims) for d in drop if shape[d] == 1}
    out = tuple(d for i, d in enumerate(dims) if i not in drop)
    return Typing(out, linear="one", localize=_as_reshape)  # a rank may hold one of several


def expand(t: Typer, node: fx.Node) -> Typing:
    shape = t.shape(node.meta["val"])
    old = t.dims(node.args[0])
    old = ((),) * (len(shape) - len(old)) + tuple(old)
    grown = [d if d or s == 1 else t.fresh(s) for d, s in zip(old, shape, strict=True)]
    new = [g for d, g in zip(old, grown, strict=True) if not d and g]
    return Typing(tuple(grown), fresh=new, linear="one", shapes=1, localize=_expand)


def _expand(local: Any) -> Any:
    return local.emit(torch.ops.aten.expand.default, local.value(0), local.shape())


def slice_(t: Typer, node: fx.Node) -> Typing:
    dims = list(t.dims(node.args[0]))
    at = argument(node, 1, "dim", 0) % len(dims)
    size, new = t.shape(node.args[0].meta["val"])[at], t.shape(node.meta["val"])[at]
    if same_size(size, new):
        return Typing(tuple(dims), linear="one", localize=lambda local: local.value(0))
    start, stop = argument(node, 2, "start"), argument(node, 3, "end")
    step = argument(node, 4, "step", 1)
    whole = dims[at]
    if (
        step == 1
        and isinstance(size, int)
        and all(isinstance(v, (int, type(None))) for v in (start, stop))
    ):
        first, last, _ = slice(start, stop).indices(size)
        found = slice_dim(whole, first, last)
        if found is not None:
            dims[at] = found
            localize = _slice_piece(whole, first, at)
            return Typing(tuple(dims), linear="one", localize=localize, selects=True)
    elif (
        isinstance(size, int)
        and isinstance(step, int)
        and size % step == 0
        and stop_is_end(stop, size)
    ):
        pair = (*fresh(size // step), *fresh(step))
        unify(whole, pair)
        axes = leaves(whole)
        if axes and axes[-1].size == step and not axes[-1].opaque:
            dims[at] = axes[:-1]
            return Typing(tuple(dims), whole=[axes[-1:]], linear="one")
    dims[at] = fresh(new)
    if step != 1 or not dims[at]:
        return Typing(tuple(dims), whole=[whole], linear="one")
    first = 0 if start is None else t.size(_value(start))
    first = first + size if isinstance(first, int) and first < 0 else first
    return moved(tuple(dims), Window(whole, dims[at], at, -first, first))


def moved(dims: Dims, window: Window) -> Typing:
    """A slice, a shift, zeros put in front or behind: elements at other positions."""
    return Typing(
        dims,
        linear="one",
        apart=(window.source, window.out),
        window=window,
        localize=_moved(window),
    )


def _moved(window: Window) -> Any:
    def localize(local: Any) -> Any:
        return local.fetch(window) if local.spanned(window) else local.default()

    return localize


def stop_is_end(stop: Any, size: int) -> bool:
    return stop is None or (isinstance(stop, int) and stop >= size)


def _slice_piece(whole: Dim, first: int, at: int) -> Any:
    def localize(local: Any) -> Any:
        start = local.offset(whole, first)
        length = local.size(local.out_dims()[at])
        return local.emit(torch.ops.aten.narrow.default, local.value(0), at, start, length)

    return localize


def pieces(t: Typer, node: fx.Node) -> Typing:
    """split, chunk, split_with_sizes, tensor_split."""
    source = t.dims(node.args[0])
    position = 2 if len(node.args) > 2 else None
    at = (node.args[position] if position else node.kwargs.get("dim", 0)) % len(source)
    out, start, structured = [], 0, True
    sizes = [t.shape(v)[at] for v in t.results(node)]
    for size in sizes:
        found = slice_dim(source[at], start, start + size) if isinstance(size, int) else None
        structured = structured and found is not None
        out.append((*source[:at], found if found is not None else fresh(size), *source[at + 1 :]))
        start = start + size
    if not structured:
        out = [(*source[:at], fresh(s), *source[at + 1 :]) for s in sizes]
        return Typing(out, whole=[source[at]], linear="one")
    return Typing(out, linear="one", localize=_pieces(at), selects=True)


def _pieces(at: int) -> Any:
    def localize(local: Any) -> Any:
        sizes = [local.size(local.out_dims(i)[at]) for i in range(local.results)]
        return local.emit(torch.ops.aten.split_with_sizes.default, local.value(0), sizes, at)

    return localize


def unbind(t: Typer, node: fx.Node) -> Typing:
    dims = t.dims(node.args[0])
    at = argument(node, 1, "dim", 0) % len(dims)
    rest = (*dims[:at], *dims[at + 1 :])
    return Typing([rest] * len(t.results(node)), whole=[dims[at]], linear="one")


def select(t: Typer, node: fx.Node) -> Typing:
    dims = t.dims(node.args[0])
    at = node.args[1] % len(dims)
    return Typing((*dims[:at], *dims[at + 1 :]), whole=[dims[at]], linear="one")


def cat(t: Typer, node: fx.Node) -> Typing:
    nodes = [n for n in node.args[0] if t.shape(n.meta["val"]) != (0,)]
    all_dims = [t.dims(n) for n in nodes]
    at = argument(node, 1, "dim", 0) % len(all_dims[0])
    out = list(all_dims[0])
    for other in all_dims[1:]:
        for i, dim in enumerate(other):
            if i != at:
                unify(out[i], dim)
    out[at] = concat_dims([d[at] for d in all_dims])
    whole = []
    if not all(isinstance(size_of(d[at]), int) for d in all_dims):
        whole = [d[at] for d in all_dims]
    return Typing(tuple(out), whole=whole, linear="all")


def stack(t: Typer, node: fx.Node) -> Typing:
    all_dims = [t.dims(n) for n in node.args[0]]
    out = list(all_dims[0])
    for other in all_dims[1:]:
        for a, b in zip(out, other, strict=True):
            unify(a, b)
    at = argument(node, 1, "dim", 0)
    out.insert(at if at >= 0 else len(out) + 1 + at, fresh(len(all_dims)))
    return Typing(tuple(out), linear="all")


def repeat(t: Typer, node: fx.Node) -> Typing:
    """x[d] repeated n times -> [n d]; every rank may make its own part of the n."""
    source = t.dims(node.args[0])
    source = ((),) * (len(node.args[1]) - len(source)) + tuple(source)
    times = [t.fresh(t.size(_value(n))) for n in node.args[1]]
    out = tuple((*many, *dim) for many, dim in zip(times, source, strict=True))
    return Typing(out, fresh=times, linear="one", localize=_repeat(times))


def _value(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def _repeat(times: list[Dim]) -> Any:
    def localize(local: Any) -> Any:
        return local.emit(local.node.target, local.value(0), [local.size(n) for n in times])

    return localize


def repeat_interleave(t: Typer, node: fx.Node) -> Typing:
    dims, count = list(t.dims(node.args[0])), node.args[1]
    at = argument(node, 2, "dim")
    if not isinstance(count, int) or at is None:
        return Typing(t.new(node.meta["val"]), whole=list(dims))
    extra = fresh(count)
    dims[at] = (*dims[at], *extra)
    return Typing(tuple(dims), fresh=[extra], linear="one", localize=_repeat_interleave(extra))


def _repeat_interleave(extra: Dim) -> Any:
    def localize(local: Any) -> Any:
        args = list(local.node.args)
        return local.emit(local.node.target, local.value(0), local.size(extra), *args[2:])

    return localize


def pad(t: Typer, node: fx.Node) -> Typing:
    """pad(x, [before, after] of the last dimension, the one before ...): padded dimensions must be
    whole, also those that keep their size (one in front, one less behind: a shift); one that is
    padded with zeros moves."""
    dims, shape, whole = list(t.dims(node.args[0])), t.shape(node.meta["val"]), []
    amounts, window = node.args[1], None
    for i in range(len(amounts) // 2):
        if any(isinstance(n, fx.Node) or n for n in amounts[2 * i : 2 * i + 2]):
            whole.append(dims[-1 - i])
            dims[-1 - i] = fresh(shape[-1 - i])
            before = t.size(_value(amounts[2 * i]))
            window = Window(whole[-1], dims[-1 - i], len(dims) - 1 - i, before, -before)
    constant = "constant" in str(node.target) or argument(node, 2, "mode", "constant") == "constant"
    value = argument(node, 2 if "constant" in str(node.target) else 3, "value")
    if constant and not value and window and len(whole) == 1 and window.out:
        return moved(tuple(dims), window)
    return Typing(tuple(dims), whole=whole, linear="one" if constant and not value else "")


def along(t: Typer, node: fx.Node) -> Typing:
    """flip, roll: the dimensions moved along must be whole."""
    dims = t.dims(node.args[0])
    position = 2 if "roll" in str(node.target) else 1
    moved = argument(node, position, "dims", range(len(dims)))
    moved = [moved] if isinstance(moved, int) else moved
    return Typing(dims, whole=[dims[d] for d in moved], linear="one")


def diff(t: Typer, node: fx.Node) -> Typing:
    dims, shape = list(t.dims(node.args[0])), t.shape(node.meta["val"])
    at = argument(node, 2, "dim", -1)
    whole = [dims[at]]
    for other in node.args[3:]:
        if isinstance(other, fx.Node):
            whole.append(t.dims(other)[at])
    dims[at] = fresh(shape[at])
    return Typing(tuple(dims), whole=whole)


def tri(t: Typer, node: fx.Node) -> Typing:
    dims = t.dims(node.args[0])
    return Typing(dims, whole=list(dims[-2:]), linear="one")


def slice_scatter(t: Typer, node: fx.Node) -> Typing:
    dims, source = t.dims(node.args[0]), t.dims(node.args[1])
    at = argument(node, 2, "dim", 0) % len(dims)
    whole = [dims[at], source[at]]
    for i, (a, b) in enumerate(zip(dims, source, strict=True)):
        if i != at:
            unify(a, b)
    if same_size(size_of(dims[at]), size_of(source[at])):
        unify(dims[at], source[at])
        return Typing(source, localize=lambda local: local.value(1))
    return Typing(dims, whole=whole)


def select_scatter(t: Typer, node: fx.Node) -> Typing:
    dims, source = t.dims(node.args[0]), list(t.dims(node.args[1]))
    at = node.args[2] % len(dims)
    for a, b in zip((*dims[:at], *dims[at + 1 :]), source, strict=True):
        unify(a, b)
    return Typing(dims, whole=[dims[at]])


def complex_view(t: Typer, node: fx.Node) -> Typing:
    """view_as_real adds a last dimension of two, view_as_complex drops it."""
    dims, value = t.dims(node.args[0]), node.meta["val"]
    if value.ndim > len(dims):
        return Typing((*dims, fresh(2)), linear="one")
    return Typing(dims[:-1], whole=[dims[-1]], linear="one")


RULES = [
    ("view reshape _unsafe_view flatten unflatten view_as reshape_as", view),
    ("permute", permute),
    ("transpose t swapaxes mT mH adjoint", transpose),
    ("movedim moveaxis", move),
    ("numpy_T", reverse_dims),
    ("unsqueeze", unsqueeze),
    ("squeeze", squeeze),
    ("expand expand_as", expand),
    ("slice", slice_),
    ("split chunk split_with_sizes tensor_split", pieces),
    ("unbind", unbind),
    ("select", select),
    ("cat concat concatenate", cat),
    ("stack", stack),
    ("repeat", repeat),
    ("repeat_interleave", repeat_interleave),
    ("pad constant_pad_nd", pad),
    ("flip roll", along),
    ("diff", diff),
    ("tril triu", tri),
    ("slice_scatter", slice_scatter),
    ("select_scatter", select_scatter),
    ("view_as_real view_as_complex", complex_view),
]
