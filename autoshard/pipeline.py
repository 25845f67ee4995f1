"""From a graph whose nodes have stages to what each stage runs.

A step runs three graphs a stage. *before*: what the micro-batches need of each other and of inputs
alone (how many tokens count), once, on all of them in lockstep. *body*: the stage itself, once a
micro-batch. *after*: what sums over micro-batches make of what the bodies gave (the loss,
statistics that buffers keep), once, in lockstep.

Values that a body needs of an earlier stage travel straight from the stage that makes them to each
that reads them, however many stages lie between.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autoshard.axes import Axis, dimension_of, leaves, root
from autoshard.errors import ShardingError, message
from autoshard.layout import piece_bounds
from autoshard.mesh import MICROBATCHES
from autoshard.objective import loss_graph
from autoshard.outline import RECOMPUTE, draws
from autoshard.program import STAGE, Program, module_path, tensor_results
from autoshard.runtime.split import deferring
from autoshard.runtime.turns import OVER_ALL, total
from autoshard.runtime.zero import release, start_gather, wait_gather
from autoshard.schedule import Schedule, schedule
from autoshard.summands import Summands

#: How many nodes an error or a note names.
NAMED = 5


if TYPE_CHECKING:
    from autoshard.stages import Part


@dataclass(frozen=True)
class Pipeline:
    """How a program is laid out over pp. ``place``: of every stage the position along pp;
    ``microbatches``: how many (None: the largest divisor of a rank's rows up to four a rank of pp);
    ``outputs``: whether a forward gives them on "all" ranks, or on those of the "last" stage;
    ``parts``: what stages are made of, and ``of_part`` the stage of each."""

    schedule: str
    place: tuple[int, ...]
    microbatches: int | None
    outputs: str = "all"
    parts: tuple[Part, ...] = ()
    of_part: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return max(self.place) + 1

    @property
    def stages(self) -> int:
        return len(self.place)

    def stage_of_nodes(self) -> dict[str, int]:
        """The stage of every node that was there when the stages were made, by its name."""
        pairs = zip(self.parts, self.of_part, strict=True)
        return {name: stage for part, stage in pairs for name in part.nodes}

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
        """How many micro-batches to make of so many rows of a rank, when nothing says: a divisor of
        their number, unless the largest one leaves most of the pipeline idle."""
        most = max(min(rows, 4 * self.ranks), 1)
        even = max(m for m in range(1, most + 1) if rows % m == 0)
        return even if 2 * even > most or even >= 2 * self.ranks else most


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
    gradient may come back; ``varying``: to which stages it sends tensors whose sizes depend on more
    than the shapes of inputs."""

    before: Piece
    body: Piece
    after: Piece
    receives: dict[int, tuple[str, ...]]
    sends: dict[int, tuple[str, ...]]
    returns: dict[int, tuple[str, ...]]
    varying: tuple[int, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, Piece, Piece]:
        return self.before, self.body, self.after


@dataclass
class Plan:
    """What the stages run of one graph. ``results``: names of the graph's results; ``made``: of
    each the stage that has it.

    Of a graph run for its loss, ``seed`` names what backward starts from in every micro-batch: what
    each adds to the loss. ``once``: only the first one starts from it, as no rows are in it.
    ``joint``: where the loss stops being a sum over micro-batches. ``seed`` is then the loss
    itself: backward starts when all forwards are done.
    """

    stages: list[Stage]
    results: tuple[str, ...]
    made: dict[str, int]
    seed: str = ""
    once: bool = False
    joint: str = ""

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Which stages send something to which later ones."""
        return [(at, to) for at, stage in enumerate(self.stages) for to in stage.sends]


def plan(program: Program, graph: fx.Graph, for_loss: bool) -> Plan:
    """What the stages run of a graph: that of the program, or `objective.loss_graph` of it. Raises
    ShardingError by name where a stage needs all micro-batches of an earlier one."""
    return Planner(program, graph, for_loss).plan()


@dataclass
class Sums:
    """What of a graph needs all micro-batches. ``varying``: nodes that may differ between them;
    ``early``: sums of what depends on inputs alone, and what is made of these; ``late``: those of
    other things, and all that is made of them."""

    varying: set[fx.Node]
    early: set[fx.Node]
    late: set[fx.Node]


def sums_of(program: Program, graph: fx.Graph, staged: Container[fx.Node]) -> Sums:
    """The sums over micro-batches of a graph; ``staged``: nodes that are of one stage."""
    found = Sums(set(graph.find_nodes(op="placeholder")) - _held(program, graph), set(), set())
    for node in graph.nodes:
        read = set(node.all_input_nodes)
        if node.op != "call_function":
            continue
        if not found.late.isdisjoint(read):
            found.late.add(node)
        elif node.target in OVER_ALL:
            (found.late if node in staged else found.early).add(node)
        elif not found.varying.isdisjoint(read) or draws(node):
            found.varying.add(node)
        elif node not in staged and not found.early.isdisjoint(read):
            found.early.add(node)
    return found


def _held(program: Program, graph: fx.Graph) -> set[fx.Node]:
    return {n for n in graph.find_nodes(op="placeholder") if n.name in program.values}


class Planner:
    """Cuts one graph."""

    def __init__(self, program: Program, graph: fx.Graph, for_loss: bool):
        assert program.pipeline is not None
        self.program, self.graph, self.for_loss = program, graph, for_loss
        self.count = program.pipeline.stages
        self.outputs = list(next(n for n in graph.nodes if n.op == "output").args[0])
        self.nodes = [n for n in graph.nodes if n.op == "call_function"]
        self.stage = {n: s for n in self.nodes if (s := self._stage(n)) is not None}
        self.sums = sums_of(program, graph, self.stage)
        self.early, self.late = self.sums.early, self.sums.late
        self.trained = self._trained() & self._wanted() if for_loss else set()
        self.dims = {node.name: dims for node, dims in program.dims.items()}

    def _stage(self, node: fx.Node) -> int | None:
        if node.target in (start_gather, wait_gather, release):
            return self.program.units[node.args[2]].stage  # type: ignore[index]
        return node.meta.get(STAGE)

    def plan(self) -> Plan:
        if found := self.waiting():
            raise waits_for_all(found, self.count)
        last = self.count - 1
        self._take_what_is_left()
        seed, once, joint = self._seed()
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
        if seed is not None and seed not in self.late:
            wanted[self.stage[seed]][seed] = None
        stages, splits = [], self.for_loss and self._splits()
        for s in range(self.count):
            body = self._piece(wanted[s], functools.partial(self._given_to_body, s))
            late = {n: None for n in self.nodes if n in self.late and self.stage.get(n) == s}
            # what this stage makes of all micro-batches for somebody else: a result
            results = {n: None for n in late if n in self.outputs}
            after = self._piece(results, self._given_after)
            own = self.outputs if s == last else ()
            needed = {n: None for n in self.nodes if n in self.early
                      and (n.name in {*body.takes, *after.takes} or n in own)}  # fmt: skip
            before = self._piece(needed, lambda n: n.op == "placeholder")
            for piece in (before, after):
                _unmark(piece)
            sends = {b: tuple(ns) for (a, b), ns in crossing.items() if a == s}
            if splits:
                self._leave_weights(body)
            stages.append(
                Stage(
                    before,
                    body,
                    after,
                    {a: tuple(n.name for n in ns) for (a, b), ns in crossing.items() if b == s},
                    {b: tuple(n.name for n in ns) for b, ns in sends.items()},
                    {b: tuple(n.name for n in ns if n in self.trained) for b, ns in sends.items()},
                    tuple(b for b, ns in sends.items() if any(map(self._varies, ns))),
                )
            )
        return Plan(
            stages,
            tuple(n.name for n in self.outputs),
            {n.name: self._maker(n) for n in self.outputs},
            seed.name if seed is not None else "",
            once,
            joint,
        )

    def joint(self) -> str:
        """Where the loss stops being a sum over micro-batches; empty where it is one."""
        self._take_what_is_left()
        return self._seed()[2]

    def _take_what_is_left(self) -> None:
        """Results of inputs alone, which no stage has: the last one makes them."""
        self.stage |= {n: self.count - 1 for n in self.outputs if self._is_left(n)}

    def _splits(self) -> bool:
        """Whether the schedule has gradients of weights apart from those of inputs."""
        pipeline = self.program.pipeline
        return pipeline.scheduled(pipeline.ranks).splits

    def _leave_weights(self, body: Piece) -> None:
        held = self.program.values
        trained = {n for n in body.takes if n in held and held[n].trainable}
        fixed = {n for n in body.takes if n in held and n not in trained}
        deferring(body.graph, trained, fixed)

    def _trained(self) -> set[fx.Node]:
        """What is made of parameters that were trainable when the model was captured."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                if self._is_trained(node) and self.program.values[node.name].trainable:
                    found.add(node)
            elif _may_pass(node) and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _varies(self, node: fx.Node) -> bool:
        """Whether a size of a node's result depends on the data."""
        dims, known = self.dims.get(node.name), set(self.program.hints)
        if not isinstance(dims, tuple):
            return False
        axes = [a for dim in dims for a in leaves(dim)]
        return any(
            a.role == "ragged" or not getattr(a.size, "free_symbols", set()) <= known for a in axes
        )

    def _wanted(self) -> set[fx.Node]:
        """What backward from the results comes to: not what is read behind a detach alone, of which
        one device has no gradient, where zeros would be one."""
        found = set(self.outputs)
        for node in reversed(self.graph.nodes):
            if node in found and _may_pass(node):
                found.update(node.all_input_nodes)
        return found

    def _is_left(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node not in self.stage and node not in self.early

    def _maker(self, result: fx.Node) -> int:
        """The stage that gives a result."""
        parameter = self.program.values.get(result.name) if result.op == "placeholder" else None
        if parameter is None or parameter.holders is None:
            return self.stage.get(result, self.count - 1)
        return self.program.pipeline.place.index(parameter.holders[0])

    def _seed(self) -> tuple[fx.Node | None, bool, str]:
        """What backward starts from; whether in the first micro-batch only; what makes it start in
        all at once."""
        if not self.for_loss:
            return None, False, ""
        loss = self.outputs[0]
        if loss not in self.late:
            return loss, True, ""
        summands = Summands(self.late, self._is_fixed, self._is_once)
        if breaks := summands.breaks(loss):
            return loss, False, told(breaks)
        before, seed = set(self.nodes), summands.write(self.graph, loss)
        self.nodes = [n for n in self.graph.nodes if n.op == "call_function"]
        self.stage |= {n: self.stage[loss] for n in self.nodes if n not in before}
        return seed, False, ""

    def _is_fixed(self, node: fx.Node) -> bool:
        """Whether a node has one value in all micro-batches, and no gradient."""
        return node not in self.stage and not self._is_trained(node) and self._is_same(node)

    def _is_once(self, node: fx.Node) -> bool:
        """Whether a node is made of parameters."""
        return (node in self.stage or self._is_trained(node)) and self._is_same(node)

    def _is_same(self, node: fx.Node) -> bool:
        return node not in self.late and node not in self.sums.varying

    def waiting(self) -> list[fx.Node]:
        """What later stages would wait for: it is made of all micro-batches of earlier ones."""
        found = [
            read
            for node in self.nodes
            if node in self.late
            for read in node.all_input_nodes
            if read in self.late and self.stage[read] != self.stage.get(node)
        ]
        return list(dict.fromkeys(found))

    def layers_behind(self) -> list[fx.Node]:
        """Where rows that are made of all micro-batches meet parameters."""
        layouts = {n.name: layout for n, layout in self.program.layouts.items()}
        rows, found = set[fx.Node](), []
        for node in self.graph.nodes:
            layout = layouts.get(node.name)
            if isinstance(layout, dict) and MICROBATCHES in layout:
                has_rows = isinstance(layout[MICROBATCHES], Axis)
            else:
                has_rows = node.target is not total and not rows.isdisjoint(node.all_input_nodes)
            if has_rows:
                rows.add(node)
            if has_rows and node in self.late and any(map(self._is_once, node.all_input_nodes)):
                found.append(node)
        return found

    def _is_trained(self, node: fx.Node) -> bool:
        parameter = self.program.values.get(node.name)
        return node.op == "placeholder" and parameter is not None and not parameter.buffer

    def _piece(self, wanted: Iterable[fx.Node], given: Callable[[fx.Node], bool]) -> Piece:
        """The graph that makes these nodes, of those that are ``given``."""
        wanted = list(wanted)
        inside: set[fx.Node] = set()
        left = list(wanted)
        while left:
            node = left.pop()
            if node in inside or (node not in wanted and given(node)):
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
                copies[node].meta.pop(RECOMPUTE, None)
                takes.append(node.name)
        for node in self.nodes:
            if node in inside:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in wanted))
        return Piece(graph, tuple(takes), tuple(node.name for node in wanted))

    def _given_to_body(self, stage: int, node: fx.Node) -> bool:
        return self._given_to_both(node) or self.stage.get(node, stage) != stage

    def _given_after(self, node: fx.Node) -> bool:
        return self._given_to_both(node) or (node in self.stage and node not in self.late)

    def _given_to_both(self, node: fx.Node) -> bool:
        return node.op == "placeholder" or node in self.early


def _may_pass(node: fx.Node) -> bool:
    """Whether gradients may go through a node; where its results are not known, they may."""
    results = tensor_results(node)
    floats = any(x.is_floating_point() or x.is_complex() for x in results)
    return node.target is not torch.ops.aten.detach.default and (floats or not results)


def _unmark(piece: Piece) -> None:
    """What runs in lockstep is never computed again."""
    for node in piece.graph.nodes:
        node.meta.pop(RECOMPUTE, None)


def waiting(program: Program, layers: bool) -> list[fx.Node]:
    """What later stages would wait for, see `Planner.waiting`; ``layers``: and layers of the same
    one (`Planner.layers_behind`)."""
    found = Planner(program, program.graph, False).waiting()
    if program.loss is not None:
        of_loss = Planner(program, loss_graph(program), True)
        found += of_loss.waiting() + (of_loss.layers_behind() if layers else [])
    return list({node.name: node for node in found}.values())


def joint(program: Program) -> str:
    """Where the loss of a program stops being a sum over micro-batches, see `Planner.joint`."""
    return Planner(program, loss_graph(program), True).joint()


def sums_behind(nodes: list[fx.Node]) -> list[fx.Node]:
    """The sums over micro-batches that nodes are made of."""
    found, seen, left = list[fx.Node](), set[fx.Node](), list(reversed(nodes))
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        found += [node] if node.target in OVER_ALL and STAGE in node.meta else []
        left += node.all_input_nodes
    return sorted(found)


def told(nodes: list[fx.Node]) -> str:
    """The ops of the model that nodes were written for, and the modules that they are in."""
    shown = [f"{n.meta.get('origin', n.name)} in {module_path(n) or 'forward'}" for n in nodes]
    shown = list(dict.fromkeys(shown))
    more = f" and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    return "; ".join(shown[:NAMED]) + more


def waits_for_all(found: list[fx.Node], stages: int) -> ShardingError:
    """The error of layers that need all micro-batches of those before them."""
    return ShardingError(
        message(
            "pipeline_parallel",
            told(sums_behind(found)),
            f"{stages} stages over pp, several micro-batches",
            "it is made of the rows of all micro-batches (as batch norm's statistics are), and"
            " layers behind it would wait for all of them",
            "pass microbatches=1, or use another norm",
        )
    )


def split_inputs(program: Program, inputs: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The inputs of a rank (by placeholder) in micro-batches: pieces of their rows, as even as may
    be; what has no rows is in each."""
    found = [dict(inputs) for _ in range(count)]
    for name, at in _dimensions_of_rows(program, inputs):
        whole = inputs[name]
        for turn, each in enumerate(found):
            start, stop = piece_bounds(whole.shape[at], count, turn)
            each[name] = whole.narrow(at, start, stop - start)
    return found


def rows_of(program: Program, inputs: dict[str, Any]) -> int:
    """How many rows a rank's inputs (by placeholder) have; 1 where they are not cut in time."""
    found = (int(inputs[name].shape[at]) for name, at in _dimensions_of_rows(program, inputs))
    return next(found, 1)


def _dimensions_of_rows(program: Program, inputs: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Of the inputs that have rows of micro-batches, the dimension that they are."""
    for node in program.graph.find_nodes(op="placeholder"):
        at = _dimension_of_rows(program, node)
        if node.name in inputs and at is not None:
            yield node.name, at


def _dimension_of_rows(program: Program, node: fx.Node) -> int | None:
    axis = (program.layouts.get(node) or {}).get(MICROBATCHES)
    return dimension_of(axis, program.dims[node]) if isinstance(axis, Axis) else None


def joined(program: Program, name: str, by_turn: list[Any]) -> Any:
    """One of the program's results of all micro-batches, of those of each: their rows behind each
    other, where it has rows. Raises ShardingError as `refuse_what_is_not_joined` does."""
    node = next(n for n in _results(program) if n.name == name)
    at = _dimension_of_rows(program, node)
    if len(by_turn) == 1 or at is None:
        return by_turn[0]
    outer = _outside_rows(program, node, at)
    if outer is None:
        raise _unjoinable(program, [node])
    if outer == 1:
        return torch.cat(by_turn, at)
    return torch.cat([x.unflatten(at, (outer, -1)) for x in by_turn], at + 1).flatten(at, at + 1)


def _results(program: Program) -> list[fx.Node]:
    return list(next(iter(reversed(program.graph.nodes))).args[0])  # type: ignore[arg-type]


def refuse_what_is_not_joined(program: Program) -> None:
    """Raise ShardingError where rows of an output are in a dimension with others, so that those of
    micro-batches cannot be put behind each other."""
    found = []
    for node in _results(program)[: len(program.output_names)]:
        at = _dimension_of_rows(program, node)
        if at is not None and _outside_rows(program, node, at) is None:
            found.append(node)
    if found:
        raise _unjoinable(program, found)


def _outside_rows(program: Program, node: fx.Node, at: int) -> int | None:
    """The product of the sizes before the rows, in a dimension that has them as a factor. None
    where that is not known, or they are in one part of a concatenation."""
    axis = root(program.layouts[node][MICROBATCHES])  # type: ignore[arg-type]
    factors = leaves(program.dims[node][at])
    if axis not in factors:
        return None
    sizes = [a.size for a in factors[: factors.index(axis)]]
    known = all(isinstance(size, int) for size in sizes) and factors.count(axis) == 1
    return math.prod(sizes) if known else None  # type: ignore[arg-type]


def _unjoinable(program: Program, nodes: list[fx.Node]) -> ShardingError:
    results = _results(program)
    names = [program.output_names[results.index(n)] for n in nodes]
    return ShardingError(
        message(
            "forward",
            f"outputs {', '.join(names)}",
            "rows of the batch are in one dimension with others, or come in it more than once",
            "micro-batches are put behind each other row by row",
            "return them with a dimension of rows, or pass microbatches=1",
        )
    )


def plan_of(program: Program, for_loss: bool) -> Plan:
    """The plan of a program, or of its loss; made once."""
    known = program.plans
    if for_loss not in known:
        known[for_loss] = plan(
            program, loss_graph(program) if for_loss else program.graph, for_loss
        )
    return known[for_loss]
