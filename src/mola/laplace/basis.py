"""Bases of output space and eigenbases: what the structures share of linear algebra."""

from __future__ import annotations

import torch
from torch import Tensor

from mola.errors import OptionError
from mola.likelihood import Likelihood

__all__ = ["centred_diagonal", "centred_variance", "eigensystem", "seen_basis"]


def seen_basis(likelihood: Likelihood, outputs: int) -> tuple[Tensor, Tensor]:
    """Orthonormal bases of what the likelihood sees of output space (C, R), and of what it does not (C, C - R).

    Raises:
        OptionError: if it hides more than one direction.
    """
    visible = likelihood.visible(outputs)
    hidden = outputs - visible.shape[1]
    if hidden == 0:
        return visible, visible.new_zeros(outputs, 0)
    if hidden == 1:
        # The complement of the contrasts is the constant vector: written down, not computed.
        return visible, visible.new_full((outputs, 1), outputs**-0.5)
    message = f"a likelihood may hide at most one direction of output space, got {hidden}"
    raise OptionError(message)


def eigensystem(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, clamped at 0, and eigenvectors of a positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp_min(0), vectors


def centred_variance(variance: Tensor) -> Tensor:
    """Variances (..., C) of independent outputs less their mean: `v_c (1 - 2/C) + mean(v) / C`."""
    outputs = variance.shape[-1]
    return variance * (1 - 2 / outputs) + variance.mean(-1, keepdim=True) / outputs


def centred_diagonal(variance: Tensor) -> Tensor:
    """Covariance (..., C, C) of independent outputs less their mean, from their variances (..., C)."""
    outputs, mean = variance.shape[-1], variance.mean(-1)[..., None, None]
    return torch.diag_embed(variance) - (variance[..., :, None] + variance[..., None, :] - mean) / outputs
