"""fuse_attention: every way to write an attention becomes one op that computes the same."""

import math

import pytest
import torch
import torch.nn.functional as F
from compare import differences
from torch import nn
from zoo import batch, tiny

from autoshard.attention import Attention, attend
from autoshard.capture import capture
from autoshard.chain import run
from autoshard.mesh import MeshSpec
from autoshard.program import Program, copied
from autoshard.rules import op_name
from passes.canonicalize import Canonicalize
from passes.fuse_attention import FuseAttention
from passes.infer_axes import InferAxes


def evaluated(spec: Attention, q, k, v, sinks, vectors) -> torch.Tensor:
    """What ``attend`` stands for, on one device."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
    scores = spec.scale * (q @ k.transpose(-2, -1))
    if spec.score is not None:
        for vector, (queries, keys) in zip(vectors, spec.varies, strict=True):
            assert vector.ndim == 4
            assert vector.shape[2] in ((scores.shape[2],) if queries else (1,))
            assert vector.shape[3] in ((scores.shape[3],) if keys else (1,))
        scores = in_blocks(spec.score, scores, vectors, spec.varies)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    if spec.causal or not spec.ahead:
        scores = scores.masked_fill(later, -torch.inf)
    if spec.sinks:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1, dtype=spec.dtype)
    weights = weights[..., :-1] if spec.sinks else weights
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = weights.masked_fill(empty, 0.0)
    return weights.to(v.dtype) @ v


def in_blocks(score, products, vectors, varies) -> torch.Tensor:
    """Four blocks of unequal sizes, each computed by itself."""

    def part(x, rows, columns, queries=True, keys=True):
        x = x[..., rows, :] if queries else x
        return x[..., columns] if keys else x

    rows, columns = (max(1, s // 3) for s in products.shape[-2:])
    out = []
    for r in (slice(0, rows), slice(rows, None)):
        blocks = []
        for c in (slice(0, columns), slice(columns, None)):
            given = [part(x, r, c, *each) for x, each in zip(vectors, varies, strict=True)]
            blocks.append(score(part(products, r, c), *given))
        out.append(torch.cat(blocks, -1))
    return torch.cat(out, -2)


def outputs(program: Program, model, given) -> dict[str, torch.Tensor]:
    """The graph's results and the gradients of their sum, weighted."""
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    args = []
    for node in nodes:
        if node.name in program.values:
            args.append(program.values[node.name].value)
        else:
            args.append(given[program.inputs[node.name]])
    model.zero_grad()
    results = program.graph_module(*args)
    out = {f"result {i}": r for i, r in enumerate(results) if isinstance(r, torch.Tensor)}
    floats = [r for r in out.values() if r.is_floating_point()]
    weights = [torch.linspace(1, 2, r.numel()).view(r.shape).to(r.dtype) for r in floats]
    sum((r * w).sum() for r, w in zip(floats, weights, strict=True)).backward()
    out.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return {n: t.detach() for n, t in out.items()}


def captured(model, example=None) -> Program:
    return run(capture(model, MeshSpec(cp=2), example, raise_precision=True)[0], [Canonicalize()])


def fused(model, example=None, given=None) -> Program:
    """The fused program, of which is shown that it computes what it was made of."""
    model = model.double()
    program = captured(model, example)
    before = copied(program)
    for node in before.graph.nodes:  # fused attention in float64 has another layout than was seen
        if op_name(node.target) == "view":
            node.target = torch.ops.aten.reshape.default
    before.graph_module.recompile()
    program = run(program, [FuseAttention(), InferAxes()])
    given = given or example or batch()
    want = outputs(before, model, given)
    for node in program.graph.nodes:
        if node.target is attend:
            node.target = lambda q, k, v, sinks, vectors, key: evaluated(
                program.attentions[key], q, k, v, sinks, vectors
            )
            node.meta["attends"] = True
    program.graph_module.recompile()
    assert differences(outputs(program, model, given), want) == {}
    return program


def attentions(program: Program) -> list[Attention]:
    """What each attention of the graph computes, in order."""
    return [program.attentions[n.args[5]] for n in program.graph.nodes if "attends" in n.meta]


def vectors(program: Program) -> list[tuple[bool, bool]]:
    return [pair for spec in attentions(program) for pair in spec.varies]


def quadratic(program: Program) -> list[str]:
    """Values of the outer graph that are as large as queries times keys."""
    found = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node.op == "call_function":
            symbols = [str(s) for s in value.shape if not isinstance(s, int)]
            if len(set(symbols)) < len(symbols):
                found.append(node.name)
    return found


def weights_of_keys(program: Program) -> list[str]:
    """Softmaxes over a dimension of dynamic size, and fused attentions that are left."""
    return [
        n.name
        for n in program.graph.nodes
        if op_name(n.target) == "scaled_dot_product_attention"
        or (op_name(n.target).endswith("softmax") and not isinstance(n.meta["val"].shape[-1], int))
    ]


def all_fused(program: Program, count: int = 2) -> list[Attention]:
    assert len(attentions(program)) == count
    assert weights_of_keys(program) == []
    assert quadratic(program) == []
    return attentions(program)


#: Causal models, and how many heads of keys there are for four of queries.
CAUSAL = {
    **{"gpt2": 4, "llama": 2, "deepseek_v3": 4, "falcon": 1, "opt": 4, "gpt_bigcode": 1},
    "gpt_neo": 4,
}


def heads(program: Program) -> list[list[int]]:
    """Of queries, keys and values, of each attention."""
    nodes = [n for n in program.graph.nodes if "attends" in n.meta]
    return [[o.meta["val"].shape[1] for o in n.args[:3]] for n in nodes]


@pytest.mark.parametrize(("kind", "keys"), CAUSAL.items())
def test_causal_attention_is_causal_and_nothing_else(kind, keys):
    program = fused(tiny(kind))
    for spec in all_fused(program):
        assert spec.causal and not spec.ahead and spec.score is None
    assert heads(program) == [[4, keys, keys]] * 2


def test_attention_written_out_is_the_same_as_fused():
    for spec in all_fused(fused(tiny("llama", attn="eager"))):
        assert spec.causal and not spec.ahead and spec.score is None


def test_bert_is_full():
    for spec in all_fused(fused(tiny("bert"))):
        assert not spec.causal and spec.ahead and spec.score is None


def test_a_window_is_a_comparison_of_positions():
    for spec in all_fused(fused(tiny("mistral", sliding_window=8))):
        assert not spec.causal and not spec.ahead and spec.score is not None
        assert spec.varies == ((False, True), (True, False), (True, False))


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_alibi(kind):
    for spec in all_fused(fused(tiny(kind))):
        assert spec.score is not None and not spec.ahead


def test_softcap():
    for spec in all_fused(fused(tiny("gemma2", sliding_window=8))):
        assert spec.score is not None and not spec.ahead and spec.scale != 1


def test_sinks():
    for spec in all_fused(fused(tiny("gpt_oss", sliding_window=8))):
        assert spec.sinks and not spec.ahead


# masks that are given


def padded(left: bool) -> dict[str, torch.Tensor]:
    given = batch(pad=False)
    mask = torch.ones_like(given["input_ids"])
    for row in range(len(mask)):
        mask[row, slice(0, 3 * row) if left else slice(len(mask[0]) - 3 * row, None)] = 0
    return {**given, "attention_mask": mask}


@pytest.mark.parametrize(
    ("kind", "ahead", "left"),
    [
        ("llama", False, False),
        ("gemma2", True, True),
        ("bloom", True, False),
        ("bert", True, False),
    ],
)
def test_padding_is_a_vector_of_keys(kind, ahead, left):
    """Where masked scores are finite, rows of nothing but padding are spread over later keys."""
    program = fused(tiny(kind), padded(left))
    for spec in all_fused(program):
        assert spec.ahead == ahead and spec.score is not None
        assert (False, True) in spec.varies and (True, True) not in spec.varies


class Mixer(nn.Module):
    """An embedding, heads of queries, keys and values, and some attention of them."""

    def __init__(self, attention, heads=4, width=32, **parameters):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, 64)
        self.heads, self.attention = heads, attention
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, ids, **more):
        x = self.embed(ids)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.heads:
            q, k, v = map(self.split, (q, k, v))
        y = self.attention(self, q, k, v, **more)
        y = y.transpose(1, 2).flatten(2) if self.heads else y
        return self.out(y)


class Documents(Mixer):
    def forward(self, ids, documents):
        return super().forward(ids, documents=documents)


class Masked(Mixer):
    def forward(self, ids, mask):
        return super().forward(ids, mask=mask)


def ids(b=4, s=24):
    return torch.randint(0, 64, (b, s), generator=torch.Generator().manual_seed(3))


def tokens():
    return {"ids": ids()}


def scores(q, k):
    return (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])


def lower(self, q, k, v):
    size = q.shape[-2]
    mask = torch.tril(torch.ones(size, size)) == 0
    return F.softmax(scores(q, k).masked_fill(mask, -torch.inf), -1) @ v


def upper(self, q, k, v):
    size = q.shape[-2]
    mask = torch.full((size, size), -torch.inf, dtype=q.dtype).triu(1)
    return torch.softmax(scores(q, k) + mask, -1) @ v


def by_einsum(self, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    at = torch.arange(q.shape[1])
    s = torch.einsum("bihd,bjhd->bhij", q, k) * 0.25
    s = torch.where(at[:, None] >= at, s, torch.finfo(s.dtype).min)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v).transpose(1, 2)


def folded(self, q, k, v):
    b, h, s, d = q.shape
    q, k, v = (x.reshape(b * h, s, d) for x in (q, k, v))
    at = torch.arange(s)
    s_ = torch.bmm(q, k.transpose(1, 2)).view(b, h, s, s) + torch.where(
        at <= at[:, None], 0.0, -torch.inf
    )
    weights = torch.softmax(s_.view(b * h, s, s), -1)
    return torch.bmm(weights, v).view(b, h, s, d)


def scaled(self, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


@pytest.mark.parametrize("attention", [lower, upper, by_einsum, folded, scaled])
@pytest.mark.parametrize("heads", [4, 0])
def test_causal_attention_by_hand(attention, heads):
    if not heads and attention in (by_einsum, folded):
        pytest.skip("written for heads")
    (spec,) = all_fused(fused(Mixer(attention, heads), tokens()), 1)
    assert spec.causal and not spec.ahead and spec.score is None
    assert spec.scale == (1.0 if attention is folded else pytest.approx(spec.scale))


def interleaved(self, q, k, v):
    k, v = (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def grouped(self, q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


def in_turn(self, q, k, v):
    k, v = (x[:, :2].repeat(1, 2, 1, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def keys_only(self, q, k, v):
    k = k[:, :2, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
    return F.scaled_dot_product_attention(q, k, v)


def one_head_of_keys(self, q, k, v):
    return F.softmax(scores(q, k[:, :1]), -1) @ v


@pytest.mark.parametrize(
    ("attention", "keys"),
    [(interleaved, 2), (grouped, 2), (in_turn, 4), (keys_only, 4), (one_head_of_keys, 4)],
)
def test_repeated_heads_are_left_out_where_their_order_is_right(attention, keys):
    program = fused(Mixer(attention), tokens())
    assert heads(program) == [[4, keys, keys]]
    (spec,) = all_fused(program, 1)
    assert not spec.causal and spec.ahead and spec.score is None


def test_one_window_by_triangles():
    def window(self, q, k, v):
        size = q.shape[-2]
        mask = torch.ones(size, size, dtype=torch.bool).tril().triu(-3)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    (spec,) = all_fused(fused(Mixer(window), tokens()), 1)
    assert not spec.causal and not spec.ahead


def same_document(self, q, k, v, documents):
    at = torch.arange(q.shape[-2])
    mask = (documents[:, None, :, None] == documents[:, None, None, :]) & (at <= at[:, None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def same_document_finite(self, q, k, v, documents):
    at = torch.arange(q.shape[-2])
    mask = (documents[:, :, None] == documents[:, None, :]) & (at <= at[:, None])
    bias = (1.0 - mask[:, None].to(q.dtype)) * torch.finfo(q.dtype).min
    return torch.softmax(scores(q, k) + bias, -1) @ v


@pytest.mark.parametrize("attention", [same_document, same_document_finite])
def test_packed_documents(attention):
    documents = torch.arange(24).div(7, rounding_mode="floor").expand(4, -1).contiguous()
    given = {"ids": ids(), "documents": documents}
    (spec,) = all_fused(fused(Documents(attention), given), 1)
    assert spec.ahead == (attention is same_document_finite)
    assert sorted(spec.varies) == [(False, True), (False, True), (True, False), (True, False)]


def test_a_mask_that_is_given_whole_stays():
    def attention(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    mask = torch.rand(4, 1, 24, 24, generator=torch.Generator().manual_seed(0)) > 0.3
    program = fused(Masked(attention), {"ids": ids(), "mask": mask})
    (spec,) = attentions(program)
    assert spec.varies == ((True, True),) and spec.ahead
    assert quadratic(program) == []  # the input itself is the vector


def test_rows_of_which_everything_is_masked():
    def attention(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    mask = torch.ones(4, 1, 1, 24, dtype=torch.bool)
    mask[1] = False
    program = fused(Masked(attention), {"ids": ids(), "mask": mask})
    assert all_fused(program, 1)[0].varies == ((False, True),)


def test_a_learned_bias_and_its_gradient():
    def attention(self, q, k, v):
        at = torch.arange(q.shape[-2])
        far = (at[:, None] - at).clamp(-7, 7) + 7
        bias = self.bias[far].permute(2, 0, 1)[None]
        bias = bias + torch.where(at <= at[:, None], 0.0, torch.finfo(torch.float32).min)
        return F.softmax((q @ k.mT + bias).float(), -1).type_as(q) @ v

    program = fused(Mixer(attention, bias=torch.randn(15, 4)), tokens())
    (spec,) = attentions(program)
    assert not spec.ahead and (True, True) in spec.varies


def test_dropout_of_the_weights_is_kept():
    def attention(self, q, k, v):
        return F.dropout(F.softmax(scores(q, k), -1), 0.25, self.training) @ v

    program = run(captured(Mixer(attention).double(), tokens()), [FuseAttention(), InferAxes()])
    (spec,) = program.attentions.values()
    assert spec.dropout == 0.25
    (node,) = (n for n in program.graph.nodes if n.target is attend)
    assert program.typings[node].random


class Cross(nn.Module):
    """Attention of one sequence to another, as long."""

    def __init__(self, causal: bool):
        super().__init__()
        self.embed, self.out, self.causal = nn.Embedding(64, 32), nn.Linear(32, 64), causal

    def forward(self, ids, other):
        q, k = (self.embed(x).unflatten(-1, (4, 8)).transpose(1, 2) for x in (ids, other))
        s = scores(q, k)
        if self.causal:
            s = s + torch.full((q.shape[2], k.shape[2]), -torch.inf, dtype=s.dtype).triu(1)
        return self.out((F.softmax(s, -1) @ k).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_to_another_sequence(causal):
    given = {"ids": ids(), "other": ids().flip(1)}
    program = fused(Cross(causal), given)
    (spec,) = attentions(program)
    assert weights_of_keys(program) == [] and spec.causal == causal


def weights_returned(self, q, k, v):
    weights = F.softmax(scores(q, k), -1)
    return weights @ v + weights.sum()


def two_products(self, q, k, v):
    return F.softmax(scores(q, k) + q @ v.mT, -1) @ v


def over_queries(self, q, k, v):
    return F.softmax(scores(q, k), -2) @ v


@pytest.mark.parametrize("attention", [weights_returned, two_products, over_queries])
def test_other_structures_are_left_alone(attention):
    program = fused(Mixer(attention), tokens())
    assert attentions(program) == [] and program.attentions == {}


def test_encoder_and_decoder_of_t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1}
    config = T5Config(
        **sizes, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0
    )
    given = {"input_ids": ids(), "labels": ids()}
    program = fused(T5ForConditionalGeneration(config).train(), given)
    encoder, decoder, cross = attentions(program)
    assert weights_of_keys(program) == []
    assert (True, True) in encoder.varies and encoder.ahead
    assert not decoder.ahead
    assert cross.ahead and (True, True) not in cross.varies
