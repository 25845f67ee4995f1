"""zero: parameters, gradients and optimizer states are shared out over the axes along
which parameters are replicated: the data axes and cp.

Requires: a partitioned graph. Gives: parameters of which each rank along the zero axes holds a
piece of dim 0, and a graph that gathers them, a segment at a time, one segment ahead of use.

    before:  h = linear(x, w1); ...; y = linear(h, w2)              w1, w2 in layers.0 and layers.1
    after:   g1 = start_gather([w1], dp); g2 = start_gather([w2], dp)
             v1 = wait_gather(g1); h = linear(x, v1); release(g1); ...
             v2 = wait_gather(g2); y = linear(h, v2)

The gradient of a `wait_gather` is the reduction of its weights' gradients. Stages differ in what is
kept: 1 keeps weights, and gradients whole until they are reduced; 2 keeps weights and reduces in
every backward (of a pipeline: in the last of a step); 3 keeps neither, and gathers weights in
forward and again in backward. See
Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autoshard.axes import atoms
from autoshard.chain import Pass
from autoshard.errors import ShardingError, message
from autoshard.layout import I, R
from autoshard.mesh import REPLICATING_AXES
from autoshard.program import STAGE, Conversion, Program, Unit, copied
from autoshard.rules.experts import EXPERTS
from autoshard.runtime.gather import slice_shape
from autoshard.runtime.sections import entries, trainable
from autoshard.runtime.zero import release, start_gather, wait_gather
from autoshard.segments import Segment, begins, segments

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Zero(Pass):
    """``stage``: 0 to 3. ``axes``: mesh axes to share out over (when None, all along which
    parameters are replicated). ``reshard``: stage 3 frees weights between forward and backward.
    ``reduce_dtype``: name of the type in which gradients are summed."""

    name: ClassVar[str] = "zero"
    stage: int = 1
    axes: tuple[str, ...] | None = None
    offload: bool = False
    reshard: bool = True
    reduce_dtype: str | None = None

    def __call__(self, program: Program) -> Program:
        program = copied(program)
        self._refuse_what_is_wrong(program)
        over = [
            m for m in program.mesh.axes if m.partition(".")[0] in (self.axes or REPLICATING_AXES)
        ]
        working = _working_types(program)
        program.offload = self.offload
        for key, parameter in program.parameters().items():
            shared = parameter.trainable or self.stage == 3 or working[key] != parameter.value.dtype
            if self.stage and shared and parameter.dims:
                parameter.zero = tuple(m for m in over if parameter.layout.get(m) in (I, R))
        moved = {
            key: working[key]
            for key, p in program.parameters().items()
            if p.zero or working[key] != p.value.dtype or self.offload
        }
        if moved:
            self._write(program, moved)
        self._tell_of_few_rows(program)
        return program

    def _tell_of_few_rows(self, program: Program) -> None:
        """Shards are pieces of dim 0: of few experts, the bulk of a model, some ranks get none."""
        mesh, few = program.mesh, dict[tuple[str, int], list[str]]()
        for parameter in program.parameters().values():
            ranks = mesh.size(parameter.zero)
            rows = (slice_shape(parameter, mesh, 0) or (ranks,))[0]
            experts = any(a.role == EXPERTS for dim in parameter.dims[:1] for a in atoms(dim))
            if experts and rows < ranks:
                few.setdefault((",".join(parameter.zero), rows), []).append(parameter.name)
        for (axes, rows), names in few.items():
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            program.notes.append(
                f"zero: {', '.join(names[:2])}{more} have {rows} in dim 0, for "
                f"{mesh.size(tuple(axes.split(',')))} ranks of {axes}: the others hold none of them"
            )

    def _refuse_what_is_wrong(self, program: Program) -> None:
        wrong = []
        if self.stage not in STAGES:
            wrong.append(f"stage {self.stage!r} is none of {', '.join(map(str, STAGES))}")
        wrong += [
            f"axis {name!r} is no axis of the mesh that replicates parameters"
            for name in self.axes or ()
            if name not in REPLICATING_AXES or name not in program.mesh.mesh.names
        ]
        if self.reduce_dtype is not None and not isinstance(
            getattr(torch, self.reduce_dtype, None), torch.dtype
        ):
            wrong.append(f"{self.reduce_dtype!r} is no torch.dtype")
        if wrong:
            raise ShardingError(
                message(
                    "zero",
                    "; ".join(wrong),
                    f"mesh {program.mesh.mesh}",
                    f"stages are {', '.join(map(str, STAGES))}, "
                    f"axes of {', '.join(REPLICATING_AXES)}",
                    "change zero=, zero_axes= or reduce_dtype=",
                )
            )

    def _keeps(self, program: Program) -> bool:
        return self.stage < 3 or self._for_step(program)

    def _for_step(self, program: Program) -> bool:
        """Whether stage 3 keeps weights for all micro-batches of a step."""
        return self.stage == 3 and not self.reshard and program.pipeline is not None

    def _write(self, program: Program, moved: dict[str, torch.dtype]) -> None:
        """Make the units, and put their calls into the graph."""
        keeps, parts = self._keeps(program), segments(program.graph)
        place = {node: i for i, part in enumerate(parts) for node in part.nodes}
        first = {node: i for i, node in enumerate(program.graph.nodes)}
        # segment, and stage of a pipeline -> parameter -> who reads it
        readers: dict[tuple[int, int], dict[str, list[fx.Node]]] = {}
        for node in program.graph.find_nodes(op="placeholder"):
            if node.name in moved:
                users = sorted(node.users, key=first.__getitem__)
                early: dict[int, fx.Node] = {}  # the first one in each stage of a pipeline
                for user in users:
                    early.setdefault(user.meta.get(STAGE, 0), user)
                for user in users:
                    stage = user.meta.get(STAGE, 0)
                    at = place[early[stage] if keeps else user], stage
                    readers.setdefault(at, {}).setdefault(node.name, []).append(user)
        shards = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
        order = sorted(readers)
        made = [self._units(program, parts[at[0]], at, readers[at], moved) for at in order]
        # before which node the weights of a segment are waited for: a block as a whole
        waits = [
            begins(parts[at[0]])
            if parts[at[0]].block
            else min((n for users in readers[at].values() for n in users), key=first.__getitem__)
            for at in order
        ]
        started: dict[str, fx.Node] = {}
        for i, (at, units) in enumerate(zip(order, made, strict=True)):
            segment_reads = readers[at]
            with program.graph.inserting_before(waits[i]):
                if i == 0:
                    self._start(program, units, shards, started)
                if i + 1 < len(made):  # it sets out when this segment's have arrived
                    self._start(program, made[i + 1], shards, started)
                for unit in units:
                    wait = _wait(program, unit, started[unit.name], shards, segment_reads)
                    _note_collectives(program, unit, started[unit.name], wait)
            # the last one is about to be read by backward, but for a pipeline's other micro-batches
            last = i + 1 == len(order) and program.pipeline is None
            if not keeps and self.reshard and not last:
                end = parts[at[0]].nodes[-1]
                graph = program.graph
                behind = graph.inserting_before if end.op == "output" else graph.inserting_after
                with behind(end):
                    for unit in units:
                        call = (started[unit.name], unit.axes, unit.name)
                        freed = program.graph.call_function(release, call)
                        _place_as(waits[i], freed)

    def _start(
        self,
        program: Program,
        units: list[Unit],
        shards: dict[str, fx.Node],
        started: dict[str, fx.Node],
    ) -> None:
        for unit in units:
            call = ([shards[key] for key in unit.keys], unit.axes, unit.name)
            started[unit.name] = program.graph.call_function(start_gather, call)

    def _units(
        self,
        program: Program,
        part: Segment,
        at: tuple[int, int],
        readers: dict[str, list[fx.Node]],
        moved: dict[str, torch.dtype],
    ) -> list[Unit]:
        """The units of a segment: one a set of axes and type, so one in most."""
        kinds: dict[Any, list[str]] = {}
        for key in readers:
            kinds.setdefault((program.values[key].zero, moved[key]), []).append(key)
        found: list[Unit] = []
        for (axes, dtype), keys in kinds.items():
            plain = part.name if part.block else _modules_of(program, keys)
            name, count = plain, 1
            while name in program.units:  # a block called twice, or with parameters of two kinds
                count += 1
                name = f"{plain} ({count})"
            unit = program.units[name] = Unit(
                name,
                tuple(keys),
                axes,
                dtype,
                getattr(torch, self.reduce_dtype) if self.reduce_dtype else None,
                self._keeps(program),
                self.stage < 2 or (self._keeps(program) and program.pipeline is not None),
                *at,
                self._for_step(program),
            )
            found.append(unit)
        return found


def _working_types(program: Program) -> dict[str, torch.dtype]:
    """Of every parameter the type that the graph was captured with."""
    return {
        n.name: n.meta["val"].dtype
        for n in program.graph.find_nodes(op="placeholder")
        if n.name in program.values
    }


def _wait(
    program: Program,
    unit: Unit,
    start: fx.Node,
    known: dict[str, fx.Node],
    readers: dict[str, list[fx.Node]],
) -> fx.Node:
    """The weights of a unit, and those who read its parameters read them."""
    shards, graph = [known[key] for key in unit.keys], program.graph
    weights = graph.call_function(wait_gather, (start, unit.axes, unit.name, shards))
    _place_as(readers[unit.keys[0]][0], weights)
    for i, shard in enumerate(shards):
        weight = graph.call_function(operator.getitem, (weights, i))
        weight.meta.update(val=shard.meta["val"], origin=shard.name)
        _place_as(readers[shard.name][0], weight)
        program.dims[weight] = program.dims[shard]
        program.layouts[weight] = program.layouts[shard]
        for user in readers[shard.name]:
            user.replace_input_with(shard, weight)
    return weights


def _place_as(reader: fx.Node, node: fx.Node) -> None:
    """A node stands in the module of one that reads it."""
    if "nn_module_stack" in reader.meta:
        node.meta["nn_module_stack"] = reader.meta["nn_module_stack"]


#: How many modules the name of a unit that is no block lists.
NAMED = 3


def _modules_of(program: Program, keys: list[str]) -> str:
    """The modules that parameters are of."""
    paths = [program.values[key].name.rpartition(".")[0] or "the model" for key in keys]
    found = list(dict.fromkeys(paths))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


def _note_collectives(program: Program, unit: Unit, start: fx.Node, wait: fx.Node) -> None:
    """What the tables show of a unit; sizes are those of rank 0."""
    found = entries(unit, program, 0)
    ranks = program.mesh.size(unit.axes)
    kind = program.values[unit.keys[0]].value.dtype
    reduced = (unit.reduce_dtype or kind).itemsize

    def note(kind: str, node: fx.Node, axes: Any, why: str, numel: int, itemsize: int) -> None:
        if numel and axes:
            made = Conversion(kind, node.name, unit.name, axes, why, numel, itemsize, True)
            program.conversions.append(made)

    section = sum(e.numel for e in found)
    note("start_gather", start, unit.axes, f"weights {unit.name}", section, unit.dtype.itemsize)
    summed = trainable(found)
    why, flat = f"gradients {unit.name}", ranks * sum(e.numel for e in summed)
    note("wait_gather", wait, unit.axes, why, flat, reduced)
    for axes in dict.fromkeys(e.after for e in summed):
        numel = sum(e.numel for e in summed if e.after == axes)
        note("sum_gradients", wait, axes, why, numel, reduced)
    for entry in summed:
        for at, _, length, axes in entry.before:
            numel = math.prod(entry.shape) // entry.shape[at] * length
            note("sum_gradients", wait, axes, why, numel, reduced)
