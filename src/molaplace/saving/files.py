"""Folders that contain a JSON document and a safetensors file. A reader sees either the old or the new state, never a mixture.

First, the tensors are written to a file with a new random name. Then a document that refers to this file atomically replaces the old
document. Finally, the old document's tensors are removed. After a crash at any point, the folder can still be loaded; unused tensors
may stay behind.

Several processes may save to one folder at the same time: because no two saves share a name, none removes the tensors of another, and
the last document wins. A reader whose tensors disappear finds another document and reads again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from molaplace.errors import StorageError
from molaplace.saving.schema import check, check_seal, parse, sealed
from molaplace.structures.base import free_memory

FORMAT = "molaplace"
VERSION = 1
DOCUMENT = "posterior.json"
TENSORS = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
"""Names of the files that `write_folder` writes beside the document. No other file is ever read or removed."""

MAX_DOCUMENT = 2**26
"""Largest number of bytes of a document that is read."""


@contextmanager
def open_file(path: str | Path, limit: int | None = None) -> Iterator[BinaryIO]:
    """Open a file that may come from a stranger for reading.

    Raises `StorageError` unless it is a regular file of at most `limit` bytes (by default, the free memory). A device supplies data
    without end, and a pipe may never supply any.
    """
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"{path} is a folder, device or pipe; expected a file.")
        limit = free_memory() if limit is None else limit
        if limit is not None and status.st_size > limit:
            raise StorageError(
                f"{path} is too large to read: it has {status.st_size:,} bytes; expected at most {limit:,}."
            )
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.") from error


def read_file(path: str | Path, limit: int | None = None) -> bytes:
    """Return the content of a file; see `open_file`."""
    with open_file(path, limit) as file:
        return file.read(os.fstat(file.fileno()).st_size)


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`. On success, a file written there replaces `path` atomically; on error, it is removed.

    The folder of `path` is created if it does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file atomically, so that readers see either the old content or the new content in full."""
    with partial_file(path) as partial:
        partial.write_bytes(content)


@contextmanager
def replacing(target: Path, marker: str, folders: Collection[str] = ()) -> Iterator[Path]:
    """Yield an empty folder inside `target`. On success, the files and folders written there replace those of `target`.

    On an error, `target` is unchanged. Without its marker, such as "index.html", `target` counts as incomplete: the old marker is
    removed first and the new one is added last, so that even a process that is killed never leaves a mixture of the old and the new
    state under a marker. Of the old `folders`, those that the new state lacks are removed as well.
    """
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target, prefix=".saving-") as temporary, ExitStack() as undo:
        new = Path(temporary, "new")
        old = Path(temporary, "old")
        new.mkdir()
        old.mkdir()
        yield new
        names = sorted(({path.name for path in new.iterdir()} | set(folders)) - {marker})
        moves = [(target / name, old / name) for name in (marker, *names)]
        moves += [(new / name, target / name) for name in (*names, marker)]
        for source, destination in moves:
            if source.exists():
                source.rename(destination)
                undo.callback(destination.rename, source)
        undo.pop_all()


def write_folder(directory: str | Path, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Save a document and its tensors to a folder, and return the folder's path.

    The folder is created if it does not exist. Its previous content stays readable until everything has been written. The document
    must have a "kind" entry, such as "swag"; a folder of a different kind is not overwritten.
    """
    folder = Path(directory)
    _replaceable_tensors(folder, document["kind"])
    content = save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    name = f"tensors-{uuid.uuid4().hex[:16]}.safetensors"
    entry = {"file": name, "sha256": hashlib.sha256(content).hexdigest()}
    complete = sealed({"format": FORMAT, "version": VERSION, **document, "tensors": entry})
    text = json.dumps(complete, indent=2, allow_nan=False)
    write_atomically(folder / name, content)
    old = _replaceable_tensors(folder, document["kind"])  # again, because another process may have saved by now
    write_atomically(folder / DOCUMENT, text.encode())
    if old is not None:
        (folder / old).unlink(missing_ok=True)
    return folder


def _replaceable_tensors(folder: Path, kind: str) -> str | None:
    # Return the name of the tensors that will be replaced, or None if there is no valid document.
    try:
        document = read_document(folder)
    except StorageError:  # a missing or damaged document may be replaced
        return None
    if document["kind"] != kind:
        raise StorageError(
            f"{folder} contains a saved {document['kind']}, which cannot be replaced by a {kind}. Choose another folder, or remove "
            f"this one."
        )
    return str(document["tensors"]["file"])


def read_folder(
    directory: str | Path, kind: str, schema: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the document and the tensors in a folder. If the folder is being replaced, read again.

    Raises `StorageError` if a file is missing, damaged or not written by molaplace, or if the saved object's kind is not `kind`.
    """
    folder = Path(directory)
    while True:
        document = read_document(folder)
        if document["kind"] != kind:
            raise StorageError(
                f"expected a saved {kind}, but {folder} contains a saved {document['kind']}. Load posteriors with "
                f"mola.load, and baselines with the class that saved them."
            )
        check(document, dict(schema or {}), "")
        try:
            return document, _read_tensors(folder, document["tensors"])
        except StorageError:
            if read_document(folder) == document:  # no other process has replaced the tensors, so they are damaged
                raise


def kind_of(directory: str | Path) -> str | None:
    """Return the kind of object saved in a folder, such as "posterior" or "swag", or None if there is no document."""
    return str(read_document(directory)["kind"]) if (Path(directory) / DOCUMENT).exists() else None


def read_document(directory: str | Path) -> dict[str, Any]:
    """Read the document in a folder, but not the tensors.

    Raises `StorageError` if the document is missing or damaged, was not written by molaplace, or was written by a newer version.
    """
    path = Path(directory) / DOCUMENT
    try:
        content = read_file(path, MAX_DOCUMENT)
    except StorageError as error:
        raise StorageError(
            f"{directory} contains nothing that molaplace has saved: {error} Pass a folder written by save(...)."
        ) from error
    document = parse(content, path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StorageError(f"{path} was not written by molaplace: expected the entry 'format' to be {FORMAT!r}.")
    if document.get("version") != VERSION:
        raise StorageError(
            f"{path} has format version {document.get('version')!r}, but this version of molaplace reads only format version {VERSION}. "
            f"Update molaplace, or save the posterior again with the installed version."
        )
    check_seal(document, path)
    check(document, {"kind": str, "tensors": {"file": str, "sha256": str}}, "")
    if TENSORS.fullmatch(document["tensors"]["file"]) is None:
        raise StorageError(
            f"{path} is damaged: it refers to the file {document['tensors']['file']!r}, which molaplace did not write."
        )
    return document


def _read_tensors(folder: Path, entry: Mapping[str, str]) -> dict[str, Tensor]:
    path = folder / entry["file"]
    try:
        content = read_file(path)
    except StorageError as error:
        raise StorageError(f"{error} {DOCUMENT} refers to this file. Copy the whole folder again.") from error
    checksum = hashlib.sha256(content).hexdigest()
    if checksum != entry["sha256"]:
        raise StorageError(
            f"{path} is truncated or corrupt: its checksum is {checksum[:16]}..., but {entry['sha256'][:16]}... "
            f"was expected. Copy the folder again, or save the posterior again."
        )
    try:
        return load_tensors(content)
    except (SafetensorError, ValueError) as error:
        raise StorageError(f"{path} is not a safetensors file: {error}") from error
