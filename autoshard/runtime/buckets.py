"""Gradients summed in buckets while the backward runs.

Buckets are filled in reverse order of use; a full one is all-reduced at once, asynchronously, and
all are finished before ``backward()`` returns (on a mesh with pp before the step does: gradients
for other stages set out first). Their order is fixed when the module is made, and every backward
launches all of them: ranks run the same collectives whatever gradients each has.
A gradient moves into its bucket as soon as it is there and ``.grad`` becomes a view of the bucket:
nothing is copied back, and memory holds every gradient once.

Between backwards ``.grad`` is either this rank's summand (after ``no_sync``) or the sum over the
ranks (after a reduction), and a later backward adds a summand to it. Before it does, a sum is made
a summand again: the first rank of the group keeps it, the others set it to zero. So gradients
accumulate exactly, with and without ``no_sync``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.program import Program, stages_of_parameters
from autoshard.runtime.gather import Piece, reductions, view_of

BUCKET_BYTES = 25 * 2**20


@dataclass
class Bucket:
    """Pieces of gradients summed over the same mesh axes in one all-reduce, and where each starts.
    ``first``: whether this rank is the one of its group that keeps an earlier sum; ``stage``: that
    of a pipeline whose backward completes them."""

    axes: tuple[str, ...]
    stage: int | None
    first: bool
    dtype: torch.dtype
    device: torch.device
    pieces: list[tuple[str, Piece, int]] = field(default_factory=list)
    numel: int = 0
    waiting: int = 0
    address: int = 0  # of the numbers of the last step
    flat: torch.Tensor | None = None
    work: Any = None

    def open(self, grad: torch.Tensor | None, start: int) -> torch.Tensor:
        """The numbers of the bucket: those in which ``grad``, a view left by the last step, or the
        bucket's only gradient, already lies; else fresh ones."""
        if self.flat is None and grad is not None and grad.is_contiguous():
            storage = grad.untyped_storage()
            ours = len(self.pieces) == 1 or storage.data_ptr() == self.address
            size = self.numel * grad.element_size()
            if ours and grad.storage_offset() == start and storage.nbytes() == size:
                self.flat = grad.new_empty(0).set_(storage, 0, (self.numel,), (1,))
        if self.flat is None:
            self.flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self.address = self.flat.data_ptr()
        return self.flat


def in_order_of_gradients(program: Program) -> list[str]:
    """The parameters in use that no unit reduces; the one whose gradient is complete first comes
    first."""
    in_units = program.in_units
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    first_use = {
        node.name: min(order[user] for user in node.users)
        for node in order
        if node.op == "placeholder"
        and node.users
        and node.name in program.values
        and node.name not in in_units
    }
    return sorted(first_use, key=lambda key: -first_use[key])


class Reducer:
    """Hooks a module's parameters so that their gradients are reduced as layouts say.

    A parameter with a gradient on some ranks only counts as zero on the others; one that has none
    on any rank keeps ``.grad`` None, as on a single device.
    """

    def __init__(self, module: Any, bucket_bytes: int = BUCKET_BYTES):
        self.module = module
        self.buckets: list[Bucket] = []
        self.of: dict[str, list[tuple[Bucket, Piece, int]]] = {}
        self._fill(bucket_bytes)
        self._present: dict[Any, tuple[list[str], torch.Tensor]] = {}
        for bucket in self.buckets:
            kind = bucket.stage, bucket.axes
            if kind not in self._present:
                keys = [
                    k
                    for k, homes in self.of.items()
                    if any((b.stage, b.axes) == kind for b, *_ in homes)
                ]
                flags = torch.ones(len(keys), device=module.tensor(keys[0]).device)
                self._present[kind] = keys, flags
        self.stage: int | None = None  # of a pipeline, the one whose backward runs
        self.reached = False  # whether that has added to a gradient
        self._active: list[Bucket] = []  # those that this backward reduces
        #: buckets and flags under way: in a pipeline a stage's are waited for at the step's end
        self._under_way: list[tuple[list[Bucket], list[Any]]] = []
        self._summed: set[str] = set()  # parameters whose .grad is a sum over the ranks
        self._accumulators: list[Any] = []
        self._task = -1  # the backward that is being reduced, by autograd's number of it
        self._next = 0
        for key in self.of:
            tensor = module.tensor(key)
            # on the node that accumulates: hooks of the tensor serve torch.autograd.grad too
            node = tensor.view_as(tensor).grad_fn.next_functions[0][0]
            node.register_prehook(lambda _, key=key: self._reopen(key))
            self._accumulators.append(node)  # a node lives only as long as it is held
            tensor.register_post_accumulate_grad_hook(lambda _, key=key: self._ready(key))

    def _fill(self, bucket_bytes: int) -> None:
        module, mesh, rank = self.module, self.module.program.mesh, self.module.rank_index
        open_: dict[Any, Bucket] = {}
        held, stages = module.held_parameters(), stages_of_parameters(module.program)
        for key in in_order_of_gradients(module.program):
            if key not in held:
                continue
            own = [s for s in stages.get(key, ()) if self._is_here(s)]
            stage = min(own, default=None)  # backward comes to the first one last
            tensor = module.tensor(key)
            homes = self.of.setdefault(key, [])
            for piece in reductions(module.program.values[key], mesh, rank):
                kind = (stage, piece[3], tensor.dtype, tensor.device)
                bucket = open_.get(kind)
                if bucket is None or bucket.numel * tensor.element_size() >= bucket_bytes:
                    first = mesh.index(rank, piece[3]) == 0
                    about = piece[3], stage, first, tensor.dtype, tensor.device
                    bucket = open_[kind] = Bucket(*about)
                    self.buckets.append(bucket)
                bucket.pieces.append((key, piece, bucket.numel))
                homes.append((bucket, piece, bucket.numel))
                bucket.numel += view_of(tensor, piece).numel()
        self.of = {key: homes for key, homes in self.of.items() if homes}

    def _is_here(self, stage: int) -> bool:
        program = self.module.program
        return program.pipeline.place[stage] == program.mesh.stage(self.module.rank_index)

    @torch.no_grad()
    def _reopen(self, key: str) -> None:
        """Make a sum a summand again; called before a gradient is added to it."""
        if key not in self._summed:
            return
        self._summed.discard(key)
        grad = self.module.tensor(key).grad
        if grad is None:
            return
        for bucket, piece, _ in self.of[key]:
            if not bucket.first:
                view_of(grad, piece).zero_()

    def complete(self, stage: int) -> None:
        """The last backward of a stage is done: what is left of its gradients, where that has
        added to none of them, is reduced now."""
        if self.reached:
            return
        self._open(stage)
        self._finish()

    def _open(self, stage: int | None) -> None:
        self._next = 0
        self._active = [b for b in self.buckets if b.stage == stage]
        for bucket in self._active:
            bucket.flat = bucket.work = None
            bucket.waiting = sum(self._trains(k) for k in {key for key, *_ in bucket.pieces})

    def _trains(self, key: str) -> bool:
        """Whether a gradient may come: the parameter was not frozen since the call."""
        return self.module.tensor(key).requires_grad

    def _ready(self, key: str) -> None:
        if not self.module._syncing:
            return
        self.reached = True
        task = torch._C._current_graph_task_id()
        if (
            task != self._task
        ):  # an earlier backward that raised may have left its buckets half done
            self._task = task
            self._open(self.stage)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        for bucket, piece, start in self.of[key]:
            self._put(bucket, key, piece, start)
        for bucket in {id(bucket): bucket for bucket, *_ in self.of[key]}.values():
            bucket.waiting -= 1
        while self._next < len(self._active) and self._active[self._next].waiting == 0:
            self._launch(self._active[self._next])
            self._next += 1

    @torch.no_grad()
    def _put(self, bucket: Bucket, key: str, piece: Piece, start: int) -> None:
        """Move a piece of a gradient into its bucket; zeros where there is none."""
        tensor = self.module.tensor(key)
        grad = None if tensor.grad is None else view_of(tensor.grad, piece)
        place = bucket.open(grad, start)[start : start + view_of(tensor, piece).numel()]
        if grad is None:
            place.zero_()
        elif grad.data_ptr() != place.data_ptr() or not grad.is_contiguous():
            place = place.view_as(grad)
            place.copy_(grad)
            if piece[2] < 0:
                tensor.grad = place

    def _launch(self, bucket: Bucket) -> None:
        for key, piece, start in bucket.pieces:
            # some have no gradient on this step; .grad may be the last sum
            if bucket.waiting or not self._trains(key):
                self._reopen(key)
                self._put(bucket, key, piece, start)
        bucket.work = self._all_reduce(bucket.flat, bucket.axes)

    def _all_reduce(self, tensor: torch.Tensor, axes: tuple[str, ...], op: str = "SUM") -> Any:
        import torch.distributed as dist

        group = self.module._groups[axes]
        return dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group, async_op=True)

    @torch.no_grad()
    def _finish(self) -> None:
        for bucket in self._active[self._next :]:
            self._launch(bucket)
        self._under_way.append((self._active, self._flags()))
        self._task, self._active = -1, []
        if self.module.wire is None:
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for what is under way: gradients are then the sums."""
        under_way, self._under_way = self._under_way, []
        for buckets, flags in under_way:
            self._add_missing(flags)
            for bucket in buckets:
                bucket.work.wait()
                self._take(bucket)
                bucket.flat = bucket.work = None
            keys = {key for bucket in buckets for key, *_ in bucket.pieces}
            self._summed |= {key for key in keys if self.module.tensor(key).grad is not None}

    def _flags(self) -> list[Any]:
        """Set out which parameters of the stage have a gradient on any rank: a parameter that may
        have none counts as one that has."""
        found = []
        for (stage, axes), (keys, ones) in self._present.items():
            if stage == self.stage:
                tensors = [self.module.tensor(key) for key in keys]
                has = [t.grad is not None or not t.requires_grad for t in tensors]
                flags = ones if all(has) else ones.new_tensor(has)
                work = self._all_reduce(flags, axes, "MAX")  # ones stay ones
                found.append((keys, has, flags, work))
        return found

    def _add_missing(self, found: list[Any]) -> None:
        """Give a parameter without a gradient one of zeros where another rank has one. Only a rank
        that lacks a gradient looks at what the others have: no other waits for the device."""
        for *_, work in found:
            work.wait()
        for keys, has, flags, _ in found:
            if all(has):
                continue
            for key, mine, anyone in zip(keys, has, flags.tolist(), strict=True):
                if anyone and not mine:
                    tensor = self.module.tensor(key)
                    tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

    def _take(self, bucket: Bucket) -> None:
        """Copy back what is no view of the bucket: parts of gradients."""
        assert bucket.flat is not None
        for key, piece, start in bucket.pieces:
            grad = self.module.tensor(key).grad
            if grad is not None:
                target = view_of(grad, piece)
                source = bucket.flat[start : start + target.numel()]
                if source.data_ptr() != target.data_ptr():
                    target.copy_(source.view_as(target))
