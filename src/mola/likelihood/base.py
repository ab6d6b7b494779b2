r"""What the last layer's outputs mean: probabilities, log-likelihood and curvature. The structures ask here alone.

A likelihood says how outputs become probabilities, how labels score them, and how the negative log-likelihood curves.
For one datum the curvature with respect to the outputs f is always of the form

.. math:: \Lambda = \mathrm{diag}(d) + L(u u^\top), \qquad L(W) = \mathrm{diag}(W 1) - W,

a part that acts on each output alone and a part that couples every pair of outputs, written as the Laplacian of the
graph whose edge weights are :math:`u_i u_j`. For a softmax, :math:`\mathrm{diag}(p) - p p^\top = L(p p^\top)`: there
is no separate part, and

* :math:`\Lambda 1 = 0` holds by construction, in any precision: the softmax ignores a shift common to all outputs;
* the diagonal :math:`p_i (1 - p_i) = \sum_{j \ne i} p_i p_j` is a sum of positive terms: summed over data first, as
  `kron` and `full` do, nothing cancels when a network is almost certain.

Independent outputs (Bernoulli, Gaussian) have only the separate part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mola.errors import OptionError

__all__ = ["Likelihood", "OutputCurvature", "laplacian"]


@dataclass(frozen=True)
class OutputCurvature:
    """Curvature of n data with respect to their C outputs: `diag(separate) + L(coupling coupling')` for each."""

    separate: Tensor | None
    """(n, C), or None where outputs have no curvature of their own."""
    coupling: Tensor | None
    """(n, C), or None where outputs do not interact."""

    def diagonal(self) -> Tensor:
        """Diagonal (n, C) of each datum's curvature.

        Raises:
            OptionError: if there is neither part.
        """
        parts = [] if self.separate is None else [self.separate]
        if self.coupling is not None:
            parts.append(self.coupling * (self.coupling.sum(1, keepdim=True) - self.coupling))
        if not parts:
            message = "a likelihood must give separate or coupled curvature"
            raise OptionError(message)
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def degrees(self) -> Tensor | None:
        """Diagonal (C,) of the coupled parts, summed over the data: what the nodes of their graph have of edges.

        The difference of two sums: `u_c (sum(u) - u_c)` loses as much to rounding by itself, and takes longer.
        """
        coupling = self.coupling
        if coupling is None:
            return None
        return coupling.sum(1) @ coupling - coupling.square().sum(0)


class Likelihood(Protocol):
    """How outputs become probabilities, are scored, and curve the loss."""

    @property
    def name(self) -> str:
        """Of the likelihood, for files."""

    @property
    def hides_shift(self) -> bool:
        """Whether a shift common to all outputs changes nothing."""

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Predictive probabilities (n, C) of outputs (n, C)."""

    def log_likelihood(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Log-likelihood (n,) of each label."""

    def scored_curvature(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, OutputCurvature]:
        """Log-likelihood (n,) of each label and the curvature: both, for less than each by itself."""

    def check_labels(self, labels: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Return labels as the likelihood reads them, or raise `DataError` naming `where`."""

    def curvature(self, outputs: Tensor) -> OutputCurvature:
        """Second derivative of the negative log-likelihood at outputs (n, C)."""

    def visible(self, outputs: int) -> Tensor:
        """Orthonormal directions (C, R) of output space that change the probabilities, in float64."""


def laplacian(weights: Tensor) -> Tensor:
    """Graph Laplacian `diag(W 1) - W` of symmetric `weights` (C, C); self-loops cancel and are never read."""
    off_diagonal = weights - torch.diag(weights.diagonal())
    return torch.diag(off_diagonal.sum(1)) - off_diagonal
