"""Read image files as a data set: a folder with a subfolder for each class, a folder of images, or a CSV of paths and labels."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mola.app.jobs.preparation import Intake
from mola.app.jobs.rows import Rows
from mola.errors import DataError, importing
from mola.lab.data.folder import ENDINGS, image_files
from mola.lab.data.images import even_places
from mola.likelihoods import CATEGORICAL, Likelihood

PATH_COLUMNS = ("path", "file", "filename", "image", "image_path")
LABEL_COLUMNS = ("label", "class", "target", "y")
GREY = frozenset({"1", "L", "I", "I;16", "F", "LA"})
"""Pillow's modes without colour."""

LOOKED_AT = 25
"""Number of images, evenly spaced, whose mode and shape all images should have."""

MOST_CLASSES = 2**31
"""Limit of class indices where the number of classes is unknown."""

BAD_ROW = -1
"""Label of a row whose error is in `problems`."""


@dataclass(frozen=True)
class Pictures:
    """Image files with their labels, decoded batch by batch."""

    name: str
    paths: tuple[Path, ...]
    names: tuple[str, ...]
    """Names of the images in messages and results."""
    labels: Tensor | None
    """Class indices (n,), or numbers (n, C)."""
    classes: tuple[str, ...] | None
    """Names that the set itself gives to the classes."""
    problems: dict[int, str]
    """By index, why an image cannot be used, if that is known before its file is opened."""
    intake: Intake

    @property
    def count(self) -> int:
        """Number of images."""
        return len(self.paths)

    def __iter__(self) -> Iterator[Rows]:
        size, places = self.intake.batch_size, range(len(self.paths))
        starts = places[::size]
        if self.intake.workers == 0:
            for start in starts:
                yield self._rows(start, [self._decode(place) for place in places[start : start + size]])
            return
        with ThreadPoolExecutor(self.intake.workers) as pool:
            ahead = [pool.submit(self._decode, place) for place in places[:size]]
            try:
                for start in starts:
                    current = ahead
                    # The next batch is decoded while this batch is used.
                    ahead = [pool.submit(self._decode, place) for place in places[start + size : start + 2 * size]]
                    yield self._rows(start, [future.result() for future in current])
            finally:
                for future in ahead:
                    future.cancel()

    def _decode(self, place: int) -> tuple[Tensor | None, str]:
        if place in self.problems:
            return None, self.problems[place]
        return read_pixels(self.paths[place], self.intake)

    def _rows(self, start: int, decoded: Sequence[tuple[Tensor | None, str]]) -> Rows:
        names = list(self.names[start : start + len(decoded)])
        good = torch.tensor([pixels is not None for pixels, _ in decoded])
        errors = [words if pixels is None else None for pixels, words in decoded]
        notes = tuple(
            (name, words) for name, (pixels, words) in zip(names, decoded, strict=True) if pixels is not None and words
        )
        images = [pixels for pixels, _ in decoded if pixels is not None]
        if not images:
            return Rows(names, errors, None, None, notes)
        inputs = self.intake.normalise(torch.stack(images)).to(self.intake.torch_dtype)
        labels = None if self.labels is None else self.labels[start : start + len(decoded)][good]
        return Rows(names, errors, inputs, labels, notes)


def read_pixels(path: Path, intake: Intake) -> tuple[Tensor | None, str]:
    """Return the pixels of one file and a remark on them, or None and the reason."""
    from PIL import Image, UnidentifiedImageError

    if not path.is_file():
        return None, "does not exist"
    try:
        with Image.open(path) as image:
            grey = image.mode in GREY
            pixels = intake.prepare(image)
    # Pillow's decoders raise whatever a damaged file leads to: struct.error, IndexError, MemoryError, ...
    except Exception as error:
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "it is of no known image format" if unknown else str(error) or type(error).__name__
        return None, f"cannot be decoded ({path.stat().st_size:,} bytes): {reason}"
    if intake.shape is not None and tuple(pixels.shape) != intake.shape:
        height, width = intake.shape[-2:]
        return None, (
            f"is {pixels.shape[1]} x {pixels.shape[2]} pixels high and wide, expected {height} x {width}; "
            f"`mola fit --resize {height}x{width}` would bring all to one size"
        )
    if not intake.asked and grey != (intake.mode == "L"):
        return pixels, "is grey and was read as RGB" if grey else "is in colour and was read as grey"
    return pixels, ""


def require_pillow() -> None:
    """Raise `MissingExtraError` without Pillow, before a long computation reaches the first image."""
    with importing("reading image files", "pillow", "bench"):
        import PIL.Image  # noqa: F401


def list_folder(root: Path, classes: Sequence[str] | None, intake: Intake, *, labelled: bool) -> Pictures:
    """List a folder of images without decoding them; subfolders are the labels, by default in alphabetical order."""
    require_pillow()
    subfolders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    loose = [path for path in image_files(root) if path.parent == root] if subfolders else image_files(root)
    if not loose and not any(image_files(folder) for folder in subfolders):
        raise DataError(f"{root} holds no images: expected files that end in {', '.join(sorted(ENDINGS))}.")
    if labelled and not subfolders:
        raise DataError(f"{root} has no subfolders, so its images have no labels: expected a subfolder for each class.")
    if not labelled:
        paths = image_files(root)
        return Pictures(str(root), tuple(paths), _names(paths, root), None, None, {}, intake)
    found = tuple(path.name for path in subfolders)
    order = tuple(classes) if classes is not None else found
    unknown = [name for name in found if name not in order]
    if unknown:
        raise DataError(
            f"{root} has the subfolder {unknown[0]!r}, which is not one of the {len(order)} classes ({', '.join(order[:5])}"
            f"{', ...' if len(order) > 5 else ''}). Name the subfolders like the classes, or fit with all names, in the order "
            f"of the networks' outputs: `mola fit --classes`."
        )
    number = {name: index for index, name in enumerate(order)}
    listed = [(path, number[folder.name]) for folder in subfolders for path in image_files(folder)]
    listed += [(path, BAD_ROW) for path in loose]
    problems = {place: "is in no class's subfolder" for place, (_, label) in enumerate(listed) if label == BAD_ROW}
    paths = [path for path, _ in listed]
    labels = torch.tensor([label for _, label in listed], dtype=torch.int64)
    return Pictures(str(root), tuple(paths), _names(paths, root), labels, order, problems, intake)


def list_file(path: Path, intake: Intake) -> Pictures:
    """Return one image, without a label."""
    require_pillow()
    return Pictures(str(path), (path,), (path.name,), None, None, {}, intake)


def _names(paths: Sequence[Path], root: Path) -> tuple[str, ...]:
    # A name that is not UTF-8 can be opened but not written: its bytes are shown as escapes.
    return tuple(os.fsencode(path.relative_to(root).as_posix()).decode(errors="backslashreplace") for path in paths)


WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0, "": math.nan}
"""Words for numbers in a CSV file; an empty cell is a missing label."""


def list_csv(
    path: Path,
    classes: Sequence[str] | None,
    intake: Intake,
    *,
    labelled: bool,
    outputs: int | None = None,
    likelihood: Likelihood = CATEGORICAL,
) -> Pictures:
    """List the images named in a CSV file, with their labels, without decoding them.

    The file has a heading and a column of paths, relative to its folder. Classes have one column of names or indices; names are
    numbered alphabetically unless `classes` gives their order. Multi-label and regression data have a column of numbers, or yes
    and no, for each output.
    """
    require_pillow()
    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            heading, rows = list(reader.fieldnames or []), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}.") from error
    if heading and not rows:
        raise DataError(f"{path} has a heading but no rows.")
    where = _column(heading, PATH_COLUMNS, f"{path} has no column of paths")
    texts = [(row.get(where) or "").strip() for row in rows]
    problems = {place: f"row {place + 2} has no file name" for place, text in enumerate(texts) if not text}
    labels = order = None
    if labelled and likelihood.mutually_exclusive:
        what = _column(heading, LABEL_COLUMNS, f"{path} has no column of labels")
        given = [(row.get(what) or "").strip() for row in rows]
        labels, order, wrong = _class_labels(path, given, classes, outputs)
        problems = wrong | problems
    elif labelled:
        order = tuple(classes) if classes is not None else tuple(name for name in heading if name != where)
        absent = [name for name in order if name not in heading]
        if absent or not order:
            raise DataError(f"{path} has no column for {', '.join(absent) or 'labels'}; found {', '.join(heading)}.")
        labels, wrong = _number_labels([[row.get(name) or "" for name in order] for row in rows], likelihood)
        problems = wrong | problems
    paths = tuple(path.parent / text for text in texts)
    return Pictures(str(path), paths, tuple(texts), labels, order, problems, intake)


def _column(heading: Sequence[str], known: Sequence[str], message: str) -> str:
    found = next((name for name in heading if name.strip().lower() in known), None)
    if found is None:
        raise DataError(
            f"{message}: expected one called {', '.join(known)}; found {', '.join(heading) or 'nothing'}. A CSV lists image files; "
            f"save tables of numbers as .npz: numpy.savez('data.npz', x=inputs, y=labels)."
        )
    return found


def _class_labels(
    path: Path, given: Sequence[str], classes: Sequence[str] | None, outputs: int | None
) -> tuple[Tensor, tuple[str, ...] | None, dict[int, str]]:
    # Class indices, names in their order, and what is wrong with a row.
    order = tuple(classes) if classes is not None else None
    if order is None and sum(map(_is_whole, given)) <= sum(map(bool, given)) / 2:  # most are names
        order = tuple(sorted({text for text in given if text}))
        if outputs is not None and len(order) != outputs:
            raise DataError(
                f"{path} has {len(order)} names of classes ({', '.join(order[:5])}{', ...' if len(order) > 5 else ''}) for networks "
                f"with {outputs} outputs, whose order is not known: give numbers from 0, or `mola fit --classes` with all names."
            )
    number = {name: index for index, name in enumerate(order or ())}
    # Where names are numbers themselves, "1" cannot be both a name and an index.
    by_index = not any(_is_whole(name) for name in number)
    most = len(order) if order is not None else outputs or MOST_CLASSES
    labels, problems = torch.full((len(given),), BAD_ROW, dtype=torch.int64), {}
    for place, text in enumerate(given):
        if text in number:
            labels[place] = number[text]
        elif by_index and _is_whole(text) and int(text) < most:
            labels[place] = int(text)
        else:
            problems[place] = (
                f"has the label {text!r}, which is not one of the {most} classes" if text else "has no label"
            )
    return labels, order, problems


def _number_labels(cells: Sequence[Sequence[str]], likelihood: Likelihood) -> tuple[Tensor, dict[int, str]]:
    # Numbers (n, C), NaN where a cell is empty, and what is wrong with a row.
    labels, problems = torch.full((len(cells), len(cells[0])), math.nan, dtype=torch.float64), {}
    for place, row in enumerate(cells):
        for column, cell in enumerate(row):
            text = cell.strip().lower()
            try:
                labels[place, column] = WORDS[text] if text in WORDS else float(text)
            except ValueError:
                problems[place] = f"has the label {cell!r}, which is not a number"
            if not text and not likelihood.classification:
                problems[place] = "has no target"
    return labels, problems


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def shown_by(pictures: Pictures) -> tuple[str, tuple[int, ...]]:
    """Return the mode ("RGB" or "L") and shape (channels, height, width) after preparation that most of 25 images have."""
    from PIL import Image

    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    first = ""
    for place in even_places(len(pictures.paths), min(LOOKED_AT, len(pictures.paths))).tolist():
        path, mode = pictures.paths[place], pictures.intake.mode
        if mode is None and path.is_file():
            try:
                with Image.open(path) as image:
                    mode = "L" if image.mode in GREY else "RGB"
            except Exception:  # `read_pixels` returns the reason
                mode = "RGB"
        pixels, words = read_pixels(path, replace(pictures.intake, mode=mode or "RGB", shape=None))
        if pixels is not None:
            found[mode or "RGB", tuple(pixels.shape)] += 1
        first = first or f" The first: {pictures.names[place]}: {words}."
    if not found:
        raise DataError(f"{pictures.name} holds no image that can be decoded.{first}")
    return found.most_common(1)[0][0]
