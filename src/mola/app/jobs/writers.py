"""Files of predictions, written in pieces: tables, archives of arrays, and folders of pictures.

Files appear under their names only when complete; an error or Ctrl-C leaves no file behind.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mola.app.jobs.columns import Sums
from mola.app.jobs.pictures import require_pillow
from mola.app.jobs.rows import Rows
from mola.app.options import check_writable
from mola.errors import DataError, MissingExtraError, OptionError
from mola.saving.files import partial_file

TABLES = (".csv", ".jsonl", ".parquet")
ARRAYS = ".npz"

PICTURE_TABLE, PICTURE_KEY = "predictions.csv", "maps.json"
"""Files next to the pictures: means of each input, and the meaning of pixel values."""

PICTURES = ("label", "confidence", "entropy")
MOST_COLOURS = 256
"""Largest number of classes of a picture with 8 bits."""
DEEP = 2**16 - 1
"""Largest value of a picture with 16 bits."""


class Portion(NamedTuple):
    """The predictions of a batch."""

    rows: Rows
    """Names, errors and notes of all inputs."""
    table: Any = None
    """A data frame with a row for each usable input; None if there are none."""
    arrays: Mapping[str, NDArray[Any]] | None = None
    """Arrays of the usable inputs, for writers that need them."""
    sums: Sums | None = None
    """Sums over the usable inputs; None if there are none."""

    def frame(self, columns: Any) -> Any:
        """Return a data frame with a row for each input: "name", `columns`, and "error"; unusable inputs have empty cells."""
        import pandas

        usable = [place for place, error in enumerate(self.rows.errors) if error is None]
        kinds = {"i": "Int64", "b": "boolean", "f": "float64"}
        table = columns if self.table is None else self.table.set_axis(usable)
        table = table.astype({name: kinds.get(kind.kind, object) for name, kind in table.dtypes.items()})
        frame = table.reindex(range(len(self.rows.names)))
        frame.insert(0, "name", pandas.Series(self.rows.names, dtype=object))
        return frame.assign(error=pandas.Series(self.rows.errors, dtype=object))


class Writer(Protocol):
    """Takes predictions batch by batch."""

    def add(self, portion: Portion) -> None:
        """Write a batch."""

    def finish(self) -> None:
        """Write what is left."""


def check_output(output: Path, data: str) -> None:
    """Refuse an output that cannot be written, or that holds the data, before any work."""
    source = Path(data).expanduser()
    if output.exists() and source.exists() and output.samefile(source):
        raise OptionError(f"{output} holds the data, and would be overwritten: choose another --output.")
    if output.suffix not in (*TABLES, ARRAYS, ""):
        raise OptionError(
            f"{output} has the ending {output.suffix!r}: expected one of {', '.join((*TABLES, ARRAYS))}, or none for a folder of "
            f"pictures of dense outputs."
        )
    if find_spec("pandas") is None:
        raise MissingExtraError(feature="mola predict", package="pandas", extra="bench")
    if output.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise OptionError(f"{output}: writing Parquet needs pyarrow: pip install pyarrow.")
    if output.suffix and output.is_dir():
        raise OptionError(f"{output} is a folder: choose another --output.")
    check_writable(output)
    if not output.suffix and output.exists():
        holds_maps = output.is_dir() and ((output / PICTURE_KEY).is_file() or not any(output.iterdir()))
        if not holds_maps:
            raise OptionError(f"{output} exists, and does not hold maps of an earlier run: choose another --output.")


@contextmanager
def open_writer(output: Path, names: Sequence[str]) -> Iterator[Writer]:
    """A writer by the ending of the output; the file or folder is put in place when the context ends without an error."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        writer: Writer
        if not output.suffix:
            writer = PictureWriter(stack.enter_context(_partial_folder(output)), names, stack)
        elif output.suffix == ARRAYS:
            partial = stack.enter_context(partial_file(output))
            spool = stack.enter_context(tempfile.TemporaryDirectory(prefix="mola-"))
            writer = ArrayWriter(partial, Path(spool), names, stack)
        else:
            writer = TableWriter(stack.enter_context(partial_file(output)), output.suffix, stack)
        yield writer
        writer.finish()


@contextmanager
def _partial_folder(output: Path) -> Iterator[Path]:
    partial = output.with_name(f".{output.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir()
        yield partial
        old = output.with_name(f".{output.name}.{uuid.uuid4().hex}.old")
        if output.exists():
            output.rename(old)
        partial.rename(output)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class TableWriter:
    """A table: CSV, JSON lines, or Parquet."""

    def __init__(self, path: Path, form: str, stack: ExitStack) -> None:
        self.path, self.form, self.stack = path, form, stack
        self.columns: Any = None
        self.waiting: list[Portion] = []
        self.stream: Any = None
        if form != ".parquet":
            self.stream = stack.enter_context(path.open("w", newline="", encoding="utf-8"))

    def add(self, portion: Portion) -> None:
        """Write a row for each input, as soon as the columns are known."""
        self.waiting.append(portion)
        if portion.table is None and self.columns is None:
            return
        write = {".csv": self._csv, ".jsonl": self._json_lines, ".parquet": self._parquet}[self.form]
        first = self.columns is None
        if first:
            self.columns = portion.table[:0]
        for one in self.waiting:
            write(one.frame(self.columns), first)
            first = False
        self.waiting = []

    def finish(self) -> None:
        """Do nothing: every batch has been written."""

    def _csv(self, frame: Any, first: bool) -> None:
        for name, kind in frame.dtypes.items():
            if kind == "boolean":
                frame[name] = frame[name].astype(object).map({True: "true", False: "false"})
        if "set" in frame:
            frame["set"] = frame["set"].map("|".join, na_action="ignore")
        frame.to_csv(self.stream, header=first, index=False, float_format="%.9g", lineterminator="\n")

    def _json_lines(self, frame: Any, first: bool) -> None:
        known = frame.astype(object).where(frame.notna(), None)
        for record in known.to_dict("records"):
            plain = {name: value for name, value in record.items() if value is not None}
            self.stream.write(json.dumps(plain, ensure_ascii=False) + "\n")

    def _parquet(self, frame: Any, first: bool) -> None:
        import pyarrow
        from pyarrow.parquet import ParquetWriter

        if first:
            kinds = {"Int64": pyarrow.int64(), "boolean": pyarrow.bool_(), "float64": pyarrow.float64()}
            texts = {"set": pyarrow.list_(pyarrow.string())}
            schema = [
                (name, kinds.get(str(kind)) or texts.get(name, pyarrow.string())) for name, kind in frame.dtypes.items()
            ]
            self.stream = self.stack.enter_context(ParquetWriter(self.path, pyarrow.schema(schema)))
        self.stream.write_table(pyarrow.Table.from_pandas(frame, self.stream.schema, preserve_index=False))


class ArrayWriter:
    """An archive with an array for each field; unusable inputs have NaN, or -1 in arrays of integers.

    Fields are collected in files of the temporary folder `spool` until their length is known.
    """

    def __init__(self, path: Path, spool: Path, names: Sequence[str], stack: ExitStack) -> None:
        self.path, self.spool, self.stack = path, spool, stack
        self.texts: dict[str, list[str]] = {"name": [], "error": [], "classes": list(names)}
        self.files: dict[str, IO[bytes]] = {}
        self.forms: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}

    def add(self, portion: Portion) -> None:
        """Append to each field."""
        self.texts["name"] += portion.rows.names
        self.texts["error"] += [error or "" for error in portion.rows.errors]
        for name, values in (portion.arrays or {}).items():
            if name not in self.forms:
                self.forms[name] = (values.dtype, values.shape[1:])
                self.files[name] = self.stack.enter_context((self.spool / name).open("w+b"))
            if values.shape[1:] != self.forms[name][1]:
                raise DataError(
                    f"{portion.rows.names[0]} has a map of size {values.shape[1:]}, and earlier inputs have {self.forms[name][1]}: "
                    f"an array holds maps of one size. Write pictures to a folder (--output maps), or resize the inputs."
                )
            self.files[name].write(values.tobytes())

    def finish(self) -> None:
        """Pack the fields into the archive."""
        with zipfile.ZipFile(self.path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, (dtype, shape) in self.forms.items():
                descr, count = np.lib.format.dtype_to_descr(dtype), len(self.texts["name"])
                size = math.prod(shape) * dtype.itemsize
                blank = np.full(shape, -1 if dtype.kind == "i" else np.nan, dtype).tobytes()
                self.files[name].seek(0)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as target:
                    header = {"descr": descr, "fortran_order": False, "shape": (count, *shape)}
                    np.lib.format.write_array_header_1_0(target, header)
                    for error in self.texts["error"]:
                        target.write(blank if error else self.files[name].read(size))
            for name, texts in self.texts.items():
                with archive.open(f"{name}.npy", "w") as target:
                    np.lib.format.write_array(target, np.array(texts, dtype=np.str_), allow_pickle=False)


class PictureWriter:
    """A folder with pictures of the labels, the confidence and the entropy of each input, and a table of means."""

    def __init__(self, folder: Path, names: Sequence[str], stack: ExitStack) -> None:
        require_pillow()
        self.folder, self.names, self.taken = folder, list(names), set[str]()
        self.table = TableWriter(folder / PICTURE_TABLE, ".csv", stack)
        for part in PICTURES:
            (folder / part).mkdir()

    def add(self, portion: Portion) -> None:
        """Write the pictures and the rows."""
        if portion.table is not None and portion.arrays is not None:
            usable = [
                name for name, error in zip(portion.rows.names, portion.rows.errors, strict=True) if error is None
            ]
            files = [self._free(name) for name in usable]
            for place, file in enumerate(files):
                for part in PICTURES:
                    self._picture(part, portion.arrays[part][place]).save(self.folder / part / file)
            portion = portion._replace(table=portion.table.assign(picture=files))
        self.table.add(portion)

    def finish(self) -> None:
        """Write the meaning of the pixel values."""
        bits = "8 bits, with a palette" if len(self.names) <= MOST_COLOURS else "16 bits"
        key = {
            "classes": self.names,
            "label": f"index of the class, {bits}",
            "confidence": f"value / {DEEP}",
            "entropy": f"value / {DEEP} * {math.log(len(self.names)):.9g} nats, the entropy of a guess",
        }
        text = json.dumps(key, indent=2, ensure_ascii=False) + "\n"
        (self.folder / PICTURE_KEY).write_text(text, encoding="utf-8")

    def _free(self, name: str) -> str:
        # A file name that no other input has, without special characters.
        stem = re.sub(r"[^\w.\-]+", "_", re.sub(r"\.[A-Za-z]+$", "", name)).strip("._")[:150] or "input"
        number, found = 1, stem
        while found.lower() in self.taken:
            number += 1
            found = f"{stem}-{number}"
        self.taken.add(found.lower())
        return f"{found}.png"

    def _picture(self, part: str, values: NDArray[Any]) -> Any:
        from PIL import Image

        if part == "label" and len(self.names) <= MOST_COLOURS:
            picture = Image.fromarray(values.astype(np.uint8))
            picture.putpalette(_palette())
            return picture
        largest = {"label": DEEP, "confidence": 1.0, "entropy": math.log(len(self.names))}[part]
        return Image.fromarray(np.round(np.clip(values / largest, 0, 1) * DEEP).astype(np.uint16))


def _palette() -> list[int]:
    # The palette of PASCAL VOC: the bits of a class, dealt to red, green and blue.
    colours = []
    for index in range(MOST_COLOURS):
        rest, colour = index, [0, 0, 0]
        for bit in range(7, -1, -1):
            for channel in range(3):
                colour[channel] |= ((rest >> channel) & 1) << bit
            rest >>= 3
        colours += colour
    return colours
