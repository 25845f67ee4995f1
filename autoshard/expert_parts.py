"""What experts compute for every token, on rows: those of tokens at the experts they chose.

Dimensions are told apart by their axes: those of the tokens, that of the experts, and all others,
the *rest*; the form of a node on rows is ``[rows, *rest]``. In a loop there is a node for each
expert in place of an axis.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.axes import Axis, Dim, leaves
from autoshard.expert_loops import Loop, inputs
from autoshard.masks import run
from autoshard.routing import Unfit, shape_of
from autoshard.rules import op_name
from autoshard.rules.contraction import letters_of
from autoshard.rules.core import Dims, argument, is_tensor
from autoshard.runtime.experts import expert_rows, grouped_product
from autoshard.scores import ARRANGES, is_elementwise, keeps_shape

aten = torch.ops.aten

#: A node with an axis of experts, or a node for each expert.
Group = tuple[fx.Node, ...]

PRODUCTS = frozenset("linear mm bmm matmul einsum".split())
#: Ops that take one dimension apart or mix along it: where it stands among the arguments.
ALONG = {
    **dict.fromkeys("split chunk split_with_sizes".split(), (2, 0)),
    **dict.fromkeys("slice select".split(), (1, 0)),
    **dict.fromkeys("softmax _softmax".split(), (1, -1)),
}


@dataclass(frozen=True, eq=False)
class Part:
    """A group on rows. zero: whether it is zero for every expert that a token has not chosen;
    make: gives the node ``[rows, *rest]``."""

    zero: bool
    make: Callable[[], Any]


@dataclass
class Parts(Loop):
    """dims: of all nodes, by axes; tokens, experts: the axes of the mixture; source: the tokens
    that rows are made of; numbers: ``[tokens, experts]``, by their first node; products: how many
    the experts compute; made: what a dispatch has given."""

    dims: dict[fx.Node, Any] = field(default_factory=dict)
    tokens: Dim = ()
    experts: Axis | None = None
    source: fx.Node | None = None
    numbers: dict[fx.Node, Callable[[], fx.Node]] = field(default_factory=dict)
    products: int = 0
    made: dict[Any, fx.Node] = field(default_factory=dict)
    _parts: dict[Group, Part] = field(default_factory=dict)

    def begin(self, tokens: Dim, experts: Axis | None) -> None:
        self.tokens, self.experts, self.source, self.products = tokens, experts, None, 0
        self._parts, self.numbers, self.made, self.stacked = {}, {}, {}, {}

    def is_computed(self, group: Group) -> bool:
        """Whether a number for every token and expert is what experts compute."""
        raise NotImplementedError

    def depends_on_choice(self, node: fx.Node) -> bool:
        raise NotImplementedError

    def is_zero_elsewhere(self, nodes: Group, turned: bool) -> bool:
        """Whether numbers are zero for all experts that a token has not chosen."""
        raise NotImplementedError

    # axes

    def flat(self, node: fx.Node) -> Dim:
        return flat(self.dims[node])

    def rest(self, dim: Dim) -> Dim:
        return tuple(a for a in leaves(dim) if a not in self.tokens and a is not self.experts)

    def shape(self, dims: Dims) -> list[Dim]:
        """The dimensions that rows have, of a node with these."""
        return [rest for d in dims if (rest := self.rest(d))]

    def has_tokens(self, node: fx.Node) -> bool:
        own = self.flat(node)
        counts = {own.count(a) for a in self.tokens}
        if counts == {0}:
            return False
        if counts != {1} or own.count(self.experts) > 1:  # type: ignore[arg-type]
            raise Unfit(f"{op_name(node.target)} of tokens with each other")
        return True

    # parts

    def part(self, group: Group) -> Part:
        if group not in self._parts:
            found = self._part(group)
            kept: list[Any] = []

            def make() -> Any:
                if not kept:
                    kept.append(found.make())
                    self._see_form(kept[0], group[0])
                return kept[0]

            self._parts[group] = Part(found.zero, make)
        return self._parts[group]

    def _see_form(self, new: fx.Node, node: fx.Node) -> None:
        """Raise Unfit unless what was made has the type and sizes of a node on rows."""
        if not is_tensor(node):
            return
        value, wanted = new.meta["val"], [number(d) for d in self.shape(self.dims[node])]
        if value.dtype != node.meta["val"].dtype or [*value.shape[1:]] != wanted:
            raise Unfit(f"{node.name} of experts, which has another form on rows of all")

    def _part(self, group: Group) -> Part:
        node, each = group[0], len(set(group)) > 1
        kind = op_name(node.target)
        if isinstance(self.dims.get(node), tuple):
            if not self.has_tokens(node):
                raise Unfit(f"{node.name}, which is made neither of tokens nor of experts")
            own = self.flat(node)
            if not each and self.experts not in own:
                return self._of_tokens(node)
            if not self.rest(own) and not self.is_computed(group):
                return self._of_numbers(group, each)
        if kind == "stack" and not each and self._is_experts(node, argument(node, 1, "dim", 0)):
            return self.part(tuple(node.args[0]))
        texts = {str((n.target, fx.map_arg((n.args, n.kwargs), lambda _: ...))) for n in group}
        if len(texts) > 1:
            raise Unfit(f"{kind} of experts with different arguments")
        given = operands(group)
        if kind in PRODUCTS:
            return self.product(group)
        if is_elementwise(node) or kind in ("dropout", "detach"):
            return self._elementwise(node, given)
        if node.target is operator.getitem:
            whole = self.part(given[0])
            return Part(whole.zero, lambda: self.call(node.target, whole.make(), node.args[1]))
        if kind in ALONG and not keeps_shape(node):
            return self._along(node, given[0])
        if kind == "cat":
            return self._joined(node, given)
        if kind in ("sum", "mean"):
            return self._reduced(node, given[0])
        if kind in ARRANGES | {"repeat"}:
            return self._view(node, given[0])
        raise Unfit(f"{kind} inside experts, which has no form for rows of all of them")

    def _is_experts(self, node: fx.Node, dim: int) -> bool:
        return leaves(self.dims[node][dim]) == (self.experts,)

    def _of_tokens(self, node: fx.Node) -> Part:
        """What is the same for all experts: rows of tokens."""
        if self.depends_on_choice(node):
            raise Unfit(f"{node.name}, which is made neither of tokens nor of experts")
        shape = self.shape(self.dims[node])
        node = self._plain(node)
        own = self.flat(node)
        width = self.rest(own)
        if not width or own != (*self.tokens, *width):
            raise Unfit("numbers of tokens that are the same for all experts")
        if self.source not in (None, node):
            raise Unfit("rows of several tensors of tokens")
        self.source = node
        return Part(False, lambda: self._arranged(self.made["rows"], [width], shape, 1))

    def _plain(self, node: fx.Node) -> fx.Node:
        """What a node shows in another arrangement."""
        own = sorted(map(id, self.flat(node)))
        while op_name(node.target) in ARRANGES and is_tensor(node.args[0]):
            if sorted(map(id, self.flat(node.args[0]))) != own:
                break
            node = node.args[0]
        return node

    def _of_numbers(self, group: Group, each: bool) -> Part:
        """One number for every token and expert, made before the experts compute."""
        first = group[0] if each else self._plain(group[0])
        own, last = self.flat(first), (self.experts,)
        turned = not each and own == (*last, *self.tokens)
        if not turned and own != (self.tokens if each else (*self.tokens, *last)):
            raise Unfit("numbers for tokens and experts in an order that is not known")
        if not first.meta["val"].is_floating_point():
            raise Unfit("choices of experts that are not numbers")

        def wide() -> fx.Node:
            if each:
                columns = [self.call(aten.reshape.default, n, [-1]) for n in group]
                return self.call(aten.stack.default, columns, 1)
            if turned:
                lines = self.call(aten.reshape.default, first, [self.count, -1])
                return self.call(aten.transpose.int, lines, 0, 1)
            if first.meta["val"].ndim == 2 and shape_of(first)[1] == self.count:
                return first
            return self.call(aten.reshape.default, first, [-1, self.count])

        self.numbers[first] = wide
        zero = self.is_zero_elsewhere(group if each else (first,), turned)
        return Part(zero, lambda: self.made[first])

    def _elementwise(self, node: fx.Node, given: list[Group]) -> Part:
        out = self.dims[node]
        parts = [self._operand(g, out) for g in given]

        def make() -> fx.Node:
            ready = iter([p.make() for p in parts])
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(ready))
            return self.call(node.target, *args, **kwargs)

        return Part(stays_zero(node, [p.zero for p in parts]), make)

    def _operand(self, group: Group, out: Dims) -> Part:
        """An operand as it meets others on rows."""
        node = group[0]
        if not is_tensor(node):
            raise Unfit("experts that read how many tokens they have")
        own = self.dims[node]
        dims = (*((),) * (len(out) - len(own)), *own)
        if self.has_tokens(node):
            found = self.part(group)
            return Part(found.zero, lambda: self._spread(found.make(), dims, out, 1))
        shape = self.shape(dims)
        if self.experts in self.flat(node) or len(set(group)) > 1:
            return Part(False, lambda: self._spread(self._table_rows(group, shape), dims, out, 1))
        return Part(False, lambda: self._spread(self._arranged(node, own, shape, 0), dims, out, 0))

    def _spread(self, x: fx.Node, dims: Dims, out: Dims, at: int) -> fx.Node:
        """With a dimension of one wherever the result has a dimension that this has not."""
        for own, wanted in zip(dims, out, strict=True):
            if self.rest(wanted):
                x = x if self.rest(own) else self.call(aten.unsqueeze.default, x, at)
                at += 1
        return x

    def _table(self, group: Group, dims: Dims, wanted: list[Dim]) -> fx.Node:
        """``[experts, *wanted]`` of what each expert has."""
        if len(set(group)) == 1:
            return self._arranged(group[0], dims, [(self.experts,), *wanted], 0)  # type: ignore[list-item]
        return self._arranged(self._stack(group), dims, wanted, 1)

    def _table_rows(self, group: Group, shape: list[Dim]) -> fx.Node:
        table = self._table(group, self.dims[group[0]], shape)
        value, rows = table.meta["val"], self.made["rows"].meta["val"].shape[0]
        made = value.new_empty([rows, *value.shape[1:]])
        return self.call(expert_rows, table, self.made["ends"], self.made["plan"], value=made)

    def _arranged(self, x: fx.Node, dims: Iterable[Dim], wanted: list[Dim], skip: int) -> fx.Node:
        """The elements of x, whose dimensions after the first ``skip`` are these, in other ones."""
        dims, wanted = [leaves(d) for d in dims], [leaves(d) for d in wanted]
        own, order = flat(dims), flat(wanted)
        if sorted(map(id, own)) != sorted(map(id, order)) or len(set(own)) < len(own):
            raise Unfit("experts with dimensions that are not told apart")
        ahead = [-1] * skip
        if own != order:
            if dims != [(a,) for a in own]:
                x = self.call(aten.reshape.default, x, [*ahead, *(number((a,)) for a in own)])
            places = [skip + own.index(a) for a in order]
            x = self.call(aten.permute.default, x, [*range(skip), *places])
            dims = [(a,) for a in order]
        if dims != wanted:
            x = self.call(aten.reshape.default, x, [*ahead, *map(number, wanted)])
        return x

    def _view(self, node: fx.Node, source: Group) -> Part:
        found = self.part(source)
        before, after = self.shape(self.dims[source[0]]), self.shape(self.dims[node])
        if sorted(map(id, flat(before))) != sorted(map(id, flat(after))):
            raise Unfit(f"{op_name(node.target)} inside experts that repeats or takes apart")
        return Part(found.zero, lambda: self._arranged(found.make(), before, after, 1))

    def _place(self, source: fx.Node, dim: int, kind: str) -> int:
        """Which dimension of rows a dimension is."""
        dims = self.dims[source]
        own = leaves(dims[dim])
        if not own or self.rest(own) != own:
            raise Unfit(f"{kind} over tokens or experts")
        return 1 + len(self.shape(dims[: dim % len(dims)]))

    def _along(self, node: fx.Node, source: Group) -> Part:
        kind = op_name(node.target)
        found, (at, default) = self.part(source), ALONG[kind]
        place = self._place(source[0], argument(node, at, "dim", default), kind)
        named = {k: v for k, v in node.kwargs.items() if k != "dim"}

        def make() -> fx.Node:
            args = [found.make(), *node.args[1:]]
            args[at : at + 1] = [place]
            return self.call(node.target, *args, **named)

        return Part(found.zero and "softmax" not in kind, make)

    def _reduced(self, node: fx.Node, source: Group) -> Part:
        kind, found, dims = op_name(node.target), self.part(source), argument(node, 1, "dim")
        places = [self._place(source[0], d, kind) for d in dims or ()]
        if not places:
            raise Unfit(f"{kind} over tokens or experts")
        named = {k: v for k, v in node.kwargs.items() if k == "dtype"}
        return Part(found.zero, lambda: self.call(node.target, found.make(), places, **named))

    def _joined(self, node: fx.Node, given: list[Group]) -> Part:
        parts = [self.part(g) for g in given]
        place = self._place(node, argument(node, 1, "dim", 0), "cat")

        def make() -> fx.Node:
            return self.call(node.target, [p.make() for p in parts], place)

        return Part(all(p.zero for p in parts), make)

    def product(self, group: Group) -> Part:
        """Rows times the weights of their experts, and times numbers; a sum over experts is left
        out."""
        node, given = group[0], operands(group)
        out, places = self.dims[node], summed_places(node)
        added = given[len(places) :]
        bias = self._operand(added[0], out) if added else None
        vectors, weights, factors = list[int](), list[int](), list[int]()
        for i in range(len(places)):
            own, summed = given[i][0], flat(self.dims[given[i][0]][p] for p in places[i])
            if any(a in self.tokens for a in summed):
                raise Unfit(f"{op_name(node.target)} of tokens with each other")
            if not self.has_tokens(own):
                weights.append(i)
            elif self.rest(self.flat(own)):
                vectors.append(i)
            else:
                factors.append(i)
        if len(vectors) > 1 or len(weights) > 1 or (weights and not vectors):
            raise Unfit("several vectors of a row")
        self.products += len(weights)
        parts = [self.part(given[i]) for i in (*vectors, *factors)]
        shape = self.shape(self.dims[given[vectors[0]][0]]) if vectors else []
        inner = self.rest(flat(self.dims[given[i][0]][p] for i in vectors for p in places[i]))
        times, shape_after = self._weight(given, places, weights, inner), shape
        if weights:
            if flat(shape) != inner and set(flat(shape)) != set(inner):
                raise Unfit("several vectors of a row")
            shape_after = [times[1]]  # type: ignore[index]
        elif inner:
            raise Unfit("products of what experts compute with each other")

        def make() -> fx.Node:
            x = parts[0].make()
            if times is not None:
                x = self._arranged(x, shape, [inner], 1)
                weight = times[0]()
                value = x.meta["val"].new_empty(
                    [x.meta["val"].shape[0], weight.meta["val"].shape[2]]
                )
                x = self.call(grouped_product, x, weight, self.made["ends"], value=value)
            for part in parts[1:]:
                factor = part.make()
                for _ in shape_after:
                    factor = self.call(aten.unsqueeze.default, factor, -1)
                x = self.call(aten.mul.Tensor, x, factor)
            x = self._arranged(x, shape_after, self.shape(out), 1)
            return x if bias is None else self.call(aten.add.Tensor, x, bias.make())

        return Part(any(p.zero for p in parts) and bias is None, make)

    def _weight(
        self, given: list[Group], places: list[set[int]], at: list[int], inner: Dim
    ) -> tuple[Callable[[], fx.Node], Dim] | None:
        """What makes ``[experts, inner, outer]`` of the weights in a product, and ``outer``."""
        if not at:
            return None
        group, summed = given[at[0]], places[at[0]]
        if len(set(group)) == 1 and self.experts not in self.flat(group[0]):
            raise Unfit("weights that are the same for all experts")
        # where a weight is square both of its dimensions may be one axis: a twin tells them apart
        twins = {a: Axis(a.size) for a in inner}
        dims = [
            tuple(twins.get(a, a) for a in leaves(d)) if i in summed else leaves(d)
            for i, d in enumerate(self.dims[group[0]])
        ]
        outer = self.rest(flat(d for i, d in enumerate(dims) if i not in summed))
        wanted = [tuple(twins[a] for a in inner), outer]
        return (lambda: self._table(group, tuple(dims), wanted)), outer


def summed_places(node: fx.Node) -> list[set[int]]:
    """Of every operand of a product: the dimensions that are summed over."""
    kind, ranks = op_name(node.target), [len(shape_of(n)) for n in inputs(node)]
    if kind == "einsum":
        letters, kept = letters_of(node.args[0], ranks)
        if any(len(set(each)) < len(each) for each in letters):
            raise Unfit("einsum that takes a diagonal")
        return [{i for i, a in enumerate(each) if a not in kept} for each in letters]
    if kind == "linear":
        return [{ranks[0] - 1}, {1}]
    return [{ranks[0] - 1}, {max(ranks[1] - 2, 0)}]


def operands(group: Group) -> list[Group]:
    """The groups that a group is computed from."""
    found = list(zip(*(inputs(n) for n in group), strict=True))
    if any(len({str(shape_of(n)) for n in each}) > 1 for each in found):
        raise Unfit("experts of different sizes")
    return found


def flat(dims: Iterable[Dim]) -> Dim:
    return tuple(a for d in dims for a in leaves(d))


def number(dim: Dim) -> int:
    size = math.prod(a.size for a in leaves(dim))
    if not isinstance(size, int):
        raise Unfit("experts with a width that is not known")
    return size


def stays_zero(node: fx.Node, zero: list[bool]) -> bool:
    """Whether the result of an elementwise op is zero, and has a gradient, where the operands are
    that are said to."""
    kind = op_name(node.target)
    if kind == "mul":
        return any(zero)
    if kind == "div" and len(zero) == 2:
        return zero == [True, False]
    if not zero or not all(zero):
        return False
    zeros = [torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in zero]
    ready = iter(zeros)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(ready))
    try:
        out = run(node, args, kwargs)
        grads = torch.autograd.grad(out.sum(), zeros, allow_unused=True)
    except Exception:  # it cannot be run: nothing is known of it
        return False
    return not out.any() and all(g is None or bool(g.isfinite().all()) for g in grads)
