r"""The interface of a likelihood: validation of outputs and labels, log-likelihood, curvature, and predictive distribution.

For one datum, the curvature of the negative log-likelihood with respect to the outputs f always has the form

.. math:: \Lambda = \mathrm{diag}(d) + L(u u^\top), \qquad L(W) = \mathrm{diag}(W 1) - W,

with a separate part d that acts on each output alone, and a part that couples every pair of outputs. The coupling part is the
Laplacian of the graph with edge weights :math:`u_i u_j`. For a softmax, :math:`\mathrm{diag}(p) - p p^\top = L(p p^\top)` has no
separate part, and

* :math:`\Lambda 1 = 0` holds by construction at any numerical precision (the softmax ignores a shift common to all outputs);
* the diagonal :math:`p_i (1 - p_i) = \sum_{j \ne i} p_i p_j` is a sum of positive terms, so no digits are lost when a network is
  almost certain.

Independent outputs (Bernoulli, Gaussian) have only the separate part.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from molaplace.errors import HeadError, OptionError
from molaplace.likelihoods.predictive import ClassificationPredictive, Predictive, RegressionPredictive
from molaplace.numerics import Generator
from molaplace.options import check_number
from molaplace.sums import Sums

Ran = Sequence[tuple[str, torch.Size]]
"""Names and output shapes of the linear layers that ran in a watched forward pass."""


@dataclass(frozen=True)
class OutputCurvature:
    """The curvature `diag(separate) + L(coupling coupling')` with respect to the C outputs, for each of n data points."""

    separate: Tensor | None = None
    """Separate curvature (n, C) of each output, or None if the outputs have only coupled curvature."""
    coupling: Tensor | None = None
    """Coupling (n, C) of the outputs, or None if the outputs do not interact."""


class OutputSpread(Protocol):
    """The covariance of a network's outputs at n data points, as likelihoods and links use it (`mola.structures.base.Spread`)."""

    @property
    def noise_size(self) -> int:
        """Number of standard normal variables in one draw of `marginal_deviations`."""

    def variance(self, *, centred: bool = False) -> Tensor:
        """Return the variance (n, C) of each output; if `centred` is True, after their mean is subtracted."""

    def covariance(self, *, centred: bool = False) -> Tensor:
        """Return the covariance (n, C, C) of the outputs; if `centred` is True, after their mean is subtracted."""

    def marginal_deviations(self, noise: Tensor) -> Tensor:
        """Turn standard normals (S, noise_size) into deviations (n, S, C) of each datum's outputs, up to a common shift."""

    def deviations(self, count: int, generator: Generator) -> Tensor:
        """Return deviations (n, count, C) of the outputs under draws of the weights."""

    def with_divided_logits(self, divisor: Tensor) -> OutputSpread:
        """Return the covariance after dividing each datum's outputs by its entry in `divisor` (n, 1)."""


@dataclass(frozen=True)
class Members:
    """The predictions of a mixture's K members at n data points, from which the predictive distribution is computed."""

    outputs: Sequence[Tensor]
    """Outputs (n, C) of each network."""
    spreads: Sequence[OutputSpread | None]
    """Covariance of each network's outputs, or None for a plain ensemble."""
    weights: Tensor
    """Mixture weights (K,)."""
    divisors: Sequence[Tensor]
    """Divisors s_k of the logits, of shape (n, 1) or (1, 1); in regression, they multiply the standard deviations."""
    pooling: float
    """Pooling coefficient c in `z + c (z_k - z)`, which contracts the members towards their mean z."""
    likelihoods: Sequence[Likelihood]
    """Likelihood of each member. In regression, the noise may differ between members."""
    temperature: float = 1.0
    """Temperature T, a factor of every divisor. In regression, it multiplies the noise."""
    noise_factors: Sequence[float] = ()
    """In regression, the factor of each member's noise."""

    def scaled(self) -> tuple[Sequence[Tensor], Sequence[OutputSpread | None]]:
        """Return the means and spreads of the logits after division (`z_k = f_k / s_k`) and pooling (`z + c (z_k - z)`)."""
        means = [outputs / divisor for outputs, divisor in zip(self.outputs, self.divisors, strict=True)]
        pairs = zip(self.spreads, self.divisors, strict=True)
        spreads = [None if spread is None else spread.with_divided_logits(divisor) for spread, divisor in pairs]
        return pooled(means, self.weights, self.pooling), spreads


@dataclass(frozen=True)
class LatentFunctions:
    """The mixture's latent functions at n data points: the logits as links receive them or, in regression, the noise-free targets.

    The function of member k is `means[k] + factors[k] * scale * (phi_k' w)`, where w is the random offset of the member's weights.
    """

    means: Sequence[Tensor]
    """Means (n, C) of each member's function."""
    factors: Sequence[Tensor]
    """Factors (n, 1) or (1, 1) of each member's deviations."""
    scale: Tensor
    """Factors (C,) of the deviations, shared by all data points."""
    noises: Sequence[Tensor] | None = None
    """Variances (n, C) of the noise, which is independent between data points; None if the likelihood has no additive noise."""


InverseLink = Callable[[Tensor], Tensor]
"""A function from logits (..., C) to probabilities (..., C), such as the softmax."""

LinkFunction = Callable[[Tensor, OutputSpread | None, InverseLink, int | None], Tensor]
"""A function that computes probabilities from the mean (n, C) and spread of the logits, the inverse link and a seed
(`mola.links`)."""


class Likelihood(ABC):
    """The interface of a likelihood, which defines the meaning of a network's outputs."""

    name: str
    mutually_exclusive: bool = False
    """True if the outputs represent C mutually exclusive classes; False for binary labels and for regression."""
    classification: bool = True
    """True for classification (classes or binary labels), False for regression."""
    estimated: bool = False
    """True if the noise was estimated from the training data, so that rules may change it."""
    default_rule: str = "nll"
    """Name of the default tuning rule."""
    output_noun: tuple[str, str] = ("output", "outputs")
    """What an output is called in messages, as singular and plural."""

    def settings(self) -> dict[str, Any]:
        """Return the constructor arguments that differ from their defaults as a JSON-serialisable dictionary.

        Likelihoods that are not dataclasses have none, unless they override this method.
        """
        default = type(self)() if is_dataclass(self) else self
        settings = {}
        for name in getattr(self, "__dataclass_fields__", ()):
            value = getattr(self, name)
            if value != getattr(default, name):
                settings[name] = list(value) if isinstance(value, tuple) else value
        return settings

    @abstractmethod
    def check_outputs(self, outputs: Tensor, ran: Ran = ()) -> Tensor:
        """Return the outputs of a network as rows (n, C), or raise `HeadError` if the outputs do not suit the likelihood.

        Args:
            outputs: outputs returned by the network.
            ran: linear layers that ran in a watched forward pass. Error messages mention the last of these layers. If `ran` is given,
                outputs that look like probabilities are not rejected, because the watched pass already detects operations after the
                last layer.
        """

    @abstractmethod
    def check_labels(self, labels: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Return labels in canonical form on the device of the outputs (n, C), or raise a `DataError` that mentions `where`."""

    def known(self, labels: Tensor) -> Tensor | None:
        """Return a mask (n,) of the data that have at least one label, or None if every datum has one.

        The labels must come from `check_labels`.
        """
        return None

    def rows_of_scores(self, labels: Tensor) -> Tensor:
        """Return the index (m,) of the datum to which each score belongs, because multi-label data have one score for each known label."""
        return torch.arange(len(labels), device=labels.device)

    @abstractmethod
    def log_likelihood(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the log-likelihood (n,) of each datum's labels."""

    @abstractmethod
    def curvature(self, outputs: Tensor, labels: Tensor | None = None) -> OutputCurvature:
        """Return the Fisher information with respect to outputs (n, C): the expected Hessian of the negative log-likelihood.

        The result depends on the labels only through their weights in the loss, and an output without a label has no curvature.
        """

    @abstractmethod
    def latent(self, members: Members) -> LatentFunctions:
        """Return the latent functions of the mixture's members after temperature, distance and pooling."""

    @abstractmethod
    def predictive(self, members: Members, link: LinkFunction, seed: int | None = None) -> Predictive:
        """Return the mixture's predictive distribution. Links that draw samples are seeded with `seed`."""

    # Groups of training data. Distances are measured from the centres of the groups.

    def num_groups(self, outputs: int) -> int:
        """Return the number of groups into which the training data are divided. By default, all data form one group."""
        return 1

    def group(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Return each datum's group (n,) as int64: its label or, if it has none, the predicted class."""
        return torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device)

    # Methods that regression likelihoods override, because their noise is chosen after the sums are computed.

    def num_uncertain(self, outputs: int) -> int:
        """Return how many of a network's outputs are uncertain."""
        return outputs

    def uncertain(self, weights: Tensor) -> Tensor:
        """Return the rows of a head's weights (C, P) that belong to uncertain outputs: all of them, except for predicted variances."""
        return weights

    def label_sums(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return sums over labels, keyed by name, from which the log-likelihood is computed after the fit; none by default."""
        return {}

    def fitted(self, sums: Sums) -> Self:
        """Return the likelihood with parameters estimated from the sums over all the training data; only the Gaussian has any."""
        return self

    def as_specified(self) -> Self:
        """Return the likelihood without parameters estimated from the training data."""
        return self

    def nonnegative(self, sums: Sums) -> Sequence[Tensor]:
        """Return the label sums that are not negative for any data."""
        return []

    def sums_at_noise(self, sums: Sums) -> Sums:
        """Return the sums with the curvature converted from unit noise to the likelihood's noise level, if it has one."""
        return sums

    def total_log_likelihood(self, sums: Sums, noise_factor: float = 1.0) -> float | None:
        """Return the log-likelihood of all training labels; in regression, after the noise has been multiplied by a factor."""
        return sums.log_likelihood

    def noise_levels(self, width: int | None = None) -> Tensor:
        """Return the noise (width,) of the outputs, in the targets' units; without a width, as many numbers as the noise has."""
        raise OptionError(f"likelihood {self.name!r} has no noise. Only the Gaussian likelihood has noise.")


class ClassificationLikelihood(Likelihood):
    """A likelihood for classification into one of C classes, or for C binary labels."""

    def latent(self, members: Members) -> LatentFunctions:
        """Return the logits after division and pooling."""
        means, _ = members.scaled()
        return LatentFunctions(
            means, [1 / divisor for divisor in members.divisors], means[0].new_ones(means[0].shape[-1])
        )

    def member_probabilities(self, members: Members, link: LinkFunction, seed: int | None = None) -> list[Tensor]:
        """Return the probabilities (n, C) that each member predicts after scaling and pooling."""
        probabilities = []
        for mean, spread in zip(*members.scaled(), strict=True):
            probabilities.append(link(mean, spread, self.probabilities, seed))
        return probabilities

    def predictive(self, members: Members, link: LinkFunction, seed: int | None = None) -> ClassificationPredictive:
        """Return `sum_k w_k link(m_k, S_k)`."""
        return self.distribution(mixed(members.weights, self.member_probabilities(members, link, seed)))

    @abstractmethod
    def distribution(self, probs: Tensor) -> ClassificationPredictive:
        """Return the predictive distribution with the given probabilities (n, C)."""

    @abstractmethod
    def probabilities(self, logits: Tensor) -> Tensor:
        """Return probabilities (..., C) for logits (..., C)."""

    def predicted(self, outputs: Tensor) -> Tensor:
        """Return the most probable choices, of shape (n,) or (n, C), for outputs (n, C)."""
        return self.distribution(self.probabilities(outputs)).predicted()

    @abstractmethod
    def targets(self, labels: Tensor) -> Tensor:
        """Return the true choices as int64, of shape (n,) or (n, C), with -1 for missing labels."""

    @abstractmethod
    def num_choices(self, outputs: int) -> int:
        """Return the number of choices: C for C exclusive classes, or 2 for binary labels."""

    @abstractmethod
    def epistemic_share(self, members: Members, seed: int = 0) -> Tensor:
        """Return the share of a mixture's entropy that is mutual information between the label and the weights.

        The share lies between 0 and 1 for every link. Its shape is (n,), or (n, C) for binary labels. Likelihoods that draw samples
        are seeded with `seed`, and all members share the draws.
        """

    @abstractmethod
    def margin(self, logits: Tensor) -> Tensor:
        """Return by how much the logits (..., C) favour the predicted choice, of shape (...), averaged over binary labels."""

    @abstractmethod
    def energy(self, logits: Tensor) -> Tensor:
        """Return the free energy (...) of logits (..., C); a higher energy means a more outlying input."""


class RegressionLikelihood(Likelihood):
    """A likelihood for regression, with an independent distribution for each of D outputs."""

    classification = False

    mixture_type: type[RegressionPredictive]
    """Class of the predictive distribution. Its constructor takes the components' weights and moments."""

    def latent(self, members: Members) -> LatentFunctions:
        """Return the pooled outputs, whose deviations are multiplied by the divisors; override it if outputs are not noise-free targets."""
        means = pooled(members.outputs, members.weights, members.pooling)
        return LatentFunctions(means, members.divisors, means[0].new_ones(means[0].shape[-1]))

    def check_targets(self, labels: Tensor, means: Tensor, where: str) -> Tensor:
        """Return the labels in canonical form, given only predicted means (n, D), or raise a `DataError` that mentions `where`."""
        return self.check_labels(labels, means, where)

    def of_means(self, weights: Tensor, means: Tensor) -> RegressionPredictive:
        """Return the mixture of members that predict only means (n, K, D), or raise `OptionError` if means do not determine it."""
        raise OptionError(
            f"likelihood {self.name!r} needs more than the predictors' means. Wrap the networks in mola.ensemble."
        )


def loss_weights(values: Any, argument: str) -> tuple[float, ...]:
    """Return weights of a loss as a tuple; raise `OptionError` unless they are finite, not negative and not all 0."""
    try:
        items = values.tolist() if hasattr(values, "tolist") else values
        weights = tuple(float(item) for item in (items if isinstance(items, (list, tuple)) else [items]))
    except (TypeError, ValueError):
        weights = ()
    if not weights or not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise OptionError(
            f"must be finite numbers that are not negative and not all 0, got {values!r}.", argument=argument
        )
    return weights


def check_label_smoothing(value: float) -> float:
    """Return the label smoothing, or raise `OptionError` unless it is a number from 0 to 1."""
    return check_number(value, "label_smoothing", 0, 1, "0 leaves labels unchanged.")


def mixed(weights: Tensor, members: Sequence[Tensor]) -> Tensor:
    """Return `sum_k w_k x_k`. A single member is returned unchanged."""
    if len(members) == 1:
        return members[0]
    total = weights[0].to(members[0]) * members[0]
    for weight, member in zip(weights[1:], members[1:], strict=True):
        total = total + weight.to(member) * member
    return total


def pooled(members: Sequence[Tensor], weights: Tensor, pooling: float) -> Sequence[Tensor]:
    """Contract members z_k (n, C) towards their weighted mean z: `z + c (z_k - z)`. If c = 1, return them unchanged."""
    if pooling == 1:
        return members
    mean = mixed(weights, members)
    return [mean + pooling * (member - mean) for member in members]


def matrix_of(outputs: Tensor, ran: Ran, expected: str) -> Tensor:
    """Return the outputs if they are a matrix; otherwise, raise `HeadError`."""
    if outputs.dim() != 2:
        last = (
            f" Its last linear layer, {ran[-1][0]!r}, returns shape {tuple(ran[-1][1])}." if ran and ran[-1][0] else ""
        )
        single = " A single input needs a batch dimension: inputs[None]." if outputs.dim() in (1, 3) else ""
        raise HeadError(
            f"expected {expected}, got shape {tuple(outputs.shape)}.{last}{single} Pass a network that returns the output of its last "
            f"linear layer without reshaping it."
        )
    return outputs
