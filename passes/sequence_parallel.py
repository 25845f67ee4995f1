"""sequence_parallel: tokens over tp, wherever tp cuts nothing of higher priority.

Requires: axes inferred. Gives: ``sequence -> tp`` assigned at a lower priority than tensor
parallelism, so that norms, dropouts and residuals between its linears hold a slice of the tokens,
and the all-reduces become all-gathers and reduce-scatters (Korthikanti et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autoshard.chain import Pass
from autoshard.infer import sequence_axes
from autoshard.program import Assignment, Program, shallow


@dataclass(frozen=True)
class SequenceParallel(Pass):
    name: ClassVar[str] = "sequence_parallel"
    assigns: ClassVar[bool] = True
    axis: str = "tp"

    def __call__(self, program: Program) -> Program:
        program = shallow(program)
        over = tuple(part for part, _ in program.mesh.parts(self.axis))
        cut = [a for a in program.assignments if set(a.mesh_axes) & set(over)]
        if not over or not cut:
            return program
        for axis in sequence_axes(program):
            if not axis.opaque:
                program.assignments.append(
                    Assignment(axis, over, 1, self.name, "cut where no wider axis is")
                )
        return program
