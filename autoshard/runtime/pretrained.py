"""Weights as Hugging Face keeps them: safetensors files read into slices, and written from them.

Names and layouts on disk that are not the model's own (other prefixes, experts one by one) go
through transformers' own conversion of checkpoints, for its models.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autoshard.errors import ShardingError, message
from autoshard.program import Parameter
from autoshard.runtime import boxes, checks, gather
from autoshard.runtime.checkpoint import kept, named, refuse_alone

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LOAD, SAVE = "load_pretrained", "save_pretrained"

#: How safetensors calls the dtypes.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Reader = Callable[[], torch.Tensor]


# --- reading ---


@dataclass
class Source:
    """Where a parameter's value comes from: one tensor of a file, or a conversion of several."""

    stored: str = ""
    conversion: Conversion | None = None


@dataclass
class Conversion:
    """A transform of transformers that makes one or several parameters out of tensors on disk."""

    transform: Any
    target: str
    stored: list[tuple[str, str, str]] = field(default_factory=list)  # renamed, stored, pattern

    def results(self, model: Any, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole tensors it makes, by the model's names for them."""
        transform = copy.deepcopy(self.transform)
        for renamed, stored, pattern in self.stored:
            transform.add_tensor(renamed, stored, pattern, read(stored))
        made = transform.convert(self.target, model=model, config=model.config)
        return {n: v[0] if isinstance(v, list) else v for n, v in made.items()}


@torch.no_grad()
def load(module: Any, path: Any, strict: bool = True) -> tuple[list[str], list[str]]:
    """Read this rank's part of every parameter and persistent buffer out of the directory's
    ``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists.

    Only what the rank holds is read, except where transformers converts what is on disk (experts
    one by one): there, one converted parameter is held whole at a time. Names may have or lack the
    model's ``base_model_prefix``; one name of a tied parameter is enough. Values are converted to
    the dtype held.

    Returns the names missing and those unexpected, without those that the model says to ignore.
    Raises, on every rank and before anything is changed, ShardingError where there are no such
    files, or that lists all wrong shapes and, when ``strict``, all such names.
    """
    path = Path(path)
    with contextlib.ExitStack() as stack:
        (sources, files, names), _ = checks.together(
            module.live, LOAD, lambda: _matched(module, path, strict, stack)
        )
        checks.together(module.live, LOAD, lambda: _read_all(module, sources, files))
    every = named(module)
    module._filled(name for filled in sources for name in every[filled].names)
    return names


def _matched(module: Any, path: Path, strict: bool, stack: contextlib.ExitStack) -> Any:
    """Where the value of every parameter is, by name; the open file of every stored tensor; and the
    names missing and unexpected. Changes nothing."""
    model = module._source.model
    files = _opened(path, stack)
    every = named(module)
    known = {n: p.name for p in every.values() for n in p.names}
    found = _sources(model, list(files), known)
    sources = {
        name: next(found[n] for n in parameter.names if n in found)
        for name, parameter in every.items()
        if any(n in found for n in parameter.names)
    }
    ignored = {p.name for p in module.program.values.values() if p.buffer and not p.persistent}
    missing = [n for n in every if n not in sources]
    missing = _without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
    used = {s.stored for s in found.values()}
    used |= {n for s in found.values() if s.conversion for _, n, _ in s.conversion.stored}
    unexpected = [n for n in files if n not in used and n not in ignored]
    unexpected = _without(unexpected, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    wrong = _wrong_shapes(every, sources, files, model)
    if wrong or (strict and (missing or unexpected)):
        told = [f"missing {', '.join(missing)}"] if missing else []
        told += [f"unexpected {', '.join(unexpected)}"] if unexpected else []
        raise ShardingError(
            message(
                LOAD,
                "; ".join([*told, *wrong]),
                f"{path} has {len(files)} tensors",
                "each parameter and persistent buffer needs a tensor of its name and shape",
                "give the directory of a checkpoint of this model, or strict=False to keep what "
                "the missing ones hold",
            )
        )
    return sources, files, (missing, unexpected)


def _without(names: list[str], patterns: Any) -> list[str]:
    """The names that none of the patterns finds."""
    return [n for n in names if not any(re.search(p, n) for p in patterns or ())]


def _opened(path: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """By name of a stored tensor the open file that has it."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise ShardingError(
            message(
                LOAD,
                "the package safetensors",
                "it is not installed",
                "the files are read with it",
                "pip install 'autoshard[hf]'",
            )
        ) from None
    index = path / INDEX
    if index.exists() and not (path / SINGLE).exists():
        listed = json.loads(index.read_text())["weight_map"]
    else:
        listed = {"": SINGLE}
    absent = sorted({name for name in listed.values() if not (path / name).exists()})
    if absent:
        there = sorted(f.name for f in path.iterdir())[:8] if path.is_dir() else "no directory"
        raise ShardingError(
            message(
                LOAD,
                str(path),
                f"{', '.join(absent)} not found; there is {there}",
                f"weights are read from {SINGLE}, or from all that {INDEX} lists",
                "give the directory of a checkpoint in safetensors",
            )
        )
    opened: dict[str, Any] = {}
    for name in sorted(set(listed.values())):
        file = stack.enter_context(safe_open(path / name, framework="pt"))
        opened |= dict.fromkeys(file.keys(), file)
    return opened


def _sources(model: Any, stored: list[str], known: dict[str, str]) -> dict[str, Source]:
    """By the model's names: where each value is found among the stored tensors."""
    renamings, converters = _transforms(model)
    found: dict[str, Source] = {}
    conversions: dict[str, Conversion] = {}
    for name in sorted(stored, key=_natural):
        renamed, pattern = _renamed(name, renamings, converters, known, model)
        if renamed not in known:
            plain, _ = _renamed(name, [], [], known, model)
            renamed, pattern = (plain, None) if plain in known else (renamed, pattern)
        if renamed not in known:
            continue
        if pattern is None:
            if renamed not in found or name == renamed:
                found[renamed] = Source(name)
            continue
        transform = next(c for c in converters if pattern in c.source_patterns)
        conversion = conversions.setdefault(renamed, Conversion(transform, renamed))
        conversion.stored.append((renamed, name, pattern))
        found[renamed] = Source(conversion=conversion)
        first = transform.target_patterns[0]
        for other in transform.target_patterns[1:]:  # one stored tensor makes several parameters
            found[renamed.replace(first, other)] = Source(conversion=conversion)
    return found


def _natural(name: str) -> list[tuple[int, Any]]:
    """Sorts numbers in names as numbers: transforms stack experts in the order they come."""
    return [(0, int(s)) if s.isdigit() else (1, s) for s in re.split(r"(\d+)", name)]


def _renamed(
    name: str, renamings: list[Any], converters: list[Any], known: dict[str, str], model: Any
) -> tuple[str, str | None]:
    """The model's name for a stored tensor, and the pattern of the converter that is to take it."""
    pattern = None
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    for converter in converters:
        name, pattern = converter.rename_source_key(name)
        if pattern is not None:
            break
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if name not in known and prefix != ".":
        if prefix + name in known:
            name = prefix + name
        elif name.removeprefix(prefix) in known:
            name = name.removeprefix(prefix)
    return name, pattern


def _transforms(model: Any) -> tuple[list[Any], list[Any]]:
    """How transformers renames and converts what is stored for this model; nothing for others."""
    if not _of_transformers(model):
        return [], []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    mapping = get_model_conversion_mapping(model)
    converters = [t for t in mapping if isinstance(t, WeightConverter)]
    return [t for t in mapping if not isinstance(t, WeightConverter)], converters


def _of_transformers(model: Any) -> bool:
    return any(cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__)


def _wrong_shapes(
    every: dict[str, Parameter], sources: dict[str, Source], files: dict[str, Any], model: Any
) -> list[str]:
    """Parameters whose value on disk has another shape; conversions that cannot be done."""
    shapes: dict[str, tuple[int, ...]] = {}
    wrong: list[str] = []
    done: list[Conversion] = []
    for name, source in sources.items():
        if source.conversion is None:
            shapes[name] = tuple(files[source.stored].get_slice(source.stored).get_shape())
        elif not any(source.conversion is each for each in done):
            done.append(source.conversion)
            try:  # on the meta device: shapes and nothing else
                made = source.conversion.results(model, lambda n: _meta(files[n], n))
            except Exception as error:
                names = [stored for _, stored, _ in source.conversion.stored]
                wrong.append(f"{', '.join(names)} cannot be converted to {name} ({error})")
                continue
            shapes |= {n: tuple(v.shape) for n, v in made.items()}
    for name, parameter in every.items():
        found = next((shapes[n] for n in parameter.names if n in shapes), None)
        if name in sources and found and found != tuple(parameter.value.shape):
            wrong.append(f"{name} is {found}, not {tuple(parameter.value.shape)}")
    return wrong


def _meta(file: Any, name: str) -> torch.Tensor:
    piece = file.get_slice(name)
    dtype = next((d for d, text in DTYPES.items() if text == piece.get_dtype()), torch.float32)
    return torch.empty(piece.get_shape(), dtype=dtype, device="meta")


def _read_all(module: Any, sources: dict[str, Source], files: dict[str, Any]) -> None:
    mesh, rank, held = module.program.mesh, module.rank_index, kept(module)
    waiting: dict[int, list[str]] = {}
    for name, source in sources.items():
        if name not in held:
            continue
        if source.conversion is not None:
            waiting.setdefault(id(source.conversion), []).append(name)
            continue
        parameter, local = held[name]
        _read(files[source.stored], source.stored, parameter, local, mesh, rank)
    for names in waiting.values():
        conversion = sources[names[0]].conversion
        assert conversion is not None
        made = conversion.results(module._source.model, lambda n: files[n].get_tensor(n))
        for name in names:
            parameter, local = held[name]
            whole = next(made[n] for n in parameter.names if n in made)
            boxes.fill(parameter, mesh, rank, local, whole)


def _read(
    file: Any, stored: str, parameter: Parameter, local: torch.Tensor, mesh: Any, rank: int
) -> None:
    """Read a rank's boxes of a stored tensor into its local one."""
    if not local.ndim:
        local.copy_(file.get_tensor(stored))
        return
    piece = file.get_slice(stored)
    for box in boxes.held(parameter, mesh, rank):
        at = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        box.of(local).copy_(piece[at])


# --- writing ---


@dataclass
class Written:
    """A tensor to be written, and the group of parameters that it is made of."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@torch.no_grad()
def save(module: Any, path: Any, max_shard_bytes: int = 5 * 10**9) -> None:
    """Write whole tensors to ``model.safetensors`` in the directory ``path``, or to shards of at
    most ``max_shard_bytes`` (or one tensor) with an index, and the model's ``config.json``, so that
    ``from_pretrained(path)`` of transformers reads them back equal to the bit.

    Every rank must call it. Rank 0 gathers and writes one parameter at a time (with its conversion,
    where transformers stores it otherwise); dtypes are those held; tied weights are written once.
    Raises MeshError where this module's other ranks do not run, and a rank's error on every rank.
    """
    refuse_alone(module)
    path, model = Path(path), module._source.model
    groups, tensors = checks.together(module.live, SAVE, lambda: _plan(module, model))[0]
    shards = _split(tensors, max_shard_bytes)
    checks.together(module.live, SAVE, lambda: path.mkdir(parents=True, exist_ok=True))
    checks.together(module.live, SAVE, lambda: _write(module, groups, shards, path))
    writes = module.rank_index == 0
    checks.together(
        module.live, SAVE, lambda: _finish(path, shards, model, tensors) if writes else None
    )


def _write(module: Any, groups: list[Group], shards: dict[str, list[Written]], path: Path) -> None:
    """Gather every group in turn, and on rank 0 write what it makes. Raises what went wrong when
    all is gathered: the other ranks wait for this one's part all the same."""
    attempt = _Attempts(module.rank_index == 0)
    for file_name, here in shards.items():
        stream = attempt(_begun, path / file_name, here)
        for group, names in _by_group(here):
            whole = {n: _whole(module, *groups[group].parameters[n]) for n in groups[group].names}
            attempt(_append, stream, groups[group], module._source.model, whole, names)
        attempt(lambda stream: stream.close(), stream)
    if attempt.error is not None:
        for file_name in shards:
            (path / f"{file_name}.tmp").unlink(missing_ok=True)
        raise attempt.error


class _Attempts:
    """Makes calls, until one fails; keeps that error."""

    def __init__(self, makes_calls: bool):
        self.makes_calls = makes_calls
        self.error: Exception | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if not self.makes_calls or self.error is not None:
            return None
        try:
            return function(*arguments)
        except Exception as error:
            self.error = error
            return None


@dataclass
class Group:
    """Parameters that are converted together, by name, and the transform; none for most."""

    parameters: dict[str, tuple[Parameter, torch.Tensor | None]]
    conversion: Conversion | None = None
    renamed: Callable[[str], str] = str

    @property
    def names(self) -> list[str]:
        return list(self.parameters)

    def converted(self, model: Any, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is written of these whole tensors, by the names on disk."""
        if self.conversion is not None:
            whole = self.conversion.results(model, lambda name: whole[name])
        return {self.renamed(name): value for name, value in whole.items()}


def _plan(module: Any, model: Any) -> tuple[list[Group], list[Written]]:
    """The groups, and all tensors that they make, in the order in which they are written."""
    held = {name: local for name, (_, local) in kept(module).items()}
    every = {_stored_name(model, p): (p, held.get(n)) for n, p in named(module).items()}
    groups = _groups(model, every)
    tensors, wrong = [], []
    for at, group in enumerate(groups):
        meta = {
            n: torch.empty(p.value.shape, dtype=p.value.dtype, device="meta")
            for n, (p, _) in group.parameters.items()
        }
        for name, value in group.converted(model, meta).items():
            tensors.append(Written(name, tuple(value.shape), value.dtype, at))
            if value.dtype not in DTYPES:
                wrong.append(f"{name} is {value.dtype}")
    if wrong:
        raise ShardingError(
            message(
                SAVE,
                ", ".join(wrong),
                f"safetensors has {', '.join(DTYPES.values())}",
                "a file has no other dtypes",
                "hold these in one of them, or use save_checkpoint",
            )
        )
    return groups, tensors


def _stored_name(model: Any, parameter: Parameter) -> str:
    """Of a tied parameter's names the one that transformers ties the others to."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return next((n for n in parameter.names if n not in tied), parameter.name)


def _groups(model: Any, every: dict[str, tuple[Parameter, torch.Tensor | None]]) -> list[Group]:
    """Parameters by the conversion that transformers reverts when it saves them."""
    renamings, converters = _reverse_transforms(model)

    def on_disk(name: str) -> str:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    groups: dict[str, Group] = {}
    for name in sorted(every, key=_natural) if converters else every:
        target, pattern = name, None
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                break
        key = target if pattern else f"={name}"
        group = groups.setdefault(key, Group({}, renamed=on_disk))
        group.parameters[name] = every[name]
        if pattern is not None:
            group.conversion = group.conversion or Conversion(converter, target)
            group.conversion.stored.append((target, name, pattern))
    return list(groups.values())


def _reverse_transforms(model: Any) -> tuple[list[Any], list[Any]]:
    """How transformers renames and converts back when it saves this model."""
    if not _of_transformers(model):
        return [], []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    used = getattr(model, "_weight_conversions", None)
    if used is None:  # not made by from_pretrained: no prefix was there to be put back
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        used = [t for t in mapping if not isinstance(t, PrefixChange)]
    back = [t.reverse_transform() for t in reversed(used)]
    converters = [t for t in back if isinstance(t, WeightConverter)]
    return [t for t in back if not isinstance(t, WeightConverter)], converters


def _split(tensors: list[Written], max_shard_bytes: int) -> dict[str, list[Written]]:
    """Tensors by file. What one group makes stays together."""
    parts: list[list[Written]] = [[]]
    size = 0
    for _, here in _of_groups(tensors):
        added = sum(t.size_bytes for t in here)
        if parts[-1] and size + added > max_shard_bytes:
            parts.append([])
            size = 0
        parts[-1] += here
        size += added
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    count = len(parts)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": p for i, p in enumerate(parts, 1)}


def _of_groups(tensors: list[Written]) -> Iterator[tuple[int, list[Written]]]:
    by_group: dict[int, list[Written]] = {}
    for tensor in tensors:
        by_group.setdefault(tensor.group, []).append(tensor)
    yield from by_group.items()


def _by_group(tensors: list[Written]) -> Iterator[tuple[int, list[str]]]:
    for group, here in _of_groups(tensors):
        yield group, [t.name for t in here]


def _begun(file: Path, tensors: list[Written]) -> Any:
    """A safetensors file with its header written: a length in 8 bytes, and JSON that says where
    each tensor lies behind it. It has another name until it is finished."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        begin, end = end, end + t.size_bytes
        header[t.name] = {
            "dtype": DTYPES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream = file.with_name(f"{file.name}.tmp").open("wb")
    stream.write(len(text).to_bytes(8, "little") + text)
    return stream


def _append(
    stream: Any, group: Group, model: Any, whole: dict[str, torch.Tensor], names: list[str]
) -> None:
    """Write what a group's whole tensors make, in the order of the header."""
    made = group.converted(model, whole)
    for name in names:
        stream.write(_bytes(made[name]))


def _bytes(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _whole(module: Any, parameter: Parameter, local: torch.Tensor | None) -> torch.Tensor | None:
    """The whole tensor on rank 0, bit by bit; on other ranks anything. ``local``: None where a rank
    holds none of it."""
    mesh, rank = module.program.mesh, module.rank_index
    stack, row = parameter.place or (parameter, None)
    cut = any(at is not None for at in gather.positions(stack, mesh, rank))
    if parameter.held_by(mesh, 0) and not cut:
        return local if row is None or local is None else local[row]
    import torch.distributed as dist

    kind = parameter.value.dtype
    device = module._device if local is None else local.device
    placed = torch.zeros(parameter.value.shape, dtype=kind, device=device)
    for box in boxes.written(parameter, mesh, rank, 0):
        boxes.part_of(placed, box.offsets, box.sizes).copy_(box.of(local))
    placed = placed.to(module._device or placed.device)
    # as integers: a sum of numbers would turn a -0.0 into 0.0
    dist.reduce(placed.reshape(-1).view(torch.uint8), dst=0)
    return placed


def _finish(
    path: Path,
    shards: dict[str, list[Written]],
    model: Any,
    tensors: list[Written],
) -> None:
    """Give the files their names, delete those of an earlier save, write index and config."""
    for name in shards:
        os.replace(path / f"{name}.tmp", path / name)
    old = [f for f in path.glob("model*.safetensors") if f.name not in shards]
    for file in old:
        if file.name == SINGLE or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", file.name):
            file.unlink()
    (path / INDEX).unlink(missing_ok=True)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.size_bytes for t in tensors)},
            "weight_map": {t.name: name for name, here in shards.items() for t in here},
        }
        (path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    if hasattr(getattr(model, "config", None), "save_pretrained"):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        floating = [t.dtype for t in tensors if t.dtype.is_floating_point]
        if floating:
            config.dtype = str(max(floating, key=floating.count)).removeprefix("torch.")
        config.save_pretrained(path)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(path)
