"""Ranks of a pipeline that fail: by an error in a stage, by a batch of another shape, killed in the
middle of a step, or by an error of their own script. Run as a script, it is one such rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import gloo
import handwritten as hw
import torch
import torch.distributed as dist
from gloo import detached, local_rows

#: How long the process groups of these modules wait.
LIMIT = 10


@contextlib.contextmanager
def patience(seconds: int):
    """Meanwhile modules are made whose process groups wait so long."""
    from autoshard.runtime import process_groups

    kept = process_groups.timeout_of
    process_groups.timeout_of = lambda device=None: timedelta(seconds=seconds)
    try:
        yield
    finally:
        process_groups.timeout_of = kept


def built(mesh, **options: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    from autoshard import autoshard

    torch.manual_seed(0)
    inputs = hw.tokens(8)
    rows = local_rows(mesh, inputs)
    with patience(LIMIT):
        options = {"microbatches": 2, **options}
        sharded = autoshard(hw.GPT(layers=4), mesh, rows, **options)
    return sharded, torch.optim.AdamW(sharded.parameters()), rows


def outcome(call: Any) -> tuple[str, str, float]:
    """The class and text of the error that a call raises, and how long it took."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


#: Who is given a batch that a stage cannot compute: an id, or a target, that there is none of. Only
#: the first, or the last, stage of data rank 1 raises: rank 1, or rank 3 of pp=2,dp=2.
RAISES = {"ids": 1, "targets": 3}


def raises(mesh, what: str, options: dict[str, Any]) -> tuple[str, str, float]:
    sharded, _, rows = built(mesh, **options)
    sharded.train_step(**rows)
    if dist.get_rank() % 2:
        rows = {**rows, what: rows[what].index_fill(1, torch.tensor([3]), 999)}
    return outcome(lambda: sharded.train_step(**rows))


def again(mesh, axes: str) -> dict[str, Any]:
    """One rank fails half way. It makes a new module at once, the others when they have waited: its
    loss; what the old one and another that was there before say then; and a loss on another mesh.
    """
    from pipeline_jobs import mesh_of

    here, other = mesh_of(axes), mesh_of("dp=2,tp=2")
    options = {} if "pp" in axes else {"microbatches": None}
    sharded, _, rows = built(here, **options)
    beside, _, _ = built(here, **options)
    for module in (sharded, beside):
        module.train_step(**rows)
    if dist.get_rank() == 3:
        rows = {**rows, "targets": rows["targets"].index_fill(1, torch.tensor([3]), 999)}
    failed = outcome(lambda: sharded.train_step(**rows))[0]
    new, _, rows = built(here, **options)
    out = {"failed": failed, "new": new.train_step(**rows).clone()}
    out["old"] = outcome(lambda: beside.train_step(**rows)) if "pp" in axes else None
    elsewhere, _, rows = built(other, microbatches=None)
    return out | {"other": elsewhere.train_step(**rows).clone()}


#: By name: the lengths of two batches that all ranks are given, and of a third: that of the ranks
#: 0 to 2, and that of rank 3.
LENGTHS = {
    "new to one": ((16, 16), (16, 12)),
    "new to all others": ((16, 16), (12, 16)),
    "known to both": ((16, 12), (16, 12)),
    "new to both": ((16, 16), (12, 10)),
}


def other_shape(mesh, name: str, options: dict[str, Any]) -> tuple[str, str, float]:
    """One rank's batch is of another length than that of the ranks which see the same rows."""
    sharded, _, _ = built(mesh, **options)
    before, now = LENGTHS[name]
    for length in before:
        sharded.train_step(**local_rows(mesh, hw.tokens(8, length)))
    rows = local_rows(mesh, hw.tokens(8, now[dist.get_rank() == 3]))
    return outcome(lambda: sharded.train_step(**rows))


def tries_again(mesh) -> list[Any]:
    """All ranks are given what forward does not take, then one alone, which then gives the right
    thing: its words are no cause of anything that comes later."""
    from autoshard.runtime import failures

    sharded, _, rows = built(mesh)
    loss = sharded.train_step(**rows)
    found: list[Any] = [outcome(lambda: sharded.train_step(**rows, more=1))[:2]]
    if dist.get_rank() == 2:
        found.append(outcome(lambda: sharded.train_step(ids=rows["ids"]))[:2])
    sharded.zero_grad()
    found.append(torch.equal(sharded.train_step(**rows), loss))
    dist.barrier()
    found.append(failures._words(sharded))
    return found


# --- processes that end ---


def script(rank: int, folder: str, how: str) -> None:
    """A training script of one rank of pp=2,dp=2. Rank 2 ends in its second step, or behind it."""
    gloo.join(rank, 4, folder, 60)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    sharded, optimizer, rows = built(mesh, zero=1)

    def step() -> None:
        optimizer.zero_grad()
        sharded.train_step(**rows)
        sharded.clip_grad_norm_(1.0)
        optimizer.step()

    step()
    sharded.save_checkpoint(f"{folder}/saved", optimizer)
    state = detached(sharded.full_state_dict())
    if rank == 2 and how == "killed":
        kill_within_a_step(sharded)
        step()
    if rank == 2:
        step()
        raise ValueError("the learning rate of step 2 is missing")
    result = outcome(lambda: [step() for _ in range(3)])
    torch.save((result, state), f"{folder}/result{rank}.pt")


def kill_within_a_step(sharded: Any) -> None:
    """From now on this process ends when it has run two actions of a step."""
    runner, left = sharded._running.runs[True].runner, [2]
    run = runner.run

    def counted(*args: Any, **kwargs: Any) -> None:
        run(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    runner.run = counted


def ended(folder: Path, how: str) -> dict[int, Any]:
    """What the ranks saw of one that ended: its outcome, and the state when all was well."""
    folder.mkdir()
    here = Path(__file__)
    environment = {**os.environ, "PYTHONPATH": f"{here.parent}:{here.parents[1]}"}
    commands = [[sys.executable, str(here), str(r), str(folder), how] for r in range(4)]
    processes = [
        subprocess.Popen(c, env=environment, stderr=subprocess.PIPE, text=True) for c in commands
    ]
    try:
        texts = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    files = {r: folder / f"result{r}.pt" for r in range(4) if r != 2}
    missing = [texts[r] for r, file in files.items() if not file.exists()]
    assert not missing, missing[0]
    return {r: torch.load(file) for r, file in files.items()}


if __name__ == "__main__":
    script(int(sys.argv[1]), sys.argv[2], sys.argv[3])
