"""Networks seen in another light, and still called like any other: with gradients, or with other weights."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["Differentiable", "WithTensors"]


class Differentiable(nn.Module):
    """A network whose logits carry gradients, although `mola.networks.call` asks for none.

    Args:
        network: any network that `call` takes.
    """

    def __init__(self, network: nn.Module) -> None:
        """Borrow the signature of the network's own `forward`: `call` reads it to pass mappings the right way."""
        super().__init__()
        self.network = network

        @functools.wraps(network.forward)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            with torch.enable_grad():
                return network(*arguments, **keywords)

        self.forward = forward


_door = threading.RLock()
"""A functional call puts tensors into the module for its duration: one thread at a time."""


class WithTensors(nn.Module):
    """A network with other parameters and buffers for the duration of each call.

    Args:
        network: whose own tensors are untouched before and after.
        tensors: by dotted name.
    """

    def __init__(self, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Borrow the signature of the network's own `forward`."""
        super().__init__()
        self.network = network

        @functools.wraps(network.forward)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            with _door:
                return functional_call(network, dict(tensors), arguments, keywords)

        self.forward = forward
