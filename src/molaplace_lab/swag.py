r"""SWAG (Maddox et al., 2019): average the predictions of networks drawn from a Gaussian fitted to SGD snapshots.

From a trained network, SGD continues at a constant learning rate. From its snapshots :math:`\theta_1, \dots, \theta_T`, one per
epoch, SWAG keeps the mean, the variance of each weight, and the last K deviations :math:`d_t = \theta_t - \bar\theta_t` from the
mean of the snapshots so far. A draw is

.. math:: \theta = \bar\theta + \sqrt{s}\, \bigl(\sigma \odot z_1 + D z_2 / \sqrt{K - 1}\bigr), \qquad z_1, z_2 \sim \mathcal N(0, I).

The BatchNorm statistics of each draw are recomputed in one pass over the training data. SWAG is `mola.ensemble` of the draws, and
MultiSWAG (Wilson and Izmailov, 2020) is `mola.ensemble` of the draws from several trained networks.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from tqdm.auto import tqdm

from molaplace.errors import OptionError
from molaplace.network import checksum_of, state_of
from molaplace.options import one_of
from molaplace_lab.activations import Network
from molaplace_lab.context import RESUMED, Context, Predictor, StoredPrediction
from molaplace_lab.files import read_tensors, write_tensors
from molaplace_lab.methods import FittedMethod
from molaplace_lab.models import fast_network
from molaplace_lab.suite import SwagBudget, TrainingData
from molaplace_lab.training import (
    LOSSES,
    Loader,
    TrainingCheckpoint,
    derived_seeds,
    remaining_epochs,
    seeded,
    train_epoch,
)

SMALLEST_VARIANCE = 1e-30  # variance assigned to a weight that did not change

EPOCHS, DRAWS, PASSES = 0, 1, 2  # purposes of the seeds: epochs, draws, and passes for BatchNorm statistics

LARGEST_LOSS = 10
"""Largest acceptable mean loss over an epoch, as a multiple of the loss of a constant prediction; above it, SGD is considered to have
diverged."""


@dataclass
class Moments:
    """Means, squared deviations and most recent deviations of the weights over the snapshots, all kept in main memory."""

    count: int = 0
    """Number of snapshots."""
    mean: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    """For each weight, the sum of squared deviations from the mean; Welford's method avoids cancellation in float32."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """The last K deviations, of shape (K, ...), oldest first."""

    def add(self, weights: Mapping[str, Tensor], rank: int) -> None:
        """Add one snapshot in place, keeping only the last `rank` deviations."""
        self.count += 1
        for name, tensor in weights.items():
            # Use at least float32, since a mean in half precision would lose small steps.
            theta = tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32))
            mean = self.mean.setdefault(name, torch.zeros_like(theta))
            before = theta - mean
            mean.add_(before / self.count)
            after = theta - mean
            self.squares.setdefault(name, torch.zeros_like(theta)).addcmul_(before, after)
            columns = self.columns.setdefault(name, theta.new_zeros((0, *theta.shape)))
            if rank:
                self.columns[name] = torch.cat([columns[1 - rank :], after[None]])

    @property
    def rank(self) -> int:
        """Number of stored deviations."""
        return len(next(iter(self.columns.values())))

    def variance(self, name: str) -> Tensor:
        """Return the variance of each weight over all snapshots."""
        return (self.squares[name] / self.count).clamp_min(SMALLEST_VARIANCE)

    def draw(self, seed: int, scale: float) -> dict[str, Tensor]:
        """Draw weights from the Gaussian after multiplying its covariance by `scale`."""
        generator = torch.Generator("cpu").manual_seed(seed)
        shared = torch.randn(self.rank, generator=generator, dtype=torch.float64, device="cpu")
        drawn = {}
        for name in sorted(self.mean):  # sorted, since files do not preserve the order
            mean = self.mean[name]
            noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device="cpu")
            step = self.variance(name).sqrt() * noise
            if self.rank:
                step = step + torch.tensordot(shared.to(mean) / (self.rank - 1) ** 0.5, self.columns[name], dims=1)
            drawn[name] = mean + scale**0.5 * step
        return drawn

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, keyed by name, for saving."""
        parts = {"mean": self.mean, "squares": self.squares, "columns": self.columns}
        return {f"{kind}.{name}": tensor for kind, part in parts.items() for name, tensor in part.items()}

    @staticmethod
    def from_tensors(count: int, tensors: Mapping[str, Tensor]) -> Moments:
        """Rebuild the moments from the output of `tensors`."""
        moments = Moments(count)
        for name, tensor in tensors.items():
            kind, _, weight = name.partition(".")
            getattr(moments, kind)[weight] = tensor
        return moments


def fit_swag(
    network: nn.Module,
    loader: Loader,
    *,
    samples: int = 30,
    scale: float | None = None,
    seed: int = 0,
    progress: bool = True,
    **options: Any,
) -> list[nn.Module]:
    """Fit SWAG to a trained network, which is not modified, and return the drawn networks; their `mola.ensemble` is the predictor.

    Args:
        network: the trained network.
        loader: training data, read once per epoch, and once per draw if the network has BatchNorm. Its shuffling and augmentation
            should draw from torch's random state, as in a `DataLoader`.
        samples: number of draws.
        scale: factor by which the covariance is multiplied; by default, 0.5, or 1 for the diagonal form, as in the SWAG paper.
        seed: random seed for the SGD path and the draws.
        progress: show a progress bar on stderr if stderr is a terminal.
        **options: options for `fit_moments`: learning_rate, epochs, rank, ...

    Raises:
        DivergedError: the learning rate is too high.
    """
    trained = copy.deepcopy(network)
    moments = fit_moments(trained, loader, seed=seed, progress=progress, **options)
    scale = (0.5 if moments.rank else 1.0) if scale is None else scale
    passes = derived_seeds(seed, PASSES, samples)
    networks = []
    for index in tqdm(range(samples), desc="draws", disable=None if progress else True, leave=False):
        drawn = draw_network(trained, moments, seed, index, scale)
        if norm_layers(drawn):
            with seeded(drawn, passes[index]):
                recompute_statistics(drawn, loader)
        networks.append(drawn.eval().requires_grad_(False))
    return networks


def fit_moments(
    network: nn.Module,
    loader: Loader,
    *,
    learning_rate: float = 1e-2,
    epochs: int = 40,
    rank: int = 20,
    momentum: float = 0.9,
    weight_decay: float = 3e-4,
    seed: int = 0,
    loss: str = "cross-entropy",
    checkpoint: Path | None = None,
    progress: bool = True,
) -> Moments:
    """Continue the training of a network in place by SGD, take a snapshot after each epoch, and return the snapshots' moments.

    Args:
        network: the trained network.
        loader: training data.
        learning_rate: constant learning rate of SGD.
        epochs: number of snapshots.
        rank: maximum number of deviations to keep (the most recent ones, one per epoch); 0 gives the diagonal form.
        momentum: momentum of SGD (without Nesterov acceleration).
        weight_decay: weight decay of SGD.
        seed: random seed; an epoch's random state depends only on this seed and the epoch's index.
        loss: name of the loss, one of `molaplace_lab.training.LOSSES`.
        checkpoint: file in which the state is saved after every epoch. An interrupted fit continues from this state and gives
            identical results. A completed fit is continued if more epochs are requested.
        progress: show a progress bar on stderr if stderr is a terminal.
    """
    if rank == 1:
        raise OptionError("must be 0 (for the diagonal form) or at least 2; got 1.", argument="rank")
    if epochs < 2:
        raise OptionError(f"must be at least 2; got {epochs}.", argument="epochs")
    weights = {name: tensor for name, tensor in network.named_parameters() if tensor.requires_grad}
    if not weights:
        raise OptionError("the network is frozen: none of its parameters require gradients.", argument="network")
    seeds = derived_seeds(seed, EPOCHS, epochs)
    optimiser = torch.optim.SGD(weights.values(), lr=learning_rate, momentum=momentum, weight_decay=weight_decay)
    moments = Moments()

    def resume(snapshots: int, tensors: dict[str, Tensor]) -> None:
        nonlocal moments
        moments = Moments.from_tensors(snapshots, tensors)

    identity = {
        "settings": [learning_rate, momentum, weight_decay, rank, seed, loss],
        "network": checksum_of(state_of(network)),
    }
    epoch_indices = remaining_epochs(
        None if checkpoint is None else TrainingCheckpoint(checkpoint, identity),
        epochs,
        network,
        optimiser,
        state=lambda: moments.tensors(),
        resume=resume,
        progress="SWAG" if progress else "",
    )
    for epoch in epoch_indices:
        where = f"epoch {epoch + 1} of {epochs}"
        train_epoch(network, loader, optimiser, swag_loss(network, loss), where, seed=seeds[epoch])
        moments.add(weights, rank)
    return moments


def swag_loss(network: nn.Module, loss: str = "cross-entropy") -> Callable[[Tensor, Tensor], tuple[Tensor, float]]:
    """Return a function that maps a batch to its mean loss and to the largest acceptable loss (see `LARGEST_LOSS`)."""
    losses = LOSSES[one_of(loss, LOSSES, "loss")]

    def loss_of(inputs: Tensor, labels: Tensor) -> tuple[Tensor, float]:
        outputs = network(inputs)
        constant = losses(torch.zeros_like(outputs), labels).mean()
        return losses(outputs, labels).mean(), LARGEST_LOSS * float(constant)

    return loss_of


def draw_network(network: nn.Module, moments: Moments, seed: int, index: int, scale: float) -> nn.Module:
    """Return a copy of the network with the weights of draw number `index`, which do not depend on the number of draws."""
    drawn = copy.deepcopy(network)
    weights = moments.draw(derived_seeds(seed, DRAWS, index + 1)[index], scale)
    with torch.no_grad():
        for name, parameter in drawn.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
    return drawn


def class_probabilities(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return the class probabilities (n, C) that a network in eval mode predicts."""
    return network(inputs).double().softmax(1).float()


def norm_layers(network: nn.Module) -> list[_NormBase]:
    """Return the layers that keep running statistics of their inputs, such as BatchNorm."""
    layers = [module for module in network.modules() if isinstance(module, _NormBase)]
    return [layer for layer in layers if layer.running_mean is not None]


def recompute_statistics(network: nn.Module, loader: Loader) -> None:
    """Set the BatchNorm statistics to averages over all batches, weighted by batch size, in one pass in training mode."""
    layers = norm_layers(network)
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
    network.train()
    count = 0
    with torch.no_grad():
        for inputs, _ in loader:
            count += len(inputs)
            for layer in layers:
                layer.momentum = len(inputs) / count
            network(inputs)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    network.eval()


# --- in suites


def stored_draws(
    network: Network, training: TrainingData, budget: SwagBudget, folder: Path | None, device: str = "cpu"
) -> list[nn.Module]:
    """Fit SWAG to a network of a suite, or resume an interrupted fit, and return the drawn networks, which are stored in `folder`.

    The seed is derived from the network, so all runs share the result.
    """
    model = fast_network(network.load().to(device), training.example())
    draws_path = None if folder is None else folder / "draws.safetensors"
    if draws_path is not None and draws_path.exists():
        return _read_draws(model, draws_path, budget.samples)
    draws = fit_swag(
        model,
        training.batches(budget.batch_size, budget.images),
        learning_rate=budget.learning_rate,
        epochs=budget.snapshots,
        rank=budget.snapshots,
        samples=budget.samples,
        seed=int(network.checksum, 16) % 2**31,
        checkpoint=None if folder is None else folder / "training.safetensors",
        progress=False,
    )
    if draws_path is not None:
        states = [draw.state_dict() for draw in draws]
        stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        write_tensors(draws_path, stacked, {})
    return draws


def _read_draws(model: nn.Module, path: Path, samples: int) -> list[nn.Module]:
    tensors, _ = read_tensors(path)
    draws = [copy.deepcopy(model) for _ in range(samples)]
    for index, draw in enumerate(draws):
        draw.load_state_dict({name: stacked[index] for name, stacked in tensors.items()})
    return draws


@dataclass(frozen=True)
class SwagMixture:
    """SWAG for one network, or MultiSWAG (a mixture of SWAGs) for several networks."""

    name: str
    budget: SwagBudget
    components: int | None = None
    group: str = "main"

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {"weights": "uniform", "swag": asdict(self.budget)}

    def fit(self, context: Context) -> FittedMethod:
        """Fit SWAG for every network, or resume an interrupted fit."""
        start = time.perf_counter()
        predictors: dict[str, list[Predictor]] = {}
        for network in context.networks[: self.components]:
            folder = context.folder("swag", network.checksum, asdict(self.budget))
            draws = stored_draws(network, context.training(), self.budget, folder, context.device)
            predictors[folder.name] = [partial(class_probabilities, draw) for draw in draws]
        return FittedMethod(
            lambda name: context.predictions(name, predictors),
            lambda members, _: StoredPrediction.mean(members).with_scores(len(members) * self.budget.samples),
            {"notes": [RESUMED]},
            time.perf_counter() - start,
        )
