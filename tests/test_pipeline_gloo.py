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

DATA = ("deep 1f1b 0", "deep gpipe 1", "deep zb 2", "deep interleaved 3", "deep dualpipev 1")
DATA += ("looped 1f1b 1", "half frozen interleaved 1", "frozen ties 1f1b 3", "biased gpipe 0")
ACCUMULATED = {
    "1f1b 0": ("snsz" "snnss", options("1f1b", 0)),
    "interleaved 1": ("nsnnsszns", options("interleaved", 1)),
    "1f1b 3": ("snszsnnss", options("1f1b", 3)),
}
LONG = {"1f1b": options(zero=1), "gpipe": options("gpipe", zero=3)}

data = ranks_of(
    {"pp": 2, "dp": 2},
    runs(DATA)
    | {f"accumulated {n}": (jobs.accumulate, "tied", *c) for n, c in ACCUMULATED.items()}
    | {f"long {n}": (jobs.long, given) for n, given in LONG.items()}
    | {
        "shapes": (jobs.other_shapes, options(microbatches=4)),
        "shapes, interleaved": (jobs.other_shapes, options("interleaved", 3)),
        "normed": (jobs.modes, "normed", True, options(microbatches=1)),
        "normed, from evaluation": (jobs.modes, "normed", False, options(microbatches=1)),
        "biased": (jobs.modes, "biased", False, options()),
        "own parts": (jobs.own_parts, "", options(zero=3)),
        "offload": (jobs.train, "tied", options(zero=2, offload=True)),
        "float32": (jobs.precision, options(zero=1)),
        "bfloat16": (jobs.precision, options(zero=1, param_dtype=torch.bfloat16)),
        "reduced": (
            jobs.precision,
            options(zero=3, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        ),
    },
)


@pytest.mark.parametrize("job", DATA)
def test_two_stages_and_two_data_ranks_train_like_one_device(data, job):
    assert_trained_alike(data, job)


def test_host_memory_holds_what_is_offloaded(data):
    assert_trained_alike({} or rename(data, "offload", "tied 1f1b 2"), "tied 1f1b 2")


def rename(results, old, new):
    return [{new: result[old]} for result in results]


@pytest.mark.parametrize("name", ACCUMULATED)
def test_steps_accumulate_like_one_device(data, name):
    synced, _ = ACCUMULATED[name]
    want = jobs.accumulate_alone("tied", synced)
    for rank, got in enumerate(each(data, f"accumulated {name}")):
        for at, (a, b) in enumerate(zip(got, want, strict=True)):
            assert differences(a, b) == {}, f"rank {rank}, synchronisation {at}"


@pytest.mark.parametrize("name", LONG)
def test_tied_weights_stay_one_weight(data, name):
    want = jobs.long_alone()
    for got in each(data, f"long {name}"):
        assert got["copies"] == {"tokens.weight": [True, True]}
        wrong = [difference(a, b) for a, b in zip(got["loss"], want["loss"], strict=True)]
        assert set(wrong) == {""} and len(wrong) == 50
        assert differences(got["state"], want["state"]) == {}


@pytest.mark.parametrize("job", ["shapes", "shapes, interleaved"])
def test_steps_take_other_lengths_and_numbers_of_rows(data, job):
    want = jobs.other_shapes_alone()
    for rank, got in enumerate(each(data, job)):
        for shape, a, b in zip(jobs.SHAPES, got, want, strict=True):
            part = b["logits"].chunk(2)[rank % 2]
            assert difference(a["loss"], b["loss"]) == "", shape
            assert difference(a["logits"], part) == "", shape
            assert differences(a["grads"], b["grads"]) == {}, shape


@pytest.mark.parametrize("job", ["normed", "normed, from evaluation", "biased"])
def test_training_and_evaluation_take_turns(data, job):
    name, first = job.partition(",")[0], job == "normed"
    want = jobs.modes_alone(name, first)
    for rank, got in enumerate(each(data, job)):
        for a, b in zip(got["out"], want["out"], strict=True):
            part = b if b.ndim == 0 else b.chunk(2)[rank % 2]
            assert difference(a, part) == ""
        assert differences(got["state"], want["state"]) == {}
        written = [n for n in got["buffers"] if "norms" in n or "bias" in n]
        assert 0 < len(written) < len([n for n in want["state"] if n in written or "norms" in n])
