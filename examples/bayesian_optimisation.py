"""A regression posterior as a model of BoTorch, and Bayesian optimisation with it.

    pip install molaplace botorch
    python examples/bayesian_optimisation.py --steps 20

`PosteriorModel` gives acquisition functions the joint distribution of the target at several inputs (`posterior.joint`), a mixture of K
multivariate normals, with its gradients. To use it in your own code, copy this file and import it. The script minimises the Branin
function: each step trains three small networks a little on all evaluations so far, fits a posterior, and evaluates the function where
the expected improvement is largest. benchmarks/bayesian_optimisation.py compares it with a Gaussian process.
"""

import argparse
import copy
import warnings

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.posteriors.posterior import Posterior
from botorch.sampling.get_sampler import GetSampler
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.test_functions import Branin
from torch import Tensor, nn

import molaplace as mola

JITTER = 1e-9
"""Added to the diagonal of covariances, relative to its mean: equal inputs have a singular covariance."""


class MixturePosterior(Posterior):
    """A mixture with weights (K,) of normals with means (K, ..., q) and covariances (K, ..., q, q)."""

    def __init__(self, weights: Tensor, means: Tensor, covariances: Tensor):
        self.weights = weights
        self.means = means
        self.covariances = covariances

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.means.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return self.means.dtype

    @property
    def mean(self) -> Tensor:
        """Means (..., q, 1) of the mixture."""
        return torch.einsum("k,k...->...", self.weights, self.means)[..., None]

    @property
    def variance(self) -> Tensor:
        """Variances (..., q, 1): those of the components, and those of their means."""
        variances = self.covariances.diagonal(dim1=-2, dim2=-1) + (self.means - self.mean[..., 0]).square()
        return torch.einsum("k,k...->...", self.weights, variances)[..., None]

    @property
    def base_sample_shape(self) -> torch.Size:
        """Shape (..., q + 1, 1) of a base sample, whose first row chooses the component."""
        return torch.Size([*self.means.shape[1:-1], self.means.shape[-1] + 1, 1])

    @property
    def batch_range(self) -> tuple[int, int]:
        """Dimensions of the base samples that batches share."""
        return 0, -2

    def _extended_shape(self, sample_shape: torch.Size = torch.Size()) -> torch.Size:  # noqa: B008
        return torch.Size([*sample_shape, *self.means.shape[1:], 1])

    def rsample_from_base_samples(self, sample_shape: torch.Size, base_samples: Tensor) -> Tensor:
        """Return draws (*sample_shape, ..., q, 1), each from one component."""
        level = self.covariances.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(1e-300)
        roots = torch.linalg.cholesky(self.covariances + JITTER * level * torch.eye(self.means.shape[-1]).to(level))
        pairs = zip(self.means, roots, strict=True)
        draws = torch.cat([mean[..., None] + root @ base_samples[..., 1:, :] for mean, root in pairs], -1)
        choice = torch.special.ndtr(base_samples[..., :1, :]) > self.weights.detach().cumsum(0)[:-1]
        return draws.gather(-1, choice.sum(-1, keepdim=True).expand(*draws.shape[:-1], 1))

    def rsample(self, sample_shape: torch.Size = torch.Size([1])) -> Tensor:  # noqa: B008
        """Return random draws (*sample_shape, ..., q, 1)."""
        return self.rsample_from_base_samples(
            sample_shape, torch.randn(*sample_shape, *self.base_sample_shape).to(self.means)
        )


@GetSampler.register(MixturePosterior)
def sampler(posterior: MixturePosterior, sample_shape: torch.Size, *, seed: int | None = None):
    """Return the sampler that acquisition functions use."""
    return SobolQMCNormalSampler(sample_shape=sample_shape, seed=seed)


class PosteriorModel(Model):
    """A regression posterior with one target as a model of BoTorch, given observations X (n, d) and Y (n, 1) made after the fit."""

    num_outputs = 1
    batch_shape = torch.Size()

    def __init__(self, regression, X=None, Y=None):  # noqa: N803
        super().__init__()
        self.regression = regression
        self.X = X
        self.Y = Y

    def posterior(self, X, output_indices=None, observation_noise=False, posterior_transform=None):  # noqa: N803
        """Return the distribution of the target at inputs (..., q, d), jointly for each q of them."""
        rows = X.flatten(0, -2) if self.X is None else torch.cat([self.X, X.flatten(0, -2)])
        joint = self.regression.joint(rows.to(next(self.regression.parameters()).dtype))
        (means,) = joint.means.mT.unbind(1)  # (n, K): one target
        weights, means, noises, covariances = (
            joint.weights,
            means.T,
            joint.noises[..., 0].T,
            joint.output_covariances(0),
        )
        if self.X is not None:
            weights, means, covariances = given(self.Y[:, 0], weights, means, covariances, noises)
        if observation_noise:
            covariances = covariances + torch.diag_embed(noises[:, -means.shape[1] :])
        q = X.shape[-2]
        blocks = covariances.unflatten(2, (-1, q)).unflatten(1, (-1, q)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
        shape = (len(weights), *X.shape[:-1])
        result = MixturePosterior(weights.to(X), means.reshape(shape).to(X), blocks.reshape(*shape, q).to(X))
        return result if posterior_transform is None else posterior_transform(result)

    def condition_on_observations(self, X, Y, **_):  # noqa: N803
        """Return the model given more observations, exactly; the features of the networks stay as they are."""
        if self.X is None:
            return PosteriorModel(self.regression, X, Y)
        return PosteriorModel(self.regression, torch.cat([self.X, X]), torch.cat([self.Y, Y]))


def given(y, weights, means, covariances, noises):
    """Return weights (K,), means (K, m) and covariances (K, m, m) of the last m values, given noisy observations y (n,) of the first n."""
    n = len(y)
    lower = torch.linalg.cholesky(covariances[:, :n, :n] + torch.diag_embed(noises[:, :n]))
    densities = torch.distributions.MultivariateNormal(means[:, :n], scale_tril=lower).log_prob(y)
    half = torch.linalg.solve_triangular(lower, covariances[:, :n, n:], upper=False)
    error = torch.linalg.solve_triangular(lower, (y - means[:, :n])[..., None], upper=False)
    means = means[:, n:] + (half.mT @ error).squeeze(-1)
    return (weights.log() + densities).softmax(0), means, covariances[:, n:, n:] - half.mT @ half


class Centred(nn.Module):
    """A map from the unit cube to [-1, 1]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs on the new scale."""
        return 2 * x - 1


class Surrogate:
    """Three networks for inputs in the unit cube, which are trained further at every `every`-th evaluation, and conditioned in between."""

    def __init__(self, dimension: int, every: int = 1):
        self.networks = [
            nn.Sequential(
                Centred(), nn.Linear(dimension, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)
            ).double()
            for _ in range(3)
        ]
        self.every = every
        self.step = 0

    def fit(self, x: Tensor, y: Tensor) -> PosteriorModel:
        """Return the model of all evaluations x (n, d) and y (n, 1), of which the last is new."""
        if self.step % self.every == 0:
            location, scale = float(y.mean()), float(y.std())
            for network in self.networks:
                train(network, x, (y - location) / scale, 100 if self.step else 600)
            likelihood = mola.likelihoods.Gaussian(location=location, scale=scale, noise=0.02 * scale)
            networks = copy.deepcopy(self.networks)
            options = {"structure": "full", "rule": "evidence", "distances": False, "progress": False}
            self.model = PosteriorModel(mola.fit(networks, [(x, y)], likelihood=likelihood, **options))
        else:
            self.model = self.model.condition_on_observations(x[-1:], y[-1:])
        self.step += 1
        return self.model


def train(network: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimiser = torch.optim.Adam(network.parameters(), lr=5e-3, weight_decay=1e-5)
    for _ in range(epochs):
        optimiser.zero_grad()
        nn.functional.mse_loss(network(x), y).backward()
        optimiser.step()


def next_point(model: Model, best: Tensor, dimension: int) -> Tensor:
    """Return the point (1, d) of the unit cube with the largest expected improvement."""
    bounds = torch.tensor([[0.0] * dimension, [1.0] * dimension], dtype=torch.float64)
    acquisition = qLogExpectedImprovement(model, best_f=best)
    return optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=128, options={"maxiter": 50})[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # BoTorch warns about its own numerics
    torch.manual_seed(0)
    branin = Branin(negate=True).double()
    low, high = branin.bounds
    x = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(6).double()
    y = branin(low + (high - low) * x)[:, None]
    print(f"regret after  6 evaluations: {branin.optimal_value - float(y.max()):.4f}")
    surrogate = Surrogate(2)
    for _ in range(options.steps):
        x = torch.cat([x, next_point(surrogate.fit(x, y), y.max(), 2)])
        y = torch.cat([y, branin(low + (high - low) * x[-1:])[:, None]])
    print(f"regret after {len(y):2} evaluations: {branin.optimal_value - float(y.max()):.4f}")


if __name__ == "__main__":
    main()
