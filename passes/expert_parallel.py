"""expert_parallel: experts over ep, and their tokens over whatever cuts tokens.

Requires: axes inferred, after all other passes that assign. Gives: ``experts -> ep`` assigned, and
the tokens of an expert (see `autoshard.rules.experts`) to the mesh axes that cut the tokens they
are made of: to dp and cp, and to tp where it cuts nothing inside experts. Where `fuse_experts` has
found no experts ep stays an axis of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autoshard.axes import atoms
from autoshard.chain import Pass
from autoshard.experts import dispatches
from autoshard.program import Assignment, Program, shallow
from autoshard.rules.experts import experts_of, inner_axes, ragged_of


@dataclass(frozen=True)
class ExpertParallel(Pass):
    name: ClassVar[str] = "expert_parallel"  # of a second graph too: its tokens are other axes

    def __call__(self, program: Program) -> Program:
        program = shallow(program)
        found = dispatches(program.graph)
        over = tuple(m for m, _ in program.mesh.parts("ep"))
        cut = {id(a.axis) for a in program.assignments if a.strategy == self.name}
        for node in found:
            typing = program.typings[node]
            experts = experts_of(typing)
            takes = over if len(experts) == 1 and not experts[0].opaque else ()
            if takes and id(experts[0]) not in cut:
                reason = "each rank has some experts; tokens go to them and back"
                program.assignments.append(Assignment(experts[0], takes, 200, self.name, reason))
                cut.add(id(experts[0]))
            tokens = {id(a) for a in atoms(typing.out[-1][0])}
            inner = inner_axes(program.typings, node)
            taken = {m for a in program.assignments if id(a.axis) in inner for m in a.mesh_axes}
            names = {m.partition(".")[0] for m in taken}
            where = {m: a for a in program.assignments if id(a.axis) in tokens for m in a.mesh_axes}
            follows = [m for m in where if m not in takes and m.partition(".")[0] not in names]
            for m in follows if id(ragged_of(typing)) not in cut else ():
                program.assignments.append(
                    Assignment(
                        ragged_of(typing), (m,), where[m].priority, self.name, "as its tokens are"
                    )
                )
        left = list(dict.fromkeys(program.unfused))
        if over and (left or not cut):
            whose = "some" if cut else "no"
            program.notes.append(
                f"expert_parallel: {whose} experts are cut over ep, which carries samples in any "
                f"case: {'; '.join(left) or 'the model has none that is recognised'}"
            )
        return program
