"""Write the README's tables of architectures and of strategy combinations from test results.

pytest --slow tests/test_zoo.py --junitxml results.xml
python tests/readme_tables.py results.xml
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tabulate import tabulate
from zoo import TYPES

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- architectures:begin -->", "<!-- architectures:end -->"
MESHES = ("tp=2", "tp=4", "dp=4", "dp=2,tp=2")
COMBINATIONS = {
    "data parallel": [("dp=4", True)],
    "tensor parallel": [("tp=2", False), ("tp=4", False)],
    "tensor + sequence parallel": [("tp=2", True), ("tp=4", True)],
    "data + tensor parallel": [("dp=2,tp=2", False)],
    "data + tensor + sequence parallel": [("dp=2,tp=2", True)],
}
Key = tuple[str, str, bool]


def read(path: str) -> tuple[dict[Key, bool], dict[str, int], dict[str, str]]:
    """Passed or not by (model, mesh, sequence parallel); fallback ops; why a model was refused."""
    passed: dict[Key, bool] = {}
    fallbacks: dict[str, int] = {}
    refused: dict[str, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        found = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
        if "model" not in found:
            continue
        kind = found["model"]
        failed = case.find("failure") is not None or case.find("error") is not None
        key = (kind, found["mesh"], found["sequence"] == "True")
        passed[key] = passed.get(key, True) and not failed and "refused" not in found
        if "refused" in found:
            refused[kind] = found["refused"]
        if "fallbacks" in found:
            fallbacks[kind] = max(fallbacks.get(kind, 0), int(found["fallbacks"]))
    return passed, fallbacks, refused


def cell(passed: dict[Key, bool], kind: str, mesh: str) -> str:
    """With sequence parallelism / without (one sign for a mesh that has no tp)."""
    options = (True, False) if "tp" in mesh else (True,)
    results = [passed.get((kind, mesh, sp)) for sp in options]
    return " / ".join({None: "?", True: "yes", False: "NO"}[r] for r in results)


def tables(path: str) -> str:
    passed, fallbacks, refused = read(path)
    rows = [
        [kind, *(cell(passed, kind, m) for m in MESHES), fallbacks.get(kind, "?")] for kind in TYPES
    ]
    architectures = tabulate(
        rows, headers=["architecture", *MESHES, "fallback ops"], tablefmt="github"
    )
    counted = []
    for name, cases in COMBINATIONS.items():
        results = [passed.get((kind, *case), False) for kind in TYPES for case in cases]
        meshes = ", ".join(mesh for mesh, _ in cases)
        counted.append([name, meshes, f"{sum(results)} of {len(results)}"])
    combinations = tabulate(counted, headers=["strategies", "meshes", "equal"], tablefmt="github")
    others = sorted({kind for kind, *_ in passed} - set(TYPES))
    work = [k for k in others if passed[k, "dp=2,tp=2", True]]
    lines = [
        "With sequence parallelism / without. `yes`: loss, outputs, every gradient, the clip norm",
        "and every parameter after two AdamW steps agree with one device to 1e-9 in float64.",
        "",
        architectures,
        "",
        combinations,
        "",
        f"Of the {len(others)} other causal language models of transformers 5.24 that the tests",
        f"build, {len(work)} agree on `dp=2,tp=2` with sequence parallelism. The others are",
        "refused by name:",
        "",
        *(f"* `{k}`: {_short(refused[k])}" for k in others if k in refused),
    ]
    return "\n".join(lines)


def _short(text: str) -> str:
    first, _, rest = text.partition("\n")
    why = re.search(r"why: (.*)", rest)
    place = re.sub(r"^pass \d+ of \d+, \w+: ", "", first)
    reason = re.sub(r" at /\S*?/site-packages/", " at ", why[1] if why else "")
    return f"{place[:140]} ({reason[:200]})"


def main() -> None:
    text = README.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n\n{tables(sys.argv[1])}\n\n{END}{after}")


if __name__ == "__main__":
    main()
