r"""Temperature scaling (Guo et al., 2017): divide the logits by the temperature that fits validation data best.

For K members with weights w the loss of a temperature T is that of the mixture,

.. math:: L(T) = -\tfrac1n \sum_n \log \sum_k w_k\, \mathrm{softmax}(z_{kn} / T)_{y_n}.

For one member L is convex in 1/T and has one minimum. For several members it may have more: a grid finds the lowest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from mola.baselines.members import rebuilding
from mola.component import per_component
from mola.errors import DataError, OptionError, warn
from mola.fitting import as_networks, ensemble
from mola.likelihoods import CATEGORICAL, LIKELIHOODS, ClassificationLikelihood, Likelihood, Predictive, as_likelihood
from mola.likelihoods.base import mixed
from mola.network import Rows, check_finite, state_checksum
from mola.numerics import to_float64
from mola.options import counted, is_real, one_of
from mola.posterior import MoLA
from mola.saving.files import read_folder, write_folder
from mola.saving.posterior import check_networks, describe, rebuild
from mola.scaling import Candidates, LogitScaling
from mola.tuning.search import maximise
from mola.weights import check_weights, uniform_weights

RANGE = 1e4  # temperatures from 1/RANGE to RANGE times the mean range of the logits are tried; beyond, nothing changes
GRID = 129  # points that find the lowest of several minima: seven per factor of e
CHUNK = 2**22  # logits at a time

KIND = "temperature"
MEANS = ("probabilities", "logits")
MODES = ("shared", "members", "pooled")
SCHEMA: dict[str, Any] = {
    **{"temperatures": [float], "weights": [float], "mean": str, "pooled": bool},
    **{"networks": [str], "likelihood": {"name": str}},
}


def fit_temperature(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """Find the temperature, shared by all members, that minimises the mixture's negative log-likelihood, to about 8 digits.

    Where every label has the highest logit, the loss falls all the way to temperature 0; where labels contradict the logits, to
    infinity. Then the end of the range is taken, with a warning.

    Args:
        logits: (K, n, C), or (n, C) for one member.
        labels: (n,), class indices.
        weights: (K,) of the members, summing to 1; None is 1 / K each.
    """
    members, labels = _checked(logits, labels)
    count = len(members)
    shares = uniform_weights(count) if weights is None else check_weights(weights, count)
    span = float((members.amax(-1) - members.amin(-1)).mean())
    if span == 0:
        warn("all logits of each datum are equal: every temperature gives the same probabilities; took 1.")
        return 1.0
    low, high = math.log(span / RANGE), math.log(span * RANGE)

    def score(log_temperature: float) -> float:
        return -_loss(members, labels, shares, log_temperature)

    best = maximise(score, low, high, coarse=9 if count == 1 else GRID)
    end = max((low, high), key=score)
    if score(end) >= score(best):
        best = end
        limit = "0: the labels have the highest logits" if best == low else "infinity: the logits contradict the labels"
        warn(
            f"the loss falls as the temperature goes to {limit} in these data; took the end of the range, {math.exp(best):.3g}. "
            f"More validation data give a finite optimum."
        )
    return math.exp(best)


def as_classes(logits: Tensor, labels: Tensor, likelihood: ClassificationLikelihood) -> tuple[Tensor, Tensor]:
    """Turn binary labels into two classes with the logits 0 and z, and drop missing labels; classes stay as they are."""
    if likelihood.mutually_exclusive:
        return logits, labels
    targets = likelihood.targets(labels).flatten()
    known = targets >= 0
    pairs = torch.stack([torch.zeros_like(logits), logits], dim=-1).flatten(1, 2)
    return pairs[:, known], targets[known]


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if logits.dim() == 2:
        logits = logits[None]
    if logits.dim() != 3 or not logits.is_floating_point() or 0 in logits.shape or logits.shape[-1] < 2:
        raise DataError(
            f"logits: expected shape (members, data, classes) with at least one datum and 2 classes, got {logits.dtype} of shape "
            f"{tuple(logits.shape)}."
        )
    exact = to_float64(logits.detach())
    for member in exact:
        check_finite(member[:, :0], member)
    return exact, CATEGORICAL.check_labels(labels, exact[0], "labels")


def _pooled_logits(members: Tensor, weights: Tensor, likelihood: ClassificationLikelihood) -> Tensor:
    # Logits (n, C) of the mixture's probabilities, from the logits (K, n, C) of its members, without underflow.
    log_weights = weights.to(members).log()[:, None, None]
    if likelihood.mutually_exclusive:
        return torch.logsumexp(torch.log_softmax(members, dim=-1) + log_weights, dim=0)
    yes, no = (torch.logsumexp(functional.logsigmoid(one) + log_weights, dim=0) for one in (members, -members))
    return yes - no


def _loss(members: Tensor, labels: Tensor, weights: Tensor, log_temperature: float) -> float:
    log_weights, loss = weights.to(members).log()[:, None], 0.0
    step = max(1, CHUNK // members[:, 0].numel())
    for rows, own in zip(torch.split(members, step, dim=1), torch.split(labels, step), strict=True):
        log_probs = torch.log_softmax(math.exp(-log_temperature) * rows, dim=-1)
        chosen = log_probs.gather(-1, own[None, :, None].expand(len(rows), -1, 1)).squeeze(-1)
        loss -= float(torch.logsumexp(chosen + log_weights, dim=0).sum())
    return loss / len(labels)


class TemperatureScaled(MoLA):
    r"""A plain ensemble with temperatures: :math:`\sum_k w_k\, \mathrm{softmax}(z_k / T_k)`.

    With `mean="logits"` it is :math:`\mathrm{softmax}(\sum_k w_k z_k / T_k)`, and with `pooled` :math:`p^{1/T}` of the mean
    probabilities p, normalised.

    Args:
        networks: one trained classifier, or K of them.
        temperatures: one number above 0, or one for each network.
        weights: "uniform", or K numbers that sum to 1.
        mean: "probabilities" or "logits": which of them are averaged over the networks.
        pooled: average probabilities first, then divide their logarithms by the temperature.
        likelihood: "categorical" or "bernoulli".
    """

    def __init__(
        self,
        networks: nn.Module | Sequence[nn.Module],
        temperatures: float | Sequence[float],
        weights: str | Sequence[float] | Tensor = "uniform",
        *,
        mean: Literal["probabilities", "logits"] = "probabilities",
        pooled: bool = False,
        likelihood: str | Likelihood = "categorical",
    ) -> None:
        one_of(mean, MEANS, "mean")
        plain = ensemble(networks, weights, likelihood=_discrete(likelihood))
        values = per_component(temperatures, len(plain.components), "temperatures")
        if not all(is_real(value) and math.isfinite(value) and value > 0 for value in values):
            raise OptionError(f"temperatures must be finite numbers above 0, got {values}.")
        if pooled and (mean == "logits" or len(set(values)) > 1):
            raise OptionError(
                f"pooled probabilities have one temperature and no mean of logits, got {values} and mean={mean!r}."
            )
        scaling = LogitScaling(pooling=0.0 if mean == "logits" else 1.0)
        super().__init__(plain.components, weights=weights, scaling=scaling)
        self.temperatures: tuple[float, ...] = tuple(map(float, values))
        self.mean: Literal["probabilities", "logits"] = mean
        self.pooled: bool = pooled

    @property
    def temperature(self) -> float:
        """The temperature of all networks; `OptionError` if each has its own."""
        if len(set(self.temperatures)) > 1:
            raise OptionError(f"each network has its own temperature: use temperatures, {self.temperatures}.")
        return self.temperatures[0]

    def divisors(self, rows: Rows, weights: Tensor, candidates: Candidates | None = None) -> list[Tensor]:
        """Return the temperature of each network; 1 for pooled probabilities."""
        values = [1.0] * len(self.temperatures) if self.pooled else self.temperatures
        return [one.new_full((1, 1), value) for one, value in zip(rows.outputs, values, strict=True)]

    def predictive(self, rows: Rows, seed: int | None = None, candidates: Candidates | None = None) -> Predictive:
        """Return the predictive distribution of rows that the networks have computed already."""
        if not self.pooled:
            return super().predictive(rows, seed)
        likelihood = self.likelihood
        assert isinstance(likelihood, ClassificationLikelihood)
        logits = _pooled_logits(torch.stack(list(rows.outputs)), self.weights, likelihood) / self.temperatures[0]
        return likelihood.distribution(likelihood.probabilities(logits))

    def with_parts(self, **changes: Any) -> Any:
        """Raise an error: the temperatures belong to these networks and weights."""
        raise OptionError(
            "the temperatures were chosen for these networks and weights: call mola.baselines.temperature_scaled again, or use "
            "mola.ensemble(networks).with_temperature(...)."
        )

    def __repr__(self) -> str:
        temperatures = ", ".join(dict.fromkeys(f"{value:.4g}" for value in self.temperatures))
        mean = "pooled probabilities" if self.pooled else self.mean
        networks = counted(len(self.components), "network")
        return f"TemperatureScaled({networks}, temperature {temperatures}, mean of {mean}, weights: {self.weighting})"

    def save(self, directory: str | Path) -> Path:
        """Save all but the networks, with a checksum of each, for `TemperatureScaled.load(directory, networks)`."""
        document = {
            "kind": KIND,
            "temperatures": list(self.temperatures),
            "weights": self.weights.tolist(),
            "mean": self.mean,
            "pooled": self.pooled,
            "networks": [state_checksum(network) for network in self.networks],
            "likelihood": describe(self.likelihood, LIKELIHOODS, "likelihood"),
        }
        return write_folder(directory, document, {})

    @classmethod
    def load(cls, directory: str | Path, networks: nn.Module | Sequence[nn.Module]) -> TemperatureScaled:
        """Load what `save` wrote onto the same networks, in the same order; `StorageError` for other networks."""
        document, _ = read_folder(directory, KIND, SCHEMA)
        given = as_networks(networks)
        check_networks(given, document["networks"])
        options = {name: document[name] for name in ("mean", "pooled")}
        with rebuilding(directory):
            likelihood = rebuild(document["likelihood"], LIKELIHOODS, "likelihood")
            return cls(given, document["temperatures"], document["weights"], likelihood=likelihood, **options)


def temperature_scaled(
    networks: nn.Module | Sequence[nn.Module],
    val_loader: Iterable[Any],
    *,
    mean: Literal["probabilities", "logits"] = "probabilities",
    mode: Literal["shared", "members", "pooled"] = "shared",
    weights: str | Sequence[float] | Tensor = "uniform",
    likelihood: str | Likelihood = "categorical",
    progress: bool = True,
) -> TemperatureScaled:
    """Choose temperatures that minimise the negative log-likelihood of validation data.

    Args:
        networks: one trained classifier, or K of them; they are not modified.
        val_loader: validation data with labels, read once.
        mean: "probabilities" or "logits": which of them are averaged over the networks.
        mode: "shared" is one temperature, the best for the mixture; "members" one for each network, the best for it alone; "pooled"
            one for the logarithms of the averaged probabilities.
        weights: "uniform", or K numbers that sum to 1.
        likelihood: "categorical" or "bernoulli".
        progress: show a progress bar on stderr, if that is a terminal.
    """
    one_of(mode, MODES, "mode")
    one_of(mean, MEANS, "mean")
    plain = ensemble(networks, weights, likelihood=_discrete(likelihood))
    meaning = plain.likelihood
    assert isinstance(meaning, ClassificationLikelihood)
    data = plain.read(val_loader, "validation loader", labelled=True, progress=progress)
    data.check_labels()
    assert data.labels is not None
    logits, labels = as_classes(torch.stack(list(data.outputs)), data.labels, meaning)
    chosen: float | list[float]
    if mode == "members":
        chosen = [fit_temperature(member, labels) for member in logits]
    elif mean == "logits":
        chosen = fit_temperature(mixed(plain.weights, list(logits)), labels)
    elif mode == "pooled":
        chosen = fit_temperature(_pooled_logits(logits, plain.weights, CATEGORICAL), labels)
    else:
        chosen = fit_temperature(logits, labels, plain.weights)
    # The mean of logits over one temperature is the same before and after the division.
    pooled = mode == "pooled" and mean == "probabilities"
    return TemperatureScaled(plain.networks, chosen, weights, mean=mean, pooled=pooled, likelihood=meaning)


def _discrete(likelihood: str | Likelihood) -> Likelihood:
    chosen = as_likelihood(likelihood)
    if not isinstance(chosen, ClassificationLikelihood):
        raise OptionError(
            f"a temperature divides logits, and likelihood {chosen.name!r} has none: expected 'categorical' or 'bernoulli'. For "
            f"regression use mola.baselines.scale_noise."
        )
    return chosen
