"""Read image files as a data set from a folder with a subfolder for each class, a folder of images, or a CSV file of paths."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from molaplace.cli.data.dataset import Dataset, InputBatch
from molaplace.cli.data.preprocessing import Preprocessing
from molaplace.errors import DataError
from molaplace.images import ENDINGS, even_indices, image_files
from molaplace.likelihoods import CATEGORICAL, Likelihood

PATH_COLUMNS = ("path", "file", "filename", "image", "image_path")
LABEL_COLUMNS = ("label", "class", "target", "y")
GREY = frozenset({"1", "L", "I", "I;16", "F", "LA"})
"""Pillow's modes for images without colour."""

LOOKED_AT = 25
"""Number of images, spread evenly over the set, that determine the mode and shape of all images."""

MOST_CLASSES = 2**31
"""Upper limit for class indices if the number of classes is unknown."""

BAD_ROW = -1
"""Label given to a row with an error."""


@dataclass(frozen=True, kw_only=True)
class ImageDataset(Dataset):
    """Image files, decoded in batches, with class indices (n,) or numbers (n, C) as labels."""

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    """Names that identify the images in messages and results."""
    errors: tuple[str | None, ...]
    """Reasons why images are unusable, if known before their files are opened; None for all other images."""

    @property
    def has_pixels(self) -> bool:
        """True, because image files are decoded to bytes."""
        return True

    def batches(self, first: int = 0, step: int = 1) -> Iterator[InputBatch]:
        """Yield the batches with indices `first`, `first + step`, ...; decode the next batch while the current one is in use."""
        size = self.preprocessing.batch_size
        indices = range(len(self.paths))
        starts = indices[first * size :: step * size]
        with ThreadPoolExecutor(self.preprocessing.workers) as pool:

            def submit(start: int) -> list[Future[tuple[Tensor | None, str]]]:
                return [pool.submit(self._decode, index) for index in indices[start : start + size]]

            following = submit(starts[0]) if starts else []
            try:
                for start in starts:
                    current = following
                    following = submit(start + step * size)
                    yield self._rows(start, [future.result() for future in current])
            finally:
                for future in following:
                    future.cancel()

    def _decode(self, index: int) -> tuple[Tensor | None, str]:
        error = self.errors[index]
        return read_pixels(self.paths[index], self.preprocessing) if error is None else (None, error)

    def _rows(self, start: int, decoded: Sequence[tuple[Tensor | None, str]]) -> InputBatch:
        names = list(self.names[start : start + len(decoded)])
        errors = [error if pixels is None else None for pixels, error in decoded]
        images = [pixels for pixels, _ in decoded if pixels is not None]
        if not images:
            return InputBatch(names, errors, None, None)
        inputs = self.preprocessing.normalise(torch.stack(images)).to(self.preprocessing.torch_dtype)
        usable = torch.tensor([error is None for error in errors])
        return InputBatch(
            names, errors, inputs, None if self.labels is None else self.labels[start : start + len(decoded)][usable]
        )


def read_pixels(path: Path, preprocessing: Preprocessing) -> tuple[Tensor | None, str]:
    """Return the pixels of one file, or None and the reason why it cannot be read."""
    from PIL import Image, UnidentifiedImageError

    if not path.is_file():
        return None, "does not exist"
    try:
        with Image.open(path) as image:
            pixels = preprocessing.prepare(image)
    # Pillow's decoders raise many kinds of error on damaged files: struct.error, IndexError, MemoryError, ...
    except Exception as error:
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "unknown image format" if unknown else str(error) or type(error).__name__
        return None, f"cannot be decoded ({path.stat().st_size:,} bytes): {reason}"
    if preprocessing.shape is not None and tuple(pixels.shape) != preprocessing.shape:
        height, width = preprocessing.shape[-2:]
        return None, (
            f"has {pixels.shape[1]} x {pixels.shape[2]} pixels (height x width), expected {height} x {width}; use "
            f"`molaplace fit --resize {height}x{width}` to resize all images"
        )
    return pixels, ""


def pictures(name: str, paths: Sequence[Path], names: Sequence[str], preprocessing: Preprocessing) -> ImageDataset:
    """Return a set of images without labels."""
    errors = (None,) * len(paths)
    return ImageDataset(
        name=name, preprocessing=preprocessing, count=len(paths), paths=tuple(paths), names=tuple(names), errors=errors
    )


def open_image_folder(
    root: Path, classes: Sequence[str] | None, preprocessing: Preprocessing, *, labelled: bool
) -> ImageDataset:
    """List the images in a folder without decoding them. Each subfolder is a class; by default, classes are in alphabetical order."""
    inside = [path.relative_to(root) for path in image_files(root)]
    inside = [path for path in inside if not any(part.startswith(".") for part in path.parts)]
    if not inside:
        raise DataError(f"{root} contains no images: expected files that end in {', '.join(sorted(ENDINGS))}.")
    # A file name that is not valid UTF-8 cannot be written to the output, so its bytes are escaped.
    names = tuple(os.fsencode(path.as_posix()).decode(errors="backslashreplace") for path in inside)
    images = pictures(str(root), [root / path for path in inside], names, preprocessing)
    if not labelled:
        return images
    subfolders = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not subfolders:
        raise DataError(
            f"{root} has no subfolders, so its images have no labels. Put the images of each class in a separate subfolder."
        )
    order = tuple(classes) if classes is not None else tuple(subfolders)
    unknown = [name for name in subfolders if name not in order]
    if unknown:
        raise DataError(
            f"{root} has the subfolder {unknown[0]!r}, which is not one of the {len(order)} classes "
            f"({_first_names(order)}). Name the subfolders after the classes, or fit with `molaplace fit --classes`, "
            f"listing all names in the order of the networks' outputs."
        )
    labels = [order.index(path.parts[0]) if len(path.parts) > 1 else BAD_ROW for path in inside]
    errors = tuple("is not in the subfolder of a class" if label == BAD_ROW else None for label in labels)
    return replace(images, labels=torch.tensor(labels), classes=order, errors=errors)


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0, "": math.nan}
"""Words that stand for numbers in a CSV file. An empty cell means that the label is missing."""


def open_image_csv(
    path: Path,
    classes: Sequence[str] | None,
    preprocessing: Preprocessing,
    *,
    labelled: bool,
    outputs: int | None = None,
    likelihood: Likelihood = CATEGORICAL,
) -> ImageDataset:
    """List the images named in a CSV file, and their labels, without decoding the images.

    The file has a header and a column of paths relative to its folder. For classification, one column contains class names or
    indices. Names are numbered alphabetically unless `classes` gives their order. For multi-label data and regression, each
    output has a column that contains numbers or the words yes and no.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            heading = list(reader.fieldnames or [])
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}.") from error
    if heading and not rows:
        raise DataError(f"{path} has a header but no rows. Add one row for each image.")
    path_column = _column(heading, PATH_COLUMNS, f"{path} has no column of paths")
    texts = [(row.get(path_column) or "").strip() for row in rows]
    labels = order = None
    wrong: dict[int, str] = {}
    if labelled and likelihood.mutually_exclusive:
        label_column = _column(heading, LABEL_COLUMNS, f"{path} has no column of labels")
        names = [(row.get(label_column) or "").strip() for row in rows]
        labels, order, wrong = _class_labels(path, names, classes, outputs)
    elif labelled:
        order = tuple(classes) if classes is not None else tuple(name for name in heading if name != path_column)
        absent = [name for name in order if name not in heading]
        if absent or not order:
            raise DataError(f"{path} has no column for {', '.join(absent) or 'labels'}; found {', '.join(heading)}.")
        labels, wrong = _number_labels([[row.get(name) or "" for name in order] for row in rows], likelihood)
    wrong |= {row_index: f"row {row_index + 2} has no file name" for row_index, text in enumerate(texts) if not text}
    images = pictures(str(path), [path.parent / text for text in texts], texts, preprocessing)
    return replace(
        images, labels=labels, classes=order, errors=tuple(wrong.get(row_index) for row_index in range(len(rows)))
    )


def _column(heading: Sequence[str], known: Sequence[str], message: str) -> str:
    column = next((name for name in heading if name.strip().lower() in known), None)
    if column is None:
        raise DataError(
            f"{message}: expected a column with one of the names {', '.join(known)}; found "
            f"{', '.join(heading) or 'nothing'}. A CSV file must list image files. Save tables of "
            f"numbers as .npz: numpy.savez('data.npz', x=inputs, y=labels)."
        )
    return column


def _class_labels(
    path: Path, texts: Sequence[str], classes: Sequence[str] | None, outputs: int | None
) -> tuple[Tensor, tuple[str, ...] | None, dict[int, str]]:
    # Return class indices, class names in order, and the error for each row.
    order = tuple(classes) if classes is not None else None
    if order is None and sum(map(_is_whole, texts)) <= sum(map(bool, texts)) / 2:  # most labels are names
        order = tuple(sorted({text for text in texts if text}))
        if outputs is not None and len(order) != outputs:
            raise DataError(
                f"{path} has {len(order)} class names ({_first_names(order)}) for networks with {outputs} outputs, so the order of "
                f"the classes is unknown. Use class indices from 0, or pass all names with `molaplace fit --classes`."
            )
    number = {name: index for index, name in enumerate(order or ())}
    # Labels may be indices only if no class name is a number; otherwise, "1" would be ambiguous.
    by_index = not any(_is_whole(name) for name in number)
    most = len(order) if order is not None else outputs or MOST_CLASSES
    labels = torch.full((len(texts),), BAD_ROW, dtype=torch.int64)
    problems = {}
    for row, text in enumerate(texts):
        if text in number:
            labels[row] = number[text]
        elif by_index and _is_whole(text) and int(text) < most:
            labels[row] = int(text)
        else:
            problems[row] = (
                f"has the label {text!r}, which is not one of the {most} classes" if text else "has no label"
            )
    return labels, order, problems


def _number_labels(cells: Sequence[Sequence[str]], likelihood: Likelihood) -> tuple[Tensor, dict[int, str]]:
    # Return numbers (n, C), with NaN for empty cells, and the error for each row.
    labels = torch.full((len(cells), len(cells[0])), math.nan, dtype=torch.float64)
    problems = {}
    for row_index, row in enumerate(cells):
        for column, cell in enumerate(row):
            text = cell.strip().lower()
            try:
                labels[row_index, column] = WORDS[text] if text in WORDS else float(text)
            except ValueError:
                problems[row_index] = f"has the label {cell!r}, which is not a number"
            if not text and not likelihood.classification:
                problems[row_index] = "has no target"
    return labels, problems


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def most_frequent_form(source: ImageDataset) -> tuple[str, tuple[int, ...]]:
    """Return the most frequent combination of mode ("RGB" or "L") and prepared shape (channels, height, width) among 25 images."""
    from PIL import Image

    forms: Counter[tuple[str, tuple[int, ...]]] = Counter()
    first = ""
    for index in even_indices(len(source.paths), min(LOOKED_AT, len(source.paths))).tolist():
        path = source.paths[index]
        mode = source.preprocessing.mode or "RGB"
        if source.preprocessing.mode is None:
            with suppress(Exception), Image.open(path) as image:  # `read_pixels` reports the error
                mode = "L" if image.mode in GREY else "RGB"
        pixels, reason = read_pixels(path, replace(source.preprocessing, mode=mode, shape=None))
        if pixels is not None:
            forms[mode, tuple(pixels.shape)] += 1
        first = first or f" The first error: {source.names[index]}: {reason}."
    if not forms:
        raise DataError(f"{source.name} contains no images that can be decoded.{first}")
    return forms.most_common(1)[0][0]
