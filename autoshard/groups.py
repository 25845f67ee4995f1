"""Groups of ranks along mesh axes, and which of them reach over nodes."""

from __future__ import annotations

import itertools

from autoshard.errors import MeshError, message
from autoshard.mesh import SubMesh

#: A list of groups, and a group's runs of ranks, are shown no longer than this.
SHOWN = 4


def groups(mesh: SubMesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Every set of ranks that differ only along these axes or sub-axes, in ascending order.

    Also of an axis that layouts do not see, as pp: only its name has to be one of the mesh.

    >>> groups(SubMesh(MeshSpec(dp=2, tp=2)), ("dp",))
    [[0, 2], [1, 3]]
    """
    along = {part for a in axes for part in ([p for p, _ in mesh.parts(a)] or [a])}
    found: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in range(mesh.mesh.world_size):
        whole = {n: i for n, i in mesh.mesh.coordinate(rank).items() if not mesh.parts(n)}
        position = whole | mesh.coordinate(rank)
        others = tuple((n, i) for n, i in position.items() if n not in along)
        found.setdefault(others, []).append(rank)
    return list(found.values())


def listed(found: list[list[int]]) -> str:
    """Groups as text: ``0-3; 4-7`` or ``0 4; 1 5; …``."""
    shown = "; ".join(_runs(group) for group in found[:SHOWN])
    return shown + ("; …" if len(found) > SHOWN else "")


def _runs(ranks: list[int]) -> str:
    runs: list[str] = []
    for _, run in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        own = [rank for _, rank in run]
        runs += [f"{own[0]}-{own[-1]}"] if len(own) > 2 else map(str, own)
    if len(runs) > SHOWN:
        runs = [*runs[: SHOWN - 1], "…", runs[-1]]
    return " ".join(runs)


def crosses(found: list[list[int]], ranks_per_node: int) -> str:
    """Whether groups have ranks of several nodes: yes, no, or of some of them. Node n holds the
    ranks from n times ``ranks_per_node`` on, as torchrun numbers them."""
    over = [group[0] // ranks_per_node != group[-1] // ranks_per_node for group in found]
    return "yes" if all(over) else "some" if any(over) else "no"


def warning(mesh: SubMesh, ranks_per_node: int) -> str:
    """One line where tp or ep is over several nodes, else nothing. These send within every layer,
    and ranks wait for it. Ranks grow fastest along them, so no outer axis stays inside of nodes
    where they do not: what helps is a mesh of which both fit."""
    spec = mesh.mesh
    blocks = {"tp": spec.size("tp"), "ep": spec.size("ep") * spec.size("tp")}
    over = [
        name
        for name in blocks
        if spec.size(name) > 1 and crosses(groups(mesh, (name,)), ranks_per_node) != "no"
    ]
    if not over:
        return ""
    sizes = ", ".join(f"{name}={spec.size(name)}" for name in over)
    block = "ep x tp" if over[-1] == "ep" and spec.size("tp") > 1 else over[-1]
    return (
        f"warning: {sizes} over several nodes: the {blocks[over[-1]]} ranks of {block} do not "
        f"divide the {ranks_per_node} of a node; make them fewer, and pp or dp larger"
    )


def refuse_no_number(ranks_per_node: int) -> None:
    """Raise MeshError for what is no number of ranks."""
    if type(ranks_per_node) is int and ranks_per_node > 0:
        return
    raise MeshError(
        message(
            "table groups",
            "ranks_per_node",
            f"got {ranks_per_node!r}",
            "a node holds a positive number of ranks",
            "give the processes that one node runs, e.g. 8",
        )
    )
