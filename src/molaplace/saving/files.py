"""Files that nobody loses. `replacing` writes a set of files to a folder, and `check_folder` decides whether it may.

A marker in the folder, `.molaplace.json`, lists the files that molaplace wrote, with their checksums. Only these files are ever replaced
or removed, and only while their content is unchanged; every other file belongs to the user.

The files are first written to a temporary folder. Then those with new names are moved to their places, and finally the file that makes
the set complete, such as "posterior.json", atomically replaces its predecessor. If any other file of the old set has to be replaced, this
file is removed beforehand. Thus a process that is killed at any point leaves the old set, the new one, or one without this file, which
cannot be opened, and the marker lists the files of both. Several processes may save to one folder at the same time: they take turns, and
the last one wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from molaplace.errors import StorageError
from molaplace.options import listed
from molaplace.saving.schema import check, check_seal, parse, sealed
from molaplace.structures.base import free_memory

FORMAT = "molaplace"
VERSION = 1
DOCUMENT = "posterior.json"
TENSORS = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
"""Names of the files that `write_folder` writes beside the document. No other file is ever read."""

MARKER = ".molaplace.json"
LOCK = ".lock"
"""Ending of the file beside a marker that is locked while files are put in place."""

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


@dataclass(frozen=True)
class Marker:
    """What molaplace has written to a folder."""

    kind: str | None = None
    """What the files are together, such as "posterior", or None if molaplace has written nothing."""
    files: Mapping[str, list[str]] = field(default_factory=dict)
    """Checksums of each file, keyed by its name relative to the folder. A save that was killed leaves the old and the new one."""

    @classmethod
    def parse(cls, content: bytes, name: object) -> Marker:
        """Read a marker; raise `StorageError` if it is damaged."""
        document = parse(content, name)
        check(document, {"kind": str, "files": {str: [str]}}, "")
        return cls(document["kind"], document["files"])

    @classmethod
    def read(cls, path: Path) -> Marker:
        """Read a folder's marker. If it is missing or damaged, nothing counts as written by molaplace."""
        try:
            return cls.parse(read_file(path, MAX_DOCUMENT), path)
        except StorageError:
            return cls()

    def replaceable(
        self,
        place: object,
        kind: str,
        present: Mapping[str, str | None],
        new: Mapping[str, str],
        *,
        visible: Sequence[str],
        overwrite: bool,
    ) -> set[str]:
        """Return the names of the files in a place that may be replaced or removed by a new set of files.

        Raises `StorageError` if the place has other content than an older set of this kind and `overwrite` is False, or if a new file
        would replace a file that molaplace did not write.

        Args:
            place: the folder or repository, for messages.
            kind: what the new files are together.
            present: checksum of what has each of these names: None if there is nothing, and "" for anything but a file.
            new: checksums of the new files.
            visible: names of files and folders in the place, apart from hidden ones.
            overwrite: whether to write even if the place has other content.
        """
        if visible and self.kind != kind and not overwrite:
            content = f"a saved {self.kind}" if self.kind else f"other files ({listed(visible, 3)})"
            raise StorageError(
                f"{place} contains {content} but no saved {kind}. Choose another folder, or pass overwrite=True (--overwrite), which "
                f"replaces only what molaplace has written there."
            )
        ours = {name for name, checksum in present.items() if checksum in self.files.get(name, ())}
        in_the_way = [name for name in new if present[name] not in (None, new[name]) and name not in ours]
        if in_the_way:
            raise StorageError(
                f"{place} contains {listed(in_the_way, 3)}, which molaplace did not write or which was changed since, so it is not "
                f"replaced. Move or rename it, or choose another folder."
            )
        return ours


def check_folder(
    folder: Path,
    kind: str,
    new: Mapping[str, str] | Iterable[str],
    *,
    overwrite: bool = False,
    marker: str = MARKER,
    ignored: Collection[str] = (),
) -> tuple[Marker, dict[str, str | None], set[str]]:
    """Raise `StorageError` if a set of files cannot be written to a folder without loss; see `Marker.replaceable`.

    Before the work, pass the names of the main files, and afterwards the checksums of all files. A marker of another name belongs to a
    single file and those that go with it, which may lie beside any other files.

    Returns:
        The marker, the checksums of the files that are present, and the names of those that may be replaced or removed.
    """
    before = Marker.read(folder / marker)
    compared = (*before.files, *new) if isinstance(new, Mapping) else tuple(new)
    new = new if isinstance(new, Mapping) else dict.fromkeys(compared, "unknown")
    try:
        names = [path.name for path in folder.iterdir()] if marker == MARKER else []
    except FileNotFoundError:
        names = []
    except NotADirectoryError as error:
        raise StorageError(f"{folder} is a file; expected a folder. Choose another folder.") from error
    present = {name: _checksum_of(folder, name) for name in compared}
    visible = sorted(name for name in names if not name.startswith(".") and name not in ignored)
    return before, present, before.replaceable(folder, kind, present, new, visible=visible, overwrite=overwrite)


def _checksum_of(folder: Path, name: str) -> str | None:
    # A folder, a file where a folder should be, and a name or a link that leads out of the folder count as something else than a file.
    path = folder / name
    if path.is_file() and folder.resolve() in path.resolve().parents:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    return None if nearest != path and nearest.is_dir() else ""


@contextmanager
def replacing(
    folder: Path, kind: str, last: Sequence[str], *, overwrite: bool = False, marker: str = MARKER
) -> Iterator[Path]:
    """Yield an empty folder. On success, the files written there replace the older set of files in `folder`; on error, nothing changes.

    Args:
        folder: the folder to write to; it is created if it does not exist.
        kind: what the files are together; see `Marker`.
        last: names of files that are put in place at the end, in this order. Without the first, the set counts as incomplete.
        overwrite: see `Marker.replaceable`.
        marker: name of the marker; see `check_folder`.
    """
    try:
        check_folder(folder, kind, last, overwrite=overwrite, marker=marker)
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            new = Path(temporary, "new")
            new.mkdir()
            yield new
            with FileLock(folder / f"{marker}{LOCK}", mode=0o666):  # other users may share the folder
                _replace(new, folder, kind, last, marker, overwrite=overwrite)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written ({error.strerror or error}). Free some disk space, or choose another folder."
        ) from error


def _replace(new: Path, folder: Path, kind: str, last: Sequence[str], marker: str, *, overwrite: bool) -> None:
    checksums = {}
    for path in sorted(path for path in new.rglob("*") if path.is_file()):
        with open(path, "rb+") as file:
            checksums[path.relative_to(new).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
    before, present, ours = check_folder(folder, kind, checksums, overwrite=overwrite, marker=marker)
    either = {name: before.files.get(name, []) for name in ours}
    either |= {name: [*either.get(name, ()), checksum] for name, checksum in checksums.items()}
    _write_marker(folder / marker, kind, either)
    with ExitStack() as undo:

        def move(source: Path, destination: Path) -> None:
            destination.parent.mkdir(parents=True, exist_ok=True)
            source.rename(destination)
            undo.callback(destination.rename, source)

        changed = [name for name in checksums if name not in last and present[name] != checksums[name]]
        obsolete = ours - checksums.keys()
        if any(present[name] is not None for name in changed):  # the new set would be mixed with the old one
            for name in (last[0], *changed, *obsolete):
                if present[name] is not None:
                    move(folder / name, new.with_name("old") / name)
        for name in changed:
            move(new / name, folder / name)
        (new / last[0]).replace(folder / last[0])
        undo.pop_all()
    for name in last[1:]:
        (new / name).replace(folder / name)
    _remove(folder, obsolete)
    _write_marker(folder / marker, kind, {name: [checksum] for name, checksum in checksums.items()})


def _write_marker(path: Path, kind: str, files: Mapping[str, list[str]]) -> None:
    write_atomically(path, json.dumps({"kind": kind, "files": files}, indent=2).encode())


def _remove(folder: Path, names: Iterable[str]) -> None:
    # Remove files, and the folders that become empty.
    for name in names:
        (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # a folder that is not empty stays
            for parent in PurePosixPath(name).parents:
                (folder / parent).rmdir()


def marker_of(name: str) -> str:
    """Return the name of the marker of a single file and those that go with it."""
    return f".{name}{MARKER}"


def remove_folder(folder: Path) -> None:
    """Remove the files that molaplace has written to a folder, and then the folder if it is empty."""
    before = Marker.read(folder / MARKER)
    _remove(folder, [name for name in before.files if _checksum_of(folder, name) in before.files[name]])
    _remove(folder, [MARKER, f"{MARKER}{LOCK}"])


def write_folder(
    directory: str | Path, document: Mapping[str, Any], tensors: Mapping[str, Tensor], *, overwrite: bool = False
) -> Path:
    """Save a document and its tensors to a folder, and return the folder's path.

    The folder is created if it does not exist. Its previous content stays readable until everything has been written. The document
    must have a "kind" entry, such as "swag". A folder with other content is refused; see `Marker.replaceable`.
    """
    folder = Path(directory)
    with replacing(folder, document["kind"], (DOCUMENT,), overwrite=overwrite) as new:
        write_document(new, document, tensors)
    return folder


def write_document(folder: Path, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a document and its tensors to an empty folder. The name of the tensors' file depends on their content."""
    content = save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    checksum = hashlib.sha256(content).hexdigest()
    entry = {"file": f"tensors-{checksum[:16]}.safetensors", "sha256": checksum}
    complete = sealed({"format": FORMAT, "version": VERSION, **document, "tensors": entry})
    text = json.dumps(complete, indent=2, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / entry["file"]).write_bytes(content)
    (folder / DOCUMENT).write_text(text, encoding="utf-8")


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
