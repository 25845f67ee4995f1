"""Program: the one thing that passes take and return."""

from __future__ import annotations

import copy
import dataclasses
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.attention import Attention
from autoshard.axes import Axis, Dim
from autoshard.layout import Layout
from autoshard.mesh import SubMesh
from autoshard.runtime.loads import Mixture


@dataclass
class Parameter:
    """A parameter or buffer of the model. ``names``: every alias in the state dict, first one
    canonical.

    ``value`` is the model's own tensor (never copied here; on the meta device for a meta model,
    and for a parameter once the ranks of a live mesh hold their slices of it).
    ``layout`` says which slice of the whole a rank computes with; ``zero`` names the mesh axes
    among whose ranks dim 0 of that slice is shared out, in pieces as `torch.chunk` makes them: a
    rank holds its piece only, and gathers the slice to compute with it. ``holders``: the positions
    along pp whose ranks hold it at all (None: all do).

    With ``stacked`` it is none of the model's own but a stack of these along a new dim 0: its name
    has ``*`` where theirs differ, and its value only their shape, type and device. One of these, as
    `own` gives it, has a ``place``: the stack, and its position on dim 0.
    """

    names: tuple[str, ...]
    value: torch.Tensor
    trainable: bool
    buffer: bool = False
    persistent: bool = True
    constant: bool = False  # lifted out of the code, no part of the state dict
    dims: tuple[Dim, ...] = ()
    layout: Layout = field(default_factory=dict)
    zero: tuple[str, ...] = ()
    holders: tuple[int, ...] | None = None
    stacked: tuple[Parameter, ...] = ()
    place: tuple[Parameter, int] | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def own(self) -> list[Parameter]:
        """The model's own parameters that are in it: itself, or those that it stacks. These have
        names and values, and no dims or layout of their own."""
        if not self.stacked:
            return [self]
        return [
            dataclasses.replace(p, place=(self, at), holders=self.holders)
            for at, p in enumerate(self.stacked)
        ]

    def held_by(self, mesh: SubMesh, rank: int) -> bool:
        """Whether a rank holds any of it."""
        return self.holders is None or mesh.stage(rank) in self.holders

    def first_held_by(self, mesh: SubMesh, rank: int) -> bool:
        """Whether a rank holds it, and no rank before it along pp does."""
        stage = mesh.stage(rank)
        return stage == (0 if self.holders is None else min(self.holders))


@dataclass
class Assignment:
    """One logical axis given to mesh sub-axes. ``priority``: who is cut when several could be."""

    axis: Axis
    mesh_axes: tuple[str, ...]
    priority: int
    strategy: str
    reason: str = ""


@dataclass
class Conversion:
    """A collective in the graph: what the tables show. ``numel`` is the local element count read
    (closed form), ``backward`` whether a gradient flows back through it."""

    kind: str
    node: str
    value: str
    axes: tuple[str, ...]
    why: str
    numel: Any
    itemsize: int
    backward: bool


@dataclass(frozen=True)
class Unit:
    """Parameters of one segment of the graph whose weights (what is computed with) are gathered,
    and whose gradients are reduced, in one collective each.

    ``keys``: their placeholders; ``axes``: the mesh axes that share them out; ``dtype``: of the
    weights; ``reduce_dtype``: in which gradients travel (None: that of the parameters); ``keep``:
    weights stay gathered until an optimizer step, or with ``for_step`` until all micro-batches of a
    step are done; ``whole_gradients``: gradients stay whole until
    they are reduced, else every backward reduces them. ``segment``: its position in the graph;
    ``stage``: that of a pipeline which reads the weights.
    """

    name: str
    keys: tuple[str, ...]
    axes: tuple[str, ...]
    dtype: torch.dtype
    reduce_dtype: torch.dtype | None
    keep: bool
    whole_gradients: bool
    segment: int
    stage: int = 0
    for_step: bool = False


@dataclass
class Program:
    """A captured graph with everything known about it.

    ``graph_module`` takes parameters, buffers and constants (``values``, by placeholder name) and
    then the inputs. ``dims[node]`` are the logical dimensions of a node's result (a list of them
    for several results); ``layouts[node]`` its layout once partitioned.
    """

    graph_module: fx.GraphModule
    values: dict[str, Parameter]
    inputs: dict[str, str]  # placeholder -> the user's name of it
    output_spec: pytree.TreeSpec
    output_names: list[str]
    loss: int | None  # which output is the loss
    dynamic: str
    mesh: SubMesh
    training: bool = True
    wrong_loss: str = ""  # why none of the outputs could be taken for the loss
    dims: dict[fx.Node, Any] = field(default_factory=dict)
    typings: dict[fx.Node, Any] = field(default_factory=dict)  # what each op's rule states
    layouts: dict[fx.Node, Any] = field(default_factory=dict)
    assignments: list[Assignment] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)
    buffer_updates: dict[str, int] = field(default_factory=dict)  # placeholder -> output index
    attentions: dict[str, Attention] = field(default_factory=dict)  # what `attend` nodes name
    mixtures: dict[str, Mixture] = field(default_factory=dict)  # what `to_experts` nodes name
    constants: dict[str, Any] = field(default_factory=dict)  # inputs that are no tensors, by name
    units: dict[str, Unit] = field(default_factory=dict)
    pipeline: Any = None  # an `autoshard.pipeline.Pipeline`, on a mesh with pp
    plans: dict[bool, Any] = field(default_factory=dict)  # see `autoshard.pipeline.plan_of`
    stages: str | None = None  # what is in each stage, as `autoshard.stages` writes it
    holders: dict[str, Any] = field(default_factory=dict)  # of another graph's parameters, by name
    offload: bool = False  # parameters, and so optimizer states, are held in host memory
    hints: dict[Any, int] = field(default_factory=dict)  # dynamic size -> its value in the example
    fallbacks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unfused: list[str] = field(
        default_factory=list
    )  # mixtures of experts left as they are, and why
    left: dict[Axis, str] = field(default_factory=dict)  # axes that no strategy cuts, and why
    log: list[tuple[str, str, float]] = field(default_factory=list)  # pass, what it did, seconds

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    def parameters(self) -> dict[str, Parameter]:
        return {k: p for k, p in self.values.items() if not p.buffer}

    @property
    def in_units(self) -> set[str]:
        """The parameters that units gather and reduce, by placeholder."""
        return {key for unit in self.units.values() for key in unit.keys}

    def assigned(self, mesh_axis: str) -> list[Assignment]:
        """The assignments that use a mesh sub-axis, highest priority first."""
        found = [a for a in self.assignments if mesh_axis in a.mesh_axes]
        return sorted(found, key=lambda a: -a.priority)


def gathered_weight(program: Program, node: fx.Node) -> Parameter | None:
    """The parameter that a node of the graph is the gathered weight of, if any."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if source.op != "call_function" or getattr(source.target, "__name__", "") != "wait_gather":
        return None
    return program.values[program.units[source.args[2]].keys[node.args[1]]]


#: The key of ``node.meta`` under which a node's stage of a pipeline stands; none: all compute it.
STAGE = "stage"


def stages_of_parameters(program: Program) -> dict[str, set[int]]:
    """The stages of a pipeline that read each parameter, by placeholder."""
    if program.pipeline is None:
        return {}
    found: dict[str, set[int]] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name in program.values:
            found[node.name] = {u.meta[STAGE] for u in node.users if STAGE in u.meta}
    for unit in program.units.values():
        for key in unit.keys:
            found[key].add(unit.stage)
    return found


def module_path(node: fx.Node) -> str:
    """The path, in the model, of the module that a node was traced from; '' for the model
    itself."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = list(stack.values())[-1][0].removeprefix("L['self'].")
    return path.partition(".")[2]  # the model is a child of the module that was exported


def copied(program: Program) -> Program:
    """A copy whose graph can be changed too; axes are shared."""
    new, graph = shallow(program), fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(program.graph, mapping))
    output = next(n for n in program.graph.nodes if n.op == "output")
    mapping[output] = next(n for n in graph.nodes if n.op == "output")
    new.graph_module = fx.GraphModule(torch.nn.Module(), graph)
    for name in ("dims", "typings", "layouts"):
        known = getattr(program, name)
        setattr(new, name, {mapping[n]: v for n, v in known.items() if n in mapping})
    return new


def tensor_results(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors a node gives, one or several."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


def shallow(program: Program) -> Program:
    """A copy of the program whose containers and parameters can be changed; graph and axes are
    shared."""
    new = copy.copy(program)
    new.values = {key: dataclasses.replace(p) for key, p in program.values.items()}
    for name in ("assignments", "conversions", "fallbacks", "notes", "log"):
        setattr(new, name, list(getattr(program, name)))
    for name in ("attentions", "mixtures", "left", "units"):
        setattr(new, name, dict(getattr(program, name)))
    return new
