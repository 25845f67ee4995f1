"""Lines about slow work, on the logger ``autoshard``: silent but under `show`."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

_log = logging.getLogger("autoshard")


def say(text: str) -> None:
    """Tell what begins now."""
    _log.info(text)


@contextlib.contextmanager
def show() -> Iterator[None]:
    """Meanwhile those lines go to stderr, each with the seconds since the first."""
    began = time.time()

    class Elapsed(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return f"[{record.created - began:6.1f} s] {record.getMessage()} ..."

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Elapsed())
    before = _log.level, _log.propagate
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(before[0])
        _log.propagate = before[1]
