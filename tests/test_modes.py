"""Training and evaluation are two graphs over one set of parameters; each takes any batch."""

import handwritten as hw
import pytest
import torch
import torch.nn.functional as F
from compare import difference
from torch import nn
from zoo import batch, tiny

from autoshard import MeshSpec, ShardingError, autoshard
from autoshard.chain import run
from autoshard.simulate import simulate
from autoshard.verify import split_batch
from passes import chain

MESHES = [{"dp": 1}, {"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}]


class Net(nn.Module):
    """A convolution, two linears, dropout and batch statistics between them."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up, self.bn2 = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.down, self.drop = nn.Linear(16, 10), nn.Dropout(0.5)

    def forward(self, images, labels):
        h = self.drop(torch.relu(self.bn1(self.conv(images)))).mean((2, 3))
        logits = self.down(self.drop(torch.relu(self.bn2(self.up(h)))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def in_float64(model, inputs):
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return model.double(), inputs


def trained():
    """A model whose running statistics are not those it started with."""
    model, inputs = in_float64(Net(), hw.images())
    for _ in range(3):
        model(**inputs)
    return model, inputs


def outputs(ranks, inputs):
    """Every output of the mode that the ranks are in, whole, by name; rank 0's loss."""
    program = ranks[0].running
    rows = [split_batch(program, inputs, r) for r in range(len(ranks))]
    arguments = [m.arguments((), rows[r]) for r, m in enumerate(ranks)]
    with torch.no_grad():
        results = simulate(program.graph, program.mesh, arguments, [m.units for m in ranks])
    step = program.mesh.mesh.size("tp")
    return {
        name: results[0][i]
        if i == program.loss
        else torch.cat([results[r][i] for r in range(0, len(ranks), step)])
        for i, name in enumerate(program.output_names)
    }


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_evaluation_gives_the_models_own_outputs(mesh):
    model, inputs = trained()
    sharded = autoshard(model, mesh, example_inputs=inputs)
    world = sharded.program.mesh.mesh.world_size
    ranks = [sharded.rank(r).eval() for r in range(world)]
    got, want = outputs(ranks, inputs), model.eval()(**inputs)
    assert {name: difference(got[name], want[name].detach()) for name in want} == {
        "loss": "",
        "logits": "",
    }


def test_evaluation_follows_the_training_of_the_same_parameters():
    model, inputs = trained()
    sharded = autoshard(model, {"dp": 1}, example_inputs=inputs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, model)]
    for step in range(2):
        for module, optimizer in zip((sharded, model), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = module.train_step(**inputs) if module is sharded else module(**inputs)["loss"]
            if module is model:
                loss.backward()
            optimizer.step()
        got, want = sharded.eval()(**inputs), model.eval()(**inputs)
        assert difference(got["logits"].detach(), want["logits"].detach()) == ""
        sharded.train(), model.train()


def test_modes_share_tensors_and_change_graph():
    model, inputs = trained()
    sharded = autoshard(model, {"dp": 1}, example_inputs=inputs)
    training, held = sharded.graph_module, dict(sharded.named_parameters())
    statistics = sharded.bn1.running_mean.clone()
    assert sharded.eval() is sharded and not sharded.training
    assert sharded.graph_module is not training
    sharded(**inputs)
    assert torch.equal(sharded.bn1.running_mean, statistics)
    assert all(p is held[name] for name, p in sharded.named_parameters())
    assert sharded.train().graph_module is training
    sharded(**inputs)
    assert not torch.equal(sharded.bn1.running_mean, statistics)


def test_compiling_leaves_the_models_modes_alone():
    model, inputs = trained()
    model.bn1.eval()
    before = {name: m.training for name, m in model.named_modules()}
    autoshard(model, {"tp": 2}, example_inputs=inputs).eval()
    assert {name: m.training for name, m in model.named_modules()} == before


def test_a_part_set_apart_keeps_its_mode():
    model, inputs = trained()
    model.bn1.eval()
    sharded = autoshard(model, {"dp": 1}, example_inputs=inputs)
    statistics = sharded.bn1.running_mean.clone(), sharded.bn2.running_mean.clone()
    sharded(**inputs)
    assert torch.equal(sharded.bn1.running_mean, statistics[0])
    assert not torch.equal(sharded.bn2.running_mean, statistics[1])


def test_a_model_in_evaluation_mode_is_compiled_as_it_is():
    model, inputs = trained()
    sharded = autoshard(model.eval(), {"dp": 1}, example_inputs=inputs)
    assert not sharded.training
    assert torch.equal(sharded(**inputs)["logits"], model(**inputs)["logits"])
    assert sharded.train().training


def test_graphs_that_cut_a_parameter_differently_are_refused(monkeypatch):
    model, inputs = trained()
    sharded = autoshard(model, {"tp": 2}, example_inputs=inputs)
    whole = run_without(sharded, "tensor_parallel")
    monkeypatch.setitem(sharded._source.compiled, False, (whole, sharded._running.output))
    with pytest.raises(ShardingError, match=r"up\.weight"):
        sharded.eval()


def run_without(sharded, name):
    from autoshard.api import in_mode
    from autoshard.capture import capture

    source = sharded._source
    with in_mode(source.model, False):
        program, _ = capture(source.model, MeshSpec.of(source.mesh), source.example_inputs)
    return run(program, [p for p in chain(sequence_parallel=False) if p.name != name])


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_one_program_takes_other_batches_and_lengths(mesh):
    model, _ = in_float64(tiny("llama"), {})
    sharded = autoshard(model, mesh, example_inputs=batch())
    assert sharded.program.dynamic == "batch and sequence"
    world = sharded.program.mesh.mesh.world_size
    ranks = [sharded.rank(r) for r in range(world)]
    code = sharded.code
    for rows, length in ((4, 32), (6, 20), (2, 9)):
        inputs = batch(b=rows, s=length)
        got, want = outputs(ranks, inputs), model(**inputs)
        assert (got["loss"] - want.loss).abs() < 1e-6  # the model itself rounds to float32
        assert (got["logits"] - want.logits).abs().max() < 1e-5
    assert sharded.code == code


def test_whole_tensors_load_on_every_rank_of_any_mesh():
    model, inputs = in_float64(tiny("gpt2"), {})
    torch.manual_seed(7)
    other, _ = in_float64(tiny("gpt2"), {})
    ranks = [autoshard(other, {"dp": 2, "tp": 2}, batch()).rank(r) for r in range(4)]
    want = [autoshard(model, {"dp": 2, "tp": 2}, batch()).rank(r) for r in range(4)]
    for rank, like in zip(ranks, want, strict=True):
        assert rank.load_full_state_dict(model.state_dict()) == ([], [])
        held = like.state_dict()
        assert {
            n: difference(x, held[n])
            for n, x in rank.state_dict().items()
            if difference(x, held[n])
        } == {}
