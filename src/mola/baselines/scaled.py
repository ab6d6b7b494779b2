"""Networks whose logits are divided by temperatures: MAP, an ensemble with one for all or one for each, or the pool."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from mola import folders
from mola.baselines.temperature import (
    fit_member_temperatures,
    fit_pooled_temperature,
    fit_temperature,
    pooled_log_probabilities,
)
from mola.choices import counted, one_of
from mola.component import per_component
from mola.errors import DataError, OptionError, StorageError, located
from mola.features import check_finite
from mola.fingerprints import Watch
from mola.fitting import ensemble
from mola.mixture import Mixture
from mola.networks import Inputs, one_batch, undisturbed, without_autocast
from mola.prediction import Prediction
from mola.tuning import read_held_out
from mola.uncertainty import entropy, max_probability_score, mutual_information

__all__ = ["TemperatureScaled", "temperature_scaled"]

MODES = ("shared", "members", "pooled")
SCHEMA = {"temperatures": [float], "weights": [float], "pooled": bool, "networks": [folders.NETWORK]}


class TemperatureScaled(Mixture):
    r"""Networks with temperatures: :math:`\sum_k w_k\, \mathrm{softmax}(z_k / T_k)`, or pooled, :math:`p^{1/T}` of their mean.

    Args:
        models: one trained classifier, or K of them.
        temperatures: one number above 0, or one for each network.
        weights: "uniform", or K numbers that sum to 1.
        pooled: whether probabilities are averaged first, and their logarithm divided by the temperature.

    Raises:
        OptionError: if a temperature is not a finite number above 0, or there are several for a pool.
    """

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        temperatures: float | Sequence[float],
        weights: str | Sequence[float] | Tensor = "uniform",
        *,
        pooled: bool = False,
    ) -> None:
        """Bind networks and temperatures.

        Raises:
            OptionError: if they do not fit.
        """
        plain = ensemble(models, weights)
        super().__init__(plain.components, plain.weights)
        self.components, self.pooled = plain.components, pooled
        self.temperatures = tuple(
            float(value) for value in per_component(temperatures, len(plain.components), "temperatures")
        )
        if not all(math.isfinite(value) and value > 0 for value in self.temperatures):
            message = f"temperatures must be finite numbers above 0, got {list(self.temperatures)}."
            raise OptionError(message)
        if pooled and len(set(self.temperatures)) > 1:
            message = f"a pool has one temperature, got {list(self.temperatures)}."
            raise OptionError(message)
        self._watches = [Watch(network) for network in self.networks]

    def _check_networks(self, *, thorough: bool = False) -> None:
        """Notice a network that was changed: the temperature was another one's.

        Raises:
            OptionError: if its numbers are not what they were, in whatever precision.
        """
        for index, watch in enumerate(self._watches):
            changed = watch.changed(thorough=thorough)
            if changed:
                message = (
                    f"models[{index}]: the network changed since its temperature was chosen ({', '.join(changed[:3])}"
                    f"{', ...' if len(changed) > 3 else ''}). Choose it again: mola.temperature_scaled(...)."
                )
                raise OptionError(message)

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """The trained networks."""
        return tuple(component.network for component in self.components)

    def extra_repr(self) -> str:
        """Temperatures and weights."""
        return f"temperatures={self.temperatures}, pooled={self.pooled}, weights={self.weights.tolist()}"

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this module alone: every pass evaluates the networks, whatever their own mode."""
        self.training = mode
        return self

    def forward(self, inputs: Inputs, generator: torch.Generator | None = None) -> Tensor:
        """Probabilities (n, C); nothing is drawn, so the generator, which a mixture hands on, is not read."""
        logits = self._logits(one_batch(inputs))
        with without_autocast(logits.device):
            return self._probabilities(logits)[0]

    def _logits(self, inputs: Inputs) -> Tensor:
        members = []
        self._check_networks()
        with undisturbed(*self.networks, passes_only=True):
            for index, component in enumerate(self.components):
                with located(f"models[{index}]"):
                    members.append(component.moments(inputs).mean)
                    check_finite(members[-1])
        classes = [logits.shape[1] for logits in members]
        if len(set(classes)) > 1:
            message = f"expected networks with the same number of classes, got {classes}."
            raise DataError(message)
        return torch.stack(members)

    def _probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of the whole (n, C), and of each member (K, n, C)."""
        if self.pooled:
            pool = pooled_log_probabilities(logits, self.weights)
            return torch.softmax(pool / self.temperatures[0], dim=-1), torch.softmax(logits, dim=-1)
        members = torch.softmax(logits / logits.new_tensor(self.temperatures)[:, None, None], dim=-1)
        return self._mix(list(members)), members

    def _predict_batch(self, inputs: Inputs, seed: int | None, place: str) -> Prediction:
        with located(place):
            logits = self._logits(inputs)
        with without_autocast(logits.device):
            probs, members = self._probabilities(logits)
            weights = self.weights.to(members)
            spread = mutual_information(members, weights)
            if self.pooled:
                # The share of the plain mixture's entropy: scaled with it, it stays between 0 and the whole.
                total = entropy(self._mix(list(members)))
                share = torch.where(total > 0, spread / total, torch.zeros_like(total)).clamp(0, 1)
                spread = entropy(probs) * share
        return Prediction(probs, spread, max_probability_score(probs), "max-probability", logits)

    def save(self, directory: str | Path) -> Path:
        """Save all but the networks.

        Args:
            directory: folder to write to.

        Returns:
            The folder, for `TemperatureScaled.load(directory, models)`.
        """
        self._check_networks(thorough=True)
        document = {
            "temperatures": list(self.temperatures),
            "weights": self.weights.tolist(),
            "pooled": self.pooled,
            "networks": [watch.signature for watch in self._watches],
        }
        return folders.save(directory, "temperature", document, {})

    @classmethod
    def load(cls, directory: str | Path, models: nn.Module | Sequence[nn.Module]) -> TemperatureScaled:
        """Load what `save` wrote onto the same networks.

        Args:
            directory: folder that `save` wrote.
            models: the networks, in the same order.

        Returns:
            The predictor.

        Raises:
            StorageError: if the files are damaged, or a network is another.
        """
        document, _ = folders.load(directory, "temperature", SCHEMA)
        networks = ensemble(models).networks
        if len(networks) != len(document["networks"]):
            message = (
                f"{directory} was saved with {counted(len(document['networks']), 'network')}, got {len(networks)}."
            )
            raise StorageError(message)
        for index, (network, saved) in enumerate(zip(networks, document["networks"], strict=True)):
            folders.require_network(network, saved, f"models[{index}]")
        try:
            loaded = cls(networks, document["temperatures"], document["weights"], pooled=document["pooled"])
        except OptionError as error:
            message = f"the saved document holds a value that cannot be used: {error}"
            raise StorageError(message) from error
        loaded._watches = [Watch(*pair) for pair in zip(networks, document["networks"], strict=True)]
        return loaded


def temperature_scaled(
    models: nn.Module | Sequence[nn.Module],
    val_loader: Iterable[Any],
    mode: Literal["shared", "members", "pooled"] = "shared",
    weights: str | Sequence[float] | Tensor = "uniform",
    *,
    progress: bool = True,
) -> TemperatureScaled:
    """Choose temperatures on validation data, by exact one-dimensional optimisation of the log-likelihood.

    Args:
        models: one trained classifier, or K of them; they are not modified.
        val_loader: validation data with labels, read once.
        mode: "shared" is one temperature that suits the mixture best, "members" one that suits each network by itself,
            "pooled" one for the logarithm of the averaged probabilities.
        weights: "uniform", or K numbers that sum to 1.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Returns:
        The predictor.
    """
    one_of(mode, MODES, "mode")
    plain = ensemble(models, weights)
    with undisturbed(*plain.networks):
        data = read_held_out(
            plain.networks,
            [None] * len(plain.networks),
            val_loader,
            where="validation loader",
            labelled=True,
            progress=progress,
        )
    data.check_labels("validation loader")
    logits, labels = torch.stack(list(data.logits)), data.labels
    assert labels is not None  # read_held_out asked for them
    if mode == "members":
        return TemperatureScaled(plain.networks, fit_member_temperatures(logits, labels), plain.weights)
    choose = fit_pooled_temperature if mode == "pooled" else fit_temperature
    return TemperatureScaled(
        plain.networks, choose(logits, labels, plain.weights), plain.weights, pooled=mode == "pooled"
    )
