"""data_parallel: samples over the data axes.

Requires: axes inferred. Gives: ``batch -> dp`` (and ``ep``) assigned; each rank feeds its own rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autoshard.chain import Pass
from autoshard.errors import MeshError, ShardingError, message
from autoshard.infer import batch_axes
from autoshard.mesh import DATA_AXES
from autoshard.program import Assignment, Program, shallow


@dataclass(frozen=True)
class DataParallel(Pass):
    name: ClassVar[str] = "data_parallel"
    assigns: ClassVar[bool] = True

    def __call__(self, program: Program) -> Program:
        program = shallow(program)
        over = tuple(m for m in program.mesh.axes if m.partition(".")[0] in DATA_AXES)
        if not over:
            return program
        ranks = program.mesh.size(over)
        found = batch_axes(program)
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
