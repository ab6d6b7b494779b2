"""Slow, obvious, dense versions to compare with: the Hessian by autograd, covariances by inversion, sums by loops.

Weights are flattened row-major: (C, P) with the bias, where there is one, as last column.
"""

from __future__ import annotations

import torch
from torch import Tensor


def negative_log_likelihood(weights: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    logits = features @ weights.T
    return -torch.log_softmax(logits, dim=1)[torch.arange(len(labels)), labels].sum()


def hessian(weights: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Exact Hessian (CP, CP) of the negative log-likelihood, by differentiating twice."""
    size = weights.numel()

    def loss(flat: Tensor) -> Tensor:
        return negative_log_likelihood(flat.view_as(weights), features, labels)

    return torch.autograd.functional.hessian(loss, weights.flatten()).reshape(size, size)


def output_curvature(logits: Tensor) -> Tensor:
    """Lambda (C, C) of one datum."""
    probs = torch.softmax(logits, dim=0)
    return torch.diag(probs) - torch.outer(probs, probs)


def kron_factors(weights: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Means A (C, C) and B (P, P), one datum at a time."""
    count = len(features)
    a = sum(output_curvature(weights @ phi) for phi in features) / count
    b = sum(torch.outer(phi, phi) for phi in features) / count
    return a, b


def precision(structure: str, weights: Tensor, features: Tensor, labels: Tensor, prior: float) -> Tensor:
    """Posterior precision (CP, CP) of each structure, written out."""
    identity = torch.eye(weights.numel(), dtype=torch.float64)
    count = len(features)
    if structure == "full":
        return hessian(weights, features, labels) + prior * identity
    if structure == "diag":
        return torch.diag(hessian(weights, features, labels).diagonal()) + prior * identity
    a, b = kron_factors(weights, features)
    if structure == "kron-exact":
        return count * torch.kron(a, b) + prior * identity
    if structure == "kron":
        left = count**0.5 * a + prior**0.5 * torch.eye(len(a), dtype=torch.float64)
        right = count**0.5 * b + prior**0.5 * torch.eye(len(b), dtype=torch.float64)
        return torch.kron(left, right)
    if structure == "kron-diag":
        left = count**0.5 * same_diagonal(a.diagonal()) + prior**0.5 * torch.eye(len(a), dtype=torch.float64)
        right = count**0.5 * b + prior**0.5 * torch.eye(len(b), dtype=torch.float64)
        return torch.kron(left, right)
    raise AssertionError(structure)


def same_diagonal(diagonal: Tensor) -> Tensor:
    """The softmax's curvature `diag(w) - w w' / sum(w)` with this diagonal, by repetition until w does not change."""
    w = diagonal.clone()
    for _ in range(10_000):
        before = w
        w = (w + diagonal / (1 - w / w.sum())) / 2
        if torch.equal(before, w):
            break
    return torch.diag(w) - torch.outer(w, w) / w.sum()


def logit_covariance(covariance: Tensor, phi: Tensor, classes: int) -> Tensor:
    """(I x phi)' Sigma (I x phi), (C, C), of one datum."""
    jacobian = torch.kron(torch.eye(classes, dtype=torch.float64), phi[None, :])
    return jacobian @ covariance @ jacobian.T


def log_evidence(dense_precision: Tensor, weights: Tensor, features: Tensor, labels: Tensor, prior: float) -> Tensor:
    fit = -negative_log_likelihood(weights, features, labels)
    size = weights.numel()
    prior_term = -0.5 * prior * weights.square().sum() + 0.5 * size * torch.tensor(prior).double().log()
    return fit + prior_term - 0.5 * torch.linalg.slogdet(dense_precision)[1]
