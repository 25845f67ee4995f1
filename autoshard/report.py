"""Tables of what was done.

Sizes are closed forms in ``batch`` and ``sequence``; ``batch`` is the rows of one data rank.
"""

from __future__ import annotations

import collections
import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tabulate import tabulate, tabulate_formats
from torch import fx

from autoshard import attentions, memory
from autoshard.activations import backward_runs, predicted, predicted_stages
from autoshard.axes import Axis, atoms, describe
from autoshard.batches import each, microbatch_count
from autoshard.collectives import TABLE
from autoshard.cost import (
    FLAG_BYTES,
    WIRE,
    conversion_bytes,
    gradient_buckets,
    held_at,
    local_shape,
    shard_numel,
    shard_shape,
    wire_bytes,
)
from autoshard.groups import crosses, groups, listed, refuse_no_number, warning
from autoshard.infer import expression
from autoshard.layout import describe_layout
from autoshard.mesh import MICROBATCHES
from autoshard.outline import RECOMPUTE
from autoshard.pipeline_table import alive, pipeline_table
from autoshard.program import (
    STAGE,
    Conversion,
    Parameter,
    Program,
    gathered_weight,
    module_path,
    stages_of_parameters,
)
from autoshard.rules import op_name
from autoshard.runtime.dispatch import to_experts, to_tokens
from autoshard.runtime.gather import reductions
from autoshard.runtime.zero import CALLS
from autoshard.shapes import closed_forms
from autoshard.traffic import (
    UNIT_KINDS,
    Runs,
    loss_bytes,
    routes,
    stages_at,
    summed,
    tied_bytes,
    ties,
)
from autoshard.words import (
    BATCH,
    SEQUENCE,
    Sizes,
    Table,
    over_text,
    shape_text,
    simple,
)

__all__ = [
    "BATCH",
    "SEQUENCE",
    "TABLES",
    "Collective",
    "Sizes",
    "Table",
    "step_collectives",
    "summary",
    "table",
]

#: Ops between a weight and the linear that reads it, and whether they swap its two dimensions.
SWAPS = {"t": True, "transpose": True, "permute": True, "to": False, "contiguous": False}
#: Linears by name, and whether their weight's first dimension is their output.
LINEARS = {"linear": True, "addmm": False, "mm": False, "matmul": False}


def table(module: Any, which: str, format: str = "plain", ranks_per_node: int | None = None) -> str:
    """One of the tables as text. ``format``: "plain", or any of tabulate's ("github", "html", ...).
    ``ranks_per_node``: with it the table of groups tells which of them cross nodes.

    Raises ValueError for a table or a format that does not exist, and for ranks of a node with
    another table; MeshError for what is no number of them.
    """
    if which not in TABLES:
        raise ValueError(f"no table {which!r}: there are {', '.join(TABLES)}")
    style = "simple" if format == "plain" else format
    if style not in tabulate_formats:
        raise ValueError(f"no format {format!r}: there are plain, {', '.join(tabulate_formats)}")
    options = {"module": module} if which in ("memory", "experts") else {}
    if which in OF_A_RANK:
        options["position"] = module.program.mesh.stage(module.rank_index)
    if ranks_per_node is not None:
        if which != "groups":
            raise ValueError(f"ranks_per_node={ranks_per_node} is for the table of groups alone")
        options["ranks_per_node"] = ranks_per_node
    made = TABLES[which](module.program, **options)
    text = tabulate(
        [
            [
                _cut(_text(cell), made.widths.get(header) if style == "simple" else None)
                for header, cell in zip(made.headers, row, strict=True)
            ]
            for row in made.rows
        ],
        headers=made.headers,
        tablefmt=style,
        disable_numparse=True,
        colalign=["right" if h in made.numbers else "left" for h in made.headers],
    )
    return f"{text}\n{_below(made.note, style)}" if made.note else text


def _below(note: str, style: str) -> str:
    """What stands below a table; several lines as they are."""
    lines = "\n" in note
    if style == "html":
        return f"<pre>{html.escape(note)}</pre>" if lines else f"<p>{html.escape(note)}</p>"
    return f"\n```\n{note}\n```" if style == "github" and lines else f"\n{note}"


def _text(cell: Any) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def _cut(text: str, width: int | None) -> str:
    """The text no wider than that: a path without its first modules, a name without its middle."""
    if width is None or len(text) <= width:
        return text
    *words, path = text.split(" ")
    at = path.split(".")
    for i in range(1, len(at)):
        if len(tail := " ".join([*words, "…" + ".".join(at[i:])])) <= width:
            return tail
    head = width // 3
    return text[:head] + "…" + text[len(text) - (width - head - 1) :]


def summary(module: Any) -> str:
    """A few lines: mesh, what each strategy cuts, collectives and memory."""
    program: Program = module.program
    at = program.mesh.stage(module.rank_index)
    own = [p for p in program.parameters().values() if held_at(p, at)]
    held = sum(shard_numel(p, program.mesh) for p in own)
    whole = sum(p.value.numel() for p in program.parameters().values())
    keeps = any(unit.keep and unit.axes for unit in program.units.values())
    kept = ", which also keeps the weights that it computes with" if keeps else ""
    taken: dict[str, list[str]] = {}
    for a in program.assignments:
        names = taken.setdefault(a.strategy, [])
        text = f"{a.axis.name or a.axis.size} -> {over_text(a.mesh_axes, program)}"
        names += [text] if text not in names else []
    counts: collections.Counter[str] = collections.Counter()
    for c in step_collectives(program, position=at):
        what = "gradients summed" if c.why == GRADIENTS else c.kind
        counts[f"{what} over {c.axes}"] += c.count
    listed = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
    lines = [
        f"ShardedModule on {program.mesh.mesh}, rank {module.rank_index}",
        f"  parameters {held:,} of {whole:,} on this rank{kept}; dynamic: {program.dynamic}",
        *(f"  {strategy}: {'; '.join(names)}" for strategy, names in taken.items()),
        *_in_stages(program, at),
        f"  collectives per step: {listed or 'none'}",
        f"  fallback ops: {len(program.fallbacks)}",
        *(f"  note: {note}" for note in program.notes),
    ]
    return "\n".join(lines)


def _in_stages(program: Program, position: int) -> list[str]:
    """A line of how the program is laid out over pp, and what a rank has of it."""
    if program.pipeline is None:
        return []
    texts, own = (program.stages or "").split("|"), stages_at(program, position)
    held = "; ".join(f"stage {s}: {texts[s]}" for s in own)
    count = microbatch_count(program)
    return [
        f"  pipeline: {program.pipeline.schedule}, {program.pipeline.stages} stages -> pp, "
        f"{count} micro-batch{'es' * (count > 1)}; {held}"
    ]


# --- names ---


#: Up to so many layers are listed one by one.
FEW = 3


class Names:
    """Module paths with the index of a repeated layer starred, and axes by names of their own."""

    def __init__(self, program: Program):
        self.program = program
        #: path of a list of modules -> index -> the parameters in there: name, shape and layout
        self.lists: dict[str, dict[str, list[Any]]] = {}
        for p in program.parameters().values():
            at = p.name.split(".")
            for i, word in enumerate(at):
                if word.isdigit():
                    what = ".".join(at[i + 1 :]), tuple(p.value.shape), describe_layout(p.layout)
                    indices = self.lists.setdefault(".".join(at[:i]), {})
                    indices.setdefault(word, []).append(what)
        self.known: dict[tuple[str, str], dict[str, int]] = {}

    def starred(self, path: str) -> tuple[str, int]:
        """The path with the first index that repeats left out, and how often it repeats."""
        at = path.split(".")
        for i, word in enumerate(at):
            if word.isdigit():
                count = self._alike(".".join(at[:i]), ".".join(at[i + 1 :])).get(word, 1)
                if count > 1:
                    return ".".join([*at[:i], "*", *at[i + 1 :]]), count
        return path, 1

    def _alike(self, path: str, below: str) -> dict[str, int]:
        """By index, in how many elements of a list the part at ``below`` has equal parameters. What
        has none, as an activation, is alike where the elements are."""
        if (path, below) not in self.known:
            indices = self.lists.get(path, {})
            own = {
                index: frozenset(w for w in content if f"{w[0]}.".startswith(f"{below}."))
                for index, content in indices.items()
            }
            if not below or not any(own.values()):
                own = {index: frozenset(content) for index, content in indices.items()}
            counts = collections.Counter(content for content in own.values() if content)
            # a list of single linears is layers only when there are many that are alike
            single = not any("." in name for content in indices.values() for name, *_ in content)
            self.known[path, below] = {
                index: counts[content]
                for index, content in own.items()
                if counts[content] > (FEW if single else 1)
            }
        return self.known[path, below]

    def group(self, text: str) -> str:
        """A text whose last word is a module path, that path starred."""
        *words, path = text.split(" ")
        return " ".join([*words, self.starred(path)[0]])

    @cached_property
    def axes(self) -> dict[Axis, str]:
        """The axes that share their name with axes elsewhere: ``hidden``, ``hidden 2``."""
        used: dict[str, dict[Any, list[Axis]]] = {}
        for axis, where in _occurrences(self.program, self).values():
            if axis.name:
                used.setdefault(axis.name, {}).setdefault((axis.size, tuple(where)), []).append(
                    axis
                )
        return {
            axis: f"{name} {number}" if number > 1 else name
            for name, places in used.items()
            for number, axes in enumerate(places.values(), start=1)
            for axis in axes
        }

    def dim(self, dim: Any) -> str:
        return describe(dim, self.axes)

    def layout(self, layout: Any) -> str:
        return describe_layout(layout, self.axes)


def _occurrences(program: Program, names: Names) -> dict[int, tuple[Axis, list[str]]]:
    """Every axis of a parameter or that is cut, with the parameters that have it, starred."""
    used: dict[int, tuple[Axis, list[str]]] = {}
    for parameter in program.parameters().values():
        for axis in (axis for dim in parameter.dims for axis in atoms(dim)):
            where = used.setdefault(id(axis), (axis, []))[1]
            name = names.starred(parameter.name)[0]
            if name not in where:
                where.append(name)
    for a in program.assignments:
        used.setdefault(id(a.axis), (a.axis, []))
    return used


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
        if gathered := gathered_weight(program, arg):
            return gathered, swapped
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
    sizes, names = Sizes(program), Names(program)
    kinds = dict(linears(program).values())
    cut: dict[tuple[int, str], str] = {}  # how a linear's weight is cut on an axis
    for p in program.parameters().values():
        for state in p.layout.values():
            if isinstance(state, Axis):
                cut[id(state), names.starred(p.name)[0]] = kinds.get(p.name, "")
    given: dict[int, list[Any]] = {}
    for a in program.assignments:
        given.setdefault(id(a.axis), []).append(a)
    groups: dict[Any, list[Any]] = {}
    for key, (axis, where) in _occurrences(program, names).items():
        taken = given.get(key, [])
        over = "; ".join(f"{over_text(a.mesh_axes, program)} ({a.strategy})" for a in taken) or "-"
        reason = "; ".join(a.reason for a in taken) or _left(axis, program)
        found = _list([(name, cut.get((key, name), "")) for name in where]) or "inputs"
        name = names.axes.get(axis, axis.name) or "-"
        row = (name, str(sizes.whole(axis.size)), found, over, reason)
        groups.setdefault((*row[:4], *where), [*row, 0])[-1] += 1
    headers = ["axis", "size", "in", "cut over", "reason", "count"]
    return Table(headers, list(groups.values()), ("size", "count"))


#: How many parameters a row of the axes table names.
NAMED = 4


def _list(where: list[tuple[str, str]]) -> str:
    """Parameters by their module's own name: ``q_proj, k_proj (column), o_proj (row)``."""
    text = ""
    for i, (name, kind) in enumerate(where[:NAMED]):
        last = i == len(where[:NAMED]) - 1
        text += _own_name(name)
        text += f" ({kind})" if kind and (last or where[i + 1][1] != kind) else ""
        text += "" if last else ", "
    return text + (f" and {len(where) - NAMED} more" if len(where) > NAMED else "")


def _own_name(name: str) -> str:
    """The last module of a parameter's path; ``mlp.0`` in a sequence."""
    at = name.removesuffix(".weight").split(".")
    keep = 2 if at[-1] == "bias" else 1
    while keep < len(at) and (at[-keep].isdigit() or at[-keep] == "*"):
        keep += 1
    return ".".join(at[-keep:])


def _left(axis: Axis, program: Program) -> str:
    """Why an axis is whole on every rank."""
    if axis.opaque:
        return "no consistent structure"
    return program.left.get(axis, "no strategy of this mesh cuts it")


def _joined(shape: list[Any], local: list[Any]) -> str:
    """A shape with the sizes on a rank: ``[2*batch→batch, 64]``; ``→ [...]`` where only they are
    known."""
    if len(shape) != len(local):
        return "→ " + shape_text(local) if local else shape_text(shape)
    return shape_text(
        f"{a}" if a == b else f"{a}→{b}".replace(" ", "") for a, b in zip(shape, local, strict=True)
    )


#: A column of shapes: of the model, and where it differs, of a rank.
SHAPE = "shape → on a rank"


def params_table(program: Program) -> Table:
    """Parameters: axes, layout of the slice that is computed with, kind of linear, shape, gradient
    reduction, with ZeRO the axes among whose ranks the slice is shared out, and with pp the stages
    that read it; many layers that are alike in one row. ``4 × experts.*.w``: a stack of four of the
    model's own."""
    names, kinds = Names(program), dict(linears(program).values())
    shared = any(p.zero for p in program.parameters().values())
    stages, piped = stages_of_parameters(program), program.pipeline is not None
    rows: dict[Any, list[Any]] = {}
    for key, p in program.parameters().items():
        summed = {m for piece in reductions(p, program.mesh) for m in piece[3]}
        star, count = names.starred(p.name)
        row = [
            "[" + ", ".join(names.dim(d) for d in p.dims) + "]",
            names.layout(p.layout),
            kinds.get(p.name, ""),
            _joined(list(p.value.shape), shard_shape(p, program.mesh)),
            over_text(summed, program) or "-",
            *([over_text(p.zero, program) or "-"] if shared else []),
            *([", ".join(map(str, sorted(stages[key]))) or "-"] if piped else []),
        ]
        name = star if count > FEW else p.name
        name = f"{len(p.stacked)} × {name}" if p.stacked else name
        rows.setdefault((name, *row), [name, *row, 0])[-1] += 1
    headers = ["parameter", "axes", "layout", "linear", SHAPE, "gradient over"]
    headers += ["zero"] * shared + ["stage"] * piped + ["count"]
    return Table(headers, list(rows.values()), ("count",), {"parameter": 46, "axes": 32})


def graph_table(program: Program) -> Table:
    """Every node (a parameter by its name): op, module path, global shape, layout, the shape on a
    rank, of a collective its mesh axes and the bytes sent, whether backward runs it again, and with
    pp the stage that computes it (none: each that needs it)."""
    sizes, names, kinds = Sizes(program), Names(program), linears(program)
    known = {c.node: c for c in program.conversions}
    forms, again = closed_forms(program), computed_again(program)
    stages = _stages_of_nodes(program) if program.pipeline is not None else {}
    rows = []
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        dims, layout = program.dims.get(node), program.layouts.get(node)
        text = sent = over = ""
        shape: list[Any] = []
        local = [sizes.local(s) for s in forms.get(node, ())]
        stated = isinstance(dims, tuple) and isinstance(layout, dict)
        if stated:
            value = node.meta.get("val")
            known_sizes = getattr(value, "shape", None)
            whole = map(_size, dims or ()) if known_sizes is None else map(expression, known_sizes)
            shape = [sizes.whole(s) for s in whole]
            if node not in forms:
                local = [sizes.local(s) for s in local_shape(dims, layout, program.mesh)]
            text = names.layout(layout)
        kind = op_name(node.target) if node.op == "call_function" else node.op
        kind = f"{kind} {kinds[node][1]}".strip() if node in kinds else kind
        if conversion := known.get(node.name):
            over = f"{kind} over {over_text(conversion.axes, program)}"
            sent = sizes.local(conversion_bytes(conversion, program.mesh)[0])
        parameter = program.values.get(node.name) if node.op == "placeholder" else None
        name = parameter.name if parameter else program.inputs.get(node.name, node.name)
        held = shape_text(local) if stated or node in forms else ""
        whole_shape = shape_text(shape) if stated else ""
        row = [name, kind, module_path(node), whole_shape, text, held, over, sent]
        row += ["yes" if node.name in again else ""] if again else []
        rows.append([*row, *([stages[node]] if stages else [])])
    headers = [
        "node",
        "op",
        "module",
        "global shape",
        "layout",
        "local shape",
        "collective",
        "bytes",
        *(["recomputed"] if again else []),
        *(["stage"] if stages else []),
    ]
    widths = {"node": 44, "op": 22, "module": 40}
    return Table(headers, rows, ("bytes",), widths, IN_TIME if program.mesh.microbatches else "")


#: Below a graph of which one rank runs several micro-batches.
IN_TIME = f"{MICROBATCHES}: micro-batches, one after the other; shapes are those of all of them"


def _stages_of_nodes(program: Program) -> dict[fx.Node, str]:
    """The stage of a pipeline that computes a node; of a parameter, those that read it."""
    found, read = {}, stages_of_parameters(program)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            found[node] = ", ".join(map(str, sorted(read.get(node.name, ()))))
        elif node.target in CALLS:
            found[node] = str(program.units[node.args[2]].stage)  # type: ignore[index]
        else:
            found[node] = str(node.meta.get(STAGE, ""))
    return found


def _size(dim: Any) -> Any:
    from autoshard.axes import size_of

    return size_of(dim)


@dataclass
class Collective:
    """Collectives of one kind, over one set of mesh axes, for one reason: how many there are in a
    step, and the bytes that one rank sends in them, a closed form in `BATCH` and `SEQUENCE`.

    ``axes``: of positions along pp that are not all, ``pp:0+3``. ``to``: of what a rank sends to
    one other, that one's position along pp.
    """

    when: str
    kind: str
    axes: str
    why: str
    to: int | None = None
    count: int = 0
    bytes: Any = 0


def step_collectives(
    program: Program, by_layer: bool = False, position: int = 0
) -> list[Collective]:
    """What one training step sends, grouped; repeated layers together unless ``by_layer``.
    ``position``: of a rank along pp."""
    return [c for c in _collectives(program, by_layer, position) if c.why != OUTPUTS]


#: Why collectives run that make outputs whole and that `train_step` leaves out.
OUTPUTS = "outputs; not in train_step"
GRADIENTS = "gradients of parameters, in buckets"
PRESENT = "flags: which parameters have gradients"
TIED = "gradients of weights of several stages"
LOSS = "the loss, to all stages"


def _collectives(program: Program, by_layer: bool = False, position: int = 0) -> list[Collective]:
    sizes, mesh, causes = Sizes(program), program.mesh, _Causes(program)
    again, regathered = backward_runs(program)
    names, runs = Names(program), Runs(program, position)
    found: dict[Any, Collective] = {}

    def add(
        when: str,
        kind: str,
        over: str,
        why: str,
        sent: Any,
        count: int = 1,
        to: int | None = None,
    ) -> None:
        key = (when, kind, over, why if by_layer else names.group(why), to)
        entry = found.setdefault(key, Collective(*key))
        entry.count += count
        entry.bytes = entry.bytes + sent

    def add_runs(when: str, kind: str, c: Conversion, each_run: Any, times: int) -> None:
        over, sent = over_text(c.axes, program), runs.bytes(times, each_run)
        if times:
            add(when, kind, over, causes.of(c), sent, times)

    for c in program.conversions:
        for when, kind, sent, times in zip(
            ("forward", "backward"),
            WIRE[c.kind],
            conversion_bytes(c, mesh),
            runs.of(c),
            strict=True,
        ):
            if kind and sent != 0:
                add_runs(when, kind, c, sent, times)
                if when == "forward" and c.node in again:
                    add_runs("recompute", kind, c, sent, times)
                if c.kind == "start_gather" and c.value in regathered:
                    add_runs("backward", kind, c, sent, times)
    flags: dict[Any, set[str]] = {}
    for bucket in gradient_buckets(program, position):
        over, ranks = over_text(bucket.axes, program), mesh.size(bucket.axes)
        sent = wire_bytes("all_reduce", bucket.bytes, ranks)
        add("backward", "all_reduce", over, GRADIENTS, sent)
        flags.setdefault((bucket.stage, bucket.axes), set()).update(bucket.keys)
    for (_, axes), keys in flags.items():
        sent = wire_bytes("all_reduce", len(keys) * FLAG_BYTES, mesh.size(axes))
        add("backward", "all_reduce", over_text(axes, program), PRESENT, sent)
    if program.pipeline is not None:
        _add_along_pipeline(program, position, add)
    for entry in found.values():
        entry.bytes = sizes.local(entry.bytes)
    return sorted(found.values(), key=lambda c: WHEN.index(c.when))


def _add_along_pipeline(program: Program, position: int, add: Callable[..., None]) -> None:
    """What a rank at a position along pp sends to others along it."""
    count, place = microbatch_count(program), program.pipeline.place
    for route in (r for r in routes(program) if r.travels):
        if place[route.source] == position:
            why = f"{_what(route.values)}, to stage {route.target}"
            times, to = count * len(route.values), place[route.target]
            sent = count * each(program, route.bytes, count)
            add("forward", "send", "pp", why, sent, times, to)
        if place[route.target] == position and route.back:
            why = f"gradients of {_what(route.back)}, to stage {route.source}"
            times, to = count * len(route.back), place[route.source]
            sent = count * each(program, route.bytes_back, count)
            add("backward", "send", "pp", why, sent, times, to)
    for holders, tied in ties(program, position).items():
        every = len(holders) == program.pipeline.ranks
        over = "pp" if every else "pp:" + "+".join(map(str, holders))
        for size in tied_bytes(program, tied):
            sent = wire_bytes("all_reduce", size, len(holders))
            add("backward", "all_reduce", over, TIED, sent)
    if program.loss is not None:
        add("backward", "broadcast", "pp", LOSS, loss_bytes(program))


def _what(values: Sequence[fx.Node]) -> str:
    """Values by the modules that they are from, where these are few."""
    paths = list(dict.fromkeys(module_path(node) or node.name for node in values))
    return ", ".join(paths) if len(paths) <= FEW else f"{len(values)} values"


#: In which part of a step collectives run, in order; "recompute" is forward once more, in backward.
WHEN = ("forward", "recompute", "backward")


def computed_again(program: Program) -> set[str]:
    """Names of the nodes that run again in backward, as far as the graph shows them."""
    marked = any(RECOMPUTE in n.meta for n in program.graph.nodes)
    return backward_runs(program)[0] if marked else set()


class _Causes:
    """Why a collective runs: of summands, the op and module that gave them; else those that read
    what it gives."""

    def __init__(self, program: Program):
        self.needed = _needed_by_loss(program)
        self.kinds = {node: kind for node, (_, kind) in linears(program).items()}
        self.nodes = {node.name: node for node in program.graph.nodes}

    def of(self, conversion: Conversion) -> str:
        if self.needed is not None and conversion.node not in self.needed:
            return OUTPUTS
        if conversion.kind in UNIT_KINDS:
            return conversion.why
        known = TABLE.get(conversion.kind)
        producer = self.nodes.get(conversion.value)
        if known is not None and known.source == "P" and producer is not None:
            if producer in self.kinds:
                return self._text(producer)
            if origin := producer.meta.get("origin"):
                name = re.sub(r"_\d+$", "", origin)
                return f"{name} {module_path(producer)}".strip()
        reader = self._reader(self.nodes[conversion.node])
        return conversion.why if reader is None else self._text(reader)

    def _reader(self, node: fx.Node) -> fx.Node | None:
        """The linear that reads a value, maybe as another view."""
        for user in node.users:
            if user in self.kinds:
                return user
            if user.op == "call_function" and op_name(user.target) in VIEWS:
                return self._reader(user)
        return None

    def _text(self, node: fx.Node) -> str:
        return f"{self.kinds[node]} linear {module_path(node)}".strip()


#: Ops between a value and the linear that reads it.
VIEWS = frozenset("view reshape flatten to contiguous".split())


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


def collectives_table(program: Program, position: int = 0) -> Table:
    """Collectives by kind, mesh axis and cause: count, and bytes a rank sends per step."""
    sizes, entries = Sizes(program), _collectives(program, position=position)
    at = sizes.captured()
    number = f"bytes at {at}" if at else "bytes at the captured sizes"
    rows = [
        [c.when, c.kind, c.axes, c.why, c.count, c.bytes, sizes.number(c.bytes)] for c in entries
    ]
    step = [c for c in entries if c.why != OUTPUTS]
    total = summed(c.bytes for c in step)
    count = sum(c.count for c in step)
    rows.append(["step", "all", "", "", count, total, sizes.number(total)])
    headers = ["when", "kind", "over", "why", "count", "bytes", number]
    return Table(headers, rows, ("count", "bytes", number), {"why": 46})


def groups_table(program: Program, ranks_per_node: int | None = None, position: int = 0) -> Table:
    """Groups of ranks that send to each other, by the mesh axes along which these differ: ranks in
    one, how many there are, their ranks, what a training step sends in one (how many of each kind),
    and the bytes that a rank sends with it. Given the ranks of a node, of which node n holds those
    from n times that on: also whether groups cross nodes. Raises MeshError for no number of them.
    """
    if ranks_per_node is not None:
        refuse_no_number(ranks_per_node)
    sizes, mesh = Sizes(program), program.mesh
    sent: dict[str, list[Collective]] = {}
    for c in _collectives(program, position=position):
        sent.setdefault(c.axes, []).append(c)
    rows = []
    for over in sorted(sent, key=lambda axes: _outermost_first(axes, program)):
        found = groups_over(program, over)
        row: list[Any] = [over, len(found[0]), len(found), listed(found)]
        row += [] if ranks_per_node is None else [crosses(found, ranks_per_node)]
        step = [c for c in sent[over] if c.why != OUTPUTS]
        total = summed(c.bytes for c in step)
        rows.append([*row, _counted(step) or OUTPUTS, total, sizes.number(total)])
    at = sizes.captured()
    number = f"bytes at {at}" if at else "bytes at the captured sizes"
    headers = ["over", "size", "groups", "ranks"]
    headers += [] if ranks_per_node is None else ["crosses nodes"]
    headers += ["sends in a step", "bytes", number]
    note = "" if ranks_per_node is None else warning(mesh, ranks_per_node)
    return Table(headers, rows, ("size", "groups", "bytes", number), note=note)


def groups_over(program: Program, over: str) -> list[list[int]]:
    """The groups along mesh axes as a `Collective` has them."""
    axes, _, along = over.partition(":")
    found = groups(program.mesh, tuple(axes.split(",")))
    return [[group[int(p)] for p in along.split("+")] for group in found] if along else found


def _outermost_first(over: str, program: Program) -> list[tuple[int, str]]:
    names = program.mesh.mesh.names
    return [(names.index(re.split("[.:]", axis)[0]), axis) for axis in over.split(",")]


def _counted(step: list[Collective]) -> str:
    """How many there are of each kind: ``2 all_gather, 1 all_reduce``."""
    counts: collections.Counter[str] = collections.Counter()
    for c in step:
        counts[c.kind] += c.count
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def passes_table(program: Program) -> Table:
    """What each pass changed, and how long it took."""
    rows = [[name, changed, f"{seconds:.3f}"] for name, changed, seconds in program.log]
    rows.append(["all", "", f"{sum(seconds for _, _, seconds in program.log):.3f}"])
    return Table(["pass", "changed", "seconds"], rows, ("seconds",))


def memory_table(program: Program, module: Any = None, position: int = 0) -> Table:
    """Bytes a rank holds, and where; of a live ``module`` also those that it holds now. Below: the
    activations that forward saves for backward, and what the largest recomputed block makes again
    there. See `autoshard.memory` for the formulas."""
    now = memory.measured(module) if module is not None and module.live else {}
    rows: list[list[Any]] = []
    for held in memory.predicted(program, position):
        share = f"{held.rank / held.whole:.4f}" if held.whole else "-"
        place = "host" if held.host else "device"
        rows.append(
            [held.what, held.whole or "-", held.rank, share, place, "-", now.get(held.what, "-")]
        )
    between = [r for r in rows if r[0] not in (memory.GATHERED, "whole gradients")]
    whole, rank = (sum(r[i] for r in between if r[i] != "-") for i in (1, 2))
    total = sum(now.get(r[0], 0) for r in between) if now else "-"
    share = f"{rank / whole:.4f}" if whole else "-"
    rows.insert(len(between), ["held between steps", whole, rank, share, "", "-", total])
    rows += [[*row[:4], "device", row[4], "-"] for row in activation_rows(program, position)]
    at = Sizes(program).captured()
    formula = f"as a formula; the bytes are at {at}" if at else "as a formula"
    headers = ["what", "bytes on one device", "bytes on a rank", "share", "in", formula, "measured"]
    return Table(headers, rows, (*headers[1:4], "measured"))


SAVED, AGAIN = "activations saved for backward", "recomputed, one block"


def activation_rows(program: Program, position: int = 0) -> list[list[Any]]:
    """Rows of the table of memory: activations on a rank at the sizes captured, and as a closed
    form (see `autoshard.activations`). With pp those of all micro-batches that are alive when they
    are most, and below those of one of them, by stage."""
    sizes = Sizes(program)
    blocks = any(RECOMPUTE in n.meta for n in program.graph.nodes)
    asked: dict[str, Any] = {}
    if program.pipeline is None:
        made = predicted(program)
        asked = {SAVED: made and made.saved}
        asked |= {AGAIN: made and made.recomputed} if blocks else {}
    else:
        asked = _activations_in_stages(program, sizes, position)
        asked = asked if blocks else {k: v for k, v in asked.items() if k != AGAIN}
    rows = []
    for label, form in asked.items():
        local = "-" if form is None else sizes.local(simple(form))
        rows.append([label, "-", "-" if form is None else sizes.number(local), "-", local])
    return rows


def _activations_in_stages(program: Program, sizes: Sizes, position: int) -> dict[str, Any]:
    made, own = predicted_stages(program), stages_at(program, position)
    held, count = alive(program)[position], microbatch_count(program)
    labels = {s: f"of one micro-batch in stage {s}, {held[s]} alive" for s in own}
    if made is None:
        return dict.fromkeys([SAVED, *labels.values(), AGAIN])
    saved = {s: each(program, made[s].saved, count) for s in own}
    again = [each(program, made[s].recomputed, count) for s in own]
    return {
        SAVED: summed(held[s] * saved[s] for s in own),
        **{labels[s]: saved[s] for s in own},
        AGAIN: max(again, key=lambda form: sizes.number(sizes.local(form))),
    }


def attention_table(program: Program) -> Table:
    """Attentions that are alike in one row: where, what is cut in them over which mesh axes, heads
    of queries and keys on a rank, which keys a query reads, the order in which ranks hold tokens,
    the bytes a rank sends per step for that (a closed form; none for the projections around it),
    and the FLOPs of the forward's two products at the sizes captured: on the rank with the least,
    on that with the most, and the most over the mean."""
    sizes, names, rows = Sizes(program), Names(program), dict[Any, list[Any]]()
    piped = program.pipeline is not None
    own = {s: sizes.values[w] for s, w in sizes.words.items() if w in sizes.values}
    for call in attentions.calls(program, {**program.hints, **own}):
        how = "; ".join(f"{kind} over {over_text(over, program)}" for kind, over in call.how)
        heads = "{} on {}".format(*call.heads) if call.heads else "-"
        where = names.starred(module_path(call.node))[0] or "the model"
        sent = sum(sum(conversion_bytes(c, program.mesh)) for c in call.sent)
        stage = [call.node.meta.get(STAGE, "-")] if piped else []
        key = where, how or "whole", heads, call.mask, call.tokens, len(call.flops), *stage
        row = rows.setdefault(key, [0, 0, [0] * len(call.flops)])
        row[:2] = row[0] + 1, row[1] + sent
        row[2] = [a + b for a, b in zip(row[2], call.flops, strict=True)]
    at = sizes.captured()
    first = f"attentions at {at}" if at else "attentions"
    headers = [first, *(["stage"] if piped else []), "count", "how", "heads", "mask", "tokens"]
    headers += ["bytes", "FLOPs, least", "most", "most/mean"]
    made = []
    for (where, how, heads, mask, tokens, _, *stage), (count, sent, flops) in rows.items():
        about = [where, *stage, count, how, heads, mask, _order(tokens, flops)]
        made.append([*about, sizes.local(sent), *_spread(flops)])
    numbers = ("count", "bytes", *headers[-3:])
    return Table(headers, made, numbers, {first: 30})


def _order(tokens: str, flops: list[int]) -> str:
    """The order of tokens; where it leaves the ranks unequal work, which has the most."""
    if tokens == "contiguous" and flops and flops[-1] > min(flops):
        return f"{tokens}: the last rank reads most"
    return tokens


def _spread(flops: list[int]) -> list[Any]:
    """The least of some numbers, the most, and the most over the mean."""
    if not any(flops):
        return ["-", "-", "-"]
    return [min(flops), max(flops), f"{max(flops) * len(flops) / sum(flops):.2f}"]


def experts_table(program: Program, module: Any = None) -> Table:
    """Mixtures of experts: before `ShardedModule.expert_load` was called, those alike, with the
    bytes that a rank sends with its tokens and for their results, forward and backward, where all
    experts get as many tokens; afterwards what it told, one by one."""
    loads = module._load if module is not None else []
    if not program.mixtures:
        why = "; ".join(dict.fromkeys(program.unfused)) or "the model has none that is recognised"
        return Table(["mixtures", "why"], [["none", why]])
    if len(loads) == len(program.mixtures):
        return _loads_table(program, loads)
    sizes, names, of = Sizes(program), Names(program), _mixtures_of(program)
    stages, rows = _stages_of_mixtures(program), dict[Any, list[Any]]()
    for name, mixture in program.mixtures.items():
        sent = [c for c in program.conversions if of.get(c.node) == name]
        sums = [sum(conversion_bytes(c, program.mesh)) for c in sent] or [0, 0]
        row = [*_experts_of(program, mixture), *map(sizes.local, sums)]
        row += [stages[name]] if stages else []
        where = names.starred(mixture.where)[0]
        rows.setdefault((where, str(row)), [where, 0, *row])[1] += 1
    headers = ["mixtures", "count", "experts", "a token", "cut over", "on a rank", "capacity"]
    headers += ["bytes there", "bytes back", *(["stage"] if stages else [])]
    numbers = ("count", "experts", "a token", "capacity", "bytes there", "bytes back")
    return Table(headers, list(rows.values()), numbers, {"mixtures": 30})


def _loads_table(program: Program, loads: list[Any]) -> Table:
    rows = [
        [
            load.where,
            _experts_of(program, mixture)[3],
            *_few(load.tokens),
            *_few(load.rows),
            max(load.sent),
            load.dropped,
        ]
        for mixture, load in zip(program.mixtures.values(), loads, strict=True)
    ]
    headers = ["mixtures", "on a rank", "tokens of experts", "most/mean", "rows of ranks"]
    headers += ["most/mean ", "bytes sent, most", "dropped"]
    return Table(headers, rows, ("most/mean", *headers[5:]), {"mixtures": 30})


def _experts_of(program: Program, mixture: Any) -> list[Any]:
    ranks = mixture.experts_of_ranks(program.mesh)
    own = str(ranks[0]) if len(set(ranks)) == 1 else " ".join(map(str, ranks))
    limit = "-" if mixture.capacity is None else f"{mixture.capacity:g}"
    return [mixture.experts, mixture.k, over_text(mixture.over, program) or "-", own, limit]


def _mixtures_of(program: Program) -> dict[str, str]:
    """The nodes that send rows to experts or back: of which mixture."""
    found = {}
    for target in (to_experts, to_tokens):
        for sends in program.graph.find_nodes(op="call_function", target=target):
            node = sends
            while node.target is not to_experts:  # what it sends back came by a plan
                node = node.args[2] if node is sends else node.args[0]
            found[sends.name] = node.args[5]
    return found


def _stages_of_mixtures(program: Program) -> dict[str, Any]:
    """The stage of a pipeline that each mixture is in; nothing without pp."""
    if program.pipeline is None:
        return {}
    nodes = program.graph.find_nodes(op="call_function", target=to_experts)
    return {str(node.args[5]): node.meta.get(STAGE, "-") for node in nodes}


def _few(numbers: Sequence[int]) -> list[str]:
    """Numbers, where they are few, else the least and the most; and the most over the mean."""
    listed = (
        " ".join(map(str, numbers)) if len(numbers) <= 8 else f"{min(numbers)} to {max(numbers)}"
    )
    return [listed, _spread(list(numbers))[-1]]


#: Tables that differ between the positions along pp.
OF_A_RANK = ("collectives", "groups", "memory")

TABLES: dict[str, Callable[..., Table]] = {
    "axes": axes_table,
    "params": params_table,
    "graph": graph_table,
    "collectives": collectives_table,
    "groups": groups_table,
    "pipeline": pipeline_table,
    "passes": passes_table,
    "memory": memory_table,
    "attention": attention_table,
    "experts": experts_table,
}
