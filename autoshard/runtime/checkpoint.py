"""Checkpoints that fit any mesh, on `torch.distributed.checkpoint`.

Each rank writes boxes of whole tensors, and each reads the boxes that it holds: the mesh of the
save is of no account. What is no tensor is kept, once, with torch's metadata.
"""

from __future__ import annotations

import dataclasses
import io
import math
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autoshard.errors import ShardingError, message
from autoshard.program import Parameter
from autoshard.runtime import boxes, checks, optimizer_state, saves
from autoshard.runtime.optimizer_state import Shards
from autoshard.runtime.saves import LOAD, SAVE

FORMAT = 1
OWN = "autoshard"  # what the metadata keeps under this key is no tensor


@torch.no_grad()
def save(module: Any, path: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Save a `ShardedModule` and an optimizer of its parameters into the directory ``path``.

    Every rank must call it, and writes its own part: each element of each parameter, persistent
    buffer and state tensor is written once, under its place in the whole tensor, so that any mesh
    can load it. The optimizer's numbers, its groups' hyperparameters and, where all ranks have the
    same, the state of torch's random generators are saved too.

    The directory must be on a file system that all ranks see. It keeps the last complete save: one
    that is killed, at whatever moment, leaves that as it was.

    Raises, on every rank and before anything is written, MeshError where this module's other ranks
    do not run, and ShardingError that lists all parameters whose state has not the shape of the
    parameter (factored, as Adafactor's). Raises ShardingError where a rank could not write.
    """
    refuse_alone(module)
    path, rank = Path(path), module.rank_index
    planner, told = checks.together(
        module.live, SAVE, lambda: _Save(module, optimizer), lambda planner: planner.digest
    )
    _refuse_other_groups(module, told)
    if any(digest["random"] != told[0]["random"] for digest in told):
        planner.record["random"] = None  # streams of the ranks' own, which no other mesh has
    _, everyone = checks.together(
        module.live, SAVE, lambda: saves.begin(path) if rank == 0 else "", lambda name: name
    )
    folder = path / everyone[0]
    writer = dcp.FileSystemWriter(folder)
    _run(
        SAVE,
        f"could not be written to {path}",
        lambda: dcp.save({}, storage_writer=writer, planner=planner, no_dist=not module.live),
    )
    checks.together(module.live, SAVE, lambda: saves.settle(folder))
    checks.together(module.live, SAVE, lambda: saves.complete(folder) if rank == 0 else None)


@torch.no_grad()
def load(module: Any, path: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load what `save` wrote into a `ShardedModule` and an optimizer of its parameters.

    Every rank must call it; mesh and options may be others than those of the save. Values are
    converted to the dtype held. With ``optimizer``, which need not have stepped yet: its state
    becomes what was saved, in the dtype saved, on the parameters' devices; its groups get their
    hyperparameters back, by the names of their parameters, but keep how they compute (``foreach``,
    ``fused``, ``capturable``). Torch's random generators are set to the state saved, if one was.

    Raises, on every rank and before anything is changed, MeshError where this module's other ranks
    do not run, and ShardingError where there is no checkpoint or an incomplete one, or that lists
    all names and shapes that do not fit. Metadata is unpickled: load only what you trust.
    """
    refuse_alone(module)
    _, everyone = checks.together(
        module.live and module.program.pipeline is not None,
        LOAD,
        lambda: optimizer_state.trained(module, optimizer, LOAD),
        lambda names: names,
    )
    trained = {name for names in everyone for name in names}
    (folder, planner, install), _ = checks.together(
        module.live, LOAD, lambda: _prepared(module, Path(path), optimizer, trained)
    )
    reader = dcp.FileSystemReader(folder)
    _run(
        LOAD,
        f"could not be read from {path}",
        lambda: dcp.load({}, storage_reader=reader, planner=planner, no_dist=not module.live),
    )
    install()
    module._filled(name for p in named(module).values() for name in p.names)


def named(module: Any) -> dict[str, Parameter]:
    """The model's own parameters and persistent buffers by canonical name, also those of which
    this rank holds nothing."""
    return {own.name: own for _, own in _persistent(module.program.values)}


def kept(module: Any) -> Shards:
    """Of these the ones that this rank holds, each with the tensor that has its part of it."""
    return {own.name: (own, module.tensor(key).detach()) for key, own in _persistent(module.held)}


def _persistent(values: dict[str, Parameter]) -> Iterator[tuple[str, Parameter]]:
    for key, parameter in values.items():
        if not parameter.buffer or parameter.persistent:
            yield from ((key, own) for own in parameter.own)


def refuse_alone(module: Any) -> None:
    """Raise MeshError for one rank's module of a larger mesh whose other ranks do not run."""
    if not module.live and module.program.mesh.mesh.world_size > 1:
        raise module._alone()


def _refuse_other_groups(module: Any, told: list[Any]) -> None:
    """Raise ShardingError where ranks that hold the same parameters have other groups of them, or
    ranks another optimizer, or none. ``told``: of every rank a `_Save.digest`."""
    mesh = module.program.mesh
    others = [r for r, digest in enumerate(told) if digest["class"] != told[0]["class"]]
    if others:
        raise ShardingError(
            message(
                SAVE,
                "the optimizer",
                f"ranks {others[:8]} save {told[others[0]]['class']}, rank 0 {told[0]['class']}",
                "the state saved is that of one optimizer, of which each rank has its part",
                "give every rank an optimizer of the same class, or none",
            )
        )
    first: dict[int, Any] = {}
    for r, digest in enumerate(told):
        first.setdefault(mesh.stage(r), digest["groups"])
    differing = [r for r, digest in enumerate(told) if digest["groups"] != first[mesh.stage(r)]]
    if differing:
        whom = "rank 0" if len(first) == 1 else "the first rank of their stages"
        raise ShardingError(
            message(
                SAVE,
                "the optimizer's groups",
                f"ranks {differing[:8]} have others than {whom}",
                "hyperparameters are saved once, for all ranks",
                "give every rank the same groups, and step every rank's scheduler",
            )
        )


def _run(who: str, what: str, call: Callable[[], Any]) -> None:
    """Run a function of torch's checkpoint, whose errors are no Exceptions: every rank sees
    them."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            call()
    except CheckpointException as caught:
        told = [f"rank {r}: {type(e).__name__}: {e}" for r, (e, _) in caught.failures.items()]
        raise ShardingError(
            message(
                who,
                what,
                "; ".join(told[:8]),
                "every rank's part is needed",
                "see those errors; an earlier checkpoint in that directory is untouched",
            )
        ) from None


# --- what is saved ---


class _Save(SavePlanner):
    """Says which boxes of which whole tensors this rank writes."""

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer | None):
        self.mesh, self.rank = module.program.mesh, module.rank_index
        self.shards: Shards = kept(module)
        # by size, so that ranks that hold the same take turns at tensors of about one size
        every = named(module)
        order = sorted(every, key=lambda name: -every[name].value.numel())
        self.turn = {name: number for number, name in enumerate(order)}
        self.record: dict[str, Any] = {
            "format": FORMAT,
            "mesh": str(self.mesh.mesh),
            "random": _random_states(module),
            "optimizer": None,
        }
        self.state: dict[str, dict[str, Any]] = {}
        self.groups: list[dict[str, Any]] = []
        if optimizer is not None:
            names = optimizer_state.names_of(module, optimizer, SAVE)
            tensors, self.state = optimizer_state.state_of(optimizer, names)
            self.shards |= tensors
            self.groups = optimizer_state.groups_of(optimizer, names)
            self.record["optimizer"] = {"class": optimizer_state.kind(optimizer)}
        self.views: dict[MetadataIndex, torch.Tensor] = {}

    @property
    def digest(self) -> dict[str, Any]:
        """By what ranks see whether they hold the same."""
        random, optimizer = self.record["random"], self.record["optimizer"]
        states = [(kind, state.numpy().tobytes()) for kind, state in random.items()]
        return {
            "random": zlib.crc32(str(states).encode()),
            "groups": zlib.crc32(optimizer_state.comparable(self.groups).encode()),
            "class": optimizer and optimizer["class"],
        }

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items, state = [], {}
        for name, (parameter, local) in self.shards.items():
            turn = self.turn[parameter.name]
            properties = TensorProperties(dtype=local.dtype)
            for box in boxes.written(parameter, self.mesh, self.rank, turn):
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                data = TensorWriteData(chunk, properties, parameter.value.shape)
                index = MetadataIndex(name, box.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self.views[index] = box.of(local)
                # a rank that holds no element of a parameter may have no state for it
                if parameter.name in self.state:
                    state[parameter.name] = self.state[parameter.name]
        # of ranks that hold the same parameters, one tells how they are grouped
        first = not any(self.mesh.index(self.rank, (axis,)) for axis in self.mesh.axes)
        return SavePlan(items, planner_data=(state, self.groups if first else []))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        for name, entry in metadata.state_dict_metadata.items():
            parts = {(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks}
            count = sum(math.prod(sizes) for _, sizes in parts)
            assert count == math.prod(entry.size), f"{name}: {count} elements of {entry.size}"
        state: dict[str, Any] = {}
        differing = []
        for plan in plans:
            for name, fields in plan.planner_data[0].items():
                first = optimizer_state.comparable(state.setdefault(name, fields))
                if first != optimizer_state.comparable(fields):
                    differing.append(f"{name}: {fields} on one rank, {state[name]} on another")
        groups = [group for plan in plans for group in plan.planner_data[1]]
        differing += optimizer_state.unequal_groups(groups)
        if differing:
            raise ShardingError(
                message(
                    SAVE,
                    "the optimizer's state",
                    "; ".join(differing),
                    "what is no tensor of a parameter's shape is saved once, for all ranks",
                    "use an optimizer that treats the parts of a parameter alike",
                )
            )
        record = dict(self.record)
        if record["optimizer"] is not None:
            record["optimizer"] = {**record["optimizer"], "groups": groups, "state": state}
        metadata.planner_data = {OWN: record}
        plans = [dataclasses.replace(plan, planner_data=None) for plan in plans]
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.views[write_item.index]


def _devices(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """Kinds of device that a module draws random numbers on, each with getter and setter."""
    yield "cpu", torch.get_rng_state, torch.set_rng_state
    device = module._device
    if device is not None and device.type != "cpu":
        of_device = torch.get_device_module(device)
        yield device.type, of_device.get_rng_state, of_device.set_rng_state


def _random_states(module: Any) -> dict[str, torch.Tensor]:
    return {kind: get().clone() for kind, get, _ in _devices(module)}


# --- what is loaded ---


class _Load(LoadPlanner):
    """Says which boxes of which whole tensors this rank reads, and where to."""

    def __init__(self, module: Any, metadata: Metadata, shards: Shards):
        self.mesh, self.rank = module.program.mesh, module.rank_index
        self.metadata, self.shards = metadata, shards
        self.views: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, (parameter, local) in self.shards.items():
            chunks, held = [], 0
            for box in boxes.held(parameter, self.mesh, self.rank):
                chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
                self.views[MetadataIndex(name, box.offsets)] = box.of(local)
                held += math.prod(box.sizes)
            entry = self.metadata.state_dict_metadata.get(name)
            found = create_read_items_for_chunk_list(name, entry, chunks) if chunks else []
            read = sum(math.prod(item.lengths) for item in found)
            assert read == held, f"{name}: {read} of {held} elements found"
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError("all entries are tensors")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self.views[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)]
        return boxes.part_of(view, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def _prepared(
    module: Any, path: Path, optimizer: torch.optim.Optimizer | None, trained: set[str]
) -> tuple[Path, _Load, Callable[[], None]]:
    """The directory to read, what to read out of it, and what to do when that is read. ``trained``:
    the names of all parameters that optimizers of any rank have. Changes nothing; raises
    ShardingError where checkpoint, module and optimizer do not fit."""
    folder = saves.last_complete(path, check_files=module.rank_index == 0)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    record = (metadata.planner_data or {}).get(OWN)
    if record is None or record["format"] != FORMAT:
        raise saves.refused(path, "it was not written by this version's save_checkpoint")
    saved = record["optimizer"] or {"groups": [], "state": {}}
    stateful = {
        optimizer_state.key(n, f) for n, here in saved["state"].items() for f in here["tensors"]
    }
    stored = {n: e.size for n, e in metadata.state_dict_metadata.items() if n not in stateful}
    every, held = named(module), kept(module)
    found = {name: optimizer_state.alias(p, stored) for name, p in every.items()}
    wrong = _misfits(every, found, stored)
    shards: Shards = {found[n]: held[n] for n in held if found[n] in stored}
    installs: list[Callable[[], None]] = [lambda: _set_random_states(module, record["random"])]
    if optimizer is not None:
        names = optimizer_state.names_of(module, optimizer, LOAD)
        if record["optimizer"] is None:
            wrong.append("it holds no optimizer's state")
        else:
            if saved["class"] != (own := optimizer_state.kind(optimizer)):
                wrong.append(f"it holds the state of {saved['class']}, and the optimizer is {own}")
            wrong += optimizer_state.unmatched_groups(optimizer, names, saved["groups"], trained)
            wrong += optimizer_state.unequal_states(optimizer, names, saved["state"])
        if not wrong:
            state, tensors = optimizer_state.new_state(optimizer, names, saved["state"], metadata)
            shards |= tensors
            installs.append(lambda: optimizer_state.set_state(optimizer, state))
            installs.append(lambda: optimizer_state.set_groups(optimizer, names, saved["groups"]))
    if wrong:
        raise ShardingError(
            message(
                LOAD,
                f"the checkpoint in {path}",
                "; ".join(wrong),
                "module and optimizer must have the names and shapes that were saved",
                "build the model and the optimizer as for the run that saved it",
            )
        )

    def install() -> None:
        for step in installs:
            step()

    return folder, _Load(module, metadata, shards), install


def _misfits(
    every: dict[str, Parameter], found: dict[str, str], stored: dict[str, torch.Size]
) -> list[str]:
    """What a checkpoint lacks, has too many, and has in other shapes."""
    known = {n for p in every.values() for n in p.names}
    missing = [n for n, p in every.items() if found[n] not in stored and p.value.numel()]
    unexpected = [n for n in stored if n not in known]
    return [
        *([f"missing {', '.join(missing)}"] if missing else []),
        *([f"unexpected {', '.join(unexpected)}"] if unexpected else []),
        *(
            f"{n} is {tuple(stored[found[n]])}, not {tuple(p.value.shape)}"
            for n, p in every.items()
            if found[n] in stored and stored[found[n]] != p.value.shape
        ),
    ]


def _set_random_states(module: Any, states: dict[str, torch.Tensor] | None) -> None:
    for kind, _, set_state in _devices(module):
        if states and kind in states:
            set_state(states[kind])
