"""Predictions as a file: CSV, JSON lines or npz, written row by row and put in place at the end.

Whatever the number of inputs, memory holds a batch: an archive's columns are kept in files until they are packed.
"""

from __future__ import annotations

import csv
import json
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from mola.errors import OptionError
from mola.saving.storage import partial_file

__all__ = ["FORMATS", "NUMBERS", "Writer", "open_writer"]

NUMBERS = ("confidence", "entropy", "epistemic", "ood_score")
FIELDS = ("name", "label", "class", *NUMBERS, "outlying", "error")
FORMATS = (".csv", ".jsonl", ".npz")
COPIED = 2**16
"""Rows or bytes that are moved at a time."""


class Writer(ABC):
    """Writes records to a file beside the one that is wanted, which it becomes when all went well.

    Args:
        path: the file that is wanted.
        classes: their names, for headings.
        probabilities: how many of them each record has; 0 for none.

    Raises:
        OptionError: if the folder cannot be written to.
    """

    def __init__(self, path: Path, classes: Sequence[str], probabilities: int) -> None:
        """Open a file beside the one that is wanted.

        Raises:
            OptionError: if the folder cannot be written to.
        """
        self.path, self.classes, self.probabilities = path, list(classes), probabilities
        self._held = ExitStack()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.partial = self._held.enter_context(partial_file(path))
            self.begin()
        except OSError as error:
            self._held.close()
            message = f"cannot write {path} ({error.strerror}): choose another --output."
            raise OptionError(message) from error

    def __enter__(self) -> Self:
        """Ready to write."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the file in place, or remove what was written if something went wrong."""
        try:
            self.end(whole=kind is None)
            if kind is None:
                self.partial.replace(self.path)
        finally:
            self._held.close()

    @abstractmethod
    def begin(self) -> None:
        """Open what is needed."""

    @abstractmethod
    def add(self, record: Mapping[str, Any]) -> None:
        """Write one record: `FIELDS` by name, None where there is nothing, and "probabilities"."""

    @abstractmethod
    def end(self, *, whole: bool) -> None:
        """Close what was opened; `whole` says whether the file is wanted."""


class CsvWriter(Writer):
    """A heading, and a line for each input."""

    def begin(self) -> None:
        """Write the heading."""
        self._stream = open(self.partial, "w", newline="", encoding="utf-8")  # noqa: SIM115 - closed by `end`
        self._writer = csv.writer(self._stream, lineterminator="\n")
        self._writer.writerow([*FIELDS, *(f"p_{name}" for name in self.classes[: self.probabilities])])

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a line."""
        values = record.get("probabilities") or [None] * self.probabilities
        self._writer.writerow([_cell(record[name]) for name in FIELDS] + [_cell(value) for value in values])

    def end(self, *, whole: bool) -> None:
        """Close the file."""
        self._stream.close()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


class JsonLinesWriter(Writer):
    """An object for each input; what there is not is left out."""

    def begin(self) -> None:
        """Open the file."""
        self._stream = open(self.partial, "w", encoding="utf-8")  # noqa: SIM115 - closed by `end`

    def add(self, record: Mapping[str, Any]) -> None:
        """Write an object."""
        known = {name: value for name, value in record.items() if value is not None}
        self._stream.write(json.dumps(known, ensure_ascii=False) + "\n")

    def end(self, *, whole: bool) -> None:
        """Close the file."""
        self._stream.close()


class NpzWriter(Writer):
    """An array for each field: nan, -1 and empty texts where there is nothing; and the classes' names."""

    def begin(self) -> None:
        """Open a file for each column."""
        self._folder = tempfile.TemporaryDirectory(prefix="mola-")
        self._columns: dict[str, IO[bytes]] = {}
        self._widest: dict[str, int] = {"name": 1, "error": 1}
        self.count = 0
        names = ["name", "label", *NUMBERS, "outlying", "error", *(["probabilities"] if self.probabilities else [])]
        for name in names:
            self._columns[name] = open(Path(self._folder.name) / name, "w+b")  # noqa: SIM115 - closed by `end`

    def add(self, record: Mapping[str, Any]) -> None:
        """Append to each column."""
        self.count += 1
        for name, column in self._columns.items():
            value = record.get(name)
            if name in self._widest:
                text = value or ""
                self._widest[name] = max(self._widest[name], len(text))
                column.write(json.dumps(text).encode() + b"\n")
            elif name == "label":
                column.write(np.int64(-1 if value is None else value).tobytes())
            elif name == "outlying":
                column.write(np.int8(-1 if value is None else value).tobytes())
            elif name == "probabilities":
                column.write(np.asarray(value or [np.nan] * self.probabilities, dtype=np.float64).tobytes())
            else:
                column.write(np.float64(np.nan if value is None else value).tobytes())

    def end(self, *, whole: bool) -> None:
        """Pack the columns into one archive."""
        try:
            if whole:
                with zipfile.ZipFile(self.partial, "w", zipfile.ZIP_DEFLATED) as archive:
                    for name, column in self._columns.items():
                        self._pack(archive, name, column)
                    with archive.open("classes.npy", "w") as target:
                        np.lib.format.write_array(target, np.array(self.classes, dtype=np.str_), allow_pickle=False)
        finally:
            for column in self._columns.values():
                column.close()
            self._folder.cleanup()

    def _pack(self, archive: zipfile.ZipFile, name: str, column: IO[bytes]) -> None:
        column.seek(0)
        kinds: dict[str, np.dtype[Any]] = {"label": np.dtype(np.int64), "outlying": np.dtype(np.int8)}
        dtype: np.dtype[Any] = (
            np.dtype(f"<U{self._widest[name]}") if name in self._widest else kinds.get(name, np.dtype(np.float64))
        )
        shape = (self.count, self.probabilities) if name == "probabilities" else (self.count,)
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        with archive.open(f"{name}.npy", "w", force_zip64=True) as target:
            np.lib.format.write_array_header_1_0(target, header)
            if name in self._widest:
                for texts in _texts(column):
                    target.write(np.array(texts, dtype=dtype).tobytes())
            else:
                while content := column.read(COPIED):
                    target.write(content)


def _texts(column: IO[bytes]) -> Iterator[list[str]]:
    texts: list[str] = []
    for line in column:
        texts.append(json.loads(line))
        if len(texts) == COPIED:
            yield texts
            texts = []
    if texts:
        yield texts


def open_writer(path: Path, classes: Sequence[str], probabilities: int) -> Writer:
    """What writes a file, by the ending of its name.

    Args:
        path: the file that is wanted.
        classes: their names, for headings.
        probabilities: how many of them each record has; 0 for none.

    Returns:
        The writer.

    Raises:
        OptionError: if the ending is unknown.
    """
    kinds: dict[str, type[CsvWriter | JsonLinesWriter | NpzWriter]] = {
        ".csv": CsvWriter,
        ".jsonl": JsonLinesWriter,
        ".npz": NpzWriter,
    }
    if path.suffix not in kinds:
        message = f"{path} has the ending {path.suffix!r}: expected one of {', '.join(FORMATS)}."
        raise OptionError(message)
    return kinds[path.suffix](path, classes, probabilities)
