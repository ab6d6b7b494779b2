"""The Gaussian over linearised logits, as a link sees it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from mola.laplace import LogitMoments, Posterior
from mola.likelihood import CATEGORICAL

__all__ = ["JointSpread", "contrasts", "logit_moments", "plain", "seen_and_shift"]

JITTER = 1e-6
"""Added to the contrast covariance's diagonal before its root is taken, relative to its mean: at least so much, and more
than what rounding takes away from a large one of low rank."""


def plain(logits: Tensor) -> Tensor:
    """Directions (C, n, C): each logit."""
    return torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)[:, None].expand(-1, len(logits), -1)


def contrasts(logits: Tensor) -> Tensor:
    """Directions (C, n, C): each logit less the mean of all."""
    return plain(logits) - 1 / logits.shape[1]


def basis(classes: int) -> Tensor:
    """Orthonormal directions (C, C) of logit space, as columns: those that the softmax sees, and last the common shift."""
    shift = torch.full((classes, 1), classes**-0.5, dtype=torch.float64, device="cpu")
    return torch.cat([CATEGORICAL.visible(classes), shift], dim=1)


def seen_and_shift(logits: Tensor) -> Tensor:
    """Directions (C, n, C): the orthonormal `basis`.

    The prior alone holds the common shift, which may vary far more than all that the softmax sees: apart, neither is lost
    in the other.
    """
    return basis(logits.shape[1]).T.to(logits)[:, None].expand(-1, len(logits), -1)


def logit_moments(mean: Tensor, joint: Tensor, given: tuple[torch.device, torch.dtype] | None = None) -> LogitMoments:
    """What a link sees.

    Args:
        mean: logits (n, C).
        joint: covariance (n, C, C) along `seen_and_shift`.
        given: the network's device and precision, where these are not there.

    Returns:
        The moments.
    """
    # A link asks no more of a posterior than `JointSpread` has.
    return LogitMoments(mean, joint.flatten(1), cast("Posterior", JointSpread(mean.shape[1])), given)


class JointSpread:
    """Reads moments off the covariance along `seen_and_shift`, which takes the features' place.

    Args:
        classes: C.
    """

    def __init__(self, classes: int) -> None:
        """Remember the size."""
        self.classes = classes
        self.noise_size = classes - 1

    def _joint(self, features: Tensor) -> Tensor:
        return features.view(len(features), self.classes, self.classes)

    def _seen(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Covariance (n, C-1, C-1) of what the softmax sees, and its directions (C, C-1)."""
        return self._joint(features)[:, :-1, :-1], basis(self.classes)[:, :-1].to(features)

    def covariance(self, features: Tensor) -> Tensor:
        """Covariance (n, C, C) of the logits."""
        columns = basis(self.classes).to(features)
        return columns @ self._joint(features) @ columns.T

    def variance(self, features: Tensor) -> Tensor:
        """Variance (n, C) of each logit."""
        return self.covariance(features).diagonal(dim1=1, dim2=2)

    def contrast_variance(self, features: Tensor) -> Tensor:
        """Variance (n, C) of each centred logit."""
        return self.contrast_covariance(features).diagonal(dim1=1, dim2=2)

    def average_contrast_variance(self) -> Tensor:
        """Ones (C,): without a Jacobian no logit has more variance than another."""
        return torch.ones(self.classes, device="cpu")

    def contrast_covariance(self, features: Tensor) -> Tensor:
        """Covariance (n, C, C) of the centred logits."""
        seen, columns = self._seen(features)
        return columns @ seen @ columns.T

    def perturb(self, features: Tensor, noise: Tensor) -> Tensor:
        """Deviations (n, S, C) of the logits, up to a common shift, driven by standard normals (S, C - 1)."""
        seen, columns = self._seen(features)
        scale = seen.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(seen.dtype).tiny)
        unit = torch.eye(self.noise_size, dtype=seen.dtype, device=seen.device)
        # In units of its own size: neither a prior that says all nor one that says nothing leaves the range of numbers.
        jitter = max(JITTER, 4 * self.noise_size * torch.finfo(seen.dtype).eps)
        root = torch.linalg.cholesky(seen / scale[:, None, None] + jitter * unit) * scale.sqrt()[:, None, None]
        return (noise @ root.mT) @ columns.T
