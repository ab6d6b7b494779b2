"""Files that are replaced atomically: safetensors with a document, and JSON with a checksum of its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from molaplace.errors import StorageError
from molaplace.saving.files import partial_file, write_atomically

SEAL = "sha256"
"""Name of the entry of a document that holds the checksum of all other entries."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    """Write tensors and a document of JSON values to one safetensors file."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with partial_file(path) as partial:
        save_file(contiguous, partial, {"document": json.dumps(document)})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the document from a file written by `write_tensors`."""
    try:
        with safe_open(path, framework="pt") as file:
            document = json.loads(file.metadata()["document"])
            return {name: file.get_tensor(name) for name in file.keys()}, document  # noqa: SIM118  (not a mapping)
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        raise StorageError(
            f"{path} is damaged or incomplete ({error}). Delete it, and run the command again."
        ) from error


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document with a checksum of its content. One line per entry keeps files small and diffs readable."""
    plain = json.loads(json.dumps(document))  # as read back from the file, with tuples as lists and keys as strings
    entries = {**plain, SEAL: _checksum(plain)}.items()
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in entries]
    write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read_document(path: Path, kind: str, version: int) -> dict[str, Any]:
    """Read a document written by `write_document`.

    Raises:
        StorageError: the file is damaged or was changed, or its format is not `kind` in this version.
    """
    try:
        document = json.loads(path.read_bytes())
        if document.get(SEAL) != _checksum(document):
            raise StorageError("its content does not match its checksum")
        if (document["format"], document["version"]) != (kind, version):
            raise StorageError(
                f"{path} has the format {document['format']!r} {document['version']}; expected {kind!r} {version}."
            )
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise StorageError(
            f"{path} cannot be read ({error}). Delete it and run the command again. The other records are kept."
        ) from error
    return document


def _checksum(document: Mapping[str, Any]) -> str:
    content = {name: value for name, value in document.items() if name != SEAL}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
