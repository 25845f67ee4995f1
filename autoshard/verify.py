"""verify: all ranks of any mesh in this process, in float64, against the model on one device."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.axes import dimension_of
from autoshard.capture import bind_inputs, data_ranks
from autoshard.emit import ShardedModule
from autoshard.errors import CaptureError, MeshError, ShardingError, message
from autoshard.inputs import find_inputs
from autoshard.layout import piece_bounds
from autoshard.mesh import MeshSpec
from autoshard.objective import loss_graph, no_loss
from autoshard.outputs import tensors_of
from autoshard.pipeline import joined, plan_of, rows_of, split_inputs
from autoshard.program import Parameter, Program, module_path
from autoshard.progress import say
from autoshard.runtime import boxes, gather, rng
from autoshard.runtime.loads import loads_of, share_of
from autoshard.simulate import simulate, sum_over_ranks
from autoshard.simulate_pipeline import simulate_pipeline

RELATIVE, FLOOR = 1e-9, 1e-12
#: Reports with more rows are printed with one row a kind.
MANY_ROWS = 20
LOW = (torch.float32, torch.bfloat16, torch.float16)


class _Float64(TorchDispatchMode):
    """Casts to lower precision inside the model become casts to float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in LOW:
            kwargs["dtype"] = torch.float64
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is torch.float64:
            return _grouped_mm(args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"])
        return func(*args, **kwargs)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The grouped product that torch's CPU kernel refuses in float64: rows of ``a`` by group times
    ``b[group]``; or, for the weight's gradient, columns of ``a`` times rows of ``b``, by group."""
    ends = [0, *offs.tolist()]
    spans = [slice(i, j) for i, j in zip(ends, ends[1:], strict=False)]
    if b.ndim == 3:
        out = a.new_zeros(a.shape[0], b.shape[2])
        for group, span in enumerate(spans):
            out[span] = a[span] @ b[group]
        return out
    return torch.stack([a[:, span] @ b[span] for span in spans])


@dataclass
class Row:
    """One comparison: what kind of value of which name, largest absolute difference, largest
    expected magnitude."""

    kind: str
    name: str
    difference: float
    magnitude: float

    @property
    def what(self) -> str:
        return f"{self.kind} {self.name}".strip()

    @property
    def ok(self) -> bool:
        return self.difference <= max(RELATIVE * self.magnitude, FLOOR)


@dataclass
class Report:
    """What `verify` found; prints as a table.

    ``ok``: every row agrees to 1e-9 relative (1e-12 absolute). ``sharded``: rank 0's module.
    """

    mesh: MeshSpec
    rows: list[Row] = field(default_factory=list)
    sharded: Any = None

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    def add(self, kind: str, name: str, got: Any, expected: Any) -> None:
        """Compare two tensors, or two times None."""
        if (got is None) != (expected is None):
            self.rows.append(Row(kind, f"{name} (None on one side)", float("inf"), 0.0))
            return
        if got is None:
            return
        if got.shape != expected.shape:
            shapes = f"{tuple(got.shape)} != {tuple(expected.shape)}"
            self.rows.append(Row(kind, f"{name} {shapes}", float("inf"), 0.0))
            return
        if not got.numel():
            return
        got, expected = got.detach().double(), expected.detach().double()
        difference = (got - expected).abs().max().item()
        difference = float("inf") if difference != difference else difference
        self.rows.append(Row(kind, name, difference, expected.abs().max().item()))

    def add_all(self, kind: str, name: str, pairs: list[tuple[Any, Any]]) -> None:
        """Compare what every rank holds; one row, of the rank that is furthest off."""
        ranks = Report(self.mesh)
        for r, (got, expected) in enumerate(pairs):
            ranks.add(kind, f"{name} rank {r}", got, expected)
        if not ranks.rows:
            return
        worst = _worst(ranks.rows)
        self.rows.append(Row(kind, name, *_numbers(worst)) if worst.ok else worst)

    def table(self, only_failures: bool = False, limit: int | None = None) -> str:
        """The rows as text. Beyond ``limit`` rows, rows that agree are folded into one for each
        kind (what is compared, in which step), the one with the largest difference."""
        rows = [r for r in self.rows if not (only_failures and r.ok)]
        if limit is not None and len(rows) > limit:
            rows = _folded(rows)
        return tabulate(
            [
                (
                    r.what,
                    f"{r.difference:.2e}",
                    f"{r.magnitude:.2e}",
                    "ok" if r.ok else "DIFFERS",
                )
                for r in rows
            ],
            headers=("what", "max difference", "max value", "verdict"),
        )

    @property
    def verdict(self) -> str:
        """One line: how many values were compared, and how many differ."""
        bad = sum(not r.ok for r in self.rows)
        verdict = "equal to one device" if self.ok else f"{bad} of {len(self.rows)} differ"
        loads = self.sharded.expert_load() if self.sharded is not None else []
        dropped = sum(load.dropped for load in loads)
        if dropped:
            chosen = sum(sum(load.tokens) for load in loads)
            verdict += f"; expert_capacity drops {dropped} of {chosen} choices, one device none"
        return f"mesh {self.mesh}: {len(self.rows)} compared, {verdict}"

    def __str__(self) -> str:
        return f"{self.table(limit=MANY_ROWS)}\n\n{self.verdict}"


def _folded(rows: list[Row]) -> list[Row]:
    """Rows that differ, and of the others one a kind: the largest difference stands for all."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(row.kind if row.ok else row.what, []).append(row)
    out = []
    for kind, same in kinds.items():
        worst = _worst(same)
        if len(same) > 1:
            worst = Row(f"{len(same)} x {kind},", f"worst {worst.name}", *_numbers(worst))
        out.append(worst)
    return out


def _worst(rows: list[Row]) -> Row:
    return max(rows, key=lambda r: r.difference / max(r.magnitude, FLOOR / RELATIVE))


def _numbers(row: Row) -> tuple[float, float]:
    return row.difference, row.magnitude


@contextlib.contextmanager
def _float64_by_default() -> Iterator[None]:
    """Tensors that the model makes without naming a type are float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@_float64_by_default()
def verify(
    model: nn.Module,
    mesh: Any,
    example_inputs: Any = None,
    steps: int = 2,
    *,
    max_norm: float = 1.0,
    optimizer: Any = None,
    accumulate: int = 1,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    stages: str | None = None,
    chunks: int | None = None,
    sequence_parallel: bool = True,
    context_parallel: str = "ring",
    expert_capacity: float | None = None,
    zero: int = 1,
    zero_axes: tuple[str, ...] | None = None,
    reshard_after_forward: bool = True,
    loss_fn: Any = None,
    strict: bool = False,
    recompute: str = "none",
    passes: Any = None,
) -> Report:
    """Compare training on a mesh with training on one device, in float64.

    Runs ``steps`` optimizer steps (AdamW unless ``optimizer(params)`` is given) on copies of the
    model, with gradients clipped to ``max_norm``. ``example_inputs`` is the global batch; with
    ``accumulate``, a step adds up the gradients of so many batches, made of it by moving its rows
    on. The other options are those of `autoshard`. Raises MeshError for a batch that the data axes
    do not divide, CaptureError for a model on the meta device, with nothing to train, that cannot
    be copied, or whose loss cannot be told, and ShardingError for one whose ranks draw random
    numbers of their own (dropout). A model without a loss is trained on the mean squares of its
    outputs.
    """
    from autoshard.api import Source

    spec = MeshSpec.of(mesh)
    if accumulate < 1 or steps < 1:
        raise ShardingError(
            message(
                "verify",
                f"steps={steps}, accumulate={accumulate}",
                "numbers of steps, and of batches a step",
                "nothing would be compared",
                "give 1 or more of each",
            )
        )
    reference = _double_model(model)
    given = (
        find_inputs(model, data_ranks(spec))
        if example_inputs is None
        else bind_inputs(model, example_inputs)
    )
    batch = {k: _double(v) for k, v in given.items()}
    source = Source(
        reference,
        spec,
        batch,
        loss_fn=loss_fn,
        passes=passes,
        options={
            "sequence_parallel": sequence_parallel,
            "context_parallel": context_parallel,
            "expert_capacity": expert_capacity,
            "strict": strict,
            "zero": zero,
            "zero_axes": zero_axes,
            "reshard_after_forward": reshard_after_forward,
            "recompute": recompute,
            "microbatches": microbatches,
            "schedule": schedule,
            "stages": stages,
            "chunks": chunks,
        },
        raise_precision=True,
    )
    program = source.program(reference.training)
    if program.wrong_loss or (program.loss is None and program.pipeline is not None):
        raise no_loss("verify", program)
    if not any(p.trainable for p in program.values.values()):
        raise CaptureError(
            message(
                "verify",
                type(model).__name__,
                f"{len(program.parameters())} parameters in use, none of them trainable",
                "there is nothing to train and compare",
                "give a model with parameters that require gradients",
            )
        )
    _divides(program, batch)
    _is_determined(program)
    ranks = [ShardedModule(program, r, False, source) for r in range(spec.world_size)]
    report = Report(spec, sharded=ranks[0])
    make = optimizer or (lambda params: torch.optim.AdamW(params))
    own = make([p for p in reference.parameters() if p.requires_grad])
    theirs: list[Any] = []  # None of a rank whose stages train nothing
    for module in ranks:
        trained = [p for p in module.parameters() if p.requires_grad]
        theirs.append(make(trained) if trained else None)
    for step in range(steps):
        say(f"step {step + 1} of {steps}")
        for turn in range(accumulate):
            seed, given = torch.get_rng_state(), _moved_on(batch, turn)
            expected = _reference_step(reference, given, loss_fn, program)
            torch.set_rng_state(seed)
            name = f"step {step}" if accumulate == 1 else f"step {step}.{turn}"
            _run_step(report, program, ranks, given, expected, name)
        _compare_gradients(report, program, ranks, reference, step)
        norm = nn.utils.clip_grad_norm_(
            [p for p in reference.parameters() if p.grad is not None], max_norm
        )
        total = torch.stack([gather.squared_norm(m) for m in ranks]).sum().sqrt()
        report.add(f"step {step} gradient norm", "", total, norm)
        for module, each in zip(ranks, theirs, strict=True):
            gather.scale_gradients(module, total, max_norm)
            if each is not None:
                each.step()
                each.zero_grad()
        own.step()
        own.zero_grad()
    _compare_parameters(report, program, ranks, reference)
    if program.mixtures:
        shares = [share_of(m._running.loads.values(), program.mesh, m.rank_index) for m in ranks]
        ranks[0]._load = loads_of(program.mixtures, torch.stack(shares).sum(0), program.mesh)
    return report


def _cut_dims(program: Program) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Per input that ranks hold their own rows of: the dimension, and the mesh axes that cut it."""
    found = {}
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in program.inputs:
            continue
        layout = program.layouts.get(node) or {}
        over = tuple(m for m, state in layout.items() if not isinstance(state, str))
        if over:
            at = dimension_of(layout[over[0]], program.dims[node])
            found[program.inputs[node.name]] = (at, over)
    return found


def _divides(program: Program, batch: dict[str, Any]) -> None:
    """Raise MeshError where the ranks would not hold equally many rows: a real run may, but then
    says so itself, and here it is a slip."""
    for name, (at, over) in _cut_dims(program).items():
        rows, ranks = batch[name].shape[at], program.mesh.size(over)
        if rows % ranks:
            raise MeshError(
                message(
                    "verify",
                    f"input {name}",
                    f"{rows} rows over {','.join(over)} = {ranks} ranks",
                    f"{rows} is not a multiple of {ranks}",
                    f"give {rows - rows % ranks or ranks} rows, or a mesh with a smaller data axis",
                )
            )


def _is_determined(program: Program) -> None:
    """Raise ShardingError where ranks draw their own random numbers: no one device draws those."""
    random = []
    for node in program.graph.nodes:
        if node.target is not rng.draw or not node.args[1]:
            continue
        # dropout(x, p, train) and native_dropout: nothing is drawn at p = 0
        if "dropout" in str(node.args[0]) and (node.args[3] == 0 or not node.args[4]):
            continue
        random.append(f"{module_path(node) or 'forward'} over {','.join(node.args[1])}")
    if random:
        more = f" and {len(random) - 5} more" if len(random) > 5 else ""
        raise ShardingError(
            message(
                "verify",
                "random numbers",
                f"{'; '.join(random[:5])}{more}",
                "each rank draws its own for its part, which no run on one device can repeat",
                "set dropout to 0 in the model given to verify, or call model.eval() first",
            )
        )


def _double(value: Any) -> Any:
    return (
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    )


def _double_model(model: nn.Module) -> nn.Module:
    if any(p.is_meta for p in model.parameters()):
        raise CaptureError(
            message(
                "verify",
                type(model).__name__,
                "its parameters are on the meta device",
                "there are no values to train with on one device",
                "build a small model of the same kind on the CPU",
            )
        )
    try:
        return copy.deepcopy(model).double()
    except RuntimeError as error:  # as by torch.nn.utils.weight_norm, which keeps computed weights
        raise CaptureError(
            message(
                "verify",
                type(model).__name__,
                str(error)[:200],
                "verify trains a deep copy of the model, and this one cannot be copied",
                "use torch.nn.utils.parametrizations (weight_norm, ...) in place of nn.utils",
            )
        ) from error


def _reference_step(
    model: nn.Module, batch: dict[str, Any], loss_fn: Any, program: Program
) -> dict[str, Any]:
    names = inspect.signature(model.forward).parameters
    own = {k: v for k, v in batch.items() if loss_fn is None or k in names}
    with _Float64():
        out = model(**own)
        named = tensors_of(out)
        if loss_fn is not None:
            extra = {k: v for k, v in batch.items() if k not in names}
            named = {"loss": loss_fn(out, **extra), **named}
        flat = dict(zip(_names(named), pytree.tree_leaves(named), strict=True))
        at = program.loss
        _objective(flat, None if at is None else flat[program.output_names[at]]).backward()
    return flat


def _objective(outputs: dict[str, torch.Tensor], loss: torch.Tensor | None) -> torch.Tensor:
    """The loss; without one, the mean square of every output."""
    if loss is not None:
        return loss
    return sum((v**2).mean() for v in outputs.values() if v.requires_grad)  # type: ignore[return-value]


def _names(tree: Any) -> list[str]:
    found = pytree.tree_flatten_with_path(tree)[0]
    return [pytree.keystr(p).replace("['", ".").replace("']", "").strip(".") for p, _ in found]


def split_batch(program: Program, batch: dict[str, Any], rank: int) -> dict[str, Any]:
    """The rows of a global batch that a rank's data coordinate holds."""
    out = dict(batch)
    for name, (at, over) in _cut_dims(program).items():
        parts, index = program.mesh.size(over), program.mesh.index(rank, over)
        start, stop = piece_bounds(batch[name].shape[at], parts, index)
        out[name] = batch[name].narrow(at, start, stop - start)
    return out


def _moved_on(batch: dict[str, Any], turn: int) -> dict[str, Any]:
    """Another batch of the same kind: its rows moved on, so that other ranks have them."""
    if not turn:
        return batch
    rows = {v.shape[0] for v in batch.values() if isinstance(v, torch.Tensor) and v.ndim}
    return {
        k: v.roll(turn, 0) if len(rows) == 1 and isinstance(v, torch.Tensor) and v.ndim else v
        for k, v in batch.items()
    }


def _run_step(
    report: Report,
    program: Program,
    ranks: list[ShardedModule],
    batch: Any,
    expected: Any,
    step: str,
) -> None:
    """Forward and backward of all ranks; losses and outputs are compared."""
    if program.pipeline is not None:
        _run_stages(report, program, ranks, batch, expected, step)
        return
    arguments = [m.arguments((), split_batch(program, batch, r)) for r, m in enumerate(ranks)]
    units = [{**m.units, **m._running.loads} for m in ranks]
    place = (program.mesh, arguments, units, program.attentions)
    results = simulate(program.graph, *place)
    names = program.output_names
    if program.loss is not None:
        seed = torch.get_rng_state()
        results_loss = simulate(loss_graph(program), *place)
        torch.set_rng_state(seed)
        torch.autograd.backward([r[0] for r in results_loss])
        for r, got in enumerate(results_loss):
            report.add(f"{step} loss", f"rank {r}", got[0], expected[names[program.loss]])
    else:
        objectives = [_objective(dict(zip(names, r, strict=False)), None) for r in results]
        torch.autograd.backward(objectives)
    with torch.no_grad():
        _compare_outputs(report, program, results, expected, step)
        for r, module in enumerate(ranks):
            module._update_buffers(results[r], program.buffer_updates)


def _run_stages(
    report: Report,
    program: Program,
    ranks: list[ShardedModule],
    batch: Any,
    expected: Any,
    step: str,
) -> None:
    """The same with layers in stages: first the outputs of all micro-batches, then a step."""
    inputs, units = [], [{**m.units, **m._running.loads} for m in ranks]
    for r in range(len(ranks)):
        given = split_batch(program, batch, r)
        own = {key: given[name] for key, name in program.inputs.items()}
        count = program.pipeline.count(rows_of(program, own))
        inputs.append(split_inputs(program, own, count))
    held = [m.held_tensors() for m in ranks]
    loss, *updates = plan_of(program, True).results
    seed = torch.get_rng_state()
    with torch.no_grad():
        found = simulate_pipeline(program, plan_of(program, False), held, inputs, units, False)
    torch.set_rng_state(seed)
    results = simulate_pipeline(program, plan_of(program, True), held, inputs, units, True)
    assert program.loss is not None
    wanted = expected[program.output_names[program.loss]]
    for r, got in enumerate(results):
        if loss in got:
            report.add(f"{step} loss", f"rank {r}", got[loss][0], wanted)
        with torch.no_grad():
            for name, key in zip(updates, program.buffer_updates, strict=True):
                if name in got:
                    ranks[r].tensor(key).copy_(got[name][0])
    outputs = plan_of(program, False).results
    made = [[joined(program, n, got[n]) if n in got else None for n in outputs] for got in found]
    _compare_outputs(report, program, made, expected, step)


@torch.no_grad()
def _compare_gradients(
    report: Report, program: Program, ranks: list[ShardedModule], model: nn.Module, step: int
) -> None:
    reduce_gradients(program, ranks)
    named = dict(model.named_parameters())
    for key, parameter in program.parameters().items():
        got = {r: m.tensor(key).grad for r, m in _holders(parameter, ranks)}
        for own in parameter.own:
            reference = next(named[n] for n in own.names if n in named)
            pairs = _beside(program, own, got, reference.grad)
            report.add_all(f"step {step} gradient", own.name, pairs)
            _drop_noise(program, own, got, reference.grad)


def _holders(
    parameter: Parameter, ranks: list[ShardedModule]
) -> Iterator[tuple[int, ShardedModule]]:
    """The ranks that hold any of a parameter."""
    for r, module in enumerate(ranks):
        if parameter.held_by(module.program.mesh, r):
            yield r, module


def _drop_noise(program: Program, parameter: Parameter, held: dict[int, Any], whole: Any) -> None:
    """What is zero to the floor becomes zero everywhere, once compared: AdamW divides a gradient by
    its own size, and would make a step of the rounding of one that is zero in exact arithmetic."""
    if whole is None or any(local is None for local in held.values()):
        return
    noise = whole.abs() <= FLOOR
    for r, local in held.items():
        for box in boxes.held(parameter, program.mesh, r):
            part, mask = box.of(local), boxes.part_of(noise, box.offsets, box.sizes)
            part[mask & (part.abs() <= FLOOR)] = 0
    whole[noise] = 0


def _compare_outputs(
    report: Report, program: Program, results: list[Any], expected: Any, step: str
) -> None:
    output = next(n for n in program.graph.nodes if n.op == "output")
    mesh = program.mesh
    for i, name in enumerate(program.output_names):
        if i == program.loss:
            continue
        layout = program.layouts.get(output.args[0][i], {})
        cut = tuple(
            m for m in mesh.axes if not isinstance(layout.get(m), str) and layout.get(m) is not None
        )
        if not cut:
            for r, result in enumerate(results):
                if result[i] is not None:  # else another stage has it
                    report.add(f"{step} output {name}", f"rank {r}", result[i], expected[name])
            continue
        at = dimension_of(layout[cut[0]], program.dims[output.args[0][i]])
        groups = {tuple(mesh.peers(r, cut)) for r in range(len(results))}
        there = [g for g in sorted(groups) if results[g[0]][i] is not None]
        wholes = [torch.cat([results[r][i] for r in group], at) for group in there]
        pairs = [(whole, expected[name]) for whole in wholes]
        report.add_all(f"{step} output", name, pairs)


def reduce_gradients(program: Program, ranks: list[ShardedModule]) -> None:
    """What the buckets do on live ranks, of parameters that no unit reduces."""
    in_units = program.in_units
    for key, parameter in program.parameters().items():
        tensors = {r: m.tensor(key) for r, m in _holders(parameter, ranks)}
        if not parameter.trainable or all(t.grad is None for t in tensors.values()):
            continue
        if len(parameter.holders or ()) > 1 or key not in in_units:
            for tensor in tensors.values():
                tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        if key not in in_units:
            sum_over_ranks(parameter, program.mesh, {r: t.grad for r, t in tensors.items()})
        for group in _tied(parameter, program, tensors):
            total = torch.stack([tensors[r].grad for r in group]).sum(0)
            for r in group:
                tensors[r].grad = total.clone()


def _tied(parameter: Parameter, program: Program, ranks: Any) -> list[list[int]]:
    """Of a parameter that several stages hold, the ranks that hold the same part of it."""
    if len(parameter.holders or ()) < 2:
        return []
    count = program.mesh.mesh.world_size // program.mesh.mesh.size("pp")
    groups: dict[int, list[int]] = {}
    for r in ranks:
        groups.setdefault(r % count, []).append(r)
    return list(groups.values())


def _beside(
    program: Program, parameter: Parameter, held: dict[int, Any], whole: torch.Tensor | None
) -> list[tuple[Any, Any]]:
    """What every rank holds of a parameter or gradient, with what it should hold."""
    if whole is None:
        return [(local, None) for local in held.values()]
    mesh = program.mesh
    if parameter.place is None:
        return [
            (local, gather.local_value(parameter, mesh, r, lambda _: whole))
            for r, local in held.items()
        ]
    out: list[tuple[Any, Any]] = []
    for r, local in held.items():  # a stack: what is of this parameter
        found = boxes.held(parameter, mesh, r)
        expected = [boxes.part_of(whole, box.offsets, box.sizes).flatten() for box in found]
        got = [box.of(local).flatten() for box in found] if local is not None else []
        out.append((torch.cat(got) if got else None, torch.cat(expected) if expected else None))
    return out


@torch.no_grad()
def _compare_parameters(
    report: Report, program: Program, ranks: list[ShardedModule], model: nn.Module
) -> None:
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for key, parameter in program.values.items():
        for own in parameter.own:
            names = [n for n in own.names if n in state]
            if names:
                held = {r: m.tensor(key) for r, m in _holders(parameter, ranks)}
                pairs = _beside(program, own, held, state[names[0]])
                kind = "buffer" if own.buffer else "parameter"
                report.add_all(f"{kind} after the steps", own.name, pairs)
