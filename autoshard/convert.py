"""Conversions: a value in the layout in which an op reads it, made once and kept."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoshard import collectives
from autoshard.axes import Axis, Dim, atoms, dimension_of, leaves
from autoshard.errors import ShardingError, message
from autoshard.layout import I, Layout, P, R, levels
from autoshard.program import Program
from autoshard.writer import Value, Writer

aten = torch.ops.aten

#: The conversions between whole states, by these.
CONVERSION_KIND = {
    (kind.source, kind.target): name
    for name, kind in collectives.TABLE.items()
    if "S" not in (kind.source, kind.target)
}

#: What happens to the parts of a concatenation that the axis does not cut (they are replicated
#: there).
UNCUT_PART = {
    "all_gather_invariant": "invariant",
    "reduce_scatter": "all_reduce_replicate",
    "shard": "replicate",
}


class Converter(Writer):
    """A writer that puts in the collectives where a value is read in another layout."""

    def __init__(self, program: Program):
        super().__init__(program)
        self.layouts: dict[fx.Node, Any] = {}
        self.dims: dict[fx.Node, Any] = {}
        self.read_replicated: set[tuple[str, str]] = set()
        self.invariant_reads: list[tuple[fx.Node, str, str]] = []
        self.views: dict[Any, dict[Any, fx.Node]] = {}

    def wanted(self, value: Value, modes: dict[str, Any]) -> Layout:
        """The layout in which an op reads an operand."""
        own = {id(a) for d in value.dims for a in atoms(d)}
        target: Layout = {}
        for m, mode in modes.items():
            if isinstance(mode, Axis):
                target[m] = mode if id(mode) in own else R
            elif mode == P:
                target[m] = P if value.layout[m] == P else R
            else:
                target[m] = mode
        return target

    def convert(self, value: Value, target: Layout) -> fx.Node:
        """The value in another layout; made once per target."""
        if value.parameter:
            return self._read_parameter(value, target)
        if not value.grad:  # no gradient: invariant and replicated are the same thing
            target = {
                m: value.layout[m] if {s, value.layout[m]} <= {I, R} else s
                for m, s in target.items()
            }
        key = tuple(id(s) if isinstance(s, Axis) else s for s in target.values())
        known = self._converted(value)
        if key not in known:
            known[key] = self._convert(value, target)
        return known[key]

    def _converted(self, value: Value) -> dict[Any, fx.Node]:
        """What a value was converted to. Equal views of inputs and constants are one value: else
        every layer would cut RoPE's tables for itself, and keep its pieces for backward."""
        node = value.node
        if value.derived or value.grad or not getattr(node.target, "is_view", False):
            return value.converted
        return self.views.setdefault(
            (node.target, str(node.args), str(node.kwargs)), value.converted
        )

    def _read_parameter(self, value: Value, target: Layout) -> fx.Node:
        """A parameter read by cut work is R (its gradient is reduced once, later); read by
        invariant work it is I. Which of the two, or both, is settled after the walk."""
        node, layout, invariant = value.node, dict(value.layout), []
        for m, state in target.items():
            if layout[m] == state:
                if state == I and value.grad:
                    invariant.append(m)
            elif layout[m] == I and state == R:
                layout[m] = R
                self.read_replicated.add((value.parameter, m))
        for m in invariant:
            key = ("invariant", m, id(node))
            if key not in value.converted:
                new = self.emit_collective("invariant", node, (m,), 0, 0, value, layout)
                self.invariant_reads.append((new, value.parameter, m))
                value.converted[key] = new
            node = value.converted[key]
        if all(layout[m] is s or layout[m] == s for m, s in target.items()):
            return node
        temporary = Value(node, value.dims, layout, value.grad, True, value.itemsize)
        return self._convert(temporary, target)

    def settle_parameters(self) -> None:
        for node, name, m in self.invariant_reads:
            if (name, m) not in self.read_replicated:
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)
        for node, value in self.env.items():
            if isinstance(value, Value) and value.parameter and node.op == "placeholder":
                layout = dict(value.layout)
                for m in self.axes:
                    if (value.parameter, m) in self.read_replicated:
                        layout[m] = R
                self.program.values[value.parameter].layout = layout
                self.layouts[value.node] = layout

    def _convert(self, value: Value, target: Layout) -> fx.Node:
        """Gather what is to be whole, cut what is to be cut, then change what remains. What a group
        of mesh axes cut last becomes whole first (`levels`)."""
        node, layout = value.node, dict(value.layout)
        for axis in reversed(_cut_in(layout)):
            for group in reversed(_beyond(levels(layout, axis), levels(target, axis))):
                other = self._swapped(value, layout, target, axis, group)
                if other is None:
                    node = self._gather(node, value, layout, target, axis, group)
                else:
                    node = self._swap(node, value, layout, axis, other, group)
        for axis in _cut_in(target):
            for group in _beyond(levels(target, axis), levels(layout, axis)):
                node = self._cut(node, value, layout, axis, group)
        steps = [m for m in self.axes if not _same(layout[m], target[m])]
        node = self._change(node, value, layout, target, steps)
        if node is not value.node:
            self.dims[node], self.layouts[node] = value.dims, layout
        return node

    def _swapped(
        self, value: Value, layout: Layout, target: Layout, axis: Axis, group: tuple[str, ...]
    ) -> Axis | None:
        """The logical axis that is cut over a group of mesh axes in place of ``axis``, where one
        all-to-all does both: each is a factor of a dimension of its own."""
        other = target[group[0]]
        if not isinstance(other, Axis) or any(target[m] is not other for m in group):
            return None
        own = [leaves(d) for d in value.dims]
        apart = all(sum(a in d for d in own) == 1 for a in (axis, other))
        apart = apart and not any(axis in d and other in d for d in own)
        next_cut = levels(target, other) == (*levels(layout, other), group)
        return other if apart and next_cut and not self.mesh.zigzag(group) else None

    def _swap(
        self,
        node: fx.Node,
        value: Value,
        layout: Layout,
        axis: Axis,
        other: Axis,
        group: tuple[str, ...],
    ) -> fx.Node:
        """An all-to-all: a dimension becomes whole and another is cut, over the same ranks."""
        split: list[Dim] = []
        for dim in value.dims:
            split += [(a,) for a in leaves(dim)] or [()]
        before = self.sizes_of(tuple(split), layout)
        layout.update(dict.fromkeys(group, I))
        at, to = split.index((axis,)), split.index((other,))
        sizes = (self.size((axis,), layout), self.size((other,), layout))
        layout.update(dict.fromkeys(group, other))
        several = any(len(leaves(d)) > 1 for d in value.dims)
        if several:
            node = self.emit(self.source, aten.reshape.default, node, before)
        node = self.emit_collective("all_to_all", node, group, (at, to), sizes, value, layout)
        if several:
            after = self.sizes_of(value.dims, layout)
            node = self.emit(self.source, aten.reshape.default, node, after)
        return node

    def _gather(
        self,
        node: fx.Node,
        value: Value,
        layout: Layout,
        target: Layout,
        axis: Axis,
        over: tuple[str, ...],
    ) -> fx.Node:
        state = R if any(target[m] == R for m in over) else I
        kind = "all_gather" if state == R else "all_gather_invariant"
        node = self._along(kind, node, value, layout, axis, over)
        layout.update(dict.fromkeys(over, state))
        return node

    def _cut(
        self, node: fx.Node, value: Value, layout: Layout, axis: Axis, over: tuple[str, ...]
    ) -> fx.Node:
        states = {layout[m] for m in over}
        if states == {P}:
            kind = "reduce_scatter"
        elif states == {I} or (states <= {I, R} and not value.grad):
            kind = "shard"
        else:
            kind = "shard_replicated"
            steps = [m for m in over if layout[m] != R]
            node = self._change(node, value, layout, layout | dict.fromkeys(steps, R), steps)
        layout.update(dict.fromkeys(over, axis))
        return self._along(kind, node, value, layout, axis, over)

    def _change(
        self, node: fx.Node, value: Value, layout: Layout, target: Layout, steps: list[str]
    ) -> fx.Node:
        """Between whole states; mesh axes that change alike are converted together."""
        while steps:
            first = steps[0]
            group = [
                m
                for m in steps
                if _same(layout[m], layout[first]) and _same(target[m], target[first])
            ]
            steps = [m for m in steps if m not in group]
            old, new = layout[first], target[first]
            if (old, new) not in CONVERSION_KIND:
                raise ShardingError(
                    message(
                        f"partition of {self.source}",
                        f"a value {old} over {','.join(group)}",
                        f"wanted as {new}",
                        "there is no conversion between these layouts",
                        "report this model",
                    )
                )
            kind = CONVERSION_KIND[old, new]
            layout.update(dict.fromkeys(group, new))
            if value.grad or kind not in ("replicate", "invariant"):
                node = self.emit_collective(kind, node, group, 0, 0, value, layout)
        return node

    def _along(
        self, kind: str, node: fx.Node, value: Value, layout: Layout, axis: Axis, group: Any
    ) -> fx.Node:
        """A collective along one logical axis, wherever it sits in the tensor's dimensions."""
        at = dimension_of(axis, value.dims)
        gathers = kind.startswith("all_gather")
        inner = {**layout}
        if not gathers:  # layout already names the result; the operand is whole over the group
            for m in group:
                inner[m] = I
        return self._along_dim(kind, node, value, inner, axis, group, at, value.dims[at])

    def _along_dim(
        self,
        kind: str,
        node: fx.Node,
        value: Value,
        layout: Layout,
        axis: Axis,
        group: Any,
        at: int,
        dim: Dim,
    ) -> fx.Node:
        axes = leaves(dim)
        if axes == (axis,):
            rest = {**layout, **dict.fromkeys(group, I)}
            size = self.size((axis,), rest)
            return self.emit_collective(kind, node, group, at, size, value, layout)
        if len(axes) == 1:  # a concatenation: piece by piece
            parts = axes[0].parts or ()
            sizes = [self.size(p, layout) for p in parts]
            pieces = self.emit(self.source, aten.split_with_sizes.default, node, sizes, at)
            done = []
            for i, part in enumerate(parts):
                item = self.emit(self.source, operator.getitem, pieces, i)
                dims = (*value.dims[:at], part, *value.dims[at + 1 :])
                piece = replace(value, dims=dims)  # its own number of elements, for the tables
                if axis in set(atoms(part)):
                    item = self._along_dim(kind, item, piece, layout, axis, group, at, part)
                elif kind in UNCUT_PART and value.grad:
                    item = self.emit_collective(UNCUT_PART[kind], item, group, 0, 0, piece, layout)
                done.append(item)
            return self.emit(self.source, aten.cat.default, done, at)
        sizes = [self.size((a,), layout) for a in axes]
        place = next(i for i, a in enumerate(axes) if axis in set(atoms((a,))))
        node = self.emit(self.source, aten.unflatten.int, node, at, sizes)
        dims = (*value.dims[:at], *((a,) for a in axes), *value.dims[at + 1 :])
        split = replace(value, dims=dims)
        node = self._along_dim(kind, node, split, layout, axis, group, at + place, (axes[place],))
        return self.emit(self.source, aten.flatten.using_ints, node, at, at + len(axes) - 1)


def _beyond(these: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of a sequence of groups, those that come after what it shares with another."""
    same = 0
    while same < min(len(these), len(others)) and these[same] == others[same]:
        same += 1
    return these[same:]


def _cut_in(layout: Layout) -> list[Axis]:
    """The logical axes that a layout cuts, by their outermost mesh axis."""
    found = {id(s): s for s in layout.values() if isinstance(s, Axis)}
    return list(found.values())


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, str) and a == b)
