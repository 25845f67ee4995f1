"""Mixtures of experts: tokens to experts on other ranks and back."""

from __future__ import annotations

import tempfile
from pathlib import Path

import expert_jobs as jobs
import gloo
import pytest
from expert_jobs import CASES

SIZES = {"dp": 4}
JOBS = {
    f"{ranks} {name}": (jobs.experts_on_ranks, ranks, name) for ranks in (2, 4) for name in CASES
}


def assert_near(found, wanted, what: str) -> None:
    assert found is not None, f"{what}: nothing"
    assert found.shape == wanted.shape, what
    if found.numel():
        assert (found - wanted).abs().max() <= 1e-12 * max(1, wanted.abs().max()), what


def assert_part(found: dict, case: jobs.Case, ranks: int, rank: int) -> None:
    given = jobs.inputs(case, ranks)
    exact = {
        name: value.requires_grad_(name != "out")
        for name, value in jobs.on_one_device(given).items()
    }
    for name, wanted in jobs.part(given | exact, case, ranks, rank).items():
        if name in exact:
            assert_near(found[name], wanted, f"{name} of rank {rank} of {ranks}")


@pytest.mark.parametrize("name", CASES)
def test_experts_of_one_rank(name):
    case = CASES[name]
    own = jobs.part(jobs.inputs(case, 1), case, 1, 0)
    if len(own["x"]):
        assert_part(jobs.with_gradients(own, (), case.experts), case, 1, 0)


@pytest.fixture(scope="module")
def ranks():
    with tempfile.TemporaryDirectory() as folder:
        gloo.launch(SIZES, JOBS, Path(folder))
        return gloo.results_in(Path(folder), SIZES)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [2, 4])
def test_experts_on_processes(ranks, count, name):
    """All hard cases: ranks that send or receive nothing, experts that get no token."""
    for rank, every in enumerate(ranks):
        found = every[f"{count} {name}"]
        assert not isinstance(found, str), found
        assert_part(found, CASES[name], count, rank % count)
