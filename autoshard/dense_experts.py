"""A mixture of experts of which every expert computes every token.

    given = zeros(tokens, experts).scatter(1, chosen, weights)
    out = einsum("teh,ehd,te->td", gelu(einsum("td,edh->teh", x, up)), down, given)

What an expert adds for a token that has not chosen it is zero: ``given`` is, in trials with any
numbers in place of scores and weights, and what is done with it keeps that. So the rows of tokens
at the experts they chose are all there is, in value and in gradient.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import torch
from torch import fx

from autoshard import experts
from autoshard.axes import Axis, leaves
from autoshard.expert_loops import inputs
from autoshard.expert_parts import PRODUCTS, Group, Parts, flat, number, summed_places
from autoshard.infer import infer_axes
from autoshard.masks import evaluate, of_sizes, run
from autoshard.program import Program, shallow
from autoshard.routing import TOKENS, Unfit, choice, chosen_by, draw_ids, is_zero, shape_of
from autoshard.rules import op_name
from autoshard.rules.core import argument, is_tensor
from autoshard.scores import ARRANGES, CASTS, FILLS

aten = torch.ops.aten

#: How often it is tried whether numbers are zero.
TRIALS = 3


def fuse_dense(program: Program, capacity: float | None) -> Iterator[tuple[fx.Node, Unfit]]:
    """Rewrite the mixtures whose experts compute every token; yield those that are left as they
    are: the choice of experts, and why. ``capacity``: of `autoshard.experts.dispatch`."""
    dispatched = {chosen_by(node.args[1]) for node in experts.dispatches(program.graph)}
    found = [n for n in program.graph.nodes if choice(n) is not None and n not in dispatched]
    if not found and not dispatched:
        found = [n for n in program.graph.nodes if _weighs(n)]
    dims: dict[fx.Node, Any] = {}
    if found:
        view = shallow(program)
        view.dims = dims
        infer_axes(view)
    for node in found:
        try:
            Dense(program, node, capacity=capacity, dims=dims).fuse()
        except Unfit as error:
            yield node, error


def _weighs(node: fx.Node) -> bool:
    """Whether an op gives weights to a fixed number of things, which could be experts: they meet
    wider ones, or are picked one by one. (Gates have the shape of what they meet.)"""
    if op_name(node.target) not in ("softmax", "_softmax", "sigmoid"):
        return False
    if not isinstance(shape_of(node)[-1], int):
        return False
    stack, seen = [node], set[fx.Node]()
    while stack:
        weights = stack.pop()
        for user in {*weights.users} - seen:
            seen.add(user)
            kind = op_name(user.target)
            others = [n for n in user.all_input_nodes if n is not weights and is_tensor(n)]
            if kind in ("select", "slice", "unbind"):
                return True
            if kind in PRODUCTS and kind != "linear" and any(len(shape_of(n)) > 2 for n in others):
                return True
            if kind in ARRANGES | CASTS:
                stack.append(user)
            elif kind in ("mul", "div"):
                if any(_is_wider(n, weights) for n in others):
                    return True
                if all(1 in shape_of(n) for n in others):  # weights that are scaled
                    stack.append(user)
    return False


def _is_wider(node: fx.Node, weights: fx.Node) -> bool:
    return shape_of(weights)[-1:] == (1,) and shape_of(node)[-1:] != (1,)


def is_made_of(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node is computed from another one. Only what is between them is walked."""
    stack, seen = [node], set[fx.Node]()
    while stack:
        each = stack.pop()
        if each is other:
            return True
        if each not in seen and each > other:
            seen.add(each)
            stack += each.all_input_nodes
    return False


@dataclass
class Dense(Parts):
    """``at``: where the experts of tokens are chosen, or get their weights if none is chosen.
    scores: ``[..., experts]``; later: what depends on it, as far as it was walked."""

    scores: Any = None
    later: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        ids = choice(self.at)
        self.scores = self.at if ids is None else self.at.args[0]
        self.count = shape_of(self.scores)[-1]
        if ids is not None:
            self.ids = ids
            same_rank = ids.meta["val"].ndim == self.scores.meta["val"].ndim
            self.k = shape_of(ids)[-1] if same_rank else 1

    def fuse(self) -> None:
        """Raises Unfit where there are such experts, and they have no form on rows."""
        why: Unfit | None = None
        for end, terms in self._ends():
            try:
                with self.or_nothing():
                    return self._rewrite_end(end, terms)
            except Unfit as error:
                why = error if self._is_mixture(terms) else why
        if why is not None:
            raise why
        return None

    def _is_mixture(self, terms: Group | None) -> bool:
        """Whether what is added up over has a number for every token."""
        numbers = {*self.tokens, self.experts}
        with_dims = (n for n in self.later if isinstance(self.dims.get(n), tuple))
        return terms is not None or any(set(self.flat(n)) == numbers for n in with_dims)

    def depends_on_choice(self, node: fx.Node) -> bool:
        return node in self.later

    def is_computed(self, group: Group) -> bool:
        node = group[0]
        if len(set(group)) > 1:
            return node not in self.later and not is_made_of(self.scores, node)
        slots = self.flat(self.ids) if self.ids is not None else ()
        stack = [node]
        while stack:
            node = stack.pop()
            own = self.flat(node) if isinstance(self.dims.get(node), tuple) else ()
            if self.experts in own and self.has_tokens(node):
                if {*self.rest(own)} - {*slots}:
                    return True
                stack += node.all_input_nodes
        return False

    # where experts are added up

    def _ends(self) -> Iterator[tuple[fx.Node, Group | None]]:
        """``(sum, terms)``: the nodes that add up over experts, and where they add node by node
        what each expert gives."""
        tokens = flat(self.dims[self.scores][:-1])
        if not tokens or not isinstance(self.k, int):
            return
        loop = _Loop(self.count)
        for node in self._walk():
            if node not in self.dims:
                continue
            for axis in self._summed(node):
                self.begin(flat(self.dims[self.scores][:-1]), axis)
                own = self.flat(node)
                if own == (*self.tokens, *self.rest(own)) and self.rest(own):
                    yield node, None
            terms = loop.terms(node, self._of_expert(node))
            if terms is not None:
                self.begin(flat(self.dims[self.scores][:-1]), None)
                yield node, terms

    def _walk(self) -> Iterator[fx.Node]:
        """What depends on the choice, in the order of the graph."""
        waiting = [self.at]
        while waiting:
            node = heappop(waiting)
            if node not in self.later:
                self.later.add(node)
                for user in node.users:
                    heappush(waiting, user)
                yield node

    def _summed(self, node: fx.Node) -> list[Axis]:
        """The axes as long as there are experts that a node adds up over."""
        kind = op_name(node.target)
        if kind == "sum":
            summed = [(node.args[0], d) for d in argument(node, 1, "dim") or ()]
        elif kind in PRODUCTS:
            places = zip(inputs(node), summed_places(node), strict=False)
            summed = [(n, d) for n, dims in places for d in dims]
        else:
            return []
        found = [a for n, d in summed for a in leaves(self.dims[n][d])]
        return list(dict.fromkeys(a for a in found if a.size == self.count))

    def _of_expert(self, node: fx.Node) -> int | None:
        """The expert whose numbers a node picks."""
        kind = op_name(node.target)
        if kind == "eq":
            at, whole = node.args[1], True
        elif kind in ("select", "slice") and len(node.args) > 2:
            size, at = shape_of(node.args[0])[node.args[1]], node.args[2]
            whole = size == self.count and (kind == "select" or shape_of(node)[node.args[1]] == 1)
        elif node.target is operator.getitem and op_name(node.args[0].target) == "unbind":
            at, whole = node.args[1], len(node.args[0].meta["val"]) == self.count
        else:
            return None
        return at if whole and isinstance(at, int) and 0 <= at < self.count else None

    # the new nodes

    def _rewrite_end(self, end: fx.Node, terms: Group | None) -> None:
        shown = terms[0] if terms else end
        own = self.flat(shown)
        if own != (*self.tokens, *self.rest(own)):
            raise Unfit("experts whose results have tokens in another order")
        if op_name(end.target) == "sum" and not terms:
            if len(argument(end, 1, "dim")) != 1:
                raise Unfit("a sum over experts and over what they give")
            found = self.part((end.args[0],))
        else:
            found = self.part(terms) if terms else self.product((end,))
        if self.source is None or not self.products:
            raise Unfit("rows that are not made of tokens")
        if not found.zero:
            raise Unfit("experts that count for tokens that have not chosen them")
        with self.before(end):
            self._dispatch()
            out = self._combined(found.make(), shown)
            if terms:
                out = self._with_first(out, end, terms)
            self.see_same(out, end)
        self.dims[out] = self.dims[end]
        end.replace_all_uses_with(out)

    def _dispatch(self) -> None:
        x: Any = self.source
        width = number(self.rest(self.flat(x)))
        if x.meta["val"].ndim != 2 or shape_of(x)[1] != width:
            x = self.call(aten.reshape.default, x, [-1, width])
        ids, chosen = self.ids, {}
        if ids.meta["val"].ndim != 2:
            ids = self.call(aten.reshape.default, ids, [-1, self.k])
        for key, wide in self.numbers.items():
            chosen[key] = self.call(aten.gather.default, wide(), 1, ids)
        made = self.dispatch(x, list(chosen.values()))
        self.made = made | {key: made[scalar] for key, scalar in chosen.items()}

    def _combined(self, rows: fx.Node, shown: fx.Node) -> fx.Node:
        """The sum of the rows of each token, as the node is that it takes the place of."""
        shape = self.shape(self.dims[shown])
        rows = self.cast(self._arranged(rows, shape, [flat(shape)], 1), shown)
        tokens = math.prod(self.scores.meta["val"].shape[:-1])  # not numel(), which fixes it
        value = rows.meta["val"].new_empty([tokens, rows.meta["val"].shape[1]])
        out = self.call(experts.combine, rows, self.made["plan"], value=value)
        if shape_of(out) == shape_of(shown):
            return out
        return self.call(aten.reshape.default, out, self._sizes(shown))

    def _sizes(self, node: fx.Node) -> list[Any]:
        """The shape of a node, where a size that is not fixed is one of the scores."""
        places = {str(size): i for i, size in reversed([*enumerate(shape_of(self.scores))])}
        found: list[Any] = []
        for size, value in zip(shape_of(node), node.meta["val"].shape, strict=True):
            if isinstance(size, int):
                found.append(size)
            elif str(size) in places:
                place = places[str(size)]
                found.append(self.call(aten.sym_size.int, self.scores, place, value=value))
            else:
                raise Unfit("tokens whose number is not known")
        return found

    def _with_first(self, out: fx.Node, last: fx.Node, terms: Group) -> fx.Node:
        """Added to what the experts' results were added to, if that was anything."""
        node: Any = last
        for term in reversed(terms):
            if node is term:
                return out
            rest = [a for a in node.args[:2] if a is not term]
            node = rest[0]
        if not isinstance(node, fx.Node) or is_zero(node):
            return out
        return self.call(aten.add.Tensor, node, out)

    # what is zero

    def is_zero_elsewhere(self, nodes: Group, turned: bool) -> bool:
        if self.ids is None:
            raise Unfit("experts that all have a weight for every token")
        return all(self._is_zero_in_trial(nodes, turned, seed) for seed in range(TRIALS))

    def _is_zero_in_trial(self, nodes: Group, turned: bool, seed: int) -> bool:
        trial = _Trial(self.program, self.ids, seed)
        ids = trial.draw_ids(self.scores, self.k)
        try:
            found = [trial.value(n).reshape(-1) for n in nodes]
        except Exception:  # it cannot be run: nothing is known of it
            return False
        if len(nodes) > 1:
            wide = torch.stack(found, 1)
        else:
            wide = found[0].view(self.count, -1).T if turned else found[0].view(-1, self.count)
        chosen = torch.zeros(wide.shape, dtype=torch.bool).scatter(1, ids, True)
        return bool((wide[~chosen] == 0).all()) and trial.is_constant(wide[~chosen])


class _Loop:
    """Looks, among nodes in the order of the graph, for those that add up what each expert gives,
    one after the other."""

    def __init__(self, count: int):
        self.count = count
        self.of = dict[fx.Node, int]()  # the experts whose numbers a node is made of, as bits
        self.meet: list[fx.Node | None] = [None] * count  # experts e-1 and e, first

    def terms(self, node: fx.Node, expert: int | None) -> Group | None:
        """What each expert gives, where a node adds up the last of them."""
        own = 0 if expert is None else 1 << expert
        for n in node.all_input_nodes:
            own |= self.of.get(n, 0)
        self.of[node] = own
        last = False
        for e in range(1, self.count) if own & (own - 1) else ():
            if self.meet[e] is None and own >> (e - 1) & 3 == 3:
                self.meet[e], last = node, True
        return self._terms() if last and None not in self.meet[1:] else None

    def _has(self, node: Any, expert: int) -> bool:
        return isinstance(node, fx.Node) and bool(self.of.get(node, 0) >> expert & 1)

    def _terms(self) -> Group | None:
        terms: list[fx.Node] = []
        last: Any = None
        for e in range(1, self.count):
            meet: Any = self.meet[e]
            if not _adds(meet):
                return None
            before, term = meet.args[:2] if self._has(meet.args[0], e - 1) else meet.args[1::-1]
            if last is None:
                added = [a for a in before.args if self._has(a, 0)] if _adds(before) else []
                terms.append(added[0] if len(added) == 1 else before)
            elif before is not last:
                return None
            terms.append(term)
            last = meet
        return tuple(terms) if all(self._has(t, e) for e, t in enumerate(terms)) else None


class _Trial:
    """What nodes are for ids drawn by chance, with any numbers, of many magnitudes, in place of all
    that does not depend on those."""

    def __init__(self, program: Program, ids: fx.Node, seed: int):
        self.program, self.ids, self.seed = program, ids, seed
        self.generator = torch.Generator().manual_seed(seed)
        self.sizes = {symbol: TOKENS + 2 * n for n, symbol in enumerate(program.hints)}
        self.known = dict[fx.Node, Any]()
        self.drawn: list[torch.Tensor] = []

    def draw_ids(self, scores: fx.Node, k: int) -> torch.Tensor:
        """No expert twice for a token."""
        *lead, count = self._shape(scores)
        ids = draw_ids(math.prod(lead), count, k, self.generator)
        self.known[self.ids] = ids.reshape(self._shape(self.ids))
        return ids

    def _shape(self, node: fx.Node) -> list[int]:
        sides = [s if isinstance(s, int) else s.subs(self.sizes) for s in shape_of(node)]
        if any(getattr(side, "free_symbols", ()) for side in sides):
            raise Unfit("tokens whose number only the data tell")
        return [int(side) for side in sides]

    def value(self, node: fx.Node) -> Any:
        if node not in self.known:
            self.known[node] = self._value(node)
        return self.known[node]

    def _value(self, node: fx.Node) -> Any:
        if not is_tensor(node) and isinstance(node.meta.get("val"), torch.SymInt):
            return (evaluate(self.program, [node], self.sizes) or {})[node]
        after = is_made_of(node, self.ids)
        known = None if after else of_sizes(self.program, [node], self.sizes)
        if known is not None:
            return known[node]
        if after or op_name(node.target) in FILLS:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.value)
            return run(node, args, kwargs)
        fake = node.meta["val"]
        if not fake.is_floating_point():
            raise Unfit("numbers that other integers tell")
        size = torch.empty(self._shape(node)).uniform_(-2, 1.5, generator=self.generator)
        sign = torch.empty(self._shape(node)).normal_(generator=self.generator).sign()
        made = (10**size * (sign if self.seed else 1)).to(fake.dtype).requires_grad_()
        self.drawn.append(made)
        return made

    def is_constant(self, values: torch.Tensor) -> bool:
        """Whether no gradient flows from what is drawn: a straight-through estimator is zero, and
        passes one on."""
        if not values.requires_grad:
            return True
        by = torch.empty(values.shape).normal_(generator=self.generator).to(values.dtype)
        grads = torch.autograd.grad((values * by).sum(), self.drawn, allow_unused=True)
        return all(g is None or not g.any() for g in grads)


def _adds(node: Any) -> bool:
    """Whether a node adds two things."""
    if not isinstance(node, fx.Node) or op_name(node.target) != "add":
        return False
    return len(node.args) == 2 and argument(node, 2, "alpha", 1) == 1
