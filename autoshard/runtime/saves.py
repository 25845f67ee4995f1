"""Directories of saves: what a save that is killed leaves behind is never taken for one.

``path/`` holds one directory per save, of which the file ``latest`` names the last complete one:

    path/latest                     the directory, its files and their sizes in bytes
    path/save-000003/__0_0.distcp   what rank 0 wrote
    path/save-000003/.metadata      which box of which tensor lies where, and what is no tensor

``latest`` is replaced, in one step, when everything else is on disk: a save that is killed leaves
it as it was. What such a save left behind is deleted by the next.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from autoshard.errors import ShardingError, message

LATEST = "latest"
SAVE, LOAD = "save_checkpoint", "load_checkpoint"


def _folders(path: Path) -> dict[int, Path]:
    """The directories of saves, complete or not, by number."""
    found = path.glob("save-*") if path.is_dir() else ()
    numbered = {f: re.fullmatch(r"save-(\d+)", f.name) for f in found}
    return {int(match[1]): folder for folder, match in numbered.items() if match}


def _latest(path: Path) -> dict[str, Any] | None:
    """What ``latest`` says: the directory and its files with their sizes. None without one."""
    try:
        return json.loads((path / LATEST).read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise refused(path, f"{LATEST} cannot be read ({error})") from None


def refused(path: Path, what: str) -> ShardingError:
    """The error for a directory that has no checkpoint to be loaded."""
    return ShardingError(
        message(
            "checkpoint",
            str(path),
            what,
            "only a save that every rank has finished can be loaded",
            "save again, or give the directory of a complete checkpoint",
        )
    )


def last_complete(path: Path, check_files: bool) -> Path:
    """The directory of the last complete save. ``check_files``: whether all its files are there."""
    latest = _latest(path)
    if latest is None:
        left = ", ".join(f.name for f in _folders(path).values())
        raise refused(
            path,
            f"it is incomplete: {left} was never finished" if left else "there is none",
        )
    folder = path / latest["folder"]
    if check_files:
        sizes = {name: _size(folder / name) for name in latest["files"]}
        wrong = [
            f"{name} " + ("is missing" if sizes[name] is None else f"has {sizes[name]} of {n} B")
            for name, n in latest["files"].items()
            if sizes[name] != n
        ]
        if wrong:
            raise refused(path, f"it is incomplete: in {folder.name}, {'; '.join(wrong)}")
    return folder


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.exists() else None


def begin(path: Path) -> str:
    """Make the directory of the next save; delete what killed saves have left."""
    path.mkdir(parents=True, exist_ok=True)
    latest, found = _latest(path), _folders(path)
    last = latest["folder"] if latest else ""
    for folder in found.values():
        if folder.name != last:
            shutil.rmtree(folder)
    # a number never used here: a rank of a killed save may still be writing
    number = max([0, *found, *(int(name) for name in re.findall(r"\d+$", last))]) + 1
    name = f"save-{number:06d}"
    (path / name).mkdir()
    _flush(path)
    return name


def settle(folder: Path) -> None:
    """See that this rank's files and everyone's metadata are where they should be, for good."""
    if not (folder / ".metadata").exists():
        raise ShardingError(
            message(
                SAVE,
                str(folder),
                "what rank 0 wrote there is not seen by this rank",
                "all ranks write into one directory",
                "give a path on a file system that all ranks share",
            )
        )
    _flush(folder)


def complete(folder: Path) -> None:
    """Make the directory the last complete one, in one step; then delete those before it."""
    path = folder.parent
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    temporary = path / f"{LATEST}.tmp"
    with temporary.open("w") as stream:
        json.dump({"folder": folder.name, "files": files}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path / LATEST)
    _flush(path)
    for other in _folders(path).values():
        if other != folder:
            shutil.rmtree(other)


def _flush(folder: Path) -> None:
    """Bring a directory's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
