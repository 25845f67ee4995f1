"""Pipeline stages: the parts of a partitioned graph, and how they are shared out.

A part is a block (an element of a list of modules), or what stands before, between and behind
blocks. The text form of a division names the parts of each stage:

    embed,layers.0-3|layers.4-7|layers.8-11,head

A block has its module path, without what the paths of all lists begin with. ``embed`` is what
stands before the first block, ``head`` what stands behind the last. What stands behind the last
block of a list, and before another list, has that list's name and ``.tail``; between two blocks of
one list, the first one's name and ``.tail``. A name that comes again gets ``@1``, ``@2``: a block
that is called more than once. Where blocks are fewer than stages, parts are the modules inside
them, and where these are, runs of ops by the name of the first product.

What has neither a product nor a parameter of two dimensions or more (masks, positions, casts, a
norm) is no part, and goes with a neighbour. So does what would be cut off between ops that hand on
something other than tensors.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autoshard import activations
from autoshard.cost import local_numel
from autoshard.cuts import Cuts, Run
from autoshard.errors import ShardingError, message
from autoshard.flow import Flow
from autoshard.program import Program
from autoshard.segments import modules, segments

#: Bytes held for each byte of a float32 parameter: itself, its gradient and AdamW's two states.
HELD = 4


@dataclass(frozen=True)
class Part:
    """What stays together on one stage, and what it costs on rank 0 for the rows captured.

    segment: the position, in ``segments(program.graph)``, of the one it begins in. flops: forward,
    of what depends on parameters; `autoshard.flow.FLOPS_PER_BYTE` for each byte that other ops than
    products move. parameters: bytes of the rank's slices that are first read there. activation:
    bytes that are saved for backward, where they first are (`autoshard.activations`); where that
    cannot be told, half of all that its ops make. gives: bytes that are alive behind it, see
    `crossing`. nodes: their names, in order.
    """

    name: str
    segment: int
    flops: int
    parameters: int
    activation: int
    gives: int
    nodes: tuple[str, ...] = field(default=(), repr=False)


def parts(program: Program, stages: int = 2) -> list[Part]:
    """The parts of a partitioned program, in order: ``stages`` of them or more. Every node but the
    placeholders is in one. Raises ShardingError where even single products are fewer."""
    flow = Flow(program)
    cuts = Cuts(flow)
    best: list[Run] = []
    for found in cuts.levels():
        best = max(best, found, key=len)
        if len(best) >= stages:
            return _with_costs(flow, best, cuts.names(best))
    raise ShardingError(
        message(
            "pipeline stages",
            _model_name(program),
            f"{_counted(len(best), 'part')} ({_ranges(cuts.names(best))}), {stages} stages",
            "every stage needs an op that multiplies or looks up parameters, and between stages"
            " only tensors can be sent",
            f"ask for at most {_counted(len(best), 'stage')}: fewer ranks in pp, or fewer stages"
            " on each",
        )
    )


def _model_name(program: Program) -> str:
    """The class of the model that was captured."""
    stacks = [modules(node) for node in program.graph.nodes]
    return next((s[1][1].rpartition(".")[2] for s in stacks if len(s) > 1), "the model")


def _with_costs(flow: Flow, found: list[Run], names: list[str]) -> list[Part]:
    of_node = _runs_of_nodes(flow, found)
    segment_of = {
        node: i for i, segment in enumerate(segments(flow.program.graph)) for node in segment.nodes
    }
    members: list[list[fx.Node]] = [[] for _ in found]
    for node in flow.nodes:
        members[of_node[node]].append(node)
    saved, first_read = _saved(flow), set[str]()
    made = []
    for run, name, nodes in zip(found, names, members, strict=True):
        new = {key for n in nodes for key in flow.reads(n)} - first_read
        first_read |= new
        made.append(
            Part(
                name,
                segment_of[flow.nodes[run.start]],
                sum(map(flow.cost, nodes)),
                sum(_parameter_bytes(flow.program, key) for key in new),
                sum(saved.get(n.name, 0) for n in nodes),
                flow.alive[run.stop],
                tuple(n.name for n in nodes),
            )
        )
    return made


def _runs_of_nodes(flow: Flow, found: list[Run]) -> dict[fx.Node, int]:
    """The run of every node. What updates a buffer is where its last operand is made, wherever it
    stands in the graph."""
    of_node: dict[fx.Node, int] = {}
    for i, run in enumerate(found):
        for node in flow.nodes[run.start : run.stop]:
            made = [of_node[n] for n in node.all_input_nodes if n in flow.travels]
            of_node[node] = max(made) if node in flow.updates and made else i
    return of_node


def _parameter_bytes(program: Program, key: str) -> int:
    parameter = program.values[key]
    return local_numel(parameter, program.mesh) * parameter.value.element_size()


def _saved(flow: Flow) -> dict[str, int]:
    """Bytes saved for backward by the name of the node that saves them, or makes them."""
    known = activations.forward(flow.program)
    if known is not None:
        return known.by
    return {n.name: flow.work[n].made // 2 for n in flow.nodes if flow.computes(n)}


def crossing(
    program: Program, parts: Sequence[Part], stage_of: Sequence[int]
) -> list[list[fx.Node]]:
    """For every stage but the last, the values that are alive behind it: what it and those before
    it make and a later one reads. They are those that depend on parameters in another way than as a
    form of them (a cast, a transpose), or on a random draw; a training step needs no others."""
    flow = Flow(program)
    firsts = [p for i, p in enumerate(parts) if i and stage_of[i] != stage_of[i - 1]]
    at = {node.name: i for i, node in enumerate(flow.nodes)}
    return [flow.across(at[p.nodes[0]]) for p in firsts]


# --- dividing ---


def balanced(parts: Sequence[Part], stages: int, *, ratio: float = 1.02) -> list[int]:
    """The stage of each part, in order, none empty.

    The slowest stage takes no longer than ``ratio`` times the least that is possible. Of such
    divisions it is that with the least memory where most is held: parameters with their AdamW
    states, and the activations of as many micro-batches as 1F1B has under way, ``stages - stage``
    (Narayanan et al. 2021). Then fewer bytes cross cuts; then times are most equal.

    Raises ShardingError where parts are fewer than stages.

    >>> costs = {"embed": 0, "layers.0": 2, "layers.1": 2, "layers.2": 2, "head": 3}
    >>> own = [Part(name, 0, flops, 0, 0, 0) for name, flops in costs.items()]
    >>> write(own, balanced(own, 2))
    'embed,layers.0-1|layers.2,head'
    """
    if not 1 <= stages <= len(parts):
        raise ShardingError(
            message(
                "pipeline stages",
                f"{_counted(len(parts), 'part')} ({_ranges(p.name for p in parts)})",
                _counted(stages, "stage"),
                "every stage needs a part of its own",
                f"ask for 1 to {len(parts)} stages",
            )
        )
    time, held, live = (
        list(itertools.accumulate(values, initial=0))
        for values in zip(
            *((p.flops, HELD * p.parameters, p.activation) for p in parts), strict=True
        )
    )
    shortest = _shortest(time, stages)
    longest = max(shortest, int(ratio * shortest))

    def memory(stage: int, start: int, stop: int) -> int:
        return held[stop] - held[start] + (stages - stage) * (live[stop] - live[start])

    def sent(stage: int, start: int, stop: int) -> tuple[int, int] | None:
        if memory(stage, start, stop) > most:
            return None
        return parts[stop - 1].gives, (time[stop] - time[start]) ** 2

    most, _ = _divided(time, stages, longest, memory, max)
    _, ends = _divided(time, stages, longest, sent, lambda a, b: (a[0] + b[0], a[1] + b[1]))
    return [bisect_right(ends, at) for at in range(len(parts))]


def _shortest(time: list[int], stages: int) -> int:
    """The least time of the slowest of so many stages; ``time``: of all parts before each."""
    steps = [b - a for a, b in itertools.pairwise(time)]
    low, high = max(*steps, -(-time[-1] // stages)), time[-1]
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(time, middle)[0] <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(time: list[int], longest: int) -> list[int]:
    """How many stages the parts from each on need, where none may take longer."""
    needed, stop = [0] * len(time), len(time) - 1
    for start in reversed(range(len(time) - 1)):
        while time[stop] - time[start] > longest:
            stop -= 1
        needed[start] = 1 + needed[stop]
    return needed


def _divided(
    time: list[int],
    stages: int,
    longest: int,
    cost: Callable[[int, int, int], Any],
    add: Callable[[Any, Any], Any],
) -> tuple[Any, tuple[int, ...]]:
    """The division of least cost in which no stage takes longer, and where each stage ends.

    ``cost(stage, start, stop)``: of the parts from one up to another as a stage; it grows with
    them, and None is too much. ``add``: the cost of two stages. Dynamic programming over where a
    stage ends.
    """
    needed, count = _stages_needed(time, longest), len(time) - 1
    best: dict[int, tuple[Any, tuple[int, ...]]] = {0: (None, ())}
    for stage in range(stages):
        left, found = stages - stage - 1, dict[int, tuple[Any, tuple[int, ...]]]()
        for start, (before, ends) in best.items():
            for stop in range(start + 1, count - left + 1):
                own = cost(stage, start, stop) if time[stop] - time[start] <= longest else None
                if own is None:
                    break
                if needed[stop] > left:
                    continue  # the rest is too much for the stages that are left
                total = own if before is None else add(before, own)
                if stop not in found or total < found[stop][0]:
                    found[stop] = total, (*ends, stop)
        best = found
    return best[count]


# --- as text ---


def parse(text: str, parts: Sequence[Part], stages: int | None = None) -> list[int]:
    """The stage of each part, from the text form: ``"embed,layers.0-3|layers.4-7,head"``.

    Raises ShardingError that lists all that is wrong: names that there are not, parts in no stage
    or in several, stages out of order or without a part, and another number of stages than
    ``stages``.
    """
    position = {part.name: i for i, part in enumerate(parts)}
    wrong, placed = [], dict[int, list[int]]()
    texts = text.split("|")
    if stages not in (None, len(texts)):
        wrong.append(f"{_counted(len(texts), 'stage')}, and the mesh has {stages}")
    for stage, names in enumerate(texts):
        items = [name.strip() for name in names.split(",") if name.strip()]
        if not items:
            wrong.append(f"stage {stage} is empty")
        for item in items:
            members = _members(item)
            unknown = [name for name in members if name not in position]
            if unknown:
                wrong.append(f"no part {_ranges(unknown)}" + f" (in {item})" * (unknown != [item]))
            for name in members:
                if name in position:
                    placed.setdefault(position[name], []).append(stage)
    missing = [part.name for i, part in enumerate(parts) if i not in placed]
    if missing:
        wrong.append(f"in no stage: {_ranges(missing)}")
    twice = [i for i, where in sorted(placed.items()) if len(where) > 1]
    if twice:
        wrong.append(f"named more than once: {_ranges(parts[i].name for i in twice)}")
    for (i, [*_, last]), (j, [first, *_]) in itertools.pairwise(sorted(placed.items())):
        if last > first:
            names = f"{parts[j].name} (stage {first}) comes behind {parts[i].name} (stage {last})"
            wrong.append(f"out of order: {names} in the model")
    if wrong:
        asked = min(stages or len(texts), len(parts))
        raise ShardingError(
            message(
                "pipeline stages",
                repr(text),
                "; ".join(wrong),
                "every part of the model is in one stage, in the order of the model, which is"
                f" {_ranges(p.name for p in parts)}",
                f"write for example {write(parts, balanced(parts, asked))!r}",
            )
        )
    return [placed[i][0] for i in range(len(parts))]


def write(parts: Sequence[Part], stage_of: Sequence[int]) -> str:
    """The text form of a division."""
    groups = itertools.groupby(zip(stage_of, parts, strict=True), key=lambda pair: pair[0])
    return "|".join(_ranges((p.name for _, p in group), ",") for _, group in groups)


def _members(item: str) -> list[str]:
    """The names that a name, or a range of them such as ``layers.0-3``, stands for."""
    found = re.fullmatch(r"(.*?)(\d+)-(\d+)", item)
    if found is None or int(found[2]) >= int(found[3]):
        return [item]
    return [f"{found[1]}{i}" for i in range(int(found[2]), int(found[3]) + 1)]


def _ranges(names: Iterable[str], between: str = ", ") -> str:
    """Names, with ranges for those that count up."""
    found: list[list[str]] = []
    for name in names:
        if found and _next(found[-1][-1]) == name:
            found[-1].append(name)
        else:
            found.append([name])
    texts = [f"{g[0]}-{re.split(NUMBER, g[-1])[1]}" if len(g) > 1 else g[0] for g in found]
    return between.join(texts)


NUMBER = r"(\d+)$"


def _next(name: str) -> str | None:
    """The name that counts on by one: ``layers.4`` for ``layers.3``."""
    at = re.search(NUMBER, name)
    return f"{name[: at.start()]}{int(at[1]) + 1}" if at else None


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


HEADERS = (
    "stage",
    "parts",
    "FLOPs share",
    "parameters, bytes",
    "activations, bytes",
    "values sent",
    "bytes sent",
)


def table(program: Program, parts: Sequence[Part], stage_of: Sequence[int]) -> list[list[Any]]:
    """A row for each stage, of what `HEADERS` say: costs of rank 0 for the rows captured, one
    forward. Bytes sent are those to the next stage; as many gradients come back."""
    everything = sum(p.flops for p in parts) or 1
    sent = [*(len(values) for values in crossing(program, parts, stage_of)), 0]
    rows = []
    for stage, values in enumerate(sent):
        own = [p for p, s in zip(parts, stage_of, strict=True) if s == stage]
        rows.append(
            [
                stage,
                _ranges(p.name for p in own),
                f"{sum(p.flops for p in own) / everything:.1%}",
                sum(p.parameters for p in own),
                sum(p.activation for p in own),
                values,
                own[-1].gives,
            ]
        )
    return rows
