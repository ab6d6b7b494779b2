"""Networks that take images of different sizes, in one mixture: each brings the images it is given to its own size.

All networks of a mixture see the same batch. Where one was trained on 224 pixels and another on 260, each is wrapped: the batch
holds the images once, and what differs is part of the network, on every path that a network takes (fitting, prediction, saving,
export, processes).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mola.errors import DataError, OptionError
from mola.options import one_of

INTERPOLATIONS = ("bilinear", "bicubic")


class Resized(nn.Module):
    """A network that takes square images of any size, and brings them to its own.

    The middle of the image is cut out, brought to the network's size (over all the pixels that shrink into one, as Pillow does; a
    bicubic enlargement is PyTorch's own) and normalised: (x - mean) / std by channel.

    Args:
        network: takes images (n, channels, size, size).
        size: pixels of its images' side.
        crop: share of the side that is kept, such as 0.875 where the network was evaluated on the middle 224 of 256 pixels.
        mean: by channel, or one number for all; in the units of the images that come in.
        std: likewise.
        interpolation: "bilinear" or "bicubic".

    Raises:
        OptionError: if a number or a name cannot be used.
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
        if size < 1 or not 0 < crop <= 1:
            message = f"size must be at least 1 and crop a share above 0 and at most 1, got {size} and {crop}."
            raise OptionError(message)
        one_of(interpolation, INTERPOLATIONS, "interpolation")
        means, stds = (torch.as_tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (mean, std))
        if not bool((stds > 0).all()):
            message = f"every std must be above 0, got {std}."
            raise OptionError(message)
        self.network, self.size, self.crop, self.interpolation = network, size, crop, interpolation
        # Options and no weights: the weights are those of the network alone.
        self.register_buffer("mean", means, persistent=False)
        self.register_buffer("std", stds, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """What the network makes of images (n, channels, side, side)."""
        logits: Tensor = self.network(self.inputs(images))
        return logits

    def inputs(self, images: Tensor) -> Tensor:
        """What the network sees of images (n, channels, side, side).

        Raises:
            DataError: if they are no square images.
        """
        if images.dim() != 4 or images.shape[2] != images.shape[3]:
            message = f"expected square images (n, channels, side, side), got shape {tuple(images.shape)}."
            raise DataError(message)
        side = images.shape[2]
        kept = max(1, round(side * self.crop))
        start = (side - kept) // 2
        images = images[:, :, start : start + kept, start : start + kept]
        if kept != self.size:
            # Plain interpolation, where nothing shrinks, is known to every runtime that a network is exported to.
            images = functional.interpolate(
                images, (self.size, self.size), mode=self.interpolation, antialias=kept > self.size
            )
        return (images - self.mean.to(images.dtype)) / self.std.to(images.dtype)

    def extra_repr(self) -> str:
        """The options: two networks that differ in them are different networks."""
        mean, std = (values.flatten().tolist() for values in (self.mean, self.std))
        return f"size={self.size}, crop={self.crop}, mean={mean}, std={std}, interpolation={self.interpolation!r}"
