r"""The path of SGD that SWAG follows (Maddox et al., 2019), and the moments of the weights along it.

SGD runs with constant learning rate from a trained network, one snapshot per epoch. After the snapshots
:math:`\theta_1, \dots, \theta_T` there are the mean, the variance of each weight (mean of squares
minus square of the mean), and the last K columns :math:`d_t = \theta_t - \bar\theta_t`, each a deviation from the mean
of the snapshots up to its own, so that the first is 0. A draw is

.. math:: \theta = \bar\theta + \sqrt{s}\, \bigl(\sigma \odot z_1 + D z_2 / \sqrt{K - 1}\bigr),

with standard normal :math:`z_1, z_2`. The variance is kept as Welford's sum of products rather than as a mean of
squares: the same value, but nothing cancels in float32. That is (2 + K) values per weight, besides the network's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from mola.baselines.sgd import derived_seeds, seeded
from mola.errors import DataError, OptionError
from mola.likelihood import CATEGORICAL, Likelihood
from mola.network import as_batch, batch_count, call, peek
from mola.network.calling import Differentiable
from mola.network.fingerprint import signature_of
from mola.options import is_real
from mola.saving.training_checkpoint import DivergedError, TrainingCheckpoint, blame_inputs

SMALLEST_VARIANCE = 1e-30
"""Where a weight did not move."""


@dataclass(frozen=True)
class Moments:
    """Mean, spread and last deviations of named weights."""

    count: int
    """Number of snapshots."""
    mean: dict[str, Tensor]
    squares: dict[str, Tensor]
    """Sum of squared deviations from the mean, for each weight."""
    columns: dict[str, Tensor]
    """(K, ...): the last deviations, oldest first."""

    @staticmethod
    def start(weights: Mapping[str, Tensor]) -> Moments:
        """Of no snapshot yet. In float32 for weights in half precision, where small steps would be lost in the mean."""
        kinds = {name: torch.promote_types(tensor.dtype, torch.float32) for name, tensor in weights.items()}
        return Moments(
            0,
            {name: torch.zeros_like(tensor, dtype=kinds[name]) for name, tensor in weights.items()},
            {name: torch.zeros_like(tensor, dtype=kinds[name]) for name, tensor in weights.items()},
            {name: tensor.new_zeros((0, *tensor.shape), dtype=kinds[name]) for name, tensor in weights.items()},
        )

    def add(self, weights: Mapping[str, Tensor], rank: int) -> Moments:
        """With one more snapshot.

        Args:
            weights: the snapshot, by the same names.
            rank: how many columns to keep.

        Returns:
            New moments; the old ones are written over, as there is room for one only.
        """
        for name, theta in weights.items():
            mean = self.mean[name]
            before = theta - mean
            mean.add_(before / (self.count + 1))
            after = theta - mean
            self.squares[name].addcmul_(before, after)
            if rank:
                self.columns[name] = torch.cat([self.columns[name][1 - rank :], after[None]])
        return Moments(self.count + 1, self.mean, self.squares, self.columns)

    @property
    def rank(self) -> int:
        """Number of columns kept."""
        return len(next(iter(self.columns.values())))

    def variance(self, name: str) -> Tensor:
        """Of each weight over all snapshots, never below 1e-30."""
        return (self.squares[name] / self.count).clamp_min(SMALLEST_VARIANCE)

    def draw(self, seed: int, scale: float) -> dict[str, Tensor]:
        """Weights from the Gaussian; the same seed gives the same, on every device.

        Args:
            seed: of this draw.
            scale: of the covariance.

        Returns:
            Weights by name.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        shared = torch.randn(self.rank, generator=generator, dtype=torch.float64, device="cpu")
        drawn = {}
        for name in sorted(self.mean):  # files do not keep the order
            mean = self.mean[name]
            noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device="cpu").to(mean.device)
            step = self.variance(name).sqrt() * noise
            if self.rank:
                along = shared.to(mean) / (self.rank - 1) ** 0.5
                step = step + torch.tensordot(along, self.columns[name], dims=1)
            drawn[name] = mean + scale**0.5 * step
        return {name: drawn[name] for name in self.mean}

    def to(self, device: torch.device) -> Moments:
        """The same on another device."""
        parts = ({name: tensor.to(device) for name, tensor in part.items()} for part in self._parts())
        return Moments(self.count, *parts)

    def _parts(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        return self.mean, self.squares, self.columns

    def tensors(self) -> dict[str, Tensor]:
        """All numbers by name, for files."""
        kinds = zip(("mean", "squares", "columns"), self._parts(), strict=True)
        return {f"{kind}.{name}": tensor for kind, part in kinds for name, tensor in part.items()}

    @staticmethod
    def from_tensors(count: int, tensors: Mapping[str, Tensor]) -> Moments:
        """What `tensors` made."""
        parts: dict[str, dict[str, Tensor]] = {"mean": {}, "squares": {}, "columns": {}}
        for name, tensor in tensors.items():
            kind, own = name.split(".", 1)
            if kind in parts:
                parts[kind][own] = tensor
        return Moments(count, parts["mean"], parts["squares"], parts["columns"])


TRAINING = 0
"""Purpose of the seeds of the epochs."""

LOST = 10
"""Times the loss of guessing. A network with so much is sure and wrong: its confidence would meet any threshold."""


@dataclass(frozen=True)
class SgdPath:
    """How to walk.

    Args:
        learning_rate: constant.
        rank: how many deviations are kept; 0 keeps none (the diagonal form).
        momentum: of SGD, without Nesterov's change.
        weight_decay: in the gradient.
        seed: of the order of the data, dropout and augmentation.
    """

    learning_rate: float
    rank: int = 20
    momentum: float = 0.9
    weight_decay: float = 3e-4
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise OptionError(f"learning_rate must be a finite number above 0, got {self.learning_rate!r}.")
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0 or self.rank == 1:
            raise OptionError(f"rank must be 0 (the diagonal form) or a whole number of at least 2, got {self.rank!r}.")
        usable = is_real(self.momentum) and is_real(self.weight_decay)
        if not (usable and 0 <= self.momentum < 1 and math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise OptionError(
                f"momentum must lie in [0, 1) and weight_decay must be finite and not negative, got {self.momentum!r} "
                f"and {self.weight_decay!r}."
            )

    def follow(
        self,
        network: nn.Module,
        loader: Iterable[Any],
        epochs: int,
        checkpoint: Path | None,
        *,
        progress: bool,
        likelihood: Likelihood = CATEGORICAL,
    ) -> Moments:
        """Train a network of your own and collect its moments.

        Every epoch begins at a random state derived from the seed and the epoch's number, so that a path that was
        interrupted goes on to the same bits, provided that the loader draws from torch's random state alone.

        Args:
            network: is trained in place.
            loader: training data with labels, read once an epoch.
            epochs: number of snapshots.
            checkpoint: folder to keep the state in after every epoch, and to take it up from; None keeps nothing.
            progress: whether to show a progress bar on stderr, if that is a terminal.
            likelihood: what the outputs mean, and so what is minimised; of numbers, the squared error.

        Returns:
            The moments of the parameters that require gradients.
        """
        weights = trainable(network)
        optimiser = torch.optim.SGD(
            weights.values(), lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )
        # Other data of as many batches are not noticed: their order may differ from one reading to the next.
        known = {"batches": batch_count(loader), "network": signature_of(network)}
        identity = {"path": asdict(self), **known}
        keeper = None if checkpoint is None else TrainingCheckpoint(checkpoint, "swag-checkpoint", identity)
        moments = Moments.start({name: tensor.detach() for name, tensor in weights.items()})
        if keeper is not None:
            done, kept = keeper.restore(epochs, network, optimiser)
            if done:
                moments = Moments.from_tensors(done, kept).to(next(iter(weights.values())).device)
        seeds = derived_seeds(self.seed, TRAINING, epochs)
        bar = tqdm(
            range(moments.count, epochs),
            desc=f"SWAG at learning rate {self.learning_rate:g}",
            initial=moments.count,
            total=epochs,
            disable=None if progress else True,
            leave=False,
        )
        for epoch in bar:
            with seeded(network, seeds[epoch]):
                loss, chance = walk_epoch(network, loader, optimiser, likelihood)
            snapshot = {name: tensor.detach() for name, tensor in weights.items()}
            finite = math.isfinite(loss) and all(bool(torch.isfinite(tensor).all()) for tensor in snapshot.values())
            if not (finite and loss <= LOST * chance):
                raise DivergedError(
                    f"SWAG diverged in epoch {epoch + 1} of {epochs} at learning rate {self.learning_rate:g}: the mean "
                    f"loss is {loss:.4g}, and {chance:.4g} where nothing is known. Lower the learning rate; if none is low enough, "
                    f"the network did not fit these data to begin with."
                )
            moments = moments.add(snapshot, self.rank)
            if keeper is not None:
                keeper.save(moments.count, network, optimiser, more=moments.tensors())
        return moments


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by name.

    Args:
        network: any.

    Returns:
        At least one.
    """
    if not isinstance(network, nn.Module):
        raise OptionError(
            f"expected one trained nn.Module, got {type(network).__name__}. For several, use mola.multi_swag."
        )
    found = {name: tensor for name, tensor in network.named_parameters() if tensor.requires_grad}
    if not found:
        raise OptionError(
            f"no parameter of {type(network).__name__} requires gradients, so that SGD has nothing to move. "
            f"Call network.requires_grad_(True), or leave at least the last layer free."
        )
    return found


def walk_epoch(
    network: nn.Module,
    loader: Iterable[Any],
    optimiser: torch.optim.Optimizer,
    likelihood: Likelihood = CATEGORICAL,
) -> tuple[float, float]:
    """One epoch; the mean loss of its batches, and that of guessing: for numbers, of the mean of all targets."""
    network.train()
    differentiable = Differentiable(network)
    total, batches, chance = 0.0, 0, math.inf
    for index, raw in enumerate(peek(loader, "the training loader")[1]):
        place = f"batch {index} of the training loader"
        batch = as_batch(raw, place)
        if batch.labels is None:
            raise DataError(f"{place} has no labels. Yield (inputs, labels), or a mapping with 'labels'.")
        logits = likelihood.check_outputs(call(differentiable, batch.inputs))
        labels = likelihood.check_labels(batch.labels, logits, place)
        optimiser.zero_grad()
        with torch.enable_grad():
            loss = -likelihood.training_score(logits, labels).mean()
            loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        total, batches, chance = total + float(loss.detach()), batches + 1, likelihood.loss_of_guessing(logits, labels)
        if not math.isfinite(total):
            blame_inputs(batch.inputs, place)
            break
    return total / batches, chance
