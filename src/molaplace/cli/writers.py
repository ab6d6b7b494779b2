"""Write predictions to files batch by batch, as tables or archives of arrays.

A file gets its final name only when it is complete. After an error or Ctrl-C, no file is left behind.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from molaplace.data.dataset import InputBatch
from molaplace.errors import DataError, OptionError
from molaplace.saving.files import check_writable, partial_file

TABLES = (".csv", ".jsonl", ".parquet")
ARRAYS = ".npz"


class OutputBatch(NamedTuple):
    """Predictions for a batch."""

    rows: InputBatch
    """Names and errors of all inputs."""
    content: Any = None
    """Data frame or arrays by name, with a row for each usable input; None if no input is usable."""
    sums: dict[str, Any] | None = None
    """Sums over the usable inputs; None if no input is usable."""


def check_output(output: Path, data: str) -> None:
    """Raise `OptionError` before any work begins if the output cannot be written or is the input file."""
    source = Path(data).expanduser()
    if output.exists() and source.exists() and output.samefile(source):
        raise OptionError(f"{output} is the input file, which would be overwritten. Choose another --output.")
    if output.suffix not in (*TABLES, ARRAYS):
        raise OptionError(
            f"--output must be a file name that ends in one of {', '.join((*TABLES, ARRAYS))}; got {output}."
        )
    if output.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise OptionError(
            f"{output}: Parquet files need pyarrow, which is not installed. Install it with: pip install pyarrow"
        )
    if output.is_dir():
        raise OptionError(f"{output} is a folder. Choose a file name for --output.")
    check_writable(output)


@contextmanager
def open_writer(output: Path, names: Sequence[str]) -> Iterator[Writer]:
    """Yield a writer for the file type of the output. The file gets its final name only if the block ends without an error."""
    with partial_file(output) as partial, ExitStack() as stack:
        tables = output.suffix != ARRAYS
        writer = TableWriter(partial, output.suffix, stack) if tables else ArrayWriter(partial, names, stack)
        yield writer
        writer.finish()


class Writer(ABC):
    """Base class for writers that receive predictions in batches.

    Batches are held back until a batch that contains a usable input determines the columns.
    """

    def __init__(self) -> None:
        self.first: Any = None
        """Content of the first batch that contains a usable input."""
        self.waiting: list[OutputBatch] = []

    def add(self, batch: OutputBatch) -> None:
        """Write a batch, or hold it back until the columns are known."""
        self.waiting.append(batch)
        if self.first is None:
            self.first = batch.content
        if self.first is not None:
            for waiting in self.waiting:
                self.write(waiting)
            self.waiting = []

    @abstractmethod
    def write(self, batch: OutputBatch) -> None:
        """Write a row for each input in a batch."""

    def finish(self) -> None:  # noqa: B027  (a table is complete after its last row)
        """Complete the file."""


class TableWriter(Writer):
    """Writer for tables in CSV, JSON Lines or Parquet format. The cells of unusable inputs are left empty."""

    def __init__(self, path: Path, suffix: str, stack: ExitStack) -> None:
        super().__init__()
        self.path = path
        self.stack = stack
        self.put = {".csv": self._csv, ".jsonl": self._json_lines, ".parquet": self._parquet}[suffix]
        self.stream: Any = None
        if suffix != ".parquet":
            self.stream = stack.enter_context(path.open("w", newline="", encoding="utf-8"))

    def write(self, batch: OutputBatch) -> None:
        """Write the data frame of a batch."""
        import pandas

        usable = [row for row, error in enumerate(batch.rows.errors) if error is None]
        kinds = {"i": "Int64", "b": "boolean", "f": "float64"}  # pandas types that allow missing values
        table = self.first[:0] if batch.content is None else batch.content.set_axis(usable)
        table = table.astype({name: kinds.get(kind.kind, object) for name, kind in table.dtypes.items()})
        frame = table.reindex(range(len(batch.rows.names)))
        frame.insert(0, "name", pandas.Series(batch.rows.names, dtype=object))
        self.put(frame.assign(error=pandas.Series(batch.rows.errors, dtype=object)))

    def _csv(self, frame: Any) -> None:
        for name in frame.select_dtypes("boolean"):
            frame[name] = frame[name].astype(object).map({True: "true", False: "false"})
        if "set" in frame:
            frame["set"] = frame["set"].map("|".join, na_action="ignore")
        begins = self.stream.tell() == 0
        frame.to_csv(self.stream, header=begins, index=False, float_format="%.9g", lineterminator="\n")

    def _json_lines(self, frame: Any) -> None:
        frame.to_json(self.stream, orient="records", lines=True, force_ascii=False, double_precision=15)

    def _parquet(self, frame: Any) -> None:
        import pyarrow
        from pyarrow.parquet import ParquetWriter

        if self.stream is None:
            kinds = {"Int64": pyarrow.int64(), "boolean": pyarrow.bool_(), "float64": pyarrow.float64()}
            texts = {"set": pyarrow.list_(pyarrow.string())}
            schema = [
                (name, kinds.get(str(kind)) or texts.get(name, pyarrow.string())) for name, kind in frame.dtypes.items()
            ]
            self.stream = self.stack.enter_context(ParquetWriter(self.path, pyarrow.schema(schema)))
        self.stream.write_table(pyarrow.Table.from_pandas(frame, self.stream.schema, preserve_index=False))


class ArrayWriter(Writer):
    """Writer for archives with an array for each field. For unusable inputs, values are NaN, or -1 in integer arrays.

    Fields are collected in temporary files, so that memory use does not grow with the data.
    """

    def __init__(self, path: Path, names: Sequence[str], stack: ExitStack) -> None:
        super().__init__()
        self.path = path
        self.stack = stack
        self.spool = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="molaplace-")))
        self.texts: dict[str, list[str]] = {"name": [], "error": [], "classes": list(names)}
        self.files: dict[str, Any] = {}

    def write(self, batch: OutputBatch) -> None:
        """Append the values from a batch to each field's file."""
        self.texts["name"] += batch.rows.names
        self.texts["error"] += [error or "" for error in batch.rows.errors]
        usable = np.array([error is None for error in batch.rows.errors])
        for name, form in self.first.items():
            values = np.full((len(usable), *form.shape[1:]), -1 if form.dtype.kind == "i" else np.nan, form.dtype)
            if batch.content is not None:
                rows = batch.content[name]
                if rows.shape[1:] != form.shape[1:]:
                    raise DataError(
                        f"{batch.rows.names[0]} has a map of size {rows.shape[1:]}, but earlier inputs have maps of size "
                        f"{form.shape[1:]}. Resize the inputs, or make predictions for each size separately."
                    )
                values[usable] = rows
            if name not in self.files:
                self.files[name] = self.stack.enter_context((self.spool / name).open("wb"))
            self.files[name].write(values.tobytes())

    def finish(self) -> None:
        """Pack the fields into the archive."""
        fields: dict[str, Any] = {name: np.array(texts, dtype=np.str_) for name, texts in self.texts.items()}
        for name, file in self.files.items():
            file.close()
            form = self.first[name]
            shape = (len(self.texts["name"]), *form.shape[1:])
            fields[name] = np.memmap(self.spool / name, form.dtype, "r", shape=shape)
        with self.path.open("wb") as stream:
            np.savez_compressed(stream, **fields)
