"""Meshes: ranks, coordinates and the peers that a collective runs over."""

import itertools

import pytest

from autoshard.mesh import MeshSpec, SubMesh

MESHES = [
    SubMesh(MeshSpec(dp=2, tp=4)),
    SubMesh(MeshSpec(dp=3, tp=8), (("tp", (2, 4)),)),
    SubMesh(MeshSpec(pp=2, dp=1, cp=2, tp=4), (("tp", (2, 2)),)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"{m.mesh}")
def test_peers_differ_only_along_the_axes_and_come_in_the_order_of_their_index(mesh):
    ranks = range(mesh.mesh.world_size)
    for count in range(1, len(mesh.axes) + 1):
        for axes in itertools.permutations(mesh.axes, count):
            others = [a for a in (*mesh.axes, "pp") if a not in axes]
            for rank in ranks:
                mine = mesh.coordinate(rank)
                same = [
                    r
                    for r in ranks
                    if all(mesh.coordinate(r).get(a) == mine.get(a) for a in others)
                ]
                want = sorted(same, key=lambda r: mesh.index(r, axes))
                assert mesh.peers(rank, axes) == want
                assert [mesh.index(r, axes) for r in want] == list(range(mesh.size(axes)))


def test_rank_and_coordinate_are_inverse():
    spec = MeshSpec(dp=3, cp=2, tp=4)
    assert [spec.rank(spec.coordinate(r)) for r in range(24)] == list(range(24))
    assert spec.coordinate(23) == {"dp": 2, "cp": 1, "tp": 3}


def test_peers_of_a_large_mesh_need_no_walk_over_its_ranks():
    mesh = SubMesh(MeshSpec(dp=2**40, tp=8))
    assert mesh.peers(8 * 12345 + 3, ("tp",)) == list(range(8 * 12345, 8 * 12345 + 8))
