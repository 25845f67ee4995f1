"""The command line: ``autoshard inspect``, ``autoshard verify``, ``autoshard demo``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tabulate import tabulate_formats
from torch import nn

from autoshard import MeshSpec, autoshard, verify
from autoshard.errors import AutoshardError, message
from autoshard.progress import say, show
from autoshard.schedule import NAMES
from autoshard.timeline import checked

TABLES = tuple(
    "axes params graph collectives groups passes memory attention experts pipeline".split()
)
#: What ``inspect`` prints when no table is named: all but the longest.
DEFAULT_TABLES = ("axes", "params", "attention", "collectives", "memory", "passes")
#: Options of a pipeline, as `autoshard` and `verify` call them.
IN_STAGES = ("schedule", "microbatches", "stages", "chunks")
EXIT_OK, EXIT_MISMATCH, EXIT_ERROR = 0, 1, 2

EPILOG = """\
FILE.py:NAME names a function without arguments that returns a model, or a pair of a model and
its example inputs (a dict of keyword arguments, or a tuple), the rows of the global batch.
NAME is `build` when left out.

Exit codes: 0 all is well, 1 verify found a difference, 2 an error, said on stderr.
"""


class TargetError(AutoshardError):
    """FILE.py:NAME does not lead to a model."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (a mismatch) or 2 (an error)."""
    arguments = _parser().parse_args(argv)
    try:
        with show():
            code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception:  # ours: not to be taken for a mismatch
        traceback.print_exc()
        return EXIT_ERROR


def inspect(arguments: argparse.Namespace) -> int:
    """Compile a model for a mesh, with no process group, and print tables."""
    mesh = MeshSpec.parse(arguments.mesh)
    _check_rank(arguments.rank, mesh)
    if arguments.timeline is not None:
        checked(arguments.timeline)
    model, example_inputs = load(arguments.target)
    sharded = autoshard(
        model,
        mesh,
        example_inputs=example_inputs,
        sequence_parallel=arguments.sequence_parallel,
        context_parallel=arguments.context_parallel,
        expert_capacity=arguments.expert_capacity,
        strict=arguments.strict,
        zero=arguments.zero,
        recompute=arguments.recompute,
        **_in_stages(arguments),
    )
    if arguments.timeline is not None:
        sharded.forecast().save(arguments.timeline)
    say("making tables")
    shown = sharded if arguments.rank is None else sharded.rank(arguments.rank)
    if not arguments.table:
        print(shown, end="\n\n")
    usual = [*DEFAULT_TABLES, *(["experts"] if sharded.program.mixtures else [])]
    usual += ["pipeline"] if sharded.program.pipeline is not None else []
    usual += ["groups"] if arguments.ranks_per_node is not None else []
    for name in arguments.table or usual:
        _print_table(shown, name, arguments.format, arguments.ranks_per_node)
    return EXIT_OK


def _in_stages(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of a pipeline."""
    return {name: getattr(arguments, name) for name in IN_STAGES}


def prove(arguments: argparse.Namespace) -> int:
    """Train a model on all ranks of a mesh in this process, and compare with the model itself."""
    mesh = MeshSpec.parse(arguments.mesh)
    model, example_inputs = load(arguments.target)
    report = verify(
        model,
        mesh,
        example_inputs=example_inputs,
        steps=arguments.steps,
        sequence_parallel=arguments.sequence_parallel,
        context_parallel=arguments.context_parallel,
        expert_capacity=arguments.expert_capacity,
        strict=arguments.strict,
        zero=arguments.zero,
        recompute=arguments.recompute,
        **_in_stages(arguments),
    )
    print(report.table(limit=None if arguments.all else 0), report.verdict, sep="\n\n")
    return EXIT_OK if report.ok else EXIT_MISMATCH


def demo(arguments: argparse.Namespace) -> int:
    """Train a small GPT on four ranks of this machine, and on one device beside them."""
    from autoshard.demo import run

    return EXIT_OK if run(arguments.steps) else EXIT_MISMATCH


def load(target: str) -> tuple[nn.Module, Any]:
    """The model and example inputs (or None) that ``FILE.py:NAME`` builds. Raises TargetError."""
    path, colon, name = target.rpartition(":")
    if not colon:
        path, name = target, "build"
    built = _users(target, _function(target, Path(path), name))
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise TargetError(
            message(
                target,
                f"what {name}() returned",
                f"got {_kinds(built)}",
                "it must be a torch.nn.Module, or a pair of one and its example inputs",
                f"end {name}() with `return model` or `return model, {{'input_ids': ids}}`",
            )
        )
    return model, inputs


def _users(target: str, call: Callable[[], Any]) -> Any:
    """What the user's code returns. Raises TargetError that shows the user's own lines."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
        lines = "".join(traceback.format_list(frames)).rstrip()
        raise TargetError(
            message(
                target,
                "the code of the model",
                f"{type(error).__name__}: {error}" + (f"\n{lines}" if lines else ""),
                "it raised this before there was a model",
                "see that it runs by itself: python -c 'import FILE; FILE.NAME()'",
            )
        ) from error


def _is_users(filename: str) -> bool:
    """Whether a file is neither this package's, nor Python's, nor an installed library's."""
    own = str(Path(__file__).parent)
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    return not filename.startswith(("<", own, *libraries))


def _function(target: str, path: Path, name: str) -> Callable[[], Any]:
    if path.suffix != ".py" or not path.is_file():
        raise TargetError(
            message(
                target,
                "the file",
                f"got {str(path)!r}",
                "there is no such Python file",
                "write it as path/to/file.py:build",
            )
        )
    function = getattr(_users(target, lambda: _module(path)), name, None)
    if not callable(function):
        raise TargetError(
            message(
                target,
                f"the function {name}",
                f"got {function!r}",
                f"{path.name} defines no function of that name",
                f"define `def {name}(): ...` in it, or name another after the colon",
            )
        )
    return function


def _module(path: Path) -> Any:
    """Run the file as a module; it may import its neighbours, as a script does."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # true for every .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _kinds(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
    return f"{type(value).__name__} {value!r:.80}"


def _check_rank(rank: int | None, mesh: MeshSpec) -> None:
    if rank is None or 0 <= rank < mesh.world_size:
        return
    raise TargetError(
        message(
            "inspect",
            "--rank",
            f"got {rank}",
            f"the mesh {mesh} has {mesh.world_size} ranks",
            f"choose one from 0 to {mesh.world_size - 1}",
        )
    )


def _print_table(sharded: Any, name: str, style: str, ranks_per_node: int | None) -> None:
    heading = {"github": f"### {name}\n", "html": f"<h3>{name}</h3>"}.get(style, f"# {name}\n")
    options = {"ranks_per_node": ranks_per_node} if name == "groups" else {}
    print(heading, sharded.table(name, format=style, **options), "", sep="\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autoshard",
        description="Compile a single-device PyTorch model for many ranks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"autoshard {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_inspect(commands)
    _add_verify(commands)
    _add_demo(commands)
    return parser


def _version() -> str:
    try:
        return version("autoshard")
    except PackageNotFoundError:
        return "(not installed)"


def _add_inspect(commands: Any) -> None:
    command = _command(commands, "inspect", inspect)
    _add_model(command)
    command.add_argument(
        "--table",
        action="append",
        choices=TABLES,
        help=f"what to print; may be given several times (default: {', '.join(DEFAULT_TABLES)})",
    )
    command.add_argument(
        "--format",
        choices=tabulate_formats,
        default="simple",
        metavar="F",
        help="simple (the default), github, html, or another format of tabulate",
    )
    command.add_argument(
        "--rank", type=int, metavar="R", help="show rank R's module, from 0 (the default)"
    )
    command.add_argument(
        "--ranks-per-node",
        type=_positive,
        metavar="N",
        help="of how many ranks a node is: the table of groups tells which cross nodes",
    )
    command.add_argument(
        "--timeline",
        metavar="FILE",
        help="with pp: write when each stage is to run what, as a picture (FILE.svg) or a trace "
        "for Perfetto (FILE.json)",
    )


def _add_verify(commands: Any) -> None:
    command = _command(commands, "verify", prove)
    _add_model(command)
    command.add_argument(
        "--steps", type=_positive, default=2, help="optimizer steps to compare (default: 2)"
    )
    command.add_argument(
        "--all",
        action="store_true",
        help="print every comparison: by default one line a kind, and every difference",
    )


def _add_demo(commands: Any) -> None:
    command = _command(commands, "demo", demo)
    command.add_argument("--steps", type=_positive, default=100, help="(default: 100)")


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int]) -> Any:
    summary = (run.__doc__ or "").strip()
    command = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=EPILOG if name != "demo" else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def _add_model(command: Any) -> None:
    command.add_argument("target", metavar="FILE.py:NAME", help="the function that builds a model")
    command.add_argument("--mesh", required=True, help="sizes by axis, e.g. dp=2,tp=4")
    command.add_argument(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_false",
        help="do not cut the sequence over tp",
    )
    command.add_argument(
        "--context-parallel",
        default="ring",
        choices=("ring", "ulysses", "allgather"),
        help="how attention reads the tokens of other ranks, on a mesh with cp",
    )
    command.add_argument(
        "--expert-capacity",
        type=float,
        metavar="F",
        help="the most an expert takes, in times of its even part (default: no token is dropped)",
    )
    command.add_argument(
        "--zero", type=int, default=1, choices=range(4), help="the stage, over dp, ep and cp"
    )
    command.add_argument(
        "--recompute",
        default="none",
        choices=("none", "block"),
        help="what backward computes again, in place of keeping it",
    )
    command.add_argument("--strict", action="store_true", help="refuse axes that do not divide")
    command.add_argument(
        "--schedule",
        default="1f1b",
        choices=NAMES,
        help="the order in which ranks run their stages, on a mesh with pp",
    )
    command.add_argument(
        "--microbatches",
        type=_positive,
        metavar="M",
        help="in how many pieces a rank's rows go through the stages (default: up to 4 for each "
        "rank of pp)",
    )
    command.add_argument(
        "--stages",
        metavar="TEXT",
        help="what is in each, e.g. 'embed,layers.0-3|layers.4-7,head' (default: balanced)",
    )
    command.add_argument(
        "--chunks", type=_positive, metavar="V", help="stages a rank, of --schedule interleaved"
    )


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; it must be a positive integer")
    return value


if __name__ == "__main__":
    sys.exit(main())
