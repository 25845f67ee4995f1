"""Jobs on real gloo processes that save checkpoints on one mesh and load them on another, and saves
that are killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import gloo
import handwritten as hw
import torch
import torch.distributed as dist
from gloo import detached, local_rows, refusal
from zoo import batch, tiny

ALONE = "one device"
MESHES = {"dp=4": {"dp": 4}, "dp=2,tp=2": {"dp": 2, "tp": 2}, "tp=4": {"tp": 4}, ALONE: {"dp": 1}}
#: Meshes that cut tokens through attention, on which a job of their own saves and loads.
CONTEXT_MESHES = {"cp=4": {"cp": 4}, "cp=2,tp=2": {"cp": 2, "tp": 2}}
#: Meshes of which some have stages, on which a job of their own saves and loads.
PIPELINE_MESHES = {
    "pp=2,dp=2": {"pp": 2, "dp": 2},
    "pp=2,tp=2, interleaved": {"pp": 2, "tp": 2},
    "pp=2,dp=2, V": {"pp": 2, "dp": 2},
    "pp=4": {"pp": 4},
    "pp=2,ep=2": {"pp": 2, "ep": 2},
}
#: Options of the call on each mesh.
OPTIONS: dict[str, dict[str, Any]] = {
    "dp=4": {"zero": 3},
    "dp=2,tp=2": {"zero": 1},
    "cp=4": {"zero": 3},
    "cp=2,tp=2": {"zero": 1, "context_parallel": "ulysses"},
    "pp=2,dp=2": {"zero": 1, "microbatches": 2},
    "pp=2,tp=2, interleaved": {"schedule": "interleaved", "microbatches": 2},
    "pp=2,dp=2, V": {"zero": 3, "schedule": "dualpipev", "microbatches": 2},
    "pp=4": {"schedule": "gpipe", "microbatches": 2},
    "pp=2,ep=2": {"zero": 2, "microbatches": 1},
    "dp=4, mixed": {"zero": 3, "param_dtype": torch.bfloat16, "offload": True},
    "dp=2,tp=2, mixed": {"zero": 2, "param_dtype": torch.bfloat16},
}


class Run:
    """A model that trains on a mesh, with two groups of parameters and a learning-rate schedule."""

    def __init__(self, mesh: str, name: str, double: bool, make_optimizer: Any = None):
        from autoshard import MeshSpec, autoshard

        self.mesh = None
        if mesh != ALONE:
            sizes = (MESHES | CONTEXT_MESHES | PIPELINE_MESHES)[mesh.removesuffix(", mixed")]
            self.mesh = dist.device_mesh.init_device_mesh(
                "cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)
            )
        self.make_optimizer = make_optimizer or two_groups
        self.casts = gloo.InFloat64 if double else contextlib.nullcontext
        torch.manual_seed(0)
        model, inputs = gloo.build(name) if double else (tiny(name, n_layer=1), batch())
        if make_optimizer is frozen_sgd:
            freeze(model)
        with self.casts():
            self.sharded = autoshard(
                model,
                MeshSpec(MESHES[mesh]) if self.mesh is None else self.mesh,
                example_inputs=inputs,
                **OPTIONS.get(mesh, {}),
            )
        self.rows = inputs if self.mesh is None else local_rows(self.mesh, inputs)
        self.restart()

    def restart(self) -> None:
        """A new optimizer, as in a new process."""
        self.optimizer = self.make_optimizer(self.sharded)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            losses.append(self.sharded.train_step(**self.rows).item())
            self.optimizer.step()
            self.schedule.step()
        return losses

    def whole(self) -> dict[str, Any]:
        """Every parameter, buffer and optimizer tensor whole, every number, and the rates."""
        out: dict[str, Any] = detached(self.sharded.full_state_dict())
        mine: dict[str, dict[str, Any]] = {}
        for key in self.sharded.held_parameters():
            local = self.sharded.tensor(key)
            fields = self.optimizer.state.get(local, {})
            cut = {f for f, v in fields.items() if getattr(v, "shape", None) == local.shape}
            mine[key] = {f: None if f in cut else v * 1 for f, v in fields.items()}
        known = self.everywhere(mine)
        for key, parameter in self.sharded.program.parameters().items():
            for field, value in known.get(key, {}).items():
                at = f"optimizer.{parameter.name}.{field}"
                if value is None and key in mine:
                    value = self.optimizer.state[self.sharded.tensor(key)][field]
                    out[at] = self.sharded._whole(parameter, value)
                else:
                    out[at] = self.sharded._whole(parameter, None) if value is None else value
        for at, group in enumerate(self.optimizer.param_groups):
            out |= {f"group {at}.{k}": group[k] for k in ("lr", "initial_lr", "weight_decay")}
        return out

    def everywhere(self, mine: dict[str, Any]) -> dict[str, Any]:
        """What ranks of all stages have."""
        if self.mesh is None or "pp" not in self.mesh.mesh_dim_names:
            return mine
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        return {key: fields for each in told for key, fields in each.items()}


def two_groups(sharded: Any) -> torch.optim.Optimizer:
    """AdamW that decays matrices only."""
    matrices = [p for p in sharded.parameters() if p.ndim > 1]
    others = [p for p in sharded.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}]
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)


def frozen_sgd(sharded: Any) -> torch.optim.Optimizer:
    """SGD with momentum of what is not frozen."""
    trainable = [p for p in sharded.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, lr=1e-2, momentum=0.9)


def freeze(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("emb" not in name and ".0." not in name)


def unequal(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """The names of values that are not equal to the bit."""
    if got.keys() != want.keys():
        return sorted(got.keys() ^ want.keys())
    return [
        n
        for n, value in got.items()
        if not (
            torch.equal(value, want[n]) if isinstance(value, torch.Tensor) else value == want[n]
        )
    ]


def matrix(
    mesh, folder: str, name: str, double: bool, meshes: Any = tuple(MESHES), make: Any = None
) -> dict[Any, Any]:
    """Train two steps on each mesh and save; then load each save on each mesh and train on.

    By (saved on, loaded on): what is not equal to the bit after loading, the losses of two steps
    more, and those of the run that was not interrupted. One device is rank 0 by itself.
    """
    mine = [m for m in meshes if m != ALONE or dist.get_rank() == 0]
    runs = {m: Run(m, name, double, make) for m in mine}
    saved, went_on = {}, {}
    for text in mine:
        runs[text].train(2)
        saved[text] = runs[text].whole()
        runs[text].sharded.save_checkpoint(f"{folder}/{name}/{text}", runs[text].optimizer)
        went_on[text] = runs[text].train(2)
    everyone = [None]
    if dist.get_rank() == 0:
        everyone = [(saved.get(ALONE), went_on.get(ALONE))]
    dist.broadcast_object_list(everyone, src=0)
    saved[ALONE], went_on[ALONE] = everyone[0]
    out = {}
    for target in mine:
        for source in meshes:
            run = runs[target]
            run.restart()
            run.sharded.load_checkpoint(f"{folder}/{name}/{source}", run.optimizer)
            wrong = unequal(run.whole(), saved[source])
            run.schedule.last_epoch = 2
            out[source, target] = {
                "unequal": wrong,
                "losses": run.train(2),
                "uninterrupted": went_on[source],
            }
    return out


def refusals(mesh, folder: str) -> dict[str, str]:
    """What each rank is told of saves and loads that only some ranks, or none, can do."""
    from autoshard import autoshard

    torch.manual_seed(0)
    inputs = hw.vectors(4, 32)
    sharded = autoshard(hw.MLP(), mesh, example_inputs=inputs)
    rows, out = local_rows(mesh, inputs), {}
    adam = torch.optim.AdamW(sharded.parameters())
    sharded.train_step(**rows)
    adam.step()
    sharded.save_checkpoint(f"{folder}/refusals", adam)
    before = detached(dict(sharded.named_parameters()))

    def save(optimizer: Any, path: str = "refusals") -> str:
        return refusal(lambda: sharded.save_checkpoint(f"{folder}/{path}", optimizer))

    factored = torch.optim.Adafactor(sharded.parameters())
    for parameter in sharded.parameters():
        if parameter.ndim > 1:
            rows, columns = parameter.shape
            state = {"row_var": torch.zeros(rows, 1), "col_var": torch.zeros(1, columns)}
            factored.state[parameter] = state
    out["factored"] = save(factored)
    adam.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    out["rates"] = save(adam)
    adam.param_groups[0]["lr"] = 0.1
    first = next(iter(adam.state.values()))
    first["step"] += dist.get_rank()
    out["steps"] = save(adam)
    first["step"] -= dist.get_rank()
    Path(f"{folder}/file").touch()
    out["a file"] = save(adam, "file")
    with torch.no_grad():
        next(sharded.parameters()).copy_(before[next(iter(before))])
    sharded.load_checkpoint(f"{folder}/refusals", adam)
    out["lr"] = str(adam.param_groups[0]["lr"])
    sharded.save_checkpoint(f"{folder}/refusals", adam)
    out["left"] = ", ".join(sorted(p.name for p in Path(f"{folder}/refusals").iterdir()))
    return out


def random_streams(mesh, folder: str) -> dict[str, Any]:
    """Random numbers drawn after loading, where ranks had one state and where each had its own."""
    from autoshard import autoshard

    torch.manual_seed(0)
    sharded = autoshard(hw.MLP(), mesh, example_inputs=hw.vectors(4, 32))
    out = {}
    for text, seed in (("one", 7), ("own", 7 + dist.get_rank())):
        torch.manual_seed(seed)
        sharded.save_checkpoint(f"{folder}/random")
        want = torch.rand(3)
        torch.manual_seed(1)
        sharded.load_checkpoint(f"{folder}/random")
        out[text] = torch.equal(torch.rand(3), want)
    return out


def pretrained(mesh, folder: str, name: str, theirs: str) -> dict[str, Any]:
    """Weights that transformers wrote, read into slices; and written again from them."""
    from autoshard import autoshard

    torch.manual_seed(0)
    model = tiny(name, seed=3)
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "batched_mm"
    sharded = autoshard(model, mesh, example_inputs=batch())
    names = sharded.load_pretrained(theirs)
    state = detached(sharded.full_state_dict())
    with torch.no_grad():
        negative_zero(sharded)
    sharded.save_pretrained(f"{folder}/{name}", max_shard_bytes=200_000)
    return {"names": names, "state": state}


def negative_zero(sharded: Any) -> None:
    """The first element of what a rank holds of each parameter becomes -0.0."""
    for parameter in sharded.parameters():
        parameter.flatten()[:1].copy_(torch.tensor(-0.0))


# --- saves that are killed ---


def one_number() -> tuple[Any, Any]:
    """A module of one device for what `keep_saving` saves, and its optimizer."""
    from autoshard import MeshSpec, autoshard

    torch.manual_seed(0)
    sharded = autoshard(hw.MLP(), MeshSpec(dp=1), example_inputs=hw.vectors(4, 32))
    return sharded, torch.optim.AdamW(sharded.parameters())


def keep_saving(rank: int, world: int, folder: str, path: str, number: int) -> None:
    """Save again and again, with every parameter and state set to the number of the save, from
    ``number`` on. The file ``begun`` has the last number begun, ``done`` the last one saved."""
    from autoshard import autoshard

    gloo.join(rank, world, folder, 30)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    inputs = hw.vectors(4, 32)
    sharded = autoshard(hw.MLP(), mesh, example_inputs=inputs)
    optimizer = torch.optim.AdamW(sharded.parameters())
    sharded.train_step(**inputs)
    optimizer.step()
    while True:
        number += 1
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.fill_(number)
                optimizer.state[parameter]["exp_avg"].fill_(number)
        if rank == 0:
            write(Path(path).with_name("begun"), number)
        sharded.save_checkpoint(path, optimizer)
        if rank == 0:
            write(Path(path).with_name("done"), number)


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def write(file: Path, number: int) -> None:
    file.with_suffix(".tmp").write_text(str(number))
    os.replace(file.with_suffix(".tmp"), file)


def kill_saves(
    folder: Path, times: int, ranks: int = 2, seed: int = 0
) -> list[tuple[int, set[float], int, list[str]]]:
    """Kill some or all ranks at random moments while they save; after each, the last number that
    was saved, the values that are then loaded on one device, the last number that was begun, and
    what is left in the directory."""
    draw = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gloo_checkpoint", "passes", "autoshard.runtime.checkpoint"])
    sharded, optimizer = one_number()
    out = []
    for attempt in range(times):
        (folder / str(attempt)).mkdir()
        before = int(read(folder / "begun") or 0)
        place = (ranks, str(folder / str(attempt)), f"{folder}/saves", before)
        processes = [context.Process(target=keep_saving, args=(r, *place)) for r in range(ranks)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 120
        while int(read(folder / "begun") or 0) < before + 3:  # then saves follow each other
            assert time.monotonic() < deadline and all(p.is_alive() for p in processes)
            time.sleep(0.002)
        time.sleep(draw.random() * 0.2)
        victims = draw.sample(processes, draw.randint(1, ranks))
        for process in victims:
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(draw.random() * 0.2)  # the others go on as far as they can
        for process in processes:
            process.kill()
            process.join()
        left = sorted(p.name for p in (folder / "saves").iterdir())
        sharded.load_checkpoint(folder / "saves", optimizer)
        values = {v for p in sharded.parameters() for v in p.flatten().tolist()}
        values |= {v for s in optimizer.state.values() for v in s["exp_avg"].flatten().tolist()}
        out.append((int(read(folder / "done") or 0), values, int(read(folder / "begun")), left))
    return out
