"""Context parallelism: what was found by trying to break it, and by reading."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard import ShardingError, autoshard, verify
from autoshard.collectives import Link, runwise

WIDTH, HEADS, VOCAB = 16, 4, 50


class Model(nn.Module):
    """A language model of one layer that is ``body(self, x)``; the loss is of its last tokens."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.mix = nn.Parameter(torch.randn(HEADS, HEADS))
        self.first = nn.Parameter(torch.randn(3, WIDTH))
        self.sink = nn.Parameter(torch.randn(HEADS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, labels):
        x = self.body(self, self.tokens(ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def attend(self, x, way):
        q, k, v = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        return x + self.o(way(self, q, k, v).transpose(1, 2).flatten(2))


def causal(m, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def scores_over_length(m, q, k, v):
    return (q @ k.mT / q.shape[2]).softmax(-1) @ v


def by_exponentials(m, q, k, v):
    a = q @ k.mT
    e = (a - a.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True) @ v


def sinks_in_front(m, q, k, v):
    a = q @ k.mT
    sink = m.sink.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
    return torch.cat([sink, a], -1).softmax(-1)[..., 1:] @ v


def grouped_in_five_dimensions(m, q, k, v):
    q, k, v = q.unflatten(1, (2, 2)), k[:, :2], v[:, :2]
    a = torch.einsum("bghid,bgjd->bghij", q, k).softmax(-1)
    return torch.einsum("bghij,bgjd->bghid", a, v).flatten(1, 2)


def talking_heads(m, q, k, v):
    return torch.einsum("bhij,hg->bgij", q @ k.mT, m.mix).softmax(-1) @ v


def weights_used_twice(m, q, k, v):
    w = (q @ k.mT).softmax(-1)
    return w @ v + w @ k


def difference_of_two(m, q, k, v):
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return ((q1 @ k1.mT).softmax(-1) - 0.3 * (q2 @ k2.mT).softmax(-1)) @ v


def zeros_for_rows_without_keys(m, q, k, v):
    return torch.nan_to_num((q @ k.mT).softmax(-1)) @ v


def heads_one_by_one(m, q, k, v):
    return torch.stack([causal(m, q[:, i], k[:, i], v[:, i]) for i in range(HEADS)], 1)


def run(body, mesh, way="ring", length=13):
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (4, length))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    return verify(Model(body), mesh, example_inputs=batch, context_parallel=way, steps=1)


def test_a_rank_without_tokens_goes_backward_through_a_convolution():
    # else the others wait in `_fetch_back` for this one until the timeout: cp=3, two tokens
    x = torch.zeros(4, WIDTH, 0, requires_grad=True)
    link = Link(("cp",), "", 3, 2, zigzag=True)
    weight = torch.randn(WIDTH, WIDTH, 3)
    out = runwise(torch.ops.aten.conv1d.default, link, x, 2, 2, 2, weight=weight, padding=[0])
    assert out.requires_grad


@pytest.mark.parametrize("kind", ["convolution", "shift"])
def test_verify_of_fewer_tokens_than_ranks(kind):
    def body(m, x):
        near = m.conv(x.mT).mT if kind == "convolution" else F.pad(x, (0, 0, 1, 0))[:, :-1]
        return m.attend(x + near, causal)

    assert run(body, "cp=4", length=3).ok


def test_a_softmax_without_the_numbers_of_empty_rows():
    assert run(lambda m, x: m.attend(x, zeros_for_rows_without_keys), "cp=2").ok


WRITTEN_OTHERWISE = [by_exponentials, weights_used_twice, talking_heads, difference_of_two]


@pytest.mark.parametrize("way", WRITTEN_OTHERWISE)
def test_attention_of_other_forms_runs_as_it_is_written_with_heads_cut(way):
    assert run(lambda m, x: m.attend(x, way), "cp=2", "ulysses").ok
    with pytest.raises(
        ShardingError, match='none of the forms.*\n.*use context_parallel="ulysses"'
    ):
        run(lambda m, x: m.attend(x, way), "cp=2", "ring")


OUTSIDE = [scores_over_length, sinks_in_front, grouped_in_five_dimensions]


@pytest.mark.parametrize("way", OUTSIDE)
def test_scores_that_are_not_recognised_are_refused_by_name(way):
    with pytest.raises(ShardingError, match="none of the forms|joins other tokens"):
        run(lambda m, x: m.attend(x, way), "cp=2", "ring")


def test_heads_in_a_loop_have_none_to_cut():
    assert run(lambda m, x: m.attend(x, heads_one_by_one), "cp=2", "ring").ok
    with pytest.raises(ShardingError, match='heads.*\n.*\n.*"ring"'):
        run(lambda m, x: m.attend(x, heads_one_by_one), "cp=2", "ulysses")


def _prompt(m, x):
    x = torch.cat([m.first.expand(len(x), -1, -1), x], 1)
    return m.attend(x, causal)[:, 3:]


def _start(m, x):
    shifted = torch.cat([m.first[:1].expand(len(x), -1, -1), x[:, :-1]], 1)
    return m.attend(shifted, causal)


@pytest.mark.parametrize("body", [_prompt, _start], ids=["learned prompt", "learned start token"])
def test_tokens_behind_learned_ones_are_refused_by_name(body):
    with pytest.raises(ShardingError, match="joins other tokens to it"):
        run(body, "cp=2")


# --- which mesh axes may cut the queries ---


class Attention(nn.Module):
    def __init__(self, heads=HEADS, causal=True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.heads > 1:
            q, k, v = (n.unflatten(-1, (self.heads, -1)).transpose(1, 2) for n in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.o(y.transpose(1, 2).flatten(2) if self.heads > 1 else y)


class Patches(nn.Module):
    """Tokens that are height times width."""

    def __init__(self):
        super().__init__()
        self.cut, self.attention = nn.Conv2d(3, WIDTH, 4, 4), Attention(causal=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images, labels):
        x = self.attention(self.cut(images).flatten(2).transpose(1, 2))
        return F.cross_entropy(self.head(x.mean(1)), labels)


@pytest.mark.parametrize("mode", ["ring", "allgather", "ulysses"])
def test_queries_of_several_dimensions_are_refused_by_name(mode):
    inputs = {"images": torch.randn(4, 3, 8, 12), "labels": torch.randint(5, (4,))}
    with pytest.raises(
        ShardingError, match=r"several dimensions in one|no dimension of the inputs"
    ):
        verify(Patches(), "cp=2", example_inputs=inputs, context_parallel=mode)


class Stack(nn.Module):
    def __init__(self, *attentions):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.attentions = nn.ModuleList(attentions)

    def forward(self, ids, labels):
        x = self.tokens(ids)
        for attention in self.attentions:
            x = attention(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def ids(length=12):
    g = torch.Generator().manual_seed(1)
    drawn = torch.randint(VOCAB, (4, length), generator=g)
    return {"ids": drawn, "labels": drawn.roll(-1, 1)}


@pytest.mark.parametrize("causal", [True, False])
def test_cp_is_factored_only_as_far_as_all_attentions_have_heads(causal):
    model = Stack(Attention(2, causal), Attention(2, causal))
    report = verify(model, "cp=4", example_inputs=ids(10), steps=1, context_parallel="ulysses")
    assert report.ok, str(report)
    model = Stack(Attention(2, causal), Attention(1, causal))
    with pytest.raises(ShardingError, match="heads"):
        verify(model, "cp=4", example_inputs=ids(10), steps=1, context_parallel="ulysses")


class Span(nn.Module):
    """The classes of the loss are the tokens themselves."""

    def __init__(self):
        super().__init__()
        self.tokens, self.attention = nn.Embedding(VOCAB, WIDTH), Attention()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids, start):
        return F.cross_entropy(self.head(self.attention(self.tokens(ids))).squeeze(-1), start)


@pytest.mark.parametrize("mesh", ["cp=2", "cp=4"])
def test_a_loss_over_tokens_in_zigzag_order(mesh):
    inputs = {"ids": ids(13)["ids"], "start": torch.tensor([0, 5, 11, 12])}
    report = verify(Span(), mesh, example_inputs=inputs, steps=1)
    assert report.ok, str(report)


def test_compiling_draws_nothing_from_the_callers_random_numbers():
    def windowed(m, q, k, v):
        at = torch.arange(q.shape[2])
        near = (at[:, None] - at[None, :]).abs() < 3
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near)

    model = Model(lambda m, x: m.attend(x, windowed))
    before = torch.get_rng_state()
    autoshard(model, "cp=2", ids())
    assert torch.equal(before, torch.get_rng_state())


def test_tp_counts_the_gather_in_front_of_what_moves_along_its_axis():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(66, WIDTH)

        def forward(self, x):
            return self.down(F.pad(self.up(x), (1, 1)))

    axes = autoshard(Padded(), "tp=2", {"x": torch.randn(4, WIDTH)}).table("axes")
    found = [line for line in str(axes).splitlines() if "FLOPs saved per byte" in line]
    assert all(int(line.split(" FLOPs")[0].split()[-1]) < 1000 for line in found), axes
