"""Ops that reduce, normalise or order along dimensions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.rules.core import Dim, Dims, Typer, Typing, argument, fresh, unify
from autoshard.rules.elementwise import elementwise

aten = torch.ops.aten


def _reduced(node: fx.Node, dims: Dims, position: int = 1) -> list[int]:
    at = argument(node, position, "dim")
    if at is None or isinstance(at, bool) or (isinstance(at, (list, tuple)) and not at):
        return list(range(len(dims)))
    return [d % len(dims) for d in ([at] if isinstance(at, int) else at)] if dims else []


def _kept(dims: Dims, at: list[int], keepdim: bool) -> Dims:
    if keepdim:
        return tuple(() if i in at else d for i, d in enumerate(dims))
    return tuple(d for i, d in enumerate(dims) if i not in at)


def sum_(t: Typer, node: fx.Node) -> Typing:
    dims = t.dims(node.args[0])
    at = _reduced(node, dims)
    out = _kept(dims, at, bool(argument(node, 2, "keepdim", False)))
    return Typing(out, summed=[dims[i] for i in at], linear="one")


def mean(t: Typer, node: fx.Node) -> Typing:
    """A sum over what is cut, divided by the whole size."""
    dims = t.dims(node.args[0])
    at = _reduced(node, dims)
    keep = bool(argument(node, 2, "keepdim", False))
    reduced = [dims[i] for i in at]

    def localize(local: Any) -> Any:
        if not local.summed_cut():
            return local.default()
        total = local.emit(aten.sum.dim_IntList, local.value(0), at, keep)
        return local.divided(total, local.whole_size(reduced))

    return Typing(_kept(dims, at, keep), summed=reduced, linear="one", localize=localize)


def reduce_whole(t: Typer, node: fx.Node) -> Typing:
    """max, min, var, norm, argmax, logsumexp ...: the reduced dimensions must be whole."""
    dims = t.dims(node.args[0])
    at = _reduced(node, dims)
    results = t.results(node)
    keep = bool(results) and results[0].ndim == len(dims) and len(dims) > 0
    out = _kept(dims, at, keep)
    several = isinstance(node.meta["val"], (list, tuple))
    return Typing([out] * len(results) if several else out, whole=[dims[i] for i in at])


def maximum(t: Typer, node: fx.Node) -> Typing:
    """max, min: of two tensors elementwise, else a reduction."""
    if len(node.args) > 1 and isinstance(node.args[1], fx.Node):
        return elementwise(t, node)
    return reduce_whole(t, node)


def norm(t: Typer, node: fx.Node) -> Typing:
    dims = t.dims(node.args[0])
    at = _reduced(node, dims, 2)
    out = _kept(dims, at, bool(argument(node, 3, "keepdim", False)))
    return Typing(out, whole=[dims[i] for i in at])


def along(t: Typer, node: fx.Node) -> Typing:
    """softmax, cumsum, sort, ...: same shape, one dimension whole."""
    dims = t.dims(node.args[0])
    position = 2 if "sort.stable" in str(node.target) else 1
    at = argument(node, position, "dim", -1)
    several = isinstance(node.meta["val"], (list, tuple))
    whole = [dims[at]] if dims else []
    linear = "one" if "cumsum" in str(node.target) else ""
    out: Any = [dims] * len(t.results(node)) if several else dims
    # integers (the experts of tokens) may be ordered among a rank's own rows; values would differ
    ordered = "sort" in str(node.target) and not node.args[0].meta["val"].is_floating_point()
    return Typing(out, whole=whole, linear=linear, per_row=ordered)


def topk(t: Typer, node: fx.Node) -> Typing:
    dims = list(t.dims(node.args[0]))
    at = argument(node, 2, "dim", -1)
    whole = dims[at]
    dims[at] = fresh(t.shape(t.results(node)[0])[at])
    return Typing([tuple(dims)] * 2, whole=[whole])


def normalize(t: Typer, node: fx.Node) -> Typing:
    """layer_norm, rms_norm over the last dimensions; where these are cut, over the ranks'
    moments."""
    dims = t.dims(node.args[0])
    count = len(node.args[1])
    last = list(dims[len(dims) - count :])
    for name, position in (("weight", 2), ("bias", 3)):
        scale = argument(node, position, name)
        if isinstance(scale, fx.Node):
            for a, b in zip(t.dims(scale), last, strict=True):
                unify(a, b)
    if isinstance(node.meta["val"], (list, tuple)):
        kept = (*dims[: len(dims) - count], *([()] * count))
        return Typing([dims, kept, kept], whole=last)
    return Typing(dims, reduced=last, localize=_normalize(dims[: len(dims) - count], last))


def _normalize(rows: Dims, last: list[Dim]) -> Any:
    """Moments of cut features: local sums, one number per row summed over the ranks."""

    def localize(local: Any) -> Any:
        cut = local.cutting(last)
        if not cut:
            args = list(local.mapped(local.node.args))
            args[1] = [local.size(d) for d in last]
            return local.emit(local.node.target, *args, **local.mapped(local.node.kwargs))
        node, x = local.node, local.value(0)
        dtype = node.args[0].meta["val"].dtype
        wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        weight, bias = argument(node, 2, "weight"), None
        is_layer_norm = "layer_norm" in str(node.target)
        eps = argument(node, 4 if is_layer_norm else 3, "eps")
        at, kept = [-1 - i for i in range(len(last))], (*rows, *([()] * len(last)))
        size = local.whole_size(last)

        def average(value: Any) -> Any:
            total = local.emit(aten.sum.dim_IntList, value, at, True)
            total = local.convert_raw("all_reduce_replicate", total, cut, kept)
            return local.emit(aten.div.Tensor, total, size)

        if wide != dtype:
            x = local.emit(aten.to.dtype, x, wide)
        if is_layer_norm:
            bias = argument(node, 3, "bias")
            x = local.emit(aten.sub.Tensor, x, average(x))
        spread = local.emit(
            aten.add.Tensor,
            average(local.emit(aten.mul.Tensor, x, x)),
            torch.finfo(dtype).eps if eps is None else eps,
        )
        out = local.emit(aten.mul.Tensor, x, local.emit(aten.rsqrt.default, spread))
        if weight is not None:
            out = local.emit(aten.mul.Tensor, out, local.mapped(weight))
        if bias is not None:
            out = local.emit(aten.add.Tensor, out, local.mapped(bias))
        return local.emit(aten.to.dtype, out, dtype) if wide != dtype else out

    return localize


def group_norm(t: Typer, node: fx.Node) -> Typing:
    dims = t.dims(node.args[0])
    for position in (2, 3):
        scale = node.args[position] if len(node.args) > position else None
        if isinstance(scale, fx.Node):
            unify(t.dims(scale)[0], dims[1])
    return Typing(dims, whole=list(dims[1:]))


def batch_norm(t: Typer, node: fx.Node) -> Typing:
    """Statistics over all dimensions but the channel: means over cut axes, reduced over them."""
    dims = t.dims(node.args[0])
    for scale in node.args[1:5]:
        if isinstance(scale, fx.Node):
            unify(t.dims(scale)[0], dims[1])
    channel: Dims = (dims[1],)
    results = t.results(node)
    reduced: list[Dim] = [dims[0], *dims[2:]]
    out: Any = dims
    if isinstance(node.meta["val"], (list, tuple)):
        out = [dims, *(channel if v.numel() else ((),) for v in results[1:])]
    training = "no_training" not in str(node.target) and bool(argument(node, 5, "training", True))
    if not training:
        return Typing(out)
    return Typing(
        out, reduced=reduced, localize=_batch_norm(reduced, channel), whole=list(dims[2:])
    )


def norm_of_channels(t: Typer, node: fx.Node) -> Typing:
    """Batch norm without running statistics, as in instance norm: all but the channels whole."""
    dims = t.dims(node.args[0])
    for scale in node.args[1:3]:
        if isinstance(scale, fx.Node):
            unify(t.dims(scale)[0], dims[1])
    return Typing([dims, (dims[1],), (dims[1],)], whole=[dims[0], *dims[2:]])


def _batch_norm(reduced: list[Dim], channel: Dims) -> Any:
    """Training statistics of a cut batch: local moments, summed over the ranks (Chan et al.
    1979)."""

    def localize(local: Any) -> Any:
        cut = local.cutting(reduced)
        if not cut:
            return local.default()
        args = [local.mapped(a) for a in local.node.args]
        x, weight, bias, running_mean, running_var = args[:5]
        momentum, eps = args[6:8]
        rank = local.node.args[0].meta["val"].ndim
        at = [0, *range(2, rank)]
        shape = [1, -1, *([1] * (rank - 2))]
        count = local.whole_size(reduced)

        def average(value: Any) -> Any:
            total = local.emit(aten.sum.dim_IntList, value, at, False)
            total = local.convert_raw("all_reduce_replicate", total, cut, channel)
            return local.emit(aten.div.Tensor, total, count)

        def wide(value: Any) -> Any:
            return local.emit(aten.reshape.default, value, shape)

        mean = average(x)
        centred = local.emit(aten.sub.Tensor, x, wide(mean))
        var = average(local.emit(aten.mul.Tensor, centred, centred))
        inverse = local.emit(aten.rsqrt.default, local.emit(aten.add.Tensor, var, eps))
        out = local.emit(aten.mul.Tensor, centred, wide(inverse))
        if weight is not None:
            out = local.emit(aten.mul.Tensor, out, wide(weight))
        if bias is not None:
            out = local.emit(aten.add.Tensor, out, wide(bias))
        if local.results == 1:
            return out
        return [
            out,
            mean,
            inverse,
            *_running(local, mean, var, count, running_mean, running_var, momentum),
        ]

    return localize


def _running(
    local: Any, mean: Any, var: Any, count: Any, old_mean: Any, old_var: Any, m: float
) -> Any:
    """Running statistics; the variance is the unbiased one, as in torch."""
    if old_mean is None:
        return []
    less = local.minus(count, 1)
    unbiased = local.emit(aten.mul.Tensor, var, local.emit(aten.div.Tensor, count, less))
    out = []
    for old, new in ((old_mean, mean), (old_var, unbiased)):
        new = local.emit(aten.detach.default, new)
        kept = local.emit(aten.mul.Tensor, old, 1 - m)
        out.append(local.emit(aten.add.Tensor, kept, local.emit(aten.mul.Tensor, new, m)))
    return out


def variance(t: Typer, node: fx.Node) -> Typing:
    """var, std over dimensions; where these are cut, from moments summed over the ranks."""
    dims = t.dims(node.args[0])
    at = _reduced(node, dims)
    keep = bool(argument(node, 3, "keepdim", False))
    reduced = [dims[i] for i in at]
    unbiased = argument(node, 1, "unbiased", None)
    unbiased = unbiased if isinstance(unbiased, bool) else argument(node, 2, "unbiased", True)
    correction = node.kwargs.get("correction", 1 if unbiased is None else int(unbiased))

    def localize(local: Any) -> Any:
        cut = local.cutting(reduced)
        if not cut:
            return local.default()
        kept = tuple(() if i in at else d for i, d in enumerate(dims))
        size = local.whole_size(reduced)

        def total(value: Any) -> Any:
            part = local.emit(aten.sum.dim_IntList, value, at, True)
            return local.convert_raw("all_reduce_replicate", part, cut, kept)

        x, dtype = local.value(0), node.meta["val"].dtype
        if dtype != local.count_dtype():
            x = local.emit(aten.to.dtype, x, local.count_dtype())
        x = local.emit(aten.sub.Tensor, x, local.emit(aten.div.Tensor, total(x), size))
        squares = total(local.emit(aten.mul.Tensor, x, x))
        out = local.emit(aten.div.Tensor, squares, local.minus(size, correction))
        if "std" in str(node.target):
            out = local.emit(aten.sqrt.default, out)
        out = out if keep else local.emit(aten.squeeze.dims, out, at)
        return out if dtype == local.count_dtype() else local.emit(aten.to.dtype, out, dtype)

    return Typing(_kept(dims, at, keep), reduced=reduced, localize=localize)


def pool(t: Typer, node: fx.Node) -> Typing:
    """max_pool, avg_pool, upsample: the spatial dimensions must be whole."""
    dims = t.dims(node.args[0])
    results = t.results(node)
    named = str(node.target)
    space = next(n for n in (1, 2, 3) if f"{n}d" in named)
    first = len(dims) - space
    outs = [(*dims[:first], *(fresh(s) for s in t.shape(v)[first:])) for v in results]
    several = isinstance(node.meta["val"], (list, tuple))
    return Typing(outs if several else outs[0], whole=list(dims[first:]))


def counts(t: Typer, node: fx.Node) -> Typing:
    """histc over a given range: a sum over what is cut. Over its own range, and bincount, whose
    size depends on the data: of everything."""
    dims = list(t.dims(node.args[0]))
    low, high = argument(node, 2, "min", 0), argument(node, 3, "max", 0)
    if "histc" in str(node.target) and low < high:
        return Typing(t.new(node.meta["val"]), summed=dims)
    return Typing(t.new(node.meta["val"]), whole=dims)


RULES = [
    ("sum", sum_),
    ("mean", mean),
    ("max min", maximum),
    ("var std", variance),
    (
        "median mode nanmedian amax amin argmax argmin logsumexp prod any all var_mean std_mean",
        reduce_whole,
    ),
    ("linalg_vector_norm norm", norm),
    (
        """softmax _softmax log_softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp sort
        argsort""",
        along,
    ),
    ("topk", topk),
    ("layer_norm rms_norm native_layer_norm", normalize),
    ("group_norm", group_norm),
    (
        "batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit_no_training",
        batch_norm,
    ),
    ("_native_batch_norm_legit", norm_of_channels),
    (
        """max_pool2d max_pool1d max_pool2d_with_indices avg_pool2d avg_pool1d adaptive_avg_pool2d
        adaptive_avg_pool1d _adaptive_avg_pool2d upsample_bilinear2d upsample_nearest2d
        upsample_bicubic2d""",
        pool,
    ),
    ("histc bincount", counts),
]
