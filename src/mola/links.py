r"""From a Gaussian over logits to probabilities: :math:`\int \mathrm{softmax}(f)\, N(f; m, C)\, df`, approximately.

The softmax ignores a shift common to all logits. `Probit` (the paper's) does not: it cools each logit by its full
variance, the part in the invisible direction included. Every other link here sees only what the softmax sees, the
contrast covariance. `MonteCarlo` converges to the integral and judges the rest (docs/links.md).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from mola.errors import OptionError
from mola.laplace import LogitMoments, or_nan
from mola.likelihood import Likelihood
from mola.options import one_of, resolve, whole_number

PAIRS_AT_ONCE = 2**23
"""Pairs of classes, over all data, whose covariances are held at once by the mean-field link; more are taken in turns."""

MOST_PAIRS = 2**28
"""Of the pairs of classes of one datum: a gigabyte in float32, several times over."""

PAIRS_IN_CACHE = 2**16
"""Of these, so many go through the elementwise steps together: what leaves the processor's cache takes several times as long."""

CLASSES_AT_ONCE = 64
"""Classes on either side of these: a pair in different groups serves both its classes with one root and one exponential."""


class Link(ABC):
    """A rule that turns the moments of logits into probabilities."""

    name: str
    needs_covariance = False
    """Whether it asks for more than the variance of each logit."""
    cooled_by: Literal["variance", "contrast_variance"] | None = None
    """The variance by which it divides each logit before a softmax, where that is all it does (`cooled_table`)."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        # Where a class has its own rule, a short cut to that of a class above is not its own.
        super().__init_subclass__(**keywords)
        if "__call__" in vars(cls) and "cooled_by" not in vars(cls):
            cls.cooled_by = None
        if cls.cooled_by not in (None, "variance", "contrast_variance"):
            raise OptionError(f"cooled_by must be 'variance', 'contrast_variance' or None, got {cls.cooled_by!r}.")

    @abstractmethod
    def __call__(self, moments: LogitMoments, seed: int | None = None) -> Tensor:
        """Probabilities (n, C)."""

    def settings(self) -> dict[str, Any]:
        """What it takes to rebuild the link, as JSON."""
        return asdict(self)  # type: ignore[call-overload]


def _cool(mean: Tensor, variance: Tensor) -> Tensor:
    # `m / sqrt(1 + pi/8 v)`: the logit of the averaged logistic, by MacKay's approximation.
    return mean * torch.rsqrt(1 + math.pi / 8 * variance)


def _centre(mean: Tensor, dim: int = -1) -> Tensor:
    return mean - mean.mean(dim=dim, keepdim=True)


def cooled_table(
    link: Link, likelihood: Likelihood, mean: Tensor, variance: Tensor, squares: Tensor | None = None
) -> Tensor:
    """Probabilities of all answers, for many variances of the same data at once, by a link that cools. Data last: faster.

    Args:
        link: one with `cooled_by`.
        likelihood: what the logits mean.
        mean: logits (C, n).
        variance: as the link asks for it (L, C, n), whose memory is used for the result; or (C, n), one for all.
        squares: of what the logits are divided by (L, 1, n), or one for all; None leaves them as they are.

    Returns:
        (L, A, m): of A answers to m questions, which for a softmax are C classes of n data.
    """
    if link.cooled_by == "contrast_variance":
        mean = _centre(mean, dim=0)
    # m / s over sqrt(1 + pi/8 v / s^2)
    start = variance.new_ones(()) if squares is None else squares
    out = variance if variance.dim() == 3 else None
    logits = torch.add(start, variance, alpha=math.pi / 8, out=out).rsqrt_().mul_(mean)
    return likelihood.table_of_logits(logits)


def divided_and_cooled(link: Link, moments: LogitMoments, divisor: Tensor) -> Tensor:
    """Probabilities (n, C) of logits that are divided before a link cools them: `m / sqrt(s^2 + pi/8 v)`, in one step.

    The same as `link(moments.divided(divisor))` but for rounding.

    Args:
        link: one with `cooled_by`.
        moments: of the logits as they are, with a spread.
        divisor: (n,), above 0.

    Returns:
        Probabilities.
    """
    contrast = link.cooled_by == "contrast_variance"
    mean, variance = (
        (_centre(moments.mean), moments.contrast_variance) if contrast else (moments.mean, moments.variance)
    )
    logits = torch.add(divisor.square()[:, None], variance, alpha=math.pi / 8).rsqrt_().mul_(mean)
    return moments.likelihood.probabilities(logits)


@dataclass(frozen=True)
class Probit(Link):
    r"""The paper's multi-class probit approximation: :math:`\mathrm{softmax}(m_i / \sqrt{1 + \frac\pi8 C_{ii}})`."""

    name = "probit"
    cooled_by = "variance"

    def __call__(self, moments: LogitMoments, seed: int | None = None) -> Tensor:
        """Probabilities (n, C)."""
        if moments.spread is None:
            return moments.likelihood.probabilities(moments.mean)
        return moments.likelihood.probabilities(_cool(moments.mean, moments.variance))


@dataclass(frozen=True)
class CentredProbit(Link):
    """Probit of the centred logits: mean and covariance are projected on the contrasts first."""

    name = "probit-centered"
    cooled_by = "contrast_variance"

    def __call__(self, moments: LogitMoments, seed: int | None = None) -> Tensor:
        """Probabilities (n, C)."""
        return moments.likelihood.probabilities(_cool(_centre(moments.mean), moments.contrast_variance))


@dataclass(frozen=True)
class MeanField(Link):
    r"""Pairwise mean-field approximation of Lu et al. (2021).

    .. math:: p_i \propto \Big(\sum_j \exp\big(-(m_i - m_j) / \sqrt{1 + \tfrac\pi8 (C_{ii} + C_{jj} - 2 C_{ij})}\big)\Big)^{-1}
    """

    name = "mean-field"
    needs_covariance = True

    def __call__(self, moments: LogitMoments, seed: int | None = None) -> Tensor:
        """Probabilities (n, C)."""
        if (
            not moments.likelihood.competing
        ):  # each logit z has one rival, 0, which is certain: what is left is the probit
            return DEFAULT(moments, seed)
        count, classes = moments.mean.shape
        if classes**2 > MOST_PAIRS:
            raise OptionError(
                f"link 'mean-field' takes {classes} x {classes} pairs of classes for each input, more than memory is for. "
                f"Use 'probit', 'probit-centered' or 'mc'."
            )
        if torch.compiler.is_compiling():
            everything = slice(None)
            return self._by_logarithms(moments.mean, moments.difference_variances()(everything, everything, everything))
        portion = max(1, PAIRS_AT_ONCE // classes**2)
        parts = (moments.rows(start, portion) for start in range(0, count, portion))
        if count == 0:
            return torch.zeros_like(moments.mean)
        return torch.cat([self._probabilities(some.mean, some.difference_variances()) for some in parts])

    def _probabilities(self, mean: Tensor, variances: Callable[[slice, slice, slice], Tensor]) -> Tensor:
        classes = mean.shape[1]
        # No exponential of a cooled margin is beyond that of the largest margin: most are far from where it overflows.
        plain = float((mean.amax(1) - mean.amin(1)).max()) < math.log(torch.finfo(mean.dtype).max) - math.log(
            2 * classes
        )
        width = -(-classes // -(-classes // CLASSES_AT_ONCE)) if plain else classes
        at_once = max(1, PAIRS_IN_CACHE // width**2)
        probs = []
        for start in range(0, len(mean), at_once):
            rows = slice(start, start + at_once)
            if plain:
                probs.append(_by_groups(mean[rows], partial(variances, rows), width))
            else:
                probs.append(self._by_logarithms(mean[rows], variances(rows, slice(None), slice(None))))
        return torch.cat(probs)

    @staticmethod
    def _by_logarithms(mean: Tensor, of_difference: Tensor) -> Tensor:
        margins = _cool(mean[:, :, None] - mean[:, None, :], or_nan(of_difference))
        # In logarithms: a margin of -1e4 would overflow as exp(1e4), and is simply a very small probability.
        return torch.softmax(-torch.logsumexp(-margins, dim=2), dim=1)


def _by_groups(mean: Tensor, variances: Callable[[slice, slice], Tensor], width: int) -> Tensor:
    # Mean-field probabilities (n, C): `exp(-margin_ij)` is 1 over `exp(-margin_ji)`, and is made once for both.
    sums = torch.zeros_like(mean)
    groups = [slice(start, start + width) for start in range(0, mean.shape[1], width)]
    for index, first in enumerate(groups):
        for second in groups[index:]:
            cooling = torch.mul(variances(first, second), math.pi / 8).add_(1).rsqrt_()
            raised = (mean[:, None, second] - mean[:, first, None]).mul_(cooling).exp_()
            sums[:, first] += raised.sum(2)
            if second is not first:
                sums[:, second] += raised.reciprocal_().sum(1)
    probs = sums.reciprocal_()
    return probs.div_(probs.sum(1, keepdim=True))


@dataclass(frozen=True)
class Bridge(Link):
    r"""Laplace bridge: the Dirichlet whose softmax-basis mode and curvature match, and its mean.

    .. math:: \alpha_i = \frac{1}{C_{ii}} \Big(1 - \frac2C + \frac{e^{m_i}}{C^2} \sum_j e^{-m_j}\Big), \qquad p = \alpha /
       \textstyle\sum \alpha,

    after projection on the contrasts. It does not become the softmax as the covariance vanishes: the ratios of the variances
    matter, and they stay. Where features are all 0, and with them every variance, the ratios are those of the variances
    averaged over all directions of the features, which for the structures `kron` and `kron-diag` is the limit.

    Args:
        normalised: scale mean and variance to a common spread first (laplace-torch's `bridge_norm`). What logits were divided by
            is scaled away with it: neither a temperature nor cooling by distance changes these probabilities.
    """

    normalised: bool = False
    name = "bridge"

    def __call__(self, moments: LogitMoments, seed: int | None = None) -> Tensor:
        """Probabilities (n, C)."""
        if moments.spread is None:
            raise OptionError(
                "link 'bridge' needs a covariance; a plain ensemble has none. Use link='probit', or mola.fit."
            )
        mean, variance = _centre(moments.mean), moments.relative_contrast_variance
        classes = mean.shape[1]
        if self.normalised:
            mean = mean * moments.spread.relative_divisor()  # mean and variances of the same logits
            spread = variance.mean(1, keepdim=True) / (classes / 2) ** 0.5
            mean, variance = mean * spread.rsqrt(), variance / spread
        rest = mean.new_full((), 1 - 2 / classes).log()
        log_alpha = torch.logaddexp(rest, mean + torch.logsumexp(-mean, 1, keepdim=True) - 2 * math.log(classes))
        return torch.softmax(log_alpha - variance.log(), dim=1)


@dataclass(frozen=True)
class MonteCarlo(Link):
    """Average the softmax over draws.

    All data share the same standard normals, so a prediction does not depend on what else is in its batch, and the same
    seed gives the same bits. Each datum by itself is an honest Monte Carlo estimate.

    Args:
        samples: number of draws.
        over: draw logits, or weights of the last layer: the same law for every datum.
        seed: seed of the draws, unless another is passed with the call.
    """

    samples: int = 100
    over: Literal["logits", "weights"] = "logits"
    seed: int = 0
    name = "mc"
    needs_covariance = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", whole_number(self.samples, "samples"))  # plain, for files
        one_of(self.over, ("logits", "weights"), "over")

    def __call__(self, moments: LogitMoments, seed: int | None = None) -> Tensor:
        """Probabilities (n, C)."""
        generator = torch.Generator("cpu").manual_seed(self.seed if seed is None else seed)
        total = torch.zeros_like(moments.mean, dtype=torch.float64)
        samples = self.samples if moments.spread is not None else 1
        for drawn in moments.draws(samples, generator, self.over):
            total += moments.likelihood.probabilities(drawn).sum(dim=1, dtype=torch.float64)
        return (total / samples).to(moments.mean.dtype)


DEFAULT = Probit()

LINKS: dict[str, type[Link]] = {kind.name: kind for kind in (Probit, CentredProbit, MeanField, Bridge, MonteCarlo)}


def as_link(link: str | Link, likelihood: Likelihood | None = None) -> Link:
    """The link of that name, or the link itself.

    Args:
        link: a name, or a link.
        likelihood: what the logits mean, where that is known.

    Returns:
        The link.
    """
    chosen = resolve(link, Link, LINKS, "link")  # type: ignore[type-abstract]
    # A link of the user's own is taken at its word, and the default is no wish where there is nothing to choose.
    if likelihood is None or chosen.name not in LINKS or (chosen == DEFAULT and not likelihood.links):
        return chosen
    if chosen.name not in likelihood.links:
        known = ", ".join(likelihood.links) or "none: its predictive distribution is known exactly"
        raise OptionError(
            f"link {chosen.name!r} is not one of likelihood {likelihood.name!r}, whose links are {known}. Leave link= out for the "
            f"default."
        )
    return chosen
