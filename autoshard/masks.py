"""What masks do, seen by running the part of a graph that depends on sizes only, at several sizes.

A mask that is causal for a few sizes, and for sizes beyond every number that its code names, is
taken to be causal for all.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.infer import expression
from autoshard.program import Program
from autoshard.rules import op_name

#: Largest side of a mask that is evaluated to see what it is.
LARGEST_MASK = 4200
#: The same where nothing of the size queries times keys is made: only some of both are looked at.
LARGEST_SIDE = 2**20
#: Sides up to which all queries and keys are looked at.
ALL = 600
#: Sides that every mask is evaluated at.
SIDES = (5, 9)

#: Boolean ops of which one operand can decide the result, and the value that does.
DECIDED_BY = {
    **dict.fromkeys(("__and__", "logical_and", "bitwise_and", "mul"), 0),
    **dict.fromkeys(("__or__", "logical_or", "bitwise_or"), 1),
}


def ancestors(nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes and all that they are computed from, in graph order."""
    found, stack = set(), list(nodes)
    while stack:
        item = stack.pop()
        if item not in found:
            found.add(item)
            stack.extend(item.all_input_nodes)
    return sorted(found)


def descendants(nodes: Iterable[fx.Node], until: Container[fx.Node] = ()) -> set[fx.Node]:
    """The nodes and all that is computed from them, no further than ``until``."""
    found, stack = set[fx.Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.users if node not in until else ())
    return found


def depends_on_sizes_only(program: Program, needed: list[fx.Node]) -> bool:
    """Whether no input or parameter is read by the nodes, but for its size."""
    return all(
        _fixed_value(program, n) is not None or _read_for_size_only(n, needed)
        for n in needed
        if n.op == "placeholder"
    )


def depends_on_parameters_only(program: Program, needed: list[fx.Node]) -> bool:
    """Whether the nodes read sizes and trainable parameters only."""
    return all(
        _fixed_value(program, n) is not None
        or _read_for_size_only(n, needed)
        or (n.name in program.values and program.values[n.name].trainable)
        for n in needed
        if n.op == "placeholder"
    )


def _fixed_value(program: Program, node: fx.Node) -> torch.Tensor | None:
    """The value of a placeholder that is the same in every step: a constant of the code, or a
    buffer that no checkpoint holds and no step changes. None for others, and without a value."""
    known = program.values.get(node.name)
    if known is None or not known.buffer or known.value.is_meta:
        return None
    fixed = known.constant or not known.persistent
    return known.value.detach() if fixed and node.name not in program.buffer_updates else None


def _read_for_size_only(node: fx.Node, needed: list[fx.Node]) -> bool:
    users = [n for n in needed if node in n.all_input_nodes]
    return bool(users) and all(op_name(n.target) == "sym_size" for n in users)


def evaluate(
    program: Program, needed: list[fx.Node], sizes: dict[Any, int]
) -> dict[fx.Node, Any] | None:
    """What the nodes are at these values of the symbolic sizes; None where they cannot be run."""
    env: dict[fx.Node, Any] = {}
    for node in needed:
        if node.op == "placeholder":
            value = _fixed_value(program, node)
            env[node] = None if value is None else value.cpu()
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            try:
                env[node] = _at(value, sizes)
            except TypeError:  # a size that values decide
                return None
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        try:
            env[node] = run(node, args, kwargs)
        except Exception:
            return None
    return env


def of_sizes(
    program: Program, nodes: Iterable[fx.Node], sizes: dict[Any, int]
) -> dict[fx.Node, Any] | None:
    """What the nodes, and what they are made of, are at these sizes; None where they depend on
    anything else, or cannot be run. It ends at the first thing that they should not depend on."""
    needed, stack = set[fx.Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        if node.op == "placeholder" and _fixed_value(program, node) is None:
            return None
        needed.add(node)
        if not isinstance(node.meta.get("val"), torch.SymInt):
            stack.extend(node.all_input_nodes)
    return evaluate(program, sorted(needed), sizes)


def run(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What a node gives for values on the CPU, whatever device it was captured for; in float64
    where the CPU does not take the integers that a GPU does."""
    args, kwargs = pytree.tree_map_only(
        torch.device, lambda _: torch.device("cpu"), (tuple(args), dict(kwargs))
    )
    target: Any = node.target
    try:
        return target(*args, **kwargs)
    except RuntimeError:
        whole = [a for a in (*args, *kwargs.values()) if _is_whole(a)]
        if not whole or not isinstance(node.meta.get("val"), torch.Tensor):
            raise
        args = [a.double() if _is_whole(a) else a for a in args]
        kwargs = {name: a.double() if _is_whole(a) else a for name, a in kwargs.items()}
        return target(*args, **kwargs).to(node.meta["val"].dtype)


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype is torch.bool
    )


def _at(size: Any, sizes: dict[Any, int]) -> int:
    expr = expression(size)
    return int(expr if isinstance(expr, int) else expr.subs(sizes))


def settings(
    program: Program,
    needed: list[fx.Node],
    shape: Iterable[Any],
    numbers: Iterable[int] = (),
    alone: Iterable[Any] = (),
    largest: int = LARGEST_MASK,
) -> list[dict[Any, int]]:
    """Values of the symbolic sizes to evaluate a mask of this shape at: small ones, and two more
    than every number in its code, ``numbers`` among them. Where the shape has several symbols, they
    are also given different values. ``alone``: symbols that are 1 throughout. None at all if some
    number is too large to go beyond with ``largest``."""
    symbols = sorted({s for e in shape for s in _symbols(e)}, key=str)
    others = {s for n in needed for s in _symbols(n.meta.get("val"))}
    fixed = dict.fromkeys(alone, 1)
    if not symbols:
        return [{**dict.fromkeys(others, SIDES[0]), **fixed}]
    named = {*numbers, *numbers_in(program, needed)}
    if any(n + 2 > largest for n in named):
        return []
    sides = sorted({*SIDES, *named, *(n + 2 for n in named)})
    out = [{**dict.fromkeys((*symbols, *others), side), **fixed} for side in sides]
    if len([s for s in symbols if s not in fixed]) > 1:
        apart = {s: SIDES[1] + n for n, s in enumerate(symbols)}
        out.append({**dict.fromkeys(others, SIDES[1]), **apart, **fixed})
    return out


def numbers_in(program: Program, nodes: Iterable[fx.Node]) -> set[int]:
    """The numbers of the code, and sizes of the tables, that can tell one position from another."""
    found: list[Any] = []
    for node in nodes:
        found += [*node.args, *node.kwargs.values()]
        value = _fixed_value(program, node) if node.op == "placeholder" else None
        found += [] if value is None else value.shape
    whole = {abs(a) for a in found if isinstance(a, int) and not isinstance(a, bool)}
    whole |= {int(abs(a)) for a in found if isinstance(a, float) and abs(a) < LARGEST_MASK}
    return {n for n in whole if 2 < n < 2**30}


def _symbols(size: Any) -> set[Any]:
    if not isinstance(size, torch.SymInt) and not hasattr(size, "free_symbols"):
        return set()
    return set(getattr(expression(size), "free_symbols", ()))


@dataclass(frozen=True)
class Verdict:
    """What scores do to the products, for every size. kind: ``causal`` or ``full`` where they are
    the products, but for keys ahead of the query in the first; else ``other``. ahead: whether a
    query may read a later key."""

    kind: str
    ahead: bool


UNKNOWN = Verdict("other", True)


@torch.random.fork_rng(devices=[])
def judge(
    program: Program,
    score: fx.GraphModule,
    vectors: list[fx.Node],
    shape: tuple[Any, ...],
    dtype: torch.dtype,
) -> Verdict:
    """What the scores of products ``[b, h, i, j]`` of this shape and type do; ``vectors``: the
    outer nodes that the score graph is given. It is tried on numbers drawn from one seed; the
    caller's random state stays as it is."""
    torch.default_generator.manual_seed(0)  # and no device's: those are not forked
    of_sizes, harmless = [], True
    for vector in vectors:
        needed = ancestors([vector])
        of_sizes.append(depends_on_sizes_only(program, needed))
        harmless = harmless and (of_sizes[-1] or depends_on_parameters_only(program, needed))
    needed = ancestors([v for v, known in zip(vectors, of_sizes, strict=True) if known])
    numbers = numbers_in(program, [*needed, *score.graph.nodes])
    alone = _symbols(shape[0]) - _symbols(shape[2]) - _symbols(shape[3])
    verdicts: list[Verdict] = []
    areas = [v for v in vectors if 1 not in v.meta["val"].shape[2:]]
    largest = LARGEST_MASK if areas else LARGEST_SIDE
    for sizes in settings(program, needed, shape, numbers, alone, largest):
        env = evaluate(program, needed, sizes)
        sides = tuple(_at(s, sizes) for s in shape[2:])
        given = [None if env is None else _sample(v, env.get(v), sizes) for v in vectors]
        if any(g is None or not _fits(g[0], sides) for g in given):
            if max(sides) in SIDES or not verdicts:
                return UNKNOWN
            continue  # beyond what a table in the model holds: it does not run at this size
        if max(sides) > largest:
            return UNKNOWN
        at = [_looked_at(side, numbers) for side in sides]
        found = _judge_at(score, [_part(g, at) for g in given if g], at, dtype, harmless)
        if found == UNKNOWN:
            return UNKNOWN
        verdicts.append(found)
    if not verdicts:
        return UNKNOWN
    kinds = {v.kind for v in verdicts}
    return Verdict(kinds.pop() if len(kinds) == 1 else "other", any(v.ahead for v in verdicts))


Sample = tuple[torch.Tensor, torch.Tensor]  # a value, and where it does not depend on data


def _sample(node: fx.Node, value: Any, sizes: dict[Any, int]) -> Sample | None:
    """A vector at these sizes: its value if that is known, else any."""
    if isinstance(value, torch.Tensor):
        return value, torch.ones_like(value, dtype=torch.bool)
    fake = node.meta["val"]
    shape = [_at(s, sizes) for s in fake.shape]
    made = torch.randn(shape).to(fake.dtype) if fake.is_floating_point() else None
    if made is None:
        made = torch.zeros(shape, dtype=fake.dtype)
    return made, torch.zeros(shape, dtype=torch.bool)


def _fits(value: torch.Tensor, sides: tuple[int, ...]) -> bool:
    return all(s in (1, side) for s, side in zip(value.shape[2:], sides, strict=True))


def _looked_at(side: int, numbers: Iterable[int]) -> torch.Tensor:
    """The positions that are looked at: all, or those about each number, and others by chance."""
    if side <= ALL:
        return torch.arange(side)
    about = {0, side - 1}
    for number in numbers:
        if number < side:
            about |= set(range(number, side, max(number, side // 8)))
    near = {p + d for p in about for d in range(-3, 4) if 0 <= p + d < side}
    return torch.tensor(sorted(near | set(torch.randint(side, (ALL // 2,)).tolist())))


def _part(sample: Sample, at: list[torch.Tensor]) -> Sample:
    """A vector at these queries and keys."""
    out = []
    for each in sample:
        for dim, positions in enumerate(at, 2):
            each = each if each.shape[dim] == 1 else each.index_select(dim, positions)
        out.append(each)
    return out[0], out[1]


def _judge_at(
    score: fx.GraphModule,
    vectors: list[Sample],
    at: list[torch.Tensor],
    dtype: torch.dtype,
    harmless: bool,
) -> Verdict:
    # scores that are the products for zeros, and for all magnitudes, are the products
    queries, keys = at
    powers = torch.empty(1, 1, len(queries), len(keys)).uniform_(
        -3, 3 if dtype is torch.float16 else 30
    )
    products = ((10.0**powers) * torch.randn(powers.shape).sign()).to(dtype)
    unknown = torch.zeros(products.shape, dtype=torch.bool)
    try:
        scores, known = _run(score, [(products, unknown), *vectors])
        of_zeros, _ = _run(score, [(torch.zeros_like(products), unknown), *vectors])
    except Exception:
        return UNKNOWN
    if not scores.is_floating_point():
        return UNKNOWN
    blocked = _masked(scores)
    later = keys > queries[:, None]
    sure = (known & blocked)[..., later]
    never = bool(sure.all())
    finite = bool((scores[..., later] != -torch.inf).any())
    if never and finite:
        # a row of which all is masked by finite numbers is spread over all keys
        rows = (~blocked & ~later).any(-1)
        never = harmless and bool(rows.all())
    same = (scores == products) & (of_zeros == 0)
    decided = all(bool(k.all()) for _, k in vectors) and bool((same | blocked).all())
    kind = "other"
    if decided and not bool(blocked.any()):
        kind = "full"
    elif decided and bool((blocked == later).all()):
        kind = "causal"
    return Verdict(kind, not never)


def _masked(scores: torch.Tensor) -> torch.Tensor:
    """Where scores are so low that the softmax of a row with any other is exactly zero."""
    return scores <= max(torch.finfo(scores.dtype).min / 2, -1e38)


def _run(score: fx.GraphModule, given: list[Sample]) -> Sample:
    """The scores, and where they are known: there they depend neither on products nor on data."""
    env: dict[fx.Node, Sample] = {}
    ready = iter(given)
    for node in score.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(ready)
        elif node.op == "output":
            return env[node.args[0]]
        else:
            env[node] = _step(node, env)
    raise AssertionError("a graph has an output")


def _step(node: fx.Node, env: dict[fx.Node, Sample]) -> Sample:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n][0])
    value = run(node, args, kwargs)
    kind = op_name(node.target)

    def known(arg: Any) -> torch.Tensor:
        return env[arg][1] if isinstance(arg, fx.Node) else torch.tensor(True)

    if kind == "new_full":
        return value, torch.ones_like(value, dtype=torch.bool)
    if kind in ("where", "masked_fill"):
        condition, chosen, other = node.args
        if kind == "masked_fill":
            other, condition, chosen = node.args
        sure = known(condition) & torch.where(env[condition][0], known(chosen), known(other))
    else:
        operands, sure = node.all_input_nodes, torch.tensor(True)
        for operand in operands:
            sure = sure & known(operand)
        for operand in operands[:1] if kind == "sub" else operands:
            sure = sure | (known(operand) & _decides(kind, env[operand][0], value))
    return value, torch.broadcast_to(sure, value.shape)


def _decides(kind: str, operand: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Where an operand makes the result what it is, whatever (finite) numbers the others are."""
    if kind in DECIDED_BY and (kind == "mul" or result.dtype is torch.bool):
        return operand == DECIDED_BY[kind]
    if kind in ("add", "sub", "minimum") and operand.is_floating_point():
        return _masked(operand)
    return torch.tensor(False)
