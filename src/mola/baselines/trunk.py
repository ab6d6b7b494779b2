"""One trunk, K heads: each head with the trunk is an ordinary network, and one pass of the trunk serves them all.

A mixture calls its K networks in turn on the same batch. The trunk remembers the last batch and what it made of it, and
answers from memory when the next head asks: same numbers in, same weights, eval mode, no gradients. It remembers one
batch, and forgets it when all heads have asked.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mola.baselines.widening import stack_inputs
from mola.errors import DataError
from mola.networks import call
from mola.networks.passes import Differentiable

__all__ = ["HeadNetwork", "Trunk"]


class _Memory(NamedTuple):
    inputs: Tensor
    """A copy: a loader may fill the same tensor again."""
    weights: tuple[object, ...]
    """Where each parameter and buffer lay, and how often it had been written."""
    features: Tensor
    left: int
    """How many heads have not asked yet."""


class Trunk(nn.Module):
    """What K heads share: features (n, P) of K copies of the input, side by side.

    Args:
        network: from stacked inputs to features.
        members: K.
    """

    def __init__(self, network: nn.Module, members: int) -> None:
        """Keep the network."""
        super().__init__()
        self.network, self.members = network, members
        self._memory: _Memory | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Features (n, P).

        Args:
            inputs: one batch (n, channels, ...).

        Returns:
            Features, from memory where this very batch was the last.

        Raises:
            DataError: if the inputs are not one tensor.
        """
        if not isinstance(inputs, Tensor) or inputs.dim() < 2:
            message = f"MIMO takes one tensor (n, channels, ...) as inputs, got {type(inputs).__name__}."
            raise DataError(message)
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._run(inputs)
        weights, last = self._weights(inputs.device), self._memory
        if last is not None and last.weights == weights and _same(last.inputs, inputs):
            self._memory = last._replace(left=last.left - 1) if last.left > 1 else None
            return last.features
        features = self._run(inputs)
        self._memory = _Memory(inputs.clone(), weights, features, self.members - 1) if self.members > 1 else None
        return features

    def _run(self, inputs: Tensor) -> Tensor:
        network = Differentiable(self.network) if torch.is_grad_enabled() else self.network
        return call(network, stack_inputs([inputs] * self.members))

    def _weights(self, device: torch.device) -> tuple[object, ...]:
        """What the features depend on besides the inputs. A change through `.data` leaves no trace, and is not seen."""
        tensors = chain(self.network.parameters(), self.network.buffers())
        versions = ((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)
        rounded = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        return (rounded, *versions)


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two batches hold the same numbers: one that was moved to a device is a new tensor for every head."""
    return first.dtype == second.dtype and first.device == second.device and torch.equal(first, second)


class HeadNetwork(nn.Module):
    """One head of a MIMO network as an ordinary classifier.

    Args:
        trunk: shared with the other heads.
        layer: the head.
    """

    def __init__(self, trunk: Trunk, layer: nn.Linear) -> None:
        """Bind a head to the trunk."""
        super().__init__()
        self.trunk, self.layer = trunk, layer

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (n, C)."""
        output: Tensor = self.layer(self.trunk(inputs))
        return output
