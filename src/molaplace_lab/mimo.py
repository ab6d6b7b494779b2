r"""MIMO (Havasi et al., 2021): one network that takes K inputs at once and has a head for each input.

During training, the K inputs are differently shuffled copies of the same batch, and each head classifies its own input
(`molaplace_lab.training.train_mimo`). At test time, all K inputs are the same, and the heads, which share a trunk, are averaged like an
ensemble: :math:`p = \tfrac1K \sum_k \mathrm{softmax}(W_k \phi + b_k)`. MIMO-MoLA is the mixture of the heads' Laplace approximations.

The first layer of the architecture is widened to accept K inputs. New weights are drawn at random from the old weights of the same
layer, to preserve the scale of the initialisation. Each head has as many weights as the original head. The first layer has K times as
many weights as before. These weights are divided by the square root of K so that the sum over K independent inputs keeps its variance.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from molaplace.errors import DataError, HeadError, OptionError
from molaplace.fitting import fit
from molaplace.likelihoods import CATEGORICAL
from molaplace.mixture import Mixture
from molaplace.network import Captured, Head, Inputs, call, check_finite, evaluating, find_head
from molaplace.numerics import check_seed, to_float64
from molaplace.options import whole_number
from molaplace.posterior import MoLA

FIRST_LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Mimo(Mixture):
    """The multi-input multi-output (MIMO) form of an architecture; train it with `molaplace_lab.training.train_mimo`.

    Save the weights with `mimo.state_dict()` and load them with `Mimo(network, members, example=x).load_state_dict(...)`.

    Args:
        network: an untrained network, which is copied, not modified.
        members: number of inputs and heads, K.
        example: a batch of inputs, used to find the first and last layers.
        seed: random seed for the new weights of the first layer and the heads.
    """

    def __init__(self, network: nn.Module, members: int = 3, *, example: Tensor, seed: int = 0) -> None:
        members = whole_number(members, "members")
        if not isinstance(example, Tensor) or example.dim() < 2 or len(example) == 0:
            raise OptionError(
                "must be one tensor (n, channels, ...) with n > 0, because MIMO stacks inputs along dimension 1.",
                argument="example",
            )
        super().__init__([partial(self._member, index) for index in range(members)])
        trunk, heads = _widen(copy.deepcopy(network), members, example, check_seed(seed))
        self.trunk: Trunk = Trunk(trunk, members)
        self.heads: nn.ModuleList = nn.ModuleList(heads)

    @property
    def members(self) -> int:
        """Number K of inputs, which is also the number of heads."""
        return len(self.heads)

    @property
    def networks(self) -> tuple[HeadNetwork, ...]:
        """K ordinary classifiers, each of which applies the trunk to K copies of the input and then applies its own head."""
        return tuple(HeadNetwork(self.trunk, head) for head in self.heads)  # type: ignore[arg-type]

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits (K, n, C) of all heads, computed in eval mode and without gradients."""
        with evaluating(self), torch.no_grad():
            features = call(self.trunk, inputs)
            return torch.stack([head(features) for head in self.heads])

    def _member_outputs(self, inputs: Inputs, seed: int | None) -> list[Tensor]:
        logits = self.logits(inputs)
        check_finite(logits.flatten(0, 1)[:, :0], logits.flatten(0, 1))
        probs = CATEGORICAL.probabilities(to_float64(logits))
        return list(probs.to(torch.promote_types(logits.dtype, torch.float32)).to(logits.device))

    def _member(self, index: int, inputs: Inputs) -> Tensor:
        return self._member_outputs(inputs, None)[index]


class MimoMoLA(MoLA):
    """A posterior over the heads of one MIMO network. A prediction takes one pass through the shared trunk."""

    def capture(self, inputs: Inputs) -> list[Captured]:
        """Run the trunk once, and then run all heads on its features."""
        networks: Any = self.networks
        with evaluating(*networks), torch.no_grad():
            features = call(networks[0].trunk, inputs)
            outputs = [network.layer(features) for network in networks]
        return [Captured.of(features, own, one.head) for own, one in zip(outputs, self.components, strict=True)]


def mimo_mola(mimo: Mimo, train_loader: Iterable[Any], val_loader: Iterable[Any] | None = None, **options: Any) -> MoLA:
    """Fit MIMO-MoLA by calling `mola.fit(mimo.networks, ...)` with the paper's structure, "full", as the default.

    Each training input is repeated K times, as at test time. Fitting and tuning take K passes through the trunk per batch; a
    prediction takes one.

    Args:
        mimo: the trained network; it is not modified.
        train_loader: training data.
        val_loader: if given, validation data on which the posterior is tuned.
        **options: options for `mola.fit`.

    Returns:
        The posterior; load a saved one with `mola.load(directory, mimo.networks)`.
    """
    fitted = fit(mimo.networks, train_loader, val_loader, **({"structure": "full"} | options))
    weights = fitted.weights if fitted.weighting == "given" else fitted.weighting
    return MimoMoLA(fitted.components, fitted.link, weights, fitted.tuning, fitted.scaling)


class Trunk(nn.Module):
    """The trunk shared by K heads. It maps K copies of the input, joined along the channel axis, to features (n, P)."""

    def __init__(self, network: nn.Module, members: int) -> None:
        super().__init__()
        self.network: nn.Module = network
        self.members: int = members

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the features (n, P) of one batch (n, channels, ...)."""
        if not isinstance(inputs, Tensor):
            raise DataError(f"MIMO takes a single tensor (n, channels, ...) as input, got {type(inputs).__name__}.")
        return self.network(stack_inputs([inputs] * self.members))


class HeadNetwork(nn.Module):
    """An ordinary classifier that consists of the shared trunk and one head of a MIMO network."""

    def __init__(self, trunk: Trunk, layer: nn.Linear) -> None:
        super().__init__()
        self.trunk: Trunk = trunk
        self.layer: nn.Linear = layer

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits (n, C)."""
        return self.layer(self.trunk(inputs))


def stack_inputs(inputs: Sequence[Tensor]) -> Tensor:
    """Join K batches (n, channels, ...) along the channel axis."""
    if any(batch.dim() < 2 for batch in inputs):
        raise DataError(
            f"expected inputs of shape (n, channels, ...), got {tuple(inputs[0].shape)}. For a single input, pass a batch of one: "
            f"inputs[None]."
        )
    return torch.cat(list(inputs), dim=1)


def _widen(network: nn.Module, members: int, example: Tensor, seed: int) -> tuple[nn.Module, list[nn.Linear]]:
    # Modify the network so that it becomes the trunk, and return it together with K new heads.
    with evaluating(network):
        head = find_head(network, example)
        if not isinstance(head.layer, nn.Linear) or head.dense_axes:
            raise OptionError(
                "MIMO needs a network that ends in an nn.Linear and returns one row of logits for each input."
            )
        name, first = _first_layer(network, head, example)
        generator = torch.Generator("cpu").manual_seed(seed)
        heads = [_drawn_head(head.layer, generator) for _ in range(members)]
        try:
            if getattr(first, "groups", 1) != 1 or any(map(parametrize.is_parametrized, (first, head.layer))):
                raise DataError(
                    "grouped convolutions and parametrised layers or heads (for example with weight_norm) are not supported."
                )
            wide = _widened_layer(first, members, generator)
            _replace(network, first, wide)
            _replace(network, head.layer, nn.Identity())
            features = call(network, stack_inputs([example] * members))
            if features.shape != (len(example), head.layer.in_features):
                raise DataError(
                    f"the features have shape {tuple(features.shape)}, but the heads take {head.layer.in_features} features."
                )
        except (DataError, HeadError) as error:
            raise OptionError(
                f"{type(network).__name__} cannot be widened at its first layer {name!r}: {error} MIMO stacks inputs along dimension "
                f"1. The first layer must read this dimension as channels or features, and no earlier operation may change it."
            ) from error
    return network, heads


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
            f"{type(network).__name__} has no linear or convolutional layer before its head {head.name!r}. MIMO needs a trunk that "
            f"the inputs can share."
        )
    return ran[0]


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
