"""What context parallelism sends and holds: the published bytes, no more, and nothing as large as
the scores."""

from functools import cache
from itertools import product

import context_traffic as jobs
import handwritten as hw
import pytest
import sympy
import torch
from test_gloo import each, ranks_of
from zoo import batch, tiny

from autoshard import autoshard
from autoshard.activations import predicted
from autoshard.attention import Attention
from autoshard.collectives import CONVERSIONS, Link, _shared, most_rows
from autoshard.cost import WIRE, conversion_bytes
from autoshard.emit import loss_graph
from autoshard.program import Conversion
from autoshard.report import BATCH, SEQUENCE, attention_table, step_collectives
from autoshard.runtime.attention import pairs
from autoshard.shapes import interpret

MODES = ("ring", "allgather", "ulysses")
#: What attention sends in each, forward and backward.
KINDS = {
    "ring": ("ring",),
    "allgather": ("all_gather", "reduce_scatter"),
    "ulysses": ("all_to_all",),
}
LAYERS, WIDTH, ITEMSIZE = 2, 64, 4
#: The zoo's decoders without experts, and those with.
DENSE = (
    "llama gpt2 bloom mistral qwen3 phi3 opt gptj starcoder2 gemma2 olmo2 stablelm granite cohere "
    "falcon gpt_bigcode glm4"
).split()
#: Of those, where all queries share one head of keys, which is gathered as there is none to cut.
ONE_HEAD = ("falcon", "gpt_bigcode")
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
#: Those that are tried in every run.
QUICK = DENSE[:3]
HEADS = {"4 on 2": {}, "8 on 2": {"num_attention_heads": 8, "head_dim": 8}}
POSITIONS = dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 4096)


@cache
def sharded(name: str, mesh: str, mode: str, heads: str = "4 on 2"):
    model = tiny(name, **HEADS[heads], **POSITIONS)
    return autoshard(model, mesh, batch(), zero=0, context_parallel=mode)


def often(names, quick=QUICK):
    """Cases of decoders, all but a few marked as slow."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


# --- bytes ---


def of_a_layer(module) -> dict[tuple[str, str], object]:
    """Bytes that a rank sends over cp for one layer, by when and kind; the loss left out."""
    found: dict = {}
    for c in step_collectives(module.program):
        if c.axes.startswith("cp") and c.kind != "all_reduce":
            found[c.when, c.kind] = found.get((c.when, c.kind), 0) + c.bytes / LAYERS
    return found


def of_keys(cp: int, tp: int, heads: str):
    """What a rank sends of the whole sequence's keys and values: (n-1)/n of them, two heads."""
    width = 2 * HEADS[heads].get("head_dim", 16)
    whole = 2 * BATCH * SEQUENCE * width * ITEMSIZE / tp
    return sympy.Rational(cp - 1, cp) * whole


MESHES = {"cp=2": (2, 1), "cp=4": (4, 1), "cp=2,tp=2": (2, 2)}


@pytest.mark.parametrize(("mesh", "heads"), list(product(MESHES, HEADS)))
def test_a_ring_sends_keys_and_values_and_back_their_gradients_too(mesh, heads):
    """(n-1)/n of K and V forward, twice that in backward (Liu et al. 2023)."""
    whole = of_keys(*MESHES[mesh], heads)
    assert of_a_layer(sharded("llama", mesh, "ring", heads)) == {
        ("forward", "ring"): whole,
        ("backward", "ring_back"): 2 * whole,
    }


@pytest.mark.parametrize(("mesh", "heads"), list(product(MESHES, HEADS)))
def test_gathered_keys_are_sent_once_each_way(mesh, heads):
    whole = of_keys(*MESHES[mesh], heads)
    assert of_a_layer(sharded("llama", mesh, "allgather", heads)) == {
        ("forward", "all_gather"): whole,
        ("backward", "reduce_scatter"): whole,
    }


@pytest.mark.parametrize("heads", HEADS)
def test_heads_in_place_of_tokens_take_four_all_to_alls_each_way(heads):
    """(n-1)/n of a rank's part of q, k, v and the result (Jacobs et al. 2023)."""
    module = sharded("llama", "cp=2", "ulysses", heads)
    q = BATCH * SEQUENCE / 2 * WIDTH * ITEMSIZE
    keys = of_keys(2, 1, heads) * 2 / 2  # of both, a half is here
    each_way = (2 * q + keys) / 2
    assert of_a_layer(module) == {
        (when, "all_to_all"): each_way for when in ("forward", "backward")
    }
    counts = [c.count for c in step_collectives(module.program) if c.kind == "all_to_all"]
    assert sum(counts) == 2 * 4 * LAYERS


def test_where_keys_have_too_few_heads_ranks_share_groups_of_queries():
    """A half of cp exchanges heads, and keys travel round the other; or keys are gathered."""
    module = sharded("llama", "cp=4", "ulysses")
    q, keys = BATCH * SEQUENCE / 4 * WIDTH * ITEMSIZE, of_keys(4, 1, "4 on 2") / 3
    travelling = keys  # (n-1)/n over two ranks, of a half of the heads of the whole sequence
    assert of_a_layer(module) == {
        ("forward", "all_to_all"): (2 * q + keys) / 2,
        ("backward", "all_to_all"): (2 * q + keys) / 2,
        ("forward", "ring"): travelling,
        ("backward", "ring_back"): 2 * travelling,
    }
    gathered = sharded("llama", "cp=2,tp=2", "ulysses")  # one head of keys is left by tp
    whole, q = of_keys(2, 2, "4 on 2"), BATCH * SEQUENCE / 4 * WIDTH * ITEMSIZE
    assert of_a_layer(gathered) == {
        ("forward", "all_to_all"): q,
        ("backward", "all_to_all"): q,
        ("forward", "all_gather"): whole,
        ("backward", "reduce_scatter"): whole,
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", often(DENSE))
def test_nothing_else_travels_along_tokens(name, mode):
    """Of a decoder without experts: what attention sends, and two numbers of the loss."""
    program = sharded(name, "cp=2", mode).program
    known = {c.node: c for c in program.conversions}
    kinds = {KINDS[mode][0]}
    if mode == "ulysses" and name in ONE_HEAD:
        kinds.add("all_gather")
    loss = attention = 0
    for node in loss_graph(program).nodes:
        conversion = known.get(node.name)
        if conversion is None or conversion_bytes(conversion, program.mesh) == (0, 0):
            continue
        if WIRE[conversion.kind][0] == "all_reduce":
            assert conversion.numel == 1, conversion
            loss += 1
        else:
            assert WIRE[conversion.kind][0] in kinds, conversion
            attention += 1
    each = {"ring": 1, "allgather": 2, "ulysses": 4}[mode]
    assert (loss, attention) == (2, each * LAYERS)


@pytest.mark.parametrize(("itemsize", "times"), [(2, 3), (4, 2), (8, 2)])
def test_gradients_on_a_ring_are_float32_at_least(itemsize, times):
    module = sharded("llama", "cp=2", "ring")
    about = ("ring_attention", "a", "b", ("cp",), "attend", 100, itemsize, True)
    ahead, back = conversion_bytes(Conversion(*about), module.program.mesh)
    assert (ahead, back) == (100 * itemsize, times * 100 * itemsize)


def test_no_halo_is_larger_than_is_said():
    """Over pieces in both orders, windows that reach ahead or not, and results of other sizes."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    tight = 0
    for _ in range(2000):
        ranks, zigzag, size = draw(2, 5), bool(draw(0, 2)), draw(1, 60)
        sizes = size, max(1, size + draw(-6, 7) * draw(0, 2))
        before = draw(-6, 13)
        reach = 0, before, draw(-before, 13)
        links = [Link((), "", ranks, i, zigzag) for i in range(ranks)]
        most = most_rows(ranks, zigzag, reach[1:], sizes)
        for i, link in enumerate(links):
            others = [r for r in range(ranks) if r != i]
            out = sum(n for r in others for *_, n in _shared(link, i, r, reach, sizes))
            back = sum(n for r in others for *_, n in _shared(link, r, i, reach, sizes))
            assert max(out, back) <= most, (ranks, zigzag, sizes, reach)
            tight += out == most > 0
    assert tight > 500


# --- shapes ---


def grown(program, length: int) -> dict[str, tuple[int, ...]]:
    """The local shape of every tensor of the graph for a sequence of this length."""
    rows, tokens = program.hints
    found = {}
    for node, value in interpret(program, {rows: 2, tokens: length}):
        if isinstance(value, torch.Tensor):
            found[node.name] = tuple(value.shape)
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", often((*DENSE, *EXPERTS), (*QUICK, "mixtral")))
def test_nothing_is_as_large_as_the_scores(name, mode):
    """No tensor of a causal decoder has two dimensions that grow with the sequence."""
    program = sharded(name, "cp=2", mode).program
    length, times = 1009, 3
    short, long = (grown(program, n) for n in (length, times * length))
    assert set(short) == set(long) and len(short) > 60
    for node, shape in short.items():
        ratios = [b / max(a, 1) for a, b in zip(shape, long[node], strict=True)]
        growing = [r for r in ratios if r > 1]
        assert len(growing) <= 1 and max(growing, default=0) < times + 0.1, (node, shape)
    assert any(length // 2 < max(shape, default=0) for shape in short.values())


def test_layers_share_the_pieces_of_tables_that_they_read():
    """Those of RoPE and of inputs are cut once, whatever the depth."""
    counts = []
    for layers in (1, 3):
        model = tiny("llama", num_hidden_layers=layers)
        graph = autoshard(model, "cp=2", batch(), zero=0).program.graph
        counts.append(sum(CONVERSIONS.get(n.target) == "shard" for n in graph.nodes))
    assert counts[0] == counts[1] > 0


# --- balance ---


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_in_zigzag_order_ranks_have_equal_work(cp):
    causal = Attention(1.0, causal=True, ahead=False)
    for zigzag, most in ((True, 1), (False, (2 * cp - 1) / cp)):
        links = [Link(("cp",), "", cp, i, zigzag) for i in range(cp)]
        work = [pairs(causal, link, 4096, 4096) for link in links]
        assert sum(work) == 4096 * 4097 // 2
        assert max(work) * cp / sum(work) == pytest.approx(most, rel=0.01)
        assert (max(work) - min(work) < 0.01 * max(work)) == zigzag


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_table_of_attentions_tells_the_order_and_the_work(cp):
    from passes import chain

    for balance in (True, False):
        module = autoshard(
            hw.GPT(layers=1),
            {"cp": cp},
            example_inputs=hw.tokens(s=512),
            passes=chain(balance=balance, zero=0),
        )
        made = attention_table(module.program)
        (found,) = (dict(zip(made.headers, row, strict=True)) for row in made.rows)
        words = "zigzag" if balance else "contiguous: the last rank reads most"
        factor = 1 if balance else (2 * cp - 1) / cp
        assert found["tokens"] == words and found["mask"] == "causal"
        assert float(found["most/mean"]) == pytest.approx(factor, abs=0.011)
        assert (found["most"] < 1.01 * found["FLOPs, least"]) == balance


# --- on processes ---


def bytes_sent(mesh, *about):
    return jobs.sent(mesh, *about)


def saved(mesh, *about):
    return jobs.saved(mesh, *about)


EIGHT = HEADS["8 on 2"]
LENGTH = 512
pair = ranks_of(
    {"cp": 2},
    {mode: (bytes_sent, torch.float32, mode, {}) for mode in MODES}
    | {f"{mode} eight": (bytes_sent, torch.float32, mode, EIGHT) for mode in MODES}
    | {"ring half": (bytes_sent, torch.bfloat16, "ring", {})},
)
four = ranks_of({"cp": 4}, {mode: (saved, mode, LENGTH) for mode in MODES})


@pytest.mark.parametrize("job", [*MODES, *(f"{mode} eight" for mode in MODES), "ring half"])
def test_processes_send_what_the_table_counts(pair, job):
    for got in each(pair, job):
        assert got["sent"] == got["table"]
        assert set(got["sent"]) == {*KINDS[job.split()[0]], "all_reduce"}  # those of the loss


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_saves_its_part_of_the_activations(four, mode):
    """A quarter over four ranks. Gathered keys and values stay whole, and where heads are cut in
    place of tokens, the result is kept in both cuts."""
    given = batch(b=2, s=LENGTH)
    model = tiny("llama", **jobs.LONG)
    alone, part = (
        autoshard(model, f"cp={n}", given, zero=0, context_parallel=mode).program for n in (1, 4)
    )
    whole, expected = (int(predicted(p).saved.subs(p.hints)) for p in (alone, part))
    part_of_one = given["input_ids"].numel() * WIDTH * ITEMSIZE * LAYERS // 4
    kept = {"ring": 0, "allgather": 2 * 3 * part_of_one, "ulysses": part_of_one}[mode]
    for got in each(four, mode):
        print(f"{mode}: {got:,} of {whole:,} bytes are saved, {got / whole:.4f}")
        assert got == expected
        assert (got - kept) / whole == pytest.approx(0.25, rel=0.05)
