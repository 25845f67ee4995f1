"""Jobs of ZeRO, offload and mixed precision on ranks, and the same on one device.

Every job takes a mesh, or None for one device, and gives what a user would look at.
"""

from __future__ import annotations

import contextlib
from typing import Any

import gloo
import handwritten as hw
import torch
from gloo import InFloat64, build, detached, gradients_of
from torch import nn

#: Optimizers by name; each takes parameters or groups of them.
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "one by one": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "writes to data": lambda params: WritesToData(params),
}


class WritesToData(torch.optim.Optimizer):
    """As many older optimizers do, which no version counter notices."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"])


class LoRA(nn.Module):
    """Frozen layers with small trainable ones beside them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 24)
        self.layers = nn.ModuleList(LoRALayer() for _ in range(3))
        self.head = nn.Linear(24, 32, bias=False)
        for name, p in self.named_parameters():
            p.requires_grad_(".down" in name or ".up" in name)

    def forward(self, ids, targets):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class LoRALayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.base = nn.LayerNorm(24), nn.Linear(24, 24)
        self.down, self.up = nn.Linear(24, 2, bias=False), nn.Linear(2, 24, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + torch.tanh(self.base(h) + self.up(self.down(h)))


class Uneven(nn.Module):
    """Sizes that four ranks do not divide, or that are smaller than four; a scalar; a weight of two
    blocks; a tied head; a parameter that nothing reads."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(UnevenBlock() for _ in range(3))
        self.blocks[2].mix = self.blocks[0].mix
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.idle = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids, targets):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.gain)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class UnevenBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.squeeze, self.widen = nn.Linear(6, 2), nn.Linear(2, 6, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.scale * torch.tanh(self.mix(x)) + self.widen(self.squeeze(x).relu())


HANDWRITTEN = {"lora": LoRA, "uneven": Uneven}


def made(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model in float64, and a global batch of which the ranks have unequal numbers of targets."""
    if name not in HANDWRITTEN:
        return build(name)
    torch.manual_seed(0)
    model = HANDWRITTEN[name]().double()
    return model, hw.tokens(b=8, s=6, vocab=11)


def rows_of(mesh, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's rows, over all data axes of the mesh."""
    ranks, index = 1, 0
    for axis in ("dp", "ep"):
        if axis in mesh.mesh_dim_names:
            ranks *= mesh[axis].size()
            index = index * mesh[axis].size() + mesh.get_local_rank(axis)
    return {k: v.chunk(ranks)[index] for k, v in inputs.items()}


def loss_of(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.loss


def train(
    mesh,
    name: str,
    optimizer: str = "adamw",
    accumulate: int = 1,
    to_none: bool = True,
    grouped: bool = False,
    outside: bool = False,
    frozen: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Three steps. ``outside``: the loss goes backward from the module's outputs; ``frozen``: a
    part of the names of parameters that are frozen once the module is made."""
    model, inputs = made(name)
    if mesh is not None:
        with InFloat64():
            model = gloo.shard(mesh, model, inputs, **options)
        inputs = rows_of(mesh, inputs)
    for n, p in model.named_parameters():
        if frozen and frozen in n:
            p.requires_grad_(False)
    parameters: Any = list(model.parameters())
    if grouped:  # as recipes do: by rank of the tensor and by name
        named = dict(model.named_parameters())
        plain = [p for n, p in named.items() if p.ndim < 2 or "head" in n]
        rest = [p for n, p in named.items() if p.ndim >= 2 and "head" not in n]
        parameters = [
            {"params": plain, "weight_decay": 0.0},
            {"params": rest, "weight_decay": 0.1, "lr": 3e-3},
        ]
    optimizer = OPTIMIZERS[optimizer](parameters)
    out: dict[str, Any] = {"loss": [], "norm": []}
    for step in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        for turn in range(accumulate):
            given = {k: v.roll(turn + step, 1) for k, v in inputs.items()}
            last = turn == accumulate - 1
            if mesh is None:
                with InFloat64():
                    loss = loss_of(model(**given))
                loss.backward()
            else:
                with contextlib.nullcontext() if last else model.no_sync():
                    if outside:
                        loss = loss_of(model(**given))
                        loss.backward()
                    else:
                        loss = model.train_step(**given)
        out["loss"].append(loss.detach().clone())
        gradients = gradients_of(model) if mesh is None else detached(model.full_gradients())
        out.setdefault("gradients", gradients)
        if mesh is None:
            out["norm"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25))
        else:
            out["norm"].append(model.clip_grad_norm_(0.25))
        optimizer.step()
    state = model.state_dict() if mesh is None else model.full_state_dict()
    return out | {"state": detached(state)}


def shapes(mesh, name: str, **options: Any) -> dict[str, Any]:
    """Names, ranks and sizes of the parameters that the module owns."""
    model, inputs = made(name)
    with InFloat64():
        sharded = gloo.shard(mesh, model, inputs, **options)
    own = {n: tuple(p.shape) for n, p in sharded.named_parameters()}
    return {"own": own, "whole": {n: tuple(p.shape) for n, p in model.named_parameters()}}


def two_heads(mesh, **options: Any) -> list[dict[str, Any]]:
    """A loss of the caller's own on one head, then on the other: what the loss does not read has no
    gradient, and an optimizer leaves it alone."""
    torch.manual_seed(0)
    model, inputs = hw.TwoHeads().double(), {"x": hw.vectors(4, 32)["x"].double()}
    if mesh is not None:
        model = gloo.shard(mesh, model, inputs, **options)
        inputs = rows_of(mesh, inputs)
    optimizer, out = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for head in ("left", "right", "left"):
        optimizer.zero_grad()
        model(**inputs)[head].square().mean().backward()
        gradients = gradients_of(model) if mesh is None else detached(model.full_gradients())
        optimizer.step()
        state = model.state_dict() if mesh is None else model.full_state_dict()
        out.append({"gradients": gradients, "state": detached(state)})
    return out


class Heads(nn.Module):
    """A trunk and two heads, each a block, and each wider than it is long."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, n), nn.Tanh()) for n in (12, 20))

    def forward(self, x):
        x = self.trunk(x)
        return {"left": self.heads[0](x), "right": self.heads[1](x)}


#: From which head each of two data ranks goes backward, step by step.
TURNS = [("left", "right"), ("right", "left"), ("right", "right"), ("left", "left")]


def own_heads(mesh, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Data ranks go backward from heads of their own; an accumulation too."""
    torch.manual_seed(0)
    model, x = Heads().double(), hw.vectors(4, 8)["x"].double()
    if mesh is not None:
        model = gloo.shard(mesh, model, {"x": x}, **options)
    out = []
    for at, turn in enumerate(TURNS):
        if mesh is None:
            parts = zip(turn, x.chunk(2), strict=True)
            losses = [model(rows)[head].square().mean() for head, rows in parts]
            torch.stack(losses).mean().backward()
            out.append(gradients_of(model))
            continue
        index = mesh.get_local_rank("dp")
        with model.no_sync() if at == 2 else contextlib.nullcontext():
            model(x=x.chunk(2)[index])[turn[index]].square().mean().backward()
        out.append(detached(model.full_gradients()) if at != 2 else {})
    if mesh is None:
        out[2] = {}
    return out


def hooked(mesh, **options: Any) -> dict[str, Any]:
    """Hooks of the caller's on parameters see reduced gradients, once, and may change them."""
    model, inputs = made("uneven")
    if mesh is not None:
        model = gloo.shard(mesh, model, inputs, **options)
        inputs = rows_of(mesh, inputs)
    calls = []
    for name, p in model.named_parameters():
        if name.endswith("squeeze.weight"):
            p.register_hook(lambda grad: grad * 3)
        p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
    if mesh is None:
        loss_of(model(**inputs)).backward()
    else:
        model.train_step(**inputs)
    gradients = gradients_of(model) if mesh is None else detached(model.full_gradients())
    return {"gradients": gradients, "calls": sorted(calls)}


def written(mesh, how: str, **options: Any) -> list[torch.Tensor]:
    """Losses after parameters were written between steps, past the optimizer."""
    model, inputs = made("uneven")
    if mesh is not None:
        model = gloo.shard(mesh, model, inputs, **options)
        inputs = rows_of(mesh, inputs)
    optimizer, out = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        if mesh is None:
            loss = loss_of(model(**inputs))
            loss.backward()
        else:
            loss = model.train_step(**inputs)
        out.append(loss.detach().clone())
        optimizer.step()
        for p in model.parameters():
            if how == "data =":
                p.data = p.data * 1.5
            elif how == "no_grad":
                with torch.no_grad():
                    p.mul_(1.5)
            else:
                p.data.mul_(1.5)
        if mesh is not None and how == "told":
            model.weights_changed()
    return out


def misused(mesh, how: str, **options: Any) -> None:
    """What must be refused by name."""
    model, inputs = made("uneven")
    model = gloo.shard(mesh, model, inputs, **options)
    rows = rows_of(mesh, inputs)
    if how == "graph of gradients":
        loss = loss_of(model(**rows))
        torch.autograd.grad(loss, model.get_parameter("embed.weight"), create_graph=True)
    elif how == "assign":
        model.load_state_dict(model.state_dict(), assign=True)
    else:
        with model.no_sync():
            model.train_step(**rows)
        if how == "clip":
            model.clip_grad_norm_(1.0)
        else:
            torch.optim.SGD(model.parameters(), lr=0.1).step()


def dropped(mesh, to_none: bool, **options: Any) -> dict[str, torch.Tensor]:
    """Gradients accumulated under no_sync and then thrown away do not come back."""
    model, inputs = made("llama")
    if mesh is not None:
        with InFloat64():
            model = gloo.shard(mesh, model, inputs, **options)
        rows = rows_of(mesh, inputs)
        with model.no_sync():
            model.train_step(**rows)
        torch.optim.SGD(model.parameters()).zero_grad(set_to_none=to_none)
        model.train_step(**rows)
        return detached(model.full_gradients())
    with InFloat64():
        loss_of(model(**inputs)).backward()
    return gradients_of(model)


def refused(mesh, job: Any, *arguments: Any, **options: Any) -> list[str]:
    """The error that a job raises, if any."""
    from autoshard.errors import AutoshardError

    try:
        job(mesh, *arguments, **options)
    except AutoshardError as error:
        return [f"{type(error).__name__}: {error}"]
    return []


def step_before_backward(mesh, **options: Any) -> None:
    """An optimizer steps between forward and backward."""
    model, inputs = made("llama")
    with InFloat64():
        model = gloo.shard(mesh, model, inputs, **options)
    loss = loss_of(model(**rows_of(mesh, inputs)))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    loss.backward()


def asked(mesh, **options: Any) -> dict[str, Any]:
    """`torch.autograd.grad` gives gradients and leaves `.grad` alone."""
    model, inputs = made("llama")
    if mesh is None:
        with InFloat64():
            loss = loss_of(model(**inputs))
        names, held = zip(*model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, held), strict=True))
    with InFloat64():
        model = gloo.shard(mesh, model, inputs, **options)
    names, held = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss_of(model(**rows_of(mesh, inputs))), held)
    assert all(p.grad is None for p in held)
    for p, grad in zip(held, found, strict=True):
        p.grad = grad
    return detached(model.full_gradients())


def curve(mesh, steps: int, seed: int = 0, **options: Any) -> list[float]:
    """The losses of a small GPT on English text; on one device in ``param_dtype`` throughout."""
    from autoshard import autoshard

    torch.manual_seed(seed)
    model = hw.GPT()
    batches = text(steps)
    if mesh is None:
        if dtype := options.get("param_dtype"):
            return _curve_alone(model, batches, dtype)
        masters, step = list(model.parameters()), lambda given: backward_of(model, given)
    else:
        example = rows_of(mesh, batches[0])
        sharded = autoshard(model, mesh, example_inputs=example, **options)
        masters = list(sharded.parameters())
        step = lambda given: sharded.train_step(**rows_of(mesh, given))  # noqa: E731
    optimizer, out = torch.optim.AdamW(masters, lr=3e-3), []
    for given in batches:
        optimizer.zero_grad()
        out.append(float(step(given)))
        optimizer.step()
    return out


def backward_of(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = loss_of(model(**given))
    loss.backward()
    return loss.detach()


def _curve_alone(model: nn.Module, batches: list[Any], dtype: torch.dtype) -> list[float]:
    """The single device's recipe: float32 masters, computing in ``dtype``."""
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer, out = torch.optim.AdamW(masters, lr=3e-3), []
    for p in model.parameters():
        p.data = p.data.to(dtype)
    for given in batches:
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
        model.zero_grad()
        out.append(float(backward_of(model, given)))
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
    return out


def text(steps: int, rows: int = 8, length: int = 24) -> list[dict[str, torch.Tensor]]:
    """Batches of English text that every Python has, as letters modulo the vocabulary."""
    import pydoc_data.topics

    letters = "".join(v for _, v in sorted(pydoc_data.topics.topics.items()))
    ids = torch.tensor([ord(c) % hw.VOCAB for c in letters[: steps * rows * length + 1]])
    out = []
    for step in range(steps):
        part = ids[step * rows * length :]
        x, y = part[: rows * length].view(rows, length), part[1 : rows * length + 1]
        out.append({"ids": x, "targets": y.view(rows, length)})
    return out


def memory(mesh, sizes: dict[str, int], **options: Any) -> dict[str, int]:
    """Bytes of all tensors that live while a Llama trains: between steps, with the gradients of the
    last one still there, and while gradients accumulate; what the table of memory predicts; the
    elements of the model, and the bytes of the largest set of weights gathered at once."""
    from gloo_meta import ids, llama
    from tensor_memory import TensorMemory

    from autoshard import autoshard
    from autoshard.memory import measured, predicted, unit_bytes

    with torch.device("meta"):
        model = llama(**sizes)
    given = ids()
    with TensorMemory() as live:
        sharded = autoshard(model, mesh, given, **options)
        optimizer = torch.optim.AdamW(sharded.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            with sharded.no_sync():
                sharded.train_step(**given)
            accumulating = live.now
            sharded.train_step(**given)
            optimizer.step()
        between = live.now
    program = sharded.program
    return {
        "between": between,
        "accumulating": accumulating,
        "peak": live.peak,
        "elements": sum(p.numel() for p in model.parameters()),
        "block": max((unit_bytes(program, u) for u in program.units.values()), default=0),
        "predicted": {h.what: h.rank for h in predicted(program)},
        "measured": measured(sharded),
        "host": sum(h.rank for h in predicted(program) if h.host),
    }


class CountedWire:
    """Counts the bytes that a rank sends for weights and gradients, as a ring would."""

    def __init__(self):
        self.sent: dict[str, int] = {}

    def __enter__(self):
        from autoshard.runtime import wire

        self.wire, self.kept = wire, (wire.all_gather, wire.reduce_scatter)
        gather, scatter = self.kept

        def all_gather(flat, group):
            self.add("all_gather", flat, group)
            return gather(flat, group)

        def reduce_scatter(flat, group):
            self.add("reduce_scatter", flat, group)
            return scatter(flat, group)

        wire.all_gather, wire.reduce_scatter = all_gather, reduce_scatter
        return self

    def __exit__(self, *_):
        self.wire.all_gather, self.wire.reduce_scatter = self.kept

    def add(self, kind: str, flat: torch.Tensor, group: Any) -> None:
        ranks = torch.distributed.get_world_size(group)
        self.sent[kind] = self.sent.get(kind, 0) + flat.nbytes // ranks * (ranks - 1)


def sent(mesh, name: str, **options: Any) -> dict[str, Any]:
    """Bytes sent in the second of two steps, and those that the table of collectives counts."""
    from autoshard.report import UNIT_KINDS, step_collectives

    model, inputs = made(name)
    with InFloat64():
        sharded = gloo.shard(mesh, model, inputs, **options)
    rows = rows_of(mesh, inputs)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for _ in range(2):
        with CountedWire() as counted:
            sharded.train_step(**rows)
        optimizer.step()
    of_units = {c.why for c in sharded.program.conversions if c.kind in UNIT_KINDS}
    table: dict[str, int] = {}
    for c in step_collectives(sharded.program, by_layer=True):
        if c.why in of_units and c.kind != "all_reduce":
            table[c.kind] = table.get(c.kind, 0) + c.bytes
    trainable = [p for p in sharded.program.parameters().values() if p.trainable]
    return {
        "sent": counted.sent,
        "table": table,
        "numbers": sum(p.value.numel() for p in trainable),
        "by name": {p.name: p.value.numel() for p in trainable},
    }
