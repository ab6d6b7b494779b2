"""What links, outlier scores and exports see of Gaussian logits: their mean, and how they spread around it.

`Spread` is the contract: posteriors of last layers at features, whole networks at inputs and the constants of an exported graph
each have one. `LogitMoments` is a mean with a spread, or without, and keeps what was computed of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from mola.errors import located
from mola.likelihood import CATEGORICAL, Likelihood
from mola.numerics import even_normals, exact

DRAWS_AT_ONCE = 2**23
"""Random numbers or logits drawn at once; more are taken in turns."""


class Spread(Protocol):
    """How the logits of n data spread around their mean. Variances and draws are all that an implementation has to give."""

    has_length: bool = False
    """Whether `length` is known."""

    @property
    def has_distance(self) -> bool:
        """Whether `log_distance` and `log_length` are known."""
        return False

    @property
    def width(self) -> int:
        """Numbers of each datum that moments are computed from: what they cost, beside draws."""

    @property
    def noise_size(self) -> int:
        """Number of independent normals that one draw of the logits takes."""

    def variance(self) -> Tensor:
        """Variance (n, C) of each logit."""

    def contrast_variance(self) -> Tensor:
        """Variance (n, C) of each logit less the mean of all."""

    def contrast_covariance(self) -> Tensor:
        """Covariance (n, C, C) of the logits less their mean."""

    def average_contrast_variance(self) -> Tensor:
        """Variance (C,) of each centred logit, averaged over all data there could be; up to a factor."""

    def perturb(self, noise: Tensor) -> Tensor:
        """Deviations (n, S, C) of the logits, up to a common shift, driven by standard normals (S, noise_size)."""

    def __getitem__(self, rows: slice) -> Spread: ...

    def relative_contrast_variance(self) -> Tensor:
        """Variance (n, C) of each centred logit, up to a factor common to those of a datum; where all are 0, the average one."""
        variance = _traced(self.contrast_variance())
        nothing = variance.amax(1, keepdim=True) == 0
        if not (torch.compiler.is_compiling() or bool(nothing.any())):
            return variance
        return torch.where(nothing, self.average_contrast_variance().to(variance), variance)

    def relative_divisor(self) -> Tensor | float:
        """What logits are divided by (n, 1), compared with those whose variances `relative_contrast_variance` gives."""
        return 1.0

    def difference_variances(self) -> Callable[[slice, slice, slice], Tensor]:
        """Variances of the differences of logits: by data, first and second logits, to (rows, first, second)."""
        covariance = _traced(self.contrast_covariance())
        own = covariance.diagonal(dim1=1, dim2=2)

        def of(rows: slice, first: slice, second: slice) -> Tensor:
            joint = covariance[rows, first, second]
            return or_nan((own[rows, first, None] + own[rows, None, second] - 2 * joint).clamp_min(0))

        return of

    def around(self, mean: Tensor, noise: Tensor) -> Callable[[slice], Tensor]:
        """What gives draws (rows, S, C) of some of the data around their mean (n, C), in memory of their own."""
        return lambda rows: mean[rows, None] + self[rows].perturb(noise)

    def deviations(self, count: int, generator: torch.Generator, over: str, like: Tensor) -> Iterator[Tensor]:
        """Deviations of the logits, up to a common shift, in portions (n, s, C) that fit in memory.

        Args:
            count: number of draws in all.
            generator: source of the random numbers, on the CPU.
            over: "logits"; or "weights" of the last layer, where there is one.
            like: the mean (n, C).

        Yields:
            Portions whose sizes s add up to count.
        """
        noise = torch.randn(count, self.noise_size, generator=generator, dtype=torch.float64, device="cpu")
        for part in torch.split(noise.to(like), draws_at_once(like)):
            yield self.perturb(part)

    def length(self) -> Tensor:
        """Length (n,) of each datum's features relative to the training features."""
        raise TypeError(f"{type(self).__name__} does not know how long features are.")

    def log_distance(self) -> Tensor:
        """Logarithm (n,) of each datum's distance from the training classes."""
        raise TypeError(f"{type(self).__name__} does not know how far features are.")

    def log_length(self) -> Tensor:
        """Logarithm (n,) of the length of each datum's features."""
        raise TypeError(f"{type(self).__name__} does not know how long features are.")

    def fits(self) -> bool:
        """Whether its precision holds the moments; `DataError` if float64 does not either."""
        return True

    def exactly(self) -> Spread:
        """The same in float64."""
        return self

    def kept(self) -> Spread:
        """The same for later: in memory of its own, and unmoved when a network is."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, and of all that was computed of them."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


class Divided(Spread):
    """The spread of logits that are divided by a positive number, one for each datum.

    Args:
        spread: of the logits as they are.
        divisor: (n, 1).
    """

    def __init__(self, spread: Spread, divisor: Tensor) -> None:
        self.spread, self.divisor = spread, divisor

    @property
    def width(self) -> int:
        """Numbers of each datum that moments are computed from."""
        return self.spread.width

    @property
    def noise_size(self) -> int:
        """Number of independent normals that one draw of the logits takes."""
        return self.spread.noise_size

    def variance(self) -> Tensor:
        """Variance (n, C) of each logit."""
        return self.spread.variance() / self.divisor.square()

    def contrast_variance(self) -> Tensor:
        """Variance (n, C) of each logit less the mean of all."""
        return self.spread.contrast_variance() / self.divisor.square()

    def contrast_covariance(self) -> Tensor:
        """Covariance (n, C, C) of the logits less their mean."""
        return self.spread.contrast_covariance() / self.divisor.square()[:, :, None]

    def average_contrast_variance(self) -> Tensor:
        """Variance (C,) of each centred logit, averaged over all data there could be; up to a factor."""
        return self.spread.average_contrast_variance()

    def relative_contrast_variance(self) -> Tensor:
        """Variance (n, C) of each centred logit, up to a factor common to those of a datum."""
        # Undivided: squares of large divisors would take variances out of the range of float32, and their ratios with them.
        return self.spread.relative_contrast_variance()

    def relative_divisor(self) -> Tensor | float:
        """What logits are divided by (n, 1), compared with those whose variances `relative_contrast_variance` gives."""
        return self.divisor * self.spread.relative_divisor()

    def difference_variances(self) -> Callable[[slice, slice, slice], Tensor]:
        """Variances of the differences of logits: by data, first and second logits, to (rows, first, second)."""
        of, squares = self.spread.difference_variances(), self.divisor.square()[:, :, None]
        return lambda rows, first, second: of(rows, first, second) / squares[rows]

    def perturb(self, noise: Tensor) -> Tensor:
        """Deviations (n, S, C) of the logits, up to a common shift, driven by standard normals (S, noise_size)."""
        return self.spread.perturb(noise) / self.divisor[:, :, None]

    def around(self, mean: Tensor, noise: Tensor) -> Callable[[slice], Tensor]:
        """What gives draws (rows, S, C) of some of the data around their mean (n, C), in memory of their own."""
        of = self.spread.around(mean * self.divisor, noise)
        return lambda rows: of(rows).div_(self.divisor[rows, :, None])

    def deviations(self, count: int, generator: torch.Generator, over: str, like: Tensor) -> Iterator[Tensor]:
        """Deviations of the logits, in portions (n, s, C)."""
        for portion in self.spread.deviations(count, generator, over, like):
            yield portion / self.divisor[:, :, None]

    def __getitem__(self, rows: slice) -> Divided:
        return Divided(self.spread[rows], self.divisor[rows])


def draws_at_once(mean: Tensor) -> int:
    """How many draws of logits (n, C) are made together."""
    return max(1, DRAWS_AT_ONCE // max(1, mean.numel()))


@dataclass(frozen=True)
class LogitMoments:
    """A Gaussian over logits as a link sees it: the mean, and the spread in as much detail as it asks for."""

    mean: Tensor
    """(n, C)"""
    spread: Spread | None
    """None: all the mass is on the mean."""
    given: tuple[torch.device, torch.dtype] | None = None
    """The network's device and precision, where the moments are not there."""
    likelihood: Likelihood = CATEGORICAL
    """What the logits mean."""

    def lifted(self) -> LogitMoments:
        """The same in float64."""
        given = self.given or (self.mean.device, self.mean.dtype)
        spread = None if self.spread is None else self.spread.exactly()
        return LogitMoments(exact(self.mean), spread, given, self.likelihood)

    def returned(self, values: Tensor) -> Tensor:
        """What was made of the moments, where the network is and in its precision."""
        return values if self.given is None else values.to(self.given[1]).to(self.given[0])

    def divided(self, divisor: Tensor) -> LogitMoments:
        """The moments of the logits divided by a positive number, one for each datum (n,), or one for all.

        Args:
            divisor: above 1 cools, below 1 sharpens.

        Returns:
            The Gaussian of the quotients: the mean by the divisor, the covariance by its square.
        """
        divisors = divisor.to(self.mean).expand(self.mean.shape[0])[:, None]
        spread = None if self.spread is None else Divided(self.spread, divisors)
        return LogitMoments(self.mean / divisors, spread, self.given, self.likelihood)

    def rows(self, start: int, count: int) -> LogitMoments:
        """The moments of some of the data, for links that need the covariance."""
        part = slice(start, start + count)
        spread = None if self.spread is None else self.spread[part]
        return LogitMoments(self.mean[part], spread, self.given, self.likelihood)

    def kept(self, mean: Tensor) -> LogitMoments:
        """The same moments for later: in memory of their own, with all that was computed of them.

        Args:
            mean: a copy of the mean.

        Returns:
            The moments.
        """
        twin = LogitMoments(mean, None if self.spread is None else self.spread.kept(), self.given, self.likelihood)
        vars(twin).update({name: value for name, value in vars(self).items() if name not in vars(twin)})
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of the mean, of the spread and of all that was computed of them."""
        own = sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))
        return own if self.spread is None else own + self.spread.nbytes

    @cached_property
    def variance(self) -> Tensor:
        """Variance (n, C) of each logit."""
        return torch.zeros_like(self.mean) if self.spread is None else _traced(self.spread.variance())

    @cached_property
    def contrast_variance(self) -> Tensor:
        """Variance (n, C) of each logit less the mean of all."""
        return torch.zeros_like(self.mean) if self.spread is None else _traced(self.spread.contrast_variance())

    @cached_property
    def relative_contrast_variance(self) -> Tensor:
        """The same up to a factor common to all logits of a datum, which also features of 0 have: there, all are 0.

        Close to 0 the ratios are those of the direction from which one comes. At 0 itself the variances are averaged over
        all directions: where the covariance is one number times a fixed matrix, this is the limit, from wherever one comes.

        Returns:
            (n, C)
        """
        return torch.zeros_like(self.mean) if self.spread is None else self.spread.relative_contrast_variance()

    @cached_property
    def contrast_covariance(self) -> Tensor:
        """Covariance (n, C, C) of the logits less their mean."""
        if self.spread is None:
            return self.mean.new_zeros(*self.mean.shape, self.mean.shape[1])
        return _traced(self.spread.contrast_covariance())

    def difference_variances(self) -> Callable[[slice, slice, slice], Tensor]:
        """Variances of the differences of logits: by data, first and second logits, to (rows, first, second)."""
        if self.spread is not None:
            return self.spread.difference_variances()
        nothing = self.contrast_covariance
        return lambda rows, first, second: nothing[rows, first, second]

    def even_draws(self, count: int, seed: int) -> Callable[[slice], Tensor]:
        """Evenly spread draws of the logits, up to a common shift, the same for all data; only where there is a spread.

        Args:
            count: number of draws, a power of two.
            seed: of the draws.

        Returns:
            What gives the draws (n, count, C) of some of the data, in memory of their own.
        """
        assert self.spread is not None
        return self.spread.around(self.mean, even_normals(count, self.spread.noise_size, seed).to(self.mean))

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
        if self.spread is None:
            yield self.mean[:, None, :].expand(-1, count, -1)
            return
        for deviations in self.spread.deviations(count, generator, over, self.mean):
            yield self.mean[:, None, :] + deviations


def or_nan(values: Tensor) -> Tensor:
    """NaN for what left the range of its precision."""
    return torch.where(values < math.inf, values, math.nan)


def _traced(values: Tensor) -> Tensor:
    # A trace has no numbers to look at: what would be `in_range` is NaN there if it is not, and never a wrong answer.
    return or_nan(values) if torch.compiler.is_compiling() else values


def in_range(moments: Sequence[LogitMoments]) -> list[LogitMoments]:
    """Moments of the components of a mixture, in a precision that holds them.

    Variances go with the squares of the features: those of 1e19 leave the range of float32, those of 1e-23 vanish. Where one
    component has such features, all are computed in float64; `DataError` if that does not hold them either.

    Args:
        moments: of each component.

    Returns:
        The same, or the same in float64.
    """
    if torch.compiler.is_compiling():
        return list(moments)
    outside = False
    for index, one in enumerate(moments):
        with located(f"models[{index}]"):
            outside |= one.given is not None or not (one.spread is None or one.spread.fits())
    return [one.lifted() for one in moments] if outside else list(moments)
