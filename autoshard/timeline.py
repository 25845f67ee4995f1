"""What ran when on each rank, predicted or measured: pictures, traces, tables, and the bubble.

Times are seconds from the start of the step. The bubble is the share of time in which ranks do
nothing; `formula` gives the size that the paper of a schedule states for it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from xml.sax.saxutils import escape

from tabulate import tabulate

from autoshard.errors import AutoshardError, ShardingError, message

#: Kinds of events that are a schedule's actions.
ACTIONS = ("F", "B", "I", "W")
#: What a rank computes, in words, in the order of legends and tables.
KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
    "reduce": "sums of gradients",
}
#: What goes on beside that.
TRANSFERS = ("send", "receive")
#: Red, green, blue: the palette of Okabe and Ito (2008), told apart by the colour-blind too.
COLOURS = {
    "F": (0, 114, 178),
    "B": (230, 159, 0),
    "I": (213, 94, 0),
    "W": (0, 158, 115),
    "reduce": (153, 153, 153),
    "send": (86, 180, 233),
    "receive": (204, 121, 167),
}


@dataclass(frozen=True)
class Event:
    """Something that one rank does from ``start`` to ``end``, in seconds.

    ``kind``: "F", "B", "I", "W", "reduce", "send", "receive", "idle". ``stage`` and ``microbatch``
    are -1 where there is none.
    """

    rank: int
    kind: str
    label: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Events of a step on so many ranks; ``name`` is that of its schedule.

    ``note`` stands in titles, such as "predicted" or "measured".
    """

    events: tuple[Event, ...]
    ranks: int
    name: str
    note: str = ""

    @property
    def total(self) -> float:
        """Seconds from 0 to the end of the last event."""
        return max((event.end for event in self.events), default=0.0)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank runs, in order."""
        found: list[set[int]] = [set() for _ in range(self.ranks)]
        for event in self.events:
            if event.kind in ACTIONS:
                found[event.rank].add(event.stage)
        return tuple(tuple(sorted(stages)) for stages in found)

    def busy(self, rank: int, kinds: Iterable[str] = tuple(KINDS)) -> float:
        """Seconds in which a rank computes, or does what is of some kinds; what it does twice at
        once counts once."""
        kinds = set(kinds)
        spans = [(e.start, e.end) for e in self.events if e.rank == rank and e.kind in kinds]
        length, reached = 0.0, -math.inf
        for start, end in sorted(spans):
            length += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return length

    def table(self, format: str = "simple") -> str:
        """Seconds of each rank by kind, and idle; ``format`` is one of tabulate's."""
        kinds = [kind for kind in (*KINDS, *TRANSFERS) if any(e.kind == kind for e in self.events)]
        rows = []
        for rank in range(self.ranks):
            idle = self.total - self.busy(rank)
            spent = [self.busy(rank, [kind]) for kind in kinds]
            share = idle / self.total if self.total else 0.0
            rows.append([rank, *(f"{s:.4g}" for s in (*spent, idle)), f"{share:.1%}"])
        headers = ["rank", *(f"{kind} (s)" for kind in (*kinds, "idle")), "idle"]
        return tabulate(
            rows, headers, tablefmt=format, disable_numparse=True, colalign=["right"] * len(headers)
        )

    def svg(self) -> str:
        """A picture as one self-contained SVG document: a row for each rank, colours for kinds."""
        return "\n".join(_picture(self))

    def chrome_trace(self) -> str:
        """JSON that chrome://tracing and Perfetto open: a thread for each rank, and rows of their
        own for transfers and for sums of gradients, which go on beside it."""
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(_trace(self))})

    def save(self, path: str | Path) -> None:
        """Write ``svg`` or ``chrome_trace`` to a file, as its name ends in .svg or .json.

        Raises AutoshardError for other names.
        """
        path = checked(path)
        text = self.svg() if path.suffix == ".svg" else self.chrome_trace()
        path.write_text(text, encoding="utf-8")


def checked(path: str | Path) -> Path:
    """A file that a timeline can be saved as. Raises AutoshardError."""
    path = Path(path)
    if path.suffix in (".svg", ".json") and path.parent.is_dir():
        return path
    raise AutoshardError(
        message(
            "Timeline.save",
            "the file",
            repr(str(path)),
            "the suffix says what is written, .svg a picture or .json a trace, into a folder that "
            "there is",
            "give a name that ends in .svg or .json, in a folder that exists",
        )
    )


# --- the bubble and its published size ---


def bubble(timeline: Timeline) -> float:
    """The share of time in which ranks do nothing: idle time / (ranks * total time)."""
    whole = timeline.ranks * timeline.total
    busy = sum(timeline.busy(rank) for rank in range(timeline.ranks))
    return 1 - busy / whole if whole else 0.0


@dataclass(frozen=True)
class Formula:
    """The published bubble of a schedule.

    ``share`` of the time of all ranks; ``text`` says how it is got, ``holds`` when ("" for always),
    ``source`` where it is published. ``exact``: a dry run of even stages with free transfers gives
    just this.
    """

    share: float
    text: str
    holds: str
    source: str
    exact: bool


@dataclass(frozen=True)
class _Published:
    """A formula for any size: ``idle`` seconds for each rank but one, of times F, I, W, and
    whether it is ``exact``, of p, m, F, I, W."""

    idle: Callable[[float, float, float], float]
    text: str
    source: str
    holds: str = ""
    exact: Callable[[int, int, float, float, float], bool] = lambda p, m, f, i, w: True


PUBLISHED = {
    "gpipe": _Published(
        lambda f, i, w: f + i + w,
        "(p-1)/(m+p-1)",
        "Huang et al. 2019, arXiv:1811.06965",
    ),
    "1f1b": _Published(
        lambda f, i, w: f + i + w,
        "(p-1)/(m+p-1)",
        "Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1",
    ),
    "interleaved": _Published(
        lambda f, i, w: f + i + w,
        "(p-1)/(vm+p-1)",
        "Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2",
        "for m >= p",
        lambda p, m, f, i, w: m >= p,
    ),
    "zb": _Published(
        lambda f, i, w: f + i - w,
        "x/(m(F+I+W)+x), x=(p-1)(F+I-W)",
        "ZB-H1 of Qi et al. 2023, arXiv:2401.10241, section 2",
        "for m >= p, W <= F, W <= I",
        lambda p, m, f, i, w: m >= p and w <= f and w <= i,
    ),
    # The report's (PP/2-1)(F&B+B-3W) with PP = 2p stages. F&B is a forward and a backward that
    # overlap. One after the other they take F+B, but then no rank has to wait for both, and what
    # is left is (p-1)(F+I-W) where W <= I <= F <= 2I.
    "dualpipev": _Published(
        lambda f, i, w: f + 2 * i - w,
        "x/(2m(F+I+W)+x), x=(p-1)(F&B+B-3W), F&B=F+B",
        "DualPipe of DeepSeek-V3, arXiv:2412.19437, section 3.2.1",
        "at most, for m >= 2p, W <= I, F <= B",
        lambda p, m, f, i, w: p == 1,
    ),
}


def formula(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    F: float = 1.0,
    I: float = 1.0,  # noqa: E741 (the letters are those of the papers)
    W: float = 1.0,
) -> Formula:
    """The published bubble of a schedule whose stages all take F, I and W seconds a micro-batch.

    In the texts p is ranks, m micro-batches, v chunks (stages a rank), B = I + W. All are
    idle / (work + idle) of a rank, with work = vm(F+I+W). ShardingError for an unknown name.

    >>> formula("1f1b", 4, 8).text, round(formula("1f1b", 4, 8).share, 4)
    ('(p-1)/(m+p-1)', 0.2727)
    """
    if name not in PUBLISHED:
        raise ShardingError(
            message(
                "formula",
                "the schedule's name",
                repr(name),
                "no bubble is published for it",
                f"use one of {', '.join(PUBLISHED)}",
            )
        )
    found = PUBLISHED[name]
    idle = (ranks - 1) * max(0.0, found.idle(F, I, W))
    share = idle / (chunks * microbatches * (F + I + W) + idle)
    exact = found.exact(ranks, microbatches, F, I, W)
    return Formula(share, found.text, found.holds, found.source, exact)


def bubble_line(timeline: Timeline) -> str:
    """The bubble of a timeline beside its published size, for the mean times of F, I and W.

    A whole B counts as half I, half W where no backward is split. A schedule of another name has no
    published size.
    """
    line = f"bubble {bubble(timeline):.1%}"
    actions = [event for event in timeline.events if event.kind in ACTIONS]
    if timeline.name not in PUBLISHED or not any(e.end > e.start for e in actions):
        return line
    spent: dict[str, list[float]] = defaultdict(list)
    for event in actions:
        spent[event.kind].append(event.end - event.start)
    mean = {kind: statistics.fmean(times) for kind, times in spent.items()}
    half = mean.get("B", 0.0) / 2
    found = formula(
        timeline.name,
        timeline.ranks,
        1 + max(event.microbatch for event in actions),
        max(map(len, timeline.stages)),
        mean.get("F", 0.0),
        mean.get("I", half),
        mean.get("W", half),
    )
    condition = f" ({found.holds})" if not found.exact else ""
    return f"{line}; formula {found.text} = {found.share:.1%}{condition}"


def compare(predicted: Timeline, measured: Timeline, format: str = "simple") -> str:
    """A small table of two timelines: seconds in all, seconds a rank computes, the bubble."""

    def busy(timeline: Timeline) -> float:
        return statistics.fmean(timeline.busy(rank) for rank in range(timeline.ranks))

    rows = []
    for what, of, style in (
        ("total (s)", lambda timeline: timeline.total, ".4g"),
        ("computing, mean of ranks (s)", busy, ".4g"),
        ("bubble", bubble, ".1%"),
    ):
        a, b = of(predicted), of(measured)
        rows.append([what, f"{a:{style}}", f"{b:{style}}", f"{b / a:.3f}" if a else "-"])
    headers = ["", "predicted", "measured", "measured / predicted"]
    return tabulate(
        rows,
        headers,
        tablefmt=format,
        disable_numparse=True,
        colalign=["left", "right", "right", "right"],
    )


def _title(timeline: Timeline) -> str:
    return timeline.name + (f", {timeline.note}" if timeline.note else "")


# --- the trace ---


def _trace(timeline: Timeline) -> Iterator[dict[str, object]]:
    """Events of the trace format: X fills a thread's row, b and e make a row of their own."""
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": _title(timeline)}}
    for rank in range(timeline.ranks):
        thread = {"ph": "M", "pid": 0, "tid": rank}
        yield thread | {"name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield thread | {"name": "thread_sort_index", "args": {"sort_index": rank}}
    for number, event in enumerate(timeline.events):
        if event.kind == "idle":
            continue
        place = {"pid": 0, "tid": event.rank, "cat": event.kind}
        place["args"] = {"stage": event.stage, "microbatch": event.microbatch}
        start, end = event.start * 1e6, event.end * 1e6  # microseconds
        if event.kind in ACTIONS:
            yield place | {"ph": "X", "name": event.label, "ts": start, "dur": end - start}
            continue
        beside = place | {"name": f"rank {event.rank} {event.kind} {event.label}", "id": number}
        yield beside | {"ph": "b", "ts": start}
        yield beside | {"ph": "e", "ts": end}


# --- the picture ---

LEFT, TOP, BAR, STRIP, GAP = 64, 64, 28, 5, 8  # pixels


def _shade(kind: str, chunk: int, chunks: int) -> tuple[int, int, int]:
    """The colour of a kind, the lighter the later the stage among those of its rank."""
    white = 0.55 * chunk / max(1, chunks - 1)
    red, green, blue = (round(c + (255 - c) * white) for c in COLOURS.get(kind, COLOURS["reduce"]))
    return red, green, blue


def _ink(colour: tuple[int, int, int]) -> str:
    """Black or white, whichever stands out more from a colour (relative luminance of WCAG 2)."""
    linear = [(c / 255) ** 2.2 for c in colour]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#fff" if light < 0.18 else "#000"


def _box(x: float, y: float, width: float, height: float, colour: tuple[int, int, int]) -> str:
    fill = "#{:02x}{:02x}{:02x}".format(*colour)
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height}" fill="{fill}" '
        'stroke="#fff" stroke-width="0.6"'
    )


def _text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def _ticks(total: float) -> tuple[list[float], float, str]:
    """Times of about ten marks at round steps, and the unit in which they read best."""
    scale, unit = next(
        (pair for pair in ((1.0, "s"), (1e-3, "ms")) if total >= pair[0]), (1e-6, "µs")
    )
    rough = total / scale / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * 0.999)
    count = math.floor(total / scale / step * 1.001)
    return [i * step * scale for i in range(count + 1)], scale, unit


def _picture(timeline: Timeline) -> Iterator[str]:
    """The lines of an SVG document."""
    total = timeline.total or 1.0
    shown = [e for e in timeline.events if e.kind != "idle" and e.end > e.start]
    bars = [e for e in shown if e.kind not in TRANSFERS]
    strips = 2 * STRIP if len(bars) < len(shown) else 0
    # Wide enough for most labels of the shortest kind, within bounds.
    spent: dict[str, list[float]] = defaultdict(list)
    for event in bars:
        spent[event.kind].append(event.end - event.start)
    short = min(map(statistics.median, spent.values()), default=total)
    wide = min(max(900.0, 24 * total / short), 6000.0)
    pixels = wide / total
    row = BAR + strips + GAP
    floor = TOP + timeline.ranks * row
    width, height = wide + LEFT + 40, floor + 74
    title = _title(timeline)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="11">'
    )
    yield f"<title>{escape(title)}</title>"
    yield f'<rect width="{width:.0f}" height="{height}" fill="#fff"/>'
    size = f"{timeline.ranks} ranks, {sum(map(len, timeline.stages))} stages"
    yield _text(LEFT, 24, f"{title}: {size}", more=' font-size="16" font-weight="bold"')
    yield _text(LEFT, 44, bubble_line(timeline), more=' font-size="13"')
    for rank in range(timeline.ranks):
        y = TOP + rank * row
        yield (
            f'<rect x="{LEFT}" y="{y}" width="{wide:.2f}" height="{BAR + strips}" fill="none" '
            'stroke="#bbb" stroke-width="0.6"/>'
        )
        yield _text(LEFT - 8, y + BAR / 2 + 4, f"rank {rank}", "end", ' font-size="12"')
    for event in shown:
        yield from _drawn(timeline, event, LEFT + event.start * pixels, pixels, row)
    yield f'<path d="M{LEFT} {floor} h{wide:.2f}" stroke="#000"/>'
    times, scale, unit = _ticks(total)
    for time in times:
        x = LEFT + time * pixels
        yield f'<path d="M{x:.2f} {floor} v4" stroke="#000"/>'
        yield _text(x, floor + 16, f"{time / scale:g}", "middle")
    yield _text(LEFT + wide + 6, floor + 16, f" {unit}")
    yield from _legend(timeline, {e.kind for e in shown}, floor + 40)
    yield "</svg>"


def _drawn(timeline: Timeline, event: Event, x: float, pixels: float, row: int) -> Iterator[str]:
    """The box of an event, its label where there is room, and what shows under the pointer."""
    y = TOP + event.rank * row
    width = (event.end - event.start) * pixels
    about = f"{event.kind} {event.label}: {event.start:.6g} to {event.end:.6g} s"
    hint = f"><title>{escape(about)}</title></rect>"
    if event.kind in TRANSFERS:
        y += BAR + (STRIP if event.kind == "receive" else 0)
        yield _box(x, y, width, STRIP, _shade(event.kind, 0, 1)) + hint
        return
    stages = timeline.stages[event.rank]
    chunk = stages.index(event.stage) if event.stage in stages else 0
    colour = _shade(event.kind, chunk, len(stages))
    yield _box(x, y, width, BAR, colour) + hint
    number = str(event.microbatch) if event.microbatch >= 0 else ""
    for label in (event.label, number):
        if label and 6.5 * len(label) + 2 <= width:
            ink = f' fill="{_ink(colour)}" pointer-events="none"'
            yield _text(x + width / 2, y + BAR / 2 + 4, label, "middle", ink)
            return


def _legend(timeline: Timeline, kinds: set[str], y: float) -> Iterator[str]:
    """What the colours mean, shades of several stages a rank included."""
    chunks = max(map(len, timeline.stages), default=1)
    x = float(LEFT)
    for kind in (*KINDS, *TRANSFERS):
        if kind not in kinds:
            continue
        shades = range(chunks) if kind in ACTIONS else range(1)
        for chunk in shades:
            yield _box(x, y, 14, 14, _shade(kind, chunk, len(shades))) + "/>"
            x += 15
        words = f"{kind}: {KINDS[kind]}" if kind in ACTIONS else KINDS.get(kind, kind)
        yield _text(x + 4, y + 11, words)
        x += 20 + 6.2 * len(words)
    words = "white: idle"
    if chunks > 1:
        words += "; the lighter, the later the stage on its rank"
    yield _text(x, y + 11, words)
