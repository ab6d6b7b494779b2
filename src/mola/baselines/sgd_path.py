"""A path of SGD with constant learning rate from a trained network, one snapshot an epoch: where SWAG gets its moments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from mola.baselines import folders
from mola.baselines.passes import Differentiable
from mola.baselines.seeds import derived_seeds, seeded
from mola.baselines.snapshots import Moments
from mola.errors import DataError, OptionError, StorageError
from mola.features import peek
from mola.heads import check_logits
from mola.likelihood import CATEGORICAL
from mola.networks import as_batch, call
from mola.storage import DOCUMENT

__all__ = ["DivergedError", "SgdPath", "trainable"]

TRAINING = 0
"""Purpose of the seeds of the epochs."""


class DivergedError(DataError):
    """The loss is no longer finite: the learning rate is too high."""


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
        if not 0 <= self.momentum < 1 or not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
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
            DivergedError: naming the epoch, if the loss or the weights are no longer finite.
        """
        weights = trainable(network)
        optimiser = torch.optim.SGD(
            weights.values(), lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )
        keeper = None if checkpoint is None else _Keeper(checkpoint, self, folders.signature_of(network))
        moments = Moments.start({name: tensor.detach() for name, tensor in weights.items()})
        if keeper is not None:
            moments = keeper.restore(network, weights, optimiser, moments, epochs)
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
                loss = _epoch(network, loader, optimiser)
            snapshot = {name: tensor.detach() for name, tensor in weights.items()}
            if not (math.isfinite(loss) and all(bool(torch.isfinite(tensor).all()) for tensor in snapshot.values())):
                message = (
                    f"SWAG diverged in epoch {epoch + 1} of {epochs} at learning rate {self.learning_rate:g}: the mean "
                    f"loss is {loss:.4g}. Lower the learning rate."
                )
                raise DivergedError(message)
            moments = moments.add(snapshot, self.rank)
            if keeper is not None:
                keeper.save(network, weights, optimiser, moments)
        return moments


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by name.

    Args:
        network: any.

    Returns:
        At least one.

    Raises:
        OptionError: if all are frozen.
    """
    found = {name: tensor for name, tensor in network.named_parameters() if tensor.requires_grad}
    if not found:
        message = (
            f"no parameter of {type(network).__name__} requires gradients, so that SGD has nothing to move. "
            f"Call network.requires_grad_(True), or leave at least the last layer free."
        )
        raise OptionError(message)
    return found


def _epoch(network: nn.Module, loader: Iterable[Any], optimiser: torch.optim.Optimizer) -> float:
    """One epoch; the mean loss of its batches.

    Raises:
        DataError: if a batch has no labels.
    """
    network.train()
    differentiable = Differentiable(network)
    total, batches = 0.0, 0
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
        total, batches = total + float(loss.detach()), batches + 1
        if not math.isfinite(total):
            break
    return total / batches


@dataclass(frozen=True)
class _Keeper:
    """The state after an epoch, in a folder."""

    folder: Path
    path: SgdPath
    start: dict[str, Any]
    """Signature of the network at the start."""

    @property
    def _identity(self) -> dict[str, Any]:
        return {"path": asdict(self.path), "network": self.start}

    def save(
        self, network: nn.Module, weights: dict[str, nn.Parameter], optimiser: torch.optim.Optimizer, moments: Moments
    ) -> None:
        momentum = {
            f"momentum.{name}": optimiser.state[parameter]["momentum_buffer"]
            for name, parameter in weights.items()
            if optimiser.state[parameter].get("momentum_buffer") is not None
        }
        state = {f"state.{name}": tensor for name, tensor in _state(network).items()}
        document = {"epochs": moments.count, "identity": self._identity}
        folders.save(self.folder, "swag-checkpoint", document, moments.tensors() | momentum | state)

    def restore(
        self,
        network: nn.Module,
        weights: dict[str, nn.Parameter],
        optimiser: torch.optim.Optimizer,
        fresh: Moments,
        epochs: int,
    ) -> Moments:
        if not (self.folder / DOCUMENT).exists():
            return fresh
        document, tensors = folders.load(self.folder, "swag-checkpoint", {"epochs": int, "identity": {"path": {}}})
        if document["identity"] != self._identity:
            message = (
                f"{self.folder} is the checkpoint of another path or another network: expected {self._identity}, got "
                f"{document['identity']}. Delete it, or use another folder."
            )
            raise StorageError(message)
        if document["epochs"] > epochs:
            message = (
                f"{self.folder} holds {document['epochs']} epochs, more than the {epochs} that are asked for. Ask for as "
                f"many, or use another folder."
            )
            raise StorageError(message)
        state, device = _state(network), next(iter(weights.values())).device
        wrong = [
            name
            for name, tensor in state.items()
            if getattr(tensors.get(f"state.{name}"), "shape", None) != tensor.shape
        ]
        if wrong:
            message = f"{self.folder} is the checkpoint of another network: {wrong[0]} is missing or has another shape."
            raise StorageError(message)
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(tensors[f"state.{name}"])
        for name, parameter in weights.items():
            if f"momentum.{name}" in tensors:
                optimiser.state[parameter]["momentum_buffer"] = tensors[f"momentum.{name}"].to(device)
        return Moments.from_tensors(document["epochs"], tensors).to(device)


def _state(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, those that a state dictionary leaves out included, each once."""
    named = [*network.named_parameters(), *network.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}
