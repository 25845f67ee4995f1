"""What the integers of a mixture of experts are, and the nodes that take the place of its parts.

`passes.fuse_experts` recognises the mixtures that are written with sorted rows or chosen weights,
`autoshard.expert_loops` those written as a loop over experts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import torch
from torch import fx

from autoshard import experts
from autoshard.infer import expression
from autoshard.masks import numbers_in, of_sizes, run
from autoshard.program import Program, tensor_results
from autoshard.rules import op_name
from autoshard.rules.core import argument
from autoshard.scores import ARRANGES, CASTS, COPIES, VIEWS, is_elementwise

aten = torch.ops.aten

#: Tokens that the routing is run for where their number is free: enough that no two of its results
#: are equal by chance.
TOKENS = 5


#: Ops that choose among the last dimension of what they are given.
CHOICES = frozenset("topk argmax sort argsort max multinomial".split())
#: Slots that a routing is tried with at most; numbers from which on it has no limit.
MANY, NO_LIMIT = 2**16, 2**31
#: How often ids are drawn until they tell experts apart.
DRAWS = 20


class Unfit(Exception):
    """Why what looks like a mixture of experts is left as it is."""


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """The shape of a tensor; of anything else, that of a number."""
    value = node.meta.get("val")
    return shape(value) if isinstance(value, torch.Tensor) else ()


def shape(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(map(expression, value.shape))


def lookup(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(x, i) of ``x[i]`` with a vector of integers."""
    if op_name(node.target) == "index":
        indices = node.args[1]
        if len(indices) != 1 or indices[0] is None:
            return None
        x, i = node.args[0], indices[0]
    elif op_name(node.target) == "index_select" and argument(node, 1, "dim") == 0:
        x, i = node.args[0], node.args[2]
    else:
        return None
    value = i.meta["val"]
    return (x, i) if value.ndim == 1 and value.dtype in (torch.int64, torch.int32) else None


def choice(node: fx.Node) -> fx.Node | None:
    """The ids of the experts that an op chooses by scores ``[..., experts]``: ``[..., k]``, or
    ``[...]`` of one expert; None where it chooses none."""
    kind = op_name(node.target)
    if node.op != "call_function" or kind not in ("topk", "max", "argmax"):
        return None
    scores, dim = shape_of(node.args[0]), _chosen_dim(node)
    if not scores or not isinstance(scores[-1], int) or dim not in (-1, len(scores) - 1):
        return None
    if kind == "argmax":
        return node
    ids = [u for u in node.users if u.target is operator.getitem and u.args[1] == 1]
    return ids[0] if ids else None


def chosen_by(ids: fx.Node) -> fx.Node:
    """The op that ids of experts are made by."""
    while choice(ids) is None and ids.all_input_nodes:
        ids = ids.all_input_nodes[0]
    return ids


def _chosen_dim(node: fx.Node) -> Any:
    kind = op_name(node.target)
    if kind in ("max", "argmax"):  # of all elements, or of two tensors
        return argument(node, 1, "dim")
    return argument(node, 2, "dim", -1) if kind == "topk" else argument(node, 1, "dim", -1)


def possible(ids: fx.Node) -> tuple[fx.Node, torch.Tensor] | None:
    """``(root, numbers)``: all that integers can be, for each that ``root`` can be; None where that
    is not known."""
    kind = op_name(ids.target)
    if ids.op != "call_function":
        return None
    for user in ids.users:  # what is read by them on one device has as many places
        if op_name(user.target) == "gather" and user.args[2] is ids:
            size = shape_of(user.args[0])[user.args[1]]
            return (ids, torch.arange(size)) if isinstance(size, int) else None
    at = ids.args[0] if ids.target is operator.getitem else ids
    if op_name(at.target) in CHOICES:
        dim = -1 if kind == "multinomial" else _chosen_dim(at)
        size = shape_of(at.args[0])[dim] if isinstance(dim, int) else None
        whole = at is ids or ids.args[1] == 1
        return (ids, torch.arange(size)) if whole and isinstance(size, int) else None
    if kind in ("cat", "concat", "stack"):
        parts = [possible(n) for n in ids.args[0]]
        known = [p[1] for p in parts if p is not None]
        return (ids, torch.cat(known)) if len(known) == len(parts) else None
    if kind in ARRANGES | CASTS:
        return possible(ids.args[0])
    if not is_elementwise(ids):
        return None
    env = {n: possible(n) for n in ids.all_input_nodes}
    roots = {found[0] if found else None for found in env.values()}
    if len(roots) != 1 or None in roots:
        return None
    args, kwargs = fx.map_arg((ids.args, ids.kwargs), lambda n: env[n][1])  # type: ignore[index]
    return roots.pop(), run(ids, args, kwargs)  # type: ignore[return-value]


def is_zero(node: fx.Node) -> bool:
    kind = op_name(node.target)
    return kind in ("zeros", "zeros_like", "new_zeros") or (
        kind in ("full", "full_like", "new_full") and argument(node, -1, "fill_value") == 0
    )


def draw_ids(
    tokens: int, count: int, k: int, generator: torch.Generator, apart: bool = True
) -> torch.Tensor:
    """``[tokens, k]`` of experts for a trial; all of them where there are places enough. apart: no
    expert twice for a token."""
    every = torch.randperm(count, generator=generator)[: tokens * k]
    if not apart:
        ids = torch.randint(count, (tokens * k,), generator=generator)
        ids[: len(every)] = every
        return ids[torch.randperm(len(ids), generator=generator)].view(tokens, k)
    rank = torch.rand(tokens, count, generator=generator)
    rank[torch.arange(len(every)) % tokens, every] -= 1  # these in any case
    ids = rank.argsort(-1)[:, :k]
    return ids.gather(1, torch.rand(tokens, k, generator=generator).argsort(-1))


def tells_apart(ids: torch.Tensor, count: int) -> bool:
    """Whether every expert is chosen, and no two by the same tokens."""
    has = torch.zeros(len(ids), count, dtype=torch.bool).scatter(1, ids, True)
    return bool(has.any(0).all()) and len(has.T.unique(dim=0)) == count


def never_twice(ids: fx.Node) -> bool:
    """Whether no token has chosen an expert twice, as the best of some scores are."""
    while True:
        kind, source = op_name(ids.target), ids.args[0] if ids.args else None
        if not isinstance(source, fx.Node):
            return False
        whole = kind in VIEWS | CASTS | COPIES and shape_of(source)[-1:] == shape_of(ids)[-1:]
        last = len(shape_of(ids)) - 1
        if not whole and not (kind == "slice" and argument(ids, 1, "dim", 0) in (-1, last)):
            break
        ids = source
    best = source if ids.target is operator.getitem and ids.args[1] == 1 else ids
    kinds = ("argsort",) if best is ids else ("topk", "sort")
    return op_name(best.target) in kinds and _chosen_dim(best) in (-1, last)


def _tensors(values: dict[fx.Node, Any]) -> dict[fx.Node, torch.Tensor]:
    return {node: x for node, x in values.items() if isinstance(x, torch.Tensor)}


def _numbers(value: torch.Tensor) -> Any:
    """What two tensors of equal numbers have in common."""
    return tuple(value.shape), value.double().numpy().tobytes(), value.dtype is torch.bool


@dataclass
class Routing:
    """The routing of one mixture of experts, found from the node ``at`` inside it.

    ids: ``[t, k]``, of every token its experts, or ``[t]`` of one; count: of experts; k: experts of
    a token; roles: of the nodes computed from them, by what they are; known: their values in a
    trial, ``crowded`` in another; capacity, skips: of `autoshard.experts.dispatch`; trials: those
    of other mixtures, by their ids and number of experts; done: nodes that need not be looked at
    again.
    """

    program: Program
    at: fx.Node
    ids: fx.Node = None  # type: ignore[assignment]
    count: int = 0
    k: int = 0
    capacity: float | None = None
    skips: bool = False
    roles: dict[fx.Node, Any] = field(default_factory=dict)
    known: dict[fx.Node, Any] = field(default_factory=dict)
    crowded: dict[fx.Node, Any] = field(default_factory=dict)
    trials: dict[Any, Any] = field(default_factory=dict)
    done: set[fx.Node] = field(default_factory=set)
    partly: bool = False  # some of what reads the ids is fused
    new: list[fx.Node] = field(default_factory=list)  # nodes that were put into the graph

    def refuse_strangers(self) -> None:
        """Raise Unfit where a token may choose an expert that there is not (a place to skip it)."""
        found = possible(self.ids)
        if found is None or not bool(((found[1] >= 0) & (found[1] < self.count)).all()):
            raise Unfit(f"tokens that may choose others than the {self.count} experts")

    def classify(self) -> None:
        """Give what depends on the experts of tokens, and on nothing else but sizes, its role."""
        key = self.ids, self.count
        if key not in self.trials:
            sizes, ids = self._drawn()
            self.k = ids.shape[-1] if ids.ndim > 1 else 1
            self.known, self.roles = self._run(sizes, ids), {}
            self._name_roles(ids.reshape(-1))
            self.crowded = self._run(*self._all_to_few())
            self._confirm_roles()
            self.trials[key] = self.k, self.known, self.crowded, self.roles
        self.k, self.known, self.crowded, self.roles = self.trials[key]

    def _run(self, sizes: dict[Any, int], ids: torch.Tensor) -> dict[fx.Node, Any]:
        """The values, for these ids, of what is computed from them and from sizes alone."""
        env: dict[fx.Node, Any] = {self.ids: ids}
        waiting, seen = sorted(self.ids.users), set[fx.Node]()
        while waiting:
            node = heappop(waiting)  # the first in the graph
            if node in seen or node.op != "call_function":
                continue
            seen.add(node)
            if isinstance(node.meta.get("val"), torch.SymInt):
                continue
            others = [n for n in node.all_input_nodes if n not in env]
            known = of_sizes(self.program, others, sizes)
            if known is None:
                continue
            env |= known
            try:
                env[node] = run(node, *fx.map_arg((node.args, node.kwargs), env.__getitem__))
            except Exception:  # an op that does not run alone is no part of a routing
                continue
            for user in node.users:
                heappush(waiting, user)
        return env

    def _all_to_few(self) -> tuple[dict[Any, int], torch.Tensor]:
        """Sizes and ids of another trial: all tokens choose the same experts, and are more than any
        number in the code. A limit of how many an expert takes shows there."""
        numbers = [n for n in numbers_in(self.program, self.known) if n < NO_LIMIT]
        most, tokens = max(numbers, default=0), TOKENS
        while True:
            sizes, sides = self._trial_sizes(tokens)
            slots = math.prod(sides)
            if slots > (most + 2) * self.k or tokens > most + 2:
                break
            tokens *= 2
        if slots > MANY:
            raise Unfit(f"a routing with the number {most}, more than it is tried with")
        few = torch.arange(self.k) % self.count
        return sizes, few.repeat(slots // self.k).view(sides)

    def _trial_sizes(self, tokens: int) -> tuple[dict[Any, int], list[int]]:
        """Values of the sizes that are free, and the shape of ids then."""
        sizes = {symbol: tokens + 2 * n for n, symbol in enumerate(self.program.hints)}
        sides = [s if isinstance(s, int) else s.subs(sizes) for s in shape_of(self.ids)]
        if any(getattr(side, "free_symbols", ()) for side in sides):
            raise Unfit("tokens whose number only the data tell")
        return sizes, [int(side) for side in sides]

    def _drawn(self) -> tuple[dict[Any, int], torch.Tensor]:
        """Sizes for a trial, and ids of experts: of each expert some, and no two of the same
        tokens. More tokens than a few only where experts would go without."""
        generator = torch.Generator().manual_seed(0)
        tokens, last = TOKENS, None
        while True:
            sizes, sides = self._trial_sizes(tokens)
            k = sides[-1] if len(sides) > 1 else 1
            # where all are chosen by all, only choosing some twice tells them apart
            apart = k < self.count and never_twice(self.ids)
            for _ in range(DRAWS):
                ids = draw_ids(math.prod(sides) // k, self.count, k, generator, apart)
                if math.prod(sides) >= 2 * self.count and tells_apart(ids, self.count):
                    return sizes, ids.view(sides)
            if sides == last or tokens > 8 * self.count:  # there are no more, or enough
                return sizes, ids.view(sides)
            tokens, last = 2 * tokens, sides

    def _name_roles(self, flat: torch.Tensor) -> None:
        names: dict[Any, Any] = {}
        for role, value in self._named_values(flat, self.known):
            names.setdefault(_numbers(value), role)
        for node, value in _tensors(self.known).items():
            if (number := _numbers(value)) in names:
                self.roles[node] = names[number]

    def _confirm_roles(self) -> None:
        """Take a role away from what does not have it in the other trial."""
        flat = self.crowded[self.ids].reshape(-1)
        right = {(role, _numbers(value)) for role, value in self._named_values(flat, self.crowded)}
        values = _tensors(self.crowded)
        for node, role in list(self.roles.items()):
            if node not in values or (role, _numbers(values[node])) not in right:
                del self.roles[node]

    def _named_values(
        self, flat: torch.Tensor, known: dict[fx.Node, Any]
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        """The roles that integers may have, with their values; of those of one value the first."""
        n, k = len(flat), self.k
        found = _tensors(known)
        places, in_order = torch.arange(n), flat.sort().values
        counts = torch.bincount(flat, minlength=self.count)
        for order in found.values():
            every = order.shape == (n,) and torch.equal(order.sort().values, places)
            if every and torch.equal(flat[order.long()], in_order):
                yield from {"order": order, "token": order // k, "slot": order % k}.items()
                yield "inverse", order.argsort()
                break
        yield from {
            "ids": flat, "sorted": in_order, "repeated": places // k, "place": places % k,
            "offsets": counts.cumsum(0),
        }.items()  # fmt: skip
        yield from self._parts_of_experts(flat)

    def _parts_of_experts(self, flat: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
        """The tokens of each expert, as positions or a mask, and at which slot they have it."""
        k, slots = self.k, []
        for expert in range(self.count):
            by_token = (flat == expert).nonzero()[:, 0]
            by_slot = by_token[(by_token % k).argsort(stable=True)]
            # rows by a mask are one for each token
            has = (flat == expert).view(-1, k).any(1)
            masks = [has] if k == 1 or never_twice(self.ids) else []
            for value in (by_token // k, by_slot // k, *masks):
                yield ("tokens", expert), value
            slots += [(("slots", expert), value) for value in (by_token % k, by_slot % k)]
        yield from slots

    def by_token(self, node: fx.Node) -> fx.Node:
        """[t, k] of a vector of numbers, one for each row; the vector where it is not made so."""
        wide, shape = node, self.token_shape
        while op_name(wide.target) in VIEWS | {"unsqueeze"} and shape_of(wide) != shape:
            wide = wide.args[0]
        return wide if shape_of(wide) == shape else node

    @property
    def token_shape(self) -> tuple[Any, ...]:
        *lead, k = shape_of(self.ids) if len(shape_of(self.ids)) > 1 else (*shape_of(self.ids), 1)
        return (math.prod(lead), k)

    def dispatch(self, source: fx.Node, scalars: list[fx.Node]) -> dict[Any, fx.Node]:
        ids, given = self.ids, []
        if len(shape_of(ids)) != 2:
            ids = self.call(aten.reshape.default, ids, [-1, self.k])
        for scalar in scalars:
            if shape_of(scalar) != shape_of(ids):
                scalar = self.call(aten.reshape.default, scalar, [-1, self.k])
            given.append(scalar)
        limit = () if self.capacity is None else (self.capacity, self._weighing(given))
        x = source.meta["val"]
        rows = x.new_empty([ids.meta["val"].shape[0] * self.k, x.shape[1]])
        values = [rows, *(s.meta["val"].new_empty([rows.shape[0]]) for s in given)]
        ends = x.new_empty([self.count], dtype=torch.int32)
        named = {"skips": True} if self.skips else {}
        value = (*values, ends, None)
        whole = self.call(
            experts.dispatch, source, ids, given, self.count, *limit, value=value, **named
        )
        parts = [
            self.call(operator.getitem, whole, i, value=v) for i, v in enumerate((*values, ends))
        ]
        plan = self.call(operator.getitem, whole, len(parts), value=None)
        made: dict[Any, fx.Node] = dict(zip(scalars, parts[1:-1], strict=True))
        return made | {"rows": parts[0], "ends": parts[-1], "plan": plan}

    def _weighing(self, scalars: list[fx.Node]) -> fx.Node | None:
        """[t, k], by which a token's experts weigh: what their rows are multiplied with or, where
        that is done elsewhere, what they were chosen by."""
        if scalars:
            return scalars[0]
        chosen: Any = self.ids
        while chosen.target is not operator.getitem:
            if op_name(chosen.target) not in VIEWS | {"to", "_to_copy", "unsqueeze"}:
                return None
            chosen = chosen.args[0]
        by = self.call(operator.getitem, chosen.args[0], 0)
        return (
            by
            if shape_of(by) == self.token_shape
            else self.call(aten.reshape.default, by, [-1, self.k])
        )

    @contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        self.at = node
        with self.program.graph.inserting_before(node):
            yield

    @contextmanager
    def after(self, node: fx.Node) -> Iterator[None]:
        while node.next.op == "placeholder" or (
            node.next.target is operator.getitem and node.next.args[0] is node
        ):
            node = node.next
        with self.before(node.next):
            yield

    @contextmanager
    def or_nothing(self) -> Iterator[None]:
        """Whatever fails inside leaves the graph as it was."""
        ids, self.new = self.ids, []
        try:
            yield
        except Exception as error:
            for node in reversed(self.new):
                self.program.graph.erase_node(node)
            self.ids = ids
            if isinstance(error, Unfit):
                raise
            text = str(error).partition("\n")[0] or type(error).__name__
            raise Unfit(f"experts that do not compute on rows of all of them ({text})") from error

    def see_rows(self, new: fx.Node, node: fx.Node) -> None:
        """Raise Unfit unless a node has the sizes, but for the number of rows, and the type of the
        one whose place it takes."""
        for made, known in zip(tensor_results(new), tensor_results(node), strict=True):
            if made.dtype != known.dtype or shape(made)[1:] != shape(known)[1:]:
                raise Unfit(f"{node.name} of experts, which has another form on rows of all")

    def see_same(self, new: fx.Node, node: fx.Node) -> None:
        """The same for all sizes."""
        self.see_rows(new, node)
        if shape_of(new) != shape_of(node):
            raise Unfit(f"{node.name}, which is no sum of rows for each token")

    def cast(self, new: fx.Node, like: fx.Node) -> fx.Node:
        dtype = like.meta["val"].dtype
        return new if new.meta["val"].dtype == dtype else self.call(aten.to.dtype, new, dtype)

    def call(self, target: Any, *args: Any, value: Any = ..., **kwargs: Any) -> fx.Node:
        new = self.program.graph.call_function(target, args, kwargs)
        self.new.append(new)
        copied = ("nn_module_stack", "stack_trace")
        new.meta.update({key: self.at.meta[key] for key in copied if key in self.at.meta})
        if value is ...:
            given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            value = target(*given, **named)
        new.meta["val"] = value
        return new
