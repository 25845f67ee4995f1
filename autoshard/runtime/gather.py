"""From local slices to whole tensors, and norms that count every element once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.axes import Axis, Dim, atoms, leaves
from autoshard.layout import R, chunk_bounds, local_indices, local_length
from autoshard.mesh import SubMesh
from autoshard.program import Parameter

#: dim, start, length (-1: the whole tensor), mesh axes summed over
Piece = tuple[int, int, int, tuple[str, ...]]


def _concatenated(parameter: Parameter) -> int | None:
    """The dimension whose parts are cut differently, if there is one."""
    cut = [state for state in parameter.layout.values() if isinstance(state, Axis)]
    for at, dim in enumerate(parameter.dims):
        axes = leaves(dim)
        if not axes or axes[0].parts is None:
            continue
        own = set(atoms(dim))
        parts = [set(atoms(part)) for part in axes[0].parts]
        if any(s in own and any(s not in part for part in parts) for s in cut):
            return at
    return None


def slice_shape(parameter: Parameter, mesh: SubMesh, rank: int) -> tuple[int, ...]:
    """The shape of the slice that a rank computes with."""
    return tuple(local_length(d, parameter.layout, mesh, rank) for d in parameter.dims)


def shard_bounds(parameter: Parameter, mesh: SubMesh, rank: int) -> tuple[int, int]:
    """Where on dim 0 of its slice the part that a rank holds begins and ends."""
    rows = slice_shape(parameter, mesh, rank)[0] if parameter.dims else 1
    if not parameter.zero:
        return 0, rows
    return chunk_bounds(rows, mesh.size(parameter.zero), mesh.index(rank, parameter.zero))


def positions(parameter: Parameter, mesh: SubMesh, rank: int) -> list[torch.Tensor | None]:
    """Along every dimension of the whole parameter the positions that a rank holds, in order; None
    where it holds all."""
    found: list[torch.Tensor | None] = []
    for at, dim in enumerate(parameter.dims):
        cut = any(parameter.layout.get(m) in set(atoms(dim)) for m in mesh.axes)
        if not cut and not (at == 0 and parameter.zero):
            found.append(None)
            continue
        here = local_indices(dim, parameter.layout, mesh, rank)
        found.append(here[slice(*shard_bounds(parameter, mesh, rank))] if at == 0 else here)
    return found


def local_value(
    parameter: Parameter,
    mesh: SubMesh,
    rank: int,
    value_of: Callable[[Parameter], torch.Tensor] | None = None,
) -> torch.Tensor:
    """What a rank holds of a parameter, contiguous and of its own storage. ``value_of``: gives the
    value of one of the model's own parameters, where it is not the one that these have; of a stack
    it is asked for those that the rank holds, one after the other."""
    value_of = value_of or (lambda own: own.value)
    wanted = positions(parameter, mesh, rank)
    if not parameter.stacked:
        value = value_of(parameter).detach()
        sliced = _selected(value, wanted)
        return sliced.clone() if sliced is value else sliced
    rows = range(len(parameter.stacked)) if wanted[0] is None else wanted[0].tolist()
    shape = (len(rows), *slice_shape(parameter, mesh, rank)[1:])
    stack = None if rows else parameter.value.new_empty(shape)
    for at, row in enumerate(rows):
        part = _selected(value_of(parameter.stacked[row]).detach(), wanted[1:])
        stack = part.new_empty(shape) if stack is None else stack
        stack[at].copy_(part)
        del part  # before the next one is made
    assert stack is not None
    return stack


def _selected(value: torch.Tensor, wanted: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The tensor at these positions along its dimensions; all where there are None."""
    for at, here in enumerate(wanted):
        if here is not None:
            value = value.index_select(at, here.to(value.device))
    return value


def pieces(parameter: Parameter, mesh: SubMesh, rank: int) -> list[tuple[Piece, tuple[str, ...]]]:
    """Runs of what a rank holds of a parameter, each with the mesh axes over which its gradient is
    still to be summed (those of ``zero`` have been when a shard's gradient is there) and those on
    which it is cut: ``((dim, start, length, summed), cut)``."""
    found = slice_pieces(parameter, mesh, rank)
    if not parameter.zero:
        return found
    low, high = shard_bounds(parameter, mesh, rank)
    out = []
    for (at, start, length, summed), cut in found:
        if length >= 0 and at == 0:
            first, last = max(start, low), min(start + length, high)
            start, length = min(first, high) - low, max(last - first, 0)
        summed = tuple(m for m in summed if m not in parameter.zero)
        cut = tuple(m for m in mesh.axes if m in cut or m in parameter.zero)
        out.append(((at, start, length, summed), cut))
    return out


def slice_pieces(
    parameter: Parameter, mesh: SubMesh, rank: int
) -> list[tuple[Piece, tuple[str, ...]]]:
    """As `pieces`, of the slice that a rank computes with, all of whose sums are still to come."""
    replicated = tuple(m for m, s in parameter.layout.items() if s == R)
    cut = tuple(m for m, s in parameter.layout.items() if isinstance(s, Axis))
    at = _concatenated(parameter)
    if at is None:
        return [((0, 0, -1, replicated), cut)]
    out, start = [], 0
    axes = leaves(parameter.dims[at])
    for part in axes[0].parts or ():
        dim: Dim = (*part, *axes[1:])
        length = local_length(dim, parameter.layout, mesh, rank)
        own = {id(a) for i, d in enumerate(parameter.dims) for a in atoms(d if i != at else dim)}
        here = tuple(m for m in cut if id(parameter.layout[m]) in own)
        summed = tuple(m for m in mesh.axes if m in replicated or (m in cut and m not in here))
        out.append(((at, start, length, summed), here))
        start += length
    return out


def reductions(parameter: Parameter, mesh: SubMesh, rank: int = 0) -> list[Piece]:
    """What must be summed over ranks of this parameter's gradient."""
    if not parameter.trainable:
        return []
    return [p for p, _ in slice_pieces(parameter, mesh, rank) if p[3]]


def view_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The run of a local tensor that a piece names."""
    at, start, length, _ = piece
    return tensor if length < 0 else tensor.narrow(at, start, length)


def place(
    parameter: Parameter, local: torch.Tensor | None, mesh: SubMesh, rank: int, device: Any = None
) -> torch.Tensor:
    """A whole tensor of zeros with this rank's part in it, where this rank is the first to hold it:
    the sum over all ranks is the whole parameter. ``local``: None where it holds none of it, and
    then the zeros are on ``device``."""
    if local is None:
        return torch.zeros(parameter.value.shape, dtype=parameter.value.dtype, device=device)
    kept = torch.zeros_like(local)
    coordinate, first = mesh.coordinate(rank), parameter.first_held_by(mesh, rank)
    for piece, cut in pieces(parameter, mesh, rank):
        if first and all(coordinate[m] == 0 for m in mesh.axes if m not in cut):
            view_of(kept, piece).copy_(view_of(local, piece))
    shape = list(local.shape)
    for at, wanted in enumerate(positions(parameter, mesh, rank)):
        if wanted is not None:
            shape[at] = math.prod(a.size for a in leaves(parameter.dims[at]))
            kept = local.new_zeros(shape).index_copy_(at, wanted.to(local.device), kept)
    return kept


def squared_norm(module: Any) -> torch.Tensor:
    """This rank's share of the squared gradient norm: the sum over all ranks is the model's."""
    mesh = module.program.mesh
    shares, device, dtype = [], None, torch.float32
    for parameter in module.program.parameters().values():  # the same on all ranks
        dtype = torch.promote_types(dtype, parameter.value.dtype)
    for key, parameter in module.held_parameters().items():
        tensor = module.tensor(key)
        device = device or tensor.device
        if tensor.grad is None:
            continue
        for piece, cut in pieces(parameter, mesh, module.rank_index):
            copies = math.prod(mesh.size(m) for m in mesh.axes if m not in cut)
            copies *= len(parameter.holders or (0,))
            wide = torch.promote_types(tensor.dtype, torch.float32)  # 300 squared is no half
            square = torch.linalg.vector_norm(view_of(tensor.grad, piece), dtype=wide) ** 2
            shares.append((square / copies).to(device))
    if not shares:
        return torch.zeros((), device=device, dtype=dtype)
    return torch.stack([share.to(dtype) for share in shares]).sum()


def scale_gradients(module: Any, norm: torch.Tensor, max_norm: float) -> None:
    """Multiply every gradient by max_norm / norm where that is below one."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for key in module.held_parameters():
        grad = module.tensor(key).grad
        if grad is not None:
            grad.mul_(factor.to(grad.device, grad.dtype))
