"""Ops that make tensors from sizes."""

from __future__ import annotations

from torch import fx

from autoshard.rules.core import Typer, Typing


def factory(t: Typer, node: fx.Node) -> Typing:
    """arange, zeros, full ...: fresh dimensions; the result is whole on every rank."""
    return Typing(t.new(node.meta["val"]))


def filled(t: Typer, node: fx.Node) -> Typing:
    """zeros, full ...: every element alike, so a rank may make its own part only."""
    return Typing(t.new(node.meta["val"]), shapes=0)


def filled_like(t: Typer, node: fx.Node) -> Typing:
    """new_zeros, new_full ...: the tensor operand gives dtype and device only."""
    return Typing(t.new(node.meta["val"]), shapes=1)


def random(t: Typer, node: fx.Node) -> Typing:
    """rand, randn, randint: a rank draws its own part, from a stream of its own."""
    out = t.new(node.meta["val"])
    arguments = node.target._schema.arguments
    shapes = next(i for i, a in enumerate(arguments) if str(a.type) == "List[int]")
    return Typing(out, fresh=list(out), shapes=shapes, random=True)


RULES = [
    ("arange eye linspace scalar_tensor tril_indices triu_indices hann_window randperm", factory),
    ("rand randn randint", random),
    ("zeros ones full empty", filled),
    ("new_zeros new_ones new_full new_empty", filled_like),
]
