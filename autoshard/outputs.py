"""What a model's forward returns: the tensors in it by name, and the way back to its own type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Nest:
    """A list, tuple or dict that holds more than tensors. ``members``: of each key or position a
    Nest, True for a tensor or what holds nothing else, False for all other things."""

    kind: type
    members: tuple[tuple[Any, Nest | bool], ...]

    @staticmethod
    def of(value: Any) -> Nest | bool:
        """What a part of a forward's result is."""
        flat = pytree.tree_leaves(value)
        if flat and all(isinstance(v, torch.Tensor) for v in flat):
            return True
        if type(value) not in (list, tuple, dict):
            return False
        items = value.items() if isinstance(value, dict) else enumerate(value)
        members = tuple((key, Nest.of(each)) for key, each in items)
        return Nest(type(value), members) if any(m for _, m in members) else False

    def taken(self, value: Any) -> list[Any]:
        """The tensors in it."""
        kept = [(value[key], m) for key, m in self.members if m]
        return [m.taken(each) if isinstance(m, Nest) else each for each, m in kept]

    def filled(self, parts: list[Any]) -> Any:
        """The value again; None for what is no tensor, which a dict leaves out."""
        left = iter(parts)
        found = {
            key: (m.filled(next(left)) if isinstance(m, Nest) else next(left)) if m else None
            for key, m in self.members
            if m or self.kind is not dict
        }
        return found if self.kind is dict else self.kind(found.values())


@dataclass(frozen=True)
class Output:
    """The type a forward returned and its fields, in order, as ``(name, key)``.

    ``style``: how the type is made: "tensor", "mapping", "keywords", "positions" or "sequence";
    ``nests``: of the fields that hold more than tensors, by name.
    """

    kind: type
    style: str
    fields: tuple[tuple[str, Any], ...]
    nests: dict[str, Nest]

    @staticmethod
    def of(out: Any) -> Output:
        """Read the type of a forward's result."""
        kind, items = type(out), tuple((str(k), k) for k, _ in _items(out))
        found = {str(k): Nest.of(value) for k, value in _items(out)}
        about = items, {name: nest for name, nest in found.items() if isinstance(nest, Nest)}
        if isinstance(out, torch.Tensor):
            return Output(torch.Tensor, "tensor", *about)
        if dataclasses.is_dataclass(
            out
        ):  # also the outputs of transformers, which are mappings too
            return Output(kind, "keywords", *about)
        if isinstance(out, Mapping) or hasattr(out, "items"):
            return Output(kind if issubclass(kind, dict) else dict, "mapping", *about)
        return Output(kind, "positions" if hasattr(out, "_fields") else "sequence", *about)

    def restore(self, named: dict[str, Any]) -> Any:
        """The tensors, by name, as the type the model returned; what is no tensor comes back as
        None, or is left out of a mapping."""
        if self.style == "tensor":
            return named["output"]
        named = {n: self.nests[n].filled(x) if n in self.nests else x for n, x in named.items()}
        if self.style == "keywords":
            return self.kind(**named)
        if self.style == "mapping":
            return self.kind({key: named[name] for name, key in self.fields if name in named})
        values = [named.get(name) for name, _ in self.fields]
        return self.kind(*values) if self.style == "positions" else self.kind(values)


def tensors_of(out: Any) -> dict[str, Any]:
    """The outputs that are tensors, or nests of them, by name. Caches and the like are left out; of
    what holds such things too it is a list of the tensors."""
    kept = {}
    for name, value in _items(out):
        nest = Nest.of(value)
        if nest:
            kept[str(name)] = nest.taken(value) if isinstance(nest, Nest) else value
    return kept


def _items(out: Any) -> list[tuple[Any, Any]]:
    if isinstance(out, torch.Tensor):
        return [("output", out)]
    if hasattr(out, "items"):
        return list(out.items())
    if hasattr(out, "_fields"):
        return list(zip(out._fields, out, strict=True))
    if dataclasses.is_dataclass(out):
        return [(f.name, getattr(out, f.name)) for f in dataclasses.fields(out)]
    return list(enumerate(out)) if isinstance(out, (tuple, list)) else []
