r"""Joint predictions: the distribution of the latent functions at several inputs together.

In component k, the last layer's weights are normal, so the values of its latent function at n inputs are jointly normal. With features
:math:`\phi`, weight covariance :math:`\Sigma_k` and divisors :math:`s_k` (`molaplace.settings`),

.. math:: \mathrm{Cov}[f_{kc}(x), f_{kd}(x')] = a_k(x)\, a_k(x')\, b_c\, b_d\; \phi_k(x)^\top \Sigma_{k,cd}\, \phi_k(x').

The latent functions are the functions that `predict` uses, after temperature, distance and pooling:

* In classification, they are the logits that the link receives, so :math:`a_k = 1 / s_k` and :math:`b = 1`. At temperature 1, pooling 1
  and distance exponent 0, their means and variances are `logit_mean` and `logit_variance` of `predict`.
* In regression, they are the targets without noise, in the targets' units, so :math:`a_k = s_k`, and b is the scale of the targets. The
  noise is separate: the variances plus the noise are `component_variance` of `predict`. A distance exponent multiplies both; `predict`
  counts the growth of the noise as epistemic.

The mixture is a mixture of K multivariate normals. Matrices are computed when they are requested. With a Kronecker structure, the
covariance is a product of an (n, n) and a (C, C) matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from molaplace.errors import OptionError
from molaplace.likelihoods import Likelihood
from molaplace.likelihoods.base import LatentFunctions, Members, RegressionLikelihood, mixed
from molaplace.numerics import check_generator, standard_normals
from molaplace.options import whole_number
from molaplace.structures.base import WEIGHTS_AT_ONCE, Spread


@dataclass(frozen=True)
class JointPrediction:
    """The joint distribution of a mixture's latent functions at n inputs; returned by `posterior.joint`.

    All tensors are in float64 and, if an input requires gradients, differentiable. For dense outputs, n counts the positions of all inputs,
    ordered by input and then by position.
    """

    weights: Tensor
    """Mixture weights (K,)."""
    latent: LatentFunctions
    """Means, factors and noise of each component."""
    spreads: Sequence[Spread | None]
    """Covariance of each network's outputs before scaling, or None for a plain ensemble."""
    likelihood: Likelihood

    @staticmethod
    def of(members: Members, likelihood: Likelihood) -> JointPrediction:
        """Return the joint prediction of a mixture's members."""
        spreads: Any = members.spreads
        weights = members.weights.to(members.outputs[0])
        return JointPrediction(weights, likelihood.latent(members), spreads, likelihood)

    def __len__(self) -> int:
        return len(self.latent.means[0])

    def __repr__(self) -> str:
        inputs, components, outputs = self.means.shape
        return f"JointPrediction({components} components, {inputs} inputs, {outputs} outputs)"

    # --- components -------------------------------------------------------------------------------------------------

    @property
    def means(self) -> Tensor:
        """Means (n, K, C) of the components."""
        return torch.stack(list(self.latent.means), 1)

    @property
    def variances(self) -> Tensor:
        """Variances (n, K, C) of the components, without noise."""
        return torch.stack([self._scaled_variance(index) for index in range(len(self.spreads))], 1)

    def _scaled_variance(self, index: int) -> Tensor:
        spread = self.spreads[index]
        if spread is None:
            return torch.zeros_like(self.latent.means[index])
        return spread.variance() * (self.latent.factors[index] * self.latent.scale).square()

    @property
    def noises(self) -> Tensor:
        """Variances (n, K, D) of the noise in regression, which is independent between inputs."""
        if self.latent.noises is None:
            raise OptionError(
                f"likelihood {self.likelihood.name!r} has no additive noise. Draw functions with posterior.joint(inputs).sample(n), "
                f"and labels from the probabilities of each function."
            )
        return torch.stack(list(self.latent.noises), 1)

    def output_covariances(self, output: int = 0) -> Tensor:
        """Return each component's covariances (K, n, n) of one output between the inputs, without noise."""
        outputs = len(self.latent.scale)
        if not -outputs <= output < outputs:
            raise OptionError(f"must be an index below {outputs}, got {output!r}.", argument="output")
        column = output % outputs
        matrices = []
        for mean, factor, spread in self._parts():
            if spread is None:
                matrices.append(mean.new_zeros(len(mean), len(mean)))
                continue
            output_only = slice(column, column + 1)
            matrix = spread.curvature.cross(spread.z, spread.z, spread.precision, outputs=output_only)[:, 0, :, 0]
            matrices.append(matrix * factor * factor.mT * self.latent.scale[column].square())
        return torch.stack(matrices)

    def covariances(self) -> Tensor:
        """Return each component's covariances (K, n, C, n, C) between all outputs at all inputs, without noise."""
        matrices = []
        for mean, factor, spread in self._parts():
            if spread is None:
                matrices.append(mean.new_zeros(*mean.shape, *mean.shape))
                continue
            scale = (factor * self.latent.scale).expand_as(mean)
            matrix = spread.curvature.cross(spread.z, spread.z, spread.precision)
            matrices.append(matrix * scale[:, :, None, None] * scale)
        return torch.stack(matrices)

    def kronecker_factors(self) -> list[tuple[Tensor, Tensor]]:
        """Return, for each component, matrices (n, n) and (C, C) whose Kronecker product is its covariance.

        Only the structures "kron" and "kron-diag" have such factors; other structures raise `OptionError`.
        """
        factors = []
        for _, factor, spread in self._parts():
            product = None if spread is None else spread.curvature.kronecker_factors(spread.z, spread.precision)
            if product is None:
                raise OptionError(
                    "the covariance is not a Kronecker product. Fit with structure='kron' or structure='kron-diag', or use "
                    "covariances() or output_covariances(output)."
                )
            inputs, outputs = product
            scale = self.latent.scale
            factors.append((inputs * factor * factor.mT, outputs * scale[:, None] * scale))
        return factors

    def _parts(self) -> Iterator[tuple[Tensor, Tensor, Spread | None]]:
        return zip(self.latent.means, self.latent.factors, self.spreads, strict=True)

    # --- the mixture ------------------------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        """Mean (n, C) of the mixture."""
        return mixed(self.weights, self.latent.means)

    def covariance(self, output: int | None = None) -> Tensor:
        """Return the mixture's covariances, without noise: within the components, plus the covariance of the components' means.

        Args:
            output: index of one output. By default, all outputs.

        Returns:
            Covariances (n, n) of the output between the inputs or, for all outputs, (n, C, n, C).
        """
        deviations = self.means - self.mean[:, None]
        if output is None:
            between = torch.einsum("k,nkc,mkd->ncmd", self.weights, deviations, deviations)
            return torch.einsum("k,kncmd->ncmd", self.weights, self.covariances()) + between
        columns = deviations[..., output]
        between = torch.einsum("k,nk,mk->nm", self.weights, columns, columns)
        return torch.einsum("k,knm->nm", self.weights, self.output_covariances(output)) + between

    def sample(self, n: int, *, noise: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Draw functions from the posterior and return their values (S, n, C) at the inputs.

        The values of one draw belong to one function: first a component is drawn according to its weight, then its weights. No matrix
        over the inputs is computed.

        Args:
            n: number of draws S.
            noise: in regression, whether to add noise, which gives draws of the targets.
            generator: random number generator on the CPU; by default, torch's default generator.
        """
        count = whole_number(n, "n")
        check_generator(generator)
        noises = self.noises if noise else None
        choice = torch.multinomial(self.weights.detach().cpu(), count, replacement=True, generator=generator)
        values: list[Tensor] = [self.latent.means[0]] * count
        for index, (mean, factor, spread) in enumerate(self._parts()):
            for draws in torch.split((choice == index).nonzero().flatten(), self._draws_at_once(spread)):
                drawn = mean.expand(len(draws), -1, -1)
                if spread is not None and len(draws):
                    deviations = spread.deviations(len(draws), generator).movedim(1, 0)
                    drawn = drawn + factor * self.latent.scale * deviations
                if noises is not None:
                    drawn = drawn + noises[:, index].sqrt() * standard_normals(drawn.shape, generator).to(drawn)
                for draw, value in zip(draws.tolist(), drawn, strict=True):
                    values[draw] = value
        return torch.stack(values)

    @staticmethod
    def _draws_at_once(spread: Spread | None) -> int:
        if spread is None:
            return WEIGHTS_AT_ONCE
        return max(1, WEIGHTS_AT_ONCE // (spread.curvature.outputs * spread.curvature.features))

    def log_prob(self, targets: Any) -> Tensor:
        """Return the joint log density, in nats, of the noisy targets (n, D) of all inputs; only for regression with normal noise.

        In the mixture, the targets of all inputs come from the same component. A component's outputs are independent.
        """
        noises = self.noises
        assert isinstance(self.likelihood, RegressionLikelihood)
        values = self.likelihood.check_targets(
            torch.as_tensor(targets, device=self.weights.device), self.latent.means[0], "the targets"
        )
        total = self.weights.log()
        for output in range(values.shape[1]):
            covariances = self.output_covariances(output) + torch.diag_embed(noises[..., output].T)
            means = self.means[..., output].T
            normals: Any = torch.distributions.MultivariateNormal(means, covariances, validate_args=False)
            total = total + normals.log_prob(values[:, output])
        return torch.logsumexp(total, 0)
