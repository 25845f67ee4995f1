"""Architectures of `transformers` on meshes, all ranks in this process, against one device.

Quick: all 24 on ``dp=2,tp=2`` with sequence parallelism and on ``tp=2`` without, and a few cases of
the rest that change every day (``AUTOSHARD_DAY=2026-01-31`` brings a day back). ``--slow`` runs the
full matrix.
"""

import os
import random
from datetime import date

import pytest
from zoo import TYPES, batch, tiny

from autoshard import autoshard, verify
from autoshard.errors import CaptureError, ShardingError

QUICK = [("dp=2,tp=2", True), ("tp=2", False)]
REST = [
    ("tp=2", True),
    ("tp=4", True),
    ("tp=4", False),
    ("dp=4", True),
    ("dp=2,tp=2", False),
]
DENSE_DECODERS = """
gpt2 llama mistral qwen3 phi3 bloom opt gptj starcoder2 gemma2 olmo2 stablelm granite cohere
falcon gpt_bigcode glm4
""".split()
#: The other causal LMs of transformers 5.24 that the zoo's sizes fit: each runs on one device.
OTHERS = """
afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bart beam bert-generation big_bird
bigbird_pegasus biogpt bitnet blenderbot blenderbot-small camembert codegen cohere2 cohere2_moe
cpmant ctrl cwm data2vec-text deepseek_v32 deepseek_v4 diffllama doge dory electra ernie
ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 falcon_mamba flex_olmo flint gemma
gemma3_text glm glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt_neo gpt_neox gpt_neox_japanese
granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense
hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling_text internlm3 iquestcoder jais2 jetmoe kolibri1
laguna lara_mini lfm2 lfm2_moe llama4_text longcat_flash mamba2 marian mbart megatron-bert
mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3
modernbert-decoder moshi mpt mvp nanochat nemotron nemotron_h olmo olmo3 olmo_hybrid olmoe
openai-gpt pegasus persimmon phi phimoe plbart qwen2 qwen2_moe rembert roberta-prelayernorm
roformer rwkv sarvam_mla sarvam_moe seed_oss smollm3 solar_open trocr vaultgemma whisper xglm
xlm xlm-roberta xlm-roberta-xl youtu zaya
""".split()

SLOW = [(kind, mesh, sp) for mesh, sp in REST for kind in TYPES]
DAY = date.fromisoformat(os.environ.get("AUTOSHARD_DAY", date.today().isoformat()))
CHANCE = random.Random(DAY.toordinal())
TODAY = CHANCE.sample(SLOW, 5)
OTHERS_TODAY = CHANCE.sample(OTHERS, 3)


def name_of(case) -> str:
    kind, mesh, sequence_parallel = case
    return f"{kind}-{mesh}-{'sp' if sequence_parallel else 'no_sp'}"


def proved(record, kind: str, mesh: str, sequence_parallel: bool, steps: int = 2) -> None:
    """Agrees with one device; `tests/readme_tables.py` reads what is recorded here."""
    for name, value in (("model", kind), ("mesh", mesh), ("sequence", sequence_parallel)):
        record(name, value)
    report = verify(
        tiny(kind), mesh, example_inputs=batch(), steps=steps, sequence_parallel=sequence_parallel
    )
    record("fallbacks", len(report.sharded.program.fallbacks))
    assert report.ok, str(report)


@pytest.mark.parametrize(("mesh", "sequence_parallel"), QUICK, ids=lambda v: str(v))
@pytest.mark.parametrize("kind", TYPES)
def test_trains_like_one_device(kind, mesh, sequence_parallel, record_property):
    proved(record_property, kind, mesh, sequence_parallel)


@pytest.mark.parametrize("case", TODAY, ids=name_of)
def test_todays_sample_trains_like_one_device(case, record_property):
    proved(record_property, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=name_of)
def test_full_matrix_trains_like_one_device(case, record_property):
    proved(record_property, *case)


@pytest.mark.parametrize("kind", DENSE_DECODERS)
def test_no_fallback_in_a_dense_decoder(kind):
    table = autoshard(tiny(kind), {"tp": 2}, example_inputs=batch()).table("graph")
    assert [line for line in table.splitlines() if "fallback" in line] == []


def works_or_says_why(record, kind: str) -> None:
    try:
        proved(record, kind, "dp=2,tp=2", True, steps=1)
    except (CaptureError, ShardingError) as error:
        text = str(error)
        record("refused", text)
        assert "why:" in text and "fix:" in text  # the message's own parts


@pytest.mark.parametrize("kind", OTHERS_TODAY)
def test_todays_other_models_work_or_say_why(kind, record_property):
    works_or_says_why(record_property, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_work_or_say_why(kind, record_property):
    works_or_says_why(record_property, kind)
