"""Backward in two parts: gradients of activations now, gradients of weights when asked for.

Zero-bubble pipeline schedules (Qi et al. 2023, "Zero Bubble Pipeline Parallelism") fill a stage's
waiting time with the gradients of its weights, for which no other stage waits. Here a `Queue`,
open during a forward, takes what its backward (the *I* action) leaves undone; `Queue.run` (the *W*
action) does it. Every product is computed once, and no op runs a second time.

A value is of the *weight side* when parameters and constants alone determine it. `deferring` looks
at the ops of a graph that read such a value beside others, and changes two things:

    before:  w = t(weight); y = mm(x, w);               z = y * scale
    after:   w = t(weight); y = deferred(mm, [w], x, w); z = y * gate(scale)

`deferred` is for products and lookups: what the gradient of a weight takes is a product of its own.
Its forward records the op on a copy of ``x`` cut off from the graph, and ``w`` as it is. Backward
asks that small graph for the gradient of ``x``; the queue keeps its other half, which leads to the
parameters as in any backward. `gate` is for all other ops, also those that communicate: their
backward runs as a whole, and what comes for the weight side, small in most, is put by.

The queue runs as one backward of autograd, whose leaves are the parameters: hooks, reductions of
`runtime.zero` and `runtime.buckets`, and the order in which gradients are added up are those of a
backward in one part. Between I and W live, of every product, its input and the gradient of its
result; weights gathered for backward do not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _StopRecomputationError

from autoshard.errors import ShardingError, message

#: Products and lookups, by the name of the op: the arguments that it multiplies. In each of them it
#: is linear, so that the gradient of one does not depend on the values of that one.
FACTORS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys("linear matmul mm bmm mv dot inner".split(), (0, 1)),
    **dict.fromkeys("addmm addmv addbmm baddbmm".split(), (1, 2)),
    **dict.fromkeys("conv1d conv2d conv3d convolution _convolution".split(), (0, 1)),
    **dict.fromkeys("conv_transpose1d conv_transpose2d conv_transpose3d".split(), (0, 1)),
    **dict.fromkeys("_grouped_mm grouped_mm grouped_product".split(), (0, 1)),
    **dict.fromkeys("embedding index index_select gather".split(), (0,)),
    "einsum": (1,),
}


# --- the calls in graphs ---


def deferred(op: Any, weights: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """``op(*args, **kwargs)``, one tensor. While a queue is open, backward leaves the gradients of
    ``weights``, which are among the arguments, to that queue. ``op`` is linear in the one of
    ``FACTORS`` that is among them, and no other of these is."""
    opened = _opened.get()
    if opened is None or not _differentiable(weights):
        return op(*args, **kwargs)
    others = [x for x in _tensors((args, kwargs)) if all(x is not w for w in weights)]
    inputs = [x for x in others if x.requires_grad]
    call = _Call(op, args, kwargs, weights, others, inputs)
    if opened.run == _AGAIN:
        return call.run_again()
    return _Product.apply(opened, call, *(inputs or [_witness(weights[0].device)]))


def gate(value: Any) -> Any:
    """``value``, of the weight side. While a queue is open, backward hands the gradient that comes
    for it to that queue, and goes no further."""
    opened = _opened.get()
    if opened is None or not isinstance(value, torch.Tensor) or not _differentiable([value]):
        return value
    if opened.run == _AGAIN:
        _hand_over(_Left(get_gradient_edge(value)))
        return value.detach().requires_grad_()
    return _Gate.apply(opened, [value], _witness(value.device))


@dataclass(frozen=True)
class Named:
    """A function as an argument of `deferred`: code that fx writes calls it by its name."""

    module: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @functools.cached_property
    def _function(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


fx.graph._register_custom_builtin("Named", "from autoshard.runtime.split import Named", Named)


# --- what is left for later ---


class Queue:
    """The gradients of weights that one forward's backward leaves undone.

        queue = Queue()
        with queue.open():
            outputs = graph_module(*arguments)
        torch.autograd.backward(outputs, gradients)      # I: no parameter has a gradient yet
        queue.run()                                      # W

    One for each micro-batch and stage. Backward must run without ``inputs=``, which would leave out
    what leads to weights alone, and once: ShardingError for a second time. Parts of the graph that
    backward does not come to leave nothing here.
    """

    def __init__(self) -> None:
        self._left: list[_Left] = []

    def __len__(self) -> int:
        """How many gradients wait."""
        return len(self._left)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Meanwhile a graph runs forward, of which this queue takes the weights' gradients."""
        token = _opened.set(_Opened(self, _PLAIN))
        try:
            yield
        finally:
            _opened.reset(token)

    def run(self) -> None:
        """Compute what waits, and add it to the parameters' ``.grad``, as backward does."""
        left, self._left = self._left, []
        cut = {id(x) for each in left for x in each.inputs}
        leaves = []
        # products in the order in which backward came to them, and what follows from each at once:
        # nodes of blocks that ran again have numbers of their own, by which they would come late
        for node in _reached([each.edge.node for each in left]):
            if node.name() != "torch::autograd::AccumulateGrad":
                node._set_sequence_nr(_AT_ONCE)
            elif id(node.variable) not in cut:
                leaves.append(node.variable)
        for number, each in enumerate(reversed(left)):
            if each.product:
                each.edge.node._set_sequence_nr(number)
        edges, grads = [each.edge for each in left], [each.grad for each in left]
        if leaves:
            torch.autograd.backward(edges, grads, inputs=leaves)


#: Of the nodes that are ready, autograd runs the one of the highest number.
_AT_ONCE = 2**62

#: How a graph runs: once; or, a recomputed block, for the first time, and again in backward.
_PLAIN, _FIRST, _AGAIN = "plain", "first", "again"


class _Opened(NamedTuple):
    queue: Queue
    run: str


_opened: ContextVar[_Opened | None] = ContextVar("_opened", default=None)


def repeatable(body: Callable[..., Any]) -> Callable[..., Any]:
    """``body``, for `checkpoint`, which runs it once more in backward: the queue that is open now
    takes what that second run has recorded."""
    opened = _opened.get()
    if opened is None:
        return body
    count = itertools.count()

    def run(*inputs: Any) -> Any:
        token = _opened.set(_Opened(opened.queue, _AGAIN if next(count) else _FIRST))
        try:
            return body(*inputs)
        finally:
            _opened.reset(token)

    return run


@dataclass(eq=False)
class _Left:
    """Gradients that remain: those of what ``edge`` leads to, other than ``inputs``. ``kept``: what
    the graph of a product has saved."""

    edge: Any = None
    product: bool = False
    inputs: list[torch.Tensor] = field(default_factory=list)
    kept: list[_Kept] = field(default_factory=list)
    grad: Any = None

    def gradients(self, grad: torch.Tensor) -> list[Any]:
        """Those of the inputs; the rest remains."""
        self.grad, found = grad, []
        if self.inputs:
            for each in self.kept:
                each.open()
            edge, inputs = [self.edge], self.inputs
            found = torch.autograd.grad(edge, inputs, [grad], retain_graph=True, allow_unused=True)
        for each in self.kept:
            each.close()
        return list(found)


class _Kept:
    """What the graph of a product keeps of a tensor, packed by the hooks that were there.

    The gradient of a weight does not depend on the weight: once that of the input is computed,
    nothing is kept of it, and the graph reads memory of no values in its place.
    """

    def __init__(self, tensor: torch.Tensor, hooks: Any, weight: bool):
        pack, self._unpack = hooks
        self._packed = pack(tensor)
        self._here: Any = None
        self._like: Any = None
        if weight:
            kind = {"dtype": tensor.dtype, "device": tensor.device}
            self._like = (tensor.size(), tensor.stride()), kind

    def open(self) -> None:
        """Unpack in the backward around, not in that of the small graph: hooks tell them apart."""
        self._here = self._unpack(self._packed)

    def close(self) -> None:
        self._here = None
        if self._like is not None:
            self._packed = None

    def read(self) -> torch.Tensor:
        if self._here is not None:
            return self._here
        if self._packed is not None:
            return self._unpack(self._packed)
        layout, kind = self._like
        return torch.empty_strided(*layout, **kind)


#: Hooks that keep a tensor itself, whatever hooks stand around.
_AS_IT_IS = torch.Tensor.detach, lambda tensor: tensor


def _nothing(_: Any) -> Any:
    raise AssertionError("the first run of a recomputed block keeps nothing")


@dataclass(eq=False)
class _Call:
    """A call of a product: ``others`` are its tensors but for the weights, ``inputs`` those of them
    that have a gradient."""

    op: Any
    args: Any
    kwargs: Any
    weights: Sequence[torch.Tensor]
    others: list[torch.Tensor]
    inputs: list[torch.Tensor]

    def record(self, left: _Left, hooks: Any) -> torch.Tensor:
        """The result; its gradients, by a graph of this op alone, are left. ``hooks``: on what that
        saves, or None."""
        left.inputs = [x.detach().requires_grad_() for x in self.inputs]
        saving: Any = contextlib.nullcontext()
        if hooks is not None:
            saving = saved_tensors_hooks(self._keep(left.kept, hooks), _Kept.read)
        with torch.enable_grad(), saving:
            # as views: autocast keeps its casts of leaves
            given = [x.view_as(x) for x in left.inputs]
            instead = {id(x): view for x, view in zip(self.inputs, given, strict=True)}
            args, kwargs = _changed((self.args, self.kwargs), instead)
            made = self.op(*args, **kwargs)
        left.edge, left.product = get_gradient_edge(made), True
        return made.detach()

    def run(self) -> torch.Tensor:
        """The result alone, by the kernels that `record` takes."""
        with torch.enable_grad(), saved_tensors_hooks(lambda _: None, _nothing):
            return self.op(*self.args, **self.kwargs).detach()

    def run_again(self) -> torch.Tensor:
        """The result in a recomputed block that runs again; the graph goes to the first run."""
        left = _Left()
        try:
            _hand_over(left)
        except _StopRecomputationError:
            # nothing after this is needed, nor is the result
            with _Uncomputed():
                self.record(left, _AS_IT_IS)
            raise
        return self.record(left, _AS_IT_IS).requires_grad_()

    def _keep(self, kept: list[_Kept], hooks: Any) -> Callable[[torch.Tensor], _Kept]:
        weights = _storages(self.weights) - _storages(self.others)

        def keep(tensor: torch.Tensor) -> _Kept:
            kept.append(_Kept(tensor, hooks, not weights.isdisjoint(_storages([tensor]))))
            return kept[-1]

        return keep


class _Uncomputed(TorchDispatchMode):
    """Products give memory of no values; what arranges their operands runs as ever."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _KERNELS:
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        args, kwargs = _changed((args, kwargs), {id(x): x.to("meta") for x in given})
        return torch.empty_like(func(*args, **kwargs), device=given[0].device)


aten = torch.ops.aten
#: What an op of one product computes it with, and nothing before it.
_KERNELS = frozenset(
    (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
    )
)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, opened: _Opened, call: _Call, *_: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        if _begin(ctx, opened, left := _Left()):
            return call.run()
        return call.record(left, torch._C._autograd._top_saved_tensors_default_hooks(False))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        left = _taken(ctx)
        found = left.gradients(grad)
        ctx.queue._left.append(left)
        return None, None, *(found or [None])


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, opened: _Opened, value: list[torch.Tensor], _: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        if not _begin(ctx, opened, left := _Left()):
            left.edge = get_gradient_edge(value[0])
        return value[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is not None:
            left = _taken(ctx)
            left.grad = grad
            ctx.queue._left.append(left)
        return None, None, None


# A recomputed block keeps nothing in its first run but tickets: empty tensors, which autograd saves
# as it saves any. Reading one runs the block again, and gives that of the second run in its place,
# which bears what was recorded there.


def _begin(ctx: Any, opened: _Opened, left: _Left) -> bool:
    """Whether this is the first run of a recomputed block, of which nothing is recorded."""
    ctx.queue, ctx.first = opened.queue, opened.run == _FIRST
    ctx.left = None if ctx.first else left
    if ctx.first:
        ctx.save_for_backward(torch.empty(0))
    return ctx.first


def _hand_over(left: _Left) -> None:
    """In the second run: save the ticket of what is about to be recorded. Raises what ends the run
    when that is the last tensor that backward needs."""
    ticket: Any = torch.empty(0)
    ticket.left = left
    pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack(ticket)


def _taken(ctx: Any) -> _Left:
    """What was recorded, once."""
    if ctx.first:
        (ticket,) = ctx.saved_tensors
        return ticket.left
    left, ctx.left = ctx.left, None
    if left is None:
        raise ShardingError(
            message(
                "backward",
                "a second time through the same graph",
                "gradients of its weights were left to a queue",
                "what the queue takes is gone from the graph, and computed once",
                "run backward once per forward, with the gradients of all outputs",
            )
        )
    return left


def _differentiable(tensors: Iterable[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


@functools.cache
def _witness(device: torch.device) -> torch.Tensor:
    """A leaf that never gets a gradient: what has only that for an input has a backward."""
    with unset_fake_temporarily():
        return torch.zeros((), device=device, requires_grad=True)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Those in arguments, each once."""
    found: dict[int, torch.Tensor] = {}
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, torch.Tensor):
            found[id(each)] = each
        elif isinstance(each, dict):
            todo += reversed(each.values())
        elif isinstance(each, (list, tuple)):
            todo += reversed(each)
    return list(found.values())


def _changed(value: Any, instead: dict[int, torch.Tensor]) -> Any:
    """Arguments with other tensors in place of some."""
    if isinstance(value, torch.Tensor):
        return instead.get(id(value), value)
    if isinstance(value, dict):
        return {k: _changed(v, instead) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_changed(v, instead) for v in value)
    return value


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Where tensors lie; one without elements lies nowhere."""
    found = {x.untyped_storage().data_ptr() for x in tensors if x.layout is torch.strided}
    return found - {0}


def _reached(nodes: list[Any]) -> list[Any]:
    """The nodes of autograd's graph that a backward from these would come to."""
    found = dict.fromkeys(nodes)
    todo = list(found)
    while todo:
        after = [node for node, _ in todo.pop().next_functions if node is not None]
        todo += [node for node in after if node not in found]
        found.update(dict.fromkeys(after))
    return list(found)


# --- graphs ---


def deferring(
    graph: fx.Graph, parameters: Collection[str], constants: Collection[str] = ()
) -> None:
    """Make the ops of a flat graph that read the weight side beside other values leave its
    gradients to a `Queue`: products become calls of `deferred`, the rest reads it by a `gate`.

    ``parameters``: placeholders that are trained; ``constants``: those that are neither trained nor
    of the batch (buffers, frozen parameters). Works before recomputed blocks are outlined: what it
    adds belongs to the block of what it is made of.
    """
    weight_side = _weight_side(graph, parameters, constants)
    gates: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node in weight_side:
            continue
        weights = [n for n in node.all_input_nodes if n in weight_side]
        if weights and _is_product_with_one(node, weight_side):
            node.args = (_as_argument(node.target), weights, *node.args)
            node.target = deferred
            continue
        for weight in weights:
            if weight not in gates:
                gates[weight] = _gated(graph, weight)
            node.replace_input_with(weight, gates[weight])


def _weight_side(
    graph: fx.Graph, parameters: Collection[str], constants: Collection[str]
) -> set[fx.Node]:
    """The nodes that hang on parameters, and on nothing else but constants and sizes."""
    found, fixed = set(), set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            found |= {node} if node.name in parameters else set()
            fixed |= {node} if node.name in constants else set()
            continue
        reads = node.all_input_nodes
        if _is_number(node) or fixed.issuperset(reads):
            fixed.add(node)
        elif all(n in found or n in fixed for n in reads):
            found.add(node)
    return found


def _is_number(node: fx.Node) -> bool:
    kinds = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(node.meta.get("val"), kinds)


def _is_product_with_one(node: fx.Node, weight_side: set[fx.Node]) -> bool:
    """Whether a node is a product, and one factor of the weight side."""
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", "")
    if node.op != "call_function" or name not in FACTORS:
        return False
    factors: list[Any] = []
    for at in FACTORS[name]:
        given = node.args[at] if at < len(node.args) else None
        factors += given if isinstance(given, (list, tuple)) else [given]
    return sum(isinstance(f, fx.Node) and f in weight_side for f in factors) == 1


def _as_argument(op: Any) -> Any:
    if isinstance(op, torch._ops.OpOverload):
        return op
    return Named(op.__module__, op.__name__)


def _gated(graph: fx.Graph, weight: fx.Node) -> fx.Node:
    after = weight
    if weight.op == "placeholder":
        after = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(after):
        made = graph.call_function(gate, (weight,))
    made.meta.update(weight.meta)
    return made
