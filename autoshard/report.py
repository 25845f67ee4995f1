"""Tables of what was done.

Sizes are closed forms in ``batch`` and ``sequence``; ``batch`` is the rows of one data rank.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
from tabulate import tabulate, tabulate_formats
from torch import fx

from autoshard.axes import Axis, atoms, describe
from autoshard.cost import WIRE, conversion_bytes, local_numel, local_shape, reduction_bytes
from autoshard.infer import expression
from autoshard.layout import describe_layout
from autoshard.program import Conversion, Parameter, Program, module_path
from autoshard.rules import op_name
from autoshard.runtime.gather import reductions

BATCH, SEQUENCE = sympy.symbols("batch sequence", integer=True, positive=True)

#: Ops between a weight and the linear that reads it, and whether they swap its two dimensions.
SWAPS = {"t": True, "transpose": True, "permute": True, "to": False, "contiguous": False}
#: Linears by name, and whether their weight's first dimension is their output.
LINEARS = {"linear": True, "addmm": False, "mm": False, "matmul": False}


@dataclass(frozen=True)
class Table:
    """Headers and rows; ``numbers`` are the columns that are set to the right."""

    headers: list[str]
    rows: list[list[Any]]
    numbers: tuple[str, ...] = ()


def table(module: Any, which: str, format: str = "plain") -> str:
    """One of the tables as text. ``format``: "plain", or any of tabulate's ("github", "html", ...).

    Raises ValueError for a table or a format that does not exist.
    """
    if which not in TABLES:
        raise ValueError(f"no table {which!r}: there are {', '.join(TABLES)}")
    style = "simple" if format == "plain" else format
    if style not in tabulate_formats:
        raise ValueError(f"no format {format!r}: there are plain, {', '.join(tabulate_formats)}")
    made = TABLES[which](module.program)
    return tabulate(
        [[_text(cell) for cell in row] for row in made.rows],
        headers=made.headers,
        tablefmt=style,
        disable_numparse=True,
        colalign=["right" if h in made.numbers else "left" for h in made.headers],
    )


def _text(cell: Any) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def summary(module: Any) -> str:
    """A few lines: mesh, what each strategy cuts, collectives and memory."""
    program: Program = module.program
    held = sum(local_numel(p, program.mesh) for p in program.parameters().values())
    whole = sum(p.value.numel() for p in program.parameters().values())
    taken: dict[str, list[str]] = {}
    for a in program.assignments:
        names = taken.setdefault(a.strategy, [])
        if (text := f"{a.axis.name or a.axis.size} -> {_over(a.mesh_axes, program)}") not in names:
            names.append(text)
    counts: collections.Counter[str] = collections.Counter()
    for c in step_collectives(program):
        what = "gradients summed" if c.why == GRADIENTS else c.kind
        counts[f"{what} over {c.axes}"] += c.count
    listed = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
    lines = [
        f"ShardedModule on {program.mesh.mesh}, rank {module.rank_index}",
        f"  parameters {held:,} of {whole:,} on this rank; dynamic: {program.dynamic}",
        *(f"  {strategy}: {'; '.join(names)}" for strategy, names in taken.items()),
        f"  collectives per step: {listed or 'none'}",
        f"  fallback ops: {len(program.fallbacks)}",
        *(f"  note: {note}" for note in program.notes),
    ]
    return "\n".join(lines)


# --- words for sizes ---


class Sizes:
    """Dynamic sizes by the part they play, and their values in the example."""

    def __init__(self, program: Program):
        self.words: dict[Any, Any] = {}  # captured symbol -> symbol shown
        self.values: dict[Any, int] = {}  # symbol shown -> size captured, on one rank
        over = {m for a in program.assignments if a.axis.role == "batch" for m in a.mesh_axes}
        self.ranks = program.mesh.size(tuple(m for m in program.mesh.axes if m in over))
        for node, dims in program.dims.items():
            if node.op == "placeholder" and node.name in program.inputs:
                for axis in (axis for dim in dims for axis in atoms(dim)):
                    if isinstance(axis.size, sympy.Symbol) and axis.size not in self.words:
                        self._name(axis, program.hints)

    def _name(self, axis: Axis, hints: dict[Any, int]) -> None:
        base = axis.role or axis.name or str(axis.size)
        count = sum(str(word).split("_")[0] == base for word in self.words.values())
        name = f"{base}_{count + 1}" if count else base
        word = self.words[axis.size] = sympy.Symbol(name, integer=True, positive=True)
        if axis.size in hints:
            captured = hints[axis.size]
            self.values[word] = -(-captured // self.ranks) if base == "batch" else captured

    def local(self, size: Any) -> Any:
        """A size of this rank's graph, in words."""
        return size if isinstance(size, int) else _simple(size.xreplace(self.words))

    def whole(self, size: Any) -> Any:
        """A size of the model, in words: the samples of all data ranks."""
        if isinstance(size, int):
            return size
        rows = {w: self.ranks * w for w in self.words.values() if str(w).startswith("batch")}
        return _simple(size.xreplace(self.words).xreplace(rows))

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


def _simple(size: Any) -> Any:
    return int(size) if getattr(size, "is_Integer", False) else size


def _shape(sizes: Iterable[Any]) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def _over(axes: Iterable[str], program: Program) -> str:
    """Mesh axes as text; the sub-axes of one that are all there as that one."""
    left, words = list(axes), []
    for name in program.mesh.mesh.names:
        parts = [part for part, _ in program.mesh.parts(name)]
        held = [part for part in parts if part in left]
        words += [name] if held == parts and parts else held
    return ",".join(words)


def _group(name: str) -> str:
    """A module path with the numbers of repeated layers left out."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


# --- linears ---


def linears(program: Program) -> dict[fx.Node, tuple[str, str]]:
    """Linear nodes: the placeholder of their weight, and ``column`` where their output features are
    cut, ``row`` where their input features are, else nothing."""
    found = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or op_name(node.target) not in LINEARS:
            continue
        out_first = LINEARS[op_name(node.target)]
        for arg in reversed(node.args[:3]):
            weight, swapped = _weight(program, arg)
            if weight is not None and len(weight.dims) == 2:
                found[node] = weight.name, linear_kind(weight, out_first != swapped)
                break
    return found


def _weight(program: Program, arg: Any) -> tuple[Parameter | None, bool]:
    """The parameter behind an operand, and whether it is read transposed."""
    swapped = False
    while isinstance(arg, fx.Node) and arg.op == "call_function":
        name = op_name(arg.target)
        if name not in SWAPS and name not in WIRE:
            return None, False
        swapped ^= SWAPS.get(name, False)
        arg = arg.args[0]
    known = program.values.get(arg.name) if isinstance(arg, fx.Node) else None
    return (known, swapped) if known is not None and not known.buffer else (None, False)


def linear_kind(parameter: Parameter, out_first: bool) -> str:
    """column, row or empty, for a weight whose first dimension is its output when ``out_first``."""
    states = [s for s in parameter.layout.values() if isinstance(s, Axis)]
    cut = [any(s in set(atoms(d)) for s in states) for d in parameter.dims]
    out, inner = cut if out_first else reversed(cut)
    return "column" if out else "row" if inner else ""


# --- the tables ---


def axes_table(program: Program) -> Table:
    """Groups of equal axes: name, size, where they occur, who cuts them and why."""
    sizes = Sizes(program)
    kinds = {name: f" ({kind})" for name, kind in linears(program).values() if kind}
    given: dict[int, list[Any]] = {}
    for a in program.assignments:
        given.setdefault(id(a.axis), []).append(a)
    used: dict[int, tuple[Axis, list[str]]] = {}
    for parameter in program.parameters().values():
        for dim in parameter.dims:
            for axis in atoms(dim):
                names = used.setdefault(id(axis), (axis, []))[1]
                cut = any(state is axis for state in parameter.layout.values())
                name = _group(parameter.name) + (kinds.get(parameter.name, "") if cut else "")
                if name not in names:
                    names.append(name)
    for a in program.assignments:
        used.setdefault(id(a.axis), (a.axis, []))
    groups: dict[Any, list[Any]] = {}
    for key, (axis, names) in used.items():
        taken = given.get(key, [])
        over = "; ".join(f"{_over(a.mesh_axes, program)} ({a.strategy})" for a in taken) or "-"
        where = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        reason = "; ".join(a.reason for a in taken) or _left(axis)
        row = (axis.name or "-", str(sizes.whole(axis.size)), where or "inputs", over, reason)
        groups.setdefault(row[:4], [*row, 0])[-1] += 1
    headers = ["axis", "size", "in", "cut over", "reason", "count"]
    return Table(headers, list(groups.values()), ("size", "count"))


def _left(axis: Axis) -> str:
    return "no consistent structure" if axis.opaque else "cutting it costs more than it saves"


def params_table(program: Program) -> Table:
    """Parameters: axes, layout, kind of linear, global and local shape, gradient reduction."""
    rows = []
    kinds = dict(linears(program).values())
    for p in program.parameters().values():
        summed = {m for piece in reductions(p, program.mesh) for m in piece[3]}
        rows.append(
            [
                p.name,
                _shape(describe(d) for d in p.dims),
                describe_layout(p.layout),
                kinds.get(p.name, ""),
                _shape(p.value.shape),
                _shape(local_shape(p.dims, p.layout, program.mesh)),
                _over(summed, program) or "-",
            ]
        )
    return Table(
        [
            "parameter",
            "axes",
            "layout",
            "linear",
            "global shape",
            "local shape",
            "gradient summed over",
        ],
        rows,
    )


def graph_table(program: Program) -> Table:
    """Every node: op, module path, global and local shape, layout, collective, bytes sent."""
    sizes, kinds = Sizes(program), linears(program)
    known = {c.node: c for c in program.conversions}
    rows = []
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        dims, layout = program.dims.get(node), program.layouts.get(node)
        if node.name in program.values:  # known only once all its readers are
            layout = program.values[node.name].layout
        shape = local = text = over = sent = ""
        if isinstance(dims, tuple) and isinstance(layout, dict):
            value = node.meta.get("val")
            whole = map(expression, value.shape) if hasattr(value, "shape") else map(_size, dims)
            shape = _shape(sizes.whole(s) for s in whole)
            local = _shape(sizes.local(s) for s in local_shape(dims, layout, program.mesh))
            text = describe_layout(layout)
        if conversion := known.get(node.name):
            over = f"{conversion.kind} over {_over(conversion.axes, program)}"
            sent = sizes.local(conversion_bytes(conversion, program.mesh)[0])
        kind = op_name(node.target) if node.op == "call_function" else node.op
        kind = f"{kind} {kinds[node][1]}".strip() if node in kinds else kind
        rows.append([node.name, kind, module_path(node), shape, text, local, over, sent])
    return Table(
        ["node", "op", "module", "global shape", "layout", "local shape", "collective", "bytes"],
        rows,
        ("bytes",),
    )


def _size(dim: Any) -> Any:
    from autoshard.axes import size_of

    return size_of(dim)


@dataclass
class Collective:
    """Collectives of one kind, over one set of mesh axes, for one reason: how many there are in a
    step, and the bytes that one rank sends in them, a closed form in `BATCH` and `SEQUENCE`."""

    when: str
    kind: str
    axes: str
    why: str
    count: int = 0
    bytes: Any = 0


def step_collectives(program: Program, by_layer: bool = False) -> list[Collective]:
    """What one training step sends, grouped; repeated layers together unless ``by_layer``."""
    return [c for c in _collectives(program, by_layer) if c.why != OUTPUTS]


#: Why collectives run that make outputs whole and that `train_step` leaves out.
OUTPUTS = "outputs; not in train_step"
GRADIENTS = "gradients of parameters, in buckets"


def _collectives(program: Program, by_layer: bool = False) -> list[Collective]:
    sizes, mesh = Sizes(program), program.mesh
    needed = _needed_by_loss(program)
    found: dict[Any, Collective] = {}

    def add(when: str, kind: str, axes: tuple[str, ...], why: str, sent: Any) -> None:
        key = (when, kind, _over(axes, program), why if by_layer else _group(why))
        entry = found.setdefault(key, Collective(*key))
        entry.count += 1
        entry.bytes = entry.bytes + sent

    for c in program.conversions:
        for when, kind, sent in zip(
            ("forward", "backward"), WIRE[c.kind], conversion_bytes(c, mesh), strict=True
        ):
            if kind and sent != 0:
                add(when, kind, c.axes, _why(c, needed), sent)
    for parameter in program.values.values():
        for piece in reductions(parameter, mesh):
            sent = reduction_bytes(parameter, piece, mesh)
            add("backward", "all_reduce", piece[3], GRADIENTS, sent)
    for entry in found.values():
        entry.bytes = sizes.local(entry.bytes)
    return sorted(found.values(), key=lambda c: c.when, reverse=True)


def _why(conversion: Conversion, needed: set[str] | None) -> str:
    return conversion.why if needed is None or conversion.node in needed else OUTPUTS


def _needed_by_loss(program: Program) -> set[str] | None:
    """The names of the nodes that `train_step` runs; None where there is no loss."""
    if program.loss is None:
        return None
    results = next(n for n in program.graph.nodes if n.op == "output").args[0]
    stack = [results[i] for i in (program.loss, *program.buffer_updates.values())]
    found: set[str] = set()
    while stack:
        node = stack.pop()
        if node.name not in found:
            found.add(node.name)
            stack.extend(node.all_input_nodes)
    return found


def collectives_table(program: Program) -> Table:
    """Collectives by kind, mesh axis and cause: count, and bytes a rank sends per step."""
    sizes, entries = Sizes(program), _collectives(program)
    at = sizes.captured()
    number = f"bytes at {at}" if at else "bytes at the captured sizes"
    rows = [
        [c.when, c.kind, c.axes, c.why, c.count, c.bytes, sizes.number(c.bytes)] for c in entries
    ]
    step = [c for c in entries if c.why != OUTPUTS]
    total = _simple(sympy.expand(sum(c.bytes for c in step)))
    count = sum(c.count for c in step)
    rows.append(["step", "all", "", "", count, total, sizes.number(total)])
    headers = ["when", "kind", "over", "why", "count", "bytes", number]
    return Table(headers, rows, ("count", "bytes", number))


def passes_table(program: Program) -> Table:
    """What each pass changed, and how long it took."""
    rows = [[name, changed, f"{seconds:.3f}"] for name, changed, seconds in program.log]
    rows.append(["all", "", f"{sum(seconds for _, _, seconds in program.log):.3f}"])
    return Table(["pass", "changed", "seconds"], rows, ("seconds",))


def memory_table(program: Program) -> Table:
    """Bytes a rank holds: parameters, gradients, and AdamW's two numbers a parameter."""
    rows: list[list[Any]] = []
    for label, times in (("parameters", 1), ("gradients", 1), ("AdamW state", 2)):
        whole = held = 0
        for p in program.parameters().values():
            if label == "parameters" or p.trainable:
                whole += times * p.value.numel() * p.value.element_size()
                held += times * local_numel(p, program.mesh) * p.value.element_size()
        rows.append([label, whole, held])
    rows.append(["total", sum(r[1] for r in rows), sum(r[2] for r in rows)])
    for row in rows:
        row.append(f"{row[2] / row[1]:.4f}" if row[1] else "-")
    headers = ["what", "bytes on one device", "bytes on a rank", "share"]
    return Table(headers, rows, tuple(headers[1:]))


TABLES: dict[str, Callable[[Program], Table]] = {
    "axes": axes_table,
    "params": params_table,
    "graph": graph_table,
    "collectives": collectives_table,
    "passes": passes_table,
    "memory": memory_table,
}
