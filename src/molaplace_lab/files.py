"""Files that are replaced atomically: a reader sees either the old content or the new content in full."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from molaplace.errors import StorageError


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`. On success, a file written there replaces `path` atomically; on error, it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


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
