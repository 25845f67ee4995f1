"""Rows: those that were captured, those of one rank, and those of one micro-batch.

Closed forms of a program are in the rows of one rank. On a mesh with pp most things happen once a
micro-batch, with a part of these rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from autoshard.axes import atoms
from autoshard.program import Program


def batch_sizes(program: Program) -> list[Any]:
    """The dynamic sizes that count samples."""
    found = (
        axis.size
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in program.inputs  # no parameter has samples
        for dim in program.dims.get(node, ())
        for axis in atoms(dim)
        if axis.role == "batch" and not isinstance(axis.size, int)
    )
    return list(dict.fromkeys(found))


def data_ranks(program: Program) -> int:
    """Ranks among which the samples of a global batch are shared out."""
    over = {m for a in program.assignments if a.axis.role == "batch" for m in a.mesh_axes}
    return program.mesh.size(tuple(m for m in program.mesh.axes if m in over))


def own_sizes(program: Program) -> dict[Any, int]:
    """The captured sizes, of samples as many as one rank has: on a live mesh its own were captured,
    else those of all."""
    ranks = 1 if program.mesh.mesh.device_mesh is not None else data_ranks(program)
    sizes = dict(program.hints)
    return sizes | {s: -(-sizes[s] // ranks) for s in batch_sizes(program) if s in sizes}


def microbatch_count(program: Program) -> int:
    """In how many micro-batches a rank's captured rows go through the stages; 1 without pp."""
    if program.pipeline is None:
        return 1
    sizes = own_sizes(program)
    rows = [sizes[s] for s in batch_sizes(program) if s in sizes]
    return program.pipeline.count(rows[0] if rows and program.mesh.microbatches else 1)


def of_microbatch(program: Program, count: int | None = None) -> dict[Any, int]:
    """The captured sizes, of samples as many as the largest of ``count`` micro-batches has."""
    count, sizes = count or microbatch_count(program), own_sizes(program)
    return sizes | {s: -(-sizes[s] // count) for s in batch_sizes(program) if s in sizes}


def captured_with(program: Program, sizes: dict[Any, int]) -> Program:
    """The program as if these sizes had been captured; graph and all else are shared."""
    return dataclasses.replace(program, hints=sizes)


def each(program: Program, form: Any, count: int) -> Any:
    """A closed form in a rank's rows, of the rows of one of so many micro-batches."""
    if isinstance(form, int) or count == 1:
        return form
    return form.xreplace({s: s / count for s in batch_sizes(program)})
