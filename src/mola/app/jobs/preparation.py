"""Preparation of inputs from any source.

Options come first, then the network's configuration, then the training data. The preparation is determined once, when a posterior
is fitted, and saved with it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from mola.app.jobs.job import Job
from mola.errors import OptionError, StorageError
from mola.lab.data.folder import Preparation
from mola.lab.data.images import NORMALISATIONS, Normalisation
from mola.options import one_of

MODES = ("RGB", "L")


@dataclass(frozen=True)
class Hints:
    """Inputs and classes by a network's configuration; None if it has no entry."""

    shape: tuple[int, int, int] | None = None
    """Channels, height and width."""
    classes: tuple[str, ...] | None = None
    resize: int | tuple[int, int] | None = None
    crop: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Intake:
    """Convert files and arrays to network inputs."""

    resize: int | tuple[int, int] | None = None
    crop: int | None = None
    """Both as in `mola.lab.data.folder.Preparation`."""
    mode: str | None = None
    """"RGB" or "L"; None until the training images are read."""
    asked: bool = False
    """True if the user chose the mode: images of another mode are then converted without a note."""
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    shape: tuple[int, ...] | None = None
    """Shape of one input, without the batch; None until the training data are read."""
    dtype: str = "float32"
    """Type of floating-point inputs: that of the networks."""
    batch_size: int = 256
    workers: int = 2
    """Threads that decode images."""

    @property
    def prepare(self) -> Preparation:
        """The conversion of a decoded image to bytes."""
        return Preparation(self.resize, self.crop, self.mode or "RGB")

    @property
    def normalise(self) -> Normalisation:
        """From bytes to inputs."""
        return Normalisation(self.mean, self.std)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The networks' floating-point type."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def plain(self) -> dict[str, Any]:
        """Return plain values, as in a job's file."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Intake:
        """Read what `plain` gave."""
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        try:
            made = cls(**known)
            Normalisation(made.mean, made.std)
        except (TypeError, ValueError, OptionError) as error:
            raise StorageError(f"the saved preparation of inputs is invalid: {error}") from error
        if not isinstance(getattr(torch, made.dtype, None), torch.dtype) or made.batch_size < 1:
            raise StorageError(
                f"the saved preparation of inputs is invalid: {made.dtype!r} in batches of {made.batch_size}."
            )
        return made


def settle(job: Job, hints: Hints, dtype: str) -> Intake:
    """Return the intake by the options and the network's configuration; the training data determine what is None in both."""
    if job.mode is not None:
        one_of(job.mode, MODES, "mode")
    for name in ("batch_size", "resize", "crop"):
        given = getattr(job, name)
        if given is not None and min(given if isinstance(given, tuple) else (given,)) < 1:
            raise OptionError(f"{name} must be 1 or more, got {given}.")
    if job.workers < 0:
        raise OptionError(f"workers must be 0 or more, got {job.workers}.")
    if (job.mean is None) != (job.std is None) or (job.mean is not None and job.normalise is not None):
        raise OptionError("the normalisation is a name (--normalise), or numbers for both --mean and --std.")
    mean, std = hints.mean or (0.0,), hints.std or (1.0,)
    if job.normalise is not None:
        chosen = NORMALISATIONS[one_of(job.normalise, NORMALISATIONS, "normalise")]
        mean, std = chosen.mean, chosen.std
    elif job.mean is not None and job.std is not None:
        mean, std = job.mean, job.std
    Normalisation(mean, std)  # refuses what does not fit together, before any image is read
    sized = job.resize is not None or job.crop is not None
    mode = job.mode
    if mode is None and hints.shape is not None:
        mode = "L" if hints.shape[0] == 1 else "RGB"
    elif mode is None and len(mean) == 3:
        mode = "RGB"  # statistics for three channels are for colour
    return Intake(
        resize=job.resize if sized else hints.resize,
        crop=job.crop if sized else hints.crop,
        mode=mode,
        asked=job.mode is not None,
        mean=mean,
        std=std,
        dtype=dtype,
        batch_size=job.batch_size,
        workers=job.workers,
    )
