"""Results of one stage on the ranks of all stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autoshard.pipeline import Plan


def loss(module: Any, mine: torch.Tensor | None) -> torch.Tensor:
    """The loss, on every rank. ``mine``: on those of the stage that has it."""
    wire, plan = module.wire, module._running.runs[True].plan
    owner = wire.place[plan.made[plan.results[0]]]
    value = _shared(wire, owner, None if mine is None else mine.detach(), plan.results[0])
    return value


def everywhere(module: Any, plan: Plan, found: dict[str, Any]) -> dict[str, Any]:
    """All results of a forward, on every rank. ``found``: those of this rank's stages."""
    wire = module.wire
    out = {}
    for name in dict.fromkeys(plan.results):
        at = plan.made[name]
        if at is None:
            out[name] = found[name]
            continue
        out[name] = _shared(wire, wire.place[at], found.get(name), None)
    return out


def _shared(wire: Any, owner: int, value: Any, remember: str | None) -> Any:
    """What the ranks at one position along pp have, on all others. ``remember``: a name under which
    its type and shape, which stay the same, are told once."""
    source, mine = wire.ranks[owner], owner == wire.here
    known = wire.headers.get(remember) if remember else None
    if known is None:
        told = [_about(value) if mine else None]
        dist.broadcast_object_list(told, source, group=wire.group, device=wire.device)
        known = told[0]
        if remember:
            wire.headers[remember] = known
    kind, what, dtype = known
    if kind != "tensor":
        return what
    if mine:
        value = value.contiguous()
    else:
        value = torch.empty(what, dtype=dtype, device=wire.device)
    dist.broadcast(value, source, group=wire.group)
    return value


def _about(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.dtype
    return "object", value, None
