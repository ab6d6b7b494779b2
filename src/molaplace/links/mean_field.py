"""The pairwise mean-field link, which uses the covariance of every pair of logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from molaplace.errors import OptionError
from molaplace.likelihoods.base import ClassificationLikelihood
from molaplace.links.base import Link
from molaplace.links.probit import Probit
from molaplace.structures.base import Spread

MOST_CLASSES = 2**13
"""Largest allowed number of classes. With this many classes, each table of class pairs takes half a gigabyte per datum."""


@dataclass(frozen=True)
class MeanField(Link):
    r"""The pairwise mean-field approximation of Lu et al. (2021).

    .. math:: p_i \propto \Big(\sum_j \exp\big(-(m_i - m_j) / \sqrt{1 + \tfrac\pi8 (S_{ii} + S_{jj} - 2 S_{ij})}\big)\Big)^{-1}
    """

    name = "mean-field"
    variance_only = False

    def row_size(self, outputs: int) -> int:
        """Return 16 C^2. Chunks of the resulting size fit in the cache, and predictions are twice as fast."""
        return 16 * outputs**2

    def __call__(
        self, mean: Tensor, spread: Spread | None, likelihood: ClassificationLikelihood, seed: int | None = None
    ) -> Tensor:
        """Return probabilities (n, C)."""
        # A binary logit z is compared only with the constant 0, so this link reduces to `Probit`.
        if spread is None or not likelihood.mutually_exclusive:
            return Probit()(mean, spread, likelihood, seed)
        if mean.shape[-1] > MOST_CLASSES:
            raise OptionError(
                f"link 'mean-field' needs a table of {mean.shape[-1]} x {mean.shape[-1]} class pairs for each input, which would "
                f"not fit into memory. Use 'probit', 'probit-centred' or 'mc'."
            )
        covariance = spread.covariance(centred=True)
        half = 0.5 + math.pi / 8 * covariance.diagonal(dim1=-2, dim2=-1)
        # Compute 1 + pi/8 (S_ii + S_jj - 2 S_ij) in place to save a third of the memory traffic, which dominates the run time.
        scale = (half[..., :, None] + half[..., None, :]).sub_(covariance, alpha=math.pi / 4).clamp_min_(1).rsqrt_()
        margins = (mean[..., None, :] - mean[..., :, None]).mul_(scale)
        # Use logarithms: a margin of -1e4 only means a very small probability, but exp(1e4) would overflow. The margin between a
        # class and itself is 0, so the diagonal of the log-softmax is the negative logarithm of the sum of exponentials.
        return torch.softmax(torch.log_softmax(margins, dim=-1).diagonal(dim1=-2, dim2=-1), dim=-1)
