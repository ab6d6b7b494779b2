"""Random variations of training images that do not change what they show."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mola.errors import DataError, OptionError

__all__ = ["flip_and_crop"]


def flip_and_crop(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Mirror every image with probability one half, and shift it by up to `padding` pixels each way, filling with 0.

    A shift is a crop of the original size, at a place drawn uniformly, from the image with `padding` zeros on every side.
    Give it bytes, before normalisation, and the border is black, as in the paper's recipe.

    Args:
        images: (n, channels, height, width) of any type.
        generator: where the draws come from; three for each image, whatever they decide.
        padding: the largest shift.

    Returns:
        Images of the same shape and type.

    Raises:
        DataError: if the images are not a batch.
        OptionError: if the padding is negative.
    """
    if images.ndim != 4:
        message = f"expected images (n, channels, height, width), got shape {tuple(images.shape)}."
        raise DataError(message)
    if padding < 0:
        message = f"padding must be at least 0, got {padding}."
        raise OptionError(message)
    count, channels, height, width = images.shape
    device = generator.device
    flipped = torch.randint(2, (count, 1), generator=generator, device=device).bool()
    top, left = torch.randint(2 * padding + 1, (2, count, 1), generator=generator, device=device)
    rows = top + torch.arange(height, device=device)
    columns = left + torch.arange(width, device=device)
    columns = torch.where(flipped, columns.flip(1), columns)
    # One index into each flattened image: a gather over all channels is many times faster than a loop over images.
    padded = functional.pad(images, [padding] * 4)
    index = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
    index = index.view(count, 1, height * width).expand(-1, channels, -1).to(images.device)
    return padded.flatten(2).gather(2, index).view_as(images)
