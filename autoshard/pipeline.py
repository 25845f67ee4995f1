"""From a graph whose nodes have stages to what each stage runs.

A step runs three graphs a stage. *before*: what the micro-batches need of each other and of inputs
alone (how many tokens count), once, on all of them in lockstep. *body*: the stage itself, once a
micro-batch. *after*: what sums over micro-batches make of what the bodies gave (the loss, statistics
that buffers keep), once, in lockstep.

Values that a body needs of an earlier stage travel straight from the stage that makes them to each
that reads them, however many stages lie between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.axes import Axis, atoms
from autoshard.errors import ShardingError, message
from autoshard.collectives import CONVERSIONS, TABLE
from autoshard.layout import piece_bounds
from autoshard.mesh import MICROBATCHES
from autoshard.objective import loss_graph
from autoshard.program import STAGE, Program, module_path, tensor_results
from autoshard.runtime.turns import OVER_ALL, total
from autoshard.runtime.zero import release, start_gather, wait_gather
from autoshard.schedule import Schedule, schedule


@dataclass(frozen=True)
class Pipeline:
    """How a program is laid out over pp. ``place``: of every stage the position along pp;
    ``microbatches``: how many (None: the largest divisor of a rank's rows up to four a rank of pp);
    ``parts``: of every stage what is in it, to show."""

    schedule: str
    place: tuple[int, ...]
    microbatches: int | None
    parts: tuple[tuple[str, ...], ...] = ()

    @property
    def ranks(self) -> int:
        return max(self.place) + 1

    @property
    def stages(self) -> int:
        return len(self.place)

    def of_position(self, position: int) -> list[int]:
        """The stages at a position along pp."""
        return [s for s, p in enumerate(self.place) if p == position]

    def scheduled(self, microbatches: int) -> Schedule:
        """The order in which ranks run their stages for so many micro-batches."""
        chunks = self.stages // self.ranks
        return schedule(self.schedule, self.ranks, microbatches, chunks)

    def count(self, rows: int) -> int:
        """How many micro-batches so many rows of a rank make."""
        return self.microbatches or self.most(rows)

    def most(self, rows: int) -> int:
        """How many micro-batches to make of so many rows of a rank, when nothing says."""
        return max(m for m in range(1, min(rows, 4 * self.ranks) + 1) if rows % m == 0)


@dataclass
class Piece:
    """A graph that a stage runs. ``takes``: what its placeholders are, and ``gives``: what its
    results are, by name of a node of the whole graph."""

    graph: fx.Graph
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass
class Stage:
    """What one stage runs. ``receives``: of every stage that sends it something, the values;
    ``sends``: of every stage that it sends something; ``returns``: of these the ones of which a
    gradient may come back."""

    before: Piece
    body: Piece
    after: Piece
    receives: dict[int, tuple[str, ...]]
    sends: dict[int, tuple[str, ...]]
    returns: dict[int, tuple[str, ...]]

    @property
    def pieces(self) -> tuple[Piece, Piece, Piece]:
        return self.before, self.body, self.after


@dataclass
class Plan:
    """What the stages run of one graph. ``results``: names of the graph's results; ``made``: of
    each the stage that has it (None: every one); ``late``: those that are made of all micro-batches
    at once.

    Of a graph run for its loss, ``seed`` names what backward starts from in every micro-batch: what
    each adds to the loss. ``once``: only the first one starts from it, as no rows are in it.
    ``joint``: the loss is no sum over micro-batches (``seed`` is the loss itself): backward starts
    when all forwards are done.
    """

    stages: list[Stage]
    results: tuple[str, ...]
    made: dict[str, int | None]
    late: frozenset[str]
    seed: str = ""
    once: bool = False
    joint: bool = False

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Which stages send something to which later ones."""
        return [(at, to) for at, stage in enumerate(self.stages) for to in stage.sends]


def plan(program: Program, graph: fx.Graph, for_loss: bool) -> Plan:
    """What the stages run of a graph: that of the program, or `emit.loss_graph` of it. Raises
    ShardingError by name where a stage needs all micro-batches of an earlier one."""
    return Planner(program, graph, for_loss).plan()


class Planner:
    """Cuts one graph. ``early``: sums over micro-batches of what depends on inputs alone; ``late``:
    those of other things, and all that is made of them."""

    def __init__(self, program: Program, graph: fx.Graph, for_loss: bool):
        assert program.pipeline is not None
        self.program, self.graph, self.for_loss = program, graph, for_loss
        self.count = program.pipeline.stages
        self.outputs = list(next(n for n in graph.nodes if n.op == "output").args[0])
        self.nodes = [n for n in graph.nodes if n.op == "call_function"]
        self.stage = {n: s for n in self.nodes if (s := self._stage(n)) is not None}
        self.trained = self._trained() if for_loss else set()
        self.early: set[fx.Node] = set()
        self.late: set[fx.Node] = set()
        for node in self.nodes:
            if not self.late.isdisjoint(node.all_input_nodes):
                self.late.add(node)
            elif node.target in OVER_ALL:
                (self.late if node in self.stage else self.early).add(node)

    def _stage(self, node: fx.Node) -> int | None:
        if node.target in (start_gather, wait_gather, release):
            return self.program.units[node.args[2]].stage  # type: ignore[index]
        return node.meta.get(STAGE)

    def plan(self) -> Plan:
        self._refuse_late_in_the_middle()
        # results of inputs alone, which no stage has: the last one makes them
        self.stage |= {n: self.count - 1 for n in self.outputs if self._is_left(n)}
        wanted: list[dict[fx.Node, None]] = [{} for _ in range(self.count)]
        crossing: dict[tuple[int, int], dict[fx.Node, None]] = {}
        for node in self.nodes:
            at = self.stage.get(node)
            if at is None or node in self.late:
                continue
            readers = {(self.stage[u], u in self.late) for u in node.users if u in self.stage}
            for to in sorted({to for to, _ in readers if to != at}):
                crossing.setdefault((at, to), {})[node] = None
            if node in self.outputs or any(to != at or late for to, late in readers):
                wanted[at][node] = None
        seed, once, joint = self._seed()
        if seed is not None and seed not in self.late:
            wanted[self.stage[seed]][seed] = None
        stages = []
        for s in range(self.count):
            body = self._piece(wanted[s], s, late=False)
            late = {n: None for n in self.nodes if n in self.late and self.stage.get(n) == s}
            # what this stage makes of all micro-batches for somebody else: a result
            after = self._piece({n: None for n in late if n in self.outputs}, s, late=True)
            early = {n: None for n in self.nodes if n in self.early}
            needed = {n: None for n in early if n.name in {*body.takes, *after.takes}}
            sends = {b: tuple(ns) for (a, b), ns in crossing.items() if a == s}
            stages.append(
                Stage(
                    self._piece(needed, None, late=False),
                    body,
                    after,
                    {a: tuple(n.name for n in ns) for (a, b), ns in crossing.items() if b == s},
                    {b: tuple(n.name for n in ns) for b, ns in sends.items()},
                    {b: tuple(n.name for n in ns if n in self.trained) for b, ns in sends.items()},
                )
            )
        return Plan(
            stages,
            tuple(n.name for n in self.outputs),
            {n.name: self.stage.get(n) for n in self.outputs},
            frozenset(n.name for n in self.outputs if n in self.late),
            seed.name if seed is not None else "",
            once,
            joint,
        )

    def _trained(self) -> set[fx.Node]:
        """What is made of parameters that were trainable when the model was captured."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                if self._is_trained(node) and self.program.values[node.name].trainable:
                    found.add(node)
            elif node.target is not torch.ops.aten.detach.default:
                results = tensor_results(node)
                floats = any(x.is_floating_point() or x.is_complex() for x in results)
                if (floats or not results) and not found.isdisjoint(node.all_input_nodes):
                    found.add(node)
        return found

    def _is_left(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node not in self.stage and node not in self.early

    def _seed(self) -> tuple[fx.Node | None, bool, bool]:
        """What backward starts from; whether in the first micro-batch only; whether in all at
        once."""
        if not self.for_loss:
            return None, False, False
        loss = node = self.outputs[0]
        if loss not in self.late:
            return loss, True, False
        while _is_sum_of_ranks(node):
            node = node.args[0]
        if node.target is total and node.args[0] not in self.late:
            return node.args[0], False, False
        return loss, False, True

    def _refuse_late_in_the_middle(self) -> None:
        """What is made of all micro-batches at once is made in one stage, at the end of it."""
        wrong = []
        for node in self.nodes:
            if node not in self.late:
                continue
            for read in node.all_input_nodes:
                if read in self.late and self.stage.get(read) != self.stage.get(node):
                    wrong.append(f"{read.name} in {module_path(read) or 'forward'}")
                elif read.op == "placeholder" and self._is_trained(read) and self.for_loss:
                    wrong.append(f"{node.name} in {module_path(node) or 'forward'}")
        if wrong:
            shown = list(dict.fromkeys(wrong))
            more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
            raise ShardingError(
                message(
                    "pipeline_parallel",
                    f"{'; '.join(shown[:5])}{more}",
                    f"{self.count} stages over pp, several micro-batches",
                    "it is made of the rows of all micro-batches (as batch norm's statistics are), "
                    "and layers behind it would wait for all of them",
                    "pass microbatches=1, or use another norm",
                )
            )

    def _is_trained(self, node: fx.Node) -> bool:
        parameter = self.program.values.get(node.name)
        return parameter is not None and not parameter.buffer

    def _piece(self, wanted: Iterable[fx.Node], stage: int | None, late: bool) -> Piece:
        """The graph that makes these nodes. What other pieces make it is given."""
        wanted = list(wanted)
        inside: set[fx.Node] = set()
        left = list(wanted)
        while left:
            node = left.pop()
            if node in inside or (node not in wanted and self._given(node, stage, late)):
                continue
            inside.add(node)
            left += node.all_input_nodes
        for node in self.nodes:  # what gives weights back has no readers
            if node.target is release and node.args[0] in inside:
                inside.add(node)
        graph, copies, takes = fx.Graph(), dict[fx.Node, fx.Node](), list[str]()
        reads = {n for node in inside for n in node.all_input_nodes} - inside
        for node in self.graph.nodes:
            if node in reads:
                copies[node] = graph.placeholder(node.name)
                copies[node].meta.update(node.meta)
                takes.append(node.name)
        for node in self.nodes:
            if node in inside:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in wanted))
        return Piece(graph, tuple(takes), tuple(node.name for node in wanted))

    def _given(self, node: fx.Node, stage: int | None, late: bool) -> bool:
        """Whether a piece of a stage is given a node, and does not make it."""
        if node.op == "placeholder" or node in self.early:
            return True
        at = self.stage.get(node)
        if at is None:
            return False
        return (node not in self.late) if late else at != stage


def _is_sum_of_ranks(node: fx.Node) -> bool:
    """Whether a node sums over ranks what each has computed, and passes its gradient on as it is."""
    kind = TABLE.get(CONVERSIONS.get(node.target, ""))  # type: ignore[call-overload]
    return kind is not None and (kind.forward, kind.backward) == ("sum", "identity")


def split_inputs(program: Program, inputs: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The inputs of a rank (by placeholder) in micro-batches: pieces of their rows, as even as may
    be; what has no rows is in each."""
    found = [dict(inputs) for _ in range(count)]
    for node in program.graph.find_nodes(op="placeholder"):
        axis = (program.layouts.get(node) or {}).get(MICROBATCHES)
        if node.name not in inputs or not isinstance(axis, Axis):
            continue
        at = next(d for d, dim in enumerate(program.dims[node]) if axis in set(atoms(dim)))
        whole = inputs[node.name]
        for turn, each in enumerate(found):
            start, stop = piece_bounds(whole.shape[at], count, turn)
            each[node.name] = whole.narrow(at, start, stop - start)
    return found


def rows_of(program: Program, inputs: dict[str, Any]) -> int:
    """How many rows a rank's inputs (by placeholder) have; 1 where they are not cut in time."""
    for node in program.graph.find_nodes(op="placeholder"):
        axis = (program.layouts.get(node) or {}).get(MICROBATCHES)
        if node.name in inputs and isinstance(axis, Axis):
            at = next(d for d, dim in enumerate(program.dims[node]) if axis in set(atoms(dim)))
            return int(inputs[node.name].shape[at])
    return 1


def joined(program: Program, name: str, by_turn: list[Any]) -> Any:
    """One of the program's results of all micro-batches, of those of each: their rows behind each
    other, where it has rows."""
    results = next(n for n in program.graph.nodes if n.op == "output").args[0]
    node = next(n for n in results if n.name == name)
    axis = (program.layouts.get(node) or {}).get(MICROBATCHES)
    if len(by_turn) == 1 or not isinstance(axis, Axis):
        return by_turn[0]
    at = next(d for d, dim in enumerate(program.dims[node]) if axis in set(atoms(dim)))
    return torch.cat(by_turn, at)


def plan_of(program: Program, for_loss: bool) -> Plan:
    """The plan of a program, or of its loss; made once."""
    known = program.plans
    if for_loss not in known:
        known[for_loss] = plan(program, loss_graph(program) if for_loss else program.graph, for_loss)
    return known[for_loss]
