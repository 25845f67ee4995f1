"""Models on the meta device: captured as if they were real, never made whole.

Parameters and persistent buffers have no values until a checkpoint or their module's own
initialisation gives them some. Tables (non-persistent buffers, tensors kept as attributes) stand in
no checkpoint, so their true values are recovered by what computed them, or an error names them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.errors import CaptureError, ShardingError, message

#: Methods without arguments by which a module (re)sets its own tensors.
RESETS = ("reset_parameters", "_reset_parameters", "reset_buffers")
#: Where a skeleton notes the device of the model it was made of.
HOME = "_autoshard_home"


def has_meta(model: nn.Module) -> bool:
    """Whether any tensor of the model is on the meta device."""
    return any(t.is_meta for _, store in _stores(model) for _, t in _tensors(store))


def home(model: nn.Module) -> torch.device:
    """The device the model's real tensors are on; the CPU when it has none."""
    if HOME in vars(model):
        return vars(model)[HOME]
    for _, store in _stores(model):
        for _, tensor in _tensors(store):
            if not tensor.is_meta:
                return tensor.device
    return torch.device("cpu")


@contextlib.contextmanager
def standing_in(
    model: nn.Module,
    mode: FakeTensorMode,
    tables: dict[str, torch.Tensor],
    dtype: torch.dtype | None = None,
) -> Iterator[None]:
    """Meanwhile every meta tensor of the model is a fake one on the model's home device, or its
    recovered value; with ``dtype``, every floating parameter is a fake one of that type. The model
    is itself again afterwards."""
    device, replaced = home(model), []
    fakes: dict[int, torch.Tensor] = {}
    for path, store in _stores(model):
        for key, tensor in _tensors(store):
            if tensor.is_meta or working_type(tensor, dtype) != tensor.dtype:
                replaced.append((store, key, tensor))
                name = f"{path}.{key}".strip(".")
                if id(tensor) not in fakes:
                    known = tables.get(name)
                    made = _fake(tensor, mode, device, dtype) if known is None else known
                    fakes[id(tensor)] = made
                store[key] = fakes[id(tensor)]
    try:
        yield
    finally:
        for store, key, tensor in replaced:
            store[key] = tensor


def working_type(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type in which a model computes with a tensor of its own, when its parameters are to be
    of ``dtype``: buffers, and what is no floating number, keep theirs."""
    casts = dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    return dtype if casts else tensor.dtype  # type: ignore[return-value]


def _fake(
    tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype | None
) -> torch.Tensor:
    kind = working_type(tensor, dtype)
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def recover_tables(model: nn.Module) -> dict[str, torch.Tensor]:
    """True values, by name, of every table that the model holds on the meta device.

    Each is computed twice by its module's own initialisation, on storage filled with different
    values, and counts only when both agree. Failing that, the innermost module around it whose
    constructor's arguments can all be read back from its attributes is constructed again, with
    parameters on meta. Raises CaptureError naming every table that neither way recovers.
    """
    found: dict[str, torch.Tensor] = {}
    lost: list[str] = []
    rebuilt: dict[str, nn.Module | None] = {}
    for path, module in model.named_modules():
        keys = _lost_tables(module)
        values = _initialised(model, path, keys, 0, home(model)) if keys else {}
        for key in keys:
            value = values.get(key)
            if value is None:
                value = _from_constructor(model, path, key, rebuilt)
            name = f"{path}.{key}".strip(".")
            if value is None:
                lost.append(name)
            else:
                found[name] = value
    if lost:
        raise CaptureError(
            message(
                type(model).__name__,
                f"tables {', '.join(lost)}",
                "they are on the meta device, and in no state dict",
                "neither the module's initialisation nor its constructor gives their values back",
                "build them with device='cpu', or fill them in a method reset_buffers()",
            )
        )
    return found


class Initialiser:
    """Makes a meta model's tensors one module at a time, equal on every rank for equal ``seed``.

    The tensors of the last module are kept until one of another module is asked for, so ask for
    those of a module one after the other, and keep none of them.
    """

    def __init__(self, model: nn.Module, seed: int, device: torch.device):
        self.model, self.seed, self.device = model, seed, device
        self._last: tuple[str, dict[str, torch.Tensor]] = ("?", {})

    def __call__(self, name: str) -> torch.Tensor | None:
        """The whole tensor of a name; None when nothing in the model fills it."""
        path, _, key = name.rpartition(".")
        if self._last[0] != path:
            self._last = ("?", {})  # freed before the next one is made
            module = self.model.get_submodule(path)
            keys = [k for _, s in _own_stores(module) for k, t in _tensors(s) if t.is_meta]
            values = _initialised(self.model, path, keys, self.seed, self.device)
            self._last = (path, values)
        return self._last[1].get(key)


def unfilled(who: str, model: nn.Module, names: Iterable[str]) -> ShardingError:
    """The error of a call that needs tensors which nothing has filled so far."""
    names = list(names)
    kinds = {type(model.get_submodule(name.rpartition(".")[0])).__name__: None for name in names}
    return ShardingError(
        message(
            f"{who} of {type(model).__name__}",
            ", ".join(names),
            "on the meta device when the model was given, and not filled since",
            f"{', '.join(kinds)} has no reset_parameters() that fills it, and no module around it "
            "an _init_weights(module) that does",
            "load a checkpoint first, as by load_full_state_dict(); or add such a method, or build "
            "this module with device='cpu'",
        )
    )


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device; one on meta becomes NaN there, or zero where its type has no NaN."""
    if not tensor.is_meta:
        return tensor.to(device)
    has_nan = tensor.is_floating_point() or tensor.is_complex()
    return torch.full_like(tensor, float("nan") if has_nan else 0, device=device)


def hollow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides and type on the meta device."""
    made = torch.empty_like(tensor, device="meta", requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return made
    new = nn.Parameter(made, tensor.requires_grad)
    vars(new).update(vars(tensor))
    return new


def skeleton(model: nn.Module) -> nn.Module:
    """A copy that can be captured in place of the model, without the values of its parameters:
    they are on the meta device, all other tensors are the model's own. The model itself where it
    has no values, or cannot be copied."""
    if all(parameter.is_meta for parameter in model.parameters()):
        return model
    kept: dict[int, Any] = {}
    for _, store in _stores(model):
        for _, tensor in _tensors(store):
            kept[id(tensor)] = hollow(tensor) if isinstance(tensor, nn.Parameter) else tensor
    try:
        new = copy.deepcopy(model, kept)
    except Exception:  # whatever a part of it raises; it then stays as it is
        return model
    vars(new)[HOME] = home(model)
    return new


# --- the tensors of a module ---


def _own_stores(module: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("parameters", module._parameters),
        ("buffers", module._buffers),
        ("attributes", vars(module)),
    ]


def _stores(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, module in model.named_modules():
        for _, store in _own_stores(module):
            yield path, store


def _tensors(store: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(k, v) for k, v in store.items() if isinstance(v, torch.Tensor)]


def _lost_tables(module: nn.Module) -> list[str]:
    hidden = module._non_persistent_buffers_set
    keys = [k for k, b in _tensors(module._buffers) if b.is_meta and k in hidden]
    return keys + [k for k, v in _tensors(vars(module)) if v.is_meta]


# --- by the module's own initialisation ---


def _initialised(
    model: nn.Module, path: str, keys: list[str], seed: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """The tensors of one module that initialisation, its own and that around it, sets whole."""
    first = _run_initialisation(model, path, keys, seed, device, 0)
    # NaN shows what was never written; integers need a second run from other values to show it
    whole = [k for k, v in first.items() if not (v.is_floating_point() or v.is_complex())]
    second = _run_initialisation(model, path, whole, seed, device, 1) if whole else {}
    return {
        key: value
        for key, value in first.items()
        if (torch.equal(value, second[key]) if key in second else not _has_nan(value))
    }


def _has_nan(value: torch.Tensor) -> bool:
    """As ``value.isnan().any()``, without a mask as large as the tensor's elements are many."""
    value = torch.view_as_real(value) if value.is_complex() else value
    return bool(value.numel()) and bool(value.amax().isnan())


def _run_initialisation(
    model: nn.Module, path: str, keys: list[str], seed: int, device: torch.device, fill: int
) -> dict[str, torch.Tensor]:
    chain = _chain(model, path)
    leaf = chain[0]
    for _, store in _own_stores(leaf):
        for key, tensor in _tensors(store):
            if key in keys:
                store[key] = _filled(tensor, device, fill)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad(), device:
        torch.manual_seed(seed ^ zlib.crc32(path.encode()))
        for step in _initialisation_steps(chain):
            # what a step that fails should have set is found missing afterwards
            with contextlib.suppress(Exception):
                step()
    made = {k: t for _, store in _own_stores(leaf) for k, t in _tensors(store) if k in keys}
    return {k: t.detach() for k, t in made.items() if not t.is_meta}


def _chain(model: nn.Module, path: str) -> list[nn.Module]:
    """Shallow copies of a module and the modules around it, innermost first."""
    copies = [_shallow(model)]
    for step in filter(None, path.split(".")):
        child = _shallow(copies[-1]._modules[step])
        copies[-1]._modules[step] = child
        copies.append(child)
    return copies[::-1]


def _shallow(module: Any) -> nn.Module:
    new = object.__new__(type(module))
    new.__dict__ = dict(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        new.__dict__[name] = dict(module.__dict__[name])
    return new


def _filled(tensor: torch.Tensor, device: torch.device, fill: int) -> torch.Tensor:
    new = torch.empty_like(tensor, device=device, requires_grad=False)
    if tensor.is_floating_point() or tensor.is_complex():
        new.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        new.fill_(bool(fill))
    else:
        limits = torch.iinfo(tensor.dtype)
        new.fill_(limits.max if fill else limits.min)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _initialisation_steps(chain: list[nn.Module]) -> list[Callable[[], Any]]:
    """The calls that set a module's tensors, in the order in which constructors would run them."""
    steps: list[Callable[[], Any]] = []
    for module in chain:
        steps += [getattr(module, name) for name in RESETS if callable(getattr(module, name, None))]
    for position, module in enumerate(chain):
        owner = next((m for m in chain[position:] if hasattr(m, "_init_weights")), None)
        if owner is None:
            continue
        init = owner._init_weights
        if inspect.signature(init).parameters:
            steps.append(functools.partial(init, module))
        elif owner is module:
            steps.append(init)
    return steps


# --- by the constructor of a module around it ---


def _from_constructor(
    model: nn.Module, path: str, key: str, rebuilt: dict[str, nn.Module | None]
) -> torch.Tensor | None:
    steps = path.split(".") if path else []
    for depth in range(len(steps), -1, -1):
        around, inside = ".".join(steps[:depth]), ".".join(steps[depth:])
        original = model.get_submodule(around)
        if around not in rebuilt:
            rebuilt[around] = _construct_again(original)
        new = rebuilt[around]
        if new is None:
            continue
        value = getattr(new.get_submodule(inside), key, None)
        wanted = getattr(original.get_submodule(inside), key)
        if isinstance(value, torch.Tensor) and value.shape == wanted.shape and not value.is_meta:
            return value.detach().to(wanted.dtype)
    return None


def _construct_again(module: nn.Module) -> nn.Module | None:
    """The module made anew with parameters on meta; None when that would be a guess."""
    if type(module).__init__ is nn.Module.__init__ or isinstance(
        module, (nn.ModuleList, nn.ModuleDict)
    ):
        return None
    arguments = {}
    for name, parameter in list(inspect.signature(type(module).__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in ("device", "dtype") and parameter.default is not parameter.empty:
            continue
        value = vars(module).get(name, inspect.Parameter.empty)
        # a default is no evidence of what was passed
        if value is inspect.Parameter.empty or parameter.kind is parameter.POSITIONAL_ONLY:
            return None
        arguments[name] = value
    try:
        with torch.random.fork_rng(devices=[]), _parameters_on_meta(), torch.device("cpu"):
            new = type(module)(**arguments)
    except Exception:
        return None
    return new if _alike(module, new) else None


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Meanwhile every parameter goes to meta as soon as a module takes it, before it is filled."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _alike(module: nn.Module, new: nn.Module) -> bool:
    """Same submodules, same tensors' shapes, same plain attributes."""
    ours, theirs = dict(module.named_modules()), dict(new.named_modules())
    if ours.keys() != theirs.keys():
        return False
    return all(_description(m) == _description(theirs[path]) for path, m in ours.items())


def _description(module: nn.Module) -> Any:
    tensors = {
        (kind, key): tensor.shape
        for kind, store in _own_stores(module)
        for key, tensor in _tensors(store)
    }
    plain = {
        k: v
        for k, v in vars(module).items()
        if isinstance(v, (int, float, str, tuple, type(None))) and k[0] != "_" and k != "training"
    }
    return type(module), tensors, {k: repr(v) for k, v in plain.items()}
