"""What each op of a rank's forward costs: FLOPs, bytes moved, bytes made.

Rank 0's graph runs on the meta device (`autoshard.shapes.interpret`), and every aten op that this
comes down to is counted by torch's own formulas (`torch.utils.flop_counter.flop_registry`: products
and convolutions). Attention and products by groups of rows have formulas here: on the meta device
they come down to other ops than they do where they run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autoshard import attentions
from autoshard.axes import Dim, size_of
from autoshard.program import Program, module_path
from autoshard.rules import op_name
from autoshard.shapes import interpret

#: Products by groups of rows, ``x[n, k]`` and ``weight[e, k, m]``: ours, and torch's own.
GROUPED = frozenset("grouped_product _grouped_mm grouped_mm".split())
#: Ops that read of their first operand no more than they give.
LOOKUPS = frozenset("embedding index index_select gather select_scatter slice_scatter".split())
#: Ops that give memory without writing it.
WRITE_NOTHING = frozenset("empty empty_like empty_strided new_empty".split())


@dataclass(frozen=True)
class Work:
    """What one op does on rank 0, forward. ``flops``: of its products. ``moved``: bytes that its
    other parts read and write. ``made``: bytes of the tensors that it makes, those on the way to
    its result too; views make none. ``value``: its result on the meta device."""

    flops: int
    moved: int
    made: int
    value: Any

    @property
    def size(self) -> int:
        """Bytes of the tensors in its result."""
        return _bytes(self.value)


def work(program: Program) -> dict[fx.Node, Work]:
    """What every op of a partitioned graph does, at the sizes captured (``program.hints``).

    Where a size depends on the data it is guessed: of what is selected from a tensor, each of the
    ops of that kind in the module takes an equal share, as rows do that are balanced over experts.
    """
    results = interpret(program, guess=_Guess(program))
    known: dict[fx.Node, Any] = {}
    found: dict[fx.Node, Work] = {}
    while True:
        with (tally := _Tally()):
            item = next(results, None)
        if item is None:
            return found
        node, known[node] = item
        counted = Work(tally.flops, tally.moved, tally.made, known[node])
        found[node] = _own(program, node, known) or counted


def _own(program: Program, node: fx.Node, known: dict[fx.Node, Any]) -> Work | None:
    """What an op with a formula of its own does; None for the others."""
    if attentions.is_attention(node):
        flops = max(attentions.flops(program, node, known), default=0)
    elif node.op == "call_function" and op_name(node.target) in GROUPED:
        x, weight = (known[n] for n in node.all_input_nodes[:2])
        flops = 2 * x.numel() * weight.shape[-1]
    else:
        return None
    made = _bytes(known[node])
    return Work(
        flops, made + sum(_bytes(known[n]) for n in node.all_input_nodes), made, known[node]
    )


class _Tally(TorchDispatchMode):
    """Adds up FLOPs, bytes moved and bytes made of the aten ops that run meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved = self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, formula = op_name(func), flop_registry.get(getattr(func, "overloadpacket", None))
        made = 0 if _is_view(func) else _bytes(out)
        self.made += made
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        elif made and name not in WRITE_NOTHING:
            self.moved += made + (made if name in LOOKUPS else _bytes((args, kwargs)))
        return out


def _is_view(op: Any) -> bool:
    """Whether the results of an op are its operands, or views of them."""
    schema = getattr(op, "_schema", None)  # other functions of torch have none
    aliases = schema is not None and any(r.alias_info is not None for r in schema.returns)
    return aliases or op_name(op) == "_unsafe_view"


def _bytes(values: Any) -> int:
    tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


class _Guess:
    """A result that interpretation cannot tell, in the sizes of the whole model: an op of this kind
    has no rule, and takes its operands whole."""

    def __init__(self, program: Program):
        self.program = program
        self.alike = Counter(map(_kind, program.graph.nodes))

    def __call__(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        inputs = pytree.tree_leaves([env[n] for n in node.all_input_nodes])
        tensors = [v for v in inputs if isinstance(v, torch.Tensor)]
        most = max((t.numel() for t in tensors), default=1)
        rows = max(most // self.alike[_kind(node)], 1)
        dims = self.program.dims.get(node)
        if dims is None or not tensors:
            return rows  # a number
        positions = op_name(node.target).startswith("nonzero")
        kind = torch.int64 if positions else tensors[0].dtype

        def made(dims: Any) -> torch.Tensor:
            return torch.empty([self._size(d, rows) for d in dims], dtype=kind, device="meta")

        return made(dims) if isinstance(dims, tuple) else [made(each) for each in dims]

    def _size(self, dim: Dim, rows: int) -> int:
        form = sympy.sympify(size_of(dim)).subs(self.program.hints)
        return int(form.subs(dict.fromkeys(form.free_symbols, rows)))


def _kind(node: fx.Node) -> tuple[str, str]:
    return op_name(node.target), module_path(node)
