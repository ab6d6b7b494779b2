"""All corruptions by name, and the one function that applies them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from mola.errors import DataError, OptionError
from mola.lab.corruptions.blur import defocus_blur, gaussian_blur, glass_blur, motion_blur, zoom_blur
from mola.lab.corruptions.digital import brightness, contrast, elastic_transform, jpeg_compression, pixelate, saturate
from mola.lab.corruptions.filters import Bytes, Streams, Table
from mola.lab.corruptions.noise import gaussian_noise, impulse_noise, shot_noise, speckle_noise
from mola.lab.corruptions.weather import fog, frost, snow, spatter
from mola.options import one_of

Corruption = Callable[[Bytes, int, Streams], Bytes]

_BY_NAME: dict[str, Corruption] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
    "speckle_noise": speckle_noise,
    "gaussian_blur": gaussian_blur,
    "spatter": spatter,
    "saturate": saturate,
}

CORRUPTIONS: tuple[str, ...] = tuple(_BY_NAME)
"""The 19 of CIFAR-10-C (Hendrycks and Dietterich, 2019), in their spelling and order."""

PAPER_CORRUPTIONS: tuple[str, ...] = tuple(
    name for name in CORRUPTIONS if name not in {"motion_blur", "snow", "jpeg_compression"}
)
"""The 16 that the paper most plausibly used: it gives the number, not the names."""

IMAGENET_PARAMETERS: Mapping[str, Table] = MappingProxyType(
    {
        "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),
        "shot_noise": (60, 25, 12, 5, 3),
        "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),
        "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        "fog": ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4)),
        "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
        "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
        "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
        "jpeg_compression": (25, 18, 15, 10, 7),
        "speckle_noise": (0.15, 0.2, 0.35, 0.45, 0.6),
        "gaussian_blur": (1.0, 2.0, 3.0, 4.0, 6.0),
        "saturate": ((0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2)),
    }
)
"""Parameters of ImageNet-C (Hendrycks and Dietterich, 2019), for corruptions that differ from CIFAR-10-C's in nothing else: lengths
in pixels of an image of 224 x 224."""

SEVERITIES = (1, 2, 3, 4, 5)
LEAST_SIDE = 8
PIECE = 1 << 18
"""Pixels of a piece (256 images of 32 x 32): images are corrupted in pieces, to bound the memory."""


def corrupt(
    pixels: Tensor,
    corruption: str,
    severity: int,
    *,
    seed: int = 0,
    first: int = 0,
    parameters: str = "cifar10-c",
) -> Tensor:
    """Corrupt images with the parameters of CIFAR-10-C, for 32 x 32 pixels, or of ImageNet-C.

    An image's randomness depends on the seed, the corruption, the severity and the image's index alone: a set corrupted in pieces,
    each with its `first`, equals the set corrupted at once. The published images are other draws from the same distributions, with
    programs (OpenCV, ImageMagick) that round here and there; averages over many images agree, single images do not.

    Args:
        pixels: bytes (n, 3, side, side), with a side of 8 or more.
        corruption: one of `CORRUPTIONS`.
        severity: 1 to 5; 0 returns the pixels themselves.
        seed: seed of all draws.
        first: index of the first image.
        parameters: "cifar10-c"; or "imagenet-c", for images of about 224 x 224 and the corruptions of `IMAGENET_PARAMETERS`.
    """
    one_of(parameters, ("cifar10-c", "imagenet-c"), "parameters")
    one_of(corruption, CORRUPTIONS if parameters == "cifar10-c" else tuple(IMAGENET_PARAMETERS), "corruption")
    if severity not in (0, *SEVERITIES):
        raise OptionError(f"severity must be a whole number from 1 to 5, or 0 for unchanged images; got {severity!r}.")
    images = _checked(pixels)
    if severity == 0 or len(pixels) == 0:
        return pixels
    apply = _BY_NAME[corruption]
    if parameters == "imagenet-c":
        apply = partial(apply, table=IMAGENET_PARAMETERS[corruption])  # type: ignore[call-arg]
    result = np.empty_like(images)
    size = max(1, PIECE // images.shape[-1] ** 2)
    for start in range(0, len(images), size):
        piece = images[start : start + size]
        # int: a NumPy integer would overflow as a counter.
        streams = Streams.of(seed, corruption, int(severity), first=int(first) + start, count=len(piece))
        result[start : start + size] = apply(piece, severity, streams)
    return torch.from_numpy(result).to(pixels.device)


def _checked(pixels: Tensor) -> Bytes:
    shape = tuple(pixels.shape)
    if pixels.dtype != torch.uint8 or len(shape) != 4 or shape[1] != 3:
        raise DataError(
            f"pixels must be colour images (n, 3, side, side) in uint8, not normalised; got {shape} in {pixels.dtype}."
        )
    if shape[2] != shape[3] or shape[2] < LEAST_SIDE:
        raise DataError(
            f"images must be square with a side of at least {LEAST_SIDE}, got {shape[2]} x {shape[3]}; crop them."
        )
    return pixels.detach().cpu().contiguous().numpy()
