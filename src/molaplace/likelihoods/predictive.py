"""Predictive distributions, which answer every question about a prediction: its value, its scores and its uncertainty.

A distribution covers n data points.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from molaplace.uncertainty import entropy


class Predictive(Protocol):
    """The predictive distribution for n data points."""

    def point(self) -> Tensor:
        """Return the result of calling the posterior: probabilities (n, C) or means (n, D)."""

    def scores(self, labels: Tensor) -> dict[str, Tensor]:
        """Return scores (m,) in float64, keyed by name, for each datum or, with multi-label data, for each known label."""

    def outlier_score(self) -> Tensor:
        """Return an outlier score (n,) that needs no features; a higher score means a more outlying input."""


@dataclass(frozen=True)
class ClassificationPredictive(ABC):
    """Probabilities of C classes, or of "yes" for C labels."""

    probs: Tensor
    """Probabilities (n, C)."""

    def point(self) -> Tensor:
        """Return the probabilities (n, C)."""
        return self.probs

    @property
    @abstractmethod
    def choices(self) -> Tensor:
        """Probabilities of all choices, of shape (..., C) for classes, or (..., C, 2) for binary labels (no, yes)."""

    def predicted(self) -> Tensor:
        """Return the most probable choices, of shape (n,), or (n, C) for binary labels."""
        return self.choices.argmax(-1)

    def confidence(self) -> Tensor:
        """Return the probabilities of the most probable choices, of shape (n,), or (n, C) for binary labels."""
        return self.choices.amax(-1)

    def entropy(self) -> Tensor:
        """Return the entropy in nats, of shape (n,), or (n, C) for binary labels."""
        return entropy(self.choices)

    def outlier_score(self) -> Tensor:
        """Return one minus the largest probability (n,), averaged over the labels for multi-label data."""
        return self.per_datum(1 - self.confidence())

    @abstractmethod
    def per_datum(self, values: Tensor) -> Tensor:
        """Return one value per datum (n,): the values themselves or, for binary labels, the mean of values (n, C)."""

    @abstractmethod
    def scores(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the log loss, Brier score, confidence and correctness (m,), keyed by name, in float64."""


@dataclass(frozen=True)
class RegressionPredictive(ABC):
    """For each of D outputs, a mixture of K distributions, described by their moments in the targets' units."""

    weights: Tensor
    """Mixture weights (K,)."""
    means: Tensor
    """Means (n, K, D) of the components."""
    variances: Tensor
    """Variances (n, K, D) of the components, including the noise."""
    noises: Tensor
    """Variances (n, K, D) of the noise."""

    def _mixed(self, values: Tensor) -> Tensor:
        return torch.einsum("k,nk...->n...", self.weights.to(values), values)

    def point(self) -> Tensor:
        """Return the mixture's mean (n, D)."""
        return self._mixed(self.means)

    def between(self) -> Tensor:
        """Return the variance (n, D) of the components' means, which measures their disagreement."""
        return self._mixed((self.means - self.point()[:, None]).square())

    def within(self) -> Tensor:
        """Return the mean variance (n, D) of the components without their noise."""
        return self._mixed(self.variances - self.noises).clamp_min(0)

    def aleatoric(self) -> Tensor:
        """Return the mean variance (n, D) of the noise."""
        return self._mixed(self.noises)

    def epistemic(self) -> Tensor:
        """Return the variance (n, D) that more data would remove: the sum of `within` and `between`."""
        return self.within() + self.between()

    def variance(self) -> Tensor:
        """Return the mixture's variance (n, D), the sum of `aleatoric` and `epistemic`."""
        return self.aleatoric() + self.epistemic()

    def component(self, index: int) -> Self:
        """Return the distribution of one component."""
        parts = {name: getattr(self, name)[:, index : index + 1] for name in ("means", "variances", "noises")}
        return replace(self, weights=torch.ones_like(self.weights[:1]), **parts)

    def outlier_score(self) -> Tensor:
        """Return the logarithm of the variance (n,), averaged over the outputs."""
        return self.variance().log().mean(-1)

    def disagreement(self) -> Tensor:
        """Return the disagreement (n,) of the components relative to the noise, averaged over the outputs."""
        return (self.between() / self.aleatoric()).log1p().mean(-1)

    def scores(self, labels: Tensor) -> dict[str, Tensor]:
        """Return each datum's joint log loss, "nll" (n,), and its CRPS averaged over the outputs, "crps" (n,)."""
        return {"nll": -self.log_density(labels), "crps": self.crps(labels).mean(-1)}

    @abstractmethod
    def log_density(self, targets: Tensor) -> Tensor:
        """Return the joint log density (n,) of targets (n, D)."""

    @abstractmethod
    def cdf(self, values: Tensor) -> Tensor:
        """Return the probability (n, D) that a target is less than or equal to `values`."""

    @abstractmethod
    def quantile(self, level: float) -> Tensor:
        """Return the values (n, D) below which the targets fall with probability `level`."""

    @abstractmethod
    def crps(self, targets: Tensor) -> Tensor:
        """Return the continuous ranked probability score (n, D) of the targets."""
