"""Experts in a list of modules, that ranks keep stacked: models, and jobs on gloo processes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo import detached, gradients_of, local_rows, refusal
from test_experts import Model, feed_forward, tokens
from torch import nn

RATE, CLIP = 1e-3, 0.25


class Gated(nn.Module):
    """SwiGLU: three linears."""

    def __init__(self, width: int, inner: int, bias: bool = False):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=bias) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def plain(width: int, inner: int) -> nn.Module:
    """Without biases."""
    return nn.Sequential(
        nn.Linear(width, inner, bias=False), nn.ReLU(), nn.Linear(inner, width, bias=False)
    )


def looped(form: str = "chosen_first", expert: Any = Gated, seed: int = 0, **sizes: int) -> Model:
    """A model whose mixture loops over experts."""
    model = Model(form, **sizes)
    mixture = model.mixture
    torch.manual_seed(seed)
    mixture.each = nn.ModuleList(expert(16, 24) for _ in range(mixture.experts))
    del mixture.up, mixture.down
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4)
    return model


def mesh_of(**sizes: int) -> Any:
    return dist.device_mesh.init_device_mesh(
        "cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )


def sharded(mesh: Any, model: nn.Module, **options: Any) -> Any:
    from autoshard import autoshard

    return autoshard(model, mesh, tokens(), **options)


def adamw(module: Any) -> torch.optim.AdamW:
    """Matrices decay; and the numbers of experts' weights and biases lie in two groups."""
    ours = [p for p in module.named_parameters() if p[1].requires_grad]
    biases = [p for n, p in ours if n.endswith("bias")]
    others = [p for n, p in ours if not n.endswith("bias")]
    return torch.optim.AdamW([{"params": others}, {"params": biases, "lr": 2e-3}], lr=RATE)


def freeze(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".gate." not in name)
    return model


# --- training ---


def train(mesh: Any, expert: Any = Gated, frozen: bool = False, **options: Any) -> dict[str, Any]:
    """Two steps, each of two batches, the first without synchronising."""
    model = looped(expert=expert).double()
    module = sharded(mesh, freeze(model) if frozen else model, **options)
    given, optimizer = local_rows(mesh, tokens()), adamw(module)
    out: dict[str, Any] = {"names": [n for n, _ in module.named_parameters()], "norm": []}
    for step in range(2):
        with module.no_sync():
            module.train_step(**given)
        out["loss"] = module.train_step(**{k: v.roll(1, 1) for k, v in given.items()})
        if step == 0:
            out["gradients"] = detached(module.full_gradients())
        out["norm"].append(module.clip_grad_norm_(CLIP).clone())
        optimizer.step()
        optimizer.zero_grad()
    out["state"] = detached(module.full_state_dict())
    module.eval()
    with torch.no_grad():
        out["evaluated"] = module(**given).clone()
    return out


def train_alone(expert: Any = Gated, frozen: bool = False) -> dict[str, Any]:
    model = looped(expert=expert).double()
    model = freeze(model) if frozen else model
    given, optimizer = tokens(), adamw(model)
    out: dict[str, Any] = {"norm": []}
    for step in range(2):
        model(**given).backward()
        loss = model(**{k: v.roll(1, 1) for k, v in given.items()})
        loss.backward()
        if step == 0:
            out["gradients"] = gradients_of(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        out["norm"].append(nn.utils.clip_grad_norm_(trained, CLIP))
        optimizer.step()
        optimizer.zero_grad()
    out["loss"], out["state"] = loss.detach(), detached(model.state_dict())
    with torch.no_grad():
        out["evaluated"] = model(**given)
    return out


def lower_precision(mesh: Any, **options: Any) -> dict[str, Any]:
    """The loss of three steps with weights in bfloat16."""
    module = sharded(mesh, looped(), param_dtype=torch.bfloat16, **options)
    given, optimizer = local_rows(mesh, tokens()), adamw(module)
    losses = []
    for _ in range(3):
        losses.append(module.train_step(**given).float().clone())
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": torch.stack(losses), "types": {p.dtype for p in module.parameters()}}


# --- states ---


def own_state(module: Any, optimizer: Any = None) -> dict[str, torch.Tensor]:
    """What a rank holds, by the names of its local state dict; and of its optimizer."""
    out = detached(module.state_dict())
    for name, parameter in module.named_parameters() if optimizer else ():
        for field, value in optimizer.state[parameter].items():
            out[f"{name} {field}"] = value.clone()
    return out


def unequal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    other = [n for n in got if n in want and not torch.equal(got[n], want[n])]
    return sorted(got.keys() ^ want.keys()) + other


def stepped(module: Any, mesh: Any, optimizer: Any) -> Any:
    given = tokens() if mesh is None else local_rows(mesh, tokens())
    optimizer.zero_grad()
    loss = module.train_step(**given)
    optimizer.step()
    return loss.clone()


def checkpoints(mesh: Any, folder: str) -> dict[str, Any]:
    """From ranks that keep experts one by one to those that keep them stacked, to one device, and
    back: what is not equal to the bit; then the losses of one step more."""
    from autoshard import autoshard

    meshes = {"tp": mesh_of(tp=2), "ep": mesh}
    runs: dict[str, Any] = {}
    for seed, (name, here) in enumerate(meshes.items()):
        module = sharded(here, looped(seed=seed), zero=1 + 2 * seed)
        runs[name] = module, here, adamw(module)
    alone = autoshard(looped(seed=3), "dp=1", tokens())
    runs["one"] = alone, None, adamw(alone)
    first, here, optimizer = runs["tp"]
    stepped(first, here, optimizer)
    wanted, own = detached(first.full_state_dict()), own_state(first, optimizer)
    out: dict[str, Any] = {}
    first.save_checkpoint(f"{folder}/tp", optimizer)
    for source, target in (("tp", "ep"), ("ep", "one"), ("one", "ep"), ("ep", "tp")):
        module, here, optimizer = runs[target]
        if target == "one":
            if dist.get_rank():
                continue
        elif source == "one":
            dist.barrier()
        if source == "ep" and target == "tp":  # what it had is gone
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
        optimizer = adamw(module)
        module.load_checkpoint(f"{folder}/{source}", optimizer)
        runs[target] = module, here, optimizer
        out[f"{source} to {target}"] = unequal(detached(module.full_state_dict()), wanted)
        module.save_checkpoint(f"{folder}/{target}", optimizer)
    module, here, optimizer = runs["tp"]
    out["tp again"] = unequal(own_state(module, optimizer), own)
    out["losses"] = {n: stepped(*r) for n, r in runs.items() if n != "one" or not dist.get_rank()}
    out["then"] = {n: detached(runs[n][0].full_state_dict()) for n in ("tp", "ep")}
    return out


def torch_says(call: Any) -> str:
    """The text of the error that torch raises where a local state dict does not fit."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def local_states(mesh: Any, **options: Any) -> dict[str, Any]:
    """The local state dict, and what loading others says."""
    module = sharded(mesh, looped(), **options)
    state = detached(module.state_dict())
    out: dict[str, Any] = {"state": state}
    live = next(v for n, v in module.state_dict().items() if ".each." in n)
    held = {p.untyped_storage().data_ptr() for p in module.parameters()}
    out["views"] = live.untyped_storage().data_ptr() in held
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    module.load_state_dict(state)
    out["again"] = unequal(detached(module.state_dict()), state)
    name = next(n for n in state if ".each." in n)
    out["name"] = name
    others = {k: v for k, v in state.items() if k != name}
    out["missing"] = torch_says(lambda: module.load_state_dict(others))
    found = module.load_state_dict(others, strict=False)
    out["not strict"] = list(found.missing_keys), list(found.unexpected_keys)
    out["shape"] = torch_says(lambda: module.load_state_dict(state | {name: state[name][:1]}))
    strange = state | {"mixture.each.9.up.weight": state[name]}
    out["unexpected"] = torch_says(lambda: module.load_state_dict(strange))
    return out


def whole_states(mesh: Any, folder: str) -> dict[str, Any]:
    """Whole state dicts and files; and whether the model's experts are freed with it."""
    model = looped()
    own = [weakref.ref(p) for p in model.mixture.each.parameters()]
    module = sharded(mesh, model)
    del model
    gc.collect()
    live = sum(ref() is not None for ref in own)
    state = detached(module.full_state_dict())
    out: dict[str, Any] = {"state": state, "live": live}
    name = "mixture.each.1.up.weight"
    others = {k: v for k, v in state.items() if k != name}
    out["missing"] = refusal(lambda: module.load_full_state_dict(others | {"more": state[name]}))
    out["shape"] = refusal(lambda: module.load_full_state_dict(state | {name: state[name][:1]}))
    out["not strict"] = module.load_full_state_dict(others, strict=False)
    module.save_pretrained(folder)
    other = sharded(mesh, looped(seed=1), zero=3)
    out["before"] = unequal(detached(other.full_state_dict()), state)
    out["names"] = other.load_pretrained(folder)
    out["read"] = unequal(detached(other.full_state_dict()), state)
    third = sharded(mesh, looped(seed=2))
    third.load_full_state_dict(state)
    out["loaded"] = unequal(detached(third.full_state_dict()), state)
    return out


def other_optimizers(mesh: Any, folder: str) -> dict[str, str]:
    """What loading says of experts whose optimizer state is not that of one parameter."""
    apart = sharded(mesh_of(tp=2), looped())
    joined = sharded(mesh, looped())
    named = dict(apart.named_parameters())
    first = [p for n, p in named.items() if ".each.0." in n]
    others = [p for n, p in named.items() if ".each.0." not in n]
    out = {}
    for name, rates in (("rates", (1e-3, 2e-3)), ("steps", (1e-3, 1e-3))):
        groups = [{"params": p, "lr": r} for p, r in zip((first, others), rates, strict=True)]
        optimizer = torch.optim.AdamW(groups)
        stepped(apart, None, optimizer)
        if name == "steps":
            for parameter in first:
                parameter.grad = None
            optimizer.step()
        apart.save_checkpoint(f"{folder}/{name}", optimizer)
        fresh = torch.optim.AdamW(joined.parameters())
        path = f"{folder}/{name}"
        out[name] = refusal(lambda path=path, fresh=fresh: joined.load_checkpoint(path, fresh))
    return out


class Unset(nn.Module):
    """An expert that nothing initialises."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def from_meta(mesh: Any) -> dict[str, Any]:
    """What a model on the meta device is initialised to, where experts are kept one by one and
    where they are stacked; how many of them a rank makes; and where nothing does."""
    from autoshard import emit

    made: list[str] = []
    call = emit.Initialiser.__call__
    emit.Initialiser.__call__ = lambda self, name: (made.append(name), call(self, name))[1]
    out: dict[str, Any] = {}
    try:
        for name, here in (("tp", mesh_of(tp=2)), ("ep", mesh)):
            made.clear()
            with torch.device("meta"):
                model = looped()
            torch.manual_seed(5)
            module = sharded(here, model)
            out[name] = detached(module.full_state_dict())
            out[f"{name} made"] = {n.split(".")[2] for n in made if ".each." in n}
            out[f"{name} loss"] = module.train_step(**local_rows(here, tokens())).clone()
    finally:
        emit.Initialiser.__call__ = call
    with torch.device("meta"):
        model = looped(expert=Unset)
    module = sharded(mesh, model)
    given = local_rows(mesh, tokens())
    out["unset"] = refusal(lambda: module.train_step(**given))
    weights = {f"mixture.each.{e}.weight": torch.ones(16, 16) * e for e in range(4)}
    first = dict(list(weights.items())[:1])
    module.load_full_state_dict(first, strict=False)
    out["one set"] = refusal(lambda: module.train_step(**given))
    module.load_full_state_dict(weights, strict=False)
    out["set"] = module.train_step(**given).clone()
    return out


def refused_optimizer(mesh: Any) -> str:
    """One that looks at a whole tensor must not take a stack for one, even where a rank has all."""

    class ByNorm(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p -= group["lr"] * p.grad / p.grad.norm()

    module = sharded(mesh, looped(), zero=0)
    module.train_step(**local_rows(mesh, tokens()))
    stacks = [p for n, p in module.named_parameters() if "*" in n]
    return refusal(ByNorm(stacks).step)


def quick_jobs(folder: Path) -> dict[str, tuple]:
    return {
        "train": (train,),
        "checkpoints": (checkpoints, str(folder)),
        "local": (local_states,),
    }


def jobs_of_two(folder: Path) -> dict[str, tuple]:
    return {
        "biased": (train, feed_forward),
        "frozen": (train, Gated, True),
        "whole": (whole_states, str(folder / "pretrained")),
        "meta": (from_meta,),
        "optimizer": (refused_optimizer,),
        "others": (other_optimizers, str(folder / "others")),
        "offload": (partial_train, {"offload": True}),
        "zero 0": (partial_train, {"zero": 0}),
        "bfloat16": (lower_precision,),
    }


def partial_train(mesh: Any, options: dict[str, Any]) -> dict[str, Any]:
    return train(mesh, **options)


def jobs_of_four(folder: Path) -> dict[str, tuple]:
    """On dp=2,ep=2."""
    stages = {f"zero {z}": (partial_train, {"zero": z}) for z in range(4)}
    return stages | {
        "offload": (partial_train, {"zero": 3, "offload": True}),
        "recompute": (partial_train, {"zero": 3, "recompute": "block"}),
        "local": (local_states_in_pieces,),
        "bfloat16": (partial_lower, {"zero": 2}),
        "bfloat16, 3": (partial_lower, {"zero": 3, "offload": True}),
    }


def local_states_in_pieces(mesh: Any) -> dict[str, Any]:
    return local_states(mesh, zero=3)


def partial_lower(mesh: Any, options: dict[str, Any]) -> dict[str, Any]:
    return lower_precision(mesh, **options)
