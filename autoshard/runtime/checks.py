"""What is checked of a call: its inputs against the captured graph and, once, other ranks."""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch
from torch import fx

from autoshard.axes import Axis, leaves
from autoshard.errors import CaptureError, MeshError, message
from autoshard.infer import expression
from autoshard.layout import describe_layout
from autoshard.mesh import DATA_AXES
from autoshard.program import Program
from autoshard.rules import op_name
from autoshard.runtime import rng


def call(program: Program, defaults: dict[str, Any], given: dict[str, Any]) -> None:
    """Inputs by name: all there, of the captured sizes, and what is no tensor as captured.

    ``defaults``: those of the model's forward. Raises CaptureError that lists all that is wrong.
    """
    wanted = list(program.inputs.values())
    wrong = [
        *(f"{n} is missing" for n in wanted if not isinstance(given.get(n), torch.Tensor)),
        *(_unknown(program, defaults, n, v) for n, v in given.items() if n not in wanted),
    ]
    wrong = [text for text in wrong if text] or _sizes(program, given)
    if wrong:
        raise CaptureError(
            message(
                "ShardedModule",
                "; ".join(wrong),
                f"got {', '.join(given)}",
                f"the graph was captured with {', '.join(wanted)}, {program.dynamic} dynamic",
                "pass these inputs, or give autoshard example_inputs with the ones you use",
            )
        )


def _unknown(program: Program, defaults: dict[str, Any], name: str, value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{name} is unknown"
    captured = program.constants.get(name, defaults.get(name))
    if value is captured or value == captured:
        return ""
    return f"{name}={value!r} was captured as {captured!r}"


def _sizes(program: Program, given: dict[str, Any]) -> list[str]:
    """Sizes that the graph takes as fixed, or as one and the same."""
    known: dict[Any, tuple[int, str]] = {}
    wrong = []
    for node in program.graph.find_nodes(op="placeholder"):
        name = program.inputs.get(node.name, "")
        if not name:
            continue
        shape = tuple(given[name].shape)
        if len(shape) != node.meta["val"].ndim:
            wrong.append(f"{name} has {len(shape)} dimensions, not {node.meta['val'].ndim}")
            continue
        for at, (size, dim) in enumerate(zip(shape, node.meta["val"].shape, strict=True)):
            expected = expression(dim)
            if isinstance(expected, int):
                here = expected // _ranks(program, node, at)
                if size != here:
                    wrong.append(f"{name} has {size} in dimension {at}, captured with {here}")
            elif size != (first := known.setdefault(expected, (size, name)))[0]:
                wrong.append(
                    f"{name} has {size} in dimension {at}, where {first[1]} has {first[0]}"
                )
    return wrong


def _ranks(program: Program, node: fx.Node, at: int) -> int:
    """The number of ranks among which a dimension of an input is cut."""
    layout, axes = program.layouts.get(node, {}), leaves(program.dims[node][at])
    over = [m for m, s in layout.items() if isinstance(s, Axis) and any(s is a for a in axes)]
    return program.mesh.size(tuple(over))


def _generator_state(device: torch.device) -> float:
    """A number that tells the states of torch's generators apart, the CPU's and the device's."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    state = torch.cat(states).double()
    return float((state * torch.arange(1, state.numel() + 1)).sum())


def same_program(program: Program, device: torch.device | None) -> None:
    """All ranks must have compiled the same graph: compared before the first process group is made.
    Raises MeshError on every rank."""
    import torch.distributed as dist

    if program.mesh.mesh.world_size == 1:
        return
    held = [
        (p.names, tuple(p.value.shape), describe_layout(p.layout)) for p in program.values.values()
    ]
    ops = [(n.name, op_name(n.target), n.args) for n in program.graph.nodes]
    text = str((program.mesh, program.training, held, [str(op) for op in ops]))
    text = re.sub(r", index=\d+", "", text)  # every rank has a device of its own
    mine = torch.tensor([zlib.crc32(text.encode())], device=device)
    everyone = [torch.zeros_like(mine) for _ in range(program.mesh.mesh.world_size)]
    dist.all_gather(everyone, mine)
    others = [r for r, other in enumerate(everyone) if int(other) != int(everyone[0])]
    if others:
        raise MeshError(
            message(
                "autoshard",
                "the compiled graph",
                f"ranks {', '.join(map(str, others[:8]))} have another one than rank 0",
                "every rank must issue the same collectives in the same order, from one model",
                "give every rank the same model, example input shapes, options and versions",
            )
        )


def first_batch(module: Any, inputs: list[torch.Tensor]) -> None:
    """Ranks of one data coordinate must hold the same batch; where the graph draws random numbers,
    all ranks the same state of torch's generator. Compared once, before step 1. Raises MeshError on
    every rank."""
    import torch.distributed as dist

    program, mesh = module.running, module.program.mesh.mesh
    if mesh.world_size == 1:
        return
    sums = []
    for x in inputs:
        weights = torch.arange(1, x.numel() + 1, device=x.device, dtype=torch.float64)
        values = x.detach().flatten().double().nan_to_num()
        sums += [float(x.numel()), float((values * weights).sum())]
    draws = any(
        n.target is rng.draw for n in program.graph.find_nodes(op="call_function", target=rng.draw)
    )
    sums.append(_generator_state(inputs[0].device) if draws else 0.0)
    mine = torch.tensor(sums, device=inputs[0].device, dtype=torch.float64)
    everyone = [torch.zeros_like(mine) for _ in range(mesh.world_size)]
    dist.all_gather(everyone, mine)
    others = [a for a in mesh.names if a not in DATA_AXES]
    first: dict[Any, int] = {}
    for r, sums_of_r in enumerate(everyone):
        position = mesh.coordinate(r)
        key = tuple(position.get(a, 0) for a in DATA_AXES)
        same = first.setdefault(key, r)
        if not torch.equal(everyone[same][:-1], sums_of_r[:-1]):
            raise MeshError(
                message(
                    "the first batch",
                    f"inputs {list(program.inputs.values())}",
                    f"differ between ranks {same} and {r}",
                    f"both are data rank {dict(zip(DATA_AXES, key, strict=True))}, "
                    f"and ranks that differ along {', '.join(others)} must see the same rows",
                    "seed the data loader by the data coordinate, not by the global rank",
                )
            )
        if everyone[0][-1] != sums_of_r[-1]:
            raise MeshError(
                message(
                    "the first batch",
                    "the state of torch's random generator",
                    f"differs between ranks 0 and {r}",
                    "the model draws random numbers (dropout), which must agree where ranks hold "
                    "the same value; they are made to differ where ranks hold different ones",
                    "call torch.manual_seed with one seed on every rank before the first step",
                )
            )
