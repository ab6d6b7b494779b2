r"""Scaling of the logits before the link: temperature, distance from the training data, and pooling of the components.

For network k, let :math:`z_k(x) = m_k(x) / s_k(x)` be its logits divided by

.. math:: s_k(x) = T\, \rho(x)^\gamma\, \nu_k(x)^2, \qquad
   \rho(x) = \max\Big(1, \tfrac1o \prod_k (d_k(x) / r_k)^{\pi_k}\Big), \qquad \nu_k(x) = \max(1, |h_k(x)| / q_k),

and contract them towards the mixture's mean :math:`z = \sum_k \pi_k z_k`:

.. math:: z'_k = z + c\, (z_k - z), \qquad p(x) = \sum_k \pi_k\, \mathrm{link}(z'_k,\, S_k / s_k^2).

T is the temperature, c is the pooling coefficient and :math:`\gamma` is the distance exponent. **T = 1, c = 1 and gamma = 0 give
exactly the paper's MoLA.** Pooling changes only the means of the logits; the covariances are divided by
:math:`s_k^2` but not pooled.

:math:`d_k` is the distance of network k's features from the training classes (`laplace/distance.py`), and :math:`r_k` is its median on
the validation data. The onset o is the distance, relative to the median, beyond which logits shrink. :math:`|h_k|` is the norm of the
features, :math:`q_k` is the 99 % quantile of the norms on the validation data, and :math:`\pi_k` are the mixture's weights. At
:math:`\gamma = 0`, both :math:`\rho` and :math:`\nu` are omitted.

The factor :math:`\nu_k^2` is needed because distances depend only on the directions of the features. Logits grow no faster than
features do, since :math:`|m_k| \le a_k |h_k| + b_k`. With this factor, :math:`z_k` and the pooled logits vanish as the features
grow, and the probabilities tend to 1/C.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from molaplace.errors import OptionError
from molaplace.options import is_real

LOG_LARGEST_DISTANCE = 40.0
"""Logarithm of the largest allowed distance divisor `rho^gamma`. This divisor is large enough to make every logit vanish."""

LOG_LARGEST = 600.0
"""Logarithm of the largest allowed total divisor, chosen to stay within the range of float64."""


class FeatureScale(NamedTuple):
    """The reference distance and norm of one network's features."""

    distance: float
    norm: float


@dataclass(frozen=True)
class Reference:
    """Typical distances, norms and outlier scores of the validation data or, before tuning, estimates from the training data."""

    scales: tuple[FeatureScale, ...]
    """Each network's median distance and the 99 % quantile of its feature norms."""
    score: tuple[tuple[float, float], ...] | None = None
    """Mean and standard deviation of each term of the outlier score on the validation data, or None if they were not computed."""
    energies: tuple[float, ...] | None = None
    """Mean energy of each network, which determines the mean of the energy term for any weights."""

    def score_at(self, weights: Tensor) -> tuple[tuple[float, float], ...] | None:
        """Return the mean and standard deviation of each term of the outlier score for a mixture with weights (K,)."""
        if self.score is None or self.energies is None:
            return self.score
        far_field, (_, spread), distance = self.score
        mean = sum(weight * energy for weight, energy in zip(weights.tolist(), self.energies, strict=True))
        return far_field, (mean, spread), distance

    def as_json(self) -> dict[str, Any]:
        """Return the reference as a JSON-serialisable dictionary."""
        return asdict(self)

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Reference:
        """Rebuild the reference from the dictionary returned by `as_json`."""
        score, energies = entry["score"], entry["energies"]
        return Reference(
            tuple(FeatureScale(float(one), float(two)) for one, two in entry["scales"]),
            None if score is None else tuple((float(mean), float(spread)) for mean, spread in score),
            None if energies is None else tuple(float(one) for one in energies),
        )


NO_COVARIANCE = 1e12
"""Prior precision at or above which the posterior is treated as a plain ensemble."""


@dataclass(frozen=True)
class Candidates:
    """Candidates in a search: L settings of a mixture of K networks, in float64."""

    precision: Tensor
    """Prior precisions (L, K)."""
    temperature: Tensor
    """Temperatures (L,)."""
    pooling: Tensor
    """Pooling coefficients (L,)."""
    exponent: Tensor
    """Distance exponents (L,)."""
    onset: Tensor
    """Onsets (L,)."""

    def __len__(self) -> int:
        return len(self.temperature)

    def split(self, size: int) -> Iterator[Candidates]:
        """Yield the candidates in chunks of at most `size` settings."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            fields = (self.precision, self.temperature, self.pooling, self.exponent, self.onset)
            yield Candidates(*(one[part] for one in fields))


@dataclass(frozen=True)
class LogitScaling:
    """Temperature, pooling coefficient and distance exponent of a mixture, and the reference for its distances."""

    temperature: float = 1.0
    """Temperature T. Values below 1 sharpen predictions."""
    pooling: float = 1.0
    """Pooling coefficient c: 1 mixes probabilities, and 0 averages logits."""
    exponent: float = 0.0
    """Distance exponent gamma. Larger values make logits shrink faster with distance."""
    onset: float = 1.0
    """Onset o: distance, relative to the median, beyond which logits shrink."""
    reference: Reference | None = None

    def __post_init__(self) -> None:
        for field, name, low, high, meaning in (
            ("temperature", "temperature", 1e-3, 1e3, "1 leaves logits unchanged; lower values sharpen predictions."),
            ("pooling", "pooling", 0, 1, "1 mixes the networks' probabilities, and 0 averages their logits."),
            ("exponent", "distance_exponent", 0, 100, "At 0, distance has no effect."),
            ("onset", "onset", 1e-6, 1e6, "1 is the median of the validation data."),
        ):
            value = getattr(self, field)
            if not (is_real(value) and low <= value <= high):
                raise OptionError(
                    f"must be a number between {low:g} and {high:g}, got {value!r}. {meaning}", argument=name
                )
            object.__setattr__(self, field, float(value))

    def log_distance(self, log_distance: Tensor, weights: Tensor) -> Tensor:
        """Combine the networks' log distances (K, n) into the mixture's log distance (n,), relative to the median."""
        return weights.to(log_distance) @ (log_distance - self._logs(0, log_distance))

    def log_excess(self, log_norm: Tensor) -> Tensor:
        """Return the log excess norm `log nu` (K, n) of the features, which is 0 for typical features."""
        return (log_norm - self._logs(1, log_norm)).clamp_min(0)

    def _logs(self, field: int, like: Tensor) -> Tensor:
        assert self.reference is not None  # posteriors with distances have a reference
        # A reference distance of 0, which occurs if all features are identical, is replaced by 1.
        values = [math.log(scale[field]) if scale[field] > 0 else 0.0 for scale in self.reference.scales]
        return like.new_tensor(values)[:, None]

    def divisors(
        self,
        logs: tuple[Tensor, Tensor] | None,
        weights: Tensor,
        *,
        norms: bool,
        candidates: Candidates | None = None,
    ) -> Tensor:
        """Return `s_k = T rho^gamma nu_k^2`, of shape (..., K, n, 1), or (..., K, 1, 1) if distances are not used.

        Args:
            logs: log distances (K, n) and log norms (K, n) of the networks' features; None if distances are not used.
            weights: mixture weights (K,).
            norms: whether to use feature norms, as classification does. Regression does not need them, because the
                variance of its predictions grows with the features.
            candidates: candidate settings of a search, which replace the settings of this object.
        """
        at = self if candidates is None else candidates
        temperature, gamma, onset = (
            torch.as_tensor(one, dtype=weights.dtype, device=weights.device)[..., None, None]
            for one in (at.temperature, at.exponent, at.onset)
        )
        if logs is None:
            return temperature[..., None].expand(*temperature.shape[:-2], len(weights), 1, 1)
        log_distance, log_norm = logs
        log_rho = (self.log_distance(log_distance, weights) - onset.log()).clamp_min(0)
        log_nu = self.log_excess(log_norm) if norms else torch.zeros_like(log_norm)
        by_distance = (gamma * log_rho).clamp_max(LOG_LARGEST_DISTANCE) + 2 * log_nu
        logarithms = temperature.log() + torch.where(gamma > 0, by_distance, 0.0)
        return logarithms.clamp_max(LOG_LARGEST).exp()[..., None]
