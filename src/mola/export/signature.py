"""The inputs of a graph: any batch that a network takes, as tensors with names, and back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mola.errors import DataError
from mola.networks import Inputs

__all__ = ["Signature"]

LABELS = "labels"


@dataclass(frozen=True)
class Signature:
    """Names of the tensors among a network's inputs, and what else it is called with.

    Args:
        kind: "tensor", "tuple" (positional arguments) or "mapping" (keyword arguments).
        names: of the tensors, in order.
        places: where each tensor stands: its position or key.
        fixed: what is no tensor (flags, None), by position or key: part of the graph.
    """

    kind: str
    names: tuple[str, ...]
    places: tuple[Any, ...] = ()
    fixed: Mapping[Any, Any] = field(default_factory=dict)

    @staticmethod
    def of(example: Inputs, network: nn.Module) -> Signature:
        """The signature of a batch.

        Args:
            example: a tensor, a tuple of positional or a mapping of keyword arguments.
            network: says how its positional arguments are called.

        Returns:
            Names and places.

        Raises:
            DataError: if the example is none of these, or its tensors are not batches of one size.
        """
        if isinstance(example, Tensor):
            found = Signature("tensor", ("input",), (0,))
        elif isinstance(example, (Mapping, tuple, list)):
            items = dict(example.items() if isinstance(example, Mapping) else enumerate(example))
            items.pop(LABELS, None)
            places = tuple(key for key, value in items.items() if isinstance(value, Tensor))
            kind = "mapping" if isinstance(example, Mapping) else "tuple"
            names = tuple(map(str, places)) if kind == "mapping" else _positional_names(network, places)
            fixed = {key: value for key, value in items.items() if not isinstance(value, Tensor)}
            found = Signature(kind, names, places, fixed)
        else:
            found = Signature("none", ())
        nested = [key for key, value in found.fixed.items() if isinstance(value, (Mapping, tuple, list))]
        if not found.names or nested:
            message = (
                f"example: expected one batch as a tensor, a tuple of tensors or a mapping of tensors; got "
                f"{type(example).__name__}{f' with nested values at {nested}' if nested else ''}. Pass what posterior.predict takes."
            )
            raise DataError(message)
        found._check_batch(example)
        return found

    def _check_batch(self, example: Inputs) -> None:
        sizes = {name: tuple(tensor.shape) for name, tensor in zip(self.names, self.tensors(example), strict=True)}
        if (
            any(not shape or shape[0] == 0 for shape in sizes.values())
            or len({shape[0] for shape in sizes.values()}) > 1
        ):
            message = (
                f"example: expected the batch as first axis of every tensor, at least one row; got shapes {sizes}."
            )
            raise DataError(message)
        for name, tensor in zip(self.names, self.tensors(example), strict=True):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                message = f"example: {name} holds NaN or infinite numbers. Pass a batch as the network sees it."
                raise DataError(message)

    def tensors(self, inputs: Inputs) -> list[Tensor]:
        """The tensors of a batch, in order.

        Args:
            inputs: a batch like the example; arrays are taken too.

        Returns:
            One for each name.

        Raises:
            DataError: if it has another form.
        """
        try:
            values = [inputs] if self.kind == "tensor" else [inputs[place] for place in self.places]
            return [torch.as_tensor(value) for value in values]
        except (TypeError, KeyError, IndexError, ValueError, RuntimeError) as error:
            expected = {"tensor": "one tensor", "tuple": "a tuple of tensors", "mapping": "a mapping of tensors"}[
                self.kind
            ]
            message = f"inputs: expected {expected} for {', '.join(self.names)}; got {type(inputs).__name__}."
            raise DataError(message) from error

    def inputs(self, tensors: Sequence[Tensor]) -> Inputs:
        """What the network is called with."""
        if self.kind == "tensor":
            return tensors[0]
        values = dict(zip(self.places, tensors, strict=True)) | dict(self.fixed)
        return values if self.kind == "mapping" else tuple(values[position] for position in sorted(values))

    def as_json(self) -> dict[str, Any]:
        """Kind, names and places."""
        return {"kind": self.kind, "names": [*self.names], "places": [*self.places]}

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Signature:
        """What `as_json` made."""
        return Signature(entry["kind"], tuple(entry["names"]), tuple(entry["places"]))


def _positional_names(network: nn.Module, places: Sequence[int]) -> tuple[str, ...]:
    """How a network calls its positional arguments, or else by number."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [name for name, one in inspect.signature(network.forward).parameters.items() if one.kind in kinds]
    return tuple(known[place] if place < len(known) else f"input_{place}" for place in places)
