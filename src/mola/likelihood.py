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

from mola.errors import DataError, OptionError

__all__ = ["CATEGORICAL", "Categorical", "Likelihood", "OutputCurvature", "laplacian"]


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


@dataclass(frozen=True)
class Categorical:
    """One of C classes, by a softmax over C logits."""

    name: str = "categorical"
    hides_shift: bool = True

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Softmax over the last axis."""
        return torch.softmax(outputs, dim=-1)

    def log_likelihood(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Log-probability (n,) of each label."""
        return torch.log_softmax(outputs, dim=-1).gather(-1, labels[:, None]).squeeze(-1)

    def check_labels(self, labels: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Class indices as int64.

        Args:
            labels: what the loader yielded.
            outputs: the network's logits (n, C) for the same data.
            where: words for the error message, such as "batch 3 of the training loader".

        Returns:
            Labels (n,) as int64 on the device of `outputs`.

        Raises:
            DataError: if labels are not n whole numbers in [0, C).
        """
        count, classes = outputs.shape
        if labels.shape != (count,):
            remedy = " Pass class indices, not one-hot or soft labels." if labels.dim() > 1 else ""
            message = (
                f"{where}: expected {count} class indices of shape ({count},), got shape {tuple(labels.shape)}.{remedy}"
            )
            raise DataError(message)
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            message = (
                f"{where}: expected class indices of an integer type, got {labels.dtype}. Convert with labels.long()."
            )
            raise DataError(message)
        labels = labels.to(outputs.device, torch.int64)
        low, high = (int(end) for end in torch.aminmax(labels))
        if low < 0 or high >= classes:
            message = (
                f"{where}: labels must lie in [0, {classes - 1}] for a network with {classes} outputs, "
                f"got values from {low} to {high}. Remove padding or ignore-index labels, or remap the classes."
            )
            raise DataError(message)
        return labels

    def curvature(self, outputs: Tensor) -> OutputCurvature:
        """`diag(p) - p p'`, as the Laplacian of `p p'`."""
        return _softmax(outputs)[2]

    def scored_curvature(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, OutputCurvature]:
        """Log-probability (n,) of each label and the curvature, with one exponential for each output.

        Args:
            outputs: (n, C).
            labels: (n,).

        Returns:
            Log-probabilities, and the curvature.
        """
        shifted, total, curvature = _softmax(outputs)
        return (shifted.gather(1, labels[:, None]) - total.log()).squeeze(1), curvature

    def visible(self, outputs: int) -> Tensor:
        """Contrasts: an orthonormal basis (C, C-1) of the vectors that sum to zero (Helmert's)."""
        basis = torch.zeros(outputs, outputs - 1, dtype=torch.float64, device="cpu")
        for column in range(outputs - 1):
            size = column + 1
            basis[:size, column] = 1 / (size * (size + 1)) ** 0.5
            basis[size, column] = -((size / (size + 1)) ** 0.5)
        return basis


def _softmax(outputs: Tensor) -> tuple[Tensor, Tensor, OutputCurvature]:
    """Step by step, with what it needs on the way: torch's own takes twice as long for 10 classes, and gives no normaliser."""
    shifted = outputs - outputs.amax(dim=-1, keepdim=True)
    weights = shifted.exp()
    total = weights.sum(dim=-1, keepdim=True)
    return shifted, total, OutputCurvature(separate=None, coupling=weights / total)


CATEGORICAL = Categorical()
