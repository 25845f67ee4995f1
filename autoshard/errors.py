"""The errors users see. Every message names who, which tensor, the values, why, and the remedy."""

from __future__ import annotations


class AutoshardError(Exception):
    """Base of every error that autoshard raises on purpose."""


class CaptureError(AutoshardError):
    """The model could not be turned into one graph."""


class MeshError(AutoshardError):
    """The mesh is malformed, or does not fit the world or the batch."""


class ShardingError(AutoshardError):
    """The captured model cannot be cut as asked."""


def message(who: str, what: str, values: str, why: str, remedy: str) -> str:
    """Join the five parts of an error: who, which tensor, the values, why, what to change."""
    return f"{who}: {what}: {values}\n  why: {why}\n  fix: {remedy}"
