"""The contract of a link, and the formulas that several links share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from mola.laplace.base import Spread
from mola.likelihoods.base import ClassificationLikelihood, Likelihood


class Link(ABC):
    """A rule that turns Gaussian logits into probabilities."""

    name: str
    variance_only = True
    """True if the link uses only the variance of each logit: many candidates of a search are then evaluated at once."""

    classes_only = False
    """True if the link centres logits over classes, which is impossible for a single binary logit."""
    needs_covariance = False
    """True if the link is undefined without covariance."""

    @abstractmethod
    def __call__(
        self, mean: Tensor, spread: Spread | None, likelihood: ClassificationLikelihood, seed: int | None = None
    ) -> Tensor:
        """Return probabilities (..., n, C) of logits with this mean (..., n, C) and spread; None is no spread."""

    def applies_to(self, likelihood: Likelihood) -> bool:
        """Test whether the link is defined for a likelihood."""
        return likelihood.classification and (likelihood.mutually_exclusive or not self.classes_only)

    def row_size(self, outputs: int) -> int:
        """Return how many numbers are held at once for each datum."""
        return outputs

    def settings(self) -> dict[str, Any]:
        """Return arguments that rebuild the link, as JSON."""
        return asdict(self)  # type: ignore[call-overload]


def probit_scaled(mean: Tensor, variance: Tensor) -> Tensor:
    """Return `m / sqrt(1 + pi/8 v)`: the logit of the averaged logistic, by MacKay's approximation."""
    return mean * torch.rsqrt(1 + math.pi / 8 * variance)


def centred(mean: Tensor) -> Tensor:
    """Return logits less their mean over the classes."""
    return mean - mean.mean(-1, keepdim=True)
