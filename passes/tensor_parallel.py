"""tensor_parallel: the axes that are worth cutting over tp.

Requires: axes inferred. Gives: heads, kv, ffn, vocab, inner ... assigned to tp; tp factored into
sub-axes where an axis is smaller than it (2 kv heads over tp=8). No name is looked at: an axis is
taken when the work that cutting it saves outweighs the traffic that cutting it causes.
"""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import sympy
from torch import fx

from autoshard.axes import Axis, Dim, atoms, leaves, size_of
from autoshard.chain import Pass
from autoshard.errors import ShardingError, message
from autoshard.infer import batch_axes, derived
from autoshard.program import Assignment, Program, shallow
from autoshard.rules import Typing, op_name
from autoshard.rules.attention import ATTENTIONS
from autoshard.rules.core import operands

#: Sizes taken for dynamic dimensions when work and traffic are compared.
NOMINAL = {"batch": 4, "sequence": 1024}
#: Least FLOPs saved per byte moved for an axis to be taken.
THRESHOLD = 8


#: Share of the model's work below which an axis that has to be gathered again is left alone.
SMALL = 0.02


#: The roles of axes that other strategies cut.
KEPT = ("batch", "sequence", "experts", "ragged")


@dataclass
class Candidate:
    """An axis that could be cut: ``work`` FLOPs it divides, by op; ``traffic`` bytes its sums
    move."""

    axis: Axis
    work: dict[fx.Node, float] = field(default_factory=dict)
    traffic: float = 0.0
    blocked: str = ""
    gathered: bool = False  # whether some op needs it whole
    ragged: bool = True  # whether pieces of unequal size would do: read by row only
    read: set[fx.Node] = field(default_factory=set)  # values without it that its ops read


Taken = tuple[Candidate, int, int, str]


@dataclass(frozen=True)
class TensorParallel(Pass):
    name: ClassVar[str] = "tensor_parallel"
    assigns: ClassVar[bool] = True
    axis: str = "tp"
    strict: bool = False

    def __call__(self, program: Program) -> Program:
        program = shallow(program)
        ranks = program.mesh.mesh.size(self.axis)
        if ranks == 1:
            return program
        taken, undivided = self._choose(program, ranks)
        factors = _factors([(start, end) for _, start, end, _ in taken], ranks)
        kept = dict(program.mesh.factors) | {self.axis: factors}
        program.mesh = replace(program.mesh, factors=tuple(kept.items()))
        parts = program.mesh.parts(self.axis)
        for candidate, start, end, reason in taken:
            position, over = 1, []
            for part, size in parts:
                if start <= position < end:
                    over.append(part)
                position *= size
            program.assignments.append(
                Assignment(candidate.axis, tuple(over), 10, self.name, reason)
            )
        self._report(program, taken, undivided, ranks)
        return program

    def _choose(self, program: Program, ranks: int) -> tuple[list[Taken], list[Candidate]]:
        """Candidates taken with the part of tp each uses, from ``start`` to ``end`` (products);
        and those that were worth it, do not divide at all, and leave their work on every rank."""
        undivided: list[Candidate] = []
        done: dict[fx.Node, int] = {}
        taken: list[Taken] = []
        nominal = Nominal(program)
        found = list(candidates(program, nominal).values())
        left = list(found)
        total = sum(nominal(t.flops) for t in program.typings.values())
        for candidate in left:
            if candidate.gathered and sum(candidate.work.values()) < SMALL * total:
                candidate.blocked = candidate.blocked or "too little work for a gather"
        heap = [(-self._gain(c, done, ranks), i) for i, c in enumerate(left)]
        heapq.heapify(heap)
        while heap:
            gain, best = -heap[0][0], left[heap[0][1]]
            now = self._gain(best, done, ranks)
            if now < gain:  # what was taken meanwhile lowers a gain, and never raises one
                heapq.heapreplace(heap, (-now, heap[0][1]))
                continue
            if gain < (THRESHOLD if taken else 0):  # tp was asked for: the best is taken anyway
                break
            heapq.heappop(heap)
            start = max((done.get(n, 1) for n in best.work), default=1)
            share = _share(best, ranks // start, start)
            if share == 1:
                program.left[best.axis] = self._undivided(best.axis.size, ranks // start, ranks)
                undivided.append(best)
                continue
            taken.append((best, start, start * share, f"{gain:.0f} FLOPs saved per byte moved"))
            for node in best.work:
                done[node] = max(done.get(node, 1), start * share)
        for _, i in heap:
            if found[i].blocked:
                program.left[found[i].axis] = found[i].blocked
            else:
                program.left[found[i].axis] = "cutting it costs more than it saves"
        if not taken:
            raise ShardingError(
                message(
                    "tensor_parallel",
                    "every axis of the model",
                    ", ".join(f"{c.axis!r} {c.blocked}" for c in found)[:800],
                    f"none can be cut over {self.axis}={ranks} with a gain",
                    "use a tp size that divides heads or hidden sizes, or drop tp from the mesh",
                )
            )
        return taken, [c for c in undivided if any(done.get(n, 1) == 1 for n in c.work)]

    def _undivided(self, size: Any, left: int, ranks: int) -> str:
        text = f"{self.axis}={ranks}" if left == ranks else f"{left}, left of {self.axis}={ranks},"
        return f"{text} does not divide {size}: whole on every rank"

    def _gain(self, candidate: Candidate, done: dict[fx.Node, int], ranks: int) -> float:
        if candidate.blocked:
            return -1.0
        start = max((done.get(n, 1) for n in candidate.work), default=1)
        if ranks // start == 1:
            return -1.0
        saved = sum(w for n, w in candidate.work.items() if done.get(n, 1) <= start)
        fresh = sum(w for n, w in candidate.work.items() if done.get(n, 1) < ranks)
        return min(saved, fresh) / (candidate.traffic + 1.0)

    def _report(
        self, program: Program, taken: list[Taken], undivided: list[Candidate], ranks: int
    ) -> None:
        """All axes that do not divide, at once. Rows of a table of tokens count as padded."""
        problems: dict[str, int] = {}
        holders = _holders(program)
        followed = {(start, node) for c, start, _, _ in taken for node in c.work}
        for candidate, start, end, _ in taken:
            axis = candidate.axis
            where = f"{axis.name or 'axis'} of {axis.size} in {_where(holders[id(axis)])}"
            if end < ranks and not any((end, node) in followed for node in candidate.work):
                key = f"{where}: cut {end // start} ways, replicated {ranks // end} ways"
            elif axis.size % (end // start) and axis.role not in ("vocab", "rows"):
                key = f"{where}: cut {end // start} ways, in pieces of unequal size"
            else:
                continue
            problems[key] = problems.get(key, 0) + 1
        for axis in (c.axis for c in undivided):
            where = f"{axis.name or 'axis'} of {axis.size} in {_where(holders[id(axis)])}"
            problems[f"{where}: whole on every rank"] = (
                problems.get(f"{where}: whole on every rank", 0) + 1
            )
        if not problems:
            return
        text = message(
            "tensor_parallel",
            f"axes that {self.axis} does not divide, {len(problems)} in kind",
            "\n    ".join(["", *(f"{p} ({n} times)" for p, n in problems.items())]),
            f"{self.axis}={ranks} does not divide these sizes",
            f"use a {self.axis} that divides them"
            + (
                "" if self.strict else ", or accept the extra work; strict=True makes this an error"
            ),
        )
        if self.strict:
            raise ShardingError(text)
        program.notes.append(text)


def _holders(program: Program) -> dict[int, list[str]]:
    """The parameters that have an axis, by its id; layers of one kind written once."""
    found: dict[int, dict[str, None]] = {}
    for p in program.parameters().values():
        for axis in {a for dim in p.dims for a in atoms(dim)}:
            found.setdefault(id(axis), {})[re.sub(r"\.\d+(?=\.)", ".*", p.name)] = None
    return {key: list(names) for key, names in found.items()}


def _where(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _share(candidate: Candidate, ranks: int, start: int) -> int:
    """How many ways an axis is cut: as far as the common divisor goes; all the way if pieces of
    unequal size do."""
    size = candidate.axis.size
    if not isinstance(size, int):
        return 1
    if candidate.ragged and start == 1 and (ranks - 1) * -(-size // ranks) < size:
        return ranks
    return math.gcd(size, ranks)


def _factors(spans: list[tuple[int, int]], ranks: int) -> tuple[int, ...]:
    """The chain of sub-axis sizes in which every span is a run of sub-axes."""
    edges = sorted({1, ranks, *(e for span in spans for e in span)})
    chain = [1]
    for edge in edges[1:]:
        if edge % chain[-1] == 0 and ranks % edge == 0:
            chain.append(edge)
    return tuple(b // a for a, b in zip(chain, chain[1:], strict=False))


def candidates(program: Program, nominal: Nominal) -> dict[int, Candidate]:
    """Every axis of a parameter, with the work that cutting it saves and the traffic it causes."""
    found: dict[int, Candidate] = {}
    for parameter in program.values.values():
        if parameter.buffer:
            continue
        for dim in parameter.dims:
            for axis in atoms(dim):
                if axis.role not in KEPT and not axis.opaque:
                    found.setdefault(id(axis), Candidate(axis))
    made = derived(program)  # values that a gradient flows to
    for node, typing in program.typings.items():
        _count(program, node, typing, found, made, nominal)
    return found


def _count(
    program: Program,
    node: fx.Node,
    typing: Typing,
    found: dict[int, Candidate],
    derived: set[fx.Node],
    nominal: Nominal,
) -> None:
    values = operands(node)
    read = [program.dims[n] for n in values]
    summed = {id(a) for d in typing.summed for a in atoms(d)}
    whole = {id(a) for d in (*typing.whole, *typing.apart) for a in atoms(d)}
    outs = typing.out if isinstance(typing.out, list) else [typing.out]
    kind = op_name(node.target)
    work = nominal(typing.flops)
    if kind == "embedding" and not _is_constant(node.args[1]):
        work = 2 * nominal(size_of(sum(outs[0], ()))) * nominal(size_of(read[0][0]))
    result = 4 * nominal(size_of(sum(outs[0], ())))
    largest = 4 * max((nominal(size_of(sum(d, ()))) for d in read), default=0)
    space = {id(a) for dims in read for d in dims for a in atoms(d)}
    if kind == "cross_entropy_loss":
        result = 12 * nominal(size_of(sum((d for d in read[1]), ())))
    for key in space & set(found):
        candidate = found[key]
        if key in whole:
            if kind in ATTENTIONS:
                candidate.blocked = "attention needs it whole"
            candidate.traffic += largest
            candidate.gathered = True
            continue
        if work:
            candidate.work[node] = work * _coverage([*read, *outs], candidate.axis, nominal)
        if key in summed:
            candidate.traffic += result
        for value, dims in zip(values, read, strict=True):
            # the gradient of what every rank reads whole is summed, once per value
            if value in derived and value not in candidate.read and not _has(dims, candidate.axis):
                candidate.read.add(value)
                candidate.traffic += 4 * nominal(size_of(sum(dims, ())))
        if kind not in ROWWISE:
            candidate.ragged = candidate.ragged and _plain(read, outs, candidate.axis)


#: Ops that read an axis by row, however long each rank's piece is.
ROWWISE = frozenset(
    "linear embedding cross_entropy_loss mm addmm matmul t transpose permute".split()
)


def _has(dims: Any, axis: Axis) -> bool:
    return any(a is axis for d in dims for a in atoms(d))


def _plain(read: list[Any], outs: list[Any], axis: Axis) -> bool:
    """Whether the axis is a dimension of its own in every tensor of an op."""
    for dims in [*read, *outs]:
        for dim in dims:
            if axis in set(atoms(dim)) and dim_length(dim) > 1:
                return False
    return True


def _coverage(tensors: list[Any], axis: Axis, nominal: Nominal) -> float:
    """The least share of a dimension that the axis cuts: below one in a concatenation."""
    shares = [
        _share_of(d, axis, nominal) for dims in tensors for d in dims if axis in set(atoms(d))
    ]
    return min(shares, default=1.0)


def _share_of(dim: Dim, axis: Axis, nominal: Nominal) -> float:
    for a in leaves(dim):
        if a is axis:
            return 1.0
        if a.parts is not None and axis in set(atoms((a,))):
            covered = [nominal(size_of(p)) * _share_of(p, axis, nominal) for p in a.parts]
            return sum(covered) / sum(nominal(size_of(p)) for p in a.parts)
    return 0.0


def dim_length(dim: Dim) -> int:
    return sum(1 for _ in atoms(dim))


def _is_constant(arg: Any) -> bool:
    """Whether a node depends on no input (positions)."""
    if not isinstance(arg, fx.Node):
        return True
    seen, stack = set(), [arg]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" and "val" in node.meta and getattr(node.meta["val"], "ndim", 0):
            return False
        if node.op == "call_function" and op_name(node.target) == "sym_size":
            continue
        stack.extend(node.all_input_nodes)
    return True


class Nominal:
    """Sizes as numbers: dynamic ones at nominal batch and sequence sizes."""

    def __init__(self, program: Program):
        batch = {a.size: NOMINAL["batch"] for a in batch_axes(program)}
        self.sizes = dict.fromkeys(program.hints, NOMINAL["sequence"]) | batch
        self.known: dict[Any, float] = {}

    def __call__(self, expr: Any) -> float:
        if isinstance(expr, (int, float)):
            return float(expr)
        if expr not in self.known:
            other = dict.fromkeys(expr.free_symbols, NOMINAL["sequence"])
            self.known[expr] = float(sympy.sympify(expr).subs(other | self.sizes))
        return self.known[expr]
