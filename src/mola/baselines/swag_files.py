"""SWAG's parts as a JSON document and tensors, and back onto a network of the same architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mola import folders
from mola.baselines.learning_rates import LearningRateTuning
from mola.baselines.snapshots import Moments
from mola.errors import StorageError
from mola.schema import Optional

__all__ = ["SwagParts", "read", "write"]

SCHEMA = {
    "snapshots": int,
    "rank": int,
    "samples": int,
    "scale": float,
    "seed": int,
    "tuning": Optional({"rule": str, "learning_rate": float, "curve": {str: [float]}, "notes": [str]}),
}


class SwagParts(NamedTuple):
    """What a SWAG is made of beside the network."""

    moments: Moments
    statistics: dict[str, Tensor]
    samples: int
    scale: float
    seed: int
    tuning: LearningRateTuning | None


def _rest(network: nn.Module, moved: set[str]) -> dict[str, Tensor]:
    """What of a network did not move: frozen parameters, and buffers."""
    named = [*network.named_parameters(), *network.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name not in moved}


def write(directory: str | Path, network: nn.Module, parts: SwagParts) -> Path:
    """Save the parts, and what of the network did not move."""
    document: dict[str, Any] = {"snapshots": parts.moments.count, "rank": parts.moments.rank}
    document |= {"samples": parts.samples, "scale": parts.scale, "seed": parts.seed}
    document["tuning"] = None if parts.tuning is None else parts.tuning.as_json()
    tensors = {f"moments.{name}": tensor for name, tensor in parts.moments.tensors().items()}
    tensors |= {f"statistics.{name}": tensor for name, tensor in parts.statistics.items()}
    tensors |= {f"network.{name}": tensor for name, tensor in _rest(network, set(parts.moments.mean)).items()}
    return folders.save(directory, "swag", document, tensors)


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def read(directory: str | Path, network: nn.Module) -> SwagParts:
    """Load the parts, and put back what of the network did not move.

    Args:
        directory: folder that `write` made.
        network: of your own and of the same architecture: what did not move is written over.

    Returns:
        The parts.

    Raises:
        StorageError: if the files are damaged, or the snapshots are of another network.
    """
    document, tensors = folders.load(directory, "swag", SCHEMA)
    moved = set(_below(tensors, "moments.mean."))
    rest = _rest(network, moved)
    expected = _expected_shapes(document, network, moved, rest, set(_below(tensors, "statistics.")))
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted({name for name, _ in found.items() ^ expected.items()})
    if (
        wrong
        or not moved
        or min(document["snapshots"], document["samples"]) < 1
        or document["rank"] == 1
        or document["scale"] < 0
    ):
        named = f"{wrong[0]} and {len(wrong) - 1} more" if wrong else "a number"
        message = (
            f"{directory} does not fit {type(network).__name__}: {named} of the saved SWAG is missing, unknown, or of "
            f"another shape or size. Pass a network of the same architecture as the one it was made from."
        )
        raise StorageError(message)
    with torch.no_grad():
        for name, tensor in rest.items():
            tensor.copy_(tensors[f"network.{name}"])
    moments = Moments.from_tensors(document["snapshots"], _below(tensors, "moments."))
    statistics = _below(tensors, "statistics.")
    tuning = None if document["tuning"] is None else LearningRateTuning.from_json(document["tuning"])
    return SwagParts(moments, statistics, document["samples"], float(document["scale"]), document["seed"], tuning)


def _expected_shapes(
    document: dict[str, Any], network: nn.Module, moved: set[str], rest: dict[str, Tensor], statistics: set[str]
) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(tensor.shape) for name, tensor in network.named_parameters() if name in moved}
    buffers = {name: tuple(tensor.shape) for name, tensor in network.named_buffers() if name in statistics}
    expected = {f"network.{name}": tuple(tensor.shape) for name, tensor in rest.items()}
    for kind, leading in (("mean", ()), ("squares", ()), ("columns", (document["rank"],))):
        expected |= {f"moments.{kind}.{name}": (*leading, *shape) for name, shape in shapes.items()}
    return expected | {f"statistics.{name}": (document["samples"], *shape) for name, shape in buffers.items()}
