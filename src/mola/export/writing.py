"""Write a file in one step, and say what was written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mola.errors import StorageError
from mola.export.tracing import Traced
from mola.storage import write_atomically

__all__ = ["Written", "check_path", "write_file"]


@dataclass(frozen=True)
class NamedTensor:
    """An input or output of a file."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    """Sizes; "batch" is any."""


@dataclass(frozen=True)
class Written:
    """A file that was exported."""

    path: Path
    bytes: int
    inputs: tuple[NamedTensor, ...]
    outputs: tuple[NamedTensor, ...]
    differences: dict[str, float] | None
    """Largest difference of each output from PyTorch's; None where it was not checked."""
    document: dict[str, Any]
    """What the file says of itself."""

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"path": str(self.path)}


def _named(nodes: Sequence[Any], names: Sequence[str]) -> tuple[NamedTensor, ...]:
    """What a traced graph's nodes are, sizes that are free called "batch"."""
    found = []
    for node, name in zip(nodes, names, strict=True):
        value = node.meta["val"]
        shape = tuple(size if isinstance(size, int) else "batch" for size in value.shape)
        found.append(NamedTensor(name, str(value.dtype).removeprefix("torch."), shape))
    return tuple(found)


def check_path(path: str | Path) -> Path:
    """A path that can be written, found out before the work.

    Args:
        path: of the file.

    Returns:
        The same.

    Raises:
        StorageError: if it is a folder, or its folder does not exist or cannot be written to.
    """
    path = Path(path)
    if path.is_dir():
        message = f"{path} is a folder; expected the name of a file to write."
        raise StorageError(message)
    if not path.parent.is_dir():
        message = f"{path} cannot be written: there is no folder {path.parent}. Make it first."
        raise StorageError(message)
    if not os.access(path.parent, os.W_OK):
        message = f"{path} cannot be written: no permission for folder {path.parent}."
        raise StorageError(message)
    return path


def write_file(path: Path, content: bytes, traced: Traced, differences: dict[str, float] | None) -> Written:
    """Write all of a file or nothing.

    Args:
        path: of the file.
        content: all of it.
        traced: what it was made of.
        differences: from PyTorch.

    Returns:
        What was written.

    Raises:
        StorageError: if the disk is full, or the system refuses.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}. Nothing was left behind."
        raise StorageError(message) from error
    nodes, graph = {node.name: node for node in traced.program.graph.nodes}, traced.graph
    signature = traced.program.graph_signature
    inputs = _named([nodes[name] for name in signature.user_inputs], graph.signature.names)
    outputs = _named([nodes[name] for name in signature.user_outputs], graph.outputs)
    return Written(path, len(content), inputs, outputs, differences, traced.document)
