"""The ops of a mixture of experts: rows by expert are cut by expert, and by who holds the tokens.

The dimension of rows is the product of two axes: ``experts``, that of the stacked parameters, and
``ragged``, which stands for the tokens of one expert. A mesh axis that cuts tokens leaves rows cut
along ``ragged`` (or along ``experts``, and then the rows travel to where the expert is). How long a
rank's part of ``ragged`` is only the data tell: nothing may ask for it.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
from torch import fx

from autoshard.axes import Axis, atoms, leaves
from autoshard.errors import ShardingError, message
from autoshard.experts import body, plan_of
from autoshard.layout import P, R
from autoshard.program import module_path
from autoshard.rules.contraction import op_is
from autoshard.rules.core import Dim, Dims, Typer, Typing, fresh, size_of, unify
from autoshard.runtime.dispatch import Capacity, at_experts, at_tokens, to_experts, to_tokens
from autoshard.runtime.loads import Mixture
from autoshard.runtime.shared_rows import own_rows, share_rows

#: The role of the axis that stands for the tokens of one expert, and of the experts themselves.
RAGGED, EXPERTS = "ragged", "experts"


def dispatch(t: Typer, node: fx.Node) -> Typing:
    """x[t, d], index[t, k], scalars[t, k] -> rows[experts·ragged, d], scalars[experts·ragged],
    offsets[experts], plan"""
    x, index = t.dims(node.args[0]), t.dims(node.args[1])
    unify(x[0], index[0])
    weights = [node.args[5]] if len(node.args) > 5 and node.args[5] is not None else []
    for scalar in [*node.args[2], *weights]:
        dims = t.dims(scalar)
        unify(dims[0], index[0])
        unify(dims[1], index[1])
    experts, count = fresh(node.args[3]), node.args[3]
    for axis in experts:
        axis.role, axis.name = EXPERTS, "experts"
    ragged = Axis(sympy.sympify(size_of(sum(index, ()))) / count, "tokens of an expert")
    ragged.role = RAGGED
    rows = (*experts, ragged)
    scalars = [(rows,) for _ in node.args[2]]
    out: list[Dims] = [(rows, *x[1:]), *scalars, (experts,), index]
    return Typing(out, whole=[index[1]], localize=_dispatch, decide=_dispatch_modes)


def ragged_of(typing: Typing) -> Axis:
    """The axis of the tokens of one expert, of what a dispatch states."""
    return leaves(typing.out[0][0])[-1]


def experts_of(typing: Typing) -> Dim:
    """The axes of the experts, of what a dispatch states: one, unless it was taken apart."""
    return leaves(typing.out[-2][0])


def inner_axes(typings: dict[fx.Node, Typing], node: fx.Node) -> set[int]:
    """The ids of the axes that products inside experts run over, but for the experts, the rows and
    the width of the tokens."""
    rows = typings[node].out[0]
    outside = {id(a) for d in (*rows, *typings[node].out[-2]) for a in atoms(d)}
    found = set[int]()
    for inner in body(node):
        typing = typings.get(inner)
        if typing is not None and typing.flops != 0:
            found |= {id(a) for d in (*typing.out, *typing.summed) for a in atoms(d)}
    return found - outside


def _dispatch_modes(p: Any, node: fx.Node, modes: dict[str, Any]) -> None:
    """Tokens may be cut where their rows may, and where experts are cut inside if rows travel: the
    ranks share them then. If none do every rank has all tokens, and does other work with them."""
    typing = p.typings[node]
    travel = bool(_over(p, typing))
    ragged, tokens = ragged_of(typing), {id(a) for a in atoms(typing.out[-1][0])}
    inner = inner_axes(p.typings, node)
    for m, mode in modes.items():
        if not isinstance(mode, Axis):
            whole = bool(inner & set(p.assigned[m]))
        else:
            apart = travel and bool(inner & set(p.assigned[m]))
            whole = id(mode) in tokens and _landing(p, m, ragged, typing) is None and not apart
        if whole:
            modes[m] = R


def _over(p: Any, typing: Typing) -> tuple[str, ...]:
    """The mesh axes that cut the experts."""
    own = {id(a) for a in experts_of(typing)}
    return tuple(m for m in p.axes if own & set(p.assigned[m]))


def _landing(p: Any, m: str, ragged: Axis, typing: Typing) -> Axis | None:
    """What rows are cut along over a mesh axis that cuts the tokens: the experts where it may."""
    experts = [a for a in experts_of(typing) if id(a) in p.assigned[m]]
    if experts:
        return experts[0]
    return ragged if id(ragged) in p.assigned[m] else None


def _dispatch(local: Any) -> Any:
    """Rows travel over the mesh axes that cut the experts; over those that cut tokens and the
    inside of experts, ranks share what has come."""
    p, typing = local.p, local.typing
    ragged, (tokens, _) = ragged_of(typing), typing.out[-1]
    for m in local.cutting([tokens]):
        local.moved[m] = _landing(p, m, ragged, typing) or R
    own, over = {id(a) for a in experts_of(typing)}, _over(p, typing)
    alike = [m for m in over if id(local.moved.get(m)) not in own]
    if alike:
        raise ShardingError(
            message(
                f"dispatch {module_path(local.node)}",
                "tokens that go to experts",
                f"they are whole over {','.join(alike)}, which cuts the experts",
                "ranks that hold the same tokens would each send them",
                f"drop {','.join(alike)} from the mesh",
            )
        )
    x, index, scalars, count, *rest = local.mapped(local.node.args)
    factor, weights = rest or (None, None)
    skips = local.node.kwargs.get("skips", False)
    cutting = local.cutting([tokens])
    k, where = index_of(local.node).shape[1], module_path(local.node) or "the model"
    mixtures = p.program.mixtures
    name = f"mixture_{len(mixtures)}"
    shared = _sharing(local.moved)
    mixtures[name] = Mixture(where, count, k, over, cutting, shared, factor)
    limit: tuple[Any, ...] = ()
    if factor is not None:
        inner = [m for m in cutting if m not in p.batch_axes]
        whole = p.size(tokens, {m: s for m, s in local.modes.items() if m not in inner})
        held = p.size(tokens, dict(local.modes), largest=True)
        limit = (Capacity(factor, p.mesh.size(tuple(inner))), whole, held, weights)
    if skips:
        limit = (*(limit or (None, 0, 0, None)), True)
    sent = local.emit(to_experts, x, over, index, scalars, count, name, *limit)
    slots, width = typing.out[-1], typing.out[0][1:]
    sizes = [(*slots, *width), *(slots for _ in scalars)]
    times = _times(local.node)
    if over:
        local.note_rows("to_experts", sent, local.read[local.node.args[0]], over, sizes, times)
    arrived = local.emit(at_experts, sent)
    if not shared:
        return arrived
    made = local.emit(share_rows, arrived, shared)
    local.note_rows("share_rows", made, local.read[local.node.args[0]], shared, sizes, times)
    return made


def _times(dispatch: fx.Node) -> Any:
    """How many rows travel for each slot: with a capacity, as many as experts take."""
    experts, *limit = dispatch.args[3:5]
    if not limit:
        return 1  # at most: those of no expert stay
    k = index_of(dispatch).shape[1]
    return min(sympy.nsimplify(limit[0], rational=True), sympy.Rational(experts, k))


def _sharing(moved: dict[str, Any]) -> tuple[str, ...]:
    """The mesh axes over whose ranks rows are put together."""
    return tuple(m for m, state in moved.items() if state == R)


def _before_sharing(plan: fx.Node) -> tuple[Any, Any]:
    """What had come to this rank alone, and where in it is the plan of these rows."""
    shared: Any
    shared, at = plan.args
    return shared.args[0], at


def index_of(node: fx.Node) -> Any:
    """The fake ``index[t, k]`` of a dispatch."""
    index: Any = node.args[1]
    return index.meta["val"]


def combine(t: Typer, node: fx.Node) -> Typing:
    """rows[experts·ragged, e], plan -> [t, e]"""
    rows, (tokens, _) = t.dims(node.args[0]), t.dims(plan_of(node))[-1]
    return Typing((tokens, *rows[1:]), linear="first", localize=_combine, decide=_combine_modes)


def _combine_modes(p: Any, node: fx.Node, modes: dict[str, Any]) -> None:
    """What the dispatch had cut comes back as it was."""
    for m, mode in p.modes[plan_of(node)].items():
        if m in p.moved[plan_of(node)]:
            modes[m] = mode


def _combine(local: Any) -> Any:
    node, p = local.node, local.p
    source = plan_of(node)
    moved, shared = p.moved[source], _sharing(p.moved[source])
    over = tuple(m for m, axis in moved.items() if m not in shared and axis.role == EXPERTS)
    rows, plan = local.held(node.args[0], moved | dict.fromkeys(shared, P)), local.value(1)
    value = local.read[node.args[0]]
    sizes = [(*p.typings[source].out[-1], *local.out_dims()[1:])]
    times = _times(source)
    if shared:
        rows = local.emit(own_rows, rows, shared, plan)
        local.note_rows("own_rows", rows, value, shared, sizes, times)
        plan = local.emit(operator.getitem, *_before_sharing(plan))
    sent = local.emit(to_tokens, rows, over, plan)
    if over:
        local.note_rows("to_tokens", sent, value, over, sizes, times)
    return local.emit(at_tokens, sent)


def rows_of_experts(t: Typer, node: fx.Node) -> Typing:
    """table[experts, ...], offsets[experts] -> [experts·ragged, ...]"""
    table, offsets = t.dims(node.args[0]), t.dims(node.args[1])
    unify(table[0], offsets[0])
    rows: Dim = t.dims(plan_of(node))[0][0]  # type: ignore[assignment]
    return Typing(
        (rows, *table[1:]),
        fresh=[rows],
        as_is=(node.args[1],),
        localize=_rows_of_experts,
        decide=_rows_of_experts_modes,
    )


def _rows_of_experts_modes(p: Any, node: fx.Node, modes: dict[str, Any]) -> None:
    """What is added to summands is one itself: the rows that one rank has, zeros on the others."""
    users = [u for u in node.users if op_is(u, "add") and len(node.users) == 1]
    others = [n for u in users for n in u.all_input_nodes if n is not node]
    summed = [a for n in others if n in p.typings for d in p.typings[n].summed for a in atoms(d)]
    for m in modes:
        if m not in p.batch_axes and {id(a) for a in summed} & set(p.assigned[m]):
            modes[m] = P


def _rows_of_experts(local: Any) -> Any:
    table, over = local.node.args[0], [m for m, mode in local.modes.items() if mode == P]
    made = local.held(table, dict.fromkeys(over, R))
    if over:
        made = local.convert_raw("once", made, tuple(over), local.read[table].dims)
    rest = (local.mapped(a) for a in local.node.args[1:])
    return local.emit(local.node.target, made, *rest)


RULES: list[Any] = [
    ("dispatch", dispatch),
    ("combine", combine),
    ("expert_rows", rows_of_experts),
]
