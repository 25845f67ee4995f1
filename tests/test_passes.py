"""The chain of passes: text form, order, a chain of one's own."""

import handwritten as hw
import pytest

from autoshard import ShardingError, autoshard
from passes import PASSES, chain, parse


def test_a_chain_prints_and_parses():
    steps = chain(sequence_parallel=True, strict=True)
    text = "; ".join(map(str, steps))
    assert "tensor_parallel(strict=True)" in text
    assert parse(text) == steps


@pytest.mark.parametrize("text", ["tensor_paralel", "tensor_parallel(size=2)", "partition(", "1+1"])
def test_what_is_no_pass_is_named(text):
    with pytest.raises(ShardingError) as error:
        parse(f"canonicalize; {text}")
    assert text in str(error.value) and "tensor_parallel" in str(error.value)


def test_every_pass_says_what_it_requires_and_gives():
    import importlib

    for name in PASSES:
        doc = importlib.import_module(f"passes.{name}").__doc__ or ""
        assert doc.startswith(f"{name}: ") and "Requires:" in doc and "Gives:" in doc


def test_a_chain_of_ones_own_leaves_sequence_parallelism_out():
    text = "canonicalize; infer_axes; data_parallel; tensor_parallel; partition"
    own = autoshard(hw.GPT(), {"tp": 2}, example_inputs=hw.tokens(), passes=parse(text))
    usual = autoshard(hw.GPT(), {"tp": 2}, example_inputs=hw.tokens(), sequence_parallel=False)
    assert own.code == usual.code
    assert [row.split()[0] for row in own.table("passes").splitlines()[2:-1]] == text.split("; ")
