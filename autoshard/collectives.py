"""The conversions between layouts, as functions with the backward that the layouts imply.

Every call in an emitted graph is ``kind(x, link, dim, size)``: ``link`` names the mesh axes until
the graph is bound to a rank, then it is that rank's `Link`; ``dim`` is the tensor dimension that is
cut and ``size`` its whole size (where they matter; of an all-to-all, both of the dimension that
becomes whole and of the one that is cut; of a halo, (dim, before, after) and the sizes of what is
read and of what reads). Pieces are as even as may be, of one run or, in zigzag order, of two
(`layout.pieces`): some are one shorter, and are padded on the wire only.
`TABLE` says which conversions there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from autoshard.layout import pieces
from autoshard.mesh import SubMesh

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Link:
    """A rank's end of a process group: ``axes`` of the mesh, group name, size, own position, and
    whether the ranks hold their pieces in zigzag order."""

    axes: tuple[str, ...]
    group: str
    size: int
    index: int
    zigzag: bool = False

    @staticmethod
    def of(mesh: SubMesh, rank: int, axes: tuple[str, ...], group: str = "") -> Link:
        """The link of a rank along mesh axes."""
        return Link(axes, group, mesh.size(axes), mesh.index(rank, axes), mesh.zigzag(axes))

    def pieces(self, size: int) -> tuple[tuple[int, int], ...]:
        """Start and stop of the runs of ``size`` that this rank holds; see `layout.pieces`."""
        return pieces(size, self.size, self.index, self.zigzag)

    def lengths(self, size: int) -> list[int]:
        """How long the runs of ``size`` are that this rank holds."""
        return [stop - start for start, stop in self.pieces(size)]

    def length(self, size: int) -> int:
        """How much of ``size`` this rank holds."""
        return sum(self.lengths(size))

    def padded(self, size: int) -> int:
        """The most that any rank holds of ``size``: the length of a piece on the wire."""
        return self.runs_each * self.run(size)

    @property
    def runs_each(self) -> int:
        """Of how many runs a piece is."""
        return 2 if self.zigzag else 1

    def run(self, size: int) -> int:
        """The length of a run of ``size`` on the wire."""
        return -(-size // (self.runs_each * self.size))


@dataclass(frozen=True)
class Kind:
    """A conversion from one state of a layout to another (``S``: cut), and the primitives that do
    it forward and that turn its gradient back."""

    source: str
    target: str
    forward: str
    backward: str


TABLE = {
    "replicate": Kind("I", "R", "identity", "sum"),
    "all_reduce": Kind("P", "I", "sum", "identity"),
    "all_reduce_replicate": Kind("P", "R", "sum", "sum"),
    "reduce_scatter": Kind("P", "S", "scatter_sum", "gather"),
    "all_gather": Kind("S", "R", "gather", "scatter_sum"),
    "all_gather_invariant": Kind("S", "I", "gather", "slice"),
    "shard": Kind("I", "S", "slice", "gather"),
    "shard_replicated": Kind("R", "S", "slice", "unslice"),
    "invariant": Kind("R", "I", "identity", "first"),
    "once": Kind("R", "P", "first", "first"),
    "all_to_all": Kind("S", "S", "exchange", "exchange_back"),
    "halo": Kind("S", "S", "fetch", "fetch_back"),
}

#: kind -> (forward primitive, backward primitive)
KINDS = {name: (kind.forward, kind.backward) for name, kind in TABLE.items()}

#: What the primitives that send anything are on the wire.
ON_WIRE = {
    "sum": "all_reduce",
    "gather": "all_gather",
    "scatter_sum": "reduce_scatter",
    "exchange": "all_to_all",
    "exchange_back": "all_to_all",
    "fetch": "halo",
    "fetch_back": "halo",
}


Pair = tuple[int, int]


def _exchange(x: torch.Tensor, link: Link, dims: Pair, sizes: Pair) -> torch.Tensor:
    """Every rank's pieces of ``dims[0]`` put together, of ``dims[1]`` this rank's piece; ``sizes``:
    the whole sizes of both."""
    (whole, cut), (long, other) = dims, sizes
    x = _spread(_padded(x, link, whole, long), link, cut, other)
    sent = x.unflatten(cut, (link.size, -1)).movedim(cut, 0).contiguous()
    split = [1] * link.size
    got = c10d.wait_tensor(c10d.all_to_all_single(sent, split, split, link.group))
    got = got.movedim(0, whole).flatten(whole, whole + 1)
    return _unpadded(_joined(got, link, whole, long), link, cut, other)


def _exchange_back(x: torch.Tensor, link: Link, dims: Pair, sizes: Pair) -> torch.Tensor:
    return _exchange(x, link, dims[::-1], sizes[::-1])


Reach = tuple[int, int, int]


def windows(link: Link, index: int, reach: Reach, sizes: Pair) -> list[tuple[int, int]]:
    """What the runs of rank ``index`` read: start and stop of each in the whole, which may lie
    outside it. ``reach``: dim, how far before and how far after an element it reads."""
    _, before, after = reach
    runs = pieces(sizes[1], link.size, index, link.zigzag)
    return [(a - before, b + after) for a, b in runs if a < b]


def _shared(link: Link, owner: int, reader: int, reach: Reach, sizes: Pair) -> list[Reach]:
    """What a rank reads of another's piece: where that lies in the owner's tensor, where in the
    reader's, and how long it is."""
    found, at = [], 0
    for start, stop in windows(link, reader, reach, sizes):
        place = 0
        for a, b in pieces(sizes[0], link.size, owner, link.zigzag):
            low, high = max(start, a), min(stop, b)
            if low < high:
                found.append((place + low - a, at + low - start, high - low))
            place += b - a
        at += max(stop - start, 0)
    return found


def most_rows(ranks: int, zigzag: bool, reach: tuple[Any, Any], sizes: tuple[Any, Any]) -> Any:
    """No rank sends more rows than so many for a halo, nor back; numbers, or closed forms of them.

    ``reach``: how far before and after an element is read; ``sizes``: of what is read and of what
    reads. All others together read as many rows of a run as one run reads of all others, and one
    more for every further run that a reach goes beyond, as runs may be one shorter (of a closed
    form, a reach is taken to end in the next run). Where the sizes differ, runs of the same place
    do not start together, and read so much further.
    """
    each = 2 if zigzag else 1
    runs = each * ranks
    longer = sympy.sympify(sizes[0] - sizes[1])
    most: Any = 0
    for far in (reach[0] + sympy.Max(0, longer), reach[1] + sympy.Max(0, -longer)):
        far = sympy.Max(0, far)
        if far.is_Integer and isinstance(sizes[0], int) and sizes[0] % runs:
            far += max(0, -(-int(far) // max(1, sizes[0] // runs)) - 1)
        most += far
    most = each * most
    return int(most) if most.is_Integer else most


def _rows(x: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([x[:0], *(x.narrow(0, at, length) for at, length in spans)])


def _carried(
    rows: torch.Tensor, link: Link, sent: list[Any], got: list[Any], length: int, put: Any
) -> torch.Tensor:
    """Rows sent to every rank, and what comes put into ``length`` rows of zeros. ``sent[rank]``:
    where the rows for it begin here, and how many; ``got[rank]``: where they begin there, where
    they go here, and how many. ``put``: writes or adds them."""
    others = [r for r in range(link.size) if r != link.index]
    parts = [_rows(rows, sent[r] if r in others else []) for r in range(link.size)]
    lengths = [sum(n for *_, n in got[r]) if r in others else 0 for r in range(link.size)]
    split = [len(part) for part in parts]
    came = c10d.all_to_all_single(torch.cat(parts).contiguous(), lengths, split, link.group)
    came = c10d.wait_tensor(came).split(lengths)
    made = rows.new_zeros(length, *rows.shape[1:])
    for r in range(link.size):
        at = 0
        for place, target, n in got[r]:
            source = rows.narrow(0, place, n) if r == link.index else came[r].narrow(0, at, n)
            put(made.narrow(0, target, n), source)
            at += n
    return made


def _fetch(x: torch.Tensor, link: Link, reach: Reach, sizes: Pair) -> torch.Tensor:
    ranks = range(link.size)
    sent = [_shared(link, link.index, r, reach, sizes) for r in ranks]
    got = [_shared(link, r, link.index, reach, sizes) for r in ranks]
    spans = [[(here, n) for here, _, n in each] for each in sent]
    total = sum(max(b - a, 0) for a, b in windows(link, link.index, reach, sizes))
    rows = x.movedim(reach[0], 0)
    made = _carried(rows, link, spans, got, total, torch.Tensor.copy_)
    return made.movedim(0, reach[0])


def _fetch_back(x: torch.Tensor, link: Link, reach: Reach, sizes: Pair) -> torch.Tensor:
    ranks = range(link.size)
    sent = [_shared(link, r, link.index, reach, sizes) for r in ranks]
    got = [_shared(link, link.index, r, reach, sizes) for r in ranks]
    spans = [[(here, n) for _, here, n in each] for each in sent]
    back = [[(there, here, n) for here, there, n in each] for each in got]
    rows = x.movedim(reach[0], 0)
    made = _carried(rows, link, spans, back, link.length(sizes[0]), torch.Tensor.add_)
    return made.movedim(0, reach[0])


def runwise(
    op: Any, link: Any, x: torch.Tensor, dim: int, size: int, reach: int, **rest: Any
) -> torch.Tensor:
    """``op`` on each run that this rank holds of ``size``, ``reach`` longer in ``x`` than in the
    result."""
    runs = [b - a + reach for a, b in link.pieces(size) if a < b]
    if not runs:  # this rank holds nothing: what comes out of a run is all beyond its length
        # made of x all the same: the backward of what x came from takes part in a collective
        run = torch.cat([x, x.new_zeros(*x.shape[:dim], reach + 1, *x.shape[dim + 1 :])], dim)
        return op(run, **rest).narrow(dim, 0, 0)
    return torch.cat([op(run, **rest) for run in x.split(runs, dim)], dim)


def _identity(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "sum", link.group))


def _gather(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    x = _padded(x, link, dim, size)
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), link.size, link.group))
    if dim != 0:
        whole = whole.view(link.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)
    return _joined(whole, link, dim, size)


def _scatter_sum(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    x = _spread(x, link, dim, size)
    if dim != 0:
        x = x.unflatten(dim, (link.size, -1)).movedim(dim, 0).flatten(0, 1)
    out = c10d.wait_tensor(c10d.reduce_scatter_tensor(x.contiguous(), "sum", link.size, link.group))
    if dim != 0:
        out = out.view(x.shape[0] // link.size, *x.shape[1:])
    return _unpadded(out, link, dim, size)


def _slice(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    runs = [x.narrow(dim, start, stop - start) for start, stop in link.pieces(size)]
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim)


def _unslice(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    whole = x.new_zeros(*x.shape[:dim], size, *x.shape[dim + 1 :])
    at = 0
    for start, stop in link.pieces(size):
        whole.narrow(dim, start, stop - start).copy_(x.narrow(dim, at, stop - start))
        at += stop - start
    return whole


def _first(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    return x if link.index == 0 else torch.zeros_like(x)


PRIMITIVES: dict[str, Callable[..., torch.Tensor]] = {
    "identity": _identity,
    "sum": _sum,
    "gather": _gather,
    "scatter_sum": _scatter_sum,
    "slice": _slice,
    "unslice": _unslice,
    "first": _first,
    "exchange": _exchange,
    "exchange_back": _exchange_back,
    "fetch": _fetch,
    "fetch_back": _fetch_back,
}


def pad_to(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """``x`` with zeros appended along ``dim`` up to ``size``."""
    missing = size - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)


def _padded(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    """This rank's piece of ``size`` as it travels: runs of one length."""
    lengths, step = link.lengths(size), link.run(size)
    if all(length == step for length in lengths):
        return x
    return torch.cat([pad_to(run, dim, step) for run in x.split(lengths, dim)], dim)


def _unpadded(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    """What `_padded` was given."""
    lengths, step = link.lengths(size), link.run(size)
    if all(length == step for length in lengths):
        return x
    runs = [x.narrow(dim, i * step, length) for i, length in enumerate(lengths)]
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim)


def _spread(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    """The whole of ``size`` as all ranks' pieces travel, one behind the other."""
    runs, step = link.size * link.runs_each, link.run(size)
    short = runs * step - size  # so many runs, the last ones, are one shorter
    if short:
        first, rest = x.split([size - short * (step - 1), short * (step - 1)], dim)
        rest = pad_to(rest.unflatten(dim, (short, step - 1)), dim + 1, step)
        x = torch.cat([first, rest.flatten(dim, dim + 1)], dim)
    return folded(x, dim, link.size) if link.zigzag else x


def _joined(x: torch.Tensor, link: Link, dim: int, size: int) -> torch.Tensor:
    """What `_spread` was given."""
    runs, step = link.size * link.runs_each, link.run(size)
    short = runs * step - size
    x = unfolded(x, dim, link.size) if link.zigzag else x
    if not short:
        return x
    first, rest = x.split([(runs - short) * step, short * step], dim)
    rest = rest.unflatten(dim, (short, step)).narrow(dim + 1, 0, step - 1)
    return torch.cat([first, rest.flatten(dim, dim + 1)], dim)


def folded(x: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """``x`` with its 2 ``ranks`` equal runs along ``dim`` in zigzag order: 0, 2n-1, 1, 2n-2, ..."""
    runs = x.chunk(2 * ranks, dim)
    return torch.cat([runs[i] for r in range(ranks) for i in (r, 2 * ranks - 1 - r)], dim)


def unfolded(x: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """What `folded` was made of."""
    runs = x.chunk(2 * ranks, dim)
    return torch.cat([*runs[0::2], *reversed(runs[1::2])], dim)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str, link: Link, dim: int, size: int) -> Any:
        ctx.call = kind, link, dim, size
        return PRIMITIVES[KINDS[kind][0]](x, link, dim, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        kind, link, dim, size = ctx.call
        return PRIMITIVES[KINDS[kind][1]](grad, link, dim, size), None, None, None, None


DOES = {
    "identity": "nothing",
    "sum": "the sum over the ranks",
    "gather": "the ranks' pieces put together",
    "scatter_sum": "this rank's piece of the sum",
    "slice": "this rank's piece",
    "unslice": "the piece among zeros",
    "first": "the first rank's, zero elsewhere",
    "exchange": "the ranks' pieces of one dimension put together, a piece of another",
    "exchange_back": "the other way round",
    "fetch": "what this rank's runs read of all ranks' pieces",
    "fetch_back": "the sum of what all ranks read",
}


def _function(name: str) -> Callable[..., torch.Tensor]:
    """The conversion as a function that graphs call, print and pickle by its name."""
    kind = TABLE[name]

    def convert(x: torch.Tensor, link: Any, dim: int = 0, size: int = 0) -> torch.Tensor:
        return _Convert.apply(x, name, link, dim, size)

    convert.__name__ = convert.__qualname__ = name
    convert.__doc__ = (
        f"{kind.source} -> {kind.target}: {DOES[kind.forward]}; "
        f"of the gradient: {DOES[kind.backward]}."
    )
    return convert


#: function -> kind; each is an attribute of this module too
CONVERSIONS = {_function(name): name for name in TABLE}
globals().update({name: function for function, name in CONVERSIONS.items()})


def all_reduce_max(x: torch.Tensor, link: Any, dim: int = 0, size: int = 0) -> torch.Tensor:
    """The maximum over the ranks; has no gradient (a softmax does not depend on its shift)."""
    return c10d.wait_tensor(c10d.all_reduce(x.detach().contiguous(), "max", link.group))


def local_size(size: int, link: Any) -> int:
    """How much of ``size`` this rank holds."""
    return int(link.length(size))


def largest_size(size: int, link: Any) -> int:
    """How much of ``size`` any rank holds at most."""
    return int(link.padded(size))


def local_places(index: torch.Tensor, link: Any, size: int) -> torch.Tensor:
    """Where each position of ``size`` is in this rank's piece; -1 where it is not."""
    places, at = torch.full_like(index, -1), 0
    for start, stop in link.pieces(size):
        inside = (index >= start) & (index < stop)
        places = torch.where(inside, index - start + at, places)
        at += stop - start
    return places


def local_start(size: int, link: Any) -> int:
    """Where this rank's piece of ``size`` begins: it is one run, not in zigzag order."""
    ((start, _),) = link.pieces(size)
    return int(start)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``x``; its gradient times ``factor``."""
    return _ScaleGradient.apply(x, factor)


LOCAL = (local_size, largest_size, local_start)


torch.fx.graph._register_custom_builtin("Link", "from autoshard.collectives import Link", Link)
