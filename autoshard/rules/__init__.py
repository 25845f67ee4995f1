"""Op rules: for each family of ops, which dimensions are the same axis, what is summed, what must
be whole. A rule never decides where to cut; `passes/partition.py` does, from what rules state."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.rules import (
    attention,
    contraction,
    elementwise,
    experts,
    factory,
    indexing,
    loss,
    reduction,
    view,
)
from autoshard.rules.core import Rule, Typer, Typing, Window

FAMILIES = (
    elementwise,
    view,
    contraction,
    reduction,
    indexing,
    attention,
    experts,
    loss,
    factory,
)


def _table() -> dict[str, Rule]:
    table: dict[str, Rule] = {}
    for family in FAMILIES:
        for names, rule in family.RULES:
            table.update(dict.fromkeys(names.split(), rule))
    return table


RULES = _table()


def op_name(target: Any) -> str:
    """The name rules know an op by: ``linear`` for ``aten.linear.default``."""
    return str(getattr(target, "_opname", None) or getattr(target, "__name__", target))


def rule_for(target: Any) -> Rule | None:
    """The rule of an op; None where there is none (the op then needs everything whole). Ops that
    torch itself marks as pointwise need no rule of their own."""
    rule = RULES.get(op_name(target))
    if rule is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        return elementwise.elementwise
    return rule


__all__ = ["RULES", "Rule", "Typer", "Typing", "Window", "op_name", "rule_for"]
