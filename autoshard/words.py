"""What tables are made of: their rows, and words for sizes and mesh axes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy

from autoshard.axes import Axis, atoms
from autoshard.batches import data_ranks, own_sizes
from autoshard.mesh import MICROBATCHES
from autoshard.program import Program

BATCH, SEQUENCE = sympy.symbols("batch sequence", integer=True, positive=True)


@dataclass(frozen=True)
class Table:
    """Headers and rows; ``numbers`` are the columns that are set to the right, ``widths`` those of
    which plain text shows no more than so many characters; ``note``: a line below."""

    headers: list[str]
    rows: list[list[Any]]
    numbers: tuple[str, ...] = ()
    widths: dict[str, int] = field(default_factory=dict)
    note: str = ""


class Sizes:
    """Dynamic sizes by the part they play, and their values in the example."""

    def __init__(self, program: Program):
        self.words: dict[Any, Any] = {}  # captured symbol -> symbol shown
        self.values: dict[Any, int] = {}  # symbol shown -> size captured, on one rank
        self.ranks, self._captured = data_ranks(program), own_sizes(program)
        for node, dims in program.dims.items():
            if node.op == "placeholder" and node.name in program.inputs:
                for axis in (axis for dim in dims for axis in atoms(dim)):
                    if isinstance(axis.size, sympy.Symbol) and axis.size not in self.words:
                        self._name(axis)

    def _name(self, axis: Axis) -> None:
        base = axis.role or axis.name or str(axis.size)
        count = sum(str(word).split("_")[0] == base for word in self.words.values())
        name = f"{base}_{count + 1}" if count else base
        word = self.words[axis.size] = sympy.Symbol(name, integer=True, positive=True)
        if axis.size in self._captured:
            self.values[word] = self._captured[axis.size]

    def local(self, size: Any) -> Any:
        """A size of this rank's graph, in words."""
        return size if isinstance(size, int) else simple(size.xreplace(self.words))

    def whole(self, size: Any) -> Any:
        """A size of the model, in words: the samples of all data ranks."""
        if isinstance(size, int):
            return size
        rows = {w: self.ranks * w for w in self.words.values() if str(w).startswith("batch")}
        return simple(size.xreplace(self.words).xreplace(rows))

    def number(self, size: Any) -> Any:
        """A local closed form at the captured sizes, rounded up; "-" where one is not known."""
        if not isinstance(size, int):
            if not size.free_symbols <= set(self.values):
                return "-"
            size = int(sympy.ceiling(size.xreplace(self.values)))
        return size

    def captured(self) -> str:
        """The sizes captured: ``batch=2, sequence=16``."""
        return ", ".join(f"{word}={value}" for word, value in self.values.items())


def simple(size: Any) -> Any:
    """A size as an int where it is one."""
    return int(size) if getattr(size, "is_Integer", False) else size


def shape_text(sizes: Iterable[Any]) -> str:
    """Sizes as a shape: ``[batch, 64]``."""
    return "[" + ", ".join(map(str, sizes)) + "]"


def over_text(axes: Iterable[str], program: Program) -> str:
    """Mesh axes as text; the sub-axes of one that are all there as that one, and the micro-batches
    of a step as these."""
    left, words = list(axes), []
    for name in program.mesh.mesh.names:
        # of an axis that layouts do not see, as pp, there is the whole only
        parts = [part for part, _ in program.mesh.parts(name)] or [name]
        held = [part for part in parts if part in left]
        words += [name] if held == parts else held
    return ",".join([*words, *(["micro-batches"] if MICROBATCHES in left else [])])
