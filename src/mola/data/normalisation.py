"""What networks are given instead of bytes: x / 255, less a mean, over a standard deviation, by channel.

Out-of-distribution inputs are normalised like the network's own training data, since a deployed network does not know where
an input comes from. Names that end in `-own` are the other habit, of the paper's authors: each set with statistics of its
own, which alone tells some sets apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from mola.choices import one_of
from mola.errors import DataError, OptionError

__all__ = ["NORMALISATIONS", "Normalisation", "normalisation"]


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation, one for each channel or one for all; of pixels between 0 and 1."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        """Refuse statistics that do not fit together.

        Raises:
            OptionError: if there are not equally many, or a deviation is not positive.
        """
        if not self.mean or len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            message = f"expected as many means as positive standard deviations, got {self.mean} and {self.std}."
            raise OptionError(message)

    def __call__(self, pixels: Tensor) -> Tensor:
        """(x / 255 - mean) / std in float32.

        Args:
            pixels: (n, channels, height, width) or (channels, height, width) in uint8.

        Returns:
            The same shape.

        Raises:
            DataError: if the pixels are not bytes, or have another number of channels.
        """
        if pixels.dtype != torch.uint8:
            message = f"expected pixels in uint8, as they lie on disk, got {pixels.dtype}: are they normalised already?"
            raise DataError(message)
        if len(self.mean) not in (1, pixels.shape[-3]):
            message = f"this normalisation is for {len(self.mean)} channels, got pixels of shape {tuple(pixels.shape)}."
            raise DataError(message)
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=pixels.device).view(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        # Divided first, as everybody does: another order would change the last bits of a network's inputs.
        return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)

    def inverse(self, inputs: Tensor) -> Tensor:
        """Pixels in uint8 from normalised inputs: rounded, and clipped to what a byte holds."""
        mean, std = (torch.tensor(values, device=inputs.device).view(-1, 1, 1) for values in (self.mean, self.std))
        return ((inputs * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


NORMALISATIONS: Mapping[str, Normalisation] = MappingProxyType(
    {
        # x / 255 and nothing else: what the paper does with MNIST and its outliers, and the authors with LSUN.
        "none": Normalisation(),
        # The paper's: (125.3, 123.0, 113.9) / 255 and (63.0, 62.1, 66.7) / 255.
        "cifar10": Normalisation(
            (125.3 / 255, 123.0 / 255, 113.9 / 255),
            (63.0 / 255, 62.1 / 255, 66.7 / 255),
        ),
        "imagenet": Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        # What the authors give each set of outliers, and the corrupted images, instead of the above.
        "svhn-own": Normalisation((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
        "cifar100-own": Normalisation((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        "cifar10-c-own": Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        "lsun-own": Normalisation(),
    }
)
"""By name. `lsun-own` is none at all."""


def normalisation(name: str) -> Normalisation:
    """The normalisation of this name; `OptionError` if there is none."""
    return NORMALISATIONS[one_of(name, NORMALISATIONS, "normalise")]
