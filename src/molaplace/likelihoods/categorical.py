r"""Classification with C mutually exclusive classes and a softmax over C logits.

The loss may have class weights w and label smoothing :math:`\epsilon`, as in `torch.nn.CrossEntropyLoss`. It is a cross-entropy with
unnormalised targets,

.. math:: \ell(f, y) = -\sum_c t_c \log p_c, \qquad t_c = w_c \big((1 - \epsilon)\, [c = y] + \epsilon / C\big), \qquad
   \nabla_f\, \ell = s p - t, \qquad \nabla_f^2\, \ell = s\, (\mathrm{diag}(p) - p p^\top), \qquad s = \sum_c t_c .

Label smoothing alone leaves the Hessian unchanged, because then s = 1. Without a label, s is replaced by its expectation under p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molaplace.errors import DataError, HeadError
from molaplace.likelihoods.base import (
    ClassificationLikelihood,
    Members,
    OutputCurvature,
    Ran,
    check_label_smoothing,
    loss_weights,
    matrix_of,
    mixed,
)
from molaplace.likelihoods.predictive import ClassificationPredictive
from molaplace.numerics import sobol_normals, to_float64
from molaplace.uncertainty import entropy_limit, num_draws, softmax_and_entropy, unexplained_share

ENOUGH_ROWS = 4
"""Minimum number of rows needed to distinguish probabilities from logits. With only a few rows, the logits in every row may sum to 1
by chance."""


@dataclass(frozen=True)
class CategoricalPredictive(ClassificationPredictive):
    """Probabilities (n, C) of mutually exclusive classes."""

    @property
    def choices(self) -> Tensor:
        """Probabilities (n, C) of the classes."""
        return self.probs

    def per_datum(self, values: Tensor) -> Tensor:
        """Return the values (n,), unchanged."""
        return values

    def scores(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the log loss, Brier score, confidence and correctness (n,) for each datum, in float64.

        For the log loss, a probability that has underflowed to 0 is replaced by the smallest positive normal number of its data type.
        """
        probs = to_float64(self.probs)
        labels = labels.to(probs.device)
        right = probs.gather(-1, labels[:, None]).squeeze(-1)
        confidence, predicted = probs.max(-1)
        return {
            "nll": -right.clamp_min(torch.finfo(self.probs.dtype).tiny).log(),
            "brier": probs.square().sum(-1) - 2 * right + 1,
            "confidence": confidence,
            "correct": (predicted == labels).to(probs),
        }


@dataclass(frozen=True)
class Categorical(ClassificationLikelihood):
    """Classification into C mutually exclusive classes, with a softmax over C logits.

    The options describe the loss with which the networks were trained. They change the curvature and the evidence of the training data,
    but neither predictions of given logits nor the scores of rules and metrics. The sum of the losses is not divided by the sum of
    their weights, so weights with a mean of 1 over the training data leave the scale of the curvature unchanged.

    Args:
        class_weights: weight of each class in the loss, as the argument `weight` of `torch.nn.CrossEntropyLoss`; by default, 1.
        label_smoothing: label smoothing of the loss, as in `torch.nn.CrossEntropyLoss`.
    """

    class_weights: Sequence[float] | None = None
    label_smoothing: float = 0.0
    name = "categorical"
    mutually_exclusive = True
    default_rule = "calibrated"
    output_noun = ("class", "classes")

    def __post_init__(self) -> None:
        weights = None if self.class_weights is None else loss_weights(self.class_weights, "class_weights")
        object.__setattr__(self, "class_weights", weights)
        object.__setattr__(self, "label_smoothing", check_label_smoothing(self.label_smoothing))

    def check_outputs(self, outputs: Tensor, ran: Ran = ()) -> Tensor:
        """Return logits (n, C), or raise `HeadError`."""
        matrix_of(outputs, ran, "logits of shape (batch, classes)")
        if outputs.shape[1] < 2:
            raise HeadError(
                f"expected at least 2 classes, got a network with {outputs.shape[1]} output. Use likelihood='bernoulli' for a "
                f"binary classifier with one logit, or likelihood='gaussian' for regression."
            )
        if not ran and _are_probabilities(outputs):
            raise HeadError(
                "each row of outputs sums to 1, so the network seems to return probabilities. Pass a network that returns logits."
            )
        if self.class_weights is not None and len(self.class_weights) != outputs.shape[1]:
            raise HeadError(
                f"class_weights has {len(self.class_weights)} values, but the network has {outputs.shape[1]} classes. Pass one weight "
                f"for each class."
            )
        return outputs

    def check_labels(self, labels: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Return class indices (n,) as int64, or raise `DataError`."""
        count, classes = outputs.shape
        if labels.shape != (count,):
            remedy = ""
            if labels.dim() > 1:
                remedy = " Pass class indices, not one-hot or soft labels."
                if labels.shape == (count, 1):
                    remedy = " Remove the axis of size 1: labels.squeeze(1)."
                if labels.shape == outputs.shape:
                    remedy += " For multi-label data, use likelihood='bernoulli'."
            raise DataError(
                f"expected {count} class indices of shape ({count},), got shape {tuple(labels.shape)}.{remedy}",
                place=where,
            )
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            remedy = "Convert with labels.long()."
            if labels.is_floating_point() and bool((labels != labels.floor()).any()):
                remedy = (
                    f"The labels contain {float(labels[labels != labels.floor()][0]):g}, which is not a class index. For regression, "
                    f"use likelihood='gaussian'."
                )
            raise DataError(f"expected class indices of an integer type, got {labels.dtype}. {remedy}", place=where)
        labels = labels.to(outputs.device, torch.int64)
        low, high = (int(end) for end in torch.aminmax(labels))
        if low < 0 or high >= classes:
            remedy = "Remove padding, or remap the classes."
            marker = high if high >= classes else low
            if abs(marker) < 2**16:  # label maps have at most 16 bits
                remedy += f" For dense outputs, pass the label that marks ignored positions: ignore_index={marker}."
            if low >= 1 and high == classes:
                remedy = (
                    f"If the classes are numbered from 1 to {classes}, pass labels - 1. If {classes} marks positions to ignore, remove "
                    f"them or, for dense outputs, pass ignore_index={classes}."
                )
            raise DataError(
                f"labels must lie in [0, {classes - 1}] for a network with {classes} outputs, got values from {low} to {high}. {remedy}",
                place=where,
            )
        return labels

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the softmax over the last axis."""
        return torch.softmax(logits, dim=-1)

    def log_likelihood(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the log-probability (n,) of each label or, with the options of a loss, the negative loss."""
        log_probs = torch.log_softmax(outputs, dim=-1)
        of_labels = log_probs.gather(-1, labels[:, None]).squeeze(-1)
        if not self.settings():
            return of_labels
        weights = self._weights(log_probs)
        share = self.label_smoothing
        return (1 - share) * weights[labels] * of_labels + share * (weights * log_probs).mean(-1)

    def curvature(self, outputs: Tensor, labels: Tensor | None = None) -> OutputCurvature:
        """Return `s (diag(p) - p p')` as the Laplacian of `s p p'`."""
        probs = torch.softmax(outputs, dim=-1)
        if self.class_weights is None:
            return OutputCurvature(coupling=probs)
        weights = self._weights(probs)
        of_labels = probs @ weights if labels is None else weights[labels]
        totals = (1 - self.label_smoothing) * of_labels + self.label_smoothing * weights.mean()
        return OutputCurvature(coupling=totals.sqrt()[:, None] * probs)

    def _weights(self, like: Tensor) -> Tensor:
        return like.new_ones(like.shape[-1]) if self.class_weights is None else like.new_tensor(self.class_weights)

    def distribution(self, probs: Tensor) -> CategoricalPredictive:
        """Return the predictive distribution with the given probabilities (n, C)."""
        return CategoricalPredictive(probs)

    def num_groups(self, outputs: int) -> int:
        """Return the number of classes."""
        return outputs

    def group(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Return the label of each datum, or its predicted class if `labels` is None."""
        return outputs.argmax(1) if labels is None else labels

    def targets(self, labels: Tensor) -> Tensor:
        """Return the labels (n,), unchanged."""
        return labels

    def num_choices(self, outputs: int) -> int:
        """Return the number of classes C."""
        return outputs

    def epistemic_share(self, members: Members, seed: int = 0) -> Tensor:
        """Return the share (n,) of the entropy, estimated from Sobol draws because it has no closed form.

        The share is computed from the entropy of the draws; it is exact if the members have no covariance.
        """
        means, spreads = members.scaled()
        draws = num_draws(means[0].shape[-1])
        quarters = []
        entropies = []
        for mean, spread in zip(means, spreads, strict=True):
            if spread is None:
                probs, uncertainty = softmax_and_entropy(mean)
                quarters.append(probs[:, None].expand(-1, 4, -1))
            else:
                noise = sobol_normals(draws, spread.noise_size, seed).to(mean)
                probs, draw_entropies = softmax_and_entropy(mean[:, None] + spread.marginal_deviations(noise))
                quarters.append(probs.view(*mean.shape[:1], 4, draws // 4, mean.shape[1]).mean(2))
                uncertainty = draw_entropies.mean(1)
            entropies.append(uncertainty)
        total = entropy_limit(mixed(members.weights, quarters))
        return unexplained_share(total, mixed(members.weights, entropies))

    def margin(self, logits: Tensor) -> Tensor:
        """Return the largest logit minus the mean of the logits."""
        return logits.amax(-1) - logits.mean(-1)

    def energy(self, logits: Tensor) -> Tensor:
        r"""Return :math:`-\log \sum_c \exp f_c` (Liu et al., 2020)."""
        return -torch.logsumexp(logits, dim=-1)


def _are_probabilities(outputs: Tensor) -> bool:
    if len(outputs) < ENOUGH_ROWS or not bool((outputs >= 0).all()):
        return False
    rounding = 4 * torch.finfo(outputs.dtype).eps * outputs.shape[1] ** 0.5
    return bool((outputs.float().sum(1) - 1).abs().max() < max(1e-5, rounding))


CATEGORICAL = Categorical()
