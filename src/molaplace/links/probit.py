"""The probit links, which divide each logit by a function of its variance and then take the softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from molaplace.likelihoods.base import ClassificationLikelihood
from molaplace.links.base import Link, centred, probit_scaled
from molaplace.structures.base import Spread


@dataclass(frozen=True)
class Probit(Link):
    r"""The paper's multi-class probit approximation: :math:`\mathrm{softmax}(m_i / \sqrt{1 + \frac\pi8 S_{ii}})`."""

    name = "probit"
    variance_only = True

    def __call__(
        self, mean: Tensor, spread: Spread | None, likelihood: ClassificationLikelihood, seed: int | None = None
    ) -> Tensor:
        """Return probabilities (..., n, C)."""
        return likelihood.probabilities(mean if spread is None else probit_scaled(mean, spread.variance()))


@dataclass(frozen=True)
class CentredProbit(Link):
    """The probit approximation applied to the centred logits."""

    name = "probit-centred"
    variance_only = True
    classes_only = True

    def __call__(
        self, mean: Tensor, spread: Spread | None, likelihood: ClassificationLikelihood, seed: int | None = None
    ) -> Tensor:
        """Return probabilities (..., n, C)."""
        if spread is None:
            return likelihood.probabilities(mean)
        return likelihood.probabilities(probit_scaled(centred(mean), spread.variance(centred=True)))
