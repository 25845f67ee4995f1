"""Checkpoints: from any mesh to any other, killed saves, refusals, and weights of transformers."""

import itertools
import json

import gloo
import gloo_checkpoint as jobs
import handwritten as hw
import pytest
import torch
from filelock import FileLock
from gloo_checkpoint import ALONE, MESHES
from transformers import AutoModelForCausalLM, GPT2Model
from zoo import TYPES, batch, tiny

from autoshard import MeshSpec, autoshard
from autoshard.errors import MeshError, ShardingError

PAIRS = list(itertools.product(MESHES, MESHES))
#: Written by transformers and read on a mesh.
FAMILIES = ("llama", "gpt2", "mixtral")
SQUARE = {"dp": 2, "tp": 2}


def with_experts(model):
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "batched_mm"
    return model


def ranks_of(name, jobs_in):
    """A fixture: every rank's results of the jobs that ``jobs_in(folder)`` names, run once for all
    workers; and the folder."""

    @pytest.fixture(scope="module")
    def results(tmp_path_factory, worker_id):
        root = tmp_path_factory.getbasetemp()
        folder = (root if worker_id == "master" else root.parent) / f"checkpoint_{name}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                folder.mkdir()
                gloo.launch(SQUARE, jobs_in(folder), folder)
        return gloo.results_in(folder, SQUARE), folder

    return results


def quick_jobs(folder):
    for name in FAMILIES:
        with_experts(tiny(name, seed=1)).save_pretrained(folder / f"theirs_{name}")
    return {
        "gpt2": (jobs.matrix, str(folder), "gpt2", False),
        "bloom": (jobs.matrix, str(folder), "bloom", False, ("dp=2,tp=2", "tp=4"), jobs.frozen_sgd),
        "refusals": (jobs.refusals, str(folder)),
        "random": (jobs.random_streams, str(folder)),
        **{n: (jobs.pretrained, str(folder), n, f"{folder}/theirs_{n}") for n in FAMILIES[:1]},
        "mixtral": (jobs.pretrained, str(folder), "mixtral", f"{folder}/theirs_mixtral"),
    }


def slow_jobs(folder):
    return {
        name: (jobs.matrix, str(folder), name, True)
        for name in ("phi3", "bloom", "gpt2", "mixtral")
    }


quick = ranks_of("quick", quick_jobs)
slow = ranks_of("slow", slow_jobs)


def each(results, job):
    """The job's result on every rank; a rank's traceback fails the test."""
    for rank, result in enumerate(results[0]):
        if isinstance(result[job], str):
            pytest.fail(f"rank {rank}:\n{result[job]}")
    return [result[job] for result in results[0]]


def assert_went_on(got, pair, tolerance):
    assert got["unequal"] == []
    assert len(got["losses"]) == 2
    for a, b in zip(got["losses"], got["uninterrupted"], strict=True):
        assert abs(a - b) <= (0.0 if pair[0] == pair[1] else tolerance * abs(b)), pair


@pytest.mark.parametrize("pair", PAIRS, ids="->".join)
def test_a_checkpoint_of_any_mesh_loads_on_any_other(quick, pair):
    results = [got[pair] for got in each(quick, "gpt2") if pair in got]
    assert len(results) == (1 if pair[1] == ALONE else 4)
    for got in results:
        assert_went_on(got, pair, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="->".join)
@pytest.mark.parametrize("name", ("phi3", "bloom", "gpt2", "mixtral"))
def test_training_goes_on_as_if_it_had_not_been_interrupted(slow, name, pair):
    for got in each(slow, name):
        if pair in got:
            assert_went_on(got[pair], pair, 1e-9)


def test_momentum_of_fused_qkv_and_frozen_parameters_load_on_another_mesh(quick):
    for got in each(quick, "bloom"):
        assert len(got) == 4
        for pair, result in got.items():
            assert_went_on(result, pair, 1e-5)


def test_every_rank_hears_why_a_save_is_refused(quick):
    for rank, got in enumerate(each(quick, "refusals")):
        for name in ("blocks.0", "blocks.1"):
            assert f"{name}" in got["factored"]
        assert "row_var" in got["factored"] and "Adafactor" in got["factored"]
        assert "ranks [1, 2, 3] have others than rank 0" in got["rates"]
        assert "step" in got["steps"] and "on another" in got["steps"]
        assert ("own:" in got["a file"]) == (rank == 0)
        assert got["lr"] == "0.001"
        assert got["left"] == "latest, save-000001, save-000002" or "save-000001" in got["left"]


def test_the_random_state_comes_back_where_ranks_shared_it(quick):
    for rank, got in enumerate(each(quick, "random")):
        assert got["one"] and (not got["own"] or rank == 0)
