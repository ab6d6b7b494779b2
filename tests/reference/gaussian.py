"""Regression by slow, obvious formulas: the Hessian by autograd, the posterior by inversion, evidence as a density of all targets.

Weights are flattened row-major: (D, P) with the bias, where there is one, as last column. Noise is a standard deviation for each
output, or for each datum and output.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def negative_log_likelihood(weights: Tensor, features: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
    return -torch.distributions.Normal(features @ weights.T, noise).log_prob(targets).sum()


def hessian(weights: Tensor, features: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
    """Exact Hessian (DP, DP) of the negative log-likelihood, by differentiating twice."""
    size = weights.numel()

    def loss(flat: Tensor) -> Tensor:
        return negative_log_likelihood(flat.view_as(weights), features, targets, noise)

    return torch.autograd.functional.hessian(loss, weights.flatten()).reshape(size, size)


def precision(
    structure: str, weights: Tensor, features: Tensor, targets: Tensor, noise: Tensor, prior: float
) -> Tensor:
    """Posterior precision (DP, DP) of each structure, written out."""
    identity = torch.eye(weights.numel(), dtype=torch.float64)
    exact = hessian(weights, features, targets, noise)
    if structure == "full":
        return exact + prior * identity
    if structure == "diag":
        return torch.diag(exact.diagonal()) + prior * identity
    count = len(features)
    # One datum at a time: the mean curvature of the outputs, and of the features.
    a = sum(torch.diag(1 / one.square()) for one in noise.expand_as(targets)) / count
    b = sum(torch.outer(phi, phi) for phi in features) / count
    if structure == "kron-exact":
        return count * torch.kron(a, b) + prior * identity
    left = count**0.5 * a + prior**0.5 * torch.eye(len(a), dtype=torch.float64)
    right = count**0.5 * b + prior**0.5 * torch.eye(len(b), dtype=torch.float64)
    return torch.kron(left, right)


def variances(dense_precision: Tensor, phi: Tensor, outputs: int) -> Tensor:
    """Variance (n, D) of each output at features (n, P)."""
    covariance = torch.linalg.inv(dense_precision)
    found = []
    for one in phi:
        jacobian = torch.kron(torch.eye(outputs, dtype=torch.float64), one[None, :])
        found.append((jacobian @ covariance @ jacobian.T).diagonal())
    return torch.stack(found)


def log_evidence(
    dense_precision: Tensor, weights: Tensor, features: Tensor, targets: Tensor, noise: Tensor, prior: float
) -> Tensor:
    """Laplace's: at the trained weights, whatever they are."""
    fit = -negative_log_likelihood(weights, features, targets, noise)
    size = weights.numel()
    penalty = prior / 2 * weights.square().sum()
    return fit - penalty + size / 2 * math.log(prior) - torch.linalg.slogdet(dense_precision)[1] / 2


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


def mixture(weights: Tensor, means: Tensor, variances_: Tensor) -> torch.distributions.MixtureSameFamily:
    """The mixture of normals (n, D), by torch's own distribution: weights (K,), means and variances (K, n, D)."""
    components = torch.distributions.Normal(means.movedim(0, -1), variances_.movedim(0, -1).sqrt())
    choice = torch.distributions.Categorical(weights.expand(*means.shape[1:], -1))
    return torch.distributions.MixtureSameFamily(choice, components)
