"""One of C classes, by a softmax over C logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mola.errors import DataError
from mola.likelihood.base import OutputCurvature

__all__ = ["CATEGORICAL", "Categorical"]


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
