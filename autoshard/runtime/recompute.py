"""Blocks of which the inputs alone are kept for backward, which computes the rest again."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(body: Any, draws: bool, *inputs: Any) -> Any:
    """``body(*inputs)``; only the inputs, of any type, are kept for backward, which runs ``body``
    again up to the last tensor that it needs. ``draws``: ``body`` draws random numbers, which are
    then the same ones (the states of the default generators are kept).

    Runs ``body`` and nothing else where gradients are off.
    """
    if not torch.is_grad_enabled():
        return body(*inputs)
    return checkpoint(body, *inputs, use_reentrant=False, preserve_rng_state=draws)
