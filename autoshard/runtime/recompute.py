"""Blocks of which the inputs alone are kept for backward, which computes the rest again."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from autoshard.runtime.dispatch import meeting_all
from autoshard.runtime.split import repeatable


def recomputed(body: Any, draws: bool, sends: bool, *inputs: Any) -> Any:
    """``body(*inputs)``; only the inputs, of any type, are kept for backward, which runs ``body``
    again up to the last tensor that it needs. ``draws``: ``body`` draws random numbers, which are
    then the same ones (the states of the default generators are kept). ``sends``: it sends rows to
    experts or back, and waits for them further on.

    Runs ``body`` and nothing else where gradients are off.
    """
    if not torch.is_grad_enabled():
        return body(*inputs)
    body = repeatable(meeting_all(body) if sends else body)
    return checkpoint(body, *inputs, use_reentrant=False, preserve_rng_state=draws)
