"""Experts in a list of modules are kept stacked, cut over ep, under the names of the model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gloo
import pytest
import stacked_jobs as jobs
import torch
from compare import difference, differences
from stacked_jobs import Gated, looped, plain
from test_experts import feed_forward, tokens
from torch import nn

from autoshard import autoshard, verify
from autoshard.errors import ShardingError
from autoshard.outline import RECOMPUTE

aten = torch.ops.aten
FORMS = ["chosen_first", "masked"]
STACKS = {f"mixture.each.*.{n}.weight" for n in ("gate", "up", "down")}


def launched(sizes: dict[str, int], make: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        gloo.launch(sizes, make(Path(folder)), Path(folder))
        return gloo.results_in(Path(folder), sizes)


def of_ranks(results: list[dict[str, Any]], name: str) -> list[Any]:
    found = [every[name] for every in results]
    for each in found:
        assert not (isinstance(each, str) and "Traceback" in each), each
    return found


@pytest.fixture(scope="module")
def ranks():
    return launched({"ep": 2}, jobs.quick_jobs)


@pytest.fixture(scope="module")
def pair():
    return launched({"ep": 2}, jobs.jobs_of_two)


@pytest.fixture(scope="module")
def four():
    return launched({"dp": 2, "ep": 2}, jobs.jobs_of_four)


def stacks(module) -> dict[str, Any]:
    return {p.name: p for p in module.program.parameters().values() if p.stacked}


def stacked_nodes(module) -> int:
    return sum(n.target is aten.stack.default for n in module.program.graph.nodes)


# --- in one process ---


def assert_agrees(model: nn.Module, mesh: str, **options: Any) -> Any:
    report = verify(model, mesh, tokens(), **options)
    assert report.ok, report
    rows = {row.name.partition(" rank ")[0] for row in report.rows}
    assert {n for n, p in model.named_parameters() if p.requires_grad} <= rows
    return report.sharded


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks(form):
    module = assert_agrees(looped(form), "ep=2", steps=2)
    assert set(stacks(module)) == STACKS
    assert not stacked_nodes(module) and not module.program.notes
    for parameter in stacks(module).values():
        assert parameter.layout["ep"].role == "experts"
        assert parameter.value.shape[0] == 4
        assert parameter.value.untyped_storage().nbytes() == 8, "a copy of experts"
    assert dict(module.named_parameters()).keys() >= STACKS
    assert "4 × mixture.each.*.gate.weight" in module.table("params")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("mesh", ["ep=4", "dp=2,ep=2", "ep=2,tp=2", "cp=2,ep=2"])
def test_meshes(form, mesh, zero):
    module = assert_agrees(looped(form), mesh, steps=2, zero=zero)
    assert set(stacks(module)) == STACKS
    for name, parameter in stacks(module).items():
        if "ep" in mesh:
            assert parameter.layout["ep"].role == "experts", name
        if "tp" in mesh:
            assert not isinstance(parameter.layout["tp"], str), name
        shared = {"dp=2,ep=2": ("dp",), "cp=2,ep=2": ("cp",)}
        assert parameter.zero == shared.get(mesh, ()), name


@pytest.mark.parametrize("mesh, zero", [("dp=2", 1), ("cp=2", 3), ("dp=2,tp=2", 1)])
def test_ranks_that_have_all_experts(mesh, zero):
    """Without ep each expert keeps its own parameters and names; tp cuts them as any other."""
    model = looped()
    module = assert_agrees(model, mesh, steps=2, zero=zero)
    assert not stacks(module) and stacked_nodes(module) == 3
    assert dict(module.named_parameters()).keys() == dict(model.named_parameters()).keys()
    layout = next(
        p.layout
        for p in module.program.parameters().values()
        if p.name == "mixture.each.1.up.weight"
    )
    assert "tp" not in mesh or not isinstance(layout["tp"], str)


@pytest.mark.slow
@pytest.mark.parametrize("expert", [plain, feed_forward, Gated])
@pytest.mark.parametrize("sizes", [{"experts": 6}, {"experts": 5, "k": 1}], ids=str)
def test_experts_that_do_not_divide(expert, sizes):
    options = {"steps": 2, "zero": 3, "accumulate": 2}
    module = assert_agrees(looped(expert=expert, **sizes), "dp=2,ep=2", **options)
    assert len(stacks(module)) == {plain: 2, feed_forward: 4, Gated: 3}[expert]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2"])
def test_turned_weights(mesh):
    """A weight that each expert reads turned round, and one in the other orientation."""

    class Turned(nn.Module):
        def __init__(self, width, inner):
            super().__init__()
            self.up = nn.Parameter(torch.randn(width, inner))
            self.down = nn.Parameter(torch.randn(width, inner))

        def forward(self, x):
            return torch.relu(x @ self.up) @ self.down.permute(1, 0)

    module = assert_agrees(looped(expert=Turned), mesh, steps=2)
    assert set(stacks(module)) == {"mixture.each.*.up", "mixture.each.*.down"}
    assert not stacked_nodes(module)


def test_what_cannot_be_stacked():
    """Some frozen, some tied, one read elsewhere too: all ranks keep them, and it is said why."""

    class Sized(type(looped())):
        def forward(self, ids, labels):
            penalty = self.mixture.each[1].down.weight.square().mean()
            return super().forward(ids, labels) + penalty

    model = looped()
    model.__class__ = Sized
    first, second = model.mixture.each[:2]
    first.gate.weight.requires_grad_(False)
    first.up.weight = second.up.weight
    module = assert_agrees(model, "ep=2", steps=1)
    assert not stacks(module)
    assert stacked_nodes(module) == 3
    notes = "\n".join(module.program.notes)
    assert "mixture.each.1.gate.weight and 2 more are frozen, and others not" in notes
    assert "mixture.each.0.up.weight and mixture.each.1.up.weight are tied" in notes
    assert "mixture.each.1.down.weight is read elsewhere too" in notes
    names = {p.name for p in module.program.parameters().values()}
    assert {n for n, _ in model.named_parameters()} == names


@pytest.mark.slow
def test_layers():
    """Layers that are computed again in backward; each has stacks of its own."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            one = looped()
            self.embed, self.head = one.embed, one.head
            self.layers = nn.ModuleList(looped(seed=seed).mixture for seed in range(3))

        def forward(self, ids, labels):
            x = self.embed(ids)
            for layer in self.layers:
                x = x + layer(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    module = assert_agrees(Layers(), "dp=2,ep=2", steps=2, zero=3, recompute="block")
    assert len(stacks(module)) == 9
    assert "layers.1.each.*.up.weight" in stacks(module)
    assert "4 × layers.1.each.*.up.weight" in module.table("params")
    blocks = {b for n in module.program.graph.nodes if (b := n.meta.get(RECOMPUTE))}
    assert len(blocks) >= 2


@pytest.mark.slow
def test_experts_with_buffers():
    """A table is no parameter: all ranks keep it, and the weights beside it are cut."""

    class Scaled(Gated):
        def __init__(self, width, inner):
            super().__init__(width, inner)
            self.register_buffer("scale", torch.rand(width))

        def forward(self, x):
            return super().forward(x) * self.scale

    module = assert_agrees(looped(expert=Scaled), "ep=2", steps=2)
    assert set(stacks(module)) == STACKS
    assert stacked_nodes(module) == 1
    assert "they are not all parameters" in "".join(module.program.notes)


@pytest.mark.slow
def test_a_model_that_stacks_its_experts():
    """Parameters of a list that the model's own forward stacks in each step."""
    model = looped("added", expert=plain)

    class Stacking(type(model.mixture)):
        up = property(lambda self: torch.stack([e[0].weight.t() for e in self.each]))
        down = property(lambda self: torch.stack([e[2].weight.t() for e in self.each]))

    model.mixture.__class__ = Stacking
    module = assert_agrees(model, "ep=2", steps=2)
    assert set(stacks(module)) == {"mixture.each.*.0.weight", "mixture.each.*.2.weight"}
    assert not stacked_nodes(module)


@pytest.mark.slow
def test_mixtures_that_share_experts():
    """Two layers over the same experts read one stack twice; an expert with two names has both."""
    model = looped()

    class Twice(type(model)):
        def forward(self, ids, labels):
            x = self.embed(ids)
            for _ in range(2):
                x = x + self.mixture(self.norm(x))
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    model.__class__ = Twice
    model.also = model.mixture.each[2]
    module = assert_agrees(model, "ep=2", steps=2)
    assert set(stacks(module)) == STACKS
    names = stacks(module)["mixture.each.*.up.weight"].stacked[2].names
    assert set(names) == {"mixture.each.2.up.weight", "also.up.weight"}


@pytest.mark.slow
def test_another_loop_in_evaluation():
    """Experts are kept in one way only; what does not fit is refused by name."""
    model = looped()

    class Sparse(type(model.mixture)):
        def chosen_first(self, tokens, weights, chosen):
            if self.training:
                return super().chosen_first(tokens, weights, chosen)
            return sum(expert(tokens) for expert in self.each)

    model.mixture.__class__ = Sparse
    module = autoshard(model, "ep=2", tokens())
    with pytest.raises(ShardingError, match="eval: parameters mixture.each.0.gate.weight, "):
        module.eval()


# --- on processes ---


def assert_trained(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in ("gradients", "state"):
        assert differences(found[key], wanted[key]) == {}, key
    for got, want in zip(found["norm"], wanted["norm"], strict=True):
        assert difference(got, want) == ""
    for key in ("loss", "evaluated"):
        assert difference(found[key], wanted[key]) == "", key


def test_training(ranks):
    """Two steps of AdamW over accumulated gradients, clipping, and a loss in evaluation."""
    wanted = jobs.train_alone()
    for found in of_ranks(ranks, "train"):
        assert_trained(found, wanted)
        assert set(found["names"]) >= STACKS


def test_checkpoints(ranks):
    """From tp=2, where experts are kept one by one, to ep=2, to one device, to ep=2, to tp=2."""
    first, *_ = found = of_ranks(ranks, "checkpoints")
    ways = ["tp to ep", "ep to one", "one to ep", "ep to tp", "tp again"]
    assert [w for w in ways if first[w]] == []
    for each in found:
        assert [w for w in ways if w in each and each[w]] == []
        for loss in each["losses"].values():
            assert abs(loss - first["losses"]["one"]) < 1e-5
        for name, value in each["then"]["tp"].items():
            assert (value - each["then"]["ep"][name]).abs().max() < 1e-5, name


def test_local_states(ranks):
    """Each rank's own experts under the names of the model, as views."""
    for rank, found in enumerate(of_ranks(ranks, "local")):
        assert_local_state(found, {2 * rank, 2 * rank + 1})


def assert_local_state(found: dict[str, Any], experts: set[int]) -> None:
    wanted = looped().state_dict()
    held = {n: v for n, v in found["state"].items() if ".each." in n}
    parts = ("gate", "up", "down")
    assert held.keys() == {f"mixture.each.{e}.{n}.weight" for e in experts for n in parts}
    assert all(torch.equal(value, wanted[n]) for n, value in held.items())
    assert found["views"] and found["again"] == []
    assert f'Missing key(s) in state_dict: "{found["name"]}"' in found["missing"]
    assert found["not strict"] == ([found["name"]], [])
    assert f"size mismatch for {found['name']}: it is (1, 16)" in found["shape"]
    assert 'Unexpected key(s) in state_dict: "mixture.each.9.up.weight"' in found["unexpected"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["biased", "frozen", "offload", "zero 0"])
def test_training_otherwise(pair, name):
    wanted = {"biased": (feed_forward,), "frozen": (Gated, True)}.get(name, ())
    expected = jobs.train_alone(*wanted)
    for found in of_ranks(pair, name):
        assert_trained(found, expected)
        assert any("*" in n for n in found["names"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(f"zero {z}" for z in range(4)), "offload", "recompute"])
def test_training_on_four(four, name):
    expected = jobs.train_alone()
    for found in of_ranks(four, name):
        assert_trained(found, expected)
        assert set(found["names"]) >= STACKS


@pytest.mark.slow
def test_local_states_on_four(four):
    """ZeRO-3 shares a rank's two experts out over dp: one is left."""
    for rank, found in enumerate(of_ranks(four, "local")):
        dp, ep = divmod(rank, 2)
        assert_local_state(found, {2 * ep + dp})


@pytest.mark.slow
def test_lower_precision(pair, four):
    """Weights in bfloat16 of parameters in float32: the losses to one step of bfloat16 (2^-6)."""
    wanted = losses_in_bfloat16()
    for found in (
        *of_ranks(pair, "bfloat16"),
        *of_ranks(four, "bfloat16"),
        *of_ranks(four, "bfloat16, 3"),
    ):
        assert found["types"] == {torch.float32}
        assert (found["loss"] - wanted).abs().max() <= 2**-6


def losses_in_bfloat16() -> torch.Tensor:
    model = looped()
    optimizer, losses = jobs.adamw(model), []
    for _ in range(3):
        weights = {n: p.bfloat16() for n, p in model.named_parameters()}
        loss = torch.func.functional_call(model, weights, kwargs=tokens()).float()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


@pytest.mark.slow
def test_whole_states(pair):
    """Whole state dicts and safetensors files have the model's own names, in and out."""
    model, name = looped(), "mixture.each.1.up.weight"
    for found in of_ranks(pair, "whole"):
        state = found["state"]
        assert jobs.unequal(state, model.state_dict()) == []
        storages = {value.untyped_storage().data_ptr() for value in state.values()}
        assert len(storages) == len(state)
        assert found["live"] == 0
        assert f"missing {name}; unexpected more" in found["missing"]
        assert f"{name} is (1, 16), not (24, 16)" in found["shape"]
        assert found["not strict"] == ([name], [])
        assert len(found["before"]) > 10
        assert found["names"] == ([], [])
        assert found["read"] == found["loaded"] == []


@pytest.mark.slow
def test_states_that_are_not_of_one_parameter(pair):
    for found in of_ranks(pair, "others"):
        assert "holds parameters of groups [0, 1], whose hyperparameters differ" in found["rates"]
        assert "mixture.each.*.gate.weight is stepped as one" in found["steps"]
        assert "mixture.each.0.gate.weight has {" in found["steps"]


@pytest.mark.slow
def test_from_meta(pair):
    """A rank makes its own experts only, with the values that every other mesh has."""
    for rank, found in enumerate(of_ranks(pair, "meta")):
        assert jobs.unequal(found["ep"], found["tp"]) == []
        assert found["tp made"] == set("0123")
        assert found["ep made"] == set("01" if rank == 0 else "23")
        assert abs(found["ep loss"] - found["tp loss"]) < 1e-5
        weights = [f"mixture.each.{e}.weight" for e in range(4)]
        assert ", ".join(weights) in found["unset"]
        assert "mixture.each.0" not in found["one set"]
        assert ", ".join(weights[1:]) in found["one set"]
        assert found["set"].isfinite()


@pytest.mark.slow
def test_optimizer_that_looks_at_whole_tensors(pair):
    for text in of_ranks(pair, "optimizer"):
        assert "ByNorm.step: parameters such as mixture.each.*." in text
