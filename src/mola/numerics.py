"""Numerical conventions: float64 for whatever is summed or solved, and one seed a call for whatever is drawn.

Float64 is used also where a network's device has none (on the CPU then). A generator becomes one seed, so that every batch and every
component draws the same numbers, and a prediction does not depend on its batch.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mola.errors import OptionError


def exact_device(device: torch.device) -> torch.device:
    """Where float64 numbers can be that belong to a device: on the CPU where it has none."""
    return torch.device("cpu") if device.type == "mps" else device


def exact(tensor: Tensor) -> Tensor:
    """In float64. First moved, then lifted: a device that has none cannot convert on the way."""
    return tensor.to(exact_device(tensor.device)).double()


EVEN_COORDINATES = 4096
"""Of a point that Sobol's sequence spreads evenly; in those beyond, the gain is lost and a table would take long to make."""


@lru_cache(maxsize=8)
def even_normals(count: int, size: int, seed: int) -> Tensor:
    """Standard normals that fill space more evenly than random ones: a scrambled Sobol sequence.

    A mean over them has the same expectation as over random ones, and a smaller error where few coordinates matter.

    Args:
        count: number of points, a power of two.
        size: coordinates of each.
        seed: of the scrambling.

    Returns:
        (count, size) in float64, on the CPU. Shared by all callers: do not write into it.
    """
    even = min(size, EVEN_COORDINATES)
    engine = torch.quasirandom.SobolEngine(even, scramble=True, seed=seed)  # type: ignore[no-untyped-call]
    least = torch.finfo(torch.float64).eps
    points = engine.draw(count, dtype=torch.float64)
    points[0] = points[0].float()  # torch makes it in its default type, whatever is asked for
    normals = torch.special.ndtri(points.clamp(least, 1 - least))
    if size == even:
        return normals
    generator = torch.Generator("cpu").manual_seed(seed)
    rest = torch.randn(count, size - even, generator=generator, dtype=torch.float64, device="cpu")
    return torch.cat([normals, rest], dim=1)


def seed_from(generator: torch.Generator | None) -> int | None:
    """A seed drawn from a generator: one number a call, so that batches and components share it.

    Args:
        generator: on the CPU, or None.

    Returns:
        A seed, or None without a generator.
    """
    if generator is None:
        return None
    check_generator(generator)
    return int(torch.randint(2**62, (), generator=generator))


def check_generator(generator: torch.Generator | None) -> None:
    """Refuse what is no generator, and one that is not on the CPU."""
    if generator is not None and not isinstance(getattr(generator, "device", None), torch.device):
        raise OptionError(
            f"generator must be a torch.Generator or None, got {generator!r}. Make one with torch.Generator().manual_seed(0)."
        )
    if generator is not None and generator.device.type != "cpu":
        raise OptionError(
            f"generator must be on the CPU so that draws are the same on every device, got {generator.device}."
        )


def check_seed(seed: int) -> int:
    """The seed itself.

    Args:
        seed: what the user gave.

    Returns:
        The same number.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise OptionError(f"seed must be a whole number from 0 to 2^63 - 1, got {seed!r}.")
    return seed
