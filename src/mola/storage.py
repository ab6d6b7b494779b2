"""Files: tensors in safetensors beside a versioned JSON document, written so that a reader sees all of it or nothing.

The tensor file is written first, under a name that holds its own checksum; then the document that points to it replaces
the old document in one step; then what the old one pointed to is removed. A crash at any moment leaves a folder that
loads. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from mola.errors import StorageError
from mola.exactness import exact
from mola.schema import check

__all__ = [
    "DOCUMENT",
    "FORMAT",
    "VERSION",
    "fingerprint",
    "how_to_load",
    "kind_of",
    "read",
    "same_signature",
    "signature",
    "write",
]

FORMAT = "mola-posterior"
VERSION = 1
DOCUMENT = "posterior.json"


def fingerprint(weights: Tensor) -> dict[str, str]:
    """Checksums of a layer's weights as they read in each floating-point type.

    A network that was fitted in float32 is still the same network after `.half()`, so each type has its own checksum.
    """
    return {
        str(dtype).removeprefix("torch."): hashlib.sha256(
            weights.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }


GOLDEN = (5**0.5 - 1) / 2
PLACES = 65537
"""How many places have a weight of their own: a prime, so that no layer's rows are that far apart."""


def signature(network: nn.Module) -> dict[str, Any]:
    """What tells one trained network from another, and survives a change of precision: sums over all its numbers.

    One of them, "order", weighs each number by its place: the same numbers in another order are another network.
    """
    tensors = [
        tensor.detach() for tensor in chain(network.parameters(), network.buffers()) if tensor.is_floating_point()
    ]
    numbers = [exact(tensor) for tensor in tensors]
    return {
        "numbers": sum(tensor.numel() for tensor in numbers),
        "sum": float(sum(tensor.sum().item() for tensor in numbers)),
        "magnitude": float(sum(tensor.abs().sum().item() for tensor in numbers)),
        "order": sum(_weighed(tensor.flatten()) for tensor in numbers),
        "half": any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors),
    }


def _weighed(numbers: Tensor) -> float:
    """The sum of numbers, each times the weight of its place: weights between 0 and 1 that look random."""
    weights = (GOLDEN * torch.arange(1, PLACES + 1, dtype=torch.float64, device=numbers.device)) % 1
    rounds, rest = divmod(len(numbers), PLACES)
    total = numbers[: rounds * PLACES].view(rounds, PLACES).sum(0) @ weights
    return float(total + numbers[rounds * PLACES :] @ weights[:rest])


def same_signature(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two signatures are of the same network, in the same precision or another."""
    # Rounding to half precision moves each number by up to 0.4 %, and their sum by far less.
    tolerance = 1e-3 if first["half"] or second["half"] else 1e-9
    scale = tolerance * max(first["magnitude"], second["magnitude"])
    names = ("sum", "magnitude", "order")
    known = [name for name in names if name in first and name in second]  # older ones lack the last
    return first["numbers"] == second["numbers"] and all(abs(first[name] - second[name]) <= scale for name in known)


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


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one step: readers see the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write(directory: str | Path, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Save a document and its tensors.

    Args:
        directory: folder to write to; made if missing. What it held before stays readable until all is written.
        document: JSON.
        tensors: by name.

    Returns:
        The folder.

    Raises:
        StorageError: if the path is a file.
    """
    folder = _place(directory, make=True)
    if folder.exists() and not folder.is_dir():
        message = f"{folder} is a file; expected a folder to save the posterior in."
        raise StorageError(message)
    folder.mkdir(parents=True, exist_ok=True)
    content = save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    checksum = hashlib.sha256(content).hexdigest()
    name = f"factors-{checksum[:16]}.safetensors"
    write_atomically(folder / name, content)
    full = {"format": FORMAT, "version": VERSION, **document, "tensors": {"file": name, "sha256": checksum}}
    write_atomically(folder / DOCUMENT, json.dumps(full, indent=2, allow_nan=False).encode())
    if not (folder / name).exists():  # another writer, at work at the same time, took it for an old one
        write_atomically(folder / name, content)
    if _read_document(folder)["tensors"]["file"] == name:
        for stale in folder.glob("factors-*.safetensors"):
            if stale.name != name:
                stale.unlink(missing_ok=True)
    return folder


def read(directory: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load a document and its tensors.

    Args:
        directory: a folder that `write` made.

    Returns:
        The document and the tensors by name.

    Raises:
        StorageError: if files are missing, truncated, foreign, or newer than this library.
    """
    folder = _place(directory)
    document = _read_document(folder)
    try:
        return document, _read_tensors(folder, document)
    except StorageError:
        # Somebody may have saved over it since the document was read: then the new one is whole.
        again = _read_document(folder)
        if again == document:
            raise
        return again, _read_tensors(folder, again)


def kind_of(directory: str | Path) -> str | None:
    """What kind of thing a folder holds, such as "posterior" or "swag"; None if it holds no document.

    Args:
        directory: a folder, or a place where there is none.

    Returns:
        The kind. `StorageError` if the document is damaged, foreign, or of another version.
    """
    folder = Path(directory)
    return str(_read_document(folder).get("kind", "posterior")) if (folder / DOCUMENT).exists() else None


def _read_document(folder: Path) -> dict[str, Any]:
    path = folder / DOCUMENT
    if not path.is_file():
        message = (
            f"{folder} holds no saved posterior: {DOCUMENT} is missing. Pass the folder given to posterior.save(...)."
        )
        raise StorageError(message)
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        message = f"{path} is not readable JSON ({error}): the file is truncated or was not written by mola."
        raise StorageError(message) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        message = f"{path} was not written by mola: expected format {FORMAT!r}."
        raise StorageError(message)
    if type(document.get("version")) is not int or document["version"] != VERSION:
        message = (
            f"{path} has version {document.get('version')!r}; this mola reads version {VERSION}. "
            f"Update mola, or save the posterior again with this one."
        )
        raise StorageError(message)
    check(document, {"tensors": {"file": str, "sha256": str}}, "")
    return document


def _read_tensors(folder: Path, document: dict[str, Any]) -> dict[str, Tensor]:
    entry = document["tensors"]
    path = folder / Path(entry["file"].replace("\\", "/")).name  # inside the folder, whatever the document says
    if not path.is_file():
        message = f"{path} is missing: {DOCUMENT} points to it. Copy the whole folder."
        raise StorageError(message)
    content = path.read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    if checksum != entry["sha256"]:
        message = (
            f"{path} is truncated or corrupt: its checksum is {checksum[:16]}..., expected {entry['sha256'][:16]}... "
            f"Copy the folder again, or save the posterior again."
        )
        raise StorageError(message)
    try:
        return load_tensors(content)
    except (SafetensorError, ValueError) as error:
        message = f"{path} is not a safetensors file: {error}"
        raise StorageError(message) from error


def _place(directory: str | Path, *, make: bool = False) -> Path:
    """The folder that a user names; with `make`, one that can be written to, or a file.

    Raises:
        StorageError: if it is no path, or the folder cannot be made.
    """
    try:
        place = Path(directory)
        if make and not place.exists():
            place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{directory} cannot be made: {error.strerror}. Choose another folder."
        raise StorageError(message) from error
    except (TypeError, ValueError) as error:
        message = f"expected the path of a folder, got {directory!r}."
        raise StorageError(message) from error
    return place
