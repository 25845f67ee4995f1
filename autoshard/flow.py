"""What flows through a rank's graph: which values depend on parameters, where they are last used,
and how many bytes are alive at every position."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from autoshard.collectives import CONVERSIONS
from autoshard.flops import work
from autoshard.outline import draws
from autoshard.program import Program
from autoshard.rules import op_name
from autoshard.runtime.zero import start_gather, wait_gather

#: FLOPs of products in the time that a byte takes to be moved. By their data sheets GPUs do 156
#: (A100) to 295 (H100) of them in bfloat16 and half as many in TF32; products reach less of that
#: than copies do.
FLOPS_PER_BYTE = 100

#: Ops that make a parameter into another form of it. So do conversions over mesh axes.
FORMS = frozenset(
    """to _to_copy t transpose permute view reshape contiguous clone expand unsqueeze squeeze
    getitem detach slice select narrow unflatten flatten""".split()
)


class Flow:
    """A partitioned graph with what each op costs and each value is needed for.

    nodes: all but the placeholders, in order; ``at``: the position of each. wanted: what a training
    step computes: the loss and updates of buffers, or all results where there is no loss. updates:
    what only updates of buffers need. forms: nodes that are a form of parameters (cast, transposed,
    gathered), with these: any stage can make them from its own slices. travels: what depends on
    parameters in other ways, or on a random draw: it is made once, and has to be sent. All else is
    made of inputs and buffers, on any stage.

    Of the values that travel, for every position (a cut before the node there): ``alive``, their
    bytes; ``count``, their number; ``closed``, how many are no tensors, and so cannot be sent.
    """

    def __init__(self, program: Program):
        self.program, self.work = program, work(program)
        self.nodes = [n for n in program.graph.nodes if n.op != "placeholder"]
        self.at = {n: i for i, n in enumerate(self.nodes)}
        self._wanted_results, self.wanted, self.updates = _wanted(program)
        self.forms = _forms(program)
        self.travels = _travelling(program, self.forms)
        self.last_use = {n: self._last_use(n) for n in self.nodes if n in self.travels}
        self.alive = self._sums(lambda n: self.work[n].size)
        self.count = self._sums(lambda n: 1)
        self.closed = self._sums(lambda n: int(not _is_tensors(self.work[n].value)))

    def reads(self, node: fx.Node) -> set[str]:
        """The parameters that a node computes with."""
        if node in self.forms or node.op == "output":
            return set()
        return {key for n in node.all_input_nodes for key in self.forms.get(n, ())}

    def computes(self, node: fx.Node) -> bool:
        """Whether a training step computes a node on one stage only."""
        return node in self.travels and node in self.wanted

    def cost(self, node: fx.Node) -> int:
        """FLOPs of a node, forward, and `FLOPS_PER_BYTE` for each byte that its other parts move;
        none of what can be made on any stage."""
        known = self.work[node] if self.computes(node) else None
        return known.flops + FLOPS_PER_BYTE * known.moved if known else 0

    def is_heavy(self, node: fx.Node, dims: int) -> bool:
        """Whether a node is a product, or computes with a parameter of so many dimensions."""
        if not self.computes(node):
            return False
        values = self.program.values
        return self.work[node].flops > 0 or any(
            values[key].value.ndim >= dims for key in self.reads(node)
        )

    def across(self, at: int) -> list[fx.Node]:
        """The values that are alive before the node at a position."""
        return [n for n, last in self.last_use.items() if self.at[n] < at <= last]

    def _last_use(self, node: fx.Node) -> int:
        """The last position at which a value is used: sizes of it are known everywhere, and updates
        of buffers stay where their buffers are."""
        uses = [
            self.at[user]
            for user in node.users
            if (node in self._wanted_results if user.op == "output" else user in self.wanted)
            and user not in self.updates
            and not _is_size(user)
        ]
        return max(uses, default=self.at[node])

    def _sums(self, of: Callable[[fx.Node], int]) -> list[int]:
        change = [0] * (len(self.nodes) + 1)
        for node, last in self.last_use.items():
            change[self.at[node] + 1] += of(node)
            change[last + 1] -= of(node)
        return list(itertools.accumulate(change))


def _wanted(program: Program) -> tuple[set[fx.Node], set[fx.Node], set[fx.Node]]:
    """The results that a training step is for, without updates of buffers; the nodes it computes;
    those of them that only the updates need."""
    results: Any = program.graph.output_node().args[0]
    updated = set(program.buffer_updates.values())
    asked = [program.loss] if program.loss is not None else range(len(results))
    wanted = {results[i] for i in asked if i not in updated and isinstance(results[i], fx.Node)}
    needed = _before(wanted)
    updates = _before(results[i] for i in updated if isinstance(results[i], fx.Node)) - needed
    return wanted, needed | updates, updates


def _before(found: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes, and all that they are computed from."""
    ahead, seen = list(found), set[fx.Node]()
    while ahead:
        if (node := ahead.pop()) not in seen:
            seen.add(node)
            ahead += node.all_input_nodes
    return seen


def _forms(program: Program) -> dict[fx.Node, set[str]]:
    held = program.parameters()
    forms: dict[fx.Node, set[str]] = {n: {n.name} for n in program.graph.nodes if n.name in held}
    for node in program.graph.nodes:
        inputs = [n for n in node.all_input_nodes if n in forms]
        if not inputs or node.op != "call_function":
            continue
        source: Any = node.args[0]
        if node.target in (start_gather, wait_gather):
            forms[node] = {key for n in inputs for key in forms[n]}
        elif node.target is operator.getitem and source.target is wait_gather:
            unit = program.units[source.args[2]]
            forms[node] = {unit.keys[node.args[1]]}  # type: ignore[index]
        elif inputs == [source] and (node.target in CONVERSIONS or op_name(node.target) in FORMS):
            forms[node] = forms[source]
    return forms


def _travelling(program: Program, forms: dict[fx.Node, set[str]]) -> set[fx.Node]:
    travels: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "call_function" and node not in forms and not _is_size(node):
            depends = any(n in travels or n in forms for n in node.all_input_nodes)
            if depends or draws(node):
                travels.add(node)
    return travels


def _is_size(node: fx.Node) -> bool:
    return op_name(node.target).startswith("sym_")


def _is_tensors(value: Any) -> bool:
    values = value if isinstance(value, (tuple, list)) else [value]
    return all(isinstance(v, torch.Tensor) for v in values)
