"""context_parallel: tokens over cp, attention included.

Requires: axes inferred; runs after `tensor_parallel`, which takes its heads first. Gives:
``sequence -> cp`` assigned. How a query then meets the keys of other ranks, ``mode``:

ring: keys and values travel from rank to rank while softmaxes are merged (Liu et al. 2023).
allgather: every rank gathers all keys and values (Dubey et al. 2024).
ulysses: inside attention heads are cut in place of tokens, by all-to-alls (Jacobs et al. 2023):
``heads -> cp`` is assigned at a lower priority. Where heads are too few for all of cp, it is
factored: its inner part cuts heads, and keys travel round its outer part.

Where keys travel or are gathered, tokens are in zigzag order if some attention is causal, unless
``balance`` is off: see `autoshard.layout.pieces`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from autoshard.attention import attend
from autoshard.axes import Axis, Dim, atoms, leaves
from autoshard.chain import Pass
from autoshard.errors import ShardingError, message
from autoshard.infer import derived, sequence_axes
from autoshard.products import PRODUCTS
from autoshard.program import Assignment, Program, module_path, shallow, tensor_results
from autoshard.rules import op_name

MODES = ("ring", "ulysses", "allgather")
#: Ops that go along a dimension, each step reading the result of the one before.
SCANS = frozenset(
    """cumsum cumprod cummax cummin logcumsumexp lstm gru rnn_tanh rnn_relu scan associative_scan
    while_loop""".split()
)
#: From so many positions that are read one by one, a loop over them is taken for a scan.
LOOP = 8


@dataclass(frozen=True)
class ContextParallel(Pass):
    name: ClassVar[str] = "context_parallel"
    assigns: ClassVar[bool] = True
    mode: str = "ring"
    balance: bool = True

    def __call__(self, program: Program) -> Program:
        program = shallow(program)
        ranks = program.mesh.mesh.size("cp")
        if ranks == 1:
            return program
        self._refuse_scans(program)
        self._refuse_what_is_opaque(program)
        heads = _heads(program, ranks) if self.mode == "ulysses" else dict[fx.Node, Any]()
        inner = math.gcd(ranks, *(share for _, share in heads.values())) if heads else 1
        if self.mode == "ulysses" and inner == 1:
            self._refuse_for_heads(program, heads, ranks)
        sizes = tuple(size for size in (ranks // inner, inner) if size > 1)
        factors = dict(program.mesh.factors) | {"cp": sizes}
        mesh = replace(program.mesh, factors=tuple(factors.items()))
        parts = tuple(m for m, _ in mesh.parts("cp"))
        travels = parts[:1] if inner < ranks else ()
        if travels:
            self._refuse_what_is_written_out(program)
        program.mesh = replace(mesh, folded=travels if self.balance and _causal(program) else ())
        for axis in _tokens(program):
            if axis.opaque or axis.parts is not None:
                continue
            axis.role, axis.name = "sequence", axis.name or "moved sequence"
            program.assignments.append(
                Assignment(axis, parts, 20, self.name, f"tokens; attention by {self.mode}")
            )
        for axis in {id(a): a for a, _ in heads.values() if a is not None}.values():
            program.assignments.append(
                Assignment(axis, parts[-1:], 5, self.name, "in attention, in place of tokens")
            )
        return program

    def _refuse_scans(self, program: Program) -> None:
        tokens = {id(a) for a in _tokens(program, factors=True)}
        made, found = derived(program), dict[str, str]()
        steps: dict[tuple[str, int], set[int]] = {}
        for node, typing in program.typings.items():
            kind, path = op_name(node.target), module_path(node) or "the model"
            whole = [a for d in typing.whole for a in atoms(d)] if node in made else []
            if kind in SCANS and tensor_results(node)[0].is_floating_point():
                if any(id(a) in tokens or a.opaque for a in whole):
                    found[f"{kind} in {path}"] = "goes along it step by step"
            elif kind == "unbind" and any(id(a) in tokens for a in whole):
                if len(tensor_results(node)) >= LOOP:
                    found[f"a loop in {path}"] = "reads it one by one"
            elif kind == "select" and any(id(a) in tokens for a in whole):
                at = steps.setdefault((path, id(whole[0])), set())
                at.add(node.args[2])
                if len(at) == LOOP:
                    found[f"a loop in {path}"] = "reads it one by one"
        if found:
            raise ShardingError(
                message(
                    self.name,
                    f"the sequence in {len(found)} scans",
                    "; ".join(f"{where} {what}" for where, what in list(found.items())[:8]),
                    "a token needs the state that all tokens before it leave, so that ranks of cp "
                    "would wait for each other",
                    "drop cp from the mesh: cp is not available for this model; tp cuts its width",
                )
            )

    def _refuse_what_is_opaque(self, program: Program) -> None:
        found = sequence_axes(program)
        queries = [
            leaves(program.dims[node.args[0]][-2])
            for node in program.graph.find_nodes(op="call_function", target=attend)
        ]
        joined = [a for axes in queries for a in axes if a.parts is not None]
        folded = [a for axes in queries if len(axes) > 1 for a in axes]
        opaque = [axis for axis in found if axis.opaque]
        if found and not opaque and not joined and not folded:
            return
        if joined:
            seen, why = joined, "attention reads parts that are joined (a class token, patches)"
        elif folded:
            seen, why = folded, "the queries of an attention are several dimensions in one"
        elif opaque:
            seen, why = opaque, "the model reshapes it, or joins other tokens to it"
        else:
            seen, why = [], "no attention reads one, and no input of token ids has one"
        shown = ", ".join(dict.fromkeys(map(repr, seen))) or "no dimension of the inputs"
        ranks = program.mesh.mesh.size("cp")
        raise ShardingError(
            message(
                self.name,
                "the sequence",
                f"{shown} over cp={ranks}",
                why,
                "drop cp from the mesh",
            )
        )

    def _refuse_what_is_written_out(self, program: Program) -> None:
        """Scores of all queries and keys: an attention that `fuse_attention` has not recognised."""
        found = {
            module_path(node)
            or "the model": f"{op_name(node.target)} of {len(heads) + 2} dimensions"
            for node, heads in _written_out(program)
        }
        if found:
            fix = 'use context_parallel="ulysses", which cuts heads and runs the scores as written'
            if self.mode == "ulysses":
                fix = "use a cp that divides the heads, so that no keys travel"
            raise ShardingError(
                message(
                    self.name,
                    f"{len(found)} attentions",
                    "; ".join(f"{where}: {what}" for where, what in list(found.items())[:8]),
                    "where keys travel or are gathered, attention is computed block by block: this "
                    "is none of the forms that are known to allow that (a softmax of scores that "
                    "are elementwise in the products, read by one product with the values)",
                    fix,
                )
            )

    def _refuse_for_heads(
        self, program: Program, heads: dict[fx.Node, tuple[Axis | None, int]], ranks: int
    ) -> None:
        tp = program.mesh.mesh.size("tp")
        few = {
            f"{module_path(node) or 'the model'}: "
            + (f"{axis.size} heads over tp={tp}" if axis else "no heads"): None
            for node, (axis, _) in heads.items()
        }
        raise ShardingError(
            message(
                self.name,
                f"heads of {len(heads) or 'no'} attentions",
                "; ".join(list(few)[:8]) or "the model has no attention",
                f'"ulysses" cuts the heads of all of them over cp={ranks}, or a part of cp: no '
                "number of ways divides what tp leaves of each",
                'use context_parallel="ring" or "allgather", which cut no heads',
            )
        )


def _tokens(program: Program, factors: bool = False) -> list[Axis]:
    """The axes of tokens, and of what is made of them at other positions: shifted, or some less.
    ``factors``: also where that is taken apart into a product, as chunks of tokens."""
    found = {id(a): a for a in sequence_axes(program)}
    for typing in program.typings.values():
        if typing.window is None:
            continue
        source, out = (leaves(d) for d in (typing.window.source, typing.window.out))
        if (factors or len(source) == len(out) == 1) and any(id(a) in found for a in source):
            found.update({id(a): a for a in out})
    return list(found.values())


def _written_out(program: Program) -> Iterator[tuple[fx.Node, tuple[Dim, ...]]]:
    """What computes scores of queries and keys outside of `attend`; their other dimensions."""
    tokens = {id(a) for a in _tokens(program)}
    made = derived(program)
    for node, typing in program.typings.items():
        kind = op_name(node.target)
        if kind == "scaled_dot_product_attention":
            yield node, typing.out[:-2]
        elif kind in PRODUCTS and node in made and isinstance(typing.out, tuple):
            long = [any(id(a) in tokens for a in atoms(d)) for d in typing.out]
            if sum(long) > 1:
                yield node, tuple(d for d, of in zip(typing.out, long, strict=True) if not of)


def _heads(program: Program, ranks: int) -> dict[fx.Node, tuple[Axis | None, int]]:
    """For each attention, the axis of its heads that cp can cut, and how many ways: heads that keys
    have too, before groups of queries that share them (all ranks gather their keys then)."""
    taken: dict[int, int] = {}
    for assignment in program.assignments:
        share = program.mesh.size(assignment.mesh_axes)
        taken[id(assignment.axis)] = taken.get(id(assignment.axis), 1) * share
    able: dict[fx.Node, list[Axis]] = {}
    for node in program.graph.find_nodes(op="call_function", target=attend):
        q, k = (program.dims[n] for n in node.args[:2])
        keys = list(leaves(k[-3]))
        able[node] = keys + [a for a in leaves(q[-3]) if a not in keys]
    for node, dims in _written_out(program):
        able[node] = [a for dim in dims for a in leaves(dim)]
    found: dict[fx.Node, tuple[Axis | None, int]] = {}
    for node, axes in able.items():
        found[node] = None, 1
        for axis in axes:
            if axis.opaque or axis.parts is not None or axis.role == "batch":
                continue
            left, rest = divmod(axis.size, taken.get(id(axis), 1))
            share = 1 if rest else math.gcd(ranks, left)
            if found[node][1] == 1:
                found[node] = axis, share
    return found


def _causal(program: Program) -> bool:
    """Whether some attention reads no later tokens: earlier queries are less work then."""
    nodes = program.graph.find_nodes(op="call_function", target=attend)
    return any(not program.attentions[node.args[5]].ahead for node in nodes)
