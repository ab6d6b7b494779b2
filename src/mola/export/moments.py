"""What a link sees in a graph: the logits of all components one below the other, so that each step is one operation for all.

Posteriors go into the graph as they are: tables of their own for each structure saved at most 0.12 ms of a batch of 1 and 2.3 ms
of a batch of 128, for five heads of 64 or 500 features and ten classes (but 2.4 ms and 8 ms for `full` with the mean-field link).
Random numbers, and what follows from them alone, are constants of the graph. They are made when they are first asked for, so that
a graph holds what its link and its outputs need: run it once before it is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from mola.laplace import SPARE, ClassDistance, FeatureSpread, Posterior, Spread, or_nan
from mola.numerics import even_normals


class GraphDistance(ClassDistance):
    """Distances in a graph, which holds one table of class means however many there are: it has no portions, and makes none anew."""

    @property
    def _means(self) -> Tensor:
        # The whitened class means (C, P).
        return self._all_means()


class GraphPosterior(nn.Module):
    """A posterior in a graph, with the constants that go with it.

    Args:
        posterior: ready to predict, in the precision to compute in.
        bias: whether the constant 1 is among the features.
    """

    posterior: Posterior

    def __init__(self, posterior: Posterior, *, bias: bool) -> None:
        super().__init__()
        self.posterior, self.bias = posterior.as_it_is(), bias
        known = posterior.distance
        self.posterior.distance = None if known is None else GraphDistance(known.geometry, known.device, known.dtype)

    def constant(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """The constant of that name, made when it is first asked for."""
        if name not in self._buffers:
            # Cloned: a file holds the whole memory of each.
            made = make().to(self.posterior.device).clone(memory_format=torch.contiguous_format)
            self.register_buffer(name, made, persistent=False)
        return self.get_buffer(name)

    def average_contrast_variance(self) -> Tensor:
        """Variance (C,) of each centred logit, averaged over all directions of the features."""
        own = self.posterior
        return self.constant("average", lambda: own.exactly().average_contrast_variance().to(own.dtype))

    def deviations(self, features: Tensor, count: int, seed: int, over: str) -> Tensor:
        """Deviations (n, C, S) of the logits: the draws that the library makes with this seed.

        Args:
            features: (n, P).
            count: number of draws.
            seed: of the draws.
            over: "logits", "weights" of the last layer, or "evenly": logits, evenly spread.

        Returns:
            The deviations.
        """
        own, name = self.posterior, f"draws_{count}_{seed}_over_{over}"
        generator = torch.Generator("cpu").manual_seed(seed)

        def weights() -> Tensor:
            drawn = own.spectrum.deviations(own.precision, count, generator)
            return drawn.permute(2, 1, 0).flatten(1).to(own.dtype)

        def driver(noise: Tensor) -> Tensor:
            exact = own.exactly()  # in float64, and rounded once
            made = exact.driver(noise.to(exact.device))
            return made if exact is own else made.to(own.dtype)

        def random() -> Tensor:
            noise = torch.randn(count, own.noise_size, generator=generator, dtype=torch.float64, device="cpu")
            return driver(noise)

        def even() -> Tensor:
            return driver(even_normals(count, own.noise_size, seed).double())

        if over == "weights":
            return (features @ self.constant(name, weights)).view(-1, own.spectrum.outputs, count)
        return own.driven(features, self.constant(name, even if over == "evenly" else random)).transpose(1, 2)


class Joint(Spread):
    """Posteriors of K networks at one batch: the spread of K n rows of logits, network by network.

    A graph has one precision, and no words: what leaves its range becomes NaN, and so does what follows from it.

    Args:
        posteriors: of each network.
        features: of each network (n, P_k), the constant 1 included.
        rows: which of the K n rows; None: all of them.
    """

    has_length = True

    def __init__(
        self, posteriors: Sequence[GraphPosterior], features: Sequence[Tensor], rows: slice | None = None
    ) -> None:
        self.posteriors, self.features, self.rows = posteriors, features, rows
        self.spreads = [one.posterior.at(values) for one, values in zip(posteriors, features, strict=True)]

    def _each(self, work: Callable[[FeatureSpread], Tensor]) -> Tensor:
        found = or_nan(torch.cat([work(one) for one in self.spreads]))
        return found if self.rows is None else found[self.rows]

    @property
    def width(self) -> int:
        """Number of features of the widest network."""
        return max(one.width for one in self.spreads)

    @property
    def noise_size(self) -> int:
        """Number of independent normals that one draw of the logits takes, of the network that takes most."""
        return max(one.noise_size for one in self.spreads)

    def variance(self) -> Tensor:
        """Variance (K n, C) of each logit."""
        return self._each(lambda one: one.variance())

    def contrast_variance(self) -> Tensor:
        """Variance (K n, C) of each centred logit."""
        return self._each(lambda one: one.contrast_variance())

    def contrast_covariance(self) -> Tensor:
        """Covariance (K n, C, C) of the centred logits."""
        return self._each(lambda one: one.contrast_covariance())

    def average_contrast_variance(self) -> Tensor:
        """Variance (K n, C) of each centred logit, averaged over all directions of its network's features."""
        averages = [one.average_contrast_variance() for one in self.posteriors]
        pairs = zip(averages, self.features, strict=True)
        return torch.cat([average.expand(values.shape[0], -1) for average, values in pairs])

    def relative_contrast_variance(self) -> Tensor:
        """Variance (K n, C) of each centred logit up to a factor, which also features of 0 have."""
        parts = []
        for one, spread in zip(self.posteriors, self.spreads, strict=True):
            variance = or_nan(spread.contrast_variance())
            if not one.bias:  # the constant 1 is not 0
                # Near the lower end of the range the ratios are lost.
                lost = variance.amax(1, keepdim=True) < torch.finfo(variance.dtype).tiny * SPARE
                variance = torch.where(lost, math.nan, variance)
                nothing = spread.features.abs().amax(1, keepdim=True) == 0
                variance = torch.where(nothing, one.average_contrast_variance(), variance)
            parts.append(variance)
        return torch.cat(parts)

    def perturb(self, noise: Tensor) -> Tensor:
        """Deviations (K n, S, C) of the logits, up to a common shift."""
        return self._each(lambda one: one.perturb(noise[:, : one.noise_size]))

    def length(self) -> Tensor:
        """Length (K n,) of each feature vector relative to the training features."""
        return self._each(lambda one: one.length())

    def __getitem__(self, rows: slice) -> Joint:
        return Joint(self.posteriors, self.features, rows)

    def deviations(self, count: int, generator: torch.Generator, over: str, like: Tensor) -> Iterator[Tensor]:
        """Deviations (K n, S, C) of the logits, all at once: a graph has no turns.

        Args:
            count: number of draws.
            generator: its seed says which.
            over: "logits", or "weights" of the last layer.
            like: the mean.

        Yields:
            All of them.
        """
        yield torch.cat(self.drawn([count] * len(self.posteriors), generator.initial_seed(), over)).transpose(1, 2)

    def drawn(self, counts: Sequence[int], seed: int, over: str) -> list[Tensor]:
        """Deviations (n, C, S) of each network's logits; see `GraphPosterior.deviations`."""
        each = zip(self.posteriors, self.features, counts, strict=True)
        return [one.deviations(values, count, seed, over) for one, values, count in each]
