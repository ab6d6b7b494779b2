"""The Gaussian over linearised logits, as a link sees it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from mola.laplace import LogitMoments, Posterior
from mola.likelihood import CATEGORICAL

__all__ = ["contrasts", "contrasts_and_mean", "logit_moments", "plain"]

JITTER = 1e-6
"""Added to the contrast covariance's diagonal before its root is taken, relative to its mean."""


def plain(logits: Tensor) -> Tensor:
    """Directions (C, n, C): each logit."""
    return torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)[:, None].expand(-1, len(logits), -1)


def contrasts(logits: Tensor) -> Tensor:
    """Directions (C, n, C): each logit less the mean of all."""
    return plain(logits) - 1 / logits.shape[1]


def contrasts_and_mean(logits: Tensor) -> Tensor:
    """Directions (C + 1, n, C): each logit less the mean of all, and that mean.

    The prior alone holds the mean, which may vary far more than all the softmax sees: apart, neither is lost in the other.
    """
    return torch.cat([contrasts(logits), torch.full_like(logits, 1 / logits.shape[1])[None]])


def logit_moments(mean: Tensor, joint: Tensor) -> LogitMoments:
    """What a link sees.

    Args:
        mean: logits (n, C).
        joint: covariance (n, C + 1, C + 1) along `contrasts_and_mean`.

    Returns:
        The moments.
    """
    # A link asks no more of a posterior than `JointSpread` has.
    return LogitMoments(mean, joint.flatten(1), cast("Posterior", JointSpread(mean.shape[1])))


class JointSpread:
    """Reads moments off the joint covariance of the centred logits and their mean, which takes the features' place.

    Args:
        classes: C.
    """

    def __init__(self, classes: int) -> None:
        """Remember the size."""
        self.classes = classes
        self.noise_size = classes - 1

    def _joint(self, features: Tensor) -> Tensor:
        return features.view(len(features), self.classes + 1, self.classes + 1)

    def variance(self, features: Tensor) -> Tensor:
        """Variance (n, C) of each logit."""
        joint = self._joint(features)
        return self.contrast_variance(features) + 2 * joint[:, :-1, -1] + joint[:, -1:, -1]

    def contrast_variance(self, features: Tensor) -> Tensor:
        """Variance (n, C) of each centred logit."""
        return self._joint(features).diagonal(dim1=1, dim2=2)[:, :-1]

    def covariance(self, features: Tensor) -> Tensor:
        """Covariance (n, C, C) of the logits."""
        joint = self._joint(features)
        return joint[:, :-1, :-1] + joint[:, :-1, -1:] + joint[:, -1:, :-1] + joint[:, -1:, -1:]

    def contrast_covariance(self, features: Tensor) -> Tensor:
        """Covariance (n, C, C) of the centred logits."""
        return self._joint(features)[:, :-1, :-1]

    def perturb(self, features: Tensor, noise: Tensor) -> Tensor:
        """Deviations (n, S, C) of the logits, up to a common shift, driven by standard normals (S, C - 1)."""
        basis = CATEGORICAL.visible(self.classes).to(features)
        inner = basis.T @ self.contrast_covariance(features) @ basis
        scale = inner.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(inner.dtype).tiny)
        unit = torch.eye(self.noise_size, dtype=inner.dtype, device=inner.device)
        # In units of its own size: neither a prior that says all nor one that says nothing leaves the range of numbers.
        root = torch.linalg.cholesky(inner / scale[:, None, None] + JITTER * unit) * scale.sqrt()[:, None, None]
        return (noise @ root.mT) @ basis.T
