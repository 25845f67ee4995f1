"""The README example, and that the proof it prints can fail."""

import pytest
import torch
from handwritten import GPT, MLP, NoNormResidual, tokens, vectors

from autoshard import MeshSpec, autoshard, collectives, verify

TABLES = ("axes", "params", "graph", "collectives", "passes", "memory", "attention")


def test_mlp_trains_the_same_on_four_ranks():
    report = verify(MLP(), {"dp": 2, "tp": 2}, example_inputs=vectors(4, 32), steps=2)
    assert report.ok, str(report)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gpt_trains_the_same_on_four_ranks(sequence_parallel):
    report = verify(
        GPT(),
        {"dp": 2, "tp": 2},
        example_inputs=tokens(),
        steps=2,
        sequence_parallel=sequence_parallel,
    )
    assert report.ok, str(report)


def test_report_names_every_parameter():
    model = GPT(layers=1)
    text = verify(model, {"tp": 2}, example_inputs=tokens(), steps=1).table()
    missing = [name for name, _ in model.named_parameters() if name not in text]
    assert missing == []


def test_verify_does_not_touch_the_model():
    model = MLP()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verify(model, {"tp": 2}, example_inputs=vectors(4, 32), steps=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["all_reduce", "replicate"])
def test_verify_notices_a_missing_collective(monkeypatch, kind):
    monkeypatch.setitem(collectives.KINDS, kind, ("identity", "identity"))
    mesh, inputs = {"tp": 2}, vectors(4, 32)
    report = verify(NoNormResidual(), mesh, example_inputs=inputs, steps=1)
    assert not report.ok, str(report)


def test_a_mesh_needs_no_process_group():
    sharded = autoshard(GPT(), MeshSpec(dp=2, tp=4), example_inputs=tokens())
    for name in TABLES:
        assert len(sharded.table(name).splitlines()) > 2, name
    assert "blocks.1.attn.in_proj.weight" in sharded.table("params")
    assert "dp=2" in str(sharded) and "tp=4" in str(sharded)


def test_each_rank_holds_a_quarter_of_the_cut_weights():
    model = GPT()
    sharded = autoshard(model, MeshSpec(dp=2, tp=4), example_inputs=tokens(), zero=0)
    whole = dict(model.named_parameters())["blocks.0.up.weight"]
    for rank in range(8):
        local = dict(sharded.rank(rank).named_parameters())["blocks.0.up.weight"]
        assert torch.equal(local, whole.chunk(4)[rank % 4])


def test_linears_are_named_column_and_row():
    table = autoshard(MLP(), {"tp": 2}, example_inputs=vectors(4, 32)).table("graph")
    lines = table.splitlines()
    assert any("column" in line and "up" in line for line in lines), table
    assert any("row" in line and "down" in line for line in lines), table
