"""The multi-input multi-output form of an architecture (Havasi et al., 2021): the first layer widened, K heads on one trunk.

New weights are drawn from the entries of the layer's own, so that the initialisation of the architecture is kept:
each head gets as many as the old one, and the first layer K times as many, divided by the square root of K so that the
sum over K independent inputs has the same variance as before.

Each head with the trunk is an ordinary network. A mixture calls its K networks in turn on the same batch, so the trunk remembers
the last batch with its features, and answers from memory when the next head asks: same inputs, same weights, eval mode, no
gradients. It forgets the batch when all heads have asked.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mola.errors import DataError, HeadError, OptionError
from mola.network import Head, call, find_head, undisturbed
from mola.network.calling import Differentiable

FIRST_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Widened(NamedTuple):
    """A trunk that takes K inputs side by side, and a last layer for each."""

    trunk: nn.Module
    """From stacked inputs (n, K * channels, ...) to features (n, P)."""
    heads: list[nn.Linear]


def stack_inputs(inputs: list[Tensor]) -> Tensor:
    """K batches as one, side by side along the channels."""
    if any(batch.dim() < 2 for batch in inputs):
        shape = tuple(inputs[0].shape)
        raise DataError(
            f"expected inputs (n, channels, ...), got shape {shape}. A single input needs a batch: inputs[None]."
        )
    return torch.cat(inputs, dim=1)


def widen(network: nn.Module, members: int, example: Tensor, seed: int) -> Widened:
    """Make the multi-input multi-output form of an architecture.

    Args:
        network: of your own; it becomes the trunk.
        members: number of inputs and heads K.
        example: a batch of inputs, to find the first and the last layer with.
        seed: of the new weights.

    Returns:
        The trunk and the heads.
    """
    with undisturbed(network):
        head = find_head(network, example)
        if not isinstance(head.layer, nn.Linear) or head.positions is not None:
            raise OptionError(
                "MIMO needs a network that ends in an nn.Linear and gives one row of logits for each input, not many positions."
            )
        name, first = _first_layer(network, head, example)
        generator = torch.Generator("cpu").manual_seed(seed)
        heads = [_drawn_head(head.layer, generator) for _ in range(members)]
        wide = _widened_layer(first, members, generator)
    _replace(network, first, wide)
    _replace(network, head.layer, nn.Identity())
    with undisturbed(network):
        try:
            features = call(network, stack_inputs([example] * members))
        except (DataError, HeadError) as error:
            raise OptionError(
                _refusal(network, name, f"the widened network fails on stacked inputs: {error}")
            ) from error
    if features.shape != (len(example), head.layer.in_features):
        raise OptionError(
            _refusal(network, name, f"the trunk gives shape {tuple(features.shape)} to heads of {heads[0]}.")
        )
    return Widened(network, heads)


def _refusal(network: nn.Module, name: str, reason: str) -> str:
    return (
        f"{type(network).__name__} cannot be widened at its first layer {name!r}: {reason} MIMO stacks inputs along "
        f"dimension 1, which the first layer must read as channels or features, and nothing before it may change."
    )


def _first_layer(network: nn.Module, head: Head, example: Tensor) -> tuple[str, nn.Module]:
    ran: list[tuple[str, nn.Module]] = []
    handles = [
        module.register_forward_pre_hook(lambda module, _, name=name: ran.append((name, module)))
        for name, module in network.named_modules()
        if isinstance(module, FIRST_LAYERS) and module is not head.layer
    ]
    try:
        call(network, example)
    finally:
        for handle in handles:
            handle.remove()
    if not ran:
        raise OptionError(
            f"{type(network).__name__} has no linear or convolutional layer before its head {head.name!r}, which the "
            f"inputs could share: MIMO needs a trunk."
        )
    name, first = ran[0]
    if getattr(first, "groups", 1) != 1:
        raise OptionError(_refusal(network, name, f"it is a grouped convolution ({first})."))
    if parametrize.is_parametrized(first) or parametrize.is_parametrized(head.layer):
        raise OptionError(
            _refusal(network, name, "it, or the head, is parametrised (weight or spectral normalisation).")
        )
    return name, first


def _resampled(entries: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> nn.Parameter:
    flat = entries.detach().flatten()
    index = torch.randint(len(flat), shape, generator=generator, device="cpu").to(flat.device)
    return nn.Parameter(flat[index])


def _drawn_head(layer: nn.Linear, generator: torch.Generator) -> nn.Linear:
    head = copy.deepcopy(layer)
    head.weight = _resampled(layer.weight, tuple(layer.weight.shape), generator)
    if layer.bias is not None:
        head.bias = _resampled(layer.bias, tuple(layer.bias.shape), generator)
    return head


def _widened_layer(layer: nn.Module, members: int, generator: torch.Generator) -> nn.Module:
    wide = copy.deepcopy(layer)
    assert isinstance(layer.weight, Tensor)
    outputs, inputs, *kernel = layer.weight.shape
    wide.weight = _resampled(layer.weight, (outputs, members * inputs, *kernel), generator)
    with torch.no_grad():
        wide.weight.div_(members**0.5)
    setattr(wide, "in_features" if isinstance(wide, nn.Linear) else "in_channels", members * inputs)
    return wide


def _replace(network: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(network.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


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
    # Whether two batches hold the same numbers: one that was moved to a device is a new tensor for every head.
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
