"""Many seeds from one, apart for each purpose; more of them begin with the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mola.randomness import check_seed

__all__ = ["check_seed", "derived_seeds", "seeded"]


def derived_seeds(seed: int, purpose: int, count: int) -> list[int]:
    """`count` seeds of one purpose.

    Args:
        seed: the user's.
        purpose: a small number; different purposes share no seed but by chance.
        count: how many.

    Returns:
        Seeds.
    """
    generator = torch.Generator("cpu").manual_seed(check_seed(seed))
    own = int(torch.randint(2**62, (purpose + 1,), generator=generator)[-1])
    return torch.randint(2**62, (count,), generator=generator.manual_seed(own)).tolist()


@contextmanager
def seeded(network: nn.Module, seed: int) -> Iterator[None]:
    """A place with a random state of its own, which begins at a seed; outside, nothing changes.

    Args:
        network: on whose devices things are drawn.
        seed: of the CPU and of those devices.

    Yields:
        Nothing.
    """
    devices = {tensor.device for tensor in network.parameters()}
    cards = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(devices=cards):
        # One by one: torch.manual_seed would seed every device of the machine, also those whose state is not put back.
        torch.default_generator.manual_seed(seed)
        for card in cards:
            with torch.cuda.device(card):
                torch.cuda.manual_seed(seed)
        if any(device.type == "mps" for device in devices):
            torch.mps.manual_seed(seed)
        yield
