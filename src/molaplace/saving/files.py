"""Folders that contain a JSON document and a safetensors file. A reader sees either the old or the new state, never a mixture.

First, the tensors are written to a file named after their checksum. Then a document that refers to this file atomically replaces the
old document. Finally, the old tensors are removed. After a crash at any point, the folder can still be loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from molaplace.errors import StorageError
from molaplace.saving.schema import check, check_seal, parse, sealed

FORMAT = "molaplace"
VERSION = 1
DOCUMENT = "posterior.json"


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`. On success, a file written there replaces `path` atomically; on error, it is removed."""
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


def write_folder(directory: str | Path, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Save a document and its tensors to a folder, and return the folder's path.

    The folder is created if it does not exist. Its previous content stays readable until everything has been written. The document
    must have a "kind" entry, such as "swag"; a folder of a different kind is not overwritten.
    """
    folder, kind = Path(directory), document["kind"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"the folder {folder} cannot be created: {error.strerror}. Choose another folder."
        ) from error
    old = None
    with suppress(StorageError):  # a missing or damaged document may be replaced
        old = read_document(folder)
    if old is not None and old["kind"] != kind:
        raise StorageError(
            f"{folder} contains a saved {old['kind']}, which cannot be replaced by a {kind}. Choose another folder, or remove this "
            f"one."
        )
    content = save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    checksum = hashlib.sha256(content).hexdigest()
    name = f"tensors-{checksum[:16]}.safetensors"
    entries = {"format": FORMAT, "version": VERSION, **document, "tensors": {"file": name, "sha256": checksum}}
    try:
        text = json.dumps(sealed(entries), indent=2, allow_nan=False)
    except ValueError as error:
        raise StorageError(
            f"nothing was saved to {folder}, because the document contains values that JSON cannot represent ({error})."
        ) from error
    write_atomically(folder / name, content)
    write_atomically(folder / DOCUMENT, text.encode())
    if old is not None and old["tensors"]["file"] != name:
        (folder / Path(old["tensors"]["file"]).name).unlink(missing_ok=True)
    return folder


def read_folder(
    directory: str | Path, kind: str, schema: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the document and the tensors in a folder.

    Raises `StorageError` if a file is missing, damaged or not written by molaplace, or if the saved object's kind is not `kind`.
    """
    folder = Path(directory)
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
        # Another process may have saved a new state since the document was read. In that case, read the new state.
        if read_document(folder) == document:
            raise
    return read_folder(folder, kind, schema)


def kind_of(directory: str | Path) -> str | None:
    """Return the kind of object saved in a folder, such as "posterior" or "swag", or None if there is no document."""
    return str(read_document(directory)["kind"]) if (Path(directory) / DOCUMENT).exists() else None


def read_document(directory: str | Path) -> dict[str, Any]:
    """Read the document in a folder, but not the tensors.

    Raises `StorageError` if the document is missing or damaged, was not written by molaplace, or was written by a newer version.
    """
    path = Path(directory) / DOCUMENT
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise StorageError(
            f"{directory} contains no saved posterior: {DOCUMENT} is missing. Pass a folder written by posterior.save(...)."
        ) from error
    except OSError as error:  # the path is a file, or access is denied
        raise StorageError(
            f"{path} cannot be read: {error.strerror}. Pass a folder written by posterior.save(...)."
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
    return document


def _read_tensors(folder: Path, entry: Mapping[str, str]) -> dict[str, Tensor]:
    path = (
        folder / Path(entry["file"].replace("\\", "/")).name
    )  # use only the base name, so that the path stays inside the folder
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} is missing, but {DOCUMENT} refers to it. Copy the whole folder again.") from error
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
