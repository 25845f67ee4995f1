"""What a legal Program is, as small named checks."""

from __future__ import annotations

from autoshard.collectives import CONVERSIONS
from autoshard.errors import ShardingError, message
from autoshard.program import Program, module_path
from autoshard.shapes import Misfit, interpret, stated


def check(program: Program) -> None:
    """Raise ShardingError where a program breaks one of the rules below."""
    program.graph.lint()
    has_placeholders(program)
    collectives_name_mesh_axes(program)
    if program.layouts:
        local_shapes_agree(program)


def has_placeholders(program: Program) -> None:
    """Every parameter and input has its placeholder."""
    found = {n.name for n in program.graph.nodes if n.op == "placeholder"}
    missing = [n for n in (*program.values, *program.inputs) if n not in found]
    if missing:
        raise ShardingError(
            message("check", "placeholders", str(missing), "a pass dropped them", "report this")
        )


def collectives_name_mesh_axes(program: Program) -> None:
    """Every collective runs over existing sub-axes of the mesh, in mesh order. The graph is one for
    all ranks, so each issues them in the same order."""
    axes = program.mesh.axes
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in CONVERSIONS:
            over = node.args[1]
            if [a for a in axes if a in over] != list(over):
                raise ShardingError(
                    message(
                        "check", node.name, f"over {over}", f"the mesh has {axes}", "report this"
                    )
                )


def local_shapes_agree(program: Program) -> None:
    """The graph runs, on tensors without values, for rank 0 at the captured sizes, and every result
    has the local shape that its dimensions and its layout say."""
    wrong = []
    try:
        for node, value in interpret(program):
            expected, shape = stated(program, node), getattr(value, "shape", None)
            if expected is not None and shape is not None and tuple(shape) != expected:
                place = module_path(node) or "the model"
                wrong.append(f"{node.name} in {place}: {tuple(shape)}, its layout says {expected}")
    except Misfit as error:
        wrong.append(f"{error.node.name} ({error.node.meta.get('origin')}): {str(error)[:200]}")
    if wrong:
        raise ShardingError(
            message(
                "check",
                f"{len(wrong)} results of rank 0",
                "\n    ".join(["", *wrong[:8]]),
                "the local graph and its layouts do not fit together",
                "report this model; a mesh without the axis that is named may work",
            )
        )
