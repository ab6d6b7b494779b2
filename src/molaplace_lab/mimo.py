r"""MIMO (Havasi et al., 2021): one network that takes K inputs at once and has a head for each input.

During training, the K inputs are differently shuffled copies of the same batch, and each head classifies its own input. At test
time, all K inputs are the same, and the heads, which share a trunk, are averaged like an ensemble:
:math:`p = \tfrac1K \sum_k \mathrm{softmax}(W_k \phi + b_k)`. MIMO-MoLA is the mixture of the heads' Laplace approximations:
`mola.fit(mimo.networks, ..., structure="full")`.

The first layer of the architecture is widened to accept K inputs. New weights are drawn at random from the old weights of the same
layer, to preserve the scale of the initialisation. Each head has as many weights as the original head. The first layer has K times as
many weights as before. These weights are divided by the square root of K so that the sum over K independent inputs keeps its variance.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from molaplace.errors import DataError, OptionError
from molaplace.network import checksum_of, state_of
from molaplace.progress import no_progress
from molaplace_lab.activations import Network
from molaplace_lab.activations_file import StoredActivations
from molaplace_lab.checksums import network_checksum
from molaplace_lab.context import RESUMED, Context
from molaplace_lab.methods import FittedMethod, LastLayerMethod
from molaplace_lab.models import fast_network
from molaplace_lab.suite import MimoBudget, TrainingData
from molaplace_lab.training import (
    RECIPES,
    Recipe,
    Shuffled,
    TrainingCheckpoint,
    derived_seeds,
    member_seeds,
    remaining_epochs,
    train_epoch,
)

LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

EPOCHS = 0  # the purpose of the seeds for epochs


class Mimo(nn.Module):
    """The multi-input multi-output (MIMO) form of an architecture; train it with `train_mimo`.

    Args:
        network: an untrained network, which is copied, not modified.
        members: number of inputs and heads, K.
        example: a batch of inputs, used to find the first and last layers.
        seed: random seed for the new weights of the first layer and the heads.
    """

    def __init__(self, network: nn.Module, members: int = 3, *, example: Tensor, seed: int = 0) -> None:
        super().__init__()
        trunk, heads = _widen(copy.deepcopy(network).eval(), members, example, seed)
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
        """Return the logits (K, n, C) of all heads."""
        features = self.trunk(inputs)
        return torch.stack([head(features) for head in self.heads])

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the mean probabilities (n, C) of all heads."""
        return self.logits(inputs).softmax(-1).mean(0)


class Trunk(nn.Module):
    """The trunk shared by K heads. It maps K copies of the input, joined along the channel axis, to features (n, P)."""

    def __init__(self, network: nn.Module, members: int) -> None:
        super().__init__()
        self.network: nn.Module = network
        self.members: int = members

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the features (n, P) of one batch (n, channels, ...)."""
        return self.network(torch.cat([inputs] * self.members, dim=1))


class HeadNetwork(nn.Module):
    """An ordinary classifier that consists of the shared trunk and one head of a MIMO network."""

    def __init__(self, trunk: Trunk, layer: nn.Linear) -> None:
        super().__init__()
        self.trunk: Trunk = trunk
        self.layer: nn.Linear = layer

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits (n, C)."""
        return self.layer(self.trunk(inputs))


# --- the wider architecture


def _widen(network: nn.Module, members: int, example: Tensor, seed: int) -> tuple[nn.Module, list[nn.Linear]]:
    # Modify the network so that it becomes the trunk, and return it together with K new heads.
    name, first, head = _end_layers(network, example)
    generator = torch.Generator("cpu").manual_seed(seed)
    heads = [_drawn_head(head, generator) for _ in range(members)]
    try:
        if getattr(first, "groups", 1) != 1 or any(map(parametrize.is_parametrized, (first, head))):
            raise DataError("grouped convolutions and parametrised layers are not supported.")
        _replace(network, first, _widened_layer(first, members, generator))
        _replace(network, head, nn.Identity())
        with torch.no_grad():
            features = network(torch.cat([example] * members, dim=1))
        if features.shape != (len(example), head.in_features):
            raise DataError(f"the features have shape {tuple(features.shape)}, but the heads take {head.in_features}.")
    except (DataError, RuntimeError, TypeError) as error:
        raise OptionError(
            f"{type(network).__name__} cannot be widened at its first layer {name!r}: {error} MIMO stacks inputs along dimension "
            f"1. The first layer must read this dimension as channels or features, and no earlier operation may change it."
        ) from error
    return network, heads


def _end_layers(network: nn.Module, example: Tensor) -> tuple[str, nn.Module, nn.Linear]:
    # Return the name of the first layer, the first layer and the last layer, in the order in which the layers run.
    calls: list[tuple[str, nn.Module, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda module, _, output, name=name: calls.append((name, module, output)))
        for name, module in network.named_modules()
        if isinstance(module, LAYERS)
    ]
    try:
        with torch.no_grad():
            outputs = network(example)
    finally:
        for handle in handles:
            handle.remove()
    if len(calls) < 2:
        raise OptionError(
            f"{type(network).__name__} has no linear or convolutional layer before its head. MIMO needs a trunk that the inputs can "
            f"share."
        )
    name, first, _ = calls[0]
    _, head, logits = calls[-1]
    if not isinstance(head, nn.Linear) or logits.dim() != 2 or not torch.equal(logits, outputs):
        raise OptionError(
            "MIMO needs a network that ends in an nn.Linear and returns one row of logits for each input."
        )
    return name, first, head


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


# --- training


def member_rows(
    size: int, members: int, batch_repetition: int, input_repetition: float, generator: torch.Generator | None = None
) -> Tensor:
    """Draw the index of an example in the batch for each member and row, as a CPU tensor of shape (K, size * batch_repetition).

    The batch is repeated and shuffled. Then, all but a fraction `input_repetition` of the rows are shuffled again for each member.
    """
    total = size * batch_repetition
    shared = torch.randperm(total, generator=generator) % size
    separate = int(total * (1 - input_repetition))
    orders = [shared[:separate][torch.randperm(separate, generator=generator)] for _ in range(members)]
    return torch.stack([torch.cat([order, shared[separate:]]) for order in orders])


def train_mimo(
    mimo: Mimo,
    loader: Shuffled | Sequence[tuple[Tensor, Tensor]],
    *,
    epochs: int = 100,
    batch_repetition: int = 4,
    input_repetition: float = 0.0,
    optimiser: Callable[[Iterable[nn.Parameter]], Optimizer] = RECIPES["cifar10"].make_optimiser,
    seed: int = 0,
    checkpoint: Path | None = None,
    progress: bool = True,
) -> Mimo:
    """Train the network in place and return it; the loss is the cross-entropy, summed over heads and averaged over rows.

    Args:
        mimo: the network to train.
        loader: training data, read once per epoch. The loader's shuffling and augmentation should draw from torch's random state, as
            in a `DataLoader`. The same seed then gives the same network, even after interruptions.
        epochs: number of epochs.
        batch_repetition: number of times that each member receives each example of a batch in one step.
        input_repetition: fraction of the rows in which all members receive the same example.
        optimiser: function that creates an optimiser for the given parameters; by default, the paper's optimiser for CIFAR-10. The
            learning rate falls to 0 along a half cosine, batch by batch.
        seed: seed for shuffling, dropout and augmentation.
        checkpoint: file in which the state is saved after every epoch, so that interrupted training can be resumed.
        progress: show a progress bar on stderr if stderr is a terminal.
    """
    network = nn.ModuleDict({"trunk": mimo.trunk.network, "heads": mimo.heads})
    steps = epochs * len(loader)
    optimiser_of_network = optimiser(network.parameters())
    schedule = CosineAnnealingLR(optimiser_of_network, steps)
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimiser_of_network.param_groups
    ]
    identity = {
        "members": mimo.members,
        "seed": seed,
        "batch_repetition": batch_repetition,
        "input_repetition": input_repetition,
        "steps": steps,
        "optimiser": [type(optimiser_of_network).__name__, repr(groups)],
        "network": checksum_of(state_of(network)),
    }

    def loss_of(inputs: Tensor, labels: Tensor) -> tuple[Tensor, float]:
        rows = member_rows(len(inputs), mimo.members, batch_repetition, input_repetition)
        features = mimo.trunk.network(torch.cat([inputs[row.to(inputs.device)] for row in rows], dim=1))
        pairs = zip(mimo.heads, labels[rows.to(labels.device)], strict=True)
        losses = [functional.cross_entropy(head(features), head_labels) for head, head_labels in pairs]
        return torch.stack(losses).sum(), math.inf

    seeds = derived_seeds(seed, EPOCHS, epochs)
    saved = None if checkpoint is None else TrainingCheckpoint(checkpoint, identity)
    bar = "MIMO" if progress else ""
    for epoch in remaining_epochs(saved, epochs, network, optimiser_of_network, schedule, progress=bar):
        where = f"epoch {epoch + 1} of {epochs}"
        train_epoch(network, loader, optimiser_of_network, loss_of, where, schedule=schedule, seed=seeds[epoch])
    network.eval()
    return mimo


# --- in suites


def stored_mimo(
    build: Callable[[], nn.Module],
    training: TrainingData,
    recipe: Recipe,
    budget: MimoBudget,
    seed: int,
    folder: Path | None,
    device: str = "cpu",
) -> Mimo:
    """Train the MIMO version of an architecture with the suite's recipe, or resume from a checkpoint."""
    example = training.example()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build().to(device, example.dtype)
    mimo = Mimo(network, budget.members, example=example, seed=seed)
    fast_network(mimo, example)
    return train_mimo(
        mimo,
        training.batches(recipe.batch_size),
        epochs=budget.epochs,
        batch_repetition=budget.batch_repetition,
        optimiser=recipe.make_optimiser,
        seed=seed,
        checkpoint=None if folder is None else folder / "training.safetensors",
        progress=False,
    )


@dataclass(frozen=True)
class MimoHeads:
    """A last-layer method applied to the heads of a MIMO network: either MIMO itself or MIMO-MoLA.

    The network is trained specifically for this method.
    """

    method: LastLayerMethod
    budget: MimoBudget
    components: int | None = 0
    """Number of the suite's networks that the method uses: always 0, because it trains a MIMO network of its own."""

    @property
    def name(self) -> str:
        """Name of the method."""
        return self.method.name

    @property
    def group(self) -> str:
        """Group of the method."""
        return self.method.group

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {**self.method.settings(), "components": self.budget.members, "mimo": asdict(self.budget)}

    def fit(self, context: Context) -> FittedMethod:
        """Train the network or resume its training, and then fit the method to the network's heads."""
        start = time.perf_counter()
        recipe = context.suite.recipe
        activations = context.activations
        seed = member_seeds(context.run + 1, 0)[context.run]
        identity = ({**recipe.describe(), "epochs": self.budget.epochs}, asdict(self.budget), seed)
        mimo = stored_mimo(
            context.networks[0].build,
            context.training(),
            recipe,
            self.budget,
            seed,
            context.folder("mimo", *identity),
            context.device,
        )
        seconds = time.perf_counter() - start
        key = network_checksum(mimo, context.network)
        heads = [Network(None, partial(mimo.networks.__getitem__, k), f"{key}-{k}") for k in range(self.budget.members)]

        def read(name: str) -> StoredActivations:
            activations.compute(heads, [context.sources[name]], no_progress)
            return activations.read(heads, context.sources[name])

        fitted = self.method.fit(replace(context, read=read))
        notes = [*fitted.chosen.get("notes", []), RESUMED]
        return replace(fitted, chosen={**fitted.chosen, "notes": notes}, seconds=seconds + fitted.seconds)
