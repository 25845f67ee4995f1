"""Checkpoints that fit any mesh, on `torch.distributed.checkpoint`.

``path/`` holds one directory per save, of which the file ``latest`` names the last complete one:

    path/latest                     the directory, its files and their sizes in bytes
    path/save-000003/__0_0.distcp   what rank 0 wrote
    path/save-000003/.metadata      which box of which tensor lies where, and what is no tensor

``latest`` is replaced, in one step, when everything else is on disk: a save that is killed leaves
it as it was. What such a save left behind is deleted by the next.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import shutil
import warnings
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
from autoshard.runtime import boxes, checks

FORMAT = 1
LATEST = "latest"
OWN = "autoshard"  # what the metadata keeps under this key is no tensor
SAVE, LOAD = "save_checkpoint", "load_checkpoint"

#: How an optimizer computes, which is this run's choice and not the saved one's.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")

#: By name in the checkpoint: the parameter whose shards they are, and this rank's.
Shards = dict[str, tuple[Parameter, torch.Tensor]]
#: A value that all ranks hold, and whether it lies on an accelerator.
Scalar = tuple[Any, bool]


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
    _refuse_alone(module)
    path, rank = Path(path), module.rank_index
    planner, told = checks.together(
        module.live, SAVE, lambda: _Save(module, optimizer), lambda planner: planner.digest
    )
    differing = [r for r, digest in enumerate(told) if digest["groups"] != told[0]["groups"]]
    if differing:
        raise ShardingError(
            message(
                SAVE,
                "the optimizer's groups",
                f"ranks {differing[:8]} have others than rank 0",
                "hyperparameters are saved once, for all ranks",
                "give every rank the same groups, and step every rank's scheduler",
            )
        )
    if any(digest["random"] != told[0]["random"] for digest in told):
        planner.record["random"] = None  # streams of the ranks' own, which no other mesh has
    _, everyone = checks.together(
        module.live, SAVE, lambda: _new_folder(path) if rank == 0 else "", lambda name: name
    )
    folder = path / everyone[0]
    writer = dcp.FileSystemWriter(folder)
    _run(
        SAVE,
        f"could not be written to {path}",
        lambda: dcp.save({}, storage_writer=writer, planner=planner, no_dist=not module.live),
    )
    checks.together(module.live, SAVE, lambda: _settle(folder))
    checks.together(module.live, SAVE, lambda: _point_to(folder) if rank == 0 else None)


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
    _refuse_alone(module)
    (folder, planner, install), _ = checks.together(
        module.live, LOAD, lambda: _prepared(module, Path(path), optimizer)
    )
    reader = dcp.FileSystemReader(folder)
    _run(
        LOAD,
        f"could not be read from {path}",
        lambda: dcp.load({}, storage_reader=reader, planner=planner, no_dist=not module.live),
    )
    install()


def kept(module: Any) -> dict[str, tuple[Parameter, torch.Tensor]]:
    """Parameters and persistent buffers by canonical name, each with this rank's tensor."""
    return {
        p.name: (p, module.tensor(key).detach())
        for key, p in module.program.values.items()
        if not p.buffer or p.persistent
    }


def _refuse_alone(module: Any) -> None:
    if not module.live and module.program.mesh.mesh.world_size > 1:
        raise module._alone()


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


# --- directories ---


def _folders(path: Path) -> dict[int, Path]:
    """The directories of saves, complete or not, by number."""
    found = path.glob("save-*") if path.is_dir() else ()
    numbered = {f: re.fullmatch(r"save-(\d+)", f.name) for f in found}
    return {int(match[1]): folder for folder, match in numbered.items() if match}


def _latest(path: Path) -> dict[str, Any] | None:
    """What ``latest`` says: the directory and its files with their sizes. None without one."""
    try:
        return json.loads((path / LATEST).read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _refused(path, f"{LATEST} cannot be read ({error})") from None


def _refused(path: Path, what: str) -> ShardingError:
    return ShardingError(
        message(
            LOAD,
            f"the checkpoint in {path}",
            what,
            "only a save that every rank has finished can be loaded",
            "save again, or give the directory of a complete checkpoint",
        )
    )


def _complete(path: Path, check_files: bool) -> Path:
    """The directory of the last complete save. ``check_files``: whether all its files are there."""
    latest = _latest(path)
    if latest is None:
        left = ", ".join(f.name for f in _folders(path).values())
        raise _refused(
            path,
            f"it is incomplete: {left} was never finished" if left else "there is none",
        )
    folder = path / latest["folder"]
    if check_files:
        sizes = {name: _size(folder / name) for name in latest["files"]}
        wrong = [
            f"{name} " + ("is missing" if sizes[name] is None else f"has {sizes[name]} of {n} B")
            for name, n in latest["files"].items()
            if sizes[name] != n
        ]
        if wrong:
            raise _refused(path, f"it is incomplete: in {folder.name}, {'; '.join(wrong)}")
    return folder


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.exists() else None


def _new_folder(path: Path) -> str:
    """Make the directory of the next save; delete what killed saves have left."""
    path.mkdir(parents=True, exist_ok=True)
    latest, found = _latest(path), _folders(path)
    last = latest["folder"] if latest else ""
    for folder in found.values():
        if folder.name != last:
            shutil.rmtree(folder)
    # a number never used here: a rank of a killed save may still be writing
    number = max([0, *found, *(int(name) for name in re.findall(r"\d+$", last))]) + 1
    name = f"save-{number:06d}"
    (path / name).mkdir()
    _flush(path)
    return name


def _settle(folder: Path) -> None:
    """See that this rank's files and everyone's metadata are where they should be, for good."""
    if not (folder / ".metadata").exists():
        raise ShardingError(
            message(
                SAVE,
                str(folder),
                "what rank 0 wrote there is not seen by this rank",
                "all ranks write into one directory",
                "give a path on a file system that all ranks share",
            )
        )
    _flush(folder)


def _point_to(folder: Path) -> None:
    """Make the directory the last complete one, in one step; then delete those before it."""
    path = folder.parent
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    temporary = path / f"{LATEST}.tmp"
    with temporary.open("w") as stream:
        json.dump({"folder": folder.name, "files": files}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path / LATEST)
    _flush(path)
    for other in _folders(path).values():
        if other != folder:
            shutil.rmtree(other)


def _flush(folder: Path) -> None:
    """Bring a directory's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- what is saved ---


class _Save(SavePlanner):
    """Says which boxes of which whole tensors this rank writes."""

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer | None):
        self.mesh, self.rank = module.program.mesh, module.rank_index
        self.shards: Shards = kept(module)
        # by size, so that ranks that hold the same take turns at tensors of about one size
        order = sorted(self.shards, key=lambda name: -self.shards[name][0].value.numel())
        self.turn = {name: number for number, name in enumerate(order)}
        self.record: dict[str, Any] = {
            "format": FORMAT,
            "mesh": str(self.mesh.mesh),
            "random": _random_states(module),
            "optimizer": None,
        }
        self.state: dict[str, dict[str, Any]] = {}
        if optimizer is not None:
            names = _names(module, optimizer, SAVE)
            tensors, self.state = _state_of(module, optimizer, names)
            self.shards |= tensors
            self.record["optimizer"] = {"groups": _groups_of(optimizer, names)}
        self.views: dict[MetadataIndex, torch.Tensor] = {}

    @property
    def digest(self) -> dict[str, int]:
        """Numbers by which ranks see whether they hold the same."""
        random, optimizer = self.record["random"], self.record["optimizer"]
        states = [(kind, state.numpy().tobytes()) for kind, state in random.items()]
        return {"random": checks._crc(states), "groups": checks._crc(_comparable(optimizer))}

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
        return SavePlan(items, planner_data=state)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        for name, entry in metadata.state_dict_metadata.items():
            parts = {(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks}
            count = sum(math.prod(sizes) for _, sizes in parts)
            assert count == math.prod(entry.size), f"{name}: {count} elements of {entry.size}"
        state: dict[str, Any] = {}
        differing = []
        for plan in plans:
            for name, fields in plan.planner_data.items():
                if _comparable(state.setdefault(name, fields)) != _comparable(fields):
                    differing.append(f"{name}: {fields} on one rank, {state[name]} on another")
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
            record["optimizer"] = {**record["optimizer"], "state": state}
        metadata.planner_data = {OWN: record}
        plans = [dataclasses.replace(plan, planner_data=None) for plan in plans]
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.views[write_item.index]


def state_key(name: str, field: str) -> str:
    """The name, in a checkpoint, of a field of a parameter's optimizer state."""
    return f"optimizer.state.{name}.{field}"


def _names(
    module: Any, optimizer: torch.optim.Optimizer, who: str
) -> dict[torch.Tensor, Parameter]:
    """The module's parameter behind each of an optimizer's; ShardingError for those of others."""
    ours = {module.tensor(key): p for key, p in module.program.parameters().items()}
    wrong = [
        f"group {at}: one of shape {tuple(p.shape)}"
        for at, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if p not in ours
    ]
    wrong += [f"state under {k!r:.80}" for k in optimizer.state if k not in ours]
    if wrong:
        raise ShardingError(
            message(
                who,
                f"{type(optimizer).__name__}'s parameters",
                "; ".join(wrong),
                "they are no parameters of this module, which names them in the checkpoint",
                "make the optimizer from the parameters() of this module",
            )
        )
    return ours


def _state_of(
    module: Any, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, Parameter]
) -> tuple[Shards, dict[str, dict[str, Any]]]:
    """An optimizer's state: tensors of the parameters' shapes, by name; and by parameter the fields
    that are such tensors (``tensors``) and those that are numbers (``scalars``)."""
    shards: Shards = {}
    state: dict[str, dict[str, Any]] = {}
    wrong = []
    for local, fields in optimizer.state.items():
        parameter = names[local]
        here: dict[str, Any] = {"tensors": [], "scalars": {}}
        for field, value in fields.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape == local.shape:
                here["tensors"].append(field)
                shards[state_key(parameter.name, field)] = (parameter, value.detach())
            elif _is_plain(value):
                on_device = isinstance(value, torch.Tensor) and not value.is_cpu
                here["scalars"][field] = (_on_cpu(value), on_device)
            else:
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)
                wrong.append(f"{parameter.name}.{field}: {shape}, of {tuple(local.shape)}")
        if fields:
            state[parameter.name] = here
    if wrong:
        raise ShardingError(
            message(
                SAVE,
                f"{type(optimizer).__name__}'s state of {len(wrong)} fields",
                "; ".join(wrong),
                "only numbers and tensors of their parameter's shape can be cut anew for another "
                "mesh",
                "use an optimizer whose state has the parameters' shapes, such as AdamW or SGD, or "
                "save without the optimizer",
            )
        )
    return shards, state


def _groups_of(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, Parameter]
) -> list[dict[str, Any]]:
    """The optimizer's groups: the names of their parameters, and their hyperparameters."""
    groups, wrong = [], []
    for at, group in enumerate(optimizer.param_groups):
        values = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        wrong += [f"group {at}: {k}={v!r:.80}" for k, v in values.items() if not _is_plain(v)]
        groups.append(
            {
                "names": [names[p].name for p in group["params"]],
                "values": {k: _on_cpu(v) for k, v in values.items()},
            }
        )
    if wrong:
        raise ShardingError(
            message(
                SAVE,
                f"{type(optimizer).__name__}'s hyperparameters",
                "; ".join(wrong),
                "only numbers, texts and lists of them are saved",
                "keep other objects out of the groups",
            )
        )
    return groups


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None, or made up of such."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, (bool, int, float, complex, str))


def _on_cpu(value: Any) -> Any:
    """The value, with its tensors copied to the CPU."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().cpu().clone(), value
    )


def _comparable(value: Any) -> str:
    """A text that is the same for equal values."""
    as_numbers = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: (t.dtype, t.item()), value
    )
    return repr(as_numbers)


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
            chunks = []
            for box in boxes.held(parameter, self.mesh, self.rank):
                chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
                self.views[MetadataIndex(name, box.offsets)] = box.of(local)
            entry = self.metadata.state_dict_metadata.get(name)
            found = create_read_items_for_chunk_list(name, entry, chunks) if chunks else []
            read = sum(math.prod(item.lengths) for item in found)
            assert read == local.numel(), f"{name}: {read} of {local.numel()} elements found"
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
    module: Any, path: Path, optimizer: torch.optim.Optimizer | None
) -> tuple[Path, _Load, Callable[[], None]]:
    """The directory to read, what to read out of it, and what to do when that is read. Changes
    nothing; raises ShardingError where checkpoint, module and optimizer do not fit."""
    folder = _complete(path, check_files=module.rank_index == 0)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    record = (metadata.planner_data or {}).get(OWN)
    if record is None or record["format"] != FORMAT:
        raise _refused(path, "it was not written by this version's save_checkpoint")
    saved = record["optimizer"] or {"groups": [], "state": {}}
    stateful = {state_key(n, f) for n, here in saved["state"].items() for f in here["tensors"]}
    stored = {n: e.size for n, e in metadata.state_dict_metadata.items() if n not in stateful}
    held = kept(module)
    found = {name: _alias(p, stored) for name, (p, _) in held.items()}
    known = {n for p, _ in held.values() for n in p.names}
    wrong = _misfits(held, found, stored, known)
    shards: Shards = {found[n]: held[n] for n in held if found[n] in stored}
    installs: list[Callable[[], None]] = [lambda: _set_random_states(module, record["random"])]
    if optimizer is not None:
        names = _names(module, optimizer, LOAD)
        if record["optimizer"] is None:
            wrong.append("it holds no optimizer's state")
        else:
            wrong += _unmatched_groups(optimizer, names, saved["groups"])
        if not wrong:
            state, tensors = _new_state(optimizer, names, saved["state"], metadata)
            shards |= tensors
            installs.append(lambda: _set_state(optimizer, state))
            installs.append(lambda: _set_groups(optimizer, names, saved["groups"]))
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


def _alias(parameter: Parameter, names: Any) -> str:
    """The name under which a checkpoint has a parameter; its canonical one where it has none."""
    return next((n for n in parameter.names if n in names), parameter.name)


def _misfits(
    held: Shards, found: dict[str, str], stored: dict[str, torch.Size], known: set[str]
) -> list[str]:
    """What a checkpoint lacks, has too many, and has in other shapes."""
    missing = [n for n, (p, _) in held.items() if found[n] not in stored and p.value.numel()]
    unexpected = [n for n in stored if n not in known]
    return [
        *([f"missing {', '.join(missing)}"] if missing else []),
        *([f"unexpected {', '.join(unexpected)}"] if unexpected else []),
        *(
            f"{n} is {tuple(stored[found[n]])}, not {tuple(p.value.shape)}"
            for n, (p, _) in held.items()
            if found[n] in stored and stored[found[n]] != p.value.shape
        ),
    ]


def _unmatched_groups(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, Parameter],
    groups: list[dict[str, Any]],
) -> list[str]:
    """Parameters of one optimizer only, and groups that were one and had different numbers."""
    saved = {n: at for at, group in enumerate(groups) for n in group["names"]}
    wanted = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    missing = [p.name for group in wanted for p in group if _alias(p, saved) not in saved]
    known = {n for group in wanted for p in group for n in p.names}
    unexpected = [n for n in saved if n not in known]
    wrong = [f"missing in the optimizer saved {', '.join(missing)}"] if missing else []
    wrong += [f"unexpected in the optimizer saved {', '.join(unexpected)}"] if unexpected else []
    for at, group in enumerate(wanted):
        origins = {saved[n] for p in group if (n := _alias(p, saved)) in saved}
        if len({_comparable(groups[origin]["values"]) for origin in origins}) > 1:
            wrong.append(
                f"group {at} holds parameters of groups {sorted(origins)}, whose hyperparameters "
                "differ"
            )
    return wrong


def _new_state(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, Parameter],
    saved: dict[str, dict[str, Any]],
    metadata: Metadata,
) -> tuple[dict[torch.Tensor, dict[str, Any]], Shards]:
    """The state that an optimizer is to have, and which of its tensors are still to be read."""
    state: dict[torch.Tensor, dict[str, Any]] = {}
    shards: Shards = {}
    for group in optimizer.param_groups:
        computes_there = bool(group.get("fused") or group.get("capturable"))
        for local in group["params"]:
            name = _alias(names[local], saved)
            if name not in saved:
                continue  # it had no state
            fields = state[local] = {}
            for field in saved[name]["tensors"]:
                key = state_key(name, field)
                dtype = metadata.state_dict_metadata[key].properties.dtype
                fields[field] = torch.zeros_like(local, dtype=dtype, requires_grad=False)
                shards[key] = (names[local], fields[field])
            for field, (value, on_device) in saved[name]["scalars"].items():
                there = isinstance(value, torch.Tensor) and (on_device or computes_there)
                fields[field] = value.to(local.device) if there else _on_cpu(value)
    return state, shards


def _set_state(optimizer: torch.optim.Optimizer, state: dict[torch.Tensor, dict[str, Any]]) -> None:
    optimizer.state.clear()
    optimizer.state.update(state)


def _set_groups(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, Parameter],
    groups: list[dict[str, Any]],
) -> None:
    saved = {n: group["values"] for group in groups for n in group["names"]}
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        values = saved[_alias(names[group["params"][0]], saved)]
        for key, value in values.items():
            if key in IMPLEMENTATION:
                continue
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))  # a compiled step reads this very tensor
            else:
                group[key] = _on_cpu(value)


def _set_random_states(module: Any, states: dict[str, torch.Tensor] | None) -> None:
    for kind, _, set_state in _devices(module):
        if states and kind in states:
            set_state(states[kind])
