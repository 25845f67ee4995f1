"""Pass, and running a chain of them: apply, check, time, keep what changed, wrap errors."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, ClassVar

from autoshard.axes import Axis, Dim, leaves
from autoshard.check import check
from autoshard.cost import is_cut
from autoshard.errors import AutoshardError
from autoshard.outline import RECOMPUTE
from autoshard.program import Program, module_path, shallow
from autoshard.progress import say


@dataclasses.dataclass(frozen=True)
class Pass:
    """A rewrite of a Program. Subclasses are frozen dataclasses whose fields are the options.

    ``assigns``: it only gives axes to mesh axes. Where two graphs of a model share their
    parameters, the second takes the assignments of the first in place of such passes.
    """

    name: ClassVar[str] = ""
    assigns: ClassVar[bool] = False

    def __call__(self, program: Program) -> Program:
        raise NotImplementedError

    def __str__(self) -> str:
        given = ", ".join(
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"{self.name}({given})" if given else self.name


def run(program: Program, passes: list[Pass], like: Program | None = None) -> Program:
    """Apply passes in order; the program is checked after each. ``like``: another program of the
    same model, partitioned already, whose assignments this one takes."""
    for position, step in enumerate(passes, 1):
        say(f"pass {position} of {len(passes)}, {step}")
        start = time.perf_counter()
        before = _counts(program)
        try:
            program = adopt(program, like) if like and step.assigns else step(program)
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
        "stages": program.pipeline.stages if program.pipeline is not None else 1,
        "parameters cut": sum(is_cut(p.layout) for p in program.parameters().values()),
        "blocks recomputed": len({b for n in program.graph.nodes if (b := n.meta.get(RECOMPUTE))}),
        "nodes recomputed": sum(RECOMPUTE in n.meta for n in program.graph.nodes),
    }


def adopt(program: Program, like: Program) -> Program:
    """The program with the assignments of another graph of the same model, axis by axis: axes are
    matched where parameters, inputs and the ops of a module correspond."""
    program = shallow(program)
    axes = _matching_axes(like, program)
    program.mesh, program.stages = like.mesh, like.stages
    program.holders = {p.name: p.holders for p in like.values.values() if not p.constant}
    program.assignments = [
        dataclasses.replace(a, axis=axes[id(a.axis)])
        for a in like.assignments
        if id(a.axis) in axes
    ]
    return program


def _matching_axes(like: Program, program: Program) -> dict[int, Axis]:
    found: dict[int, Axis] = {}
    ours = {p.name: p for p in program.values.values()}
    for parameter in like.values.values():
        if parameter.name in ours:
            _match(parameter.dims, ours[parameter.name].dims, found)
    theirs, own = _dims_by_place(like), _dims_by_place(program)
    for place, all_dims in theirs.items():
        if len(all_dims) == len(own.get(place, ())):
            for one, other in zip(all_dims, own[place], strict=True):
                _match(one, other, found)
    return found


def _dims_by_place(program: Program) -> dict[Any, list[tuple[Dim, ...]]]:
    """Dimensions of the inputs, and of the results of every op of a kind in a module, in order."""
    out: dict[Any, list[tuple[Dim, ...]]] = {}
    for node, dims in program.dims.items():
        if node.op == "placeholder" and node.name in program.inputs:
            out["input", program.inputs[node.name]] = [dims]
    for node, typing in program.typings.items():
        results = typing.out if isinstance(typing.out, list) else [typing.out]
        out.setdefault((module_path(node), str(node.target)), []).extend(results)
    return out


def _match(one: tuple[Dim, ...], other: tuple[Dim, ...], found: dict[int, Axis]) -> None:
    for a, b in zip(one, other, strict=False):
        mine, yours = leaves(a), leaves(b)
        sizes = [(x.size, y.size) for x, y in zip(mine, yours, strict=False)]
        whole = [s for s in sizes if isinstance(s[0], int) and isinstance(s[1], int)]
        if len(mine) != len(yours) or any(x != y for x, y in whole):
            continue
        for x, y in zip(mine, yours, strict=True):
            found.setdefault(id(x), y)
            if x.parts is not None and y.parts is not None and len(x.parts) == len(y.parts):
                _match(x.parts, y.parts, found)
