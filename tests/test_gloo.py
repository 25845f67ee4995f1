"""Real gloo processes against one device: losses, norms, gradients, state after two steps."""

import zlib
from functools import cache

import gloo
import pytest
from compare import difference, differences
from filelock import FileLock

ZOO = ("gpt2", "llama", "starcoder2", "mixtral")
SHAPES = [(6, 20), (2, 9), (4, 48)]
#: Steps that synchronise their gradients (s) and steps that do not (n), without clearing between.
MIXED = ("sss", "nsnns")

train_alone = cache(gloo.train_alone)


def ranks_of(sizes, jobs):
    """A fixture: every rank's results on a mesh. Its processes start once, for all workers."""

    @pytest.fixture(scope="module")
    def results(tmp_path_factory, worker_id):
        root = tmp_path_factory.getbasetemp()
        root = root if worker_id == "master" else root.parent
        mesh = "_".join(f"{axis}{size}" for axis, size in sizes.items())
        folder = root / f"{mesh}_{zlib.crc32(repr(sorted(jobs)).encode())}"  # of these jobs alone
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                folder.mkdir()
                gloo.launch(sizes, jobs, folder)
        return gloo.results_in(folder, sizes)

    return results


def each(results, job):
    """The job's result on every rank; a rank's traceback fails the test."""
    for rank, result in enumerate(results):
        if isinstance(result[job], str):
            pytest.fail(f"rank {rank}:\n{result[job]}")
    return [result[job] for result in results]


def assert_trained_alike(results, job, name):
    want = train_alone(name)
    assert min(want["norm"]) > gloo.CLIP  # clipping acts
    for rank, got in enumerate(each(results, job)):
        for key in ("loss", "norm"):
            wrong = [difference(a, b) for a, b in zip(got[key], want[key], strict=True)]
            assert wrong == ["", ""], f"rank {rank}: {key}"
        assert differences(got["gradients"], want["gradients"]) == {}, f"rank {rank}"
        assert differences(got["state"], want["state"]) == {}, f"rank {rank}"


def assert_accumulated_alike(results, steps, name):
    want = gloo.accumulate_mixed_alone(name, steps)
    for rank, got in enumerate(each(results, steps)):
        for at, (a, b) in enumerate(zip(got, want, strict=True)):
            assert differences(a, b) == {}, f"rank {rank}, synchronisation {at}"


# --- two data ranks by two tensor ranks, with the sequence cut too ---

square = ranks_of(
    {"dp": 2, "tp": 2},
    {name: (gloo.train, name) for name in ZOO}
    | {
        "uneven": (gloo.train, "gpt2", [3, 1]),
        "differing batch": (gloo.differing_batch, "gpt2", 1),
        "differing model": (gloo.differing_model, 2),
        "differing seed": (gloo.differing_seed,),
        "asking": (gloo.asking_for_gradients, "llama"),
        "failing capture": (gloo.failing_capture, 2),
        "differing weights": (gloo.differing_weights, 3),
        "refused batch": (gloo.refused_batch, 1),
        "restore": (gloo.restore,),
        **{text: (gloo.accumulate_mixed, "llama", text) for text in MIXED},
    },
)


@pytest.mark.parametrize("name", ZOO)
def test_dp2_tp2_trains_like_one_device(square, name):
    assert_trained_alike(square, name, name)


def test_data_ranks_may_hold_different_numbers_of_rows(square):
    assert_trained_alike(square, "uneven", "gpt2")


def test_a_batch_that_differs_inside_a_tensor_parallel_group_is_detected(square):
    for got in each(square, "differing batch"):
        assert got["kind"] is not None, "no error was raised"
        assert "tp" in got["error"] and "batch" in got["error"]
        assert got["moved"] == []


def test_ranks_that_compile_different_models_are_told_so(square):
    for (error,) in each(square, "differing model"):
        assert "ranks 2 have another" in error and "fix:" in error


def test_asking_for_gradients_leaves_those_of_the_step_alone(square):
    for alike in each(square, "asking"):
        assert len(alike) > 10 and all(alike)


def test_ranks_with_different_seeds_are_told_so_where_dropout_needs_them(square):
    for alike, apart in each(square, "differing seed"):
        assert alike == ""
        assert "torch.manual_seed" in apart


def test_ranks_hear_of_one_whose_model_cannot_be_captured(square):
    for rank, (error, option) in enumerate(each(square, "failing capture")):
        assert "blocks.1" in error and "the line that cannot be captured" in error
        assert ("rank 2 raised CaptureError" in error) == (rank != 2)
        assert "microbatches=0" in option
        assert ("rank 2 raised ShardingError" in option) == (rank != 2)


def test_ranks_that_start_from_different_weights_are_told_so(square):
    for (error,) in each(square, "differing weights"):
        assert "ranks 3 have others than rank 0" in error and "manual_seed" in error
        assert "the values of" in error and "bias" in error


def test_ranks_hear_of_one_whose_first_batch_is_refused(square):
    for rank, (error, trains) in enumerate(each(square, "refused batch")):
        assert "x is torch.float64" in error and trains
        assert ("rank 1 raised CaptureError" in error) == (rank != 1)


def test_a_state_saved_on_one_mesh_loads_on_another(square):
    for got in each(square, "restore"):
        assert got["saved"].keys() == got["loaded"].keys()
        assert differences(got["loaded"], got["saved"]) == {}


def test_a_rank_that_stops_ends_the_others_when_the_timeout_is_over(tmp_path):
    (waited, error), _ = gloo.stuck(tmp_path, seconds=8)
    assert error and 6 < waited < 25


@pytest.mark.parametrize("steps", MIXED)
def test_dp2_tp2_accumulates_like_one_device(square, steps):
    assert_accumulated_alike(square, steps, "llama")


# --- two tensor ranks, sequence whole ---

tensor = ranks_of(
    {"tp": 2},
    {name: (gloo.train_without_sequence, name) for name in ZOO}
    | {
        "other shapes": (gloo.other_shapes, "llama", SHAPES),
        "call": (gloo.call_and_backward, "handwritten"),
        "compiled": (gloo.compiled, "handwritten"),
        "meta": (gloo.made_from_meta, "llama"),
    },
)


@pytest.mark.parametrize("name", ZOO)
def test_tp2_without_sequence_parallelism_trains_like_one_device(tensor, name):
    assert_trained_alike(tensor, name, name)


def test_one_module_takes_other_batches_and_lengths(tensor):
    want = gloo.other_shapes_alone("llama", SHAPES)
    for got in each(tensor, "other shapes"):
        assert not got["compiled_again"]
        for i, shape in enumerate(SHAPES):
            assert difference(got["loss"][i], want["loss"][i]) == "", shape
            assert differences(got["gradients"][i], want["gradients"][i]) == {}, shape


def test_a_call_returns_the_models_outputs(tensor):
    model, inputs = gloo.build("handwritten")
    want = model(**inputs)
    want.loss.backward()
    for got in each(tensor, "call"):
        assert difference(got["loss"], want.loss.detach()) == ""
        assert difference(got["logits"], want.logits.detach()) == ""
        assert differences(got["gradients"], gloo.gradients_of(model)) == {}


def test_torch_compile_gives_the_same_loss_and_gradients(tensor):
    model, inputs = gloo.build("handwritten")
    loss = model(**inputs).loss
    loss.backward()
    for got in each(tensor, "compiled"):
        assert difference(got["loss"], loss.detach()) == ""
        assert differences(got["gradients"], gloo.gradients_of(model)) == {}


def test_ranks_make_one_model_out_of_a_meta_model(tensor):
    got = each(tensor, "meta")
    assert differences(got[0]["state"], got[1]["state"]) == {}
    model = gloo.tiny("llama")
    model.load_state_dict(got[0]["state"])
    want = model(**gloo.batch()).loss.detach()
    for rank in got:
        assert abs(rank["loss"] - want) < 1e-5 and abs(rank["evaluated"] - want) < 1e-5


# --- two data ranks ---

data = ranks_of(
    {"dp": 2},
    {
        "resnet": (gloo.train, "resnet"),
        "accumulate": (gloo.accumulate, "gpt2"),
        **{text: (gloo.accumulate_mixed, "gpt2", text) for text in MIXED},
        "take turns": (gloo.take_turns,),
        "other shapes": (gloo.other_shapes, "llama", SHAPES[:2]),
    },
)


def test_resnet_trains_like_one_device_running_statistics_included(data):
    state = train_alone("resnet")["state"]
    assert sum("running" in name for name in state) == 14
    assert_trained_alike(data, "resnet", "resnet")


def test_accumulation_without_sync_gives_the_sum(data):
    want = gloo.accumulate_alone("gpt2")
    for got in each(data, "accumulate"):
        assert differences(got, want) == {}


@pytest.mark.parametrize("steps", MIXED)
def test_accumulation_with_and_without_sync_gives_the_sum(data, steps):
    assert_accumulated_alike(data, steps, "gpt2")


def test_ranks_may_lack_gradients_that_others_have(data):
    want = gloo.take_turns_alone()
    assert {"left.weight", "trunk.bias"} <= set(want[0])
    assert not {"right.weight", "idle.weight"} & set(want[0])
    for rank, got in enumerate(each(data, "take turns")):
        for step in range(len(want)):
            assert set(got[step]) == set(want[step]), f"rank {rank}, step {step}"
            assert differences(got[step], want[step]) == {}, f"rank {rank}, step {step}"


def test_data_ranks_take_other_batches_and_lengths(data):
    want = gloo.other_shapes_alone("llama", SHAPES[:2])
    for got in each(data, "other shapes"):
        assert not got["compiled_again"]
        for i, shape in enumerate(SHAPES[:2]):
            assert difference(got["loss"][i], want["loss"][i]) == "", shape
            assert differences(got["gradients"][i], want["gradients"][i]) == {}, shape
