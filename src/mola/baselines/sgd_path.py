"""A path of SGD with constant learning rate from a trained network, one snapshot an epoch: where SWAG gets its moments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from mola import folders
from mola.baselines.keeping import DivergedError, Keeper, blame_inputs
from mola.baselines.seeds import derived_seeds, seeded
from mola.baselines.snapshots import Moments
from mola.choices import is_real
from mola.errors import DataError, OptionError
from mola.features import batch_count, peek
from mola.heads import check_logits
from mola.likelihood import CATEGORICAL
from mola.networks import as_batch, call
from mola.networks.passes import Differentiable

__all__ = ["SgdPath", "trainable", "walk_epoch"]

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

    Raises:
        OptionError: if a number cannot be used.
    """

    learning_rate: float
    rank: int = 20
    momentum: float = 0.9
    weight_decay: float = 3e-4
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            OptionError: if one cannot be used.
        """
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            message = f"learning_rate must be a finite number above 0, got {self.learning_rate!r}."
            raise OptionError(message)
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0 or self.rank == 1:
            message = f"rank must be 0 (the diagonal form) or a whole number of at least 2, got {self.rank!r}."
            raise OptionError(message)
        usable = is_real(self.momentum) and is_real(self.weight_decay)
        if not (usable and 0 <= self.momentum < 1 and math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            message = (
                f"momentum must lie in [0, 1) and weight_decay must be finite and not negative, got {self.momentum!r} "
                f"and {self.weight_decay!r}."
            )
            raise OptionError(message)

    def follow(
        self, network: nn.Module, loader: Iterable[Any], epochs: int, checkpoint: Path | None, *, progress: bool
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

        Returns:
            The moments of the parameters that require gradients.

        Raises:
            DivergedError: naming the epoch, if the loss or the weights are no longer finite, or the loss is many times that
                of guessing.
        """
        weights = trainable(network)
        optimiser = torch.optim.SGD(
            weights.values(), lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )
        # Other data of as many batches are not noticed: their order may differ from one reading to the next.
        known = {"batches": batch_count(loader), "network": folders.signature_of(network)}
        identity = {"path": asdict(self), **known}
        keeper = None if checkpoint is None else Keeper(checkpoint, "swag-checkpoint", identity)
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
                loss, chance = walk_epoch(network, loader, optimiser)
            snapshot = {name: tensor.detach() for name, tensor in weights.items()}
            finite = math.isfinite(loss) and all(bool(torch.isfinite(tensor).all()) for tensor in snapshot.values())
            if not (finite and loss <= LOST * chance):
                message = (
                    f"SWAG diverged in epoch {epoch + 1} of {epochs} at learning rate {self.learning_rate:g}: the mean "
                    f"loss is {loss:.4g}, and {chance:.4g} where nothing is known. Lower the learning rate; if none is low enough, "
                    f"the network did not fit these data to begin with."
                )
                raise DivergedError(message)
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

    Raises:
        OptionError: if all are frozen, or this is no network.
    """
    if not isinstance(network, nn.Module):
        message = f"expected one trained nn.Module, got {type(network).__name__}. For several, use mola.multi_swag."
        raise OptionError(message)
    found = {name: tensor for name, tensor in network.named_parameters() if tensor.requires_grad}
    if not found:
        message = (
            f"no parameter of {type(network).__name__} requires gradients, so that SGD has nothing to move. "
            f"Call network.requires_grad_(True), or leave at least the last layer free."
        )
        raise OptionError(message)
    return found


def walk_epoch(network: nn.Module, loader: Iterable[Any], optimiser: torch.optim.Optimizer) -> tuple[float, float]:
    """One epoch; the mean loss of its batches, and that of guessing.

    Raises:
        DataError: if a batch has no labels.
    """
    network.train()
    differentiable = Differentiable(network)
    total, batches, chance = 0.0, 0, math.inf
    for index, raw in enumerate(peek(loader, "the training loader")[1]):
        place = f"batch {index} of the training loader"
        batch = as_batch(raw, place)
        if batch.labels is None:
            message = f"{place} has no labels. Yield (inputs, labels), or a mapping with 'labels'."
            raise DataError(message)
        logits = call(differentiable, batch.inputs)
        check_logits(logits)
        labels = CATEGORICAL.check_labels(batch.labels, logits, place)
        optimiser.zero_grad()
        with torch.enable_grad():
            loss = -CATEGORICAL.log_likelihood(logits, labels).mean()
            loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        total, batches, chance = total + float(loss.detach()), batches + 1, math.log(logits.shape[1])
        if not math.isfinite(total):
            blame_inputs(batch.inputs, place)
            break
    return total / batches, chance
