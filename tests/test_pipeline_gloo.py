"""Pipelines on real gloo processes against one device."""

from functools import cache

import pipeline_jobs as jobs
import pytest
import torch
from compare import difference, differences
from test_gloo import each, ranks_of

train_alone = cache(jobs.train_alone)


def options(schedule="1f1b", zero=1, **more):
    return {"schedule": schedule, "zero": zero, **more}


def runs(cases):
    """A training job for each case: model, schedule and ZeRO stage in one text."""
    found = {}
    for text in cases:
        name, schedule, zero = text.rsplit(" ", 2)
        found[text] = (jobs.train, name, options(schedule, int(zero)))
    return found


def assert_trained_alike(results, job):
    want = train_alone(job.rsplit(" ", 2)[0])
    assert min(want["norm"]) > jobs.CLIP  # clipping acts
    for rank, got in enumerate(each(results, job)):
        for key in ("loss", "norm"):
            wrong = [difference(a, b) for a, b in zip(got[key], want[key], strict=True)]
            assert wrong == ["", ""], f"rank {rank}: {key}"
        assert none_of(got["gradients"]) == none_of(want["gradients"]), f"rank {rank}"
        for key in ("gradients", "state"):
            assert differences(some_of(got[key]), some_of(want[key])) == {}, f"rank {rank}: {key}"
        for key in ("outputs", "evaluated"):
            rows = want[key]["rows"][got["rows"]]
            assert difference(got[key]["loss"], want[key]["loss"]) == "", f"rank {rank}: {key}"
            assert difference(got[key]["rows"], rows) == "", f"rank {rank}: {key}"


def none_of(gradients):
    return [n for n, g in gradients.items() if g is None]


def some_of(values):
    return {n: v for n, v in values.items() if v is not None}


# --- two stages, two data ranks ---

DATA = ("deep interleaved 3", "penalised 1f1b 1", "half frozen interleaved 1", "biased gpipe 0")
MORE_DATA = ("deep 1f1b 0", "deep gpipe 1", "deep zb 2", "deep dualpipev 1", "looped 1f1b 1")
MORE_DATA += ("detached interleaved 1", "penalised 1f1b 0", "penalised gpipe 3")
MORE_DATA += ("frozen ties 1f1b 3", "tied offload 2")
ACCUMULATED = {
    "1f1b 0": ("snszsnnss", options("1f1b", 0)),
    "interleaved 1": ("nsnnszsns", options("interleaved", 1)),
    "1f1b 3": ("snszsnnss", options("1f1b", 3)),
}
LONG = {"1f1b": options(zero=1), "gpipe": options("gpipe", zero=3)}
SHAPES = {"shapes": options(microbatches=4), "shapes, interleaved": options("interleaved", 3)}
MODES = {
    "normed": ("normed", True, options(microbatches=1)),
    "normed, from evaluation": ("normed", False, options(microbatches=1)),
    "biased": ("biased", False, options()),
}


def both(quick, slow):
    """Cases of two fixtures: of the quick jobs, and of those that run with ``--slow``."""
    cases = [pytest.param("data", name, id=name) for name in quick]
    return cases + [pytest.param("more", n, id=n, marks=pytest.mark.slow) for n in slow]


def only(of, *names):
    return {name: of[name] for name in names}


def accumulating(given):
    return {f"accumulated {n}": (jobs.accumulate, "tied", *case) for n, case in given.items()}


data = ranks_of(
    {"pp": 2, "dp": 2},
    {"numbers": (jobs.other_numbers_of_groups,)}  # before all groups are made
    | runs(DATA)
    | accumulating(only(ACCUMULATED, "interleaved 1"))
    | {
        "long 1f1b": (jobs.long, LONG["1f1b"]),
        "shapes, interleaved": (jobs.other_shapes, SHAPES["shapes, interleaved"]),
        "normed, from evaluation": (jobs.modes, *MODES["normed, from evaluation"]),
        "sizes": (jobs.sizes_of_their_own,),
        "chosen": (jobs.chosen,),
        "unlike": (jobs.unlike,),
        "several modules": (jobs.several_modules,),
        "own parts": (jobs.own_parts, "", options(zero=3)),
        "float32": (jobs.precision, options(zero=1)),
        "reduced": (
            jobs.precision,
            options(zero=3, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        ),
    },
)

more = ranks_of(
    {"pp": 2, "dp": 2},
    runs(MORE_DATA[:-1])
    | accumulating(only(ACCUMULATED, "1f1b 0", "1f1b 3"))
    | {
        "long gpipe": (jobs.long, LONG["gpipe"]),
        "shapes": (jobs.other_shapes, SHAPES["shapes"]),
        "normed": (jobs.modes, *MODES["normed"]),
        "biased": (jobs.modes, *MODES["biased"]),
        "tied offload 2": (jobs.train, "tied", options(zero=2, offload=True)),
        "float32": (jobs.precision, options(zero=1)),
        "bfloat16": (jobs.precision, options(zero=1, param_dtype=torch.bfloat16)),
    },
)


@pytest.mark.parametrize("ranks, job", both(DATA, MORE_DATA))
def test_two_stages_and_two_data_ranks_train_like_one_device(request, ranks, job):
    assert_trained_alike(request.getfixturevalue(ranks), job)


@pytest.mark.parametrize("ranks, name", both(["interleaved 1"], ["1f1b 0", "1f1b 3"]))
def test_steps_accumulate_like_one_device(request, ranks, name):
    synced, _ = ACCUMULATED[name]
    want = jobs.accumulate_alone("tied", synced)
    for rank, got in enumerate(each(request.getfixturevalue(ranks), f"accumulated {name}")):
        for at, (a, b) in enumerate(zip(got, want, strict=True)):
            assert differences(a, b) == {}, f"rank {rank}, synchronisation {at}"


@pytest.mark.parametrize("ranks, name", both(["1f1b"], ["gpipe"]))
def test_tied_weights_stay_one_weight(request, ranks, name):
    want = jobs.long_alone()
    for got in each(request.getfixturevalue(ranks), f"long {name}"):
        assert got["copies"] == {"tokens.weight": [True, True]}
        wrong = [difference(a, b) for a, b in zip(got["loss"], want["loss"], strict=True)]
        assert set(wrong) == {""} and len(wrong) == 50
        assert differences(got["state"], want["state"]) == {}


@pytest.mark.parametrize("ranks, job", both(["shapes, interleaved"], ["shapes"]))
def test_steps_take_other_lengths_and_numbers_of_rows(request, ranks, job):
    want = jobs.other_shapes_alone()
    for rank, got in enumerate(each(request.getfixturevalue(ranks), job)):
        for shape, a, b in zip(jobs.SHAPES, got, want, strict=True):
            part = b["logits"].chunk(2)[rank % 2]
            assert difference(a["loss"], b["loss"]) == "", shape
            assert difference(a["logits"], part) == "", shape
            assert differences(a["grads"], b["grads"]) == {}, shape


@pytest.mark.parametrize("ranks, job", both(["normed, from evaluation"], ["normed", "biased"]))
def test_training_and_evaluation_take_turns(request, ranks, job):
    name, first, _ = MODES[job]
    want = jobs.modes_alone(name, first)
    ranks = each(request.getfixturevalue(ranks), job)
    for rank, got in enumerate(ranks):
        for a, b in zip(got["out"], want["out"], strict=True):
            part = b if b.ndim == 0 else b.chunk(2)[rank % 2]
            assert difference(a, part) == ""
        assert differences(got["state"], want["state"]) == {}
        # what a step writes is held by the stage that writes it, in either mode
        moved = [n for n in want["state"] if ".norm.running" in n or n.endswith(".bias")]
        own = [n for n in moved if n in got["buffers"]]
        other = [n for n in moved if n in ranks[(rank + 2) % 4]["buffers"]]
        assert own and other and not {*own} & {*other}


def test_a_rank_speaks_of_its_own_parts(data):
    model, inputs = jobs.made("tied")
    want = model.state_dict()
    ranks = each(data, "own parts")
    for got in ranks:
        assert got["again"] == got["missing"] == got["loaded"] == []
        assert "process groups" in got["copy"] and "process groups" in got["pickle"]
        assert "assign=True" in got["assign"] and "float16" in got["dtype"]
        assert differences(got["whole"], want) == {}
        assert difference(got["loss"], model(**inputs).loss.detach()) == ""
        assert "missing norm.weight" in got["refused"] and "unexpected more" in got["refused"]
        assert "blocks.0.up.weight is (2,), not (64, 32)" in got["shape"]
        assert got["lenient"] == (["norm.weight"], ["more"])
        assert "parameters" in got["text"] and "parameters" in got["memory"]
    names = [{*got["names"]} for got in ranks]
    assert names[0] | names[2] == {*want} - {"head.weight"}
    assert names[0] & names[2] == {"tokens.weight"}


def test_modules_take_turns_on_one_mesh_and_share_its_process_groups(data):
    model, inputs = jobs.made("tied")
    want = model(**inputs).loss.detach()
    for rank, got in enumerate(each(data, "several modules")):
        assert len(got["losses"]) == 6
        assert {difference(loss, want) for loss in got["losses"]} == {""}
        assert len({*got["groups"]}) == 1
        told = "a rank has 4 rows, which make 4 micro-batches, not the 100 asked for"
        assert [len(said) for said in got["said"]] == [rank == 0] * 3
        assert all(told in text for said in got["said"] for text in said)


def test_gradients_come_back_in_the_size_of_their_own_micro_batch(data):
    assert each(data, "sizes") == [[(3,), (5,)]] * 4


def test_integers_go_between_stages_and_rows_that_come_twice_keep_their_order(data):
    want = jobs.chosen_alone()
    for rank, got in enumerate(each(data, "chosen")):
        part = want["twice"].chunk(2, 1)[rank % 2].flatten(0, 1)
        assert difference(got["twice"], part) == ""
        assert difference(got["loss"], want["loss"]) == ""
        assert differences(got["gradients"], want["gradients"]) == {}


def test_ranks_with_batches_of_other_lengths_cut_alike_and_other_options_are_refused(data):
    want, ranks = jobs.unlike_alone(), each(data, "unlike")
    assert len({got["stages"] for got in ranks}) == 1
    for got in ranks:
        assert difference(got["loss"], want["loss"]) == ""
        assert differences(got["gradients"], want["gradients"]) == {}
        assert len(got["refused"]) == 3
        assert all("another one than rank 0" in text for text in got["refused"])


def test_ranks_may_have_made_other_groups_before(data):
    model, inputs = jobs.made("tied")
    want = model(**inputs).loss.detach()
    assert [difference(loss, want) for loss in each(data, "numbers")] == [""] * 4


@pytest.mark.parametrize("ranks, job", both(["reduced"], ["bfloat16"]))
def test_lower_precision_stays_near_and_ties_stay_equal(request, ranks, job):
    results = request.getfixturevalue(ranks)
    for got, exact in zip(each(results, job), each(results, "float32"), strict=True):
        first, *others = got["holders"]
        assert len(others) == 3  # all ranks hold a part, of which those along pp are copies
        assert torch.equal(others[1], first) and torch.equal(others[2], others[0])
        assert got["kinds"] == {"torch.float32", "cpu"}
        assert got["losses"] != exact["losses"]
        for a, b in zip(got["losses"], exact["losses"], strict=True):
            assert abs(a - b) < 0.02 * b
        assert got["losses"][-1] < got["losses"][0] - 0.5


# --- two stages, two tensor ranks ---

TENSOR = ("gpt2 1f1b 1", "gpt2 zb 0", "llama interleaved 0", "llama dualpipev 1")
#: Options under which the masks of dropout are the same.
DROPPING = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "recomputed": {"recompute": "block"},
}

tensor = ranks_of(
    {"pp": 2, "tp": 2},
    runs(TENSOR)
    | {f"dropout {n}": (jobs.dropout, {"microbatches": 4, **o}) for n, o in DROPPING.items()},
)


@pytest.mark.parametrize("job", TENSOR)
def test_two_stages_and_two_tensor_ranks_train_like_one_device(tensor, job):
    assert_trained_alike(tensor, job)


def test_masks_are_one_on_tensor_ranks_and_others_in_other_micro_batches_and_layers(tensor):
    ranks = each(tensor, "dropout 1f1b")
    first = [mask != 0 for mask in ranks[0]["masks"]]
    for got in ranks[1:]:
        assert all(torch.equal(a != 0, b) for a, b in zip(got["masks"], first, strict=True))
    parts = [part for mask in first for part in mask.split(2)]  # by layer and micro-batch
    assert len(parts) == 16
    for at, one in enumerate(parts):
        assert 0.2 < one.double().mean() < 0.8
        for other in parts[:at]:
            assert 0.3 < (one == other).double().mean() < 0.7  # independent, not only different


def test_masks_do_not_depend_on_the_order_of_micro_batches(tensor):
    want, *others = (each(tensor, f"dropout {n}") for n in DROPPING)
    assert not torch.equal(*want[0]["loss"])
    for ranks in others:
        for got, first in zip(ranks, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got["loss"], first["loss"], strict=True))
            for name, gradient in got["gradients"].items():
                assert torch.equal(gradient, first["gradients"][name]), name


# --- two stages, two expert ranks ---

EXPERTS = ("mixtral interleaved 3",)
MORE_EXPERTS = ("mixtral 1f1b 1", "looped gpipe 1", "biased 1f1b 0")

LOADS = {
    "loads": (jobs.loads, "looped", "pp=2,ep=2", options(microbatches=2)),
    "recomputed": (jobs.loads, "looped", "pp=2,ep=2", options(recompute="block")),
    "of four": (jobs.loads, "looped", "dp=2,ep=2", {}),
}

more_experts = ranks_of(
    {"pp": 2, "ep": 2}, runs(MORE_EXPERTS) | only(LOADS, "recomputed", "of four")
)
experts = ranks_of(
    {"pp": 2, "ep": 2},
    runs(EXPERTS)
    | only(LOADS, "loads", "of four")
    | {
        "in one stage": (jobs.loads, "one mixture", "pp=2,ep=2", options()),
    },
)


@pytest.mark.parametrize("job", EXPERTS)
def test_two_stages_and_two_expert_ranks_train_like_one_device(experts, job):
    assert_trained_alike(experts, job)


@pytest.mark.slow
@pytest.mark.parametrize("job", MORE_EXPERTS)
def test_stages_and_expert_ranks_train_like_one_device(more_experts, job):
    assert_trained_alike(more_experts, job)


def test_loads_are_those_of_all_micro_batches(experts):
    assert_loads_of_all(experts, "loads")


@pytest.mark.slow
def test_loads_are_those_of_all_micro_batches_recomputed(more_experts):
    assert_loads_of_all(more_experts, "recomputed")


def assert_loads_of_all(results, job):
    want = each(results, "of four")[0]
    for got in each(results, job):
        assert got[0] == []
        for mine, theirs in zip(got[1:4], want[1:4], strict=True):
            assert [load.tokens for load in mine] == [load.tokens for load in theirs]
            assert [sum(load.rows) for load in mine] == [sum(load.rows) for load in theirs]
            assert [load.ranks for load in mine] == [(0, 1), (2, 3)]  # its stage's
            assert all(min(load.rows) > 0 and len(load.rows) == 2 for load in mine)
        assert got[4] == each(results, job)[0][4] and "most/mean" in got[4]


def test_ranks_of_a_stage_without_experts_hear_of_loads(experts):
    for got in each(experts, "in one stage"):
        assert got[0] == [] and [len(loads) for loads in got[1:4]] == [1, 1, 1]
        assert got[1] == each(experts, "in one stage")[0][1]
        assert sum(got[1][0].tokens) == 2 * 48


# --- four stages ---

STAGES = ("deep 1f1b 1", "deep gpipe 0", "deep zb 1", "deeper interleaved 1", "deeper dualpipev 1")

line = ranks_of({"pp": 4}, runs(STAGES))


@pytest.mark.slow
@pytest.mark.parametrize("job", STAGES)
def test_four_stages_train_like_one_device(line, job):
    assert_trained_alike(line, job)


# --- two stages, two data ranks, two tensor ranks ---

CUBE = ("deep 1f1b 1", "gpt2 zb 1", "llama interleaved 3", "looped dualpipev 2")

cube = ranks_of({"pp": 2, "dp": 2, "tp": 2}, runs(CUBE))


@pytest.mark.slow
@pytest.mark.parametrize("job", CUBE)
def test_eight_ranks_train_like_one_device(cube, job):
    assert_trained_alike(cube, job)
