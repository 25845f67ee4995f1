"""Jobs of pipelines on real gloo processes, and the same on one device, in float64."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections import namedtuple
from typing import Any

import gloo
import handwritten as hw
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo import InFloat64, detached, gradients_of, local_rows, refusal
from mixtures import Biased, Looped
from mixtures import Model as Mixtures
from torch import nn

RATE, CLIP = 1e-3, 0.25
#: Tokens of a row that mixtures are given.
LENGTH = 6


# --- models ---


def tied(layers: int = 2, **sizes: Any) -> nn.Module:
    """A GPT whose head is its embedding: the first stage and the last hold one weight."""
    return hw.GPT(layers=layers, tied=True, **sizes)


def half_frozen() -> nn.Module:
    """A GPT of which the part before its last block is frozen: the first of two stages."""
    model = hw.GPT(layers=4)
    for name, parameter in model.named_parameters():
        trains = name.startswith(("blocks.3", "norm", "head"))
        parameter.requires_grad_(trains)
    return model


def frozen_ties() -> nn.Module:
    model = tied()
    model.tokens.weight.requires_grad_(False)
    return model


class Penalised(nn.Module):
    """The last backward of its second stage adds to no gradient: all that is trained there is what
    a penalty reads, which counts in the first micro-batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.size = nn.Parameter(torch.linspace(-1, 1, 5))
        for p in self.second.parameters():
            p.requires_grad_(False)

    def forward(self, x, target):
        out = self.second(torch.tanh(self.first(x)))
        return hw.Output(F.mse_loss(out, target) + (self.size**2).sum(), out)


class Detached(nn.Module):
    """Its first two layers have no gradient at all: what comes behind reads them detached."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, target):
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        x = x.detach()
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x))
        return hw.Output(F.mse_loss(x, target), x)


class NormedBlock(nn.Module):
    """With running statistics, and a table that nothing writes."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, x):
        return x + torch.tanh(self.norm(self.linear(x)) * self.scale)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(NormedBlock() for _ in range(4))

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x)
        return hw.Output(F.mse_loss(x, target), x)


Out = namedtuple("Out", "loss rows")


class Chosen(nn.Module):
    """The first stage chooses rows of a table that is in the last one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.table = nn.Embedding(16, 16)

    def forward(self, x, target):
        row, mask = self.layers[0](x).argmax(-1), self.layers[0](x) > 0
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        loss = F.mse_loss(x * mask + self.table(row), target)
        return Out(loss, x.repeat(2, 1))


class Dropping(nn.Module):
    """Gives the masks of its layers, times the numbers 1."""

    def __init__(self, layers: int = 4, p: float = 0.5):
        super().__init__()
        self.layers, self.p = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers)), p

    def forward(self, x):
        masks = []
        for layer in self.layers:
            mask = F.dropout(torch.ones_like(x), self.p)
            x = x + torch.tanh(layer(x)) * mask
            masks.append(mask)
        return {"loss": x.square().mean(), "masks": masks}


#: By name: what builds a model, and its global batch.
MODELS: dict[str, Any] = {
    "tied": (tied, lambda: hw.tokens(8)),
    "deep": (lambda: tied(4), lambda: hw.tokens(8)),
    "deeper": (lambda: tied(8), lambda: hw.tokens(8)),
    "half frozen": (half_frozen, lambda: hw.tokens(8)),
    "frozen ties": (frozen_ties, lambda: hw.tokens(8)),
    "penalised": (Penalised, lambda: hw.vectors(8, 16)),
    "detached": (Detached, lambda: hw.vectors(8, 16)),
    "chosen": (Chosen, lambda: hw.vectors(8, 16)),
    "normed": (Normed, lambda: hw.vectors(8, 16)),
    "looped": (lambda: Mixtures(Looped(), Looped()), lambda: mixture_tokens()),
    "one mixture": (lambda: Mixtures(Looped()), lambda: mixture_tokens()),
    "biased": (lambda: Mixtures(Biased(0.01), Biased(0.01)), lambda: mixture_tokens()),
    "dropping": (Dropping, lambda: {"x": hw.vectors(8, 4, 16)["x"]}),
}


def mixture_tokens(rows: int = 8) -> dict[str, torch.Tensor]:
    given = hw.tokens(rows, LENGTH, vocab=32)
    return {"ids": given["ids"], "labels": given["targets"]}


def made(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model in float64, and its global batch."""
    if name not in MODELS:
        return gloo.build(name)
    torch.manual_seed(seed)
    build, inputs = MODELS[name]
    given = {k: v.double() if v.is_floating_point() else v for k, v in inputs().items()}
    return build().double(), given


def mesh_of(text: str) -> Any:
    """A mesh of all ranks, of a text such as ``pp=2,dp=2``."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    return dist.device_mesh.init_device_mesh(
        "cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )


def trainable(module: Any) -> list[nn.Parameter]:
    """As fine-tuning scripts write it."""
    return [p for p in module.parameters() if p.requires_grad]


# --- training ---


def train(mesh, name: str, options: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """Outputs of a forward, then AdamW steps with clipping: losses, norms, first gradients, and the
    state at the end."""
    model, inputs = made(name)
    sharded = gloo.shard(mesh, model, inputs, **options)
    rows = local_rows(mesh, inputs)
    optimizer = torch.optim.AdamW(trainable(sharded), lr=RATE)
    count = len(next(iter(inputs.values())))
    with torch.no_grad():
        out: dict[str, Any] = {"outputs": outputs_of(sharded(**rows)), "loss": [], "norm": []}
    out["rows"] = local_rows(mesh, {"at": torch.arange(count)})["at"]
    for step in range(steps):
        optimizer.zero_grad()
        out["loss"].append(sharded.train_step(**rows).clone())
        if step == 0:
            out["gradients"] = sharded.full_gradients()
        out["norm"].append(sharded.clip_grad_norm_(CLIP).clone())
        optimizer.step()
    out["state"] = detached(sharded.full_state_dict())
    with torch.no_grad(), InFloat64():
        sharded.eval()
        out["evaluated"] = outputs_of(sharded(**rows))
    return out


def train_alone(name: str, steps: int = 2) -> dict[str, Any]:
    model, inputs = made(name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    with torch.no_grad(), InFloat64():
        out: dict[str, Any] = {"outputs": outputs_of(model(**inputs)), "loss": [], "norm": []}
    for step in range(steps):
        optimizer.zero_grad()
        with InFloat64():
            loss = model(**inputs).loss
        loss.backward()
        out["loss"].append(loss.detach())
        if step == 0:
            grads = {n: p.grad for n, p in model.named_parameters()}
            out["gradients"] = {n: None if g is None else g.clone() for n, g in grads.items()}
        out["norm"].append(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
    out["state"] = detached(model.state_dict())
    model.eval()
    with torch.no_grad(), InFloat64():
        out["evaluated"] = outputs_of(model(**inputs))
    return out


def outputs_of(out: Any) -> dict[str, torch.Tensor]:
    """Loss, and what has rows."""
    other = out.logits if hasattr(out, "logits") else out.chosen.unflatten(0, (-1, LENGTH))
    return {"loss": out.loss.detach().clone(), "rows": other.detach().clone()}


def long(mesh, options: dict[str, Any], steps: int = 50) -> dict[str, Any]:
    """The loss of every step, the state at the end, and whether ranks that hold the same part of a
    tied weight have the same bits."""
    model, inputs = made("tied")
    sharded = gloo.shard(mesh, model, inputs, **options)
    rows = local_rows(mesh, inputs)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(sharded.train_step(**{k: v.roll(step, 1) for k, v in rows.items()}).clone())
        optimizer.step()
    return {
        "loss": losses,
        "state": detached(sharded.full_state_dict()),
        "copies": copies(sharded),
    }


def long_alone(steps: int = 50) -> dict[str, Any]:
    model, inputs = made("tied")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=RATE), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**{k: v.roll(step, 1) for k, v in inputs.items()}).loss
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return {"loss": losses, "state": detached(model.state_dict())}


def copies(sharded: Any) -> dict[str, list[bool]]:
    """Of every parameter that several stages hold: of every rank of these whether its part has the
    bits of that of the first such rank."""
    from autoshard.runtime.staged import along_pipeline

    mesh, rank, found = sharded.program.mesh, sharded.rank_index, {}
    for key, parameter in sharded.program.parameters().items():
        if len(parameter.holders or ()) < 2:
            continue
        mine = sharded.tensor(key).detach().clone() if key in sharded.held else None
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        parts = [everyone[along_pipeline(mesh, rank)[p]] for p in parameter.holders]
        bits = [part.view(torch.int64) for part in parts]
        found[parameter.name] = [torch.equal(each, bits[0]) for each in bits]
    return found


def accumulate(
    mesh, name: str, synced: str, options: dict[str, Any], zeroed: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Gradients accumulated over several batches, by the letter: s synchronises, n does not, z sets
    gradients to zero first, and S is an s behind such a z. Whole ones after every s."""
    model, inputs = made(name)
    sharded = gloo.shard(mesh, model, inputs, **options)
    rows, out = local_rows(mesh, inputs), []
    for step, letter in enumerate(synced):
        if letter == "z":
            sharded.zero_grad(set_to_none=False)
            continue
        with sharded.no_sync() if letter == "n" else contextlib.nullcontext():
            sharded.train_step(**{k: v.roll(step, 1) for k, v in rows.items()})
        if letter == "s":
            out.append(detached(sharded.full_gradients()))
    return out


def accumulate_alone(name: str, synced: str) -> list[dict[str, torch.Tensor]]:
    model, inputs = made(name)
    out = []
    for step, letter in enumerate(synced):
        if letter == "z":
            model.zero_grad(set_to_none=False)
            continue
        with InFloat64():
            model(**{k: v.roll(step, 1) for k, v in inputs.items()}).loss.backward()
        if letter == "s":
            out.append(gradients_of(model))
    return out


#: Rows and length of the batches of `other_shapes`; the first says how many micro-batches.
SHAPES = [(8, 16), (8, 9), (6, 16), (10, 12), (2, 5), (8, 16)]


def other_shapes(mesh, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Steps with batches of other lengths and other numbers of rows, also of fewer rows than
    micro-batches."""
    model, inputs = made("tied")
    sharded = gloo.shard(mesh, model, inputs, **options)
    out = []
    for b, s in SHAPES:
        sharded.zero_grad()
        rows = local_rows(mesh, hw.tokens(b, s))
        loss = sharded.train_step(**rows).clone()
        with torch.no_grad():
            logits = sharded(**rows).logits.clone()
        out.append({"loss": loss, "logits": logits, "grads": detached(sharded.full_gradients())})
    return out


def other_shapes_alone() -> list[dict[str, Any]]:
    model, _ = made("tied")
    out = []
    for b, s in SHAPES:
        model.zero_grad()
        loss, logits = model(**hw.tokens(b, s))
        loss.backward()
        grads = gradients_of(model)
        out.append({"loss": loss.detach(), "logits": logits.detach(), "grads": grads})
    return out


def modes(mesh, name: str, first: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Training and evaluation in turn; ``first``: the model is in training mode when it is given.
    Outputs, the state at the end, and who holds what is written."""
    model, inputs = made(name)
    model.train(first)
    sharded = gloo.shard(mesh, model, inputs, **options)
    rows, out = local_rows(mesh, inputs), []
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.05)
    for training in (first, not first, first, not first):
        sharded.train(training)
        if training:
            optimizer.zero_grad()
            out.append(sharded.train_step(**rows).clone())
            optimizer.step()
        else:
            with torch.no_grad():
                out.append(outputs_of(sharded(**rows))["rows"])
    buffers = {n: b.clone() for n, b in sharded.named_buffers() if "_constants" not in n}
    return {"out": out, "state": detached(sharded.full_state_dict()), "buffers": buffers}


def modes_alone(name: str, first: bool) -> dict[str, Any]:
    model, inputs = made(name)
    optimizer, out = torch.optim.SGD(model.parameters(), lr=0.05), []
    for training in (first, not first, first, not first):
        model.train(training)
        if training:
            optimizer.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            out.append(loss.detach())
            optimizer.step()
        else:
            with torch.no_grad():
                out.append(outputs_of(model(**inputs))["rows"])
    return {"out": out, "state": detached(model.state_dict())}


# --- precision, and what is held where ---


def precision(mesh, options: dict[str, Any], steps: int = 8) -> dict[str, Any]:
    """Losses in float32 masters and whatever the options say, and tied copies."""
    from autoshard import autoshard

    torch.manual_seed(0)
    model, inputs = tied(), hw.tokens(8)
    sharded = autoshard(model, mesh, local_rows(mesh, inputs), **options)
    optimizer, losses = torch.optim.AdamW(sharded.parameters(), lr=3e-3), []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(float(sharded.train_step(**local_rows(mesh, inputs))))
        optimizer.step()
    mine = {n: p.detach().clone() for n, p in sharded.named_parameters()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {n: p for n, p in mine.items() if n == "tokens.weight"})
    holders = [held["tokens.weight"] for held in everyone if "tokens.weight" in held]
    kinds = {str(p.dtype) for p in sharded.parameters()} | {p.device.type for p in mine.values()}
    return {"losses": losses, "holders": holders, "kinds": kinds}


def several_modules(mesh) -> dict[str, Any]:
    """Modules that take turns on one mesh: losses of each, and how many process groups there are
    behind each; and what is said of more micro-batches than rows."""
    model, inputs = made("tied")
    rows, out = local_rows(mesh, inputs), {"losses": [], "groups": [], "said": []}
    modules = []
    for schedule in ("1f1b", "gpipe", "1f1b"):
        modules.append(gloo.shard(mesh, model, inputs, schedule=schedule, microbatches=100))
        out["groups"].append(len(dist.distributed_c10d._world.pg_map))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            out["losses"] += [sharded.train_step(**rows).clone() for sharded in modules]
        out["said"].append([str(w.message) for w in said if "micro-batches" in str(w.message)])
    return out


def own_parts(mesh, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a rank of a pipeline says and holds by itself."""
    model, inputs = made("tied")
    sharded = gloo.shard(mesh, model, inputs, **options)
    rows = local_rows(mesh, inputs)
    state = detached(sharded.state_dict())
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    missing = sharded.load_state_dict(state)
    out: dict[str, Any] = {
        "names": list(state),
        "again": [n for n, v in sharded.state_dict().items() if not torch.equal(v, state[n])],
        "missing": [*missing.missing_keys, *missing.unexpected_keys],
        "copy": refusal(lambda: copy.deepcopy(sharded)),
        "pickle": refusal(lambda: pickle.dumps(sharded)),
        "assign": refusal(lambda: sharded.load_state_dict(state, assign=True)),
        "dtype": refusal(lambda: sharded.half()),
    }
    sharded.weights_changed()
    loss = sharded.train_step(**rows)
    whole = detached(sharded.full_state_dict())
    other = dict(whole) | {"more": torch.ones(1)}
    other.pop("norm.weight")
    wrong = {**whole, "blocks.0.up.weight": torch.ones(2)}
    out |= {
        "loss": loss.clone(),
        "whole": whole,
        "refused": refusal(lambda: sharded.load_full_state_dict(other)),
        "shape": refusal(lambda: sharded.load_full_state_dict(wrong)),
        "lenient": sharded.load_full_state_dict(other, strict=False),
        "text": repr(sharded),
        "memory": sharded.table("memory"),
    }
    sharded.load_full_state_dict({n: v + 1 for n, v in whole.items()})
    now = sharded.full_state_dict()
    out["loaded"] = [n for n, v in now.items() if not torch.equal(v, whole[n] + 1)]
    return out


def loads(mesh, name: str, axes: str, options: dict[str, Any]) -> list[Any]:
    """What expert_load says: before any step, after one, after another of fewer rows, and after a
    forward in evaluation; and the table of it."""
    mesh = mesh_of(axes)
    model, inputs = made(name)
    sharded = gloo.shard(mesh, model, inputs, **options)
    rows = local_rows(mesh, inputs)
    found = [sharded.expert_load()]
    sharded.train_step(**rows)
    found.append(sharded.expert_load())
    sharded.train_step(**local_rows(mesh, {k: v[:4] for k, v in inputs.items()}))
    found.append(sharded.expert_load())
    table = sharded.table("experts")
    sharded.eval()
    with torch.no_grad():
        sharded(**rows)
    return [*found, sharded.expert_load(), table]


# --- dropout ---


def dropout(mesh, options: dict[str, Any]) -> dict[str, Any]:
    """Masks of a forward, by layer; the loss and gradients of two steps from one seed."""
    model, inputs = made("dropping")
    sharded = gloo.shard(mesh, model, inputs, **options)
    rows = local_rows(mesh, inputs)
    torch.manual_seed(5)
    with torch.no_grad():
        masks = [mask.clone() for mask in sharded(**rows)["masks"]]
    torch.manual_seed(7)
    first = sharded.train_step(**rows).clone()
    gradients = detached(sharded.full_gradients())
    return {
        "masks": masks,
        "loss": [first, sharded.train_step(**rows).clone()],
        "gradients": gradients,
    }


# --- ranks that differ, and integers between stages ---


class Lengths(nn.Module):
    """Blocks of which some cost more in longer rows."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x, target):
        for at, block in enumerate(self.blocks):
            x = x + torch.tanh(block(x))
            if at < 3:
                x = x + (x @ x.mT).softmax(-1) @ x / 8
        return Out(F.mse_loss(x, target), x)


def rows_of_lengths(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {n: torch.randn(4, m, 16, generator=generator).double() for n in ("x", "target")}
        for m in lengths
    ]


def chosen(mesh) -> dict[str, Any]:
    """Integers and masks of parameters go from stage to stage; rows come twice in an output."""
    model, inputs = made("chosen")
    sharded = gloo.shard(mesh, model, inputs, microbatches=4)
    rows = local_rows(mesh, inputs)
    with torch.no_grad():
        twice = sharded(**rows).rows
    loss = sharded.train_step(**rows).clone()
    return {"twice": twice, "loss": loss, "gradients": sharded.full_gradients()}


def chosen_alone() -> dict[str, Any]:
    model, inputs = made("chosen")
    out = model(**inputs)
    out.loss.backward()
    parts = out.rows.detach().unflatten(0, (2, 8))
    return {"twice": parts, "loss": out.loss.detach(), "gradients": gradients_of(model)}


def unlike(mesh) -> dict[str, Any]:
    """Ranks whose first batches have other lengths, and ranks that are given other stages."""
    torch.manual_seed(0)
    model, mine = Lengths().double(), mesh["dp"].get_local_rank()
    given = rows_of_lengths([4, 96])
    sharded = gloo.shard(mesh, model, given[mine], microbatches=2)
    out: dict[str, Any] = {"stages": sharded.program.stages}
    rows = rows_of_lengths([5, 5])[mine]
    out["loss"] = sharded.train_step(**rows).clone()
    out["gradients"] = sharded.full_gradients()
    first = ",".join(f"blocks.{i},blocks.{i}.tail" for i in range(3))
    texts = f"{first}|blocks.3-7", f"{first},blocks.3|blocks.4-7"
    out["refused"] = [
        refusal(lambda option=option: gloo.shard(mesh, model, given[0], **option[dist.get_rank()]))
        for option in (
            [{"stages": texts[r % 2]} for r in range(4)],
            [{"schedule": ("1f1b", "gpipe")[r % 2]} for r in range(4)],
            [{"outputs": ("all", "last")[r % 2]} for r in range(4)],
        )
    ]
    return out


def unlike_alone() -> dict[str, Any]:
    torch.manual_seed(0)
    model, rows = Lengths().double(), rows_of_lengths([5, 5])
    loss = model(**{n: torch.cat([r[n] for r in rows]) for n in rows[0]}).loss
    loss.backward()
    return {"loss": loss.detach(), "gradients": gradients_of(model)}


# --- groups, and what carries values ---


def other_numbers_of_groups(mesh) -> torch.Tensor:
    """The loss where some ranks have made groups of their own before."""
    (model, inputs), _ = made("tied"), dist.new_group([0, 1])
    sharded = gloo.shard(mesh, model, inputs, schedule="zb")
    return sharded.train_step(**local_rows(mesh, inputs)).clone()


def sizes_of_their_own(mesh) -> list[tuple[int, ...]]:
    """Two micro-batches of other sizes on their way at once, and gradients of the first one back:
    the shapes that arrive, on the rank that they are for."""
    from autoshard.mesh import MeshSpec, SubMesh
    from autoshard.runtime.process_groups import groups_of
    from autoshard.runtime.staged import Wire, along_pipeline
    from autoshard.schedule import Action, Transfer

    spec = MeshSpec.of(mesh)
    ranks = tuple(along_pipeline(SubMesh(spec), dist.get_rank()))
    here = ranks.index(dist.get_rank())
    wire = Wire(groups_of(spec, torch.device("cpu")), ranks, (0, 1), here)
    wire.meet([(0, 1)])
    wire.varying = {(0, 1)}
    wire.begin([("rows", 4), ("rows", 4)], {(0, 1): (True,)})
    forward = [Transfer(here == 0, Action(0, "F", at), 1) for at in (0, 1)]
    back = [Transfer(here == 1, Action(1, "B", at), 0) for at in (0, 1)]
    shapes = []
    for at, transfer in enumerate(forward):
        if here == 0:
            wire.put(0, 1, at, False, [[torch.ones(3 + 2 * at, requires_grad=True)]])
        wire.post(transfer)
    if here == 1:
        shapes += [tuple(wire.take(0, 1, at, False)[0][0].shape) for at in (0, 1)]
    for at, transfer in enumerate(back):
        if here == 1:
            wire.put(0, 1, at, True, [[torch.ones(3 + 2 * at)]])
        wire.post(transfer)
        if here == 0:
            shapes.append(tuple(wire.take(0, 1, at, True)[0][0].shape))
    wire.finish()
    return shapes
