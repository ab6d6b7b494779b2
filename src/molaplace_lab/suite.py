"""Definition of a suite: data sets and their roles, networks, a training recipe, and training budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from molaplace.demo import LabelledData
from molaplace.errors import OptionError
from molaplace.evaluation import Role
from molaplace.images import NORMALISATIONS, Images
from molaplace.imported import import_builder
from molaplace.options import one_of
from molaplace_lab.checksums import checksum
from molaplace_lab.measures import Measure
from molaplace_lab.models import fast_inputs
from molaplace_lab.training import Loader, Recipe, Shuffled


@dataclass(frozen=True)
class SwagBudget:
    """Training budget for each network in SWAG and MultiSWAG."""

    learning_rate: float
    snapshots: int = 40
    images: int | None = None
    """Number of training images per snapshot, and per pass that computes a draw's BatchNorm statistics; if None, all images, which
    gives one snapshot per epoch."""
    batch_size: int = 512
    samples: int = 30
    """Number of draws from the Gaussian fitted to each network."""


@dataclass(frozen=True)
class MimoBudget:
    """Training budget for a MIMO network."""

    epochs: int = 100
    members: int = 3
    batch_repetition: int = 4


@dataclass(frozen=True)
class Budget:
    """Training budgets for all methods that train networks."""

    swag: SwagBudget
    mimo: MimoBudget = field(default_factory=MimoBudget)


Part = TypeVar("Part", SwagBudget, MimoBudget)


def changed(part: Part, text: str) -> Part:
    """Return a copy of a budget with the changes specified in text such as "snapshots=12, images=12500"."""
    names = [field.name for field in fields(part)]
    values: dict[str, Any] = {}
    for pair in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = (piece.strip() for piece in pair.partition("="))
        try:
            values[one_of(name, names, "name")] = float(value) if name == "learning_rate" else int(value)
        except (ValueError, OptionError) as error:
            raise OptionError(
                f"expected name=number pairs, separated by commas, with names from {', '.join(names)}; got {pair!r}."
            ) from error
        least = 1 if name == "snapshots" else 0
        if not values[name] > least:
            raise OptionError(f"expected {name} above {least}, got {value}.")
    return replace(part, **values)


Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Source:
    """A data set that yields network inputs and is read on demand."""

    name: str
    title: str
    role: Role
    count: int
    checksum: str
    """Checksum of the data and their processing. Two sources with the same checksum yield the same batches."""
    read: Callable[[Sequence[int]], Batches]
    """Function that maps indices to batches of (inputs, labels), in the order of the indices."""
    show: Callable[[Sequence[int]], Images] | None
    """Function that maps indices to unnormalised images; None if the data are not images."""
    level: float = 0.0
    """Level of the shift; 0 for data that are not shifted."""
    types: tuple[str, ...] = ()
    """Types of shift; example i has the type with index i modulo the number of types."""
    large: bool = False
    """True if the data do not fit into memory, in which case activations are computed in slices."""
    whole: Source | None = None
    """The larger set that contains this set and provides its activations; None if this set has activations of its own."""
    indices: tuple[int, ...] = ()
    """Indices of this set's examples in the larger set, in order."""

    def open(self) -> Batches:
        """Return all batches."""
        return self.read(range(self.count))

    def part(self, indices: Sequence[int], **changes: Any) -> Source:
        """Return the data at the given indices, with the given changes to attributes such as `name`.

        The activations of the whole set are reused.
        """
        show = self.show
        return replace(
            self,
            count=len(indices),
            checksum=checksum(self.checksum, list(indices)),
            read=lambda rows: self.read([indices[row] for row in rows]),
            show=None if show is None else lambda rows: show([indices[row] for row in rows]),
            whole=self,
            indices=tuple(indices),
            **changes,
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.open())


@dataclass(frozen=True)
class DataOptions:
    """Options for selecting and processing the data of a suite."""

    directory: Path | None = None
    train: int | None = None
    """Maximum number of training images, which are evenly spaced in the set; all images if None."""
    outliers: int | None = None
    """Maximum number of images in each outlier set; all images if None."""
    test: int | None = None
    """Maximum number of test images, whether shifted or not; all images if None."""
    download: bool = False
    normalisation: str | None = None
    """Name of the normalisation for all inputs, including outliers; the suite's normalisation if None."""
    shifted: int | None = None
    """Maximum number of images in each shifted test set; all images if None."""
    image_size: int | None = None
    """Side of images read from folders, in pixels; the suite's size if None."""
    types: tuple[str, ...] = ()
    """Corruptions of the shifted test sets, if the suite offers a choice; an empty tuple selects the suite's default."""
    cross_fit: bool = False
    """True to divide the labelled images into folds instead of reading training data."""

    def __post_init__(self) -> None:
        if self.normalisation is not None:
            one_of(self.normalisation, NORMALISATIONS, "normalisation")

    def describe(self) -> dict[str, Any]:
        """Return the options that affect results, as JSON values."""
        always = {name: getattr(self, name) for name in ("train", "outliers", "test", "normalisation")}
        optional = {"shifted": self.shifted, "image_size": self.image_size, "types": list(self.types)}
        optional |= {"cross_fit": self.cross_fit}
        # The constants stand for the paper's 16 types of corruption, and for outliers that are normalised like the training data. Optional
        # entries with default values are omitted, so that records without these entries still match.
        return (
            always
            | {"corruptions": "paper", "conventions": "consistent"}
            | {name: value for name, value in optional.items() if value}
        )


@dataclass(frozen=True)
class TrainingData:
    """Training data in memory."""

    data: LabelledData
    prepare: Callable[[Tensor], Tensor]
    """Function that turns a batch into network inputs, including augmentation; it may draw from torch's random state."""
    loader: Callable[[LabelledData, int, Callable[[Tensor], Tensor]], Loader] = Shuffled
    """Function that divides the data into the batches of an epoch, in random order."""
    describe: Callable[[nn.Module], dict[str, Any]] = lambda network: {}
    """Function that returns facts about a trained network, as JSON values, to store with its weights."""

    def batches(self, batch_size: int, images: int | None = None) -> Shuffled:
        """Return the data in random order, prepared and in the fastest memory layout; each pass has at most `images` inputs."""
        return Shuffled(self.data, batch_size, lambda inputs: fast_inputs(self.prepare(inputs)), images)

    def example(self) -> Tensor:
        """Return two prepared inputs, without changing torch's random state."""
        with torch.random.fork_rng(devices=[]):
            return self.prepare(self.data.inputs[:2])


@dataclass(frozen=True)
class Suite:
    """Definition of an experiment."""

    name: str
    title: str
    builders: Mapping[str, Callable[[], nn.Module]]
    """Functions that build networks, keyed by name; the first is the default."""
    classes: tuple[str, ...]
    recipe: Recipe
    """Training recipe for `python -m molaplace_lab train`."""
    threshold: float | None
    """Minimum mean confidence on the validation data under the paper's rule; the networks' accuracy minus 0.01 if None."""
    shift: Mapping[str, str] | None
    """Title of the shifted sets and label of their axis in reports; None if no set is shifted."""
    make_sources: Callable[[DataOptions], dict[str, Source]]
    """Function that returns all sets, keyed by name, including "train", "validation" and "test"."""
    make_folds: Callable[[DataOptions], list[dict[str, Source]]] | None = None
    """Function that returns a dictionary of sets for each fold of a cross-fit; None if the suite has no cross-fit."""
    options: frozenset[str] = frozenset()
    """Names of the data options that the suite uses, besides the data directory and downloads."""
    components: int = 5
    sweep: int = 10
    """Size of the largest mixture in the comparison of mixture sizes, each run of which has its own networks."""
    notes: tuple[str, ...] = ()
    fold_notes: tuple[str, ...] = ()
    """Notes that reports include for a cross-fit."""
    training_data: Callable[[DataOptions, Recipe], TrainingData] | None = None
    """Function that returns the training data for `python -m molaplace_lab train`; None if the suite does not train networks."""
    measures: Callable[[DataOptions], dict[str, Measure]] = lambda _: {}
    """Function that returns additional measures to compute, under the keys used in the records."""
    budget: Budget = field(default_factory=lambda: Budget(SwagBudget(learning_rate=1e-2)))
    """Default budget for methods that train networks."""
    cost_images: int = 2000
    """Number of images on which the cost of methods is measured; the cost is extrapolated to all images."""
    cost_of_training: bool = True
    """True to also measure the cost of methods that train networks (SWAG, MIMO)."""

    def check_options(self, options: DataOptions) -> None:
        """Raise `OptionError` if an option is set that the suite does not use."""
        for option in fields(DataOptions):
            used = option.name in ("directory", "download", *self.options)
            if not used and getattr(options, option.name) != option.default:
                raise OptionError(f"is not used by the {self.name} suite. Omit it.", argument=option.name)

    def builder(self, network: str | None) -> tuple[str, Callable[[], nn.Module]]:
        """Return the name and the builder of a network, from the suite or from the user's `package.module:function`."""
        if network is not None and ":" in network:
            return network, import_builder(network)
        name = next(iter(self.builders)) if network is None else one_of(network, tuple(self.builders), "network")
        return name, self.builders[name]
