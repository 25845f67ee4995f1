"""What goes in and what comes out: example inputs, output types, meta models, refusals."""

import dataclasses
from datetime import timedelta

import handwritten as hw
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from compare import difference
from test_models import hf_t5, hf_vit
from torch import nn
from zoo import tiny, tiny_config

from autoshard import CaptureError, MeshError, ShardingError, autoshard, verify

ONE = {"dp": 1}


# --- example inputs that nobody gave ---

WITHOUT_INPUTS = {
    "llama": (lambda: tiny("llama"), {"input_ids", "labels"}),
    "mixtral": (lambda: tiny("mixtral"), {"input_ids", "labels"}),
    "t5": (lambda: hf_t5()[0], {"input_ids", "labels"}),
    "vit": (lambda: hf_vit()[0], {"pixel_values", "labels"}),
    "gpt": (hw.GPT, {"ids", "targets"}),
    "encoder_decoder": (hw.EncoderDecoder, {"source", "target", "labels"}),
    "handwritten_vit": (hw.ViT, {"images", "labels"}),
    "resnet": (hw.ResNet, {"images", "labels"}),
    "mlp": (hw.MLP, {"x", "target"}),
    "autoencoder": (hw.TiedAutoencoder, {"x"}),
    "attention": (hw.QKNormAttention, {"x", "target"}),
}


@pytest.mark.parametrize(("build", "names"), WITHOUT_INPUTS.values(), ids=WITHOUT_INPUTS)
def test_inputs_are_found(build, names):
    model = build()
    sharded = autoshard(model, {"dp": 2})
    assert set(sharded.program.inputs.values()) == names
    assert sharded.program.loss is not None


def test_inputs_found_have_rows_for_every_data_rank():
    assert verify(hw.GPT(layers=1), {"dp": 3}, steps=1).ok


def test_a_tensor_or_a_tuple_is_bound_by_position():
    x, target = hw.vectors(4, 32).values()
    assert list(autoshard(hw.MLP(), ONE, (x, target)).program.inputs.values()) == ["x", "target"]
    assert list(autoshard(hw.TiedAutoencoder(), ONE, x).program.inputs.values()) == ["x"]


def test_constants_are_baked_in():
    class Scaled(hw.MLP):
        def forward(self, x, target, factor=1.0, flag=None):
            return super().forward(x, target) * (factor if flag is None else 0.0)

    model, inputs = Scaled(), hw.vectors(4, 32)
    sharded = autoshard(model, ONE, {**inputs, "factor": 3.0, "flag": None})
    assert torch.equal(sharded(**inputs), model(**inputs, factor=3.0))


def test_a_loss_of_the_callers_own():
    class Head(nn.Linear):
        def forward(self, x, **more):
            assert not more
            return super().forward(x)

    model, inputs = Head(32, 32), hw.vectors(4, 32)
    sharded = autoshard(model, ONE, inputs, loss_fn=lambda y, target: F.mse_loss(y, target))
    want = F.mse_loss(model(inputs["x"]), inputs["target"])
    assert torch.equal(sharded.train_step(**inputs), want.detach())


# --- refusals ---


class NoTensor(hw.MLP):
    def forward(self, x, target):
        super().forward(x, target)
        return {"steps": 3}


class Nested(nn.Linear):
    def forward(self, pair):
        return super().forward(pair[0])


class PythonBranch(hw.MLP):
    def forward(self, x, target):
        return super().forward(x, target if x.mean() > 0 else -target)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(32, 8), nn.Linear(9, 8))

    def forward(self, x):
        return self.parts(x)


X = torch.ones(4, 32)
REFUSED = {
    "no_tensor": (NoTensor, hw.vectors(4, 32), ("NoTensor", "dict", "tensor")),
    "nested": (lambda: Nested(32, 32), {"pair": [X, X]}, ("pair", "list", "own")),
    "branch": (PythonBranch, hw.vectors(4, 32), ("test_capture.py", "x.mean() > 0")),
    "broken": (Broken, X, ("Broken.parts.1", "test_capture.py", "self.parts(x)")),
    "too_few": (hw.MLP, X, ("MLP", "target")),
    "missing": (hw.MLP, {"x": X}, ("MLP", "target")),
    "too_many": (hw.TiedAutoencoder, (X, X), ("2 positional", "forward takes")),
}


@pytest.mark.parametrize(("build", "inputs", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_captured_is_refused_by_name(build, inputs, words):
    with pytest.raises(CaptureError) as error:
        autoshard(build(), {"tp": 2}, example_inputs=inputs)
    assert [w for w in (*words, "why:", "fix:") if w not in str(error.value)] == []


def test_a_branch_on_data_is_named_without_example_inputs_too():
    with pytest.raises(CaptureError, match=r"blocks\.1"):
        autoshard(hw.Branching(), {"tp": 2})


def test_nothing_is_logged_about_a_failure(capfd):
    with pytest.raises(CaptureError):
        autoshard(Broken(), {"tp": 2}, example_inputs=X)
    assert capfd.readouterr().err == ""


OPTIONS = {"microbatches": 4, "schedule": "gpipe"}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_pipelines_have_no_effect_without_pp_and_a_note_says_so(option):
    made = autoshard(hw.MLP(), {"tp": 2}, hw.vectors(4, 32), **{option: OPTIONS[option]})
    assert any("no pp" in note and option in note for note in made.program.notes)


@pytest.mark.parametrize("axis", ["cp"])
def test_mesh_axes_without_a_pass_are_refused_by_name(axis):
    with pytest.raises(ShardingError, match=f"{axis}=2"):
        autoshard(hw.MLP(), {axis: 2}, hw.vectors(4, 32))


def test_unknown_options_are_no_options():
    with pytest.raises(TypeError, match="zeros"):
        autoshard(hw.MLP(), {"tp": 2}, hw.vectors(4, 32), zeros=1)


@pytest.mark.parametrize("method", ["__call__", "train_step"])
def test_a_rank_alone_does_not_run(method):
    inputs = hw.vectors(4, 32)
    with pytest.raises(MeshError, match=r"(?s)dp=2,tp=2.*4 ranks.*world has 1"):
        getattr(autoshard(hw.MLP(), {"dp": 2, "tp": 2}, inputs), method)(**inputs)


# --- the model's own type of output ---


@dataclasses.dataclass
class Pair:
    loss: torch.Tensor
    note: str = "kept"


def returning(make):
    class Model(hw.MLP):
        def forward(self, x, target):
            return make(super().forward(x, target), x)

    return Model()


RETURNED = {
    "tensor": lambda loss, x: loss,
    "tuple": lambda loss, x: (loss, x + 1),
    "list": lambda loss, x: [loss, x + 1],
    "dict": lambda loss, x: {"loss": loss, "nest": (x + 1, {"deep": x + 2})},
    "named_tuple": lambda loss, x: hw.Output(loss, x + 1),
    "transformers": lambda loss, x: transformers.utils.ModelOutput(loss=loss, logits=x + 1),
}


@pytest.mark.parametrize("make", RETURNED.values(), ids=RETURNED)
def test_outputs_keep_their_type(make):
    model, inputs = returning(make), hw.vectors(4, 32)
    sharded = autoshard(model, ONE, inputs)
    got, want = sharded(**inputs), model(**inputs)
    assert type(got) is type(want)
    pairs = [torch.utils._pytree.tree_leaves(o) for o in (got, want)]
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def test_what_is_no_tensor_keeps_its_place():
    inputs = hw.vectors(4, 32)
    assert autoshard(returning(lambda a, x: (None, a, "text")), ONE, inputs)(**inputs)[0] is None
    assert isinstance(autoshard(returning(lambda a, x: Pair(a)), ONE, inputs)(**inputs), Pair)


def test_a_model_may_use_the_names_of_the_module():
    class Names(hw.MLP):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(32))
            self.rank, self.code = nn.Linear(32, 32), nn.Parameter(torch.ones(32))

        def forward(self, x, target):
            return super().forward(self.rank(x) * self.table * self.code, target)

    model, inputs = Names(), hw.vectors(4, 32)
    sharded = autoshard(model, ONE, inputs)
    assert torch.equal(sharded(**inputs), model(**inputs))
    assert sharded.full_state_dict().keys() == model.state_dict().keys()


NAMES = (
    "reducer program rank code tensor running train_step live _reducer _modes _checked _places"
    " _running _source _training _constants"
).split()


def test_a_model_may_use_the_names_of_the_modules_own_state(mesh_of_one):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            for name in NAMES:
                setattr(self, name, nn.Linear(4, 4))

        def forward(self, x):
            for name in NAMES:
                x = torch.relu(x + getattr(self, name)(x))
            return (x**2).mean()

    model, x = Named(), torch.ones(3, 4)
    sharded = autoshard(model, mesh_of_one, {"x": x})
    names = {name for name, _ in model.named_parameters()}
    assert {name for name, _ in sharded.named_parameters()} == names
    assert torch.equal(sharded.train_step(x), model(x).detach())
    assert {n for n, g in sharded.full_gradients().items() if g is not None} == names
    assert torch.equal(sharded.eval()(x), model(x))
    assert torch.equal(sharded.train().train_step(x), model(x).detach())


def test_nothing_is_logged_about_a_batch_of_one_row(capfd):
    autoshard(hw.MLP(), ONE, hw.vectors(1, 32))
    assert capfd.readouterr().err == ""


# --- models on the meta device ---


class Table(nn.Module):
    """A table that only its constructor computes."""

    def __init__(self, width=32, base=10.0):
        super().__init__()
        self.width, self.base = width, base
        self.register_buffer("table", base ** torch.linspace(0, 1, width), persistent=False)


class Tabled(hw.MLP):
    def __init__(self, table):
        super().__init__()
        self.rope = table

    def forward(self, x, target):
        return super().forward(x * self.rope.table, target)


class Forgetful(Table):
    """Does not keep what it was made of."""

    def __init__(self, width=32, base=10.0):
        super().__init__(width, base)
        del self.base


class Refillable(Forgetful):
    def reset_buffers(self):
        self.table.copy_(3.0 ** torch.linspace(0, 1, self.width))


def on_meta(table, **options):
    with torch.device("meta"):
        return Tabled(table(**options))


def test_a_table_is_computed_again_by_its_constructor():
    sharded = autoshard(on_meta(Table, base=7.0), {"tp": 2}, hw.vectors(4, 32)).rank(1)
    assert torch.equal(sharded.rope.table, Table(base=7.0).table)
    assert all(p.is_meta for p in sharded.parameters())


def test_a_table_is_filled_again_by_reset_buffers():
    sharded = autoshard(on_meta(Refillable, base=3.0), {"tp": 2}, hw.vectors(4, 32))
    assert difference(sharded.rope.table, Table(base=3.0).table) == ""


def test_a_table_that_is_lost_is_named():
    with pytest.raises(CaptureError, match=r"(?s)rope\.table.*reset_buffers"):
        autoshard(on_meta(Forgetful), {"tp": 2}, hw.vectors(4, 32))


def test_a_meta_model_is_left_as_it_was():
    model = on_meta(Table)
    before = {id(t) for t in (*model.parameters(), *model.buffers())}
    autoshard(model, {"tp": 2})
    assert {id(t) for t in (*model.parameters(), *model.buffers())} == before


def test_verify_of_a_meta_model():
    with pytest.raises(CaptureError, match="meta"):
        verify(on_meta(Table), {"tp": 2}, hw.vectors(4, 32))


@pytest.fixture
def mesh_of_one():
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20)
    )
    yield dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


BUILDS = {
    "llama": lambda: transformers.LlamaForCausalLM(tiny_config("llama")),
    "resnet": hw.ResNet,
    "gpt": lambda: hw.GPT(tied=True),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_live_rank_makes_its_part_as_the_model_would(mesh_of_one, build):
    real = build().train()
    with torch.device("meta"):
        model = build().train()
    sharded = autoshard(model, mesh_of_one)
    again = autoshard(model, mesh_of_one)
    assert all(p.is_meta for p in model.parameters())
    state, same = sharded.full_state_dict(), again.full_state_dict()
    for name, want in real.state_dict().items():
        got = state[name]
        assert torch.equal(got, same[name]), name
        assert got.shape == want.shape and got.dtype == want.dtype
        if got.is_floating_point() and want.numel() > 200:
            assert 0.7 * want.std() <= got.std() <= 1.3 * want.std(), name
        elif got.is_floating_point() and want.std() == 0:
            assert torch.equal(got, want), name


def test_a_live_rank_does_not_train_on_what_nothing_fills(mesh_of_one):
    with torch.device("meta"):
        model = hw.TiedAutoencoder()
    sharded = autoshard(model, mesh_of_one, {"x": X})
    for call in (lambda: sharded.train_step(x=X), sharded.full_state_dict):
        with pytest.raises(ShardingError, match=r"(?s)weight.*reset_parameters"):
            call()


def test_a_mesh_of_part_of_the_world_is_refused(mesh_of_one, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    with pytest.raises(MeshError, match=r"(?s)1 ranks.*world has 2"):
        autoshard(hw.MLP(), mesh_of_one, hw.vectors(4, 32))


# --- the report of verify ---


def test_a_long_report_is_folded():
    report = verify(hw.GPT(layers=4), {"tp": 2}, hw.tokens(), steps=2)
    text = str(report)
    assert report.ok and len(report.rows) > 150
    assert len(text.splitlines()) < 40 and "x step 1 gradient" in text
    assert f"{len(report.rows)} compared" in text


def test_what_differs_is_never_folded():
    report = verify(hw.GPT(layers=4), {"tp": 2}, hw.tokens(), steps=2)
    wrong = [row for row in report.rows if "gradient blocks" in row.what][:3]
    for row in wrong:
        row.difference = 1.0
    assert [row.what for row in wrong if f"{row.what} " not in str(report)] == []


def test_verify_refuses_random_numbers():
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32))
    with pytest.raises(ShardingError, match="dropout"):
        verify(model, {"dp": 2}, X)
    assert verify(model.eval(), {"dp": 2}, X).ok
