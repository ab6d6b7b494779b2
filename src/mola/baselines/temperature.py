r"""Temperature scaling (Guo et al., 2017): divide the logits by the one number that does best on validation data.

For K members with weights w and temperature T the loss is the mixture's own,

.. math:: L(T) = -\tfrac1n \sum_n \log \sum_k w_k\, \mathrm{softmax}(z_{kn} / T)_{y_n},

and its slope in :math:`\log T` is known in closed form: with the responsibilities :math:`r_{kn}` of the members for the
label, :math:`\tfrac1n \sum_n \sum_k r_{kn} (z_{kny} - E_k[z_{kn}]) / T`. For one member L is convex in 1/T and has one
minimum. For several it may have more: a grid brackets each, bisection of the slope ends it, and the lowest is taken.

Networks whose logits are divided by temperatures: MAP, an ensemble with one for all or one for each, or the pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from mola.component import per_component
from mola.errors import DataError, OptionError, StorageError, located, warn
from mola.fitting import ensemble
from mola.likelihood import CATEGORICAL, LIKELIHOODS, Likelihood, as_likelihood
from mola.mixture import Mixture, check_weights, uniform_weights
from mola.network import DenseFeatures, Inputs, check_finite, one_batch, undisturbed, without_autocast
from mola.network.fingerprint import NETWORK, Watch, require_network
from mola.numerics import exact
from mola.options import counted, one_of
from mola.prediction import Prediction
from mola.saving import storage
from mola.tuning.candidates import read_held_out
from mola.uncertainty import entropy, max_probability_score, mutual_information

REACH = 1e4
"""Temperatures from 1/REACH to REACH times the mean range of the logits are tried: beyond, nothing changes any more."""

GRID = 129
"""Points on which minima are bracketed: seven an e-fold."""

AT_ONCE = 2**22
"""Logits worked on at once."""


def fit_temperature(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """The one temperature of all members that minimises the mixture's negative log-likelihood.

    Where every label has the highest logit of all, the loss falls all the way to temperature 0, and where the labels go
    against the logits it falls all the way to infinity: then the end of the range is taken, with a warning.

    Args:
        logits: (K, n, C), or (n, C) for one member.
        labels: (n,), class indices.
        weights: (K,) of the members, summing to 1; None is 1 / K each.

    Returns:
        The temperature, exact to about 10 digits.
    """
    members, labels = _checked(logits, labels)
    count = len(members)
    shares = uniform_weights(count) if weights is None else check_weights(weights, count)
    span = float((members.amax(-1) - members.amin(-1)).mean())
    if span == 0:
        warn("all logits of each datum are equal: every temperature gives the same probabilities; took 1.")
        return 1.0
    low, high = math.log(span / REACH), math.log(span * REACH)
    points = 2 if count == 1 else GRID  # one member has one minimum: the ends bracket it
    best, at_end = _minimise(lambda position: _loss(members, labels, shares, position), low, high, points)
    if at_end:
        falls, to = (
            ("the labels have the highest logits", "0") if best == low else ("the logits are no guide", "infinity")
        )
        warn(
            f"the loss falls as the temperature goes to {to}, as {falls} on these data; took the end of the range, "
            f"{math.exp(best):.3g}. More validation data give a finite optimum."
        )
    return math.exp(best)


def fit_member_temperatures(logits: Tensor, labels: Tensor) -> list[float]:
    """A temperature for each member by itself; see `fit_temperature`.

    Args:
        logits: (K, n, C).
        labels: (n,), class indices.

    Returns:
        K temperatures.
    """
    members, labels = _checked(logits, labels)
    return [fit_temperature(member, labels) for member in members]


def fit_pooled_temperature(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """The temperature of the mixture's log-probabilities: members are averaged first, then scaled.

    Args:
        logits: (K, n, C).
        labels: (n,), class indices.
        weights: (K,) of the members, summing to 1; None is 1 / K each.

    Returns:
        The temperature; see `fit_temperature`.
    """
    members, labels = _checked(logits, labels)
    shares = uniform_weights(len(members)) if weights is None else check_weights(weights, len(members))
    return fit_temperature(pooled_log_probabilities(members, shares), labels)


def pooled_log_probabilities(logits: Tensor, weights: Tensor) -> Tensor:
    """Log-probabilities (n, C) of a mixture of members with logits (K, n, C); they do not underflow."""
    log_weights = weights.to(logits).log()[:, None, None]
    return torch.logsumexp(torch.log_softmax(logits, dim=-1) + log_weights, dim=0)


def _questions(logits: Tensor, likelihood: Likelihood) -> Tensor:
    # Logits (K, ..., C) as those of classes: for yes or no (K, ..., C, 2), where no has the logit 0.
    return logits if likelihood.competing else torch.stack([torch.zeros_like(logits), logits], dim=-1)


def as_classes(logits: Tensor, labels: Tensor, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
    """Logits (K, n, C) and labels as those of classes, a row for each question whose answer is known."""
    if likelihood.competing:
        return logits, labels
    asked = likelihood.asked(labels)
    known = asked >= 0
    return _questions(logits.transpose(1, 2).flatten(1), likelihood)[:, known], asked[known]


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    # Logits as (K, n, C) in float64, and labels as indices.
    if logits.dim() == 2:
        logits = logits[None]
    if logits.dim() != 3 or not logits.is_floating_point() or 0 in logits.shape or logits.shape[-1] < 2:
        raise DataError(
            f"logits: expected shape (members, data, classes) with at least one datum and 2 classes, got "
            f"{logits.dtype} of shape {tuple(logits.shape)}."
        )
    lifted = exact(logits.detach())
    for member in lifted:
        check_finite(member)
    return lifted, CATEGORICAL.check_labels(labels, lifted[0], "labels")


def _loss(members: Tensor, labels: Tensor, weights: Tensor, log_temperature: float) -> tuple[float, float]:
    scale, loss, slope = math.exp(-log_temperature), 0.0, 0.0
    log_weights = weights.to(members).log()[:, None]
    step = max(1, AT_ONCE // members[:, 0].numel())
    for rows, own in zip(torch.split(members, step, dim=1), torch.split(labels, step), strict=True):
        index = own[None, :, None].expand(len(rows), -1, 1)
        log_probs = torch.log_softmax(scale * rows, dim=-1)
        joint = log_probs.gather(-1, index).squeeze(-1) + log_weights
        loss -= float(torch.logsumexp(joint, dim=0).sum())
        mean = (log_probs.exp() * rows).sum(-1)
        advantage = rows.gather(-1, index).squeeze(-1) - mean
        slope += scale * float((torch.softmax(joint, dim=0) * advantage).sum())
    return loss / len(labels), slope / len(labels)


def _minimise(loss: Callable[[float], tuple[float, float]], low: float, high: float, points: int) -> tuple[float, bool]:
    # Where a smooth function is least between two ends, and whether that is an end; `loss` gives value and slope.
    positions = torch.linspace(low, high, points, dtype=torch.float64, device="cpu").tolist()
    positions[0], positions[-1] = low, high
    values = [loss(position) for position in positions]
    # The ends compete too; among equals (a loss that has run flat) the end that is nearest wins.
    candidates = [(values[0][0], 0, low), (values[-1][0], 0, high)]
    for left, right, before, after in zip(positions[:-1], positions[1:], values[:-1], values[1:], strict=True):
        if before[1] < 0 <= after[1]:
            found = _bisect(loss, left, right)
            candidates.append((loss(found)[0], 1, found))
    _, interior, best = min(candidates)
    return best, not interior


def _bisect(loss: Callable[[float], tuple[float, float]], left: float, right: float) -> float:
    while right - left > 1e-12:
        middle = (left + right) / 2
        left, right = (middle, right) if loss(middle)[1] < 0 else (left, middle)
    return (left + right) / 2


MODES = ("shared", "members", "pooled")
SCHEMA = {"temperatures": [float], "weights": [float], "pooled": bool, "networks": [NETWORK]}


class TemperatureScaled(Mixture):
    r"""Networks with temperatures: :math:`\sum_k w_k\, \mathrm{softmax}(z_k / T_k)`, or pooled, :math:`p^{1/T}` of their mean.

    Args:
        models: one trained classifier, or K of them.
        temperatures: one number above 0, or one for each network.
        weights: "uniform", or K numbers that sum to 1.
        pooled: whether probabilities are averaged first, and their logarithm divided by the temperature.
        likelihood: what the networks' outputs mean: "categorical" or "bernoulli".
    """

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        temperatures: float | Sequence[float],
        weights: str | Sequence[float] | Tensor = "uniform",
        *,
        pooled: bool = False,
        likelihood: str | Likelihood = "categorical",
    ) -> None:
        plain = ensemble(models, weights, likelihood=_discrete(likelihood))
        super().__init__(plain.components, plain.weights, likelihood=plain.likelihood)
        self.components, self.pooled = plain.components, pooled
        self.temperatures = tuple(
            float(value) for value in per_component(temperatures, len(plain.components), "temperatures")
        )
        if not all(math.isfinite(value) and value > 0 for value in self.temperatures):
            raise OptionError(f"temperatures must be finite numbers above 0, got {list(self.temperatures)}.")
        if pooled and len(set(self.temperatures)) > 1:
            raise OptionError(f"a pool has one temperature, got {list(self.temperatures)}.")
        self._watches = [Watch(network) for network in self.networks]

    def _check_networks(self, *, thorough: bool = False) -> None:
        # Notice a network that was changed: the temperature was another one's.
        for index, watch in enumerate(self._watches):
            changed = watch.changed(thorough=thorough)
            if changed:
                raise OptionError(
                    f"models[{index}]: the network changed since its temperature was chosen ({', '.join(changed[:3])}"
                    f"{', ...' if len(changed) > 3 else ''}). Choose it again: mola.temperature_scaled(...)."
                )

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
        # Logits (K, n, C).
        members = []
        self._check_networks()
        with undisturbed(*self.networks, passes_only=True):
            for index, component in enumerate(self.components):
                with located(f"models[{index}]"):
                    found = component.observed(inputs)
                    if isinstance(found, DenseFeatures):
                        raise DataError(
                            "temperature scaling gives one row for each input, and this network has outputs at many positions. Use "
                            "mola.ensemble(models).with_temperature(temperature), which keeps their layout."
                        )
                    members.append(found.mean)
                    check_finite(members[-1])
        classes = [logits.shape[1] for logits in members]
        if len(set(classes)) > 1:
            raise DataError(f"expected networks with the same number of classes, got {classes}.")
        return torch.stack(members)

    def _probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        # Of the whole (n, C), and of each member (K, n, C).
        said = self.likelihood.probabilities
        if self.pooled:
            asked = _questions(logits, self.likelihood)
            pool = pooled_log_probabilities(asked.flatten(1, -2), self.weights).view(asked.shape[1:])
            probs = torch.softmax(pool / self.temperatures[0], dim=-1)
            return probs if self.likelihood.competing else probs[..., 1], said(logits)
        members = said(logits / logits.new_tensor(self.temperatures)[:, None, None])
        return self._mix(list(members)), members

    def _predict_batch(self, inputs: Inputs, seed: int | None, place: str) -> Prediction:
        with located(place):
            logits = self._logits(inputs)
        with without_autocast(logits.device):
            probs, members = self._probabilities(logits)
            weights = self.weights.to(members)
            spread = mutual_information(members, weights, self.likelihood)
            if self.pooled:
                # The share of the plain mixture's entropy: scaled with it, it stays between 0 and the whole.
                answers = self.likelihood.answer_probabilities
                total = entropy(answers(self._mix(list(members))))
                share = torch.where(total > 0, spread / total, torch.zeros_like(total)).clamp(0, 1)
                spread = entropy(answers(probs)) * share
            score = max_probability_score(probs, self.likelihood)
        return Prediction(probs, spread, score, "max-probability", logits, likelihood=self.likelihood)

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
            **({} if self.likelihood == CATEGORICAL else {"likelihood": self.likelihood.name}),
        }
        return storage.write(directory, document, {}, kind="temperature")

    @classmethod
    def load(cls, directory: str | Path, models: nn.Module | Sequence[nn.Module]) -> TemperatureScaled:
        """Load what `save` wrote onto the same networks.

        Args:
            directory: folder that `save` wrote.
            models: the networks, in the same order.

        Returns:
            The predictor.
        """
        document, _ = storage.read(directory, "temperature", SCHEMA)
        networks = ensemble(models).networks
        if len(networks) != len(document["networks"]):
            raise StorageError(
                f"{directory} was saved with {counted(len(document['networks']), 'network')}, got {len(networks)}."
            )
        for index, (network, saved) in enumerate(zip(networks, document["networks"], strict=True)):
            require_network(network, saved, f"models[{index}]")
        meaning = document.get("likelihood", CATEGORICAL.name)  # said only where it is another
        try:
            loaded = cls(
                networks, document["temperatures"], document["weights"], pooled=document["pooled"], likelihood=meaning
            )
        except OptionError as error:
            raise StorageError(f"the saved document holds a value that cannot be used: {error}") from error
        loaded._watches = [Watch(*pair) for pair in zip(networks, document["networks"], strict=True)]
        return loaded


def temperature_scaled(
    models: nn.Module | Sequence[nn.Module],
    val_loader: Iterable[Any],
    mode: Literal["shared", "members", "pooled"] = "shared",
    weights: str | Sequence[float] | Tensor = "uniform",
    *,
    progress: bool = True,
    likelihood: str | Likelihood = "categorical",
) -> TemperatureScaled:
    """Choose temperatures on validation data, by exact one-dimensional optimisation of the log-likelihood.

    Args:
        models: one trained classifier, or K of them; they are not modified.
        val_loader: validation data with labels, read once.
        mode: "shared" is one temperature that suits the mixture best, "members" one that suits each network by itself,
            "pooled" one for the logarithm of the averaged probabilities.
        weights: "uniform", or K numbers that sum to 1.
        progress: whether to show a progress bar on stderr, if that is a terminal.
        likelihood: what the networks' outputs mean: "categorical" or "bernoulli".

    Returns:
        The predictor.
    """
    one_of(mode, MODES, "mode")
    own = getattr(models, "likelihood", None)  # of an ensemble, where networks were asked for
    plain = ensemble(models, weights, likelihood=_discrete(own if isinstance(own, Likelihood) else likelihood))
    with undisturbed(*plain.networks):
        data = read_held_out(
            plain.networks,
            [None] * len(plain.networks),
            val_loader,
            where="validation loader",
            labelled=True,
            progress=progress,
            likelihood=plain.likelihood,
        )
    data.check_labels("validation loader")
    assert data.labels is not None  # read_held_out asked for them
    logits, labels = as_classes(torch.stack(list(data.logits)), data.labels, plain.likelihood)
    if mode == "members":
        chosen: Any = fit_member_temperatures(logits, labels)
    else:
        choose = fit_pooled_temperature if mode == "pooled" else fit_temperature
        chosen = choose(logits, labels, plain.weights)
    return TemperatureScaled(
        plain.networks, chosen, plain.weights, pooled=mode == "pooled", likelihood=plain.likelihood
    )


def _discrete(likelihood: str | Likelihood) -> Likelihood:
    chosen = as_likelihood(likelihood)
    if not chosen.discrete or type(chosen) is not LIKELIHOODS.get(chosen.name):
        known = ", ".join(repr(name) for name, kind in LIKELIHOODS.items() if kind.discrete)
        raise OptionError(
            f"a temperature divides logits, and likelihood {chosen.name!r} has none: it is for {known}. Numbers have a noise instead: "
            f"use mola.scale_noise."
        )
    return chosen
