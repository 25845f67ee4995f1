"""Pass, and running a chain of them: apply, check, time, keep what changed, wrap errors."""

from __future__ import annotations

import dataclasses
import time
from typing import ClassVar

from autoshard.check import check
from autoshard.cost import is_cut
from autoshard.errors import AutoshardError
from autoshard.program import Program


@dataclasses.dataclass(frozen=True)
class Pass:
    """A rewrite of a Program. Subclasses are frozen dataclasses whose fields are the options."""

    name: ClassVar[str] = ""

    def __call__(self, program: Program) -> Program:
        raise NotImplementedError

    def __str__(self) -> str:
        given = ", ".join(
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"{self.name}({given})" if given else self.name


def run(program: Program, passes: list[Pass]) -> Program:
    """Apply passes in order; the program is checked after each."""
    for position, step in enumerate(passes, 1):
        start = time.perf_counter()
        before = _counts(program)
        try:
            program = step(program)
            check(program)
        except AutoshardError as error:
            text = f"pass {position} of {len(passes)}, {step}: {error}"
            raise type(error)(text) from error
        words = [
            f"{what} {old} -> {new}"
            for (what, old), new in zip(before.items(), _counts(program).values(), strict=True)
            if old != new
        ]
        seconds = time.perf_counter() - start
        program.log.append((str(step), ", ".join(words) or "nothing", seconds))
    return program


def _counts(program: Program) -> dict[str, int]:
    """What the table of passes shows the change of."""
    return {
        "nodes": len(program.graph.nodes),
        "values with known axes": len(program.dims),
        "assignments": len(program.assignments),
        "collectives": len(program.conversions),
        "parameters cut": sum(is_cut(p.layout) for p in program.parameters().values()),
    }
