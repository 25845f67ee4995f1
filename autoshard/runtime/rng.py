"""Random numbers that are equal where a value is invariant and independent where it is cut.

A random op whose value is cut over some mesh axes draws from a stream of its own for this rank's
position on those axes; other random ops draw from the common stream. Streams follow
``torch.manual_seed``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autoshard.mesh import MICROBATCHES
from autoshard.runtime import turns

#: Odd constants that spread seeds and positions (Knuth, multiplicative hashing).
GOLDEN, APART, BETWEEN = 0x9E3779B97F4A7C15, 0x632BE59BD9B4E019, 0xD6E8FEB86659FD93


def draw(op: Any, link: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a random op in the stream of ``link``: a `Link`, or ``()`` for the common stream."""
    if not link:
        return op(*args, **kwargs)
    # one number of the common stream per op, the same on every rank, keeps the streams in step
    seed = number()
    mixed = seed * GOLDEN + (link.index + 1) * APART
    if MICROBATCHES in link.axes:
        mixed += turns.turn * BETWEEN
    mixed %= 2**63
    generator = _generator_of(*args, *kwargs.values())
    state = generator.get_state()
    generator.manual_seed(mixed)
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_state(state)


@contextlib.contextmanager
def stream(seed: int, stage: int) -> Iterator[None]:
    """Meanwhile the default generators are at the start of a stream of a stage's own, the same for
    every micro-batch: `draw` parts these where they are parts of a value."""
    generators = [torch.default_generator]
    if torch.cuda.is_available():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    states = [g.get_state() for g in generators]
    try:
        for generator in generators:
            generator.manual_seed((seed * GOLDEN + (stage + 1) * BETWEEN) % 2**63)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class _Number:
    """Draws a number to seed a generator with; it never lies on a device that one would wait for.
    An argument of `draw`, it stands under its own name in the code that fx writes."""

    def __call__(self) -> int:
        return int(torch.randint(2**31, (), dtype=torch.int64, device="cpu").item())

    def __repr__(self) -> str:
        return "number"

    def __deepcopy__(self, memo: Any) -> _Number:
        return self


number = _Number()
torch.fx.graph._register_custom_builtin(
    "number", "from autoshard.runtime.rng import number", number
)


def _generator_of(*arguments: Any) -> torch.Generator:
    """The default generator of the device that an op's arguments lie on, or name."""
    places = [a.device for a in arguments if isinstance(a, torch.Tensor)]
    places += [a for a in arguments if isinstance(a, torch.device)]
    device = next((d for d in places if d.type != "cpu"), None)
    if device is None:
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[
        module.current_device() if device.index is None else device.index
    ]
