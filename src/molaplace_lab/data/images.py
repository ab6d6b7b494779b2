"""Labelled images, held in memory as bytes, and their normalisation: (x / 255 - mean) / std for each channel.

Out-of-distribution inputs are normalised like the network's training data, because a deployed network cannot know where an input comes
from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from molaplace.errors import DataError, OptionError
from molaplace.options import one_of


@dataclass(frozen=True)
class Images:
    """Labelled images: pixels (n, channels, height, width) as uint8 and class indices (n,) as int64."""

    pixels: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        fits = self.pixels.ndim == 4 and self.labels.ndim == 1 and len(self.pixels) == len(self.labels)
        if not fits or self.pixels.dtype != torch.uint8 or self.labels.dtype != torch.int64:
            raise DataError(
                "expected pixels of shape (n, channels, height, width) in uint8 and labels of shape (n,) in int64; got "
                f"{tuple(self.pixels.shape)} in {self.pixels.dtype} and {tuple(self.labels.shape)} in {self.labels.dtype}."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, indices: Tensor | Sequence[int] | slice) -> Images:
        """Return the images with the given indices, in the given order."""
        if not isinstance(indices, slice | Tensor):
            indices = torch.tensor(indices, dtype=torch.int64)
        return Images(self.pixels[indices], self.labels[indices])

    def evenly(self, count: int | None) -> Images:
        """Return at most `count` evenly spaced images (files may be sorted by class), or all images if `count` is None."""
        return self if count is None or len(self) <= count else self.part(even_places(len(self), count))


def even_places(total: int, count: int) -> Tensor:
    """Return `count` of `total` indices, evenly spaced from the first to the last."""
    # Use integers, so that the choice does not depend on the default floating-point type.
    return torch.arange(count) * (total - 1) // max(count - 1, 1)


def split_validation(images: Images, validation: int = 2000, seed: int = 42) -> tuple[Images, Images]:
    """Split a test set at random into `validation` images for tuning and the remaining images for testing, as in the paper."""
    if not 0 < validation < len(images):
        raise OptionError(
            f"validation must be between 1 and {len(images) - 1} for a set of {len(images)} images; got {validation}."
        )
    sizes = [validation, len(images) - validation]
    places: Sequence[int] = range(len(images))
    generator = torch.Generator().manual_seed(seed)
    tune, report = torch.utils.data.random_split(places, sizes, generator=generator)  # type: ignore[arg-type, var-annotated]
    return images.part(tune.indices), images.part(report.indices)


@dataclass(frozen=True)
class Normalisation:
    """Means and standard deviations of pixels scaled to [0, 1], given either for each channel or for all channels together."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std):
            raise OptionError(
                f"expected as many means as standard deviations; got {len(self.mean)} and {len(self.std)}."
            )
        if not all(value > 0 for value in self.std):
            raise OptionError(f"std must be above 0, got {', '.join(map(str, self.std))}.")

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return (x / 255 - mean) / std as float32."""
        if len(self.mean) not in (1, pixels.shape[-3]):
            raise DataError(
                f"this normalisation is for {len(self.mean)} channels; got pixels of shape {tuple(pixels.shape)}."
            )
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=pixels.device).view(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        # Divide by 255 first, as is usual, because a different order would change the last bits of a network's inputs.
        return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)


NORMALISATIONS: Mapping[str, Normalisation] = MappingProxyType(
    {
        # x / 255, as used in the paper for MNIST and its outliers
        "none": Normalisation(),
        # as in the paper
        "cifar10": Normalisation((125.3 / 255, 123 / 255, 113.9 / 255), (63 / 255, 62.1 / 255, 66.7 / 255)),
        "imagenet": Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    }
)


def normalisation(name: str) -> Normalisation:
    """Return the normalisation with the given name; raise `OptionError` if the name is unknown."""
    return NORMALISATIONS[one_of(name, NORMALISATIONS, "normalise")]
