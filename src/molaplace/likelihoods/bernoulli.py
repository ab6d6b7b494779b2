r"""Binary and multi-label classification: yes or no for each of C labels, with one logit each, :math:`p(\text{yes}) = \sigma(f)`.

Labels are independent given the logits, so the curvature has only the separate part, :math:`p_c (1 - p_c)`. Every direction in output
space therefore has curvature. A missing label contributes neither to the log-likelihood nor to the curvature.

The loss may have weights w of positive labels and label smoothing :math:`\epsilon`, as in `torch.nn.BCEWithLogitsLoss` and Keras. For one
label,

.. math:: \ell(f, y) = -w \tilde y \log \sigma(f) - (1 - \tilde y) \log \sigma(-f), \qquad
   \tilde y = (1 - \epsilon)\, y + \epsilon / 2, \qquad
   \ell''(f) = (w \tilde y + 1 - \tilde y)\, \sigma(f)\, \sigma(-f) .

The sigmoid of a logit z is the second entry of the softmax of (0, z), in which the first logit is fixed at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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
from molaplace.numerics import to_float64
from molaplace.options import counted
from molaplace.uncertainty import expected_sigmoid, unexplained_share

MISSING = -100
"""Value that, like NaN, marks a missing label. It is the default `ignore_index` of PyTorch's losses."""

ENOUGH_OUTPUTS = 64
"""Minimum number of outputs needed to distinguish probabilities from logits. A few logits may all lie between 0 and 1 by chance."""


@dataclass(frozen=True)
class BernoulliPredictive(ClassificationPredictive):
    """Probabilities (n, C) of "yes"."""

    @property
    def choices(self) -> Tensor:
        """Probabilities (n, C, 2) of "no" and "yes"."""
        return torch.stack([1 - self.probs, self.probs], dim=-1)

    def per_datum(self, values: Tensor) -> Tensor:
        """Return the mean (n,) over the labels of values (n, C)."""
        return values.mean(-1)

    def scores(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the log loss, Brier score, confidence and correctness (m,) for each known label, in float64.

        In floating point, 1 - p rounds to 0 long before p does. Probabilities are therefore first clamped to [eps, 1 - eps], where eps
        is the machine epsilon of their data type, so that the log loss does not depend on which answer is called yes.
        """
        labels = labels.to(self.probs.device)
        known = ~labels.isnan()
        epsilon = torch.finfo(self.probs.dtype).eps
        yes = to_float64(self.probs[known]).clamp(epsilon, 1 - epsilon)
        truth = to_float64(labels[known]) > 0.5
        right = torch.where(truth, yes, 1 - yes)
        return {
            "nll": -right.log(),
            "brier": 2 * (1 - right).square(),
            "confidence": torch.maximum(yes, 1 - yes),
            "correct": ((yes > 0.5) == truth).to(yes),
        }


@dataclass(frozen=True)
class Bernoulli(ClassificationLikelihood):
    """A yes-or-no answer for each of C labels; the probability of yes is the sigmoid of the label's logit.

    The options describe the loss with which the networks were trained, as for `Categorical`.

    Args:
        pos_weight: weight of a positive label in the loss, as one number or one for each label; see `torch.nn.BCEWithLogitsLoss`.
        label_smoothing: label smoothing of the loss: labels 0 and 1 become `label_smoothing / 2` and `1 - label_smoothing / 2`.
    """

    pos_weight: float | Sequence[float] | None = None
    label_smoothing: float = 0.0
    name = "bernoulli"
    default_rule = "calibrated"
    output_noun = ("label", "labels")

    def __post_init__(self) -> None:
        weights = None if self.pos_weight is None else loss_weights(self.pos_weight, "pos_weight")
        object.__setattr__(self, "pos_weight", weights)
        object.__setattr__(self, "label_smoothing", check_label_smoothing(self.label_smoothing))

    def check_outputs(self, outputs: Tensor, ran: Ran = ()) -> Tensor:
        """Return logits of shape (n, C), given outputs of shape (n,) or (n, C)."""
        if outputs.dim() == 1:
            outputs = outputs[:, None]
        matrix_of(outputs, ran, "logits of shape (batch,) or (batch, labels)")
        if not ran and _are_probabilities(outputs):
            raise HeadError(
                "all outputs lie between 0 and 1, so the network seems to return probabilities. Pass a network that returns "
                "logits, without a final sigmoid."
            )
        weights: Any = self.pos_weight
        if weights is not None and len(weights) not in (1, outputs.shape[1]):
            raise HeadError(
                f"pos_weight has {len(weights)} values, but the network has {counted(outputs.shape[1], 'output')}. Pass one number, or "
                f"one for each output."
            )
        return outputs

    def check_labels(self, labels: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Return labels (n, C) as float64: 0, 1, or NaN for a missing label. Labels (n,) are accepted if there is only one logit."""
        count, width = outputs.shape
        if labels.dim() == 1 and width == 1:
            labels = labels[:, None]
        if labels.shape != (count, width):
            remedy = ""
            if labels.dim() == 1 and len(labels) == count:
                remedy = " For class indices, use likelihood='categorical'. For multi-label data, pass 0 or 1 for each label."
            raise DataError(
                f"expected labels of shape ({count}, {width}), with 0 or 1 for each output; got shape "
                f"{tuple(labels.shape)}.{remedy}",
                place=where,
            )
        if labels.is_complex():
            raise DataError(f"expected labels that are 0 or 1, got {labels.dtype}.", place=where)
        values = labels.to(outputs.device).to(torch.float64)
        missing = values.isnan() | (values == MISSING)
        invalid = ~(missing | (values == 0) | (values == 1))
        if bool(invalid.any()):
            others = values[invalid]
            remedy = (
                "For class indices, use likelihood='categorical'. Otherwise, pass 0 or 1, or use -100 or NaN for a missing label."
                if bool((others == others.round()).all())
                else "Soft labels are not supported. Pass 0 or 1, or use -100 or NaN for a missing label."
            )
            raise DataError(
                f"labels must be 0 or 1, got {counted(int(invalid.sum()), 'other value')}, such as {float(others[0]):.4g}. "
                f"{remedy}",
                place=where,
            )
        return torch.where(missing, torch.nan, values)

    def known(self, labels: Tensor) -> Tensor | None:
        """Return a mask (n,) of the data that have at least one label, or None if every datum has one."""
        known = ~labels.isnan().all(1)
        return None if bool(known.all()) else known

    def rows_of_scores(self, labels: Tensor) -> Tensor:
        """Return the index (m,) of the datum to which each known label belongs."""
        return (~labels.isnan()).nonzero()[:, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of "yes": the sigmoid of each logit."""
        return torch.sigmoid(logits)

    def log_likelihood(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the log-likelihood (n,) of each datum, summed over its known labels, or the negative loss if it has options."""
        if self.settings():
            positive, negative = self._targets(labels.nan_to_num())
            values = positive * functional.logsigmoid(outputs) + negative * functional.logsigmoid(-outputs)
        else:
            values = functional.logsigmoid(torch.where(labels > 0.5, outputs, -outputs))
        return torch.where(labels.isnan(), 0.0, values).sum(1)

    def curvature(self, outputs: Tensor, labels: Tensor | None = None) -> OutputCurvature:
        """Return `p (1 - p)` for each output, times the weight of its label in the loss, or 0 if its label is missing."""
        # The product of the two sigmoids stays accurate when the network is almost certain, whereas p (1 - p) does not.
        separate = torch.sigmoid(outputs) * torch.sigmoid(-outputs)
        if self.pos_weight is not None:
            positive, negative = self._targets(torch.sigmoid(outputs) if labels is None else labels)
            separate = (positive + negative) * separate
        return OutputCurvature(separate if labels is None else torch.where(labels.isnan(), 0.0, separate))

    def _targets(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        # Return the weights (n, C) of the two terms of the loss, given labels or expected labels (n, C).
        smooth = (1 - self.label_smoothing) * labels + self.label_smoothing / 2
        positive = smooth if self.pos_weight is None else smooth * smooth.new_tensor(self.pos_weight)
        return positive, 1 - smooth

    def distribution(self, probs: Tensor) -> BernoulliPredictive:
        """Return the predictive distribution with the given probabilities (n, C)."""
        return BernoulliPredictive(probs)

    def num_groups(self, outputs: int) -> int:
        """Return 2 for a single label (the groups are no and yes) and 1 for several labels (all data form one group)."""
        return 2 if outputs == 1 else 1

    def group(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Return each datum's label or, if it is missing, the predicted label. With several labels, return 0 for each datum."""
        if outputs.shape[1] > 1:
            return super().group(outputs, labels)
        yes = outputs[:, 0] > 0
        if labels is not None:
            yes = torch.where(labels[:, 0].isnan(), yes, labels[:, 0] > 0.5)
        return yes.long()

    def targets(self, labels: Tensor) -> Tensor:
        """Return labels (n, C) as int64: 0, 1, or -1 for a missing label."""
        return torch.where(labels.isnan(), -1, labels.nan_to_num()).long()

    def num_choices(self, outputs: int) -> int:
        """Return 2, the number of values of a label: no and yes."""
        return 2

    def epistemic_share(self, members: Members, seed: int = 0) -> Tensor:
        """Return the share (n, C) of each label's entropy. Each logit is a single Gaussian variable, so no draws are needed."""
        means, spreads = members.scaled()
        probs = []
        entropies = []
        for mean, spread in zip(means, spreads, strict=True):
            yes, uncertainty = expected_sigmoid(mean, torch.zeros_like(mean) if spread is None else spread.variance())
            probs.append(yes)
            entropies.append(uncertainty)
        total = self.distribution(mixed(members.weights, probs)).entropy()
        return unexplained_share(total, mixed(members.weights, entropies))

    def margin(self, logits: Tensor) -> Tensor:
        """Return half of the mean absolute logit: each logit is compared with a second logit fixed at 0."""
        return logits.abs().mean(-1) / 2

    def energy(self, logits: Tensor) -> Tensor:
        r"""Return :math:`-\sum_c \log(1 + e^{f_c})` (Wang et al., 2021).

        An input with no predicted label is treated as unlike the training data. For a single label, however, a confident "no" is as
        typical as a confident "yes", so the energy is computed from the logits :math:`(-f/2, f/2)` of two classes.
        """
        energy = -functional.softplus(logits)
        return (energy + logits / 2).squeeze(-1) if logits.shape[-1] == 1 else energy.sum(-1)


def _are_probabilities(outputs: Tensor) -> bool:
    return outputs.numel() >= ENOUGH_OUTPUTS and bool(((outputs >= 0) & (outputs <= 1)).all())


BERNOULLI = Bernoulli()
