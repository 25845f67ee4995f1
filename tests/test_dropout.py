"""Dropout: one mask where ranks hold one value, another where they hold different parts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard import autoshard
from autoshard.simulate import simulate
from autoshard.verify import split_batch

P = 0.5


class Dropping(nn.Module):
    """Dropout of a value that tp does not cut, and of one that it does; both come out."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        whole = F.dropout(x, P)
        wide = F.dropout(self.up(x).abs() + 1, P)
        return {"loss": self.down(wide).square().mean(), "whole": whole, "wide": wide}


def masks(mesh: str, seed: int, times: int = 1) -> list[dict[str, torch.Tensor]]:
    """What every rank dropped, in the last of some runs: True where a number was kept."""
    x = torch.ones(8, 64)
    first = autoshard(Dropping(), mesh, {"x": x}, sequence_parallel=False)
    program = first.program
    ranks = [first.rank(r) for r in range(program.mesh.mesh.world_size)]
    given = [m.arguments((), split_batch(program, {"x": x}, r)) for r, m in enumerate(ranks)]
    torch.manual_seed(seed)
    for _ in range(times):
        results = simulate(program.graph, program.mesh, given, [m.units for m in ranks])
    return [
        {name: out != 0 for name, out in zip(program.output_names, result, strict=False)}
        for result in results
    ]


def share(mask: torch.Tensor) -> float:
    return mask.double().mean().item()


def test_masks_are_one_where_a_value_is_one_and_differ_between_the_parts_of_one():
    first, second = masks("tp=2", seed=3)
    assert torch.equal(first["whole"], second["whole"])
    assert torch.equal(first["wide"], second["wide"])  # gathered: both ranks see both parts
    left, right = first["wide"].chunk(2, -1)
    assert not torch.equal(left, right)
    assert abs(share(left == right) - 0.5) < 0.1  # independent, not only different


def test_masks_differ_between_data_ranks():
    first, second = masks("dp=2", seed=3)
    for name in ("whole", "wide"):
        assert abs(share(first[name] == second[name]) - 0.5) < 0.15


def test_masks_on_two_axes():
    ranks = masks("dp=2,tp=2", seed=3)
    for one, other in ((0, 1), (2, 3)):
        assert torch.equal(ranks[one]["whole"], ranks[other]["whole"])
    assert not torch.equal(ranks[0]["whole"], ranks[2]["whole"])
    assert not torch.equal(ranks[0]["wide"], ranks[2]["wide"])


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2", "dp=2,tp=2"])
def test_the_seed_repeats_them_and_another_seed_or_step_does_not(mesh):
    again, other, later = masks(mesh, 3), masks(mesh, 4), masks(mesh, 3, times=2)
    for name in ("whole", "wide"):
        now = [m[name] for m in masks(mesh, 3)]
        assert all(torch.equal(a, b[name]) for a, b in zip(now, again, strict=True))
        assert not any(torch.equal(a, b[name]) for a, b in zip(now, other, strict=True))
        assert not any(torch.equal(a, b[name]) for a, b in zip(now, later, strict=True))


def test_as_many_are_kept_as_on_one_device():
    for rank in masks("dp=2,tp=2", seed=5):
        for name in ("whole", "wide"):
            assert abs(share(rank[name]) - (1 - P)) < 0.1
