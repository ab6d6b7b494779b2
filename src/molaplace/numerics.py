"""Numerical conventions: the head is evaluated in float64, and one seed per call determines all draws.

Rows on a device that does not support float64 (mps) are moved to the CPU. Each call draws one seed from its generator, so every batch
and every component uses the same random numbers. A prediction therefore does not depend on the rest of its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import OptionError

Generator = torch.Generator | np.random.Generator | None
"""A source of random numbers; if None, PyTorch's default generator is used."""

SOBOL_DIMENSIONS = 4096
"""Largest number of dimensions drawn from a Sobol sequence. Beyond this number, the gain in accuracy is negligible and the
sequence is slow to set up."""


SUM_TOLERANCE = 1e-2
"""Largest accepted difference between 1 and the sum of the probabilities of all classes. In bfloat16, rounding changes a sum by up to
0.002."""


def float64_device(device: torch.device) -> torch.device:
    """Return the device for float64 computations: the given device, or the CPU if the device does not support float64."""
    return torch.device("cpu") if device.type == "mps" else device


def as_tensor(values: Any) -> Tensor:
    """Return a tensor unchanged, and convert anything else to a tensor on the CPU, whatever torch's default device is."""
    return values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")


def to_float64(tensor: Tensor) -> Tensor:
    """Convert a tensor to float64, moving it to the CPU first if its device does not support float64."""
    return tensor.to(float64_device(tensor.device)).double()


def square_root(values: Tensor) -> Tensor:
    """Return the square roots, with a gradient of 0 instead of infinity at 0: a draw has no deviation where its variance vanishes."""
    positive = values > 0
    return torch.where(positive, torch.where(positive, values, 1.0).sqrt(), 0.0)


def standard_normals(shape: Sequence[int], generator: Generator) -> Tensor:
    """Draw standard normals on the CPU in float64, so that the draws are the same on every device."""
    if isinstance(generator, np.random.Generator):
        return torch.from_numpy(generator.standard_normal(tuple(shape)))
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


@lru_cache(maxsize=32)  # every batch uses the same draws, and tracing stores cached draws as constants
def sobol_normals(count: int, size: int, seed: int) -> Tensor:
    """Draw standard normals (count, size) from a scrambled Sobol sequence, which fills space more evenly than random draws.

    A mean over these draws has the same expectation as a mean over random draws, but a smaller error if only a few dimensions
    matter. `count` must be a power of two.
    """
    sobol_size = min(size, SOBOL_DIMENSIONS)
    engine = torch.quasirandom.SobolEngine(sobol_size, scramble=True, seed=seed)  # type: ignore[no-untyped-call]
    smallest = torch.finfo(torch.float64).eps
    points = engine.draw(count, dtype=torch.float64)
    points[0] = points[0].float()  # torch draws the first point in its default dtype, which the user may have changed
    normals = torch.special.ndtri(points.clamp(smallest, 1 - smallest))
    if size == sobol_size:
        return normals
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.cat([normals, standard_normals((count, size - sobol_size), generator)], dim=1)


def seed_from(generator: torch.Generator | None) -> int | None:
    """Draw one seed from a CPU generator, or return None if there is no generator."""
    if generator is None:
        return None
    check_generator(generator)
    return int(torch.randint(2**62, (), generator=generator, device="cpu"))


def check_generator(generator: torch.Generator | None) -> None:
    """Raise `OptionError` unless the argument is None or a CPU generator."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(
            f"must be a torch.Generator or None, got a {type(generator).__name__}. Pass torch.Generator().manual_seed(0), for example. "
            f"Several inputs of a network are one tuple: posterior((first, second)).",
            argument="generator",
        )
    if generator is not None and generator.device.type != "cpu":
        raise OptionError(
            f"must be on the CPU, so that draws are the same on every device; got {generator.device}.",
            argument="generator",
        )


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with a single thread, because small networks lose more time to synchronisation than they gain from parallelism."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
