r"""What the sliders do to a picture, in the networks' own size and before normalisation: values between 0 and 1.

In this order: invert, contrast and brightness, size, turn, blur, noise. Each is the identity, to the bit, at its neutral value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from mola.errors import OptionError
from mola.lab.data.transforms import rotate

RANGES = {
    "rotation": (-180.0, 180.0),
    "scale": (0.25, 3.0),
    "blur": (0.0, 15.0),
    "noise": (0.0, 1.0),
    "brightness": (-0.5, 0.5),
    "contrast": (0.0, 3.0),
}
"""Smallest and largest value of each."""

LARGEST_SEED = 2**31 - 1


@dataclass(frozen=True)
class Changes:
    """How far each slider is moved.

    Attributes:
        rotation: degrees, counter-clockwise.
        scale: how many times larger.
        blur: standard deviation of the Gaussian, in percent of the longer side.
        noise: standard deviation of the Gaussian noise; white is 1.
        brightness: what is added.
        contrast: what the distance from mid-grey is multiplied by.
        invert: whether black and white change places.
        seed: of the noise.
    """

    rotation: float = 0.0
    scale: float = 1.0
    blur: float = 0.0
    noise: float = 0.0
    brightness: float = 0.0
    contrast: float = 1.0
    invert: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise OptionError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed <= LARGEST_SEED:
            raise OptionError(f"seed must be a whole number from 0 to {LARGEST_SEED}, got {self.seed!r}.")

    @property
    def moved(self) -> tuple[str, ...]:
        """Names of what is not neutral."""
        names = [field.name for field in fields(self) if field.name != "seed"]
        return tuple(name for name in names if getattr(self, name) != getattr(NEUTRAL, name))


NEUTRAL = Changes()


def apply(values: Tensor, changes: Changes) -> Tensor:
    """Change pictures.

    Args:
        values: (n, channels, height, width) between 0 and 1.
        changes: the same for all.

    Returns:
        The same shape, between 0 and 1; `values` itself if nothing is moved.
    """
    if not changes.moved:
        return values
    if changes.invert:
        values = 1 - values
    if changes.contrast != 1 or changes.brightness != 0:
        values = ((values - 0.5) * changes.contrast + 0.5 + changes.brightness).clamp(0, 1)
    values = rotate(_resize(values, changes.scale), changes.rotation)
    values = _blur(values, changes.blur)
    if changes.noise > 0:
        generator = torch.Generator().manual_seed(changes.seed)
        drawn = torch.randn(values.shape[1:], generator=generator, dtype=torch.float32)
        values = values + changes.noise * drawn.to(values)
    return values.clamp(0, 1)


def _resize(values: Tensor, scale: float) -> Tensor:
    if scale == 1:
        return values
    # Bilinear sampling sees two pixels: where more shrink into one, finer samples are averaged.
    finer = math.ceil(0.5 / scale)
    count, channels, height, width = values.shape
    inverse = values.new_tensor([[1 / scale, 0.0, 0.0], [0.0, 1 / scale, 0.0]]).expand(count, 2, 3)
    grid = functional.affine_grid(inverse, [count, channels, finer * height, finer * width], align_corners=False)
    sampled = functional.grid_sample(values, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return functional.avg_pool2d(sampled, finer) if finer > 1 else sampled


def _blur(values: Tensor, percent: float) -> Tensor:
    # Gaussian blur, w_i \propto \exp(-i^2 / 2\sigma^2) along each axis, the border repeated outwards.
    if percent == 0:
        return values
    sigma = percent / 100 * max(values.shape[-2:])
    reach = max(1, math.ceil(3 * sigma))
    places = torch.arange(-reach, reach + 1, dtype=values.dtype)
    weights = torch.exp(-places.square() / (2 * sigma**2))
    weights = weights / weights.sum()
    channels = values.shape[1]
    padded = functional.pad(values, (reach,) * 4, mode="replicate")
    across = functional.conv2d(padded, weights.view(1, 1, 1, -1).expand(channels, 1, 1, -1), groups=channels)
    return functional.conv2d(across, weights.view(1, 1, -1, 1).expand(channels, 1, -1, 1), groups=channels)
