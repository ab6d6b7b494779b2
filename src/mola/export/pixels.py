"""Bytes to what a network is given, inside the graph: a file that takes images as they lie on disk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mola.errors import OptionError

__all__ = ["Pixels"]


class Pixels(nn.Module):
    """`(x / 255 - mean) / std` by channel, of bytes (n, channels, height, width).

    Args:
        mean: of pixels between 0 and 1; one for each channel, or one for all.
        std: standard deviations likewise.

    Raises:
        OptionError: if there are not equally many, or a deviation is not positive.
    """

    def __init__(self, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> None:
        """Keep the statistics as constants.

        Raises:
            OptionError: if they do not fit together.
        """
        super().__init__()
        if not len(mean) or len(mean) != len(std) or not all(value > 0 for value in std):
            message = f"Pixels: expected as many means as positive standard deviations, got {mean} and {std}."
            raise OptionError(message)
        self.statistics = tuple(mean), tuple(std)
        self.register_buffer("mean", torch.tensor(self.statistics[0], dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(self.statistics[1], dtype=torch.float32).view(-1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised pixels in float32."""
        mean, std = self.get_buffer("mean"), self.get_buffer("std")
        return (pixels.to(torch.float32) / 255 - mean) / std

    def extra_repr(self) -> str:
        """The statistics."""
        mean, std = self.statistics
        return f"mean={mean}, std={std}"
