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
    return _shared(wire, owner, None if mine is None else mine.detach(), plan.results[0])


def everywhere(module: Any, plan: Plan, names: list[str], found: dict[str, Any]) -> dict[str, Any]:
    """These results of a forward, on every rank. ``found``: those of this rank's stages."""
    wire, out = module.wire, dict[str, Any]()
    for name in dict.fromkeys(names):
        out[name] = _shared(wire, wire.place[plan.made[name]], found.get(name))
    return out


def on_last(
    module: Any, plan: Plan, names: list[str], found: dict[str, Any]
) -> dict[str, Any] | None:
    """The same on the ranks of the last stage; None on all others."""
    wire, out = module.wire, dict(found)
    last = wire.place[-1]
    for name in dict.fromkeys(names):
        owner = wire.place[plan.made[name]]
        if owner == last:
            continue
        if wire.here == owner:
            _send(wire, found[name], wire.ranks[last])
        elif wire.here == last:
            out[name] = _received(wire, wire.ranks[owner])
    return out if wire.here == last else None


def _send(wire: Any, value: Any, to: int) -> None:
    dist.send_object_list([_about(value)], to, group=wire.group, device=wire.device)
    if isinstance(value, torch.Tensor):
        dist.send(value.contiguous(), to, group=wire.group)


def _received(wire: Any, source: int) -> Any:
    told: list[Any] = [None]
    dist.recv_object_list(told, source, group=wire.group, device=wire.device)
    kind, what, dtype = told[0]
    if kind != "tensor":
        return what
    value = torch.empty(what, dtype=dtype, device=wire.device)
    dist.recv(value, source, group=wire.group)
    return value


def _shared(wire: Any, owner: int, value: Any, remember: str = "") -> Any:
    """What the ranks at one position along pp have, on all others. ``remember``: a name under which
    its type and shape, which stay the same, are told once."""
    source, mine = wire.ranks[owner], owner == wire.here
    about = remember, wire.signatures[0][:1]  # the mode, and what else decides on types
    known = wire.headers.get(about) if remember else None
    if known is None:
        told = [_about(value) if mine else None]
        dist.broadcast_object_list(told, source, group=wire.group, device=wire.device)
        known = told[0]
        if remember:
            wire.headers[about] = known
    assert known is not None
    kind, what, dtype = known
    if kind != "tensor":
        return what
    value = value.contiguous() if mine else torch.empty(what, dtype=dtype, device=wire.device)
    dist.broadcast(value, source, group=wire.group)
    return value


def _about(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.dtype
    return "object", value, None
