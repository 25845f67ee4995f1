"""Optimizers that cannot work on parts of tensors are refused, at their first step.

Most update every number by itself (SGD, Adam, Lion, ...): a rank's part is updated as it would be
in the whole. Others look at the whole tensor (Adafactor's factors, LAMB's norms, Muon's matrices)
and would quietly do something else. Which is which is found by trial: the optimizer's own step on
a small tensor, and on its two halves.
"""

from __future__ import annotations

import collections
import copy
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from autoshard.errors import ShardingError, message

#: Steps that optimizers of live modules' parameters have taken in this process.
taken = 0

_ours: Any = WeakIdKeyDictionary()  # parameters of live modules: name, whether ranks hold parts
#: Optimizers: how many groups they had when tried, and whether they step on such parameters.
_tried: Any = weakref.WeakKeyDictionary()
_trying = False

#: Steps of a trial, and by how much its halves may differ from the whole.
STEPS, TOLERANCE = 2, 1e-6


def watch(parameter: nn.Parameter, name: str, cut: bool) -> None:
    """From now on optimizers that step on this parameter are known; where ``cut``, as a rank holds
    a part of it only, they are tried first."""
    _ours[parameter] = name, cut


def of(parameters: list[torch.Tensor]) -> list[Any]:
    """The optimizers that have stepped on any of these parameters."""
    own = {id(p) for p in parameters}
    return [o for o in _tried if any(id(p) in own for g in o.param_groups for p in g["params"])]


#: What holds gradients that are not reduced yet (`runtime.zero.Store`), of modules that live.
stores: Any = weakref.WeakSet()


def _before_step(optimizer: Any, *_: Any) -> None:
    for store in stores:
        if store.reductions.accumulated() and any(
            p is store.shards.get(_ours[p][0])
            for group in optimizer.param_groups
            for p in group["params"]
            if p in _ours
        ):
            store.reductions.refuse_unreduced(f"{type(optimizer).__name__}.step")
    count = len(optimizer.param_groups)
    if _trying or not _ours or _tried.get(optimizer, (0,))[0] == count:
        return
    own = any(p in _ours for group in optimizer.param_groups for p in group["params"])
    _tried[optimizer] = count, own
    off = {}
    for group in optimizer.param_groups:
        parts = {p.ndim: p for p in group["params"] if p.ndim and _ours.get(p, ("", False))[1]}
        for example in parts.values():
            difference = _difference(optimizer, group, example)
            if difference > TOLERANCE:
                off[_ours[example][0]] = difference
    if off:
        del _tried[optimizer]  # it is refused again
        raise ShardingError(
            message(
                f"{type(optimizer).__name__}.step",
                f"parameters such as {', '.join(off)}",
                f"halves of a tensor end up {max(off.values()):.1e} from where the whole one does",
                "its update of one number looks at others of the tensor, and this rank holds a "
                "part of it only",
                "use an optimizer that updates every number by itself (AdamW, SGD, Lion, ...), or "
                "give it only parameters that are whole on every rank (zero=0, no tp)",
            )
        )


def _after_step(optimizer: Any, *_: Any) -> None:
    global taken
    taken += not _trying and _tried.get(optimizer, (0, False))[1]


def _difference(optimizer: Any, group: dict[str, Any], like: nn.Parameter) -> float:
    """The largest difference between stepping on a tensor and on its halves, in units of the step;
    zero where the optimizer cannot be tried."""
    global _trying
    shape = (4, *(3,) * (like.ndim - 1))
    count = 4 * 3 ** (like.ndim - 1)
    numbers = torch.arange(1, count + 1, dtype=torch.float32).view(shape)
    start = (numbers * 0.7).sin().to(like.device)
    grads = [(numbers * (step + 1.3)).cos().to(like.device) for step in range(STEPS)]
    _trying = True
    try:
        whole = _stepped(optimizer, group, start, grads)
        halves = [
            _stepped(optimizer, group, start[rows], [g[rows] for g in grads])
            for rows in (slice(0, 2), slice(2, 4))
        ]
    except Exception:  # an optimizer that only works where it is: nothing is known about it
        return 0.0
    finally:
        _trying = False
    moved = (whole - start).abs().max().clamp(min=1e-30)
    return float((whole - torch.cat(halves)).abs().max() / moved)


def _stepped(
    optimizer: Any, group: dict[str, Any], start: torch.Tensor, grads: list[torch.Tensor]
) -> torch.Tensor:
    """Where a copy of the optimizer with fresh state takes a tensor."""
    parameter = nn.Parameter(start.clone())
    trial = copy.copy(optimizer)
    own = {id(p) for each in optimizer.param_groups for p in each["params"]}
    trial.__dict__ = {
        name: [parameter] if _holds(value, own) else value
        for name, value in vars(optimizer).items()
        if name != "step"  # which schedulers set, to one that steps the optimizer itself
    }
    trial.state = collections.defaultdict(dict)
    trial.param_groups = [{**group, "params": [parameter]}]
    if "lr" in group and not float(group["lr"]):  # as when it warms up
        trial.param_groups[0]["lr"] = 0.1
    trial._optimizer_step_pre_hooks = collections.OrderedDict()
    trial._optimizer_step_post_hooks = collections.OrderedDict()
    for grad in grads:
        parameter.grad = grad.clone()
        try:
            type(optimizer).step(trial)
        except TypeError:  # it wants a closure
            type(optimizer).step(trial, lambda: torch.zeros(()))
    return parameter.detach()


def _holds(value: Any, parameters: set[int]) -> bool:
    """Whether an attribute is a list of parameters (LBFGS keeps one)."""
    return isinstance(value, (list, tuple)) and any(id(v) in parameters for v in value)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
