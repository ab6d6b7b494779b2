"""What a link sees of a posterior: the moments of the logits, each computed when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mola.errors import DataError, located
from mola.float64 import exact
from mola.laplace.base import Posterior, Spectrum
from mola.laplace.kron import DampedFeatures
from mola.randomness import even_normals

__all__ = ["Candidate", "LogitMoments", "in_range", "or_nan"]

DRAWS_AT_ONCE = 2**23
"""Random numbers or logits drawn at once; more are taken in turns."""


@dataclass(frozen=True)
class Candidate:
    """A posterior tried on features that are projected already: variances cost one small product, the rest is made on demand."""

    spectrum: Spectrum
    precision: float
    projected: Tensor

    @cached_property
    def _posterior(self) -> Posterior:
        return self.spectrum.posterior(self.precision)

    @property
    def noise_size(self) -> int:
        """Number of independent normals that one draw of the logits takes."""
        return self._posterior.noise_size

    def variance(self, _features: Tensor) -> Tensor:
        """Variance (n, C) of each logit."""
        return self.spectrum.variance(self.projected, self.precision)

    def contrast_variance(self, _features: Tensor) -> Tensor:
        """Variance (n, C) of each centred logit."""
        return self.spectrum.variance(self.projected, self.precision, contrast=True)

    def average_contrast_variance(self) -> Tensor:
        """Variance (C,) of each centred logit, averaged over all directions of the features."""
        return self._posterior.average_contrast_variance()

    def contrast_covariance(self, features: Tensor) -> Tensor:
        """Covariance (n, C, C) of the centred logits."""
        return self._posterior.contrast_covariance(features)

    def perturb(self, features: Tensor, noise: Tensor) -> Tensor:
        """Deviations (n, S, C) of the logits, up to a common shift."""
        return self._posterior.perturb(features, noise)

    def mahalanobis(self, features: Tensor) -> Tensor:
        """Length (n,) of each feature vector relative to the training features."""
        return self._posterior.mahalanobis(features)


@dataclass(frozen=True)
class LogitMoments:
    """What a link sees of a Gaussian over logits: the mean, and the spread in as much detail as it asks for."""

    mean: Tensor
    """(n, C)"""
    features: Tensor
    """(n, P), the constant 1 included."""
    posterior: Posterior | Candidate | None
    """None: all the mass is on the mean."""
    given: tuple[torch.device, torch.dtype] | None = None
    """The network's device and precision, where the moments are not there."""

    def lifted(self) -> LogitMoments:
        """The same in float64."""
        posterior = self.posterior.exactly() if isinstance(self.posterior, Posterior) else self.posterior
        given = self.given or (self.mean.device, self.mean.dtype)
        return LogitMoments(exact(self.mean), exact(self.features), posterior, given)

    def returned(self, values: Tensor) -> Tensor:
        """What was made of the moments, where the network is and in its precision."""
        return values if self.given is None else values.to(self.given[1]).to(self.given[0])

    def rows(self, start: int, count: int) -> LogitMoments:
        """The moments of some of the data, for links that need the covariance."""
        part = slice(start, start + count)
        posterior = self.posterior._posterior if isinstance(self.posterior, Candidate) else self.posterior
        return LogitMoments(self.mean[part], self.features[part], posterior, self.given)

    def kept(self, mean: Tensor) -> LogitMoments:
        """The same moments for later: in memory of their own, and with a posterior that stays where it is.

        Args:
            mean: a copy of the mean.

        Returns:
            The moments, with all that was computed of them.
        """
        if self.posterior is None:
            return LogitMoments(mean, mean[:, :0], None, self.given)
        posterior = self.posterior.as_it_is() if isinstance(self.posterior, Posterior) else self.posterior
        twin = LogitMoments(mean, self.features.clone(), posterior, self.given)
        vars(twin).update({name: value for name, value in vars(self).items() if name not in vars(twin)})
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of the mean, of the features and of all that was computed of them."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    @cached_property
    def scale(self) -> Tensor:
        """The number (n,) by which Algorithm 1 multiplies a fixed covariance, kept: it is most of the work of every moment."""
        assert isinstance(self.posterior, DampedFeatures)
        return self.posterior.scale(self.features)

    @cached_property
    def variance(self) -> Tensor:
        """Variance (n, C) of each logit."""
        if self.posterior is None:
            return torch.zeros_like(self.mean)
        if isinstance(self.posterior, DampedFeatures):
            return _traced(self.scale[:, None] * self.posterior.class_variance)
        return _traced(self.posterior.variance(self.features))

    @cached_property
    def contrast_variance(self) -> Tensor:
        """Variance (n, C) of each logit less the mean of all."""
        if self.posterior is None:
            return torch.zeros_like(self.mean)
        if isinstance(self.posterior, DampedFeatures):
            return _traced(self.scale[:, None] * self.posterior.contrast_class_variance)
        return _traced(self.posterior.contrast_variance(self.features))

    @cached_property
    def relative_contrast_variance(self) -> Tensor:
        """The same up to a factor common to all logits of a datum, which also features of 0 have: there, all are 0.

        Close to 0 the ratios are those of the direction from which one comes. At 0 itself the variances are averaged over
        all directions: where the covariance is one number times a fixed matrix, this is the limit, from wherever one comes.

        Returns:
            (n, C)
        """
        variance = self.contrast_variance
        nothing = variance.amax(1, keepdim=True) == 0
        if self.posterior is None or not (torch.compiler.is_compiling() or bool(nothing.any())):
            return variance
        return torch.where(nothing, self.posterior.average_contrast_variance().to(variance), variance)

    @cached_property
    def contrast_covariance(self) -> Tensor:
        """Covariance (n, C, C) of the logits less their mean."""
        if self.posterior is None:
            return self.mean.new_zeros(*self.mean.shape, self.mean.shape[1])
        return _traced(self.posterior.contrast_covariance(self.features))

    def difference_variances(self) -> Callable[[slice, slice, slice], Tensor]:
        """Variances of the differences of logits: by data, first and second logits, to (rows, first, second)."""
        faster: Callable[[Tensor], Callable[[slice, slice, slice], Tensor]] | None = getattr(
            self.posterior, "difference_variances", None
        )
        if faster is not None:
            return faster(self.features)
        covariance = self.contrast_covariance
        own = covariance.diagonal(dim1=1, dim2=2)

        def of(rows: slice, first: slice, second: slice) -> Tensor:
            joint = covariance[rows, first, second]
            return or_nan((own[rows, first, None] + own[rows, None, second] - 2 * joint).clamp_min(0))

        return of

    def even_draws(self, count: int, seed: int) -> Callable[[slice], Tensor]:
        """Evenly spread draws of the logits, up to a common shift, the same for all data; only where there is a posterior.

        Args:
            count: number of draws, a power of two.
            seed: of the draws.

        Returns:
            What gives the draws (n, count, C) of some of the data, in memory of their own.
        """
        assert self.posterior is not None
        posterior, mean = self.posterior, self.mean
        noise = even_normals(count, posterior.noise_size, seed).to(mean)
        if isinstance(posterior, DampedFeatures):  # one number for each datum, times draws that are fixed
            lengths = self.scale.sqrt()
            fixed = posterior.class_draws(noise)
            return lambda part: torch.addcmul(mean[part, None], lengths[part, None, None], fixed)
        return lambda part: mean[part, None] + posterior.perturb(self.features[part], noise)

    def draws(self, count: int, generator: torch.Generator, over: str) -> Iterator[Tensor]:
        """Draws of the logits, up to a common shift, in portions (n, s, C) that fit in memory.

        All data share the same random numbers, and how many are made at once does not depend on n: a datum's draws are
        the same in any batch.

        Args:
            count: number of draws in all.
            generator: source of the random numbers, on the CPU.
            over: "logits", or "weights" of the last layer.

        Yields:
            Portions whose sizes s add up to count.
        """
        portion = max(1, DRAWS_AT_ONCE // max(1, self.mean.numel()))
        if self.posterior is None:
            yield self.mean[:, None, :].expand(-1, count, -1)
        elif over == "logits":
            noise = torch.randn(
                count, self.posterior.noise_size, generator=generator, dtype=torch.float64, device="cpu"
            )
            for part in torch.split(noise.to(self.mean), portion):
                yield self.mean[:, None, :] + self.posterior.perturb(self.features, part)
        else:
            spectrum, precision = self.posterior.spectrum, self.posterior.precision
            at_once = max(1, DRAWS_AT_ONCE // (spectrum.outputs * spectrum.features))
            for start in range(0, count, at_once):
                weights = spectrum.deviations(precision, min(at_once, count - start), generator).to(self.mean)
                for some in torch.split(weights, portion):
                    yield self.mean[:, None, :] + torch.einsum("np,scp->nsc", self.features, some)


def or_nan(values: Tensor) -> Tensor:
    """NaN for what left the range of its precision."""
    return torch.where(values < math.inf, values, math.nan)


def _traced(values: Tensor) -> Tensor:
    """A trace has no numbers to look at: what would be `in_range` is NaN there if it is not, and never a wrong answer."""
    return or_nan(values) if torch.compiler.is_compiling() else values


def in_range(moments: Sequence[LogitMoments]) -> list[LogitMoments]:
    """Moments of the components of a mixture, in a precision that holds them.

    Variances go with the squares of the features: those of 1e19 leave the range of float32, those of 1e-23 vanish. Where one
    component has such features, all are computed in float64.

    Args:
        moments: of each component.

    Returns:
        The same, or the same in float64.

    Raises:
        DataError: if float64 does not hold them either.
    """
    if torch.compiler.is_compiling():
        return list(moments)
    outside = False
    for index, one in enumerate(moments):
        if not isinstance(one.posterior, Posterior) or not len(one.features):
            continue
        least, most = one.posterior.reach
        size = one.features.abs().amax(1)
        smallest, largest = (float(end) for end in size.aminmax())
        if one.features.dtype != torch.float64:
            outside |= largest > most or (smallest < least and bool(((size < least) & (size > 0)).any()))
        elif largest > most:
            message = (
                f"features are as large as {largest:.3g}, and their squares leave the range of float64. "
                f"Check the inputs, or scale them."
            )
            with located(f"models[{index}]"):
                raise DataError(message)
    return [one.lifted() for one in moments] if outside else list(moments)
