"""Models on the meta device on real ranks: shard by shard, filled later; what is held after it."""

from datetime import timedelta
from functools import partial

import gloo
import gloo_meta
import pytest
import torch
import torch.distributed as dist
from compare import difference, differences
from filelock import FileLock
from gloo_meta import BARE
from tensor_memory import TensorMemory

from autoshard import autoshard
from autoshard.errors import CaptureError

SIZES = {"dp": 2, "tp": 2}
ZERO = {1: False, 3: True}  # stage -> whether all four ranks are data ranks
#: Models made from meta, and the stages at which they are.
MADE = [("llama", 1), ("llama", 3), ("resnet", 3)]
#: Under which options a model is filled later.
LATER = {
    "zero 3": {"zero": 3},
    "offload": {"zero": 1, "offload": True, "param_dtype": torch.bfloat16},
}
#: The stage at which each model is let go.
STAGES = {"normed": 3, "tied": 1, "hooked": 3, "stuck": 1, "penalty": 3}


def job(function, *arguments, **options):
    return partial(function, **options), *arguments


JOBS = {
    "peak": job(gloo_meta.build_peak, gloo_meta.WIDE, True, zero=3),
    **{
        f"made {name} {stage}": job(gloo_meta.made, name, ZERO[stage], zero=stage)
        for name, stage in MADE
    },
    **{
        f"later {name}": job(gloo_meta.filled_later, ZERO[options["zero"]], **options)
        for name, options in LATER.items()
    },
    **{
        f"kept {name}": job(gloo_meta.let_go, name, ZERO[stage], zero=stage)
        for name, stage in STAGES.items()
    },
    "caller": job(gloo_meta.caller_keeps, zero=3),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, worker_id):
    """Every rank's results. The processes start once, for all workers."""
    root = tmp_path_factory.getbasetemp()
    folder = (root if worker_id == "master" else root.parent) / "meta"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            gloo.launch(SIZES, JOBS, folder)
    return gloo.results_in(folder, SIZES)


def each(results, name):
    """The job's result on every rank; a rank's traceback fails the test."""
    for rank, result in enumerate(results):
        if isinstance(result[name], str):
            pytest.fail(f"rank {rank}:\n{result[name]}")
    return [result[name] for result in results]


@pytest.fixture(scope="module")
def alone():
    """A live mesh of one rank, in this process."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20)
    )
    yield dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


# --- shard by shard ---


@pytest.mark.parametrize(("name", "stage"), MADE)
def test_a_meta_model_is_made_to_the_bit_alike_on_all_meshes(results, alone, name, stage):
    want = gloo_meta.made(alone, name, False)
    assert not any(x.isnan().any() for x in want.values())
    for got in each(results, f"made {name} {stage}"):
        assert got.keys() == want.keys()
        assert [n for n in want if not torch.equal(got[n], want[n])] == []


def test_a_build_from_meta_holds_its_shards_and_one_block_at_most(results):
    for got in each(results, "peak"):
        assert got["whole"] > 2e8  # fifty million parameters
        assert got["shards"] <= 1.01 * got["whole"] / 4
        assert got["peak"] <= 1.1 * (got["shards"] + got["block"])
        # and no copy is hidden in a block's size: one module stood beside the shards
        assert got["peak"] <= 1.01 * (got["shards"] + got["module"])
        assert got["after"] <= 1.01 * got["shards"]


def test_tensor_memory_counts_what_lives_at_once():
    with TensorMemory() as memory:
        first = torch.zeros(1000)
        second = first.view(10, 100) + 1  # a view is no tensor of its own
        del first
        third = second[:5]
        del second
        torch.empty(10**6, device="meta")
    assert memory.peak == 8000 and memory.now == 4000
    del third
    assert memory.now == 0


# --- filled later ---


@pytest.mark.parametrize("name", LATER)
def test_what_nothing_fills_is_named_by_the_first_use_until_it_is_loaded(results, name):
    torch.manual_seed(0)
    model = gloo_meta.Bare()
    want = model(**gloo_meta.hw.vectors(8, 32)).detach()
    for got in each(results, f"later {name}"):
        assert got["meta"] == []
        unset = {n for n, nan in got["nan"].items() if nan}
        assert {"weight", "shift"} <= unset <= {"weight", "scale", "shift"}
        for call in ("step", "call", "state"):
            text = got[call]
            assert text.partition("\n")[0].endswith(
                f"{', '.join(BARE)}: on the meta device when the model was given, and not filled "
                "since"
            )
            assert "why: Bare has no reset_parameters()" in text and "_init_weights" in text
            assert "fix: load a checkpoint" in text and "load_full_state_dict" in text
        assert "scale, shift: on the meta device" in got["in part"]
        assert "weight" not in got["in part"].partition("\n")[0]
        assert "of Bare: scale: on the meta device" in got["by hand"]
        assert got["declared"] == ""
        assert (got["loss"] - want).abs() < (0.02 if name == "offload" else 1e-5)
        state = model.state_dict()
        assert [n for n, x in got["loaded"].items() if not torch.equal(x, state[n])] == []


# --- held after the build ---


@pytest.mark.parametrize("name", STAGES)
def test_a_module_lives_on_without_the_model(results, name):
    want = gloo_meta.let_go_alone(name)
    for got in each(results, f"kept {name}"):
        # a model that cannot be copied, or that its loss function holds, is kept
        assert (got["alive"] > 0) == (name in ("stuck", "penalty"))
        assert difference(got["loss"], want["loss"]) == ""
        assert difference(got["evaluated"], want["evaluated"]) == ""
        assert differences(got["state"], want["state"]) == {}
        assert all(got["tables"]) and got["rank"]
        assert "captured as" in got["batch"]


def test_the_callers_model_stays_as_it_was(results):
    for got in each(results, "caller"):
        assert all(got.values()), got


def test_a_loss_function_that_holds_a_parameter_alone_is_refused():
    model = torch.nn.Linear(8, 8)
    weight = model.weight

    def loss_fn(output, target):
        return (output - target).square().mean() + weight.square().sum()

    inputs = {"input": torch.zeros(4, 8), "target": torch.zeros(4, 8)}
    with pytest.raises(CaptureError, match=r"(?s)parameters weight: read as constants.*get_param"):
        autoshard(model, {"dp": 2}, inputs, loss_fn=loss_fn)
