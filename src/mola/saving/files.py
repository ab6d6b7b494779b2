"""Folders of one JSON document and one safetensors file, written so that a reader sees the old state or the new, never a mix.

The tensors are written first, to a file named by their checksum; then the document that names this file replaces the old
document in one step; then the old tensors are removed. A crash at any moment leaves a folder that loads.
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

from mola.errors import StorageError
from mola.saving.schema import check, check_seal, parse, sealed

FORMAT = "mola"
VERSION = 1
DOCUMENT = "posterior.json"


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Yield a path next to `path` to write to; afterwards the file replaces `path` in one step, or, on an error, is removed."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one step: readers see the old content or the new, never a part."""
    with partial_file(path) as partial:
        partial.write_bytes(content)


def write_folder(directory: str | Path, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Save a document and its tensors; the previous content of the folder stays readable until all is written.

    The folder is made if missing, and returned. The document has an entry "kind", such as "swag": a folder of another
    kind is not overwritten.
    """
    folder, kind = Path(directory), document["kind"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made a folder: {error.strerror}. Choose another folder.") from error
    old = None
    with suppress(StorageError):  # no document, or a damaged one, which may be replaced
        old = read_document(folder)
    if old is not None and old["kind"] != kind:
        raise StorageError(
            f"{folder} holds a saved {old['kind']}, which a {kind} does not replace: choose another folder, or remove this one."
        )
    content = save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    checksum = hashlib.sha256(content).hexdigest()
    name = f"tensors-{checksum[:16]}.safetensors"
    entries = {"format": FORMAT, "version": VERSION, **document, "tensors": {"file": name, "sha256": checksum}}
    try:
        text = json.dumps(sealed(entries), indent=2, allow_nan=False)
    except ValueError as error:
        raise StorageError(f"{folder}: nothing was saved, since the document is not finite JSON ({error}).") from error
    write_atomically(folder / name, content)
    write_atomically(folder / DOCUMENT, text.encode())
    if old is not None and old["tensors"]["file"] != name:
        (folder / Path(old["tensors"]["file"]).name).unlink(missing_ok=True)
    return folder


def read_folder(
    directory: str | Path, kind: str, schema: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the document and the tensors of a folder; `StorageError` if they are missing, damaged, foreign or of another kind."""
    folder = Path(directory)
    document = read_document(folder)
    if document["kind"] != kind:
        raise StorageError(
            f"{folder} holds a saved {document['kind']}, expected a saved {kind}. Load posteriors with mola.load, and "
            "baselines with the class of mola.baselines that saved them."
        )
    check(document, dict(schema or {}), "")
    try:
        return document, _read_tensors(folder, document["tensors"])
    except StorageError:
        # Another process may have saved since the document was read; then the new state is intact.
        if read_document(folder) == document:
            raise
    return read_folder(folder, kind, schema)


def kind_of(directory: str | Path) -> str | None:
    """Return the kind of a saved folder, such as "posterior" or "swag"; None if there is no document."""
    return str(read_document(directory)["kind"]) if (Path(directory) / DOCUMENT).exists() else None


def read_document(directory: str | Path) -> dict[str, Any]:
    """Read the document of a folder without its tensors; `StorageError` if it is missing, damaged, foreign or newer."""
    path = Path(directory) / DOCUMENT
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise StorageError(
            f"{directory} holds no saved posterior: {DOCUMENT} is missing. Pass the folder given to posterior.save(...)."
        ) from error
    except OSError as error:  # the path is a file, or there is no permission
        raise StorageError(f"{path} cannot be read: {error.strerror}. Pass the folder that was saved.") from error
    document = parse(content, path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StorageError(f"{path} was not written by mola: expected an entry 'format' with the value {FORMAT!r}.")
    if document.get("version") != VERSION:
        raise StorageError(
            f"{path} has version {document.get('version')!r}, and this mola reads version {VERSION}. Update mola, or save the "
            f"posterior again with this one."
        )
    check_seal(document, path)
    check(document, {"kind": str, "tensors": {"file": str, "sha256": str}}, "")
    return document


def _read_tensors(folder: Path, entry: Mapping[str, str]) -> dict[str, Tensor]:
    path = folder / Path(entry["file"].replace("\\", "/")).name  # inside the folder, whatever the document names
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} is missing: {DOCUMENT} points to it. Copy the whole folder.") from error
    checksum = hashlib.sha256(content).hexdigest()
    if checksum != entry["sha256"]:
        raise StorageError(
            f"{path} is truncated or corrupt: its checksum is {checksum[:16]}..., expected {entry['sha256'][:16]}... Copy the "
            f"folder again, or save the posterior again."
        )
    try:
        return load_tensors(content)
    except (SafetensorError, ValueError) as error:
        raise StorageError(f"{path} is not a safetensors file: {error}") from error
