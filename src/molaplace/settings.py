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
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from molaplace.errors import OptionError
from molaplace.options import check_number, one_of

NO_COVARIANCE = 1e12
"""Prior precision at or above which a search treats the posterior as a plain ensemble."""

LOG_LARGEST_DISTANCE = 40.0
"""Logarithm of the largest allowed distance divisor `rho^gamma`. This divisor is large enough to make every logit vanish."""

EXCESS_WEIGHT = 4.0
"""Weight of the log excess norm in outlier scores. With broadly distributed norms, an input must be several times as long as most before
its norm is in excess, and the energy has made it look typical by then (docs/outliers.md)."""

LOG_LARGEST = 600.0
"""Logarithm of the largest allowed total divisor, chosen to stay within the range of float64."""


def _setting(low: float, high: float, remedy: str, *, by_distance: bool = False) -> dict[str, Any]:
    # Describe a setting: its bounds and the last sentence of error messages, and whether it acts only if the distance does.
    return {"bounds": (low, high, remedy), "by_distance": by_distance}


@dataclass(frozen=True)
class Settings:
    """The settings of a mixture of K networks or, in a search, of L candidates.

    Each setting is a number, and the prior precision a tuple of K numbers. For L candidates, which `candidates` creates, each setting
    is a float64 tensor (L,), and the prior precision a tensor (L, K).
    """

    prior_precision: tuple[float, ...] | Tensor = field(
        metadata=_setting(
            1e-30,
            1e30,
            "It is the precision of a Gaussian prior. For predictions without covariance, use mola.ensemble.",
        )
    )
    """Prior precision lambda of each network."""
    temperature: float | Tensor = field(
        default=1.0,
        metadata=_setting(1e-3, 1e3, "1 leaves logits unchanged; lower values sharpen predictions."),
    )
    """Temperature T. Values below 1 sharpen predictions."""
    pooling: float | Tensor = field(
        default=1.0,
        metadata=_setting(0, 1, "1 mixes the networks' probabilities, and 0 averages their logits."),
    )
    """Pooling coefficient c: 1 mixes probabilities, and 0 averages logits."""
    distance_exponent: float | Tensor = field(default=0.0, metadata=_setting(0, 100, "At 0, distance has no effect."))
    """Distance exponent gamma. Larger values make logits shrink faster with distance."""
    onset: float | Tensor = field(
        default=1.0, metadata=_setting(1e-6, 1e6, "1 is the median of the validation data.", by_distance=True)
    )
    """Onset o: distance, relative to the median, beyond which logits shrink."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            values: Any = getattr(self, setting.name)
            per_network = setting.name == "prior_precision"
            if isinstance(values, Tensor) and values.dim() == (2 if per_network else 1):
                continue  # candidates of a search
            if not per_network:
                number = check_number(values, setting.name, *setting.metadata["bounds"])
                object.__setattr__(self, setting.name, number)
                continue
            if getattr(values, "ndim", 1) == 0 or not isinstance(values, Iterable):
                raise OptionError(
                    f"must be a tuple with one number for each network, got {values!r}.", argument=setting.name
                )
            numbers = tuple(check_number(value, setting.name, *setting.metadata["bounds"]) for value in values)
            object.__setattr__(self, setting.name, numbers)

    # --- candidates of a search ---------------------------------------------------------------------------------------

    def candidates(self, **values: Sequence[float] | float) -> Settings:
        """Return L candidates that have the given values, broadcast against each other, and otherwise equal these settings.

        Prior precisions of shape (L,) are shared by all networks; their shape may also be (L, K).
        """
        names = [setting.name for setting in fields(self)]
        for name in values:
            one_of(name, names, "setting")
        columns = []
        for name in names:
            column: Any = values.get(name, getattr(self, name))
            columns.append(torch.as_tensor(column, dtype=torch.float64, device="cpu"))
        precisions, *others = columns
        if precisions.dim() == 0:
            precisions = precisions[None]
        if precisions.dim() == 1:
            precisions = precisions[:, None] if "prior_precision" in values else precisions[None]
        size = max(len(precisions), *(column.numel() for column in others))
        precisions = precisions.expand(size, len(self.precisions))
        return Settings(precisions, *(column.flatten().expand(size) for column in others))

    @property
    def is_search(self) -> bool:
        """True for the candidates of a search, and False for the settings of a mixture."""
        return isinstance(self.temperature, Tensor)

    def __len__(self) -> int:
        return len(self.temperature) if isinstance(self.temperature, Tensor) else 1

    def __getitem__(self, index: int | slice | Tensor) -> Settings:
        """Return one candidate or, for a slice or a tensor of indices, several candidates."""
        return Settings(*(getattr(self, setting.name)[index] for setting in fields(self)))

    # --- what the formulas need ---------------------------------------------------------------------------------------

    @property
    def precisions(self) -> Sequence[float | Tensor]:
        """Prior precision of each network: K numbers or, for L candidates, K tensors (L,)."""
        values = self.prior_precision
        return values.unbind(-1) if isinstance(values, Tensor) else values

    @property
    def without_covariance(self) -> bool:
        """True for candidates whose prior precisions are all so large that they have no covariance."""
        return isinstance(self.prior_precision, Tensor) and bool((self.prior_precision >= NO_COVARIANCE).all())

    @property
    def uses_distance(self) -> bool:
        """True if the distance exponent of any candidate is above 0."""
        return (
            bool((self.distance_exponent > 0).any())
            if isinstance(self.distance_exponent, Tensor)
            else self.distance_exponent > 0
        )

    @property
    def neutral(self) -> bool:
        """True if the logits are neither divided nor pooled, as in the paper."""
        return not self.changed()

    def divisors(self, like: Tensor, log_distance: Tensor | None = None, log_excess: Tensor | None = None) -> Tensor:
        """Return `s_k = T rho^gamma nu_k^2`, of shape (..., K, n, 1), or (..., K, 1, 1) without distances.

        Args:
            like: tensor whose data type and device the divisors have.
            log_distance: the mixture's log distances (n,) (`Reference.log_distance`).
            log_excess: log excess norms (K, n) of the networks' features (`Reference.log_excess`). Regression passes zeros, because
                the variance of its predictions grows with the features.
        """
        temperature, gamma, onset = (
            torch.as_tensor(values, dtype=like.dtype, device=like.device)[..., None, None]
            for values in (self.temperature, self.distance_exponent, self.onset)
        )
        if log_distance is None or log_excess is None:
            return temperature[..., None].expand(*temperature.shape[:-2], len(self.precisions), 1, 1)
        log_rho = (log_distance - onset.log()).clamp_min(0)
        by_distance = (gamma * log_rho).clamp_max(LOG_LARGEST_DISTANCE) + 2 * log_excess
        logarithms = temperature.log() + torch.where(gamma > 0, by_distance, 0.0)
        return logarithms.clamp_max(LOG_LARGEST).exp()[..., None]

    # --- files and reports --------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Return the settings as a JSON-serialisable dictionary, keyed by name."""
        return vars(self) | {"prior_precision": list(self.prior_precision)}

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Settings:
        """Rebuild settings from a dictionary returned by `as_json`."""
        return Settings(*(entry[setting.name] for setting in fields(Settings)))

    def changed(self) -> dict[str, float]:
        """Return the settings that have an effect and differ from their neutral values, keyed by name."""
        return {
            setting.name: getattr(self, setting.name)
            for setting in fields(self)
            if setting.default not in (MISSING, getattr(self, setting.name))
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

    def as_json(self) -> dict[str, Any]:
        """Return the reference as a JSON-serialisable dictionary."""
        return asdict(self)

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Reference:
        """Rebuild the reference from the dictionary returned by `as_json`."""
        score = entry["score"]
        energies = entry["energies"]
        return Reference(
            tuple(FeatureScale(float(distance), float(norm)) for distance, norm in entry["scales"]),
            None if score is None else tuple((float(mean), float(deviation)) for mean, deviation in score),
            None if energies is None else tuple(float(energy) for energy in energies),
        )
