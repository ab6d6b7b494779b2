r"""Bayesian optimisation: a regression posterior as a model of BoTorch, in the optional extra `molaplace[botorch]`.

In component k, the value of output d is :math:`m_{kd}(x) + \psi_k(x)^\top w_{kd}` with :math:`w_{kd} \sim \mathcal N(0, C_{kd})`, in the
units of the targets and after all settings (`molaplace.joint`). The values at q inputs are therefore a mixture of K multivariate
normals.

New observations change the weights of each component exactly, by Bayes' rule for a normal prior and normal noise :math:`\Sigma`:

.. math:: G = C \Psi^\top (\Psi C \Psi^\top + \Sigma)^{-1}, \qquad w \mapsto w + G (y - m - \Psi w), \qquad C \mapsto C - G \Psi C,

and multiply the weight of component k by its density of the observations. The features stay fixed, so a network that should learn from
new observations must be trained again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from molaplace.errors import DataError, OptionError, importing
from molaplace.joint import JointPrediction
from molaplace.laplace_mixture import LaplaceMixture
from molaplace.likelihoods import Gaussian
from molaplace.structures.base import LayerCurvature

with importing("Bayesian optimisation", "botorch", "botorch"):
    from botorch.models.model import FantasizeMixin, Model
    from botorch.posteriors.posterior import Posterior
    from botorch.sampling.get_sampler import GetSampler
    from botorch.sampling.normal import SobolQMCNormalSampler

__all__ = ["MixturePosterior", "PosteriorModel"]

JITTER = 1e-9
"""Jitter added to the diagonal of covariances before their Cholesky decomposition, relative to the mean diagonal entry. A covariance is
singular if inputs are equal or outnumber the features."""


def _root(covariance: Tensor) -> Tensor:
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    level = diagonal.mean(-1, keepdim=True).clamp_min(torch.finfo(covariance.dtype).tiny)
    return torch.linalg.cholesky(covariance + torch.diag_embed(JITTER * level.expand_as(diagonal)))


@dataclass(frozen=True)
class OutputWeights:
    """The weights of one component's outputs, given the observations."""

    shift: Tensor
    """Means w (..., m, P) of the weights."""
    covariance: Tensor
    """Covariances C (..., m, P, P) of the weights."""

    def mean(self, psi: Tensor) -> Tensor:
        """Return the means (..., q, m) of `psi' w` for features (..., q, P)."""
        return torch.einsum("...qp,...mp->...qm", psi, self.shift)

    def covariances(self, psi: Tensor) -> Tensor:
        """Return the covariances (..., m, q, q) of `psi' w` for features (..., q, P)."""
        return psi[..., None, :, :] @ self.covariance @ psi[..., None, :, :].mT

    def given(self, psi: Tensor, residual: Tensor, noise: Tensor) -> tuple[OutputWeights, Tensor]:
        """Return the weights given observations at features (..., q, P), and the log density (...) of the observations.

        Args:
            psi: features of the observed inputs.
            residual: observations minus the component's means before any observation, of shape (..., q, m).
            noise: variances (..., q, m) of the noise.
        """
        features = psi[..., None, :, :]
        projected = self.covariance @ features.mT  # (..., m, P, q)
        lower = torch.linalg.cholesky(features @ projected + torch.diag_embed(noise.mT))
        error = (residual - self.mean(psi)).mT[..., None]  # (..., m, q, 1)
        shift = (projected @ torch.cholesky_solve(error, lower)).squeeze(-1)
        half = torch.linalg.solve_triangular(lower, projected.mT, upper=False)  # (..., m, q, P)
        normal: Any = torch.distributions.MultivariateNormal(torch.zeros_like(error[..., 0]), scale_tril=lower)
        log_density = normal.log_prob(error[..., 0]).sum(-1)
        return OutputWeights(self.shift + shift, self.covariance - half.mT @ half), log_density


class MixturePosterior(Posterior):  # type: ignore[misc]
    """A mixture of K multivariate normals for the values (q, m) at q inputs, in batches.

    Every draw comes from one component, which the first base sample chooses according to the mixture's weights. Acquisition functions that
    use draws therefore see the mixture itself; analytic ones see its mean and variance, as if it were normal.

    Args:
        weights: weights (..., K) of the components.
        means: means (..., q, m) of each component.
        covariances: covariances (..., m, q, q) of each component.
    """

    def __init__(self, weights: Tensor, means: Sequence[Tensor], covariances: Sequence[Tensor]) -> None:
        batches = (means[0].shape[:-2], covariances[0].shape[:-3], weights.shape[:-1])
        self.batch_shape: torch.Size = torch.broadcast_shapes(*batches)  # type: ignore[no-untyped-call]
        self.weights: Tensor = weights.expand(*self.batch_shape, -1)
        self.means: list[Tensor] = [mean.expand(*self.batch_shape, *mean.shape[-2:]) for mean in means]
        self.covariances: Sequence[Tensor] = covariances

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.means[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the values."""
        return self.means[0].dtype

    @property
    def mean(self) -> Tensor:
        """Means (..., q, m) of the mixture."""
        return torch.einsum("...k,...kqm->...qm", self.weights, torch.stack(self.means, -3))

    @property
    def variance(self) -> Tensor:
        """Variances (..., q, m) of the mixture: within the components, plus the variance of their means."""
        within = torch.stack([c.diagonal(dim1=-2, dim2=-1).mT.expand_as(self.means[0]) for c in self.covariances], -3)
        between = (torch.stack(self.means, -3) - self.mean[..., None, :, :]).square()
        return torch.einsum("...k,...kqm->...qm", self.weights, within + between)

    @property
    def base_sample_shape(self) -> torch.Size:
        """Shape (..., q + 1, m) of one base sample. The first row chooses the component."""
        inputs, outputs = self.means[0].shape[-2:]
        return torch.Size([*self.batch_shape, inputs + 1, outputs])

    @property
    def batch_range(self) -> tuple[int, int]:
        """Dimensions of the base samples that batches share."""
        return 0, -2

    def _extended_shape(self, sample_shape: torch.Size = torch.Size()) -> torch.Size:  # noqa: B008
        return torch.Size([*sample_shape, *self.means[0].shape])

    def rsample_from_base_samples(self, sample_shape: torch.Size, base_samples: Tensor) -> Tensor:
        """Return draws (*sample_shape, ..., q, m) that are differentiable in the means and covariances."""
        normals = base_samples[..., 1:, :].mT[..., None]  # (..., m, q, 1)
        draws = torch.stack(
            [
                mean + (_root(covariance) @ normals).squeeze(-1).mT
                for mean, covariance in zip(self.means, self.covariances, strict=True)
            ],
            -1,
        )
        level = torch.special.ndtr(base_samples[..., 0, 0])
        index = (level[..., None] > self.weights.detach().cumsum(-1)[..., :-1]).sum(-1)
        return draws.gather(-1, index[..., None, None, None].expand(*draws.shape[:-1], 1)).squeeze(-1)

    def rsample(self, sample_shape: torch.Size | None = None) -> Tensor:
        """Return random draws (*sample_shape, ..., q, m)."""
        shape = torch.Size([1]) if sample_shape is None else sample_shape
        base_samples = torch.randn(*shape, *self.base_sample_shape, dtype=self.dtype, device=self.device)
        return self.rsample_from_base_samples(shape, base_samples)


@GetSampler.register(MixturePosterior)  # type: ignore[untyped-decorator]
def _sampler(posterior: MixturePosterior, sample_shape: torch.Size, *, seed: int | None = None) -> Any:
    return SobolQMCNormalSampler(sample_shape=sample_shape, seed=seed)


class PosteriorModel(Model, FantasizeMixin):  # type: ignore[misc]
    """A regression posterior as a model of BoTorch, for acquisition functions and `optimize_acqf`.

    The model predicts the targets in their units. Its features are fixed: `condition_on_observations` and `fantasize` change the last
    layers only, by Bayes' rule.

    Args:
        regression: a posterior from `mola.fit` with the likelihood "gaussian".
    """

    def __init__(self, regression: LaplaceMixture) -> None:
        super().__init__()
        if not isinstance(regression.likelihood, Gaussian):
            raise OptionError(
                f"must be a regression posterior with normal noise, got likelihood {regression.likelihood.name!r}. Fit with "
                f"likelihood='gaussian'.",
                argument="regression",
            )
        layers = [component.require_layer("a model of BoTorch") for component in regression.components]
        factors = regression.settings.noise_factors
        curvatures = [layer.curvature_at(factor) for layer, factor in zip(layers, factors, strict=True)]
        if not all(isinstance(curvature, LayerCurvature) for curvature in curvatures):
            raise OptionError("must be a posterior over last layers, from mola.fit.", argument="regression")
        self.regression: LaplaceMixture = regression
        self.likelihood = None  # BoTorch asks for the noise model of Gaussian processes
        self.log_weights: Tensor = regression.weights.log()
        self.output_weights: list[OutputWeights] = []
        outputs = curvatures[0].outputs
        scale = regression.likelihood.units(outputs)[1]
        for curvature, precision in zip(curvatures, regression.prior_precision, strict=True):
            assert isinstance(curvature, LayerCurvature)
            covariance = torch.stack([curvature.class_covariance(precision, output) for output in range(outputs)])
            covariance = covariance * scale.square().to(covariance)[:, None, None]
            self.output_weights.append(OutputWeights(covariance.new_zeros(outputs, curvature.features), covariance))

    @property
    def num_outputs(self) -> int:
        """Number of targets m."""
        return self.output_weights[0].covariance.shape[-3]

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of the observations on which the model is conditioned."""
        return torch.Size(
            torch.broadcast_shapes(self.output_weights[0].shift.shape[:-2], self.log_weights.shape[:-1])  # type: ignore[no-untyped-call]
        )

    def _features(self, inputs: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        # Return each component's features (..., q, P), means (..., q, m) before any observation, and noise variances (..., q, m).
        parameter = next(self.regression.parameters(), inputs)
        rows = self.regression.capture(inputs.flatten(0, -2).to(parameter.dtype)).select()
        joint = JointPrediction.of(self.regression.members(self.regression.project(rows)), self.regression.likelihood)
        shape = inputs.shape[:-1]

        def in_batches(values: Tensor) -> Tensor:
            return values.reshape(*shape, values.shape[-1])

        features = [in_batches(phi * factor) for phi, factor in zip(rows.phi, joint.latent.factors, strict=True)]
        noises = [in_batches(noise) for noise in joint.noises.unbind(1)]
        return features, [in_batches(mean) for mean in joint.latent.means], noises

    def posterior(
        self,
        X: Tensor,  # noqa: N803
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """Return the joint distribution of the targets at inputs (..., q, d).

        Args:
            X: inputs (..., q, d).
            output_indices: indices of the targets; by default, all of them.
            observation_noise: whether to add the noise, or variances (..., q, m) to add instead of it.
            posterior_transform: a BoTorch transform of the result.
        """
        indices = list(range(self.num_outputs)) if output_indices is None else output_indices
        features, priors, noises = self._features(self.transform_inputs(X))
        means = []
        covariances = []
        for psi, prior, noise, weights in zip(features, priors, noises, self.output_weights, strict=True):
            matrices = weights.covariances(psi)
            if isinstance(observation_noise, Tensor):
                matrices = matrices + torch.diag_embed(observation_noise.expand_as(noise).mT)
            elif observation_noise:
                matrices = matrices + torch.diag_embed(noise.mT)
            means.append((prior + weights.mean(psi))[..., indices].to(X.dtype))
            covariances.append(matrices[..., indices, :, :].to(X.dtype))
        posterior = MixturePosterior(self.log_weights.softmax(-1).to(means[0]), means, covariances)
        return posterior if posterior_transform is None else posterior_transform(posterior)

    def condition_on_observations(
        self,
        X: Tensor,  # noqa: N803
        Y: Tensor,  # noqa: N803
        noise: Tensor | None = None,
        **options: Any,
    ) -> PosteriorModel:
        """Return the model given new observations, by Bayes' rule for the last layers; the features stay as they are.

        Args:
            X: inputs (..., q, d).
            Y: targets (..., q, m), which may have more batch dimensions than the inputs.
            noise: variances (..., q, m) of the observations; by default, the noise of the likelihood.
            **options: none; other keyword arguments raise `OptionError`.
        """
        if options:
            raise OptionError(f"unknown arguments: {', '.join(options)}. Pass X, Y and noise.")
        if Y.shape[-2:] != (X.shape[-2], self.num_outputs):
            raise DataError(f"expected targets (..., {X.shape[-2]}, {self.num_outputs}), got {tuple(Y.shape)}.")
        features, priors, noises = self._features(self.transform_inputs(X))
        updated = []
        log_densities = []
        for psi, prior, variances, weights in zip(features, priors, noises, self.output_weights, strict=True):
            conditioned, log_density = weights.given(
                psi, Y.to(prior) - prior, variances if noise is None else noise.to(prior)
            )
            updated.append(conditioned)
            log_densities.append(log_density)
        model = PosteriorModel(self.regression)
        if hasattr(self, "input_transform"):
            model.input_transform = self.input_transform
        model.output_weights = updated
        model.log_weights = (self.log_weights.to(log_densities[0]) + torch.stack(log_densities, -1)).log_softmax(-1)
        return model
