"""Regression by slow, obvious formulas: the most probable weights, the evidence as a density of all targets, and mixtures."""

from __future__ import annotations

import torch
from torch import Tensor


def ridge_weights(features: Tensor, targets: Tensor, noise: Tensor, prior: float) -> Tensor:
    """The most probable weights (D, P): where Laplace's evidence is the evidence."""
    rows = []
    for output, deviation in enumerate(noise):
        matrix = features.T @ features / deviation**2 + prior * torch.eye(features.shape[1], dtype=torch.float64)
        rows.append(torch.linalg.solve(matrix, features.T @ targets[:, output] / deviation**2))
    return torch.stack(rows)


def exact_log_evidence(features: Tensor, targets: Tensor, noise: Tensor, prior: float) -> Tensor:
    """Density of the targets with the weights integrated out: normal, with covariance `Phi Phi' / lambda + sigma^2`."""
    total = torch.zeros((), dtype=torch.float64)
    for output, deviation in enumerate(noise):
        covariance = features @ features.T / prior + deviation**2 * torch.eye(len(features), dtype=torch.float64)
        mean = torch.zeros(len(features), dtype=torch.float64)
        total += torch.distributions.MultivariateNormal(mean, covariance).log_prob(targets[:, output])
    return total


def mixture(weights: Tensor, means: Tensor, variances: Tensor) -> torch.distributions.MixtureSameFamily:
    """The mixture of normals (n, D), by torch's own distribution: weights (K,), means and variances (K, n, D)."""
    components = torch.distributions.Normal(means.movedim(0, -1), variances.movedim(0, -1).sqrt())
    choice = torch.distributions.Categorical(weights.expand(*means.shape[1:], -1))
    return torch.distributions.MixtureSameFamily(choice, components)
