"""Jobs on real gloo processes: models on the meta device, and what is held after the build."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import gloo
import handwritten as hw
import torch
import torch.distributed as dist
import transformers
from tensor_memory import Resident, TensorMemory
from zoo import batch, tiny

#: A Llama of 54 million parameters, and one of 51 million in few layers, quick to capture.
DEEP = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
}
WIDE = {
    "vocab_size": 1024,
    "hidden_size": 1408,
    "intermediate_size": 3840,
    "num_hidden_layers": 2,
    "num_attention_heads": 11,
}


def llama(**sizes: int) -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()


def ids(rows: int = 4, length: int = 8) -> dict[str, torch.Tensor]:
    tokens = torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


def build_peak(
    mesh, sizes: dict[str, int], on_line: bool = False, **options: Any
) -> dict[str, int]:
    """Bytes at the peak of a build from meta (and by how much the process grew), bytes held after
    it, and those of the parameters: of all, of this rank's, of the largest module of its own and of
    the largest block (what is gathered at once)."""
    from autoshard import autoshard

    mesh = line_of(mesh) if on_line else mesh
    with torch.device("meta"):
        model = llama(**sizes)
    gc.collect()
    with Resident() as resident, TensorMemory() as memory:
        sharded = autoshard(model, mesh, ids(), **options)
    modules = [sum(nbytes(p) for p in m.parameters(recurse=False)) for m in model.modules()]
    values = sharded.program.values
    blocks = [sum(nbytes(values[k].value) for k in u.keys) for u in sharded.program.units.values()]
    return {
        "peak": memory.peak,
        "resident": resident.grown,
        "after": memory.now,
        "shards": sum(nbytes(p) for p in sharded.parameters()),
        "whole": sum(nbytes(p) for p in model.parameters()),
        "module": max(modules),
        "block": max(blocks, default=0),
    }


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def line_of(mesh) -> Any:
    """All ranks of the mesh as data ranks."""
    size = (dist.get_world_size(),)
    return dist.device_mesh.init_device_mesh("cpu", size, mesh_dim_names=("dp",))


# --- equal on all meshes ---

MODELS = {"llama": (lambda: tiny("llama"), batch), "resnet": (hw.ResNet, hw.images)}


def made(mesh, name: str, on_line: bool, **options: Any) -> dict[str, torch.Tensor]:
    """The whole state of a meta model, as the ranks of a mesh initialise it."""
    from autoshard import autoshard

    mesh = line_of(mesh) if on_line else mesh
    build, inputs = MODELS[name]
    with torch.device("meta"):
        model = build().train()
    torch.manual_seed(3)
    return gloo.detached(autoshard(model, mesh, inputs(), **options).full_state_dict())


# --- what nothing initialises ---


class Bare(torch.nn.Module):
    """Has a linear, which initialises itself, and tensors of its own, which nothing does."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(32, 64)
        self.weight = torch.nn.Parameter(torch.randn(32, 64) * 0.1)
        self.scale = torch.nn.Parameter(torch.ones(2))  # of fewer entries than ranks
        self.register_buffer("shift", torch.ones(32))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x, target):
        y = torch.nn.functional.linear(torch.relu(self.up(x)), self.weight) + self.shift
        y = (y.unflatten(-1, (2, 16)) * self.scale[:, None]).flatten(-2)
        return torch.nn.functional.mse_loss(y + self.seen, target)


BARE = ("weight", "scale", "shift", "seen")


def filled_later(mesh, on_line: bool, **options: Any) -> dict[str, Any]:
    """What a model says before it is filled, in part and wholly, by each way to fill it."""
    from autoshard import autoshard

    mesh = line_of(mesh) if on_line else mesh
    inputs = hw.vectors(8, 32)
    rows = gloo.local_rows(mesh, inputs)
    torch.manual_seed(0)
    state = Bare().state_dict()

    with torch.device("meta"):
        model = Bare()
    sharded = autoshard(model, mesh, rows, **options)
    held = dict(sharded.named_parameters()) | dict(sharded.named_buffers())
    out: dict[str, Any] = {
        "nan": {n: bool(t.isnan().all()) for n, t in held.items() if t.numel()},
        "meta": [n for n, t in held.items() if t.is_meta],
        "step": gloo.refusal(lambda: sharded.train_step(**rows)),
        "call": gloo.refusal(lambda: sharded(**rows)),
        "state": gloo.refusal(sharded.full_state_dict),
    }
    sharded.load_full_state_dict({n: state[n] for n in ("weight", "seen")}, strict=False)
    out["in part"] = gloo.refusal(lambda: sharded.train_step(**rows))
    with torch.no_grad():
        sharded.shift.zero_()
    out["by hand"] = gloo.refusal(lambda: sharded.eval()(**rows))
    sharded._filled(["scale"])
    out["declared"] = gloo.refusal(lambda: sharded(**rows))
    sharded.train().load_full_state_dict(state)
    out["loss"] = sharded.train_step(**rows).clone()
    return out | {"loaded": gloo.detached(sharded.full_state_dict())}


# --- what is held after the build ---


class Normed(hw.MLP):
    """Has running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(32)

    def forward(self, x, target):
        return super().forward(self.norm(x), target)


class Stuck(hw.MLP):
    """Cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("no copies")


class Hooked(hw.MLP):
    """A hook of its own reads a parameter."""

    def __init__(self):
        super().__init__()
        self.up.register_forward_hook(self.shifted)

    def shifted(self, module, args, output):
        return output + self.down.weight.sum()


def with_penalty() -> tuple[torch.nn.Module, Any]:
    """A loss function that holds the model."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))

    def loss_fn(output, target):
        return (output - target).square().mean() + 0.1 * model[0].weight.square().mean()

    return model, loss_fn


KEPT = {
    "normed": (lambda: (Normed(), None), lambda: hw.vectors(8, 32)),
    "tied": (lambda: (hw.GPT(tied=True, layers=1), None), lambda: hw.tokens(8)),
    "hooked": (lambda: (Hooked(), None), lambda: hw.vectors(8, 32)),
    "stuck": (lambda: (Stuck(), None), lambda: hw.vectors(8, 32)),
    "penalty": (with_penalty, lambda: named("input target", hw.vectors(8, 32))),
}


def named(names: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(names.split(), inputs.values(), strict=True))


def double(name: str) -> tuple[torch.nn.Module, Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    build, inputs = KEPT[name]
    model, loss_fn = build()
    rows = {k: v.double() if v.is_floating_point() else v for k, v in inputs().items()}
    return model.double(), loss_fn, rows


def let_go(mesh, name: str, on_line: bool, **options: Any) -> dict[str, Any]:
    """One step, then evaluation, by a module whose model is gone: how many of its parameters still
    live, and what the module computes."""
    from autoshard import autoshard

    mesh = line_of(mesh) if on_line else mesh
    model, loss_fn, inputs = double(name)
    rows = gloo.local_rows(mesh, inputs)
    owned = [weakref.ref(p) for p in model.parameters()]
    sharded = autoshard(model, mesh, rows, loss_fn=loss_fn, **options)
    del model, loss_fn
    gc.collect()
    out: dict[str, Any] = {"alive": sum(ref() is not None for ref in owned)}
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    out["loss"] = sharded.train_step(**rows).clone()
    optimizer.step()
    out["state"] = gloo.detached(sharded.full_state_dict())
    sharded.eval()
    out["evaluated"] = sharded.train_step(**rows).clone()
    sharded.train()
    names = ("axes", "params", "graph", "collectives", "passes", "memory", "attention")
    out["tables"] = [bool(sharded.table(name)) for name in names] + [bool(repr(sharded))]
    out["rank"] = {n: tuple(p.shape) for n, p in sharded.rank(1).named_parameters()}
    out["batch"] = gloo.refusal(lambda: sharded(**{k: v.bool() for k, v in rows.items()}))
    return out


def let_go_alone(name: str) -> dict[str, Any]:
    model, loss_fn, inputs = double(name)

    def loss():
        if loss_fn is not None:
            return loss_fn(model(inputs["input"]), inputs["target"])
        out = model(**inputs)
        return out if isinstance(out, torch.Tensor) else out.loss

    before = loss()
    before.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    state = gloo.detached(model.state_dict())
    model.eval()
    return {"loss": before.detach(), "state": state, "evaluated": loss().detach()}


def caller_keeps(mesh, **options: Any) -> dict[str, bool]:
    """The caller's model stays as it was, and usable."""
    from autoshard import autoshard

    mesh = line_of(mesh)
    model, _, inputs = double("normed")
    before = {n: (t, t.clone()) for n, t in model.state_dict(keep_vars=True).items()}
    sharded = autoshard(model, mesh, gloo.local_rows(mesh, inputs), **options)
    state = model.state_dict(keep_vars=True)
    out = {
        "same": all(state[n] is t for n, (t, _) in before.items()),
        "values": all(torch.equal(t, values) for t, values in before.values()),
        "light": all(p.value.is_meta for p in sharded.program.parameters().values()),
    }
    rows = gloo.local_rows(mesh, inputs)
    out["evaluates"] = bool(sharded.eval().train_step(**rows).isfinite())
    model(**inputs).backward()
    out["trains"] = all(p.grad is not None for p in model.parameters())
    return out
