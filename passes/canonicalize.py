"""canonicalize: one form for each thing, and nothing that computes nothing.

Requires: a captured graph. Gives: no assertions, aliases, no-op casts or inactive dropouts; masks
that are causal or full for every size replaced by ``is_causal`` or dropped; scaled additions of
products written out; no concatenation with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autoshard.chain import Pass
from autoshard.infer import expression
from autoshard.masks import ancestors, depends_on_sizes_only, evaluate, settings
from autoshard.program import Program, shallow
from autoshard.rules import op_name
from autoshard.rules.core import argument

aten = torch.ops.aten
DROPPED = frozenset(
    """_assert_tensor_metadata _assert_scalar _assert_async sym_constrain_range
    sym_constrain_range_for_size""".split()
)


#: What makes a tensor of another one's shape, and what it is filled with; none: by an argument.
FILLED = {"zeros_like": 0, "ones_like": 1, "full_like": None}


@dataclass(frozen=True)
class Canonicalize(Pass):
    name: ClassVar[str] = "canonicalize"

    def __call__(self, program: Program) -> Program:
        program = shallow(program)
        for node in list(program.graph.nodes):
            if node.op == "call_function":
                _simplify(program.graph, node)
                _constant_index(program, node)
        _recognise_masks(program)
        program.graph.eliminate_dead_code(
            is_impure_node=lambda n: n.op in ("placeholder", "output")
        )
        program.graph_module.recompile()
        return program


def _simplify(graph: fx.Graph, node: fx.Node) -> None:
    kind = op_name(node.target)
    if kind in DROPPED:
        if not node.users:
            graph.erase_node(node)
    elif kind in ("alias", "detach_"):
        if kind == "detach_":
            node.target = aten.detach.default
        else:
            _replace(node, node.args[0])
    elif kind in ("to", "_to_copy", "lift_fresh_copy"):
        source = node.args[0].meta["val"]
        if source.dtype == node.meta["val"].dtype and source.device == node.meta["val"].device:
            _replace(node, node.args[0])
    elif kind == "dropout":
        if not argument(node, 1, "p") or not argument(node, 2, "train"):
            _replace(node, node.args[0])
    elif kind == "broadcast_tensors":
        _write_out_broadcast(graph, node)
    elif kind == "copy":
        _copied(graph, node)
    elif kind == "baddbmm" or (kind == "addmm" and _factors(node) != (1, 1)):
        _write_out_added(graph, node)
    elif kind == "cat":
        _without_empty(node)
    elif kind in FILLED:
        _filled_alone(node, FILLED[kind])


def _constant_index(program: Program, node: fx.Node) -> None:
    """x[..., [-2, -1], :] with constant neighbouring indices is a slice."""
    if op_name(node.target) != "index":
        return
    source, indices = node.args
    used = [i for i, v in enumerate(indices) if v is not None]
    if len(used) != 1:
        return
    constant = indices[used[0]]
    while op_name(constant.target) in ("clone", "lift_fresh_copy", "detach", "alias"):
        constant = constant.args[0]
    known = program.values.get(constant.name)
    size = source.meta["val"].shape[used[0]]
    if known is None or not known.constant or known.value.ndim != 1 or not isinstance(size, int):
        return
    where = [int(v) % size for v in known.value.tolist()] if not known.value.is_meta else []
    if not where or where != list(range(where[0], where[0] + len(where))):
        return
    with program.graph.inserting_before(node):
        new = program.graph.call_function(
            aten.slice.Tensor, (source, used[0], where[0], where[0] + len(where))
        )
    new.meta = dict(node.meta)
    _replace(node, new)


def _replace(node: fx.Node, by: Any) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _write_out_broadcast(graph: fx.Graph, node: fx.Node) -> None:
    """broadcast_tensors is an expand of each operand that has another shape."""
    for user in list(node.users):
        source, value = node.args[0][user.args[1]], user.meta["val"]
        if tuple(source.meta["val"].shape) == tuple(value.shape):
            _replace(user, source)
            continue
        largest = next(n for n in node.args[0] if tuple(n.meta["val"].shape) == tuple(value.shape))
        with graph.inserting_before(user):
            new = graph.call_function(aten.expand_as.default, (source, largest))
        new.meta = dict(user.meta)
        _replace(user, new)


def _copied(graph: fx.Graph, node: fx.Node) -> None:
    """copy(into, x) is x, in the shape and type of what it is copied into."""
    into, source = node.args[:2]
    value, made = node.meta["val"], source.meta["val"]
    with graph.inserting_before(node):
        new = source
        if made.dtype != value.dtype:
            new = graph.call_function(aten.to.dtype, (source, value.dtype))
            new.meta = {**node.meta, "val": made.to(value.dtype)}
        if tuple(made.shape) != tuple(value.shape):
            return
    _replace(node, new)


def _without_empty(node: fx.Node) -> None:
    """A tensor joined to ones of shape (0,), such as a cache that holds nothing yet, is itself. It
    is a copy of it: what follows may be a view that only a contiguous tensor has."""
    parts = list(node.args[0])
    full = [n for n in parts if tuple(map(expression, n.meta["val"].shape)) != (0,)]
    if len(full) == 1 < len(parts) and full[0].meta["val"].dtype == node.meta["val"].dtype:
        node.target, node.args = aten.clone.default, (full[0],)
        node.kwargs = {"memory_format": torch.contiguous_format}


def _filled_alone(node: fx.Node, value: int | None) -> None:
    """One element that is filled reads nothing, so that no piece of a tensor is cut out for its
    type alone: zeros_like(x[:1, :1])."""
    made = node.meta["val"]
    if all(isinstance(size, int) and size == 1 for size in made.shape):
        value = argument(node, 1, "fill_value") if value is None else value
        node.target, node.args = aten.full.default, (list(made.shape), value)
        node.kwargs = {"dtype": made.dtype, "device": made.device}


def _factors(node: fx.Node) -> tuple[Any, Any]:
    return argument(node, 3, "beta", 1), argument(node, 4, "alpha", 1)


def _write_out_added(graph: fx.Graph, node: fx.Node) -> None:
    """beta * input + alpha * (a @ b)"""
    added, a, b = node.args[:3]
    beta, alpha = _factors(node)
    value = node.meta["val"]

    def call(target: Any, *args: Any) -> fx.Node:
        new = graph.call_function(target, args)
        new.meta = {**node.meta, "val": value}
        return new

    with graph.inserting_before(node):
        batched = op_name(node.target) == "baddbmm"
        product = call(aten.bmm.default if batched else aten.mm.default, a, b)
        if alpha != 1:
            product = call(aten.mul.Tensor, product, alpha)
        if beta != 1:
            source = added.meta["val"]
            added = call(aten.mul.Tensor, added, beta)
            added.meta["val"] = source
        total = call(aten.add.Tensor, product, added)
    _replace(node, total)


def _recognise_masks(program: Program) -> None:
    """Masks of attention that depend on sizes only: evaluated at several sizes, and replaced."""
    known: dict[fx.Node, str] = {}
    for node in program.graph.nodes:
        if op_name(node.target) != "scaled_dot_product_attention":
            continue
        mask = argument(node, 3, "attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        if mask not in known:
            known[mask] = _what_mask(program, mask)
        if known[mask] in ("causal", "full"):
            args = list(node.args)[:3]
            kwargs = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "is_causal")}
            dropout = argument(node, 4, "dropout_p", 0.0)
            kwargs.pop("dropout_p", None)
            node.args = (*args, None, dropout, known[mask] == "causal")
            node.kwargs = kwargs


def _what_mask(program: Program, mask: fx.Node) -> str:
    """``causal``, ``full`` or ``other``."""
    if mask.op == "placeholder":
        return "other"
    needed = ancestors([mask])
    if not depends_on_sizes_only(program, needed):
        return "other"
    verdicts = set()
    for sizes in settings(program, needed, mask.meta["val"].shape):
        env = evaluate(program, needed, sizes)
        verdicts.add("other" if env is None else _classify(env[mask]))
        if "other" in verdicts:
            return "other"
    return verdicts.pop() if len(verdicts) == 1 else "other"


def _classify(mask: torch.Tensor) -> str:
    if mask.ndim < 2:
        return "other"
    allowed = mask if mask.dtype is torch.bool else mask == 0
    if mask.dtype is not torch.bool:
        blocked = mask[~allowed]
        if blocked.numel() and blocked.max() > torch.finfo(mask.dtype).min / 2:
            return "other"
    if bool(allowed.all()):
        return "full"
    rows, columns = mask.shape[-2:]
    causal = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if rows == columns and bool((allowed == causal).all()) else "other"
