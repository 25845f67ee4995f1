"""Experts with a capacity, how their load is told, and what is computed while tokens travel."""

import tempfile
from pathlib import Path

import capacity_jobs as jobs
import gloo
import pytest
import torch
from capacity_jobs import Model, tokens
from compare import difference, differences

from autoshard import autoshard, simulate, verify
from autoshard.errors import ShardingError
from autoshard.runtime.dispatch import Capacity

SIZES = {"ep": 2}
FACTORS = (0.6, 1.0, 4.0)
JOBS = {f"step {factor}": (jobs.step, factor) for factor in (None, *FACTORS)}
JOBS |= {f"rooted {factor}": (jobs.step, factor, True) for factor in FACTORS}
JOBS |= {f"departures {again}": (jobs.departures, again) for again in ("none", "block")}
JOBS |= {
    "uneven": (jobs.uneven,),
    "order": (jobs.order,),
    "sent": (jobs.sent,),
    "modes": (jobs.modes,),
}


@pytest.fixture(scope="module")
def ranks():
    with tempfile.TemporaryDirectory() as folder:
        gloo.launch(SIZES, JOBS, Path(folder))
        return gloo.results_in(Path(folder), SIZES)


def results(ranks, name):
    for every in ranks:
        assert not isinstance(every[name], str), every[name]
    return [every[name] for every in ranks]


@pytest.mark.parametrize("factor", FACTORS)
def test_what_is_dropped_on_processes(ranks, factor):
    """Each rank's tokens by themselves, as a model does that drops by hand."""
    loss, gradients = jobs.one_device(factor, groups=2)
    for found in results(ranks, f"step {factor}"):
        assert difference(found["loss"], loss) == ""
        assert differences(found["gradients"], gradients) == {}


@pytest.mark.parametrize("factor", FACTORS)
def test_what_is_dropped_on_one_rank(factor):
    model = Model().double()
    sharded = autoshard(model, "dp=1", tokens(), expert_capacity=factor)
    loss, gradients = jobs.one_device(factor, groups=1)
    assert difference(sharded.train_step(**tokens()), loss) == ""
    assert differences(sharded.full_gradients(), gradients) == {}


@pytest.mark.parametrize("factor", FACTORS)
def test_experts_without_a_gradient_at_zero(ranks, factor):
    """What an expert is sent for nothing is no row of zeros."""
    loss, gradients = jobs.one_device(factor, groups=2, rooted=True)
    for found in results(ranks, f"rooted {factor}"):
        assert difference(found["loss"], loss) == ""
        assert differences(found["gradients"], gradients) == {}
    report = verify(Model().rooted(), "ep=2", tokens(), steps=1, expert_capacity=4.0)
    assert report.ok, report


def test_the_oracle_sees_rows_of_zeros(monkeypatch):
    """Zeros for what is sent for nothing, at an expert that has no gradient there."""
    row = simulate._row
    zeros = lambda x, at, read: row(x, at, read) * read  # noqa: E731
    monkeypatch.setattr(simulate, "_row", zeros)
    assert not verify(Model().rooted(), "ep=2", tokens(), steps=1, expert_capacity=4.0).ok


@pytest.mark.parametrize("mesh", ["cp=2", "ep=2,cp=2", "dp=2,tp=2"])
def test_a_length_that_ranks_do_not_divide(mesh):
    """A rank may hold more tokens than their even part, and all may choose the same experts."""
    model = Model()
    for layer in model.layers:
        torch.nn.init.zeros_(layer.router.weight)
    report = verify(model, mesh, tokens(length=5), steps=1, expert_capacity=100.0)
    assert report.ok, report
    assert [load.dropped for load in report.sharded.expert_load()] == [0, 0]


@pytest.mark.parametrize("factor", [None, 1.0, 0.25])
@pytest.mark.parametrize("mesh", ["ep=2", "dp=2", "ep=2,tp=2"])
def test_tokens_that_choose_no_expert(mesh, factor):
    """They are not counted, and take no place of others."""
    torch.manual_seed(1)
    x, model = torch.randn(8, 6, jobs.WIDTH), jobs.Skipping()
    chosen = model.router(x).argmax(-1).flatten()
    counts = torch.bincount(chosen, minlength=4).tolist()
    assert sum(counts[:3]) < counts[3]
    report = verify(model, mesh, {"x": x}, steps=1, expert_capacity=factor)
    (load,) = report.sharded.expert_load()
    assert load.tokens == tuple(counts[:3])
    if factor == 0.25:
        assert 0 < load.dropped < sum(counts[:3])
    else:
        assert report.ok and load.dropped == 0, report
    if factor is None and mesh == "ep=2":
        assert sum(load.rows) == sum(counts[:3])


@pytest.mark.parametrize("mesh", ["ep=2", "ep=2,tp=2", "dp=2,ep=2", "cp=2,ep=2", "dp=2,tp=2"])
def test_a_capacity_that_drops_nothing_changes_nothing(mesh):
    report = verify(Model(shared=True), mesh, tokens(), steps=1, expert_capacity=2.0)
    assert report.ok, report
    assert [load.dropped for load in report.sharded.expert_load()] == [0, 0]


@pytest.mark.parametrize("zero", [1, 3])
def test_recomputed_and_shared_out(zero):
    options = {"zero": zero, "recompute": "block", "accumulate": 2, "expert_capacity": 2.0}
    report = verify(Model(shared=True), "dp=2,ep=2", tokens(), **options)
    assert report.ok, report


def test_all_that_sets_out_is_waited_for(ranks):
    """Also where a shared expert, the last thing that backward needs, stands in between."""
    pairs = [results(ranks, f"departures {again}") for again in ("none", "block")]
    for (plain, once), (again, twice) in zip(*pairs, strict=True):
        assert differences(again, plain) == {}
        assert once[0] == once[1] == 2 * 5  # of two layers: counts, and both ways twice
        assert twice[0] == twice[1] == 2 * 8
        assert once[2] == twice[2] == 0


def test_slots_of_an_expert():
    """The factor times the even part, rounded up, as far as there are tokens."""
    assert Capacity(1.0, 1).slots(tokens=8, held=8, k=2, experts=4) == 4
    assert Capacity(1.25, 1).slots(tokens=8, held=8, k=2, experts=4) == 5
    assert Capacity(1.1, 1).slots(tokens=100, held=100, k=1, experts=10) == 11
    assert Capacity(0.01, 1).slots(tokens=8, held=8, k=2, experts=4) == 1
    assert Capacity(9.0, 1).slots(tokens=8, held=8, k=2, experts=4) == 8
    assert Capacity(1.0, 2).slots(tokens=9, held=5, k=1, experts=2) == 3
    assert Capacity(1.0, 1).slots(tokens=0, held=0, k=2, experts=4) == 0


def test_ranks_with_other_numbers_of_rows_are_told(ranks):
    for every in ranks:
        text = every["uneven"]
        assert "have [6, 6] elements on rank 0 and [18, 18] on rank 1" in text, text
        assert "all ranks send as many rows in layers.0, layers.1" in text


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "1.25"])
def test_no_capacity(value):
    with pytest.raises(ShardingError, match="option expert_capacity"):
        autoshard(Model(), "ep=2", tokens(), expert_capacity=value)


def test_a_capacity_without_experts():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with pytest.raises(ShardingError, match="expert_capacity=1.25: the model has none"):
        autoshard(model, "dp=2", torch.randn(4, 4), expert_capacity=1.25)


# --- loads ---


def chosen_by(model: Model) -> list[torch.Tensor]:
    """Of each mixture, how many slots every expert was chosen for."""
    found = []
    hooks = [
        layer.router.register_forward_hook(
            lambda _, __, scores: found.append(scores.topk(jobs.K, -1).indices)
        )
        for layer in model.layers
    ]
    model(**tokens())
    for hook in hooks:
        hook.remove()
    return [torch.bincount(index.flatten(), minlength=jobs.EXPERTS) for index in found]


def test_loads_on_processes(ranks):
    wanted = [tuple(counts.tolist()) for counts in chosen_by(Model().double())]
    first, second = results(ranks, "step None")
    assert first["load"] == second["load"]
    assert [load.where for load in first["load"]] == ["layers.0", "layers.1"]
    for load, counts in zip(first["load"], wanted, strict=True):
        assert load.tokens == counts
        assert load.rows == (sum(counts[:2]), sum(counts[2:]))
        assert load.dropped == 0
        assert load.expert_imbalance == max(counts) * 4 / 48
        assert load.rank_imbalance == max(load.rows) * 2 / 48
        row = 8 * (jobs.WIDTH + 1)  # a token and its weight, in float64
        assert all(0 < sent <= 24 * row and sent % row == 0 for sent in load.sent)


@pytest.mark.parametrize("factor", [None, *FACTORS])
def test_simulated_loads_are_those_of_processes(ranks, factor):
    found = results(ranks, f"step {factor}")[0]["load"]
    report = verify(Model(), "ep=2", tokens(), steps=1, zero=0, expert_capacity=factor)
    after = found[0]  # of the first mixture: no step came before it
    assert report.sharded.expert_load()[0] == after
    if factor in (0.6, 1.0):
        assert after.dropped > 0
        assert sum(after.rows) == 4 * 2 * Capacity(factor, 1).slots(12, 12, 2, 4)


def test_loads_of_a_mode(ranks):
    """Training and evaluation are told apart, and nothing is told of what has not run."""
    for before, trained, unused, evaluated, again in results(ranks, "modes"):
        assert before == unused == []
        assert [sum(load.tokens) for load in trained] == [48, 48]
        assert [sum(load.tokens) for load in evaluated] == [24, 24]
        assert again == trained


def test_rows_that_ranks_of_tp_share():
    """Each computes, with its part of the width, the rows that came to any of them."""
    report = verify(Model(), "ep=2,tp=2", tokens(), steps=1)
    for load in report.sharded.expert_load():
        halves = sum(load.tokens[:2]), sum(load.tokens[2:])
        assert load.rows == (halves[0], halves[0], halves[1], halves[1])
        assert load.rank_imbalance == max(halves) * 2 / 48
    capped = verify(Model(), "ep=2,tp=2", tokens(), steps=1, expert_capacity=1.0)
    each = Capacity(1.0, 2).slots(12, 6, 2, 4)
    for load in capped.sharded.expert_load():
        assert load.rows == (2 * 2 * 2 * each,) * 4


@pytest.mark.parametrize("mesh", ["ep=4", "dp=2,ep=2", "ep=2,tp=2", "cp=2,ep=2", "tp=2,cp=2"])
def test_every_slot_is_counted_once(mesh):
    report = verify(Model(), mesh, tokens(), steps=1)
    for load in report.sharded.expert_load():
        assert sum(load.tokens) == 4 * 6 * jobs.K
        assert load.dropped == 0


def test_table_of_experts():
    sharded = autoshard(Model(), "dp=2,ep=2", tokens())
    (line,) = sharded.table("experts").splitlines()[2:]
    assert line.split()[:8] == ["layers.*", "2", "4", "2", "ep", "2", "-", "136*batch*sequence"]
    report = verify(Model(), "dp=2,ep=2", tokens(), steps=1, expert_capacity=1.0)
    table = report.sharded.table("experts")
    assert len(table.splitlines()) == 4
    for header in (
        "tokens of experts",
        "most/mean",
        "rows of ranks",
        "bytes sent, most",
        "dropped",
    ):
        assert header in table


def test_bytes_of_balanced_experts(ranks):
    """Each way k rows of a token, (ep-1)/ep of them to other ranks, forward and backward; on the
    way there with a number for each, the weight, and its gradient on the way back."""
    tokens_here, ep = 4 * 8, 2
    rows = tokens_here * jobs.K * (ep - 1) // ep
    there, back = rows * (jobs.WIDTH + 1) * 8, rows * jobs.WIDTH * 8
    for found, told in results(ranks, "sent"):
        assert found == [there, back, back, there]
        assert told == [there]


@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2", "ep=2,tp=2", "cp=2,ep=2"])
def test_nothing_is_gathered_over_ep(mesh):
    """Of activations; what is summed over it are single numbers of the loss."""
    conversions = autoshard(Model(), mesh, tokens(), zero=0).program.conversions
    over = [c for c in conversions if "ep" in {m.partition(".")[0] for m in c.axes}]
    rows = [c for c in over if c.numel != 1]
    assert {c.kind for c in rows} == {"to_experts", "to_tokens"}
    assert len(rows) == 4


def test_rows_are_not_sent_twice_over_tp():
    """With tokens cut over tp each of its ranks sends its own only."""
    both = autoshard(Model(), "ep=2,tp=2", tokens()).program
    once = autoshard(Model(), "ep=2", tokens()).program
    rows = {
        name: [c.numel for c in program.conversions if c.kind in ("to_experts", "to_tokens")]
        for name, program in (("both", both), ("once", once))
    }
    assert rows["once"] == [2 * numel for numel in rows["both"]]


# --- while tokens travel ---


def test_the_shared_expert_computes_while_rows_travel(ranks):
    """Of the backward of the first layer: its down product while gradients go to the experts, its
    up product while they come back."""
    for happened in results(ranks, "order"):
        assert happened[-6:] == ["out", "down", "in", "out", "up", "in"], happened


def test_the_shared_expert_stands_between():
    graph = autoshard(Model(shared=True), "ep=2", tokens()).program.graph
    kinds = ("to_experts", "at_experts", "to_tokens", "at_tokens", "linear")
    names = [n.name.split("_default")[0].rstrip("_0123456789") for n in graph.nodes]
    found = [name for name in names if name in kinds]
    layer = ["to_experts", "linear", "at_experts", "to_tokens", "linear", "at_tokens"]
    assert found == [*(["linear", *layer] * 2), "linear"]


def test_a_table_without_experts_says_why():
    module = autoshard(torch.nn.Linear(4, 4), "ep=2", torch.randn(4, 4))
    assert "the model has none that is recognised" in module.table("experts")


def test_a_report_says_what_was_dropped():
    report = verify(Model(), "ep=2", tokens(), steps=1, expert_capacity=0.6)
    assert not report.ok
    assert "expert_capacity drops" in report.verdict and "of 96 choices" in report.verdict
