"""The state of any torch optimizer of a module's parameters, taken apart by parameter and put back.

Tensors of their parameter's shape are cut as the parameter is; numbers are the same on all ranks;
hyperparameters belong to groups, which are told by the names of their parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from autoshard.errors import ShardingError, message
from autoshard.program import Parameter
from autoshard.runtime.saves import SAVE

#: How an optimizer computes, which is this run's choice and not the saved one's.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")

#: By name in the checkpoint: the model's own parameter whose shards they are, and the tensor that
#: has this rank's.
Shards = dict[str, tuple[Parameter, torch.Tensor]]
#: The module's parameter behind each of the optimizer's.
Names = dict[torch.Tensor, Parameter]


def key(name: str, field: str) -> str:
    """The name, in a checkpoint, of a field of a parameter's optimizer state."""
    return f"optimizer.state.{name}.{field}"


def kind(optimizer: torch.optim.Optimizer) -> str:
    """What an optimizer is called: its state means nothing to another."""
    return type(optimizer).__name__


def names_of(module: Any, optimizer: torch.optim.Optimizer, who: str) -> Names:
    """The module's parameter behind each of an optimizer's; ShardingError for those of others. One
    that stands for none of them (`ShardedModule.named_parameters`) is left out."""
    ours = {module.tensor(k): p for k, p in module.held_parameters().items()}
    known = {*ours, module.nothing}
    wrong = [
        f"group {at}: one of shape {tuple(p.shape)}"
        for at, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if p not in known
    ]
    wrong += [f"state under {k!r:.80}" for k in optimizer.state if k not in known]
    if wrong:
        raise ShardingError(
            message(
                who,
                f"{type(optimizer).__name__}'s parameters",
                "; ".join(wrong),
                "they are no parameters of this module, which names them in the checkpoint",
                "make the optimizer from the parameters() of this module",
            )
        )
    return ours


def _of_group(group: dict[str, Any], names: Names) -> list[Parameter]:
    """The module's parameters in a group."""
    return [names[p] for p in group["params"] if p in names]


def trained(module: Any, optimizer: torch.optim.Optimizer | None, who: str) -> list[str]:
    """All names of the parameters that an optimizer has."""
    if optimizer is None:
        return []
    names = names_of(module, optimizer, who)
    found = [p for group in optimizer.param_groups for p in _of_group(group, names)]
    return [name for p in found for own in p.own for name in own.names]


def state_of(
    optimizer: torch.optim.Optimizer, names: Names
) -> tuple[Shards, dict[str, dict[str, Any]]]:
    """An optimizer's state: tensors of the parameters' shapes, by name; and by parameter the fields
    that are such tensors (``tensors``) and those that are numbers (``scalars``)."""
    shards: Shards = {}
    state: dict[str, dict[str, Any]] = {}
    wrong = []
    for local, fields in optimizer.state.items():
        if local not in names:
            continue
        parameter = names[local]
        here: dict[str, Any] = {"tensors": [], "scalars": {}}
        for field, value in fields.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape == local.shape:
                here["tensors"].append(field)
                for own in parameter.own:
                    shards[key(own.name, field)] = (own, value.detach())
            elif _is_plain(value):
                on_device = isinstance(value, torch.Tensor) and not value.is_cpu
                here["scalars"][field] = (_on_cpu(value), on_device)
            else:
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)
                wrong.append(f"{parameter.name}.{field}: {shape}, of {tuple(local.shape)}")
        if fields:
            state |= {own.name: here for own in parameter.own}
    if wrong:
        raise ShardingError(
            message(
                SAVE,
                f"{type(optimizer).__name__}'s state of {len(wrong)} fields",
                "; ".join(wrong),
                "only numbers and tensors of their parameter's shape can be cut anew for another "
                "mesh",
                "use an optimizer whose state has the parameters' shapes, such as AdamW or SGD, or "
                "save without the optimizer",
            )
        )
    return shards, state


def groups_of(optimizer: torch.optim.Optimizer, names: Names) -> list[dict[str, Any]]:
    """The optimizer's groups: the names of their parameters, and their hyperparameters."""
    groups, wrong = [], []
    for at, group in enumerate(optimizer.param_groups):
        values = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        wrong += [f"group {at}: {k}={v!r:.80}" for k, v in values.items() if not _is_plain(v)]
        groups.append(
            {
                "names": [own.name for p in _of_group(group, names) for own in p.own],
                "values": {k: _on_cpu(v) for k, v in values.items()},
            }
        )
    if wrong:
        raise ShardingError(
            message(
                SAVE,
                f"{type(optimizer).__name__}'s hyperparameters",
                "; ".join(wrong),
                "only numbers, texts and lists of them are saved",
                "keep other objects out of the groups",
            )
        )
    return groups


def unequal_groups(groups: list[dict[str, Any]]) -> list[str]:
    """Parameters that ranks of several stages have, in groups of different hyperparameters."""
    first: dict[str, str] = {}
    wrong = []
    for group in groups:
        values = comparable(group["values"])
        for name in group["names"]:
            if (other := first.setdefault(name, values)) != values:
                wrong.append(f"{name} is in a group with {other}, and in one with {values}")
    return wrong


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None, or made up of such."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, (bool, int, float, complex, str))


def _on_cpu(value: Any) -> Any:
    """The value, with its tensors copied to the CPU."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().cpu().clone(), value
    )


def comparable(value: Any) -> str:
    """A text that is the same for equal values."""
    as_numbers = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: (t.dtype, t.item()), value
    )
    return repr(as_numbers)


def alias(parameter: Parameter, names: Any) -> str:
    """The name under which a checkpoint has a parameter; its canonical one where it has none."""
    return next((n for n in parameter.names if n in names), parameter.name)


def unmatched_groups(
    optimizer: torch.optim.Optimizer,
    names: Names,
    groups: list[dict[str, Any]],
    trained: set[str],
) -> list[str]:
    """Parameters of one optimizer only, and groups that were one and had different numbers.
    ``trained``: all names of the parameters that some rank's optimizer has."""
    saved = {n: at for at, group in enumerate(groups) for n in group["names"]}
    wanted = [
        [own for p in _of_group(group, names) for own in p.own] for group in optimizer.param_groups
    ]
    missing = [p.name for group in wanted for p in group if alias(p, saved) not in saved]
    unexpected = [n for n in saved if n not in trained]
    wrong = [f"missing in the optimizer saved {', '.join(missing)}"] if missing else []
    wrong += [f"unexpected in the optimizer saved {', '.join(unexpected)}"] if unexpected else []
    for at, group in enumerate(wanted):
        origins = {saved[n] for p in group if (n := alias(p, saved)) in saved}
        if len({comparable(groups[origin]["values"]) for origin in origins}) > 1:
            wrong.append(
                f"group {at} holds parameters of groups {sorted(origins)}, whose hyperparameters "
                "differ"
            )
    return wrong


def unequal_states(
    optimizer: torch.optim.Optimizer, names: Names, saved: dict[str, dict[str, Any]]
) -> list[str]:
    """Stacks of parameters whose states, saved one by one, are not those of one parameter."""
    wrong = []
    for p in (p for group in optimizer.param_groups for p in _of_group(group, names)):
        found = {comparable(saved.get(alias(own, saved), "none")): own.name for own in p.own}
        if len(found) > 1:
            told = "; ".join(f"{name} has {state:.120}" for state, name in found.items())
            wrong.append(f"{p.name} is stepped as one, and in the state saved {told}")
    return wrong


def new_state(
    optimizer: torch.optim.Optimizer,
    names: Names,
    saved: dict[str, dict[str, Any]],
    metadata: Metadata,
) -> tuple[dict[torch.Tensor, dict[str, Any]], Shards]:
    """The state that an optimizer is to have, and which of its tensors are still to be read."""
    state: dict[torch.Tensor, dict[str, Any]] = {}
    shards: Shards = {}
    for group in optimizer.param_groups:
        computes_there = bool(group.get("fused") or group.get("capturable"))
        for local in (p for p in group["params"] if p in names):
            found = {alias(own, saved): own for own in names[local].own}
            name = next(iter(found))
            if name not in saved:
                continue  # it had no state
            fields = state[local] = {}
            for field in saved[name]["tensors"]:
                dtype = metadata.state_dict_metadata[key(name, field)].properties.dtype
                fields[field] = torch.zeros_like(local, dtype=dtype, requires_grad=False)
                shards |= {key(each, field): (own, fields[field]) for each, own in found.items()}
            for field, (value, on_device) in saved[name]["scalars"].items():
                there = isinstance(value, torch.Tensor) and (on_device or computes_there)
                fields[field] = value.to(local.device) if there else _on_cpu(value)
    return state, shards


def set_state(optimizer: torch.optim.Optimizer, state: dict[torch.Tensor, dict[str, Any]]) -> None:
    """Give an optimizer this state and no other."""
    optimizer.state.clear()
    optimizer.state.update(state)


def set_groups(
    optimizer: torch.optim.Optimizer,
    names: Names,
    groups: list[dict[str, Any]],
) -> None:
    """Give groups the hyperparameters saved with the group that their parameters were in."""
    saved = {n: group["values"] for group in groups for n in group["names"]}
    for group in optimizer.param_groups:
        here = _of_group(group, names)
        if not here:
            continue
        values = saved[alias(here[0].own[0], saved)]
        for field, value in values.items():
            if field in IMPLEMENTATION:
                continue
            if isinstance(group.get(field), torch.Tensor):
                group[field].copy_(torch.as_tensor(value))  # a compiled step reads this very tensor
            else:
                group[field] = _on_cpu(value)
