"""Layers on stages: all ranks in this process train like one device, whatever the layers hand on.

What the loss may be, and what micro-batches may read of each other: `test_microbatches.py`.
Processes: `test_pipeline_gloo.py`.
"""

import handwritten as hw
import pytest
import torch
from staged_models import (
    Best,
    Block,
    Chain,
    Counting,
    Halves,
    Headless,
    Normed,
    Routed,
    first_in_all,
    integers_and_masks,
    mean_of_tokens,
    one_block_twice,
    parts_of_one_split,
    rows,
    skips,
    two_values,
    values_and_places,
    written_in_place,
)
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration
from zoo import batch, tiny

from autoshard import autoshard, verify
from autoshard.pipeline import plan_of
from autoshard.program import STAGE, module_path
from autoshard.rules import op_name
from autoshard.schedule import NAMES

ORDERS = [(name, mesh) for name in NAMES for mesh in ("pp=2", "pp=4")]


def proved(model, mesh="pp=2", inputs=None, **options):
    report = verify(model, mesh, example_inputs=rows() if inputs is None else inputs, **options)
    assert report.ok, str(report)
    return report


def compared(report) -> set[str]:
    """The names of the outputs that were held against those of one device."""
    return {row.what.split()[3] for row in report.rows if " output" in row.kind}


# --- what runs where ---


def block_of(node) -> str:
    """The path of a node's module, as far as the number of a block."""
    steps = module_path(node).split(".")
    end = next((i + 1 for i, step in enumerate(steps) if step.isdigit()), len(steps))
    return ".".join(steps[:end]) or "forward"


def told(plan) -> str:
    """A plan as text: of every stage, the modules that it computes, what goes to which stage (by
    op and module), and the ops that run once for all micro-batches."""
    made = {
        node.name: f"{node.meta['origin']} of {block_of(node)}"
        for stage in plan.stages
        for node in stage.body.graph.nodes
        if STAGE in node.meta and node.op == "call_function"
    }
    lines = []
    for at, stage in enumerate(plan.stages):
        computed = [n for n in stage.body.graph.nodes if n.meta.get(STAGE) == at]
        lines.append(f"stage {at}: {', '.join(dict.fromkeys(map(block_of, computed)))}")
        for to, names in stage.sends.items():
            lines.append(f"  to {to}: {', '.join(made[name] for name in names)}")
        for when, piece in (("before", stage.before), ("after", stage.after)):
            ops = [op_name(n.target) for n in piece.graph.nodes if n.op == "call_function"]
            if piece.gives:
                lines.append(f"  {when}: {' '.join(o for o in ops if o != 'sym_size')}")
    starts = made.get(plan.seed, "")
    return "\n".join([*lines, *([f"backward starts at {starts}"] if starts else [])])


def plan_text(model, mesh, inputs, **options) -> str:
    return told(plan_of(autoshard(model, mesh, example_inputs=inputs, **options).program, True))


LLAMA = """
stage 0: model.embed_tokens, model.layers.0
  to 1: add_9 of model.layers.0
stage 1: model.layers.1, model.norm, lm_head, forward
  before: pad slice contiguous mul reshape ne sum to total
  after: total
backward starts at cross_entropy_loss of forward
"""

SKIPS = """
stage 0: blocks.0
  to 1: add of blocks.0
  to 3: add of blocks.0
stage 1: blocks.1
  to 2: add_1 of blocks.1
stage 2: blocks.2, forward
  to 3: add_3 of forward
stage 3: blocks.3, forward, head
  before: ne sum to total all_reduce
  after: total all_reduce
backward starts at cross_entropy_loss of forward
"""


def test_the_plan_of_a_small_llama():
    assert plan_text(tiny("llama"), "pp=2", batch(), stages=LLAMA_STAGES) == LLAMA.strip()


LLAMA_STAGES = "embed,layers.0|layers.1,head"
SKIPS_STAGES = "blocks.0|blocks.1|blocks.2|blocks.3,head"


def test_the_plan_of_skips_over_stages():
    text = plan_text(Chain(skips), "pp=4,dp=2", rows(), stages=SKIPS_STAGES)
    assert text == SKIPS.strip()


def test_results_are_given_where_they_are_made():
    program = autoshard(
        tiny("llama"),
        "pp=2",
        example_inputs={**batch(), "output_hidden_states": True},
        stages=LLAMA_STAGES,
    ).program
    plan = plan_of(program, False)
    at = dict(zip(program.output_names, (plan.made[n] for n in plan.results), strict=False))
    hidden = [at[name] for name in program.output_names if name.startswith("hidden_states")]
    assert hidden == [0, 0, 1] and at["loss"] == at["logits"] == 1
    assert [len(names) for names in plan.stages[0].sends.values()] == [1]  # not for its outputs


# --- schedules ---


@pytest.mark.parametrize(("name", "mesh"), ORDERS)
def test_every_schedule(name, mesh):
    proved(Chain(skips if mesh == "pp=4" else None), mesh, schedule=name, microbatches=4)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_of_stages_and_of_data(name):
    options = {"schedule": name, "microbatches": 2, "accumulate": 2}
    proved(Chain(first_in_all), "pp=2,dp=2", zero=3, recompute="block", **options)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_every_stage_of_zero(zero, recompute):
    model = hw.GPT(tied=True)
    proved(model, "pp=2,dp=2", hw.tokens(), zero=zero, recompute=recompute, accumulate=2)


@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "pp=2,cp=2", "pp=2,dp=2,tp=2"])
def test_micro_batches_stay_when_other_axes_are_cut(mesh):
    report = proved(hw.GPT(), mesh, hw.tokens(), steps=1, microbatches=2)
    assert report.sharded.program.pipeline.microbatches == 2
    assert report.sharded.program.mesh.microbatches


# --- what blocks hand on ---


@pytest.mark.parametrize("mesh", ["pp=2", "pp=4"])
@pytest.mark.parametrize(
    ("body", "block"),
    [
        (skips, Block),
        (first_in_all, Block),
        (integers_and_masks, Block),
        (one_block_twice, Block),
        (parts_of_one_split, Block),
        (written_in_place, Block),
        (two_values, Halves),
        (values_and_places, Best),
    ],
)
def test_what_blocks_hand_on(body, block, mesh):
    proved(Chain(body, block=block), mesh, steps=1, microbatches=4)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_block_that_two_stages_run(zero):
    report = proved(Chain(one_block_twice), "pp=2,dp=2", zero=zero, recompute="block")
    shared = next(p for p in report.sharded.program.values.values() if p.name == "blocks.0.up.bias")
    assert shared.holders == (0, 1)


@pytest.mark.parametrize("body", [skips, values_and_places])
def test_a_part_of_a_result_is_in_the_stage_of_its_op(body):
    model = Chain(body, block=Best if body is values_and_places else Block)
    graph = autoshard(model, "pp=4", example_inputs=rows()).program.graph
    parts = [n for n in graph.nodes if op_name(n.target) == "getitem"]
    assert all(n.meta[STAGE] == n.args[0].meta[STAGE] for n in parts if STAGE in n.meta)


def test_an_encoder_and_a_decoder():
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    config = T5Config(**sizes, num_layers=2, dropout_rate=0.0, decoder_start_token_id=0)
    ids, labels = torch.randint(3, 64, (4, 12)), torch.randint(3, 64, (4, 8))
    labels[1, :3] = -100
    mask = (torch.arange(12) < torch.tensor([[12], [5], [7], [9]])).long()
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    proved(T5ForConditionalGeneration(config), "pp=4", inputs, steps=1, microbatches=2)


# --- outputs ---


def many(m, y, target, x):
    hidden = [x]
    for block in m.blocks:
        hidden.append(block(hidden[-1]))
    return {
        "hidden": tuple(hidden),
        "input": x,
        "ids": target + 1,
        "mask": target > 2,
        "places": torch.arange(4),
        "count": target.to(y.dtype).sum(),
        "right": (y.argmax(-1) == target).sum(),
        "weight": m.blocks[0].up.weight.T,
        "bias": m.blocks[1].up.bias,
        "sum": m.blocks[3].up.weight.sum(),
        "centred": y - y.mean(0),
        "none": None,
        "text": "as it is",
        "number": 3,
    }


@pytest.mark.parametrize("mesh", ["pp=2", "pp=4", "pp=2,dp=2"])
def test_outputs_of_all_kinds(mesh):
    report = proved(Chain(outputs=many), mesh, steps=1, microbatches=4)
    hidden = {f"hidden.{i}" for i in range(5)} | {f"hidden[{i}]" for i in range(5)}
    names = compared(report)
    assert {"y", "input", "ids", "mask", "count", "right", "weight", "bias", "sum", "centred"} <= {
        *names
    }
    assert len(names & hidden) == 5 and "places" in names


def test_a_model_whose_loss_is_a_function():
    def loss(y, target):
        return mean_of_tokens(None, y, target, None)

    proved(Headless(skips), "pp=4", loss_fn=loss, microbatches=4)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_caches_and_hidden_states(kind):
    asked = {"output_hidden_states": True, "use_cache": True}
    report = proved(tiny(kind), "pp=2", {**batch(), **asked}, steps=1, microbatches=2)
    assert len(compared(report)) >= 4


# --- parameters ---


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipev"])
@pytest.mark.parametrize("mesh", ["pp=2", "pp=4"])
def test_tied_weights(mesh, name):
    report = proved(hw.GPT(layers=4, tied=True), mesh, hw.tokens(), steps=1, schedule=name)
    weight = next(p for p in report.sharded.program.values.values() if "head" in str(p.names))
    ends = {"1f1b": (0, -1), "interleaved": (0, -1), "dualpipev": (0,)}[name]  # a V: on one rank
    ranks = report.sharded.program.pipeline.ranks
    assert weight.holders == tuple(at % ranks for at in ends)


@pytest.mark.parametrize("name", ["1f1b", "zb", "dualpipev"])
@pytest.mark.parametrize("parts", ["blocks.0 blocks.1", "blocks", "blocks.3 head", "blocks.1.up"])
def test_frozen_parameters(parts, name):
    model = Chain()
    for part in parts.split():
        model.get_submodule(part).requires_grad_(False)
    proved(model, "pp=2,dp=2", schedule=name, microbatches=2, zero=3)


def test_a_rank_may_have_nothing_to_train():
    model = Chain()
    model.blocks.requires_grad_(False)
    model.scale.requires_grad_(False)  # that nothing reads; the first stage holds it
    report = proved(model, microbatches=2)
    held = list(report.sharded.parameters())  # of rank 0
    assert held and not any(p.requires_grad for p in held)


# --- buffers ---


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb", "dualpipev"])
@pytest.mark.parametrize("block", [Counting, Routed])
def test_buffers_are_written_once_a_step_of_all_micro_batches(block, name):
    report = proved(Chain(block=block), schedule=name, microbatches=4)
    assert any(row.kind == "buffer after the steps" for row in report.rows)


@pytest.mark.parametrize("block", [Counting, Routed])
def test_buffers_on_data_ranks(block):
    proved(Chain(block=block), "pp=2,dp=2", zero=3, accumulate=2)


@pytest.mark.parametrize("first", [True, False], ids=["train first", "eval first"])
def test_training_and_evaluation_have_micro_batches_of_their_own(first):
    model = Chain(block=Normed).train(first)
    module = autoshard(model, "pp=2", example_inputs=rows())
    module.train(not first)
    counts = {mode: m.program.pipeline.microbatches for mode, m in module._modes.items()}
    assert counts == {True: 1, False: None}  # with running statistics, rows are independent


# --- loads of experts ---


def test_the_load_of_experts_is_that_of_all_micro_batches():
    mixture = tiny("mixtral", num_hidden_layers=2)
    loads = [
        proved(mixture, mesh, batch(), steps=1, **options).sharded.expert_load()
        for mesh, options in (("ep=2", {}), ("pp=2,ep=2", {"microbatches": 2}))
    ]
    whole, staged = loads
    assert [load.tokens for load in staged] == [load.tokens for load in whole]
    assert [sum(load.rows) for load in staged] == [sum(load.rows) for load in whole]


# --- rows ---


@pytest.mark.parametrize("name", ["1f1b", "dualpipev"])
@pytest.mark.parametrize(("count", "microbatches"), [(5, 2), (3, 4), (7, None), (9, 4), (2, 2)])
def test_rows_that_micro_batches_do_not_divide(count, microbatches, name):
    proved(Chain(), inputs=rows(count), steps=1, schedule=name, microbatches=microbatches)


def test_no_more_micro_batches_than_rows_are_chosen():
    pipeline = autoshard(Chain(), "pp=2", example_inputs=rows()).program.pipeline
    assert [pipeline.count(n) for n in (1, 2, 6, 7, 8, 16, 12)] == [1, 2, 6, 7, 8, 8, 6]


class Sentences(nn.Module):
    """Rows with different numbers of tokens that count."""

    def __init__(self):
        super().__init__()
        self.words, self.chain = nn.Embedding(50, 8), Chain()

    def forward(self, ids, labels):
        y = self.chain.head(self.chain.body(self.chain, self.words(ids)))
        return nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten()), y


@pytest.mark.parametrize(("mesh", "microbatches"), [("pp=2", 4), ("pp=2,dp=2", 2)])
def test_micro_batches_without_tokens_that_count(mesh, microbatches):
    ids, labels = torch.randint(50, (4, 7)), torch.randint(5, (4, 7))
    labels[:2], labels[2, :5] = -100, -100
    proved(Sentences(), mesh, {"ids": ids, "labels": labels}, microbatches=microbatches)
