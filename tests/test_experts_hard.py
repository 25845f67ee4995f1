"""Mixtures of experts that are hard on ranks: in one process, and on real ones."""

from __future__ import annotations

from functools import cache

import mixtures
import pytest
import torch
from compare import difference, differences
from mixtures import EXACT, Case
from test_experts import JOBS, SIZES
from test_gloo import each, ranks_of
from zoo import batch, tiny

from autoshard import verify
from autoshard.errors import ShardingError
from autoshard.runtime.dispatch import to_experts

alone = cache(lambda case, accumulate=1: mixtures.train(None, case, accumulate=accumulate))


def verified(case, mesh, **options):
    model, inputs = mixtures.made(case)
    report = verify(model, mesh, inputs, **options)
    assert report.ok, report
    assert any(n.target is to_experts for n in report.sharded.program.graph.nodes)
    return report


# --- in one process ---


@pytest.mark.parametrize("at, name", enumerate(EXACT), ids=EXACT)
def test_trains_like_one_device(at, name):
    verified(Case(name), ("ep=2", "ep=4")[at % 2])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["ep=2", "ep=4", "dp=2,ep=2", "ep=2,tp=2", "cp=2,ep=2"])
@pytest.mark.parametrize("name", EXACT)
def test_trains_like_one_device_on_every_mesh(name, mesh):
    verified(Case(name), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2"])
@pytest.mark.parametrize("name", EXACT)
def test_stores_parts_and_computes_again(name, mesh):
    verified(Case(name), mesh, zero=3, accumulate=2, recompute="block")


@pytest.mark.parametrize("name", ["one expert a token", "a rank without tokens"])
def test_a_token_for_every_rank(name):
    verified(Case(name, length=1), "ep=4")


def test_a_bias_that_forward_moves_is_that_of_all_tokens():
    report = verified(Case("bias of forward"), "ep=4")
    compared = [row.what for row in report.rows]
    assert "buffer after the steps layers.0.bias" in compared


@pytest.mark.parametrize("name", ["jitter", "bias of forward"])
def test_evaluation(name):
    model, inputs = mixtures.made(Case(name))
    report = verify(model.eval(), "ep=2", inputs, steps=1)
    assert report.ok, report


def test_noise_in_a_router_is_no_one_devices():
    model = tiny("mixtral", router_jitter_noise=0.1)
    with pytest.raises(ShardingError, match="random numbers: .*mlp"):
        verify(model, "ep=2", batch(), steps=1)


# --- on processes ---

ranks = ranks_of(SIZES, JOBS)
line = ranks_of(SIZES, mixtures.SLOW["line"])
square = ranks_of(SIZES, mixtures.SLOW["square"])
inside = ranks_of(SIZES, mixtures.SLOW["inside"])
architectures = ranks_of(SIZES, mixtures.SLOW["architectures"])
architectures_stored = ranks_of(SIZES, mixtures.SLOW["architectures_stored"])
MORE = [
    (started, name)
    for started, jobs in mixtures.SLOW.items()
    for name, job in jobs.items()
    if job[0] is mixtures.trained and job[1].name in (*EXACT, *mixtures.MIXTURES)
]


def assert_alike(got, want) -> None:
    """To rounding; and zero exactly where one device has zero."""
    for key in ("loss", "norm", "load"):
        for a, b in zip(got.get(key, []), want.get(key, []), strict=True):
            assert difference(a, b) == "", key
    for a, b in zip(got.get("gradients", []), want.get("gradients", []), strict=True):
        assert differences(a, b) == {}
        for name, gradient in b.items():
            assert not a[name][gradient == 0].any(), name
    assert differences(got["state"], want["state"]) == {}
    if "evaluated" in got:
        assert difference(got["evaluated"], want["evaluated"]) == ""


@pytest.mark.parametrize("name", mixtures.QUICK)
def test_processes_train_like_one_device(ranks, name):
    _, case, _, accumulate, *_ = mixtures.QUICK[name]
    for got in each(ranks, name):
        assert_alike(got, alone(case, accumulate))


@pytest.mark.slow
@pytest.mark.parametrize("started, name", MORE)
def test_more_processes_train_like_one_device(request, started, name):
    _, case, _, accumulate, *_ = mixtures.SLOW[started][name]
    for got in each(request.getfixturevalue(started), name):
        assert_alike(got, alone(case, accumulate))


@pytest.mark.parametrize("name", ["an expert without tokens", "a module without tokens"])
def test_an_expert_without_tokens_has_zeros_on_one_device(name):
    """What the tests above compare with."""
    found = alone(Case(name))["gradients"][0]
    whole = [g for n, g in found.items() if "each.2" in n] or [found["layers.0.up"][2]]
    assert not any(g.any() for g in whole)
    assert "idle" not in found


@pytest.mark.parametrize("name", ["biased by load", "corrected"])
def test_a_users_bias_moves_tokens(ranks, name):
    want = mixtures.OTHER[name][1](None)
    assert len({round(loss.item(), 6) for loss in want["loss"]}) > 2  # it does something
    for got in each(ranks, name):
        assert_alike(got, want)


@pytest.mark.parametrize("name", ["uneven rows", "a token"])
def test_few_tokens_on_processes(ranks, name):
    """A rank has no row and computes with those of others; every rank has one token."""
    want = alone(mixtures.OTHER[name][3]["case"])
    for got in each(ranks, name):
        assert_alike(got, want)


@pytest.mark.slow
def test_noise_on_processes(square):
    """Every rank its own: the loss is one, and without noise that of one device."""
    results = each(square, "jitter")
    for got in results:
        assert torch.equal(torch.stack(got["loss"]), torch.stack(results[0]["loss"]))
        assert torch.isfinite(torch.stack(got["loss"])).all()
        assert got["before"] == pytest.approx(mixtures.jittered(None)["before"], rel=1e-9)


def test_a_router_without_numbers_raises_nothing(ranks):
    for got in each(ranks, "nan"):
        assert_no_numbers(got, "nan")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nan", "inf"])
def test_a_router_without_numbers_on_a_line(line, name):
    for got in each(line, f"{name} on ep=4"):
        assert_no_numbers(got, name)


def assert_no_numbers(got, name: str) -> None:
    """The loss is none, as on one device."""
    for found in (got, alone(Case(name))):
        assert [loss.isnan().item() for loss in found["loss"]] == [True, True]


def test_experts_in_bfloat16_and_a_router_in_float32(ranks):
    """No further from one device in bfloat16 than that is from float32: as much is rounding."""
    one, exact = mixtures.in_half(None), mixtures.in_half(None, dtype=torch.float32)
    for got in each(ranks, "in half"):
        assert got.keys() == one.keys()
        for name, gradient in got.items():
            assert gradient.dtype == one[name].dtype
            off = (gradient.double() - one[name].double()).norm()
            rounding = (one[name].double() - exact[name].double()).norm()
            assert off <= rounding, f"{name}: {off} from one device, which is {rounding} off"
