"""Micro-batches: what of a graph needs all of them, and a graph run on all of them in lockstep.

A micro-batch is a position on a mesh axis in time. One process runs all of them, one after the
other, so what is summed over that axis is a plain sum of tensors that are here, and its gradient is
autograd's own. Outside of `in_lockstep` there is one micro-batch, and its sum is itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

#: The micro-batch that this process is at: other than 0 only while a pipeline runs.
turn = 0


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over the micro-batches of a step."""
    return x


def peak(x: torch.Tensor) -> torch.Tensor:
    """The largest over the micro-batches of a step; has no gradient, as
    `collectives.all_reduce_max`."""
    return x.detach()


def in_first(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the first micro-batch, zeros in the others: what counts once a step."""
    return x if turn == 0 else torch.zeros_like(x)


#: What needs all micro-batches, and how it is made of theirs.
OVER_ALL: dict[Any, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {
    total: lambda xs: xs[0] if len(xs) == 1 else torch.stack(list(xs)).sum(0, dtype=xs[0].dtype),
    peak: lambda xs: torch.stack([x.detach() for x in xs]).amax(0),
}


def in_lockstep(
    graph: fx.Graph,
    arguments: Sequence[Sequence[Any]],
    run: Callable[[fx.Node, list[dict[fx.Node, Any]]], list[Any]],
    ranks: int = 1,
) -> list[list[Any]]:
    """Run a graph node by node, each on all micro-batches. ``arguments[turn][rank]``: the graph's;
    ``run``: one node on all ``ranks`` of this process, whose values by node it is given. Gives
    ``[turn][rank]``: the results.

    Sums over micro-batches are of one rank's; what is made of them alone is computed once, what
    else is behind them once a micro-batch. The objective is then that of one micro-batch, not their
    sum.
    """
    global turn
    before = turn
    same = common(graph)
    envs: list[list[dict[fx.Node, Any]]] = [[{} for _ in range(ranks)] for _ in arguments]
    feeds = [[iter(of_rank) for of_rank in of_turn] for of_turn in arguments]
    for node in graph.nodes:
        if node.op == "placeholder":
            for env, feed in zip(envs, feeds, strict=True):
                for here, values in zip(env, feed, strict=True):
                    here[node] = next(values)
        elif node.op == "output":
            return [[fx.map_arg(node.args[0], here.__getitem__) for here in env] for env in envs]
        elif node.target in OVER_ALL:
            for rank in range(ranks):
                made = OVER_ALL[node.target]([env[rank][node.args[0]] for env in envs])
                for env in envs:
                    env[rank][node] = made
        elif node in same:
            for rank, value in enumerate(run(node, envs[0])):
                for env in envs:
                    env[rank][node] = value
        else:
            for at, env in enumerate(envs):
                turn = at
                for here, value in zip(env, run(node, env), strict=True):
                    here[node] = value
            turn = before
    raise AssertionError("a graph without output")


def common(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a graph that runs in lockstep which give the same in every micro-batch, and so
    run once a step: sums over these, and what is made of such sums alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        read = node.all_input_nodes
        made_of_sums = bool(read) and found.issuperset(read) and node.op == "call_function"
        if node.target in OVER_ALL or (made_of_sums and node.target is not in_first):
            found.add(node)
    return found


def on_one_rank(node: fx.Node, envs: list[dict[fx.Node, Any]]) -> list[Any]:
    """A node of a graph that is bound to this process's rank."""
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), envs[0].__getitem__)
    return [target(*args, **kwargs)]
