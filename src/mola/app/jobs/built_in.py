"""The built-in sets and the user's own functions as sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mola.app.jobs.preparation import Intake
from mola.app.jobs.rows import Rows, checked_rows
from mola.errors import DataError, MolaError, OptionError
from mola.lab.data.catalogue import DATASETS, load_images, split_validation
from mola.lab.data.embedded import load_digits
from mola.lab.imported import import_function, split_name
from mola.network import as_batch
from mola.options import counted, one_of

__all__ = ["BUILT_IN", "InMemory", "Own", "open_built_in", "open_own", "overlap"]

DIGITS = "digits"
BUILT_IN = (DIGITS, *DATASETS)
SPLITS = ("train", "val", "report", "test")
"""`val` are the 2000 test images that the paper tunes on, `report` the others."""


@dataclass(frozen=True)
class InMemory:
    """A set that is read as a whole: pixels in bytes, or network inputs.

    Attributes:
        name: as the user named it.
        values: (n, ...).
        labels: (n,), or None.
        outputs: number of classes of the networks, where it is known.
        intake: from pixels to inputs.
        classes: always None: these sets do not name their classes.
    """

    name: str
    values: Tensor
    labels: Tensor | None
    outputs: int | None
    intake: Intake
    classes: tuple[str, ...] | None = None

    @property
    def count(self) -> int:
        """How many."""
        return len(self.values)

    def taken_by(self, intake: Intake) -> InMemory:
        """The same inputs, prepared otherwise."""
        return replace(self, intake=intake)

    def __iter__(self) -> Iterator[Rows]:
        """Batch by batch.

        Yields:
            One batch after the other.

        Raises:
            DataError: if the images are not what the networks take.
        """
        size = self.intake.batch_size
        for start in range(0, len(self.values), size):
            values = self.values[start : start + size]
            inputs = values if values.is_floating_point() else self.intake.normalise(values)
            if self.intake.shape is not None and tuple(inputs.shape[1:]) != self.intake.shape:
                message = f"{self.name} holds inputs of shape {tuple(inputs.shape[1:])}, expected {self.intake.shape}."
                raise DataError(message)
            labels = None if self.labels is None else self.labels[start : start + size]
            names = [f"{self.name}[{index}]" for index in range(start, start + len(values))]
            yield checked_rows(names, inputs, labels, classes=self.outputs, dtype=self.intake.torch_dtype)


def open_built_in(
    name: str,
    directory: str | None,
    outputs: int | None,
    intake: Intake,
    *,
    labelled: bool,
    seed: int = 0,
    download: bool = False,
) -> InMemory:
    """A built-in set by name and split, such as `mnist:test`.

    Args:
        name: of the set, a colon, and `train`, `val`, `report` or `test`; without a split, `test`.
        directory: that holds the sets; otherwise `MOLA_DATA` names it.
        outputs: number of classes of the networks, where it is known.
        intake: from pixels to inputs.
        labelled: whether labels are asked for.
        seed: of the split of the digits.
        download: whether to fetch what is missing.

    Returns:
        The set.
    """
    base, _, split = name.partition(":")
    split = one_of(split or "test", SPLITS, f"the split of {base}")
    if base == DIGITS:
        digits = load_digits(seed)
        part = {"train": digits.train, "val": digits.val, "test": digits.test, "report": digits.test}[split]
        return InMemory(name, part.inputs, part.labels if labelled else None, outputs, intake)
    images = load_images(base, "train" if split == "train" else "test", directory, download=download)
    if split in ("val", "report"):
        tuned, report = split_validation(images, min(2000, len(images) // 5))
        images = tuned if split == "val" else report
    return InMemory(name, images.pixels, images.labels if labelled else None, outputs, intake)


def overlap(one: str, other: str) -> bool:
    """Whether two names of built-in sets stand for sets that share images: `val` and `report` are parts of `test`."""
    (base, _, split), (other_base, _, other_split) = one.partition(":"), other.partition(":")
    if base != other_base or base not in BUILT_IN:
        return False
    splits = {split or "test", other_split or "test"}
    return len(splits) == 1 or ("test" in splits and "train" not in splits and (base != DIGITS or "val" not in splits))


@dataclass(frozen=True)
class Own:
    """Batches that a function of the user's gives.

    Attributes:
        name: `package.module:function`.
        function: called without arguments whenever the data are read.
        labelled: whether labels are asked for.
        outputs: number of classes of the networks, where it is known.
        intake: gives the type of floating-point inputs.
        classes: always None.
    """

    name: str
    function: Callable[[], Iterable[Any]]
    labelled: bool
    outputs: int | None
    intake: Intake
    classes: tuple[str, ...] | None = None
    count: int | None = None

    def taken_by(self, intake: Intake) -> Own:
        """The same batches, prepared otherwise."""
        return replace(self, intake=intake)

    def __iter__(self) -> Iterator[Rows]:
        """The function's batches.

        Yields:
            One batch after the other.

        Raises:
            DataError: whatever goes wrong in the user's code, in one line.
        """
        start = 0
        for index, raw in enumerate(self._batches()):
            batch = as_batch(raw, f"batch {index} of {self.name}")
            size = _size(batch.inputs, f"batch {index} of {self.name}")
            names = [f"{self.name}[{place}]" for place in range(start, start + size)]
            labels = batch.labels if self.labelled else None
            if labels is not None and len(labels) != size:
                message = (
                    f"batch {index} of {self.name} has {counted(len(labels), 'label')} for {counted(size, 'input')}."
                )
                raise DataError(message)
            if labels is not None and (labels.ndim != 1 or bool((labels != labels.floor()).any())):
                message = (
                    f"batch {index} of {self.name} has labels of shape {tuple(labels.shape)} and type {labels.dtype}: expected a "
                    f"whole number for each input, the index of its class."
                )
                raise DataError(message)
            yield checked_rows(names, batch.inputs, labels, classes=self.outputs, dtype=self.intake.torch_dtype)
            start += size

    def _batches(self) -> Iterator[Any]:
        try:
            yield from self.function()
        except MolaError:
            raise
        except Exception as error:  # the user's code may raise anything
            message = (
                f"{self.name} failed ({type(error).__name__}: {error}): expected a function without arguments that gives batches "
                f"of (inputs, labels)."
            )
            raise DataError(message) from error


def _size(inputs: Any, where: str) -> int:
    """How many inputs there are.

    Raises:
        DataError: if they are no tensors with a row for each.
    """
    sizes: dict[str, int] = {}

    def look(value: Any, place: str) -> None:
        if isinstance(value, Tensor) and value.ndim > 0:
            sizes[place] = len(value)
        elif isinstance(value, (Mapping, tuple)) and value:
            entries = value.items() if isinstance(value, Mapping) else enumerate(value)
            for name, one in entries:
                look(one, f"{place}[{name!r}]")
        else:
            kind = "a tensor of one number" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            message = f"{where}: {place} is {kind}; expected tensors with a row for each input: leave out what is none."
            raise DataError(message)

    look(inputs, "the input")
    if len(set(sizes.values())) > 1:
        message = f"{where}: tensors of different lengths, {sizes}; expected a row for each input in all of them."
        raise DataError(message)
    return next(iter(sizes.values()))


def open_own(name: str, outputs: int | None, intake: Intake, *, labelled: bool) -> Own:
    """Batches of the user's own code; modules in the current folder are found as well.

    Args:
        name: `package.module:function`, a function without arguments.
        outputs: number of classes of the networks, where it is known.
        intake: gives the type of floating-point inputs.
        labelled: whether labels are asked for.

    Returns:
        The set.

    Raises:
        OptionError: if there is no such function.
    """
    split_name(name)  # what is no name is told as such
    try:
        function = import_function(name)
    except Exception as error:  # the user's code may raise anything
        message = f"cannot import {name!r} for the data ({type(error).__name__}: {error})."
        raise OptionError(message) from error
    if not callable(function):
        message = f"{name} is a {type(function).__name__}; expected a function that gives batches."
        raise OptionError(message)
    return Own(name, function, labelled, outputs, intake)
