"""autoshard(): the one call."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from autoshard.capture import capture
from autoshard.chain import Pass, run
from autoshard.emit import ShardedModule
from autoshard.errors import MeshError, ShardingError, message
from autoshard.mesh import MeshSpec
from autoshard.program import Program


def autoshard(
    model: nn.Module,
    mesh: Any,
    example_inputs: Any = None,
    *,
    sequence_parallel: bool = True,
    loss_fn: Any = None,
    strict: bool = False,
    passes: list[Pass] | None = None,
    zero: int = 0,
    **later: Any,
) -> ShardedModule:
    """Turn a single-device model into one rank's module of a mesh.

    mesh: a live ``DeviceMesh`` with named dimensions (this rank's module, trains), or a `MeshSpec`, dict or
    text such as ``"dp=2,tp=4"`` (rank 0's module, for inspection; no process group).
    example_inputs: a dict of keyword arguments or a tuple; found from the model when left out.
    sequence_parallel: also cut tokens over tp between its linears.
    loss_fn: ``loss_fn(output, **targets)``, for a model that returns no loss.
    strict: raise ShardingError where an axis does not divide.
    passes: a chain of your own in place of `passes.chain`.
    Raises CaptureError, MeshError or ShardingError, alike on every rank and before any collective.
    """
    spec = MeshSpec.of(mesh)
    _refuse_unsupported(spec, zero, later)
    rank = _live_rank(spec)
    program, output_type = build(
        model,
        spec,
        example_inputs,
        sequence_parallel=sequence_parallel,
        loss_fn=loss_fn,
        strict=strict,
        passes=passes,
    )
    signature = inspect.signature(model.forward)
    return ShardedModule(program, rank or 0, rank is not None, signature, output_type)


def build(
    model: nn.Module,
    mesh: MeshSpec,
    example_inputs: Any = None,
    *,
    sequence_parallel: bool = True,
    loss_fn: Any = None,
    strict: bool = False,
    passes: list[Pass] | None = None,
    raise_precision: bool = False,
) -> tuple[Program, Any]:
    """Capture, infer axes, run the chain: the partitioned Program and the model's output type."""
    program, output_type = capture(model, mesh, example_inputs, loss_fn, raise_precision)
    if passes is None:
        from passes import chain

        passes = chain(sequence_parallel=sequence_parallel, strict=strict)
    return run(program, passes), output_type


def _live_rank(spec: MeshSpec) -> int | None:
    if spec.device_mesh is None:
        return None
    import torch.distributed as dist

    if spec.world_size > dist.get_world_size():
        raise MeshError(
            message(
                "mesh",
                str(spec),
                f"{spec.world_size} ranks",
                f"the world has {dist.get_world_size()}",
                "start more",
            )
        )
    return dist.get_rank()


def _refuse_unsupported(spec: MeshSpec, zero: int, later: dict[str, Any]) -> None:
    axes = [a for a in ("pp", "cp", "ep") if spec.size(a) > 1]
    options = sorted(k for k, v in later.items() if v)
    if zero:
        options.append(f"zero={zero}")
    if axes or options:
        raise ShardingError(
            message(
                "autoshard",
                f"mesh axes {axes}, options {options}",
                f"mesh {spec}",
                "these strategies are not built yet",
                "use dp and tp",
            )
        )
