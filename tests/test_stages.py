"""Parts of a program, and their division into pipeline stages.

Costs are held against torch's own count of FLOPs and the bytes that autograd saves; divisions
against all that there are.
"""

import itertools
import random
import time

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from zoo import TYPES, batch, tiny

from autoshard import activations, autoshard
from autoshard.cost import local_numel
from autoshard.errors import ShardingError
from autoshard.flops import work
from autoshard.flow import FLOPS_PER_BYTE, Flow
from autoshard.shapes import interpret
from autoshard.stages import HEADERS, HELD, Part, balanced, crossing, parse, parts, table, write

#: How each architecture calls its list of blocks.
LISTS = {
    **dict.fromkeys("gpt2 bloom gptj falcon gpt_bigcode".split(), "h"),
    **dict.fromkeys("bert roberta".split(), "layer"),
}
QUICK = ("llama", "gpt2", "bert", "olmo2")
EACH = [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in TYPES]


def program(model, mesh="tp=1", inputs=None, **options):
    inputs = batch() if inputs is None else inputs
    return autoshard(model, mesh, example_inputs=inputs, **options).program


def by_parts(program, found):
    """The names of the values that are alive behind each part but the last."""
    each = crossing(program, found, range(len(found)))
    return {part.name: [n.name for n in nodes] for part, nodes in zip(found, each, strict=False)}


def names(found):
    return write(found, [0] * len(found))


# --- parts ---


@pytest.mark.parametrize("kind", EACH)
def test_parts_of_architectures(kind):
    found = program(tiny(kind), "tp=2")
    own = parts(found)
    of = LISTS.get(kind, "layers")
    assert names(own) == f"embed,{of}.0-1,head"
    assert write(own, balanced(own, 2)) == f"embed,{of}.0|{of}.1,head"
    assert balanced(own, 4) == [0, 1, 2, 3]
    # every node is in one part, every parameter counts once, and so does what is saved
    nodes = [n.name for n in found.graph.nodes if n.op != "placeholder"]
    assert [n for part in own for n in part.nodes] == nodes
    held = sum(local_numel(p, found.mesh) * 4 for p in found.parameters().values())
    assert sum(part.parameters for part in own) == held
    assert sum(part.activation for part in own) == activations.forward(found).saved
    # between blocks nothing but the hidden states travel: rows, half of the tokens, width
    assert [part.gives for part in own[1:]] == [4 * 16 * 64 * 4] * 2 + [0]
    assert [len(v) for v in by_parts(found, own).values()][1:] == [1, 1]


def test_deeper_models():
    found = program(tiny("llama", num_hidden_layers=8))
    own = parts(found)
    division = balanced(own, 4)
    assert write(own, division) == "embed,layers.0-1|layers.2-3|layers.4-5|layers.6-7,head"
    assert parse(write(own, division), own, 4) == division
    rows = table(found, own, division)
    assert [len(row) for row in rows] == [len(HEADERS)] * 4
    assert [row[1] for row in rows][1:] == ["layers.2-3", "layers.4-5", "layers.6-7, head"]
    assert [row[-2:] for row in rows] == [[1, 4 * 32 * 64 * 4]] * 3 + [[0, 0]]
    assert sum(float(row[2].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.3)


def small_t5():
    config = T5Config(
        vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2,
        num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).train()


def test_encoder_and_decoder():
    found = program(small_t5())
    own = parts(found)
    assert names(own) == "embed,encoder.block.0-1,encoder.block.tail,decoder.block.0-1,head"
    # two stacks share biases of positions, and the decoder reads what the encoder gives
    assert [len(v) for v in by_parts(found, own).values()] == [1, 2, 1, 2, 3, 1]
    assert balanced(own, 2) == [0, 0, 0, 0, 1, 1, 1]


def test_shared_blocks():
    config = AlbertConfig(
        vocab_size=128, embedding_size=32, hidden_size=64, num_hidden_layers=4,
        num_attention_heads=4, intermediate_size=128, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    own = parts(program(AlbertForMaskedLM(config).train(), "tp=2"))
    assert names(own) == "embed,albert_layer_groups.0,albert_layer_groups.0@1-3,head"
    assert [p.parameters > 0 for p in own] == [True, True, False, False, False, True]
    assert len({p.flops for p in own[1:-1]}) == 1
    assert len({p.segment for p in own[1:-1]}) == 1


class Layers(nn.Module):
    """Blocks that are gone through several times; with ``drop``, one random mask for all."""

    def __init__(self, rounds=1, drop=False):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2))
        self.last = nn.Linear(32, 4)
        self.rounds, self.drop = rounds, drop

    def forward(self, x):
        keep = torch.bernoulli(torch.full((x.shape[0], 32), 0.9)) if self.drop else None
        x = self.first(x)
        for layer in list(self.layers) * self.rounds:
            x = layer(x) if keep is None else layer(x) * keep
        return self.last(x).square().mean()


def test_blocks_that_come_back():
    own = parts(program(Layers(3), inputs=(torch.randn(8, 16),)))
    back = ",".join(f"layers.0@{i},layers.1@{i}" for i in (1, 2))
    assert names(own) == f"embed,layers.0-1,{back},head"


def test_random_draws_travel():
    found = program(Layers(drop=True), inputs=(torch.randn(8, 16),))
    alive = by_parts(found, parts(found))
    assert [len(v) for v in alive.values()] == [2, 2, 2]
    assert len({v[0] for v in alive.values()}) == 1  # the mask, made once


def test_images():
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        image_size=32, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 1, 0])}
    found = program(ViTForImageClassification(config).train(), inputs=images)
    assert names(parts(found)) == "embed,layers.0-1,head"


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
        self.stem = nn.Conv2d(3, 8, 3)
        self.stages = nn.ModuleList(nn.Sequential(*block) for block in blocks)
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.fc(x.mean((2, 3))).square().mean()


def test_updates_of_buffers_stay():
    """Running statistics are not sent to the end of the graph, where they are scaled."""
    found = program(Convolutions(), "tp=2", (torch.randn(4, 3, 16, 16),))
    own = parts(found)
    assert names(own) == "embed,stages.0-2,head"
    assert [len(v) for v in by_parts(found, own).values()] == [1, 1, 1, 1]
    updates = {n.name for n in Flow(found).updates}
    assert updates and not updates.intersection(own[-1].nodes)


def test_experts_and_their_routers():
    """Logits of all routers go to the loss; what experts are sent by is no tensor, and stays."""
    model = tiny("mixtral", output_router_logits=True)
    model.config.output_router_logits = True
    found = program(model, "ep=2")
    own = parts(found)
    assert names(own) == "embed,layers.0-1,head"
    assert [len(v) for v in by_parts(found, own).values()] == [1, 2, 3]
    values = dict(interpret(found))
    fine = parts(found, 10)
    assert len(fine) >= 10 and "layers.0.mlp.experts" in [p.name for p in fine]
    for alive in crossing(found, fine, range(len(fine))):
        assert all(isinstance(values[node], torch.Tensor) for node in alive)


def test_gathered_weights_and_recomputed_blocks():
    found = program(tiny("llama"), "dp=2", zero=3, recompute="block")
    own = parts(found)
    assert names(own) == "embed,layers.0-1,head"
    assert [len(v) for v in by_parts(found, own).values()] == [1, 1, 1]
    held = sum(local_numel(p, found.mesh) * 4 for p in found.parameters().values())
    assert sum(part.parameters for part in own) == held
    # a block keeps its inputs only
    cosines_and_sines = 2 * 32 * 16 * 4
    assert own[1].activation == own[0].gives + cosines_and_sines
    assert own[2].activation == own[1].gives


# --- models without blocks, or with few ---


class Plain(nn.Module):
    """No modules inside; at the third product two values are alive."""

    def __init__(self):
        super().__init__()
        shapes = {"a": (16, 32), "b": (32, 4), "c": (32, 4)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        h = torch.relu(x @ self.a)
        return ((h @ self.b) * (h @ self.c)).mean()


class Wrapped(nn.Module):
    """A list that is one part of a list."""

    def __init__(self):
        super().__init__()
        inner = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
        self.parts = nn.Sequential(nn.Linear(16, 32), inner, nn.Linear(32, 4))

    def forward(self, x):
        return self.parts(x).square().mean()


ROW = (torch.randn(8, 16),)


def test_linears_in_a_row():
    layers = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    own = parts(program(nn.Sequential(*layers), inputs=ROW))
    assert names(own) == "0,2,4"


def test_children_that_are_no_list():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, x):
            return self.head(torch.relu(self.encoder(x))).square().mean()

    own = parts(program(Model(), inputs=ROW))
    assert names(own) == "encoder,head"


def test_a_list_inside_a_list():
    own = parts(program(Wrapped(), inputs=ROW))
    assert names(own) == "parts.0,parts.1.0-3,parts.2"


def test_one_module():
    found = program(Plain(), inputs=ROW)
    assert names(parts(found)) == "matmul_default,matmul_default_1"
    assert names(parts(found, 3)) == "matmul_default,matmul_default_1-2"
    with pytest.raises(ShardingError) as error:
        parts(found, 4)
    text = str(error.value)
    assert "Plain: 3 parts (matmul_default, matmul_default_1-2), 4 stages" in text
    assert "at most 3 stages" in text


def test_more_stages_than_blocks():
    own = parts(program(tiny("llama")), 5)
    inside = ",".join(f"layers.{i}.self_attn,layers.{i}.mlp" for i in (0, 1))
    assert names(own) == f"embed_tokens,{inside},lm_head"


# --- costs ---


@pytest.mark.parametrize("kind", ["mlp", "images"])
def test_flops_are_those_that_torch_counts(kind):
    layers = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)
    model, inputs = {
        "mlp": (nn.Sequential(*layers), ROW),
        "images": (Convolutions(), (torch.randn(4, 3, 16, 16),)),
    }[kind]
    counted = sum(w.flops for w in work(program(model, inputs=inputs)).values())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs)
    assert counted == counter.get_total_flops() > 0


def test_flops_of_attention_and_experts():
    b, s, width, ffn, experts, k, heads, head = 4, 32, 64, 128, 4, 2, 4, 16
    found = program(tiny("mixtral"), "ep=2")
    flow = Flow(found)
    layer = set(parts(found)[1].nodes)
    own = sum(flow.work[n].flops for n in flow.nodes if n.name in layer)
    projections = 2 * b * s * width * head * (2 * heads + 2 * 2)
    attention = 2 * b * heads * (2 * head) * s * (s + 1) // 2
    router = 2 * b * s * width * experts
    rows = b * s * k  # of two ranks, with half of the experts each
    assert own == projections + attention + router + 2 * rows * 3 * width * ffn


def test_a_lookup_is_cheap_and_a_norm_not_free():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.norm = nn.Embedding(1000, 32), nn.LayerNorm(32)
            self.out = nn.Linear(32, 1000)

        def forward(self, ids):
            return self.out(self.norm(self.table(ids))).square().mean()

    flow = Flow(program(Model(), inputs=(torch.zeros(4, 8, dtype=torch.long),)))
    cost = {n.name: flow.cost(n) for n in flow.nodes}
    row = 4 * 8 * 32 * 4
    assert cost["embedding_default"] == FLOPS_PER_BYTE * 2 * row  # what it reads of the table
    assert cost["linear_default"] == 2 * 4 * 8 * 32 * 1000
    # the input, two vectors of the norm's own, the result, and a mean and deviation of each row
    assert cost["layer_norm_default"] == FLOPS_PER_BYTE * (2 * row + 2 * 32 * 4 + 2 * 4 * 8 * 4)


class Selecting(nn.Module):
    """Four experts, each with the rows that are its own: how many they are the data tell."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Linear(16, 32), nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        h = self.first(x)
        chosen, out = self.gate(h).argmax(-1), torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == i)[:, 0]
            out = out.index_add(0, rows, torch.relu(expert(h[rows])))
        return out.square().mean()


def test_sizes_that_depend_on_data():
    found = program(Selecting(), inputs=(torch.randn(64, 16),))
    known = work(found)
    flops = [w.flops for w in known.values() if w.flops]
    assert flops == [2 * 64 * 16 * 32, 2 * 64 * 32 * 4, *[2 * 16 * 32 * 32] * 4]
    assert activations.forward(found) is None
    own = parts(found)
    assert sum(p.activation for p in own) == sum(
        known[n].made // 2 for n in found.graph.nodes if n in known and Flow(found).computes(n)
    )
    assert set(balanced(own, 2)) == {0, 1}


# --- balance ---


def part(name, flops=1, parameters=0, activation=0, gives=0):
    return Part(name, 0, flops, parameters, activation, gives)


def key(own, stage_of, stages):
    """What a division is judged by: time, memory, bytes sent, and how unequal times are."""
    groups = [[p for p, s in zip(own, stage_of, strict=True) if s == i] for i in range(stages)]
    times = [sum(p.flops for p in group) for group in groups]
    memory = [
        sum(HELD * p.parameters + (stages - i) * p.activation for p in group)
        for i, group in enumerate(groups)
    ]
    return max(times), max(memory), sum(g[-1].gives for g in groups), sum(t * t for t in times)


def divisions(count, stages):
    for ends in itertools.combinations(range(1, count), stages - 1):
        yield [sum(end <= at for end in ends) for at in range(count)]


@pytest.mark.parametrize("seed", range(40))
def test_best_of_all_divisions(seed):
    draw = random.Random(seed)
    most = draw.choice([3, 100])  # few numbers: many ties
    own = [
        part(f"p{i}", *(draw.randint(0, most) for _ in range(4))) for i in range(draw.randint(2, 9))
    ]
    stages, ratio = draw.randint(1, len(own)), draw.choice([1.0, 1.05, 1.5])
    keys = [key(own, each, stages) for each in divisions(len(own), stages)]
    within = ratio * min(time for time, *_ in keys)
    best = min((k for k in keys if k[0] <= within), key=lambda k: k[1:])
    found = balanced(own, stages, ratio=ratio)
    assert sorted(set(found)) == list(range(stages)) and found == sorted(found)
    assert key(own, found, stages)[1:] == best[1:]
    assert key(own, found, stages)[0] <= within


def test_a_heavy_head_takes_fewer_blocks():
    blocks = [part(f"layers.{i}", 10) for i in range(12)]
    own = [part("embed", 0), *blocks, part("head", 20)]
    assert write(own, balanced(own, 2)) == "embed,layers.0-6|layers.7-11,head"


def test_memory_decides_among_equals():
    """The first stage keeps most micro-batches: it gives a block away where that costs nothing."""
    own = [part(f"layers.{i}", 100, 10, 1000) for i in range(3)]
    assert balanced(own, 2) == [0, 1, 1]


def test_many_parts_are_quick():
    draw = random.Random(0)
    own = [
        part(f"layers.{i}", *(draw.randint(10**12, 10**13) for _ in range(4))) for i in range(130)
    ]
    start = time.perf_counter()
    balanced(own, 16)
    balanced(own, 2)
    assert time.perf_counter() - start < 0.5  # a few milliseconds, and room for a busy machine


def test_fewer_parts_than_stages():
    with pytest.raises(ShardingError, match=r"2 parts \(embed, head\): 3 stages"):
        balanced([part("embed"), part("head")], 3)


# --- text ---

OWN = [part(n) for n in ["embed", *(f"layers.{i}" for i in range(12)), "layers.tail", "head"]]


@pytest.mark.parametrize(
    "text",
    [
        "embed,layers.0-3|layers.4-7|layers.8-11,layers.tail,head",
        "embed|layers.0|layers.1-11,layers.tail|head",
        "embed,layers.0-11,layers.tail,head",
    ],
)
def test_text_and_back(text):
    assert write(OWN, parse(text, OWN)) == text
    assert parse(text.replace(",", " , ").replace("|", "\n|\n"), OWN) == parse(text, OWN)


def test_names_that_come_again():
    own = [part(n) for n in ("a.0", "a.0@1", "a.0@2", "a.0@3", "head")]
    text = "a.0,a.0@1|a.0@2-3,head"
    assert parse(text, own) == [0, 0, 1, 1, 1]
    assert write(own, [0, 0, 1, 1, 1]) == text


@pytest.mark.parametrize(
    "text, said",
    [
        ("embed,layers.0-11|layers.tail,haed", ["no part haed", "in no stage: head"]),
        ("embed,layers.0-13|layers.tail,head", ["no part layers.12-13 (in layers.0-13)"]),
        ("embed,layers.0-4|layers.6-11,layers.tail,head", ["in no stage: layers.5"]),
        ("embed,layers.0-5|layers.5-11,layers.tail,head", ["named more than once: layers.5"]),
        ("embed,layers.0-11,layers.tail,head|", ["stage 1 is empty"]),
        ("embed,layers.0-11,layers.tail,head", ["1 stage, and the mesh has 2"]),
        (
            "layers.0-11|embed,layers.tail,head",
            ["out of order: layers.0 (stage 0) comes behind embed (stage 1) in the model"],
        ),
        (
            "layers.4-1||layers.0-2,x,layers.2|embed",
            [
                "4 stages, and the mesh has 2",
                "no part layers.4-1",
                "stage 1 is empty",
                "no part x",
                "named more than once: layers.2",
                "in no stage: layers.3-11, layers.tail, head",
                "layers.0 (stage 2) comes behind embed (stage 3)",
            ],
        ),
    ],
)
def test_wrong_texts_are_refused(text, said):
    with pytest.raises(ShardingError) as error:
        parse(text, OWN, 2)
    message = str(error.value)
    assert [part for part in said if part not in message] == []
    assert "which is embed, layers.0-11, layers.tail, head" in message
    assert f"write for example {write(OWN, balanced(OWN, 2))!r}" in message
