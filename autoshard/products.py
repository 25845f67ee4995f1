"""The matrix products of an attention, however they are written: matmul, bmm, mm, einsum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autoshard.rules import op_name
from autoshard.rules.core import is_tensor
from autoshard.scores import ARRANGES, Untraceable, is_elementwise, permutation, shape_of

PRODUCTS = frozenset("matmul bmm mm einsum".split())
#: Ops that scores may come through on the way from their products.
THROUGH = ARRANGES | {"tril", "triu"}


@dataclass(frozen=True)
class Operand:
    """A node with its dimensions in this order; None: a new one, of size one."""

    node: fx.Node
    order: tuple[int | None, ...]

    def simple(self) -> Operand:
        """The same without transposes that undo each other."""
        before = permutation(self.node)
        if before is None or self.order == tuple(range(len(self.order))):
            return self
        order = tuple(None if d is None else before[d] for d in self.order)
        return Operand(self.node.args[0], order).simple()


@dataclass(frozen=True)
class Product:
    """left[..., i, d] with right[..., j, d]: scores; or the weights with right[..., j, e].
    order: for each dimension of the node's result, which one of [..., i, e] it is."""

    node: fx.Node
    left: Operand
    right: Operand
    order: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.order)


def first_product(scores: fx.Node) -> Product:
    """The only matrix product that scores are computed from by elementwise ops."""
    sides = shape_of(scores)[-2:]
    found, seen, stack = [], set(), [scores]
    while stack:
        node = stack.pop()
        if node in seen or not is_tensor(node) or node.meta["val"].ndim < 2:
            continue
        seen.add(node)
        kind = op_name(node.target)
        if kind in PRODUCTS:
            found += [node] if shape_of(node)[-2:] == sides else []
        elif kind in THROUGH or is_elementwise(node):
            stack.extend(node.all_input_nodes)
    if len(found) != 1:
        raise Untraceable(f"{len(found)} matrix products in the scores")
    return _scores_of(found[0])


def _scores_of(node: fx.Node) -> Product:
    rank = node.meta["val"].ndim
    if op_name(node.target) == "einsum":
        (left, right), operands, out = _equation(node)
        if out[-1] in left:
            left, right, operands = right, left, operands[::-1]
        lead, row, column = out[:-2], out[-2], out[-1]
        summed = _summed(left, right, out)
        if row in right or column in left:
            raise Untraceable("an einsum that is not of queries and keys")
        return Product(
            node,
            Operand(operands[0], _order(left, lead + row + summed)),
            Operand(operands[1], _order(right, lead + column + summed)),
            tuple(range(rank)),
        )
    a, b = _alike(node)
    natural = tuple(range(rank))
    return Product(
        node, Operand(a, natural), Operand(b, (*natural[:-2], rank - 1, rank - 2)), natural
    )


def second_product(node: fx.Node, position: int) -> Product:
    """The product of weights, which are this operand of it, and values."""
    rank = node.meta["val"].ndim
    if op_name(node.target) == "einsum":
        labels, operands, out = _equation(node)
        weights, values = labels[position], labels[1 - position]
        lead, column = weights[:-2], weights[-1]
        made = "".join(c for c in values if c not in weights)
        if _summed(weights, values, out) != column or len(made) != 1 or len(out) != len(weights):
            raise Untraceable("an einsum that is not of weights and values")
        result = lead + weights[-2] + made
        return Product(
            node,
            Operand(operands[position], tuple(range(rank))),
            Operand(operands[1 - position], _order(values, lead + column + made)),
            tuple(result.index(c) for c in out),
        )
    a, b = _alike(node)
    if position != 0 or a is b:
        raise Untraceable("weights on the right of a product")
    natural = tuple(range(rank))
    return Product(node, Operand(a, natural), Operand(b, natural), natural)


def _alike(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    a, b = node.args[:2]
    if not a.meta["val"].ndim == b.meta["val"].ndim == node.meta["val"].ndim >= 2:
        raise Untraceable("operands of several ranks")
    return a, b


def _equation(node: fx.Node) -> tuple[list[str], list[fx.Node], str]:
    """Labels of two operands, the operands, and the labels of the result."""
    equation, operands = node.args[0].replace(" ", ""), list(node.args[1])
    given, arrow, out = equation.partition("->")
    labels = given.split(",")
    if len(operands) != 2 or not arrow or len(out) < 2 or "." in equation:
        raise Untraceable("an einsum that is not a product of two")
    if any(len(set(each)) != len(each) for each in (*labels, out)):
        raise Untraceable("an einsum that takes a diagonal")
    return labels, operands, out


def _summed(left: str, right: str, out: str) -> str:
    """The one label that is summed over."""
    found = set(left + right) - set(out)
    if len(found) != 1 or not found <= set(left) & set(right):
        raise Untraceable("an einsum that sums over other than one dimension")
    return found.pop()


def _order(labels: str, wanted: str) -> tuple[int | None, ...]:
    if not set(labels) <= set(wanted) or not set(wanted[-2:]) <= set(labels):
        raise Untraceable("an einsum over other dimensions")
    return tuple(labels.index(c) if c in labels else None for c in wanted)
