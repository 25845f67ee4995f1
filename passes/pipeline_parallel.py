"""pipeline_parallel: layers over pp.

Requires: a partitioned graph; runs before `zero`. Gives: every node that is computed once has a
stage in ``node.meta["stage"]``; parameters know the positions along pp that hold them;
``program.pipeline`` says how stages lie on ranks and in which order they run. The graph stays one:
`autoshard.pipeline` makes of it what each stage runs.

    before:  h = linear(x, w1); y = linear(h, w2)               pp=2
    after:   h = linear(x, w1) in stage 0; y = linear(h, w2) in stage 1, which receives h

What depends on inputs and constants only (masks, positions, tables of angles) has no stage: each
computes what it needs. What is made of parameters alone is made in every stage that reads it. Sums
over micro-batches become `runtime.turns.total`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autoshard import collectives, stages
from autoshard.chain import Pass
from autoshard.collectives import CONVERSIONS, TABLE
from autoshard.errors import ShardingError, message
from autoshard.mesh import MICROBATCHES
from autoshard.outline import draws
from autoshard.pipeline import (
    Pipeline,
    joint,
    sums_behind,
    sums_of,
    told,
    waiting,
    waits_for_all,
)
from autoshard.program import STAGE, Parameter, Program, copied, module_path, shallow
from autoshard.runtime import rng, turns
from autoshard.runtime.dispatch import to_experts
from autoshard.schedule import NAMES, chunks_of, schedule

aten = torch.ops.aten

#: Which ranks a forward may give its outputs on: all, or those of the last stage.
OUTPUTS = ("all", "last")


@dataclass(frozen=True)
class PipelineParallel(Pass):
    """``schedule``: the order in which ranks run their stages; ``microbatches``: how many (None:
    chosen when rows are there); ``stages``: the layout in text, as `autoshard.stages.parse` reads
    it (None: balanced); ``chunks``: stages a rank (None: as the schedule has it); ``outputs``: on
    which ranks a forward gives them, "all" or those of the "last" stage."""

    name: ClassVar[str] = "pipeline_parallel"
    schedule: str = "1f1b"
    microbatches: int | None = None
    stages: str | None = None
    chunks: int | None = None
    outputs: str = "all"

    def __call__(self, program: Program) -> Program:
        ranks = program.mesh.mesh.size("pp")
        self._refuse_what_is_wrong(program)
        if ranks == 1:
            return self._without_effect(program)
        marked = self._marked(program, ranks)
        if not program.mesh.microbatches:
            return marked
        late = self.schedule == "gpipe"  # backward begins when all forwards are done
        if found := waiting(marked, layers=self.microbatches is None and not late):
            if self.microbatches is not None:
                raise waits_for_all(found, len(marked.pipeline.place))
            marked = self._marked(program, ranks, one=True)
            behind = told(sums_behind(found))
            marked.notes.append(
                f"pipeline: one micro-batch, as layers behind {behind} need all rows"
            )
        elif marked.loss is not None and not late and (breaks := joint(marked)):
            raise self._joint(breaks)
        return marked

    def _without_effect(self, program: Program) -> Program:
        """On a mesh without pp: the same script may be run with and without."""
        given = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        if given:
            program = shallow(program)
            texts = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in given)
            program.notes.append(f"pipeline: the mesh has no pp, so {texts} has no effect")
        return program

    def _marked(self, program: Program, ranks: int, one: bool = False) -> Program:
        """The program in stages; ``one``: of one micro-batch, whatever rows there are."""
        program = copied(program)
        _sum_over_turns(program)
        if one:
            _drop_sums(program)
        place = schedule(self.schedule, ranks, ranks, self.chunks).place
        found = stages.parts(program, len(place))
        text = program.stages or self.stages
        if text is None:
            text = stages.write(found, stages.balanced(found, len(place)))
        of_part = stages.parse(text, found, len(place))
        program.stages = text
        program.pipeline = Pipeline(
            self.schedule,
            place,
            1 if one or not program.mesh.microbatches else self.microbatches,
            self.outputs,
            tuple(found),
            tuple(of_part),
        )
        Marker(program).run()
        return program

    def _joint(self, breaks: str) -> ShardingError:
        count = "chosen from the rows" if self.microbatches is None else self.microbatches
        return ShardingError(
            message(
                "pipeline_parallel",
                f"the loss: {breaks}",
                f"schedule={self.schedule!r}, microbatches {count}",
                "there it stops being a sum over micro-batches (a product of two such sums is"
                " none), so no backward may begin before all forwards are done",
                'pass schedule="gpipe", which runs all forwards first, or microbatches=1',
            )
        )

    def _refuse_what_is_wrong(self, program: Program) -> None:
        wrong = []
        if self.schedule not in NAMES:
            wrong.append(f"schedule={self.schedule!r} is none of {', '.join(map(repr, NAMES))}")
        elif self.chunks is not None and chunks_of(self.schedule, self.chunks) != self.chunks:
            wrong.append(f"chunks={self.chunks!r} with schedule={self.schedule!r}")
        count = self.microbatches
        if count is not None and (type(count) is not int or count < 1):
            wrong.append(f"microbatches={count!r} is no positive integer")
        if self.stages is not None and not isinstance(self.stages, str):
            wrong.append(f'stages={self.stages!r} is no text as "embed,layers.0-3|layers.4-7,head"')
        if self.outputs not in OUTPUTS:
            wrong.append(f"outputs={self.outputs!r} is none of {', '.join(map(repr, OUTPUTS))}")
        if wrong:
            raise ShardingError(
                message(
                    "pipeline_parallel",
                    "; ".join(wrong),
                    f"mesh {program.mesh.mesh}",
                    "they say in which order the stages along pp run, and what is in them",
                    'write them as in schedule="1f1b", microbatches=8, outputs="last", or leave '
                    "them out",
                )
            )


#: Conversions that send nothing over micro-batches: each has its own copy already.
_OWN_COPY = ("replicate", "invariant")


def _drop_sums(program: Program) -> None:
    """Of one micro-batch, sums over micro-batches are their summands."""
    for node in list(program.graph.nodes):
        if node.target is turns.peak:
            node.target = aten.detach.default
        elif node.target is turns.total:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)


def _sum_over_turns(program: Program) -> None:
    """What runs over ranks and micro-batches runs over micro-batches first, then over ranks."""
    if not program.mesh.microbatches:
        return
    graph = program.graph
    for node in list(graph.nodes):
        over = node.args[1] if node.op == "call_function" and len(node.args) > 1 else ()
        if not isinstance(over, tuple) or MICROBATCHES not in over or node.target is rng.draw:
            continue
        kind = CONVERSIONS.get(node.target, "")
        if node.target is collectives.all_reduce_max:
            inner: Any = turns.peak
        elif kind in TABLE and TABLE[kind].forward == "sum":
            inner = turns.total
        elif kind == "once":
            inner = turns.in_first
        elif kind in _OWN_COPY:
            inner = None
        else:
            raise ShardingError(
                message(
                    f"pipeline_parallel {module_path(node)}".strip(),
                    f"{node.name}, {getattr(node.target, '__name__', node.target)}",
                    f"over {','.join(over)}",
                    "it reads rows of other micro-batches in another way than a sum",
                    "pass microbatches=1",
                )
            )
        rest = tuple(m for m in over if m != MICROBATCHES)
        if inner is not None:
            with graph.inserting_before(node):
                made = graph.call_function(inner, (node.args[0],))
            made.meta.update(node.meta)
            for known in (program.dims, program.layouts):
                if node in known:
                    known[made] = known[node]
            node.update_arg(0, made)
        if rest:
            node.update_arg(1, rest)
        else:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    conversions = []
    for conversion in program.conversions:
        rest = tuple(m for m in conversion.axes if m != MICROBATCHES)
        if rest:
            conversions.append(dataclasses.replace(conversion, axes=rest))
    program.conversions = conversions
    for parameter in program.values.values():
        if MICROBATCHES in parameter.layout:
            parameter.layout = {**parameter.layout, MICROBATCHES: "I"}


class Marker:
    """Gives nodes their stages, and parameters their holders."""

    def __init__(self, program: Program):
        self.program, self.graph = program, program.graph
        self.place = program.pipeline.place
        #: depends on inputs and constants only; of these, on no input; made of parameters alone
        self.free: set[fx.Node] = set()
        self.constant: set[fx.Node] = set()
        self.weight: set[fx.Node] = set()
        of_name = program.pipeline.stage_of_nodes()
        self.at = {n: of_name[n.name] for n in self.graph.nodes if n.op != "placeholder"}

    @property
    def _results(self) -> Any:
        return next(n for n in self.graph.nodes if n.op == "output").args[0]

    def run(self) -> None:
        for node in self.graph.nodes:
            self._classify(node)
        outside = self.free | self.weight
        for node in self.graph.nodes:
            if node.op == "call_function" and node not in outside:
                node.meta[STAGE] = self._stage_of(node)
        self._bring_sums_together()
        for node in reversed(list(self.graph.nodes)):
            if node in self.weight and node.op == "call_function":
                self._in_every_stage(node)
        self._give_to_holders()
        for node in self.graph.find_nodes(op="call_function", target=to_experts):
            known = self.program.mixtures
            position = self.place[node.meta[STAGE]]
            known[node.args[5]] = dataclasses.replace(known[node.args[5]], position=position)

    def _classify(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            parameter = self.program.values.get(node.name)
            if parameter is None:
                self.free.add(node)
            elif not parameter.buffer:
                self.weight.add(node)
            elif node.name not in self.program.buffer_updates and not self._held_before(parameter):
                self.free.add(node)
                self.constant.add(node)
        elif node.op == "call_function" and not draws(node):
            read = set(node.all_input_nodes)
            if read <= self.free:
                self.free.add(node)
                if read <= self.constant:
                    self.constant.add(node)
            elif all(n in self.weight or n in self.constant for n in read):
                self.weight.add(node)

    def _stage_of(self, node: fx.Node) -> int:
        """A part of what an op gives stands where the op does, and what is of no module (the form
        that a result is given in) where the last of what it reads is made."""
        if node.target is operator.getitem or not node.meta.get("nn_module_stack"):
            stages = [n.meta[STAGE] for n in node.all_input_nodes if STAGE in n.meta]
            return max(stages, default=self.at[node])
        return self.at[node]

    def _bring_sums_together(self) -> None:
        """What is made of all micro-batches is made where the last reader of it is: layers before
        need not wait for it. It reads no parameter itself, so that every gradient comes out of the
        part of a stage that runs once a micro-batch."""
        updates = {self._results[at] for at in self.program.buffer_updates.values()}
        late = sums_of(
            self.program, self.graph, [n for n in self.graph.nodes if STAGE in n.meta]
        ).late
        for node in reversed(self.graph.nodes):
            if node not in late:
                continue
            stages = [user.meta[STAGE] for user in node.users if user in late]
            if stages and node not in updates:
                node.meta[STAGE] = max(stages)
            for read in node.all_input_nodes:
                if read.op == "placeholder" and read in self.weight:
                    self._read_as_alias(node, read)

    def _read_as_alias(self, node: fx.Node, parameter: fx.Node) -> None:
        with self.graph.inserting_before(node):
            made = self.graph.call_function(aten.alias.default, (parameter,))
        made.meta.update({k: v for k, v in node.meta.items() if k != STAGE})
        self.at[made] = self.at[node]
        self.weight.add(made)
        for known in (self.program.dims, self.program.layouts):
            known[made] = known[parameter]
        node.replace_input_with(parameter, made)

    def _held_before(self, parameter: Parameter) -> tuple[int, ...] | None:
        """The only positions that hold a parameter in the other graph of the model, if it has been
        there first: those of readers in this one may be fewer."""
        return self.program.holders.get(parameter.name)

    def _in_every_stage(self, node: fx.Node) -> None:
        """What is made of parameters is made where it is read, once in each stage."""
        readers: dict[int, list[fx.Node]] = {}
        for user in node.users:
            readers.setdefault(user.meta.get(STAGE, self.at[node]), []).append(user)
        first, *others = sorted(readers) or [self.at[node]]
        node.meta[STAGE] = first
        for stage in others:
            with self.graph.inserting_after(node):
                copy = self.graph.node_copy(node)
            copy.meta[STAGE] = stage
            self.weight.add(copy)
            for known in (self.program.dims, self.program.layouts):
                if node in known:
                    known[copy] = known[node]
            for user in readers[stage]:
                user.replace_input_with(node, copy)

    def _give_to_holders(self) -> None:
        """A parameter is held where it is read; so is a buffer that is written."""
        updates = self.program.buffer_updates
        for node in self.graph.find_nodes(op="placeholder"):
            parameter = self.program.values.get(node.name)
            if parameter is None:
                continue
            before = self._held_before(parameter)
            if parameter.buffer and node.name not in updates and before is None:
                continue
            stages = {user.meta[STAGE] for user in node.users if STAGE in user.meta}
            if node.name in updates:
                stages = self._of_update(node, stages, self._results[updates[node.name]])
            found = {self.place[s] for s in stages}
            if before is not None and found <= {*before}:
                found = {*before}
            parameter.holders = tuple(sorted(found)) or (0,)

    def _of_update(self, node: fx.Node, readers: Iterable[int], new: fx.Node) -> set[int]:
        """The stage in which a buffer is read and written."""
        found = {*readers, *([new.meta[STAGE]] if STAGE in new.meta else [])}
        if len(found) > 1:
            raise ShardingError(
                message(
                    "pipeline_parallel",
                    f"buffer {self.program.values[node.name].name}",
                    f"read or written in stages {', '.join(map(str, sorted(found)))}",
                    "one stage would go on with a copy that another one has written",
                    "use it in one layer only, or cut the stages with stages= so that it is in one",
                )
            )
        return found
