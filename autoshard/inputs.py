"""Example inputs for a model that is given without any."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from autoshard.errors import CaptureError, message
from autoshard.meta import has_meta, home, standing_in

#: Arguments that hold what the loss compares with, the surest first.
TARGETS = ("labels", "label", "targets", "target", "y")
LENGTH = 16
#: What fake tensors raise where a model looks at its data.
UNDECIDABLE = (DataDependentOutputException, DynamicOutputShapeException)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Meanwhile torch logs and prints nothing about a trace that fails: our error says it."""
    loggers = [
        logging.getLogger(name)
        for name in (
            "torch._subclasses.fake_tensor",
            "torch.fx.experimental.symbolic_shapes",
            "torch._export.non_strict_utils",
        )
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def find_inputs(
    model: nn.Module, data_ranks: int = 1, tables: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Inputs by name, with rows that ``data_ranks`` divide; with targets where forward takes any.

    Tried in turn, on fake tensors: what the signature and the first layers suggest, then the
    model's ``dummy_inputs``. ``tables``: recovered values of a meta model. Raises CaptureError that
    says what to pass.
    """
    rows = 2 * data_ranks if data_ranks > 1 else 4
    failure = "nothing in the model suggests any"
    fits: dict[str, torch.Tensor] | None = None
    for candidate in _candidates(model, rows):
        try:
            _run(model, candidate, tables or {})
            return candidate
        except UNDECIDABLE:  # the inputs fit so far; the capture will say which line asks for data
            fits = fits or candidate
        except Exception as error:  # whatever a model does with inputs it does not expect
            failure = f"the last tried, {_shapes(candidate)}, failed: {str(error)[:300]}"
    if fits is not None:
        return fits
    names = inspect.signature(model.forward).parameters
    raise CaptureError(
        message(
            type(model).__name__,
            "example inputs",
            f"forward takes {', '.join(names) or 'nothing'}",
            f"none were given and none could be inferred; {failure}",
            "pass example_inputs={'name': tensor, ...}",
        )
    )


def _candidates(model: nn.Module, rows: int) -> Iterator[dict[str, torch.Tensor]]:
    parameters = inspect.signature(model.forward).parameters
    plain = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in plain]
    needed = [p.name for p in plain if p.default is p.empty]
    for name, x in _first_inputs(model, names, needed, rows):
        yield from _completed(name, x, names, needed)
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, dict):
        yield {k: v for k, v in dummy.items() if isinstance(v, torch.Tensor)}


def _completed(
    name: str, x: torch.Tensor, names: list[str], needed: list[str]
) -> Iterator[dict[str, torch.Tensor]]:
    """One input and the others that go with it: with targets first, for a loss."""
    target = next((n for n in TARGETS if n in names and n != name), None)
    others = {n: x.clone() for n in needed if n not in (name, target)}
    found = {name: x, **others}
    if target is not None:
        alike, classes = x.clone(), torch.zeros(x.shape[0], dtype=torch.long)
        by_class = x.is_floating_point() and target.startswith("label")
        for value in (classes, alike) if by_class else (alike, classes):
            yield {**found, target: value}
        if "decoder_input_ids" in names and not x.is_floating_point():
            yield {**found, "decoder_input_ids": x.clone(), target: x.clone()}
    if target not in needed:
        yield found
        if "decoder_input_ids" in names and not x.is_floating_point():
            yield {**found, "decoder_input_ids": x.clone()}


def _first_inputs(
    model: nn.Module, names: list[str], needed: list[str], rows: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's main input: its name and a tensor that fits its first layers."""
    main = getattr(model, "main_input_name", None)
    first = main if main in names else next(iter(needed or names), None)
    if first is None:
        return
    if "input_ids" in names and first not in ("pixel_values", "input_features", "input_values"):
        first = "input_ids"
    layers = [m for m in model.modules() if _kind(m)]
    embeds = any(isinstance(m, nn.Embedding) for m in layers)
    if first == "input_ids" or (embeds and _kind(layers[0]) == "tokens"):
        yield first, _tokens(layers, rows)
    shapes = [s for m in layers[:3] for s in _shapes_for(m, rows)]
    size = getattr(getattr(model, "config", None), "image_size", None)
    if isinstance(size, int):
        shapes = [(*s[:2], size, size) for s in shapes if len(s) == 4] + shapes
    for shape in dict.fromkeys(shapes):
        yield first, torch.zeros(shape, dtype=_dtype(model))
    if embeds and first != "input_ids":
        yield first, _tokens(layers, rows)
    matrix = next((p for p in model.parameters() if p.ndim == 2), None)
    for width in reversed(matrix.shape if matrix is not None else ()):
        yield first, torch.zeros(rows, width, dtype=_dtype(model))


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Embedding):
        return "tokens"
    return "features" if _shapes_for(module, 1) else ""


def _tokens(layers: list[nn.Module], rows: int) -> torch.Tensor:
    sizes = [m.num_embeddings for m in layers if isinstance(m, nn.Embedding)]
    return torch.arange(rows * LENGTH).reshape(rows, LENGTH) % min([LENGTH, *sizes])


def _shapes_for(module: nn.Module, rows: int) -> list[tuple[int, ...]]:
    if isinstance(module, nn.Linear):
        return [(rows, module.in_features), (rows, LENGTH, module.in_features)]
    if isinstance(module, nn.Conv1d):
        return [(rows, module.in_channels, n) for n in (32, 128, 3000)]
    if isinstance(module, nn.Conv2d):
        return [(rows, module.in_channels, n, n) for n in (32, 224, 16, 28, 64, 128, 256)]
    if isinstance(module, nn.Conv3d):
        return [(rows, module.in_channels, n, n, n) for n in (16, 32)]
    if isinstance(module, nn.RNNBase):
        return [(rows, LENGTH, module.input_size)]
    return []


def _dtype(model: nn.Module) -> torch.dtype:
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(floats, torch.get_default_dtype())


def _run(model: nn.Module, inputs: dict[str, Any], tables: dict[str, torch.Tensor]) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(quietly())
        # models ask this to choose the path they take under export
        stack.enter_context(mock.patch.object(torch.compiler, "_is_compiling_flag", True))
        if has_meta(model):
            stack.enter_context(standing_in(model, mode, tables))
        stack.enter_context(mode)
        stack.enter_context(torch.no_grad())
        model(**{k: v.to(home(model)).clone() for k, v in inputs.items()})


def _shapes(inputs: dict[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in inputs.items())
