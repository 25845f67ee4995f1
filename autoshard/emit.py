"""Program -> ShardedModule: one rank's module, with this rank's slices of the parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoshard import collectives
from autoshard.collectives import Link
from autoshard.cost import BYTES_PER_SECOND, FLOPS_PER_SECOND, is_cut
from autoshard.errors import MeshError, ShardingError, message
from autoshard.layout import R, local_indices
from autoshard.mesh import SubMesh
from autoshard.meta import Initialiser, on_device, unfilled
from autoshard.objective import loss_graph, no_loss
from autoshard.outline import code_of, code_of_stage, outlined
from autoshard.outputs import Output
from autoshard.pipeline import Stage, plan_of, refuse_what_is_not_joined
from autoshard.program import Parameter, Program
from autoshard.runtime import (
    along,
    boxes,
    checks,
    failures,
    gather,
    optimizers,
    rng,
    sections,
    stacks,
    zero,
)
from autoshard.runtime.attention import gathered_attention, ring_attention
from autoshard.runtime.buckets import Reducer
from autoshard.runtime.dispatch import to_experts, to_tokens
from autoshard.runtime.loads import ExpertLoad, Load, loads_of, share_of
from autoshard.runtime.process_groups import even_out, groups_of
from autoshard.runtime.shared_rows import own_rows, share_rows
from autoshard.runtime.staged import Line, Wire, along_pipeline
from autoshard.runtime.ties import Ties
from autoshard.schedule import Costs
from autoshard.timeline import Timeline

LINKED = {
    *collectives.CONVERSIONS,
    collectives.all_reduce_max,
    collectives.runwise,
    collectives.local_places,
    ring_attention,
    gathered_attention,
    to_experts,
    to_tokens,
    share_rows,
    own_rows,
    *collectives.LOCAL,
    rng.draw,
    *zero.CALLS,
}

#: Of those, what sends nothing.
SILENT = {
    rng.draw,
    collectives.runwise,
    collectives.local_places,
    gathered_attention,
    *collectives.LOCAL,
}

#: At which argument some name what they need.
NAMED_AT = dict.fromkeys(zero.CALLS, 2) | {
    ring_attention: 6,
    gathered_attention: 6,
    to_experts: 5,
}

#: What a ShardedModule sets on itself: kept apart from the model's names, which may be the same.
OWN = frozenset(
    "program rank_index live _source _signature _device _made_groups _groups _checked _syncing"
    " _places _load _frozen _modes _running _reducer _store _unfilled"
    " wire ties nothing held _counts".split()
)


def bind(
    graph: fx.Graph,
    mesh: SubMesh,
    rank: int,
    groups: dict[tuple[str, ...], str],
    device: torch.device | None = None,
    units: Mapping[str, zero.Weights] | None = None,
    named: Mapping[str, Any] | None = None,
) -> fx.GraphModule:
    """A copy of the graph for one rank: mesh axes become links, known local sizes become numbers,
    names of ``units`` become the rank's own, other names what is ``named`` so, tensors made inside
    it are made on ``device``, and recomputed blocks become submodules."""
    root = nn.Module()
    held = {name: f"unit_{i}" for i, name in enumerate(units or {})}
    held |= {name: name for name in named or {}}
    for name, what in {**(units or {}), **(named or {})}.items():
        setattr(root, held[name], what)
    return outlined(bound(graph, mesh, rank, groups, device, held), root)


def bound(
    graph: fx.Graph,
    mesh: SubMesh,
    rank: int,
    groups: dict[tuple[str, ...], str],
    device: torch.device | None = None,
    held: Mapping[str, str] | None = None,
) -> fx.Graph:
    """What `bind` makes, as a flat graph. ``held``: attributes that names become."""
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    for node in list(new.nodes):
        if device is not None and node.op == "call_function":
            place = {k: device for k, v in node.kwargs.items() if isinstance(v, torch.device)}
            node.kwargs = {**node.kwargs, **place}
            node.args = tuple(device if isinstance(v, torch.device) else v for v in node.args)
        linked = node.op == "call_function" and node.target in LINKED
        named = NAMED_AT.get(node.target) if linked else None
        if named is not None and held and node.args[named] in held:
            with new.inserting_before(node):
                node.update_arg(named, new.get_attr(held[node.args[named]]))
        elif linked and node.target is to_experts:
            node.update_arg(named, None)  # nothing takes note of loads
        if not linked or not isinstance(node.args[1], tuple):
            continue
        axes = node.args[1]
        if not axes:
            continue
        silent = node.target in SILENT
        group = "" if silent or not groups else groups[axes]  # those send nothing
        link = Link.of(mesh, rank, axes, group)
        node.update_arg(1, link)
        if node.target in collectives.LOCAL and isinstance(node.args[0], int):
            node.replace_all_uses_with(node.target(node.args[0], link))
            new.erase_node(node)
    return new


def needed_groups(program: Program, rank: int) -> list[tuple[str, ...]]:
    """Every set of mesh sub-axes that some collective runs over, in an order all ranks share."""
    axes = program.mesh.axes
    found = {tuple(c.axes) for c in program.conversions}
    in_units = program.in_units
    for key, parameter in program.values.items():
        if key not in in_units:
            found |= {over for *_, over in gather.reductions(parameter, program.mesh)}
    return sorted(found, key=lambda g: tuple(axes.index(a) for a in g))


@dataclass(eq=False)
class Mode:
    """What a module runs in training, or in evaluation: one program, bound to its rank.

    ``places``: by placeholder, the submodule and name under which the local tensor is held;
    ``loads``: what takes note of a mixture of experts, by name. On a mesh with pp ``lines`` has
    what the rank's stages run, by stage, for the loss (True) and for all outputs, and ``runs`` runs
    them on a live mesh; ``graph_module`` is then that of the first of them for one micro-batch.
    """

    program: Program
    output: Output
    places: dict[str, tuple[nn.Module, str]]
    graph_module: fx.GraphModule
    loss_module: fx.GraphModule | None
    units: dict[str, zero.Weights]
    loads: dict[str, Load]
    lines: dict[bool, dict[int, BoundStage]] = field(default_factory=dict)
    runs: dict[bool, Line] = field(default_factory=dict)


@dataclass(eq=False)
class BoundStage:
    """What a rank runs of one of its stages: graphs for all micro-batches, a module for each."""

    before: fx.Graph
    body: fx.GraphModule
    after: fx.Graph


def bound_stage(stage: Stage, *place: Any) -> BoundStage:
    """A stage of a plan on one rank; ``place``: what `bind` takes behind the graph."""
    before, after = bind(stage.before.graph, *place), bind(stage.after.graph, *place)
    return BoundStage(before.graph, bind(stage.body.graph, *place), after.graph)


class ShardedModule(nn.Module):
    """One rank's part of the model: parameters are this rank's slices under the model's own names.

    ``module(**batch)`` gives the model's outputs for this data rank's rows; ``train_step`` the loss
    of the global batch, with gradients reduced. ``eval()`` and ``train()`` change between two
    graphs over the same parameters; the second is compiled when first asked for. Raises
    CaptureError for wrong input names, MeshError when the mesh has ranks that do not run.

    ``source`` compiles the model (``program(training)``, ``output(training)``) and tells what its
    forward takes (``signature``).
    """

    def __init__(self, program: Program, rank: int, live: bool, source: Any):
        super().__init__()
        self.program, self.rank_index, self.live = program, rank, live
        self.training = program.training
        self._source, self._signature = source, source.signature
        self._device = _device_of(program) if live else None
        self._made_groups = groups_of(program.mesh.mesh, self._device) if live else None
        self._groups: dict[tuple[str, ...], Any] = {}
        self.wire: Any = None
        self.ties: Any = None
        self._counts: dict[bool, int] = {}  # micro-batches, by mode
        self._checked: set[bool] = set()  # modes whose first batch was compared between ranks
        self._syncing = True
        self._load: list[ExpertLoad] = []
        self._store = zero.Store(program, rank, self._device)
        #: what nothing has filled, by the model's own name: its placeholder, and that's version
        self._unfilled: dict[str, tuple[str, int]] = {}
        #: what this rank holds any of: all but the parameters of other stages, by placeholder
        self.held = {k: p for k, p in program.values.items() if p.held_by(program.mesh, rank)}
        self._places = self._own(program)
        self._store.settle()
        #: an empty parameter, where this rank's stages have none to train
        self.nothing = self._nothing_to_train() if live else None
        self._frozen = [k for k, p in self.held.items() if not (p.buffer or p.trainable)]
        self._modes = {program.training: self._mode(program, self._places)}
        self._enter(program.training)
        self.register_state_dict_post_hook(stacks.take_apart)
        self.register_load_state_dict_pre_hook(stacks.put_together)
        self._reducer = Reducer(self) if live else None
        for key, parameter in self.held.items():
            if live and not parameter.buffer:
                cut = bool(parameter.zero or parameter.stacked) or is_cut(parameter.layout)
                optimizers.watch(self.tensor(key), parameter.name, cut)
        if live:
            source.let_go()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardingError(
            message(
                "ShardedModule",
                "a copy or a pickle of the module",
                f"mesh {self.program.mesh.mesh}",
                "it holds process groups, hooks and a graph of this process",
                "call autoshard again, or keep state_dict() or full_state_dict()",
            )
        )

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedModule:
        for tensor in (*self.parameters(), *self.buffers()):
            before = tensor.detach().flatten()[:0]
            after = fn(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                raise ShardingError(
                    message(
                        "ShardedModule",
                        "another dtype or device",
                        f"{before.dtype} on {before.device} -> {after.dtype} on {after.device}",
                        "the graph was compiled for what the model was, and may name both",
                        "convert the model, and pass that to autoshard",
                    )
                )
        return super()._apply(fn, recurse)

    def _mode(self, program: Program, places: dict[str, tuple[nn.Module, str]]) -> Mode:
        groups = {}
        if self.live:
            assert self._made_groups is not None
            about = program, self.rank_index
            even_out()
            groups = self._made_groups.along(*about, needed_groups(*about))
            sums = sorted(sections.gradient_groups(*about))
            self._store.sums.update(self._made_groups.along(*about, sums, "gradients"))
            self._groups = groups if program is self.program else self._groups
            if program.pipeline is not None and self.wire is None:
                self._reach_along_pipeline(program)
        names = {axes: group.group_name for axes, group in groups.items()}
        self._store.groups.update(groups)
        weights = zero.weights_of(program, self._store)
        loads = {name: Load(mixture) for name, mixture in program.mixtures.items()}
        named = {**program.attentions, **loads}
        place = (program.mesh, self.rank_index, names, self._device, weights, named)
        output, has_loss = self._source.output(program.training), program.loss is not None
        if program.pipeline is None:
            graph_module = bind(program.graph, *place)
            loss_module = bind(loss_graph(program), *place) if has_loss else None
            return Mode(program, output, places, graph_module, loss_module, weights, loads)
        lines = {}
        for for_loss in (False, True) if has_loss else (False,):
            plan = plan_of(program, for_loss)
            own = program.pipeline.of_position(program.mesh.stage(self.rank_index))
            lines[for_loss] = {s: bound_stage(plan.stages[s], *place) for s in own}
        first, *_ = lines[has_loss].values()
        mode = Mode(program, output, places, first.body, None, weights, loads, lines)
        if self.live:
            mode.runs = {fl: Line(self, program, own, fl) for fl, own in lines.items()}
            self.wire.meet(edge for line in mode.runs.values() for edge in line.plan.edges)
        return mode

    def _reach_along_pipeline(self, program: Program) -> None:
        assert self._made_groups is not None
        ranks = tuple(along_pipeline(program.mesh, self.rank_index))
        at = program.mesh.stage(self.rank_index)
        self.wire = Wire(self._made_groups, ranks, program.pipeline.place, at)
        failures.watch(self.wire)
        self.ties = Ties(self, self._made_groups)
        self._store.reductions.lags = True

    def set_syncing(self, syncing: bool, stage: int | None = None) -> None:
        """Whether backward reduces gradients from here on; ``stage``: those of a stage alone."""
        self._syncing = self._store.syncing = syncing
        self._store.reductions.reached = False
        if self._reducer is not None:
            self._reducer.stage, self._reducer.reached = stage, False

    def settle(self) -> None:
        """A step in stages is done: wait for the reductions that are under way."""
        if self._reducer is not None:
            self._reducer.settle()
        self._store.reductions.settle()

    def complete(self, stage: int) -> None:
        """The last backward of a stage is done: gradients are reduced that it has not added to."""
        if self._reducer is not None:
            self._reducer.complete(stage)
        self._store.complete(stage, self.units.values())

    def held_parameters(self) -> dict[str, Parameter]:
        """Of what this rank holds, the parameters."""
        return {key: p for key, p in self.held.items() if not p.buffer}

    def _nothing_to_train(self) -> nn.Parameter | None:
        found = [p for p in self.program.parameters().values() if p.trainable]
        if not found or any(p.trainable for p in self.held_parameters().values()):
            return None
        return nn.Parameter(torch.empty(0, dtype=found[0].value.dtype, device=self._device))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module.named_parameters`: this rank's slices. A rank of a pipeline whose stages
        have nothing to train has an empty parameter too, in no state dict, which never has a
        gradient: optimizers refuse a list of none."""
        yield from super().named_parameters(*args, **kwargs)
        if self.nothing is not None:
            yield "nothing_to_train", self.nothing

    def _enter(self, training: bool) -> None:
        self._running = self._modes[training]

    def train(self, mode: bool = True) -> ShardedModule:
        """Train or, with False, evaluate: dropout off, running statistics. Compiles the model in
        that mode on first use; raises ShardingError when it would cut a parameter differently."""
        if mode not in self._modes:
            program = self._compiled(mode)
            self._modes[mode] = self._mode(program, self._shared(program))
        super().train(mode)
        self._enter(mode)
        return self

    def _compiled(self, training: bool) -> Program:
        if self.live:
            return checks.everywhere(lambda _: self._source.program(training), True)
        return self._source.program(training)

    @property
    def graph_module(self) -> fx.GraphModule:
        """The emitted graph of this rank, in the mode the module is in."""
        return self._running.graph_module

    @property
    def units(self) -> dict[str, zero.Weights]:
        """What the emitted graph gathers together, by name, in the mode the module is in."""
        return self._running.units

    @property
    def running(self) -> Program:
        """The program of the mode the module is in."""
        return self._running.program

    def _own(self, program: Program) -> dict[str, tuple[nn.Module, str]]:
        initial = None
        if self.live and any(p.value.is_meta for p in program.values.values()):
            initial = Initialiser(self._source.model, _common_seed(), self._device)
        places = {}
        for key, parameter in self.held.items():
            name = _constant_name(program, parameter) if parameter.constant else parameter.name
            if initial is None or not parameter.value.is_meta:
                places[key] = self._hold(program, parameter, name)
                continue
            values = _Initial(initial)
            places[key] = self._hold(program, parameter, name, values)
            if not values.asked:  # a rank without any of a stack, which says what the others say
                values(parameter.own[0])
            if values.lacking:
                version = _held(places[key])._version
                self._unfilled |= {own.name: (key, version) for own in parameter.own}
        return places

    def _filled(self, names: Iterable[str]) -> None:
        """Tensors of these names now hold other values, on all ranks: also on one that has an empty
        part of them, and so wrote nothing that could be noticed."""
        self._store.stale.update(self._store.kept)
        written = {self._unfilled.pop(name)[0] for name in names if name in self._unfilled}
        for name, (key, _) in self._unfilled.items():
            if key in written:  # another of a stack, which has no values for that
                self._unfilled[name] = key, self.tensor(key)._version

    def _refuse_unfilled(self, who: str) -> None:
        """Raise ShardingError while tensors that the model could not initialise hold no values."""
        for name, (key, version) in list(self._unfilled.items()):
            if self.tensor(key)._version != version:  # written in place, by whatever loads
                del self._unfilled[name]
        if self._unfilled:
            raise unfilled(who, self._source.model, self._unfilled)

    def _hold(
        self, program: Program, parameter: Parameter, name: str, value_of: Any = None
    ) -> tuple[nn.Module, str]:
        mesh, rank = program.mesh, self.rank_index
        holder: nn.Module = self
        *path, last = name.split(".")
        for step in path:
            holder = holder._modules.setdefault(step, nn.Module())  # type: ignore[assignment]
        # not by register_*: those refuse a name that this class uses too, such as `table`
        if not parameter.buffer:
            holder._parameters[last] = self._store.hold(parameter, mesh, value_of)
            return holder, last
        value = gather.local_value(parameter, mesh, rank, value_of)
        value = value if self._device is None else on_device(value, self._device)
        holder._buffers[last] = value
        if not parameter.persistent:
            holder._non_persistent_buffers_set.add(last)
        return holder, last

    def _shared(self, program: Program) -> dict[str, tuple[nn.Module, str]]:
        """Where another program finds the tensors that this module holds already."""
        held = {p.name: key for key, p in self.program.values.items() if not p.constant}
        self._refuse_other_stacks(program)
        places, different = {}, []
        for key, parameter in program.values.items():
            if parameter.constant:
                places[key] = self._hold(program, parameter, _constant_name(program, parameter))
                continue
            here = held[parameter.name]
            own = self.program.values[here]
            if own.buffer and own.holders is None and parameter.holders is not None:
                self._leave_to_holders(here, parameter.holders)
            if not _held_alike(own, self.program.mesh, parameter, program.mesh):
                different.append(parameter.name)
            elif parameter.held_by(program.mesh, self.rank_index):
                places[key] = self._places[here]
        if different:
            raise ShardingError(
                message(
                    "eval" if not program.training else "train",
                    f"parameters {', '.join(different)}",
                    f"mesh {program.mesh.mesh}",
                    "the graphs of training and of evaluation cut them differently, or read them "
                    "in other stages",
                    "give a chain with passes= that assigns the same axes in both",
                )
            )
        return places

    def _leave_to_holders(self, key: str, holders: tuple[int, ...]) -> None:
        """A buffer that all ranks hold is written by steps of the mode that is now compiled: from
        here on only ranks of the stage that writes it hold it, unless another one reads it."""
        program = self.program
        for plan in program.plans.values():
            for stage, at in zip(plan.stages, program.pipeline.place, strict=True):
                if at not in holders and any(key in piece.takes for piece in stage.pieces):
                    return
        program.values[key].holders = holders
        if program.mesh.stage(self.rank_index) not in holders:
            holder, last = self._places.pop(key)
            del holder._buffers[last], self.held[key]
            self._unfilled = {n: at for n, at in self._unfilled.items() if at[0] != key}

    def _refuse_other_stacks(self, program: Program) -> None:
        """Raise ShardingError where another program keeps parameters one by one that this module
        keeps stacked, or the other way round."""
        here, there = (
            {own.name: [each.name for each in p.own] for p in each.values.values() for own in p.own}
            for each in (self.program, program)
        )
        other = [name for name in here if name in there and here[name] != there[name]]
        if other:
            raise ShardingError(
                message(
                    "eval" if not program.training else "train",
                    f"parameters {', '.join(other)}",
                    f"mesh {program.mesh.mesh}",
                    "experts that are a loop in one mode only are kept stacked in one mode only",
                    "write forward so that it computes them in the same way in both",
                )
            )

    def tensor(self, key: str) -> torch.Tensor:
        """The local tensor of a placeholder (a parameter, buffer or constant)."""
        return _held(self._places[key])

    def held_tensors(self) -> dict[str, torch.Tensor]:
        """What this rank holds, by placeholder. Backward reads a buffer as it was: one that a step
        writes is handed over as a copy."""
        updated = self.running.buffer_updates
        return {
            key: _held(place).clone() if key in updated else _held(place)
            for key, place in self._running.places.items()
        }

    def arguments(self, args: Any, kwargs: Any) -> list[Any]:
        """The graph's arguments: parameters, then inputs in the order captured."""
        return self._behind_held(self._inputs(args, kwargs))

    def _behind_held(self, inputs: dict[str, Any]) -> list[Any]:
        return [*self.held_tensors().values(), *inputs.values()]

    def _inputs(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """The inputs of a call, by placeholder, in the order captured."""
        given = dict(kwargs)
        if args:
            given = {**self._signature.bind_partial(*args).arguments, **given}
        if not torch.compiler.is_compiling():
            checks.call(self.running, self._signature, given)
            checks.frozen(self.program, {key: self.tensor(key) for key in self._frozen})
        return {key: given[name] for key, name in self.running.inputs.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.running.pipeline is not None:
            return self._forward_in_stages(args, kwargs)
        arguments = self._behind_held(self._checked_inputs(args, kwargs))
        with self._sending(), self._gathering(own_loss=False):
            results = self.graph_module(*arguments)
        self._update_buffers(results, self.running.buffer_updates)
        return self.structured(results)

    def _sending(self) -> Any:
        """The context of what other ranks wait for."""
        if self._made_groups is None or torch.compiler.is_compiling():
            return contextlib.nullcontext()
        return self._made_groups.step()

    def _gathering(self, own_loss: bool) -> Any:
        """The context in which a graph runs that gathers weights; none where there are none."""
        has_units = bool(self._store.shards)
        return self._store.forward(own_loss) if has_units else contextlib.nullcontext()

    def _checked_inputs(self, args: Any, kwargs: Any) -> dict[str, Any]:
        mode = self.running.training
        if not self.live and self.program.mesh.mesh.world_size > 1:
            self._inputs(args, kwargs)
            raise self._alone()
        if self.live and not torch.compiler.is_compiling():
            self._refuse_other_world()
        if not self.live or mode in self._checked or torch.compiler.is_compiling():
            return self._inputs(args, kwargs)
        # the first batch: all ranks tell each other what they think of theirs
        inputs, error = dict[str, Any](), None
        try:
            self._refuse_unfilled("the first step")
            inputs = self._inputs(args, kwargs)
        except Exception as caught:
            error = caught
        checks.first_batch(self, list(inputs.values()), error)
        if self.running.pipeline is not None:
            self._counts[mode] = checks.micro_batches(self.running, inputs)
        self._checked.add(mode)
        return inputs

    def _refuse_other_world(self) -> None:
        import torch.distributed as dist

        assert self._made_groups is not None
        if dist.group.WORLD is not self._made_groups.world:
            raise MeshError(
                message(
                    "ShardedModule",
                    "the default process group",
                    "it was destroyed" if dist.group.WORLD is None else "it is another one now",
                    "the module sends over groups of the one in which it was made",
                    "call autoshard again, behind init_process_group and with a mesh of it",
                )
            )

    def _alone(self) -> MeshError:
        import torch.distributed as dist

        world = dist.get_world_size() if dist.is_initialized() else 1
        mesh = self.program.mesh.mesh
        fits = world == mesh.world_size
        return MeshError(
            message(
                "ShardedModule",
                f"mesh {mesh}",
                f"it has {mesh.world_size} ranks; this world has {world}"
                if not fits
                else "the module was made for a MeshSpec",
                "one rank's part cannot run without the others, and this one has no process group",
                "pass the DeviceMesh of this world to autoshard"
                if fits
                else f"start {mesh.world_size} processes and pass a DeviceMesh, or use verify",
            )
        )

    def structured(self, results: Any) -> Any:
        """Flat results as the model's own kind of output."""
        spec = self.running.output_spec
        named = pytree.tree_unflatten(list(results[: spec.num_leaves]), spec)
        return self._running.output.restore(named)

    def train_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward; returns the loss of the global batch, the same on every rank."""
        loss_module = self._running.loss_module
        if self.running.loss is None:
            raise no_loss("train_step", self.running)
        if not torch.is_grad_enabled():
            raise ShardingError(
                message(
                    "train_step",
                    "gradients",
                    "they are switched off (torch.no_grad, inference_mode)",
                    "a training step goes backward from its loss",
                    "call it outside, or call the module itself for its loss alone",
                )
            )
        if self.running.pipeline is not None:
            return self._step_in_stages(args, kwargs)
        arguments = self._behind_held(self._checked_inputs(args, kwargs))
        assert loss_module is not None
        with self._sending():
            with self._gathering(own_loss=True):
                results = loss_module(*arguments)
            updates = {k: i + 1 for i, k in enumerate(self.running.buffer_updates)}
            self._update_buffers(results, updates)
            results[0].backward()
        return results[0].detach()

    def _step_in_stages(self, args: Any, kwargs: Any) -> torch.Tensor:
        program, syncing = self.running, self._syncing
        if not self.live:
            self._checked_inputs(args, kwargs)  # which says what is missing
        with failures.told(self, "train_step"):
            inputs = self._checked_inputs(args, kwargs)
            line = self._running.runs[True]
            self.ties.reopen()
            found = line.run(inputs, self._counts[program.training], syncing)
            if syncing:
                self.ties.sum()
            loss, *updates = line.plan.results
            self._update_named(found, updates)
            whole = along.loss(self, found.get(loss))
            self.wire.made.broken = False
            return whole

    def _forward_in_stages(self, args: Any, kwargs: Any) -> Any:
        program = self.running
        if not self.live:
            self._checked_inputs(args, kwargs)
        with failures.told(self, "forward"), torch.no_grad():
            inputs = self._checked_inputs(args, kwargs)
            line = self._running.runs[False]
            count = self._counts[program.training]
            if count > 1:
                refuse_what_is_not_joined(program)
            found = line.run(inputs, count, self._syncing)
            results = list(line.plan.results)
            self._update_named(found, [results[i] for i in program.buffer_updates.values()])
            shown = results[: program.output_spec.num_leaves]  # not what buffers become
            last = program.pipeline.outputs == "last"
            give = along.on_last if last else along.everywhere
            outputs = give(self, line.plan, shown, found)
            self.wire.made.broken = False
        if outputs is None:
            return None
        return self.structured([outputs[name] for name in shown])

    def timeline(self) -> Timeline:
        """When each stage ran what in the last `train_step`, on a live mesh with pp; all ranks call
        it, and wait. Save it as a picture or a trace with its ``save``. Raises ShardingError where
        there is none."""
        line = self._running.runs.get(True)
        if line is None or not line.spans:
            raise ShardingError(
                message(
                    "timeline",
                    "a step in stages",
                    f"mesh {self.program.mesh.mesh}",
                    "a mesh without pp has no stages"
                    if self.program.pipeline is None
                    else "there has been none"
                    if self.live
                    else "processes run one, on a live mesh",
                    "call it after train_step on a live mesh with pp; forecast() predicts one",
                )
            )
        return line.timeline()

    def forecast(
        self,
        microbatches: int | None = None,
        flops_per_second: float = FLOPS_PER_SECOND,
        bytes_per_second: float = BYTES_PER_SECOND,
        costs: Costs | None = None,
        processors: int | None = None,
    ) -> Timeline:
        """When each stage is to run what in a `train_step` on a mesh with pp, predicted from its
        work and from what it sends, without any process: `autoshard.forecast.forecast`."""
        from autoshard.forecast import forecast

        rates = flops_per_second, bytes_per_second
        return forecast(self.running, microbatches, *rates, costs, processors)

    def _update_named(self, found: Mapping[str, Any], names: list[str]) -> None:
        with torch.no_grad():
            for key, name in zip(self.running.buffer_updates, names, strict=True):
                if name in found:
                    _held(self._running.places[key]).copy_(found[name])

    def _update_buffers(self, results: Any, updates: dict[str, int]) -> None:
        with torch.no_grad():
            for key, position in updates.items():
                _held(self._running.places[key]).copy_(results[position])

    def rank(self, r: int) -> ShardedModule:
        """Rank ``r``'s module, for inspection; without a process group."""
        if not 0 <= r < self.program.mesh.mesh.world_size:
            raise MeshError(
                message(
                    "rank",
                    str(r),
                    f"mesh {self.program.mesh.mesh}",
                    "no such rank",
                    "pick a smaller one",
                )
            )
        return ShardedModule(self.program, r, False, self._source)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them; the next backward outside reduces the sum."""
        self.set_syncing(False)
        try:
            yield
        finally:
            self.set_syncing(True)

    @property
    def code(self) -> str:
        """The emitted graph as Python text, and that of every recomputed block; with pp what each
        of the rank's stages runs before all micro-batches, in each, and after them."""
        lines = self._running.lines
        if not lines:
            return code_of(self.graph_module)
        own = lines[self.running.loss is not None].items()
        return "\n\n".join(code_of_stage(at, s.before, s.body, s.after) for at, s in own)

    def weights_changed(self) -> None:
        """Call on all ranks after parameters were written through ``.data`` outside of an
        optimizer's step, which nothing can notice: weights kept whole are gathered again."""
        self._store.stale.update(self._store.kept)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As `nn.Module.load_state_dict`, of this rank's own parts. Raises ShardingError for
        ``assign``: other tensors in place of the parameters would not be gathered or reduced."""
        if assign:
            raise ShardingError(
                message(
                    "load_state_dict",
                    "assign=True",
                    f"{len(state_dict)} tensors",
                    "gathers and reductions belong to the parameters that are there",
                    "leave assign out, so that values are copied",
                )
            )
        return super().load_state_dict(state_dict, strict)

    @failures.telling
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that the norm of the whole model's gradient is at most ``max_norm``;
        returns that norm before scaling. Every parameter counts once. Raises ShardingError while
        gradients accumulated under `no_sync` are not reduced."""
        self._store.reductions.refuse_unreduced("clip_grad_norm_")
        total = gather.squared_norm(self)
        if self.live:
            total = total.to(self._device)
            import torch.distributed as dist

            dist.all_reduce(total)
        norm = total.sqrt()
        gather.scale_gradients(self, norm, max_norm)
        return norm

    @failures.telling
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Every parameter and persistent buffer whole, under all its original names, on every rank.
        Raises ShardingError while one that was on the meta device holds no values."""
        # of what only ranks of another stage hold, only these know
        asks = self.live and self.program.pipeline is not None
        name, held, out = "full_state_dict", self.held, {}
        checks.together(asks, name, lambda: self._refuse_unfilled(name))
        for key, parameter in self.program.values.items():
            if parameter.buffer and not parameter.persistent:
                continue
            local = self.tensor(key).detach() if key in held else None
            whole = self._whole(parameter, local)
            for own, value in _taken_apart(parameter, whole):
                out.update(dict.fromkeys(own.names, value))
        return out

    @torch.no_grad()
    def load_full_state_dict(
        self, state: Mapping[str, torch.Tensor], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Take this rank's slices out of whole tensors under the model's own names: the inverse of
        `full_state_dict`, for any mesh. One name of a tied parameter is enough.

        Returns the names missing and those unexpected. Raises ShardingError, before anything is
        changed, that lists all wrong shapes and, when ``strict``, all such names.
        """
        from autoshard.runtime.checkpoint import kept, named

        every, held = named(self), kept(self)
        known = {n: p for p in every.values() for n in p.names}
        missing = [name for name, p in every.items() if not any(n in state for n in p.names)]
        unexpected = [n for n in state if n not in known]
        wrong = [
            f"{n} is {tuple(x.shape)}, not {tuple(known[n].value.shape)}"
            for n, x in state.items()
            if n in known and x.shape != known[n].value.shape
        ]
        if wrong or (strict and (missing or unexpected)):
            told = [f"missing {', '.join(missing)}"] if missing else []
            told += [f"unexpected {', '.join(unexpected)}"] if unexpected else []
            raise ShardingError(
                message(
                    "load_full_state_dict",
                    "; ".join([*told, *wrong]),
                    f"got {len(state)} tensors",
                    "whole tensors under the names of the model's own state_dict() are needed",
                    "pass full_state_dict() of any mesh, or the model's state_dict()",
                )
            )
        for name, parameter in every.items():
            whole = next((state[n] for n in parameter.names if n in state), None)
            if whole is not None and name in held:
                local = held[name][1]
                boxes.fill(parameter, self.program.mesh, self.rank_index, local, whole)
            if whole is not None:
                self._filled(parameter.names)
        return missing, unexpected

    @failures.telling
    def save_checkpoint(self, path: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Save parameters, buffers and the optimizer's state into the directory ``path``, from all
        ranks at once: `autoshard.runtime.checkpoint.save`."""
        from autoshard.runtime import checkpoint

        checkpoint.save(self, path, optimizer)

    @failures.telling
    def load_checkpoint(self, path: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load what `save_checkpoint` wrote, on any mesh: `autoshard.runtime.checkpoint.load`."""
        from autoshard.runtime import checkpoint

        checkpoint.load(self, path, optimizer)

    @failures.telling
    def save_pretrained(self, path: Any, max_shard_bytes: int = 5 * 10**9) -> None:
        """Write whole tensors as safetensors, and the model's config, as transformers reads them:
        `autoshard.runtime.pretrained.save`."""
        from autoshard.runtime import pretrained

        pretrained.save(self, path, max_shard_bytes)

    @failures.telling
    def load_pretrained(self, path: Any, strict: bool = True) -> tuple[list[str], list[str]]:
        """Read this rank's slices out of safetensors files: `autoshard.runtime.pretrained.load`."""
        from autoshard.runtime import pretrained

        return pretrained.load(self, path, strict)

    @failures.telling
    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """Every gradient whole, by parameter name, on every rank; None where no rank has any."""
        grads = {key: self.tensor(key).grad for key in self.held_parameters()}
        there = self._somewhere({key for key, grad in grads.items() if grad is not None})
        out: dict[str, torch.Tensor | None] = {}
        for key, parameter in self.program.parameters().items():
            if key not in there:
                out |= {own.name: None for own in parameter.own}
                continue
            grad = grads.get(key)
            if grad is None and key in grads:
                grad = torch.zeros_like(self.tensor(key))
            whole = self._whole(parameter, grad)
            out |= {own.name: value for own, value in _taken_apart(parameter, whole)}
        return out

    def _somewhere(self, here: set[str]) -> set[str]:
        """Of what some rank has, by placeholder, all; ``here``: what this one has. Ranks that hold
        the same parameters have the same."""
        if not self.live or self.program.pipeline is None:
            return here
        import torch.distributed as dist

        keys = list(self.program.parameters())
        flags = torch.tensor([key in here for key in keys], dtype=torch.int32, device=self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return {key for key, flag in zip(keys, flags.tolist(), strict=True) if flag}

    def _whole(self, parameter: Parameter, local: torch.Tensor | None) -> torch.Tensor:
        """``local``: this rank's part, None where it holds none of the parameter."""
        mesh = self.program.mesh
        local = local if self._device is None or local is None else local.to(self._device)
        whole_here = not parameter.zero and all(s in ("I", R) for s in parameter.layout.values())
        if local is not None and whole_here and parameter.holders is None:
            return local.clone()
        if not self.live:
            raise MeshError(
                message(
                    "full_state_dict",
                    parameter.name,
                    f"mesh {mesh.mesh}",
                    "a module made for a MeshSpec holds one rank's slices only",
                    "use verify, or a live DeviceMesh",
                )
            )
        import torch.distributed as dist

        whole = gather.place(parameter, local, mesh, self.rank_index, self._device).contiguous()
        # as integers: a sum of numbers would turn a -0.0 into 0.0
        dist.all_reduce(whole.reshape(-1).view(torch.uint8))
        return whole

    @failures.telling
    def expert_load(self) -> list[ExpertLoad]:
        """How tokens were spread over experts and ranks in the last ``train_step`` or forward in
        the mode that the module is in, by mixture in the order of the graph: of all micro-batches
        of a pipeline, and of an accumulation the last call. Empty before any, and for a model
        without experts.

        All ranks must call it, in the same mode: it sums over them, and waits. ``table("experts")``
        shows what it gave last. A module made for a MeshSpec runs nothing by itself: it gives an
        empty list, or that of the last step where it is the ``sharded`` of a `verify.Report`.
        """
        if self.live:
            import torch.distributed as dist

            loads, mesh = self._running.loads, self.program.mesh
            self._load = []
            ran = any(load.taken for load in loads.values())
            if self.program.pipeline is not None:  # ranks of other stages may have no mixture
                ran = bool(loads) and self.running.training in self._checked
            if ran:
                share = share_of(loads.values(), mesh, self.rank_index, self._device)
                dist.all_reduce(share)
                self._load = loads_of(self.running.mixtures, share, mesh)
        return self._load

    def table(self, which: str, format: str = "simple", ranks_per_node: int | None = None) -> str:
        """A table of what was done: axes, params, graph, collectives, groups, passes, memory,
        pipeline, attention or experts. With pp, collectives, groups and memory are those of this
        rank's stages. ``ranks_per_node``: that of groups then tells which cross nodes."""
        from autoshard.report import table

        return table(self, which, format, ranks_per_node)

    def __repr__(self) -> str:
        from autoshard.report import summary

        return summary(self)


def _taken_apart(
    parameter: Parameter, whole: torch.Tensor
) -> Iterator[tuple[Parameter, torch.Tensor]]:
    """The model's own parameters in one, each with its tensor; none shares memory with another."""
    if not parameter.stacked:
        yield parameter, whole
        return
    for own, value in zip(parameter.own, whole.unbind(), strict=True):
        yield own, value.clone()


class _Initial:
    """Values of a parameter that is on the meta device, and what the model does not initialise."""

    def __init__(self, initial: Initialiser):
        self.initial = initial
        self.asked = self.lacking = False

    def __call__(self, own: Parameter) -> torch.Tensor:
        value = self.initial(own.name)
        self.asked, self.lacking = True, self.lacking or value is None
        return own.value if value is None else value.to(own.value.dtype)


def _held(place: tuple[nn.Module, str]) -> torch.Tensor:
    holder, last = place
    parameter = holder._parameters.get(last)
    return holder._buffers[last] if parameter is None else parameter  # type: ignore[return-value]


def _constant_name(program: Program, parameter: Parameter) -> str:
    return f"_constants.{'train' if program.training else 'eval'}.{parameter.name}"


def _device_of(program: Program) -> torch.device:
    """The device of this process in a live mesh."""
    kind = program.mesh.mesh.device_mesh.device_type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, getattr(torch, kind).current_device())


def _common_seed() -> int:
    """Rank 0's seed, on every rank."""
    import torch.distributed as dist

    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0)
    return seed[0]


def _held_alike(ours: Parameter, our_mesh: SubMesh, theirs: Parameter, mesh: SubMesh) -> bool:
    """Whether two programs hold the same slices of a parameter, and reduce its gradient alike."""
    if (ours.zero, ours.holders) != (theirs.zero, theirs.holders):
        return False
    cut = any(s not in ("I", R) for p in (ours, theirs) for s in p.layout.values())
    for rank in range(mesh.mesh.world_size if cut else 0):
        for a, b in zip(ours.dims, theirs.dims, strict=True):
            mine = local_indices(a, ours.layout, our_mesh, rank)
            if not torch.equal(mine, local_indices(b, theirs.layout, mesh, rank)):
                return False
    sums = [
        [(p.layout.get(m) == R, m) for m in over.axes]
        for p, over in ((ours, our_mesh), (theirs, mesh))
    ]
    return not ours.trainable or sums[0] == sums[1]
