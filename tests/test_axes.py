"""The dimensions a model has, seen in what the ranks hold: no layer is known by its name."""

import pytest
import torch
from torch import nn
from zoo import batch, tiny

from autoshard import autoshard, verify

HEAD = 16


def fused_groups(w, half):
    """phi3: four q heads, then two k heads, then two v heads."""
    q, k, v = w.split([64, 32, 32])
    return torch.cat([part.chunk(2)[half] for part in (q, k, v)])


def multi_query(w, half):
    """falcon: four q heads, and one k and one v head for all of them."""
    q, kv = w.split([64, 32])
    return torch.cat([q.chunk(2)[half], kv])


def whole(w, half):
    return w


def chunk(dim, *view):
    """Half of dimension ``dim`` after a view."""
    return lambda w, half: w.view(*(view or w.shape)).chunk(2, dim)[half]


LAYER, H = "model.layers.0.", "transformer.h.0."
EXPECTED = {
    ("llama", LAYER + "self_attn.q_proj.weight"): chunk(0),
    ("llama", LAYER + "self_attn.k_proj.weight"): chunk(0),
    ("llama", LAYER + "self_attn.v_proj.weight"): chunk(0),
    ("llama", LAYER + "self_attn.o_proj.weight"): chunk(1),
    ("llama", LAYER + "mlp.gate_proj.weight"): chunk(0),
    ("llama", LAYER + "mlp.up_proj.weight"): chunk(0),
    ("llama", LAYER + "mlp.down_proj.weight"): chunk(1),
    ("llama", LAYER + "input_layernorm.weight"): whole,
    ("gpt2", H + "attn.c_attn.weight"): chunk(2, 64, 3, 4, HEAD),
    ("gpt2", H + "attn.c_attn.bias"): chunk(1, 3, 4, HEAD),
    ("gpt2", H + "attn.c_proj.weight"): chunk(0),
    ("gpt2", H + "attn.c_proj.bias"): whole,
    ("gpt2", H + "mlp.c_fc.weight"): chunk(1),
    ("gpt2", H + "mlp.c_proj.weight"): chunk(0),
    ("phi3", LAYER + "self_attn.qkv_proj.weight"): fused_groups,
    ("phi3", LAYER + "mlp.gate_up_proj.weight"): chunk(1, 2, 128, 64),
    ("phi3", LAYER + "mlp.down_proj.weight"): chunk(1),
    ("bloom", H + "self_attention.query_key_value.weight"): chunk(0, 4, 3, HEAD, 64),
    ("bloom", H + "self_attention.query_key_value.bias"): chunk(0, 4, 3, HEAD),
    ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight"): chunk(0, 4, 3, HEAD, 64),
    ("falcon", H + "self_attention.query_key_value.weight"): multi_query,
    ("falcon", H + "self_attention.dense.weight"): chunk(1),
    ("mixtral", LAYER + "mlp.experts.gate_up_proj"): chunk(2, 4, 2, 128, 64),
    ("mixtral", LAYER + "mlp.experts.down_proj"): chunk(2),
    ("deepseek_v3", LAYER + "self_attn.q_b_proj.weight"): chunk(0, 4, 24, 32),
    ("deepseek_v3", LAYER + "self_attn.kv_b_proj.weight"): chunk(0, 4, 32, 16),
    ("deepseek_v3", LAYER + "self_attn.o_proj.weight"): chunk(1),
    ("mamba", "backbone.layers.0.mixer.in_proj.weight"): chunk(1, 2, 128, 64),
    ("mamba", "backbone.layers.0.mixer.x_proj.weight"): chunk(1),
    ("mamba", "backbone.layers.0.mixer.A_log"): chunk(0),
    ("mamba", "backbone.layers.0.mixer.out_proj.weight"): chunk(1),
    ("olmo2", LAYER + "self_attn.q_norm.weight"): chunk(0),
    ("olmo2", LAYER + "self_attn.k_norm.weight"): chunk(0),
}
TYPES = list(dict.fromkeys(model_type for model_type, _ in EXPECTED))


@pytest.mark.parametrize("model_type", TYPES)
def test_two_ranks_hold_the_halves_of_the_right_axis(model_type):
    model = tiny(model_type)
    sharded = autoshard(model, {"tp": 2}, example_inputs=batch())
    full, wrong = dict(model.named_parameters()), []
    for half in range(2):
        local = dict(sharded.rank(half).named_parameters())
        for (kind, name), cut in EXPECTED.items():
            if kind != model_type:
                continue
            want, got = cut(full[name], half), local[name]
            if got.numel() != want.numel() or not torch.equal(got.flatten(), want.flatten()):
                wrong.append(f"rank {half}: {name} {tuple(got.shape)}, not {tuple(want.shape)}")
    assert wrong == []


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "deepseek_v3"])
def test_layers_are_cut_alike(model_type):
    model = tiny(model_type, num_hidden_layers=3, n_layer=3)
    sharded = autoshard(model, {"tp": 2}, example_inputs=batch())
    shapes = {name: p.shape for name, p in sharded.named_parameters()}
    pairs = [(n, n.replace(".1.", ".2.", 1)) for n in shapes if ".1." in n]
    assert len(pairs) > 5
    assert [pair for pair in pairs if shapes[pair[0]] != shapes[pair[1]]] == []


def test_the_embedding_width_is_one_axis_and_never_cut():
    sharded = autoshard(tiny("llama"), {"tp": 2}, example_inputs=batch())
    norms = {n: tuple(p.shape) for n, p in sharded.named_parameters() if "norm" in n}
    assert len(norms) == 5 and set(norms.values()) == {(64,)}


def test_an_axis_that_is_two_factors_of_one_dimension_is_not_cut():
    """Halves that are shuffled and added: every factor of two of the width is one axis."""

    class Shuffled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)

        def forward(self, ids):
            x = self.embed(ids)
            x = x + x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
            return self.head(x).square().mean()

    ids = torch.arange(32).view(4, 8) % 24
    report = verify(Shuffled(), "tp=2", {"ids": ids}, sequence_parallel=False)
    assert report.ok, str(report)
