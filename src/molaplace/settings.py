r"""Settings of a mixture: the prior precision, and the scaling of the logits by temperature, distance and pooling.

The prior precision :math:`\lambda` determines the covariance of the logits; the other settings act on the logits before the link.

For network k, let :math:`z_k(x) = m_k(x) / s_k(x)` be its logits divided by

.. math:: s_k(x) = T\, \rho(x)^\gamma\, \nu_k(x)^2, \qquad
   \rho(x) = \max\Big(1, \tfrac1o \prod_k (d_k(x) / r_k)^{\pi_k}\Big), \qquad \nu_k(x) = \max(1, |h_k(x)| / q_k),

and contract them towards the mixture's mean :math:`z = \sum_k \pi_k z_k`:

.. math:: z'_k = z + c\, (z_k - z), \qquad p(x) = \sum_k \pi_k\, \mathrm{link}(z'_k,\, S_k / s_k^2).

T is the temperature, c is the pooling coefficient and :math:`\gamma` is the distance exponent. **T = 1, c = 1 and gamma = 0 give
exactly the paper's MoLA.** Pooling changes only the means of the logits; the covariances are divided by
:math:`s_k^2` but not pooled.

:math:`d_k` is the distance of network k's features from the training classes (`structures/distance.py`), and :math:`r_k` is its median on
the validation data. The onset o is the distance, relative to the median, beyond which logits shrink. :math:`|h_k|` is the norm of the
features, :math:`q_k` is the 99 % quantile of the norms on the validation data, and :math:`\pi_k` are the mixture's weights. At
:math:`\gamma = 0`, both :math:`\rho` and :math:`\nu` are omitted.

The factor :math:`\nu_k^2` is needed because distances depend only on the directions of the features. Logits grow no faster than
features do, since :math:`|m_k| \le a_k |h_k| + b_k`. With this factor, :math:`z_k` and the pooled logits vanish as the features
grow, and the probabilities tend to 1/C.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, NamedTuple

from torch import Tensor

from molaplace.errors import OptionError
from molaplace.options import check_number

NO_COVARIANCE = 1e12
"""Prior precision at or above which a search treats the posterior as a plain ensemble."""

LOG_LARGEST_DISTANCE = 40.0
"""Logarithm of the largest allowed distance divisor `rho^gamma`. This divisor is large enough to make every logit vanish."""

EXCESS_WEIGHT = 4.0
"""Weight of the log excess norm in outlier scores. With broadly distributed norms, an input must be several times as long as most before
its norm is in excess, and the energy has made it look typical by then (docs/outliers.md)."""

LOG_LARGEST = 600.0
"""Logarithm of the largest allowed total divisor, chosen to stay within the range of float64."""


def _setting(
    low: float, high: float, remedy: str, *, per_network: bool = False, by_distance: bool = False
) -> dict[str, Any]:
    # Describe a setting: its bounds and the last sentence of error messages, whether there is one number for each network, and whether
    # it acts only if the distance does.
    return {"bounds": (low, high, remedy), "per_network": per_network, "by_distance": by_distance}


@dataclass(frozen=True)
class Settings:
    """The settings of a mixture of K networks: numbers, or a tuple with one number for each network."""

    prior_precision: tuple[float, ...] = field(
        metadata=_setting(
            1e-30,
            1e30,
            "It is the precision of a Gaussian prior. For predictions without covariance, use mola.ensemble.",
            per_network=True,
        )
    )
    """Prior precision lambda of each network."""
    temperature: float = field(
        default=1.0,
        metadata=_setting(1e-3, 1e3, "1 leaves logits unchanged; lower values sharpen predictions."),
    )
    """Temperature T. Values below 1 sharpen predictions."""
    pooling: float = field(
        default=1.0,
        metadata=_setting(0, 1, "1 mixes the networks' probabilities, and 0 averages their logits."),
    )
    """Pooling coefficient c: 1 mixes probabilities, and 0 averages logits."""
    distance_exponent: float = field(default=0.0, metadata=_setting(0, 100, "At 0, distance has no effect."))
    """Distance exponent gamma. Larger values make logits shrink faster with distance."""
    onset: float = field(
        default=1.0, metadata=_setting(1e-6, 1e6, "1 is the median of the validation data.", by_distance=True)
    )
    """Onset o: distance, relative to the median, beyond which logits shrink."""
    noise_factor: tuple[float, ...] = field(
        default=(),
        metadata=_setting(1e-30, 1e30, "1 leaves the noise of a regression unchanged.", per_network=True),
    )
    """In regression, the factor by which each network's noise is multiplied; empty if no noise is changed."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value: Any = getattr(self, setting.name)
            if not setting.metadata["per_network"]:
                checked: Any = check_number(value, setting.name, *setting.metadata["bounds"])
            elif getattr(value, "ndim", 1) == 0 or not isinstance(value, Iterable):
                raise OptionError(
                    f"must be a tuple with one number for each network, got {value!r}.", argument=setting.name
                )
            else:
                checked = tuple(check_number(number, setting.name, *setting.metadata["bounds"]) for number in value)
            object.__setattr__(self, setting.name, checked)
        if self.noise_factor and len(self.noise_factor) != len(self.prior_precision):
            raise OptionError(
                f"must have one number for each of {len(self.prior_precision)} networks, or none; got {self.noise_factor!r}.",
                argument="noise_factor",
            )

    def at_precision(self, prior_precision: float, **others: Any) -> Settings:
        """Return the settings with one prior precision for all networks and, if given, other values of other settings."""
        return replace(self, prior_precision=(prior_precision,) * len(self.prior_precision), **others)

    # --- what the formulas need ---------------------------------------------------------------------------------------

    @property
    def noise_factors(self) -> tuple[float, ...]:
        """Factor of each network's noise."""
        return self.noise_factor or (1.0,) * len(self.prior_precision)

    @property
    def has_covariance(self) -> bool:
        """True if a prior precision is below the value from which a search treats the posterior as a plain ensemble."""
        return any(precision < NO_COVARIANCE for precision in self.prior_precision)

    @property
    def uses_distance(self) -> bool:
        """True if the distance exponent is above 0."""
        return self.distance_exponent > 0

    @property
    def neutral(self) -> bool:
        """True if the logits are neither divided nor pooled, as in the paper."""
        return not self.changed()

    def divisors(
        self, like: Tensor, log_distance: Tensor | None = None, log_excess: Tensor | None = None
    ) -> list[Tensor]:
        """Return each network's `s_k = T rho^gamma nu_k^2`, of shape (n, 1), or (1, 1) without distances.

        Args:
            like: tensor whose data type and device the divisors have.
            log_distance: the mixture's log distances (n,) (`Reference.log_distance`).
            log_excess: log excess norms (K, n) of the networks' features (`Reference.log_excess`). Regression passes zeros, because
                the variance of its predictions grows with the features.
        """
        log_temperature = math.log(self.temperature)
        if log_distance is None or log_excess is None or not self.uses_distance:
            return [like.new_full((1, 1), self.temperature)] * len(self.prior_precision)
        log_rho = (log_distance - math.log(self.onset)).clamp_min(0)
        by_distance = (self.distance_exponent * log_rho).clamp_max(LOG_LARGEST_DISTANCE) + 2 * log_excess
        return list((log_temperature + by_distance).clamp_max(LOG_LARGEST).exp().to(like)[..., None].unbind(0))

    # --- files and reports --------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Return the settings as a JSON-serialisable dictionary, keyed by name."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def changed(self) -> dict[str, Any]:
        """Return the settings that act on the logits and differ from their neutral values, keyed by name."""
        return {
            setting.name: getattr(self, setting.name)
            for setting in fields(self)
            if setting.default not in (MISSING, getattr(self, setting.name))
            and not setting.metadata["per_network"]
            and (self.uses_distance or not setting.metadata["by_distance"])
        }


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

    def log_distance(self, log_distances: Tensor, weights: Tensor) -> Tensor:
        """Combine the networks' log distances (K, n) into the mixture's log distance (n,), relative to the median."""
        return weights.to(log_distances) @ (log_distances - self._logs("distance", log_distances))

    def log_excess(self, log_norms: Tensor) -> Tensor:
        """Return the log excess norm `log nu` (K, n) of the features, which is 0 for typical features."""
        return (log_norms - self._logs("norm", log_norms)).clamp_min(0)

    def log_departure(self, log_distances: Tensor, log_norms: Tensor, weights: Tensor) -> Tensor:
        """Return the mixture's log distance plus the weighted mean of its log excess norms (n,), which outlier scores use.

        The distance depends only on the direction of the features, the excess norm only on their length.
        """
        log_excess = weights.to(log_norms) @ self.log_excess(log_norms)
        return self.log_distance(log_distances, weights) + EXCESS_WEIGHT * log_excess

    def _logs(self, name: str, like: Tensor) -> Tensor:
        # A reference of 0, which occurs if all features are identical or 0, is replaced by 1.
        values = [getattr(scale, name) for scale in self.scales]
        return like.new_tensor([math.log(value) if value > 0 else 0.0 for value in values])[:, None]

    def score_at(self, weights: Tensor) -> tuple[tuple[float, float], ...] | None:
        """Return the mean and standard deviation of each term of the outlier score for a mixture with weights (K,)."""
        if self.score is None or self.energies is None:
            return self.score
        far_field, (_, deviation), distance = self.score
        mean = sum(weight * energy for weight, energy in zip(weights.tolist(), self.energies, strict=True))
        return far_field, (mean, deviation), distance
