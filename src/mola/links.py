r"""From a Gaussian over logits to probabilities: :math:`\int \mathrm{softmax}(f)\, N(f; m, S)\, df`, approximately.

The softmax ignores a shift common to all logits. `Probit` (the paper's) does not: it divides each logit by its full variance, the part
in the hidden direction included. Every other link uses only the centred covariance. `MonteCarlo` converges to the integral, and judges
the others (docs/links.md).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mola.errors import OptionError
from mola.laplace.base import LastLayerSpread, Spread
from mola.likelihoods.base import DiscreteLikelihood, Likelihood
from mola.numerics import check_seed, standard_normals
from mola.options import one_of, resolve, whole_number

DRAWS_AT_ONCE = 2**16
"""Draws times classes per datum that are held at once."""

MOST_CLASSES = 2**13
"""Classes that the mean-field link takes: its tables of all pairs have half a gigabyte per datum."""


class Link(ABC):
    """A rule that turns Gaussian logits into probabilities."""

    name: str
    variance_only = True
    """Whether the variance of each logit is all that it uses: then many candidates of a search are evaluated at once."""

    @abstractmethod
    def __call__(
        self, mean: Tensor, spread: Spread | None, likelihood: DiscreteLikelihood, seed: int | None = None
    ) -> Tensor:
        """Probabilities (..., n, C) of logits with this mean (..., n, C) and spread; None is no spread."""

    def row_size(self, outputs: int) -> int:
        """Numbers per datum that are held at once."""
        return outputs

    def settings(self) -> dict[str, Any]:
        """Arguments that rebuild the link, as JSON."""
        return asdict(self)  # type: ignore[call-overload]


def probit_scaled(mean: Tensor, variance: Tensor) -> Tensor:
    """`m / sqrt(1 + pi/8 v)`: the logit of the averaged logistic, by MacKay's approximation."""
    return mean * torch.rsqrt(1 + math.pi / 8 * variance)


def _centred(mean: Tensor) -> Tensor:
    return mean - mean.mean(-1, keepdim=True)


@dataclass(frozen=True)
class Probit(Link):
    r"""The paper's multi-class probit approximation: :math:`\mathrm{softmax}(m_i / \sqrt{1 + \frac\pi8 S_{ii}})`."""

    name = "probit"

    def __call__(
        self, mean: Tensor, spread: Spread | None, likelihood: DiscreteLikelihood, seed: int | None = None
    ) -> Tensor:
        """Probabilities (..., n, C)."""
        return likelihood.probabilities(mean if spread is None else probit_scaled(mean, spread.variance()))


@dataclass(frozen=True)
class CentredProbit(Link):
    """Probit of the centred logits: mean and covariance are projected on the contrasts first."""

    name = "probit-centred"

    def __call__(
        self, mean: Tensor, spread: Spread | None, likelihood: DiscreteLikelihood, seed: int | None = None
    ) -> Tensor:
        """Probabilities (..., n, C)."""
        if spread is None:
            return likelihood.probabilities(mean)
        return likelihood.probabilities(probit_scaled(_centred(mean), spread.variance(centred=True)))


@dataclass(frozen=True)
class MeanField(Link):
    r"""Pairwise mean-field approximation of Lu et al. (2021).

    .. math:: p_i \propto \Big(\sum_j \exp\big(-(m_i - m_j) / \sqrt{1 + \tfrac\pi8 (S_{ii} + S_{jj} - 2 S_{ij})}\big)\Big)^{-1}
    """

    name = "mean-field"
    variance_only = False

    def row_size(self, outputs: int) -> int:
        """Several matrices of all pairs of classes; in chunks that leave the processor's cache they take twice as long."""
        return 16 * outputs**2

    def __call__(
        self, mean: Tensor, spread: Spread | None, likelihood: DiscreteLikelihood, seed: int | None = None
    ) -> Tensor:
        """Probabilities (n, C)."""
        # A yes/no logit z has one rival, the constant 0: what is left is the probit.
        if spread is None or not likelihood.mutually_exclusive:
            return DEFAULT(mean, spread, likelihood, seed)
        if mean.shape[-1] > MOST_CLASSES:
            raise OptionError(
                f"link 'mean-field' needs {mean.shape[-1]} x {mean.shape[-1]} pairs of classes for each input, which memory does not "
                f"hold. Use 'probit', 'probit-centred' or 'mc'."
            )
        covariance = spread.covariance(centred=True)
        own = covariance.diagonal(dim1=-2, dim2=-1)
        variances = (own[..., :, None] + own[..., None, :] - 2 * covariance).clamp_min(0)
        margins = probit_scaled(mean[..., :, None] - mean[..., None, :], variances)
        # In logarithms: a margin of -1e4 would overflow as exp(1e4), and is simply a very small probability.
        return torch.softmax(-torch.logsumexp(-margins, dim=-1), dim=-1)


@dataclass(frozen=True)
class Bridge(Link):
    r"""Laplace bridge: the mean of the Dirichlet whose softmax-basis mode and curvature match.

    .. math:: \alpha_i = \frac{1}{S_{ii}} \Big(1 - \frac2C + \frac{e^{m_i}}{C^2} \sum_j e^{-m_j}\Big), \qquad p = \alpha /
       \textstyle\sum \alpha,

    after projection on the contrasts. It does not become the softmax as the covariance vanishes: the ratios of the variances stay.

    Args:
        normalised: scale mean and variance to a common spread first (laplace-torch's `bridge_norm`). Whatever logits were divided by
            is scaled away with it: neither a temperature nor the distance changes these probabilities.
    """

    normalised: bool = False
    name = "bridge"

    def __call__(
        self, mean: Tensor, spread: Spread | None, likelihood: DiscreteLikelihood, seed: int | None = None
    ) -> Tensor:
        """Probabilities (..., n, C)."""
        if spread is None:
            raise OptionError(
                "link 'bridge' needs a covariance, and a plain ensemble has none. Use link='probit', or mola.fit."
            )
        mean, variance = _centred(mean), spread.variance(centred=True)
        # Features that are all 0, without a bias, have no variance in any logit.
        variance = torch.where(variance.amax(-1, keepdim=True) > 0, variance, 1.0)
        classes = variance.shape[-1]
        if self.normalised:
            common = variance.mean(-1, keepdim=True) / (classes / 2) ** 0.5
            mean, variance = mean * common.rsqrt(), variance / common
        rest = mean.new_full((), 1 - 2 / classes).log()
        shifted = mean + torch.logsumexp(-mean, -1, keepdim=True) - 2 * math.log(classes)
        return torch.softmax(torch.logaddexp(rest, shifted) - variance.log(), dim=-1)


@dataclass(frozen=True)
class MonteCarlo(Link):
    """Average the probabilities over draws of the logits.

    All data share the same standard normals, so a prediction does not depend on its batch, and the same seed gives the same
    probabilities. Each datum by itself is an honest Monte Carlo estimate.

    Args:
        samples: number of draws.
        over: draw logits, or weights of the last layer: the same distribution for every datum.
        seed: of the draws, unless a generator is passed with the call.
    """

    samples: int = 100
    over: Literal["logits", "weights"] = "logits"
    seed: int = 0
    name = "mc"
    variance_only = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", whole_number(self.samples, "samples"))
        one_of(self.over, ("logits", "weights"), "over")
        check_seed(self.seed)

    def row_size(self, outputs: int) -> int:
        """The draws."""
        return outputs * min(self.samples, max(1, DRAWS_AT_ONCE // outputs))

    def __call__(
        self, mean: Tensor, spread: Spread | None, likelihood: DiscreteLikelihood, seed: int | None = None
    ) -> Tensor:
        """Probabilities (n, C)."""
        if spread is None:
            return likelihood.probabilities(mean)
        # By NumPy: a trace takes the draws as constants.
        generator = np.random.default_rng(self.seed if seed is None else seed)
        total, step = torch.zeros_like(mean), max(1, DRAWS_AT_ONCE // mean.shape[-1])
        if self.over == "weights" and isinstance(spread, LastLayerSpread):
            for start in range(0, self.samples, step):
                deviations = spread.by_weights(min(step, self.samples - start), generator)
                total = total + likelihood.probabilities(mean[:, None] + deviations).sum(1)
            return total / self.samples
        noise = standard_normals((self.samples, spread.noise_size), generator).to(mean)
        for part in torch.split(noise, step):
            total = total + likelihood.probabilities(mean[:, None] + spread.perturb(part)).sum(1)
        return total / self.samples


DEFAULT = Probit()

LINKS: dict[str, type[Link]] = {kind.name: kind for kind in (Probit, CentredProbit, MeanField, Bridge, MonteCarlo)}


def as_link(link: str | Link, likelihood: Likelihood | None = None) -> Link:
    """The link of that name with its defaults, or the link itself; `OptionError` if the likelihood does not support it."""
    chosen = resolve(link, Link, LINKS, "link")  # type: ignore[type-abstract]
    # A user's own link is accepted as it is. For a regression, which has no links, the default means nothing.
    if likelihood is None or chosen.name not in LINKS or (chosen == DEFAULT and not likelihood.links):
        return chosen
    if chosen.name not in likelihood.links:
        known = ", ".join(likelihood.links) or "none, since its predictive distribution is exact"
        raise OptionError(
            f"link {chosen.name!r} does not apply to likelihood {likelihood.name!r}. Its links: {known}. Leave link= "
            "out for the default."
        )
    return chosen
