"""autoshard(): the one call."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard.capture import capture
from autoshard.chain import Pass, run
from autoshard.emit import ShardedModule
from autoshard.errors import CaptureError, MeshError, ShardingError, message
from autoshard.mesh import MeshSpec
from autoshard.meta import hollow, skeleton
from autoshard.outputs import Output
from autoshard.program import Program
from autoshard.progress import say
from autoshard.runtime import checks


def autoshard(
    model: nn.Module,
    mesh: Any,
    example_inputs: Any = None,
    *,
    sequence_parallel: bool = True,
    context_parallel: str = "ring",
    expert_capacity: float | None = None,
    zero: int = 1,
    zero_axes: tuple[str, ...] | None = None,
    reshard_after_forward: bool = True,
    offload: bool = False,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    stages: str | None = None,
    chunks: int | None = None,
    outputs: str = "all",
    recompute: str = "none",
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    loss_fn: Any = None,
    strict: bool = False,
    passes: list[Pass] | None = None,
) -> ShardedModule:
    """Turn a single-device model into one rank's module of a mesh.

    mesh: a live ``DeviceMesh`` with named dimensions (this rank's module, which trains), or a
    `MeshSpec`, dict or text such as ``"dp=2,tp=4"`` (rank 0's module, to look at; no processes).
    example_inputs: a dict of keyword arguments, a tuple, or a tensor; found when left out. Rows of
    this rank for a DeviceMesh, of the global batch for the others; two at least, to stay dynamic.
    sequence_parallel: also cut tokens over tp between its linears.
    context_parallel: how, on a mesh with cp, queries meet the keys of other ranks: "ring" (keys and
    values travel round), "ulysses" (heads are cut in place of tokens), "allgather". Every rank of
    cp is given the whole sequences.
    expert_capacity: an expert takes of each rank's tokens at most this many times what it would get
    if all experts got as many; what is over, of the smallest routing weights, is dropped (adds
    nothing), and every all-to-all is of one size. All ranks must then have as many rows as the
    others in every step; in training and in evaluation the first batch alone is compared
    (MeshError), since a comparison is a wait: a later difference fails, or hangs, in the backend.
    None: no token is dropped.
    zero: 0 to 3; over the data axes and cp, 1 shares out optimizer states, 2 gradients too, 3
    parameters too, gathered a block at a time. ``parameters()`` are then pieces of dim 0.
    zero_axes: those of these axes to do so over (all, when None). reshard_after_forward: stage 3
    frees weights between forward and backward; with pp, False keeps them for all micro-batches of a
    step, and gradients whole until its end.
    offload: parameters, gradients and optimizer states are in host memory.
    param_dtype: the type of weights, of what is computed from them, and of floating inputs; the
    parameters themselves keep theirs. reduce_dtype: that of gradients on their way (default: the
    parameters' own).
    microbatches: on a mesh with pp, in how many pieces a rank's rows go through the stages; None:
    the largest divisor of their number up to four a rank of pp (where that is few, as many uneven
    ones), as found in the first step, of all ranks the fewest. Losses and gradients are those of
    the whole batch.
    schedule: the order in which ranks run their stages: "gpipe", "1f1b", "interleaved" (several
    stages a rank), "zb" (ZB-H1: gradients of weights fill the bubble), "dualpipev" (two stages a
    rank, in a V). chunks: stages a rank, of "interleaved".
    stages: what is in each, as in ``"embed,layers.0-3|layers.4-7,head"``; None: balanced by work
    and memory. ``table("pipeline")`` shows it.
    outputs: a forward of a mesh with pp has no gradients, and gives its outputs on "all" ranks, or
    on those of the "last" stage and None on the others.
    recompute: "block" keeps only the inputs of blocks (layers that repeat) for backward, which
    computes the rest again; "none" keeps all.
    loss_fn: ``loss_fn(output, **targets)``, for a model that returns no loss.
    strict: raise ShardingError where an axis does not divide.
    passes: a chain of your own in place of that of `passes.chain`, which then takes the options.
    A model on the meta device is initialised on a live mesh shard by shard; the first step raises
    ShardingError by name for what the model itself does not initialise and nothing has loaded.
    After the call on a live mesh nothing here keeps the model's values: ``del model`` frees them.
    Raises CaptureError, MeshError or ShardingError. On a live mesh every rank raises: one that
    failed its own error, the others a MeshError that quotes it.
    """
    spec = MeshSpec.of(mesh)
    rank = _live_rank(spec)
    source = Source(
        model,
        spec,
        example_inputs,
        loss_fn=loss_fn,
        passes=passes,
        param_dtype=param_dtype,
        options={
            "sequence_parallel": sequence_parallel,
            "context_parallel": context_parallel,
            "expert_capacity": expert_capacity,
            "strict": strict,
            "zero": zero,
            "zero_axes": _names(zero_axes),
            "reshard_after_forward": reshard_after_forward,
            "offload": offload,
            "recompute": recompute,
            "reduce_dtype": reduce_dtype and str(reduce_dtype).rpartition(".")[2],
            "microbatches": microbatches,
            "schedule": schedule,
            "stages": stages,
            "chunks": chunks,
            "outputs": outputs,
        },
    )

    def compile_(cut: str | None = None) -> Program:
        source.recut(cut)
        _refuse_what_is_no_model(model)
        _refuse_what_is_no_type(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        _refuse_what_is_no_choice(zero, zero_axes, offload, reshard_after_forward)
        return source.program(model.training)

    asked = any(getattr(step, "stages", None) for step in passes or ()) or stages is not None
    program = compile_() if rank is None else checks.everywhere(compile_, asked)
    say("emitting")
    return ShardedModule(program, rank or 0, rank is not None, source)


@dataclass(eq=False, kw_only=True)
class Source:
    """A model and how to compile it: in the mode it is in, and in the other one when asked for.

    Once it has let go of the model's values, ``model`` is a skeleton of it; ``caller`` and
    ``parameters`` refer to the model itself and its own for as long as something else keeps them.
    """

    model: nn.Module = field(kw_only=False)
    mesh: MeshSpec = field(kw_only=False)
    example_inputs: Any = field(default=None, kw_only=False)
    loss_fn: Any = None
    passes: list[Pass] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    raise_precision: bool = False
    param_dtype: torch.dtype | None = None
    compiled: dict[bool, tuple[Program, Output]] = field(default_factory=dict)
    caller: Any = None
    parameters: dict[str, Any] = field(default_factory=dict)
    light: bool = False
    cut: str | None = None

    def recut(self, cut: str | None) -> None:
        """Compile with these stages of a pipeline, in text, from here on; None: as before."""
        self.cut = cut or self.cut
        if any(p.stages != cut for p, _ in self.compiled.values() if cut):
            self.compiled.clear()

    @property
    def signature(self) -> inspect.Signature:
        """What the model's forward takes."""
        return inspect.signature(self.model.forward)

    def program(self, training: bool) -> Program:
        """The partitioned Program of the model in training or in evaluation mode."""
        return self._compiled(training)[0]

    def output(self, training: bool) -> Output:
        """The type that forward returns in that mode."""
        return self._compiled(training)[1]

    def _compiled(self, training: bool) -> tuple[Program, Output]:
        if training not in self.compiled:
            # the model itself while there is one: hooks and loss_fn may reach into it
            model = (self.caller and self.caller()) or self.model
            say(f"capturing {type(model).__name__}")
            with in_mode(model, training):
                program, output = capture(
                    model,
                    self.mesh,
                    self.example_inputs,
                    self.loss_fn,
                    self.raise_precision,
                    self.param_dtype,
                )
            if not self.light:
                self.parameters = {n: weakref.ref(p) for n, p in model.named_parameters()}
            _refuse_constants(program, model, {n: p() for n, p in self.parameters.items()})
            other = self.compiled.get(not training)
            like = other[0] if other else None
            program.stages = self.cut
            self.compiled[training] = run(program, self._chain(), like), output
            if self.light:
                _let_go(self.compiled[training][0])
        return self.compiled[training]

    def let_go(self) -> None:
        """Keep no values of the model's parameters from here on: ranks hold their slices. The model
        stays as it is, for whoever else refers to it."""
        self.light = True
        for program, _ in self.compiled.values():
            _let_go(program)
        if self.caller is None:
            self.caller, self.model = weakref.ref(self.model), skeleton(self.model)

    def _chain(self) -> list[Pass]:
        from passes import chain

        if self.passes is None:
            return chain(**self.options)
        usual = inspect.signature(chain).parameters
        asked = [f"{k}={v!r}" for k, v in self.options.items() if v != usual[k].default]
        if asked:
            raise ShardingError(
                message(
                    "autoshard",
                    f"options {', '.join(asked)}",
                    f"passes={'; '.join(map(str, self.passes))}"[:500],
                    "a chain of passes of your own has its options in it",
                    f"give them to the chain: passes.chain({', '.join(asked)})",
                )
            )
        return self.passes


def _refuse_constants(program: Program, model: nn.Module, parameters: dict[str, Any]) -> None:
    """Raise CaptureError where the graph holds a parameter as a constant, never to be trained."""
    own = {p.untyped_storage()._cdata: n for n, p in parameters.items() if p is not None}
    constants = [p.value for p in program.values.values() if p.constant]
    strided = [c for c in constants if c.layout is torch.strided]
    found = [own[c.untyped_storage()._cdata] for c in strided if c.untyped_storage()._cdata in own]
    if found:
        raise CaptureError(
            message(
                type(model).__name__,
                f"parameters {', '.join(found)}",
                "read as constants",
                "loss_fn or a hook holds them by themselves, and not the model that they are of",
                "read them through the model, as model.get_parameter(name), or inside its forward",
            )
        )


def _let_go(program: Program) -> None:
    for parameter in program.parameters().values():
        for each in (parameter, *parameter.stacked):
            each.value = hollow(each.value)


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Meanwhile the model trains or evaluates; its parts that were set apart keep their own mode
    when the model's does not change, and get it back afterwards when it does."""
    if model.training == training:
        yield
        return
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _live_rank(spec: MeshSpec) -> int | None:
    """This process's rank in a live mesh; None for a mesh without processes."""
    if spec.device_mesh is None:
        return None
    import torch.distributed as dist

    world = dist.get_world_size() if dist.is_initialized() else 1
    ranks = spec.device_mesh.mesh.flatten().tolist()
    if ranks != list(range(world)):
        raise MeshError(
            message(
                "mesh",
                str(spec),
                f"it has {spec.world_size} ranks, {ranks[:8]}{'...' if len(ranks) > 8 else ''}",
                f"the world has {world}, and a mesh must hold all of them in order",
                f"start {spec.world_size} processes, or make the mesh of all {world}",
            )
        )
    return dist.get_rank()


def _refuse_what_is_no_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(
            message(
                "autoshard",
                "the model",
                f"got {type(model).__name__} {model!r:.80}",
                "it must be a torch.nn.Module",
                "pass the model itself, made and in the mode it is to run in",
            )
        )


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _refuse_what_is_no_type(**given: Any) -> None:
    wrong = [
        f"{name}={value!r}"
        for name, value in given.items()
        if value is not None and value not in FLOATS
    ]
    if wrong:
        raise ShardingError(
            message(
                "autoshard",
                ", ".join(f"option {text}" for text in wrong),
                "got what is no floating torch.dtype",
                "weights and gradients are floating numbers",
                "pass torch.bfloat16, torch.float32, ..., or leave the option out",
            )
        )


def _names(axes: Any) -> Any:
    """Names of mesh axes as a tuple, where they are names at all."""
    if isinstance(axes, str):
        return (axes,)
    return tuple(axes) if isinstance(axes, list) else axes


def _refuse_what_is_no_choice(zero: Any, zero_axes: Any, offload: Any, reshard: Any) -> None:
    wrong = [] if type(zero) is int and 0 <= zero <= 3 else [f"zero={zero!r} is none of 0, 1, 2, 3"]
    flags = {"offload": offload, "reshard_after_forward": reshard}
    wrong += [f"{n}={v!r} is not True or False" for n, v in flags.items() if type(v) is not bool]
    names = _names(zero_axes)
    if names is not None and not (
        isinstance(names, tuple) and names and all(isinstance(n, str) for n in names)
    ):
        wrong.append(f"zero_axes={zero_axes!r} is no tuple of names of mesh axes")
    if wrong:
        raise ShardingError(
            message(
                "autoshard",
                "; ".join(wrong),
                "options of ZeRO",
                "they say what is shared out, over which axes, and where it is held",
                'write them as in zero=3, zero_axes=("dp",), offload=True',
            )
        )
