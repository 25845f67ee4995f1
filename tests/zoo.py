"""Tiny, randomly initialised copies of architectures that ship with `transformers`.

`tiny(model_type)` builds the causal LM of that type with every size shrunk, so that a forward and
backward pass takes milliseconds; nothing is downloaded. `batch()` makes token ids and labels whose
rows hold different numbers of real tokens, so that a mean of means shows. A `Case` is what is
tried: an architecture, a mesh and the options of the compiler.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()

#: The 24 architectures that every mesh is tried on.
TYPES = (
    "gpt2 llama mistral qwen3 phi3 bloom opt gptj starcoder2 gemma2 olmo2 stablelm mixtral "
    "qwen3_moe gpt_oss deepseek_v3 bert roberta mamba granite cohere falcon gpt_bigcode glm4"
).split()
#: Those that are also tried with blocks computed again in backward.
RECOMPUTED = ("llama", "gpt2", "mixtral", "bert")
#: Those with mixtures of experts, and of these the ones that can add the loss of their routers.
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
AUXILIARY = MIXTURES[:3]
#: The other causal LMs with experts of transformers 5.24 that the zoo's sizes fit: in how many of
#: their two layers they have some.
OTHER_MIXTURES = {
    **dict.fromkeys(
        """cohere2_moe deepseek_v4 granitemoe granitemoe_swa granitemoehybrid granitemoeshared
        hunyuan_v1_moe inkling2_text jamba jetmoe lara_mini lfm2_moe llama4_text longcat_flash
        mellum minimax minimax_m2 minimax_m3_vl_text olmoe phimoe qwen2_moe qwen3_5_moe_text
        qwen3_next solar_open zaya aria_text flex_olmo inkling_text kolibri1""".split(),
        2,
    ),
    **dict.fromkeys(
        """afmoe axk1 axk2 deepseek_v2 deepseek_v32 dots1 ernie4_5_moe exaone_moe glm4_moe
        glm4_moe_lite glm_moe_dsa hy_v3 hy_v4 laguna mimo_v2_flash nemotron_h sarvam_mla
        sarvam_moe""".split(),
        1,
    ),
}
#: How attention reads the tokens of other ranks of cp.
CONTEXTS = ("ring", "allgather", "ulysses")
#: Those whose tokens cp can cut: not a scan, which takes one token after another.
WITHOUT_SCANS = tuple(kind for kind in TYPES if kind != "mamba")


class Case(NamedTuple):
    kind: str
    mesh: str
    sequence_parallel: bool = True
    zero: int = 0
    recompute: str = "none"
    context: str = "ring"
    auxiliary: bool = False  # with the loss of the routers
    schedule: str = "1f1b"

    @property
    def accumulate(self) -> int:
        """Batches a step: what stages differ in shows with two."""
        return 2 if self.zero else 1

    @property
    def layers(self) -> int:
        """Two but for those whose layers every schedule shares out."""
        return 4 if "pp" in self.mesh and self.kind in PIPELINED else 2

    @property
    def rows(self) -> int:
        """Of the global batch: with pp, every data rank has two or more."""
        ranks = math.prod(int(size) for size in re.findall(r"(?:dp|ep)=(\d+)", self.mesh))
        return max(4, 2 * ranks) if "pp" in self.mesh else 4

    @property
    def microbatches(self) -> int | None:
        """Of one row each where a schedule has them in turn; of two or more where there are data
        ranks, or sums over ranks, too."""
        if "pp" not in self.mesh:
            return None
        return self.rows if self.mesh in ("pp=2", "pp=4") else 2

    def __str__(self) -> str:
        parts = [self.kind, self.mesh, "sp" if self.sequence_parallel else "no_sp"]
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += [self.recompute] if self.recompute != "none" else []
        parts += [self.context] if "cp" in self.mesh else []
        parts += ["auxiliary"] if self.auxiliary else []
        parts += [self.schedule] if "pp" in self.mesh else []
        return "-".join(parts)


#: Meshes that cut experts, and the ZeRO stage on them.
EXPERT_MESHES = (
    ("ep=2", 0),
    ("ep=4", 0),
    ("dp=2,ep=2", 0),
    ("ep=2,tp=2", 0),
    ("cp=2,ep=2", 0),
    ("ep=2", 3),
)

#: Those whose layers every schedule shares out, and on how many ranks each does.
PIPELINED = RECOMPUTED
SCHEDULES = {
    **dict.fromkeys(("gpipe", "1f1b", "zb", "dualpipev"), ("pp=2", "pp=4")),
    "interleaved": ("pp=2",),
}
#: Meshes of stages that other strategies cut, too; and those of them that cut experts.
MIXED_MESHES = ("pp=2,dp=2", "pp=2,tp=2", "pp=2,dp=2,tp=2", "pp=2,cp=2,tp=2")
MIXED_EXPERT_MESHES = ("pp=2,ep=2", "pp=2,dp=2,ep=2,tp=2")


def stages_of_zero(mesh: str) -> tuple[int, ...]:
    """The stages that differ on a mesh: over tp and pp, nothing is shared out."""
    return (0, 1, 2, 3) if re.search("dp|cp|ep", mesh) else (0,)


#: What a config field is set to, where the config has it.
SIZES = {
    # width, depth, vocabulary
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), 128),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    "max_seq_len": 128,
    # feed-forward
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "ffn_hidden_size", "hidden_dim", "d_ff"), 128),
    # attention
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels"), 16),
    "rotary_dim": 8,
    "sliding_window": 64,
    "attention_window": 32,
    # multi-head latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # mixtures of experts
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    "moe_num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"), 1),
    # state spaces
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    "num_groups": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
}

NO_DROPOUT = (
    "activation_dropout",
    "attention_dropout",
    "attention_dropout_prob",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attn_pdrop",
    "classifier_dropout",
    "dropout",
    "dropout_rate",
    "emb_dropout_prob",
    "embd_pdrop",
    "embed_dropout",
    "embedding_dropout",
    "ff_dropout",
    "ffn_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "layerdrop",
    "resid_dropout",
    "resid_pdrop",
    "residual_dropout",
    "summary_first_dropout",
)

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

#: Fields that a type needs on top of SIZES.
EXTRA: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
    "granitemoehybrid": {
        "layer_types": ["attention", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1, "chunk_size": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe_text"),
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "reformer": {"is_decoder": True},
    "zaya": {"num_experts_per_tok": 1},
}


def _shrunk(base: Any, over: dict[str, Any]) -> dict[str, Any]:
    """The fields that ``base`` has, at their small values."""
    want = {}
    for name, value in {**SIZES, **over}.items():
        current = getattr(base, name, None)
        if current is not None and not isinstance(current, (list, dict)):
            want[name] = value
    want.update({k: 0.0 for k in NO_DROPOUT if isinstance(getattr(base, k, None), float)})
    want.update({k: v for k, v in TOKENS.items() if getattr(base, k, None) is not None})
    if "kv_lora_rank" in want:  # multi-head latent attention: one kv head per head, rope part only
        want["num_key_value_heads"] = 4
        if "head_dim" in want:
            want["head_dim"] = 8
    return want


def _settable(cls: type, name: str) -> bool:
    attribute = getattr(cls, name, None)
    return not (isinstance(attribute, property) and attribute.fset is None)


def tiny_config(model_type: str, **over: Any) -> Any:
    """The shrunk config of a type; ``over`` sets fields, ``attn`` the attention implementation."""
    cls = CONFIG_MAPPING[model_type]
    base = cls()
    want = {**_shrunk(base, over), **EXTRA.get(model_type, {})}
    config = cls(**{k: v for k, v in want.items() if _settable(cls, k)})
    config._attn_implementation = over.get("attn") or "sdpa"
    return config


def tiny(model_type: str, seed: int = 0, **over: Any) -> nn.Module:
    """The small causal LM of a type, in training mode, the same weights for the same seed."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **over)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    try:
        model = cls._from_config(config) if hasattr(cls, "_from_config") else cls(config)
    except Exception:  # no fused attention in this type
        config._attn_implementation = "eager"
        model = cls(config)
    return model.train()


def batch(
    vocab: int = 128, b: int = 4, s: int = 32, seed: int = 1, pad: bool = True
) -> dict[str, torch.Tensor]:
    """Ids and labels; with ``pad``, row r hides its first 3 r labels: a mean of means is wrong."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (b, s), generator=g)
    labels = ids.clone()
    if pad:
        for row in range(b):
            labels[row, : 3 * row] = -100
    return {"input_ids": ids, "labels": labels}
