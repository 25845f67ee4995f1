"""The two collectives that move weights and gradients, on one contiguous tensor, asynchronously.

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
    others = flat.new_empty(ranks - 1, parts[mine].numel())
    places = [others[r - (r > mine)] if r != mine else parts[mine] for r in range(ranks)]
    works = _exchange(list(parts), places, mine, group)
    yield None
    for work in works:
        work.wait()
    # in the order of ranks, so that the sum does not depend on who makes it
    held = [parts[mine] if r == mine else places[r] for r in range(ranks)]
    out = held[0] + held[1]
    for other in held[2:]:
        out += other
    yield out


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
