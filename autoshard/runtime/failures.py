"""A rank that fails tells the others why: they wait for it, and would only see that it is gone.

Words are left in the store in which the processes met. A rank that sees no more than that another
one is gone, or has waited as long as its process group does, looks there for the cause. Nothing is
read or written in a step that goes well, and has inputs of shapes that were there before.

On a GPU nothing raises in a process that waits: its work stands in a stream, and at last a watchdog
ends it without a word. There a thread listens (`_listen`), and ends it with the cause.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from autoshard.errors import AutoshardError, MeshError, message
from autoshard.mesh import DATA_AXES

#: Seconds to wait for the cause, once waiting for a rank has failed.
PATIENCE = 2.0
#: Seconds between two looks at the store.
PAUSE = 0.02
#: Seconds between two looks of the thread that listens, and those for which a word has to hold.
LISTEN, GRACE = 1.0, 10.0
#: Words of errors of NCCL that are the rank's own.
OWN = ("out of memory", "invalid usage", "invalid argument")
#: Words of errors that say that another rank is not there, and nothing about why.
GONE = ("connection", "timed out", "timeout", "peer", "socket", "gloo", "nccl", "broken pipe")
#: Keys of the store: how many words were left, and of each; of what ranks agree on.
COUNT, WORD, SHAPES = "autoshard/words", "autoshard/word/{}", "autoshard/shapes/{}/{}/{}"
#: Where an exception says that `told` has seen it.
SEEN = "_told_by_autoshard"


@dataclass(frozen=True)
class Word:
    """What a rank has left. ``cause``: 2 where it has failed by itself, 1 where it waits for others
    to have inputs like its own, 0 where it saw that another rank is gone. ``shapes``: of the inputs
    of the step that it was in, by name; empty outside of one."""

    rank: int
    cause: int
    text: str
    shapes: dict[str, list[int]]


@contextlib.contextmanager
def told(module: Any, who: str) -> Iterator[None]:
    """Meanwhile an error of this rank is left where the others look, and one that only says that
    another rank is gone becomes a MeshError that quotes what that rank has left."""
    try:
        yield
    except Exception as error:
        if SEEN in vars(error):
            raise
        if not _says_gone(error):
            vars(error)[SEEN] = True
            _leave(module, 2, f"it raised {type(error).__name__}: {error}")
            raise
        _leave(module, 0, f"{type(error).__name__}: {error}")
        made = _lost(module, who, error)
        vars(made)[SEEN] = True
        raise made from error
    else:
        take_back()


def telling(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a module that all ranks call, under `told` where the module has stages."""

    @functools.wraps(method)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if module.wire is None:
            return method(module, *args, **kwargs)
        with told(module, method.__name__):
            return method(module, *args, **kwargs)

    return call


def watch(wire: Any) -> None:
    """From now on an error that ends this process's script is left for the others too. On a GPU the
    process is ended where a transfer of ``wire`` waits for a rank that has failed."""
    global _watching, _listening
    _forget_other_world()
    _wires.add(wire)
    if wire.device.type == "cuda" and not _listening:
        _listening, about = True, (_store().clone(), dist.get_rank(), _any_stands)
        threading.Thread(target=_listen, args=(*about, _end), daemon=True).start()
    if _watching:
        return
    _watching, before = True, sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, Exception) and SEEN not in vars(error) and dist.is_initialized():
            _leave(None, 2, f"its script ended with {kind.__name__}: {error}")
        before(kind, error, trace)

    sys.excepthook = hook


_watching = False
#: Of the world that is joined: the wires, whether a thread listens, and which one it is.
_wires: weakref.WeakSet[Any] = weakref.WeakSet()
_listening = False
_world: Any = None


def _forget_other_world() -> None:
    global _world, _listening
    if dist.group.WORLD is not _world:
        _world, _listening = dist.group.WORLD, False
        _left.clear()
        _wires.clear()


def _any_stands() -> bool:
    try:
        return any(wire.stands() for wire in list(_wires))
    except RuntimeError:  # a module was made meanwhile, or the device does not say
        return False


def _listen(store: Any, rank: int, stands: Callable[[], bool], end: Callable[[str], Any]) -> None:
    """Look for the word of a rank that has failed, once a second; where it still holds after some,
    and this rank's work stands still, call ``end`` with the cause. Ends where the store does."""
    since: dict[int, float] = {}
    while True:
        try:
            words = _standing(store)
        except RuntimeError:
            return
        failed = {n: w for n, w in words if w.cause == 2 and w.rank != rank}
        now = time.monotonic()
        since = {n: since.get(n, now) for n in failed}
        for n, word in failed.items():
            if now - since[n] >= GRACE and stands():
                end(f"rank {word.rank} failed, and this rank {rank} waits for it: {word.text}")
                return
        time.sleep(LISTEN)


def _end(cause: str) -> None:
    print(f"autoshard: {cause}", file=sys.stderr, flush=True)
    os._exit(1)


def agree(module: Any, inputs: dict[str, Any], mode: Any) -> None:
    """Before anything is sent whose size depends on the shapes of a step's inputs, the first time
    that they are these: wait until all ranks that are to have the same rows have told that theirs
    are too. Raises MeshError, on all of these, where they are not. ``mode``: what else decides."""
    wire, rank = module.wire, module.rank_index
    wire.shapes = shapes = {n: list(x.shape) for n, x in inputs.items() if hasattr(x, "shape")}
    known = (mode, *((n, *size) for n, size in shapes.items()))
    if known in wire.agreed:
        return
    wire.agreements += 1
    peers, keys, store = _of_same_rows(module), dict[int, str](), _store()
    keys = {r: SHAPES.format(wire.number, wire.agreements, r) for r in peers}
    text = json.dumps([str(mode), shapes])
    store.set(keys[rank], text)
    others = [r for r in peers if r != rank]
    if not _come(store, [keys[r] for r in others], PATIENCE):
        about = f"it has inputs of shapes {shapes}, as no step before, and waits for the others"
        _leave(module, 1, about)
        _wait(module, store, {r: keys[r] for r in others})
        take_back()
    theirs = {r: store.get(keys[r]).decode() for r in others}
    differing = {r: json.loads(x)[1] for r, x in theirs.items() if x != text}
    if differing:
        raise _other_shapes(shapes, differing)
    wire.agreed.add(known)


def _other_shapes(shapes: Any, differing: dict[int, Any]) -> MeshError:
    told = "; ".join(f"rank {r} has {theirs}" for r, theirs in list(differing.items())[:4])
    return MeshError(
        message(
            "the batch",
            "shapes of inputs",
            f"this rank has {shapes}; {told}",
            "ranks that differ along pp, cp or tp alone see the same rows in every step, and send "
            "each other what is made of them",
            "give these ranks the same batch",
        )
    )


def _come(store: Any, keys: list[str], seconds: float) -> bool:
    """Whether all keys are there, or come in so many seconds."""
    until = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE)
    return True


def _wait(module: Any, store: Any, keys: dict[int, str]) -> None:
    """Wait for others to agree nearly as long as their process group would, so that they find out
    why. Raises MeshError when that is over, or when one of them has failed in the meantime."""
    limit = module.wire.timeout.total_seconds()
    until = time.monotonic() + max(limit - 3 * PATIENCE, limit / 4)
    while not _come(store, list(keys.values()), 1.0):
        failed = next((w for w in _words(module) if w.cause == 2 and w.rank in keys), None)
        if failed is None and time.monotonic() < until:
            continue
        away = [r for r, key in keys.items() if not store.check([key])]
        if not away:
            return
        raise MeshError(
            message(
                "the batch",
                "shapes of inputs",
                f"this rank has {module.wire.shapes}, as no step before; "
                f"ranks {away[:8]} have not said so",
                f"rank {failed.rank} failed: {failed.text}"
                if failed is not None
                else "they have inputs of other shapes, or do not answer; ranks that differ along "
                "pp, cp or tp alone see the same rows in every step",
                "give these ranks the same batch",
            )
        )


def _of_same_rows(module: Any) -> list[int]:
    """The ranks that are to have the same rows as this one, itself included."""
    place = _data_place(module, module.rank_index)
    ranks = range(module.program.mesh.mesh.world_size)
    return [r for r in ranks if _data_place(module, r) == place]


def _data_place(module: Any, rank: int) -> tuple[int, ...]:
    """Where a rank is along the axes that carry rows."""
    coordinate = module.program.mesh.mesh.coordinate(rank)
    return tuple(at for axis, at in coordinate.items() if axis in DATA_AXES)


def _says_gone(error: Exception) -> bool:
    """Whether an error is one of waiting for another rank."""
    if isinstance(error, AutoshardError) or not isinstance(error, (RuntimeError, dist.DistError)):
        return False
    text = str(error).lower()
    return any(word in text for word in GONE) and not any(word in text for word in OWN)


def _lost(module: Any, who: str, error: Exception) -> MeshError:
    """What to raise where another rank is gone."""
    whom, why = _cause(module)
    return MeshError(
        message(
            who,
            whom,
            f"{type(error).__name__}: {str(error)[:300]}",
            f"no rank can go on without the others; {why}",
            "see the output of that rank, start all again and load the last checkpoint",
        )
    )


def _cause(module: Any) -> tuple[str, str]:
    """Whose fault it is, and what that rank has said."""
    until = time.monotonic() + PATIENCE
    while True:
        words = _words(module)
        failed = [w for w in words if w.cause == 2]
        if failed:
            return f"rank {failed[0].rank}", failed[0].text
        if time.monotonic() > until:
            break
        time.sleep(PAUSE)
    mine = Word(module.rank_index, 0, "", module.wire.shapes)
    unlike = _unlike(module, [mine, *words])
    if unlike is not None:
        a, b = unlike
        why = f"they are to see the same rows, and have inputs of shapes {a.shapes} and {b.shapes}"
        return f"ranks {a.rank} and {b.rank}", why
    waiting = [w for w in words if w.cause == 1]
    if waiting:
        return f"rank {waiting[0].rank}", waiting[0].text
    said = {w.rank for w in words} | {module.rank_index}
    silent = [r for r in range(module.program.mesh.mesh.world_size) if r not in said]
    whom = f"rank {silent[0]}" if len(silent) == 1 else f"one of ranks {silent[:8]}"
    why = "it left no word: its process was killed or stopped, or it does not answer"
    return (whom if silent else "another rank"), why


def _unlike(module: Any, words: list[Word]) -> tuple[Word, Word] | None:
    """Two ranks that are to have the same rows, and have inputs of other shapes."""
    first: dict[Any, Word] = {}
    for word in words:
        if word.shapes:
            other = first.setdefault(_data_place(module, word.rank), word)
            if other.shapes != word.shapes:
                return other, word
    return None


# --- the store ---

#: Of this process's words those that stand.
_left: list[int] = []


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _leave(module: Any, cause: int, text: str) -> None:
    shapes = module.wire.shapes if module is not None else {}
    with contextlib.suppress(Exception):  # the one that is raised counts
        store = _store()
        number = store.add(COUNT, 1)
        word = [dist.get_rank(), cause, text[:4000], shapes]
        store.set(WORD.format(number), json.dumps(word))
        _left.append(number)


def take_back() -> None:
    """What this rank said is over: it has gone on."""
    _forget_other_world()
    for number in _left:
        with contextlib.suppress(Exception):
            _store().set(WORD.format(number), "")
    _left.clear()


def _words(module: Any) -> list[Word]:
    """All words of other ranks that stand, in the order in which they were left."""
    found = list[tuple[int, Word]]()
    with contextlib.suppress(Exception):
        found = _standing(_store())
    return [w for _, w in found if w.rank != module.rank_index]


def _standing(store: Any) -> list[tuple[int, Word]]:
    """All words that stand, with their numbers."""
    found = []
    for number in range(1, store.add(COUNT, 0) + 1):
        key = WORD.format(number)
        if store.check([key]) and (text := store.get(key).decode()):
            found.append((number, Word(*json.loads(text))))
    return found
