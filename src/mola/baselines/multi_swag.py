"""MultiSWAG (Wilson and Izmailov, 2020): the mixture of several SWAGs, each from a trained network of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from mola import folders
from mola.baselines import swag_files
from mola.baselines.learning_rates import LearningRateTuning, as_rates, choose_learning_rate
from mola.baselines.seeds import derived_seeds
from mola.baselines.swag import ONE_RATE, Swag
from mola.errors import OptionError, StorageError
from mola.fitting import ensemble
from mola.mixture import Mixture
from mola.prior import ConfidenceThreshold

__all__ = ["MultiSwag", "multi_swag"]

MEMBERS = 3
"""Purpose of the seeds of the members."""


class MultiSwag(Mixture):
    """The uniform mixture of SWAGs. Made by `mola.multi_swag` or `mola.MultiSwag.load`.

    Args:
        swags: one for each trained network.
        tuning: how their learning rate was chosen, if it was.
    """

    def __init__(self, swags: Sequence[Swag], tuning: LearningRateTuning | None = None) -> None:
        """Bind the SWAGs."""
        super().__init__(swags)
        self.swags, self.tuning = tuple(swags), tuning

    def save(self, directory: str | Path) -> Path:
        """Save every SWAG in a folder of its own inside this one.

        Args:
            directory: folder to write to.

        Returns:
            The folder, for `mola.MultiSwag.load(directory, models)`.
        """
        names = [f"swag-{index}" for index in range(len(self.swags))]
        for name, swag in zip(names, self.swags, strict=True):
            swag.save(Path(directory) / name)
        tuning = None if self.tuning is None else self.tuning.as_json()
        return folders.save(directory, "multi-swag", {"swags": names, "tuning": tuning}, {})

    @classmethod
    def load(cls, directory: str | Path, models: nn.Module | Sequence[nn.Module]) -> MultiSwag:
        """Load what `save` wrote.

        Args:
            directory: folder that `save` wrote.
            models: one network of the same architecture for all, or one for each; copies are used.

        Returns:
            The predictor.

        Raises:
            StorageError: if the files are damaged, or there are not as many networks.
        """
        document, _ = folders.load(directory, "multi-swag", {"swags": [str], "tuning": swag_files.SCHEMA["tuning"]})
        names = document["swags"]
        networks = ensemble(models).networks
        networks = networks * len(names) if len(networks) == 1 else networks
        if not names or len(networks) != len(names):
            message = f"{directory} was saved with {len(names)} SWAGs, got {len(networks)} models."
            raise StorageError(message)
        tuning = None if document["tuning"] is None else LearningRateTuning.from_json(document["tuning"])
        return cls(
            [Swag.load(Path(directory) / Path(name).name, own) for name, own in zip(names, networks, strict=True)],
            tuning,
        )


def multi_swag(
    models: Sequence[nn.Module],
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    *,
    learning_rate: float | Sequence[float] = 1e-2,
    rule: ConfidenceThreshold | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    **options: Any,
) -> MultiSwag:
    """MultiSWAG: the uniform mixture of one SWAG from each trained network.

    Args:
        models: K trained classifiers; they are not modified.
        train_loader: training data with labels.
        val_loader: validation data, to choose among several learning rates.
        learning_rate: one number, or several: one is chosen for all, the largest with which the mixture's mean
            confidence on the validation data meets the threshold.
        rule: the threshold; None is the paper's, a little below the networks' own mean accuracy.
        seed: from which each SWAG has its own.
        checkpoint: folder to keep the paths in.
        **options: of `Swag.fit`, for each: epochs, rank, samples, ...

    Returns:
        The mixture.

    Raises:
        OptionError: if an option cannot be used.
    """
    networks = ensemble(models).networks
    seeds = derived_seeds(seed, MEMBERS, len(networks))

    def make(rate: float) -> MultiSwag:
        members = []
        for index, (network, own) in enumerate(zip(networks, seeds, strict=True)):
            folder = None if checkpoint is None else Path(checkpoint) / f"model-{index}-learning-rate-{rate:g}"
            swag = Swag.fit(network, train_loader, learning_rate=rate, seed=own, checkpoint=folder, **options)
            members.append(swag)
        return MultiSwag(members)

    rates, several = as_rates(learning_rate)
    if not several:
        if val_loader is not None or rule is not None:
            raise OptionError(ONE_RATE)
        return make(rates[0])
    plain = [ensemble(network) for network in networks]
    chosen = choose_learning_rate(rates, make, plain, val_loader, rule)
    chosen.predictor.tuning = chosen.tuning
    return chosen.predictor
