"""A predictor in a folder: the document says what kind of thing it is, so that one kind is never read as another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mola.errors import StorageError
from mola.network import undisturbed
from mola.network.fingerprint import NETWORK, same_network, signature
from mola.saving import storage
from mola.schema import check

__all__ = ["NETWORK", "load", "require_network", "save", "signature_of"]


def save(directory: str | Path, kind: str, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Save a document of one kind, and its tensors.

    Args:
        directory: folder to write to; what it held before stays readable until all is written.
        kind: of thing, as in "swag".
        document: JSON.
        tensors: by name.

    Returns:
        The folder.
    """
    return storage.write(directory, {"kind": kind, **document}, tensors)


def load(directory: str | Path, kind: str, schema: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load what `save` wrote.

    Args:
        directory: a folder.
        kind: of thing that must be in it.
        schema: of its document.

    Returns:
        The document and the tensors by name.

    Raises:
        StorageError: if the folder holds something else, or is damaged.
    """
    document, tensors = storage.read(directory)
    found = document.get("kind", "posterior")
    if found != kind:
        message = f"{directory} holds a saved {found}, expected a saved {kind}. {storage.how_to_load(found)}"
        raise StorageError(message)
    check(document, dict(schema), "")
    return document, tensors


def signature_of(network: nn.Module) -> dict[str, Any]:
    """What tells one trained network from another, read without disturbing it."""
    with undisturbed(network):
        return signature(network)


def require_network(network: nn.Module, saved: dict[str, Any], name: str) -> None:
    """Refuse a network that is not the one that was saved.

    Args:
        network: as the user passed it.
        saved: signature of the one that was saved.
        name: of the argument, for the message.

    Raises:
        StorageError: if it is another.
    """
    with undisturbed(network):
        same = same_network(network, saved)
    if not same:
        message = f"{name}: this is not the network that was saved: its numbers are other ones. Pass the network this was made from."
        raise StorageError(message)
