"""When tensors count as equal here: to 1e-9 of the largest entry, and 1e-12 for what is zero."""

from __future__ import annotations

import torch

RELATIVE, FLOOR = 1e-9, 1e-12


def difference(got: torch.Tensor, want: torch.Tensor) -> str:
    """What is wrong with ``got``; empty when it agrees with ``want``."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}"
    if not want.numel() or not want.is_floating_point():
        return "" if torch.equal(got, want) else f"{got} instead of {want}"
    error, scale = (got - want).abs().max().item(), want.abs().max().item()
    fine = error <= RELATIVE * scale + FLOOR
    return "" if fine else f"off by {error:.2e}, largest entry {scale:.2e}"


def differences(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, str]:
    """Every name whose value differs, is missing, or is only in ``got``, with the reason."""
    out = {name: "only here" for name in got if name not in want}
    for name, value in want.items():
        text = difference(got[name], value) if name in got else "missing"
        if text:
            out[name] = text
    return out
