"""One seed a call: what a generator becomes, so that every batch and component draws the same numbers."""

from __future__ import annotations

import torch

from mola.errors import OptionError

__all__ = ["check_generator", "check_seed", "seed_from"]


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
    """Refuse what is no generator, and one that is not on the CPU.

    Raises:
        OptionError: if it is not.
    """
    if generator is not None and not isinstance(getattr(generator, "device", None), torch.device):
        message = f"generator must be a torch.Generator or None, got {generator!r}. Make one with torch.Generator().manual_seed(0)."
        raise OptionError(message)
    if generator is not None and generator.device.type != "cpu":
        message = f"generator must be on the CPU so that draws are the same on every device, got {generator.device}."
        raise OptionError(message)


def check_seed(seed: int) -> int:
    """The seed itself.

    Args:
        seed: what the user gave.

    Returns:
        The same number.

    Raises:
        OptionError: unless it is a whole number from 0 to 2^63 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        message = f"seed must be a whole number from 0 to 2^63 - 1, got {seed!r}."
        raise OptionError(message)
    return seed
