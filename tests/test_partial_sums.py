"""Ops on summands: what is linear may wait for the sum, nothing else may."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard import verify


class Small(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.then = then
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def hidden(self, x):
        return torch.sigmoid(self.up(x))

    def forward(self, x):
        return self.then(self, x)


def squared(y):
    return (y * y).mean()


CASES = {
    "a product with itself": lambda m, x: squared(m.down(m.hidden(x))),
    "matmul with itself": lambda m, x: (lambda y: (y.mT @ y).mean())(m.down(m.hidden(x))),
    "einsum with itself": lambda m, x: (lambda y: torch.einsum("bsi,bsj->bij", y, y).mean())(
        m.down(m.hidden(x))
    ),
    "over the samples, squared": lambda m, x: squared(m.down(m.hidden(x)).sum(0)),
    "as divisor": lambda m, x: (m.scale / m.hidden(x).sum(-1)).mean(),
    "as divisor, over the samples": lambda m, x: (m.scale / m.hidden(x).sum(0)).mean(),
    "divided and rounded": lambda m, x: (
        m.hidden(x).sum(-1).div(0.3, rounding_mode="floor").mean() + m.hidden(x).mean()
    ),
    "plus a size": lambda m, x: squared(m.hidden(x).sum(0) + x.shape[1]),
    "plus a number": lambda m, x: squared(m.hidden(x).sum(0) + 1.5),
    "made an integer": lambda m, x: m.hidden(x).sum(0).to(torch.int64).sum() * m.scale,
    "made a truth": lambda m, x: (m.hidden(x).sum(0) - 2).bool().sum() * m.scale,
    "variance of all": lambda m, x: m.hidden(x).var(unbiased=False),
    "deviation of all": lambda m, x: m.hidden(x).std(),
    "variance of the features": lambda m, x: m.hidden(x).var(-1, keepdim=True).mean(),
    "deviation over the samples": lambda m, x: m.hidden(x).std((0, 1), correction=0).sum(),
    "smooth l1": lambda m, x: F.smooth_l1_loss(m.down(m.hidden(x)), x, beta=0.1),
    "huber": lambda m, x: F.huber_loss(m.down(m.hidden(x)), x, delta=0.1),
    "nll": lambda m, x: F.nll_loss(
        F.log_softmax(m.down(m.hidden(x)).flatten(0, 1), -1), x.argmax(-1).flatten()
    ),
    "squeezed": lambda m, x: m.down(m.hidden(x))[:, :1].squeeze().softmax(-1).square().mean(),
    "split in two, squeezed": lambda m, x: squared(
        m.hidden(x).unflatten(-1, (2, 16)).squeeze(2).sum(-1)
    ),
    "pooled without a batch dimension": lambda m, x: squared(
        F.max_pool1d(m.hidden(x).flatten(0, 1), 2)
    ),
}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(case, mesh, sequence_parallel):
    given = {"x": torch.randn(2 if case == "squeezed" else 4, 6, 8)}
    report = verify(
        Small(CASES[case]),
        mesh,
        example_inputs=given,
        steps=1,
        sequence_parallel=sequence_parallel,
    )
    assert report.ok, str(report)


@pytest.mark.parametrize(("rows", "ranks"), [(9, 4), (10, 4), (17, 8), (5, 4)])
def test_no_rank_is_left_without_a_piece(rows, ranks):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(rows, 16), nn.Linear(16, rows)

        def forward(self, ids):
            return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())

    report = verify(Words(), {"tp": ranks}, {"ids": torch.randint(rows, (4, 6))}, steps=1)
    assert report.ok, str(report)
