"""Data as a user names them, opened as sets, and divided among processes.

| name | data |
|---|---|
| a folder | images; its subfolders are the classes |
| `file.png`, `file.jpg`, ... | one image, without a label |
| `file.npz`, `file.npy` | arrays: `x` and `y`, or inputs alone |
| `file.csv` | a column of image paths and one of labels, or one for each output where these are yes or no, or numbers |
| `mnist:test`, `digits:train`, ... | a built-in set |
| `package.module:function` | an iterable of batches, returned by the function |
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from mola.app.jobs.arrays import Arrays, InMemory, open_arrays
from mola.app.jobs.pictures import Pictures, list_csv, list_file, list_folder, list_labels
from mola.app.jobs.preparation import Intake
from mola.app.jobs.rows import Rows, Set, checked_rows
from mola.distributed import Team
from mola.errors import DataError, MolaError, OptionError
from mola.lab.data.catalogue import DATASETS, load_images
from mola.lab.data.embedded import load_digits
from mola.lab.data.folder import ENDINGS
from mola.lab.data.images import split_validation
from mola.lab.imported import import_function, is_path, split_name
from mola.likelihoods import CATEGORICAL, Likelihood
from mola.network import as_batch
from mola.options import counted, did_you_mean, one_of

DIGITS = "digits"
BUILT_IN = (DIGITS, *DATASETS)
SPLITS = ("train", "val", "report", "test")
"""`val` are the 2000 test images that the paper tunes on, `report` the others."""


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
        likelihood: what labels mean.
    """

    name: str
    function: Callable[[], Iterable[Any]]
    labelled: bool
    outputs: int | None
    intake: Intake
    classes: tuple[str, ...] | None = None
    count: int | None = None
    likelihood: Likelihood = CATEGORICAL

    def taken_by(self, intake: Intake) -> Own:
        """The same batches, prepared otherwise."""
        return replace(self, intake=intake)

    def __iter__(self) -> Iterator[Rows]:
        start = 0
        for index, raw in enumerate(self._batches()):
            batch = as_batch(raw, f"batch {index} of {self.name}")
            size = _size(batch.inputs, f"batch {index} of {self.name}")
            names = [f"{self.name}[{place}]" for place in range(start, start + size)]
            labels = batch.labels if self.labelled else None
            if labels is not None and len(labels) != size:
                raise DataError(
                    f"batch {index} of {self.name} has {counted(len(labels), 'label')} for {counted(size, 'input')}."
                )
            several = not self.likelihood.mutually_exclusive
            if labels is not None and not several and not _are_indices(labels, self.outputs):
                raise DataError(
                    f"batch {index} of {self.name} has labels of shape {tuple(labels.shape)} and type {labels.dtype}: expected a "
                    f"whole number for each input, the index of its class, or for each of its positions."
                )
            yield checked_rows(
                names,
                batch.inputs,
                labels,
                classes=self.outputs,
                dtype=self.intake.torch_dtype,
                likelihood=self.likelihood,
            )
            start += size

    def _batches(self) -> Iterator[Any]:
        try:
            yield from self.function()
        except MolaError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise DataError(
                f"{self.name} failed ({type(error).__name__}: {error}): expected a function without arguments that gives batches "
                f"of (inputs, labels)."
            ) from error


UserSet = Pictures | Arrays | InMemory | Own
"""Any set that a user can name."""


def is_own_function(name: str) -> bool:
    """Whether a name stands for a function that gives batches."""
    if ":" not in name or is_path(name) or name.partition(":")[0] in BUILT_IN:
        return False
    return not Path(name).expanduser().exists()


def open_set(
    name: str,
    intake: Intake,
    *,
    labelled: bool,
    classes: Sequence[str] | None = None,
    outputs: int | None = None,
    directory: str | None = None,
    seed: int = 0,
    download: bool = False,
    likelihood: Likelihood = CATEGORICAL,
) -> UserSet:
    """Data by name, looked into but not read.

    Args:
        name: as in the table above.
        intake: from what is on disk to network inputs.
        labelled: whether labels are asked for.
        classes: the classes' names in the order of the networks' outputs, where they are known.
        outputs: how many classes there are, where that is known.
        directory: that holds the built-in sets.
        seed: of the split of the digits.
        download: whether built-in sets may be fetched.
        likelihood: what labels mean.

    Returns:
        The set.
    """
    path = Path(name).expanduser()
    built_in = name.partition(":")[0] in BUILT_IN and not path.exists()
    if labelled and not likelihood.mutually_exclusive and (built_in or path.is_dir()):
        raise DataError(
            f"{name} has one class for each image; likelihood {likelihood.name!r} takes a number for each output: give .npz with x "
            f"and y, .csv with a column for each output, or package.module:function."
        )
    if built_in:
        return open_built_in(name, directory, outputs, intake, labelled=labelled, seed=seed, download=download)
    if path.is_dir():
        return list_folder(path, classes, intake, labelled=labelled)
    if path.is_file():
        if path.suffix in (".npz", ".npy"):
            return open_arrays(path, outputs, intake, labelled=labelled, likelihood=likelihood)
        if path.suffix == ".csv":
            if not likelihood.mutually_exclusive:
                return list_labels(path, classes, intake, labelled=labelled, likelihood=likelihood)
            return list_csv(path, classes, intake, labelled=labelled, outputs=outputs)
        if path.suffix.lower() in ENDINGS and not labelled:
            return list_file(path, intake)
        raise DataError(f"{path} is of an unknown kind: expected a folder of images, .npz, .npy or .csv.")
    if is_own_function(name):
        return open_own(name, outputs, intake, labelled=labelled, likelihood=likelihood)
    near = _nearest(path)
    hint = f" Did you mean {near}?"
    if near is None:  # what is clearly a path is no misspelt set
        hint = "" if "/" in name or path.suffix else did_you_mean(name.partition(":")[0], BUILT_IN)
    raise OptionError(
        f"unknown data {name!r}: there is no such file or folder.{hint} The built-in sets are {', '.join(BUILT_IN)}; a function "
        f"of your own is named package.module:function."
    )


def _nearest(path: Path) -> Path | None:
    found = Path(path.anchor)
    for part in path.parts[1 if path.anchor else 0 :]:
        if not (found / part).exists():
            try:
                there = sorted(one.name for one in found.iterdir())
            except OSError:
                return None
            near = difflib.get_close_matches(part, there, 1)
            if not near:
                return None
            part = near[0]
        found /= part
    return found


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


def _size(inputs: Any, where: str) -> int:
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
            raise DataError(
                f"{where}: {place} is {kind}; expected tensors with a row for each input: leave out everything else."
            )

    look(inputs, "the input")
    if len(set(sizes.values())) > 1:
        raise DataError(
            f"{where}: tensors of different lengths, {sizes}; expected a row for each input in all of them."
        )
    return next(iter(sizes.values()))


def open_own(
    name: str, outputs: int | None, intake: Intake, *, labelled: bool, likelihood: Likelihood = CATEGORICAL
) -> Own:
    """Batches of the user's own code; modules in the current folder are found as well.

    Args:
        name: `package.module:function`, a function without arguments.
        outputs: number of classes of the networks, where it is known.
        intake: gives the type of floating-point inputs.
        labelled: whether labels are asked for.
        likelihood: what labels mean.

    Returns:
        The set.
    """
    split_name(name)  # what is no name is told as such
    try:
        function = import_function(name)
    except Exception as error:  # the user's code may raise anything
        raise OptionError(f"cannot import {name!r} for the data ({type(error).__name__}: {error}).") from error
    if not callable(function):
        raise OptionError(f"{name} is a {type(function).__name__}; expected a function that gives batches.")
    return Own(name, function, labelled, outputs, intake, likelihood=likelihood)


@dataclass(frozen=True)
class Dealt:
    """The batches of a set, dealt out in turns: for sets that are read from start to end.

    Attributes:
        source: the whole set, which every process reads.
        rank: of this process.
        size: number of processes.
    """

    source: Set
    rank: int
    size: int

    @property
    def name(self) -> str:
        """As the user named the set."""
        return self.source.name

    @property
    def count(self) -> int | None:
        """About how many inputs there are."""
        return None if self.source.count is None else self.source.count // self.size

    def __iter__(self) -> Iterator[Rows]:
        return islice(iter(self.source), self.rank, None, self.size)


def divided(source: Set, team: Team) -> Set:
    """This process's part of a set; image files are divided before they are decoded."""
    if team.size == 1:
        return source
    if not isinstance(source, Pictures):
        return Dealt(source, team.rank, team.size)
    return some_of(source, team.shard(range(source.count)))


def in_turns(source: Set, team: Team) -> Set:
    """This process's batches of a set, of which every process takes one in turn; image files are divided before they are decoded."""
    if team.size == 1:
        return source
    if not isinstance(source, Pictures):
        return Dealt(source, team.rank, team.size)
    size = source.intake.batch_size
    starts = range(team.rank * size, source.count, team.size * size)
    return some_of(source, [place for start in starts for place in range(start, min(start + size, source.count))])


def some_of(source: Pictures, places: Sequence[int]) -> Pictures:
    """Some of the pictures, in this order."""
    now = {place: index for index, place in enumerate(places)}
    return replace(
        source,
        paths=tuple(source.paths[place] for place in places),
        names=tuple(source.names[place] for place in places),
        labels=None if source.labels is None else source.labels[list(places)],
        problems={now[place]: words for place, words in source.problems.items() if place in now},
    )


def _are_indices(labels: Tensor, outputs: int | None) -> bool:
    # Whether labels may be indices of classes, for each input or for each of its positions; one-hot rows are not.
    if labels.ndim < 1 or bool((labels != labels.floor()).any()):
        return False
    rows_of_classes = labels.ndim == 2 and labels.shape[1] == outputs and labels.is_floating_point()
    return not (
        rows_of_classes and len(labels) and bool(((labels == 0) | (labels == 1)).all() & (labels.sum(1) == 1).all())
    )
