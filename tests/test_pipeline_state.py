"""State of models in stages: checkpoints, files, what ranks initialise, and optimizers."""

import itertools

import gloo_checkpoint as checkpoints
import pytest
from gloo_checkpoint import ALONE, PIPELINE_MESHES
from test_checkpoint import assert_went_on, pretrained_jobs, ranks_of

MESHES = (*(m for m in PIPELINE_MESHES if "ep" not in m), "dp=4", "dp=2,tp=2", ALONE)
EXPERT_MESHES = ("pp=2,ep=2", "pp=2,dp=2", "dp=2,tp=2", ALONE)


def quick_jobs(folder):
    return {
        "gpt2": (checkpoints.matrix, str(folder), "gpt2", True, MESHES),
        **pretrained_jobs(folder, ["gpt2"]),
    }


quick = ranks_of("pipeline", quick_jobs)


def each(results, job):
    """The job's result on every rank; a rank's traceback fails the test."""
    for rank, result in enumerate(results[0]):
        if isinstance(result[job], str):
            pytest.fail(f"rank {rank}:\n{result[job]}")
    return [result[job] for result in results[0]]


@pytest.mark.parametrize("pair", list(itertools.product(MESHES, MESHES)), ids="->".join)
def test_a_checkpoint_of_any_stages_loads_on_any_mesh(quick, pair):
    results = [got[pair] for got in each(quick, "gpt2") if pair in got]
    assert len(results) == (1 if pair[1] == ALONE else 4)
    for got in results:
        assert_went_on(got, pair, 1e-9)
