"""Ops that make tensors from sizes."""

from __future__ import annotations

from torch import fx

from autoshard.rules.core import Typer, Typing


def factory(t: Typer, node: fx.Node) -> Typing:
    """arange, zeros, full ...: fresh dimensions; the result is whole on every rank."""
    return Typing(t.new(node.meta["val"]))


RULES = [
    (
        """arange zeros ones full empty eye linspace scalar_tensor new_zeros new_ones new_full new_empty
        tril_indices triu_indices hann_window randperm""",
        factory,
    ),
]
