"""Tables of what was done, by tabulate."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any

from tabulate import tabulate
from torch import fx

from autoshard.axes import Axis, atoms, describe
from autoshard.cost import WIRE, conversion_bytes, local_numel, local_shape
from autoshard.infer import expression
from autoshard.layout import describe_layout
from autoshard.program import Parameter, Program, module_path
from autoshard.rules import op_name
from autoshard.runtime.gather import reductions

Rows = tuple[list[str], list[list[Any]]]


def table(module: Any, which: str, format: str = "simple") -> str:  # noqa: A002
    """One of the tables as text. ``format``: any of tabulate's ("simple", "github", "html", ...)."""
    if which not in TABLES:
        raise ValueError(f"no table {which!r}: there are {', '.join(TABLES)}")
    headers, rows = TABLES[which](module.program)
    return tabulate(rows, headers=headers, tablefmt="simple" if format == "plain" else format)


def summary(module: Any) -> str:
    """A few lines: mesh, what each strategy cuts, collectives and memory."""
    program: Program = module.program
    held = sum(local_numel(p, program.mesh) for p in program.parameters().values())
    whole = sum(p.value.numel() for p in program.parameters().values())
    taken: dict[str, list[str]] = {}
    for a in program.assignments:
        names = taken.setdefault(a.strategy, [])
        if (text := f"{a.axis.name or a.axis.size} -> {','.join(a.mesh_axes)}") not in names:
            names.append(text)
    counts = collections.Counter(w for c in program.conversions for w in WIRE[c.kind] if w)
    lines = [
        f"ShardedModule on {program.mesh.mesh}, rank {module.rank_index}",
        f"  parameters {held:,} of {whole:,} on this rank; dynamic: {program.dynamic}",
        *(f"  {strategy}: {'; '.join(names)}" for strategy, names in taken.items()),
        f"  collectives per step: {', '.join(f'{n} {k}' for k, n in counts.items()) or 'none'}",
        f"  fallback ops: {len(program.fallbacks)}",
        *(f"  note: {note}" for note in program.notes),
    ]
    return "\n".join(lines)


def _group(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def axes_table(program: Program) -> Rows:
    """Groups of equal axes: name, size, where they occur, who cuts them and why."""
    used: dict[int, tuple[Axis, list[str]]] = {}
    for parameter in program.parameters().values():
        for dim in parameter.dims:
            for axis in atoms(dim):
                names = used.setdefault(id(axis), (axis, []))[1]
                if (name := _group(parameter.name)) not in names:
                    names.append(name)
    for a in program.assignments:
        used.setdefault(id(a.axis), (a.axis, []))
    given = {id(a.axis): a for a in program.assignments}
    groups: dict[Any, list[Any]] = {}
    for key, (axis, names) in used.items():
        a = given.get(key)
        cut = f"{','.join(a.mesh_axes)} ({a.strategy})" if a else "-"
        where = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        row = (axis.name or "-", str(axis.size), where or "inputs", cut, a.reason if a else _left(axis))
        groups.setdefault(row[:4], [*row, 0])[-1] += 1
    return ["axis", "size", "in", "cut over", "reason", "count"], list(groups.values())


def _left(axis: Axis) -> str:
    return "no consistent structure" if axis.opaque else "cutting it costs more than it saves"


def params_table(program: Program) -> Rows:
    """Parameters: axes, layout, kind of linear, global and local size, gradient reduction."""
    rows = []
    kinds = _linear_kinds(program)
    for key, p in program.parameters().items():
        summed = sorted({m for piece in reductions(p, program.mesh) for m in piece[3]})
        rows.append(
            [
                p.name,
                "[" + ", ".join(describe(d) for d in p.dims) + "]",
                describe_layout(p.layout),
                kinds.get(key, ""),
                "x".join(map(str, p.value.shape)),
                "x".join(str(s) for s in local_shape(p.dims, p.layout, program.mesh)),
                ",".join(summed) or "-",
            ]
        )
    return ["parameter", "axes", "layout", "linear", "shape", "local shape", "gradient summed over"], rows


def _linear_kinds(program: Program) -> dict[str, str]:
    """``column`` where a linear's output features are cut, ``row`` where its input features are."""
    kinds = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and op_name(node.target) in ("linear", "addmm", "mm", "matmul"):
            weight = next((a for a in node.args if _parameter(program, a)), None)
            if weight is not None:
                p = program.values[weight.name]
                kinds[weight.name] = linear_kind(p, op_name(node.target) == "linear")
    return kinds


def _parameter(program: Program, arg: Any) -> Parameter | None:
    if isinstance(arg, fx.Node) and arg.op == "placeholder":
        return program.values.get(arg.name)
    return None


def linear_kind(parameter: Parameter, out_first: bool) -> str:
    """column, row or empty, for a weight whose first dimension is its output when ``out_first``."""
    if len(parameter.dims) != 2:
        return ""
    cut = [any(s in set(atoms(d)) for s in parameter.layout.values() if isinstance(s, Axis)) for d in parameter.dims]
    out, inner = cut if out_first else reversed(cut)
    return "column" if out else "row" if inner else ""


def graph_table(program: Program) -> Rows:
    """Every node: op, module path, global shape, layout, local shape, collective, bytes sent."""
    known = {c.node: c for c in program.conversions}
    kinds = _linear_kinds(program)
    rows = []
    for node in program.graph.nodes:
        if node.op in ("output",):
            continue
        dims, layout = program.dims.get(node), program.layouts.get(node)
        typed = isinstance(dims, tuple) and isinstance(layout, dict)
        shape = local = ""
        if typed:
            value = node.meta.get("val")
            sizes = [expression(s) for s in value.shape] if hasattr(value, "shape") else [_size(d) for d in dims]
            shape = "x".join(map(str, sizes))
            local = "x".join(map(str, local_shape(dims, layout, program.mesh)))
        conversion = known.get(node.name)
        kind = op_name(node.target) if node.op == "call_function" else node.op
        if kind == "linear":
            kind = f"linear {kinds.get(node.args[1].name, '')}".strip()
        sent = conversion_bytes(conversion, program.mesh)[0] if conversion else ""
        over = f"{conversion.kind} over {','.join(conversion.axes)}" if conversion else ""
        text = describe_layout(layout) if typed else ""
        rows.append([node.name, kind, module_path(node), shape, text, local, over, sent])
    headers = ["node", "op", "module", "global shape", "layout", "local shape", "collective", "bytes"]
    return headers, rows


def _size(dim: Any) -> Any:
    from autoshard.axes import size_of

    return size_of(dim)


def collectives_table(program: Program) -> Rows:
    """Collectives by kind, mesh axis and cause: count and bytes a rank sends per step."""
    groups: dict[Any, list[Any]] = {}
    for c in program.conversions:
        forward, backward = conversion_bytes(c, program.mesh)
        for direction, kind, size in (("forward", WIRE[c.kind][0], forward), ("backward", WIRE[c.kind][1], backward)):
            if kind and size != 0:
                key = (direction, kind, ",".join(c.axes), _group(c.why))
                row = groups.setdefault(key, [*key, 0, 0])
                row[4] += 1
                row[5] += size
    for parameter in program.values.values():
        for piece in reductions(parameter, program.mesh):
            size = local_numel(parameter, program.mesh) * parameter.value.element_size()
            ranks = program.mesh.size(piece[3])
            key = ("backward", "all-reduce", ",".join(piece[3]), "gradients, in buckets")
            row = groups.setdefault(key, [*key, 0, 0])
            row[4] += 1
            row[5] += 2 * size * (ranks - 1) // ranks
    rows = [[*r, _number(program, r[5])] for r in groups.values()]
    return ["when", "kind", "over", "why", "count", "bytes", "bytes at the captured sizes"], rows


def _number(program: Program, expr: Any) -> Any:
    if isinstance(expr, int) or not getattr(expr, "free_symbols", None):
        return expr
    hints = program.hints
    if not set(expr.free_symbols) <= set(hints):
        return "-"
    return int(expr.subs(hints))


def passes_table(program: Program) -> Rows:
    """What each pass changed, and how long it took."""
    return ["pass", "changed", "seconds"], [[n, w, round(s, 3)] for n, w, s in program.log]


def memory_table(program: Program) -> Rows:
    """Bytes a rank holds: parameters, gradients, optimizer state (AdamW: two numbers a parameter)."""
    rows = []
    for label, kind in (("parameters", "all"), ("gradients", "trainable"), ("AdamW state", "state")):
        whole = held = 0
        for p in program.parameters().values():
            if kind != "all" and not p.trainable:
                continue
            times = 2 if kind == "state" else 1
            whole += times * p.value.numel() * p.value.element_size()
            held += times * local_numel(p, program.mesh) * p.value.element_size()
        rows.append([label, whole, held, round(held / whole, 4) if whole else 0])
    rows.append(["total", sum(r[1] for r in rows), sum(r[2] for r in rows), ""])
    return ["what", "bytes on one device", "bytes on a rank", "share"], rows


TABLES: dict[str, Callable[[Program], Rows]] = {
    "axes": axes_table,
    "params": params_table,
    "graph": graph_table,
    "collectives": collectives_table,
    "passes": passes_table,
    "memory": memory_table,
}
