"""State of models in stages: checkpoints, files, what ranks initialise, and optimizers."""

import itertools

import gloo_checkpoint as checkpoints
import pipeline_jobs
import pipeline_state_jobs as jobs
import pytest
import stacked_jobs
import torch
from compare import difference, differences
from gloo_checkpoint import ALONE, PIPELINE_MESHES
from test_checkpoint import assert_read_and_written, assert_went_on, each, ranks_of, small

MESHES = (*(m for m in PIPELINE_MESHES if "ep" not in m), "dp=4", "dp=2,tp=2", ALONE)
FEW = ("pp=2,dp=2", "pp=2,tp=2, interleaved", "dp=4", ALONE)
EXPERT_MESHES = ("pp=2,ep=2", "pp=2,dp=2", "dp=2,tp=2", ALONE)

#: Meshes on which a model is made from the meta device.
META = {
    "pp=2,dp=2": {"zero": 3, "microbatches": 2},
    "pp=2,tp=2": {"schedule": "interleaved", "microbatches": 2},
    "dp=4": {"zero": 1},
}
#: Of an optimizer: which one, of which model, saved where and loaded where.
MOVED = {
    "frozen": ("half frozen", "plain", "pp=2,dp=2", "dp=4"),
    "frozen, back": ("half frozen", "plain", "dp=2,tp=2", "pp=2,dp=2"),
    "by layer": ("deep", "by layer", "pp=2,dp=2", "pp=4"),
    "by layer, back": ("deep", "by layer", "dp=4", "pp=2,tp=2"),
}
OPTIONS = {"zero": 1, "microbatches": 2}


def pretrained(folder, names):
    for name in names:
        small(name, seed=1).save_pretrained(folder / f"theirs_{name}")
    return {
        f"pretrained {n}": (
            jobs.pretrained,
            "pp=2,ep=2" if n == "mixtral" else "pp=2,tp=2",
            str(folder),
            n,
            f"{folder}/theirs_{n}",
        )
        for n in names
    }


def quick_jobs(folder):
    return {
        "gpt2": (checkpoints.matrix, str(folder), "gpt2", True, FEW),
        "meta": (jobs.from_meta, META),
        "peak": (jobs.peak, "pp=2,dp=2", {"zero": 3}),
        "unset": (jobs.unset, "pp=2,dp=2", {"zero": 3}),
        **{n: (jobs.optimizers, f"{folder}/{n}", *c, OPTIONS) for n, c in MOVED.items()},
        "refused": (jobs.refused, str(folder)),
        "stacked": (jobs.stacked, "pp=2,ep=2", OPTIONS),
        "stacked states": (jobs.stacked_states, "pp=2,ep=2", str(folder)),
        **pretrained(folder, ["gpt2"]),
    }


def slow_jobs(folder):
    return {
        "gpt2": (checkpoints.matrix, str(folder), "gpt2", True, MESHES),
        "mixtral": (checkpoints.matrix, str(folder), "mixtral", True, EXPERT_MESHES),
        "stacked": (jobs.stacked, "pp=2,ep=2", {"zero": 3, "schedule": "interleaved"}),
        **pretrained(folder, ["llama", "mixtral"]),
    }


quick = ranks_of("pipeline_quick", quick_jobs)
slow = ranks_of("pipeline_slow", slow_jobs)


# --- checkpoints and files ---


def pairs(meshes):
    return list(itertools.product(meshes, meshes))


def assert_loads_and_goes_on(results, name, pair):
    found = [got[pair] for got in each(results, name) if pair in got]
    assert len(found) == (1 if pair[1] == ALONE else 4)
    for got in found:
        assert_went_on(got, pair, 1e-9)


@pytest.mark.parametrize("pair", pairs(FEW), ids="->".join)
def test_a_checkpoint_of_stages_loads_on_other_meshes(quick, pair):
    assert_loads_and_goes_on(quick, "gpt2", pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", pairs(MESHES), ids="->".join)
def test_a_checkpoint_of_any_stages_loads_on_any_mesh(slow, pair):
    assert_loads_and_goes_on(slow, "gpt2", pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", pairs(EXPERT_MESHES), ids="->".join)
def test_experts_in_stages_save_and_load_too(slow, pair):
    assert_loads_and_goes_on(slow, "mixtral", pair)


def test_ranks_of_stages_read_slices_and_write_whole_tensors(quick):
    assert_read_and_written(quick, "gpt2")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_ranks_of_stages_read_slices_of_other_architectures(slow, name):
    assert_read_and_written(slow, name)


# --- the meta device ---


def test_each_rank_initialises_what_its_stages_read(quick):
    for got in each(quick, "meta"):
        first, *others = got.values()
        for text, found in got.items():
            assert found["others"] == [] and found["meta"] == [], text
            assert set(map(all, found["copies"].values())) <= {True}
            assert "pp" not in text or list(found["copies"]) == ["tokens.weight"]
            assert not any(v.isnan().any() for v in found["state"].values())
        for found in others:
            assert all(torch.equal(v, first["state"][n]) for n, v in found["state"].items())
            assert difference(found["loss"], first["loss"]) == ""


def test_a_build_from_meta_makes_no_more_than_the_ranks_own(quick):
    for got in each(quick, "peak"):
        assert got["shards"] < 0.35 * got["whole"]
        assert got["peak"] < got["shards"] + 2.2 * got["module"]


def test_all_ranks_hear_of_what_nothing_fills(quick):
    ranks = each(quick, "unset")
    torch.manual_seed(0)
    model, inputs = jobs.Unset(), jobs.hw.vectors(8, 4, 32)
    want = model(**inputs).detach()
    for rank, got in enumerate(ranks):
        for text in (got["step"], got["call"], got["state"]):
            assert "blocks.3.shift" in text and "fix:" in text, rank
        assert ("rank 2 raised ShardingError" in got["state"]) == (rank < 2)
        assert got["by hand"].tolist() == [2.0] * 32
        assert abs(got["loss"] - want) < 1e-5


# --- optimizers ---


@pytest.mark.parametrize("job", MOVED)
def test_groups_that_differ_from_rank_to_rank_are_saved_by_name(quick, job):
    name, which, source, target = MOVED[job]
    model, _ = pipeline_jobs.made(name)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    ranks = each(quick, job)
    for got in ranks:
        assert got["unequal"] == []
        for a, b in zip(got["losses"], got["went on"], strict=True):
            assert difference(a, b) == ""
        if which == "by layer":
            wanted = {f"blocks.{i}": 1e-3 * (i + 1) for i in range(4)}
            assert all(rate == wanted.get(key, 5e-4) for key, rate in got["rates"].items())
    own = [{*got["trained"]} for got in ranks]
    assert set.union(*own) - {"nothing_to_train"} == trained
    if source == "pp=2,dp=2" and name == "half frozen":
        assert [names == {"nothing_to_train"} for names in own] == [True, True, False, False]


def test_optimizers_that_do_not_fit_are_refused_on_all_ranks(quick):
    for got in each(quick, "refused"):
        assert "ranks [2] save SGD, rank 0 AdamW" in got["classes"]
        assert "ranks [2, 3] save AdamW, rank 0 None" in got["none"]
        assert "ranks [1, 3] have others than the first rank of their stages" in got["in a stage"]
        assert "tokens.weight is in a group with" in got["tied"]
        assert "unexpected in the optimizer saved norm.weight" in got["fewer"]
        for name in ("blocks.2.up.weight", "blocks.3.up.weight"):
            assert name in got["other"]


# --- experts in a list of modules ---


def assert_stacked_alike(results):
    want = stacked_jobs.train_alone()
    for got in each(results, "stacked"):
        for key in ("gradients", "state"):
            assert differences(got[key], want[key]) == {}
        assert difference(got["loss"], want["loss"]) == ""
        assert [difference(a, b) for a, b in zip(got["norm"], want["norm"], strict=True)] == [
            ""
        ] * 2
    stacks = [[n for n in got["names"] if "*" in n] for got in each(results, "stacked")]
    assert stacks[0] == stacks[1] and stacks[2] == stacks[3]
    assert sorted(map(bool, stacks[::2])) == [False, True]  # held in one of two stages


def test_stacks_of_experts_train_in_a_stage(quick):
    assert_stacked_alike(quick)


@pytest.mark.slow
def test_stacks_of_experts_train_in_many_stages(slow):
    assert_stacked_alike(slow)


def test_stacks_of_experts_in_a_stage_are_saved_one_by_one(quick):
    ranks = each(quick, "stacked states")
    for got in ranks:
        assert got["there"] == got["back"] == got["local"] == []
    experts = [{n for n in got["names"] if ".each." in n} for got in ranks]
    assert sorted(map(len, experts)) == [0, 0, 6, 6]  # two of four experts on a rank of the stage
