r"""Temperature scaling (Guo et al., 2017): divide the logits by the one number that does best on validation data.

For K members with weights w and temperature T the loss is the mixture's own,

.. math:: L(T) = -\tfrac1n \sum_n \log \sum_k w_k\, \mathrm{softmax}(z_{kn} / T)_{y_n},

and its slope in :math:`\log T` is known in closed form: with the responsibilities :math:`r_{kn}` of the members for the
label, :math:`\tfrac1n \sum_n \sum_k r_{kn} (z_{kny} - E_k[z_{kn}]) / T`. For one member L is convex in 1/T and has one
minimum. For several it may have more: a grid brackets each, bisection of the slope ends it, and the lowest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mola.errors import DataError, warn
from mola.exactness import exact
from mola.features import check_finite
from mola.likelihood import CATEGORICAL
from mola.weights import check_weights, uniform_weights

__all__ = ["fit_member_temperatures", "fit_pooled_temperature", "fit_temperature", "pooled_log_probabilities"]

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


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits as (K, n, C) in float64, and labels as indices.

    Raises:
        DataError: if they do not fit.
    """
    if logits.dim() == 2:
        logits = logits[None]
    if logits.dim() != 3 or not logits.is_floating_point() or 0 in logits.shape or logits.shape[-1] < 2:
        message = (
            f"logits: expected shape (members, data, classes) with at least one datum and 2 classes, got "
            f"{logits.dtype} of shape {tuple(logits.shape)}."
        )
        raise DataError(message)
    lifted = exact(logits.detach())
    for member in lifted:
        check_finite(member)
    return lifted, CATEGORICAL.check_labels(labels, lifted[0], "labels")


def _loss(members: Tensor, labels: Tensor, weights: Tensor, log_temperature: float) -> tuple[float, float]:
    """The loss and its slope in the logarithm of the temperature."""
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
    """Where a smooth function is least between two ends, and whether that is an end; `loss` gives value and slope."""
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
    """Where the slope changes from falling to rising."""
    while right - left > 1e-12:
        middle = (left + right) / 2
        left, right = (middle, right) if loss(middle)[1] < 0 else (left, middle)
    return (left + right) / 2
