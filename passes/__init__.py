"""The passes: by name, and in the one order that is right."""

from __future__ import annotations

import ast
from typing import Any

from autoshard.chain import Pass
from autoshard.errors import ShardingError, message
from passes.canonicalize import Canonicalize
from passes.context_parallel import MODES, ContextParallel
from passes.data_parallel import DataParallel
from passes.expert_parallel import ExpertParallel
from passes.fuse_attention import FuseAttention
from passes.fuse_experts import FuseExperts
from passes.infer_axes import InferAxes
from passes.overlap_experts import OverlapExperts
from passes.partition import Partition
from passes.pipeline_parallel import PipelineParallel
from passes.recompute import Recompute
from passes.sequence_parallel import SequenceParallel
from passes.tensor_parallel import TensorParallel
from passes.zero import Zero

PASSES: dict[str, type[Pass]] = {
    p.name: p
    for p in (
        Canonicalize,
        FuseAttention,
        FuseExperts,
        InferAxes,
        DataParallel,
        TensorParallel,
        ContextParallel,
        SequenceParallel,
        ExpertParallel,
        Partition,
        OverlapExperts,
        PipelineParallel,
        Zero,
        Recompute,
    )
}


#: What ``recompute`` may be.
RECOMPUTE = ("none", "block")


def is_capacity(value: Any) -> bool:
    """Whether a value says how much an expert may take."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < float("inf")


def chain(
    *,
    sequence_parallel: bool = True,
    context_parallel: str = "ring",
    expert_capacity: float | None = None,
    balance: bool = True,
    strict: bool = False,
    zero: int = 1,
    zero_axes: tuple[str, ...] | None = None,
    reshard_after_forward: bool = True,
    offload: bool = False,
    reduce_dtype: str | None = None,
    recompute: str = "none",
    microbatches: int | None = None,
    schedule: str = "1f1b",
    stages: str | None = None,
    chunks: int | None = None,
    outputs: str = "all",
) -> list[Pass]:
    """The passes that `autoshard` runs, in order. ``balance``: hold tokens in zigzag order where
    attention is causal. Raises ShardingError for a value of ``recompute``, ``context_parallel`` or
    ``expert_capacity`` that there is not."""
    if recompute not in RECOMPUTE:
        raise ShardingError(
            message(
                "autoshard",
                "option recompute",
                repr(recompute),
                "it says what backward computes again: nothing, or blocks from their inputs",
                f"use one of {', '.join(map(repr, RECOMPUTE))}",
            )
        )
    if context_parallel not in MODES:
        raise ShardingError(
            message(
                "autoshard",
                "option context_parallel",
                repr(context_parallel),
                "it says how queries meet the keys of other ranks",
                f"use one of {', '.join(map(repr, MODES))}",
            )
        )
    if expert_capacity is not None and not is_capacity(expert_capacity):
        raise ShardingError(
            message(
                "autoshard",
                "option expert_capacity",
                repr(expert_capacity),
                "it is a number of times what each expert would get if all got as many tokens",
                "give a number above 0, such as 1.25, or None to drop no token",
            )
        )
    transport = "ring" if context_parallel == "ulysses" else context_parallel
    steps: list[Pass] = [
        Canonicalize(),
        FuseAttention(transport),
        FuseExperts(capacity=expert_capacity),
        InferAxes(),
        DataParallel(microbatches),
        TensorParallel(strict=strict),
        ContextParallel(context_parallel, balance),
    ]
    if sequence_parallel:
        steps.append(SequenceParallel())
    steps.append(ExpertParallel())
    steps += [Partition(), OverlapExperts()]
    steps.append(PipelineParallel(schedule, microbatches, stages, chunks, outputs))
    steps.append(Zero(zero, zero_axes, offload, reshard_after_forward, reduce_dtype))
    if recompute == "block":
        steps.append(Recompute())
    return steps


def parse(text: str) -> list[Pass]:
    """A chain from its text, as a pass prints itself: ``"infer_axes;
    tensor_parallel(strict=True)"``.

    Raises ShardingError for an unknown pass or option, with the ones there are.
    """
    return [_parse_one(part.strip()) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> Pass:
    try:
        call = ast.parse(text, mode="eval").body
        name = call.func if isinstance(call, ast.Call) else call
        given = call.keywords if isinstance(call, ast.Call) else []
        options = {k.arg or "": ast.literal_eval(k.value) for k in given}
        return PASSES[name.id](**options)  # type: ignore[attr-defined]
    except (SyntaxError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ShardingError(
            message(
                "parse",
                "a pass",
                repr(text),
                f"{type(error).__name__}: {error}",
                f"write NAME or NAME(option=value), of {', '.join(PASSES)}",
            )
        ) from error


__all__ = ["PASSES", "chain", "parse"]
