"""What autograd keeps on real ranks of a pipeline, and what they send, against the tables."""

from functools import partial

import pipeline_traffic
import pytest
from test_gloo import each, ranks_of

#: By schedule, of four ranks how many micro-batches each keeps for backward, of eight.
ALIVE = {"1f1b": (4, 3, 2, 1), "gpipe": (8, 8, 8, 8)}
#: Numbers that a loss keeps.
SCALARS = 64
OPTIONS = {
    **{f"zero {stage}": {"zero": stage} for stage in range(4)},
    "zero 3, kept": {"zero": 3, "reshard_after_forward": False},
    "zero 3, recomputed": {"zero": 3, "recompute": "block"},
}

four = ranks_of({"pp": 4}, {name: (pipeline_traffic.peak, name, 8) for name in ALIVE})
two_by_two = ranks_of(
    {"pp": 2, "dp": 2},
    {
        name: (partial(pipeline_traffic.traffic, microbatches=2, **options), 4, 4)
        for name, options in OPTIONS.items()
    },
)


@pytest.mark.parametrize("schedule", ALIVE)
def test_activations_at_the_peak_are_those_of_so_many_micro_batches(four, schedule):
    """(pp - stage) of 1F1B (Narayanan et al. 2021), all of GPipe."""
    for times, got in zip(ALIVE[schedule], each(four, schedule), strict=True):
        assert got["one"] > 40_000
        assert got["peak"] == pytest.approx(times * got["one"], abs=SCALARS)
        assert got["peak"] == pytest.approx(got["predicted"], abs=SCALARS)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_sends_what_the_table_counts(two_by_two, name):
    for got in each(two_by_two, name):
        assert got["sent"] == got["table"]
        assert {"send", "broadcast", "all_reduce"} <= got["sent"].keys()
