"""What moves weights, gradients and blocks of keys, on one contiguous tensor, asynchronously.

gloo reduces everything everywhere where only a part of the sum is asked for, and copies what it
gathers once more: there both are sends and receives between all pairs of ranks, which moves the
bytes of a ring.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist


def all_gather(flat: torch.Tensor, group: Any) -> list[Any]:
    """Fill ``flat``, of which every rank has filled its own of equal parts. Gives what to wait
    for."""
    ranks, mine = dist.get_world_size(group), dist.get_rank(group)
    parts = flat.chunk(ranks)
    if dist.get_backend(group) != "gloo":
        return [dist.all_gather_single(flat, parts[mine], group=group, async_op=True)]
    return _exchange([parts[mine]] * ranks, list(parts), mine, group)


def reduce_scatter(flat: torch.Tensor, group: Any) -> Generator[torch.Tensor | None, None, None]:
    """Sum ``flat`` over the ranks; of the equal parts of the sum, every rank gets its own. Gives
    None while that is under way, then the part. ``flat`` may be overwritten."""
    ranks, mine = dist.get_world_size(group), dist.get_rank(group)
    parts = flat.chunk(ranks)
    if dist.get_backend(group) != "gloo":
        out = torch.empty_like(parts[mine])
        work = dist.reduce_scatter_single(out, flat, group=group, async_op=True)
        yield None
        work.wait()
        yield out
        return
    # the first to arrive becomes the sum: a tensor of its own, that the rest is added to
    others = [r for r in range(ranks) if r != mine]
    out = torch.empty_like(parts[mine])
    rest = scratch.take((ranks - 2) * out.numel(), flat.dtype, flat.device)
    rest = rest.view(ranks - 2, out.numel())
    places = dict(zip(others, [out, *rest], strict=True)) | {mine: parts[mine]}
    works = _exchange(list(parts), [places[r] for r in range(ranks)], mine, group)
    yield None
    for work in works:
        work.wait()
    for part in (parts[mine], *rest):
        out += part
    scratch.give(rest)
    yield out


def shift(flat: torch.Tensor, into: torch.Tensor, group: Any, tag: int = 0) -> list[Any]:
    """Send ``flat`` to the next rank of the group, and receive ``into`` from the previous one (of
    two ranks, one is both). Gives what to wait for; neither tensor may be touched before. ``tag``
    keeps apart what is under way at the same time."""
    ranks, mine = dist.get_world_size(group), dist.get_rank(group)
    to, origin = (mine + 1) % ranks, (mine - 1) % ranks
    if dist.get_backend(group) == "gloo":
        return [
            dist.isend(flat, group=group, group_dst=to, tag=tag),
            dist.irecv(into, group=group, group_src=origin, tag=tag),
        ]
    # one batch, so that no rank waits for another to receive before it does so itself
    both = [
        dist.P2POp(dist.isend, flat, group=group, tag=tag, group_peer=to),
        dist.P2POp(dist.irecv, into, group=group, tag=tag, group_peer=origin),
    ]
    return list(dist.batch_isend_irecv(both))


class Scratch:
    """Memory for what lies between packing and unpacking, used again and again: on the CPU, where
    fresh pages cost more than the copies made in them. Other devices have allocators that do so."""

    KEPT = 2

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor with no values."""
        if device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=dtype, device=device)
        size = numel * dtype.itemsize
        fits = [i for i, storage in enumerate(self._free) if storage.nbytes() >= size]
        if not fits:
            return torch.empty(numel, dtype=dtype)
        storage = self._free.pop(min(fits, key=lambda i: self._free[i].nbytes()))
        return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,))

    def give(self, tensor: torch.Tensor) -> None:
        """A tensor from `take` that nobody reads any more."""
        if tensor.device.type == "cpu" and tensor.numel():
            self._free.append(tensor.untyped_storage())
            self._free.sort(key=lambda storage: -storage.nbytes())
            del self._free[self.KEPT :]

    def trim(self) -> None:
        """Between steps one is kept, the largest."""
        del self._free[1:]


scratch = Scratch()


def _exchange(
    sent: list[torch.Tensor], received: list[torch.Tensor], mine: int, group: Any
) -> list[Any]:
    """Send a tensor to every other rank of the group, and receive one from each."""
    works = []
    for step in range(1, len(sent)):
        to, origin = (mine + step) % len(sent), (mine - step) % len(sent)
        works.append(dist.isend(sent[to], group=group, group_dst=to))
        works.append(dist.irecv(received[origin], group=group, group_src=origin))
    return works
