"""What a model's forward returns: the tensors in it by name, and the way back to its own type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Output:
    """The type a forward returned and its fields, in order, as ``(name, key)``.

    ``style``: how the type is made: "tensor", "mapping", "keywords", "positions" or "sequence".
    """

    kind: type
    style: str
    fields: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(out: Any) -> Output:
        """Read the type of a forward's result."""
        kind, items = type(out), tuple((str(k), k) for k, _ in _items(out))
        if isinstance(out, torch.Tensor):
            return Output(torch.Tensor, "tensor", items)
        if dataclasses.is_dataclass(
            out
        ):  # also the outputs of transformers, which are mappings too
            return Output(kind, "keywords", items)
        if isinstance(out, Mapping) or hasattr(out, "items"):
            return Output(kind if issubclass(kind, dict) else dict, "mapping", items)
        return Output(kind, "positions" if hasattr(out, "_fields") else "sequence", items)

    def restore(self, named: dict[str, Any]) -> Any:
        """The tensors, by name, as the type the model returned; what is no tensor comes back as
        None, or is left out of a mapping."""
        if self.style == "tensor":
            return named["output"]
        if self.style == "keywords":
            return self.kind(**named)
        if self.style == "mapping":
            return self.kind({key: named[name] for name, key in self.fields if name in named})
        values = [named.get(name) for name, _ in self.fields]
        return self.kind(*values) if self.style == "positions" else self.kind(values)


def tensors_of(out: Any) -> dict[str, Any]:
    """The outputs that are tensors, or nests of them, by name; caches and the like are left out."""
    kept = {}
    for name, value in _items(out):
        flat = pytree.tree_leaves(value)
        if flat and all(isinstance(v, torch.Tensor) for v in flat):
            kept[str(name)] = value
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
