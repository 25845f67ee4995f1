"""Pass, and running a chain of them: apply, check, time, keep what changed, wrap errors."""

from __future__ import annotations

import dataclasses
import time
from typing import ClassVar

from autoshard.check import check
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
        before = (len(program.graph.nodes), len(program.assignments), len(program.conversions))
        try:
            program = step(program)
            check(program)
        except AutoshardError as error:
            text = f"pass {position} of {len(passes)}, {step}: {error}"
            raise type(error)(text) from error
        after = (len(program.graph.nodes), len(program.assignments), len(program.conversions))
        words = [
            f"{what} {a} -> {b}"
            for what, a, b in zip(
                ("nodes", "assignments", "collectives"), before, after, strict=True
            )
            if a != b
        ]
        program.log.append((str(step), ", ".join(words) or "nothing", time.perf_counter() - start))
    return program
