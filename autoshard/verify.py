"""verify: all ranks of any mesh in this process, in float64, against the model on one device."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.capture import _tensor_outputs, bind_inputs, find_inputs
from autoshard.emit import ShardedModule, loss_graph
from autoshard.layout import piece_bounds
from autoshard.mesh import DATA_AXES, MeshSpec
from autoshard.program import Program
from autoshard.runtime import gather
from autoshard.simulate import simulate

RELATIVE, FLOOR = 1e-9, 1e-12
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
    """One comparison: largest absolute difference, largest expected magnitude, verdict."""

    what: str
    difference: float
    magnitude: float

    @property
    def ok(self) -> bool:
        return self.difference <= max(RELATIVE * self.magnitude, FLOOR)


@dataclass
class Report:
    """What `verify` found; prints as a table. ``ok``: every row agrees to 1e-9 relative (1e-12 absolute)."""

    mesh: MeshSpec
    rows: list[Row] = field(default_factory=list)
    sharded: Any = None

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    def add(self, what: str, got: Any, expected: Any) -> None:
        if (got is None) != (expected is None):
            self.rows.append(Row(f"{what} (None on one side)", float("inf"), 0.0))
            return
        if got is None:
            return
        if got.shape != expected.shape:
            self.rows.append(
                Row(f"{what} {tuple(got.shape)} != {tuple(expected.shape)}", float("inf"), 0.0)
            )
            return
        if not got.numel():
            return
        got, expected = got.detach().double(), expected.detach().double()
        difference = (got - expected).abs().max().item()
        difference = float("inf") if difference != difference else difference
        self.rows.append(Row(what, difference, expected.abs().max().item()))

    def table(self, only_failures: bool = False) -> str:
        rows = [r for r in self.rows if not (only_failures and r.ok)]
        return tabulate(
            [
                (r.what, f"{r.difference:.2e}", f"{r.magnitude:.2e}", "ok" if r.ok else "DIFFERS")
                for r in rows
            ],
            headers=("what", "max difference", "max value", "verdict"),
        )

    def __str__(self) -> str:
        bad = sum(not r.ok for r in self.rows)
        verdict = "equal to one device" if self.ok else f"{bad} of {len(self.rows)} differ"
        return f"{self.table()}\n\nmesh {self.mesh}: {len(self.rows)} compared, {verdict}"


def verify(
    model: nn.Module,
    mesh: Any,
    example_inputs: Any = None,
    steps: int = 2,
    *,
    max_norm: float = 1.0,
    optimizer: Any = None,
    **options: Any,
) -> Report:
    """Compare training on a mesh with training on one device, in float64.

    Runs ``steps`` optimizer steps (AdamW unless ``optimizer(params)`` is given) on copies of the model.
    ``example_inputs`` is the global batch. Options are those of `autoshard`.
    """
    from autoshard.api import build

    spec = MeshSpec.of(mesh)
    given = find_inputs(model) if example_inputs is None else bind_inputs(model, example_inputs)
    batch = {k: _double(v) for k, v in given.items()}
    reference = _double_model(model)
    program, output_type = build(reference, spec, batch, raise_precision=True, **options)
    signature = inspect.signature(model.forward)
    ranks = [
        ShardedModule(program, r, False, signature, output_type) for r in range(spec.world_size)
    ]
    report = Report(spec, sharded=ranks[0])
    make = optimizer or (lambda params: torch.optim.AdamW(params))
    own = make([p for p in reference.parameters() if p.requires_grad])
    theirs = [make([p for p in m.parameters() if p.requires_grad]) for m in ranks]
    loss_fn = options.get("loss_fn")
    for step in range(steps):
        seed = torch.get_rng_state()
        expected = _reference_step(reference, batch, loss_fn)
        torch.set_rng_state(seed)
        _compare_step(report, program, ranks, batch, reference, expected, step)
        norm = nn.utils.clip_grad_norm_(
            [p for p in reference.parameters() if p.grad is not None], max_norm
        )
        total = torch.stack([gather.squared_norm(m) for m in ranks]).sum().sqrt()
        report.add(f"step {step} gradient norm", total, norm)
        for module, each in zip(ranks, theirs, strict=True):
            gather.scale_gradients(module, total, max_norm)
            each.step()
            each.zero_grad()
        own.step()
        own.zero_grad()
    _compare_parameters(report, program, ranks, reference)
    return report


def _double(value: Any) -> Any:
    return (
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    )


def _double_model(model: nn.Module) -> nn.Module:
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("verify needs real parameters; this model is on the meta device")
    return copy.deepcopy(model).double()


def _reference_step(model: nn.Module, batch: dict[str, Any], loss_fn: Any) -> dict[str, Any]:
    names = inspect.signature(model.forward).parameters
    own = {k: v for k, v in batch.items() if loss_fn is None or k in names}
    with _Float64():
        out = model(**own)
        named = _tensor_outputs(out)
        if loss_fn is not None:
            extra = {k: v for k, v in batch.items() if k not in names}
            named = {"loss": loss_fn(out, **extra), **named}
        flat = dict(zip(_names(named), pytree.tree_leaves(named), strict=True))
        loss = next((v for k, v in flat.items() if k == "loss"), None)
        if loss is None:
            scalars = [v for v in flat.values() if v.ndim == 0 and v.is_floating_point()]
            loss = scalars[0] if scalars else None
        _objective(flat, loss).backward()
    return flat


def _objective(outputs: dict[str, torch.Tensor], loss: torch.Tensor | None) -> torch.Tensor:
    """The loss; without one, the mean square of every output."""
    if loss is not None:
        return loss
    return sum((v**2).mean() for v in outputs.values() if v.requires_grad)  # type: ignore[return-value]


def _names(tree: Any) -> list[str]:
    found = pytree.tree_flatten_with_path(tree)[0]
    return [pytree.keystr(p).replace("['", ".").replace("']", "").strip(".") for p, _ in found]


def split_batch(batch: dict[str, Any], mesh: MeshSpec, rank: int) -> dict[str, Any]:
    """The rows of a global batch that a rank's data coordinate holds."""
    coordinate, index, parts = mesh.coordinate(rank), 0, 1
    for name in DATA_AXES:
        index = index * mesh.size(name) + coordinate.get(name, 0)
        parts *= mesh.size(name)
    out = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            start, stop = piece_bounds(value.shape[0], parts, index)
            value = value[start:stop]
        out[key] = value
    return out


def _compare_step(
    report: Report,
    program: Program,
    ranks: list[ShardedModule],
    batch: Any,
    model: nn.Module,
    expected: Any,
    step: int,
) -> None:
    arguments = [m.arguments((), split_batch(batch, report.mesh, r)) for r, m in enumerate(ranks)]
    results = simulate(program.graph, program.mesh, arguments)
    names = program.output_names
    if program.loss is not None:
        seed = torch.get_rng_state()
        results_loss = simulate(loss_graph(program), program.mesh, arguments)
        torch.set_rng_state(seed)
        torch.autograd.backward([r[0] for r in results_loss])
        for r, got in enumerate(results_loss):
            report.add(f"step {step} loss, rank {r}", got[0], expected[names[program.loss]])
    else:
        objectives = [_objective(dict(zip(names, r, strict=False)), None) for r in results]
        torch.autograd.backward(objectives)
    with torch.no_grad():
        _compare_outputs(report, program, results, expected, step)
        for r, module in enumerate(ranks):
            module._update_buffers(results[r], program.buffer_updates)
        reduce_gradients(program, ranks)
        named = dict(model.named_parameters())
        for key, parameter in program.parameters().items():
            reference = next(named[n] for n in parameter.names if n in named)
            locals_ = [m.tensor(key).grad for m in ranks]
            got = None if locals_[0] is None else assemble(program, key, locals_)
            report.add(f"step {step} gradient of {parameter.name}", got, reference.grad)


def _compare_outputs(
    report: Report, program: Program, results: list[Any], expected: Any, step: int
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
                report.add(f"step {step} output {name}, rank {r}", result[i], expected[name])
            continue
        first = mesh.peers(0, cut)
        axis, dims = layout[cut[0]], program.dims[output.args[0][i]]
        from autoshard.axes import atoms

        at = next(d for d, dim in enumerate(dims) if axis in set(atoms(dim)))
        whole = torch.cat([results[r][i] for r in first], at)
        report.add(f"step {step} output {name}", whole, expected[name])


def reduce_gradients(program: Program, ranks: list[ShardedModule]) -> None:
    """What the buckets do on live ranks."""
    for key, parameter in program.parameters().items():
        if not parameter.trainable or ranks[0].tensor(key).grad is None:
            continue
        for piece in gather.reductions(parameter, program.mesh):
            done: set[int] = set()
            for r in range(len(ranks)):
                if r in done:
                    continue
                group = program.mesh.peers(r, piece[3])
                done.update(group)
                views = [gather.view_of(ranks[p].tensor(key).grad, piece) for p in group]
                total = torch.stack(views).sum(0)
                for view in views:
                    view.copy_(total)


def assemble(program: Program, key: str, locals_: list[torch.Tensor]) -> torch.Tensor:
    """A whole tensor from every rank's slice."""
    parameter = program.values[key]
    pieces = [gather.place(parameter, x, program.mesh, r) for r, x in enumerate(locals_)]
    return torch.stack(pieces).sum(0)


@torch.no_grad()
def _compare_parameters(
    report: Report, program: Program, ranks: list[ShardedModule], model: nn.Module
) -> None:
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for key, parameter in program.values.items():
        names = [n for n in parameter.names if n in state]
        if names and parameter.value.is_floating_point():
            got = assemble(program, key, [m.tensor(key).detach() for m in ranks])
            kind = "buffer" if parameter.buffer else "parameter"
            report.add(f"{kind} {parameter.name} after the steps", got, state[names[0]])
