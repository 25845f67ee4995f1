"""Ops that treat every element alike: all operands broadcast to the result."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.rules.core import Typer, Typing, argument, broadcast, is_tensor, operands


def elementwise(t: Typer, node: fx.Node) -> Typing:
    return Typing(broadcast([t.dims(n) for n in operands(node)]))


def additive(t: Typer, node: fx.Node) -> Typing:
    """add, sub: a partial sum passes when every operand is one; not next to a number."""
    typing = elementwise(t, node)
    if all(is_tensor(a) for a in node.args[:2]):
        typing.linear = "all"
    return typing


def scaling(t: Typer, node: fx.Node) -> Typing:
    """mul: linear in either operand."""
    typing = elementwise(t, node)
    typing.linear = "one"
    return typing


def division(t: Typer, node: fx.Node) -> Typing:
    """div: linear in its first operand, unless it rounds."""
    typing = elementwise(t, node)
    typing.linear = "" if node.kwargs.get("rounding_mode") else "first"
    return typing


def linear_map(t: Typer, node: fx.Node) -> Typing:
    typing = elementwise(t, node)
    typing.linear = "one"
    return typing


def cast(t: Typer, node: fx.Node) -> Typing:
    """to, type_as: the target tensor is read for its dtype only. No sum may wait for a cast that
    rounds."""
    made, given = node.meta["val"].dtype, node.args[0].meta["val"].dtype
    whole = made is torch.bool or (given.is_floating_point and not made.is_floating_point)
    return Typing(t.dims(node.args[0]), linear="" if whole and not made.is_complex else "first")


def dropout(t: Typer, node: fx.Node) -> Typing:
    active = argument(node, 2, "train", True) and argument(node, 1, "p", 0.5)
    return Typing(t.dims(node.args[0]), linear="one" if not active else "", random=bool(active))


def native_dropout(t: Typer, node: fx.Node) -> Typing:
    dims = t.dims(node.args[0])
    return Typing([dims, dims], random=bool(argument(node, 1, "p", 0.5)))


def random_like(t: Typer, node: fx.Node) -> Typing:
    return Typing(t.dims(node.args[0]), random=True)


RULES = [
    (
        """pow relu gelu silu sigmoid tanh exp expm1 log log1p log2 sqrt rsqrt reciprocal abs square
        softplus hardtanh hardswish hardsigmoid leaky_relu elu selu mish celu log_sigmoid erf erfc
        sin cos tan sinh cosh asin acos atan atan2 floor ceil round trunc sign clamp clamp_min
        clamp_max maximum minimum masked_fill eq ne lt le gt ge logical_and logical_or
        logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__
        __xor__ isnan isinf isfinite remainder fmod floor_divide rsub nan_to_num relu6 lerp addcmul
        addcdiv copy zeros_like ones_like full_like empty_like fill threshold prelu polar logaddexp
        sgn __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift""",
        elementwise,
    ),
    ("add sub", additive),
    ("mul", scaling),
    ("div", division),
    ("neg clone contiguous detach detach_ alias lift_fresh_copy lift_fresh positive", linear_map),
    ("to _to_copy type_as", cast),
    ("dropout", dropout),
    ("native_dropout", native_dropout),
    ("rand_like randn_like exponential uniform bernoulli normal_functional", random_like),
]
