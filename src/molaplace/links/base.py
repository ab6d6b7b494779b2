"""The interface of a link and the formulas shared by several links."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from molaplace.likelihoods.base import ClassificationLikelihood, Likelihood
from molaplace.structures.base import Spread


class Link(ABC):
    """A map from Gaussian logits to probabilities. Every link is a frozen dataclass whose fields are its settings."""

    name: str
    variance_only = False
    """True if the link uses only the variance of each logit, so that a search can evaluate many candidates at once."""

    classes_only = False
    """True if the link centres the logits and therefore applies only to mutually exclusive classes."""
    needs_covariance = False
    """True if the link is undefined without a covariance."""

    @abstractmethod
    def __call__(
        self, mean: Tensor, spread: Spread | None, likelihood: ClassificationLikelihood, seed: int | None = None
    ) -> Tensor:
        """Return probabilities (..., n, C), given the logits' mean (..., n, C) and their spread (None without a covariance)."""

    def applies_to(self, likelihood: Likelihood) -> bool:
        """Return True if the link is defined for the given likelihood."""
        return likelihood.classification and (likelihood.mutually_exclusive or not self.classes_only)

    def row_size(self, outputs: int) -> int:
        """Return the number of values that the link holds in memory at once for each datum."""
        return outputs

    def settings(self) -> dict[str, Any]:
        """Return the link's constructor arguments as a JSON-serialisable dictionary."""
        return asdict(self)  # type: ignore[call-overload]


def probit_scaled(mean: Tensor, variance: Tensor) -> Tensor:
    """Return `m / sqrt(1 + pi/8 v)`, MacKay's approximation of the logit of the expected sigmoid."""
    return mean * torch.rsqrt(1 + math.pi / 8 * variance)


def centred(mean: Tensor) -> Tensor:
    """Return the logits minus their mean over the classes."""
    return mean - mean.mean(-1, keepdim=True)
