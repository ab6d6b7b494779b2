"""Declaration of a suite: data sets and their roles, networks, a training recipe, and training budgets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from mola.compare.record import Role
from mola.errors import OptionError
from mola.lab.data.images import NORMALISATIONS, Images
from mola.lab.imported import import_builder
from mola.lab.measures import Measure
from mola.lab.training import Labelled, Recipe
from mola.options import one_of


@dataclass(frozen=True)
class SwagBudget:
    """Budget of SWAG and MultiSWAG, for each trained network."""

    learning_rate: float
    snapshots: int = 40
    images: int | None = None
    """Training images between two snapshots, and in the pass that makes BatchNorm's statistics for a draw; None is all
    images, a snapshot an epoch."""
    batch_size: int = 512
    samples: int = 30
    """Draws from each network's Gaussian."""


@dataclass(frozen=True)
class MimoBudget:
    """Budget of a MIMO network."""

    epochs: int = 100
    members: int = 3
    batch_repetition: int = 4


@dataclass(frozen=True)
class Budget:
    """Budget of all methods that train."""

    swag: SwagBudget
    mimo: MimoBudget = field(default_factory=MimoBudget)


Part = TypeVar("Part", SwagBudget, MimoBudget)


def changed(part: Part, text: str) -> Part:
    """Return a budget with some numbers changed, from text such as "snapshots=12, images=12500"."""
    names = [one.name for one in fields(part)]
    values: dict[str, Any] = {}
    for pair in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = (piece.strip() for piece in pair.partition("="))
        try:
            values[one_of(name, names, "name")] = float(value) if name == "learning_rate" else int(value)
        except (ValueError, OptionError) as error:
            raise OptionError(
                f"expected name=number for {', '.join(names)}, separated by commas; got {pair!r}."
            ) from error
        least = 1 if name == "snapshots" else 0
        if not values[name] > least:
            raise OptionError(f"expected {name} above {least}, got {value}.")
    return replace(part, **values)


Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Source:
    """One set of data as network inputs, read on demand."""

    name: str
    title: str
    role: Role
    count: int
    checksum: str
    """Checksum of the data and their processing: two sources with the same checksum give the same batches."""
    read: Callable[[Sequence[int]], Batches]
    """Returns batches of (inputs, labels) at some places, in this order."""
    show: Callable[[Sequence[int]], Images] | None
    """Returns the images at some places, without normalisation; None if the data are not images."""
    level: float = 0.0
    """Level of the shift; 0 for data that are not shifted."""
    types: tuple[str, ...] = ()
    """Types of shift, assigned to the data in turn: datum i has type i modulo their number."""
    large: bool = False
    """True if the data do not fit in memory: activations are computed in slices."""
    whole: Source | None = None
    """The set that this set is a part of, if their activations are shared."""
    places: tuple[int, ...] = ()
    """Places of this part's data in the whole, in this order."""

    def open(self) -> Batches:
        """Return all batches."""
        return self.read(range(self.count))

    def part(self, places: Sequence[int], **changes: Any) -> Source:
        """Return the data at some places, with other attributes, such as the name; activations of the whole are used."""
        show = self.show
        return replace(
            self,
            count=len(places),
            checksum=checksum(self.checksum, list(places)),
            read=lambda rows: self.read([places[row] for row in rows]),
            show=None if show is None else lambda rows: show([places[row] for row in rows]),
            whole=self,
            places=tuple(places),
            **changes,
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.open())


@dataclass(frozen=True)
class DataOptions:
    """Options of the data."""

    directory: Path | None = None
    train: int | None = None
    """Largest number of training images, evenly spaced; None is all."""
    outliers: int | None = None
    """Largest number of images of each outlier set."""
    test: int | None = None
    """Largest number of test images, shifted or not."""
    download: bool = False
    normalisation: str | None = None
    """Name of the inputs' normalisation, in distribution and out of it; None is the suite's."""
    corruptions: str = "paper"
    """"paper" is the paper's 16 types, "all" the published 19."""
    shifted: int | None = None
    """Largest number of images of each shifted test set."""
    image_size: int | None = None
    """Pixels of the side of images from folders; None is the suite's."""
    types: tuple[str, ...] = ()
    """Corruptions that shift test sets, if there is a choice; empty means the suite's default."""
    cross_fit: bool = False
    """Divide the labelled images into folds instead of reading training data."""

    def __post_init__(self) -> None:
        one_of(self.corruptions, ("paper", "all"), "corruptions")
        if self.normalisation is not None:
            one_of(self.normalisation, NORMALISATIONS, "normalisation")

    def describe(self) -> dict[str, Any]:
        """Return the options that affect numbers, as JSON values."""
        always = {name: getattr(self, name) for name in ("train", "outliers", "test", "normalisation", "corruptions")}
        optional = {"shifted": self.shifted, "image_size": self.image_size, "types": list(self.types)}
        optional |= {"cross_fit": self.cross_fit}
        # Outliers are normalised like the training data. Options that are not chosen are left out: most records lack them.
        return always | {"conventions": "consistent"} | {name: value for name, value in optional.items() if value}


@dataclass(frozen=True)
class TrainingData:
    """Training data in memory."""

    data: Labelled
    prepare: Callable[[Tensor], Tensor]
    """Turns a batch into network inputs, augmentation included; it may draw from torch's random state."""


@dataclass(frozen=True)
class Suite:
    """An experiment, declared."""

    name: str
    title: str
    builders: Mapping[str, Callable[[], nn.Module]]
    """Networks by name; the first is the default."""
    classes: tuple[str, ...]
    recipe: Recipe
    """Recipe of `mola train`."""
    threshold: float | None
    """Mean validation confidence that the paper's rule keeps; None is 0.01 below the networks' accuracy."""
    shift: Mapping[str, str] | None
    """Title of the shifted sets and name of their axis, for reports; None if nothing is shifted."""
    make_sources: Callable[[DataOptions], dict[str, Source]]
    """Returns all sets by name, "train", "validation" and "test" among them."""
    make_folds: Callable[[DataOptions], list[dict[str, Source]]] | None = None
    """Returns the sets of each fold of a cross-fit, by the same names; None if the suite has training data."""
    components: int = 5
    class_count: int = 0
    """Number of classes, if they have no names here."""
    notes: tuple[str, ...] = ()
    fold_notes: tuple[str, ...] = ()
    """Notes on a cross-fit."""
    training_data: Callable[[DataOptions, Recipe], TrainingData] | None = None
    """Returns the data of `mola train`."""
    measures: Callable[[DataOptions], dict[str, Measure]] = lambda _: {}
    """Returns numbers to compute besides the common metrics, by their key in records."""
    budget: Budget = field(default_factory=lambda: Budget(SwagBudget(learning_rate=1e-2)))
    """Default budget of methods that train."""
    cost_images: int = 2000
    """Number of images on which the cost of methods is measured; costs are extrapolated to all images."""
    cost_of_training: bool = True
    """Measure the cost of methods that train (SWAG, MIMO), too."""

    @property
    def outputs(self) -> int:
        """Number of classes."""
        return self.class_count or len(self.classes)

    def builder(self, network: str | None) -> tuple[str, Callable[[], nn.Module]]:
        """Return name and builder of a network: one of the suite's, or the user's own `package.module:function`."""
        if network is not None and ":" in network:
            return network, import_builder(network)
        name = next(iter(self.builders)) if network is None else one_of(network, tuple(self.builders), "network")
        return name, self.builders[name]


def checksum(*parts: Any) -> str:
    """Return a checksum of plain JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def data_checksum(inputs: Tensor, labels: Tensor) -> str:
    """Return a checksum of inputs and labels in memory."""
    digest = hashlib.sha256(str(tuple(inputs.shape)).encode())
    digest.update(inputs.contiguous().numpy().tobytes())
    digest.update(labels.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
