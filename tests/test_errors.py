"""Errors say who, which tensor, the values, why, and what to change: tested for those words."""

import inspect
import re
from datetime import timedelta

import handwritten as hw
import pytest
import torch
import torch.distributed as dist
from zoo import batch, tiny

from autoshard import MeshSpec, autoshard, verify
from autoshard.errors import AutoshardError, CaptureError, MeshError, ShardingError


def says(error: pytest.ExceptionInfo, *words: str) -> None:
    """Every word stands in the message; numbers stand alone, not inside a longer number."""
    text = str(error.value)
    for word in words:
        pattern = rf"(?<!\d){word}(?!\d)" if word.isdigit() else re.escape(word)
        assert re.search(pattern, text, re.IGNORECASE), f"no {word!r} in: {text}"


def test_all_errors_are_of_one_family():
    for kind in (CaptureError, MeshError, ShardingError):
        assert issubclass(kind, AutoshardError)


# --- the mesh ---


@pytest.mark.parametrize("mesh", [{"dp": 2, "tensor": 4}, "dp=2,tensor=4"], ids=["dict", "text"])
def test_unknown_mesh_axis(mesh):
    with pytest.raises(MeshError) as error:
        autoshard(hw.MLP(), mesh, example_inputs=hw.vectors(4, 32))
    says(error, "tensor", "pp", "dp", "cp", "ep", "tp", "fix:")


def test_unknown_mesh_axis_by_keyword():
    with pytest.raises(MeshError) as error:
        MeshSpec(data=2, tp=2)
    says(error, "data", "dp", "fix:")


def test_duplicated_mesh_axis():
    with pytest.raises(MeshError) as error:
        autoshard(hw.MLP(), "tp=2,tp=4", example_inputs=hw.vectors(4, 32))
    says(error, "tp", "twice", "fix:")


@pytest.mark.parametrize("size", [0, -2])
def test_mesh_axis_of_no_ranks(size):
    with pytest.raises(MeshError) as error:
        autoshard(hw.MLP(), {"tp": size}, example_inputs=hw.vectors(4, 32))
    says(error, "tp", str(abs(size)), "positive", "fix:")


@pytest.fixture
def world_of_one():
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20)
    )
    yield
    dist.destroy_process_group()


def test_mesh_larger_than_the_world(world_of_one):
    inputs = hw.vectors(4, 32)
    with pytest.raises(MeshError) as error:
        autoshard(hw.MLP(), {"dp": 2, "tp": 2}, example_inputs=inputs).train_step(**inputs)
    says(error, "4", "1", "world", "fix:")


def test_device_mesh_without_names(world_of_one):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    with pytest.raises(MeshError) as error:
        autoshard(hw.MLP(), mesh, example_inputs=hw.vectors(4, 32))
    says(error, "name", "mesh_dim_names", "fix:")


def test_rank_outside_the_mesh():
    sharded = autoshard(hw.MLP(), {"tp": 2}, example_inputs=hw.vectors(4, 32))
    with pytest.raises(MeshError) as error:
        sharded.rank(2)
    says(error, "rank", "2")


# --- the capture ---


def test_op_that_cannot_be_captured():
    lines, first = inspect.getsourcelines(hw.Branching.Gate.forward)
    line = first + next(i for i, text in enumerate(lines) if "cannot be captured" in text)
    with pytest.raises(CaptureError) as error:
        autoshard(hw.Branching(), {"tp": 2}, example_inputs=hw.vectors(4, 32))
    says(error, "blocks.1", "handwritten.py", str(line))


class Bare(torch.nn.Module):
    """Gives no clue as to what it eats."""

    def forward(self, *things, **options):
        return options["one"] @ things[0]


def test_inputs_that_cannot_be_guessed():
    with pytest.raises(CaptureError) as error:
        autoshard(Bare(), {"tp": 2})
    says(error, "example_inputs", "Bare")


# --- the batch ---


@pytest.mark.parametrize("call", [autoshard, verify], ids=["autoshard", "verify"])
def test_wrong_example_input_names(call):
    batch = hw.tokens()
    wrong = {"tokens": batch["ids"], "targets": batch["targets"]}
    with pytest.raises(AutoshardError) as error:
        call(hw.GPT(), {"dp": 2}, example_inputs=wrong)
    says(error, "tokens", "ids", "targets")


@pytest.mark.parametrize("method", ["__call__", "train_step"])
def test_wrong_input_names(method):
    batch = hw.tokens()
    sharded = autoshard(hw.GPT(), {"dp": 1}, example_inputs=batch)
    with pytest.raises(AutoshardError) as error:
        getattr(sharded, method)(tokens=batch["ids"], targets=batch["targets"])
    says(error, "tokens", "ids", "targets")


def test_missing_input():
    batch = hw.tokens()
    sharded = autoshard(hw.GPT(), {"dp": 1}, example_inputs=batch)
    with pytest.raises(AutoshardError) as error:
        sharded.train_step(ids=batch["ids"])
    says(error, "targets")


@pytest.mark.parametrize(("rows", "dp"), [(3, 2), (6, 4)])
def test_batch_that_the_data_axis_does_not_divide(rows, dp):
    with pytest.raises(MeshError) as error:
        verify(hw.GPT(), {"dp": dp}, example_inputs=hw.tokens(rows))
    says(error, "dp", str(rows), str(dp), "fix:")


# --- the cut ---


def test_every_indivisible_axis_at_once():
    model = hw.GPT(width=48, heads=6, ffn=130)
    with pytest.raises(ShardingError) as error:
        autoshard(model, {"tp": 4}, example_inputs=hw.tokens(), strict=True)
    says(error, "tp", "4", "6", "130", "blocks", "attn", "up", "fix:")


def test_what_divides_is_no_error_when_strict():
    sharded = autoshard(hw.GPT(), {"tp": 4}, example_inputs=hw.tokens(), strict=True)
    local = dict(sharded.named_parameters())["blocks.0.up.weight"]
    assert local.shape == (16, 32)


def test_nothing_left_to_cut():
    with pytest.raises(ShardingError) as error:
        autoshard(hw.Odd(), {"tp": 2}, example_inputs=hw.vectors(4, 5), strict=True)
    says(error, "tp", "2", "7", "fix:")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_cache": True}, ("use_cache=True",)),
        ({"scale": 3.0}, ("scale=3.0",)),
        ({"labels": torch.zeros(2, 32, dtype=torch.long)}, ("labels has 2", "input_ids has 4")),
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, ("input_ids has 1 dimensions",)),
        ({"input_ids": None}, ("input_ids is missing",)),
    ],
)
def test_a_call_that_is_not_what_was_captured(change, words):
    sharded = autoshard(tiny("llama"), {"tp": 1}, example_inputs=batch())
    with pytest.raises(CaptureError) as error:
        sharded(**{**batch(), **change})
    says(error, *words)
