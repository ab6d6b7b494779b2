r"""Yes or no for each of C labels (binary and multi-label classification), by one logit each: :math:`p(\text{yes}) = \sigma(f)`.

Labels are independent given the logits, so the curvature has only the separate part, :math:`p_c (1 - p_c)`, and no direction of
output space is hidden. A missing label contributes neither log-likelihood nor curvature.

One logit z is the two-class softmax of the logits (0, z), whose first row of weights is fixed at 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mola.errors import DataError, HeadError
from mola.likelihoods.base import ClassificationLikelihood, OutputCurvature, Ran, matrix_of

MISSING = -100
"""Value of a missing label, besides NaN: the default `ignore_index` of PyTorch's losses."""

ENOUGH_OUTPUTS = 64
"""Outputs between 0 and 1 needed to tell probabilities from logits: a few logits may all be there by chance."""


@dataclass(frozen=True)
class BernoulliPredictive:
    """Probabilities (..., n, C) of "yes"."""

    probs: Tensor

    def point(self) -> Tensor:
        """Return the probabilities of "yes"."""
        return self.probs

    def scores(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the log loss, Brier score, confidence and correctness (..., m) of each known label."""
        known = ~labels.isnan()
        yes, truth = self.probs[..., known], labels[known]
        # 1 - p is 0 long before p is: both answers are bounded alike, so that a loss does not depend on which of them is called yes.
        right = torch.where(truth > 0.5, yes, 1 - yes).clamp_min(torch.finfo(yes.dtype).eps / 2)
        return {
            "nll": -right.log(),
            "brier": 2 * (1 - right).square(),
            "confidence": torch.maximum(yes, 1 - yes),
            "correct": ((yes > 0.5) == (truth > 0.5)).to(yes),
        }


@dataclass(frozen=True)
class Bernoulli(ClassificationLikelihood):
    """Yes or no for each of C labels, by a sigmoid of one logit each."""

    name = "bernoulli"
    default_rule = "calibrated"

    def check_outputs(self, outputs: Tensor, ran: Ran = ()) -> Tensor:
        """Return logits (n, C), from (n,), (n, 1) or (n, C)."""
        if outputs.dim() == 1:
            outputs = outputs[:, None]
        matrix_of(outputs, ran, "logits of shape (batch,) or (batch, labels)")
        if not ran and _are_probabilities(outputs):
            raise HeadError(
                "the network seems to return probabilities: all outputs lie between 0 and 1. Pass a network that returns logits, "
                "without a final sigmoid."
            )
        return outputs

    def check_labels(self, labels: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Return labels (n, C) as 0 and 1 in float64, NaN where missing; (n,) is accepted for one logit."""
        count, width = outputs.shape
        if labels.dim() == 1 and width == 1:
            labels = labels[:, None]
        if labels.shape != (count, width):
            remedy = ""
            if labels.dim() == 1 and len(labels) == count:
                remedy = " For class indices use likelihood='categorical'; for multi-label data pass a 0 or 1 for each label."
            raise DataError(
                f"{where}: expected labels of shape ({count}, {width}), 0 or 1 for each output, got shape "
                f"{tuple(labels.shape)}.{remedy}"
            )
        if labels.is_complex():
            raise DataError(f"{where}: expected labels 0 or 1, got {labels.dtype}.")
        read = labels.to(outputs.device).to(outputs.dtype if outputs.dtype == torch.float64 else torch.float64)
        missing = read.isnan() | (read == MISSING)
        invalid = ~(missing | (read == 0) | (read == 1))
        if bool(invalid.any()):
            found = read[invalid]
            remedy = (
                "For class indices use likelihood='categorical'; here each label is 0 or 1, and -100 or NaN where it is missing."
                if bool((found == found.round()).all())
                else "Soft labels are not supported: pass 0 or 1, and -100 or NaN where a label is missing."
            )
            raise DataError(
                f"{where}: labels must be 0 or 1, got {int(invalid.sum())} others, such as {float(found[0]):.4g}. {remedy}"
            )
        return torch.where(missing, torch.nan, read)

    def known(self, labels: Tensor) -> Tensor | None:
        """Return data with at least one known label; None if all have one."""
        some = ~labels.isnan().all(1)
        return None if bool(some.all()) else some

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of "yes": the sigmoid of each logit."""
        return torch.sigmoid(logits)

    def log_likelihood(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Sum (n,) over the known labels."""
        signed = torch.where(labels > 0.5, outputs, -outputs)
        return torch.where(labels.isnan(), 0.0, functional.logsigmoid(signed)).sum(1)

    def curvature(self, outputs: Tensor, labels: Tensor | None = None) -> OutputCurvature:
        """Return `p (1 - p)` for each output; 0 where its label is missing."""
        # The product of both sigmoids keeps its digits where the network is almost certain; p (1 - p) does not.
        own = torch.sigmoid(outputs) * torch.sigmoid(-outputs)
        return OutputCurvature(separate=own if labels is None else torch.where(labels.isnan(), 0.0, own))

    def distribution(self, probs: Tensor) -> BernoulliPredictive:
        """Return probabilities as a predictive distribution."""
        return BernoulliPredictive(probs)

    def num_groups(self, outputs: int) -> int:
        """Return 2 for one logit, negative and positive; several labels form one group."""
        return 2 if outputs == 1 else 1

    def group(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Return the label, given or, if missing, predicted; 0 for several labels."""
        if outputs.shape[1] > 1:
            return super().group(outputs, labels)
        yes = outputs[:, 0] > 0
        if labels is not None:
            yes = torch.where(labels[:, 0].isnan(), yes, labels[:, 0] > 0.5)
        return yes.long()

    def num_choices(self, outputs: int) -> int:
        """Return 2: no and yes."""
        return 2

    def choices(self, probs: Tensor) -> Tensor:
        """Return probabilities (..., C, 2) of no and yes."""
        return torch.stack([1 - probs, probs], dim=-1)

    def targets(self, labels: Tensor) -> Tensor:
        """Return 0, 1, or -1 where missing (n, C)."""
        return torch.where(labels.isnan(), -1, labels.nan_to_num()).long()


def _are_probabilities(outputs: Tensor) -> bool:
    return outputs.numel() >= ENOUGH_OUTPUTS and bool(((outputs >= 0) & (outputs <= 1)).all())


BERNOULLI = Bernoulli()
