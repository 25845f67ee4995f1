"""A rank that fails tells the others why: they wait for it, and would only see that it is gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from autoshard.errors import AutoshardError, MeshError, message

#: Seconds to wait for the cause, once waiting for a rank has failed.
PATIENCE = 2.0
#: Words of errors that say that another rank is not there, and nothing about why.
GONE = ("connection", "timed out", "timeout", "peer", "socket", "gloo", "nccl", "broken pipe")


@contextlib.contextmanager
def told(module: Any, who: str) -> Iterator[None]:
    """Meanwhile an error of this rank is left where the others look, and one that only says that
    another rank is gone becomes a MeshError that quotes what that rank has left."""
    module.calls += 1
    try:
        yield
    except Exception as error:
        if not _says_gone(error):
            _leave(module, error)
            raise
        found = _left_by_another(module)
        rank, why = found or (
            None,
            "it left no word: its process was killed, or it does not answer",
        )
        raise MeshError(
            message(
                who,
                "another rank" if rank is None else f"rank {rank}",
                f"{type(error).__name__}: {str(error)[:300]}",
                f"no rank can go on without the others; {why}",
                "see the output of that rank, start all again and load the last checkpoint",
            )
        ) from error


def _says_gone(error: Exception) -> bool:
    """Whether an error is one of waiting for another rank."""
    if isinstance(error, AutoshardError) or not isinstance(error, (RuntimeError, dist.DistError)):
        return False
    text = str(error).lower()
    return any(word in text for word in GONE)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _leave(module: Any, error: Exception) -> None:
    with contextlib.suppress(Exception):  # the one that is raised counts
        text = f"{module.rank_index}\n{type(error).__name__}: {error}"[:4000]
        _store().compare_set(f"autoshard/{module.calls}", "", text)


def _left_by_another(module: Any) -> tuple[int, str] | None:
    """Which rank failed first, and what it said."""
    key, until = f"autoshard/{module.calls}", time.monotonic() + PATIENCE
    with contextlib.suppress(Exception):
        store = _store()
        while time.monotonic() < until:
            if store.check([key]):
                rank, _, text = store.get(key).decode().partition("\n")
                return int(rank), f"it raised {text}"
            time.sleep(0.05)
    return None
