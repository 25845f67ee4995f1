"""What each micro-batch adds to a loss.

Backward of one micro-batch can begin before the others have run where the loss is a sum over
micro-batches: of sums over them, times what all of them have in common, and of terms of parameters
alone, which count once. What a micro-batch adds has then the loss's own gradients:

    loss = total(a) / n * v + norm(w)        adds        a / n * v + in_first(norm(w))

A sum over ranks hands its gradient on as it is, and is left out, but where it meets a parameter:
the gradient of that needs the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from torch import fx

from autoshard.collectives import CONVERSIONS, TABLE, scale_gradient
from autoshard.outline import RECOMPUTE
from autoshard.rules import op_name
from autoshard.runtime.turns import in_first, total

#: Linear in their first argument.
LINEAR = frozenset(
    """neg positive clone contiguous alias detach sum mean view reshape _unsafe_view squeeze
    unsqueeze permute transpose t expand flatten unflatten select slice to _to_copy
    type_as""".split()
)
#: Linear in all tensors together.
ADDITIVE = frozenset("add sub cat stack".split())


@dataclass
class Summands:
    """Of one graph. ``late``: what is made of all micro-batches at once; ``fixed``: whether a node
    has one value for all of them and no gradient; ``once``: whether it has one and is made of
    parameters."""

    late: Set[fx.Node]
    fixed: Callable[[fx.Node], bool]
    once: Callable[[fx.Node], bool]
    made: dict[tuple[fx.Node, bool], fx.Node] = field(default_factory=dict)

    def breaks(self, loss: fx.Node) -> list[fx.Node]:
        """Where a loss stops being a sum over micro-batches: none where it is one."""
        found, seen, left = list[fx.Node](), set[fx.Node](), [loss]
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            if not self._is_linear(node):
                found.append(node.args[0] if node.target is total else node)
            elif node.target is not total:
                left += [n for n in node.all_input_nodes if n in self.late]
        return sorted(found)

    def _is_linear(self, node: fx.Node) -> bool:
        first, *others = node.all_input_nodes
        kind = op_name(node.target)
        if node.target is total:
            return first not in self.late
        if node.target in CONVERSIONS or node.target is scale_gradient or kind in LINEAR:
            return first in self.late and self.late.isdisjoint(others)
        common = [n for n in (first, *others) if self.fixed(n) or self.once(n)]
        if kind in ADDITIVE:
            return all(n in self.late or n in common for n in (first, *others))
        if kind == "mul":
            return len(common) == len(others) and node.args[0] is not node.args[1]
        if kind == "div" and not node.kwargs.get("rounding_mode"):
            return node.args[0] in self.late and common == others
        return False

    def write(self, graph: fx.Graph, loss: fx.Node) -> fx.Node:
        """Put into the graph what a micro-batch adds to a loss that nothing breaks."""
        output = next(n for n in graph.nodes if n.op == "output")
        with graph.inserting_before(output):
            return self._write(graph, loss, False)

    def _write(self, graph: fx.Graph, node: fx.Node, summed: bool) -> fx.Node:
        """``summed``: over ranks too."""
        if node.target is total:
            return node.args[0]  # type: ignore[return-value]
        if is_sum_of_ranks(node) and not summed:
            return self._write(graph, node.args[0], False)  # type: ignore[arg-type]
        if (node, summed) not in self.made:
            adds = op_name(node.target) in ADDITIVE
            meets = not adds and any(map(self.once, node.all_input_nodes))

            def inside(n: fx.Node) -> fx.Node:
                if n in self.late:
                    return self._write(graph, n, summed or meets)
                return graph.call_function(in_first, (n,)) if adds and self.once(n) else n

            read = {n: inside(n) for n in node.all_input_nodes}
            made = graph.node_copy(node, read.__getitem__)
            made.meta.pop(RECOMPUTE, None)
            self.made[node, summed] = made
        return self.made[node, summed]


def is_sum_of_ranks(node: fx.Node) -> bool:
    """Whether a node sums over ranks what each has computed, and hands its gradient on as it is."""
    kind = TABLE.get(CONVERSIONS.get(node.target, ""))  # type: ignore[call-overload]
    return kind is not None and (kind.forward, kind.backward) == ("sum", "identity")
