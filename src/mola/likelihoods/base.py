r"""The contract of a likelihood: checks of outputs and labels, log-likelihood, curvature, and predictive distribution.

For one datum the curvature of the negative log-likelihood with respect to the outputs f is always of the form

.. math:: \Lambda = \mathrm{diag}(d) + L(u u^\top), \qquad L(W) = \mathrm{diag}(W 1) - W,

a part that acts on each output alone and a part that couples every pair of outputs, written as the Laplacian of the graph with edge
weights :math:`u_i u_j`. For a softmax, :math:`\mathrm{diag}(p) - p p^\top = L(p p^\top)`: there is no separate part, and

* :math:`\Lambda 1 = 0` holds by construction, in any precision: the softmax ignores a shift common to all outputs;
* the diagonal :math:`p_i (1 - p_i) = \sum_{j \ne i} p_i p_j` is a sum of positive terms. Summed over data first,
  nothing cancels when a network is almost certain.

Independent outputs (Bernoulli, Gaussian) have only the separate part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

from mola.errors import HeadError

if TYPE_CHECKING:
    from mola.laplace.base import Spread
    from mola.laplace.sums import Sums

Ran = Sequence[tuple[str, torch.Size]]
"""Names and output shapes of the linear layers that ran in a watched pass."""


@dataclass(frozen=True)
class OutputCurvature:
    """Curvature of n data with respect to their C outputs: `diag(separate) + L(coupling coupling')` for each."""

    separate: Tensor | None = None
    """(n, C), or None if outputs have no curvature of their own."""
    coupling: Tensor | None = None
    """(n, C), or None if outputs do not interact."""


@dataclass(frozen=True)
class Members:
    """K members of a mixture at n data: all that a predictive distribution is made from.

    Leading dimensions (...) are candidates of a search.
    """

    outputs: Sequence[Tensor]
    """Outputs (n, C) of each network."""
    spreads: Sequence[Spread | None]
    """Covariance of the outputs; None for a plain ensemble."""
    weights: Tensor
    """(K,)"""
    divisors: Sequence[Tensor]
    """s_k (..., n, 1) or (..., 1, 1): divides logits, multiplies the standard deviations of a regression."""
    pooling: float | Tensor
    """c in `z + c (z_k - z)`, which contracts the members towards their mean z; (...) for candidates."""
    likelihoods: Sequence[Likelihood]
    """The noise of a regression may differ between members."""

    def scaled(self) -> tuple[Sequence[Tensor], Sequence[Spread | None]]:
        """Return means and spreads of the logits after division and pooling: `z_k = f_k / s_k`, then `z + c (z_k - z)`."""
        means = [outputs / divisor for outputs, divisor in zip(self.outputs, self.divisors, strict=True)]
        pairs = zip(self.spreads, self.divisors, strict=True)
        spreads = [None if spread is None else spread.divided(divisor) for spread, divisor in pairs]
        return pooled(means, self.weights, self.pooling), spreads


class Predictive(Protocol):
    """The predictive distribution of n data. Leading dimensions may be candidates of a search."""

    def point(self) -> Tensor:
        """Return probabilities (..., n, C), or means (..., n, D): the result of calling a posterior."""

    def scores(self, labels: Tensor) -> dict[str, Tensor]:
        """Return scores (..., m) of each datum, or of each known label of multi-label data."""


@dataclass(frozen=True)
class RegressionPredictive(ABC):
    """A mixture of K distributions for each of D outputs, in the targets' units, given by the moments of its components."""

    weights: Tensor
    """(K,)"""
    means: Tensor
    """(K, ..., n, D)"""
    variances: Tensor
    """(K, ..., n, D), noise included."""
    noises: Tensor
    """Variance (K, ..., n, D) of the noise, without scaling."""

    def point(self) -> Tensor:
        """Return the mixture's mean (..., n, D)."""
        return torch.einsum("k,k...->...", self.weights.to(self.means), self.means)

    def component(self, index: int) -> Self:
        """Return one component."""
        parts = {name: getattr(self, name)[index : index + 1] for name in ("means", "variances", "noises")}
        return replace(self, weights=torch.ones_like(self.weights[:1]), **parts)

    @abstractmethod
    def scores(self, labels: Tensor) -> dict[str, Tensor]:
        """Return scores (..., n) of each datum: its log loss "nll", and further scores by name."""

    @abstractmethod
    def log_density(self, targets: Tensor) -> Tensor:
        """Return the log density (..., n) of targets (n, D), all outputs together."""

    @abstractmethod
    def cdf(self, values: Tensor) -> Tensor:
        """Return the probability (..., n, D) that a target is at most `values`."""

    @abstractmethod
    def quantile(self, level: float) -> Tensor:
        """Return the value (..., n, D) that targets stay below with probability `level`."""

    @abstractmethod
    def crps(self, targets: Tensor) -> Tensor:
        """Return the continuous ranked probability score (..., n, D) of targets."""


LinkFunction = Callable[[Tensor, "Spread | None", "ClassificationLikelihood", int | None], Tensor]
"""Maps mean (..., n, C) and spread of the logits, the likelihood and a seed to probabilities (`mola.links`)."""


class Likelihood(ABC):
    """The meaning of a network's outputs."""

    name: str
    mutually_exclusive: bool = False
    """True for one of C classes, False for C binary labels."""
    classification: bool = True
    """True if labels are choices (classes, or yes and no), False for a regression."""
    default_rule: str = "nll"
    """Name of the tuning rule that is used where none is given."""

    def settings(self) -> dict[str, Any]:
        """Return arguments that rebuild the likelihood, as JSON."""
        return {}

    @abstractmethod
    def check_outputs(self, outputs: Tensor, ran: Ran = ()) -> Tensor:
        """Return the outputs of a network as rows (n, C), or raise `HeadError` if they do not fit.

        Args:
            outputs: as the network returned them.
            ran: linear layers that ran in a watched pass, to name the last in messages. If given, outputs are not tested for being
                probabilities: the watched pass detects operations after the last layer.
        """

    @abstractmethod
    def check_labels(self, labels: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Return labels in canonical form on the device of the outputs (n, C); `DataError` naming `where` otherwise."""

    def known(self, labels: Tensor) -> Tensor | None:
        """Return a mask (n,) of the data with at least one label, for checked labels; None if all must have one."""
        return None

    @abstractmethod
    def log_likelihood(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the log-likelihood (n,) of each datum's labels."""

    @abstractmethod
    def curvature(self, outputs: Tensor, labels: Tensor | None = None) -> OutputCurvature:
        """Return the second derivative of the negative log-likelihood at outputs (n, C); labels mark missing outputs."""

    @abstractmethod
    def predictive(self, members: Members, link: LinkFunction, seed: int | None = None) -> Predictive:
        """Return the mixture's predictive distribution; `seed` is for links that draw."""

    # Groups of training data, from whose centres distances are measured.

    def num_groups(self, outputs: int) -> int:
        """Return the number of groups: by default all data form one."""
        return 1

    def group(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Return the group (n,) of each datum in int64: by its label, or by the predicted class if it has no label."""
        return torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device)

    # Regression: the noise is chosen after the sums, so these differ there.

    def num_uncertain(self, outputs: int) -> int:
        """Return the number of a network's outputs that are uncertain."""
        return outputs

    def uncertain(self, weights: Tensor) -> Tensor:
        """Return the rows of a head's weights (C, P) whose outputs are uncertain."""
        return weights

    def label_sums(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return sums over labels, by name, from which the log-likelihood follows after the fit; empty if it is known at once."""
        return {}

    def fitted(self, sums: Sums) -> Self:
        """Return the likelihood once the sums of all training data are known."""
        return self

    def sums_at_noise(self, sums: Sums) -> Sums:
        """Return the sums with their curvature, which is summed at unit noise, at the noise of the likelihood."""
        return sums

    def total_log_likelihood(self, sums: Sums) -> float | None:
        """Return the log-likelihood of all training labels."""
        return sums.log_likelihood


class ClassificationLikelihood(Likelihood):
    """Classification: one of C classes, or each of C binary labels."""

    def member_probabilities(self, members: Members, link: LinkFunction, seed: int | None = None) -> list[Tensor]:
        """Return probabilities (..., n, C) of each member, after scaling and pooling."""
        means, spreads = members.scaled()
        return [link(mean, spread, self, seed) for mean, spread in zip(means, spreads, strict=True)]

    def predictive(self, members: Members, link: LinkFunction, seed: int | None = None) -> Predictive:
        """Return `sum_k w_k link(m_k, S_k)`."""
        return self.distribution(mixed(members.weights, self.member_probabilities(members, link, seed)))

    @abstractmethod
    def distribution(self, probs: Tensor) -> Predictive:
        """Return the predictive distribution with these probabilities (..., n, C)."""

    @abstractmethod
    def probabilities(self, logits: Tensor) -> Tensor:
        """Return probabilities (..., C) of logits (..., C)."""

    @abstractmethod
    def num_choices(self, outputs: int) -> int:
        """Return the number of choices of each question: C for one of C classes, 2 for a binary label."""

    @abstractmethod
    def choices(self, probs: Tensor) -> Tensor:
        """Return probabilities of all choices: (..., C) of classes, (..., C, 2) of no and yes."""

    @abstractmethod
    def targets(self, labels: Tensor) -> Tensor:
        """Return the right choices in int64, (n,) or (n, C); -1 where unknown."""

    def predicted(self, outputs: Tensor) -> Tensor:
        """Return the most probable choices, (n,) or (n, C), of outputs (n, C)."""
        return self.choices(self.probabilities(outputs)).argmax(-1)


class RegressionLikelihood(Likelihood):
    """Regression: each of D outputs has a distribution of its own."""

    classification = False
    mixture_type: type[RegressionPredictive]
    """Type of the predictive distribution, made from weights and moments."""


def mixed(weights: Tensor, members: Sequence[Tensor]) -> Tensor:
    """Return `sum_k w_k x_k`; a single member is returned unchanged."""
    if len(members) == 1:
        return members[0]
    total = weights[0].to(members[0]) * members[0]
    for weight, member in zip(weights[1:], members[1:], strict=True):
        total = total + weight.to(member) * member
    return total


def pooled(members: Sequence[Tensor], weights: Tensor, pooling: float | Tensor) -> Sequence[Tensor]:
    """Contract members (..., n, C) towards their weighted mean: `z + c (z_k - z)`. At c = 1 they are returned unchanged."""
    if not isinstance(pooling, Tensor) and pooling == 1:
        return members
    mean, c = mixed(weights, members), pooling[..., None, None] if isinstance(pooling, Tensor) else pooling
    return [mean + c * (member - mean) for member in members]


def matrix_of(outputs: Tensor, ran: Ran, expected: str) -> Tensor:
    """Return the outputs if they are a matrix; raise `HeadError` otherwise."""
    if outputs.dim() != 2:
        last = (
            f" Its last linear layer, {ran[-1][0]!r}, returns shape {tuple(ran[-1][1])}." if ran and ran[-1][0] else ""
        )
        single = " A single input needs a batch dimension: inputs[None]." if outputs.dim() == 1 else ""
        raise HeadError(
            f"expected {expected}, got shape {tuple(outputs.shape)}.{last}{single} Pass a network that returns the output of its last "
            f"linear layer without reshaping it."
        )
    return outputs
