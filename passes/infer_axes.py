"""infer_axes: the logical dimensions of every tensor.

Requires: a canonical graph. Gives: ``program.dims`` and what every op's rule states
(``program.typings``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autoshard.chain import Pass
from autoshard.infer import infer_axes
from autoshard.program import Program, shallow


@dataclass(frozen=True)
class InferAxes(Pass):
    name: ClassVar[str] = "infer_axes"

    def __call__(self, program: Program) -> Program:
        program = shallow(program)
        program.dims = {}
        program.typings = infer_axes(program)
        return program
