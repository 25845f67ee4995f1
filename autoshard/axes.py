"""Logical axes: the dimensions a model has, found by unification.

A tensor dimension is a `Dim`: a tuple of axes, major first; ``()`` is a dimension of size one. An
axis starts as a variable, may be merged with another, refined into a product, or seen as a
concatenation of dimensions. After inference the *leaves* are what strategies cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import sympy

Size = Any  # int, or a sympy expression where the size is dynamic
_ids = itertools.count()


class Axis:
    """One logical axis. ``factors``: refined into a product. ``parts``: a concatenation of dims."""

    __slots__ = ("factors", "id", "name", "opaque", "parent", "parts", "rigid", "role", "size")

    def __init__(self, size: Size, name: str = ""):
        self.size, self.name, self.id = size, name, next(_ids)
        self.parent: Axis | None = None
        self.factors: tuple[Axis, ...] | None = None
        self.parts: tuple[Dim, ...] | None = None
        self.opaque = False  # has no consistent structure: never cut
        self.rigid = False  # an input's dimension: a slice of it is a new axis, not a piece
        self.role = ""

    def __repr__(self) -> str:
        return f"{self.name or 'a' + str(self.id)}:{self.size}"


Dim = tuple[Axis, ...]


def axis_dim(size: Size, name: str = "") -> Dim:
    """A fresh dimension of one axis; of none when the size is one."""
    return () if size == 1 else (Axis(size, name),)


def root(axis: Axis) -> Axis:
    """What the axis was merged into, itself if nothing; the way there is shortened."""
    top = axis
    while top.parent is not None:
        top = top.parent
    while axis.parent is not None and axis.parent is not top:
        axis.parent, axis = top, axis.parent
    return top


def leaves(dim: Dim) -> Dim:
    """The dimension as its current factors, products expanded, concatenations kept as one axis."""
    out: list[Axis] = []
    for axis in dim:
        axis = root(axis)
        if axis.factors is None:
            out.append(axis)
        else:
            out.extend(leaves(axis.factors))
    return tuple(out)


def atoms(dim: Dim) -> Iterator[Axis]:
    """Every axis that could be cut: leaves, with concatenations entered."""
    for axis in leaves(dim):
        if axis.parts is None:
            yield axis
        else:
            for part in axis.parts:
                yield from atoms(part)


def dimension_of(axis: Axis, dims: Iterable[Dim]) -> int:
    """The first dimension of a tensor that an axis cuts."""
    return next(at for at, dim in enumerate(dims) if axis in set(atoms(dim)))


def repeated(dim: Dim) -> Dim:
    """The axes that are two factors of one product: a slice of each is no slice of the whole."""
    found = leaves(dim)
    out = tuple(a for a in found if found.count(a) > 1)
    return out + tuple(a for axis in found for part in axis.parts or () for a in repeated(part))


def size_of(dim: Dim) -> Size:
    return math.prod((root(a).size for a in dim), start=1)


def same_size(a: Size, b: Size) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(a == b) or sympy.expand(a - b) == 0


def quotient(a: Size, b: Size) -> Size | None:
    """a / b when it is exact, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    ratio = sympy.cancel(sympy.sympify(a) / b)
    if ratio.is_Integer:
        return int(ratio)
    _, denominator = sympy.fraction(ratio)
    return ratio if denominator == 1 and ratio.is_polynomial() else None


def refine(axis: Axis, major: Size, minor: Size) -> Dim | None:
    """Turn a leaf into a product major x minor. None when its structure does not allow it."""
    if axis.parts is not None:
        first = axis.parts[0]
        equal = all(same_size(size_of(p), size_of(first)) for p in axis.parts)
        if not equal or not same_size(len(axis.parts), major):
            return None
        for part in axis.parts[1:]:
            unify(first, part)
        count = Axis(major, axis.name)
        axis.parts, axis.factors = None, (count, *first)
        return leaves(axis.factors)
    outer, inner = Axis(major), Axis(minor)
    for new in (outer, inner):
        new.opaque = axis.opaque
    axis.factors = (outer, inner)
    return axis.factors


def make_opaque(*dims: Dim) -> None:
    for dim in dims:
        for axis in atoms(dim):
            axis.opaque = True


def unify(a: Dim, b: Dim) -> None:
    """State that two dimensions are the same. Products take their common refinement; where there is
    none, what is left of both is marked opaque."""
    left, right = list(leaves(a)), list(leaves(b))
    while left and right:
        x, y = root(left.pop(0)), root(right.pop(0))
        if x.factors or y.factors:  # refined meanwhile
            left[:0], right[:0] = leaves((x,)), leaves((y,))
            continue
        if x is y:
            continue
        if same_size(x.size, y.size):
            _merge(x, y)
        elif (q := quotient(x.size, y.size)) is not None:
            pieces = refine(x, y.size, q)
            if pieces is None:
                return make_opaque((x, *left), (y, *right))
            left[:0], right[:0] = pieces, [y]
        elif (q := quotient(y.size, x.size)) is not None:
            pieces = refine(y, x.size, q)
            if pieces is None:
                return make_opaque((x, *left), (y, *right))
            left[:0], right[:0] = [x], pieces
        else:
            return make_opaque((x, *left), (y, *right))
    return None


def _merge(x: Axis, y: Axis) -> None:
    if x.parts is None and (y.parts is not None or y.rigid):
        x, y = y, x  # the structured one stays the root
    if y.parts is not None and x.parts is not None:
        _merge_parts(x, y)
    elif x.parts is not None and y.rigid:
        make_opaque((x,))
    y.parent = x
    x.opaque, x.rigid = x.opaque or y.opaque, x.rigid or y.rigid
    x.name, x.role = x.name or y.name, x.role or y.role


def _boundaries(axis: Axis) -> list[Size]:
    return list(itertools.accumulate(size_of(p) for p in axis.parts or ()))


def _merge_parts(x: Axis, y: Axis) -> None:
    for edge in _boundaries(y):
        cut_concat(x, edge)
    for edge in _boundaries(x):
        cut_concat(y, edge)
    a, b = x.parts or (), y.parts or ()
    if [size_of(p) for p in a] != [size_of(p) for p in b]:
        return make_opaque((x,), (y,))
    for p, q in zip(a, b, strict=True):
        unify(p, q)
    return None


def cut_concat(axis: Axis, edge: int) -> bool:
    """Make ``edge`` a boundary between parts of the axis. False when its structure forbids that."""
    axis = root(axis)
    if edge in (0, axis.size):
        return True
    if not isinstance(axis.size, int) or axis.rigid:
        return False
    if axis.parts is None:
        axis.parts = (axis_dim(edge), axis_dim(axis.size - edge))
        for part in axis.parts:
            for piece in part:
                piece.opaque = axis.opaque
        return True
    start = 0
    parts: list[Dim] = []
    done = True
    for part in axis.parts:
        size = size_of(part)
        if start < edge < start + size:
            pieces = cut_dim(part, edge - start)
            done = pieces is not None
            parts.extend(pieces or (part,))
        else:
            parts.append(part)
        start += size
    axis.parts = tuple(parts)
    return done


def cut_dim(dim: Dim, edge: int) -> tuple[Dim, Dim] | None:
    """The two pieces of a dimension before and after ``edge``; None when no boundary fits there."""
    axes = leaves(dim)
    if not axes:
        return None
    inner = size_of(axes[1:])
    if not isinstance(inner, int) or edge % inner:
        return None
    head = axes[0]
    if not cut_concat(head, edge // inner):
        return None
    return piece(dim, 0, edge), piece(dim, edge, size_of(dim))


def piece(dim: Dim, start: int, stop: int) -> Dim:
    """The part of a dimension between two boundaries made by `cut_concat`."""
    axes = leaves(dim)
    if start == 0 and same_size(stop, size_of(axes)):
        return axes
    inner = size_of(axes[1:])
    head, first, last = axes[0], start // inner, stop // inner
    position, kept = 0, []
    for part in head.parts or ():
        if first <= position and position + size_of(part) <= last:
            kept.append(part)
        position += size_of(part)
    if len(kept) == 1:
        return (*kept[0], *axes[1:])
    whole = Axis(last - first)
    whole.parts = tuple(kept)
    return (whole, *axes[1:])


def slice_dim(dim: Dim, start: Any, stop: Any) -> Dim | None:
    """The dimension ``[start:stop]`` as pieces of the old one; None when it has no such
    structure."""
    if not all(isinstance(v, int) for v in (start, stop, size_of(dim))) or stop <= start:
        return None
    for edge in (start, stop):
        if edge not in (0, size_of(dim)) and cut_dim(dim, edge) is None:
            return None
    return piece(dim, start, stop)


def concat_dims(dims: list[Dim]) -> Dim:
    """The concatenation of dimensions as one dimension."""
    if len(dims) == 1:
        return dims[0]
    whole = Axis(sum(size_of(d) for d in dims))
    if all(isinstance(size_of(d), int) for d in dims):
        whole.parts = tuple(dims)
    return (whole,)


def describe(dim: Dim, names: dict[Axis, str] | None = None) -> str:
    """Text of a dimension: ``kv·group·head_dim``, ``(a+b)``; unnamed axes by size. ``names``: what
    axes are called instead."""
    words = []
    for axis in leaves(dim):
        if axis.parts is None:
            words.append((names or {}).get(axis) or axis.name or str(axis.size))
            continue
        parts = [describe(p, names) or "1" for p in axis.parts]
        if len(set(parts)) == 1 and len(parts) > 1:
            words.append(f"{len(parts)}·{parts[0]}")
        else:
            words.append("(" + "+".join(parts) + ")")
    return "·".join(words) or "1"
