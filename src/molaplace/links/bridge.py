"""The Laplace bridge, a link that maps Gaussian logits to a Dirichlet distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from molaplace.errors import OptionError
from molaplace.likelihoods.base import ClassificationLikelihood
from molaplace.links.base import Link, centred
from molaplace.structures.base import Spread


@dataclass(frozen=True)
class Bridge(Link):
    r"""The Laplace bridge: the mean of the Dirichlet distribution whose mode and curvature in the softmax basis match the Gaussian's.

    .. math:: \alpha_i = \frac{1}{S_{ii}} \Big(1 - \frac2C + \frac{e^{m_i}}{C^2} \sum_j e^{-m_j}\Big), \qquad p = \alpha /
       \textstyle\sum \alpha,

    after centring the logits. Even as the covariance vanishes, the link does not converge to the softmax, because it still depends
    on the ratios of the variances.

    Args:
        normalised: whether to first scale the logits so that their mean variance is sqrt(C / 2), as laplace-torch's `bridge_norm`
            does. The scaling undoes any division of the logits, so neither the temperature nor the distance affects the probabilities.
    """

    normalised: bool = False
    name = "bridge"
    variance_only = True
    classes_only = True
    needs_covariance = True

    def __call__(
        self, mean: Tensor, spread: Spread | None, likelihood: ClassificationLikelihood, seed: int | None = None
    ) -> Tensor:
        """Return probabilities (..., n, C)."""
        if spread is None:
            raise OptionError(
                "link 'bridge' needs a covariance, but a plain ensemble has none. Use link='probit', or mola.fit."
            )
        mean, variance = centred(mean), spread.variance(centred=True)
        # If there is no bias and all features are 0, no logit has any variance.
        variance = torch.where(variance.amax(-1, keepdim=True) > 0, variance, 1.0)
        classes = variance.shape[-1]
        if self.normalised:
            common = variance.mean(-1, keepdim=True) / (classes / 2) ** 0.5
            mean, variance = mean * common.rsqrt(), variance / common
        rest = mean.new_full((), 1 - 2 / classes).log()
        shifted = mean + torch.logsumexp(-mean, -1, keepdim=True) - 2 * math.log(classes)
        return torch.softmax(torch.logaddexp(rest, shifted) - variance.log(), dim=-1)
