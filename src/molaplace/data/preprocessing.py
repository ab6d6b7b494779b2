"""Preprocessing of inputs from files and arrays.

Options take precedence over the network's configuration, which takes precedence over the training data. The preparation is determined
once, when a posterior is fitted, and saved with the posterior.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from molaplace.errors import OptionError
from molaplace.images import NORMALISATIONS, Normalisation, Preparation
from molaplace.options import one_of, whole_number

MAX_SIDE = 2**14
"""Largest number of pixels along one side of a prepared image."""

FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Preprocessing:
    """Settings for converting files and arrays to network inputs."""

    resize: int | tuple[int, int] | None = None
    crop: int | None = None
    """Side length of the square crop. `resize` and `crop` are described in `mola.images.Preparation`."""
    mode: str | None = None
    """"RGB" or "L"; None until the training images are read."""
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    shape: tuple[int, ...] | None = None
    """Shape of one input without the batch dimension; None until the training data are read."""
    dtype: str = "float32"
    """Floating-point type of the networks and their inputs."""
    batch_size: int = 256
    workers: int = 2
    """Number of threads that decode images."""

    def __post_init__(self) -> None:
        whole_number(self.batch_size, "batch_size")
        whole_number(self.workers, "workers")
        one_of(self.dtype, FLOATS, "dtype")
        sides = (self.crop, *(self.resize if isinstance(self.resize, tuple) else (self.resize,)))
        if any(side is not None and not 0 < side <= MAX_SIDE for side in sides):
            raise OptionError(f"the sides of images must be from 1 to {MAX_SIDE:,} pixels; got {sides}.")

    @property
    def prepare(self) -> Preparation:
        """Function that converts a decoded image to bytes."""
        grey = self.shape is not None and self.shape[0] == 1
        return Preparation(self.resize, self.crop, self.mode or ("L" if grey else "RGB"))

    @property
    def normalise(self) -> Normalisation:
        """Function that converts bytes to inputs."""
        return Normalisation(self.mean, self.std)

    def pixels(self, values: Tensor) -> Tensor | None:
        """Return the bytes (1 or 3, height, width) of which one input was made, or None if it is no picture."""
        if values.dim() != 3 or len(values) not in (1, 3) or min(values.shape[1:]) < 2:
            return None
        mean, std = (
            torch.tensor(numbers, dtype=torch.float64, device="cpu").view(-1, 1, 1) for numbers in (self.mean, self.std)
        )
        shares = values.double().cpu() * std + mean
        if float(shares.min()) < -0.01 or float(shares.max()) > 1.01:
            return None
        return (shares.clamp(0, 1) * 255).round().to(torch.uint8)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Floating-point type of the networks."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def describe(self) -> str:
        """Describe how images are prepared, such as "32 x 32, colour, x / 255, not normalised"; `shape` must be known."""
        assert self.shape is not None
        channels, height, width = self.shape
        colours = {1: "greyscale", 3: "colour"}.get(channels, f"{channels} channels")
        numbers = (", ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        normalised = "normalised with mean {} and std {}".format(*numbers)
        if set(self.mean) == {0.0} and set(self.std) == {1.0}:
            normalised = "not normalised"
        return f"{height} x {width}, {colours}, x / 255, {normalised}"

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain values to store in a file."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Preprocessing:
        """Rebuild the preprocessing from the values that `plain` returned."""
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**settings)

    def changed(
        self,
        *,
        resize: int | tuple[int, int] | None = None,
        crop: int | None = None,
        mode: str | None = None,
        normalise: str | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        **others: Any,
    ) -> Preprocessing:
        """Return the preprocessing with the settings that are given; the training data later determine any that is None."""
        if (mean is None) != (std is None) or (mean is not None and normalise is not None):
            raise OptionError("the normalisation must be a name (--normalise), or numbers for both --mean and --std.")
        if normalise is not None:
            mean, std = NORMALISATIONS[normalise].mean, NORMALISATIONS[normalise].std
        if mean is not None and std is not None:
            others |= {"mean": mean, "std": std}
        if resize is not None:
            shorter = min(resize) if isinstance(resize, tuple) else resize
            fits = self.crop is not None and self.crop <= shorter  # a larger crop would add a border
            others |= {"resize": resize, "crop": self.crop if fits else None}
        if crop is not None:
            others["crop"] = crop
        # Statistics for three channels imply colour images.
        colour = "RGB" if len(others.get("mean", self.mean)) == 3 else None
        changed = replace(self, mode=mode or self.mode or colour, **others)
        Normalisation(changed.mean, changed.std)  # checks both before any image is read
        return changed
