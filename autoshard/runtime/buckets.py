"""Gradients summed in buckets while the backward runs.

Buckets are filled in reverse order of use; a full one is all-reduced at once, asynchronously, and all are
finished before ``backward()`` returns. The order is fixed when the module is made, so that it is the same
on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.runtime.gather import Piece, reductions, view_of

BUCKET_BYTES = 25 * 2**20


@dataclass
class Bucket:
    """Pieces of gradients summed over the same mesh axes in one all-reduce."""

    axes: tuple[str, ...]
    pieces: list[tuple[str, Piece]] = field(default_factory=list)
    nbytes: int = 0
    waiting: int = 0
    flat: torch.Tensor | None = None
    work: Any = None


class Reducer:
    """Hooks a module's parameters so that their gradients are reduced as layouts say."""

    def __init__(self, module: Any, bucket_bytes: int = BUCKET_BYTES):
        self.module = module
        self.buckets: list[Bucket] = []
        self.of: dict[str, list[Bucket]] = {}
        self._fill(bucket_bytes)
        self._armed = False
        self._next = 0
        for key in self.of:
            tensor = module.tensor(key)
            tensor.register_post_accumulate_grad_hook(lambda _, key=key: self._ready(key))

    def _fill(self, bucket_bytes: int) -> None:
        program = self.module.program
        used = [n.name for n in program.graph.nodes if n.op == "placeholder" and n.users]
        order = {n: i for i, node in enumerate(program.graph.nodes) for n in [node.name]}
        first_use = {}
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name in used:
                first_use[node.name] = min(order[u.name] for u in node.users)
        open_: dict[Any, Bucket] = {}
        for key in sorted(first_use, key=lambda k: -first_use[k]):
            parameter = program.values.get(key)
            if parameter is None:
                continue
            for piece in reductions(parameter, program.mesh, self.module.rank_index):
                tensor = self.module.tensor(key)
                kind = (piece[3], tensor.dtype)
                bucket = open_.get(kind)
                if bucket is None or bucket.nbytes >= bucket_bytes:
                    bucket = open_[kind] = Bucket(piece[3])
                    self.buckets.append(bucket)
                bucket.pieces.append((key, piece))
                bucket.nbytes += view_of(tensor, piece).numel() * tensor.element_size()
                if bucket not in self.of.setdefault(key, []):
                    self.of[key].append(bucket)

    def _ready(self, key: str) -> None:
        if not self.module._syncing:
            return
        if not self._armed:
            self._armed, self._next = True, 0
            for bucket in self.buckets:
                bucket.waiting = len({k for k, _ in bucket.pieces})
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        for bucket in self.of[key]:
            bucket.waiting -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
            self._launch(self.buckets[self._next])
            self._next += 1

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> None:
        import torch.distributed as dist

        grads = []
        for key, piece in bucket.pieces:
            tensor = self.module.tensor(key)
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            grads.append(view_of(tensor.grad, piece))
        if len(grads) == 1 and grads[0].is_contiguous():
            bucket.flat = grads[0].view(-1)
        else:
            bucket.flat = torch.cat([g.reshape(-1) for g in grads])
        group = self.module._groups[bucket.axes]
        bucket.work = dist.all_reduce(bucket.flat, group=group, async_op=True)

    @torch.no_grad()
    def _finish(self) -> None:
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        self._armed = False
        for bucket in self.buckets:
            bucket.work.wait()
            if len(bucket.pieces) == 1:
                key, piece = bucket.pieces[0]
                target = view_of(self.module.tensor(key).grad, piece)
                if bucket.flat.data_ptr() != target.data_ptr():
                    target.copy_(bucket.flat.view_as(target))
            else:
                self._scatter(bucket)
            bucket.flat = bucket.work = None

    def _scatter(self, bucket: Bucket) -> None:
        start, targets, sources = 0, [], []
        assert bucket.flat is not None
        for key, piece in bucket.pieces:
            target = view_of(self.module.tensor(key).grad, piece)
            sources.append(bucket.flat[start : start + target.numel()].view_as(target))
            targets.append(target)
            start += target.numel()
        torch._foreach_copy_(targets, sources)
