"""Matrix products, einsum and convolutions: two operands, a sum over what they share."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard import collectives
from autoshard.axes import leaves
from autoshard.errors import ShardingError, message
from autoshard.layout import P
from autoshard.program import module_path
from autoshard.rules.core import (
    Dim,
    Dims,
    Typer,
    Typing,
    Window,
    argument,
    broadcast,
    fresh,
    size_of,
    unify,
)

aten = torch.ops.aten


def _flops(*dims: Dim) -> Any:
    return 2 * size_of(sum(dims, ()))


def linear(t: Typer, node: fx.Node) -> Typing:
    """x[..., i], weight[o, i], bias[o] -> [..., o]"""
    x, weight = t.dims(node.args[0]), t.dims(node.args[1])
    unify(x[-1], weight[1])
    out = (*x[:-1], weight[0])
    if argument(node, 2, "bias") is not None:
        unify(t.dims(argument(node, 2, "bias"))[0], weight[0])
    return Typing(out, summed=[x[-1]], localize=_linear, flops=_flops(*out, x[-1]))


def _linear(local: Any) -> Any:
    """A bias is added once: after the sum, where the contracted axis is cut."""
    bias = argument(local.node, 2, "bias")
    if bias is None or not local.summed_cut():
        return local.default()
    product = local.emit(aten.linear.default, local.value(0), local.value(1))
    return local.then_add(product, bias)


def addmm(t: Typer, node: fx.Node) -> Typing:
    """bias[n], a[m, k], b[k, n] -> [m, n]"""
    bias, a, b = (t.dims(n) for n in node.args[:3])
    unify(a[1], b[0])
    out = broadcast([(a[0], b[1]), bias])
    return Typing(out, summed=[a[1]], localize=_addmm, flops=_flops(*out, a[1]))


def _addmm(local: Any) -> Any:
    if not local.summed_cut():
        return local.default()
    product = local.emit(aten.mm.default, local.value(1), local.value(2))
    return local.then_add(product, local.node.args[0])


def matmul(t: Typer, node: fx.Node) -> Typing:
    """[..., m, k] @ [..., k, n], batch dimensions broadcast; vectors as in torch.matmul"""
    a, b = t.dims(node.args[0]), t.dims(node.args[1])
    inner_b = b[-2] if len(b) > 1 else b[0]
    unify(a[-1], inner_b)
    batch = broadcast([a[:-2], b[:-2]])
    out = (*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))
    return Typing(out, summed=[a[-1]], flops=_flops(*out, a[-1]), linear="one")


def einsum(t: Typer, node: fx.Node) -> Typing:
    """Any einsum; an ellipsis stands for the leading dimensions, as in torch."""
    inputs = [t.dims(operand) for operand in node.args[1]]
    operands, right = letters_of(node.args[0], [len(dims) for dims in inputs])
    named: dict[str, Dim] = {}
    for letters, dims in zip(operands, inputs, strict=True):
        for letter, dim in zip(letters, dims, strict=True):
            if letter in named and named[letter] and dim:
                unify(named[letter], dim)
            named[letter] = named.get(letter) or dim
    summed = [dim for letter, dim in named.items() if letter not in right]
    out = tuple(named[letter] for letter in right)
    return Typing(out, summed=summed, flops=_flops(*out, *summed), linear="one")


def letters_of(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """The subscripts of every operand and of the result, one a dimension. Those of an ellipsis are
    named ``.n``, counted from the last."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands: list[list[str]] = []
    longest = 0
    for text, rank in zip(left.split(","), ranks, strict=True):
        before, dots, after = text.partition("...")
        count = rank - len(before) - len(after) if dots else 0
        longest = max(longest, count)
        operands.append([*before, *(f".{n}" for n in range(count, 0, -1)), *after])
    hidden = [f".{n}" for n in range(longest, 0, -1)]
    if arrow:
        before, dots, after = right.partition("...")
        return operands, [*before, *(hidden if dots else []), *after]
    plain = [c for c in left if c.isalpha()]
    return operands, [*hidden, *sorted(c for c in set(plain) if plain.count(c) == 1)]


def of_experts(x: Dims, weight: Dims, offsets: Dims) -> bool:
    """Whether rows are those that a dispatch has sorted: their experts are then the weight's."""
    axes = leaves(x[0])
    if not axes or axes[-1].role != "ragged":
        return False
    unify(offsets[0], weight[0])
    return True


def grouped_mm(t: Typer, node: fx.Node) -> Typing:
    """x[tokens, k], weight[experts, k, n], offsets[experts] -> [tokens, n]; unless a dispatch has
    sorted them, tokens must be whole"""
    x, weight = t.dims(node.args[0]), t.dims(node.args[1])
    offsets = argument(node, 2, "offs")
    unify(x[-1], weight[-2])
    if isinstance(offsets, fx.Node) and of_experts(x, weight, t.dims(offsets)):
        out, flops = (x[0], weight[-1]), _flops(x[0], weight[-1], x[-1])
        return Typing(out, summed=[x[-1]], flops=flops, as_is=(offsets,))
    whole, own = [x[0], weight[0]], tuple[fx.Node, ...]()
    if isinstance(offsets, fx.Node):
        whole.append(t.dims(offsets)[0])
        own = (offsets,)
    out = (x[0], weight[-1])
    return Typing(
        out,
        summed=[x[-1]],
        whole=whole,
        flops=_flops(*out, x[-1]),
        per_row=True,
        as_is=own,
        localize=_of_own_rows if own else None,
    )


def _of_own_rows(local: Any) -> fx.Node:
    """Rows of this rank end where counts of its own rows say: summands of those of all ranks."""
    (offsets,) = local.typing.as_is
    layout, rows = local.read[offsets].layout, local.read[local.node.args[0]].dims[0]
    others = [m for m in local.cutting([rows]) if layout.get(m) != P]
    if others:
        raise ShardingError(
            message(
                f"product by groups {module_path(local.node)}".strip(),
                "where the rows of each expert end",
                f"it is one and the same on all ranks of {','.join(others)}",
                "these hold rows of their own, and what ends are made of (a limit of counts) does "
                "not add up over the ranks",
                "give an expert all rows that chose it, or pass expert_capacity to autoshard",
            )
        )
    return local.default()


def convolution(t: Typer, node: fx.Node) -> Typing:
    """x[n, c, space...], weight[o, c/groups, kernel...] -> [n, o, space...]"""
    x, weight = t.dims(node.args[0]), t.dims(node.args[1])
    bias = argument(node, 2, "bias")
    by_position = 8 if "convolution" in str(node.target) else 6
    groups = argument(node, by_position, "groups", 1)
    if len(x) < len(weight):  # no batch dimension
        return Typing(t.new(node.meta["val"]), whole=[*x, *weight])
    shape = t.shape(node.meta["val"])
    space: Dims = tuple(fresh(s) for s in shape[2:])
    if bias is not None:
        unify(t.dims(bias)[0], weight[0])
    window = _window(node, x, space)
    whole, apart = [*x[2:], *weight[2:]], tuple[Dim, ...]()
    if window is not None:
        whole, apart = [*weight[2:]], (window.source, window.out)
    if groups == 1:
        unify(x[1], weight[1])
        out = (x[0], weight[0], *space)
        flops = _flops(*out, x[1], *weight[2:])
        return Typing(
            out,
            summed=[x[1]],
            whole=whole,
            apart=apart,
            window=window,
            localize=_convolution,
            flops=flops,
        )
    if isinstance(size_of(x[1]), int) and groups == size_of(x[1]) == size_of(weight[0]):
        unify(x[1], weight[0])
        return Typing(
            (x[0], weight[0], *space),
            whole=whole,
            apart=apart,
            window=window,
            localize=_depthwise(weight[0], by_position),
        )
    return Typing((x[0], weight[0], *space), whole=[*whole, *apart, x[1], weight[0], weight[1]])


def _window(node: fx.Node, x: Dims, space: Dims) -> Window | None:
    """What a convolution along one dimension reads, step by step; None for other ones."""
    if not op_is(node, "conv1d") or not space[0] or not isinstance(node.args[0], fx.Node):
        return None
    (step,), (padding,), (dilation,) = (
        (given,) if isinstance(given := argument(node, at, name, value), int) else given
        for at, name, value in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    reach = node.args[1].meta["val"].shape[-1]
    if step != 1 or not all(isinstance(v, int) for v in (padding, dilation, reach)):
        return None
    return Window(x[-1], space[0], 2, padding, dilation * (reach - 1) - padding)


def op_is(node: fx.Node, name: str) -> bool:
    return getattr(node.target, "_opname", "") == name


def _convolution(local: Any) -> Any:
    bias = argument(local.node, 2, "bias")
    args = [local.mapped(a) for a in local.node.args]
    if bias is None or not local.summed_cut():
        return _convolved(local, args)
    args[2] = None
    rank = local.node.meta["val"].ndim - 2
    return local.then_add(_convolved(local, args), bias, (-1, *([1] * rank)))


#: The arguments of a convolution along one dimension, in order.
CONV1D = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _convolved(local: Any, args: list[Any], **changed: Any) -> Any:
    """The convolution of what a rank holds; where tokens are cut, of each of its runs and what
    these read of other ranks."""
    window = local.typing.window
    kwargs = {k: local.mapped(v) for k, v in local.node.kwargs.items()} | changed
    over = local.spanned(window)
    if not over:
        return local.emit(local.node.target, *args, **kwargs)
    x = local.fetch(window)
    given = dict(zip(CONV1D, args, strict=False)) | kwargs | {"padding": [0]}
    del given["input"]
    size, reach = local.p.size_node(size_of(window.out)), window.before + window.after
    return local.emit(
        collectives.runwise, local.node.target, over, x, window.at, size, reach, **given
    )


def _depthwise(channels: Dim, position: int) -> Any:
    def localize(local: Any) -> Any:
        args = [local.mapped(a) for a in local.node.args]
        groups = local.size(channels)
        if len(args) > position:
            args[position] = groups
            return _convolved(local, args)
        return _convolved(local, args, groups=groups)

    return localize


RULES = [
    ("linear", linear),
    ("addmm", addmm),
    ("matmul mm bmm mv dot", matmul),
    ("einsum", einsum),
    ("_grouped_mm grouped_mm grouped_mm_fallback grouped_product", grouped_mm),
    ("conv1d conv2d conv3d convolution", convolution),
]
