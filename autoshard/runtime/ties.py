"""Parameters that several stages hold: their gradients are summed once a step.

Each rank that holds one has the gradient of what its own stages read. When a step has reduced
these over the data axes, ranks with the same part of the parameter in other stages add theirs:
copies then get the same gradient, and stay the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime.process_groups import Groups
from autoshard.runtime.staged import along_pipeline


class Ties:
    """The parameters of a rank that other stages hold too, by the ranks that hold the same part."""

    def __init__(self, module: Any, made: Groups):
        self.module, self.groups = module, list[tuple[Any, int, list[str]]]()
        self._summed: set[str] = set()  # parameters whose .grad is a sum over these ranks
        program, rank = module.program, module.rank_index
        peers = along_pipeline(program.mesh, rank)
        by_holders: dict[tuple[int, ...], list[str]] = {}
        for key, parameter in program.parameters().items():
            if parameter.trainable and len(parameter.holders or ()) > 1:
                by_holders.setdefault(parameter.holders, []).append(key)
        here = program.mesh.stage(rank)
        for holders in sorted(by_holders):
            # a rank that holds none makes a group too: torch names one by how many a rank has
            ranks = tuple(peers[p] for p in holders) if here in holders else (rank,)
            group = made.of(ranks, f"ties of {holders}")
            if here in holders:
                self.groups.append((group, holders.index(here), by_holders[holders]))

    @torch.no_grad()
    def reopen(self) -> None:
        """Gradients that are a sum already become a summand: one rank keeps it."""
        for _, index, keys in self.groups:
            for key in keys:
                grad = self.module.tensor(key).grad
                if index and grad is not None and key in self._summed:
                    grad.zero_()
        self._summed.clear()

    @torch.no_grad()
    def sum(self) -> None:
        """Sum over the ranks that hold the same part; every rank of these calls it. A parameter
        without a gradient on some of them counts as zero there; on all, it stays without."""
        for group, _, keys in self.groups:
            tensors = [self.module.tensor(key) for key in keys]
            tensors = [t for t in tensors if t.requires_grad]
            for dtype in dict.fromkeys(t.dtype for t in tensors):
                self._sum(group, [t for t in tensors if t.dtype == dtype])
            self._summed.update(key for key in keys if self.module.tensor(key).grad is not None)

    def _sum(self, group: Any, tensors: list[torch.Tensor]) -> None:
        """Sum gradients of one type in one collective, with a number each that says how many ranks
        have one. Only a rank that lacks one looks at these: no other waits for the device."""
        device, has = self.module._device, [t.grad is not None for t in tensors]
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
        parts = [grad.to(device).flatten() for grad in grads]
        flags = parts[0].new_ones(len(has)) if all(has) else parts[0].new_tensor(has)
        flat = torch.cat([*parts, flags])
        dist.all_reduce(flat, group=group)
        *sums, flags = flat.split([*(g.numel() for g in grads), len(has)])
        anyone = has if all(has) else [flag > 0 for flag in flags.tolist()]
        for tensor, grad, total, there in zip(tensors, grads, sums, anyone, strict=True):
            if there:
                tensor.grad = grad.copy_(total.view_as(grad))
