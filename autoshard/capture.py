"""model -> Program: one ATen graph by ``torch.export``, before autograd."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from autoshard.errors import CaptureError, message
from autoshard.mesh import MeshSpec, SubMesh
from autoshard.program import Parameter, Program

aten = torch.ops.aten


class _Wrapper(nn.Module):
    """Gives ``torch.export`` plain arguments and tensor-only outputs."""

    def __init__(
        self, model: nn.Module, constants: dict[str, Any], loss_fn: Any, targets: set[str]
    ):
        super().__init__()
        self.model = model
        self.constants, self.loss_fn, self.targets = constants, loss_fn, targets
        self.output_type: type = torch.Tensor

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        own = {k: v for k, v in inputs.items() if k not in self.targets}
        out = self.model(**own, **self.constants)
        self.output_type = torch.Tensor if isinstance(out, torch.Tensor) else type(out)
        named = _tensor_outputs(out)
        if self.loss_fn is not None:
            extra = {k: v for k, v in inputs.items() if k in self.targets}
            named = {"loss": self.loss_fn(out, **extra), **named}
        return named


def _tensor_outputs(out: Any) -> dict[str, Any]:
    """The outputs that are tensors (caches and the like are left out), by name."""
    if isinstance(out, torch.Tensor):
        return {"output": out}
    items = out.items() if hasattr(out, "items") else enumerate(out)
    kept = {}
    for name, value in items:
        flat = pytree.tree_leaves(value)
        if flat and all(isinstance(v, torch.Tensor) for v in flat):
            kept[str(name)] = value
    return kept


def bind_inputs(model: nn.Module, example_inputs: Any) -> dict[str, Any]:
    """The example inputs by argument name."""
    if isinstance(example_inputs, dict):
        return dict(example_inputs)
    args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    return dict(inspect.signature(model.forward).bind(*args).arguments)


def find_inputs(model: nn.Module) -> dict[str, Any]:
    """Example inputs for a model given without any: its ``dummy_inputs``, else inferred from the
    signature and the first layers. Raises CaptureError that says what to pass."""
    parameters = inspect.signature(model.forward).parameters
    names = list(parameters)
    embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if "input_ids" in names or (embedding is not None and names):
        size = embedding.num_embeddings if embedding is not None else 8
        ids = torch.arange(2 * 8).reshape(2, 8) % min(size, 16)
        first = "input_ids" if "input_ids" in names else names[0]
        found = {first: ids}
        for label in ("labels", "targets", "target"):
            if label in names:
                found[label] = ids.clone()
                break
        if "decoder_input_ids" in names and "labels" not in names:
            found["decoder_input_ids"] = ids.clone()
        if _runs(model, found):
            return found
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, dict) and _runs(model, dummy):
        return dict(dummy)
    for module in model.modules():
        shape = _first_layer_shape(module)
        if shape is None:
            continue
        for candidate in shape:
            x = torch.zeros(candidate)
            if names and _runs(model, {names[0]: x}):
                return {names[0]: x}
        break
    raise CaptureError(
        message(
            type(model).__name__,
            "example inputs",
            f"forward({', '.join(names)})",
            "none were given and none could be inferred from the signature and the first layer",
            "pass example_inputs={'name': tensor, ...}",
        )
    )


def _first_layer_shape(module: nn.Module) -> list[tuple[int, ...]] | None:
    if isinstance(module, nn.Linear):
        return [(4, module.in_features), (4, 8, module.in_features)]
    if isinstance(module, nn.Conv2d):
        return [(4, module.in_channels, s, s) for s in (32, 64, 224)]
    if isinstance(module, nn.Conv1d):
        return [(4, module.in_channels, 32)]
    return None


def _runs(model: nn.Module, inputs: dict[str, Any]) -> bool:
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            meta = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
            model(**meta)
        return True
    except Exception:
        return False


def capture(
    model: nn.Module,
    mesh: MeshSpec,
    example_inputs: Any = None,
    loss_fn: Any = None,
    raise_precision: bool = False,
) -> tuple[Program, Any]:
    """Export the model as one functional graph. ``raise_precision`` turns its float32 casts into
    float64 ones (for `verify`). Raises CaptureError with the module path and line of what failed."""
    given = find_inputs(model) if example_inputs is None else bind_inputs(model, example_inputs)
    names = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in names.values())
    unknown = [] if takes_any else [k for k in given if k not in names]
    targets = set(unknown) if loss_fn is not None else set()
    if unknown and loss_fn is None:
        raise CaptureError(
            message(
                type(model).__name__,
                f"inputs {', '.join(unknown)}",
                f"got {', '.join(given)}",
                f"forward takes {', '.join(names)}",
                "rename these inputs",
            )
        )
    tensors = {k: v.clone() for k, v in given.items() if isinstance(v, torch.Tensor)}
    constants = {k: v for k, v in given.items() if not isinstance(v, torch.Tensor)}
    wrapper = _Wrapper(model, constants, loss_fn, targets)
    wrapper.train(model.training)
    exported, dynamic = _export(wrapper, tensors, type(model).__name__)
    program = _program(exported, model, tensors, MeshSpec.of(mesh), dynamic, raise_precision)
    return program, wrapper.output_type


def _export(wrapper: nn.Module, tensors: dict[str, torch.Tensor], who: str) -> tuple[Any, str]:
    auto = {k: dict.fromkeys(range(min(v.ndim, 2)), Dim.AUTO) for k, v in tensors.items()}
    batch = {k: {0: Dim.AUTO} if v.ndim else {} for k, v in tensors.items()}
    error: Exception | None = None
    for shapes, label in ((auto, "batch and sequence"), (batch, "batch"), (None, "static")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exported = torch.export.export(
                    wrapper,
                    (tensors,),
                    strict=False,
                    dynamic_shapes=None if shapes is None else (shapes,),
                )
                if _mutates(exported.graph):
                    exported = exported.run_decompositions({})
            return exported, label
        except Exception as caught:  # torch.export raises many kinds
            error = error or caught
    raise CaptureError(
        message(
            who,
            "the captured graph",
            f"{type(error).__name__}: {str(error)[:1500]}",
            "torch.export could not trace the model" + _where(error),
            "rewrite that line without data-dependent Python control flow",
        )
    ) from error


def _where(error: BaseException | None) -> str:
    """The user's own innermost line in a traceback."""
    found, trace = "", error.__traceback__ if error else None
    while trace is not None:
        code = trace.tb_frame.f_code
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and "/torch/" not in code.co_filename:
            found = (
                f" at {type(module).__name__}.{code.co_name}, {code.co_filename}:{trace.tb_lineno}"
            )
        trace = trace.tb_next
    return found


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
            value = state[spec.target.removeprefix("model.")]
            values[placeholder] = Parameter(
                tuple(aliases[id(value)]),
                value,
                trainable=kind == "PARAMETER" and value.requires_grad,
                buffer=kind == "BUFFER",
                persistent=any(n in persistent for n in aliases[id(value)]),
            )
        elif kind == "USER_INPUT":
            inputs[placeholder] = user_names[len(inputs)]
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
        None,
        spec,
        names,
        _loss_index(output, len(user_outputs), names),
        dynamic,
        SubMesh(mesh),
        model.training,
        buffer_updates=updates,
    )
    _unify_symbols(program)
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


def _unify_symbols(program: Program) -> None:
    """Where export proved only that products of input sizes agree (batch x length of ids and of labels),
    take the factors to agree, position by position."""
    first: dict[int, Any] = {}
    same: dict[Any, Any] = {}
    env = None
    for node in program.graph.nodes:
        if node.name not in program.inputs:
            continue
        for position, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                env, symbol = size.node.shape_env, size.node.expr
                kept = first.setdefault(position, symbol)
                if kept != symbol and symbol.is_Symbol:
                    same[symbol] = kept
    for guard in env.guards if env is not None else ():
        expr = guard.expr
        if not isinstance(expr, sympy.Eq):
            continue
        used = {a: b for a, b in same.items() if a in expr.free_symbols}
        if used and sympy.expand((expr.lhs - expr.rhs).subs(used)) == 0:
            env.replacements.update(used)
            env._update_version_counter()
            env._replacements_version_counter += 1


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


def _loss_index(output: fx.Node, count: int, names: list[str]) -> int | None:
    """The model's loss: the output called ``loss``, else the only scalar."""
    scalars = []
    for i, node in enumerate(output.args[0][:count]):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point():
            scalars.append(i)
    named = [i for i in scalars if names[i] == "loss"]
    return named[0] if named else scalars[0] if scalars else None


def _raise_precision(graph: fx.Graph) -> None:
    def raised(arg: Any) -> Any:
        return torch.float64 if arg in (torch.float32, torch.bfloat16, torch.float16) else arg

    def visit(value: Any) -> Any:
        return raised(value) if isinstance(value, torch.dtype) else value

    for node in graph.nodes:
        if node.op == "call_function":
            node.args = pytree.tree_map(visit, node.args)
            node.kwargs = pytree.tree_map(visit, node.kwargs)
