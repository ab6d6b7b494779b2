"""One component of a mixture: a network and the Laplace approximation of its last layer, before the prior is added.

Without a Laplace approximation, a component is a member of a plain ensemble.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from molaplace.errors import OptionError
from molaplace.fingerprints import digest, sampled
from molaplace.likelihoods import Likelihood
from molaplace.network import Head, StateChecksums
from molaplace.structures import Structure
from molaplace.structures.base import Curvature, Spread
from molaplace.structures.distance import ClassDistance
from molaplace.sums import Sums


@dataclass(frozen=True)
class LastLayer:
    """The Laplace approximation of a last layer before the prior is added, computed in one pass over the training data."""

    structure: Structure
    sums: Sums
    weights: Tensor
    """Trained weights (C, P) in float64, used as the posterior mean. The bias is the last column."""
    curvature: Curvature
    distance: ClassDistance | None
    """Distances from the training classes, or None if they were not computed during the fit."""
    checksums: StateChecksums
    """Checksums of all weights of the network during the fit."""

    @staticmethod
    def from_sums(
        structure: Structure, sums: Sums, weights: Tensor, likelihood: Likelihood, checksums: StateChecksums
    ) -> LastLayer:
        """Compute the curvature and the class distances from the sums. `weights` (C, P) are those of the uncertain outputs."""
        weighted = sums.weighted()
        curvature = structure.solve(likelihood.sums_at_noise(weighted))
        return LastLayer(structure, sums, weights, curvature, ClassDistance.from_sums(weighted), checksums)

    def with_sums(self, sums: Sums, likelihood: Likelihood) -> LastLayer:
        """Return the approximation computed from other sums, on the CPU."""
        return LastLayer.from_sums(self.structure, sums, self.weights.cpu(), likelihood, self.checksums)

    def curvature_at(self, noise_factor: float) -> Curvature:
        """Return the curvature after the noise of a regression has been multiplied by a factor."""
        return self.curvature if noise_factor == 1 else replace(self.curvature, scale=noise_factor**-2)

    def to(self, device: torch.device) -> LastLayer:
        """Return the same approximation on another device."""
        distance = None if self.distance is None else self.distance.to(device)
        return replace(self, weights=self.weights.to(device), curvature=self.curvature.to(device), distance=distance)


class Component(nn.Module):
    """A network with a Laplace approximation of its last layer.

    Args:
        network: the trained network, which is shared and never modified.
        head: the network's last linear layer, or None in a plain ensemble.
        layer: the Laplace approximation of the last layer, or None in a plain ensemble.
        likelihood: the likelihood of the network's outputs.
    """

    def __init__(
        self,
        network: nn.Module,
        head: Head | None,
        layer: LastLayer | None,
        likelihood: Likelihood,
    ) -> None:
        super().__init__()
        self.network: nn.Module = network
        self.head: Head | None = head
        self.layer: LastLayer | None = layer
        self.likelihood: Likelihood = likelihood

    @property
    def fingerprint(self) -> str:
        """Digest of the last layer, its curvature and the likelihood or, in a plain ensemble, of the network and the likelihood."""
        layer = self.layer
        if layer is None:
            return digest(self.likelihood, sampled([*self.network.parameters(), *self.network.buffers()]))
        tensors = [tensor for _, tensor in sorted(layer.sums.tensors.items())]
        return digest(self.likelihood, layer.structure.name, layer.sums.count, sampled([layer.weights, *tensors]))

    @property
    def width(self) -> int | None:
        """Number of uncertain outputs, or None if there is no Laplace approximation."""
        return None if self.layer is None else len(self.layer.weights)

    def on(self, device: torch.device) -> LastLayer | None:
        """Return the Laplace approximation on the given device, and keep it there for the next call.

        A thread that uses another device may replace what is kept, but not what this call returns.
        """
        layer = self.layer
        if layer is not None and layer.weights.device != device:
            layer = self.layer = layer.to(device)
        return layer

    def project(self, phi: Tensor) -> Tensor | None:
        """Return the features (n, P) in the basis of the curvature, or None if there is no Laplace approximation."""
        layer = self.on(phi.device)
        return None if layer is None else layer.curvature.project(phi)

    def spread(self, z: Tensor | None, precision: float, noise_factor: float = 1.0) -> Spread | None:
        """Return the spread of the logits for projected features, or None if there is no Laplace approximation."""
        if z is None:
            return None
        layer = self.on(z.device)
        return None if layer is None else Spread(layer.curvature_at(noise_factor), z, precision)

    def require_layer(self, what: str) -> LastLayer:
        """Return the Laplace approximation, or raise an `OptionError` saying that the operation `what` needs it."""
        if self.layer is None:
            raise OptionError(
                f"{what} needs a Laplace approximation, but a plain ensemble has none. Use mola.fit(networks, train_loader)."
            )
        return self.layer

    def log_evidence(self, precision: Tensor, noise_factor: float = 1.0) -> Tensor:
        r"""Return the log marginal likelihood of the training labels, differentiable in the prior precision.

        .. math:: \sum_n \log p(y_n) - \tfrac\lambda2 \|\theta\|^2 + \tfrac d2 \log\lambda - \tfrac12 \log\det(H + \lambda I)
        """
        layer = self.require_layer("the log evidence")
        log_likelihood = self.likelihood.total_log_likelihood(layer.sums.weighted(), noise_factor)
        if log_likelihood is None:
            raise OptionError("the log evidence needs training labels. Fit with batches of (inputs, labels).")
        precision = precision.to(layer.weights)
        prior = layer.weights.numel() * precision.log() - precision * layer.weights.square().sum()
        return log_likelihood + (prior - layer.curvature_at(noise_factor).log_determinant(precision)) / 2


def per_component(value: Any, count: int, name: str) -> list[Any]:
    """Return one value per component as a list, given a single value or a sequence of `count` values."""
    shape = getattr(value, "shape", None)  # of a tensor or array, which is a single value if it holds one
    single = (
        isinstance(value, (int, float, str, bytes)) or value is None or (shape is not None and math.prod(shape) == 1)
    )
    try:
        values = [value] * count if single else list(value)
    except TypeError:
        values = []
    if len(values) != count:
        raise OptionError(f"must be one value, or {count} values (one per component); got {value!r}.", argument=name)
    return values
