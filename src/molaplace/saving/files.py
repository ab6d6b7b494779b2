"""Files that nobody loses. `replacing` writes a set of files to a folder, and `check_folder` decides whether it may.

A marker in the folder, `.molaplace.json`, lists the files that molaplace wrote, with their checksums. Only these files are ever replaced
or removed, and only while their content is unchanged; every other file belongs to the user.

The files are first written to a temporary folder. Then those with new names are moved to their places, and finally the file that makes
the set complete, such as "posterior.safetensors", atomically replaces its predecessor. If any other file of the old set has to be
replaced, this file is removed beforehand. Thus a process that is killed at any point leaves the old set, the new one, or one without this
file, which cannot be opened, and the marker lists the files of both. Several processes may save to one folder at the same time: they take
turns, and the last one wins.

What `write_folder` saves is one safetensors file, "<kind>.safetensors": tensors, and a JSON document in the file's metadata, which
contains a checksum of the whole file.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, BinaryIO

from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from molaplace.errors import OptionError, StorageError
from molaplace.options import listed
from molaplace.saving.schema import check, parse
from molaplace.structures.base import free_memory

FORMAT = "molaplace"
"""Name of the entry of a safetensors file's metadata that contains the document."""

VERSION = 1
NO_CHECKSUM = "0" * 64
"""What stands in the place of a file's checksum while the checksum is computed."""

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


def check_writable(path: Path) -> None:
    """Raise `OptionError` before any work begins if a file or folder cannot be created."""
    parents = (path, *path.absolute().parents)
    above = next(parent for parent in parents if parent.is_dir() or (parent != path and parent.exists()))
    try:
        # os.access is not reliable: for root, it reports that /proc is writable.
        with TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise OptionError(
            f"{path} cannot be written: {above} is not a writable folder. Choose another folder for the output."
        ) from error


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
        (folder / last[0]).parent.mkdir(exist_ok=True)
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


def file_name(kind: str) -> str:
    """Return the name of the file that contains a saved object of a kind, such as "posterior"."""
    return f"{kind}.safetensors"


def write_folder(
    directory: str | Path, document: Mapping[str, Any], tensors: Mapping[str, Tensor], *, overwrite: bool = False
) -> Path:
    """Save a document and its tensors to a file in a folder, and return the folder's path.

    The folder is created if it does not exist. Its previous content stays readable until everything has been written. The document
    must have a "kind" entry, such as "posterior". A folder with other content is refused; see `Marker.replaceable`.
    """
    folder = Path(directory)
    name = file_name(document["kind"])
    with replacing(folder, document["kind"], (name,), overwrite=overwrite) as new:
        (new / name).write_bytes(encode(document, tensors))
    return folder


def encode(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return a safetensors file whose metadata contain the document; the same content gives the same bytes."""
    text = json.dumps({"version": VERSION, "sha256": NO_CHECKSUM, **document}, allow_nan=False)
    values = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = save_tensors(values, {FORMAT: text})
    return content.replace(NO_CHECKSUM.encode(), hashlib.sha256(content).hexdigest().encode(), 1)


def read_folder(
    directory: str | Path, kind: str, schema: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the document and the tensors of an object of a kind that was saved in a folder.

    Raises `StorageError` if the file is missing, damaged or not written by molaplace.
    """
    path = Path(directory) / file_name(kind)
    try:
        content = read_file(path)
    except StorageError as error:
        saved = [other.stem for other in sorted(Path(directory).glob(file_name("*"))) if other != path]
        but = f", but a saved {listed(saved, 3)}" if saved else ""
        raise StorageError(
            f"{directory} contains no {kind}{but}: {error} Pass a folder written by save(...)."
        ) from error
    document, tensors = decode(content, path)
    check(document, {"kind": str, **(schema or {})}, "")
    if document["kind"] != kind:
        raise StorageError(f"expected a saved {kind}, but {path} contains a saved {document['kind']}.")
    return document, tensors


def decode(content: bytes, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the document and the tensors in a file from `encode`; raise `StorageError` if it is damaged or foreign."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, MAX_DOCUMENT):
        raise StorageError(f"{path} is truncated or corrupt, or not a safetensors file. Copy the file again.")
    header = parse(content[8 : 8 + length], path)
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get(FORMAT), str):
        raise StorageError(f"{path} was not written by molaplace: its metadata have no entry {FORMAT!r}.")
    document = parse(metadata[FORMAT], path)
    if not isinstance(document, dict) or document.get("version") != VERSION:
        version = document.get("version") if isinstance(document, dict) else None
        raise StorageError(
            f"{path} has format version {version!r}, but this version of molaplace reads only format version {VERSION}. Update "
            f"molaplace, or save the posterior again with the installed version."
        )
    checksum = str(document.pop("sha256", None))
    if hashlib.sha256(content.replace(checksum.encode(), NO_CHECKSUM.encode(), 1)).hexdigest() != checksum:
        raise StorageError(
            f"{path} is truncated or corrupt: its content does not match its checksum. Copy the file again, or save it again."
        )
    try:
        return document, load_tensors(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise StorageError(f"{path} is not a safetensors file: {error}") from error
