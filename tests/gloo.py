"""Jobs on real gloo processes: what a user's training script would do, in float64."""

from __future__ import annotations

import contextlib
import math
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import handwritten as hw
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from zoo import batch, tiny

LIMIT_SECONDS = 300
LEARNING_RATE, CLIP = 1e-3, 0.25


class InFloat64(TorchFunctionMode):
    """Raises a model's own casts to float32, so that agreement can be asked for to 1e-9."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        raised = torch.utils._pytree.tree_map(
            lambda value: torch.float64 if value is torch.float32 else value, (args, kwargs or {})
        )
        return function(*raised[0], **raised[1])


def build(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model in float64 with its global batch, the same on every call."""
    torch.manual_seed(0)
    if name == "resnet":
        model, inputs = hw.ResNet(), hw.images()
    elif name == "handwritten":
        model, inputs = hw.GPT(), hw.tokens()
    else:
        model, inputs = tiny(name), batch()
        if hasattr(model.config, "_experts_implementation"):
            model.config._experts_implementation = "batched_mm"  # grouped_mm refuses float64
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return model.double(), inputs


# --- processes ---


def launch(sizes: dict[str, int], jobs: dict[str, tuple], folder: Path) -> None:
    """Run every job on every rank of a mesh; the folder then holds the results."""
    world = math.prod(sizes.values())
    context = torch.multiprocessing.spawn(
        _rank, (world, sizes, jobs, str(folder)), nprocs=world, join=False
    )
    deadline = time.monotonic() + LIMIT_SECONDS
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"ranks of {sizes} still run after {LIMIT_SECONDS} s")


def results_in(folder: Path, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Per rank: job name -> its result, or the text of its traceback."""
    ranks = range(math.prod(sizes.values()))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in ranks]


def join(rank: int, world: int, folder: str, seconds: int) -> None:
    """Become a rank of a gloo world that meets in the folder and waits at most so long."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )


def _rank(rank: int, world: int, sizes: dict[str, int], jobs: dict[str, tuple], folder: str):
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    join(rank, world, folder, 60)
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )
    results = {}
    for name, (job, *arguments) in jobs.items():
        try:
            results[name] = job(mesh, *arguments)
        except Exception:  # handed to the test, which fails with it
            results[name] = traceback.format_exc()
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def local_rows(mesh, inputs: dict[str, torch.Tensor], sizes=None) -> dict[str, torch.Tensor]:
    """This data rank's rows of the global batch, in equal parts or in parts of the sizes given."""
    over = [axis for axis in ("dp", "ep") if axis in mesh.mesh_dim_names]
    if not over:
        return inputs
    rows, ranks, rank = len(next(iter(inputs.values()))), 1, 0
    for axis in over:
        ranks, rank = (
            ranks * mesh[axis].size(),
            rank * mesh[axis].size() + mesh.get_local_rank(axis),
        )
    sizes = sizes or [rows // ranks] * ranks
    return {k: v.split(sizes)[rank] for k, v in inputs.items()}


def shard(mesh, model, inputs, **options):
    from autoshard import autoshard

    with InFloat64():
        return autoshard(model, mesh, example_inputs=inputs, **options)


def detached(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in values.items() if value is not None}


# --- jobs on ranks, and the same on one device ---


def train(mesh, name: str, sizes: Any = None, **options: Any) -> dict[str, Any]:
    """Two AdamW steps with clipping: losses, norms, first gradients, and the state at the end."""
    model, inputs = build(name)
    sharded = shard(mesh, model, inputs, **options)
    rows = local_rows(mesh, inputs, sizes)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=LEARNING_RATE)
    out: dict[str, Any] = {"loss": [], "norm": []}
    for step in range(2):
        optimizer.zero_grad()
        out["loss"].append(torch.as_tensor(sharded.train_step(**rows)).detach().clone())
        if step == 0:
            out["gradients"] = detached(sharded.full_gradients())
        out["norm"].append(torch.as_tensor(sharded.clip_grad_norm_(CLIP)).detach().clone())
        optimizer.step()
    return out | {"state": detached(sharded.full_state_dict())}


def train_without_sequence(mesh, name: str) -> dict[str, Any]:
    return train(mesh, name, sequence_parallel=False)


def train_alone(name: str) -> dict[str, Any]:
    model, inputs = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    out: dict[str, Any] = {"loss": [], "norm": []}
    for step in range(2):
        optimizer.zero_grad()
        with InFloat64():
            loss = model(**inputs).loss
        loss.backward()
        out["loss"].append(loss.detach())
        if step == 0:
            out["gradients"] = gradients_of(model)
        out["norm"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
    return out | {"state": detached(model.state_dict())}


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return detached({n: p.grad for n, p in model.named_parameters()})


def other_shapes(mesh, name: str, shapes: list[tuple[int, int]]) -> dict[str, Any]:
    """Loss and gradients on batches of other sizes, from the one module."""
    model, inputs = build(name)
    sharded = shard(mesh, model, inputs)
    graph, code, out = sharded.graph_module, sharded.code, {"loss": [], "gradients": []}
    for b, s in shapes:
        for parameter in sharded.parameters():
            parameter.grad = None
        out["loss"].append(sharded.train_step(**local_rows(mesh, batch(b=b, s=s))).detach().clone())
        out["gradients"].append(detached(sharded.full_gradients()))
    return out | {"compiled_again": sharded.graph_module is not graph or sharded.code != code}


def other_shapes_alone(name: str, shapes: list[tuple[int, int]]) -> dict[str, Any]:
    model, _ = build(name)
    out: dict[str, Any] = {"loss": [], "gradients": []}
    for b, s in shapes:
        model.zero_grad()
        with InFloat64():
            loss = model(**batch(b=b, s=s)).loss
        loss.backward()
        out["loss"].append(loss.detach())
        out["gradients"].append(gradients_of(model))
    return out


def accumulate(mesh, name: str) -> dict[str, torch.Tensor]:
    """Gradients of two batches, the first without synchronising."""
    model, inputs = build(name)
    sharded = shard(mesh, model, inputs)
    rows = local_rows(mesh, inputs)
    with sharded.no_sync():
        sharded.train_step(**rows)
    sharded.train_step(**{k: v.roll(1, dims=1) for k, v in rows.items()})
    return detached(sharded.full_gradients())


def accumulate_alone(name: str) -> dict[str, torch.Tensor]:
    model, inputs = build(name)
    for rows in (inputs, {k: v.roll(1, dims=1) for k, v in inputs.items()}):
        with InFloat64():
            model(**rows).loss.backward()
    return gradients_of(model)


def accumulate_mixed(mesh, name: str, synced: str) -> list[dict[str, torch.Tensor]]:
    """Gradients accumulated over several batches, by the letter: s synchronises, n does not. Whole
    gradients after every s."""
    model, inputs = build(name)
    sharded = shard(mesh, model, inputs)
    rows, out = local_rows(mesh, inputs), []
    for step, letter in enumerate(synced):
        with sharded.no_sync() if letter == "n" else contextlib.nullcontext():
            sharded.train_step(**{k: v.roll(step, dims=1) for k, v in rows.items()})
        if letter == "s":
            out.append(detached(sharded.full_gradients()))
    return out


def accumulate_mixed_alone(name: str, synced: str) -> list[dict[str, torch.Tensor]]:
    model, inputs = build(name)
    out = []
    for step, letter in enumerate(synced):
        with InFloat64():
            model(**{k: v.roll(step, dims=1) for k, v in inputs.items()}).loss.backward()
        if letter == "s":
            out.append(gradients_of(model))
    return out


#: Which output each data rank goes backward from, step by step. ``idle`` is read by no output.
TURNS = [("left", "left"), ("right", "left"), ("right", "right")]


def take_turns(mesh) -> list[dict[str, torch.Tensor]]:
    """Data ranks go backward from different outputs; gradients accumulate."""
    from autoshard import autoshard

    inputs = hw.vectors(4, 32)
    sharded = autoshard(two_heads(), mesh, example_inputs={"x": inputs["x"].double()})
    rows, out = local_rows(mesh, {"x": inputs["x"].double()}), []
    for turn in TURNS:
        sharded(**rows)[turn[dist.get_rank()]].square().mean().backward()
        out.append(detached(sharded.full_gradients()))
    return out


def take_turns_alone() -> list[dict[str, torch.Tensor]]:
    model, x, out = two_heads(), hw.vectors(4, 32)["x"].double(), []
    for turn in TURNS:
        losses = [
            model(rows)[name].square().mean() for name, rows in zip(turn, x.chunk(2), strict=True)
        ]
        torch.stack(losses).mean().backward()
        out.append(gradients_of(model))
    return out


def two_heads() -> torch.nn.Module:
    torch.manual_seed(0)
    return hw.TwoHeads().double()


def compiled(mesh, name: str) -> dict[str, Any]:
    """Loss and gradients of ``torch.compile(sharded, fullgraph=True)``."""
    model, inputs = build(name)
    sharded = shard(mesh, model, inputs)
    loss = torch.compile(sharded, fullgraph=True)(**local_rows(mesh, inputs)).loss
    loss.backward()
    return {"loss": loss.detach().clone(), "gradients": detached(sharded.full_gradients())}


def call_and_backward(mesh, name: str) -> dict[str, Any]:
    """The module used like the model itself: outputs of this rank's rows, then ``backward``."""
    model, inputs = build(name)
    sharded = shard(mesh, model, inputs)
    out = sharded(**local_rows(mesh, inputs))
    out.loss.backward()
    return {
        "loss": out.loss.detach().clone(),
        "logits": out.logits.detach().clone(),
        "gradients": detached(sharded.full_gradients()),
    }


def made_from_meta(mesh, name: str) -> dict[str, Any]:
    """A meta model whose ranks have seeds of their own: its state, loss, and loss in eval mode."""
    from autoshard import autoshard

    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = tiny(name)
    torch.manual_seed(dist.get_rank())
    sharded = autoshard(model, mesh, example_inputs=batch())
    state = detached(sharded.full_state_dict())
    loss = sharded.train_step(**batch()).detach().clone()
    with torch.no_grad():
        evaluated = sharded.eval()(**batch()).loss.clone()
    return {"state": state, "loss": loss, "evaluated": evaluated}


def differing_batch(mesh, name: str, rank: int) -> dict[str, Any]:
    """One rank of a tensor-parallel group gets other tokens: the error, and what moved."""
    from autoshard.errors import AutoshardError

    model, inputs = build(name)
    sharded = shard(mesh, model, inputs)
    before = detached(dict(sharded.named_parameters()))
    rows = local_rows(mesh, inputs)
    if dist.get_rank() == rank:
        rows = {k: v.roll(1, dims=1) for k, v in rows.items()}
    out: dict[str, Any] = {"error": "", "kind": None}
    try:
        sharded.train_step(**rows)
    except AutoshardError as error:
        out = {"error": str(error), "kind": type(error)}
    after = dict(sharded.named_parameters())
    moved = [n for n, p in after.items() if p.grad is not None or not torch.equal(p, before[n])]
    return out | {"moved": moved}


def refusal(call) -> str:
    """The text of the named error that a call raises; '' for none."""
    from autoshard.errors import AutoshardError

    try:
        call()
    except AutoshardError as error:
        return str(error)
    return ""


def differing_model(mesh, rank: int) -> list[str]:
    """One rank builds another model."""
    from autoshard import autoshard

    model = hw.GPT(ffn=96 if dist.get_rank() == rank else 64)
    return [refusal(lambda: autoshard(model, mesh, example_inputs=hw.tokens()))]


def differing_seed(mesh) -> tuple[str, str]:
    """A model with dropout on ranks that were seeded alike, and differently."""
    from autoshard import autoshard

    out = []
    for seed in (0, dist.get_rank()):
        torch.manual_seed(7)
        model, inputs = tiny("gpt2"), batch()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        sharded = autoshard(model, mesh, example_inputs=inputs)
        torch.manual_seed(seed)
        rows = local_rows(mesh, inputs)
        out.append(refusal(lambda module=sharded, given=rows: module.train_step(**given)))
    return out[0], out[1]


def failing_capture(mesh, rank: int) -> list[str]:
    """One rank's model cannot be captured; one rank asks for what there is no pass for."""
    from autoshard import autoshard

    odd, inputs = dist.get_rank() == rank, hw.vectors(4, 32)
    model = hw.Branching() if odd else hw.MLP()
    return [
        refusal(lambda: autoshard(model, mesh, example_inputs=inputs)),
        refusal(
            lambda: autoshard(
                hw.MLP(), mesh, example_inputs=inputs, microbatches=0 if odd else None
            )
        ),
    ]


def differing_weights(mesh, rank: int) -> list[str]:
    """One rank's weights are others."""
    from autoshard import autoshard

    torch.manual_seed(0)
    model = hw.MLP()
    if dist.get_rank() == rank:
        with torch.no_grad():
            list(model.parameters())[-1].add_(1)
    return [refusal(lambda: autoshard(model, mesh, example_inputs=hw.vectors(4, 32)))]


def refused_batch(mesh, rank: int) -> tuple[str, bool]:
    """One rank's first batch is not what was captured; whether a right one then trains."""
    from autoshard import autoshard

    torch.manual_seed(0)
    inputs = hw.vectors(4, 32)
    sharded = autoshard(hw.MLP(), mesh, example_inputs=inputs)
    given = dict(inputs)
    if dist.get_rank() == rank:
        given["x"] = given["x"].double()
    text = refusal(lambda: sharded.train_step(**given))
    return text, bool(sharded.train_step(**inputs).isfinite())


def restore(mesh) -> dict[str, Any]:
    """A state saved on one mesh and loaded on another, whose model had other weights."""
    from autoshard import autoshard

    states = []
    line = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for seed, where in enumerate((mesh, line)):
        torch.manual_seed(seed)
        sharded = autoshard(tiny("gpt2"), where, example_inputs=batch())
        if states:
            sharded.load_full_state_dict(states[0])
        states.append(detached(sharded.full_state_dict()))
    return {"saved": states[0], "loaded": states[1]}


# --- a rank that stops ---


def stuck(folder: Path, seconds: int) -> list[tuple[float, str]]:
    """Two data ranks, of which the second stops after a step: per rank how long it waited in the
    next one, and what ended that."""
    torch.multiprocessing.spawn(_stuck_rank, (str(folder), seconds), nprocs=2)
    return [torch.load(folder / f"stuck{rank}.pt") for rank in range(2)]


def _stuck_rank(rank: int, folder: str, seconds: int) -> None:
    from autoshard import autoshard

    join(rank, 2, folder, seconds)
    line = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    inputs = hw.vectors(4, 32)
    sharded = autoshard(hw.MLP(), line, example_inputs=inputs)
    sharded.train_step(**inputs)
    began, error = time.monotonic(), ""
    while rank == 1 and not Path(f"{folder}/stuck0.pt").exists():
        time.sleep(0.1)
        if time.monotonic() - began > 10 * seconds:
            break
    if rank == 0:
        try:
            sharded.train_step(**inputs)
        except RuntimeError as caught:
            error = str(caught)
    torch.save((time.monotonic() - began, error), f"{folder}/stuck{rank}.pt")


def asking_for_gradients(mesh, name: str) -> list[bool]:
    """torch.autograd.grad after a step: whether every ``.grad`` is still what the step left."""
    model, inputs = build(name)
    sharded = shard(mesh, model, inputs)
    rows = local_rows(mesh, inputs)
    sharded.train_step(**rows)
    held = [p for p in sharded.parameters() if p.grad is not None]
    before = [p.grad.clone() for p in held]
    torch.autograd.grad(sharded(**rows)["loss"], held, allow_unused=True)
    return [torch.equal(p.grad, b) for p, b in zip(held, before, strict=True)]
