"""Not only language models: pictures, two-sided models, fused and shared weights, each proved."""

import handwritten as hw
import pytest
import torch
from transformers import (
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from autoshard import verify

MESHES = {"tp=2": {"tp": 2}, "dp=2,tp=2": {"dp": 2, "tp": 2}}


def hf_vit():
    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    batch = hw.images()
    inputs = {"pixel_values": batch["images"], "labels": batch["labels"]}
    return ViTForImageClassification(config).train(), inputs


def hf_t5():
    config = T5Config(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    batch = hw.translation()
    inputs = {"input_ids": batch["source"], "labels": batch["labels"]}
    return T5ForConditionalGeneration(config).train(), inputs


def autoencoder():
    return hw.TiedAutoencoder(), {"x": hw.vectors(4, 32)["x"]}


MODELS = {
    "vit": lambda: (hw.ViT(), hw.images()),
    "vit_transformers": hf_vit,
    "encoder_decoder": lambda: (hw.EncoderDecoder(), hw.translation()),
    "t5": hf_t5,
    "gpt_fused_qkv": lambda: (hw.GPT(), hw.tokens()),
    "gpt_shift_inside": lambda: (hw.ShiftedGPT(), hw.tokens()),
    "gpt_torch_multihead_attention": lambda: (hw.TorchAttentionGPT(), hw.tokens()),
    "module_called_three_times": lambda: (hw.RecurrentDepthGPT(), hw.tokens()),
    "weight_used_twice": autoencoder,
}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_trains_like_one_device(build, mesh):
    model, inputs = build()
    report = verify(model, mesh, example_inputs=inputs, steps=2)
    assert report.ok, str(report)


@pytest.mark.parametrize("dp", [2, 4])
def test_resnet_with_batch_norm_trains_like_one_device(dp):
    report = verify(hw.ResNet(), {"dp": dp}, example_inputs=hw.images(), steps=2)
    assert report.ok, str(report)


def test_resnet_running_statistics_are_part_of_the_proof():
    model = hw.ResNet()
    text = verify(model, {"dp": 2}, example_inputs=hw.images(), steps=2).table()
    statistics = [n for n, b in model.named_buffers() if b.is_floating_point()]
    assert len(statistics) == 14
    assert [name for name in statistics if name not in text] == []


def test_rows_whose_statistics_differ_are_a_fair_case():
    """Mean over ranks of per-rank variances is not the variance: the pictures must show that."""
    pixels = hw.images()["images"]
    local = torch.stack([half.var() for half in pixels.chunk(2)]).mean()
    assert abs(local - pixels.var()) > 1e-3
