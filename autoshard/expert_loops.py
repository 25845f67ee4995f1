"""A mixture of experts written as a loop: each expert computes the tokens that chose it.

    for e, expert in enumerate(experts):
        token, slot = where(chosen == e)
        out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])

All experts compute alike, each with parameters of its own: the graph of the first, on rows sorted
by expert and with parameters stacked, is that of all.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard import experts
from autoshard.masks import descendants, run
from autoshard.program import tensor_results
from autoshard.routing import Routing, Unfit, choice, is_zero, lookup, shape, shape_of
from autoshard.rules import op_name
from autoshard.rules.core import argument, is_tensor
from autoshard.runtime.experts import expert_rows, grouped_product
from autoshard.scores import ARRANGES

aten = torch.ops.aten

#: Ops that neither mix rows nor have parameters that could be any expert's.
PLAIN = frozenset(
    """unsqueeze squeeze chunk split split_with_sizes slice select to _to_copy clone contiguous
    dropout getitem detach""".split()
)

#: Products of rows with weights, and at which argument the rows are.
AT = {"linear": 0, "mm": 0, "matmul": 0, "addmm": 1}


def begins_loop(node: fx.Node) -> bool:
    """Whether a node compares the experts that tokens have chosen with the first one."""
    ids = _compared(node)
    return (
        ids is not None
        and not ids.meta["val"].is_floating_point()
        and ids.meta["val"].ndim in (1, 2)
        and _choices(ids) is not None
    )


def _compared(node: fx.Node) -> fx.Node | None:
    """The ids that a node compares with the first expert."""
    kind = op_name(node.target)
    if kind == "eq":
        return node.args[0] if node.args[1] == 0 and is_tensor(node.args[0]) else None
    if kind != "select" or node.args[2] != 0:
        return None
    source = node.args[0]
    while op_name(source.target) in ARRANGES | {"to", "_to_copy"}:
        source = source.args[0]
    return source.args[0] if op_name(source.target) == "one_hot" else None


def _choices(ids: fx.Node) -> int | None:
    """Among how many experts the ones that are given were chosen."""
    while op_name(ids.target) in ARRANGES:
        ids = ids.args[0]  # type: ignore[assignment]
    at = ids.args[0] if ids.target is operator.getitem else ids
    return shape_of(at.args[0])[-1] if choice(at) is ids else None


@dataclass
class Loop(Routing):
    """``at``: where the loop over experts begins. ``sums[e]``: where the rows ``ends[e]`` of expert
    e are added to the tokens; ``stacked``: what is of one expert each, by the nodes of all."""

    sums: tuple[fx.Node, ...] = ()
    compared: set[fx.Node] = field(default_factory=set)  # what is computed for an expert
    ends: tuple[fx.Node, ...] = ()
    stacked: dict[tuple[fx.Node, ...], fx.Node] = field(default_factory=dict)
    _rowed: set[fx.Node] = field(default_factory=set)  # of the first expert, made of its tokens

    def fuse(self) -> None:
        ids: Any = _compared(self.at)
        self.ids, self.count = ids, _choices(ids) or 0
        if ids in self.done:
            return
        self.done.add(ids)
        self.refuse_strangers()
        self.classify()
        why: Unfit | None = None
        for sums, ends in self._chains():
            try:
                replace(self, sums=sums, ends=ends, stacked={}).fuse_chain()
                self.partly = True
            except Unfit as error:
                why = why or error
        if why is not None:
            raise why

    def fuse_chain(self) -> None:
        """One loop over all experts; others may read the same ids."""
        self._in_order()
        telling = [u for u in self.ids.users if op_name(u.target) in ("eq", "one_hot")]
        self.compared = descendants(telling, self.sums)
        of_first = [node for node, role in self.roles.items() if role == ("tokens", 0)]
        self._rowed = descendants(of_first, self.sums)
        pairs: dict[fx.Node, Any] = {}
        self._match(self.ends, pairs)
        with self.or_nothing():
            self._rewrite(self.ends[0], pairs)

    def _chains(self) -> list[tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]]:
        """``(sums, ends)`` where tokens of experts are added to one another, unless nothing reads
        them any more."""
        adds: dict[fx.Node, tuple[int, fx.Node]] = {}
        for node, role in self.roles.items():
            if isinstance(role, tuple) and role[0] == "tokens":
                for user in node.users:
                    rows = _added(user, node, self.k)
                    if rows is not None:
                        adds[user] = role[1], rows
        chains: dict[fx.Node, list[fx.Node]] = {}
        first: dict[fx.Node, fx.Node] = {}
        for node in sorted(adds):
            begin = first.get(node.args[0], node)  # type: ignore[arg-type]
            if adds[node][0] in [adds[n][0] for n in chains.get(begin, ())]:
                begin = node  # another loop that goes on with the same sum
            first[node] = begin
            chains.setdefault(begin, []).append(node)
        if not chains:
            raise Unfit("a loop that adds up the tokens of none of the experts")
        live = [chain for chain in chains.values() if chain[-1].users]
        return [(tuple(chain), tuple(adds[n][1] for n in chain)) for chain in live]

    def _in_order(self) -> None:
        """Sort what is added by expert; see that it is added one by one to zeros."""
        of = {self.roles[_tokens_of(node)][1]: i for i, node in enumerate(self.sums)}
        if {*of} != {*range(len(of))} or len(of) < 2:
            raise Unfit(f"a loop that adds up the tokens of {len(of)} of {self.count} experts")
        self.skips = len(of) < self.count
        if self.skips and not self._told_apart():
            raise Unfit("a loop over experts that cannot be told apart by their tokens")
        into = [node.args[0] for node in self.sums]
        if not is_zero(into[0]) or into[1:] != [*self.sums[:-1]]:
            raise Unfit("a loop whose experts do not add to the same tokens one by one")
        self.count = len(of)
        self.sums = tuple(self.sums[of[e]] for e in range(self.count))
        self.ends = tuple(self.ends[of[e]] for e in range(self.count))

    def _told_apart(self) -> bool:
        """Whether in the trial every choice was made, and no two by the same tokens."""
        ids = self.known[self.ids].reshape(-1, self.k)
        tokens = {tuple((ids == e).any(-1).tolist()) for e in range(self.count)}
        return len(tokens) == self.count and all(map(any, tokens))

    def _match(self, nodes: tuple[fx.Node, ...], pairs: dict[fx.Node, Any]) -> None:
        """See that the experts compute alike; ``pairs``: by node of the first, what it is: rows or
        a scalar with its source, else the nodes of all experts."""
        stack = [nodes]
        while stack:
            nodes = stack.pop()
            first = nodes[0]
            if first in pairs:
                continue
            leaf = [self._leaf(node, e) for e, node in enumerate(nodes)]
            if leaf[0] is not None:
                if any(each != leaf[0] for each in leaf):
                    raise Unfit("experts that read different tokens")
                pairs[first] = leaf[0]
                continue
            pairs[first] = ("all", nodes)
            if not self._depends(first):
                self._see_same_sizes(nodes, 0)
                continue  # parameters, or made of those: stacked as they are
            if any(v.shape[:1] != self._rows_of_first for v in tensor_results(first)):
                raise Unfit(f"{op_name(first.target)} of experts whose result has other rows")
            if any(node.target is not first.target for node in nodes):
                raise Unfit("experts that compute different things")
            self._see_same_sizes(nodes, 1)
            texts = {str(fx.map_arg((n.args, n.kwargs), lambda _: None)) for n in nodes}
            if len(texts) > 1:
                raise Unfit(f"{op_name(first.target)} of experts with different arguments")
            if any(isinstance(n.meta.get("val"), torch.SymInt) for n in first.all_input_nodes):
                raise Unfit("experts that read how many tokens they have")
            for each in zip(*(inputs(node) for node in nodes), strict=True):
                stack.append(each)

    @staticmethod
    def _see_same_sizes(nodes: tuple[fx.Node, ...], start: int) -> None:
        """Of all dimensions from this one on; and the same types."""
        forms = [[(v.dtype, *shape(v)[start:]) for v in tensor_results(n)] for n in nodes]
        if any(form != forms[0] for form in forms):
            raise Unfit("experts of different sizes or types")
        if not forms[0]:
            raise Unfit("experts that read what is no tensor")

    @property
    def _rows_of_first(self) -> Any:
        return self.ends[0].meta["val"].shape[:1]

    def _leaf(self, node: fx.Node, expert: int) -> tuple[str, fx.Node] | None:
        looked = _selected(node)
        if looked is not None and self.roles.get(looked[1]) == ("tokens", expert):
            sizes = shape_of(looked[0])
            if len(sizes) == 1 or sizes[1:] == (1,):
                return "scalar", self._weights(looked[0], expert)
            if len(sizes) != 2 or sizes[0] != self.token_shape[0]:
                raise Unfit("rows that are not made of tokens")
            return "rows", looked[0]
        if op_name(node.target) == "index" and len(node.args[1]) == 2:
            source = self.by_token(node.args[0])
            tokens, slots = node.args[1]
            if self._are_slots(tokens, slots, expert):
                if shape_of(source) != self.token_shape:
                    raise Unfit("numbers that are not one for each expert of a token")
                return "scalar", source
        return None

    def _are_slots(self, tokens: fx.Node, slots: fx.Node, expert: int) -> bool:
        """Whether the integers say where tokens have chosen an expert."""
        if self.roles.get(tokens) != ("tokens", expert) or slots not in self.known:
            return False
        found = self.known[tokens] * self.k + self.known[slots]
        wanted = (self.known[self.ids].reshape(-1) == expert).nonzero()[:, 0]
        return torch.equal(found.sort().values, wanted)

    def _weights(self, node: fx.Node, expert: int) -> fx.Node:
        """[t, k], of which the node has for every token the number that belongs to an expert."""
        needed: dict[fx.Node, None] = {}
        sources: dict[fx.Node, None] = {}
        stack = [node]
        while stack:
            each = stack.pop()
            if each in self.known or each in needed or each in sources:
                continue
            if self._of_slots(each) and each not in self.compared and not self._shows_slots(each):
                sources[each] = None
            elif each.op != "call_function":
                break
            else:
                needed[each] = None
                stack += each.all_input_nodes
        same = len(sources) == 1 and _rounds_once([*sources, *sorted(needed)], node)
        order = sorted(needed)
        for known in (self.known, self.crowded):
            same = same and self._are_weights(node, expert, list(sources), order, known)
        if not same:
            raise Unfit("numbers of tokens that are not one for each of their experts")
        return next(iter(sources))

    def _are_weights(
        self,
        node: fx.Node,
        expert: int,
        sources: list[fx.Node],
        needed: list[fx.Node],
        known: dict[fx.Node, Any],
    ) -> bool:
        """Whether a node made of ``sources`` has for every token the number that is an expert's, in
        a trial, and the gradients of that."""
        chosen = known[self.ids].view(-1, self.k)
        trial = torch.linspace(1, 2, chosen.numel(), dtype=torch.float64).view(chosen.shape)
        trial.requires_grad_()
        env = {n: _exact(value) for n, value in known.items()}
        for each in sources:
            env[each] = trial if len(shape_of(each)) == 2 else trial[:, 0]
        has = (chosen == expert).any(-1)
        wanted = (trial * (chosen == expert)).sum(-1)[has]
        try:
            for each in needed:
                args, kwargs = fx.map_arg((each.args, each.kwargs), env.__getitem__)
                env[each] = _in_float64(each, args, kwargs)
            made = env[node].view(-1)[has]
            if not len(wanted) and known is self.crowded:
                return True  # no token has chosen it there
            same = len(wanted) > 0 and torch.allclose(made, wanted, rtol=1e-12)
            by = torch.linspace(2, 3, len(wanted), dtype=torch.float64)
            (grad,) = torch.autograd.grad((made * by).sum(), trial)
            (own,) = torch.autograd.grad((wanted * by).sum(), trial)
            return same and torch.allclose(grad, own, rtol=1e-12)
        except Exception:  # it cannot be run: nothing is known of it
            return False

    def _of_slots(self, node: fx.Node) -> bool:
        """Whether there is a number for each expert of a token."""
        shape, wanted = shape_of(node), self.token_shape
        return shape == wanted or (self.k == 1 and shape == wanted[:1])

    def _shows_slots(self, node: fx.Node) -> bool:
        """Whether a node has such numbers of another one."""
        return op_name(node.target) in ARRANGES and self._of_slots(node.args[0])

    def _depends(self, node: fx.Node) -> bool:
        """Whether a node of the first expert is computed from its tokens."""
        return node in self._rowed

    # the new nodes

    def _rewrite(self, end: fx.Node, pairs: dict[fx.Node, Any]) -> None:
        sources = {each for kind, each in pairs.values() if kind == "rows"}
        if len(sources) != 1:
            raise Unfit("rows of several tensors of tokens")
        for node, (kind, each) in pairs.items():
            if kind == "all" and self._depends(node):
                self._fits(node, each)
        scalars = list(dict.fromkeys(each for kind, each in pairs.values() if kind == "scalar"))
        late = max(self.sums)
        with self.before(late):
            made = self.dispatch(next(iter(sources)), scalars)
            new: dict[fx.Node, fx.Node] = {}
            for node in sorted(pairs):
                kind, each = pairs[node]
                if kind == "rows":
                    new[node] = made["rows"]
                elif kind == "scalar":
                    new[node] = made[each]
                    for _ in shape_of(node)[1:]:
                        new[node] = self.call(aten.unsqueeze.default, new[node], -1)
                    new[node] = self.cast(new[node], node)
                elif self._depends(node):
                    new[node] = self._of_all(node, new, pairs, made)
                if node in new:
                    self.see_rows(new[node], node)
            if end not in new:
                raise Unfit("experts that compute nothing of their tokens")
            self.see_rows(new[end], late)
            rows, tokens = new[end], late.meta["val"]
            value = rows.meta["val"].new_empty(tokens.shape)
            out = self.call(experts.combine, rows, made["plan"], value=value)
        late.replace_all_uses_with(out)

    def _fits(self, node: fx.Node, nodes: tuple[fx.Node, ...]) -> None:
        """Raise Unfit where an op of an expert has no counterpart on rows of all of them."""
        kind = op_name(node.target)
        own = [n for n in node.all_input_nodes if not self._depends(n)]
        if kind in AT:
            at = AT[kind]
            x, weight = node.args[at : at + 2]
            others = [*node.args[at + 2 :], *node.kwargs.values()]  # a bias, and factors
            plain = all(o in (None, 1) or is_tensor(o) for o in others)
            if len(shape_of(weight)) == 2 and plain and self._depends(x):
                if set(shape_of(x)[1:-1]) - {1}:
                    raise Unfit("several vectors of a row")
                if not self._depends(weight):
                    return
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()):
            if all(_is_of_expert(n, node) for n in own):
                return
        elif kind in PLAIN and not own:
            return
        raise Unfit(f"{kind} inside experts, which has no form for rows of all of them")

    def _of_all(
        self, node: fx.Node, new: dict[fx.Node, fx.Node], pairs: Any, made: dict[Any, fx.Node]
    ) -> fx.Node:
        """A node of the first expert, on the rows of all."""
        kind = op_name(node.target)

        def on_rows(n: fx.Node) -> fx.Node:
            return new[n] if n in new else self._rows(pairs[n][1], len(shape_of(node)), made)

        if kind not in AT:
            args, kwargs = fx.map_arg((node.args, node.kwargs), on_rows)
            return self.call(node.target, *args, **kwargs)
        bias = argument(node, 2, "bias") if kind == "linear" else None
        bias = node.args[0] if kind == "addmm" else bias
        x, weight = node.args[AT[kind] : AT[kind] + 2]
        whole = self._stack(pairs[weight][1])
        if kind == "linear":
            whole = self.call(aten.transpose.int, whole, 1, 2)
        row, between = new[x], len(shape_of(x)) - 2
        for _ in range(between):
            row = self.call(aten.squeeze.dim, row, 1)
        rows = row.meta["val"]
        value = rows.new_empty([rows.shape[0], whole.meta["val"].shape[2]])
        out = self.call(grouped_product, row, whole, made["ends"], value=value)
        for _ in range(between):
            out = self.call(aten.unsqueeze.default, out, 1)
        return out if bias is None else self.call(aten.add.Tensor, out, on_rows(bias))

    def _rows(self, nodes: tuple[fx.Node, ...], rank: int, made: dict[Any, fx.Node]) -> fx.Node:
        """What each row's expert has, as it meets rows of this rank."""
        table = self._stack(nodes)
        rows = made["rows"].meta["val"]
        value = table.meta["val"].new_empty([rows.shape[0], *table.meta["val"].shape[1:]])
        out = self.call(expert_rows, table, made["ends"], made["plan"], value=value)
        if value.ndim > rank:  # a dimension of one, along which it is the same for all rows
            return self.call(aten.squeeze.dim, out, 1)
        for _ in range(rank - value.ndim):
            out = self.call(aten.unsqueeze.default, out, 1)
        return out

    def _stack(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        if nodes not in self.stacked:
            self.stacked[nodes] = self.call(aten.stack.default, list(nodes))
        return self.stacked[nodes]


def _is_of_expert(node: fx.Node, out: fx.Node) -> bool:
    """Whether an operand is the same for all rows of the result."""
    if not is_tensor(node) or not is_tensor(out):
        return False
    sizes = shape_of(node)
    return len(sizes) < len(shape_of(out)) or sizes[:1] == (1,)


def _selected(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(x, i) of ``x[i]``, with positions or a mask."""
    if op_name(node.target) == "index" and len(node.args[1]) == 1 and node.args[1][0] is not None:
        return node.args[0], node.args[1][0]
    return lookup(node)


def _added(node: fx.Node, tokens: fx.Node, k: int) -> fx.Node | None:
    """The rows that a node adds to some tokens of its first argument; None where it does not. Where
    a token has one expert, what it puts in place of nothing."""
    if op_name(node.target) == "index_add" and node.args[2] is tokens:
        plain = argument(node, 1, "dim") == 0 and argument(node, 4, "alpha", 1) == 1
        return node.args[3] if plain else None
    if op_name(node.target) != "index_put" or list(node.args[1]) != [tokens]:
        return None
    rows = node.args[2]
    if argument(node, 3, "accumulate", False):
        return rows
    if op_name(rows.target) != "add" or len(rows.args) != 2 or rows.kwargs:
        return rows if k == 1 else None
    before = [a for a in rows.args if is_tensor(a) and _selected(a) == (node.args[0], tokens)]
    others = [a for a in rows.args if a not in before]
    if not before and k == 1:
        return rows
    return others[0] if len(before) == len(others) == 1 else None


def _exact(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floats else value


def _in_float64(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """A node's value, where no number is rounded on the way."""
    args, kwargs = pytree.tree_map_only(
        torch.dtype,
        lambda dtype: torch.float64 if dtype.is_floating_point else dtype,
        (tuple(args), dict(kwargs)),
    )
    if op_name(node.target) == "type_as" and _is_float(node):
        return args[0].double()
    return _exact(run(node, args, kwargs))


def _rounds_once(nodes: list[fx.Node], last: fx.Node) -> bool:
    """Whether numbers lose by the types they have on the way only what they lose in the end."""
    types = [n.meta["val"].dtype for n in nodes if is_tensor(n) and _is_float(n)]
    ends = (types[0], last.meta["val"].dtype)
    return all(any(torch.promote_types(t, end) == t for end in ends) for t in types)


def _is_float(node: fx.Node) -> bool:
    return node.meta["val"].is_floating_point()


def _tokens_of(node: fx.Node) -> fx.Node:
    """To which tokens a node adds."""
    return node.args[2] if op_name(node.target) == "index_add" else node.args[1][0]  # type: ignore


def inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, each as often as it stands there."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found
