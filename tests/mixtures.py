"""Mixtures of experts that are hard on ranks, and jobs that train them, on ranks and on one device.

Every job takes a mesh, or None for one device, and gives what a user would look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import gloo
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers.integrations.moe  # registers the products by groups
from context_jobs import laid_out, step_of
from gloo import InFloat64, detached, gradients_of
from torch import nn
from zero_jobs import rows_of
from zoo import MIXTURES, batch, tiny

assert transformers.integrations.moe

WIDTH, INNER, VOCAB = 16, 24, 32


class Mixture(nn.Module):
    """Products by groups of rows sorted by expert. ``only``: experts that can be chosen."""

    def __init__(self, experts: int = 4, k: int = 2, only: tuple[int, ...] = ()):
        super().__init__()
        self.k, self.experts = k, experts
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, INNER) / 4)
        self.down = nn.Parameter(torch.randn(experts, INNER, WIDTH) / 4)
        closed = [1e9 if only and e not in only else 0.0 for e in range(experts)]
        self.register_buffer("closed", torch.tensor(closed))

    def choose(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.router(tokens) - self.closed).softmax(-1).topk(self.k, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, self.chosen = self.choose(tokens)
        return self.computed(tokens, weights.to(x.dtype), self.chosen).view_as(x)

    def computed(self, tokens, weights, chosen):
        slots = chosen.reshape(-1)
        order = slots.argsort(stable=True)
        ends = F.one_hot(slots, self.experts).sum(0).cumsum(0).to(torch.int32)
        inner = F.gelu(grouped_mm(tokens[order // self.k], self.up, ends))
        out = grouped_mm(inner, self.down, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // self.k, out)


def grouped_mm(x, weight, ends):
    return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)


class Looped(Mixture):
    """Each expert a module of its own."""

    def __init__(self, *args: Any, **sizes: Any):
        super().__init__(*args, **sizes)
        del self.up, self.down
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
            for _ in range(self.experts)
        )

    def computed(self, tokens, weights, chosen):
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.each):
            token, slot = torch.where(chosen == e)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
        return out


class InFloat32(Mixture):
    """The router computes in float32, whatever the experts do."""

    def choose(self, tokens):
        scores = F.linear(tokens.float(), self.router.weight.float())
        return scores.softmax(-1).topk(self.k, -1)


class Biased(Mixture):
    """Choice by scores and a bias that is not learned; weights are the scores. ``rate``: by how
    much forward moves the bias of experts that get more or fewer tokens than others."""

    def __init__(self, rate: float = 0.0):
        super().__init__()
        self.rate = rate
        self.register_buffer("bias", torch.zeros(self.experts))

    def choose(self, tokens):
        scores = self.router(tokens).sigmoid()
        chosen = (scores + self.bias).topk(self.k, -1).indices
        if self.rate and self.training:
            counts = F.one_hot(chosen, self.experts).sum((0, 1)).to(scores.dtype)
            self.bias += self.rate * torch.sign(counts.mean() - counts)
        return scores.gather(1, chosen), chosen


class Jittered(Mixture):
    """The router sees noise in training."""

    def choose(self, tokens):
        if self.training:
            tokens = tokens * torch.empty_like(tokens).uniform_(0.9, 1.1)
        return super().choose(F.dropout(tokens, 0.1, self.training))


class Output(NamedTuple):
    loss: torch.Tensor
    chosen: torch.Tensor


class Model(nn.Module):
    """Mixtures one after another; what the first chooses is an output. One parameter is
    read by nothing."""

    def __init__(self, *mixtures: Mixture):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.layers, self.head = nn.ModuleList(mixtures), nn.Linear(WIDTH, VOCAB)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, ids, labels):
        x = self.embed(ids)
        for mixture in self.layers:
            x = x + mixture(self.norm(x))
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return Output(loss, self.layers[0].chosen)


def shared() -> Model:
    """One mixture at two depths."""
    mixture = Mixture()
    return Model(mixture, mixture)


def frozen(part: str) -> Model:
    model = Model(Mixture(), Mixture())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part not in name)
    return model


def broken(value: float) -> Model:
    """A router whose numbers are no numbers."""
    model = Model(Mixture())
    with torch.no_grad():
        model.layers[0].router.weight[1] = value
    return model


#: Name -> the model.
MODELS: dict[str, Callable[[], Model]] = {
    "more than a rank has": lambda: Model(Mixture(k=3)),
    "one expert a token": lambda: Model(Mixture(k=1)),
    "all to one": lambda: Model(Mixture(k=1, only=(2,))),
    "a rank without tokens": lambda: Model(Mixture(only=(0, 1))),
    "an expert without tokens": lambda: Model(Mixture(only=(0, 1, 3))),
    "a module without tokens": lambda: Model(Looped(only=(0, 1, 3))),
    "unlike each other": lambda: Model(Mixture(), Mixture(8, 1), Mixture(6, 3)),
    "shared": shared,
    "frozen router": lambda: frozen("router"),
    "frozen experts": lambda: frozen("layers.0.up"),
    "frozen mixture": lambda: frozen("layers"),
    "bias of the user": lambda: Model(Biased()),
    "bias of forward": lambda: Model(Biased(rate=0.1)),
    "router in float32": lambda: Model(InFloat32()),
    "jitter": lambda: Model(Jittered()),
    "nan": lambda: broken(float("nan")),
    "inf": lambda: broken(float("inf")),
}
#: Those that can be told from one device, to rounding.
EXACT = [name for name in MODELS if name not in ("jitter", "nan", "inf")]


#: Of an architecture: with experts.
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}


class Case(NamedTuple):
    """``name``: of a model above, or of an architecture."""

    name: str
    length: int = 6


def made(case: Case) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model with its global batch, the same on every call. Rows hold unequal numbers of labels,
    and the last token always one."""
    torch.manual_seed(0)
    if case.name not in MODELS:
        model = tiny(case.name, **ONE_LAYER)
        model.config._experts_implementation = "batched_mm"  # grouped_mm refuses float64
        return model, batch()
    given = batch(VOCAB, 4, case.length, pad=False)
    for row in range(4):
        given["labels"][row, : min(row, case.length - 1)] = -100
    return MODELS[case.name](), {"ids": given["input_ids"], "labels": given["labels"]}


def train(
    mesh: Any,
    case: Case,
    axes: dict[str, int] | None = None,
    accumulate: int = 1,
    evaluates: bool = True,
    rows: tuple[int, ...] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Two AdamW steps with clipping: losses, norms, gradients of both, the state, and if it
    ``evaluates`` (which compiles once more) the loss in evaluation mode. ``rows``: of each rank,
    where not equally many."""
    model, inputs = made(case)
    model, mesh = model.double(), laid_out(mesh, axes)
    if mesh is not None:
        model = gloo.shard(mesh, model, inputs, **options)
        inputs = gloo.local_rows(mesh, inputs, rows)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    out: dict[str, Any] = {"loss": [], "norm": [], "gradients": []}
    for _ in range(2):
        optimizer.zero_grad()
        for turn in range(accumulate):
            given = {k: v.roll(turn, 1) for k, v in inputs.items()}
            out["loss"].append(step_of(mesh, model, given))
        out["gradients"].append(gradients_on(mesh, model))
        out["norm"].append(clipped(mesh, model))
        optimizer.step()
    state = model.state_dict() if mesh is None else model.full_state_dict()
    out["state"] = detached(state)
    return out | ({"evaluated": evaluated(mesh, model, inputs)} if evaluates else {})


def gradients_on(mesh: Any, model: Any) -> dict[str, torch.Tensor]:
    return gradients_of(model) if mesh is None else detached(model.full_gradients())


def clipped(mesh: Any, model: Any) -> torch.Tensor:
    if mesh is None:
        held = [p for p in model.parameters() if p.grad is not None]
        return nn.utils.clip_grad_norm_(held, gloo.CLIP)
    return torch.as_tensor(model.clip_grad_norm_(gloo.CLIP)).clone()


def evaluated(mesh: Any, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss in evaluation mode, of the global batch on every rank."""
    with torch.no_grad(), InFloat64():
        return model.eval()(**inputs).loss.clone()


def biased_by_load(mesh: Any, axes: dict[str, int] | None = None, **options: Any) -> dict[str, Any]:
    """Between steps the user moves the bias of a router by the load of its experts."""
    model, inputs = made(Case("bias of the user"))
    model, mesh = model.double(), laid_out(mesh, axes)
    if mesh is not None:
        model = gloo.shard(mesh, model, inputs, **options)
        inputs = rows_of(mesh, inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bias = dict(model.named_buffers())["layers.0.bias"]
    out: dict[str, Any] = {"loss": [], "load": []}
    for _ in range(4):
        optimizer.zero_grad()
        found = model(**inputs)
        found.loss.backward()
        optimizer.step()
        load = torch.bincount(found.chosen.flatten(), minlength=4).double()
        if mesh is not None:
            dist.all_reduce(load)
        bias += 0.3 * torch.sign(load.mean() - load)
        out["loss"].append(found.loss.detach().clone())
        out["load"].append(load)
    state = model.state_dict() if mesh is None else model.full_state_dict()
    return out | {"state": detached(state)}


def corrected(mesh: Any, axes: dict[str, int] | None = None, **options: Any) -> dict[str, Any]:
    """DeepSeek-V3's own bias, turned round between steps: other experts are chosen each time."""
    model, inputs = made(Case("deepseek_v3"))
    model, mesh = model.double(), laid_out(mesh, axes)
    if mesh is not None:
        model = gloo.shard(mesh, model, inputs, **options)
        inputs = rows_of(mesh, inputs)
    held = dict(model.named_buffers())
    (bias,) = [b for name, b in held.items() if name.endswith("e_score_correction_bias")]
    bias.copy_(torch.tensor([1.0, 0.5, -0.5, -1.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out: dict[str, Any] = {"loss": [], "norm": [], "gradients": []}
    for _ in range(3):
        optimizer.zero_grad()
        out["loss"].append(step_of(mesh, model, inputs))
        out["gradients"].append(gradients_on(mesh, model))
        out["norm"].append(clipped(mesh, model))
        optimizer.step()
        bias.copy_(bias.roll(1))
    state = model.state_dict() if mesh is None else model.full_state_dict()
    return out | {"state": detached(state)}


def in_half(
    mesh: Any, axes: dict[str, int] | None = None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Gradients where all but the router is of a type."""
    from autoshard import autoshard

    model, inputs = made(Case("router in float32", length=64))
    model, mesh = model.to(dtype), laid_out(mesh, axes)
    model.layers[0].router.float()
    if mesh is None:
        model(**inputs).loss.backward()
        return gradients_of(model)
    sharded = autoshard(model, mesh, example_inputs=inputs)
    sharded.train_step(**rows_of(mesh, inputs))
    return detached(sharded.full_gradients())


def jittered(mesh: Any, axes: dict[str, int] | None = None) -> dict[str, Any]:
    """Losses of two steps with noise in the router, and before that without."""
    model, inputs = made(Case("jitter"))
    model, mesh = model.double(), laid_out(mesh, axes)
    if mesh is not None:
        model = gloo.shard(mesh, model, inputs)
        inputs = rows_of(mesh, inputs)
    out: dict[str, Any] = {"before": evaluated(mesh, model, inputs).item()}
    model.train()
    torch.manual_seed(0)
    return out | {"loss": [step_of(mesh, model, inputs) for _ in range(2)]}


def with_options(mesh: Any, job: Any, axes: dict[str, int], options: dict[str, Any]) -> Any:
    return job(mesh, axes=axes, **options)


def trained(mesh: Any, case: Case, axes: dict[str, int], accumulate: int, options: Any) -> Any:
    return train(mesh, case, axes, accumulate, **options)


def jobs(names: Iterable[str], axes: dict[str, int], accumulate: int = 1, **options: Any) -> Any:
    """A training job for each of some models, by a name that tells where."""
    where = ",".join(f"{axis}={size}" for axis, size in axes.items())
    where += f" zero {options['zero']}" if "zero" in options else ""
    cases = {f"{name} on {where}": Case(name) for name in names}
    return {text: (trained, case, axes, accumulate, options) for text, case in cases.items()}


LINE, SQUARE, INSIDE = {"ep": 4}, {"dp": 2, "ep": 2}, {"ep": 2, "tp": 2}
#: Which run each time.
QUICK = (
    jobs(["qwen3_moe"], LINE, evaluates=False)
    | jobs(["gpt_oss"], INSIDE, evaluates=False)
    | jobs(["a rank without tokens", "bias of forward"], LINE)
    | jobs(["unlike each other"], SQUARE, 2, zero=3, recompute="block", evaluates=False)
)
#: Name -> the job, and what it is given.
OTHER: dict[str, tuple[Any, ...]] = {
    "biased by load": (biased_by_load, LINE, {}),
    "corrected": (corrected, SQUARE, {"zero": 3}),
    "in half": (in_half, LINE, {}),
    "uneven rows": (
        train,
        LINE,
        {"case": Case("bias of forward"), "rows": (2, 1, 1, 0), "evaluates": False},
    ),
    "a token": (train, LINE, {"case": Case("one expert a token", 1), "evaluates": False}),
    "nan": (train, LINE, {"case": Case("nan"), "evaluates": False}),
}
OTHER = {name: (with_options, *job) for name, job in OTHER.items()}
#: What is slow, by what starts together.
SLOW = {
    "line": jobs(EXACT, LINE) | jobs(["nan", "inf"], LINE, evaluates=False),
    "square": jobs(EXACT, SQUARE, 2, zero=3, evaluates=False) | {"jitter": (jittered, SQUARE)},
    "inside": jobs(EXACT, INSIDE),
    "architectures": jobs(MIXTURES, LINE) | jobs(MIXTURES, SQUARE) | jobs(MIXTURES, INSIDE),
    "architectures_stored": jobs(MIXTURES, SQUARE, 2, zero=3, evaluates=False)
    | jobs(MIXTURES, INSIDE, 2, zero=3, evaluates=False),
}
