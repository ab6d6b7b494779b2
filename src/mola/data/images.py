"""Labelled images in memory, as they lie on disk: whole numbers from 0 to 255."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mola.errors import DataError, OptionError

__all__ = ["Images", "even_places", "split_validation"]


@dataclass(frozen=True)
class Images:
    """Pixels (n, channels, height, width) in uint8 and class indices (n,) in int64."""

    pixels: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        """Refuse what is not one label to each image.

        Raises:
            DataError: if the shapes or types are others.
        """
        fits = self.pixels.ndim == 4 and self.labels.ndim == 1 and len(self.pixels) == len(self.labels)
        if not fits or self.pixels.dtype != torch.uint8 or self.labels.dtype != torch.int64:
            message = (
                "expected pixels (n, channels, height, width) in uint8 and labels (n,) in int64, got "
                f"{tuple(self.pixels.shape)} in {self.pixels.dtype} and {tuple(self.labels.shape)} in {self.labels.dtype}."
            )
            raise DataError(message)

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def part(self, indices: Tensor | Sequence[int] | slice) -> Images:
        """The images at these places, in this order."""
        if not isinstance(indices, slice):
            indices = torch.as_tensor(indices)
            # An empty list has no type of its own.
            indices = indices if indices.dtype == torch.bool else indices.long()
        return Images(self.pixels[indices], self.labels[indices])

    def evenly(self, count: int) -> Images:
        """At most `count` of them, evenly spaced from the first to the last: files may be in order of classes."""
        return self if len(self) <= count else self.part(even_places(len(self), count))


def even_places(total: int, count: int) -> Tensor:
    """`count` places among `total`, evenly spaced from the first to the last.

    Raises:
        OptionError: if count is not at least 1.
    """
    if count < 1:
        message = f"count must be at least 1, got {count}."
        raise OptionError(message)
    # In whole numbers, so that the choice does not depend on the default floating-point type.
    return torch.arange(count) * (total - 1) // max(count - 1, 1)


def split_validation(images: Images, validation: int = 2000, seed: int = 42) -> tuple[Images, Images]:
    """Divide a test set at random into a part to tune on and a part to report on, as the paper's experiments do.

    The division is that of `torch.utils.data.random_split` with a generator of this seed.

    Args:
        images: the test set.
        validation: how many are to tune on.
        seed: of the division.

    Returns:
        The validation images and the remaining test images.

    Raises:
        OptionError: if either part would be empty.
    """
    if not 0 < validation < len(images):
        message = f"validation must leave some of {len(images)} images on either side, got {validation}."
        raise OptionError(message)
    sizes = [validation, len(images) - validation]
    places: Sequence[int] = range(len(images))
    generator = torch.Generator().manual_seed(seed)
    tune, report = torch.utils.data.random_split(places, sizes, generator=generator)  # type: ignore[arg-type, var-annotated]
    return images.part(tune.indices), images.part(report.indices)
