"""model -> Program: one ATen graph by ``torch.export``, before autograd."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import math
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils import _pytree as pytree

from autoshard.errors import CaptureError, message
from autoshard.inputs import UNDECIDABLE, find_inputs, quietly
from autoshard.mesh import DATA_AXES, MeshSpec, SubMesh
from autoshard.meta import has_meta, home, recover_tables, standing_in
from autoshard.objective import loss_index, wrong_loss
from autoshard.outputs import Output, tensors_of
from autoshard.program import Parameter, Program, tensor_results
from autoshard.rules import rule_for

aten = torch.ops.aten

#: Top-level modules whose lines in a traceback are not the user's.
NOT_THE_USERS = {*sys.stdlib_module_names, "torch"} - {"__main__"}


class _Returned:
    """Holds what the wrapped forward returned; no module attribute, which export would put back."""

    output: Output | None = None


class _Wrapper(nn.Module):
    """Gives ``torch.export`` plain arguments and tensor-only outputs."""

    def __init__(
        self,
        model: nn.Module,
        constants: dict[str, Any],
        loss_fn: Any,
        targets: set[str],
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.model, self.dtype = model, dtype
        self.constants, self.loss_fn, self.targets = constants, loss_fn, targets
        self.returned = _Returned()
        self.training = model.training  # of this module alone: a part may be in another mode

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        own = {k: self._cast(v) for k, v in inputs.items() if k not in self.targets}
        out = self.model(**own, **self.constants)
        self.returned.output = Output.of(out)
        named = tensors_of(out)
        if self.loss_fn is not None:
            extra = {k: v for k, v in inputs.items() if k in self.targets}
            loss = self.loss_fn(out, **extra)
            if not isinstance(loss, torch.Tensor):
                raise _no_loss_tensor(loss)
            named = {"loss": loss, **named}
        if not named:
            raise _no_tensors(type(self.model).__name__, out)
        return named

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        """Inputs are of the type that parameters compute in."""
        return value.to(self.dtype) if self.dtype and value.is_floating_point() else value


def _no_loss_tensor(loss: Any) -> CaptureError:
    return CaptureError(
        message(
            "loss_fn",
            "what it returns",
            type(loss).__name__,
            "backward starts from one tensor, the loss",
            "let it return the loss alone; what else is wanted, the model's forward can return",
        )
    )


def _no_tensors(who: str, out: Any) -> CaptureError:
    return CaptureError(
        message(
            who,
            "the outputs",
            f"forward returned {type(out).__name__}",
            "there is no tensor in it to compute",
            "return tensors: alone, in a tuple, a dict, a dataclass",
        )
    )


def bind_inputs(model: nn.Module, example_inputs: Any) -> dict[str, Any]:
    """The example inputs (a mapping, a tuple or a tensor) by argument name. Raises CaptureError."""
    if isinstance(example_inputs, Mapping):
        return dict(example_inputs)
    single = isinstance(example_inputs, torch.Tensor)
    args = (example_inputs,) if single else tuple(example_inputs)
    signature = inspect.signature(model.forward)
    try:
        return dict(signature.bind(*args).arguments)
    except TypeError as error:
        raise CaptureError(
            message(
                type(model).__name__,
                "example_inputs",
                f"got {len(args)} positional ones",
                f"forward takes {signature}: {error}",
                "pass example_inputs={'name': tensor, ...}",
            )
        ) from error


def _sort_inputs(
    model: nn.Module, given: dict[str, Any], loss_fn: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Any], set[str]]:
    """Tensors, constants, and the names of what only ``loss_fn`` takes. Raises CaptureError."""
    names = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in names.values())
    unknown = [k for k in given if k not in names]
    if unknown and loss_fn is None and not takes_any:
        raise CaptureError(
            message(
                type(model).__name__,
                f"inputs {', '.join(unknown)}",
                f"got {', '.join(given)}",
                f"forward takes {', '.join(names)}",
                "rename these inputs",
            )
        )
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [n for n, p in names.items() if p.default is p.empty and p.kind not in variadic]
    missing = [n for n in needed if n not in given]
    if missing:
        raise CaptureError(
            message(
                type(model).__name__,
                f"inputs {', '.join(missing)}",
                f"got {', '.join(given)}",
                f"forward takes {', '.join(names)}, and these have no default",
                "add them to example_inputs",
            )
        )
    tensors = {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}
    constants = {k: v for k, v in given.items() if not isinstance(v, torch.Tensor)}
    nested = [k for k, v in constants.items() if any(map(torch.is_tensor, pytree.tree_leaves(v)))]
    if nested:
        raise CaptureError(
            message(
                type(model).__name__,
                f"inputs {', '.join(nested)}",
                f"got {', '.join(type(constants[k]).__name__ for k in nested)}",
                "tensors inside containers cannot be told apart from constants",
                "pass every tensor as an argument of its own",
            )
        )
    if not tensors:
        raise CaptureError(
            message(
                type(model).__name__,
                "the inputs",
                f"got {', '.join(f'{k}={v!r:.40}' for k, v in given.items()) or 'nothing'}",
                "none of them is a tensor, and a batch is what ranks share out",
                "pass example_inputs={'name': tensor, ...}",
            )
        )
    return tensors, constants, set(unknown) if loss_fn is not None else set()


def capture(
    model: nn.Module,
    mesh: MeshSpec,
    example_inputs: Any = None,
    loss_fn: Any = None,
    raise_precision: bool = False,
    param_dtype: torch.dtype | None = None,
) -> tuple[Program, Output]:
    """Export the model, in the mode it is in, as one functional graph.

    ``raise_precision`` turns its float32 casts into float64 ones (for `verify`). A model on the
    meta device is captured as if it stood on the device of its real tensors, or the CPU. Raises
    CaptureError with the module path, file and line of what failed.
    """
    mesh = MeshSpec.of(mesh)
    tables = recover_tables(model) if has_meta(model) else {}
    if example_inputs is None:
        given = find_inputs(model, data_ranks(mesh), tables)
    else:
        given = bind_inputs(model, example_inputs)
    tensors, constants, targets = _sort_inputs(model, given, loss_fn)
    tensors = {k: _real(v, model) for k, v in tensors.items()}
    wrapper = _Wrapper(model, constants, loss_fn, targets, param_dtype)
    with _noting_functions() as functions:
        exported, dynamic = _export(wrapper, tensors, tables)
    assert wrapper.returned.output is not None  # export ran forward
    program = _program(exported, model, tensors, tables, mesh, dynamic, raise_precision)
    program.constants = constants
    if functions:
        text = (
            f"gradients through {', '.join(sorted(functions))} are those of the ops in forward: "
            "the graph does not have the backward of a torch.autograd.Function"
        )
        program.notes.append(text)
        if model.training:
            warnings.warn(f"{text}. See with verify() whether they agree", stacklevel=2)
    return program, wrapper.returned.output


@contextlib.contextmanager
def _noting_functions() -> Iterator[set[str]]:
    """Meanwhile every torch.autograd.Function of the model's own that is applied leaves its name:
    export sees the ops of its forward alone."""
    found, kept = set[str](), torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            found.add(cls.__qualname__)
        return kept.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield found
    finally:
        torch.autograd.Function.apply = kept


def data_ranks(mesh: MeshSpec) -> int:
    """The number of ranks that hold different rows."""
    return math.prod(mesh.size(name) for name in DATA_AXES)


def _real(value: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """A copy of an input: no two are one tensor, and none is on meta (only its shape matters).
    With a meta model it stands where that is captured."""
    if value.is_meta:
        return torch.zeros(value.shape, dtype=value.dtype, device=home(model))
    own = value.detach().clone()
    return own.to(home(model)) if has_meta(model) else own


def _export(
    wrapper: _Wrapper, tensors: dict[str, torch.Tensor], tables: dict[str, torch.Tensor]
) -> tuple[Any, str]:
    auto = {k: dict.fromkeys(range(min(v.ndim, 2)), Dim.AUTO) for k, v in tensors.items()}
    batch = {k: {0: Dim.AUTO} if v.ndim else {} for k, v in tensors.items()}
    error: Exception | None = None
    for shapes, label in ((auto, "batch and sequence"), (batch, "batch"), (None, "static")):
        try:
            with quietly():
                exported = _export_once(wrapper, tensors, shapes, tables)
            if shapes is None or _takes(exported, tensors):
                return exported, label
        except CaptureError:
            raise
        except Exception as caught:  # torch.export raises many kinds
            error = caught
    assert error is not None
    raise _failed(wrapper.model, error) from error


def _takes(exported: Any, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a graph takes the very inputs it was traced with (a size of one input may have been
    fixed to that of another), and token ids of one length are all fixed to it or none."""
    names = [
        s.arg.name for s in exported.graph_signature.input_specs if s.kind.name == "USER_INPUT"
    ]
    made = {n.name: n.meta["val"].shape for n in exported.graph.find_nodes(op="placeholder")}
    lengths: dict[bool, set[int]] = {True: set(), False: set()}
    for name, tensor in zip(names, tensors.values(), strict=True):
        for at, (size, real) in enumerate(zip(made[name], tensor.shape, strict=True)):
            fixed = isinstance(size, int) or bool(size.node.expr.is_Integer)
            if fixed and size != real:
                return False
            if at == 1 and not tensor.is_floating_point():
                lengths[fixed].add(real)
    return lengths[True].isdisjoint(lengths[False])


def _export_once(
    wrapper: _Wrapper,
    tensors: dict[str, torch.Tensor],
    shapes: Any,
    tables: dict[str, torch.Tensor],
) -> Any:
    with contextlib.ExitStack() as stack:
        if has_meta(wrapper.model) or wrapper.dtype is not None:
            mode = FakeTensorMode(
                shape_env=ShapeEnv(tracked_fakes=[], trace_asserts=True),
                allow_non_fake_inputs=True,
                export=True,
            )
            stack.enter_context(standing_in(wrapper.model, mode, tables, wrapper.dtype))
            # export then makes its own fake tensors in this mode too
            stack.enter_context(tracing(TracingContext(mode)))
        exported = torch.export.export(
            wrapper,
            (tensors,),
            strict=False,
            dynamic_shapes=None if shapes is None else (shapes,),
        )
        _inline_no_grad(exported.graph_module)
        taken_apart = _without_rule(exported.graph)
        if taken_apart or _mutates(exported.graph):
            return exported.run_decompositions(taken_apart)
        return exported


def _without_rule(graph: fx.Graph) -> dict[Any, Any]:
    """How torch takes apart the ops that have no rule here, where it can."""
    missing = {
        n.target
        for n in graph.nodes
        if isinstance(n.target, torch._ops.OpOverload)
        and tensor_results(n)
        and rule_for(n.target) is None
    }
    if not missing:
        return {}
    known = torch.export.default_decompositions()
    return {target: known[target] for target in missing if target in known}


def _failed(model: nn.Module, error: Exception) -> CaptureError:
    path, place = _where(model, error)
    reason = str(error).strip().split("\n\n")[0]
    on_data = isinstance(error, (*UNDECIDABLE, GuardOnDataDependentSymNode))
    loops = getattr(getattr(model, "config", None), "_experts_implementation", "") == "eager"
    instead = ', or set model.config._experts_implementation = "grouped_mm"' if loops else ""
    return CaptureError(
        message(
            f"{type(model).__name__}{'.' if path else ''}{path}",
            "the captured graph",
            f"{type(error).__name__}: {reason[:600]}",
            f"torch.export could not trace the model{place}",
            "rewrite that line without Python control flow that depends on data" + instead
            if on_data
            else "see that the model runs on these inputs alone; then write that line in torch ops",
        )
    )


def _where(model: nn.Module, error: BaseException | None) -> tuple[str, str]:
    """The path of the innermost module of a traceback, and the user's innermost file and line."""
    paths = {id(module): path for path, module in model.named_modules()}
    while error is not None:
        path, place, inside = "", "", False
        for frame, line in traceback.walk_tb(error.__traceback__):
            own = frame.f_locals.get("self")
            if isinstance(own, nn.Module) and id(own) in paths:
                path, inside = paths[id(own)], True
            if (
                inside
                and frame.f_globals.get("__name__", "").partition(".")[0] not in NOT_THE_USERS
            ):
                code = frame.f_code
                place = f" at {code.co_filename}:{line}, in {code.co_name}"
                text = linecache.getline(code.co_filename, line).strip()
                place += f": `{text}`" if text else ""
        if place:
            return path, place
        error = error.__cause__ or error.__context__
    return "", ""


def _inline_no_grad(module: fx.GraphModule) -> None:
    """Blocks under ``torch.no_grad`` are nested graphs: put in line, their results detached.
    (torch's own inlining would let gradients through.)"""
    graph = module.graph
    for node in [n for n in graph.nodes if "wrap_with_set_grad_enabled" in str(n.target)]:
        enabled, block, *args = node.args
        inner = getattr(module, block.target)
        _inline_no_grad(inner)
        values = dict(zip(inner.graph.find_nodes(op="placeholder"), args, strict=True))
        with graph.inserting_before(node):
            results = graph.graph_copy(inner.graph, values)
            made = []
            for result in results:
                if isinstance(result, fx.Node) and not enabled and _flows(result):
                    value = result.meta["val"]
                    result = graph.call_function(aten.detach.default, (result,))
                    result.meta.update(node.meta, val=value.detach())
                made.append(result)
        for user in list(node.users):
            user.replace_all_uses_with(made[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not block.users:
            graph.erase_node(block)
    module.recompile()


def _flows(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _mutates(graph: fx.Graph) -> bool:
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and node.target is not aten.detach_.default:
            return True
        if node.op == "get_attr":  # a submodule, as under a set_grad_enabled block
            return True
    return False


def _program(
    exported: Any,
    model: nn.Module,
    tensors: dict[str, torch.Tensor],
    tables: dict[str, torch.Tensor],
    mesh: MeshSpec,
    dynamic: str,
    raise_precision: bool,
) -> Program:
    module = exported.graph_module
    signature = exported.graph_signature
    state = dict(model.named_parameters(remove_duplicate=False))
    state.update(model.named_buffers(remove_duplicate=False))
    persistent = set(model.state_dict(keep_vars=True))
    aliases: dict[int, list[str]] = {}
    for name, value in state.items():
        aliases.setdefault(id(value), []).append(name)

    values: dict[str, Parameter] = {}
    inputs: dict[str, str] = {}
    user_names = list(tensors)
    for spec in signature.input_specs:
        kind, placeholder = spec.kind.name, spec.arg.name
        if kind in ("PARAMETER", "BUFFER"):
            name = spec.target.removeprefix("model.")
            value = state[name]
            values[placeholder] = Parameter(
                tuple(aliases[id(value)]),
                tables.get(name, value),
                trainable=kind == "PARAMETER" and value.requires_grad,
                buffer=kind == "BUFFER",
                persistent=any(n in persistent for n in aliases[id(value)]),
            )
        elif kind == "USER_INPUT":
            inputs[placeholder] = user_names[len(inputs)]
        elif spec.target not in exported.constants:
            raise CaptureError(
                message(
                    type(model).__name__,
                    placeholder,
                    f"a graph input of kind {kind.lower()}",
                    "an op checks its result while it runs (linalg.solve and its like do)",
                    "compute it outside the model, or by ops without such a check",
                )
            )
        else:
            constant = exported.constants[spec.target]
            values[placeholder] = Parameter(
                (spec.target,), constant, False, True, False, constant=True
            )

    _merge_tied(module.graph, values)
    updates, user_outputs = {}, []
    output = next(n for n in module.graph.nodes if n.op == "output")
    by_target = {v.name: k for k, v in values.items()}
    for position, spec in enumerate(signature.output_specs):
        if spec.kind.name == "BUFFER_MUTATION":
            updates[by_target[spec.target.removeprefix("model.")]] = position
        elif spec.kind.name == "USER_OUTPUT":
            user_outputs.append(position)
        else:
            target = str(spec.target).removeprefix("model.")
            raise CaptureError(
                message(
                    type(model).__name__,
                    target,
                    spec.kind.name.lower().replace("_", " "),
                    "forward writes in place to one of its inputs or parameters "
                    "(as an embedding with max_norm does)",
                    "write to a copy, or register what changes as a buffer",
                )
            )
    results = list(output.args[0])
    order = user_outputs + list(updates.values())
    output.args = (tuple(results[i] for i in order),)
    updates = {k: len(user_outputs) + i for i, k in enumerate(updates)}

    spec = exported.call_spec.out_spec
    names = [pytree.keystr(path) for path, _ in _paths(spec)]
    names = [n.replace("['", ".").replace("']", "").strip(".") for n in names]
    program = Program(
        fx.GraphModule(module, module.graph),
        values,
        inputs,
        spec,
        names,
        None,
        dynamic,
        SubMesh(mesh),
        model.training,
        buffer_updates=updates,
    )
    program.loss, program.wrong_loss = loss_index(program), wrong_loss(program)
    _unify_symbols(program, tensors)
    _keep_hints(program, tensors)
    if raise_precision:
        _raise_precision(program.graph)
    return program


def _keep_hints(program: Program, tensors: dict[str, torch.Tensor]) -> None:
    for node in program.graph.nodes:
        if node.name in program.inputs:
            real = tensors[program.inputs[node.name]]
            for size, value in zip(node.meta["val"].shape, real.shape, strict=True):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    program.hints.setdefault(size.node.expr, int(value))


def _unify_symbols(program: Program, tensors: dict[str, torch.Tensor]) -> None:
    """Inputs with as many rows as the first share its batch. Where export proved only that
    products of input sizes agree (batch x length of ids and of labels), take the factors to
    agree."""
    places: dict[Any, tuple[int, int]] = {}  # dynamic size of an input -> its position, its value
    env: Any = None
    for node in program.graph.nodes:
        if node.name not in program.inputs:
            continue
        real = tensors[program.inputs[node.name]]
        for position, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                env = size.node.shape_env
                places.setdefault(size.node.expr, (position, int(real.shape[position])))
    if env is None:
        return
    rows = next((len(x) for x in tensors.values() if x.ndim), 0)
    same = _all_like_the_first([s for s, place in places.items() if place == (0, rows)])
    for guard in env.guards:
        if not isinstance(guard.expr, sympy.Eq):
            continue
        used = dict(same)
        for place in {places[s] for s in guard.expr.free_symbols if s in places}:
            alike = [s for s in places if places[s] == place and guard.expr.has(s)]
            used |= _all_like_the_first([s for s in alike if s not in same])
        if used and sympy.expand((guard.expr.lhs - guard.expr.rhs).subs(used)) == 0:
            same |= used
    if same:
        env.replacements.update(same)
        env._update_version_counter()
        env._replacements_version_counter += 1


def _all_like_the_first(symbols: list[Any]) -> dict[Any, Any]:
    return dict.fromkeys(symbols[1:], symbols[0]) if symbols else {}


def _merge_tied(graph: fx.Graph, values: dict[str, Parameter]) -> None:
    """Placeholders of one tensor become one."""
    first: dict[int, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in values:
            kept = first.setdefault(id(values[node.name].value), node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)
                del values[node.name]


def _paths(spec: pytree.TreeSpec) -> Any:
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return pytree.tree_flatten_with_path(tree)[0]


def _raise_precision(graph: fx.Graph) -> None:
    def raised(arg: Any) -> Any:
        return torch.float64 if arg in (torch.float32, torch.bfloat16, torch.float16) else arg

    def visit(value: Any) -> Any:
        return raised(value) if isinstance(value, torch.dtype) else value

    for node in graph.nodes:
        if node.op == "call_function":
            node.args = pytree.tree_map(visit, node.args)
            node.kwargs = pytree.tree_map(visit, node.kwargs)
