"""Errors say who, which tensor, the values, why, and what to change: tested for those words."""

import copy
import inspect
import pickle
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
    assert "axis names" not in str(error.value)


def test_what_is_no_mesh():
    with pytest.raises(MeshError) as error:
        autoshard(hw.MLP(), 4, example_inputs=hw.vectors(4, 32))
    says(error, "int 4", "DeviceMesh", "MeshSpec", "fix:")


def test_what_is_no_model():
    with pytest.raises(CaptureError) as error:
        autoshard(hw.MLP, {"tp": 2}, example_inputs=hw.vectors(4, 32))
    says(error, "the model", "Module", "fix:")


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


def test_a_mesh_spec_in_a_world_of_its_size(world_of_one, monkeypatch):
    inputs = hw.vectors(4, 32)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(MeshError) as error:
        autoshard(hw.MLP(), {"dp": 2, "tp": 2}, example_inputs=inputs).train_step(**inputs)
    says(error, "made for a MeshSpec", "pass the DeviceMesh")
    assert "this world has 4" not in str(error.value)


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(4, 32, dtype=torch.float64)}, ("x is torch.float64", "torch.float32")),
        ({"x": torch.zeros(4, 32, dtype=torch.long)}, ("x is torch.int64", "torch.float32")),
        ({"x": torch.zeros(4, 32, device="meta")}, ("x is on the meta device",)),
        ({"foo": 1}, ("forward takes no foo",)),
    ],
)
def test_a_call_with_other_types_than_captured(change, words):
    inputs = hw.vectors(4, 32)
    sharded = autoshard(hw.MLP(), {"tp": 1}, example_inputs=inputs)
    with pytest.raises(CaptureError) as error:
        sharded.train_step(**{**inputs, **change})
    says(error, *words)


def test_ids_that_are_floats():
    inputs = hw.tokens()
    sharded = autoshard(hw.GPT(), {"tp": 1}, example_inputs=inputs)
    with pytest.raises(CaptureError) as error:
        sharded(**{**inputs, "ids": inputs["ids"].float()})
    says(error, "ids is torch.float32", "torch.int64")


def test_no_tensor_among_the_inputs():
    with pytest.raises(CaptureError) as error:
        autoshard(hw.MLP(), {"tp": 1}, example_inputs={"x": 1, "target": None})
    says(error, "x=1", "tensor", "fix:")


# --- the loss ---


class Scalars(torch.nn.Module):
    """Returns what ``outputs(h)`` makes of a hidden value, by name."""

    def __init__(self, outputs):
        super().__init__()
        self.layer, self.outputs = torch.nn.Linear(8, 8), outputs

    def forward(self, x):
        return self.outputs(self.layer(x))


X = {"x": torch.ones(4, 8)}
NO_LOSS = {
    "several": (
        lambda h: {"first": h.sum(), "second": (h**2).mean()},
        ("first", "second", "none is called loss"),
    ),
    "no scalar": (lambda h: {"loss": (h**2).mean(-1)}, ("output loss", "scalar")),
    "detached": (lambda h: {"loss": h.mean().detach(), "other": h.sum()}, ("loss", "trainable")),
}


@pytest.mark.parametrize(("outputs", "words"), NO_LOSS.values(), ids=NO_LOSS)
def test_a_loss_that_cannot_be_told(outputs, words):
    for call in (
        lambda: autoshard(Scalars(outputs), {"dp": 1}, X).train_step(**X),
        lambda: verify(Scalars(outputs), {"dp": 2}, X),
    ):
        with pytest.raises(CaptureError) as error:
            call()
        says(error, *words)


def test_a_metric_is_not_taken_for_the_loss():
    def outputs(h):
        return (h > 0).float().mean(), h.mean().detach(), (h**2).mean()

    model = Scalars(outputs)
    loss = autoshard(model, {"dp": 1}, X).train_step(**X)
    assert torch.equal(loss, model(**X)[2])
    assert verify(model, {"dp": 2}, X, steps=1).ok


# --- what is done to the module afterwards ---


def test_a_parameter_that_is_unfrozen_later():
    model = hw.MLP()
    frozen = next(iter(dict(model.named_parameters())))
    model.get_parameter(frozen).requires_grad_(False)
    inputs = hw.vectors(4, 32)
    sharded = autoshard(model, {"dp": 1}, example_inputs=inputs)
    sharded.train_step(**inputs)
    sharded.get_parameter(frozen).requires_grad_(True)
    with pytest.raises(ShardingError) as error:
        sharded.train_step(**inputs)
    says(error, frozen, "trainable", "fix:")


def test_a_copy_or_another_type_is_refused():
    sharded = autoshard(hw.MLP(), {"tp": 2}, example_inputs=hw.vectors(4, 32))
    for call in (lambda: copy.deepcopy(sharded), lambda: pickle.dumps(sharded)):
        with pytest.raises(ShardingError) as error:
            call()
        says(error, "copy", "full_state_dict", "fix:")
    with pytest.raises(ShardingError) as error:
        sharded.double()
    says(error, "torch.float32", "torch.float64", "fix:")
    assert sharded.float() is sharded and sharded.cpu() is sharded


def test_whole_tensors_that_do_not_fit():
    inputs = hw.vectors(4, 32)
    sharded, state = autoshard(hw.MLP(), {"tp": 2}, inputs), hw.MLP().state_dict()
    first, second, *_ = state
    before = {n: p.detach().clone() for n, p in sharded.named_parameters()}
    state[first] = torch.zeros(3)
    state["other"] = state.pop(second)
    with pytest.raises(ShardingError) as error:
        sharded.load_full_state_dict(state)
    says(error, f"missing {second}", "unexpected other", f"{first} is (3,)", "fix:")
    assert all(torch.equal(p, before[n]) for n, p in sharded.named_parameters())
    del state[first]
    assert sharded.load_full_state_dict(state, strict=False) == ([first, second], ["other"])


# --- verify ---


def test_verify_of_a_model_with_nothing_to_train():
    frozen = hw.MLP().requires_grad_(False)
    with pytest.raises(CaptureError) as error:
        verify(frozen, {"dp": 2}, hw.vectors(4, 32))
    says(error, "trainable", "fix:")
    with pytest.raises(CaptureError) as error:
        verify(torch.nn.ReLU(), {"dp": 2}, {"input": torch.ones(4, 8)})
    says(error, "trainable", "fix:")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_verify_of_a_model_that_cannot_be_copied():
    model = torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Linear(8, 8)))
    model(torch.ones(4, 8))
    with pytest.raises(CaptureError) as error:
        verify(model, {"dp": 2}, {"input": torch.ones(4, 8)})
    says(error, "copy", "parametrizations", "fix:")


def test_verify_sees_a_copy_that_strays_on_the_last_rank(monkeypatch):
    from autoshard.emit import ShardedModule

    update = ShardedModule._update_buffers

    def stray(self, *arguments):
        update(self, *arguments)
        if self.rank_index == 3:
            self.tick.add_(1)
            with torch.no_grad():
                self.layer.bias.add_(1)

    class Ticking(Scalars):
        def __init__(self):
            super().__init__(lambda h: (h**2).mean())
            self.register_buffer("tick", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.tick.add_(1)
            return super().forward(x)

    assert verify(Ticking(), {"dp": 4}, X, steps=1).ok
    monkeypatch.setattr(ShardedModule, "_update_buffers", stray)
    bad = {row.name for row in verify(Ticking(), {"dp": 4}, X, steps=1).rows if not row.ok}
    assert bad == {"tick rank 3", "layer.bias rank 3"}


def test_an_axis_that_does_not_divide_at_all_is_named_too():
    model = hw.GPT(width=48, heads=4, ffn=66)
    with pytest.raises(ShardingError) as error:
        autoshard(model, {"tp": 3}, example_inputs=hw.tokens(), strict=True)
    says(error, "heads of 4", "attn", "whole on every rank", "tp=3")
    loose = autoshard(model, {"tp": 3}, example_inputs=hw.tokens())
    assert any("heads of 4" in note for note in loose.program.notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero": 4}, "zero=4"),
        ({"zero": "3"}, "zero='3'"),
        ({"zero": True}, "zero=True"),
        ({"offload": "cpu"}, "offload='cpu'"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward='no'"),
        ({"zero_axes": 5}, "zero_axes=5"),
        ({"zero_axes": ()}, "zero_axes=()"),
        ({"zero_axes": ("tp",)}, "axis 'tp'"),
        ({"param_dtype": "bf16"}, "param_dtype='bf16'"),
        ({"reduce_dtype": torch.int32}, "reduce_dtype=torch.int32"),
    ],
)
def test_options_of_zero_are_checked_by_name(options, words):
    with pytest.raises(ShardingError) as error:
        autoshard(hw.MLP(), "dp=2,tp=2", hw.vectors(4, 32), **options)
    says(error, words, "why:", "fix:")


PARTS = ("why:", "fix:")


def test_a_way_of_context_parallelism_that_there_is_not():
    with pytest.raises(ShardingError) as error:
        autoshard(tiny("llama"), "cp=2", batch(), context_parallel="rings")
    says(error, "context_parallel", "'rings'", "ring", "ulysses", "allgather", *PARTS)


@pytest.mark.parametrize("mesh", ["cp=3", "cp=2,tp=4"])
def test_too_few_heads_for_ulysses(mesh):
    model = tiny("llama", num_hidden_layers=1)
    with pytest.raises(ShardingError) as error:
        autoshard(model, mesh, batch(), context_parallel="ulysses")
    says(error, "context_parallel", "heads of 1 attentions", "layers.0.self_attn", "cp=", *PARTS)
    says(error, 'context_parallel="ring"')


@pytest.mark.parametrize("way", ["ring", "ulysses", "allgather"])
@pytest.mark.parametrize("what", ["cumsum", "lstm", "loop"])
def test_a_scan_over_tokens_that_cp_cuts(what, way):
    place = "cumsum in body" if what == "cumsum" else "a loop in body"
    with pytest.raises(ShardingError) as error:
        autoshard(Scan(what), "cp=2", hw.tokens(), context_parallel=way)
    says(error, "context_parallel", "scans", place, "cp", "wait for", *PARTS)


class Scan(torch.nn.Module):
    """Each token needs what the one before it left."""

    class Body(torch.nn.Module):
        def __init__(self, what):
            super().__init__()
            self.what, self.lstm = what, torch.nn.LSTM(8, 8, batch_first=True)

        def forward(self, x):
            if self.what == "cumsum":
                return x.cumsum(1)
            if self.what == "lstm":
                return self.lstm(x)[0]
            state, out = torch.zeros_like(x[:, 0]), []
            for at in range(x.shape[1]):
                state = torch.tanh(state + x[:, at])
                out.append(state)
            return torch.stack(out, 1)

    def __init__(self, what):
        super().__init__()
        self.embed, self.body = torch.nn.Embedding(hw.VOCAB, 8), self.Body(what)
        self.head = torch.nn.Linear(8, hw.VOCAB)

    def forward(self, ids, targets):
        logits = self.head(self.body(self.embed(ids)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (hw.MLP, lambda: hw.vectors(4, 32)),
        (hw.ResNet, hw.images),
        (lambda: tiny("llama"), lambda: {"input_ids": torch.ones(2, 1, dtype=torch.long)}),
    ],
    ids=["vectors", "images", "one token"],
)
def test_inputs_without_a_sequence_that_cp_could_cut(model, inputs):
    with pytest.raises(ShardingError) as error:
        autoshard(model(), "cp=2", inputs())
    says(error, "context_parallel", "the sequence", "no dimension of the inputs", "cp=2", *PARTS)


def test_a_training_step_needs_gradients():
    module = autoshard(hw.MLP(), "dp=1", hw.vectors(4, 32))
    with torch.no_grad(), pytest.raises(ShardingError, match="no_grad"):
        module.train_step(**hw.vectors(4, 32))
