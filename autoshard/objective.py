"""Which output of a model is its loss."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.errors import CaptureError, message
from autoshard.program import Program, tensor_results
from autoshard.runtime.zero import release, start_gather

aten = torch.ops.aten

#: Ops whose results do not depend on their inputs' values, or pass no gradient to them.
CUT = {
    aten.detach.default,
    aten.detach_.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
}


def loss_index(program: Program) -> int | None:
    """Position of the loss among the outputs: the one called ``loss``, else the only scalar that a
    gradient can flow from; None where there is no such one, or where `wrong_loss` says why."""
    names, scalars = program.output_names, _scalars(program)
    if "loss" in names:
        at = names.index("loss")
        return at if at in scalars else None
    return scalars[0] if len(scalars) == 1 else None


def wrong_loss(program: Program) -> str:
    """Why the outputs leave no loss to choose; empty when one is chosen, or none is a scalar."""
    names, scalars = program.output_names, _scalars(program)
    if "loss" in names and names.index("loss") not in scalars:
        shape = tuple(_output(program)[names.index("loss")].meta["val"].shape)
        if shape:
            return f"the output loss has shape ({', '.join(map(str, shape))}), and is no scalar"
        return "the output loss does not depend on any trainable parameter"
    if "loss" not in names and len(scalars) > 1:
        return f"{', '.join(names[i] for i in scalars)} are all scalars, and none is called loss"
    return ""


def no_loss(who: str, program: Program) -> CaptureError:
    """The error for a program without a loss."""
    return CaptureError(
        message(
            who,
            "the loss",
            f"outputs {', '.join(program.output_names)}",
            program.wrong_loss or "no output is a scalar that depends on a trainable parameter",
            "return a scalar called loss, give labels in example_inputs, or pass loss_fn=",
        )
    )


def _output(program: Program) -> list[fx.Node]:
    return list(next(n for n in program.graph.nodes if n.op == "output").args[0])


def _scalars(program: Program) -> list[int]:
    """Outputs of one number that a gradient can flow from."""
    reached = _differentiable(program)
    return [
        i
        for i, node in enumerate(_output(program)[: len(program.output_names)])
        if node in reached and tensor_results(node)[0].ndim == 0
    ]


def _differentiable(program: Program) -> set[fx.Node]:
    """Nodes that a gradient can reach a trainable parameter from."""
    reached: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            parameter = program.values.get(node.name)
            flows = parameter is not None and parameter.trainable
        else:
            flows = node.target not in CUT and any(n in reached for n in node.all_input_nodes)
        if flows and any(t.is_floating_point() or t.is_complex() for t in tensor_results(node)):
            reached.add(node)
    return reached


def loss_graph(program: Program) -> fx.Graph:
    """The graph that computes the loss (and buffer updates) and nothing else."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(program.graph, mapping)
    output = next(n for n in program.graph.nodes if n.op == "output")
    results = list(output.args[0])
    kept = [results[program.loss or 0], *(results[i] for i in program.buffer_updates.values())]
    graph.output(tuple(mapping[n] for n in kept))
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="call_function", target=start_gather):
        if all(user.target is release for user in node.users):  # the loss does without
            for user in list(node.users):
                graph.erase_node(user)
            graph.erase_node(node)
    return graph
