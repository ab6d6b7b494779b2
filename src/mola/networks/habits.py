"""What a network was seen to do in a pass: whether it writes into its inputs, and that it draws no random numbers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Habits", "copied", "habits_of", "random_states", "remember", "same_values", "tensors_of", "versions_of"]


@dataclass(frozen=True)
class Habits:
    """What a pass showed that left the random state alone."""

    writes: bool
    """Into its own inputs, as `x -= mean` does."""


_known: dict[int, tuple[weakref.ref[nn.Module], Habits]] = {}
"""By identity: modules may compare and hash as they please."""


def habits_of(network: nn.Module) -> Habits | None:
    """What is known of a network; None before its first pass, and as long as random numbers are drawn in its passes."""
    found = _known.get(id(network))
    return None if found is None or found[0]() is not network else found[1]


def remember(network: nn.Module, habits: Habits) -> None:
    """Keep what was seen for as long as the network lives."""
    key = id(network)
    _known[key] = (weakref.ref(network, lambda gone: _forget(key, gone)), habits)


def _forget(key: int, gone: weakref.ref[nn.Module]) -> None:
    # Another network may have the place in memory, and in this dictionary, by now.
    if key in _known and _known[key][0] is gone:
        del _known[key]


def random_states(device: torch.device | None) -> list[Tensor]:
    """The state of torch's own generators: that of the CPU, and that of a network's card."""
    card = [torch.cuda.get_rng_state(device)] if device is not None and device.type == "cuda" else []
    return [torch.get_rng_state(), *card]


def tensors_of(inputs: Any) -> Iterator[Tensor]:
    """Every tensor among the inputs of a network.

    Yields:
        One after the other.
    """
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, (Mapping, tuple, list)):
        for value in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from tensors_of(value)


def copied(inputs: Any) -> Any:
    """The inputs of a network with a copy of every tensor."""
    if isinstance(inputs, Tensor):
        return inputs.detach().clone()
    if isinstance(inputs, Mapping):
        return {key: copied(value) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        parts = [copied(value) for value in inputs]
        return type(inputs)(*parts) if hasattr(inputs, "_fields") else type(inputs)(parts)
    return inputs


def versions_of(inputs: Any) -> list[int]:
    """How often each tensor was written in place; those of inference mode do not count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_of(inputs)]


def same_values(first: Any, second: Any) -> bool:
    """Whether two inputs hold the same numbers: a change through `.data` leaves the version alone."""
    pairs = zip(tensors_of(first), tensors_of(second), strict=True)
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs)
