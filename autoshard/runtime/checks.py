"""What is checked of a call: its inputs against the captured graph and, once, other ranks."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import fx

from autoshard.axes import Axis, leaves
from autoshard.errors import (
    AutoshardError,
    CaptureError,
    MeshError,
    ShardingError,
    message,
)
from autoshard.infer import expression
from autoshard.layout import describe_layout
from autoshard.mesh import DATA_AXES
from autoshard.pipeline import rows_of
from autoshard.program import Program
from autoshard.rules import op_name
from autoshard.runtime import rng

T = TypeVar("T")

#: Elements summed at a time: a sum in int64 makes a copy of what it sums.
CHUNK = 2**24
#: Integers as wide as an element.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def call(program: Program, takes: inspect.Signature, given: dict[str, Any]) -> None:
    """Inputs by name: all there, of the captured types and sizes; what is no tensor as captured.

    ``takes``: what the model's forward takes. Raises CaptureError that lists all that is wrong.
    """
    wanted = list(program.inputs.values())
    wrong = [
        *(f"{n} is missing" for n in wanted if not isinstance(given.get(n), torch.Tensor)),
        *(_unknown(program, takes, n, v) for n, v in given.items() if n not in wanted),
    ]
    wrong = [text for text in wrong if text] or _types(program, given) or _sizes(program, given)
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


def frozen(program: Program, tensors: dict[str, torch.Tensor]) -> None:
    """Parameters captured as frozen must be frozen still. ``tensors``: the local ones of these, by
    placeholder. Raises ShardingError that names those that are not."""
    thawed = [program.values[k].name for k, tensor in tensors.items() if tensor.requires_grad]
    if thawed:
        raise ShardingError(
            message(
                "ShardedModule",
                f"parameters {', '.join(thawed)}",
                "they require gradients now",
                "they were frozen when the model was compiled: nothing reduces their gradients",
                "pass the model with them trainable to autoshard, and freeze them afterwards",
            )
        )


def _unknown(program: Program, takes: inspect.Signature, name: str, value: Any) -> str:
    known = takes.parameters
    if name not in known and all(p.kind is not p.VAR_KEYWORD for p in known.values()):
        return f"forward takes no {name}"
    if isinstance(value, torch.Tensor):
        return f"{name} is unknown: it was no tensor when captured"
    captured = program.constants.get(name, known[name].default if name in known else None)
    if value is captured or value == captured:
        return ""
    return f"{name}={value!r} was captured as {captured!r}"


def _types(program: Program, given: dict[str, Any]) -> list[str]:
    """Inputs without values, on another device than the mesh's, or of another kind of number than
    the graph was made for."""
    wrong, mesh = [], program.mesh.mesh.device_mesh
    for node in program.graph.find_nodes(op="placeholder"):
        name = program.inputs.get(node.name, "")
        if not name:
            continue
        got, expected = given[name].dtype, node.meta["val"].dtype
        whole = [not t.is_floating_point and not t.is_complex for t in (got, expected)]
        integers = all(whole) and torch.bool not in (got, expected)
        if given[name].is_meta:
            wrong.append(f"{name} is on the meta device")
        elif got != expected and not integers:
            wrong.append(f"{name} is {got}, captured as {expected}")
        elif mesh is not None and _is_elsewhere(given[name], node.meta["val"], mesh.device_type):
            wrong.append(
                f"{name} is on {given[name].device}, and the mesh is of {mesh.device_type}"
            )
    return wrong


def _is_elsewhere(got: torch.Tensor, captured: torch.Tensor, kind: str) -> bool:
    """Whether an input that was on the mesh's kind of device is on another one."""
    return captured.device.type == kind != got.device.type and got.ndim > 0


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


def everywhere(compile_: Callable[[str | None], Program], asked: bool) -> Program:
    """``compile_(None)`` on a live mesh, once all ranks have compiled one graph from one set of
    values. ``asked``: whether the stages of a pipeline were given; where they were not, and ranks
    cut in other places, as their example inputs have other lengths, they ``compile_`` with those
    of rank 0.

    Ranks tell each other before the first process group is made, so that none waits for one that
    failed. Raises a rank's own error on that rank, and on every other a MeshError that quotes it;
    and a MeshError on every rank when graphs or initial values differ.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return compile_(None)

    def compiled(cut: str | None) -> tuple[Program, list[Any]]:
        program, error, own = None, None, list[Any]([0, 0, None])
        try:
            program = compile_(cut)
            own = [_fingerprint(program), _crc(_value_sums(program)), program.stages]
        except Exception as caught:  # whatever it is, the other ranks must hear of it
            error = caught
        meet("autoshard")
        everyone = _exchange([_text(error), *own, asked])
        _raise_errors("autoshard", [text for text, *_ in everyone], error)
        assert program is not None  # or this rank's error was raised
        return program, everyone

    program, everyone = compiled(None)
    cuts = [told[3] for told in everyone]
    if not any(told[4] for told in everyone) and None not in cuts and len({*cuts}) > 1:
        program, everyone = compiled(cuts[0])
    others = [r for r, told in enumerate(everyone) if told[1] != everyone[0][1]]
    if others:
        raise MeshError(
            message(
                "autoshard",
                "the compiled graph",
                f"ranks {_some(others)} have another one than rank 0",
                "every rank must issue the same collectives in the same order, from one model",
                "give every rank the same model, example input shapes, options and versions",
            )
        )
    others = [r for r, told in enumerate(everyone) if told[2] != everyone[0][2]]
    if others:
        sums = _value_sums(program)
        theirs = _exchange(sums)
        names = [n for n in sums if any(theirs[r][n] != theirs[0][n] for r in others)]
        raise MeshError(
            message(
                "autoshard",
                f"the values of {_some(names)}",
                f"ranks {_some(others)} have others than rank 0",
                "all ranks must start from the same weights and tables",
                "call torch.manual_seed with one seed before the model is built, or load the same "
                "checkpoint on every rank",
            )
        )
    return program


def meet(who: str) -> None:
    """Wait until every rank is here, twice as long as the default group does: a rank that gave up
    waiting for another one comes so much later. Raises MeshError that names those that do not."""
    import torch.distributed as dist

    from autoshard.runtime.process_groups import timeout_of

    global _meetings
    if _meetings[0] is not dist.group.WORLD:
        _meetings = dist.group.WORLD, itertools.count()
    store, number = dist.distributed_c10d._get_default_store(), next(_meetings[1])
    rank, world = dist.get_rank(), dist.get_world_size()
    every, over = MEET.format(number, "all"), MEET.format(number, "over")
    store.set(MEET.format(number, rank), "")
    if store.add(MEET.format(number, "count"), 1) == world:
        store.set(every, "")
    away, error = list[int](), None
    try:
        store.wait([every], 2 * timeout_of())
    except RuntimeError as caught:
        error = caught
        with contextlib.suppress(RuntimeError):
            store.set(over, str(rank))
            away = [r for r in range(world) if not store.check([MEET.format(number, r)])]
    if error is None and store.check([over]):  # the others have given up: meet next time
        away = [int(store.get(over))]
    if error is not None or away:
        raise MeshError(
            message(
                who,
                f"ranks {_some(away)}",
                "they have not come here",
                "every rank compiles, and waits for the others; these have failed, or do something "
                "else",
                "see the output of these ranks, and make the same calls on all",
            )
        ) from error


#: A key of the store, of one meeting of all ranks; and how many there have been.
MEET = "autoshard/meeting/{}/{}"
_meetings: tuple[Any, Iterator[int]] = (None, itertools.count())


def _exchange(mine: Any) -> list[Any]:
    """What every rank gives, by rank."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def together(
    live: bool, who: str, work: Callable[[], T], tell: Callable[[T], Any] = lambda result: None
) -> tuple[T, list[Any]]:
    """``work()`` on every rank: this rank's result, and what ``tell`` makes of everyone's, by rank.

    All ranks must call it, and wait for each other. Where it fails on some, those raise their own
    error (a ShardingError, where it is none of ours: of files and what is in them), and all others
    a MeshError that quotes it. ``live``: whether there are other ranks.
    """
    result: Any = None
    told: Any = None
    error: Exception | None = None
    try:
        result = work()
        told = tell(result)
    except AutoshardError as caught:
        error = caught
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = ShardingError(
            message(
                who,
                "the files",
                f"{type(caught).__name__}: {str(caught)[:500]}",
                "they cannot be read or written as they are",
                "see that the path is right, may be used, and holds what was saved there",
            )
        )
        error.__cause__ = caught
    everyone = _exchange((_text(error), told)) if live else [(_text(error), told)]
    _raise_errors(who, [text for text, _ in everyone], error)
    return result, [each for _, each in everyone]


def _text(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"[:2000]


def _some(items: list[Any]) -> str:
    more = f" and {len(items) - 8} more" if len(items) > 8 else ""
    return ", ".join(map(str, items[:8])) + more


def _raise_errors(who: str, texts: list[str], own: Exception | None) -> None:
    """Raise this rank's error, or one that quotes that of another rank."""
    if own is not None:
        raise own
    failed = [r for r, text in enumerate(texts) if text]
    if failed:
        raise MeshError(
            message(
                who,
                f"rank{'s' if len(failed) > 1 else ''} {_some(failed)}",
                f"rank {failed[0]} raised {texts[failed[0]]}",
                "no rank can go on without the others",
                "see that error",
            )
        )


def _fingerprint(program: Program) -> int:
    """A number that tells compiled graphs apart."""
    held = [
        (p.name, own.names, tuple(own.value.shape), own.value.dtype, own.value.is_meta)
        + (describe_layout(p.layout), p.holders)
        for p in program.values.values()
        for own in p.own
    ]
    ops = [(n.name, op_name(n.target), n.args) for n in program.graph.nodes]
    line = program.pipeline
    about = line and (line.schedule, line.place, line.microbatches, line.outputs, program.stages)
    text = str((program.mesh, program.training, about, held, [str(op) for op in ops]))
    return _crc(re.sub(r", index=\d+", "", text))  # every rank has a device of its own


def _crc(value: Any) -> int:
    return zlib.crc32(str(value).encode())


@torch.no_grad()
def _value_sums(program: Program) -> dict[str, int]:
    """The sum of the bits of every value, by name. Meta tensors have none: they are filled alike
    on all ranks later."""
    sums = {}
    for parameter in (own for p in program.values.values() for own in p.own):
        value = parameter.value.detach()
        if value.is_meta or value.layout is not torch.strided:
            continue
        value = torch.view_as_real(value) if value.is_complex() else value
        bits = value.view(_BITS[value.element_size()]).flatten()
        parts = [part.sum(dtype=torch.int64) for part in bits.split(CHUNK)]
        sums[parameter.name] = torch.stack(parts).sum()
    return {name: int(each) for name, each in sums.items()}


def _lengths(one: list[float], other: list[float]) -> str:
    """How many elements inputs have on two ranks, where that differs."""
    counts = [[int(n) for n in sums[:-1:2]] for sums in (one, other)]
    return "" if counts[0] == counts[1] else f", with {counts[0]} and {counts[1]} elements"


def _same_numbers(program: Program, counts: list[list[float]]) -> None:
    """Raise MeshError, where experts have a capacity, and ranks inputs of different sizes: what
    they send one another would be too. Of later batches nothing tells a rank that another one's has
    changed, short of an exchange in every step."""
    limited = [m.where for m in program.mixtures.values() if m.capacity is not None and m.over]
    different = [r for r, count in enumerate(counts) if count != counts[0]]
    if limited and different:
        raise MeshError(
            message(
                "the first batch",
                f"inputs {list(program.inputs.values())}",
                f"have {[int(n) for n in counts[0]]} elements on rank 0 and "
                f"{[int(n) for n in counts[different[0]]]} on rank {different[0]}",
                f"with expert_capacity, all ranks send as many rows in {_some(limited)}",
                "give all ranks as many rows in every step, or leave expert_capacity out",
            )
        )


def _warn_of_equal_rows(mesh: Any, everyone: list[list[float]]) -> None:
    """All data ranks were given the same rows: most likely a loader that is seeded alike."""
    names = [a for a in DATA_AXES if a in mesh.names and mesh.size(a) > 1]
    for axis in names:
        others = [a for a in mesh.names if a != axis]
        by_rest: dict[Any, set[Any]] = {}
        for r, sums in enumerate(everyone):
            position = mesh.coordinate(r)
            by_rest.setdefault(tuple(position[a] for a in others), set()).add(tuple(sums))
        if all(len(seen) == 1 for seen in by_rest.values()):
            warnings.warn(
                f"autoshard: all ranks along {axis} were given the same rows in the first batch; "
                f"each is to have rows of its own of the global batch",
                stacklevel=4,
            )


def micro_batches(program: Program, inputs: dict[str, torch.Tensor]) -> int:
    """In how many micro-batches every rank takes its rows, this step and all others: the fewest
    that any rank would make of its own."""
    import torch.distributed as dist

    rows = rows_of(program, inputs)
    told = _exchange((program.pipeline.count(rows), rows))
    fewest = min(rows for _, rows in told)
    asked = program.pipeline.microbatches
    if asked is not None and asked > fewest and dist.get_rank() == 0:
        text = f"a rank has {fewest} rows, which make {fewest} micro-batches, not the {asked} asked"
        warnings.warn(f"{text} for: pass more rows, or fewer microbatches", stacklevel=2)
    count = min(count for count, _ in told)
    return count if asked is None else min(count, max(fewest, 1))


def first_batch(module: Any, inputs: list[torch.Tensor], error: Exception | None = None) -> None:
    """Ranks of one data coordinate must hold the same batch; where the graph draws random numbers,
    all ranks the same state of torch's generator. Compared once, before step 1. ``error``: what
    this rank's own check of the call raised. Raises that, or MeshError, on every rank."""
    program, mesh = module.running, module.program.mesh.mesh
    if mesh.world_size == 1:
        if error is not None:
            raise error
        return
    sums: list[float] = []
    for x in inputs:
        weights = torch.arange(1, x.numel() + 1, device=x.device, dtype=torch.float64)
        values = x.detach().flatten().double().nan_to_num()
        sums += [float(x.numel()), float((values * weights).sum())]
    draws = bool(program.graph.find_nodes(op="call_function", target=rng.draw))
    sums.append(_generator_state(inputs[0].device) if draws and inputs else 0.0)
    told = _exchange((_text(error), sums))
    _raise_errors("the first batch", [text for text, _ in told], error)
    everyone = [sums for _, sums in told]
    _same_numbers(program, [sums[:-1:2] for sums in everyone])
    _warn_of_equal_rows(mesh, [sums[:-1] for sums in everyone])
    others = [a for a in mesh.names if a not in DATA_AXES]
    first: dict[Any, int] = {}
    for r, sums_of_r in enumerate(everyone):
        position = mesh.coordinate(r)
        key = tuple(position.get(a, 0) for a in DATA_AXES)
        same = first.setdefault(key, r)
        data = {a: position[a] for a in DATA_AXES if a in position}
        if everyone[same][:-1] != sums_of_r[:-1]:
            raise MeshError(
                message(
                    "the first batch",
                    f"inputs {list(program.inputs.values())}",
                    f"differ between ranks {same} and {r}{_lengths(everyone[same], sums_of_r)}",
                    f"both are data rank {data}, "
                    f"and ranks that differ along {', '.join(others)} must see the same rows",
                    "seed the data loader by the data coordinate, not by the global rank"
                    + ("; pass whole sequences, which the graph slices" if "cp" in others else ""),
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
