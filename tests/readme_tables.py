"""Write the README's tables of architectures and of strategy combinations from test results.

pytest --slow tests/test_zoo.py --junitxml results.xml
python tests/readme_tables.py results.xml

What a part of the tests (``-k with_ep``) does not tell stays as it is there.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from tabulate import tabulate
from zoo import (
    AUXILIARY,
    CONTEXTS,
    EXPERT_MESHES,
    MIXED_EXPERT_MESHES,
    MIXED_MESHES,
    MIXTURES,
    PIPELINED,
    RECOMPUTED,
    SCHEDULES,
    TYPES,
    Case,
    stages_of_zero,
)

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- architectures:begin -->", "<!-- architectures:end -->"
MESHES = ("tp=2", "tp=4", "dp=4", "dp=2,tp=2")
ZERO_MESHES, STAGES = ("dp=4", "dp=2,tp=2"), (1, 2, 3)
#: Meshes that cut tokens through attention, and the ZeRO stage on them.
CONTEXT_MESHES = (("cp=2", 0), ("cp=4", 0), ("cp=2,tp=2", 0), ("dp=2,cp=2", 0), ("cp=2", 3))
#: The mesh on which all architectures are in stages.
STAGED = "pp=2"
#: Strategies -> what every case to count is made of, after its architecture.
COMBINATIONS: dict[str, list[tuple[Any, ...]]] = {
    "data parallel": [("dp=4", True, 0, "none")],
    "tensor parallel": [("tp=2", False, 0, "none"), ("tp=4", False, 0, "none")],
    "tensor + sequence parallel": [("tp=2", True, 0, "none"), ("tp=4", True, 0, "none")],
    "data + tensor parallel": [("dp=2,tp=2", False, 0, "none")],
    "data + tensor + sequence parallel": [("dp=2,tp=2", True, 0, "none")],
}
for mesh, strategies in zip(
    ZERO_MESHES, ("data parallel", "data + tensor + sequence parallel"), strict=True
):
    for stage in STAGES:
        name = f"{strategies}, ZeRO {stage}, accumulation"
        COMBINATIONS[name] = [(mesh, True, stage, "none")]
    COMBINATIONS[f"{name}, recompute"] = [(mesh, True, 3, "block")]
for strategies, on in (
    ("context parallel", CONTEXT_MESHES[:2]),
    ("context + tensor + sequence parallel", CONTEXT_MESHES[2:3]),
    ("data + context parallel", CONTEXT_MESHES[3:4]),
    ("context parallel, ZeRO 3, accumulation", CONTEXT_MESHES[4:]),
):
    for way in CONTEXTS:
        cases = [(mesh, True, stage, "none", way) for mesh, stage in on]
        COMBINATIONS[f"{strategies}, {way}"] = cases
for strategies, on in (
    ("expert parallel", EXPERT_MESHES[:2]),
    ("data + expert parallel", EXPERT_MESHES[2:3]),
    ("expert + tensor + sequence parallel", EXPERT_MESHES[3:4]),
    ("context + expert parallel", EXPERT_MESHES[4:5]),
    ("expert parallel, ZeRO 3, accumulation", EXPERT_MESHES[5:]),
):
    for auxiliary in (False, True):
        name = f"{strategies}, loss of routers" if auxiliary else strategies
        COMBINATIONS[name] = [(mesh, True, stage, "none", "ring", auxiliary) for mesh, stage in on]
WITH_STAGES = ("none", "ring", False)
COMBINATIONS["pipeline"] = [(STAGED, True, 0, *WITH_STAGES)]
for schedule, meshes in SCHEDULES.items():
    name = f"pipeline of 4 layers, {schedule}"
    COMBINATIONS[name] = [(mesh, True, 0, *WITH_STAGES, schedule) for mesh in meshes]
COMBINATIONS["pipeline, gpipe, loss of routers"] = [
    (STAGED, True, 0, "none", "ring", True, "gpipe")
]
NAMES = {"dp": "data", "cp": "context", "ep": "expert", "tp": "tensor + sequence"}
for mesh in (*MIXED_MESHES, *MIXED_EXPERT_MESHES):
    strategies = " + ".join(["pipeline", *(NAMES[m] for m in NAMES if f"{m}=" in mesh)])
    for stage in stages_of_zero(mesh):
        name = f"{strategies} parallel" + (f", ZeRO {stage}, accumulation" if stage else "")
        COMBINATIONS[name] = [(mesh, True, stage, *WITH_STAGES)]
COMBINATIONS["pipeline + data parallel, ZeRO 3, accumulation, recompute"] = [
    ("pp=2,dp=2", True, 3, "block")
]
WITHOUT_EXPERTS = "data parallel over ep, without experts"
COMBINATIONS[WITHOUT_EXPERTS] = [("ep=2",), ("dp=2,ep=2",)]
SIGNS = {None: "?", True: "yes", False: "NO"}
#: What the other models are tried on: what is said of them, and the rest of the case.
OTHERS: dict[str, tuple[Any, ...]] = {
    "agree": (
        "other causal language models of transformers 5.24 that the tests build",
        "on `dp=2,tp=2` with sequence parallelism and ZeRO 3",
        *("dp=2,tp=2", True, 3, "none"),
    ),
    "have all their experts cut and agree": (
        "other causal language models with experts of transformers 5.24 that the tests build",
        "on `ep=2`",
        "ep=2",
    ),
}


def read(path: str) -> tuple[dict[Case, bool], dict[str, int], dict[Case, str]]:
    """Passed or not by case; fallback ops by architecture; why a case was refused."""
    passed: dict[Case, bool] = {}
    fallbacks: dict[str, int] = {}
    refused: dict[Case, str] = {}
    for test in ElementTree.parse(path).iter("testcase"):
        found = {p.get("name", ""): p.get("value", "") for p in test.iter("property")}
        if "kind" not in found:
            continue
        case = Case(
            found["kind"],
            found["mesh"],
            found["sequence_parallel"] == "True",
            int(found["zero"]),
            found["recompute"],
            found["context"],
            found["auxiliary"] == "True",
            found["schedule"],
        )
        failed = test.find("failure") is not None or test.find("error") is not None
        passed[case] = passed.get(case, True) and not failed and "refused" not in found
        if "refused" in found:
            refused[case] = found["refused"]
        if "fallbacks" in found:
            fallbacks[case.kind] = max(fallbacks.get(case.kind, 0), int(found["fallbacks"]))
    return passed, fallbacks, refused


def signs(passed: dict[Case, bool], refused: dict[Case, str], cases: list[Case]) -> str:
    if cases and all(case in refused for case in cases):
        return "refused"
    return " / ".join(SIGNS[passed.get(case)] for case in cases)


def row(passed: dict[Case, bool], refused: dict[Case, str], kind: str) -> list[str]:
    """With sequence parallelism / without (one sign for a mesh that has no tp); then stages of
    ZeRO; then the ways of context parallelism; then a pipeline."""
    plain = [
        [Case(kind, mesh, sp) for sp in ((True, False) if "tp" in mesh else (True,))]
        for mesh in MESHES
    ]
    stages = [[Case(kind, mesh, zero=stage) for stage in STAGES] for mesh in ZERO_MESHES]
    ways = [
        [Case(kind, mesh, zero=stage, context=way) for way in CONTEXTS]
        for mesh, stage in CONTEXT_MESHES
    ]
    cells = [*plain, *stages, *ways, [Case(kind, STAGED)]]
    return [kind, *(signs(passed, refused, cases) for cases in cells)]


def row_of_mixture(passed: dict[Case, bool], refused: dict[Case, str], kind: str) -> list[str]:
    """Without the loss of routers / with it, where the model has one."""
    losses = (False, True) if kind in AUXILIARY else (False,)
    cells = [
        [Case(kind, mesh, zero=stage, auxiliary=auxiliary) for auxiliary in losses]
        for mesh, stage in EXPERT_MESHES
    ]
    return [kind, *(signs(passed, refused, cases) for cases in cells)]


def row_of_pipeline(passed: dict[Case, bool], refused: dict[Case, str], kind: str) -> list[str]:
    """Every schedule, on all that it is tried on."""
    cells = [
        [Case(kind, mesh, schedule=schedule) for mesh in meshes]
        for schedule, meshes in SCHEDULES.items()
    ]
    return [kind, *(signs(passed, refused, cases) for cases in cells)]


def counted_kinds(name: str, options: list[tuple[Any, ...]]) -> list[str]:
    """The architectures that a row of strategies counts."""
    if name == WITHOUT_EXPERTS:
        return [kind for kind in TYPES if kind not in MIXTURES]
    case = Case("", *options[0])
    if case.auxiliary:
        return list(AUXILIARY)
    if "ep" in case.mesh:
        return list(MIXTURES)
    if "pp" in case.mesh and name != "pipeline":
        return list(PIPELINED)
    return list(RECOMPUTED) if case.recompute != "none" else TYPES


def with_stage(mesh: str, stage: int) -> str:
    return f"{mesh}, ZeRO {stage}" if stage else mesh


def cells_of(text: str) -> dict[tuple[str, str], str]:
    """The cells of the tables in a text, by the first cell of their row and the column's header."""
    found: dict[tuple[str, str], str] = {}
    headers: list[str] = []
    for line in text.splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")] if line.startswith("|") else []
        for header, cell in zip(headers, cells, strict=False):
            found[cells[0], header] = cell
        headers = cells if not headers or not cells else headers
    return found


def kept(rows: list[list[Any]], headers: list[str], old: dict[tuple[str, str], str]) -> Any:
    """The rows, with what no result tells as it was before."""
    for row in rows:
        for at, cell in enumerate(row):
            if str(cell).startswith("? of") or set(str(cell)) <= set("?/ "):
                row[at] = old.get((row[0], headers[at]), cell)
    return rows


def tables(path: str, before: str = "") -> str:
    """The tables of a file of results. ``before``: those of earlier ones, for what it does not
    tell."""
    passed, fallbacks, refused = read(path)
    old = cells_of(before)
    stages = " / ".join(map(str, STAGES))
    headers = ["architecture", *MESHES, *(f"{mesh}, ZeRO {stages}" for mesh in ZERO_MESHES)]
    headers += [with_stage(*each) for each in CONTEXT_MESHES]
    headers += [STAGED, "fallback ops"]
    rows = [[*row(passed, refused, kind), fallbacks.get(kind, "?")] for kind in TYPES]
    architectures = tabulate(kept(rows, headers, old), headers=headers, tablefmt="github")
    headers = ["mixtures of experts", *(with_stage(*each) for each in EXPERT_MESHES)]
    rows = [row_of_mixture(passed, refused, kind) for kind in MIXTURES]
    mixtures = tabulate(kept(rows, headers, old), headers=headers, tablefmt="github")
    headers = ["schedules", *(f"{name}, {' / '.join(on)}" for name, on in SCHEDULES.items())]
    rows = [row_of_pipeline(passed, refused, kind) for kind in PIPELINED]
    pipelines = tabulate(kept(rows, headers, old), headers=headers, tablefmt="github")
    counted = []
    for name, options in COMBINATIONS.items():
        kinds = counted_kinds(name, options)
        results = [passed.get(Case(kind, *each)) for kind in kinds for each in options]
        meshes = " and ".join(mesh for mesh, *_ in options)
        equal = "?" if set(results) == {None} else results.count(True)
        counted.append([name, meshes, f"{equal} of {len(results)}"])
    headers = ["strategies", "meshes", "equal"]
    combinations = tabulate(kept(counted, headers, old), headers=headers, tablefmt="github")
    lines = [
        "Columns of a mesh: with sequence parallelism / without, and no ZeRO. Columns of ZeRO: its",
        "stages, with sequence parallelism and the gradients of two batches added up a step.",
        f"Columns of a mesh with cp: {' / '.join(CONTEXTS)}; `refused`: by name, and none of them.",
        "`yes`: loss, outputs, every gradient, the clip norm and every parameter after two AdamW",
        "steps agree with one device to 1e-9 in float64.",
        "",
        architectures,
        "",
        "Experts cut over ep; on cp, keys travel round a ring. Columns of a mesh: without / with",
        "the loss of the routers (`output_router_logits`), where the model adds one.",
        "",
        mixtures,
        "",
        "Four layers in stages, in every order that there is; interleaved has two stages a rank.",
        "",
        pipelines,
        "",
        combinations,
        "",
    ]
    for many, (about, where, *case) in OTHERS.items():
        told = _others(many, about, where, case, passed, refused)
        lines += [told or _paragraph(before, about), ""]
    return "\n".join(lines).strip()


def _others(many: str, about: str, where: str, case: list[Any], passed: Any, refused: Any) -> str:
    """How many of the other architectures agree, and why not the rest."""
    cases = [c for c in passed if c.kind not in TYPES and c == Case(c.kind, *case)]
    if not cases:
        return ""
    work = [c for c in cases if passed[c]]
    why = {c.kind: refused[c] for c in cases if c in refused}
    head = f"Of the {len(cases)} {about}, {len(work)} {many} {where}."
    listed = [f"* `{kind}`: {_short(why[kind])}" for kind in sorted(why)]
    return "\n".join([head + (" Refused by name are:" if why else ""), "", *listed]).strip()


def _paragraph(text: str, about: str) -> str:
    """The part of a text that begins with how many there are of something."""
    found = re.search(rf"^Of the \d+ {re.escape(about)}.*?(?=\n\nOf the|\Z)", text, re.M | re.S)
    return found[0].strip() if found else ""


def _short(text: str) -> str:
    first, _, rest = text.partition("\n")
    why = re.search(r"why: (.*)", rest)
    place = re.sub(r"^pass \d+ of \d+, \w+: ", "", first)
    reason = re.sub(r" at /\S*?/site-packages/", " at ", why[1] if why else "")
    return f"{place[:140]} ({reason[:200]})"


def main() -> None:
    text = README.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n\n{tables(sys.argv[1], old)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
