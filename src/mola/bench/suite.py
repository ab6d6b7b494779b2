"""What a suite is made of: sets of data with their roles, a network, a recipe. Declarations only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mola.bench.budget import Budget, SwagBudget
from mola.choices import one_of
from mola.data.images import Images
from mola.data.labelled import Labelled
from mola.data.normalisation import NORMALISATIONS
from mola.errors import OptionError
from mola.models.imported import import_builder
from mola.training import Recipe

__all__ = [
    "EXAMPLES",
    "Batches",
    "DataOptions",
    "Role",
    "Shift",
    "Source",
    "Suite",
    "TrainingData",
    "checksum",
    "first_labels",
    "from_memory",
    "image_checksum",
]

EXAMPLES = 8
"""Images of each set that a report shows."""

SAMPLE = 64
"""Images of each set whose inputs enter its checksum: enough for every type of corruption to come up."""

Role = Literal["train", "validation", "test", "shift", "outlier"]

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Source:
    """One set of data as the networks see it; nothing is read before it is asked for."""

    name: str
    title: str
    role: Role
    count: int
    checksum: str
    """Of the data and of all that is done to them: two sources with the same checksum give the same batches."""
    open: Callable[[], Batches]
    """Batches of (inputs, labels), in the same order every time."""
    show: Callable[[int], Tensor]
    """The first few images as bytes (n, channels, height, width)."""
    level: float = 0.0
    """How far the data are shifted."""
    labels: tuple[int, ...] = ()
    """Of the first few images; none for outliers, which belong to no class."""


@dataclass(frozen=True)
class Shift:
    """A family of shifted test sets."""

    name: str
    title: str
    axis: str
    levels: tuple[float, ...]
    """0, the test set itself, included."""


@dataclass(frozen=True)
class DataOptions:
    """Where data lie, and how much of them to use."""

    directory: Path | None = None
    train: int | None = None
    """At most so many training images, evenly spaced; None is all of them."""
    outliers: int | None = None
    """At most so many of each outlier set."""
    test: int | None = None
    """At most so many test images, shifted or not."""
    download: bool = False
    normalisation: str | None = None
    """Of the inputs, by name, in distribution and out of it; None is the suite's."""
    corruptions: str = "paper"
    """"paper" is the 16 types it speaks of, "all" the 19 that were published."""
    conventions: str = "consistent"
    """"consistent" normalises outliers like the training data, as a deployed network would; "authors" does as the paper's
    scripts: each set with statistics of its own, and EMNIST's digits, untransposed, instead of its letters."""

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            OptionError: if one is not known, or the normalisation is meant for one set of outliers.
        """
        one_of(self.conventions, ("consistent", "authors"), "conventions")
        one_of(self.corruptions, ("paper", "all"), "corruptions")
        if self.normalisation is not None:
            known = [name for name in NORMALISATIONS if not name.endswith("-own")]
            one_of(
                self.normalisation,
                (*known, self.normalisation) if self.normalisation.endswith("-own") else known,
                "normalisation",
            )
        if self.normalisation is not None and self.normalisation.endswith("-own"):
            message = f'normalisation {self.normalisation!r} is for one set of outliers alone: choose conventions="authors" instead.'
            raise OptionError(message)

    def describe(self) -> dict[str, Any]:
        """What matters of it for the numbers, as plain JSON values."""
        names = ("train", "outliers", "test", "normalisation", "corruptions", "conventions")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class TrainingData:
    """What networks are trained on."""

    data: Labelled
    """As it lies in memory."""
    prepare: Callable[[Tensor], Tensor]
    """Makes a batch what the network sees, augmentation included; it may draw from torch's random state."""


@dataclass(frozen=True)
class Suite:
    """An experiment, declared."""

    name: str
    title: str
    builders: Mapping[str, Callable[[], nn.Module]]
    """The networks it knows, by name; the first is the default."""
    classes: tuple[str, ...]
    recipe: Recipe
    """For `mola train`."""
    threshold: float | None
    """Mean validation confidence that the paper's rule keeps; None is 0.01 below the networks' accuracy."""
    shift: Shift
    make_sources: Callable[[DataOptions], dict[str, Source]]
    """All sets by name, "train", "validation" and "test" among them."""
    components: int = 5
    notes: tuple[str, ...] = ()
    training_data: Callable[[DataOptions, Recipe], TrainingData] | None = None
    """What `mola train` reads."""
    budget: Budget = field(default_factory=lambda: Budget(SwagBudget(learning_rate=1e-2)))
    """What methods that train may spend, unless the user says otherwise."""

    def builder(self, network: str | None) -> tuple[str, Callable[[], nn.Module]]:
        """Name and builder of the network asked for: one of the suite's, or the user's own `package.module:function`."""
        if network is not None and ":" in network:
            return network, import_builder(network)
        name = next(iter(self.builders)) if network is None else one_of(network, tuple(self.builders), "network")
        return name, self.builders[name]


def checksum(*parts: Any) -> str:
    """A checksum of plain JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def image_checksum(images: Images) -> str:
    """A checksum of pixels and labels."""
    digest = hashlib.sha256(str(tuple(images.pixels.shape)).encode())
    digest.update(images.pixels.contiguous().numpy().tobytes())
    digest.update(images.labels.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def from_memory(
    name: str,
    title: str,
    role: Role,
    images: Images,
    prepare: Callable[[Tensor], Tensor],
    *,
    made_by: tuple[Any, ...],
    change: Callable[[Images], Images] = lambda images: images,
    level: float = 0.0,
    batch_size: int = 64,
) -> Source:
    """A source of images that are in memory, changed (rotated, corrupted) when they are asked for.

    Args:
        name: of the set.
        title: for readers.
        role: what it is for.
        images: as they lie on disk.
        prepare: makes a batch of bytes what the network sees.
        made_by: plain values that name what `prepare` and `change` do; they enter the checksum, and so does what they make
            of the first images.
        change: what is done to the images, with their labels kept.
        level: how far the data are shifted.
        batch_size: images a batch.

    Returns:
        The source.
    """

    def batches() -> Batches:
        changed = change(images)
        for pixels, labels in zip(
            torch.split(changed.pixels, batch_size), torch.split(changed.labels, batch_size), strict=True
        ):
            yield prepare(pixels), labels

    def show(count: int) -> Tensor:
        return change(images.part(slice(0, count))).pixels

    sample = change(images.part(slice(0, SAMPLE)))
    seen = hashlib.sha256(prepare(sample.pixels).contiguous().numpy().tobytes()).hexdigest()
    key = checksum(image_checksum(images), *made_by, seen)
    return Source(name, title, role, len(images), key, batches, show, level, first_labels(role, images.labels))


def first_labels(role: Role, labels: Tensor) -> tuple[int, ...]:
    """Labels of the images that a report shows."""
    return () if role == "outlier" else tuple(labels[:EXAMPLES].tolist())
