"""Where a graph may be cut in two, from coarse to fine, and names for what is between cuts."""

from __future__ import annotations

import itertools
import os.path
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autoshard.flow import Flow
from autoshard.segments import Segment, begins, call_of, modules, segments


@dataclass
class Run:
    """The nodes from one position up to another. ``block``: the path of the module that they are
    of, "" for none; ``call``: which call of it."""

    block: str
    call: str
    start: int
    stop: int


class Cuts:
    """Runs of a graph that follow each other; every node is in one."""

    def __init__(self, flow: Flow):
        self.flow = flow
        self._stacks = [[path for path, _ in modules(n) if path] for n in flow.nodes]
        self._blocks = self._blocks_of_nodes()
        paths = [block.split(".") for block in dict.fromkeys(self._blocks)]
        #: modules that blocks are inside of
        self._above = {".".join(path[:end]) for path in paths for end in range(1, len(path))}
        heavy = (flow.is_heavy(n, 2) for n in flow.nodes)
        self._heavy = list(itertools.accumulate(heavy, initial=0))

    def levels(self) -> Iterator[list[Run]]:
        """Blocks; the modules inside them, one level deeper at a time; runs of ops that hand on one
        value; runs of ops."""
        for depth in range(1 + max(map(len, self._stacks), default=0)):
            yield self._settled([self._label(at, depth) for at in range(len(self._blocks))])
        for single in (True, False):
            yield self._ops(single)

    def _blocks_of_nodes(self) -> list[str]:
        """The path of every node's block, "" outside. A block that has others inside it is none,
        and neither is one with more than half of the cost, most of it in a list of modules."""
        found = segments(self.flow.program.graph)
        names = {s.name for s in found if s.block}
        outer = {name for name in names if any(n.startswith(f"{name}.") for n in names)}
        own = [s.name if s.block and s.name not in outer else "" for s in found]
        blocks = [name for name, s in zip(own, found, strict=True) for _ in s.nodes]
        while name := self._too_large(blocks):
            inner = [self._inner(at, name) if b == name else b for at, b in enumerate(blocks)]
            products = self._summed(inner, self._flops)
            held = [v for (b, _), v in products.items() if b.startswith(f"{name}.") and v]
            if len(held) < 2 or 2 * sum(held) < self._summed(blocks, self._flops)[name, name]:
                break
            blocks = inner
        return blocks

    def _flops(self, node: fx.Node) -> int:
        return self.flow.work[node].flops if self.flow.computes(node) else 0

    def _summed(self, blocks: list[str], of: Callable[[fx.Node], int]) -> Counter[tuple[str, str]]:
        """For every block, and every call of it, the sum over its nodes."""
        sums: Counter[tuple[str, str]] = Counter()
        for node, block in zip(self.flow.nodes, blocks, strict=True):
            sums[block, call_of(node, block) or block] += of(node)
        return sums

    def _too_large(self, blocks: list[str]) -> str:
        costs = self._summed(blocks, self.flow.cost)
        (block, call), most = costs.most_common(1)[0]
        return block if call == block and 2 * most > costs.total() else ""

    def _inner(self, at: int, block: str) -> str:
        """The outermost element of a list inside a block that a node is in."""
        inside = (p for p in self._stacks[at] if p.startswith(f"{block}."))
        return next((p for p in inside if p.rpartition(".")[2].isdigit()), "")

    def _label(self, at: int, depth: int) -> tuple[str, str] | None:
        """The module, so far inside the block, that a node is of, and which call of it; None where
        the node does not say."""
        node, block = self.flow.nodes[at], self._blocks[at]
        if not node.meta.get("nn_module_stack") and node.op != "output":
            return None
        stack = self._stacks[at]
        inside = [
            p for p in stack if (p.startswith(f"{block}.") if block else p not in self._above)
        ]
        path = inside[min(depth, len(inside)) - 1] if depth and inside else block
        return path, call_of(node, path) or ""

    def _settled(self, labels: Sequence[tuple[str, str] | None]) -> list[Run]:
        """Runs of nodes with one label, where they have something heavy; the others are joined with
        a neighbour."""
        runs: list[Run] = []
        for at, label in enumerate(labels):
            if not runs or label not in (None, (runs[-1].block, runs[-1].call)):
                runs.append(Run(*(label or ("", "")), at, at))
            runs[-1].stop = at + 1
        self._move_sums(runs)
        while len(runs) > 1 and (light := next(filter(self._is_light, runs), None)):
            self._join(runs, light)
            runs = _alike(runs)
        return self._open(runs)

    def _move_sums(self, runs: list[Run]) -> None:
        """A sum over ranks at the start of a block is of what was made before it."""
        for before, run in itertools.pairwise(runs):
            own = self.flow.nodes[run.start : run.stop]
            before.stop = run.start = self.flow.at[begins(Segment(run.block, True, own))]

    def _is_light(self, run: Run) -> bool:
        return self._heavy[run.start] == self._heavy[run.stop]

    def _join(self, runs: list[Run], light: Run) -> None:
        """Join a run with the neighbour that it exchanges more with; rather that before."""
        at, alive = runs.index(light), self.flow.alive
        last = at + 1 == len(runs)
        following = not at or (not last and alive[light.stop] > alive[light.start])
        runs.remove(light)
        if following:
            runs[at].start = light.start
        else:
            runs[at - 1].stop = light.stop

    def _open(self, runs: list[Run]) -> list[Run]:
        """Runs between which nothing but tensors is alive."""
        found: list[Run] = []
        for run in runs:
            if found and self.flow.closed[run.start]:
                found[-1].stop = run.stop
            else:
                found.append(run)
        return found

    def _ops(self, single: bool) -> list[Run]:
        """Runs that begin with a heavy op; those at which only one value is alive, or all."""
        flow = self.flow
        heavy = [at for at, node in enumerate(flow.nodes) if flow.is_heavy(node, 1)]
        starts = [at for at in heavy[1:] if not single or flow.count[at] == 1]
        firsts = [*heavy[:1], *starts]
        bounds = [0, *starts, len(flow.nodes)]
        names = [flow.nodes[at].name for at in firsts] or [""]
        pairs = zip(names, itertools.pairwise(bounds), strict=True)
        return self._open([Run(name, "", start, stop) for name, (start, stop) in pairs])

    def names(self, runs: list[Run]) -> list[str]:
        """A name for each run, see `autoshard.stages`."""
        above = [_list_of(block).split(".")[:-1] for block in dict.fromkeys(self._blocks) if block]
        prefix = ".".join(os.path.commonprefix(above))
        short = {r.block: r.block.removeprefix(f"{prefix}.") for r in runs}
        if len(set(short.values())) < len(short):
            short = {block: block for block in short}
        blocks = [re.sub(r"[^\w.]", "_", short[r.block]) for r in runs]
        seen: Counter[str] = Counter()
        found = []
        for at in range(len(runs)):
            name = blocks[at] or _gap_name(blocks, at)
            found.append(f"{name}@{seen[name]}" if seen[name] else name)
            seen[name] += 1
        return found


def _gap_name(blocks: list[str], at: int) -> str:
    if len(blocks) == 1:
        return "model"
    if at in (0, len(blocks) - 1):
        return "head" if at else "embed"
    before, after = blocks[at - 1], blocks[at + 1]
    same = _list_of(before) == _list_of(after)
    return f"{before if same else _list_of(before) or before}.tail"


def _alike(runs: list[Run]) -> list[Run]:
    """Neighbours of one block, in one call of it, as one."""
    found: list[Run] = []
    for run in runs:
        if found and (found[-1].block, found[-1].call) == (run.block, run.call):
            found[-1].stop = run.stop
        else:
            found.append(run)
    return found


def _list_of(block: str) -> str:
    """The list that a block is an element of: ``layers`` for ``layers.3``."""
    path, _, last = block.rpartition(".")
    return path if last.isdigit() else block
