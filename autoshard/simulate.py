"""All ranks in one process: the emitted graph run node by node for every rank, in lockstep.

Collectives act on the ranks' tensors directly, with the backward of `collectives.KINDS`; nothing is
padded or sent, which makes this an oracle for the real ones. One autograd graph spans all ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from autoshard import collectives
from autoshard.collectives import KINDS, PRIMITIVES, Link, windows
from autoshard.emit import LINKED
from autoshard.layout import piece_bounds
from autoshard.mesh import SubMesh
from autoshard.outline import Run, runs
from autoshard.program import Parameter
from autoshard.runtime import gather, rng, sections, zero
from autoshard.runtime.attention import gathered_attention, ring_attention
from autoshard.runtime.dispatch import at_experts, at_tokens, to_experts, to_tokens
from autoshard.runtime.shared_rows import own_rows, share_rows
from autoshard.runtime.split import repeatable


class _Lockstep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: str, links: list[Link], dim: Any, sizes: list[Any], *xs: torch.Tensor
    ) -> Any:
        ctx.call = kind, links, dim, sizes
        return tuple(_primitive(KINDS[kind][0], links, dim, sizes, list(xs)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        kind, links, dim, sizes = ctx.call
        return None, None, None, None, *_primitive(KINDS[kind][1], links, dim, sizes, list(grads))


def _window(x: torch.Tensor, dim: int, start: int, stop: int) -> torch.Tensor:
    """Rows of ``x`` along a dimension, moved in front; zeros outside it."""
    x = x.movedim(dim, 0)
    rows = [x[i] if 0 <= i < len(x) else torch.zeros_like(x[0]) for i in range(start, stop)]
    return torch.stack(rows) if rows else x[:0]


def _runs(link: Link, size: int) -> list[tuple[int, int, int]]:
    """Where in a rank's piece each of its runs begins; start and stop of that in the whole."""
    at, found = 0, []
    for start, stop in link.pieces(size):
        found.append((at, start, stop))
        at += stop - start
    return found


def _primitive(
    name: str, links: list[Link], dim: Any, sizes: list[Any], xs: list[torch.Tensor]
) -> list[torch.Tensor]:
    if name == "gather":
        runs = [
            (start, x.narrow(dim, at, stop - start))
            for x, link, size in zip(xs, links, sizes, strict=True)
            for at, start, stop in _runs(link, size)
        ]
        whole = [run for _, run in sorted(runs, key=lambda r: (r[0], r[1].shape[dim]))]
        return [torch.cat(whole, dim) for _ in xs]
    if name in ("exchange", "exchange_back"):
        back = name == "exchange_back"
        (whole, cut), (long, other) = dim[::-1] if back else dim, zip(*sizes, strict=True)
        long, other = (other, long) if back else (long, other)
        together = _primitive("gather", links, whole, list(long), xs)
        return _primitive("slice", links, cut, list(other), together)
    if name == "fetch":
        lengths = [size for size, _ in sizes]
        out = []
        for link, size, whole in zip(
            links, sizes, _primitive("gather", links, dim[0], lengths, xs), strict=True
        ):
            found = windows(link, link.index, dim, size)
            rows = [_window(whole, dim[0], *window) for window in found]
            out.append(torch.cat([whole.movedim(dim[0], 0)[:0], *rows]).movedim(0, dim[0]))
        return out
    if name == "fetch_back":
        total = xs[0].new_zeros(sizes[0][0], *xs[0].movedim(dim[0], 0).shape[1:])
        for x, link, size in zip(xs, links, sizes, strict=True):
            rows, at = x.movedim(dim[0], 0), 0
            for start, stop in windows(link, link.index, dim, size):
                low, high = max(start, 0), min(stop, len(total))
                if low < high:
                    total[low:high] += rows[at + low - start : at + high - start]
                at += max(stop - start, 0)
        lengths = [size for size, _ in sizes]
        whole = total.movedim(0, dim[0])
        return _primitive("slice", links, dim[0], lengths, [whole] * len(xs))
    if name in ("sum", "scatter_sum"):
        total = torch.stack(xs).sum(0)
        if name == "sum":
            return [total.clone() for _ in xs]
        return [
            PRIMITIVES["slice"](total, link, dim, size).clone()
            for link, size in zip(links, sizes, strict=True)
        ]
    return [
        PRIMITIVES[name](x, link, dim, s).clone()
        for x, link, s in zip(xs, links, sizes, strict=True)
    ]


class _Gathered(torch.autograd.Function):
    """The weights of a unit, of all ranks' shards; their gradients are summed and cut again."""

    @staticmethod
    def forward(ctx: Any, units: list[Any], mesh: SubMesh, *shards: torch.Tensor) -> Any:
        ctx.units, ctx.mesh = units, mesh
        ctx.set_materialize_grads(False)
        count = len(units[0].entries)
        by_rank = [list(shards[r * count : (r + 1) * count]) for r in range(len(units))]
        packed = [_section(unit, own) for unit, own in zip(units, by_rank, strict=True)]
        out = []
        for r, unit in enumerate(units):
            flat = torch.cat([packed[p] for p in mesh.peers(r, unit.unit.axes)])
            wholes = [flat.new_empty(e.shape) for e in unit.entries]
            sections.unpack(unit.entries, flat, unit.ranks, wholes)
            out += wholes
        frozen = [not e.parameter.trainable for unit in units for e in unit.entries]
        ctx.mark_non_differentiable(*itertools.compress(out, frozen))
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        units, mesh = ctx.units, ctx.mesh
        count = len(units[0].entries)
        found: list[Any] = [None] * len(grads)
        for i in range(count):
            held = [grads[r * count + i] for r in range(len(units))]
            if all(grad is None for grad in held):
                continue
            entries = [unit.entries[i] for unit in units]
            wholes = [
                torch.zeros(e.shape, dtype=units[0].unit.dtype) if g is None else g.clone()
                for e, g in zip(entries, held, strict=True)
            ]
            sum_over_ranks(entries[0].parameter, mesh, dict(enumerate(wholes)))
            for r, (entry, whole) in enumerate(zip(entries, wholes, strict=True)):
                mine = whole[slice(*entry.bounds)] if entry.shape else whole
                found[r * count + i] = mine.clone()
        return None, None, *found


def _section(unit: Any, shards: list[torch.Tensor]) -> torch.Tensor:
    empty = torch.zeros(unit.numel, dtype=unit.unit.dtype)
    return sections.pack(unit.entries, shards, empty)


def sum_over_ranks(parameter: Parameter, mesh: SubMesh, wholes: dict[int, torch.Tensor]) -> None:
    """Sum gradients of a parameter's slice, by rank that has one, in place, as its layout says."""
    pieces = {r: gather.slice_pieces(parameter, mesh, r) for r in wholes}
    for at, ((*_, over), _) in enumerate(next(iter(pieces.values()))):
        done: set[int] = set()
        for r in wholes:
            if r in done or not over:
                continue
            group = mesh.peers(r, over)
            done.update(group)
            views = [gather.view_of(wholes[p], pieces[p][at][0]) for p in group]
            total = torch.stack(views).sum(0)
            for view in views:
                view.copy_(total)


def simulate(
    graph: fx.Graph,
    mesh: SubMesh,
    arguments: list[list[Any]],
    units: list[dict[str, Any]] | None = None,
    named: dict[str, Any] | None = None,
) -> list[Any]:
    """Run a graph on all ranks. ``arguments[rank]``: the graph's; ``units[rank]``: the
    `runtime.zero.Weights` and `runtime.loads.Load` that it names; ``named``: what else it names.
    Gives each rank's results. Recomputed blocks are computed again in backward, on all ranks at
    once."""
    ranks = range(len(arguments))
    units = [{**own, **(named or {})} for own in units or [{}] * len(arguments)]
    env: list[dict[fx.Node, Any]] = [{} for _ in ranks]
    remaining = [iter(a) for a in arguments]
    last_use = _last_uses(graph)
    for run in runs(graph):
        if run.block is not None:
            _again(run, mesh, env, units)
        for node in run.nodes:
            if node.op == "placeholder":
                for r in ranks:
                    env[r][node] = next(remaining[r])
            elif node.op == "output":
                return [fx.map_arg(node.args[0], lambda n, r=r: env[r][n]) for r in ranks]
            elif run.block is None:
                _step(node, mesh, env, units)
            for dead in last_use.get(node, ()):
                for r in ranks:
                    env[r].pop(dead, None)
    raise AssertionError("a graph without output")


def _step(node: fx.Node, mesh: SubMesh, env: list[dict[fx.Node, Any]], units: Any) -> None:
    try:
        values = run_node(node, mesh, env, units)
    except RuntimeError as error:
        raise RuntimeError(
            f"{node.format_node()} from {node.meta.get('origin')}: {error}"
        ) from error
    for r, value in enumerate(values):
        env[r][node] = value


def _again(run: Run, mesh: SubMesh, env: list[dict[fx.Node, Any]], units: Any) -> None:
    """Run a recomputed block: backward has its inputs only, and runs it again."""
    reads, gives = run.reads(), run.gives()

    def body(*inputs: Any) -> Any:
        rows = [inputs[i : i + len(reads)] for i in range(0, len(inputs), len(reads))]
        inner = [dict(zip(reads, row, strict=True)) for row in rows]
        for node in run.nodes:
            _step(node, mesh, inner, units)
        return [[each[node] for node in gives] for each in inner]

    inputs = [each[node] for each in env for node in reads]
    made = checkpoint(repeatable(body), *inputs, use_reentrant=False)
    for each, values in zip(env, made, strict=True):
        each.update(zip(gives, values, strict=True))


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    out: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last.items():
        if node.op != "output":
            out.setdefault(node, []).append(used)
    return out


def run_node(node: fx.Node, mesh: SubMesh, env: list[dict[fx.Node, Any]], units: Any) -> list[Any]:
    """One node on all ranks, whose values by node are ``env``; see `simulate`."""
    if node.target in (zero.start_gather, zero.release):
        return [None] * len(env)
    calls = [fx.map_arg((node.args, node.kwargs), lambda n, e=e: e[n]) for e in env]
    if node.target is zero.wait_gather:
        own = [known[node.args[2]] for known in units]
        flat = _Gathered.apply(own, mesh, *(shard for args, _ in calls for shard in args[3]))
        count = len(own[0].entries)
        return [list(flat[r * count : (r + 1) * count]) for r in range(len(own))]
    if node.target in (ring_attention, gathered_attention):
        return _attention(node, mesh, [args for args, _ in calls], units)
    if node.target in (to_experts, to_tokens):
        return [(args, mesh.peers(r, args[1]) or [r]) for r, (args, _) in enumerate(calls)]
    if node.target in (share_rows, own_rows):
        return _shared(node, mesh, [args for args, _ in calls])
    if node.target in (at_experts, at_tokens):
        return _experts(node, [args[0] for args, _ in calls], units)
    if node.target in LINKED and node.args[1]:
        axes = node.args[1]
        links = [Link.of(mesh, r, axes) for r in range(len(env))]
        if node.target in collectives.LOCAL:
            return [
                node.target(args[0], link) for (args, _), link in zip(calls, links, strict=True)
            ]
        if node.target in (collectives.runwise, collectives.local_places):
            return [
                node.target(args[0], link, *args[2:], **kwargs)
                for (args, kwargs), link in zip(calls, links, strict=True)
            ]
        if node.target is rng.draw:
            return _in_step(
                node, [((a[0], link, *a[2:]), k) for (a, k), link in zip(calls, links, strict=True)]
            )
        return _collective(node, mesh, axes, links, [args for args, _ in calls])
    if node.target is rng.draw:
        return _in_step(node, calls)
    return [node.target(*args, **kwargs) for args, kwargs in calls]


def _in_step(node: fx.Node, calls: list[Any]) -> list[Any]:
    """Every rank sees the common random stream in the same state."""
    state, out = torch.get_rng_state(), []
    for args, kwargs in calls:
        torch.set_rng_state(state)
        out.append(node.target(*args, **kwargs))
    return out


def _attention(node: fx.Node, mesh: SubMesh, calls: list[Any], units: Any) -> list[Any]:
    """Each rank's queries on all keys: what travels round a ring is gathered here."""
    axes, ranks = node.args[1], range(len(calls))
    keys, values = ([args[at] for args in calls] for at in (2, 3))
    links = [Link.of(mesh, r, axes) if axes else None for r in ranks]
    if node.target is ring_attention:
        for first in ranks:
            group = mesh.peers(first, axes)
            if group[0] != first:
                continue
            for held in (keys, values):
                own = [links[r] for r in group]
                sizes = [calls[r][8] for r in group]
                whole = _Lockstep.apply("all_gather", own, 2, sizes, *(held[r] for r in group))
                for r, x in zip(group, whole, strict=True):
                    held[r] = x
    out = []
    for r, args in enumerate(calls):
        sinks, vectors, key, *rest = args[4:]
        spec = units[r][key]
        out.append(
            gathered_attention(args[0], links[r], keys[r], values[r], sinks, vectors, spec, *rest)
        )
    return out


@dataclass(eq=False)
class _Way:
    """Which slots ``(rank, slot)`` the rows of a rank are, in order (None: of none, nothing reads
    what becomes of them), and of how many tokens with k experts each its own are."""

    slots: list[tuple[int, int | None]]
    tokens: int
    k: int

    @property
    def rows(self) -> int:
        return len(self.slots)


def _experts(node: fx.Node, calls: list[Any], units: Any) -> list[Any]:
    """Rows of all ranks' tokens to the ranks of their experts, or back, one by one. ``calls``: of
    every rank, the arguments of what sends them, and the ranks of its group."""
    sent = [args for args, _ in calls]
    if node.target is at_tokens:
        return [_returned(r, group, sent) for r, (_, group) in enumerate(calls)]
    kept = [_kept(*args) for args in sent]
    out = [_arrived(r, group, sent, kept) for r, (_, group) in enumerate(calls)]
    for r, ((args, group), (*_, way)) in enumerate(zip(calls, out, strict=True)):
        load = units[r].get(args[5])
        if load is not None:
            _take_note(load, r, args, group, way, kept[r])
    return out


def _kept(
    x: Any, over: Any, index: torch.Tensor, scalars: Any, experts: int, name: str,
    capacity: Any = None, tokens: int = 0, held: int = 0, weights: torch.Tensor | None = None,
    skips: bool = False,
) -> list[list[int]]:  # fmt: skip
    """The slots of one rank that go to each expert, in order."""
    flat = index.reshape(-1).tolist()
    found = [[s for s, e in enumerate(flat) if e == expert] for expert in range(experts)]
    if capacity is None:
        return found
    most = capacity.slots(tokens, held, index.shape[1], experts)
    if weights is not None:
        heavy = weights.detach().reshape(-1).tolist()
        found = [sorted(slots, key=lambda s: (-heavy[s], s)) for slots in found]
    return [slots[:most] for slots in found]


def _idle(args: Any, kept: list[list[int]]) -> list[list[int]]:
    """The slots of one rank whose rows each expert is given for nothing: with a capacity as many as
    are missing, of its first slot; where nothing travels, the last one those of no expert."""
    over, index, experts, limit = args[1], args[2], args[4], args[6:9]
    if limit and limit[0] is not None:
        most = limit[0].slots(*limit[1:], index.shape[1], experts)
        return [[next(iter(slots), 0)] * (most - len(slots)) for slots in kept]
    found: list[list[int]] = [[] for _ in range(experts)]
    if not over:
        found[-1] = [s for s, e in enumerate(index.reshape(-1).tolist()) if e >= experts]
    return found


def _take_note(
    load: Any, rank: int, args: Any, group: list[int], way: _Way, kept: list[list[int]]
) -> None:
    index, experts = args[2].reshape(-1), args[4]
    low, high = piece_bounds(experts, len(group), group.index(rank))
    counts = torch.bincount(index.long(), minlength=experts)[:experts]
    leaving = [len(a) + len(b) for a, b in zip(kept, _idle(args, kept), strict=True)]
    away = sum(leaving[:low]) + sum(leaving[high:])
    each = args[0].element_size() * args[0].shape[1] + sum(s.element_size() for s in args[3])
    flown = {s for slots in kept for s in slots}
    over = [e < experts and s not in flown for s, e in enumerate(index.tolist())]
    load.take(counts, way.rows, away * each, torch.tensor(over, dtype=torch.bool))


def _arrived(rank: int, group: list[int], sent: list[Any], kept: list[Any]) -> tuple[Any, ...]:
    x, _, index, own, experts, *_ = sent[rank]
    slots: list[tuple[int, int | None]] = []
    sources: list[tuple[int, int, bool]] = []
    counts, idle = [], {p: _idle(sent[p], kept[p]) for p in group}
    for expert in range(*piece_bounds(experts, len(group), group.index(rank))):
        before = len(slots)
        for p in group:
            slots += [(p, s) for s in kept[p][expert]] + [(p, None)] * len(idle[p][expert])
            sources += [(p, s, True) for s in kept[p][expert]]
            sources += [(p, s, False) for s in idle[p][expert]]
        counts.append(len(slots) - before)
    k = index.shape[1]
    rows = [_row(sent[p][0], s // k, read) for p, s, read in sources]
    scalars = [
        [_row(sent[p][3][i].reshape(-1), s, read) for p, s, read in sources]
        for i in range(len(own))
    ]
    likes = [x, *(each.reshape(-1) for each in own)]
    made = [
        torch.stack(each) if each else like[:0] * 1
        for each, like in zip([rows, *scalars], likes, strict=True)
    ]
    offsets = torch.tensor(counts, dtype=torch.int64).cumsum(0).to(torch.int32)
    return (*made, offsets, _Way(slots, len(index), k))


def _row(x: torch.Tensor, at: int, read: bool) -> torch.Tensor:
    """A row that travels; one that is not ``read`` gives no gradient back."""
    if read:
        return x[at]
    return x[at].detach() if len(x) else x.new_zeros(x.shape[1:])


@dataclass(eq=False)
class _Union:
    """Which rows ``(rank, row)`` of all ranks of a group, in order."""

    places: list[tuple[int, int]]
    own: int

    @property
    def rows(self) -> int:
        return len(self.places)


def _shared(node: fx.Node, mesh: SubMesh, calls: list[Any]) -> list[Any]:
    """Rows of all ranks of a group, by expert; or every rank's own rows of the sum."""
    out: list[Any] = [None] * len(calls)
    for first in range(len(calls)):
        group = mesh.peers(first, node.args[1])
        if out[first] is not None:
            continue
        if node.target is own_rows:
            total = torch.stack([calls[r][0] for r in group]).sum(0)
            for r in group:
                union = calls[r][2]
                mine = [at for at, (p, _) in enumerate(union.places) if p == r]
                out[r] = total[torch.tensor(mine, dtype=torch.long)]
            continue
        arrived = {r: calls[r][0] for r in group}
        ends = {r: [0, *arrived[r][-2].tolist()] for r in group}
        places, counts = [], []
        for expert in range(len(ends[first]) - 1):
            found = [(r, i) for r in group for i in range(*ends[r][expert : expert + 2])]
            places += found
            counts.append(len(found))
        several = range(len(arrived[first]) - 2)
        rows = [_taken({r: arrived[r][i] for r in group}, places) for i in several]
        offsets = torch.tensor(counts, dtype=torch.int64).cumsum(0).to(torch.int32)
        for at, r in enumerate(group):
            union = _Union(places, len(arrived[r][0]))
            out[r] = (*(x[at] for x in rows), offsets, union)
    return out


def _taken(xs: dict[int, torch.Tensor], places: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Rows of several ranks, for each of them: their gradients are summed."""
    start = dict(zip(xs, itertools.accumulate([0, *map(len, xs.values())]), strict=False))
    at = torch.tensor([start[r] + i for r, i in places], dtype=torch.long)
    rows = torch.cat(list(xs.values()))[at]
    return [rows.clone() for _ in xs]


def _returned(rank: int, group: list[int], sent: list[Any]) -> torch.Tensor:
    rows, _, way = sent[rank]
    sums: list[Any] = [[] for _ in range(way.tokens)]
    for p in group:
        for i, (source, slot) in enumerate(sent[p][2].slots):
            if source == rank and slot is not None:
                sums[slot // way.k].append(sent[p][0][i])
    zero = rows.new_zeros(rows.shape[1:])
    made = [torch.stack(each).sum(0) if each else zero for each in sums]
    return torch.stack(made) if made else rows[:0] * 1


def _collective(
    node: fx.Node, mesh: SubMesh, axes: tuple[str, ...], links: list[Link], calls: list[Any]
) -> list[Any]:
    out: list[Any] = [None] * len(calls)
    for first in range(len(calls)):
        if out[first] is not None:
            continue
        group = mesh.peers(first, axes)
        xs = [calls[r][0] for r in group]
        if node.target is collectives.all_reduce_max:
            peak = torch.stack([x.detach() for x in xs]).amax(0)
            results: Any = [peak.clone() for _ in xs]
        else:
            kind = collectives.CONVERSIONS[node.target]
            sizes = [calls[r][3] for r in group]
            results = _Lockstep.apply(kind, [links[r] for r in group], calls[first][2], sizes, *xs)
        for r, result in zip(group, results, strict=True):
            out[r] = result
    return out
