"""From the scores of an attention in a graph to the function of one block that computes them.

The scores are computed from the products by elementwise ops, among views of leading dimensions, and
from masks and biases that are computed the same way. Each of these ops is read backwards, starting
at the scores. Of every value met it is known which of its dimensions are batch, heads, queries and
keys (its `Form`), so that the op can be written again for blocks of four dimensions, and the views
between ops vanish. What does not vary in both queries and keys is not read any further, nor what an
op makes that is not elementwise: these are the vectors that the function is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import Max

from autoshard.infer import expression
from autoshard.masks import ancestors, depends_on_sizes_only, evaluate
from autoshard.program import Program
from autoshard.rules import elementwise, op_name
from autoshard.rules.core import argument, is_tensor

aten = torch.ops.aten

BATCH, HEADS, QUERIES, KEYS = range(4)
#: For each dimension of a value, which of the four it is made of, major first; () for size one.
Form = tuple[tuple[int, ...], ...]

_BY_ELEMENT = (
    elementwise.elementwise,
    elementwise.additive,
    elementwise.scaling,
    elementwise.division,
    elementwise.linear_map,
    elementwise.cast,
)
ELEMENTWISE = frozenset(
    name for names, rule in elementwise.RULES if rule in _BY_ELEMENT for name in names.split()
)
CASTS = frozenset("to _to_copy type_as".split())
COPIES = frozenset("clone contiguous alias lift_fresh lift_fresh_copy".split())
VIEWS = frozenset("view reshape _unsafe_view flatten unflatten view_as reshape_as".split())
SWAPS = frozenset("transpose swapaxes t mT adjoint".split())
#: Everything that only arranges, copies or repeats elements.
ARRANGES = (
    COPIES | VIEWS | SWAPS | frozenset("unsqueeze squeeze expand expand_as slice permute".split())
)
#: Ops whose result is one number everywhere: where that number is among the arguments.
FILLS: dict[str, Any] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda n: 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda n: 1),
    **dict.fromkeys(("full", "full_like", "fill"), lambda n: argument(n, 1, "fill_value")),
    "new_full": lambda n: argument(n, 2, "fill_value"),
    "scalar_tensor": lambda n: argument(n, 0, "s"),
}


class Untraceable(Exception):
    """This is no attention that can be written as one op."""


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """The sizes of a node's result, ints or expressions."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise Untraceable("a result of several tensors")
    return tuple(s if isinstance(s, int) else _plain(s) for s in value.shape)


def _plain(size: torch.SymInt) -> Any:
    """A size such as 1 - Max(0, 1 - n), that a slice from the end has, where it is simpler."""
    expr = expression(size)
    if isinstance(expr, int) or not expr.has(sympy.Max, Max):
        return expr
    env = size.node.shape_env

    def larger(*args: Any) -> Any:
        for a in args:
            if all(env._maybe_evaluate_static(sympy.Ge(a, b)) == True for b in args):  # noqa: E712
                return a
        return Max(*args)

    made = expr.replace(Max, larger).replace(sympy.Max, larger)
    return int(made) if made.is_Integer else made


def dtype_of(node: fx.Node) -> torch.dtype:
    """The type that a node names, else that of its value: `verify` raises the former only."""
    named = node.kwargs.get("dtype")
    if named is None and node.target is aten.to.dtype:
        named = node.args[1]
    return named if isinstance(named, torch.dtype) else node.meta["val"].dtype


def is_elementwise(node: fx.Node) -> bool:
    """Whether every element of the result depends on one element of each operand."""
    tags = getattr(node.target, "tags", ())
    if op_name(node.target) == "where":
        return len(node.args) > 1  # of a condition alone: positions
    if op_name(node.target) in ELEMENTWISE:
        return True
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def marked(shape: tuple[Any, ...], form: Iterable[tuple[int, ...]], sizes: tuple[Any, ...]) -> Form:
    """The form with dimensions of size one marked. The others must have the full size."""
    made = tuple(() if s == 1 else f for s, f in zip(shape, form, strict=True))
    for size, slots in zip(shape, made, strict=True):
        if size != math.prod(sizes[s] for s in slots):
            raise Untraceable(f"a size {size} that is not of the scores")
    return made


def permutation(node: fx.Node) -> list[int] | None:
    """Of a transpose or permute: for each dimension of the result, the operand's; else None."""
    kind, rank = op_name(node.target), node.meta["val"].ndim
    if kind == "permute":
        return [d % rank for d in node.args[1]]
    if kind not in SWAPS or (kind == "mT" and rank < 2):
        return None
    order = list(range(rank))
    if rank > 1:
        a, b = (node.args[1], node.args[2]) if len(node.args) > 2 else (-2, -1)
        order[a], order[b] = order[b], order[a]
    return order


def keeps_shape(node: fx.Node) -> bool:
    """Whether a slice, copy, view or expand gives its operand as it is."""
    kind = op_name(node.target)
    return bool(
        kind in COPIES | VIEWS | {"slice", "expand", "expand_as"}
        and is_tensor(node.args[0])
        and shape_of(node) == shape_of(node.args[0])
        and argument(node, 4, "step", 1) == 1
    )


class Tracer:
    """Writes the score graph of one attention.

    ``sizes`` of batch, heads, queries, keys; ``product``: the node of the products, if the graph
    has one, and its form. ``outer`` is called with a node and its form to make the vector
    ``[b|1, h|1, i|1, j|1]`` of it in the outer graph; ``positions`` with QUERIES or KEYS and a
    device to make the vector that counts them.
    """

    def __init__(
        self,
        program: Program,
        sizes: tuple[Any, ...],
        outer: Callable[[fx.Node, Form], fx.Node],
        positions: Callable[[int, torch.device], fx.Node],
        product: fx.Node | None = None,
        form: Form = (),
    ):
        self.program, self.sizes, self.outer, self.positions = program, sizes, outer, positions
        self.graph = fx.Graph()
        self.block = self.graph.placeholder("products")
        self.last = self.block  # of the placeholders
        self.vectors: dict[fx.Node, fx.Node] = {}  # outer vector -> placeholder
        self.varies: dict[fx.Node, tuple[bool, bool]] = {}
        self.product, self.product_form = product, form
        self.below = descendants(product) if product is not None else set()
        self.seen: dict[tuple[fx.Node, Form], fx.Node] = {}

    def form(self, node: fx.Node, form: Iterable[tuple[int, ...]]) -> Form:
        return marked(shape_of(node), form, self.sizes)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def drop_unused(self) -> None:
        """Forget vectors that no score depends on."""
        for outer, made in list(self.vectors.items()):
            if not made.users:
                self.graph.erase_node(made)
                del self.vectors[outer], self.varies[outer]

    def scores(self, node: fx.Node, form: Form) -> fx.Node:
        """The node of the score graph that computes this node of the outer one."""
        if (node, form) not in self.seen:
            self.seen[node, form] = self._scores(node, form)
        return self.seen[node, form]

    def _scores(self, node: fx.Node, form: Form) -> fx.Node:
        if node is self.product:
            if form != self.product_form:
                raise Untraceable("the products come with other dimensions")
            return self.block
        found = self._number(node) or self._arranged(node, form)
        if found is not None:
            return found
        slots = {s for dim in form for s in dim}
        if node in self.below or {QUERIES, KEYS} <= slots:
            found = self._triangle(node, form) or self._op(node, form)
            if found is not None:
                return found
        if node in self.below:
            raise Untraceable(f"{op_name(node.target)} between the products and the softmax")
        return self._vector(self.outer(node, form), node.meta["val"].ndim == 0)

    def _vector(self, outer: fx.Node, scalar: bool = False) -> fx.Node:
        if outer not in self.vectors:
            with self.graph.inserting_after(self.last):
                self.last = self.graph.placeholder(f"vector_{len(self.vectors)}")
            self.vectors[outer] = self.last
            shape = shape_of(outer)
            self.varies[outer] = (shape[QUERIES] != 1, shape[KEYS] != 1)
        made = self.vectors[outer]
        # as a number it does not take part in type promotion
        return self.call(aten.reshape.default, made, []) if scalar else made

    def _number(self, node: fx.Node) -> fx.Node | None:
        """The same number everywhere, made on the device of the block."""
        value = self.number(node)
        if value is None:
            return None
        fake = node.meta["val"]
        shape = [1] * 4 if fake.ndim else []
        return self.call(aten.new_full.default, self.block, shape, value, dtype=dtype_of(node))

    def number(self, node: fx.Node) -> Any:
        """What every element of a node is, if that is one number that is known; else None."""
        fake = node.meta["val"]
        kind = op_name(node.target)
        value = FILLS[kind](node) if kind in FILLS else None
        if value is None and fake.ndim == 0 and fake.device.type != "meta":
            needed = ancestors([node])
            fixed = not any(isinstance(n.meta.get("val"), torch.SymInt) for n in needed)
            if fixed and depends_on_sizes_only(self.program, needed):
                env = evaluate(self.program, needed, {})
                value = env[node].item() if env and env[node] is not None else None
        return None if isinstance(value, fx.Node) else value

    def _arranged(self, node: fx.Node, form: Form) -> fx.Node | None:
        """Reads through views: the operand, with its own form."""
        inner = self.operand_form(node, form)
        return None if inner is None else self.scores(node.args[0], inner)

    def operand_form(self, node: fx.Node, form: Form) -> Form | None:
        """The form of what a view, copy or repetition is of; None for other ops."""
        kind = op_name(node.target)
        if not node.args or not is_tensor(node.args[0]):
            return None
        shape = shape_of(node.args[0])
        if (made := _before(node, kind, list(form), shape, self.sizes)) is None:
            return None
        return self.form(node.args[0], made)

    def _triangle(self, node: fx.Node, form: Form) -> fx.Node | None:
        """tril, triu: a comparison of positions."""
        kind = op_name(node.target)
        if kind not in ("tril", "triu"):
            return None
        lower, diagonal = kind == "tril", argument(node, 1, "diagonal", 0)
        if not isinstance(diagonal, int) or {form[-2], form[-1]} != {(QUERIES,), (KEYS,)}:
            return None
        device = node.meta["val"].device
        rows, columns = (self._vector(self.positions(s, device)) for (s,) in form[-2:])
        ahead = self.call(aten.sub.Tensor, columns, rows)
        kept = self.call(aten.le.Scalar if lower else aten.ge.Scalar, ahead, diagonal)
        zero = torch.zeros((), dtype=node.meta["val"].dtype).item()
        return self.call(aten.where.ScalarOther, kept, self.scores(node.args[0], form), zero)

    def _op(self, node: fx.Node, form: Form) -> fx.Node | None:
        if not is_elementwise(node):
            return None
        inputs = node.all_input_nodes
        if not inputs or not all(is_tensor(n) for n in inputs):
            return None  # a size among the operands

        def operand(n: fx.Node) -> fx.Node:
            skipped = len(form) - n.meta["val"].ndim
            pairs = zip(shape_of(n), shape_of(node)[skipped:], strict=True)
            # a symbolic size that is not one can only be that of the result, however it is written
            shape = tuple(s if isinstance(s, int) else made for s, made in pairs)
            return self.scores(n, marked(shape, form[skipped:], self.sizes))

        if op_name(node.target) in CASTS:
            made, given = dtype_of(node), operand(node.args[0])
            if dtype_of(node.args[0]) == made:
                return given
            return self.call(aten.to.dtype, given, made)
        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        return self.call(node.target, *args, **kwargs)


def descendants(node: fx.Node) -> set[fx.Node]:
    """The node and all that is computed from it."""
    found, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def _before(
    node: fx.Node, kind: str, form: list[Any], shape: tuple[Any, ...], sizes: tuple[Any, ...]
) -> list[Any] | None:
    """The dimensions of a view's operand of this shape, by those of its result."""
    if keeps_shape(node) or kind in COPIES:
        return form
    if (order := permutation(node)) is not None:
        made: list[Any] = [()] * len(order)
        for new, old in enumerate(order):
            made[old] = form[new]
        return made
    if kind == "unsqueeze":
        at = node.args[1]
        del form[at if at >= 0 else len(form) + at]
        return form
    if kind == "squeeze":
        drop = argument(node, 1, "dim")
        drop = range(len(shape)) if drop is None else [drop] if isinstance(drop, int) else drop
        gone = {d % len(shape) for d in drop if shape[d] == 1}
        rest = iter(form)
        return [() if d in gone else next(rest) for d in range(len(shape))]
    if kind in ("expand", "expand_as"):
        tail = form[len(form) - len(shape) :]
        return [() if s == 1 else f for s, f in zip(shape, tail, strict=True)]
    if kind in VIEWS:
        return regrouped([s for dim in form for s in dim], shape, sizes)
    if kind == "repeat":
        times = [expression(getattr(t, "meta", {}).get("val", t)) for t in node.args[1]]
        pairs = list(zip(form, times, strict=True))[len(form) - len(shape) :]
        return _unrepeated(pairs, shape, sizes)
    return None


def _unrepeated(
    repeated: list[tuple[tuple[int, ...], Any]], shape: tuple[Any, ...], sizes: tuple[Any, ...]
) -> list[Any] | None:
    """Of every dimension that was repeated some times, as a whole, the part that is one time."""
    out = []
    for (form, times), size in zip(repeated, shape, strict=True):
        parts = [(), form] if times == 1 else regrouped(form, (times, size), sizes)
        if parts is None:
            return None
        out.append(parts[1])
    return out


def regrouped(
    slots: Iterable[int], shape: tuple[Any, ...], sizes: tuple[Any, ...]
) -> list[tuple[int, ...]] | None:
    """Dimensions of these sizes, made in order of the slots; None where they do not divide so."""
    rest, out = [s for s in slots if sizes[s] != 1], []
    for size in shape:
        taken: list[int] = []
        while size != math.prod(sizes[s] for s in taken):
            if not rest:
                return None
            taken.append(rest.pop(0))
        out.append(tuple(taken))
    return None if rest else out
