"""MultiSWAG (Wilson and Izmailov, 2020): the mixture of several SWAGs, each from a trained network of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from mola.baselines.learning_rates import choose_learning_rate
from mola.baselines.seeds import derived_seeds
from mola.baselines.swag import ONE_RATE, Swag
from mola.errors import OptionError
from mola.fitting import ensemble
from mola.mixture import Mixture
from mola.prior import ConfidenceThreshold

__all__ = ["multi_swag"]

MEMBERS = 3
"""Purpose of the seeds of the members."""


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
) -> Mixture:
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
        The mixture; its `predictors` are the SWAGs, each of which can be saved.

    Raises:
        OptionError: if an option cannot be used.
    """
    networks = ensemble(models).networks
    seeds = derived_seeds(seed, MEMBERS, len(networks))

    def make(rate: float) -> Mixture:
        members = []
        for index, (network, own) in enumerate(zip(networks, seeds, strict=True)):
            folder = None if checkpoint is None else Path(checkpoint) / f"model-{index}-learning-rate-{rate:g}"
            swag = Swag.fit(network, train_loader, learning_rate=rate, seed=own, checkpoint=folder, **options)
            members.append(swag)
        return Mixture(members)

    if isinstance(learning_rate, (int, float)):
        if val_loader is not None or rule is not None:
            raise OptionError(ONE_RATE)
        return make(learning_rate)
    plain = [ensemble(network) for network in networks]
    return choose_learning_rate(list(learning_rate), make, plain, val_loader, rule).predictor
