"""Program -> ShardedModule: one rank's module, with this rank's slices of the parameters."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoshard import collectives
from autoshard.axes import atoms
from autoshard.collectives import Link
from autoshard.errors import CaptureError, MeshError, message
from autoshard.layout import R, local_indices
from autoshard.mesh import SubMesh
from autoshard.program import Parameter, Program
from autoshard.runtime import gather, rng
from autoshard.runtime.buckets import Reducer

LINKED = {*collectives.CONVERSIONS, collectives.all_reduce_max, *collectives.LOCAL, rng.draw}


def local_value(parameter: Parameter, mesh: SubMesh, rank: int) -> torch.Tensor:
    """This rank's slice of a parameter, contiguous and of its own storage."""
    value = parameter.value.detach()
    sliced = value
    for at, dim in enumerate(parameter.dims):
        if any(parameter.layout.get(m) in set(atoms(dim)) for m in mesh.axes):
            wanted = local_indices(dim, parameter.layout, mesh, rank)
            sliced = sliced.index_select(at, wanted.to(value.device))
    return sliced.clone() if sliced is value else sliced


def loss_graph(program: Program) -> fx.Graph:
    """The graph that computes the loss (and buffer updates) and nothing else."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(program.graph, mapping)
    output = next(n for n in program.graph.nodes if n.op == "output")
    results = list(output.args[0])
    kept = [results[program.loss or 0], *(results[i] for i in program.buffer_updates.values())]
    graph.output(tuple(mapping[n] for n in kept))
    graph.eliminate_dead_code()
    return graph


def bind(
    graph: fx.Graph, mesh: SubMesh, rank: int, groups: dict[tuple[str, ...], str]
) -> fx.GraphModule:
    """A copy of the graph for one rank: mesh axes become links, known local sizes become numbers."""
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    for node in list(new.nodes):
        if (
            node.op != "call_function"
            or node.target not in LINKED
            or not isinstance(node.args[1], tuple)
        ):
            continue
        axes = node.args[1]
        if not axes:
            continue
        link = Link(axes, groups.get(axes, ""), mesh.size(axes), mesh.index(rank, axes))
        node.update_arg(1, link)
        if node.target in collectives.LOCAL and isinstance(node.args[0], int):
            node.replace_all_uses_with(node.target(node.args[0], link))
            new.erase_node(node)
    module = fx.GraphModule(torch.nn.Module(), new)
    return module


def needed_groups(program: Program) -> list[tuple[str, ...]]:
    """Every set of mesh sub-axes that some collective runs over, in an order all ranks share."""
    axes = program.mesh.axes
    found = {tuple(c.axes) for c in program.conversions}
    for parameter in program.values.values():
        for _, _, _, over in gather.reductions(parameter, program.mesh):
            found.add(over)
    return sorted(found, key=lambda g: tuple(axes.index(a) for a in g))


def make_groups(program: Program, rank: int) -> dict[tuple[str, ...], Any]:
    """Process groups of the live world, made in the same order on every rank."""
    import torch.distributed as dist

    mesh, made = program.mesh, {}
    for axes in needed_groups(program):
        seen: set[int] = set()
        for first in range(mesh.mesh.world_size):
            if first in seen:
                continue
            ranks = mesh.peers(first, axes)
            seen.update(ranks)
            group = dist.new_group(ranks)
            if rank in ranks:
                made[axes] = group
    return made


class ShardedModule(nn.Module):
    """One rank's part of the model: parameters are this rank's slices under the model's own names.

    ``module(**batch)`` gives the model's outputs for this data rank's rows; ``train_step`` the loss of
    the global batch, with gradients reduced. Raises CaptureError for wrong input names.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        live: bool,
        signature: inspect.Signature,
        output_type: Any,
    ):
        super().__init__()
        self.program, self.rank_index, self.live = program, rank, live
        self._signature, self._output_type = signature, output_type
        self._groups = make_groups(program, rank) if live else {}
        self._local: dict[str, torch.Tensor] = {}
        self._checked = False
        self._syncing = True
        for key, parameter in program.values.items():
            self._own(key, parameter)
        names = {axes: group.group_name for axes, group in self._groups.items()}
        self.graph_module = bind(program.graph, program.mesh, rank, names)
        self._loss_module = None
        if program.loss is not None:
            self._loss_module = bind(loss_graph(program), program.mesh, rank, names)
        self.reducer = Reducer(self) if live else None

    def _own(self, key: str, parameter: Parameter) -> None:
        value = local_value(parameter, self.program.mesh, self.rank_index)
        holder: nn.Module = self
        *path, last = parameter.name.split(".")
        for step in path:
            if step not in holder._modules:
                holder.add_module(step, nn.Module())
            holder = holder._modules[step]  # type: ignore[assignment]
        if parameter.buffer:
            holder.register_buffer(last, value, persistent=parameter.persistent)
        else:
            holder.register_parameter(last, nn.Parameter(value, requires_grad=parameter.trainable))
        self._places = {**getattr(self, "_places", {}), key: (holder, last)}

    def tensor(self, key: str) -> torch.Tensor:
        """The local tensor of a placeholder (a parameter, buffer or constant)."""
        holder, last = self._places[key]
        return getattr(holder, last)

    def arguments(self, args: Any, kwargs: Any) -> list[Any]:
        """The graph's arguments: parameters, then inputs in the order captured."""
        given = dict(kwargs)
        if args:
            given = {**self._signature.bind_partial(*args).arguments, **given}
        wanted = list(self.program.inputs.values())
        missing = [n for n in wanted if not isinstance(given.get(n), torch.Tensor)]
        extra = [n for n, v in given.items() if n not in wanted and isinstance(v, torch.Tensor)]
        if missing or extra:
            raise CaptureError(
                message(
                    "ShardedModule",
                    f"inputs missing: {missing}, unknown: {extra}",
                    f"got {list(given)}",
                    f"the graph was captured with {wanted}",
                    "pass these inputs, or give autoshard example_inputs with the ones you use",
                )
            )
        return [*(self.tensor(k) for k in self.program.values), *(given[n] for n in wanted)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        results = self.graph_module(*self._checked_arguments(args, kwargs))
        self._update_buffers(results, self.program.buffer_updates)
        return self.structured(results)

    def _checked_arguments(self, args: Any, kwargs: Any) -> list[Any]:
        arguments = self.arguments(args, kwargs)
        if self.live and not self._checked and not torch.compiler.is_compiling():
            self._checked = True
            self._compare_batches(arguments[len(self.program.values) :])
        return arguments

    def structured(self, results: Any) -> Any:
        """Flat results as the model's own kind of output."""
        spec = self.program.output_spec
        named = pytree.tree_unflatten(list(results[: spec.num_leaves]), spec)
        return restore_output(named, self._output_type)

    def train_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward; returns the loss of the global batch, the same on every rank."""
        if self._loss_module is None:
            raise CaptureError(
                message(
                    "train_step",
                    "the loss",
                    f"outputs {self.program.output_names}",
                    "the model returns no scalar loss",
                    "give labels in example_inputs, or loss_fn=",
                )
            )
        results = self._loss_module(*self._checked_arguments(args, kwargs))
        updates = {k: i + 1 for i, k in enumerate(self.program.buffer_updates)}
        self._update_buffers(results, updates)
        results[0].backward()
        return results[0].detach()

    def _update_buffers(self, results: Any, updates: dict[str, int]) -> None:
        with torch.no_grad():
            for key, position in updates.items():
                self.tensor(key).copy_(results[position])

    def _compare_batches(self, inputs: list[torch.Tensor]) -> None:
        """Ranks that share a data coordinate must hold the same batch: compared once, before step 1."""
        import torch.distributed as dist

        from autoshard.mesh import DATA_AXES

        mesh = self.program.mesh
        if dist.get_world_size() == 1:
            return
        sums = []
        for x in inputs:
            weights = torch.arange(1, x.numel() + 1, device=x.device, dtype=torch.float64)
            sums += [float(x.numel()), float((x.detach().flatten().double() * weights).sum())]
        device = inputs[0].device
        mine = torch.tensor(sums, device=device, dtype=torch.float64)
        everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        position = {r: mesh.mesh.coordinate(r) for r in range(mesh.mesh.world_size)}
        first: dict[Any, int] = {}
        for r, sums_of_r in enumerate(everyone):
            key = tuple(position[r].get(a, 0) for a in DATA_AXES)
            same = first.setdefault(key, r)
            if not torch.equal(everyone[same], sums_of_r):
                raise MeshError(
                    message(
                        "the first batch",
                        f"inputs {list(self.program.inputs.values())}",
                        f"differ between ranks {same} and {r}",
                        f"both are data rank {dict(zip(DATA_AXES, key, strict=True))}, whose peers must see the same rows",
                        "seed the data loader by the data coordinate, not by the global rank",
                    )
                )

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
        return ShardedModule(self.program, r, False, self._signature, self._output_type)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them; the next backward outside reduces the sum."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    @property
    def code(self) -> str:
        """The emitted graph as Python text."""
        return self.graph_module.code

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that the norm of the whole model's gradient is at most ``max_norm``;
        returns that norm before scaling. Every parameter counts once."""
        total = gather.squared_norm(self)
        if self.live:
            import torch.distributed as dist

            dist.all_reduce(total)
        norm = total.sqrt()
        gather.scale_gradients(self, norm, max_norm)
        return norm

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Every parameter and persistent buffer whole, under all its original names."""
        out = {}
        for key, parameter in self.program.values.items():
            if parameter.buffer and not parameter.persistent:
                continue
            whole = self._whole(parameter, self.tensor(key).detach())
            out.update(dict.fromkeys(parameter.names, whole))
        return out

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """Every gradient whole, by parameter name; None where there is none."""
        out = {}
        for key, parameter in self.program.parameters().items():
            grad = self.tensor(key).grad
            out[parameter.name] = None if grad is None else self._whole(parameter, grad)
        return out

    def _whole(self, parameter: Parameter, local: torch.Tensor) -> torch.Tensor:
        mesh = self.program.mesh
        if all(s in ("I", R) for s in parameter.layout.values()):
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

        whole = gather.place(parameter, local, mesh, self.rank_index)
        dist.all_reduce(whole)
        return whole

    def table(self, which: str, format: str = "simple") -> str:  # noqa: A002
        """A table of what was done: axes, params, graph, collectives, passes or memory."""
        from autoshard.report import table

        return table(self, which, format)

    def __repr__(self) -> str:
        from autoshard.report import summary

        return summary(self)


def restore_output(named: Any, output_type: Any) -> Any:
    """The named outputs as the type the model returned."""
    if output_type is torch.Tensor:
        return named["output"]
    if output_type in (tuple, list):
        return output_type(named.values())
    try:
        return output_type(**named)
    except TypeError:
        return named
