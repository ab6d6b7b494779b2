"""One of C classes, by a softmax over C logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mola.errors import DataError, HeadError
from mola.likelihood.base import Likelihood, OutputCurvature, Ran, matrix_of

ENOUGH = 4
"""Rows that tell probabilities from logits."""


@dataclass(frozen=True)
class Categorical(Likelihood):
    """One of C classes, by a softmax over C logits."""

    name = "categorical"
    hides_shift = True
    competing = True
    links = ("probit", "probit-centered", "mean-field", "bridge", "mc")

    def check_outputs(self, outputs: Tensor, ran: Ran = ()) -> Tensor:
        """Logits (n, C).

        Args:
            outputs: a network's output.
            ran: names and output shapes of the linear layers that ran, to name the last.

        Returns:
            The same.
        """
        matrix_of(outputs, ran, "logits of shape (batch, classes)")
        if outputs.shape[1] < 2:
            raise HeadError(
                f"expected at least 2 classes, got a network with {outputs.shape[1]} output. A network that says yes or no by one "
                f"logit is for likelihood='bernoulli', one that predicts a number for likelihood='gaussian'."
            )
        if not ran and _are_probabilities(outputs):  # where layers were watched, it is known which comes after the last
            raise HeadError(
                "the network's outputs are probabilities already: they sum to 1. Pass a network that returns logits."
            )
        return outputs

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
        """
        count, classes = outputs.shape
        if labels.shape != (count,):
            remedy = ""
            if labels.dim() > 1:
                remedy = " Pass class indices, not one-hot or soft labels."
                if labels.shape == (count, 1):
                    remedy = " Remove the axis of size 1: labels.squeeze(1)."
                if labels.shape == outputs.shape:
                    remedy += " If several classes of an input may be right at once, use likelihood='bernoulli'."
            raise DataError(
                f"{where}: expected {count} class indices of shape ({count},), got shape {tuple(labels.shape)}.{remedy}"
            )
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            remedy = "Convert with labels.long()."
            if labels.is_floating_point() and bool((labels != labels.floor()).any()):
                remedy = (
                    f"They hold {float(labels[labels != labels.floor()][0]):g}, which is no class: numbers to predict are for "
                    f"likelihood='gaussian'."
                )
            raise DataError(f"{where}: expected class indices of an integer type, got {labels.dtype}. {remedy}")
        labels = labels.to(outputs.device, torch.int64)
        low, high = (int(end) for end in torch.aminmax(labels))
        if low < 0 or high >= classes:
            raise DataError(
                f"{where}: labels must lie in [0, {classes - 1}] for a network with {classes} outputs, "
                f"got values from {low} to {high}. Remove padding or ignore-index labels, or remap the classes; at many "
                f"positions, name a label that does not count: ignore_index={high if high >= classes else low}."
            )
        return labels

    def curvature(self, outputs: Tensor, labels: Tensor | None = None) -> OutputCurvature:
        """`diag(p) - p p'`, as the Laplacian of `p p'`; it does not depend on labels."""
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

    def groups(self, outputs: int) -> int:
        """The classes."""
        return outputs

    def group_of(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        """The class, given or predicted."""
        return outputs.argmax(1) if labels is None else labels

    def answers(self, outputs: int) -> int:
        """One question, and C answers to it."""
        return outputs

    def answer_probabilities(self, probs: Tensor) -> Tensor:
        """Those of the classes."""
        return probs

    def asked(self, labels: Tensor) -> Tensor:
        """The labels."""
        return labels

    def answered(self, outputs: Tensor) -> Tensor:
        """The classes with the largest logits."""
        return outputs.argmax(1)

    def table(self, probs: Tensor) -> Tensor:
        """The probabilities themselves."""
        return probs

    def table_of_logits(self, logits: Tensor) -> Tensor:
        """Softmax over the classes, in the memory of the logits."""
        weights = logits.sub_(logits.amax(dim=1, keepdim=True)).exp_()
        return weights.div_(weights.sum(dim=1, keepdim=True))


def _are_probabilities(outputs: Tensor) -> bool:
    # Whether a network seems to end in a softmax. Of a few rows that cannot be told: logits may sum to 1 by chance.
    if torch.compiler.is_compiling() or len(outputs) < ENOUGH or not bool((outputs >= 0).all()):
        return False
    rounding = 4 * torch.finfo(outputs.dtype).eps * outputs.shape[1] ** 0.5
    return bool((outputs.float().sum(1) - 1).abs().max() < max(1e-5, rounding))


def _softmax(outputs: Tensor) -> tuple[Tensor, Tensor, OutputCurvature]:
    # Step by step, with what it needs on the way: torch's own takes twice as long for 10 classes, and gives no
    # normaliser.
    shifted = outputs - outputs.amax(dim=-1, keepdim=True)
    weights = shifted.exp()
    total = weights.sum(dim=-1, keepdim=True)
    return shifted, total, OutputCurvature(separate=None, coupling=weights / total)


CATEGORICAL = Categorical()
