"""What backward needs of forward: bytes saved on a rank, and what runs again where blocks are
recomputed.

Predicted: rank 0's graph is run on fake tensors (shapes, dtypes and a device, no numbers) with
gradients on, under `torch.autograd.graph.saved_tensors_hooks`. The collectives' own autograd
functions run too. Measured: the same hooks around the forward of a live module.

Exact is which tensors autograd saves, and their storages, each counted once; parameters, buffers
and inputs do not count. On a mesh with pp it is one stage in one micro-batch, and what it received
counts too. A fake tensor takes the same way through torch as a real one of its device:
on the CPU attention saves what its flash kernel saves, where a tensor of the meta device would get
the formula that saves all scores. Not told are: memory that kernels use while they run, gradients,
allocators' rounding, states of random generators (a few kB a block); and kernels that this torch
was built without: for a GPU ask on a machine whose torch knows it (the kinds of fused attention it
chooses differ). A model on the meta device counts as one on the CPU.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from autoshard.batches import batch_sizes, of_microbatch, own_sizes
from autoshard.emit import bound
from autoshard.objective import loss_graph
from autoshard.outline import RECOMPUTE, Run, runs
from autoshard.pipeline import Piece, Stage, plan_of
from autoshard.program import Program
from autoshard.runtime import rng
from autoshard.runtime.sections import entries
from autoshard.runtime.zero import release, wait_gather
from autoshard.shapes import stated


@dataclass(eq=False)
class Saved:
    """A tensor that autograd saved: its storage, and the node of the graph that it was saved by."""

    storage: Any
    node: fx.Node | None = None


class Recorder(saved_tensors_hooks):
    """Records what autograd saves meanwhile, and does not keep it: there is no backward."""

    def __init__(self) -> None:
        self.node: fx.Node | None = None
        self.by: list[fx.Node | None] = []  # for every tensor saved, in order
        self._alive: weakref.WeakSet[Saved] = weakref.WeakSet()
        super().__init__(self._pack, _no_backward)

    def _pack(self, tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor.untyped_storage(), self.node)
        self.by.append(self.node)
        self._alive.add(saved)
        return saved

    def saved(self) -> list[Saved]:
        """What the results that are still there need for their backward."""
        return list(self._alive)


def _no_backward(saved: Saved) -> torch.Tensor:
    raise RuntimeError("the saved tensors of this forward were only counted")


def _bytes(storages: dict[int, Any], held: dict[int, Any]) -> int:
    """Bytes of storages that are not held anyway."""
    return sum(storage.nbytes() for key, storage in storages.items() if key not in held)


def _storages(values: Any) -> dict[int, Any]:
    """The storages of the tensors among some values."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    return {s._cdata: s for s in (t.untyped_storage() for t in tensors)}


def measured(module: Any, *args: Any, **kwargs: Any) -> int:
    """Bytes that one forward of ``train_step`` on this batch saves for backward on this rank, of a
    live `ShardedModule`; the whole forward's where the model has no loss. No backward follows, and
    buffers stay as they are; random numbers are drawn. All ranks must call it."""
    mode, store = module._running, module._store
    arguments = module.arguments(args, kwargs)
    with store.forward(own_loss=True), (recorder := Recorder()):
        results = (mode.loss_module or mode.graph_module)(*arguments)
    held = _storages([*arguments, *store.kept.values()])
    found = {s.storage._cdata: s.storage for s in recorder.saved()}
    gathered = {k: s for k, s in found.items() if s.data_ptr() in store.running.weights}
    del results
    return _bytes(found, held | gathered)


# --- predicted ---


@dataclass(frozen=True)
class Given:
    """A tensor that a stage gives, and whether its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


@dataclass
class Forward:
    """One run of rank 0's forward: bytes saved for backward, of recomputed blocks their inputs
    alone; in ``blocks``, what each of these saves when it is computed again.

    ``again``: names of the nodes that run again in backward; ``units``: of those of which backward
    reads the weights. ``by``: ``saved`` by the name of the first node that saves a tensor, or of
    the first one of the recomputed block that reads it. ``gives``: of a stage, the tensors that it
    gives, by name.
    """

    saved: int
    blocks: list[int] = field(default_factory=list)
    again: set[str] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    by: dict[str, int] = field(default_factory=dict)
    gives: dict[str, Given] = field(default_factory=dict)


class _Tracer(fx.Interpreter):
    """Runs a graph and tells the recorder which node is running; ``inputs``: the storages that
    every recomputed block reads."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder):
        super().__init__(module)
        self.recorder = recorder
        self.blocks = [run for run in runs(module.graph) if run.block is not None]
        self._first = {run.nodes[0]: run for run in self.blocks}
        self.inputs: dict[int, dict[int, Any]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if run := self._first.get(n):
            self.inputs[id(run)] = _storages(self.env[node] for node in run.reads())
        self.recorder.node = n
        return super().run_node(n)


def forward(program: Program) -> Forward | None:
    """Run the forward of ``train_step`` (where there is no loss, the whole one) on fake tensors, at
    the sizes captured. None where an op needs numbers. Run once for all tables of a program."""

    def run() -> list[Forward]:
        return [_run(program, _flat(program), program.hints)]

    found = _once(program, "_forward_run", run)
    return None if found is None else found[0]


def stage_forwards(program: Program) -> list[Forward] | None:
    """The same for every stage of a mesh with pp, in one micro-batch of the rows captured."""
    sizes = of_microbatch(program)
    return _once(program, "_stage_runs", lambda: _run_stages(program, _stages(program), sizes))


def backward_runs(program: Program) -> tuple[set[str], set[str]]:
    """Names of the nodes that run again in backward (of recomputed blocks, those up to the last
    tensor that backward needs), and of the units whose weights are gathered again there. Where
    that cannot be told, all nodes of the blocks, and all units that are not kept."""
    marked = {n.name for n in program.graph.nodes if RECOMPUTE in n.meta}
    calls = program.graph.find_nodes(op="call_function", target=release)
    freed = {str(node.args[2]) for node in calls}
    made = _forwards(program) if marked or freed else None
    if made is None:
        return marked, freed
    waits = program.graph.find_nodes(op="call_function", target=wait_gather)
    again = {name for each in made for name in each.again}
    read = {str(node.args[2]) for node in waits if node.name in again}
    return again, freed & read.union(*(each.units for each in made))


def _forwards(program: Program) -> list[Forward] | None:
    """What the graph saves for backward, or those of all stages."""
    if program.pipeline is not None:
        return stage_forwards(program)
    made = forward(program)
    return None if made is None else [made]


def _once(program: Program, name: str, run: Callable[[], list[Forward]]) -> list[Forward] | None:
    known = vars(program).get(name)
    if known is None or known[0] is not program.graph_module:
        known = vars(program)[name] = program.graph_module, _or_none(run)
    return known[1]


def _or_none(run: Callable[[], list[Forward]]) -> list[Forward] | None:
    try:
        with FakeTensorMode():
            return run()
    except Exception:  # whatever an op raises that has no shape without numbers, or not this one
        return None


def _flat(program: Program) -> fx.GraphModule:
    """Rank 0's graph, on no process group."""
    graph = loss_graph(program) if program.loss is not None else fx.Graph()
    if program.loss is None:
        graph.output(graph.graph_copy(program.graph, {}))
    return _module(program, graph)


def _module(program: Program, graph: fx.Graph) -> fx.GraphModule:
    """A graph bound to rank 0, on no process group. Changes the graph."""
    for node in list(graph.nodes):
        if node.target is rng.draw:
            node.update_arg(1, ())  # a stream of one's own is seeded by a number
            if node.args[0] is rng.number:
                node.replace_all_uses_with(0)
                graph.erase_node(node)
    root = torch.nn.Module()
    held = {name: f"unit_{i}" for i, name in enumerate(program.units)}
    for name, attribute in held.items():
        setattr(root, attribute, _Unit(program, name))
    for name, attention in program.attentions.items():
        held[name] = name
        setattr(root, name, attention)
    return fx.GraphModule(root, bound(graph, program.mesh, 0, {}, _device(program), held))


@dataclass
class _Stage:
    """A stage of a plan, and its graphs bound to rank 0 of it."""

    stage: Stage
    before: fx.GraphModule
    body: fx.GraphModule


def _stages(program: Program) -> list[_Stage]:
    def module(piece: Piece) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output(graph.graph_copy(piece.graph, {}))
        return _module(program, graph)

    stages = plan_of(program, program.loss is not None).stages
    return [_Stage(s, module(s.before), module(s.body)) for s in stages]


class _Unit:
    """Stands for the weights of a unit (`runtime.zero.Weights`), and for a gathering of them."""

    def __init__(self, program: Program, name: str):
        self.unit, self.device = program.units[name], _device(program)
        self.weights, self.entries = self, entries(self.unit, program, 0)
        self.storages: dict[int, Any] = {}

    def start(self) -> _Unit:
        return self

    def read(self, grad: bool) -> list[torch.Tensor]:
        dtype, device = self.unit.dtype, self.device
        made = [torch.empty(e.shape, dtype=dtype, device=device) for e in self.entries]
        self.storages.update(_storages(made))
        return made

    def release(self) -> None:
        pass


def _run(program: Program, module: fx.GraphModule, sizes: dict[Any, int]) -> Forward:
    arguments = _arguments(program, sizes)
    return _traced(module, list(arguments.values()))[0]


def _run_stages(program: Program, stages: list[_Stage], sizes: dict[Any, int]) -> list[Forward]:
    """One micro-batch through all stages, one after the other."""
    values, found = _arguments(program, sizes), []
    for each in stages:
        with torch.no_grad():
            early = each.before(*(values[name] for name in each.stage.before.takes))
        values |= zip(each.stage.before.gives, early, strict=True)
        received = {name: None for names in each.stage.receives.values() for name in names}
        values |= {name: _cut_off(values[name]) for name in received}
        arguments = [values[name] for name in each.stage.body.takes]
        made, results = _traced(each.body, arguments, [values[name] for name in received])
        gives = dict(zip(each.stage.body.gives, results, strict=True))
        values |= {name: _cut_off(x) for name, x in gives.items()}
        made.gives = {n: _given(x) for n, x in gives.items() if isinstance(x, torch.Tensor)}
        found.append(made)
        del results, gives
    return found


def _given(x: torch.Tensor) -> Given:
    return Given(tuple(x.shape), x.dtype, x.requires_grad)


def _cut_off(value: Any) -> Any:
    """A value as it is when it has travelled."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _traced(
    module: fx.GraphModule, arguments: list[Any], received: Iterable[Any] = ()
) -> tuple[Forward, Any]:
    """What a module saves on these arguments, those ``received`` counted, and its results."""
    tracer = _Tracer(module, recorder := Recorder())
    with recorder:
        results = tracer.run(*arguments)
    units = [v for v in vars(module).values() if isinstance(v, _Unit)]
    kept = _storages(received)
    held = _storages(arguments) | {k: s for unit in units for k, s in unit.storages.items()}
    held = {k: s for k, s in held.items() if k not in kept}
    read: set[str] = set()
    of = {node: run for run in tracer.blocks for node in run.nodes}
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    first: dict[int, fx.Node] = {}  # that saves each of those kept, or reads it for a block
    inside: dict[int, dict[int, Any]] = {}
    for saved in sorted(recorder.saved(), key=lambda s: order[s.node]):  # type: ignore[index]
        run, key = of.get(saved.node), saved.storage._cdata  # type: ignore[arg-type]
        if run is None:
            new = {key: saved.storage}
            read |= {unit.unit.name for unit in units if key in unit.storages}
        else:
            inside.setdefault(id(run), {})[key] = saved.storage
            new = tracer.inputs[id(run)]
        for key in new.keys() - first.keys():
            kept[key] = new[key]
            first[key] = saved.node if run is None else run.nodes[0]  # type: ignore[assignment]
    by: collections.Counter[str] = collections.Counter()
    for key in first.keys() - held.keys():
        by[first[key].name] += kept[key].nbytes()
    for unit in units:
        unit.storages.clear()
    again = [run for run in tracer.blocks if id(run) in inside]
    made = Forward(
        _bytes(kept, held),
        [_bytes(inside[id(run)], {**held, **tracer.inputs[id(run)]}) for run in again],
        {name for run in again for name in _again(run, recorder)},
        read,
        dict(by),
    )
    return made, results


def _again(run: Run, recorder: Recorder) -> Iterator[str]:
    """The nodes up to the one that saves a block's last tensor: torch's checkpoint stops there."""
    own = set(run.nodes)
    last = next(node for node in reversed(recorder.by) if node in own)
    for node in run.nodes:
        yield node.name
        if node is last:
            return


def _device(program: Program) -> torch.device:
    """Where the program will run, as far as is known."""
    if program.mesh.mesh.device_mesh is not None:
        return torch.device(program.mesh.mesh.device_mesh.device_type)
    kinds = {p.value.device.type for p in program.values.values()} - {"meta"}
    return torch.device(min(kinds, default="cpu"))


def _arguments(program: Program, sizes: dict[Any, int]) -> dict[str, Any]:
    """Fake tensors for the placeholders of a program's graph, by name."""
    device = _device(program)
    nodes = program.graph.find_nodes(op="placeholder")
    return {node.name: _argument(program, node, sizes, device) for node in nodes}


def _argument(
    program: Program, node: fx.Node, sizes: dict[Any, int] | None, device: torch.device
) -> Any:
    value, shape = node.meta.get("val"), stated(program, node, sizes)
    if not isinstance(value, torch.Tensor) or shape is None:
        return value
    parameter = program.values.get(node.name)
    trainable = parameter is not None and parameter.trainable
    return torch.empty(shape, dtype=value.dtype, device=device, requires_grad=trainable)


# --- closed forms ---

#: Sizes that a closed form is found at: so many times those captured, and the one it is checked at.
TIMES, CHECKED = (1, 2, 3), 4
#: With more dynamic sizes than that, only the number at the captured sizes is told.
MOST_SIZES = 3


@dataclass
class Prediction:
    """Bytes on a rank: saved for backward, and of recomputed blocks the largest one's; closed forms
    of the dynamic sizes, or numbers at the sizes captured."""

    saved: Any
    recomputed: Any


def predicted(program: Program) -> Prediction | None:
    """What one forward saves for backward on rank 0. Where it is a polynomial, linear in the batch
    and up to quadratic in other sizes, that polynomial: found at multiples of the captured sizes,
    exactly, and checked at one more. A size that cannot grow, or with too many of them all but the
    batch, stays at its captured value. None where no number is known."""
    module = _flat(program)

    def run(sizes: dict[Any, int]) -> list[Forward] | None:
        if sizes == program.hints:
            known = forward(program)
            return None if known is None else [known]
        return _or_none(lambda: [_run(program, module, sizes)])

    found = _in_forms(program, run) or run(own_sizes(program))
    return None if found is None else _largest(program, found)[0]


def predicted_stages(program: Program) -> list[Prediction] | None:
    """The same for every stage of a mesh with pp, in one micro-batch: polynomials of its rows; all
    numbers, for the rows captured, where some polynomial does not give these."""
    exact, stages = stage_forwards(program), _stages(program)
    if exact is None:
        return None

    def run(sizes: dict[Any, int]) -> list[Forward] | None:
        return _or_none(lambda: _run_stages(program, stages, sizes))

    forms, sizes = _in_forms(program, run), of_microbatch(program)
    if forms is None or any(
        sympy.sympify(form.saved).xreplace(sizes) != known.saved
        for form, known in zip(forms, exact, strict=True)
    ):
        forms = exact
    return _largest(program, forms)


def _largest(program: Program, found: list[Forward]) -> list[Prediction]:
    """Of each what is saved, and of the block that is largest at the captured sizes."""
    made = []
    for each in found:
        blocks = {sympy.sympify(f).xreplace(program.hints): f for f in dict.fromkeys(each.blocks)}
        made.append(Prediction(each.saved, blocks[max(blocks)] if blocks else 0))
    return made


def _in_forms(
    program: Program, run: Callable[[dict[Any, int]], list[Forward] | None]
) -> list[Forward] | None:
    """What ``run`` gives, with closed forms of the dynamic sizes in place of bytes; None where
    there are none."""
    batch = [s for s in batch_sizes(program) if s in program.hints]
    base = run(program.hints)
    if base is None:
        return None

    def numbers(sizes: dict[Any, int]) -> list[int] | None:
        found = base if sizes == program.hints else run(sizes)
        return None if found is None else [n for f in found for n in (f.saved, *f.blocks)]

    for symbols in ([*program.hints], batch):
        if 0 < len(symbols) <= MOST_SIZES:
            forms = _forms(program, numbers, symbols, batch)
            if forms is not None:
                left = iter(forms)
                return [Forward(next(left), [next(left) for _ in f.blocks]) for f in base]
    return None


def _forms(
    program: Program,
    run_at: Callable[[dict[Any, int]], list[int] | None],
    symbols: list[Any],
    batch: list[Any],
) -> list[Any] | None:
    """The numbers that ``run_at`` gives as polynomials of these sizes; the lowest that fit."""
    hints = program.hints

    @functools.cache
    def run(times: tuple[int, ...]) -> list[int] | None:
        grown = {s: hints[s] * t for s, t in zip(symbols, times, strict=True)}
        return run_at({**hints, **grown})

    for degree in (1, 2):
        powers = list(itertools.product(*(range(2 if s in batch else degree + 1) for s in symbols)))
        factors = _through(run, powers)
        if factors is not None:
            bases = [
                math.prod((s / hints[s]) ** p for s, p in zip(symbols, each, strict=True))
                for each in powers
            ]
            return [
                sympy.expand(sum(f * b for f, b in zip(each, bases, strict=True)))
                for each in factors
            ]
    return None


def _through(
    run: Callable[[tuple[int, ...]], list[int] | None], powers: list[tuple[int, ...]]
) -> list[list[Any]] | None:
    """The factors of these powers in each of the numbers that ``run`` gives, exactly; None where it
    gives none, or the point that checks them lies elsewhere."""
    points = [tuple(TIMES[p] for p in each) for each in powers]
    points.append((CHECKED,) * len(powers[0]))
    found = [run(times) for times in points]
    if None in found or len({len(values) for values in found if values}) > 1:
        return None
    *rows, last = (
        [math.prod(t**p for t, p in zip(times, each, strict=True)) for each in powers]
        for times in points
    )
    inverse = sympy.Matrix(rows).inv()
    out = []
    for *values, check in zip(*found, strict=True):  # type: ignore[arg-type]
        factors = list(inverse * sympy.Matrix(values))
        if sum(f * x for f, x in zip(factors, last, strict=True)) != check:
            return None
        out.append(factors)
    return out
