"""Data as a user names them, opened as sets, and divided among processes.

| name | data |
|---|---|
| a folder | images; its subfolders are the classes |
| `file.png`, `file.jpg`, ... | one image, without a label |
| `file.npz`, `file.npy` | arrays: `x` and `y`, or inputs alone |
| `file.csv` | a column of image paths, and a column of classes, or of numbers for each output of multi-label data and regression |
| `mnist:test`, `digits:train`, ... | a built-in set |
| `package.module:function` | an iterable of batches, returned by the function |
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from mola.app.jobs.arrays import Arrays, open_arrays
from mola.app.jobs.pictures import Pictures, list_csv, list_file, list_folder
from mola.app.jobs.preparation import Intake
from mola.app.jobs.rows import Rows, Set, finite_rows
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
    """Batches that a function of the user's returns, which is called whenever the data are read."""

    name: str
    function: Callable[[], Iterable[Any]]
    labelled: bool
    intake: Intake
    classes: tuple[str, ...] | None = None
    count: int | None = None

    def __iter__(self) -> Iterator[Rows]:
        start = 0
        for index, raw in enumerate(self._batches()):
            where = f"batch {index} of {self.name}"
            batch = as_batch(raw, where)
            size = _size(batch.inputs, where)
            names = [f"{self.name}[{place}]" for place in range(start, start + size)]
            labels = batch.labels if self.labelled else None
            if labels is not None and (not labels.ndim or len(labels) != size):
                raise DataError(f"{where} has {counted(labels.numel(), 'label')} for {counted(size, 'input')}.")
            yield finite_rows(names, batch.inputs, labels, self.intake.torch_dtype)
            start += size

    def _batches(self) -> Iterator[Any]:
        try:
            yield from self.function()
        except MolaError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise DataError(
                f"{self.name} failed ({type(error).__name__}: {error}): expected a function without arguments that returns batches "
                f"of (inputs, labels)."
            ) from error


def _size(inputs: Any, where: str) -> int:
    # Number of inputs in a batch, the length of each of its tensors.
    sizes: set[int] = set()
    for place, value in tree_flatten_with_path(inputs, is_leaf=lambda one: isinstance(one, list))[0]:
        if not isinstance(value, Tensor) or not value.ndim:
            kind = "a tensor of one number" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise DataError(
                f"{where}: the input{keystr(place)} is {kind}; expected tensors with a row for each input, and nothing else."
            )
        sizes.add(len(value))
    if len(sizes) != 1:
        raise DataError(f"{where}: tensors of different lengths, {sorted(sizes)}; expected a row for each input.")
    return sizes.pop()


UserSet = Pictures | Arrays | Own
"""Any set that a user can name."""


def is_own_function(name: str) -> bool:
    """True for data named as `package.module:function`."""
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
    """Open data by name, as in the table above; images are not decoded yet.

    `classes` and `outputs` are the names and the number of the networks' outputs, if known.
    """
    path = Path(name).expanduser()
    built_in = name.partition(":")[0] in BUILT_IN and not path.exists()
    if labelled and not likelihood.mutually_exclusive and (built_in or path.is_dir()):
        raise DataError(
            f"{name} has one class for each image; likelihood {likelihood.name!r} takes a number for each output: give .npz with x "
            f"and y, .csv with a column for each output, or package.module:function."
        )
    if built_in:
        return _open_built_in(name, directory, intake, labelled=labelled, seed=seed, download=download)
    if path.is_dir():
        return list_folder(path, classes, intake, labelled=labelled)
    if path.is_file():
        if path.suffix in (".npz", ".npy"):
            return open_arrays(path, intake, labelled=labelled, likelihood=likelihood)
        if path.suffix == ".csv":
            return list_csv(path, classes, intake, labelled=labelled, outputs=outputs, likelihood=likelihood)
        if path.suffix.lower() in ENDINGS and not labelled:
            return list_file(path, intake)
        raise DataError(f"{path} is of an unknown kind: expected a folder of images, .npz, .npy or .csv.")
    if is_own_function(name):
        return _open_own(name, intake, labelled=labelled)
    near = _nearest(path)
    hint = f" Did you mean {near}?"
    if near is None:  # a path is not a misspelt set
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
                near = difflib.get_close_matches(part, sorted(one.name for one in found.iterdir()), 1)
            except OSError:
                return None
            if not near:
                return None
            part = near[0]
        found /= part
    return found


def _open_built_in(
    name: str, directory: str | None, intake: Intake, *, labelled: bool, seed: int, download: bool
) -> Arrays:
    base, _, split = name.partition(":")
    split = one_of(split or "test", SPLITS, f"the split of {base}")
    if base == DIGITS:
        digits = load_digits(seed)
        part = {"train": digits.train, "val": digits.val, "test": digits.test, "report": digits.test}[split]
        return Arrays(name, part.inputs.numpy(), part.labels if labelled else None, intake)
    images = load_images(base, "train" if split == "train" else "test", directory, download=download)
    if split in ("val", "report"):
        tuned, report = split_validation(images, min(2000, len(images) // 5))
        images = tuned if split == "val" else report
    return Arrays(name, images.pixels.numpy(), images.labels if labelled else None, intake)


def overlap(one: str, other: str) -> bool:
    """True for built-in sets that share images: `val` and `report` are parts of `test`."""
    (base, _, split), (other_base, _, other_split) = one.partition(":"), other.partition(":")
    if base != other_base or base not in BUILT_IN:
        return False
    splits = {split or "test", other_split or "test"}
    return len(splits) == 1 or ("test" in splits and "train" not in splits and (base != DIGITS or "val" not in splits))


def _open_own(name: str, intake: Intake, *, labelled: bool) -> Own:
    split_name(name)  # refuses what is not package.module:function
    try:
        function = import_function(name)
    except Exception as error:  # the user's code may raise anything
        raise OptionError(f"cannot import {name!r} for the data ({type(error).__name__}: {error}).") from error
    if not callable(function):
        raise OptionError(f"{name} is a {type(function).__name__}; expected a function that returns batches.")
    return Own(name, function, labelled, intake)


@dataclass(frozen=True)
class Dealt:
    """Batches rank, rank + size, rank + 2 size, ... of a set that every process reads from start to end."""

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
    """Distribute the batches of a set over the processes in turn; image files are divided before they are decoded."""
    if team.size == 1:
        return source
    if not isinstance(source, Pictures):
        return Dealt(source, team.rank, team.size)
    size = source.intake.batch_size
    starts = range(team.rank * size, source.count, team.size * size)
    return some_of(source, [place for start in starts for place in range(start, min(start + size, source.count))])


def some_of(source: Pictures, places: Sequence[int]) -> Pictures:
    """Return some of the pictures, in this order."""
    now = {place: index for index, place in enumerate(places)}
    return replace(
        source,
        paths=tuple(source.paths[place] for place in places),
        names=tuple(source.names[place] for place in places),
        labels=None if source.labels is None else source.labels[list(places)],
        problems={now[place]: words for place, words in source.problems.items() if place in now},
    )
