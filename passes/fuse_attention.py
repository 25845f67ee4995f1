"""fuse_attention: on a mesh with cp, every attention of the graph becomes one op.

Requires: a canonical graph. Gives: `autoshard.attention.attend` in place of every scaled dot
product attention, and of every product - softmax - product written out, with what each computes in
``program.attentions``. Keys and values come without repeated heads; of causal, windowed, padded,
packed and ALiBi scores nothing of the size queries times keys is left. What looks like an attention
but has another structure is left as it is.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from autoshard.attention import Attention, attend
from autoshard.chain import Pass
from autoshard.infer import expression
from autoshard.masks import Verdict, judge
from autoshard.products import PRODUCTS, Operand, Product, first_product, second_product
from autoshard.program import Program, shallow
from autoshard.rules import op_name
from autoshard.rules.core import argument, is_tensor
from autoshard.scores import (
    BATCH,
    CASTS,
    COPIES,
    HEADS,
    KEYS,
    QUERIES,
    VIEWS,
    Form,
    Tracer,
    Untraceable,
    descendants,
    dtype_of,
    keeps_shape,
    marked,
    permutation,
    shape_of,
)

aten = torch.ops.aten

#: Ops between softmax and values, all of which keep queries and keys as the last two dimensions.
BETWEEN = COPIES | CASTS | VIEWS | frozenset("expand unsqueeze squeeze".split())


@dataclass(frozen=True)
class FuseAttention(Pass):
    """``transport``: how keys come to queries of other ranks, see `Attention`."""

    name: ClassVar[str] = "fuse_attention"
    transport: str = "ring"

    def __call__(self, program: Program) -> Program:
        program = shallow(program)
        if program.mesh.mesh.size("cp") == 1:
            return program
        fuser = _Fuser(program, self.transport)
        for node in list(program.graph.nodes):
            try:
                fuser.fuse(node)
            except Untraceable:
                continue
        program.graph.eliminate_dead_code(
            is_impure_node=lambda n: n.op in ("placeholder", "output")
        )
        program.graph_module.recompile()
        return program


@dataclass(frozen=True)
class _Weights:
    """From a softmax to the product with the values. node: the product; position: which of its
    operands the weights are; path: the nodes between; sinks: whether the last column is cut off."""

    node: fx.Node
    position: int
    path: tuple[fx.Node, ...]
    sinks: bool
    dropout: float


@dataclass
class _Fuser:
    program: Program
    transport: str
    at: fx.Node | None = None  # nodes are inserted before this one
    shared: dict[Any, fx.Node] = field(default_factory=dict)  # vectors, by what they are made of
    keys: dict[Any, str] = field(default_factory=dict)  # an Attention, as text -> its key
    verdicts: dict[Any, Verdict] = field(default_factory=dict)

    def fuse(self, node: fx.Node) -> None:
        """Replace an attention by `attend`; Untraceable where it cannot be."""
        kind = op_name(node.target)
        if kind == "scaled_dot_product_attention":
            with self._before(node):
                self._fused(node)
        elif kind in ("softmax", "_softmax"):
            value = node.meta["val"]
            if value.ndim > 1 and argument(node, 1, "dim") in (-1, value.ndim - 1):
                weights = _weights(node)
                with self._before(weights.node):
                    self._written_out(node, weights)

    # the two ways an attention is written

    def _fused(self, node: fx.Node) -> None:
        """scaled_dot_product_attention of two to four dimensions"""
        operands, rank = node.args[:3], node.meta["val"].ndim
        if rank > 4 or any(n.meta["val"].ndim != rank for n in operands):
            raise Untraceable("other than two to four dimensions")
        form = _form(rank, folded=False)
        natural = tuple(range(rank))
        shape, keys = shape_of(operands[0]), shape_of(operands[1])
        lead = (*shape_of(node)[:-2], *(1 for _ in range(4 - rank)))
        sizes = (*lead, shape[-2], keys[-2])
        q, k, v = (self._operand(Operand(n, natural), form, sizes) for n in operands)
        tracer = self._tracer(sizes)
        scores = tracer.block
        mask = argument(node, 3, "attn_mask")
        if isinstance(mask, fx.Node):
            tail = form[len(form) - mask.meta["val"].ndim :]
            given = tracer.scores(mask, tracer.form(mask, tail))
            if mask.meta["val"].dtype is torch.bool:
                scores = tracer.call(aten.where.ScalarOther, given, scores, float("-inf"))
            else:
                scores = tracer.call(aten.add.Tensor, scores, given)
        scale = argument(node, 7, "scale")
        scale = shape[-1] ** -0.5 if scale is None else scale
        if not isinstance(scale, (int, float)):
            raise Untraceable("a scale that is computed")
        spec = Attention(
            float(scale),
            causal=bool(argument(node, 5, "is_causal", False)),
            dropout=float(argument(node, 4, "dropout_p", 0.0)),
        )
        spec = self._judged(spec, tracer, scores, operands[0].meta["val"].dtype)
        new = self._attend(spec, tracer, (q, k, v), None)
        self._replace(new, form, natural)

    def _written_out(self, softmax: fx.Node, weights: _Weights) -> None:
        """product - scores - softmax - weights - product"""
        scores, sink = _scores_and_sink(softmax, weights.sinks)
        first, second = first_product(scores), second_product(weights.node, weights.position)
        lead = _lead(first, second, scores, (softmax, *weights.path))
        sizes = (*(lead or _unfolded(first)), *shape_of(scores)[-2:])
        form, last = (_form(p.rank, lead is not None) for p in (first, second))
        tracer = self._tracer(sizes, first.node, form)
        root = _form(scores.meta["val"].ndim, lead is not None)
        result = tracer.scores(scores, tracer.form(scores, root))
        q, k = (self._operand(o, form, sizes) for o in (first.left, first.right))
        v = self._operand(second.right, last, sizes)
        sinks = None if sink is None else self._sinks(sink, tracer)
        given = dtype_of(first.node)
        dtype = argument(softmax, 2, "dtype") if op_name(softmax.target) == "softmax" else None
        if dtype is None and dtype_of(scores) != given:
            dtype = dtype_of(scores)
        scale, result = _without_scale(tracer, result)
        spec = Attention(scale, dropout=weights.dropout, sinks=sinks is not None, dtype=dtype)
        spec = self._judged(spec, tracer, result, given)
        new = self._attend(spec, tracer, (q, k, v), sinks)
        self._replace(new, last, second.order)

    # queries, keys and values, in four dimensions

    def _operand(self, operand: Operand, form: Form, sizes: tuple[Any, ...]) -> fx.Node:
        """[b, h, ., .] of a product's operand; ``form`` is the product's."""
        operand = operand.simple()
        folded = len(form[0]) == 2
        if folded and (source := _folded(operand, sizes)) is not None:
            operand, folded = source.simple(), False
        node, order = _copied(operand.node), operand.order
        kept = [d for d in order if d is not None]
        if kept != sorted(kept):
            node = self._call(aten.permute.default, node, kept)
        for position, dim in enumerate(order):
            if dim is None:
                node = self._call(aten.unsqueeze.default, node, position)
        if folded:
            if not isinstance(sizes[HEADS], int):
                raise Untraceable("a number of heads that is no number")
            return self._call(aten.unflatten.int, node, 0, [-1, sizes[HEADS]])
        while node.meta["val"].ndim < 4:  # [b, ., .] has one head; [., .] is one sample too
            node = self._call(aten.unsqueeze.default, node, node.meta["val"].ndim - 2)
        return node

    def _unrepeated(self, node: fx.Node, dim: int) -> fx.Node | None:
        """The keys or values of which ``dim`` repeats every one of fewer heads; None if none."""
        kind, shape = op_name(node.target), shape_of(node)
        if not node.args or not is_tensor(node.args[0]):
            return None
        source = node.args[0]
        before = shape_of(source)
        if keeps_shape(node):
            return self._unrepeated(source, dim)
        if (order := permutation(node)) is not None:
            inner = self._unrepeated(source, order[dim])
            return None if inner is None else self._call(aten.permute.default, inner, order)
        if kind in CASTS:
            inner = self._unrepeated(source, dim)
            return None if inner is None else self._call(aten.to.dtype, inner, dtype_of(node))
        if kind == "repeat_interleave" and argument(node, 2, "dim") in (dim, dim - len(shape)):
            return _same(source) if isinstance(node.args[1], int) else None
        if kind == "expand" and before == _with(shape, dim, 1):
            return _same(source)
        if kind in VIEWS and len(before) == len(shape) + 1:
            split = before[dim : dim + 2]
            if before != (*shape[:dim], *split, *shape[dim + 1 :]):
                return None
            return self._unrepeated_pair(source, dim + 1)
        return None

    def _unrepeated_pair(self, node: fx.Node, dim: int) -> fx.Node | None:
        """x[..., g, r, ...], that repeats x[..., g, 1, ...] along ``dim``: x without it."""
        node = _same(node)
        shape = shape_of(node)
        if op_name(node.target) not in ("expand", "repeat"):
            return None
        source = node.args[0]
        if shape_of(source) != _with(shape, dim, 1):
            return None
        inner, rank = _same(source), len(shape)
        if op_name(inner.target) == "unsqueeze" and inner.args[1] in (dim, dim - rank):
            return _same(inner.args[0])
        return self._call(aten.squeeze.dim, inner, dim)

    def _fitting(self, node: fx.Node, batch: Any, heads: Any = None) -> fx.Node:
        """The operand with the whole batch, and as many heads where they are given."""
        shape = shape_of(node)
        heads = shape[1] if heads is None else heads
        if shape[:2] == (batch, heads):
            return node
        if shape[0] not in (1, batch) or shape[1] not in (1, heads):
            raise Untraceable("operands of several batches")
        rows = -1 if shape[0] == batch else self._size(batch)
        return self._call(aten.expand.default, node, [rows, heads, -1, -1])

    # vectors

    def _tracer(
        self, sizes: tuple[Any, ...], product: fx.Node | None = None, form: Form = ()
    ) -> Tracer:
        def outer(node: fx.Node, form: Form) -> fx.Node:
            return self._vector(node, form, sizes)

        def positions(slot: int, device: torch.device) -> fx.Node:
            return self._vector(self._arange(sizes[slot], device), ((slot,),), sizes)

        if product is not None:
            form = marked(shape_of(product), form, sizes)
        return Tracer(self.program, sizes, outer, positions, product, form)

    def _vector(self, node: fx.Node, form: Form, sizes: tuple[Any, ...]) -> fx.Node:
        """[b|1, h|1, i|1, j|1] of a node of this form"""
        if len(form) == 4 and all(f in ((), (d,)) for d, f in enumerate(form)):
            return node
        if (node, form) in self.shared:
            return self.shared[node, form]
        made = node
        for dim in reversed(range(len(form))):
            if not form[dim]:
                made = self._call(aten.squeeze.dim, made, dim, like=node)
            elif len(form[dim]) > 1:
                parts = [sizes[s] for s in form[dim][1:]]
                if not all(isinstance(p, int) for p in parts):
                    raise Untraceable("a folded dimension of unknown parts")
                made = self._call(aten.unflatten.int, made, dim, [-1, *parts], like=node)
        slots = [s for dim in form for s in dim]
        order = sorted(range(len(slots)), key=slots.__getitem__)
        if order != list(range(len(slots))):
            made = self._call(aten.permute.default, made, order, like=node)
        for slot in range(4):
            if slot not in slots:
                made = self._call(aten.unsqueeze.default, made, slot, like=node)
        self.shared[node, form] = made
        return made

    def _arange(self, size: Any, device: torch.device) -> fx.Node:
        if (size, device) not in self.shared:
            mode = next(n.meta["val"].fake_mode for n in self.program.graph.nodes if is_tensor(n))
            with mode:
                self.shared[size, device] = self._call(
                    aten.arange.default, self._size(size), device=device
                )
        return self.shared[size, device]

    def _size(self, size: Any) -> Any:
        """A size as an argument: a number, or a node that is there already."""
        if isinstance(size, int):
            return size
        for node in self.program.graph.nodes:
            if node is self.at:
                break
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and expression(value) == size:
                return node
        raise Untraceable(f"the size {size} is nowhere a number")

    def _sinks(self, node: fx.Node, tracer: Tracer) -> fx.Node:
        """[h] of the sinks [b, h, i, 1]"""
        form = (*_form(node.meta["val"].ndim, node.meta["val"].ndim == 3)[:-1], ())
        form = tracer.form(node, form)
        while (inner := tracer.operand_form(node, form)) is not None:
            node, form = node.args[0], inner
        if form == ((HEADS,),):
            return node
        slots = {s for dim in form for s in dim}
        if slots != {HEADS} and (slots or tracer.sizes[HEADS] != 1):
            raise Untraceable("sinks that are more than one number a head")
        return self._call(aten.flatten.using_ints, node, 0, -1)

    # the result

    def _judged(
        self, spec: Attention, tracer: Tracer, scores: fx.Node, dtype: torch.dtype
    ) -> Attention:
        """The attention with its score graph, or without if causal or full says it all."""
        if scores is tracer.block:
            return dataclasses.replace(spec, ahead=not spec.causal)
        tracer.graph.output(scores)
        tracer.graph.eliminate_dead_code()
        tracer.drop_unused()
        score = fx.GraphModule(torch.nn.Module(), tracer.graph)
        vectors = tuple(tracer.vectors)
        known = (str(score.graph), vectors, tracer.sizes, dtype)
        if known not in self.verdicts:
            self.verdicts[known] = judge(self.program, score, list(vectors), tracer.sizes, dtype)
        verdict = self.verdicts[known]
        if verdict.kind == "other":
            ahead = verdict.ahead and not spec.causal
            return dataclasses.replace(
                spec, score=score, varies=tuple(tracer.varies.values()), ahead=ahead
            )
        tracer.vectors.clear()
        causal = spec.causal or verdict.kind == "causal"
        return dataclasses.replace(spec, causal=causal, ahead=not causal)

    def _attend(
        self,
        spec: Attention,
        tracer: Tracer,
        operands: tuple[fx.Node, fx.Node, fx.Node],
        sinks: fx.Node | None,
    ) -> fx.Node:
        q, k, v = operands
        batch, heads = tracer.sizes[:2]
        q = self._fitting(q, batch, heads)
        fewer = [self._unrepeated(n, 1) for n in (k, v)]
        if all(n is not None for n in fewer):
            shapes = {shape_of(n)[1] for n in fewer if n is not None}
            k, v = fewer if len(shapes) == 1 else (k, v)  # type: ignore[assignment]
        groups = max(shape_of(n)[1] for n in (k, v))
        k, v = (self._fitting(n, batch, groups) for n in (k, v))
        if heads % groups:
            raise Untraceable(f"{groups} heads of keys for {heads} of queries")
        assert self.at is not None
        shape = [*q.meta["val"].shape[:3], v.meta["val"].shape[3]]
        value = q.meta["val"].new_empty(shape, dtype=self.at.meta["val"].dtype)
        args = (q, k, v, sinks, list(tracer.vectors) if spec.score else [], self._key(spec))
        return self._call(attend, *args, value=value)

    def _key(self, spec: Attention) -> str:
        text = None if spec.score is None else str(spec.score.graph)
        spec = dataclasses.replace(spec, transport=self.transport)
        known = (
            *(getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name != "score"),
            text,
        )
        if known not in self.keys:
            self.keys[known] = f"attention_{len(self.program.attentions)}"
            self.program.attentions[self.keys[known]] = spec
        return self.keys[known]

    def _replace(self, new: fx.Node, form: Form, order: tuple[int, ...]) -> None:
        """Put [b, h, i, e] where the last product was, in its dimensions."""
        assert self.at is not None
        if len(form[0]) == 2:
            new = self._call(aten.flatten.using_ints, new, 0, 1)
        for _ in range(new.meta["val"].ndim - len(form)):
            new = self._call(aten.squeeze.dim, new, new.meta["val"].ndim - 3)
        if order != tuple(range(len(order))):
            new = self._call(aten.permute.default, new, list(order))
        self.at.replace_all_uses_with(new)
        _reshape_for_views(new)

    @contextmanager
    def _before(self, node: fx.Node) -> Iterator[None]:
        self.at = node
        with self.program.graph.inserting_before(node):
            yield

    def _call(
        self, target: Any, *args: Any, like: fx.Node | None = None, value: Any = None, **kwargs: Any
    ) -> fx.Node:
        """A call, with its value, and the place in the model of ``like`` or what is replaced."""
        new = self.program.graph.call_function(target, args, kwargs)
        like = like or self.at
        assert like is not None
        copied = ("nn_module_stack", "stack_trace")
        new.meta.update({key: like.meta[key] for key in copied if key in like.meta})
        if value is None:
            given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            value = target(*given, **named)
        new.meta["val"] = value
        return new


def _form(rank: int, folded: bool) -> Form:
    """The form of scores of this rank: [b, h, i, j], [b h, i, j] or [b, i, j], [i, j]."""
    if rank not in (2, 3, 4):
        raise Untraceable(f"scores of {rank} dimensions")
    three = ((BATCH, HEADS),) if folded else ((BATCH,),)
    lead: Form = {2: (), 3: three, 4: ((BATCH,), (HEADS,))}[rank]
    return (*lead, (QUERIES,), (KEYS,))


def _with(shape: tuple[Any, ...], dim: int, size: int) -> tuple[Any, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _weights(softmax: fx.Node) -> _Weights:
    """Follows what uses a softmax to the product with the values."""
    path: list[fx.Node] = []
    node, sinks, dropout = softmax, False, 0.0
    while True:
        users = [u for u in node.users if op_name(u.target) != "sym_size"]
        if len(users) != 1:
            raise Untraceable("weights that are used twice")
        user, kind = users[0], op_name(users[0].target)
        if kind in PRODUCTS:
            operands = user.args[1] if kind == "einsum" else user.args
            places = [p for p, n in enumerate(operands) if n is node]
            if len(places) != 1:
                raise Untraceable("a product of weights with themselves")
            return _Weights(user, places[0], tuple(path), sinks, dropout)
        if not is_tensor(user) or not user.args or user.args[0] is not node:
            raise Untraceable("weights that are used otherwise")
        before, after = shape_of(node)[-2:], shape_of(user)[-2:]
        if kind == "dropout" and not dropout:
            dropout = float(argument(user, 1, "p"))
        elif kind == "slice" and not keeps_shape(user):
            last = argument(user, 1, "dim", 0) % len(shape_of(node)) == len(shape_of(node)) - 1
            starts = argument(user, 2, "start") in (0, None)
            if not (last and starts and after == (before[0], before[1] - 1)) or sinks:
                raise Untraceable("a part of the weights")
            sinks = True
        elif kind == "nan_to_num" and not argument(user, 1, "nan"):
            pass  # rows that read no key are 0 already
        elif kind not in BETWEEN | {"slice"} or before != after:
            raise Untraceable(f"{kind} of weights")
        node = user
        path.append(user)


def _scores_and_sink(softmax: fx.Node, sinks: bool) -> tuple[fx.Node, fx.Node | None]:
    """What a softmax is of, but for a shift of its rows, and the sinks joined to it."""
    node = softmax.args[0]
    while True:
        kind = op_name(node.target)
        if kind in COPIES or (kind == "sub" and _is_largest(node.args[1], node.args[0])):
            node = node.args[0]
        else:
            break
    if not sinks:
        return node, None
    if kind != "cat" or argument(node, 1, "dim", 0) not in (-1, node.meta["val"].ndim - 1):
        raise Untraceable("a column of weights that is no sink")
    if len(node.args[0]) != 2 or shape_of(node.args[0][1])[-1] != 1:
        raise Untraceable("a column of weights that is no sink")
    scores, sink = node.args[0]
    return scores, sink


def _is_largest(node: Any, of: fx.Node) -> bool:
    """Whether a node is the largest of each row of another."""
    while isinstance(node, fx.Node) and op_name(node.target) == "detach":
        node = node.args[0]
    if isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == 0:
        node = node.args[0]
    if not isinstance(node, fx.Node) or op_name(node.target) not in ("max", "amax"):
        return False
    dims, rank = argument(node, 1, "dim"), of.meta["val"].ndim
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    kept = argument(node, 2, "keepdim", False)
    return node.args[0] is of and bool(kept) and list(dims) in ([-1], [rank - 1])


def _unfolded(first: Product) -> tuple[Any, Any]:
    """Batch and heads of products without folded dimensions."""
    return (*shape_of(first.node)[:-2], 1, 1)[:2]  # type: ignore[return-value]


def _lead(
    first: Product, second: Product, scores: fx.Node, path: tuple[fx.Node, ...]
) -> tuple[Any, Any] | None:
    """Batch and heads that are folded somewhere from products to values; None if nowhere."""
    if first.rank == 4:
        return shape_of(first.node)[:2]  # type: ignore[return-value]
    if first.rank != 3:
        return None
    folded = shape_of(first.node)[0]
    between, stack = set(), [scores]
    below = descendants(first.node) - {first.node}
    while stack:
        node = stack.pop()
        if node in below and node not in between:
            between.add(node)
            stack += node.all_input_nodes
    operands = [o.simple().node for o in (first.left, first.right, second.right)]
    sources = [n.args[0] for n in map(_copied, operands) if op_name(n.target) in VIEWS]
    rows = shape_of(first.node)[1]
    for node in (*path, *sources, *second.node.users):
        shape = shape_of(node) if is_tensor(node) else ()
        if len(shape) == 4 and shape[0] * shape[1] == folded:
            return shape[:2]  # type: ignore[return-value]
    for node in between:
        shape = shape_of(node)
        if len(shape) == 4 and shape[0] * shape[1] == folded and shape[2] == rows:
            return shape[:2]  # type: ignore[return-value]
    return None


def _same(node: fx.Node) -> fx.Node:
    """The node that copies, views and slices of all of it stand for."""
    while keeps_shape(node):
        node = node.args[0]
    return node


def _reshape_for_views(node: fx.Node) -> None:
    """An attention need not lay out its result as what it replaces did: views become reshapes."""
    for user in node.users:
        if op_name(user.target) in ("view", "_unsafe_view"):
            user.target = aten.reshape.default
        if permutation(user) is not None or op_name(user.target) in VIEWS:
            _reshape_for_views(user)


def _copied(node: fx.Node) -> fx.Node:
    while op_name(node.target) in COPIES:
        node = node.args[0]
    return node


def _folded(operand: Operand, sizes: tuple[Any, ...]) -> Operand | None:
    """[b, h, ., .], where the operand [b h, ., .] is a view of it."""
    node = _copied(operand.node)
    if op_name(node.target) not in VIEWS or operand.order[:1] != (0,):
        return None
    source = _copied(node.args[0])
    before, after = shape_of(source), shape_of(node)
    if len(before) != 4 or before[2:] != after[1:] or before[0] * before[1] != after[0]:
        return None
    if before[1] != sizes[HEADS]:
        return None
    order = tuple(None if d is None else d + 1 for d in operand.order[1:])
    return Operand(source, (0, 1, *order))


def _without_scale(tracer: Tracer, scores: fx.Node) -> tuple[float, fx.Node]:
    """The number that the products are multiplied with first, and the scores without that."""
    users = [u for u in tracer.block.users if op_name(u.target) != "new_full"]
    if len(users) != 1 or op_name(users[0].target) not in ("mul", "div") or users[0].kwargs:
        return 1.0, scores
    user, number = users[0], users[0].args[1]
    if isinstance(number, fx.Node) and op_name(number.target) == "new_full" and not number.args[1]:
        number = number.args[2]
    if user.args[0] is not tracer.block or not isinstance(number, (int, float)):
        return 1.0, scores
    user.replace_all_uses_with(tracer.block)
    scale = float(number) if op_name(user.target) == "mul" else 1.0 / float(number)
    scores = tracer.block if scores is user else scores
    tracer.graph.erase_node(user)
    return scale, scores
