"""What context parallelism gets wrong or refuses, found by trying to break it: for the fixer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard import ShardingError, verify
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


@pytest.mark.xfail(strict=True, reason="the zeros in `runwise` do not depend on x: no fetch_back")
def test_a_rank_without_tokens_goes_backward_through_a_convolution():
    # else the others wait in `_fetch_back` for this one until the timeout: cp=3, two tokens
    x = torch.zeros(4, WIDTH, 0, requires_grad=True)
    link = Link(("cp",), "", 3, 2, zigzag=True)
    weight = torch.randn(WIDTH, WIDTH, 3)
    out = runwise(torch.ops.aten.conv1d.default, link, x, 2, 2, 2, weight=weight, padding=[0])
    assert out.requires_grad


@pytest.mark.xfail(strict=True, raises=ValueError, reason="simulate: `fetch` cats no windows")
@pytest.mark.parametrize("kind", ["convolution", "shift"])
def test_verify_of_fewer_tokens_than_ranks(kind):
    def body(m, x):
        near = m.conv(x.mT).mT if kind == "convolution" else F.pad(x, (0, 0, 1, 0))[:, :-1]
        return m.attend(x + near, causal)

    assert run(body, "cp=4", length=3).ok


@pytest.mark.xfail(strict=True, raises=ShardingError, reason="not recognised as an attention")
@pytest.mark.parametrize(
    "way",
    [
        scores_over_length,
        by_exponentials,
        sinks_in_front,
        grouped_in_five_dimensions,
        zeros_for_rows_without_keys,
        weights_used_twice,
    ],
)
def test_attentions_round_a_ring(way):
    assert run(lambda m, x: m.attend(x, way), "cp=2").ok


@pytest.mark.xfail(
    strict=True,
    raises=ShardingError,
    reason='refused as "the model has no attention", though ring\'s error says to use ulysses',
)
@pytest.mark.parametrize(
    "way", [talking_heads, weights_used_twice, difference_of_two, by_exponentials, heads_one_by_one]
)
def test_ulysses_runs_attention_as_it_is_written(way):
    assert run(lambda m, x: m.attend(x, way), "cp=2", "ulysses").ok


def _prompt(m, x):
    x = torch.cat([m.first.expand(len(x), -1, -1), x], 1)
    return m.attend(x, causal)[:, 3:]


def _start(m, x):
    shifted = torch.cat([m.first[:1].expand(len(x), -1, -1), x[:, :-1]], 1)
    return m.attend(shifted, causal)


@pytest.mark.xfail(strict=True, raises=ShardingError, reason="a join whose end is read is opaque")
@pytest.mark.parametrize("body", [_prompt, _start], ids=["learned prompt", "learned start token"])
def test_tokens_behind_learned_ones(body):
    assert run(body, "cp=2").ok
