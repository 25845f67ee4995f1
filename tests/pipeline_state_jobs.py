"""Jobs on real gloo processes of what ranks of a pipeline hold: models on the meta device, files,
optimizers whose groups differ from rank to rank, stacks of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gloo
import gloo_checkpoint
import gloo_meta
import handwritten as hw
import stacked_jobs
import torch
import torch.distributed as dist
from gloo import detached, local_rows, refusal
from pipeline_jobs import copies, made, mesh_of, trainable
from torch import nn

#: A Llama whose layers are large beside what a step of the build makes.
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}


# --- the meta device ---


def from_meta(mesh, axes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The whole state of a meta model with a tied weight, as the ranks of each mesh initialise it;
    which tensors this rank made; whether copies are equal; and two losses."""
    from autoshard import autoshard, emit

    asked: list[str] = []
    call = emit.Initialiser.__call__
    emit.Initialiser.__call__ = lambda self, name: (asked.append(name), call(self, name))[1]
    out: dict[str, Any] = {}
    try:
        for text, options in axes.items():
            asked.clear()
            here, inputs = mesh_of(text), hw.tokens(8)
            with torch.device("meta"):
                model = hw.GPT(layers=2, tied=True).double()
            torch.manual_seed(3)
            sharded = autoshard(model, here, inputs, **options)
            made, held = set(asked), {p.name for p in sharded.held.values() if not p.constant}
            torch.manual_seed(4 + dist.get_rank())
            loss = sharded.train_step(**local_rows(here, inputs)).clone()
            out[text] = {
                "state": detached(sharded.full_state_dict()),
                "others": sorted(made - held),
                "copies": copies(sharded),
                "loss": loss,
                "meta": [n for n, p in sharded.named_parameters() if p.is_meta],
            }
    finally:
        emit.Initialiser.__call__ = call
    return out


def peak(mesh, axes: str, options: dict[str, Any]) -> dict[str, int]:
    """Bytes at the peak of a build from meta, and those of this rank's parameters."""
    return gloo_meta.build_peak(mesh_of(axes), SIZES, **options)


class Unset(nn.Module):
    """Blocks of which the last has a tensor that nothing initialises."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(hw.Block(32, 4, 64) for _ in range(4))
        self.blocks[3].shift = nn.Parameter(torch.ones(32))

    def forward(self, x, target):
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x * self.blocks[3].shift, target)


def unset(mesh, axes: str, options: dict[str, Any]) -> dict[str, Any]:
    """What each rank is told while a tensor of the last stage has no values, and when it has."""
    from autoshard import autoshard

    here, inputs = mesh_of(axes), hw.vectors(8, 4, 32)
    rows = local_rows(here, inputs)
    torch.manual_seed(0)
    state = Unset().state_dict()
    with torch.device("meta"):
        model = Unset()
    sharded = autoshard(model, here, rows, **options)
    out: dict[str, Any] = {
        "step": refusal(lambda: sharded.train_step(**rows)),
        "call": refusal(lambda: sharded(**rows)),
        "state": refusal(sharded.full_state_dict),
    }
    with torch.no_grad():
        for name, parameter in sharded.named_parameters():
            if name.endswith("shift"):
                parameter.fill_(2.0)
    out["by hand"] = sharded.full_state_dict()["blocks.3.shift"].clone()
    sharded.load_full_state_dict(state)
    out["loss"] = sharded.train_step(**rows).clone()
    return out


# --- optimizers ---


def by_layer(module: Any) -> torch.optim.Optimizer:
    """A group for each layer, of a rate of its own, as far as there is something to train."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            path = name.split(".")
            key = ".".join(path[:2]) if path[0] == "blocks" else path[0]
            groups.setdefault(key, []).append(parameter)
    rates = {"blocks.0": 1e-3, "blocks.1": 2e-3, "blocks.2": 3e-3, "blocks.3": 4e-3}
    return torch.optim.AdamW(
        [{"params": p, "lr": rates.get(key, 5e-4), "layer": key} for key, p in groups.items()]
    )


def plain(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(module), lr=1e-3)


OPTIMIZERS = {"by layer": by_layer, "plain": plain}


def optimizers(
    mesh, folder: str, name: str, which: str, source: str, target: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Train on one mesh and save; load on another, and train on there. The state of parameters and
    of the optimizer after loading, whole, and the losses."""
    where = Path(folder) / f"{name} {which}"
    first, rows = _run(source, name, options)
    optimizer = OPTIMIZERS[which](first)
    _steps(first, optimizer, rows, 2)
    first.save_checkpoint(where, optimizer)
    saved = detached(first.full_state_dict())
    went_on = _steps(first, optimizer, rows, 2)

    other, rows = _run(target, name, options)
    optimizer = OPTIMIZERS[which](other)
    other.load_checkpoint(where, optimizer)
    loaded = detached(other.full_state_dict())
    return {
        "unequal": [n for n, v in loaded.items() if not torch.equal(v, saved[n])],
        "rates": {g.get("layer", ""): g["lr"] for g in optimizer.param_groups},
        "losses": _steps(other, optimizer, rows, 2),
        "went on": went_on,
        "trained": [n for n, p in first.named_parameters() if p.requires_grad],
    }


def _run(axes: str, name: str, options: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    mesh = mesh_of(axes)
    model, inputs = made(name)
    given = options if "pp" in axes else {}
    return gloo.shard(mesh, model, inputs, **given), local_rows(mesh, inputs)


def _steps(module: Any, optimizer: Any, rows: Any, steps: int) -> list[torch.Tensor]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(module.train_step(**rows).clone())
        optimizer.step()
    return losses


def refused(mesh, folder: str) -> dict[str, str]:
    """Saves and loads that do not fit, on all ranks or some."""
    rank = dist.get_rank()
    sharded, rows = _run("pp=2,dp=2", "tied", {})
    optimizer = plain(sharded)
    _steps(sharded, optimizer, rows, 1)
    sharded.save_checkpoint(f"{folder}/refused", optimizer)

    def save(given: Any) -> str:
        return refusal(lambda: sharded.save_checkpoint(f"{folder}/refused", given))

    out = {"classes": save(torch.optim.SGD(sharded.parameters()) if rank == 2 else optimizer)}
    out["none"] = save(None if rank < 2 else optimizer)
    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank % 2)
    out["in a stage"] = save(optimizer)
    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank // 2)
    out["tied"] = save(optimizer)
    optimizer.param_groups[0]["lr"] = 1e-3
    names = dict(sharded.named_parameters())
    fewer = torch.optim.AdamW([p for n, p in names.items() if n != "norm.weight"])
    out["fewer"] = refusal(lambda: sharded.load_checkpoint(f"{folder}/refused", fewer))
    other, _ = _run("pp=2,dp=2", "deep", {})
    out["other"] = refusal(lambda: other.load_checkpoint(f"{folder}/refused"))
    sharded.load_checkpoint(f"{folder}/refused", optimizer)
    return out


# --- files, and stacks ---


def pretrained(mesh, axes: str, *about: Any) -> dict[str, Any]:
    return gloo_checkpoint.pretrained(mesh_of(axes), *about)


def stacked(mesh, axes: str, options: dict[str, Any]) -> dict[str, Any]:
    return stacked_jobs.train(mesh_of(axes), **options)


def stacked_states(mesh, axes: str, folder: str) -> dict[str, Any]:
    """Experts stacked in one stage: local and whole state dicts, and a checkpoint from there to
    ranks that keep them one by one, and back."""
    here, out = mesh_of(axes), dict[str, Any]()
    first = stacked_jobs.sharded(here, stacked_jobs.looped())
    optimizer = stacked_jobs.adamw(first)
    stacked_jobs.stepped(first, here, optimizer)
    wanted, local = detached(first.full_state_dict()), detached(first.state_dict())
    first.save_checkpoint(f"{folder}/stacked", optimizer)
    line = mesh_of("tp=4")
    other = stacked_jobs.sharded(line, stacked_jobs.looped(seed=1))
    second = stacked_jobs.adamw(other)
    other.load_checkpoint(f"{folder}/stacked", second)
    out["there"] = stacked_jobs.unequal(detached(other.full_state_dict()), wanted)
    other.save_checkpoint(f"{folder}/one by one", second)
    own = stacked_jobs.own_state(first, optimizer)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    optimizer = stacked_jobs.adamw(first)
    first.load_checkpoint(f"{folder}/one by one", optimizer)
    out["back"] = stacked_jobs.unequal(stacked_jobs.own_state(first, optimizer), own)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    first.load_state_dict(local)
    out["local"] = stacked_jobs.unequal(detached(first.state_dict()), local)
    out["names"] = list(local)
    return out
