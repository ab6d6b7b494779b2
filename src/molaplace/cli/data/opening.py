"""Open data sets by name.

| name | data |
|---|---|
| a folder | images; its subfolders are the classes |
| `file.png`, `file.jpg`, ... | one image, without a label |
| `file.npz`, `file.npy` | arrays: `x` and `y`, or only inputs |
| `file.csv` | a column of image paths, and a column of classes or, for multi-label data and regression, a numeric column per output |
| `mnist:test`, `digits:train`, ... | a built-in data set |
| `package.module:function` | the iterable of batches that the function returns |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from molaplace.cli.data.arrays import ArrayDataset, open_arrays
from molaplace.cli.data.dataset import Rows, Set, finite_rows
from molaplace.cli.data.image_files import open_image_csv, open_image_folder, pictures
from molaplace.cli.data.preprocessing import Preprocessing
from molaplace.cli.job import Job
from molaplace.errors import DataError, MolaError, OptionError, importing
from molaplace.images import ENDINGS
from molaplace.network import as_batch
from molaplace.options import counted, did_you_mean, one_of
from molaplace_lab.data.catalogue import DATASETS, load_images
from molaplace_lab.data.embedded import load_digits
from molaplace_lab.data.images import split_validation
from molaplace_lab.imported import import_function, is_path, split_name

DIGITS = "digits"
BUILT_IN = (DIGITS, *DATASETS)
SPLITS = ("train", "val", "report", "test")
"""Splits of a built-in set. `val` contains the 2000 test images that the paper tunes on, and `report` contains the rest."""

DEFAULTS = Job()


@dataclass(frozen=True, kw_only=True)
class Own(Set):
    """Batches returned by a user's function, which is called each time the data are read."""

    function: Callable[[], Iterable[Any]]
    labelled: bool

    def batches(self, first: int = 0, step: int = 1) -> Iterator[Rows]:
        """Call the function and yield the batches with indices `first`, `first + step`, ..."""
        start = 0
        for index, raw in enumerate(self._raw_batches()):
            where = f"batch {index} of {self.name}"
            batch = as_batch(raw, where)
            size = _size(batch.inputs, where)
            names = [f"{self.name}[{place}]" for place in range(start, start + size)]
            labels = batch.labels if self.labelled else None
            if labels is not None and (not labels.ndim or len(labels) != size):
                raise DataError(
                    f"{where}: expected a label for each input, got {counted(labels.numel(), 'label')} for {counted(size, 'input')}."
                )
            if index % step == first:
                yield finite_rows(names, batch.inputs, labels, self.intake.torch_dtype)
            start += size

    def _raw_batches(self) -> Iterator[Any]:
        try:
            yield from self.function()
        except MolaError:
            raise
        except Exception as error:  # the user's code may raise any exception
            raise DataError(
                f"{self.name} failed ({type(error).__name__}: {error}): expected a function without arguments that returns batches "
                f"of (inputs, labels)."
            ) from error


def _size(inputs: Any, where: str) -> int:
    # Return the number of inputs in a batch, which is the length of each tensor.
    sizes: set[int] = set()
    for place, value in tree_flatten_with_path(inputs, is_leaf=lambda one: isinstance(one, list))[0]:
        if not isinstance(value, Tensor) or not value.ndim:
            kind = "a tensor without dimensions" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise DataError(
                f"{where}: the input{keystr(place)} is {kind}; expected a tensor with a row for each input."
            )
        sizes.add(len(value))
    if len(sizes) != 1:
        raise DataError(
            f"{where}: expected tensors with a row for each input, but their lengths differ: {sorted(sizes)}."
        )
    return sizes.pop()


def is_data_function(name: str) -> bool:
    """Return True if a data set's name has the form `package.module:function`."""
    if ":" not in name or is_path(name) or name.partition(":")[0] in BUILT_IN:
        return False
    return not Path(name).expanduser().exists()


def open_dataset(
    name: str,
    intake: Preprocessing,
    *,
    labelled: bool,
    classes: Sequence[str] | None = None,
    outputs: int | None = None,
    job: Job = DEFAULTS,
) -> Set:
    """Open data by name, as in the table above. Images are not decoded yet.

    `classes` and `outputs` are the names and the number of the networks' outputs, if known.
    """
    path, likelihood = Path(name).expanduser(), job.meaning()
    built_in = name.partition(":")[0] in BUILT_IN and not path.exists()
    if labelled and not likelihood.mutually_exclusive and (built_in or path.is_dir()):
        raise DataError(
            f"{name} contains a class label for each image, but --likelihood {likelihood.name} needs a number for each output. "
            f"Pass an .npz file with x and y, a .csv file with a column for each output, or package.module:function."
        )
    if built_in:
        return _open_built_in(name, intake, job, labelled=labelled)
    if path.is_file() and path.suffix in (".npz", ".npy"):
        return open_arrays(path, intake, labelled=labelled, likelihood=likelihood)
    if path.exists():
        with importing("reading image files", "pillow", "bench"):
            import PIL.Image  # noqa: F401 - a missing package is reported before a long computation
        if path.is_dir():
            return open_image_folder(path, classes, intake, labelled=labelled)
        if path.suffix == ".csv":
            return open_image_csv(path, classes, intake, labelled=labelled, outputs=outputs, likelihood=likelihood)
        if path.suffix.lower() in ENDINGS and not labelled:
            return pictures(str(path), [path], [path.name], intake)
        raise DataError(f"{path} has an unknown format. Pass a folder of images, or an .npz, .npy or .csv file.")
    if is_data_function(name):
        module, attribute = split_name(name)
        try:
            function = import_function(name)
        except Exception as error:  # the user's code may raise any exception
            if isinstance(error, AttributeError) and module in sys.modules:
                near = did_you_mean(attribute, dir(sys.modules[module]))
                raise OptionError(
                    f"module {module!r} has no function {attribute!r} that returns batches.{near}"
                ) from error
            near = did_you_mean(module, BUILT_IN) if attribute in SPLITS else ""
            raise OptionError(
                f"cannot import {name!r} for the data ({type(error).__name__}: {error}).{near}"
            ) from error
        if not callable(function):
            raise OptionError(
                f"expected a function that returns batches, but {name} has type {type(function).__name__}."
            )
        return Own(name=name, intake=intake, function=function, labelled=labelled)
    known = [*([] if is_path(name) or path.suffix else BUILT_IN), *(one.name for one in path.parent.glob("*"))]
    hint = did_you_mean(path.name.partition(":")[0], known)
    raise OptionError(
        f"unknown data {name!r}: the file or folder does not exist.{hint} The built-in sets are "
        f"{', '.join(BUILT_IN)}. Specify your own function as package.module:function."
    )


def _open_built_in(name: str, intake: Preprocessing, job: Job, *, labelled: bool) -> ArrayDataset:
    base, _, split = name.partition(":")
    split = one_of(split or "test", SPLITS, f"the split of {base}")
    if base == DIGITS:
        digits = load_digits(job.seed)
        part = {"train": digits.train, "val": digits.val, "test": digits.test, "report": digits.test}[split]
        return _arrays(name, intake, part.inputs, part.labels if labelled else None)
    images = load_images(base, "train" if split == "train" else "test", job.data, download=job.download)
    if split in ("val", "report"):
        tuned, report = split_validation(images, min(2000, len(images) // 5))
        images = tuned if split == "val" else report
    return _arrays(name, intake, images.pixels, images.labels if labelled else None)


def _arrays(name: str, intake: Preprocessing, inputs: Tensor, labels: Tensor | None) -> ArrayDataset:
    return ArrayDataset(name=name, intake=intake, values=inputs.numpy(), labels=labels, count=len(inputs))


def are_same(one: str, other: str) -> bool:
    """Return True if two names refer to the same data."""
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def overlap(one: str, other: str) -> bool:
    """Return True if two built-in sets share images. `val` and `report` are parts of `test`."""
    (base, _, split), (other_base, _, other_split) = one.partition(":"), other.partition(":")
    if base != other_base or base not in BUILT_IN:
        return False
    splits = {split or "test", other_split or "test"}
    return len(splits) == 1 or ("test" in splits and "train" not in splits and (base != DIGITS or "val" not in splits))
