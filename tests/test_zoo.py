"""Architectures of `transformers` on meshes, all ranks in this process, against one device.

Quick: all 24 on ``dp=2,tp=2`` with sequence parallelism and ZeRO 3, on ``tp=2`` with neither, and
on ``cp=2,tp=2`` with one of the ways of context parallelism; one with mixtures of experts on each
of the meshes that cut experts; some on stages; and a few cases of the rest that change every day
(``AUTOSHARD_DAY=2026-01-31`` brings a day back). ``--slow`` runs the full matrix. Every case with a
ZeRO stage adds up two batches a step.
"""

import os
import random
from datetime import date

import pytest
from zoo import (
    AUXILIARY,
    CONTEXTS,
    EXPERT_MESHES,
    MIXED_EXPERT_MESHES,
    MIXED_MESHES,
    MIXTURES,
    OTHER_MIXTURES,
    PIPELINED,
    RECOMPUTED,
    SCHEDULES,
    TYPES,
    WITHOUT_SCANS,
    Case,
    batch,
    stages_of_zero,
    tiny,
)

from autoshard import autoshard, verify
from autoshard.errors import CaptureError, ShardingError
from autoshard.runtime.dispatch import to_experts

DATA_MESHES = ("dp=4", "dp=2,tp=2")  # those on which ZeRO has something to share out
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

QUICK = [Case(kind, "dp=2,tp=2", zero=3) for kind in TYPES]
QUICK += [Case(kind, "tp=2", sequence_parallel=False) for kind in TYPES]
WITHOUT_ZERO = [
    Case(kind, mesh, sequence_parallel)
    for mesh, sequence_parallel in (
        ("tp=2", True),
        ("tp=4", True),
        ("tp=4", False),
        ("dp=4", True),
        ("dp=2,tp=2", True),
        ("dp=2,tp=2", False),
    )
    for kind in TYPES
]
WITH_ZERO = [
    Case(kind, mesh, zero=stage) for mesh in DATA_MESHES for stage in (1, 2, 3) for kind in TYPES
]
WITH_ZERO += [
    Case(kind, mesh, zero=3, recompute="block") for mesh in DATA_MESHES for kind in RECOMPUTED
]
WITH_ZERO = [case for case in WITH_ZERO if case not in QUICK]
CONTEXT_MESHES = (("cp=2", 0), ("cp=4", 0), ("cp=2,tp=2", 0), ("dp=2,cp=2", 0), ("cp=2", 3))
CONTEXT = [
    Case(kind, mesh, zero=stage, context=way)
    for mesh, stage in CONTEXT_MESHES
    for way in CONTEXTS
    for kind in TYPES
]
WITH_CONTEXT = [case for case in CONTEXT if case.kind in WITHOUT_SCANS]
SCANS = [case for case in CONTEXT if case.kind not in WITHOUT_SCANS]
QUICK_CONTEXT = [
    Case(kind, "cp=2,tp=2", context=CONTEXTS[at % 3]) for at, kind in enumerate(WITHOUT_SCANS)
]
EXPERTS = [
    Case(kind, mesh, zero=stage, auxiliary=auxiliary)
    for mesh, stage in EXPERT_MESHES
    for auxiliary in (False, True)
    for kind in (AUXILIARY if auxiliary else MIXTURES)
]
QUICK_EXPERTS = [
    Case(MIXTURES[at % 4], mesh, zero=stage, auxiliary=at >= 4)
    for at, (mesh, stage) in enumerate(EXPERT_MESHES)
]
#: Models without experts, whose batch ep cuts as dp does.
WITHOUT_EXPERTS = [
    Case(kind, mesh) for mesh in ("ep=2", "dp=2,ep=2") for kind in TYPES if kind not in MIXTURES
]
PIPELINES = [Case(kind, "pp=2") for kind in TYPES]
PIPELINES += [
    Case(kind, mesh, schedule=schedule)
    for schedule, meshes in SCHEDULES.items()
    for mesh in meshes
    for kind in PIPELINED
]
#: The loss of routers is no sum over micro-batches.
PIPELINES += [Case(kind, "pp=2", auxiliary=True, schedule="gpipe") for kind in AUXILIARY]
PIPELINES += [
    Case(kind, mesh, zero=stage)
    for kinds, meshes in ((TYPES, MIXED_MESHES), (MIXTURES, MIXED_EXPERT_MESHES))
    for mesh in meshes
    for stage in stages_of_zero(mesh)
    for kind in kinds
    if kind in WITHOUT_SCANS or "cp" not in mesh
]
PIPELINES += [Case(kind, "pp=2,dp=2", zero=3, recompute="block") for kind in PIPELINED]
PIPELINES = list(dict.fromkeys(PIPELINES))
QUICK_PIPELINES = [
    Case("llama", "pp=2"),
    Case("gpt2", "pp=4", schedule="zb"),
    Case("bert", "pp=2", schedule="interleaved"),
    Case("llama", "pp=4", schedule="dualpipev"),
    Case("gpt2", "pp=2,dp=2,tp=2", zero=3),
    Case("deepseek_v3", "pp=2,ep=2", zero=3),
]
WITH_PP = [case for case in PIPELINES if case not in QUICK_PIPELINES]
WITH_EP = [case for case in EXPERTS if case not in QUICK_EXPERTS] + WITHOUT_EXPERTS
DAY = date.fromisoformat(os.environ.get("AUTOSHARD_DAY", date.today().isoformat()))
CHANCE = random.Random(DAY.toordinal())
TODAY = CHANCE.sample(WITHOUT_ZERO, 5) + CHANCE.sample(WITH_ZERO, 5)
TODAY += CHANCE.sample([case for case in WITH_CONTEXT if case not in QUICK_CONTEXT], 5)
TODAY += CHANCE.sample(WITH_EP, 3)
TODAY += CHANCE.sample(WITH_PP, 4)


def record_case(record, case: Case) -> None:
    for name, value in case._asdict().items():
        record(name, value)


def proved(record, case: Case, steps: int = 2) -> None:
    """Agrees with one device; `tests/readme_tables.py` reads what is recorded here."""
    record_case(record, case)
    sizes = dict.fromkeys(("num_hidden_layers", "n_layer"), case.layers)
    report = verify(
        tiny(case.kind, **sizes, **({"output_router_logits": True} if case.auxiliary else {})),
        case.mesh,
        example_inputs=batch(b=case.rows),
        steps=steps,
        sequence_parallel=case.sequence_parallel,
        zero=case.zero,
        accumulate=case.accumulate,
        recompute=case.recompute,
        context_parallel=case.context,
        schedule=case.schedule,
        microbatches=case.microbatches,
    )
    program = report.sharded.program
    assert program.pipeline is None or program.pipeline.microbatches == case.microbatches
    record("fallbacks", len(program.fallbacks))
    assert report.ok, str(report)
    if case.kind in (*MIXTURES, *OTHER_MIXTURES) and "ep" in case.mesh:  # not only equal: cut
        sends = [node for node in program.graph.nodes if node.target is to_experts]
        assert len(sends) == OTHER_MIXTURES.get(case.kind, len(sends)) > 0
        assert not program.unfused
    assert not case.auxiliary or "aux_loss" in program.output_names


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_trains_like_one_device(case, record_property):
    proved(record_property, case)


@pytest.mark.parametrize("case", QUICK_CONTEXT, ids=str)
def test_tokens_cut_through_attention_train_like_one_device(case, record_property):
    proved(record_property, case, steps=1)


@pytest.mark.parametrize("case", QUICK_EXPERTS, ids=str)
def test_experts_on_meshes_with_ep_train_like_one_device(case, record_property):
    proved(record_property, case)


@pytest.mark.parametrize("case", QUICK_PIPELINES, ids=str)
def test_layers_on_stages_train_like_one_device(case, record_property):
    proved(record_property, case)


def refused_for_its_scan(record, case: Case) -> None:
    record_case(record, case)
    with pytest.raises(ShardingError, match="scans") as error:
        verify(
            tiny(case.kind),
            case.mesh,
            example_inputs=batch(),
            zero=case.zero,
            context_parallel=case.context,
        )
    text = str(error.value)
    record("refused", text)
    assert "a loop in backbone.layers.0" in text and "why:" in text and "fix:" in text


@pytest.mark.parametrize("case", SCANS[:1], ids=str)
def test_a_scan_over_tokens_is_refused_by_name(case, record_property):
    refused_for_its_scan(record_property, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SCANS[1:], ids=str)
def test_a_scan_is_refused_on_every_mesh(case, record_property):
    refused_for_its_scan(record_property, case)


@pytest.mark.parametrize("case", TODAY, ids=str)
def test_todays_sample_trains_like_one_device(case, record_property):
    proved(record_property, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", WITHOUT_ZERO + WITH_ZERO + WITH_CONTEXT, ids=str)
def test_full_matrix_trains_like_one_device(case, record_property):
    proved(record_property, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", WITH_EP, ids=str)
def test_all_meshes_with_ep_train_like_one_device(case, record_property):
    proved(record_property, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", WITH_PP, ids=str)
def test_all_pipelines_train_like_one_device(case, record_property):
    proved(record_property, case)


@pytest.mark.parametrize("kind", DENSE_DECODERS)
def test_no_fallback_in_a_dense_decoder(kind):
    table = autoshard(tiny(kind), {"tp": 2}, example_inputs=batch()).table("graph")
    assert [line for line in table.splitlines() if "fallback" in line] == []


def works_or_says_why(record, case: Case) -> None:
    try:
        proved(record, case, steps=1)
    except (CaptureError, ShardingError) as error:
        text = str(error)
        record("refused", text)
        assert "why:" in text and "fix:" in text  # the message's own parts


OTHERS_ON = [Case(kind, "dp=2,tp=2", zero=3) for kind in OTHERS]
MIXTURES_ON = [Case(kind, "ep=2") for kind in OTHER_MIXTURES]


@pytest.mark.parametrize(
    "case", CHANCE.sample(OTHERS_ON, 3) + CHANCE.sample(MIXTURES_ON, 2), ids=str
)
def test_todays_other_models_work_or_say_why(case, record_property):
    works_or_says_why(record_property, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS_ON + MIXTURES_ON, ids=str)
def test_other_models_work_or_say_why(case, record_property):
    works_or_says_why(record_property, case)
