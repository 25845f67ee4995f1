"""Jobs of context parallelism on ranks, and the same on one device.

Every job takes a mesh, or None for one device, and gives what a user would look at. A mesh of four
ranks is laid out anew for jobs that name other ``axes``.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import gloo
import torch
import torch.distributed as dist
from gloo import InFloat64, detached, gradients_of
from torch import nn
from zero_jobs import loss_of, refused, rows_of
from zoo import batch, tiny

#: What a type needs to be what it is named for: a window shorter than the batch, a softcap.
OVER: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 1},
    "llama": {"num_hidden_layers": 1},
    "bloom": {"n_layer": 1},
    "gemma2": {"sliding_window": 8, "attn": "eager"},
    "gpt_oss": {"sliding_window": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
ROWS, LENGTH = 4, 24


def made(name: str, length: int = LENGTH, dropout: float = 0.0) -> tuple[nn.Module, dict]:
    """A model in float64 with its global batch, the same on every call. ``dropout``: in attention,
    of those types that have a module for it."""
    model = tiny(name, **OVER.get(name, {}))
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "batched_mm"  # grouped_mm refuses float64
    for path, module in model.named_modules():
        if path.endswith("attn_dropout"):
            module.p = dropout
    return model.double(), batch(b=ROWS, s=length)


def laid_out(mesh: Any, axes: dict[str, int] | None) -> Any:
    """The ranks of a mesh under other axes."""
    if mesh is None or axes is None:
        return mesh
    return dist.device_mesh.init_device_mesh(
        "cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)
    )


def step_of(mesh: Any, model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Forward and backward; the loss."""
    if mesh is not None:
        return model.train_step(**given).detach().clone()
    with InFloat64():
        loss = loss_of(model(**given))
    loss.backward()
    return loss.detach()


def train(
    mesh: Any,
    name: str,
    axes: dict[str, int] | None = None,
    lengths: tuple[int, ...] = (LENGTH, LENGTH),
    accumulate: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """An AdamW step on a batch of each length, after compiling for the first: losses, norms, the
    gradients of every step, and the state at the end."""
    model, inputs = made(name, lengths[0])
    mesh = laid_out(mesh, axes)
    if mesh is not None:
        model = gloo.shard(mesh, model, inputs, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=gloo.LEARNING_RATE)
    out: dict[str, Any] = {"loss": [], "norm": [], "gradients": []}
    for step, length in enumerate(lengths):
        optimizer.zero_grad()
        for turn in range(accumulate):
            given = batch(b=ROWS, s=length, seed=1 + step + 10 * turn)
            last = mesh is None or turn == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = step_of(mesh, model, given if mesh is None else rows_of(mesh, given))
        out["loss"].append(loss)
        if mesh is None:
            out["gradients"].append(gradients_of(model))
            norm = nn.utils.clip_grad_norm_(model.parameters(), gloo.CLIP)
        else:
            out["gradients"].append(detached(model.full_gradients()))
            norm = model.clip_grad_norm_(gloo.CLIP)
        out["norm"].append(torch.as_tensor(norm).detach().clone())
        optimizer.step()
    state = model.state_dict() if mesh is None else model.full_state_dict()
    return out | {"state": detached(state)}


@cache
def alone(name: str, lengths: tuple[int, ...] = (LENGTH, LENGTH), accumulate: int = 1) -> Any:
    return train(None, name, lengths=lengths, accumulate=accumulate)


def evaluated(mesh: Any, name: str, axes: dict[str, int] | None = None, **options: Any) -> Any:
    """Outputs in evaluation mode after a training step, on a batch of another length too; then the
    loss of training again."""
    model, inputs = made(name)
    mesh = laid_out(mesh, axes)
    if mesh is not None:
        model = gloo.shard(mesh, model, inputs, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = (lambda given: given) if mesh is None else (lambda given: rows_of(mesh, given))
    out: dict[str, Any] = {"loss": [], "logits": []}
    for length in (LENGTH, 13):
        optimizer.zero_grad()
        out["loss"].append(step_of(mesh, model, rows(inputs)))
        optimizer.step()
        model.eval()
        with torch.no_grad(), InFloat64():
            result = model(**rows(batch(b=ROWS, s=length)))
        out["loss"].append(result.loss.clone())
        out["logits"].append(result.logits.clone())
        model.train()
    out["loss"].append(step_of(mesh, model, rows(inputs)))
    return out


def short(mesh: Any, name: str, lengths: tuple[int, ...], **options: Any) -> dict[str, Any]:
    """Logits of sequences so short that some ranks hold nothing of them, and the gradients of their
    mean square, from one module."""
    model, inputs = made(name)
    if mesh is not None:
        model = gloo.shard(mesh, model, inputs, **options)
    out: dict[str, Any] = {"logits": [], "gradients": []}
    for length in lengths:
        for parameter in model.parameters():
            parameter.grad = None
        with InFloat64():
            logits = model(**batch(b=ROWS, s=length, pad=False)).logits
        logits.square().mean().backward()
        out["logits"].append(logits.detach().clone())
        found = gradients_of(model) if mesh is None else detached(model.full_gradients())
        out["gradients"].append(found)
    return out


def dropping(mesh: Any, name: str, recompute: str = "none", **options: Any) -> dict[str, Any]:
    """Losses with dropout in attention for seeds 1, 1 and 2, the loss without; how much the loss
    grows along its gradient, at equal masks, by differences and by backward."""
    plain, inputs = made(name)
    model, _ = made(name, dropout=0.25)
    sharded = gloo.shard(mesh, model, inputs, zero=0, recompute=recompute, **options)
    out: dict[str, Any] = {"loss": [], "recompute": recompute}

    def step(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return step_of(mesh, sharded, inputs)

    for seed in (1, 1, 2):
        out["loss"].append(step(seed))
    sharded.zero_grad()
    step(1)
    gradients = [p.grad.clone() for p in sharded.parameters()]
    out["gradients"] = detached(sharded.full_gradients())
    out["by backward"] = sum(g.square().sum() for g in gradients)
    sides, reach = [], 1e-5
    for move in (reach, -2 * reach):
        with torch.no_grad():
            for parameter, gradient in zip(sharded.parameters(), gradients, strict=True):
                parameter.add_(gradient, alpha=move)
        sides.append(step(1))
    out["by differences"] = (sides[0] - sides[1]) / (2 * reach)
    with InFloat64():
        out["without"] = loss_of(plain(**inputs)).detach()
    return out


def differing(mesh: Any, **options: Any) -> list[str]:
    """Ranks of cp are given other tokens, and then the right ones."""
    model, inputs = made("llama")
    sharded = gloo.shard(mesh, model, inputs, **options)
    given = {k: v.roll(dist.get_rank(), 1) for k, v in inputs.items()}
    told = refused(mesh, lambda _: sharded.train_step(**given))
    return [*told, str(bool(sharded.train_step(**inputs).isfinite()))]
