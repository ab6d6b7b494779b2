"""All corruptions, keyed by name, with their published parameters, and the function that applies them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import DataError, OptionError
from molaplace.options import one_of
from molaplace_lab.corruptions import blur, digital, noise, weather
from molaplace_lab.corruptions.filters import Bytes, Streams

Corruption = tuple[Callable[..., Bytes], tuple[Any, ...], tuple[Any, ...]]
"""A function of pixels, streams and parameters; its parameters at severities 1 to 5 in CIFAR-10-C; and its parameters in ImageNet-C,
which are empty if ImageNet-C uses a different algorithm."""

# The zoom factors are np.arange(1, end, 0.01), which gives 7, 12, 16, 21 and 26 factors at severities 1 to 5. Because of rounding
# errors, the first two ranges include `end`, and the last range ends slightly above 1.25. The published images were generated this
# way.
BY_NAME: dict[str, Corruption] = {
    "gaussian_noise": (noise.gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": (noise.shot_noise, (500, 250, 100, 75, 50), (60, 25, 12, 5, 3)),
    "impulse_noise": (noise.impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27)),
    "defocus_blur": (
        blur.defocus_blur,
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)),
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    ),
    "glass_blur": (blur.glass_blur, ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)), ()),
    "motion_blur": (blur.motion_blur, ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)), ()),
    "zoom_blur": (blur.zoom_blur, (1.06, 1.11, 1.16, 1.21, 1.26), ()),
    "snow": (
        weather.snow,
        (
            (0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95),
            (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8),
        ),
        (),
    ),
    "frost": (weather.frost, ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)), ()),
    "fog": (
        weather.fog,
        ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)),
        ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4)),
    ),
    "brightness": (digital.brightness, (0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (digital.contrast, (0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05)),
    "elastic_transform": (
        digital.elastic_transform,
        ((0.0, 0.0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
        (),
    ),
    "pixelate": (digital.pixelate, (0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg_compression": (digital.jpeg_compression, (80, 65, 58, 50, 40), (25, 18, 15, 10, 7)),
    "speckle_noise": (noise.speckle_noise, (0.06, 0.1, 0.12, 0.16, 0.2), (0.15, 0.2, 0.35, 0.45, 0.6)),
    "gaussian_blur": (blur.gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0), (1.0, 2.0, 3.0, 4.0, 6.0)),
    "spatter": (
        weather.spatter,
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, False),
            (0.65, 0.1, 0.8, 0.7, 0.5, False),
            (0.65, 0.3, 1.0, 0.69, 0.5, False),
            (0.65, 0.1, 0.7, 0.69, 0.6, True),
            (0.65, 0.1, 0.5, 0.68, 0.6, True),
        ),
        (),
    ),
    "saturate": (
        digital.saturate,
        ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)),
        ((0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2)),
    ),
}

CORRUPTIONS: tuple[str, ...] = tuple(BY_NAME)
"""The 19 corruptions of CIFAR-10-C (Hendrycks and Dietterich, 2019), under their published names and in their published order."""

PAPER_CORRUPTIONS: tuple[str, ...] = tuple(
    name for name in CORRUPTIONS if name not in {"motion_blur", "snow", "jpeg_compression"}
)
"""The 16 corruptions that the paper most likely used; the paper gives their number but not their names."""

IMAGENET_CORRUPTIONS: tuple[str, ...] = tuple(name for name, (_, _, imagenet) in BY_NAME.items() if imagenet)
"""Corruptions that can be generated with ImageNet-C's parameters, in which lengths are measured in pixels of a 224 x 224 image."""

SEVERITIES = (1, 2, 3, 4, 5)
LEAST_SIDE = 8
PIECE = 1 << 18
"""Maximum number of pixels processed at once, to limit memory use: 256 images of 32 x 32 pixels."""


def corrupt(
    pixels: Tensor, corruption: str, severity: int, *, seed: int = 0, first: int = 0, parameters: str = "cifar10-c"
) -> Tensor:
    """Corrupt images with the parameters of CIFAR-10-C (meant for images of 32 x 32 pixels) or of ImageNet-C.

    The random numbers for an image depend only on the seed, the corruption, the severity and the image's index. Corrupting a set in
    parts, each with its own `first`, therefore gives the same result as corrupting the whole set at once. The published images are
    different draws from the same distributions, generated by programs (OpenCV, ImageMagick) that round some intermediate results.
    Averages over many images agree, but individual images differ.

    `pixels` has type uint8 and shape (n, 3, side, side), with a side of at least 8. The severity is a number from 1 to 5, or 0 to
    return the pixels unchanged. `first` is the index, within the whole set, of the first image in `pixels`. The "imagenet-c"
    parameters are meant for images of about 224 x 224 pixels and are available only for `IMAGENET_CORRUPTIONS`.
    """
    large = one_of(parameters, ("cifar10-c", "imagenet-c"), "parameters") == "imagenet-c"
    one_of(corruption, IMAGENET_CORRUPTIONS if large else CORRUPTIONS, "corruption")
    if severity not in (0, *SEVERITIES):
        raise OptionError(
            f"must be a whole number from 1 to 5, or 0 for unchanged images; got {severity!r}.", argument="severity"
        )
    shape = tuple(pixels.shape)
    if pixels.dtype != torch.uint8 or len(shape) != 4 or shape[1] != 3:
        raise DataError(
            "must be unnormalised colour images of shape (n, 3, side, side) and type uint8; "
            f"got shape {shape} and type {pixels.dtype}.",
            argument="pixels",
        )
    if shape[2] != shape[3] or shape[2] < LEAST_SIDE:
        raise DataError(
            f"must be square, with a side of at least {LEAST_SIDE} pixels; got {shape[2]} x {shape[3]}. Crop them.",
            argument="images",
        )
    if severity == 0 or len(pixels) == 0:
        return pixels
    apply, cifar10, imagenet = BY_NAME[corruption]
    values = (imagenet if large else cifar10)[severity - 1]
    arguments = values if isinstance(values, tuple) else (values,)
    images = pixels.detach().cpu().contiguous().numpy()
    result = np.empty_like(images)
    size = max(1, PIECE // shape[-1] ** 2)
    for start in range(0, len(images), size):
        piece = images[start : start + size]
        # Convert to int, because the counter would overflow a NumPy integer.
        streams = Streams(f"{seed}/{corruption}/{int(severity)}", int(first) + start, len(piece))
        result[start : start + size] = apply(piece, streams, *arguments)
    return torch.from_numpy(result).to(pixels.device)
