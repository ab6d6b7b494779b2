r"""Links, which map Gaussian logits to probabilities by approximating :math:`\int \mathrm{softmax}(f)\, N(f; m, S)\, df`.

The softmax ignores a shift common to all logits, but the paper's `Probit` link does not. `Probit` uses the full variance of each
logit, including the part along the hidden direction. Every other link uses only the centred covariance. `MonteCarlo` converges to
the integral and serves as the reference for the other links (docs/links.md).

A link receives the inverse link function of the likelihood, such as the softmax, and the mean and spread of the logits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import OptionError
from molaplace.likelihoods import InverseLink, Likelihood, OutputSpread
from molaplace.numerics import standard_normals
from molaplace.options import one_of, resolve, whole_number

__all__ = ["Bridge", "CentredProbit", "Link", "MeanField", "MonteCarlo", "Probit"]

MOST_CLASSES = 2**13
"""Largest number of classes for `MeanField`. With this many classes, each table of class pairs takes half a gigabyte per datum."""

DRAWS_AT_ONCE = 2**16
"""Maximum number of values (draws times classes) that `MonteCarlo` holds in memory at once for each datum."""


class Link(ABC):
    """A map from Gaussian logits to probabilities. Every link is a frozen dataclass whose fields are its settings."""

    name: str
    needs_covariance = False
    """True if the link is undefined without a covariance."""

    @abstractmethod
    def __call__(
        self, mean: Tensor, spread: OutputSpread | None, inverse_link: InverseLink, seed: int | None = None
    ) -> Tensor:
        """Return probabilities (n, C).

        Args:
            mean: means (n, C) of the logits.
            spread: covariance of the logits, or None without a covariance.
            inverse_link: function from logits to probabilities, such as the softmax.
            seed: seed for links that draw samples.
        """

    def for_labels(self) -> Link | None:
        """Return the link that applies to binary labels in place of this one, or None if the link needs exclusive classes."""
        return self

    def row_size(self, outputs: int) -> int:
        """Return the number of values that the link holds in memory at once for each datum."""
        return outputs

    def settings(self) -> dict[str, Any]:
        """Return the link's constructor arguments as a JSON-serialisable dictionary."""
        return asdict(self)  # type: ignore[call-overload]


def probit_scaled(mean: Tensor, variance: Tensor) -> Tensor:
    """Return `m / sqrt(1 + pi/8 v)`, MacKay's approximation of the logit of the expected sigmoid."""
    return mean * torch.rsqrt(1 + math.pi / 8 * variance)


def centred(mean: Tensor) -> Tensor:
    """Return the logits minus their mean over the classes."""
    return mean - mean.mean(-1, keepdim=True)


@dataclass(frozen=True)
class Probit(Link):
    r"""The paper's multi-class probit approximation: :math:`\mathrm{softmax}(m_i / \sqrt{1 + \frac\pi8 S_{ii}})`."""

    name = "probit"
    variance_only = True

    def __call__(
        self, mean: Tensor, spread: OutputSpread | None, inverse_link: InverseLink, seed: int | None = None
    ) -> Tensor:
        """Return probabilities (n, C)."""
        return inverse_link(mean if spread is None else probit_scaled(mean, spread.variance()))


@dataclass(frozen=True)
class CentredProbit(Link):
    """The probit approximation applied to the centred logits."""

    name = "probit-centred"
    variance_only = True

    def __call__(
        self, mean: Tensor, spread: OutputSpread | None, inverse_link: InverseLink, seed: int | None = None
    ) -> Tensor:
        """Return probabilities (n, C)."""
        if spread is None:
            return inverse_link(mean)
        return inverse_link(probit_scaled(centred(mean), spread.variance(centred=True)))

    def for_labels(self) -> None:
        """Return None, because only exclusive classes can be centred."""


@dataclass(frozen=True)
class MeanField(Link):
    r"""The pairwise mean-field approximation of Lu et al. (2021).

    .. math:: p_i \propto \Big(\sum_j \exp\big(-(m_i - m_j) / \sqrt{1 + \tfrac\pi8 (S_{ii} + S_{jj} - 2 S_{ij})}\big)\Big)^{-1}
    """

    name = "mean-field"

    def __call__(
        self, mean: Tensor, spread: OutputSpread | None, inverse_link: InverseLink, seed: int | None = None
    ) -> Tensor:
        """Return probabilities (n, C)."""
        if spread is None:
            return inverse_link(mean)
        if mean.shape[-1] > MOST_CLASSES:
            raise OptionError(
                f"'mean-field' needs a table of {mean.shape[-1]} x {mean.shape[-1]} class pairs for each input, which would "
                f"not fit into memory. Use 'probit', 'probit-centred' or 'mc'.",
                argument="link",
            )
        covariance = spread.covariance(centred=True)
        half = 0.5 + math.pi / 8 * covariance.diagonal(dim1=-2, dim2=-1)
        # Compute 1 + pi/8 (S_ii + S_jj - 2 S_ij) in place to save a third of the memory traffic, which dominates the run time.
        scale = (half[..., :, None] + half[..., None, :]).sub_(covariance, alpha=math.pi / 4).clamp_min_(1).rsqrt_()
        margins = (mean[..., None, :] - mean[..., :, None]).mul_(scale)
        # Use logarithms: a margin of -1e4 only means a very small probability, but exp(1e4) would overflow. The margin between a
        # class and itself is 0, so the diagonal of the log-softmax is the negative logarithm of the sum of exponentials.
        return torch.softmax(torch.log_softmax(margins, dim=-1).diagonal(dim1=-2, dim2=-1), dim=-1)

    def for_labels(self) -> Link:
        """Return `Probit`, which equals this link because a binary logit is compared only with the constant 0."""
        return Probit()

    def row_size(self, outputs: int) -> int:
        """Return 16 C^2. Chunks of the resulting size fit in the cache, and predictions are twice as fast."""
        return 16 * outputs**2


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
    needs_covariance = True

    def __call__(
        self, mean: Tensor, spread: OutputSpread | None, inverse_link: InverseLink, seed: int | None = None
    ) -> Tensor:
        """Return probabilities (n, C)."""
        if spread is None:
            raise OptionError(
                "'bridge' needs a covariance, but a plain ensemble has none. Use link='probit', or mola.fit.",
                argument="link",
            )
        mean = centred(mean)
        variance = spread.variance(centred=True)
        # If there is no bias and all features are 0, no logit has any variance.
        variance = torch.where(variance.amax(-1, keepdim=True) > 0, variance, 1.0)
        classes = variance.shape[-1]
        if self.normalised:
            scale = variance.mean(-1, keepdim=True) / (classes / 2) ** 0.5
            mean = mean * scale.rsqrt()
            variance = variance / scale
        constant = mean.new_full((), 1 - 2 / classes).log()
        exponential = mean + torch.logsumexp(-mean, -1, keepdim=True) - 2 * math.log(classes)
        return torch.softmax(torch.logaddexp(constant, exponential) - variance.log(), dim=-1)

    def for_labels(self) -> None:
        """Return None, because the Dirichlet distribution is over exclusive classes."""


MAX_SAMPLES = 1_000_000
"""Largest number of draws, whose noise is held in memory at once. Their standard errors are below 0.0005."""


@dataclass(frozen=True)
class MonteCarlo(Link):
    """The mean of the probabilities over draws of the logits.

    All data share the same standard normal draws, so a prediction does not depend on the rest of its batch. The same seed gives the
    same probabilities. The estimate for each datum is unbiased.

    Args:
        samples: number of draws.
        over: whether to draw the "logits" or the "weights" of the last layer. The logits of each datum have the same distribution in
            both cases.
        seed: seed for the draws, used unless a generator is passed to the call.
    """

    samples: int = 100
    over: Literal["logits", "weights"] = "logits"
    seed: int = 0
    name = "mc"

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", whole_number(self.samples, "samples"))
        if self.samples > MAX_SAMPLES:
            raise OptionError(f"must be at most {MAX_SAMPLES:,}, got {self.samples:,}.", argument="samples")
        one_of(self.over, ("logits", "weights"), "over")
        whole_number(self.seed, "seed", 0)

    def __call__(
        self, mean: Tensor, spread: OutputSpread | None, inverse_link: InverseLink, seed: int | None = None
    ) -> Tensor:
        """Return probabilities (n, C)."""
        if spread is None:
            return inverse_link(mean)
        # Draw with NumPy, so that tracing stores the draws as constants.
        generator = np.random.default_rng(self.seed if seed is None else seed)
        step = max(1, DRAWS_AT_ONCE // mean.shape[-1])
        total = torch.zeros_like(mean)
        if self.over == "weights":
            for start in range(0, self.samples, step):
                deviations = spread.deviations(min(step, self.samples - start), generator)
                total = total + inverse_link(mean[:, None] + deviations).sum(1)
            return total / self.samples
        noise = standard_normals((self.samples, spread.noise_size), generator).to(mean)
        for draws in torch.split(noise, step):
            total = total + inverse_link(mean[:, None] + spread.marginal_deviations(draws)).sum(1)
        return total / self.samples

    def row_size(self, outputs: int) -> int:
        """Return the number of drawn values that are held in memory at once for each datum."""
        return outputs * min(self.samples, max(1, DRAWS_AT_ONCE // outputs))


PROBIT = Probit()
"""The default link."""

LINKS: dict[str, type[Link]] = {kind.name: kind for kind in (Probit, CentredProbit, MeanField, Bridge, MonteCarlo)}


def as_link(link: str | Link, likelihood: Likelihood | None = None) -> Link:
    """Return the link, given as a name or an object, that applies to the likelihood, or raise `OptionError` if there is none."""
    chosen = resolve(link, Link, LINKS, "link")  # type: ignore[type-abstract]
    if likelihood is None or likelihood.mutually_exclusive or chosen == PROBIT:  # regression ignores the default link
        return chosen
    applicable = chosen.for_labels() if likelihood.classification else None
    if applicable is not None:
        return applicable
    names = [name for name, kind in LINKS.items() if likelihood.classification and kind().for_labels() is not None]
    known = ", ".join(names) or "none, because the predictive distribution is exact"
    raise OptionError(
        f"{chosen.name!r} does not apply to likelihood {likelihood.name!r}. The applicable links are: {known}. Leave out link= to "
        f"use the default.",
        argument="link",
    )
