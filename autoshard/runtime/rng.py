"""Random numbers that are equal where a value is invariant and independent where it is cut.

A random op whose value is cut over some mesh axes draws from a stream of its own for this rank's
position on those axes; other random ops draw from the common stream. Streams follow
``torch.manual_seed``.
"""

from __future__ import annotations

from typing import Any

import torch

_GOLDEN = 0x9E3779B97F4A7C15  # spreads positions over seeds (Knuth, multiplicative hashing)


def draw(op: Any, link: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a random op in the stream of ``link``: a `Link`, or ``()`` for the common stream."""
    if not link:
        return op(*args, **kwargs)
    index = link.index
    device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device("cpu"))
    devices = [device] if device.type != "cpu" else []
    # one number of the common stream per op, the same on every rank, keeps the streams in step
    seed = int(torch.randint(2**31, (), dtype=torch.int64).item())
    mixed = (seed * _GOLDEN + (index + 1) * 0x632BE59BD9B4E019) % 2**63
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(mixed)
        return op(*args, **kwargs)
