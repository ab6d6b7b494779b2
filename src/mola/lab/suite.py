"""What a suite is made of: sets of data with their roles, a network, a recipe, and how much methods that train may spend.

Declarations only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mola.compare.record import Role
from mola.compare.results import EXAMPLES
from mola.errors import OptionError
from mola.lab.data.images import NORMALISATIONS, Images
from mola.lab.imported import import_builder
from mola.lab.measures import Measure
from mola.lab.training import Labelled, Recipe
from mola.options import one_of


@dataclass(frozen=True)
class SwagBudget:
    """Of SWAG and MultiSWAG, for each trained network."""

    learning_rate: float
    snapshots: int = 40
    images: int | None = None
    """Training images between two snapshots, and in the pass that makes BatchNorm's statistics for a draw; None is all of
    them, a snapshot an epoch."""
    batch_size: int = 512
    samples: int = 30
    """Draws from each network's Gaussian."""

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, "learning rate of SWAG", "above 0", self.learning_rate)
        _require(self.snapshots >= 2, "snapshots of SWAG", "at least 2", self.snapshots)
        _require(self.samples >= 1, "draws of SWAG", "at least 1", self.samples)
        _require(self.images is None or self.images >= 1, "images between snapshots", "at least 1", self.images)
        _require(self.batch_size >= 1, "batch size of SWAG", "at least 1", self.batch_size)

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class MimoBudget:
    """Of a MIMO network."""

    epochs: int = 100
    members: int = 3
    batch_repetition: int = 4

    def __post_init__(self) -> None:
        _require(self.epochs >= 1, "epochs of MIMO", "at least 1", self.epochs)
        _require(self.members >= 1, "members of MIMO", "at least 1", self.members)
        _require(self.batch_repetition >= 1, "batch repetition of MIMO", "at least 1", self.batch_repetition)

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Budget:
    """Of all methods that train."""

    swag: SwagBudget
    mimo: MimoBudget = field(default_factory=MimoBudget)


Part = TypeVar("Part", SwagBudget, MimoBudget)


def changed(part: Part, text: str) -> Part:
    """A budget with some of its numbers changed, as a user writes them.

    Args:
        part: the budget to begin with.
        text: such as "snapshots=12, images=12500".

    Returns:
        The new budget.
    """
    names = [one.name for one in fields(part)]
    values: dict[str, Any] = {}
    for pair in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = (piece.strip() for piece in pair.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if name not in names or not math.isfinite(number):
            raise OptionError(f"expected name=number of {', '.join(names)}, separated by commas; got {pair!r}.")
        if name == "learning_rate":
            values[name] = number
        else:
            _require(number == int(number), name, "a whole number", number)
            values[name] = int(number)
    return replace(part, **values)


def _require(holds: bool, what: str, expected: str, found: object) -> None:
    if not holds:
        raise OptionError(f"{what} must be {expected}, got {found!r}.")


SAMPLE = 64
"""Images of each set whose inputs enter its checksum: enough for every type of corruption to come up."""

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
    show: Callable[[int], Tensor] | None
    """The first few images as bytes (n, channels, height, width); None where the data are no images but rows in memory."""
    level: float = 0.0
    """How far the data are shifted."""
    labels: tuple[int, ...] = ()
    """Of the first few images; none for outliers, which belong to no class."""
    types: tuple[str, ...] = ()
    """Kinds of shift that were dealt over the data in turn: datum i has type i modulo their number."""
    open_part: Callable[[int, int], Batches] | None = None
    """Batches of the data from one place up to another; None where the data can only be read from the first on."""
    whole: Source | None = None
    """The set that this one is a part of, if networks are run over that one and its activations are shared."""
    places: tuple[int, ...] = ()
    """Where the data of this part lie in the whole, in this order."""


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
    shifted: int | None = None
    """At most so many images of each shifted test set."""
    image_size: int | None = None
    """Pixels of the side of the images that networks are given, where they lie in folders; None is the suite's."""
    types: tuple[str, ...] = ()
    """Corruptions to shift test sets by, where there is a choice; none is the suite's."""
    cross_fit: bool = False
    """Whether to divide the labelled images into folds instead of reading training data."""
    conventions: str = "consistent"
    """"consistent" normalises outliers like the training data, as a deployed network would; "authors" does as the paper's
    scripts: each set with statistics of its own, and EMNIST's digits, untransposed, instead of its letters."""

    def __post_init__(self) -> None:
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
            raise OptionError(
                f'normalisation {self.normalisation!r} is for one set of outliers alone: choose conventions="authors" instead.'
            )

    def describe(self) -> dict[str, Any]:
        """What matters of it for the numbers, as plain JSON values."""
        names = ("train", "outliers", "test", "normalisation", "corruptions", "conventions")
        described = {name: getattr(self, name) for name in names}
        # Left out where they were not chosen: records of before did not know them.
        later = {"shifted": self.shifted, "image_size": self.image_size, "types": list(self.types)}
        later |= {"cross_fit": self.cross_fit}
        return described | {name: value for name, value in later.items() if value}


@dataclass(frozen=True)
class Folds:
    """Cross-fitting: the same data in several divisions, each of which is a run."""

    sources: tuple[dict[str, Source], ...]
    """The sets of each fold, by the same names."""
    notes: tuple[str, ...] = ()
    """What readers of the numbers must know."""


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
    shift: Shift | None
    """None if nothing is shifted."""
    make_sources: Callable[[DataOptions], dict[str, Source]]
    """All sets by name, "train", "validation" and "test" among them."""
    make_folds: Callable[[DataOptions], Folds] | None = None
    """The same for each fold of a cross-fit; None where the suite has training data."""
    components: int = 5
    class_count: int = 0
    """Where the classes have no names here; 0 counts these."""
    notes: tuple[str, ...] = ()
    training_data: Callable[[DataOptions, Recipe], TrainingData] | None = None
    """What `mola train` reads."""
    measures: Callable[[DataOptions], tuple[Measure, ...]] = lambda _: ()
    """Numbers beyond the common metrics that are asked of every method of the main comparison."""
    budget: Budget = field(default_factory=lambda: Budget(SwagBudget(learning_rate=1e-2)))
    """What methods that train may spend, unless the user says otherwise."""
    cost_images: int = 2000
    """Images on which the cost of methods is measured, and extended to all."""
    cost_of_training: bool = True
    """Whether the cost of methods that train (SWAG, MIMO) is measured, too: their steps are those of training."""

    @property
    def outputs(self) -> int:
        """Number of classes that networks of the suite tell apart."""
        return self.class_count or len(self.classes)

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
    return data_checksum(images.pixels, images.labels)


def data_checksum(inputs: Tensor, labels: Tensor) -> str:
    """A checksum of inputs and labels in memory."""
    digest = hashlib.sha256(str(tuple(inputs.shape)).encode())
    digest.update(inputs.contiguous().numpy().tobytes())
    digest.update(labels.contiguous().numpy().tobytes())
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
    types: tuple[str, ...] = (),
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
        types: kinds of shift that `change` deals over the images in turn.

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
    labels = first_labels(role, images.labels)
    return Source(name, title, role, len(images), key, batches, show, level, labels, types)


def first_labels(role: Role, labels: Tensor) -> tuple[int, ...]:
    """Labels of the images that a report shows."""
    return () if role == "outlier" else tuple(labels[:EXAMPLES].tolist())
