r"""Yes or no, once or for many labels, by one logit each: :math:`p(\text{yes}) = \sigma(f)`.

Labels are independent given the logits, so the curvature has the separate part alone, :math:`p_c (1 - p_c)`, and no direction of
output space is hidden. A label that is missing leaves no trace: neither log-likelihood nor curvature.

One logit z is the two-class softmax of the logits (0, z), whose first row of weights is fixed at 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mola.errors import DataError, HeadError
from mola.likelihood.base import Likelihood, OutputCurvature, Ran, matrix_of

MISSING = -100
"""A label that is not known, beside NaN: what PyTorch's losses ignore by default."""

ENOUGH = 64
"""Outputs between 0 and 1 that tell probabilities from logits: of a few logits, all may lie there by chance."""


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Yes or no for each of C labels, by a sigmoid of one logit each."""

    name = "bernoulli"
    partial = True
    links = ("probit", "mean-field", "mc")

    def check_outputs(self, outputs: Tensor, ran: Ran = ()) -> Tensor:
        """Logits (n, C), of (n,), (n, 1) or (n, C).

        Args:
            outputs: a network's output.
            ran: names and output shapes of the linear layers that ran, to name the last.

        Returns:
            The same memory as a matrix.
        """
        if outputs.dim() == 1:
            outputs = outputs[:, None]
        matrix_of(outputs, ran, "logits of shape (batch,) or (batch, labels)")
        if not ran and _are_probabilities(outputs):
            raise HeadError(
                "the network's outputs seem to be probabilities already: all lie between 0 and 1. Pass a network that returns logits, "
                "without a sigmoid at its end."
            )
        return outputs

    def check_labels(self, labels: Tensor, outputs: Tensor, where: str) -> Tensor:
        """0 and 1 in float64, NaN where a label is missing.

        Args:
            labels: (n, C), for one logit also (n,): 0 or 1 of any type; NaN or -100 where a label is missing.
            outputs: the network's logits (n, C) for the same data.
            where: words for the error message.

        Returns:
            (n, C) on the device of `outputs`.
        """
        count, outs = outputs.shape
        if labels.dim() == 1 and outs == 1:
            labels = labels[:, None]
        if labels.shape != (count, outs):
            message = f"{where}: expected labels of shape ({count}, {outs}), 0 or 1 for each output, got shape {tuple(labels.shape)}."
            if labels.dim() == 1 and len(labels) == count:
                message += (
                    " Class indices, of which one is right for each input, are for likelihood='categorical'; if several may be, "
                    "give a 0 or 1 for each."
                )
            raise DataError(message)
        if labels.is_complex():
            raise DataError(f"{where}: expected labels 0 or 1, got {labels.dtype}.")
        read = labels.to(outputs.device).to(torch.float64)
        missing = read.isnan() | (read == MISSING)
        other = ~(missing | (read == 0) | (read == 1))
        if bool(other.any()):
            found = read[other]
            whole = bool((found == found.round()).all())
            why = (
                "Class indices are for likelihood='categorical'; here each label is 0 or 1, and -100 or NaN where it is missing."
                if whole
                else "Soft labels are not taken: give 0 or 1, and -100 or NaN where a label is missing."
            )
            raise DataError(
                f"{where}: labels must be 0 or 1, got {int(other.sum())} others, such as {float(found[0]):.4g}. {why}"
            )
        return torch.where(missing, torch.nan, read)

    def readable(self, labels: Tensor) -> Tensor:
        """Rows of 0, 1, NaN and -100."""
        rows = labels.reshape(len(labels), -1)
        return (rows.isnan() | (rows == MISSING) | (rows == 0) | (rows == 1)).all(1)

    def known(self, labels: Tensor) -> Tensor | None:
        """Data of which at least one label is known; None where that is all of them."""
        some = ~labels.isnan().all(1)
        return None if bool(some.all()) else some

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Of yes: a sigmoid of each logit."""
        return torch.sigmoid(outputs)

    def log_likelihood(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Sum (n,) over the labels that are known."""
        # log sigmoid(z) for yes, log sigmoid(-z) for no.
        signed = torch.where(labels > 0.5, outputs, -outputs)
        return torch.where(labels.isnan(), 0.0, functional.logsigmoid(signed)).sum(1)

    def curvature(self, outputs: Tensor, labels: Tensor | None = None) -> OutputCurvature:
        """`p (1 - p)` for each output; 0 where its label is missing."""
        # Not p (1 - p): the product of both probabilities keeps its digits where the network is almost certain.
        own = torch.sigmoid(outputs) * torch.sigmoid(-outputs)
        if labels is not None:
            own = torch.where(labels.isnan(), 0.0, own)
        return OutputCurvature(separate=own, coupling=None)

    def groups(self, outputs: int) -> int:
        """Yes and no for one logit; all data are one group where there are several."""
        return 2 if outputs == 1 else 1

    def group_of(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Yes or no, given or, where it is missing, predicted; the one group of several labels."""
        if outputs.shape[1] > 1:
            return torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device)
        said = outputs[:, 0] > 0
        if labels is not None:
            given = labels[:, 0]
            said = torch.where(given.isnan(), said, given > 0.5)
        return said.long()

    def answers(self, outputs: int) -> int:
        """Yes and no."""
        return 2

    def answer_probabilities(self, probs: Tensor) -> Tensor:
        """Of no and yes (..., C, 2)."""
        return torch.stack([1 - probs, probs], dim=-1)

    def asked(self, labels: Tensor) -> Tensor:
        """A question for each label of each datum (C n,): first all data's first label."""
        flat = labels.T.flatten()
        return torch.where(flat.isnan(), -1, flat.nan_to_num()).long()

    def answered(self, outputs: Tensor) -> Tensor:
        """Yes where a logit is above 0."""
        return (outputs > 0).T.flatten().long()

    def table(self, probs: Tensor) -> Tensor:
        """No and yes (L, 2, C n)."""
        yes = probs.flatten(1)
        return torch.stack([1 - yes, yes], dim=1)

    def table_of_logits(self, logits: Tensor) -> Tensor:
        """No and yes (L, 2, C n), each by a sigmoid of its own: 1 - p would lose the digits of a small one."""
        flat = logits.flatten(1)
        return torch.stack([torch.sigmoid(-flat), torch.sigmoid(flat)], dim=1)


def _are_probabilities(outputs: Tensor) -> bool:
    if torch.compiler.is_compiling() or outputs.numel() < ENOUGH:
        return False
    return bool(((outputs >= 0) & (outputs <= 1)).all())


BERNOULLI = Bernoulli()
