"""Bytes that a rank holds: predicted from the program, and counted on a live module.

With Ψ elements, N ranks that share them out, and K bytes of optimizer state an element (8 for
AdamW), a rank holds of parameters, gradients and states in float32 (Rajbhandari et al. 2020):

    stage 0    4Ψ   + 4Ψ   + KΨ
    stage 1    4Ψ   + 4Ψ   + KΨ/N     gradients whole while no_sync accumulates, 4Ψ/N otherwise
    stage 2    4Ψ   + 4Ψ/N + KΨ/N
    stage 3    4Ψ/N + 4Ψ/N + KΨ/N     and the weights of the segments that are being computed

With ``param_dtype`` the weights that stages 0 to 2 keep are of that type, and come on top of the
float32 parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.cost import held_at, local_numel, shard_numel
from autoshard.program import Program, Unit
from autoshard.runtime import optimizers
from autoshard.runtime.sections import entries
from autoshard.runtime.zero import release
from autoshard.traffic import stages_at

#: Numbers of its own that AdamW keeps of an element.
STATES = 2

ROWS = ("parameters", "weights kept whole", "gradients", "optimizer state", "whole gradients")
GATHERED = "weights gathered, peak"


@dataclass
class Held:
    """Bytes of one kind: on one device, on a rank, and whether they are in host memory."""

    what: str
    whole: int
    rank: int
    host: bool = False


def predicted(program: Program, position: int = 0) -> list[Held]:
    """What a rank holds between steps and, in the last row, at most in between; ``position``: along
    pp. Gradients stand for those after a backward; whole ones for what `no_sync`, or the
    micro-batches of a step, accumulate in their place."""
    mesh, host = program.mesh, program.offload
    units = {key: unit for unit in program.units.values() for key in unit.keys}
    rows = {what: Held(what, 0, 0, host) for what in ROWS}
    rows["weights kept whole"].host = rows["whole gradients"].host = False
    for key, p in program.parameters().items():
        size, unit = p.value.element_size(), units.get(key)
        whole, shard = p.value.numel() * size, shard_numel(p, mesh) * size
        weights = local_numel(p, mesh) * (unit.dtype.itemsize if unit else size)
        keep = unit is not None and unit.keep and not unit.for_step
        alias = unit is not None and keep and not host and unit.dtype == p.value.dtype
        rows["parameters"].whole += whole
        if p.trainable:
            rows["gradients"].whole += whole
            rows["optimizer state"].whole += STATES * whole
        if not held_at(p, position):
            continue
        rows["parameters"].rank += weights if alias else shard
        if keep and not alias:
            rows["weights kept whole"].rank += weights
        if p.trainable:
            rows["gradients"].rank += shard
            rows["optimizer state"].rank += STATES * shard
            if unit is not None and unit.whole_gradients and unit.axes:
                rows["whole gradients"].rank += local_numel(p, mesh) * size
    found = [row for row in rows.values() if row.rank or row.whole]
    return [*found, Held(GATHERED, 0, gathered_peak(program, position))] if units else found


def gathered_peak(program: Program, position: int = 0) -> int:
    """The most bytes of gathered weights at one time: of a segment, and of the next one that
    arrives meanwhile; where weights are kept, what they pass through on their way; where they are
    for a step, those of all segments."""
    weights: dict[int, int] = {}
    moved: dict[int, int] = {}  # what arrives is not yet in its place
    own = stages_at(program, position)
    for unit in (u for u in program.units.values() if u.stage in own):
        if not (
            unit.keep and unit.dtype == program.values[unit.keys[0]].value.dtype and not unit.axes
        ):
            found, ranks = entries(unit, program, 0), program.mesh.size(unit.axes)
            flat = ranks * sum(e.numel for e in found) * unit.dtype.itemsize
            alone = len(found) == 1 and not unit.keep  # it stays where it arrives
            keep = unit.keep and not unit.for_step
            stays = 0 if keep else flat if alone else unit_bytes(program, unit)
            weights[unit.segment] = weights.get(unit.segment, 0) + stays
            moved[unit.segment] = moved.get(unit.segment, 0) + (0 if alone else flat)
    released = program.graph.find_nodes(op="call_function", target=release)
    most = held = 0
    for at in sorted(weights):
        arriving = moved[at] or weights[at]
        kept = 0 if released else held
        most = max(most, held + arriving, kept + weights[at] + moved[at])
        held = kept + weights[at]
    return most


def unit_bytes(program: Program, unit: Unit) -> int:
    """Bytes of the gathered weights of a unit on rank 0."""
    return sum(math.prod(e.shape) for e in entries(unit, program, 0)) * unit.dtype.itemsize


def measured(module: Any) -> dict[str, int]:
    """Bytes of each kind that a live module holds now, by the names of `predicted`: every storage
    counts once. Optimizers count that have taken a step on the module's parameters."""
    store = module._store
    held = [module.tensor(key) for key in module.held_parameters()]
    counted: set[int] = set()

    def count(tensors: Any) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    aliases = [store.kept[name] for name in store.aliases]
    states = [
        value
        for optimizer in optimizers.of(held)
        for p in held
        for value in optimizer.state.get(p, {}).values()
        if isinstance(value, torch.Tensor)
    ]
    return {
        "parameters": count([*aliases, *held]),
        "weights kept whole": count(store.kept.values()),
        "whole gradients": count(store.reductions.accumulated()),
        "gradients": count(p.grad for p in held if p.grad is not None),
        "optimizer state": count(states),
        GATHERED: store.peak,
    }
