"""Losses: the loss of the global batch, whatever is cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.axes import leaves
from autoshard.rules.core import Dim, Typer, Typing, argument, broadcast, is_tensor, operands, unify

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def cross_entropy(t: Typer, node: fx.Node) -> Typing:
    """cross entropy and nll: logits[n, classes, ...], target[n, ...]. The mean is over the real
    tokens of the global batch; cut logits are never gathered."""
    logits, target = t.dims(node.args[0]), t.dims(node.args[1])
    at = 1 if len(logits) > 1 else 0
    classes = logits[at]
    tokens = [d for i, d in enumerate(logits) if i != at]
    weight = argument(node, 2, "weight")
    reduction = argument(node, 3, "reduction", MEAN)
    smoothing = argument(node, 5, "label_smoothing", 0.0)
    log_probabilities = "nll" in str(node.target)
    whole: list[Dim] = [classes] if log_probabilities else []
    if len(target) == len(logits):  # class probabilities
        unify(target[at], classes)
        whole.append(classes)
    for a, b in zip(
        tokens,
        [d for i, d in enumerate(target) if len(target) < len(logits) or i != at],
        strict=True,
    ):
        unify(a, b)
    if is_tensor(weight):
        unify(t.dims(weight)[0], classes)
    if is_tensor(weight) or smoothing or reduction == NONE or at != len(logits) - 1:
        whole.append(classes)
    for axis in leaves(classes):
        axis.role = axis.role or "vocab"
    if reduction == NONE:
        return Typing(tuple(tokens), whole=whole)
    return Typing(
        (), summed=[*tokens, classes], whole=whole, localize=_cross_entropy(tokens, classes)
    )


def _cross_entropy(tokens: list[Dim], classes: Dim) -> Any:
    def localize(local: Any) -> Any:
        cut = local.cutting([classes])
        tokens_cut = local.cutting(tokens)
        if not cut and not tokens_cut:
            return local.default()
        node = local.node
        logits, target = local.value(0), local.value(1)
        weight = argument(node, 2, "weight")
        weight = local.mapped(weight) if weight is not None else None
        ignore = local.mapped(argument(node, 4, "ignore_index", -100))
        rest = node.args[5:]  # label_smoothing
        if cut:
            total = _vocab_parallel(local, tokens, classes, cut, ignore)
            local.resolved(cut)
        else:
            total = local.emit(node.target, logits, target, weight, SUM, ignore, *rest)
        if argument(node, 3, "reduction", MEAN) == SUM:
            return total
        return local.divided(total, _count(local, node, target, weight, ignore, tokens_cut))

    return localize


def _count(local: Any, node: fx.Node, target: Any, weight: Any, ignore: int, cut: Any) -> Any:
    """The number (or weight) of real tokens of the global batch."""
    if node.args[1].meta["val"].is_floating_point():
        count = local.local_numel(node.args[1], drop=1)
        return local.convert_raw("all_reduce", count, cut, grad=False) if cut else count
    real = local.emit(aten.ne.Scalar, target, ignore)
    if weight is not None:
        safe = local.emit(
            aten.masked_fill.Scalar, target, local.emit(aten.logical_not.default, real), 0
        )
        weights = local.emit(aten.to.dtype, weight, local.count_dtype())
        real = local.emit(aten.mul.Tensor, local.emit(aten.index.Tensor, weights, [safe]), real)
    count = local.emit(aten.sum.default, real)
    count = local.emit(aten.to.dtype, count, local.count_dtype())
    return local.convert_raw("all_reduce", count, cut, grad=False) if cut else count


def _vocab_parallel(local: Any, tokens: list[Dim], classes: Dim, cut: Any, ignore: int) -> Any:
    """Sum over tokens of log-sum-exp minus the target's logit, with the classes cut over ranks
    (Shoeybi et al. 2019, section 3): three reductions of one number per token."""
    logits, target, per_token = local.value(0), local.value(1), tuple(tokens)
    if local.node.args[0].meta["val"].dtype not in (torch.float32, torch.float64):
        logits = local.emit(aten.to.dtype, logits, torch.float32)  # as torch's own loss does inside
    peak = local.emit(aten.amax.default, logits, [-1], True)
    peak = local.convert_raw("all_reduce_max", peak, cut, per_token, grad=False)
    shifted = local.emit(aten.sub.Tensor, logits, peak)
    mass = local.emit(aten.sum.dim_IntList, local.emit(aten.exp.default, shifted), [-1])
    mass = local.convert_raw("all_reduce", mass, cut, per_token)
    inside, position = local.own_range(target, classes, cut)
    picked = local.emit(
        aten.gather.default, shifted, -1, local.emit(aten.unsqueeze.default, position, -1)
    )
    picked = local.emit(aten.squeeze.dim, picked, -1)
    picked = local.emit(
        aten.masked_fill.Scalar, picked, local.emit(aten.logical_not.default, inside), 0
    )
    picked = local.convert_raw("all_reduce", picked, cut, per_token)
    each = local.emit(aten.sub.Tensor, local.emit(aten.log.default, mass), picked)
    ignored = local.emit(aten.eq.Scalar, target, ignore)
    each = local.emit(aten.masked_fill.Scalar, each, ignored, 0)
    return local.emit(aten.sum.default, each)


def pointwise_loss(t: Typer, node: fx.Node) -> Typing:
    """mse, l1, bce, huber ...: a mean (or sum) over all elements."""
    dims = broadcast([t.dims(n) for n in operands(node)])
    value = node.meta["val"]
    if value.ndim == len(dims) and value.ndim:
        return Typing(dims)

    def localize(local: Any) -> Any:
        cut = local.cutting(list(dims))
        if not cut:
            return local.default()
        position = next(
            i for i, a in enumerate(node.target._schema.arguments) if a.name == "reduction"
        )
        if argument(node, position, "reduction", MEAN) == SUM:
            return local.default()
        args = [local.mapped(a) for a in node.args]
        kwargs = {k: local.mapped(v) for k, v in node.kwargs.items() if k != "reduction"}
        if len(args) > position:
            args[position] = SUM
        else:
            kwargs["reduction"] = SUM
        total = local.emit(node.target, *args, **kwargs)
        return local.divided(total, local.whole_size(list(dims)))

    return Typing((), summed=list(dims), localize=localize)


RULES = [
    ("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d", cross_entropy),
    (
        """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
        binary_cross_entropy_with_logits kl_div soft_margin_loss""",
        pointwise_loss,
    ),
]
