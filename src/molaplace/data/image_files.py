"""Read image files as a data set from a folder with a subfolder for each class, a folder of images, or a CSV file of paths."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from molaplace.data.dataset import Dataset, InputBatch
from molaplace.data.preprocessing import Preprocessing
from molaplace.errors import DataError
from molaplace.images import ENDINGS, decode, even_indices, image_files, open_folder
from molaplace.likelihoods import CATEGORICAL, Likelihood

GREY = frozenset({"1", "L", "I", "I;16", "F", "LA"})
"""Pillow's modes for images without colour."""

LABEL_DIGITS = 15
"""Number of digits that a class index may have."""

LOOKED_AT = 25
"""Number of images, spread evenly over the set, that determine the mode and shape of all images."""


@dataclass(frozen=True, kw_only=True)
class ImageDataset(Dataset):
    """Image files, decoded in batches, with class indices (n,) or numbers (n, C) as labels."""

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    """Names that identify the images in messages and results."""
    errors: tuple[str | None, ...]
    """Reasons why images are unusable, if known before their files are opened; None for all other images."""

    def batches(self, first: int = 0, step: int = 1) -> Iterator[InputBatch]:
        """Yield the batches with indices `first`, `first + step`, ...; decode the next batch while the current one is in use."""
        size = self.preprocessing.batch_size
        indices = range(len(self.paths))
        starts = indices[first * size :: step * size]
        with ThreadPoolExecutor(self.preprocessing.workers) as pool:
            following = pool.map(self._decode, indices[first * size : (first + 1) * size])
            try:
                for start in starts:
                    decoded = following
                    after = start + step * size
                    following = pool.map(self._decode, indices[after : after + size])  # begins immediately
                    yield self._rows(start, list(decoded))
            finally:
                pool.shutdown(cancel_futures=True)

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
        usable = torch.tensor([error is None for error in errors], device="cpu")
        return InputBatch(
            names, errors, inputs, None if self.labels is None else self.labels[start : start + len(decoded)][usable]
        )


def read_pixels(path: Path, preprocessing: Preprocessing) -> tuple[Tensor | None, str]:
    """Return the pixels of one file, or None and the reason why it cannot be read."""
    try:
        pixels = decode(path, preprocessing.prepare)
    except DataError as error:
        return None, error.message
    if preprocessing.shape is not None and tuple(pixels.shape) != preprocessing.shape:
        height, width = preprocessing.shape[-2:]
        return None, (
            f"has {pixels.shape[1]} x {pixels.shape[2]} pixels (height x width), expected {height} x {width}; resize "
            f"the images to this size, or fit (again) with --resize {height}x{width}, which then resizes all images"
        )
    return pixels, ""


def pictures(name: str, paths: Sequence[Path], names: Sequence[str], preprocessing: Preprocessing) -> ImageDataset:
    """Return a set of images without labels."""
    errors = (None,) * len(paths)
    return ImageDataset(
        name=name,
        preprocessing=preprocessing,
        count=len(paths),
        has_pixels=True,
        paths=tuple(paths),
        names=tuple(names),
        errors=errors,
    )


def open_image_folder(
    root: Path, classes: Sequence[str] | None, preprocessing: Preprocessing, *, labelled: bool
) -> ImageDataset:
    """List the images in a folder without decoding them. Each subfolder is a class; by default, classes are in alphabetical order."""
    folder = open_folder(root, classes=classes) if labelled else None
    paths = image_files(root) if folder is None else folder.paths
    if not paths:
        raise DataError(f"{root} contains no images: expected files that end in {', '.join(sorted(ENDINGS))}.")
    # A file name that is not valid UTF-8 cannot be written to the output, so its bytes are escaped.
    names = [os.fsencode(path.relative_to(root).as_posix()).decode(errors="backslashreplace") for path in paths]
    images = pictures(str(root), paths, names, preprocessing)
    return images if folder is None else replace(images, labels=folder.labels, classes=folder.classes)


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

    The file has a header and a column `path` of paths relative to its folder. For classification, the column `label` contains class
    names or indices. Names are numbered alphabetically unless `classes` gives their order. For multi-label data and regression, each
    output has a column of numbers.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, restval="")
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}.") from error
    heading = list(reader.fieldnames or ()) if rows else []
    columns = []
    if labelled and likelihood.mutually_exclusive:
        columns = ["label"]
    elif labelled:
        columns = list(classes or [name for name in heading if name != "path"])
    missing = [name for name in ("path", *columns) if name not in heading]
    if missing:
        raise DataError(
            f"{path} has no rows with a column {missing[0]!r}; found the columns {', '.join(heading) or 'none'}. A CSV file must list "
            f"image files. Save tables of numbers as .npz: numpy.savez('data.npz', x=inputs, y=labels)."
        )
    for number, row in enumerate(rows, 1):
        if None in row:
            raise DataError(
                f"{path}: row {number} ({row['path']}) has more cells than the header. Quote cells that contain a comma."
            )
    names = [row["path"].strip() for row in rows]
    images = pictures(str(path), [path.parent / name for name in names], names, preprocessing)
    if not labelled:
        return images
    if likelihood.mutually_exclusive:
        return _with_class_labels(images, [row["label"].strip() for row in rows], classes, outputs)
    try:
        numbers = [[float(row[name] or math.nan) for name in columns] for row in rows]
    except ValueError as error:
        raise DataError(
            f"{path}: {error}. Labels must be numbers; leave a cell empty if its label is missing."
        ) from error
    labels = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    incomplete = labels.isnan().any(1) & (not likelihood.classification)
    errors = tuple("has no target" if without_target else None for without_target in incomplete.tolist())
    return replace(images, labels=labels, classes=tuple(columns), errors=errors)


def _with_class_labels(
    images: ImageDataset, texts: Sequence[str], classes: Sequence[str] | None, outputs: int | None
) -> ImageDataset:
    # Labels are indices if all of them are whole numbers and no class is named by a number; otherwise, they are class names.
    order = None if classes is None else tuple(classes)
    indexed = all(map(str.isdecimal, filter(None, texts))) and not any(map(str.isdecimal, order or ()))
    if order is None and not indexed:
        order = tuple(sorted(set(filter(None, texts))))
        if outputs is not None and len(order) != outputs:
            raise DataError(
                f"{images.name} has {len(order)} class names ({', '.join(order[:5])}, ...) for networks with {outputs} outputs, so the "
                f"order of the classes is unknown. Use class indices from 0, or pass all names with `molaplace fit --classes`."
            )
    numbers = {name: index for index, name in enumerate(order or ())}
    if indexed:
        long = next((index for index, text in enumerate(texts) if len(text) > LABEL_DIGITS), None)
        if long is not None:
            raise DataError(
                f"{images.name}: expected class indices from 0 as labels, got {texts[long][:30]!r} for {images.names[long]}."
            )
        numbers = {text: int(text) for text in texts if text}
    labels = torch.tensor([numbers.get(text, 0) for text in texts], device="cpu")
    errors = tuple(None if text in numbers else f"has the unknown label {text!r}" for text in texts)
    return replace(images, labels=labels, classes=order, errors=errors)


def most_frequent_form(source: ImageDataset) -> tuple[str, tuple[int, ...]]:
    """Return the most frequent combination of mode ("RGB" or "L") and prepared shape (channels, height, width) among 25 images."""
    from PIL import Image

    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    first_error = ""
    for index in even_indices(len(source.paths), min(LOOKED_AT, len(source.paths))).tolist():
        path = source.paths[index]
        mode = source.preprocessing.mode or "RGB"
        if source.preprocessing.mode is None and path.is_file():
            with suppress(Exception), Image.open(path) as image:  # `read_pixels` reports the error
                mode = "L" if image.mode in GREY else "RGB"
        pixels, reason = read_pixels(path, replace(source.preprocessing, mode=mode, shape=None))
        if pixels is not None:
            counts[mode, tuple(pixels.shape)] += 1
        first_error = first_error or f" The first error: {source.names[index]}: {reason}."
    if not counts:
        raise DataError(f"{source.name} contains no images that can be decoded.{first_error}")
    return counts.most_common(1)[0][0]
