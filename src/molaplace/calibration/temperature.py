r"""Temperature scaling (Guo et al., 2017): divide the logits by the temperature that best fits the validation data.

For K members with weights w, the loss at temperature T is the mixture's log loss, plus the weak prior against T < 1 that the default
rule has (`molaplace/rules/priors.py`),

.. math:: L(T) = -\tfrac1n \Big[\sum_n \log \sum_k w_k\, \mathrm{softmax}(z_{kn} / T)_{y_n} + \log p(T)\Big].

Without the prior, T would be 0 whenever all validation data are classified correctly. L may have more than one minimum; a grid search
finds the lowest one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from molaplace.errors import DataError, OptionError, warn
from molaplace.fitting import Logits, Tokens, ensemble
from molaplace.likelihoods import CATEGORICAL, ClassificationLikelihood, Likelihood
from molaplace.likelihoods.base import mixed
from molaplace.network import check_finite
from molaplace.numerics import to_float64
from molaplace.options import one_of
from molaplace.posterior import MoLA
from molaplace.rules.held_out import HeldOut
from molaplace.rules.priors import negative_log_prior
from molaplace.rules.search import maximise
from molaplace.weights import check_weights, uniform_weights

TEMPERATURE_RANGE = (
    1e4  # range of the search in either direction, relative to the mean spread of the logits; it always includes 1
)
GRID = 129  # number of grid points: seven per factor of e, enough to separate several minima
CHUNK = 2**22  # number of logits processed at a time


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
    span = float((members.amax(-1) - members.amin(-1)).mean())
    if span == 0:
        warn(
            "for each datum, all logits are equal, so every temperature gives the same probabilities. The temperature is set to 1."
        )
        return 1.0
    low = min(0.0, math.log(span / TEMPERATURE_RANGE))
    high = max(0.0, math.log(span * TEMPERATURE_RANGE))

    def score(log_temperature: float) -> float:
        total = 0.0
        for rows, row_labels in zip(torch.split(members, step, dim=1), torch.split(labels, step), strict=True):
            log_probs = torch.log_softmax(math.exp(-log_temperature) * rows, dim=-1)
            log_likelihoods = log_probs.gather(-1, row_labels[None, :, None].expand(count, -1, 1)).squeeze(-1)
            total += float(torch.logsumexp(log_likelihoods + log_weights, dim=0).sum())
        return (total - float(negative_log_prior(log_temperature))) / len(labels)

    best = maximise(score, low, high, coarse=GRID)
    if score(high) >= score(best):
        best = high
        warn(
            f"on these data, the loss keeps falling as the temperature goes to infinity: the logits contradict the labels. The "
            f"temperature is set to the end of the search range, {math.exp(best):.3g}. More validation data may give a finite optimum."
        )
    return math.exp(best)


def as_classes(logits: Tensor, labels: Tensor, likelihood: ClassificationLikelihood) -> tuple[Tensor, Tensor]:
    """Convert binary labels to two classes with logits 0 and z, dropping missing labels. Class labels are returned unchanged."""
    if likelihood.mutually_exclusive:
        return logits, labels
    targets = likelihood.targets(labels).flatten()
    labelled = targets >= 0
    two_logits = torch.stack([torch.zeros_like(logits), logits], dim=-1).flatten(1, 2)
    return two_logits[:, labelled], targets[labelled]


def temperature_scaled(
    networks: nn.Module | Sequence[nn.Module],
    val_loader: Iterable[Any],
    *,
    mean: Literal["probabilities", "logits"] = "probabilities",
    weights: str | Sequence[float] | Tensor = "uniform",
    likelihood: str | Likelihood = "categorical",
    logits: Logits | Sequence[Logits] | None = None,
    tokens: Tokens | None = None,
    tokenizer: Any = None,
    progress: bool = True,
) -> MoLA:
    """Return a plain ensemble with the temperature that minimises the negative log-likelihood on the validation data.

    A weak prior, which the default rule shares, penalises temperatures below 1. It matters only with few validation data, above all if
    the networks classify all of them correctly.

    The result is `mola.ensemble(networks).with_temperature(T)`; only T (`result.temperature`) needs to be saved.

    Args:
        networks: one trained classifier, or K of them; they are not modified.
        val_loader: validation data with labels, read once.
        mean: the quantity that is averaged over the networks, "probabilities" or "logits".
        weights: "uniform", or K numbers that sum to 1.
        likelihood: "categorical" or "bernoulli".
        logits: function that extracts the logits from a network's output, as for `mola.fit`.
        tokens: tokens that are the classes of causal language models, as for `mola.fit`.
        tokenizer: the tokenizer of the language models, as for `mola.fit`.
        progress: show a progress bar on stderr if it is a terminal.
    """
    one_of(mean, ("probabilities", "logits"), "mean")
    plain = ensemble(networks, weights, likelihood=likelihood, logits=logits, tokens=tokens, tokenizer=tokenizer)
    if not isinstance(plain.likelihood, ClassificationLikelihood):
        raise OptionError(
            f"a temperature divides logits, but likelihood {plain.likelihood.name!r} has no logits. Expected 'categorical' or 'bernoulli'. "
            f"For regression, use mola.calibration.scale_noise."
        )
    data = plain.read(val_loader, "validation loader", labelled=True, progress=progress)
    data.check_labels()
    return with_best_temperature(plain, data, mean)


def with_best_temperature(plain: MoLA, data: HeldOut, mean: str = "probabilities") -> MoLA:
    """Return a plain ensemble with the temperature that suits the validation data of all processes best; see `temperature_scaled`."""
    likelihood = plain.likelihood
    assert isinstance(likelihood, ClassificationLikelihood)
    rows = data.team.gather(torch.stack(list(data.outputs), dim=1))
    logits, labels = as_classes(rows.transpose(0, 1), data.team.gather(data.labels), likelihood)
    if mean == "logits":
        temperature = fit_temperature(mixed(plain.weights, list(logits)), labels)
        plain = plain.with_pooling(0.0)
    else:
        temperature = fit_temperature(logits, labels, plain.weights)
    return plain.with_temperature(min(max(temperature, 1e-3), 1e3))  # the range that `with_temperature` accepts
