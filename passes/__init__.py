"""The passes: by name, and in the one order that is right."""

from __future__ import annotations

from autoshard.chain import Pass
from passes.canonicalize import Canonicalize
from passes.data_parallel import DataParallel
from passes.infer_axes import InferAxes
from passes.partition import Partition
from passes.sequence_parallel import SequenceParallel
from passes.tensor_parallel import TensorParallel

PASSES: dict[str, type[Pass]] = {
    p.name: p
    for p in (Canonicalize, InferAxes, DataParallel, TensorParallel, SequenceParallel, Partition)
}


def chain(*, sequence_parallel: bool = True, strict: bool = False) -> list[Pass]:
    """The passes that `autoshard` runs, in order."""
    steps: list[Pass] = [Canonicalize(), InferAxes(), DataParallel(), TensorParallel(strict=strict)]
    if sequence_parallel:
        steps.append(SequenceParallel())
    return [*steps, Partition()]


__all__ = ["PASSES", "chain"]
