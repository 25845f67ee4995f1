"""The ops that bring tokens to experts and back, as they stand in a graph that is not partitioned.

`passes.fuse_experts` puts them in; `autoshard.rules.experts` states their axes and writes what
takes their place on a rank, which is in `autoshard.runtime.experts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx


def dispatch(
    x: torch.Tensor,
    index: torch.Tensor,
    scalars: list[torch.Tensor],
    experts: int,
    capacity: float | None = None,
    weights: torch.Tensor | None = None,
    skips: bool = False,
) -> tuple[Any, ...]:
    """Tokens ``x[t, d]``, each a row for every one of its experts ``index[t, k]``: ``(rows[n, d],
    *rows of the scalars [t, k] as [n], offsets[experts], plan)`` with n = t k, sorted by expert.
    Rows of expert e end at ``offsets[e]``; ``plan`` is what `combine` needs to undo it.

    ``capacity``: an expert takes of a rank's tokens at most this many times what each would get if
    all got as many (`autoshard.runtime.dispatch.Capacity`); of those over it, the ones of the
    smallest ``weights[t, k]`` add nothing. ``skips``: there may be indices from ``experts`` on, of
    slots that add nothing either."""
    raise NotImplementedError("dispatch is to be replaced before the graph runs")


def combine(rows: torch.Tensor, plan: Any) -> torch.Tensor:
    """``[t, e]``: for every token the sum of its ``rows[n, e]``."""
    raise NotImplementedError("combine is to be replaced before the graph runs")


def dispatches(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that begin a mixture of experts."""
    return list(graph.find_nodes(op="call_function", target=dispatch))


def plan_of(node: fx.Node) -> fx.Node:
    """The dispatch that gave the plan which a `combine` or ``expert_rows`` reads."""
    plan: Any = node.args[-1]
    return plan.args[0]


def body(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes between a dispatch and its combine: what experts compute."""
    found, stack = set[fx.Node](), list(node.users)
    while stack:
        user = stack.pop()
        if user in found or user.target is combine or user.op == "output":
            continue
        found.add(user)
        stack.extend(user.users)
    yield from found
