"""Files: tensors in safetensors beside a versioned JSON document, written so that a reader sees all of it or nothing.

The tensor file is written first, under a name that holds its own checksum; then the document that points to it replaces
the old document in one step; then what the old one pointed to is removed. A crash at any moment leaves a folder that
loads. Nothing is pickled.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from mola.errors import StorageError
from mola.schema import SEAL, check, check_seal, parse, sealed

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed
    fcntl = None  # type: ignore[assignment]

FORMAT = "mola-posterior"
VERSION = 1
COOLED_VERSION = 2
"""Of documents that are wrong to a reader who does not know of temperatures and distances, or of baselines for other outputs than
classes; all others stay at `VERSION`."""
DOCUMENT = "posterior.json"


LOADERS = {
    "posterior": "mola.load",
    "whole-posterior": "mola.WholeMoLA.load",
    "swag": "mola.Swag.load",
    "multi-swag": "mola.MultiSwag.load",
    "mimo": "mola.Mimo.load",
    "mc-dropout": "mola.McDropout.load",
    "temperature": "mola.TemperatureScaled.load",
}
"""What reads a folder, by the kind of thing in it."""


def how_to_load(kind: str) -> str:
    """Which function reads a folder of that kind."""
    return f"Load it with {LOADERS[kind]}(...)." if kind in LOADERS else "Load it with what saved it."


ABANDONED = 24 * 3600
"""Seconds after which a partial file is taken for abandoned where locks cannot tell."""


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """A file to write beside another, which it may then replace; afterwards it is gone, whatever happens.

    Its lock tells others that it is being written: those of writers that were killed have none, and are removed here.

    Args:
        path: of the file that is wanted.

    Yields:
        The path of the partial file, which exists and is empty.
    """
    remove_abandoned(path.parent, path.name)
    while True:
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        lock = _lock(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
        # Between the two calls, somebody may have taken it for abandoned.
        if lock is None or os.fstat(lock).st_nlink > 0:
            break
        os.close(lock)
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


def _lock(file: int) -> int | None:
    # Lock an open file; without locks (on Windows, an open file could not be renamed), close it.
    if fcntl is None:
        os.close(file)
        return None
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def remove_abandoned(folder: Path, name: str) -> None:
    """Remove the partial files of writers that were killed.

    Args:
        folder: where they lie.
        name: of the file that they were to replace; `*` stands for anything.
    """
    pattern = "*".join(glob.escape(part) for part in name.split("*"))
    for partial in folder.glob(f".{pattern}.*.partial"):
        with suppress(OSError):  # gone meanwhile, or locked by its writer
            _remove_unlocked(partial)


def _remove_unlocked(partial: Path) -> None:
    old = time.time() - partial.stat().st_mtime > ABANDONED
    if fcntl is None:
        if old:
            partial.unlink()
        return
    file = os.open(partial, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Still locked while it is removed: a writer who has just made it finds that it is gone, and makes another.
        partial.unlink()
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        if old:
            partial.unlink()
    finally:
        os.close(file)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one step: readers see the old content or the new, never a part."""
    with partial_file(path) as partial:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def sealed_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The content of one safetensors file, with a checksum of all of it among its metadata.

    Args:
        tensors: by name.
        metadata: short texts by name.

    Returns:
        What `read_sealed_tensors` reads.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save_tensors(plain, {**metadata, SEAL: _digest(plain, metadata)})


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    texts = {name: text for name, text in metadata.items() if name != SEAL}
    shapes = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
    digest = hashlib.sha256(json.dumps([texts, shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_sealed_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file that `sealed_tensors` made; those of older versions have no seal.

    Args:
        path: of the file.

    Returns:
        Tensors and texts, by name.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise StorageError(f"{path} is not a whole safetensors file ({error}).") from error
    if SEAL in metadata and metadata[SEAL] != _digest(tensors, metadata):
        raise StorageError(
            f"{path} was changed after it was written: its content does not have the checksum that it names."
        )
    return tensors, metadata


def write(
    directory: str | Path, document: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: str | None = None
) -> Path:
    """Save a document and its tensors.

    Args:
        directory: folder to write to; made if missing. What it held before stays readable until all is written.
        document: JSON.
        tensors: by name.
        kind: of thing that is saved, such as "swag", so that one kind is never read as another; None is a posterior.

    Returns:
        The folder.
    """
    document = document if kind is None else {"kind": kind, **document}
    folder = _place(directory, make=True)
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; expected a folder to save the posterior in.")
    _keep_others(folder, str(document.get("kind", "posterior")))
    folder.mkdir(parents=True, exist_ok=True)
    content = save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    checksum = hashlib.sha256(content).hexdigest()
    name = f"factors-{checksum[:16]}.safetensors"
    write_atomically(folder / name, content)
    remove_abandoned(folder, "factors-*")
    full = sealed({"format": FORMAT, "version": VERSION, **document, "tensors": {"file": name, "sha256": checksum}})
    try:
        text = json.dumps(full, indent=2, allow_nan=False)
    except ValueError as error:
        raise StorageError(
            f"{folder}: nothing was saved, since a number of the document is not finite ({error})."
        ) from error
    write_atomically(folder / DOCUMENT, text.encode())
    if not (folder / name).exists():  # another writer, at work at the same time, took it for an old one
        write_atomically(folder / name, content)
    if read_document(folder)["tensors"]["file"] == name:
        for stale in folder.glob(f"factors-{'[0-9a-f]' * 16}.safetensors"):  # other names are not ours
            if stale.name != name:
                stale.unlink(missing_ok=True)
    return folder


def _keep_others(folder: Path, kind: str) -> None:
    # Refuse to replace a thing of another kind, which is hardly meant; what is damaged may be replaced.
    try:
        found = kind_of(folder)
    except StorageError:
        return
    if found not in (None, kind):
        raise StorageError(
            f"{folder} holds a saved {found}, which a {kind} does not replace: choose another folder, or remove that one."
        )


def read(
    directory: str | Path, kind: str | None = None, schema: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load a document and its tensors.

    Args:
        directory: a folder that `write` made.
        kind: of thing that must be in it; None accepts any.
        schema: of its document.

    Returns:
        The document and the tensors by name.
    """
    folder = _place(directory)
    document = read_document(folder)
    try:
        tensors = _read_tensors(folder, document)
    except StorageError:
        # Somebody may have saved over it since the document was read: then the new one is intact.
        again = read_document(folder)
        if again == document:
            raise
        document, tensors = again, _read_tensors(folder, again)
    found = document.get("kind", "posterior")
    if kind not in (None, found):
        raise StorageError(f"{directory} holds a saved {found}, expected a saved {kind}. {how_to_load(found)}")
    check(document, dict(schema or {}), "")
    return document, tensors


def kind_of(directory: str | Path) -> str | None:
    """What kind of thing a folder holds, such as "posterior" or "swag"; None if it holds no document.

    Args:
        directory: a folder, or a place where there is none.

    Returns:
        The kind. `StorageError` if the document is damaged, foreign, or of another version.
    """
    folder = Path(directory)
    return str(read_document(folder).get("kind", "posterior")) if (folder / DOCUMENT).exists() else None


def read_document(folder: Path) -> dict[str, Any]:
    """The document of a folder, without its tensors.

    Args:
        folder: that `write` made.

    Returns:
        The document.
    """
    path = folder / DOCUMENT
    if not path.is_file():
        raise StorageError(
            f"{folder} is a file; pass the folder that holds it: {str(folder.parent)!r}."
            if folder.is_file()
            else f"{folder} holds no saved posterior: {DOCUMENT} is missing. Pass the folder given to posterior.save(...)."
        )
    try:
        document = parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path} is not readable JSON ({error}): the file is truncated or was not written by mola."
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StorageError(f"{path} was not written by mola: expected format {FORMAT!r}.")
    if type(document.get("version")) is not int or document["version"] not in (VERSION, COOLED_VERSION):
        raise StorageError(
            f"{path} has version {document.get('version')!r}; this mola reads versions {VERSION} and {COOLED_VERSION}. "
            f"Update mola, or save the posterior again with this one."
        )
    check_seal(document, path)
    kind = {"kind": str} if "kind" in document else {}
    check(document, {"tensors": {"file": str, "sha256": str}, **kind}, "")
    return document


def _read_tensors(folder: Path, document: dict[str, Any]) -> dict[str, Tensor]:
    entry = document["tensors"]
    path = folder / Path(entry["file"].replace("\\", "/")).name  # inside the folder, whatever the document says
    if not path.is_file():
        raise StorageError(f"{path} is missing: {DOCUMENT} points to it. Copy the whole folder.")
    content = path.read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    if checksum != entry["sha256"]:
        raise StorageError(
            f"{path} is truncated or corrupt: its checksum is {checksum[:16]}..., expected {entry['sha256'][:16]}... "
            f"Copy the folder again, or save the posterior again."
        )
    try:
        return load_tensors(content)
    except (SafetensorError, ValueError) as error:
        raise StorageError(f"{path} is not a safetensors file: {error}") from error


def _place(directory: str | Path, *, make: bool = False) -> Path:
    # The folder that a user names; with `make`, one that can be written to, or a file.
    try:
        place = Path(directory)
        if make and not place.exists():
            place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{directory} cannot be made: {error.strerror}. Choose another folder.") from error
    except (TypeError, ValueError) as error:
        raise StorageError(f"expected the path of a folder, got {directory!r}.") from error
    return place
