r"""Temperature scaling (Guo et al., 2017): divide the logits by the temperature that best fits the validation data.

The loss at temperature T is the mixture's mean log loss, plus the weak prior against T < 1 that the default rule has
(`molaplace/rules/priors.py`). For K members with weights w and without covariance,

.. math:: L(T) = -\tfrac1n \Big[\sum_n \log \sum_k w_k\, \mathrm{softmax}(z_{kn} / T)_{y_n} + \log p(T)\Big].

Without the prior, T would be 0 whenever all validation data are classified correctly. L may have more than one minimum; a grid search
finds the lowest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from molaplace.errors import DataError, warned
from molaplace.likelihoods import CATEGORICAL
from molaplace.network import check_finite
from molaplace.numerics import to_float64
from molaplace.options import one_of
from molaplace.rules.objective import Objective
from molaplace.rules.priors import negative_log_prior
from molaplace.rules.rule import Rule, Tuning
from molaplace.rules.search import maximise
from molaplace.settings import Settings
from molaplace.weights import check_weights, uniform_weights

TEMPERATURE_RANGE = (
    1e4  # range of the search in either direction, relative to the mean spread of the logits; it always includes 1
)
GRID = 129  # number of grid points: seven per factor of e, enough to separate several minima
CHUNK = 2**22  # number of logits processed at a time


@dataclass(frozen=True)
class Temperature(Rule):
    """The rule that chooses only the temperature; for a plain ensemble, this is temperature scaling.

    Args:
        mean: the quantity that is averaged over the networks, "probabilities" or "logits".
    """

    mean: Literal["probabilities", "logits"] = "probabilities"
    needs_covariance = False

    def __post_init__(self) -> None:
        one_of(self.mean, ("probabilities", "logits"), "mean")

    def __call__(self, objective: Objective) -> Tuning:
        """Choose the temperature."""
        settings = replace(objective.settings, pooling=0.0 if self.mean == "logits" else 1.0)
        outputs = torch.stack(list(objective.data.outputs))
        if outputs.shape[-1] == 1:  # a binary logit is compared with 0
            outputs = torch.cat([torch.zeros_like(outputs), outputs], -1)

        def loss(temperature: float) -> float:
            return float(objective.mean_scores([replace(settings, temperature=temperature)])["nll"][0])

        low, high, _ = next(setting for setting in fields(Settings) if setting.name == "temperature").metadata["bounds"]
        temperature, notes = best_temperature(loss, outputs, objective.data.num_independent(), low, high)
        summary = f"Temperature {temperature:.3g} minimises the validation log loss, {loss(temperature):.4g}."
        return Tuning(f"Temperature({self.mean!r})", replace(settings, temperature=temperature), summary, notes)


def best_temperature(
    loss: Callable[[float], float],
    logits: Tensor,
    num_data: float,
    lowest: float = 0.0,
    highest: float = math.inf,
) -> tuple[float, tuple[str, ...]]:
    """Return the temperature that minimises a mean log loss under the prior, and any warnings.

    Args:
        loss: function that maps a temperature to the mean log loss of the data.
        logits: logits (..., C), whose mean spread determines the range of the search.
        num_data: number of independent data.
        lowest: lower bound on the temperature.
        highest: upper bound on the temperature.
    """
    span = float((logits.amax(-1) - logits.amin(-1)).mean())
    if span == 0:
        text = "for each datum, all logits are equal, so every temperature gives the same probabilities. The temperature is set to 1."
        return 1.0, (warned(text),)
    low = math.log(max(min(1.0, span / TEMPERATURE_RANGE), lowest))
    high = math.log(min(max(1.0, span * TEMPERATURE_RANGE), highest))

    def from_log(log_temperature: float) -> float:
        return min(max(math.exp(log_temperature), lowest), highest)  # the exponential may round beyond the range

    def score(log_temperature: float) -> float:
        return -loss(from_log(log_temperature)) - float(negative_log_prior(log_temperature)) / num_data

    best = maximise(score, low, high, coarse=GRID)
    if score(high) < score(best):
        return from_log(best), ()
    text = (
        f"on these data, the loss keeps falling as the temperature goes to infinity: the logits contradict the labels. The "
        f"temperature is set to the end of the search range, {math.exp(high):.3g}. More validation data may give a finite optimum."
    )
    return from_log(high), (warned(text),)


def fit_temperature(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """Find, to about 8 digits, the temperature that minimises the mixture's negative log-likelihood under a weak prior against T < 1.

    All members share this temperature. If the labels contradict the logits, the best temperature is infinite. In this case, the
    function warns and returns the upper end of the search range.

    Args:
        logits: logits (K, n, C), or (n, C) for one member.
        labels: class indices (n,).
        weights: member weights (K,), which sum to 1; by default, each is 1 / K.
    """
    logits = logits[None] if logits.dim() == 2 else logits
    if logits.dim() != 3 or not logits.is_floating_point() or 0 in logits.shape or logits.shape[-1] < 2:
        raise DataError(
            f"must be shape (members, data, classes) with at least one datum and 2 classes, got {logits.dtype} of shape "
            f"{tuple(logits.shape)}.",
            argument="logits",
        )
    members = to_float64(logits.detach())
    check_finite(members.flatten(0, 1))
    labels = CATEGORICAL.check_labels(labels, members[0], "labels")
    count = len(members)
    shares = uniform_weights(count) if weights is None else check_weights(weights, count)
    log_weights = shares.to(members).log()[:, None]
    step = max(1, CHUNK // members[:, 0].numel())

    def losses(temperature: float) -> Iterator[float]:
        for rows, row_labels in zip(torch.split(members, step, dim=1), torch.split(labels, step), strict=True):
            log_probs = torch.log_softmax(rows / temperature, dim=-1)
            log_likelihoods = log_probs.gather(-1, row_labels[None, :, None].expand(count, -1, 1)).squeeze(-1)
            yield -float(torch.logsumexp(log_likelihoods + log_weights, dim=0).sum())

    return best_temperature(lambda temperature: sum(losses(temperature)) / len(labels), members, len(labels))[0]
