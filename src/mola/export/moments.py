"""What a link sees in a graph: the logits of all components one below the other, so that each step is one operation for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from mola.export.folding import Draws, Folded
from mola.laplace import LogitMoments
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

    def variance(self, _: Tensor) -> Tensor:
        """Variance (K n, C) of each logit."""
        return self._each(lambda one, values: one.variance(values))

    def contrast_variance(self, _: Tensor) -> Tensor:
        """Variance (K n, C) of each centred logit."""
        return self._each(lambda one, values: one.contrast_variance(values))

    def contrast_covariance(self, _: Tensor) -> Tensor:
        """Covariance (K n, C, C) of the centred logits."""
        return self._each(lambda one, values: one.contrast_covariance(values))

    def length(self) -> Tensor:
        """Length (K n,) of each feature vector relative to the training features."""
        return self._each(lambda one, values: one.length(values))

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
