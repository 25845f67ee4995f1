"""A rank's part of a stack of the model's own parameters, by their names, in local state dicts.

Hooks of `ShardedModule`: whoever reads or writes ``state_dict()`` sees the parameters that the rank
has some of, one by one, as views of the stack that it holds.
"""

from __future__ import annotations

from typing import Any

import torch

from autoshard.program import Parameter
from autoshard.runtime import gather


def _own_rows(module: Any, parameter: Parameter) -> dict[str, int]:
    """By name of a parameter in a stack, where a rank has it on dim 0 of its part."""
    rows = gather.positions(parameter, module.program.mesh, module.rank_index)[0]
    held = range(len(parameter.stacked)) if rows is None else rows.tolist()
    return {parameter.stacked[at].name: row for row, at in enumerate(held)}


def _stacks(module: Any) -> list[tuple[str, Parameter]]:
    return [(k, p) for k, p in module.held_parameters().items() if p.stacked]


def take_apart(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """In a state dict, views under the model's own names in place of stacks."""
    stacks = {prefix + p.name: p for _, p in _stacks(module)}
    if not stacks:
        return
    items = list(state.items())
    state.clear()
    for name, value in items:
        if name not in stacks:
            state[name] = value
            continue
        for own, row in _own_rows(module, stacks[name]).items():
            state[prefix + own] = value[row]


@torch.no_grad()
def put_together(
    module: Any,
    state: dict[str, Any],
    prefix: str,
    _: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Copy what is of a stack into it, before the rest of a state dict is loaded."""
    for key, parameter in _stacks(module):
        local = module.tensor(key)
        for own, row in _own_rows(module, parameter).items():
            name, part = prefix + own, local.detach()[row]
            if name not in state:
                missing.append(name)
                continue
            value = state.pop(name)
            if value.shape == part.shape:
                part.copy_(value)
            else:
                errors.append(
                    f"size mismatch for {name}: it is {tuple(value.shape)}, and this rank's part "
                    f"of it {tuple(part.shape)}"
                )
        state[prefix + parameter.name] = local  # as it is now
