"""fuse_experts: on a mesh with ep or cp, every mixture of experts is told apart from its transport;
where only dp cuts samples those are, that are written as a loop which selects rows of the batch.

Requires: a canonical graph. Gives: `autoshard.experts.dispatch` and ``combine`` in place of how a
model brings tokens to experts and back, and between them what the experts compute, on rows sorted
by expert. What the integers of the routing are (an order by expert, its inverse, where experts end)
is seen by running the part of the graph that computes them. Recognised are products by groups of
sorted rows, and products of every row with its own expert's weights. A loop over modules, each with
parameters of its own, becomes products by groups, and where ep cuts them those parameters become
one stack (`autoshard.stacks`); so does what every expert computes of every token, where only those
that a token has chosen count. What has another structure is left as it is, and said why in
``program.unfused``.

    before:  order = sort(e.view(-1)); y = grouped_mm(x[order // k], w, ends)
             y[inverse].view(t, k, d).sum(1)
    after:   rows, ends, plan = dispatch(x, e); y = grouped_mm(rows, w, ends); combine(y, plan)
"""

from __future__ import annotations

import operator
from bisect import insort
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from autoshard import experts
from autoshard.chain import Pass
from autoshard.dense_experts import fuse_dense
from autoshard.errors import ShardingError, message
from autoshard.expert_loops import Loop, begins_loop
from autoshard.experts import dispatches
from autoshard.infer import expression
from autoshard.masks import descendants, of_sizes
from autoshard.program import Program, module_path, shallow, tensor_results
from autoshard.routing import (
    TOKENS,
    Routing,
    Unfit,
    choice,
    chosen_by,
    is_zero,
    lookup,
    shape_of,
)
from autoshard.rules import op_name
from autoshard.rules.core import argument, is_tensor
from autoshard.runtime.experts import expert_rows, grouped_product
from autoshard.scores import COPIES, VIEWS
from autoshard.stacks import join_parts, keep_stacked

aten = torch.ops.aten

CHOSEN = frozenset("bmm matmul".split())
PRODUCTS = CHOSEN | {"einsum"}
GROUPED = frozenset("_grouped_mm grouped_mm grouped_mm_fallback".split())
#: What a product by groups may be given besides.
EXTRA = ("bias", "out_dtype")


@dataclass(frozen=True)
class FuseExperts(Pass):
    """``always``: also on a mesh with neither ep nor cp. ``capacity``: what an expert takes at most
    (`autoshard.experts.dispatch`); with one, all mixtures must be recognised."""

    name: ClassVar[str] = "fuse_experts"
    always: bool = False
    capacity: float | None = None

    def __call__(self, program: Program) -> Program:
        program = shallow(program)
        mesh = program.mesh.mesh
        wanted = self.always or self.capacity is not None
        every = wanted or mesh.size("ep") * mesh.size("cp") > 1
        if not every and mesh.size("dp") == 1:
            return program
        # a product that is none of a mixture that is fused, the ids of experts, and why
        left: list[tuple[fx.Node | None, fx.Node | None, str]] = []
        trials, done = dict[Any, Any](), set[fx.Node]()
        for node in list(program.graph.nodes):
            if node.op != "call_function" or not node.users or node in done:
                continue
            kind = _Block if is_routed(node) else Loop if begins_loop(node) else None
            if kind is not None and (every or kind is Loop):
                routing = kind(program, node, capacity=self.capacity, trials=trials, done=done)
                try:
                    routing.fuse()
                except Unfit as error:
                    ids = None if routing.partly else routing.ids
                    product = node if kind is _Block else None
                    left.append((product, ids, _reason(node, error)))
        _drop_unused(program)
        dense = fuse_dense(program, self.capacity) if every else ()
        left += [(None, None, _reason(node, why)) for node, why in dense]
        join_parts(program.graph)
        _drop_unused(program)
        taken = {chosen_by(node.args[1]) for node in dispatches(program.graph)}
        present = {None, *program.graph.nodes}
        program.unfused = [
            why
            for product, ids, why in left
            if product in present and (ids is None or chosen_by(ids) not in taken)
        ]
        if self.capacity is not None and (program.unfused or not dispatches(program.graph)):
            raise ShardingError(
                message(
                    "autoshard",
                    f"option expert_capacity={self.capacity}",
                    "; ".join(dict.fromkeys(program.unfused))
                    or "the model has none that is recognised",
                    "it holds for all mixtures of experts, and these are not recognised",
                    "leave the option out",
                )
            )
        if mesh.size("ep") > 1:  # elsewhere all ranks have all experts, under their own names
            keep_stacked(program)
        program.graph_module.recompile()
        return program


def _reason(node: fx.Node, why: Unfit) -> str:
    return f"{module_path(node) or 'the model'}: {why}"


def _drop_unused(program: Program) -> None:
    program.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


def is_routed(node: fx.Node) -> bool:
    """Whether a node is a product by groups, or of rows with weights chosen for each."""
    if op_name(node.target) in GROUPED:
        return True
    return op_name(node.target) in CHOSEN and _chosen(node) is not None


def _chosen(node: fx.Node) -> int | None:
    """Which operand of a product is ``weights[ids]``, an expert's for every row."""
    for at in (0, 1):
        arg = node.args[at]
        if isinstance(arg, fx.Node) and lookup(_unturned(arg)) is not None:
            return at
    return None


def _unturned(node: fx.Node) -> fx.Node:
    """What a node is, but for the order of the dimensions of each row, and its type."""
    while op_name(node.target) in ("transpose", "contiguous", "clone", "to", "_to_copy"):
        rank = len(shape_of(node))
        if op_name(node.target) == "transpose" and 0 in (node.args[1] % rank, node.args[2] % rank):
            break
        node = node.args[0]
    return node


def _adds_weighed(node: fx.Node, rows: fx.Node) -> bool:
    """Whether an einsum is of numbers ``tk`` and rows ``tkd``, to ``td``."""
    given, _, out = node.args[0].replace(" ", "").partition("->")
    letters = given.split(",")
    if len(letters) != 2 or rows not in node.args[1] or "." in given:
        return False
    at = list(node.args[1]).index(rows)
    of_rows, of_numbers = letters[at], letters[1 - at]
    t, k, d = of_rows
    return len({t, k, d}) == 3 and of_numbers == t + k and out == t + d


@dataclass
class _Block(Routing):
    """A mixture of experts with sorted rows or chosen weights; ``at`` is a product inside it."""

    rows: Any = None  # how many: t k
    sorted: bool = True  # whether they are, by expert
    weighing: dict[fx.Node, fx.Node | None] = field(default_factory=dict)  # see `_weighs`

    def fuse(self) -> None:
        self._find_routing()
        end, sums = self._find_end()
        leaves, inner = self._find_inner(end)
        with self.or_nothing():
            self._rewrite(end, sums, leaves, inner)

    # what the integers are

    def _find_routing(self) -> None:
        """The experts of every token, and what is computed from them."""
        if op_name(self.at.target) in GROUPED:
            weight, of = self.at.args[1], argument(self.at, 2, "offs")
        else:
            where = _chosen(self.at)
            weight, of = lookup(_unturned(self.at.args[where]))  # type: ignore[misc, index]
        self.count, self.rows = weight.meta["val"].shape[0], shape_of(self.at)[0]
        if not isinstance(of, fx.Node) or not isinstance(self.count, int):
            raise Unfit("experts of a number that is not known")
        flat = self._flat_ids(of)
        self.ids = flat
        while op_name(self.ids.target) in VIEWS and len(shape_of(self.ids)) < 2:
            self.ids = self.ids.args[0]
        if len(shape_of(self.ids)) < 2 and not self._one_each(self.ids):
            raise Unfit("tokens that do not all have the same number of experts")
        self.refuse_strangers()
        self.classify()
        if self.roles.get(of) not in ("offsets", "ids", "sorted"):
            raise Unfit("an order of tokens that is not by expert")
        self.sorted = self.roles[of] != "ids"

    def _flat_ids(self, of: fx.Node) -> fx.Node:
        """The vector of integers, one for each row, that an index or offsets are made of."""
        waiting, seen = [of], set[fx.Node]()
        while waiting:
            node = waiting.pop()  # the last in the graph
            if node in seen:
                continue
            seen.add(node)
            for other in node.all_input_nodes:
                insort(waiting, other)
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.is_floating_point():
                continue
            made = op_name(node.target) in VIEWS or self._one_each(node)
            if made and shape_of(node) == (self.rows,):
                return node
        raise Unfit("experts that are not chosen by index")

    @staticmethod
    def _one_each(ids: fx.Node) -> bool:
        """Whether every token has chosen one expert."""
        at = ids.args[0] if ids.target is operator.getitem else ids
        return isinstance(at, fx.Node) and choice(at) is ids and len(shape_of(ids)) == 1

    # where experts end

    def _find_end(self) -> tuple[fx.Node, fx.Node]:
        """The rows as the experts leave them, and the node that adds up those of a token."""
        seen: set[fx.Node] = set()
        stack = [self.at]
        while stack:
            node = stack.pop()
            for user in node.users:
                if user in seen or not tensor_results(user):
                    continue
                seen.add(user)
                self.weighing.clear()
                sums = self._sums(node, user)
                if sums is not None:
                    return sums
                if self._has_rows(user):
                    stack.append(user)
        raise Unfit("rows that are not added up by token")

    def _sums(self, node: fx.Node, user: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """(rows, sum) where ``user`` begins to add up the rows ``node`` of each token."""
        kind, shape = op_name(user.target), shape_of(node)
        if len(shape) != 2 or shape[0] != self.rows:
            return None
        if kind == "index_add" and argument(user, 1, "dim") == 0 and user.args[3] is node:
            if argument(user, 4, "alpha", 1) != 1:
                raise Unfit("rows that are added up times a number")
            if self._role(user.args[2]) not in self.of_tokens:
                return None
            if not is_zero(user.args[0]):
                return None
            return node, user
        rows = node
        if self._unsorts(node, user):
            following = [u for u in user.users if is_tensor(u)]
            if len(following) != 1:
                return None
            user, node = following[0], user
            while self.k > 1 and self._weighs(node, user):
                following = [u for u in user.users if is_tensor(u)]
                if len(following) != 1:
                    return None
                user, node = following[0], user
        elif self.sorted_rows:
            return None
        if op_name(user.target) not in VIEWS or shape_of(user)[1:] != (self.k, shape[1]):
            if self.k == 1:  # a token has one row
                return rows, node
            return None
        while True:
            following = [u for u in user.users if is_tensor(u)]
            if len(following) != 1:
                return None
            node, user = user, following[0]
            if not self._weighs(node, user):
                break
            if op_name(user.target) in PRODUCTS:
                return rows, user
        if op_name(user.target) != "sum" or argument(user, 2, "keepdim", False):
            return None
        return (rows, user) if list(argument(user, 1, "dim")) in ([1], [-2]) else None

    def _unsorts(self, rows: fx.Node, user: fx.Node) -> bool:
        """Whether ``user`` is the sorted rows by token."""
        looked = lookup(user)
        if looked is not None:
            return looked[0] is rows and self.roles.get(looked[1]) == "inverse"
        kind = op_name(user.target)
        if kind == "index_put":
            put = list(user.args[1]), user.args[2], argument(user, 3, "accumulate", False)
        elif kind == "index_copy":
            put = [user.args[2]], user.args[3], argument(user, 1, "dim") != 0
        else:
            return False
        if put[1] is not rows or put[2] or [self.roles.get(i) for i in put[0]] != ["order"]:
            return False
        blank = op_name(user.args[0].target)
        return shape_of(user) == shape_of(rows) and (is_zero(user.args[0]) or "empty" in blank)

    def _weighs(self, rows: fx.Node, user: fx.Node) -> bool:
        """Whether ``user`` makes of rows by token, ``[t, k, d]`` or ``[t k, d]``, others, each for
        itself: of another type, or times a number; or adds up those of a token times numbers by a
        product of matrices. ``self.weighing``: these numbers, ``[t, k]``."""
        kind, (tokens, k), wide = op_name(user.target), self.token_shape, len(shape_of(rows)) == 3
        if kind in ("to", "_to_copy") and len(user.all_input_nodes) == 1:
            self.weighing[user] = None
            return True
        if kind == "mul" and len(user.args) == 2:
            numbers = user.args[user.args[0] is rows]
            shape: tuple[Any, ...] = (tokens, k, 1) if wide else (self.rows, 1)
        elif kind in CHOSEN and wide and user.args[1] is rows:
            numbers, shape = user.args[0], (tokens, 1, k)
        elif kind == "einsum" and wide and _adds_weighed(user, rows):
            numbers, shape = user.args[1][user.args[1][0] is rows], (tokens, k)
        else:
            return False
        if not is_tensor(numbers) or shape_of(numbers) != shape:
            return False
        by_token = self.by_token(numbers)
        if not wide and shape_of(by_token) != (tokens, k):
            return False
        self.weighing[user] = by_token
        return True

    @property
    def of_tokens(self) -> tuple[str, ...]:
        """The roles of integers that say which token a row is of."""
        if not self.sorted:
            return ("repeated",)
        return ("token", *(("order",) if self.k == 1 else ()))

    @property
    def sorted_rows(self) -> bool:
        return "order" in self.roles.values()

    # what is inside

    def _find_inner(self, end: fx.Node) -> tuple[dict[fx.Node, tuple[str, Any]], list[fx.Node]]:
        """What rows are made of, by node: ``(kind, source)``; and the nodes of the experts."""
        leaves: dict[fx.Node, tuple[str, Any]] = {}
        inner: dict[fx.Node, None] = {}
        stack = [end]
        while stack:
            node = stack.pop()
            if node in leaves or node in inner:
                continue
            leaf = self._leaf(node)
            if leaf is not None:
                leaves[node] = leaf
                continue
            inner[node] = None
            if op_name(node.target) in GROUPED:
                if any(a is not None for a in (*node.args[3:], *map(node.kwargs.get, EXTRA))):
                    raise Unfit("products by groups with a bias, or of another type")
                if len(shape_of(node.args[1])) != 3:
                    raise Unfit("products of groups with each other")
                stack.append(node.args[0])
            elif op_name(node.target) in CHOSEN and _chosen(node) is not None:
                at = _chosen(node)
                other = node.args[1 - at]  # type: ignore[operator]
                if len(shape_of(other)) != 3 or shape_of(other)[2 if at == 0 else 1] != 1:
                    raise Unfit("several vectors of a row")
                stack.append(other)
            else:
                stack += [n for n in node.all_input_nodes if self._has_rows(n)]
                if self._has_rows(node) and not any(map(self._has_rows, node.all_input_nodes)):
                    raise Unfit(f"{node.name}, whose rows are none of tokens")
        kinds = [kind for kind, _ in leaves.values()]
        if "rows" not in kinds:
            raise Unfit("rows that are not made of tokens")
        if len({source for kind, source in leaves.values() if kind == "rows"}) > 1:
            raise Unfit("rows of several tensors of tokens")
        return leaves, list(inner)

    def _has_rows(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        return any(
            isinstance(v, torch.Tensor) and v.ndim and expression(v.shape[0]) == self.rows
            for v in values
        )

    def _leaf(self, node: fx.Node) -> tuple[str, Any] | None:
        kind, looked = op_name(node.target), lookup(node)
        if looked is not None:
            source, role = looked[0], self._role(looked[1])
            tokens = self._repeated(source) if role == "order" else None
            if tokens is not None:
                return "rows", tokens
            if role in self.of_tokens and len(shape_of(source)) == 2:
                return "rows", source
            if role == "order" and set(shape_of(source)[1:]) <= {1}:
                return "scalar", self.by_token(source)
            if role in ("sorted", "ids"):
                return "table", source
            if role == "inverse":
                raise Unfit("rows that change their order twice")
        pair = [self.roles.get(i) for i in node.args[1]] if kind == "index" else []
        known = pair in (["token", "slot"], ["repeated", "place"])
        if known and shape_of(node.args[0]) == self.token_shape:
            return "scalar", node.args[0]
        tokens = None if self.sorted else self._repeated(node)
        if tokens is not None:
            return "rows", tokens
        shape = shape_of(node)
        column = shape[:1] == (self.rows,) and set(shape[1:]) <= {1}
        if kind in VIEWS and column and not self._has_rows(node.args[0]) and not self.sorted_rows:
            return "scalar", self.by_token(node)
        return None

    def _role(self, index: fx.Node) -> Any:
        """Of integers; also of those that do not depend on the experts of tokens."""
        if index not in self.roles and shape_of(index) == (self.rows,) and self._repeats(index):
            return "repeated"
        return self.roles.get(index)

    def _repeats(self, index: fx.Node) -> bool:
        """Whether integers are 0 k times, 1 k times, and so on, at all sizes."""
        for tokens in (TOKENS, TOKENS + 1):
            sizes = {symbol: tokens + 2 * n for n, symbol in enumerate(self.program.hints)}
            known = of_sizes(self.program, [index], sizes)
            if known is None:
                return False
            if not torch.equal(known[index].long(), torch.arange(len(known[index])) // self.k):
                return False
        return True

    def _repeated(self, node: fx.Node) -> fx.Node | None:
        """The tokens of which ``node`` has every one k times, one after the other."""
        if len(shape_of(node)) != 2 or shape_of(node)[0] != self.rows:
            return None
        kind, source, looked = op_name(node.target), node.args[0], lookup(node)
        if looked is not None:
            made = self._role(looked[1]) == "repeated"
        elif kind == "repeat_interleave":
            made = node.args[1] == self.k and argument(node, 2, "dim") == 0
        elif kind in VIEWS:
            while op_name(source.target) in COPIES:  # type: ignore[union-attr]
                source = source.args[0]  # type: ignore[union-attr]
            wide, column = source, source.args[0]  # type: ignore[union-attr]
            if op_name(wide.target) != "expand" or op_name(column.target) != "unsqueeze":  # type: ignore
                return None
            source = column.args[0]  # type: ignore[union-attr]
            tokens, width = self.token_shape[0], shape_of(node)[1]
            made = shape_of(wide) == (tokens, self.k, width) and column.args[1] in (1, -2)  # type: ignore
        else:
            return None
        made = made and shape_of(source) == (self.token_shape[0], *shape_of(node)[1:])
        return source if made else None

    # the new nodes

    def _rewrite(
        self, end: fx.Node, sums: fx.Node, leaves: dict[fx.Node, Any], inner: list[fx.Node]
    ) -> None:
        own = {*inner, *leaves}
        escaping = [u for n in inner if n is not end for u in n.users if u not in own]
        if escaping:
            raise Unfit(f"{escaping[0].name} reads what experts have not finished")
        source = next(s for kind, s in leaves.values() if kind == "rows")
        given = [s for kind, s in leaves.values() if kind == "scalar"]
        weighing = [s for s in self.weighing.values() if s is not None]
        if descendants([end], {sums}).intersection(weighing):
            raise Unfit("rows times numbers that are made of them")
        scalars = list(dict.fromkeys([*given, *weighing]))
        late = max([source, self.ids, *scalars])
        with self.after(late):
            made = self.dispatch(source, scalars)
        new, last = dict[fx.Node, fx.Node](), made["plan"]
        for node in sorted(own):
            # where it stands, or where rows can be had
            with self.before(node if node > last else last.next):
                self.at = node
                new[node] = self._of_rows(node, leaves.get(node), new, made)
                self.see_rows(new[node], node)
            last = max(last, new[node])
        tokens = sums.meta["val"]
        with self.before(sums):
            rows = new[end]
            for node, numbers in self.weighing.items():
                rows = self._weighed(rows, node, None if numbers is None else made[numbers])
            product = sums in self.weighing
            rows = rows if product else self.cast(rows, sums)
            value = rows.meta["val"].new_empty([tokens.shape[0], tokens.shape[-1]])
            out = self.call(experts.combine, rows, made["plan"], value=value)
            out = self.cast(out, sums)
            if tokens.ndim == 3:
                out = self.call(aten.unsqueeze.default, out, 1)
            self.see_rows(out, sums)
        sums.replace_all_uses_with(out)
        self.done |= own

    def _weighed(self, rows: fx.Node, node: fx.Node, numbers: fx.Node | None) -> fx.Node:
        """Rows sorted by expert, as `_weighs` says that a node makes them of rows by token."""
        if numbers is None:
            return self.call(node.target, rows, *node.args[1:], **node.kwargs)
        if op_name(node.target) in PRODUCTS:  # which round what they add up only in the end
            dtype = torch.promote_types(node.meta["val"].dtype, torch.float32)
            rows, numbers = (self.call(aten.to.dtype, n, dtype) for n in (rows, numbers))
        column = self.call(aten.unsqueeze.default, numbers, -1)
        return self.call(aten.mul.Tensor, rows, column)

    def _of_rows(
        self, node: fx.Node, leaf: Any, new: dict[fx.Node, fx.Node], made: dict[Any, fx.Node]
    ) -> fx.Node:
        """A node's counterpart on rows sorted by expert."""
        kind = op_name(node.target)
        if leaf is not None:
            what, source = leaf
            if what == "rows":
                return made["rows"]
            if what == "table":
                value = node.meta["val"]
                return self.call(expert_rows, source, made["ends"], made["plan"], value=value)
            column = made[source]
            for _ in shape_of(node)[1:]:
                column = self.call(aten.unsqueeze.default, column, -1)
            return column
        if kind in GROUPED:
            x, weight = new[node.args[0]], node.args[1]
            value = node.meta["val"]
            return self.call(grouped_product, x, weight, made["ends"], value=value)
        at = _chosen(node) if kind in CHOSEN else None
        if at is not None:
            return self._grouped(node, at, new, made)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: new.get(n, n))
        return self.call(node.target, *args, value=node.meta["val"], **kwargs)

    def _grouped(
        self, node: fx.Node, at: int, new: dict[fx.Node, fx.Node], made: dict[Any, fx.Node]
    ) -> fx.Node:
        """A product of every row with its expert's weights, as one by groups."""
        chosen, other = node.args[at], new[node.args[1 - at]]
        weight = self._whole(chosen)
        if at == 0:  # w[o, i] x[i, 1]
            weight = self.call(aten.transpose.int, weight, 1, 2)
        row = self.call(aten.squeeze.dim, other, 2 if at == 0 else 1)
        x, w = row.meta["val"], weight.meta["val"]
        value = x.new_empty([x.shape[0], w.shape[2]])
        product = self.call(grouped_product, row, weight, made["ends"], value=value)
        return self.call(aten.unsqueeze.default, product, 2 if at == 0 else 1)

    def _whole(self, node: fx.Node) -> fx.Node:
        """The weights of all experts, turned as those of a row are."""
        looked = lookup(node)
        if looked is not None:
            return looked[0]
        inner = self._whole(node.args[0])
        return self.call(node.target, inner, *node.args[1:], **node.kwargs)
