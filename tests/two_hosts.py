"""Train on two hosts, which are two network namespaces of this machine, over a slow link.

A pair of virtual interfaces joins the namespaces, and a queueing discipline slows it down. Two gloo
processes run on either host::

    sudo python tests/two_hosts.py dp=2,tp=2 tp=4 dp=2,tp=2@alternate
    sudo python tests/two_hosts.py pp=2,tp=2 --microbatches 4 --rate-mbit 50

A case is a mesh and, after @, where its ranks are: ``torchrun`` (the default: launched by it on
both hosts, 0 and 1 on the first) or ``alternate`` (0 and 2 on the first, so that the innermost axis
crosses the link). Told of each are seconds of a step, and the bytes that go over the link: those
of the table of collectives for the groups that cross, the same as gloo sends them, and what the
interface of the first host counts, out and in, headers included. Losses must be those of one
device.

Needs root and ``ip netns``. Namespaces are named by process, and are deleted at the end, after a
failure too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LINK, ADDRESSES, PORT = "link0", ("10.77.0.1", "10.77.0.2"), 29500
PER_HOST, WORLD = 2, 4
LIMIT_SECONDS = 600


class Case(NamedTuple):
    """A mesh as text, and where its ranks are."""

    mesh: str
    place: str = "torchrun"

    @staticmethod
    def parse(text: str) -> Case:
        mesh, _, place = text.partition("@")
        if place not in ("", "torchrun", "alternate"):
            raise argparse.ArgumentTypeError(f"{text!r}: after @ comes torchrun or alternate")
        return Case(mesh, place or "torchrun")

    def host(self, rank: int) -> int:
        return rank % 2 if self.place == "alternate" else rank // PER_HOST

    def ranks(self, host: int) -> list[int]:
        return [rank for rank in range(WORLD) if self.host(rank) == host]


# --- the hosts ---


def run(*command: str) -> str:
    """What a command prints; RuntimeError with what it says when it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def lacking() -> str:
    """What this machine lacks to be two hosts; nothing when it can be."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "root on Linux is needed for network namespaces"
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"there is no command {' or '.join(missing)} (package iproute2)"
    try:
        with hosts():
            return ""
    except RuntimeError as error:
        return str(error)


@contextlib.contextmanager
def hosts() -> Iterator[list[str]]:
    """Names of two namespaces that are joined by an interface `LINK` in each."""
    names = [f"autoshard-{os.getpid()}-{end}" for end in "ab"]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        pair = ("type", "veth", "peer", "name", LINK, "netns", names[1])
        run("ip", "link", "add", LINK, "netns", names[0], *pair)
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", LINK)
            for interface in ("lo", LINK):
                run("ip", "-n", name, "link", "set", interface, "up")
        yield names
    finally:
        for name in names:
            remove(name)


def remove(name: str) -> None:
    """Delete a namespace, and end what still runs in it; nothing when it is not there."""
    if name not in run("ip", "netns", "list").split():
        return
    for pid in run("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    run("ip", "netns", "delete", name)


def slow_down(names: list[str], mbit: int, delay_ms: float) -> str:
    """Limit the link in both directions, and tell what it is then. ``tbf`` limits the rate alone:
    without ``netem`` in the kernel nothing there delays packets."""
    if not mbit:
        return "as fast as memory"
    limits = {
        "netem": ["delay", f"{delay_ms}ms", "rate", f"{mbit}mbit", "limit", "100000"],
        "tbf": ["rate", f"{mbit}mbit", "burst", "128kb", "latency", "1s"],
    }
    failures = []
    for kind, limit in limits.items():
        try:
            for name in names:
                run("tc", "-n", name, "qdisc", "replace", "dev", LINK, "root", kind, *limit)
        except RuntimeError as error:
            failures.append(str(error))
            continue
        late = f", {delay_ms} ms late" if kind == "netem" else ", no delay: there is no netem"
        return f"{mbit} Mbit/s each way by {kind}{late}"
    raise RuntimeError("nothing slows the link down: " + "; ".join(failures))


# --- processes ---


def launch(names: list[str], case: Case, options: list[str]) -> None:
    """Run `work` on all ranks. Raises RuntimeError with what a rank printed when one fails."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "GLOO_SOCKET_IFNAME": LINK,
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "OMP_NUM_THREADS": "1",
    }
    script = [__file__, "--work", *options]
    running = []
    with tempfile.TemporaryFile("w+") as out:

        def start(host: int, command: list[str], **more: str) -> None:
            inside = ["ip", "netns", "exec", names[host], sys.executable, *command]
            running.append(subprocess.Popen(inside, env=env | more, stdout=out, stderr=out))

        for host in range(2):
            if case.place == "torchrun":
                nodes = ["--nnodes=2", f"--nproc-per-node={PER_HOST}", f"--node-rank={host}"]
                meet = [f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
                start(host, ["-m", "torch.distributed.run", *nodes, *meet, *script])
                continue
            for rank in case.ranks(host):
                start(host, script, RANK=str(rank), WORLD_SIZE=str(WORLD))
        try:
            wait(running)
        except RuntimeError as error:
            out.seek(0)
            raise RuntimeError(f"{'@'.join(case)}: {error}\n{out.read()[-8000:]}") from None


def wait(running: list[subprocess.Popen]) -> None:
    """Until all have ended; RuntimeError when one fails or none ends, and then none runs on."""
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while any(process.poll() is None for process in running):
            if failed := [p.returncode for p in running if p.returncode]:
                raise RuntimeError(f"a process ended with {failed[0]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks still run after {LIMIT_SECONDS} s")
            time.sleep(0.1)
        if failed := [p.returncode for p in running if p.returncode]:
            raise RuntimeError(f"a process ended with {failed[0]}")
    finally:
        for process in running:
            process.terminate()  # torchrun ends its ranks then
        for process in running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


# --- a rank ---


def model_of(size: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The model, and the rows of the global batch; the same on every call."""
    import handwritten as hw
    import torch

    torch.manual_seed(0)
    model = hw.GPT(size.width, 4, 4 * size.width, size.layers, 1024, max_length=size.length)
    return model, hw.tokens(size.batch, size.length, vocab=1024)


def work(size: argparse.Namespace) -> None:
    """Train; rank 0 writes what it found."""
    import torch
    import torch.distributed as dist
    from gloo import local_rows

    from autoshard import MeshSpec, autoshard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (case,) = size.cases
    spec = MeshSpec.parse(case.mesh)
    sizes = tuple(n for _, n in spec.sizes)
    mesh = dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=spec.names)
    model, batch = model_of(size)
    rows = local_rows(mesh, batch)
    piped = {"microbatches": size.microbatches} if size.microbatches else {}
    sharded = autoshard(model, mesh, example_inputs=rows, zero=size.zero, **piped)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    losses, seconds = [], []
    for step in range(1 + size.steps):
        dist.barrier()
        if step == 1:  # the first one compares batches between ranks
            begin = counted()
        now = time.perf_counter()
        optimizer.zero_grad()
        losses.append(sharded.train_step(**rows).item())
        optimizer.step()
        seconds.append(time.perf_counter() - now)
    dist.barrier()
    if dist.get_rank() == 0:
        sent = [(b - a) / size.steps for a, b in zip(begin, counted(), strict=True)]
        found = {
            "losses": losses,
            "seconds": seconds[1:],
            "measured": sent,
        }
        found |= predicted(sharded.program, case)
        Path(size.out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def counted() -> list[int]:
    """Bytes that went to the other host, and that came from it."""
    folder = Path(f"/sys/class/net/{LINK}/statistics")
    return [int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes")]


def predicted(program: Any, case: Case) -> dict[str, list[float]]:
    """Bytes of a step from the first host to the second, and back, by the table of collectives, and
    as gloo sends them."""
    from autoshard.report import Sizes, groups_over, step_collectives
    from autoshard.traffic import positions

    sizes, table, gloo = Sizes(program), [0.0, 0.0], [0.0, 0.0]
    for position in range(positions(program)):
        for c in step_collectives(program, position=position):
            sent = sizes.number(c.bytes)
            for group, host in itertools.product(groups_over(program, c.axes), (0, 1)):
                own = [r for r in group if program.mesh.stage(r) == position]
                if not own:
                    continue
                if c.to is not None:
                    ring = sent * sum(case.host(r) == host != case.host(group[c.to]) for r in own)
                else:
                    ring = sent * ring_crossings(group, case, host, own)
                table[host] += ring
                if by_pairs(c):
                    gloo[host] += sent / (len(group) - 1) * pair_crossings(group, case, host)
                else:  # gloo's reduce-scatter is an all-reduce of which every rank keeps its part
                    gloo[host] += ring * (2 if c.kind == "reduce_scatter" else 1)
    return {"table": table, "gloo": gloo}


def by_pairs(collective: Any) -> bool:
    """Whether on gloo every rank sends to every other: all-to-alls, and what `runtime.wire` moves,
    which is weights gathered and gradients reduced to the ranks that hold them."""
    of_units = collective.why.startswith(("weights ", "gradients "))
    others = ("all_reduce", "send")
    return collective.kind == "all_to_all" or (of_units and collective.kind not in others)


def ring_crossings(
    group: list[int], case: Case, host: int, senders: list[int] | None = None
) -> int:
    """How often a ring round the group goes from a host to the other: so many ranks of it (of
    ``senders``, where they are given) send all that they send to the other one."""
    onward = zip(group, [*group[1:], group[0]], strict=True)
    own = group if senders is None else senders
    return sum(case.host(a) == host != case.host(b) for a, b in onward if a in own)


def pair_crossings(group: list[int], case: Case, host: int) -> int:
    """How many pairs there are of a rank of a host and one of the other."""
    return sum(case.host(a) == host != case.host(b) for a, b in itertools.permutations(group, 2))


# --- all together ---


def alone(size: argparse.Namespace) -> list[float]:
    """Losses on one device."""
    import torch

    model, batch = model_of(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(1 + size.steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def measure(case: Case, size: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """What `work` found on two hosts that are there as long as it runs, and what their link was."""
    with hosts() as names, tempfile.TemporaryDirectory() as folder:
        link = slow_down(names, size.rate_mbit, size.delay_ms)
        out = f"{folder}/found.json"
        launch(names, case, ["@".join(case), *options, "--out", out])
        return json.loads(Path(out).read_text()) | {"link": link}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure every case and print a row of each; gives what was found."""
    argv = sys.argv[1:] if argv is None else argv
    size = parser().parse_args(argv)
    if size.work:
        work(size)
        return []
    if reason := lacking():
        raise SystemExit(f"two_hosts: {reason}")
    given = {name: getattr(size, name) for name in OPTIONS}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    wanted, found = alone(size), []
    for case in size.cases:
        found.append(measure(case, size, options) | {"case": case})
        pairs = zip(found[-1]["losses"], wanted, strict=True)
        wrong = [(got, want) for got, want in pairs if abs(got - want) > 1e-4 * abs(want)]
        if wrong:
            raise SystemExit(f"{'@'.join(case)}: losses (got, of one device) differ: {wrong}")
    show(found, size)
    return found


def show(found: list[dict[str, Any]], size: argparse.Namespace) -> None:
    from tabulate import tabulate

    rows = []
    for each in found:
        case = each["case"]
        where = " | ".join(" ".join(map(str, case.ranks(host))) for host in range(2))
        sent = [n / 1e6 for n in (each["table"][0], each["gloo"][0], *each["measured"])]
        rows.append(
            [case.mesh, where, statistics.median(each["seconds"]), *sent, each["losses"][-1]]
        )
    headers = ["mesh", "ranks on hosts", "s a step", "MB by the table", "as gloo sends"]
    headers += ["measured out", "measured in", "last loss"]
    print(tabulate(rows, headers, floatfmt=("", "", ".3f", ".2f", ".2f", ".2f", ".2f", ".6f")))
    print(
        f"\nlink: {found[0]['link']}; medians of {size.steps} steps of {size.batch} x "
        f"{size.length} tokens, {size.layers} layers, width {size.width}, zero={size.zero}; losses "
        "are those of one device"
    )


OPTIONS = {
    "steps": 3,
    "batch": 16,
    "length": 128,
    "width": 256,
    "layers": 4,
    "zero": 0,
    "microbatches": 0,
    "rate_mbit": 200,
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("cases", nargs="+", type=Case.parse, metavar="MESH[@PLACE]")
    for name, value in OPTIONS.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    made.add_argument("--delay-ms", type=float, default=2.0, help="where the kernel has netem")
    made.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--out", help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that hosts are removed
    main()
