r"""What logits are divided by before they become probabilities: a temperature, and the distance from the training data.

The logits f of network k at input x become :math:`f / s_k(x)`, mean and spread alike, before the link, with

.. math:: s_k(x) = T\, \rho(x)^\gamma\, \nu_k(x)^2, \qquad
   \rho(x) = \max\Big(1, \prod_k (d_k(x) / r_k)^{\pi_k}\Big), \qquad \nu_k(x) = \max(1, |h_k(x)| / q_k).

:math:`d_k` is the distance of network k's features from the training classes (`laplace/distance.py`), :math:`r_k` its median on
validation data, :math:`|h_k|` the length of the features, :math:`q_k` a length that 99 % of the validation data stay below, and
:math:`\pi_k` the mixture's weights. :math:`\gamma`, the exponent, says how much caution distance asks for; at 0 neither
:math:`\rho` nor :math:`\nu` is there.

Why :math:`\nu_k^2`: logits grow no faster than features, :math:`|f_k| \le a_k |h_k| + b_k`. So :math:`f_k / \nu_k^2` vanishes as
features grow, and the probabilities of every network whose features grow without bound tend to 1/C. Directions alone, which is what
distances see, would leave them where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mola.errors import OptionError
from mola.laplace import LogitMoments, Scale, Spread
from mola.options import is_real

LARGEST = 40.0
"""Logarithm of the largest divisor by distance: with it no logit is left. Features may be longer than that, without any bound."""

ROOM = 8.0
"""Logarithm of the room that divisors leave below the largest number of their precision."""

STEEPEST = 100.0
"""Exponent beyond which distances a hundredth above the usual one are as far as any."""


def check_temperature(value: float) -> float:
    """A temperature as a float."""
    if not (is_real(value) and 1e-3 <= value <= 1e3):
        raise OptionError(
            f"temperature must be a number between 0.001 and 1000, got {value!r}. 1 leaves logits as they are, below 1 sharpens."
        )
    return float(value)


def check_exponent(value: float) -> float:
    """A distance exponent as a float."""
    if not (is_real(value) and 0 <= value <= STEEPEST):
        raise OptionError(
            f"distance_exponent must be a number between 0 and {STEEPEST:g}, got {value!r}. 0 is no cooling by distance."
        )
    return float(value)


@dataclass(frozen=True)
class Usual:
    """What is usual of the data that the networks are for, as validation data show it."""

    scales: tuple[Scale, ...]
    """Of each network's features."""
    score: tuple[tuple[float, float], ...] | None = None
    """Mean and standard deviation of each term of the outlier score; None where there were no data to see it."""
    energies: tuple[float, ...] | None = None
    """Mean energy of each network, with which the mean of the second term follows other weights: each has a zero of its own."""

    def score_at(self, weights: Tensor) -> tuple[tuple[float, float], ...] | None:
        """Mean and standard deviation of each term of the outlier score of a mixture with these weights (K,)."""
        if self.score is None or self.energies is None:
            return self.score
        far_field, (_, spread), distance = self.score
        mean = sum(weight * energy for weight, energy in zip(weights.tolist(), self.energies, strict=True))
        return far_field, (mean, spread), distance

    def as_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "scales": [list(scale) for scale in self.scales],
            "score": None if self.score is None else [list(term) for term in self.score],
            "energies": None if self.energies is None else list(self.energies),
        }

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Usual:
        """What `as_json` made."""
        score = None if entry["score"] is None else tuple((float(a), float(b)) for a, b in entry["score"])
        known = entry.get("energies")  # older files have none
        energies = None if known is None else tuple(float(one) for one in known)
        return Usual(tuple(Scale(float(a), float(b)) for a, b in entry["scales"]), score, energies)


@dataclass(frozen=True)
class Cooling:
    """How logits are cooled."""

    temperature: float = 1.0
    """T, for all inputs alike: below 1 sharpens."""
    exponent: float = 0.0
    """gamma: how much caution distance asks for."""
    usual: Usual | None = None
    """Which distances and lengths are usual; None where nothing is known of distances."""
    _logs: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", check_temperature(self.temperature))
        object.__setattr__(self, "exponent", check_exponent(self.exponent))

    @property
    def changes_nothing(self) -> bool:
        """Whether logits stay as they are."""
        return self.temperature == 1 and self.exponent == 0

    def from_logs(self, log_distance: Tensor, log_length: Tensor, weights: Tensor) -> Tensor:
        """What the logits of each network are divided by.

        Args:
            log_distance: (K, n), logarithm of the distance of each network's features.
            log_length: (K, n), of their length.
            weights: (K,) of the mixture.

        Returns:
            (K, n)
        """
        # In place from the first step on: there are few numbers, and each operation costs more than they do.
        steep = self.mean_log(log_distance, weights).mul_(self.exponent).clamp_(0.0, LARGEST)
        if self.temperature != 1:
            steep.add_(math.log(self.temperature))
        # Not bounded but by the precision: logits grow with the features, and must vanish beside the divisor all the same.
        logs = torch.add(steep, self._log_excess(log_length), alpha=2)
        return logs.clamp_max_(_log_largest(log_length)).exp_()

    def _usual_logs(self, like: Tensor) -> tuple[Tensor, Tensor]:
        # Logarithms of the usual distances (K, 1) and lengths (K, 1), made once for a device and a precision.
        key = (like.device, like.dtype)
        found = self._logs.get(key)
        if found is None:
            rows = [
                [[_log(scale.distance)] for scale in self._scales],
                [[_log(scale.length)] for scale in self._scales],
            ]
            found = like.new_tensor(rows[0]), like.new_tensor(rows[1])
            if not torch.compiler.is_compiling():  # a trace's tensors are of no use outside of it
                self._logs[key] = found
        return found

    def _log_excess(self, log_length: Tensor) -> Tensor:
        # Logarithm (K, n) of how many times longer than usual features are; 0 for all that are not.
        return (log_length - self._usual_logs(log_length)[1]).clamp_min_(0)

    def excess(self, moments: Sequence[LogitMoments]) -> Tensor:
        """How many times longer than usual each network's features are (K, n), at least 1."""
        return self.excess_of(_stacked([_spread(one).log_length() for one in moments]))

    def excess_of(self, log_length: Tensor) -> Tensor:
        """The same from the logarithms of the lengths (K, n)."""
        return self._log_excess(log_length).clamp_max(_log_largest(log_length) / 2).exp()

    def mean_log(self, log_distance: Tensor, weights: Tensor) -> Tensor:
        """Logarithm (n,) of the mixture's distance, relative to the usual one, from those of the networks (K, n)."""
        relative = log_distance - self._usual_logs(log_distance)[0]
        return relative[0] if len(relative) == 1 else weights.to(log_distance) @ relative

    @property
    def _scales(self) -> tuple[Scale, ...]:
        assert self.usual is not None  # where distances are known
        return self.usual.scales

    def log_distance(self, moments: Sequence[LogitMoments], weights: Tensor) -> Tensor:
        """Logarithm (n,) of the mixture's distance, relative to the usual one: a geometric mean over networks.

        Args:
            moments: of each network, whose spreads know distances.
            weights: (K,) of the mixture.

        Returns:
            (n,), 0 at the validation data's median.
        """
        return self.mean_log(torch.stack([_spread(one).log_distance() for one in moments]), weights)

    def divisors(self, moments: Sequence[LogitMoments], weights: Tensor) -> Tensor:
        """What the logits (n, C) of each network are divided by (K, n), or all of them (K,)."""
        if self.exponent == 0:
            return moments[0].mean.new_full((len(moments), 1), self.temperature)
        distances = _stacked([_spread(one).log_distance() for one in moments])
        return self.from_logs(distances, _stacked([_spread(one).log_length() for one in moments]), weights)

    def divisors_at(
        self,
        coolings: Sequence[tuple[float, float]],
        log_distance: Tensor,
        log_length: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """What logits are divided by under many coolings of the same data, with these usual distances and lengths.

        Args:
            coolings: L temperatures with exponents.
            log_distance: (K, n), as for `from_logs`.
            log_length: (K, n), likewise.
            weights: (K,) of the mixture.

        Returns:
            (L, K, n)
        """
        pairs = log_distance.new_tensor(coolings)[:, :, None, None]
        temperatures, exponents = pairs[:, 0], pairs[:, 1]
        steep = self.mean_log(log_distance, weights).clamp_min_(0)
        logs = (exponents * steep).clamp_max_(LARGEST).add_(temperatures.log())
        logs = self._log_excess(log_length).mul_(2).add(logs)
        found = logs.clamp_max_(_log_largest(log_length)).exp_()
        return torch.where(exponents > 0, found, temperatures)

    def growth(self, moments: Sequence[LogitMoments], weights: Tensor) -> Tensor:
        """What the standard deviations of numbers are multiplied by (n,), at least 1: distance alone, to the exponent.

        Long features need nothing of their own there: variances grow with the square of their length.
        """
        steep = self.exponent * self.log_distance(moments, weights).clamp_min(0)
        return steep.clamp_max(LARGEST).exp()

    def __call__(self, moments: Sequence[LogitMoments], weights: Tensor) -> list[LogitMoments]:
        """The moments of the cooled logits.

        Args:
            moments: of each network.
            weights: (K,) of the mixture.

        Returns:
            The same, bit for bit, where nothing changes.
        """
        if self.changes_nothing:
            return list(moments)
        pairs = zip(moments, self.divisors(moments, weights), strict=True)
        return [one.divided(divisor) for one, divisor in pairs]


def _stacked(values: Sequence[Tensor]) -> Tensor:
    # Numbers (K, n) of the networks; of one network a view, as this is paid at every prediction.
    return values[0][None] if len(values) == 1 else torch.stack(list(values))


def _spread(moments: LogitMoments) -> Spread:
    assert moments.spread is not None  # where distances are known
    return moments.spread


def _log_largest(like: Tensor) -> float:
    return math.log(torch.finfo(like.dtype).max) - ROOM


def _log(usual: float) -> float:
    # Logarithm of what is usual; 0 where that is 0, as distances are if all features are alike.
    return math.log(usual) if usual > 0 else 0.0
