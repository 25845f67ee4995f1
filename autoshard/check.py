"""What a legal Program is, as small named checks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autoshard.axes import Axis, Dim, leaves
from autoshard.collectives import CONVERSIONS, KINDS, LOCAL, Link, all_reduce_max
from autoshard.errors import ShardingError, message
from autoshard.layout import Layout, cut_axes, piece_bounds
from autoshard.mesh import DATA_AXES, SubMesh
from autoshard.program import Program, module_path
from autoshard.runtime import rng


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
    env: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            break
        expected = _expected(program, node)
        if node.op == "placeholder":
            value = node.meta.get("val")
            if expected is not None and isinstance(value, torch.Tensor):
                value = torch.empty(expected, dtype=value.dtype, device="meta")
            env[node] = value
            continue
        try:
            env[node] = _run(node, program.mesh, env)
        except NotImplementedError:  # its result's size depends on the data: nothing to compare
            return
        except Exception as error:  # whatever an op raises on shapes that do not fit
            text = str(error).split("\n")[0]
            wrong.append(f"{node.name} ({node.meta.get('origin')}): {text[:200]}")
            break
        shape = getattr(env[node], "shape", None)
        if expected is not None and shape is not None and tuple(shape) != expected:
            place = module_path(node) or "the model"
            wrong.append(f"{node.name} in {place}: {tuple(shape)}, its layout says {expected}")
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


def _expected(program: Program, node: fx.Node) -> tuple[int, ...] | None:
    dims, layout = program.dims.get(node), program.layouts.get(node)
    if not isinstance(dims, tuple) or not isinstance(layout, dict):
        return None
    sizes = [_size(program, dim, layout) for dim in dims]
    return None if None in sizes else tuple(sizes)  # type: ignore[arg-type]


def _size(program: Program, dim: Dim, layout: Layout) -> int | None:
    """Rank 0's size of a dimension at the captured sizes; None where that is not known."""
    sizes = [_axis_size(program, axis, layout) for axis in leaves(dim)]
    return None if None in sizes else math.prod(sizes)  # type: ignore[arg-type]


def _axis_size(program: Program, axis: Axis, layout: Layout) -> int | None:
    if axis.parts is not None:
        sizes = [_size(program, part, layout) for part in axis.parts]
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]
    by = cut_axes(layout, axis)
    size = axis.size
    if not isinstance(size, int):
        size = program.hints[size] if size in program.hints else size.subs(program.hints)
        if not isinstance(size, int) and not size.is_Integer:
            return None
        size = int(size)
        if by and all(m.partition(".")[0] in DATA_AXES for m in by):
            return size  # inputs are this rank's rows already
    return piece_bounds(size, program.mesh.size(by), 0)[1] if by else size


def _run(node: fx.Node, mesh: SubMesh, env: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
    target: Any = node.target
    if target in CONVERSIONS:
        return _converted(KINDS[CONVERSIONS[target]][0], mesh.size(args[1]), *args)
    if target is all_reduce_max:
        return args[0]
    if target in LOCAL:
        return target(args[0], Link(args[1], "", mesh.size(args[1]), 0))
    if target is rng.draw:
        target, args = args[0], args[2:]
    args = tuple("meta" if isinstance(a, torch.device) else a for a in args)
    kwargs = {k: "meta" if isinstance(v, torch.device) else v for k, v in kwargs.items()}
    with torch.no_grad():
        return target(*args, **kwargs)


def _converted(
    primitive: str, ranks: int, x: torch.Tensor, _: Any, dim: int = 0, size: int = 0
) -> torch.Tensor:
    """What a conversion makes of a shape."""
    if primitive in ("identity", "sum"):
        return x
    made = size if primitive == "gather" else piece_bounds(size, ranks, 0)[1]
    return x.new_empty(*x.shape[:dim], made, *x.shape[dim + 1 :])
