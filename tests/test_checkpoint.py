"""Checkpoints: from any mesh to any other, killed saves, refusals, and weights of transformers."""

import itertools
import json
import math
import os
import shutil
from collections import Counter
from functools import cache
from pathlib import Path

import gloo
import gloo_checkpoint as jobs
import handwritten as hw
import pytest
import safetensors
import torch
from filelock import FileLock
from gloo_checkpoint import ALONE, CONTEXT_MESHES, MESHES
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from transformers import AutoModelForCausalLM
from zoo import TYPES, batch, tiny

from autoshard import MeshSpec, autoshard
from autoshard.axes import Axis
from autoshard.errors import MeshError, ShardingError
from autoshard.program import Parameter
from autoshard.runtime.boxes import held, part_of, written
from autoshard.runtime.gather import local_value

PAIRS = list(itertools.product(MESHES, MESHES))
SQUARE = {"dp": 2, "tp": 2}
MIXED = ("dp=4, mixed", "dp=2,tp=2, mixed", "tp=4")
SLOW = ("phi3", "bloom", "mixtral")
CONTEXT = (*CONTEXT_MESHES, "tp=4", ALONE)


def small(name, **options):
    """A tiny model of transformers, on whose experts autoshard can work."""
    model = tiny(name, **options)
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "batched_mm"
    return model


def alone(model, inputs=None):
    """A model's module on a mesh of one rank, without a process group."""
    return autoshard(model, MeshSpec(dp=1), example_inputs=inputs or batch())


@cache
def loader(name):
    """A module of a tiny model, for tests that load into it."""
    return alone(small(name, seed=2))


def mlp(seed=0, **options):
    torch.manual_seed(seed)
    return alone(hw.MLP(**options), hw.vectors(4, 32))


def step(sharded, optimizer):
    optimizer.zero_grad()
    loss = sharded.train_step(**hw.vectors(4, 32))
    optimizer.step()
    return loss.item()


def same(got, want):
    return got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


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


def pretrained_jobs(folder, names):
    for name in names:
        small(name, seed=1).save_pretrained(folder / f"theirs_{name}")
    return {
        f"pretrained {n}": (jobs.pretrained, str(folder), n, f"{folder}/theirs_{n}") for n in names
    }


def quick_jobs(folder):
    two = ("dp=2,tp=2", "tp=4")
    return {
        "gpt2": (jobs.matrix, str(folder), "gpt2", False),
        "momentum": (jobs.matrix, str(folder), "handwritten", True, two, jobs.frozen_sgd),
        "context": (jobs.matrix, str(folder), "qwen3", True, CONTEXT),
        "refusals": (jobs.refusals, str(folder)),
        "random": (jobs.random_streams, str(folder)),
        **pretrained_jobs(folder, ["llama"]),
    }


def slow_jobs(folder):
    return {
        **{name: (jobs.matrix, str(folder), name, True) for name in SLOW},
        "mixed": (jobs.matrix, str(folder), "gpt2", False, MIXED),
        **pretrained_jobs(folder, ["gpt2", "mixtral", "phi3"]),
    }


quick = ranks_of("quick", quick_jobs)
slow = ranks_of("slow", slow_jobs)


def each(results, job):
    """The job's result on every rank; a rank's traceback fails the test."""
    for rank, result in enumerate(results[0]):
        if isinstance(result[job], str):
            pytest.fail(f"rank {rank}:\n{result[job]}")
    return [result[job] for result in results[0]]


# --- from mesh to mesh ---


def assert_went_on(got, pair, tolerance):
    """Equal to the bit after loading; then, on the same mesh, losses equal to the bit too."""
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


@pytest.mark.parametrize("pair", list(itertools.product(CONTEXT, CONTEXT)), ids="->".join)
def test_meshes_that_cut_tokens_save_and_load_too(quick, pair):
    results = [got[pair] for got in each(quick, "context") if pair in got]
    assert len(results) == (1 if pair[1] == ALONE else 4)
    for got in results:
        assert_went_on(got, pair, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="->".join)
@pytest.mark.parametrize("name", SLOW)
def test_training_goes_on_as_if_it_had_not_been_interrupted(slow, name, pair):
    for got in each(slow, name):
        if pair in got:
            assert_went_on(got[pair], pair, 1e-9)


@pytest.mark.slow
def test_masters_of_half_precision_load_with_other_options(slow):
    for got in each(slow, "mixed"):
        assert len(got) == len(MIXED) ** 2
        for pair, result in got.items():
            assert_went_on(result, pair, 2e-2)


def test_momentum_and_frozen_parameters_load_on_another_mesh(quick):
    for got in each(quick, "momentum"):
        assert len(got) == 4
        for pair, result in got.items():
            assert_went_on(result, pair, 1e-9)


@pytest.mark.parametrize("mesh", ("dp=4", "dp=2,tp=2", "tp=4"))
def test_every_element_is_written_once_and_by_all_ranks_alike(quick, mesh):
    (folder,) = (quick[1] / "gpt2" / mesh).glob("save-*")
    metadata = FileSystemReader(folder).read_metadata()
    by_file: Counter = Counter()
    for name, entry in metadata.state_dict_metadata.items():
        covered = torch.zeros(entry.size, dtype=torch.int)
        for chunk in entry.chunks:
            part_of(covered, chunk.offsets, chunk.sizes).add_(1)
            stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            by_file[stored.relative_path] += math.prod(chunk.sizes)
        assert (covered == 1).all(), name
    assert len(by_file) == 4
    assert max(by_file.values()) < 0.4 * sum(by_file.values())


def test_the_random_state_comes_back_where_ranks_shared_it(quick):
    got = each(quick, "random")
    assert all(each["one"] for each in got)
    assert not any(each["own"] for each in got)


def test_torch_reads_a_checkpoint_as_whole_tensors(quick, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    (folder,) = (quick[1] / "gpt2" / "dp=2,tp=2").glob("save-*")
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt")
    assert state["transformer.h.0.attn.c_attn.weight"].shape == (64, 192)
    assert state["optimizer.state.transformer.h.0.attn.c_attn.weight.exp_avg"].shape == (64, 192)
    assert "lm_head.weight" not in state  # tied


@pytest.mark.parametrize(
    ("name", "sizes"),
    (
        ("gpt2", {"dp": 2, "tp": 2}),
        ("gpt2", {"tp": 4}),
        ("gpt2", {"dp": 5, "tp": 3}),
        ("phi3", {"dp": 2, "tp": 2}),
    ),
    ids=str,
)
def test_boxes_are_what_ranks_hold_and_cover_it_once(name, sizes):
    """Against slices taken by index, in pieces of dim 0 over dp too, for which some parameters are
    too short."""
    sharded = autoshard(tiny(name, n_layer=1, num_hidden_layers=1), sizes, example_inputs=batch())
    mesh = sharded.program.mesh
    parameters = [p for p in sharded.program.values.values() if not p.constant]
    scalar = Parameter(("scalar",), torch.tensor(3.0), True)
    short = Parameter(("short",), torch.arange(6.0).reshape(2, 3), True, dims=short_dims())
    shared = [(), ("dp",)] if "dp" in sizes else [()]
    for zero, (turn, parameter) in itertools.product(
        shared, enumerate([*parameters, scalar, short])
    ):
        parameter.zero = zero
        covered = torch.zeros(parameter.value.shape)
        for rank in range(math.prod(sizes.values())):
            local = local_value(parameter, mesh, rank)
            read = torch.full_like(local, -1)
            for box in held(parameter, mesh, rank):
                box.of(read).copy_(part_of(parameter.value, box.offsets, box.sizes))
            assert torch.equal(read, local), parameter.name
            for box in written(parameter, mesh, rank, turn):
                part_of(covered, box.offsets, box.sizes).add_(1)
        assert (covered == 1).all(), parameter.name


def short_dims():
    return tuple((Axis(size, name),) for size, name in ((2, "a"), (3, "b")))


# --- one device, no process group ---


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AMSGrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    **{
        name: lambda p, name=name: getattr(torch.optim, name)(p)
        for name in ("Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_comes_back(tmp_path, name):
    sharded = mlp()
    optimizer = OPTIMIZERS[name](sharded.parameters())
    step(sharded, optimizer), step(sharded, optimizer)
    sharded.save_checkpoint(tmp_path / "c", optimizer)
    want = [step(sharded, optimizer) for _ in range(3)]
    fresh = OPTIMIZERS[name](sharded.parameters())
    sharded.load_checkpoint(tmp_path / "c", fresh)
    assert [step(sharded, fresh) for _ in range(3)] == want
    sharded.load_checkpoint(tmp_path / "c", optimizer)  # one that has stepped
    assert [step(sharded, optimizer) for _ in range(3)] == want


def test_groups_are_known_by_their_parameters(tmp_path):
    sharded = mlp()
    weights = [p for n, p in sharded.named_parameters() if "weight" in n]
    biases = [p for n, p in sharded.named_parameters() if "bias" in n]
    optimizer = torch.optim.SGD([{"params": weights, "lr": 0.5}, {"params": biases, "lr": 0.25}])
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    sharded.save_checkpoint(tmp_path, optimizer)
    other = torch.optim.SGD([{"params": biases}, {"params": weights[:1]}, {"params": weights[1:]}])
    sharded.load_checkpoint(tmp_path, other)
    assert [g["lr"] for g in other.param_groups] == [0.25, 0.5, 0.5]
    assert [g["initial_lr"] for g in other.param_groups] == [0.25, 0.5, 0.5]
    one = torch.optim.SGD(sharded.parameters())
    with pytest.raises(ShardingError, match=r"group 0 holds parameters of groups \[0, 1\]"):
        sharded.load_checkpoint(tmp_path, one)
    some = torch.optim.SGD(weights)
    with pytest.raises(ShardingError, match="unexpected in the optimizer saved .*bias"):
        sharded.load_checkpoint(tmp_path, some)


def test_state_in_half_precision_stays_so(tmp_path):
    sharded = mlp()
    optimizer = torch.optim.AdamW(sharded.parameters())
    step(sharded, optimizer)
    for fields in optimizer.state.values():
        fields["exp_avg"] = fields["exp_avg"].bfloat16()
    sharded.save_checkpoint(tmp_path, optimizer)
    other = torch.optim.AdamW(sharded.parameters())
    sharded.load_checkpoint(tmp_path, other)
    assert {f["exp_avg"].dtype for f in other.state.values()} == {torch.bfloat16}
    assert {f["exp_avg_sq"].dtype for f in other.state.values()} == {torch.float32}


def test_a_parameter_without_state_has_none_after_loading(tmp_path):
    sharded = mlp()
    optimizer = torch.optim.AdamW(sharded.parameters())
    sharded.train_step(**hw.vectors(4, 32))
    idle = next(sharded.parameters())
    idle.grad = None
    optimizer.step()
    sharded.save_checkpoint(tmp_path, optimizer)
    step(sharded, optimizer)
    assert idle in optimizer.state
    sharded.load_checkpoint(tmp_path, optimizer)
    assert idle not in optimizer.state and len(optimizer.state) == 3


def test_parameters_load_without_the_optimizer_that_was_saved(tmp_path):
    sharded = mlp()
    optimizer = torch.optim.AdamW(sharded.parameters())
    step(sharded, optimizer)
    sharded.save_checkpoint(tmp_path, optimizer)
    other = mlp(seed=1)
    other.load_checkpoint(tmp_path)
    assert same(other.full_state_dict(), sharded.full_state_dict())


# --- killed ---


def assert_survived(kills):
    for done, values, begun, left in kills:
        assert len(values) == 1, "a mixture of saves was loaded"
        assert done <= min(values) <= begun
        assert "latest" in left and len(left) < 5


def test_killed_saves_leave_the_last_one(tmp_path):
    assert_survived(jobs.kill_saves(tmp_path, 2))


@pytest.mark.slow
def test_ten_killed_saves_leave_the_last_one(tmp_path):
    assert_survived(jobs.kill_saves(tmp_path, 10, seed=1))


def test_a_save_that_ends_at_any_step_leaves_the_last_one(tmp_path, monkeypatch):
    """Every call that changes the directory is made the last one."""
    sharded, (first, second) = mlp(), (torch.ones(()), torch.full((), 2.0))

    def filled(value):
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.fill_(value)

    calls = 0

    def ending_at(last, function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > last:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return call

    seen = []
    for last in itertools.count():
        path = tmp_path / str(last)
        filled(first)
        sharded.save_checkpoint(path)
        filled(second)
        calls, finished = 0, True
        with monkeypatch.context() as patch:
            for owner, name in (
                (os, "fsync"),
                (os, "replace"),
                (shutil, "rmtree"),
                (Path, "mkdir"),
            ):
                patch.setattr(owner, name, ending_at(last, getattr(owner, name)))
            try:
                sharded.save_checkpoint(path)
            except (KeyboardInterrupt, ShardingError):
                finished = False
        filled(torch.zeros(()))
        sharded.load_checkpoint(path)
        (value,) = {v for p in sharded.parameters() for v in p.flatten().tolist()}
        seen.append(value)
        if finished:
            break
        filled(second)
        sharded.save_checkpoint(path)  # the next one clears away what is left
        assert len(list(path.iterdir())) == 2
    assert len(seen) > 6 and seen == sorted(seen) and set(seen) == {1.0, 2.0}


# --- refused ---


def test_every_rank_hears_why_a_save_is_refused(quick):
    for rank, got in enumerate(each(quick, "refusals")):
        for name in ("up.weight.row_var", "down.weight.col_var"):
            assert name in got["factored"]
        assert "Adafactor" in got["factored"]
        assert "ranks [1, 2, 3] have others than rank 0" in got["rates"]
        assert "step" in got["steps"] and "on another" in got["steps"]
        assert "FileExistsError" in got["a file"] and "fix:" in got["a file"]
        assert ("rank 0 raised" in got["a file"]) == (rank != 0)
        assert got["lr"] == "0.001"
        assert got["left"].startswith("latest, save-") and got["left"].count("save-") == 1


def refused(call, *texts):
    with pytest.raises(ShardingError) as error:
        call()
    for text in (*texts, "why:", "fix:"):
        assert text in str(error.value)


def test_what_is_no_complete_checkpoint_is_refused(tmp_path):
    sharded = mlp()
    before = {n: p.clone() for n, p in sharded.full_state_dict().items()}

    def load(path):
        return lambda: sharded.load_checkpoint(path)

    refused(load(tmp_path / "none"), "there is none", str(tmp_path / "none"))
    path = tmp_path / "c"
    sharded.save_checkpoint(path)
    (path / "latest").rename(path / "kept")
    refused(load(path), "it is incomplete: save-000001 was never finished")
    (path / "kept").rename(path / "latest")
    file = path / "save-000001" / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:100])
    refused(load(path), f"__0_0.distcp has 100 of {len(content)} B")
    file.unlink()
    (path / "save-000001" / ".metadata").unlink()
    refused(load(path), "__0_0.distcp is missing", ".metadata is missing")
    (path / "latest").write_text("{")
    refused(load(path), "latest cannot be read")
    assert same(sharded.full_state_dict(), before)


def test_all_names_and_shapes_that_do_not_fit_are_told_at_once(tmp_path):
    sharded = alone(two_heads(left=8), VECTORS)
    sharded.save_checkpoint(tmp_path)
    optimizer = torch.optim.AdamW(sharded.parameters())
    refused(lambda: sharded.load_checkpoint(tmp_path, optimizer), "no optimizer's state")
    other = alone(two_heads(left=4, other="extra"), VECTORS)
    before = {n: p.clone() for n, p in other.full_state_dict().items()}
    refused(
        lambda: other.load_checkpoint(tmp_path),
        "missing extra.weight, extra.bias",
        "unexpected right.weight, right.bias",
        "left.weight is (8, 32), not (4, 32)",
        "left.bias is (8,), not (4,)",
    )
    assert same(other.full_state_dict(), before)


VECTORS = {"x": hw.vectors(4, 32)["x"]}


class Heads(torch.nn.Module):
    """Two linears side by side, the second under a name of its own."""

    def __init__(self, left, other):
        super().__init__()
        self.left = torch.nn.Linear(32, left)
        self.other = other
        setattr(self, other, torch.nn.Linear(32, 8))

    def forward(self, x):
        return self.left(x).square().mean() + getattr(self, self.other)(x).square().mean()


def two_heads(left, other="right"):
    torch.manual_seed(0)
    return Heads(left, other)


def test_optimizers_of_other_parameters_are_refused(tmp_path):
    sharded = mlp()
    foreign = torch.optim.AdamW([*sharded.parameters(), torch.nn.Parameter(torch.ones(3, 5))])
    refused(lambda: sharded.save_checkpoint(tmp_path, foreign), "group 0: one of shape (3, 5)")
    lbfgs = torch.optim.LBFGS(sharded.parameters())
    lbfgs.step(lambda: sharded.train_step(**hw.vectors(4, 32)))
    refused(lambda: sharded.save_checkpoint(tmp_path, lbfgs), "LBFGS", "up.weight.d")
    assert not list(tmp_path.iterdir())


def test_one_rank_of_many_cannot_save_or_load_alone(tmp_path):
    sharded = autoshard(hw.MLP(), MeshSpec(tp=2), example_inputs=hw.vectors(4, 32))
    for call in (sharded.save_checkpoint, sharded.load_checkpoint, sharded.save_pretrained):
        with pytest.raises(MeshError, match="start 2 processes"):
            call(tmp_path)
    assert not list(tmp_path.iterdir())


def test_any_name_of_a_tied_parameter_is_accepted(tmp_path):
    sharded = loader("gpt2")
    sharded.save_checkpoint(tmp_path)
    other = alone(small("gpt2", seed=1))
    for parameter in other.program.values.values():
        parameter.names = parameter.names[::-1]
    assert "lm_head.weight" in {p.name for p in other.program.values.values()}
    other.load_checkpoint(tmp_path)
    assert same(other.full_state_dict(), sharded.full_state_dict())


# --- weights of transformers ---


def assert_exchanged(name, tmp_path):
    model = small(name, seed=1)
    model.save_pretrained(tmp_path / "theirs")
    sharded = loader(name)
    assert sharded.load_pretrained(tmp_path / "theirs") == ([], [])
    assert same(sharded.full_state_dict(), model.state_dict())
    sharded.save_pretrained(tmp_path / "ours", max_shard_bytes=200_000)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(back) is type(model) and same(back.state_dict(), model.state_dict())
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as file:
        index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(file.keys())  # in the same layout
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    assert sharded.load_pretrained(tmp_path / "ours") == ([], [])
    assert same(sharded.full_state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ("llama", "gpt2", "mixtral"))
def test_weights_go_from_transformers_and_back(name, tmp_path):
    assert_exchanged(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_weights_of_every_architecture_go_from_transformers_and_back(name, tmp_path):
    assert_exchanged(name, tmp_path)


def assert_read_and_written(results, name):
    folder = results[1]
    theirs = AutoModelForCausalLM.from_pretrained(folder / f"theirs_{name}").state_dict()
    got = each(results, f"pretrained {name}")
    for rank in got:
        assert rank["names"] == ([], []) and same(rank["state"], theirs)
    back = AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
    signs = 0
    for n, value in back.items():
        changed = value.view(torch.int32) != theirs[n].view(torch.int32)
        assert (value[changed] == 0).all() and value[changed].signbit().all(), n
        signs += int(changed.sum())
    assert signs >= len(got[0]["state"]) - 1  # every -0.0 was written as such


def test_ranks_read_slices_and_write_whole_tensors(quick):
    assert_read_and_written(quick, "llama")


@pytest.mark.slow
@pytest.mark.parametrize("name", ("gpt2", "mixtral", "phi3"))
def test_ranks_read_slices_of_other_architectures(slow, name):
    assert_read_and_written(slow, name)


def test_names_may_lack_or_have_the_prefix(tmp_path):
    model = small("gpt2", seed=1)
    state = dict(model.transformer.state_dict())
    save_file(state, tmp_path / "model.safetensors")
    sharded = loader("gpt2")
    assert sharded.load_pretrained(tmp_path) == ([], [])
    assert same(sharded.full_state_dict(), model.state_dict())


def test_one_file_takes_the_place_of_several(tmp_path):
    sharded = loader("llama")
    sharded.save_pretrained(tmp_path, max_shard_bytes=100_000)
    assert len(list(tmp_path.glob("model-*"))) > 1
    sharded.save_pretrained(tmp_path)
    assert [f.name for f in tmp_path.glob("model*")] == ["model.safetensors"]


def test_only_what_is_held_is_read(tmp_path, monkeypatch):
    model = small("llama", seed=1)
    model.save_pretrained(tmp_path)
    sharded = autoshard(small("llama"), MeshSpec(tp=4), example_inputs=batch()).rank(3)
    elements = []

    class Counted:
        def __init__(self, piece):
            self.piece, self.get_shape = piece, piece.get_shape

        def __getitem__(self, at):
            elements.append(self.piece[at].numel())
            return self.piece[at]

    class CountedFile:
        def __init__(self, *args, **kwargs):
            self.file = safe_open(*args, **kwargs)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            return Counted(self.file.get_slice(name))

    monkeypatch.setattr(safetensors, "safe_open", CountedFile)
    sharded.load_pretrained(tmp_path)
    assert sum(elements) == sum(p.numel() for p in sharded.parameters())
    whole = model.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    got = dict(sharded.named_parameters())["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(got, whole[48:])


def test_values_become_the_dtype_held(tmp_path):
    model = small("llama", seed=1)
    model.bfloat16().save_pretrained(tmp_path)
    sharded = loader("llama")
    sharded.load_pretrained(tmp_path)
    assert same(sharded.full_state_dict(), {n: v.float() for n, v in model.state_dict().items()})
    half = alone(small("llama").bfloat16())
    half.load_pretrained(tmp_path)
    half.save_pretrained(tmp_path / "ours")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert back.dtype == torch.bfloat16 and same(back.state_dict(), model.state_dict())


def test_models_that_are_not_of_transformers_go_to_a_file_and_back(tmp_path):
    sharded = mlp()
    sharded.save_pretrained(tmp_path)
    assert same(load_file(tmp_path / "model.safetensors"), sharded.full_state_dict())
    other = mlp(seed=1)
    assert other.load_pretrained(tmp_path) == ([], [])
    assert same(other.full_state_dict(), sharded.full_state_dict())


def test_files_that_do_not_fit_are_refused(tmp_path):
    sharded = alone(two_heads(left=8), VECTORS)
    refused(lambda: sharded.load_pretrained(tmp_path), "model.safetensors not found")
    sharded.save_pretrained(tmp_path)
    other = alone(two_heads(left=4, other="extra"), VECTORS)
    refused(
        lambda: other.load_pretrained(tmp_path),
        "missing extra.weight, extra.bias",
        "unexpected right.bias, right.weight",
        "left.weight is (8, 32), not (4, 32)",
    )
    third = alone(two_heads(left=8, other="extra"), VECTORS)
    names = third.load_pretrained(tmp_path, strict=False)
    assert names == (["extra.weight", "extra.bias"], ["right.bias", "right.weight"])


def test_experts_that_cannot_be_converted_are_named(tmp_path):
    model = small("mixtral", seed=1)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    gone = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    del state[gone]
    save_file(state, tmp_path / "model.safetensors")
    sharded = loader("mixtral")
    refused(lambda: sharded.load_pretrained(tmp_path), "experts.1.w1.weight", "gate_up_proj")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    refused(lambda: mlp().load_pretrained(tmp_path), "safetensors", "autoshard[hf]")


@pytest.mark.parametrize(
    "how", ["a file", "metadata", "latest", "another optimizer", "safetensors"]
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, how):
    module = autoshard(hw.MLP(), MeshSpec(dp=1), hw.vectors(4, 32))
    optimizer = torch.optim.AdamW(module.parameters())
    module.train_step(**hw.vectors(4, 32))
    optimizer.step()
    path = tmp_path / "saved"
    module.save_checkpoint(path, optimizer)
    if how == "a file":
        path = tmp_path / "file"
        path.write_text("no directory")
    elif how == "metadata":
        next(path.glob("save-*/.metadata")).write_bytes(b"\x80\x04junk")
    elif how == "latest":
        (path / "latest").write_text("[]")
    elif how == "another optimizer":
        optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    else:
        path = tmp_path / "pretrained"
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ShardingError) as error:
        if how == "safetensors":
            module.load_pretrained(path)
        else:
            module.load_checkpoint(path, optimizer)
    assert "why:" in str(error.value) and "fix:" in str(error.value)
