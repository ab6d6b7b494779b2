"""What a link sees in a graph: the logits of all components one below the other, so that each step is one operation for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor

from mola.export.folding import Draws, Folded
from mola.laplace import SPARE, LogitMoments, or_nan
from mola.randomness import even_normals

__all__ = ["Joint", "JointMoments"]


@dataclass(frozen=True)
class Joint:
    """K folded posteriors at what they make of one batch; stands where a link expects a posterior."""

    folded: Sequence[Folded]
    features: Sequence[Tensor]
    """Of each network: input (n, P_k) of its head."""

    @cached_property
    def projected(self) -> list[Tensor]:
        """What each posterior needs of its features."""
        return [one.project(values) for one, values in zip(self.folded, self.features, strict=True)]

    def _each(self, work: Callable[[Folded, Tensor], Tensor]) -> Tensor:
        return torch.cat([work(one, values) for one, values in zip(self.folded, self.projected, strict=True)])

    # A graph has one precision, and no words: what leaves its range becomes NaN, and so does what follows from it.

    def variance(self, _: Tensor) -> Tensor:
        """Variance (K n, C) of each logit."""
        return or_nan(self._each(lambda one, values: one.variance(values)))

    def contrast_variance(self, _: Tensor) -> Tensor:
        """Variance (K n, C) of each centred logit."""
        return or_nan(self._each(lambda one, values: one.contrast_variance(values)))

    def contrast_covariance(self, _: Tensor) -> Tensor:
        """Covariance (K n, C, C) of the centred logits."""
        return or_nan(self._each(lambda one, values: one.contrast_covariance(values)))

    def length(self) -> Tensor:
        """Length (K n,) of each feature vector relative to the training features."""
        return or_nan(self._each(lambda one, values: one.length(values)))

    def relative_contrast_variance(self) -> Tensor:
        """Variance (K n, C) of each centred logit up to a factor, which also features of 0 have."""
        parts = []
        for one, features, projected in zip(self.folded, self.features, self.projected, strict=True):
            variance = or_nan(one.contrast_variance(projected))
            if not one.bias:  # the constant 1 is not 0
                average = one.constant("average_contrast_variance", partial(_average, one.posterior))
                # Near the lower end of the range the ratios are lost.
                lost = variance.amax(1, keepdim=True) < torch.finfo(variance.dtype).tiny * SPARE
                variance = torch.where(lost, math.nan, variance)
                variance = torch.where(features.abs().amax(1, keepdim=True) == 0, average, variance)
            parts.append(variance)
        return torch.cat(parts)

    def alone(self) -> list[Joint]:
        """Each posterior by itself."""
        return [Joint([one], [values]) for one, values in zip(self.folded, self.features, strict=True)]

    def deviations(self, count: int, seed: int, over: str) -> Tensor:
        """Deviations (K n, C, S) of the logits: the draws that the library makes with this seed, as constants.

        Args:
            count: number of draws.
            seed: of the draws.
            over: "logits", "weights" of the last layer, or "evenly": logits, evenly spread.

        Returns:
            The deviations.
        """

        def weights(posterior: Any) -> Tensor:
            return posterior.spectrum.deviations(posterior.precision, count, torch.Generator("cpu").manual_seed(seed))

        def noise(posterior: Any) -> Tensor:
            generator = torch.Generator("cpu").manual_seed(seed)
            return torch.randn(count, posterior.noise_size, generator=generator, dtype=torch.float64, device="cpu")

        def even(posterior: Any) -> Tensor:
            return even_normals(count, posterior.noise_size, seed)

        make = {"weights": weights, "logits": noise, "evenly": even}[over]
        parts = []
        for one, features, projected in zip(self.folded, self.features, self.projected, strict=True):
            draws = Draws(f"draws_{count}_{seed}_over_{over}", count, partial(make, one.posterior))
            by_weights = over == "weights"
            parts.append(one.weight_deviations(features, draws) if by_weights else one.deviations(projected, draws))
        return torch.cat(parts)


def _average(posterior: Any, _: dict[str, Tensor]) -> Tensor:
    """A constant of a graph."""
    found: Tensor = posterior.exactly().average_contrast_variance()
    return found


@dataclass(frozen=True)
class _Rows:
    """Some rows of a joint posterior's covariance, for links that take turns."""

    joint: Joint
    rows: slice

    def contrast_covariance(self, features: Tensor) -> Tensor:
        """Covariance (n, C, C) of the centred logits of these rows."""
        return self.joint.contrast_covariance(features)[self.rows]


class JointMoments(LogitMoments):
    """Moments of K n Gaussians over logits."""

    @cached_property
    def relative_contrast_variance(self) -> Tensor:
        """As for one posterior, written without a choice."""
        joint = cast("Joint", self.posterior)
        return joint.relative_contrast_variance()

    def rows(self, start: int, count: int) -> LogitMoments:
        """The moments of some of the rows, for links that need the covariance."""
        part = slice(start, start + count)
        posterior: Any = None if self.posterior is None else _Rows(self.posterior, part)  # type: ignore[arg-type]
        return LogitMoments(self.mean[part], self.mean[part], posterior)

    def draws(self, count: int, generator: torch.Generator, over: str) -> Iterator[Tensor]:
        """Draws (K n, S, C) of the logits, all at once: a graph has no turns.

        Args:
            count: number of draws.
            generator: its seed says which.
            over: "logits", or "weights" of the last layer.

        Yields:
            All of them.
        """
        joint: Any = self.posterior
        yield self.mean[:, None, :] + joint.deviations(count, generator.initial_seed(), over).transpose(1, 2)
