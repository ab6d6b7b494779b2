"""A wrapper that resizes images, so that one mixture can contain networks trained on images of different sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from molaplace.errors import DataError, OptionError
from molaplace.options import one_of, whole_number


class Resized(nn.Module):
    """A wrapper that lets a network accept square images of any size by centre-cropping, resizing and normalising them.

    When an image is shrunk, each target pixel averages all source pixels that it covers, as in Pillow. Enlarging uses PyTorch's
    interpolation.

    Args:
        network: network that takes images of shape (n, channels, size, size).
        size: side length, in pixels, of the images that the network takes.
        crop: fraction of the side length to keep, such as 0.875 for a network evaluated on the central 224 of 256 pixels.
        mean: means to subtract, one per channel or one for all channels, in the units of the incoming images.
        std: standard deviations to divide by, one per channel or one for all channels, in the same units.
        interpolation: "bilinear" or "bicubic".
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        size: int,
        *,
        crop: float = 1.0,
        mean: Sequence[float] | float = 0.0,
        std: Sequence[float] | float = 1.0,
        interpolation: str = "bilinear",
    ) -> None:
        super().__init__()
        whole_number(size, "size")
        if not 0 < crop <= 1:
            raise OptionError(f"must be above 0 and at most 1, got {crop!r}.", argument="crop")
        one_of(interpolation, ("bilinear", "bicubic"), "interpolation")
        means, stds = (
            torch.as_tensor(values, dtype=torch.float32, device="cpu").view(-1, 1, 1) for values in (mean, std)
        )
        if not bool((stds > 0).all()):
            raise OptionError(f"must be above 0 in every channel, got {std}.", argument="std")
        self.network: nn.Module = network
        self.size: int = size
        self.crop: float = crop
        self.interpolation: str = interpolation
        # The buffers are not persistent, so that the state dict contains only the network's entries.
        self.register_buffer("mean", means, persistent=False)
        self.register_buffer("std", stds, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the network's output for images of shape (n, channels, side, side)."""
        logits: Tensor = self.network(self.inputs(images))
        return logits

    def inputs(self, images: Tensor) -> Tensor:
        """Crop, resize and normalise images (n, channels, side, side) for the network."""
        if images.dim() != 4 or images.shape[2] != images.shape[3]:
            raise DataError(
                f"expected square images of shape (n, channels, side, side), got shape {tuple(images.shape)}."
            )
        side = images.shape[2]
        cropped = max(1, round(side * self.crop))
        start = (side - cropped) // 2
        images = images[:, :, start : start + cropped, start : start + cropped]
        if cropped != self.size:
            # Use antialiasing only to shrink images, because not every export runtime supports antialiasing.
            images = functional.interpolate(
                images, (self.size, self.size), mode=self.interpolation, antialias=cropped > self.size
            )
        return (images - self.mean.to(images.dtype)) / self.std.to(images.dtype)
