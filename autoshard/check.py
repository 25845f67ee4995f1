"""What a legal Program is, as small named checks."""

from __future__ import annotations

from autoshard.collectives import CONVERSIONS
from autoshard.errors import ShardingError, message
from autoshard.program import Program


def check(program: Program) -> None:
    """Raise ShardingError where a program breaks one of the rules below."""
    program.graph.lint()
    has_placeholders(program)
    collectives_name_mesh_axes(program)


def has_placeholders(program: Program) -> None:
    """Every parameter and input has its placeholder."""
    found = {n.name for n in program.graph.nodes if n.op == "placeholder"}
    missing = [n for n in (*program.values, *program.inputs) if n not in found]
    if missing:
        raise ShardingError(
            message("check", "placeholders", str(missing), "a pass dropped them", "report this")
        )


def collectives_name_mesh_axes(program: Program) -> None:
    """Every collective runs over existing sub-axes of the mesh, in mesh order."""
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
