"""Open data sets by name.

| name | data |
|---|---|
| a folder | images; its subfolders are the classes |
| `file.png`, `file.jpg`, ... | one image, without a label |
| `file.npz`, `file.npy` | arrays: `x` and `y`, or only inputs |
| `file.csv` | a column of image paths, and a column of classes or, for multi-label data and regression, a numeric column per output |
| `digits:train`, `digits:val`, `digits:test` | scikit-learn's handwritten digits |
| `package.module:function` | the iterable of batches that the function returns |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from molaplace.data.arrays import ArrayDataset, open_arrays
from molaplace.data.dataset import Dataset, InputBatch, finite_rows
from molaplace.data.digits import load_digits
from molaplace.data.image_files import open_image_csv, open_image_folder, pictures
from molaplace.data.preprocessing import Preprocessing
from molaplace.errors import DataError, MolaError, OptionError
from molaplace.images import ENDINGS
from molaplace.imported import import_function, is_function_name
from molaplace.likelihoods import CATEGORICAL, Likelihood
from molaplace.network import as_batch
from molaplace.options import counted, did_you_mean, one_of

DIGITS = "digits"
SPLITS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class FunctionDataset(Dataset):
    """Batches returned by a user's function, which is called each time the data are read."""

    function: Callable[[], Iterable[Any]]
    labelled: bool

    def batches(self, first: int = 0, step: int = 1) -> Iterator[InputBatch]:
        """Call the function and yield the batches with indices `first`, `first + step`, ..."""
        start = 0
        for index, raw in enumerate(self._raw_batches()):
            where = f"batch {index} of {self.name}"
            batch = as_batch(raw, where)
            size = _size(batch.inputs, where)
            names = [f"{self.name}[{index}]" for index in range(start, start + size)]
            labels = batch.labels if self.labelled else None
            if labels is not None and (not labels.ndim or len(labels) != size):
                raise DataError(
                    f"{where}: expected a label for each input, got {counted(labels.numel(), 'label')} for {counted(size, 'input')}."
                )
            if index % step == first:
                yield finite_rows(names, batch.inputs, labels, self.preprocessing.torch_dtype)
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
    leaves = tree_leaves(inputs)
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
    if len(sizes) != 1 or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise DataError(f"{where}: expected tensors of equal lengths as inputs, with a row for each input.")
    return sizes.pop()


def open_dataset(
    name: str,
    preprocessing: Preprocessing,
    *,
    labelled: bool,
    classes: Sequence[str] | None = None,
    outputs: int | None = None,
    likelihood: Likelihood = CATEGORICAL,
    seed: int = 0,
) -> Dataset:
    """Open data by name, as in the table above. Images are not decoded yet.

    `classes` and `outputs` are the names and the number of the networks' outputs, if known; `seed` splits the digits.
    """
    path = Path(name).expanduser()
    built_in = name.partition(":")[0] == DIGITS and not path.exists()
    if labelled and not likelihood.mutually_exclusive and (built_in or path.is_dir()):
        raise DataError(
            f"{name} contains a class label for each image, but --likelihood {likelihood.name} needs a number for each output. "
            f"Pass an .npz file with x and y, a .csv file with a column for each output, or package.module:function."
        )
    if built_in:
        return _open_digits(name, preprocessing, seed, labelled=labelled)
    if path.is_file() and path.suffix in (".npz", ".npy"):
        return open_arrays(path, preprocessing, labelled=labelled, likelihood=likelihood)
    if path.is_file() and path.suffix == ".csv":
        return open_image_csv(path, classes, preprocessing, labelled=labelled, outputs=outputs, likelihood=likelihood)
    if path.exists():
        if path.is_dir():
            return open_image_folder(path, classes, preprocessing, labelled=labelled)
        if path.suffix.lower() in ENDINGS and not labelled:
            return pictures(str(path), [path], [path.name], preprocessing)
        raise DataError(f"{path} has an unknown format. Pass a folder of images, or an .npz, .npy or .csv file.")
    if is_function_name(name):
        function = import_function(name)
        return FunctionDataset(name=name, preprocessing=preprocessing, function=function, labelled=labelled)
    hint = did_you_mean(path.name, [neighbour.name for neighbour in path.parent.glob("*")])
    raise OptionError(
        f"unknown data {name!r}: the file or folder does not exist.{hint} Specify your own function as package.module:function."
    )


def _open_digits(name: str, preprocessing: Preprocessing, seed: int, *, labelled: bool) -> ArrayDataset:
    split = one_of(name.partition(":")[2] or "test", SPLITS, f"the split of {DIGITS}")
    part = getattr(load_digits(seed), split)
    labels = part.labels if labelled else None
    return ArrayDataset(
        name=name, preprocessing=preprocessing, values=part.inputs.numpy(), labels=labels, count=len(part.inputs)
    )


def are_same(name: str, other: str) -> bool:
    """Return True if two names refer to the same data."""
    return Path(name).expanduser().resolve() == Path(other).expanduser().resolve()
