r"""What the last layer's outputs mean: probabilities, log-likelihood and curvature. The structures ask here alone.

A likelihood says which outputs and labels it takes, how outputs become probabilities, how labels score them, and how the negative
log-likelihood curves. It also says what tuning, distances and links need to know, so that nothing else asks which likelihood it is.
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

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from mola.errors import HeadError, OptionError

Ran = Sequence[tuple[str, torch.Size]]
"""Names and output shapes of the linear layers that ran in a pass, to name the last."""


@dataclass(frozen=True)
class OutputCurvature:
    """Curvature of n data with respect to their C outputs: `diag(separate) + L(coupling coupling')` for each."""

    separate: Tensor | None
    """(n, C), or None where outputs have no curvature of their own."""
    coupling: Tensor | None
    """(n, C), or None where outputs do not interact."""

    def diagonal(self) -> Tensor:
        """Diagonal (n, C) of each datum's curvature."""
        parts = [] if self.separate is None else [self.separate]
        if self.coupling is not None:
            parts.append(self.coupling * (self.coupling.sum(1, keepdim=True) - self.coupling))
        if not parts:
            raise OptionError("a likelihood must give separate or coupled curvature")
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def degrees(self) -> Tensor | None:
        """Diagonal (C,) of the coupled parts, summed over the data: what the nodes of their graph have of edges.

        The difference of two sums: `u_c (sum(u) - u_c)` loses as much to rounding by itself, and takes longer.
        """
        coupling = self.coupling
        if coupling is None:
            return None
        return coupling.sum(1) @ coupling - coupling.square().sum(0)


class Likelihood(ABC):
    """How outputs become probabilities, are scored, and curve the loss.

    Attributes:
        name: for files and messages.
        hides_shift: whether a shift common to all outputs changes nothing.
        discrete: whether labels are answers to choose from, and not numbers.
        competing: whether outputs compete: one is probable only at the cost of the others.
        partial: whether some of a datum's labels may be missing, and the others count.
        links: names of the links that apply.
        rules: names of the rules that mean something.
        default_rule: the rule that is taken where none is named.
    """

    name: str
    hides_shift: bool = False
    discrete: bool = True
    competing: bool = False
    partial: bool = False
    links: tuple[str, ...] = ()
    rules: tuple[str, ...] = ("threshold", "nll", "brier", "ece", "evidence", "distance")
    default_rule: str = "threshold"

    def settings(self) -> dict[str, Any]:
        """What it takes to rebuild the likelihood, as JSON."""
        return {}

    # --- outputs and labels -----------------------------------------------------------------------------------------

    @abstractmethod
    def check_outputs(self, outputs: Tensor, ran: Ran = ()) -> Tensor:
        """Outputs of a network as rows (n, C), or `HeadError` where they do not fit.

        Args:
            outputs: as the network returned them.
            ran: linear layers that ran, where they were watched: then what comes after the last is found in another way.

        Returns:
            The same numbers in the same memory.
        """

    @abstractmethod
    def check_labels(self, labels: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Labels as the likelihood reads them, on the device of the outputs (n, C); `DataError` naming `where` if it cannot."""

    def readable(self, labels: Tensor) -> Tensor:
        """Which rows (n,) of labels from a file, (n,) or (n, C) in float64, hold what `check_labels` takes: finite numbers."""
        return labels.reshape(len(labels), -1).isfinite().all(1)

    def known(self, labels: Tensor) -> Tensor | None:
        """Which data (n,) have a label at all, of labels that were checked; None where all must have one."""
        return None

    # --- values -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def probabilities(self, outputs: Tensor) -> Tensor:
        """Predictive probabilities (..., C) of outputs (..., C)."""

    @abstractmethod
    def log_likelihood(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Log-likelihood (n,) of each datum's labels."""

    @abstractmethod
    def curvature(self, outputs: Tensor, labels: Tensor | None = None) -> OutputCurvature:
        """Second derivative of the negative log-likelihood at outputs (n, C); labels say which outputs have one."""

    def scored_curvature(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, OutputCurvature]:
        """Log-likelihood (n,) and curvature: both, where that costs less than each by itself."""
        return self.log_likelihood(outputs, labels), self.curvature(outputs, labels)

    # --- training further, as some baselines do ---------------------------------------------------------------------

    def training_score(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """What training makes as large as can be (n,): the log-likelihood."""
        return self.log_likelihood(outputs, labels)

    def loss_of_guessing(self, outputs: Tensor, labels: Tensor) -> float:
        """Mean loss of whoever knows nothing of the inputs."""
        return math.log(self.answers(outputs.shape[1])) * (1 if self.competing else outputs.shape[1])

    # --- sums that depend on a number that is chosen after them ------------------------------------------------------

    def latent(self, outputs: int) -> int:
        """How many of a network's outputs are uncertain: all of them."""
        return outputs

    def rows(self, outputs: int) -> slice:
        """Which of a network's outputs these are."""
        return slice(outputs)

    def label_sums(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """What is summed of labels beside their log-likelihood, in float64; None for nothing."""
        return None

    def settled(self, sums: Tensor | None, count: int) -> Self:
        """The likelihood once the sums of all training data are known: itself, where nothing is estimated from them."""
        return self

    def output_scale(self, width: int) -> Tensor | None:
        """What the curvature of each output, as it was summed, is multiplied by (C,); None for nothing."""
        return None

    def total_log_likelihood(self, sums: Tensor, count: int) -> float:
        """Log-likelihood of all data whose `label_sums` these are."""
        raise OptionError(f"likelihood {self.name!r} has no sums of labels.")

    # --- what it sees -----------------------------------------------------------------------------------------------

    def visible(self, outputs: int) -> Tensor:
        """Orthonormal directions (C, R) of output space that change the probabilities, in float64: all of them."""
        return torch.eye(outputs, dtype=torch.float64, device="cpu")

    # --- which group of the training data a datum belongs to --------------------------------------------------------

    @abstractmethod
    def groups(self, outputs: int) -> int:
        """Number of groups of training data whose centres distances are measured from."""

    @abstractmethod
    def group_of(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        """The group (n,) of each datum, in int64: by its label, or by the outputs (n, C) where there is none."""

    # --- questions with a few answers -------------------------------------------------------------------------------

    def answers(self, outputs: int) -> int:
        """Number of answers to each question that the outputs put: C for one of C classes, 2 for yes or no."""
        raise OptionError(self._no_answers())

    def answer_probabilities(self, probs: Tensor) -> Tensor:
        """Probabilities (..., A) of all answers to each question, from what `probabilities` gives."""
        raise OptionError(self._no_answers())

    def asked(self, labels: Tensor) -> Tensor:
        """The right answers (m,) in int64 to all questions of n data, from their labels; -1 where none is known.

        Questions are in the order in which `table` puts them.
        """
        raise OptionError(self._no_answers())

    def answered(self, outputs: Tensor) -> Tensor:
        """The most probable answers (m,) to all questions of n data, from their outputs (n, C), in the same order."""
        raise OptionError(self._no_answers())

    def table(self, probs: Tensor) -> Tensor:
        """Probabilities (L, A, m) of the answers to all questions of n data, from (L, C, n)."""
        raise OptionError(self._no_answers())

    def table_of_logits(self, logits: Tensor) -> Tensor:
        """The same from logits (L, C, n), with all digits of small probabilities; the memory of the logits may be used."""
        raise OptionError(self._no_answers())

    def _no_answers(self) -> str:
        return f"likelihood {self.name!r} has numbers as outputs, and no answers to choose from."


def matrix_of(outputs: Tensor, ran: Ran, expected: str) -> Tensor:
    """Outputs that must be a matrix.

    Args:
        outputs: of a network.
        ran: linear layers that were watched.
        expected: what they should be, for the message.

    Returns:
        The same.
    """
    if outputs.dim() == 1 and not ran:
        raise HeadError(
            f"expected {expected}, got shape {tuple(outputs.shape)}. A single input needs a batch around "
            f"it: inputs[None]."
        )
    if outputs.dim() != 2:
        near = f" Its last linear layer, {ran[-1][0]!r}, gives shape {tuple(ran[-1][1])}." if ran else ""
        raise HeadError(
            f"expected {expected}, got shape {tuple(outputs.shape)}.{near} "
            f"Pass a network that returns the output of its last linear layer as it is, without reshaping."
        )
    return outputs


def laplacian(weights: Tensor) -> Tensor:
    """Graph Laplacian `diag(W 1) - W` of symmetric `weights` (C, C); self-loops cancel and are never read."""
    off_diagonal = weights - torch.diag(weights.diagonal())
    return torch.diag(off_diagonal.sum(1)) - off_diagonal
