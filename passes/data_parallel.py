"""data_parallel: samples over the data axes.

Requires: axes inferred. Gives: ``batch -> dp`` (and ``ep``) assigned; each rank feeds its own rows.
With pp, samples are cut in time too (``batch -> mb``): micro-batches are another data axis, of
which one rank has all positions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from autoshard.axes import Axis
from autoshard.chain import Pass
from autoshard.errors import MeshError, ShardingError, message
from autoshard.infer import batch_axes
from autoshard.mesh import DATA_AXES
from autoshard.program import Assignment, Program, shallow


@dataclass(frozen=True)
class DataParallel(Pass):
    """``microbatches``: in how many a stage of a pipeline takes its rows; None: it is chosen when
    rows are there."""

    name: ClassVar[str] = "data_parallel"
    assigns: ClassVar[bool] = True
    microbatches: int | None = None

    def __call__(self, program: Program) -> Program:
        program = shallow(program)
        found = batch_axes(program)
        if program.mesh.mesh.size("pp") > 1 and self.microbatches != 1:
            self._cut_in_time(program, found)
        over = tuple(m for m in program.mesh.axes if m.partition(".")[0] in DATA_AXES)
        if not over:
            return program
        ranks = program.mesh.size(over)
        if not found or any(axis.opaque for axis in found):
            raise ShardingError(
                message(
                    "data_parallel",
                    "the batch",
                    f"dim 0 of {', '.join(program.inputs.values())}",
                    "it has one row in example_inputs, so its size is fixed"
                    if not found
                    else "the model reshapes it in a way that mixes rows, or fixes their number "
                    "(len(x) does, x.shape[0] does not)",
                    "give example_inputs of two rows or more"
                    if not found
                    else f"drop {','.join(over)} from the mesh",
                )
            )
        for axis in found:
            if isinstance(axis.size, int) and axis.size % ranks:
                raise MeshError(
                    message(
                        "data_parallel",
                        "the batch",
                        f"{axis.size} rows over {','.join(over)} = {ranks} ranks",
                        "the captured batch has a fixed size, which the data axes do not divide",
                        f"use a multiple of {ranks} rows, or a smaller data axis",
                    )
                )
            program.assignments.append(
                Assignment(axis, over, 100, self.name, "samples are independent")
            )
        return program

    def _cut_in_time(self, program: Program, found: list[Axis]) -> None:
        """Have micro-batches, where the number of rows may change."""
        if found and not any(a.opaque or isinstance(a.size, int) for a in found):
            program.mesh = dataclasses.replace(program.mesh, microbatches=True)
            return
        why = "the number of rows is fixed in the graph"
        if self.microbatches is None:
            program.notes.append(f"pipeline: one micro-batch, as {why}")
            return
        raise ShardingError(
            message(
                "data_parallel",
                f"option microbatches={self.microbatches}",
                f"dim 0 of {', '.join(program.inputs.values())}",
                f"{why}: it has one row in example_inputs, or the model reshapes it in a way that "
                "mixes rows, or fixes their number (len(x) does, x.shape[0] does not)",
                "give example_inputs of two rows or more, or pass microbatches=1",
            )
        )
