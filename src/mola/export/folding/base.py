r"""A posterior at one prior precision as constants of a graph: lambda folded in, and as few products as there can be.

The head's input is taken as the network gives it: the constant 1 of the bias trick is folded into the constants too.
Everything that follows from the features through one product is computed once (`project`), and a constant is made when
it is first asked for, so that a graph holds what its link and its outputs need, and nothing else: run it once before it
is traced. Constants are made in float64 and kept in the precision of the posterior.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mola.laplace import Posterior

__all__ = ["Draws", "Folded", "FoldedAsItIs"]


@dataclass(frozen=True)
class Draws:
    """Random numbers that are constants of a graph, made when they are first asked for."""

    name: str
    count: int
    make: Callable[[], Tensor]


class Folded(nn.Module, ABC):
    """What `Posterior` is to features with the constant 1, this is to what `project` makes of a head's input.

    Args:
        posterior: ready to predict, in the precision to compute in.
        bias: whether the constant 1 joins the features.
    """

    def __init__(self, posterior: Any, *, bias: bool) -> None:
        """Bind a posterior."""
        super().__init__()
        # In a list, so that it is no module of the graph: only the constants are.
        self._source = [posterior]
        self._own: dict[str, Tensor] = {}
        self.bias = bias
        self.dtype: torch.dtype = posterior.dtype

    @property
    def posterior(self) -> Any:
        """What is folded."""
        return self._source[0]

    @property
    def width(self) -> int:
        """Number of features P, the constant 1 included."""
        return int(self.posterior.spectrum.features)

    def constant(
        self, name: str, make: Callable[[dict[str, Tensor]], Tensor], dtype: torch.dtype | None = None
    ) -> Tensor:
        """The constant of that name, made from the posterior's own (in float64) when it is first asked for."""
        if name not in self._buffers:
            device = next(self.posterior.buffers()).device
            self._own = self._own or self.posterior.constants()
            # Cloned, where nothing else makes it a tensor of its own: a file holds the whole memory of each.
            self.register_buffer(
                name, make(self._own).clone(memory_format=torch.contiguous_format).to(device, dtype or self.dtype)
            )
        return self.get_buffer(name)

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """What all the rest needs of a head's input (n, P) without the constant 1."""

    @abstractmethod
    def variance(self, projected: Tensor) -> Tensor:
        """Variance (n, C) of each logit."""

    @abstractmethod
    def contrast_variance(self, projected: Tensor) -> Tensor:
        """Variance (n, C) of each centred logit."""

    @abstractmethod
    def contrast_covariance(self, projected: Tensor) -> Tensor:
        """Covariance (n, C, C) of the centred logits."""

    @abstractmethod
    def deviations(self, projected: Tensor, draws: Draws) -> Tensor:
        """Deviations (n, C, S) of the logits, driven by standard normals (S, noise_size)."""

    @abstractmethod
    def length(self, projected: Tensor) -> Tensor:
        """Length (n,) of each feature vector relative to the training features."""

    def weight_deviations(self, features: Tensor, draws: Draws) -> Tensor:
        """Deviations (n, C, S) of the logits under drawn deviations (S, C, P) of the weights."""
        table = self.affine(features, draws.name, lambda _: draws.make().transpose(0, 1).flatten(0, 1).T)
        return table.view(-1, self.posterior.spectrum.outputs, draws.count)

    def affine(self, features: Tensor, name: str, make: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        """Features times a table (P, m), whose last row is added where there is a bias: the constant is never made."""
        if not self.bias:
            return features @ self.constant(name, make)
        table = self.constant(name, lambda own: make(own)[:-1])
        return torch.addmm(self.constant(f"{name}_of_bias", lambda own: make(own)[-1]), features, table)


class FoldedAsItIs(Folded):
    """A structure of somebody's own: its posterior goes into the graph as it is."""

    def __init__(self, posterior: Posterior, *, bias: bool) -> None:
        """Bind a posterior, whose buffers become constants of the graph."""
        super().__init__(posterior, bias=bias)
        self.add_module("own", posterior)

    def project(self, features: Tensor) -> Tensor:
        """Features (n, P) with the constant 1."""
        return torch.cat([features, features.new_ones(features.shape[0], 1)], dim=1) if self.bias else features

    def variance(self, projected: Tensor) -> Tensor:
        """The posterior's own."""
        return self.posterior.variance(projected)

    def contrast_variance(self, projected: Tensor) -> Tensor:
        """The posterior's own."""
        return self.posterior.contrast_variance(projected)

    def contrast_covariance(self, projected: Tensor) -> Tensor:
        """The posterior's own."""
        return self.posterior.contrast_covariance(projected)

    def deviations(self, projected: Tensor, draws: Draws) -> Tensor:
        """The posterior's own."""
        return self.posterior.perturb(projected, self.constant(draws.name, lambda _: draws.make())).transpose(1, 2)

    def length(self, projected: Tensor) -> Tensor:
        """The posterior's own."""
        return self.posterior.mahalanobis(projected)
