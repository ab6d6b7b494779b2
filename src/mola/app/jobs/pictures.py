"""Image files as a set: a folder with a subfolder for each class, a folder of images, or a CSV of paths and labels."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mola.app.jobs.preparation import Intake
from mola.app.jobs.rows import Rows, readable
from mola.errors import DataError, MissingExtraError
from mola.lab.data.folder import ENDINGS, image_files
from mola.lab.data.images import even_places
from mola.likelihoods import Likelihood

PATH_COLUMNS = ("path", "file", "filename", "image", "image_path")
LABEL_COLUMNS = ("label", "class", "target", "y")
GREY = frozenset({"1", "L", "I", "I;16", "F", "LA"})
"""Pillow's modes without colour."""

LOOKED_AT = 25
"""Images, evenly spaced, that show what the others should look like."""

MOST_CLASSES = 2**31
"""Numbers from here on are no classes, where nobody knows how many there are."""

BAD_ROW = -1
"""Label of a row whose error is in `problems`."""


@dataclass(frozen=True)
class Pictures:
    """Image files with their labels, decoded batch by batch.

    Attributes:
        name: as the user named them.
        paths: of the files.
        names: what each is called in messages and results.
        labels: class indices, or None where the set has none.
        classes: names that the set itself gives to the classes.
        problems: why a row cannot be used, by its place, known before the file is opened.
        intake: from a file to an input.
    """

    name: str
    paths: tuple[Path, ...]
    names: tuple[str, ...]
    labels: Tensor | None
    classes: tuple[str, ...] | None
    problems: dict[int, str]
    intake: Intake

    @property
    def count(self) -> int:
        """How many."""
        return len(self.paths)

    def taken_by(self, intake: Intake) -> Pictures:
        """The same files, prepared otherwise."""
        return replace(self, intake=intake)

    def __iter__(self) -> Iterator[Rows]:
        size = self.intake.batch_size
        starts = range(0, len(self.paths), size)
        if self.intake.workers == 0:
            for start in starts:
                yield self._rows(start, [self._decode(place) for place in self._places(start)])
            return
        with ThreadPoolExecutor(self.intake.workers) as pool:
            ahead = [pool.submit(self._decode, place) for place in self._places(0)]
            try:
                for start in starts:
                    current = ahead
                    ahead = [pool.submit(self._decode, place) for place in self._places(start + size)]
                    yield self._rows(start, [future.result() for future in current])
            finally:
                for future in ahead:
                    future.cancel()

    def _places(self, start: int) -> range:
        return range(min(start, len(self.paths)), min(start + self.intake.batch_size, len(self.paths)))

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
    """The pixels of one file and a word on them, or None and why there are none."""
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
    """Ask for Pillow before a long computation gets as far as the first image."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(feature="reading image files", package="pillow", extra="bench") from error


def list_folder(root: Path, classes: Sequence[str] | None, intake: Intake, *, labelled: bool) -> Pictures:
    """List a folder of images.

    Args:
        root: with a subfolder for each class, or with images alone.
        classes: the classes' names in the order of the networks' outputs; None takes the subfolders' in alphabetical order.
        intake: from a file to an input.
        labelled: whether labels are asked for.

    Returns:
        The images, none of them decoded yet.
    """
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
            f"{root} has the subfolder {unknown[0]!r}, which is none of the {len(order)} classes ({', '.join(order[:5])}"
            f"{', ...' if len(order) > 5 else ''}). Name the subfolders like the classes, or name the classes, in the order of "
            f"the networks' outputs, with --classes."
        )
    number = {name: index for index, name in enumerate(order)}
    listed = [(path, number[folder.name]) for folder in subfolders for path in image_files(folder)]
    listed += [(path, BAD_ROW) for path in loose]
    problems = {place: "lies in no class's subfolder" for place, (_, label) in enumerate(listed) if label == BAD_ROW}
    paths = [path for path, _ in listed]
    labels = torch.tensor([label for _, label in listed], dtype=torch.int64)
    return Pictures(str(root), tuple(paths), _names(paths, root), labels, order, problems, intake)


def list_file(path: Path, intake: Intake) -> Pictures:
    """One image, without a label."""
    require_pillow()
    return Pictures(str(path), (path,), (path.name,), None, None, {}, intake)


def _names(paths: Sequence[Path], root: Path) -> tuple[str, ...]:
    # A name that is not UTF-8 can be opened but not written: its bytes are shown as escapes.
    return tuple(os.fsencode(path.relative_to(root).as_posix()).decode(errors="backslashreplace") for path in paths)


def list_csv(
    path: Path, classes: Sequence[str] | None, intake: Intake, *, labelled: bool, outputs: int | None = None
) -> Pictures:
    """List the images that a CSV file names, with their labels.

    Args:
        path: a CSV with a heading; a column for paths, relative to its folder, and one for labels.
        classes: the classes' names in the order of the networks' outputs; None takes numbers, or names in alphabetical order.
        intake: from a file to an input.
        labelled: whether labels are asked for.
        outputs: how many classes there are, where that is known.

    Returns:
        The images, none of them decoded yet.
    """
    heading, rows = _read_csv(path)
    where = _column(heading, PATH_COLUMNS)
    what = _column(heading, LABEL_COLUMNS)
    if where is None or (labelled and what is None):
        wanted, known = ("paths", PATH_COLUMNS) if where is None else ("labels", LABEL_COLUMNS)
        raise DataError(
            f"{path} has no column of {wanted}: expected one called {', '.join(known)}; found {', '.join(heading) or 'nothing'}."
        )
    texts, paths, problems = _files(path, rows, where)
    if not labelled or what is None:
        return Pictures(str(path), tuple(paths), tuple(texts), None, None, problems, intake)
    given = [(row.get(what) or "").strip() for row in rows]
    order = tuple(classes) if classes is not None else None
    if order is None and sum(map(_is_whole, given)) <= sum(map(bool, given)) / 2:  # most are names
        order = tuple(sorted({text for text in given if text}))
        if outputs is not None and len(order) != outputs:
            raise DataError(
                f"{path} has {len(order)} names of classes ({', '.join(order[:5])}{', ...' if len(order) > 5 else ''}) for networks "
                f"with {outputs} outputs, whose order is not known: give numbers from 0, or `mola fit --classes` with all names."
            )
    number = {name: index for index, name in enumerate(order or ())}
    # Where names are numbers themselves, "1" cannot be both a name and a place.
    by_place = not any(_is_whole(name) for name in number)
    most = len(order) if order is not None else outputs or MOST_CLASSES
    labels = torch.full((len(given),), BAD_ROW, dtype=torch.int64)
    for place, text in enumerate(given):
        if text in number:
            labels[place] = number[text]
        elif by_place and _is_whole(text) and int(text) < most:
            labels[place] = int(text)
        else:
            words = f"has the label {text!r}, which is none of the {most} classes" if text else "has no label"
            problems.setdefault(place, words)
    return Pictures(str(path), tuple(paths), tuple(texts), labels, order, problems, intake)


def _read_csv(path: Path) -> tuple[list[str], list[dict[str, str | None]]]:
    require_pillow()
    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            heading, rows = list(reader.fieldnames or []), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}.") from error
    if heading and not rows:
        raise DataError(f"{path} has a heading but no rows.")
    return heading, rows


def _files(
    path: Path, rows: Sequence[Mapping[str, str | None]], where: str
) -> tuple[list[str], list[Path], dict[int, str]]:
    # What a column names: texts, files relative to the CSV's folder, and rows that name none.
    texts = [(row.get(where) or "").strip() for row in rows]
    problems = {place: f"row {place + 2} names no file" for place, text in enumerate(texts) if not text}
    return texts, [path.parent / text for text in texts], problems


ANSWERS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0, "": math.nan}
"""Words for numbers in a CSV file; an empty cell is a label that is missing."""


def list_labels(
    path: Path, classes: Sequence[str] | None, intake: Intake, *, labelled: bool, likelihood: Likelihood
) -> Pictures:
    """List the images that a CSV file names, with a number for each output.

    Args:
        path: a CSV with a heading; a column for paths, relative to its folder, and one for each output: numbers, or yes and no.
        classes: the outputs' names, which are those of their columns; None takes all columns but that of the paths, in their order.
        intake: from a file to an input.
        labelled: whether labels are asked for.
        likelihood: says which numbers there can be.

    Returns:
        The images, none of them decoded yet.
    """
    heading, rows = _read_csv(path)
    where = _column(heading, PATH_COLUMNS)
    names = tuple(classes) if classes is not None else tuple(name for name in heading if name != where)
    absent = [name for name in names if name not in heading]
    if where is None or (labelled and (absent or not names)):
        wanted = f"of paths ({', '.join(PATH_COLUMNS)})" if where is None else f"for {', '.join(absent) or 'labels'}"
        raise DataError(f"{path} has no column {wanted}; found {', '.join(heading) or 'nothing'}.")
    texts, paths, problems = _files(path, rows, where)
    if not labelled:
        return Pictures(str(path), tuple(paths), tuple(texts), None, None, problems, intake)
    labels = torch.full((len(rows), len(names)), math.inf, dtype=torch.float64)
    for place, row in enumerate(rows):
        for column, name in enumerate(names):
            given = (row.get(name) or "").strip().lower()
            with suppress(ValueError):
                labels[place, column] = ANSWERS[given] if given in ANSWERS else float(given)
    for place in torch.nonzero(~readable(labels, likelihood)).flatten().tolist():
        cells = ", ".join(f"{name}={rows[place].get(name)!r}" for name in names[:5])
        problems.setdefault(place, f"has labels that likelihood {likelihood.name!r} does not take ({cells})")
    return Pictures(str(path), tuple(paths), tuple(texts), labels, names, problems, intake)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _column(heading: Sequence[str], known: Sequence[str]) -> str | None:
    return next((name for name in heading if name.strip().lower() in known), None)


def shown_by(pictures: Pictures) -> tuple[str, tuple[int, ...]]:
    """The commonest mode and shape among some of the images: what the networks were presumably trained on.

    Args:
        pictures: the training data.

    Returns:
        "RGB" or "L", and (channels, height, width) after preparation.
    """
    from PIL import Image

    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    first = ""
    for place in even_places(len(pictures.paths), min(LOOKED_AT, len(pictures.paths))).tolist():
        path, mode = pictures.paths[place], pictures.intake.mode
        if mode is None and path.is_file():
            try:
                with Image.open(path) as image:
                    mode = "L" if image.mode in GREY else "RGB"
            except Exception:  # `read_pixels` says what is wrong
                mode = "RGB"
        pixels, words = read_pixels(path, replace(pictures.intake, mode=mode or "RGB", shape=None))
        if pixels is not None:
            found[mode or "RGB", tuple(pixels.shape)] += 1
        first = first or f" The first: {pictures.names[place]}: {words}."
    if not found:
        raise DataError(f"{pictures.name} holds no image that can be decoded.{first}")
    return found.most_common(1)[0][0]
