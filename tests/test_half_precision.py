"""What half precision cannot hold is not kept in it; `verify`, in float64, would not see it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard import autoshard
from autoshard.emit import loss_graph
from autoshard.runtime import gather
from autoshard.simulate import simulate
from autoshard.verify import split_batch

ROWS = 5000


class Counting(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.then = then
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        return self.then(self.up(x))


def ranks_of(then, dtype):
    """Every rank's module on dp=2, after one backward, and its loss."""
    x = torch.ones(ROWS, 16, dtype=dtype)
    model = Counting(then).to(dtype)
    with torch.no_grad():
        model.up.weight.zero_()
        model.up.bias.fill_(1.0)
    first = autoshard(model, "dp=2", {"x": x})
    program, ranks = first.program, [first.rank(r) for r in range(2)]
    given = [m.arguments((), split_batch(program, {"x": x}, r)) for r, m in enumerate(ranks)]
    results = simulate(loss_graph(program), program.mesh, given, [m.units for m in ranks])
    torch.autograd.backward([r[0] for r in results])
    return ranks, [r[0].item() for r in results]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("then", "want"),
    [
        (lambda y: y.mean(), 1.0),  # 80,000 numbers: no float16, and no whole bfloat16
        (lambda y: F.mse_loss(y, torch.zeros_like(y)), 1.0),
        (lambda y: (y.float().square().sum() / y.shape[0]).to(y.dtype), 16.0),
    ],
    ids=["mean", "mse", "sum over rows"],
)
def test_counts_are_not_kept_in_half_precision(then, want, dtype):
    for loss in ranks_of(then, dtype)[1]:
        assert abs(loss - want) < 0.01 * want


def test_the_count_of_tokens_is_exact():
    target = torch.zeros(ROWS, dtype=torch.long)
    _, losses = ranks_of(
        lambda y: F.cross_entropy(y.float(), target[: y.shape[0]] * 0).to(y.dtype), torch.bfloat16
    )
    for loss in losses:
        assert abs(loss - torch.tensor(16.0).log().item()) < 0.02


def test_a_norm_whose_square_is_no_half_is_finite():
    ranks, _ = ranks_of(lambda y: y.mean(), torch.float16)
    for module in ranks:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 300.0)
    total = sum(gather.squared_norm(m) for m in ranks).sqrt().item()
    count = sum(p.numel() for module in ranks for p in module.parameters())  # shares of one model
    assert abs(total - 300 * count**0.5) < 0.01 * total
