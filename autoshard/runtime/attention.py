"""Attention of this rank's queries over the keys of all ranks, in blocks.

The blocks either travel round the ring of ranks (`ring_attention`) or lie here already
(`gathered_attention`). What a row has read so far is kept as a maximum of its scores, the sum of
their exponentials beside it, and the values weighted so: blocks add to that in any order. The
backward computes the blocks' scores once more; nothing as large as the scores is kept.

Where the scores are plain products, torch's kernels compute a block; else it is done here, in tiles
of at most `TILE` queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from autoshard.attention import Attention
from autoshard.layout import pieces
from autoshard.runtime.rng import APART, GOLDEN, number
from autoshard.runtime.wire import shift

aten = torch.ops.aten
Runs = tuple[tuple[int, int], ...]  # start and stop of successive positions, in order

#: Most queries, and most keys, of the scores that are computed at a time outside torch's kernels.
TILE = 1024

#: One more odd constant that spreads positions, see `rng`.
_ASIDE = 0xD1342543DE82EF95

_KEYS, _GRADIENTS = 1, 2  # tags on the wire: both may be under way, and ZeRO's 0


def ring_attention(
    q: torch.Tensor,
    link: Any,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    vectors: list[torch.Tensor],
    attention: Attention,
    size_q: int,
    size_k: int,
    seed: int | None = None,
) -> torch.Tensor:
    """Attention of the rows ``q[b, h, i, d]`` that this rank holds of ``size_q`` over all
    ``size_k`` keys, of which it holds ``k[b, g, j, d]`` and ``v[b, g, j, e]``: ``[b, h, i, e]``.

    ``link``: the ranks that cut queries and keys; ``()`` or None for nobody. ``sinks[h]`` or None.
    ``vectors``: see `Attention.varies`; those that have queries hold this rank's, those that have
    keys hold all keys. Rows that read no key (all scores -inf) are 0. Gradients of ``sinks`` and
    ``vectors`` are this rank's part of a sum over the ranks. ``seed``: of the dropout's masks,
    drawn when None.

    With n ranks, each sends n - 1 blocks of keys and values, and in the backward once more n - 1
    of them and n - 1 of their gradients, which are float32 where keys are of a half type. Blocks
    are ``b * g * link.padded(size_k) * (d + e)`` elements: short pieces are padded.
    """
    ring = bool(link) and link.size > 1
    work = _Work(attention, link or None, size_q, size_k, ring, seed)
    return _Attend.apply(work, q, k, v, sinks, *vectors)


def gathered_attention(
    q: torch.Tensor,
    link: Any,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    vectors: list[torch.Tensor],
    attention: Attention,
    size_q: int,
    size_k: int,
    seed: int | None = None,
) -> torch.Tensor:
    """Like `ring_attention`, but ``k`` and ``v`` are whole; their gradients, too, are this rank's
    part of a sum. Nothing is sent."""
    work = _Work(attention, link or None, size_q, size_k, False, seed)
    return _Attend.apply(work, q, k, v, sinks, *vectors)


class _Work(NamedTuple):
    """What is the same in forward and backward; ``seed`` of the dropout's masks."""

    attention: Attention
    link: Any
    size_q: int
    size_k: int
    ring: bool
    seed: int | None = None

    @property
    def queries(self) -> Runs:
        """The positions of this rank's rows."""
        if self.link is None:
            return ((0, self.size_q),)
        return tuple(self.link.pieces(self.size_q))

    def keys(self, origin: int) -> Runs:
        """The positions of the keys in the block of the rank ``origin``."""
        if not self.ring:
            return ((0, self.size_k),)
        return pieces(self.size_k, self.link.size, origin, self.link.zigzag)


# --- which queries read which keys ---


class Stair(NamedTuple):
    """Rows ``start`` to ``stop``, of which the first reads the first ``keys`` keys of a block, and
    each following one ``step`` (0 or 1) more than the one before."""

    start: int
    stop: int
    keys: int
    step: int

    def reads(self, row: int) -> int:
        """How many keys of the block a row reads."""
        return self.keys + self.step * (row - self.start)


class Part(NamedTuple):
    """Rows and keys of a block that are computed at once, by their places on this rank and in the
    block. ``square``: row n of them reads its keys up to n only."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    square: bool


def stairs(queries: Runs, keys: Runs, attention: Attention) -> list[Stair]:
    """Which keys of a block the rows read, in as few stairs as there can be. Both lie in the order
    of their positions, so that what a row reads are always the first of the keys."""
    found: list[Stair] = []
    everything = attention.ahead and not attention.causal
    total = sum(stop - start for start, stop in keys)
    edges = sorted({edge for run in keys for edge in run})
    at = 0
    for start, stop in queries:
        cuts = [] if everything else [edge for edge in edges if start < edge < stop]
        for low, high in pairwise([start, *cuts, stop]):
            if low == high:
                continue
            step = 0 if everything else int(any(a <= low < b for a, b in keys))
            reads = total if everything else sum(min(max(low + 1 - a, 0), b - a) for a, b in keys)
            stair = Stair(at, at + high - low, reads, step)
            at = stair.stop
            last = found[-1] if found else None
            if last and last.step == step and last.reads(stair.start) == reads:
                found[-1] = last._replace(stop=stair.stop)
            else:
                found.append(stair)
    return [stair for stair in found if stair.keys]


def parts(found: list[Stair]) -> list[Part]:
    """The stairs as rectangles and squares: at most one of each per stair."""
    out = []
    for stair in found:
        rows, before = (stair.start, stair.stop), stair.keys - 1
        if stair.step == 0 or stair.stop - stair.start == 1:
            out.append(Part(rows, (0, stair.keys), False))
            continue
        if before:
            out.append(Part(rows, (0, before), False))
        out.append(Part(rows, (before, stair.reads(stair.stop - 1)), True))
    return out


def pairs(attention: Attention, link: Any, size_q: int, size_k: int) -> int:
    """How many pairs of a query and a key this rank computes. Of a square on the diagonal that is
    the half that is read (torch's kernels leave out the rest, up to their own blocks)."""
    work = _Work(attention, link or None, size_q, size_k, False)
    count = 0
    for stair in stairs(work.queries, work.keys(0), attention):
        rows = stair.stop - stair.start
        count += rows * stair.keys + stair.step * rows * (rows - 1) // 2
    return count


class _Tile(NamedTuple):
    """Rows and keys whose scores are computed here. ``row``, ``key``: positions of the first;
    ``masked``: the causal stair that they reach beyond, if any."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    row: int
    key: int
    masked: Stair | None


def _tiles(work: _Work, keys: Runs) -> Iterator[_Tile]:
    """The tiles of a block; none has keys of two runs, whose columns in vectors lie apart."""
    for stair in stairs(work.queries, keys, work.attention):
        for start in range(stair.start, stair.stop, TILE):
            stop = min(start + TILE, stair.stop)
            most, before = stair.reads(stop - 1), 0
            row = _position(work.queries, start)
            for first, last in keys:
                last_read = min(last, first + most - before)
                for low in range(first, last_read, TILE):
                    here = before + low - first
                    there = here + min(TILE, last_read - low)
                    beyond = work.attention.causal and there > stair.reads(start)
                    masked = stair if beyond else None
                    yield _Tile((start, stop), (here, there), row, low, masked)
                before += last - first


def _position(runs: Runs, at: int) -> int:
    """The position of place ``at`` in runs that lie one behind the other."""
    for start, stop in runs:
        if at < stop - start:
            return start + at
        at -= stop - start
    raise IndexError(at)


# --- blocks on their way round the ring ---


def _pack(k: torch.Tensor, v: torch.Tensor, length: int) -> torch.Tensor:
    """Keys and values in one flat tensor, padded to ``length`` positions."""
    b, g = k.shape[:2]
    flat = k.new_empty(b * g * length * (k.shape[3] + v.shape[3]))
    for place, x in zip(_unpack(flat, k, v, length, k.shape[2]), (k, v), strict=True):
        place.copy_(x)
    if length > k.shape[2]:  # what is sent has values
        for place in _unpack(flat, k, v, length, length):
            place.narrow(2, k.shape[2], length - k.shape[2]).zero_()
    return flat


def _unpack(
    flat: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, held: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first ``held`` positions of keys and values in a flat tensor of `_pack`."""
    (b, g), d, e = k.shape[:2], k.shape[3], v.shape[3]
    cut = b * g * length * d
    keys, values = flat[:cut].view(b, g, length, d), flat[cut:].view(b, g, length, e)
    return keys.narrow(2, 0, held), values.narrow(2, 0, held)


def _send(link: Any, flat: torch.Tensor, into: torch.Tensor, tag: int) -> list[Any]:
    """`shift` on the link. Where there is no group (ranks are simulated), what this rank holds
    stands in for what the others would send."""
    if not link.group:
        into.copy_(flat)
        return []
    group = torch.distributed.distributed_c10d._resolve_process_group(link.group)
    return shift(flat, into, group, tag)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _blocks(
    work: _Work, k: torch.Tensor, v: torch.Tensor, own_last: bool
) -> Iterator[tuple[Runs, torch.Tensor, torch.Tensor]]:
    """The blocks of all ranks, that of the previous rank first, then its previous; this rank's own
    before all others or after them. A block leaves for the next rank before it is given out, and is
    valid until the next one is asked for."""
    if not work.ring:
        yield work.keys(0), k, v
        return
    link = work.link
    length = link.padded(work.size_k)
    here = _pack(k, v, length)
    there = torch.empty_like(here)
    works = _send(link, here, there, _KEYS)
    if not own_last:
        yield work.keys(link.index), k, v
    for step in range(1, link.size):
        _wait(works)
        here, there = there, here
        if step + 1 < link.size:
            works = _send(link, here, there, _KEYS)
        runs = work.keys((link.index - step) % link.size)
        yield runs, *_unpack(here, k, v, length, sum(b - a for a, b in runs))
    if own_last:
        yield work.keys(link.index), k, v


# --- torch's kernels ---


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.promote_types(dtype, torch.float32)


def _exact(attention: Attention, q: torch.Tensor) -> torch.dtype:
    """What the softmax is computed in."""
    return torch.promote_types(_wide(q.dtype), attention.dtype or torch.float32)


def _has_kernel(attention: Attention, q: torch.Tensor) -> bool:
    """Whether torch's kernels compute such attention."""
    if attention.score is not None or attention.dropout:
        return False
    if _exact(attention, q) != _wide(q.dtype):
        return False
    return q.is_cpu or (q.is_cuda and q.dtype != torch.float64)


def _precise(work: _Work, x: torch.Tensor) -> torch.Tensor:
    """On the CPU, half types in float32 where several blocks make a result: a kernel rounds what it
    gives to its inputs' type, block by block. (CUDA's kernels of half types have no other.)"""
    several = work.link is not None and work.link.size > 1
    return x.to(_wide(x.dtype)) if several and x.is_cpu else x


def _width(q: torch.Tensor, v: torch.Tensor) -> int:
    """The head dimension that the kernels see: the same for keys and values, whole vectors."""
    width = max(q.shape[3], v.shape[3])
    return width if q.is_cpu else -(-width // 8) * 8


def _to_width(x: torch.Tensor, width: int) -> torch.Tensor:
    """``x`` with zeros appended to its last dimension, which the kernels read without strides."""
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _is_flash(q: torch.Tensor, width: int) -> bool:
    """Of CUDA's two kernels, whether it is the one of half types."""
    able = not q.is_cuda or torch.cuda.get_device_capability(q.device) >= (8, 0)
    return able and q.dtype != torch.float32 and width <= 256


def _spread(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Grouped heads repeated for every query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _collected(x: torch.Tensor, heads: int) -> torch.Tensor:
    """The gradient of `_spread`."""
    if x.shape[1] == heads:
        return x
    return x.unflatten(1, (heads, -1)).sum(2, dtype=_wide(x.dtype))


def _kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, square: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a block alone, and the logarithm of its sum of exponentials ``[b, h, i]``."""
    width, e = _width(q, v), v.shape[3]
    q, k, v = (_to_width(x, width) for x in (q, k, v))
    if q.is_cpu:
        op = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(q, k, v, 0.0, square, scale=scale)
    elif _is_flash(q, width):
        op = aten._scaled_dot_product_flash_attention
        out, lse = op(q, k, v, 0.0, square, False, scale=scale)[:2]
    else:
        k, v = _spread(k, q.shape[1]), _spread(v, q.shape[1])
        op = aten._scaled_dot_product_efficient_attention
        out, lse = op(q, k, v, None, True, 0.0, square, scale=scale)[:2]
        lse = lse[..., : q.shape[2]]
    return out[..., :e], lse


def _kernel_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    square: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block's part of the gradients of q, k, v; ``out`` and ``lse`` are those of all blocks."""
    width, d, e, groups = _width(q, v), q.shape[3], v.shape[3], k.shape[1]
    grad, q, k, v, out = (_to_width(x, width) for x in (grad, q, k, v, out))
    if q.is_cpu:
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = op(grad, q, k, v, out, lse, 0.0, square, scale=scale)
    elif _is_flash(q, width):
        state = q.new_empty(2, dtype=torch.uint64)  # of a dropout that there is not
        op = aten._scaled_dot_product_flash_attention_backward
        lengths = None, None, q.shape[2], k.shape[2]
        dq, dk, dv = op(
            *(grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, square, state, state[:0]),
            scale=scale,
        )
    else:
        k, v = _spread(k, q.shape[1]), _spread(v, q.shape[1])
        # the kernel reads rows in groups of 32; those past the end weigh exp(-inf)
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf).contiguous()
        state = q.new_empty((), dtype=torch.int64)
        op = aten._scaled_dot_product_efficient_attention_backward
        wanted = [True, True, True, False]
        dq, dk, dv, _ = op(
            *(grad, q, k, v, None, out, lse, state, state, 0.0, wanted, square), scale=scale
        )
    return dq[..., :d], _collected(dk[..., :d], groups), _collected(dv[..., :e], groups)


# --- tiles of scores ---


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """``[b, h, i, n]`` as ``[b, g, h/g i, n]``: the rows of a group of heads behind each other."""
    b, h, i, n = x.shape
    return x.reshape(b, groups, h // groups * i, n)


def _times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x[b, h, i, n]`` times ``y[b, g, n, m]``: ``[b, h, i, m]``."""
    return (_grouped(x, y.shape[1]) @ y).view(*x.shape[:3], y.shape[3])


def _cut(x: torch.Tensor, tile: _Tile, varies: tuple[bool, bool]) -> torch.Tensor:
    """A vector's part for a tile: this rank's rows, and columns by their positions."""
    queries, keys = varies
    if queries:
        x = x.narrow(2, tile.rows[0], tile.rows[1] - tile.rows[0])
    return x.narrow(3, tile.key, tile.keys[1] - tile.keys[0]) if keys else x


def _scores(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, vectors: list[torch.Tensor]
) -> torch.Tensor:
    """The scores of a tile, before the causal mask."""
    products = _times(q, k.mT) * attention.scale
    return products if attention.score is None else attention.score(products, *vectors)


def _hidden(tile: _Tile, device: torch.device) -> torch.Tensor:
    """Which pairs of a tile the causal mask hides: ``[i, j]``."""
    assert tile.masked is not None
    rows = torch.arange(*tile.rows, device=device)
    keys = torch.arange(*tile.keys, device=device)
    limits = tile.masked.keys + tile.masked.step * (rows - tile.masked.start)
    return keys >= limits[:, None]


def _exponents(tile: _Tile, scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scores as the softmax reads them."""
    scores = scores.to(dtype)
    if tile.masked is None:
        return scores
    return scores.masked_fill(_hidden(tile, scores.device), -math.inf)


def _seed(attention: Attention, q: torch.Tensor) -> int | None:
    """A number of torch's common stream for the dropout's masks; None where there are none to
    draw. It never lies on the device of ``q``, which nobody has to wait for then."""
    if not attention.dropout or isinstance(q, FakeTensor):
        return None
    return number()


def _kept(work: _Work, tile: _Tile, like: torch.Tensor) -> torch.Tensor:
    """What dropout multiplies a tile's probabilities by: the same whenever it is asked for."""
    keep = 1 - work.attention.dropout
    if keep <= 0:
        return torch.zeros_like(like)
    generator = None
    if work.seed is not None:
        mixed = work.seed * GOLDEN + (tile.row + 1) * APART + (tile.key + 1) * _ASIDE
        generator = torch.Generator(like.device)
        generator.manual_seed(mixed % 2**63)
    return torch.empty_like(like).bernoulli_(keep, generator=generator).div_(keep)


# --- forward ---

Total = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # values, maximum, sum of exponentials


def _nothing(q: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> Total:
    """The total of rows that have read no key."""
    b, h, i, d = q.shape
    if v.shape[3] == d:
        out = torch.zeros_like(q, dtype=dtype)
    else:
        out = q.new_zeros((b, i, h, v.shape[3]), dtype=dtype).transpose(1, 2)
    m = q.new_full((b, h, i), -math.inf, dtype=dtype)
    return out, m, torch.zeros_like(m)


def _levelled(m: torch.Tensor) -> torch.Tensor:
    """A maximum to subtract: not of infinity where all is -inf."""
    return m.masked_fill(m == -math.inf, 0.0)


def _add(total: Total | None, q: torch.Tensor, rows: tuple[int, int], more: Total) -> Total:
    """The total with what the rows read in a block, whose tensors it may take over. None: nothing
    was read before."""
    if total is None:
        if rows == (0, q.shape[2]):
            values, top, weight = more
            return values.to(top.dtype), top, weight
        total = _nothing(q, more[0], more[1].dtype)
    out, m, mass = (x.narrow(2, rows[0], rows[1] - rows[0]) for x in total)
    values, top, weight = more
    high = torch.maximum(m, top)
    level = _levelled(high)
    old, new = torch.exp(m - level), torch.exp(top - level)
    out.mul_(old[..., None]).addcmul_(values.to(out.dtype), new[..., None])
    mass.mul_(old).addcmul_(weight, new)
    m.copy_(high)
    return total


def _read(
    work: _Work,
    total: Total | None,
    keys: Runs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    vectors: list[torch.Tensor],
) -> Total | None:
    """The total with a block added."""
    attention, dtype = work.attention, _exact(work.attention, q)
    if _has_kernel(attention, q):
        q, k, v = (_precise(work, x) for x in (q, k, v))
        for part in parts(stairs(work.queries, keys, attention)):
            x, y, z = _of(part, q, k, v)
            out, lse = _kernel(x, y, z, part.square, attention.scale)
            total = _add(total, q, part.rows, (out, lse, torch.ones_like(lse)))
        return total
    for tile in _tiles(work, keys):
        x, y, z = _of(tile, q, k, v)
        cut = [_cut(n, tile, varies) for n, varies in zip(vectors, attention.varies, strict=True)]
        scores = _exponents(tile, _scores(attention, x, y, cut), dtype)
        m = scores.amax(3)
        p = torch.exp(scores - _levelled(m)[..., None])
        mass = p.sum(3)
        if attention.dropout:
            p = p * _kept(work, tile, p)
        total = _add(total, q, tile.rows, (_times(p.to(v.dtype), z), m, mass))
    return total


def _of(part: Part | _Tile, q: torch.Tensor, *keyed: torch.Tensor) -> list[torch.Tensor]:
    """The rows and keys of a part."""
    (start, stop), (low, high) = part.rows, part.keys
    return [q.narrow(2, start, stop - start), *(x.narrow(2, low, high - low) for x in keyed)]


# --- backward ---


class _Back(NamedTuple):
    """What the backward of every block needs. ``m``, ``mass``: of the whole rows; ``mass`` is None
    where ``m`` is the logarithm of the sum itself. ``dot``: of every row with its gradient."""

    grad: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    m: torch.Tensor
    mass: torch.Tensor | None
    dot: torch.Tensor | None
    vectors: list[torch.Tensor]


def _read_backward(
    work: _Work,
    back: _Back,
    keys: Runs,
    k: torch.Tensor,
    v: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dvectors: list[torch.Tensor | None],
) -> None:
    """Add a block's part of the gradients to the sums given."""
    attention, q = work.attention, back.q
    if back.mass is None:
        q, k, v, *tops = (_precise(work, x) for x in (q, k, v, back.grad, back.out))
        for part in parts(stairs(work.queries, keys, attention)):
            grad, out, lse = (_of(part, x)[0] for x in (*tops, back.m))
            x, y, z = _of(part, q, k, v)
            found = _kernel_backward(grad, x, y, z, out, lse, part.square, attention.scale)
            for place, more in zip(_of(part, dq, dk, dv), found, strict=True):
                place.add_(more)
        return
    for tile in _tiles(work, keys):
        with torch.enable_grad():
            x, y = (n.detach().requires_grad_() for n in _of(tile, q, k))
            cut = []
            for n, total, varies in zip(back.vectors, dvectors, attention.varies, strict=True):
                cut.append(_cut(n.detach(), tile, varies).requires_grad_(total is not None))
            scores = _scores(attention, x, y, cut)
        z = _of(tile, q, v)[1]
        grad, m, mass, dot = (
            _of(tile, n)[0] for n in (back.grad, back.m, back.mass, back.dot) if n is not None
        )
        p = torch.exp(_exponents(tile, scores.detach(), m.dtype) - m[..., None])
        p = p / mass[..., None]
        dp = _times(grad, z.mT).to(p.dtype)
        weights = p
        if attention.dropout:
            kept = _kept(work, tile, p)
            weights, dp = p * kept, dp * kept
        groups = k.shape[1]
        places = _of(tile, dq, dk, dv)
        places[2].add_(_grouped(weights.to(v.dtype), groups).mT @ _grouped(grad, groups))
        ds = (p * (dp - dot[..., None])).to(scores.dtype)
        # only now the scores' own backward, which knows what the score does to the products
        leaves, sums = [x, y], places[:2]
        for n, total, varies in zip(cut, dvectors, attention.varies, strict=True):
            if total is not None:
                leaves.append(n)
                sums.append(_cut(total, tile, varies))
        found = torch.autograd.grad(scores, leaves, ds, allow_unused=True)
        for place, n in zip(sums, found, strict=True):
            if n is not None:
                place.add_(n)


def _backward(
    work: _Work,
    back: _Back,
    k: torch.Tensor,
    v: torch.Tensor,
    dvectors: list[torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v.

    The sums of a block's gradients set out from the rank behind the one whose block it is, one step
    after the block, and are at home when they have passed all others: that one adds its own part.
    """
    dq = torch.zeros_like(back.q, dtype=_wide(back.q.dtype))
    link, held = work.link, k.shape[2]
    length = link.padded(work.size_k) if work.ring else held
    left = link.size - 1 if work.ring else 0
    sent, arriving = None, None
    works: list[Any] = []
    for keys, keys_here, values_here in _blocks(work, k, v, own_last=True):
        mine = k.new_zeros(
            math.prod(k.shape[:2]) * length * (k.shape[3] + v.shape[3]), dtype=dq.dtype
        )
        dk, dv = _unpack(mine, k, v, length, keys_here.shape[2])
        if back.q.numel() and keys_here.numel():
            _read_backward(work, back, keys, keys_here, values_here, dq, dk, dv, dvectors)
        _wait(works)
        if arriving is not None:
            mine.add_(arriving)
        if left:
            left -= 1
            arriving = torch.empty_like(mine) if sent is None else sent
            sent, works = mine, _send(link, mine, arriving, _GRADIENTS)
    return dq, dk, dv


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, q: Any, k: Any, v: Any, sinks: Any, *vectors: Any) -> Any:
        attention = work.attention
        if work.seed is None:
            work = work._replace(seed=_seed(attention, q))
        total: Total | None = None
        for keys, keys_here, values_here in _blocks(work, k, v, own_last=False):
            if q.numel() and keys_here.numel():
                total = _read(work, total, keys, q, keys_here, values_here, list(vectors))
        if total is None:
            total = _nothing(q, v, _exact(attention, q))
        if sinks is not None:
            nothing, sink = total[0].new_zeros(()), sinks.to(total[1].dtype)[:, None]
            _add(total, q, (0, q.shape[2]), (nothing, sink, torch.ones_like(sink)))
        values, m, mass = total
        empty = mass == 0
        m, mass = m.masked_fill(empty, 0.0), mass.masked_fill(empty, 1.0)
        out = values.div_(mass[..., None]).to(q.dtype)
        # apart: where all scores of a row are as low as can be, a logarithm is lost in them
        stats = [m + mass.log()] if _has_kernel(attention, q) else [m, mass]
        ctx.work = work
        ctx.save_for_backward(q, k, v, sinks, out, *vectors, *stats)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        work = ctx.work
        q, k, v, sinks, out, *rest = ctx.saved_tensors
        count = len(work.attention.varies)
        vectors, (m, *mass) = rest[:count], rest[count:]
        dot = None
        if mass or sinks is not None:
            dot = (grad.to(m.dtype) * out).sum(3)
        back = _Back(grad, q, out, m, mass[0] if mass else None, dot, vectors)
        dvectors = [
            torch.zeros_like(x, dtype=_wide(x.dtype)) if needed else None
            for x, needed in zip(vectors, ctx.needs_input_grad[5:], strict=True)
        ]
        dq, dk, dv = _backward(work, back, k, v, dvectors)
        dsinks = None
        if sinks is not None:
            p = torch.exp(sinks.to(m.dtype)[:, None] - m)
            dsinks = -((p / mass[0] if mass else p) * dot).sum((0, 2)).to(sinks.dtype)
        return (
            None,
            dq.to(q.dtype),
            dk.to(k.dtype),
            dv.to(v.dtype),
            dsinks,
            *(x if x is None else x.to(n.dtype) for x, n in zip(dvectors, vectors, strict=True)),
        )
