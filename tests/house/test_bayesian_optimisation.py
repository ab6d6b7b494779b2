"""The example's model of BoTorch: moments, exact conditioning, acquisition functions and their optimisation."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import molaplace as mola
from tests.closeness import assert_close
from tests.conftest import STRUCTURES, make_problem
from tests.library.problems import relative
from tests.library.test_joint import standard_scores
from tests.reference.gaussian import ridge_weights

pytest.importorskip("botorch", reason="NO BOTORCH: pip install botorch to run the tests of Bayesian optimisation.")
pytestmark = pytest.mark.filterwarnings("ignore")  # BoTorch and its dependencies warn about themselves

from botorch.acquisition import LogExpectedImprovement, qLogExpectedImprovement  # noqa: E402
from botorch.acquisition.logei import qLogNoisyExpectedImprovement  # noqa: E402
from botorch.optim import optimize_acqf  # noqa: E402
from botorch.sampling import SobolQMCNormalSampler  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "bayesian_optimisation.py"
PosteriorModel = runpy.run_path(str(EXAMPLE))["PosteriorModel"]


def one_output(count=30, seed=0, structure="full"):
    """A posterior with one target, and its data."""
    torch.manual_seed(seed)
    x = torch.rand(count, 2)
    y = torch.sin(5 * x[:, :1]) + x[:, 1:].square() + 0.05 * torch.randn(count, 1)
    networks = []
    for _ in range(2):
        network = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1))
        optimiser = torch.optim.Adam(network.parameters(), 0.02)
        for _ in range(150):
            optimiser.zero_grad()
            nn.functional.mse_loss(network(x), y).backward()
            optimiser.step()
        networks.append(network)
    fitted = mola.fit(
        networks, [(x, y)], likelihood=mola.likelihoods.Gaussian(noise=0.05), structure=structure, progress=False
    )
    return fitted.with_distance_exponent(0.5).with_weights([0.3, 0.7]), x, y


@pytest.mark.parametrize("structure", STRUCTURES)
def test_batches_have_the_moments_of_the_joint_prediction(structure):
    posterior, x, _ = one_output(structure=structure)
    model = PosteriorModel(posterior)
    batches = x[:12].view(2, 2, 3, 2)
    result = model.posterior(batches)
    noisy = model.posterior(batches, observation_noise=True)
    for first in range(2):
        for second in range(2):
            joint = posterior.joint(batches[first, second])
            assert_close(result.mean[first, second], joint.mean, "float64")
            assert_close(result.variance[first, second][:, 0], joint.covariance(0).diagonal(), "float64")
            assert_close(result.covariances[:, first, second], joint.output_covariances(0), "float64")
            noise = torch.einsum("k,qkm->qm", posterior.weights, joint.noises)
            difference = noisy.variance[first, second] - result.variance[first, second]
            assert_close(difference, noise, "float64", scale=float(noisy.variance.detach().max()))


@pytest.mark.parametrize("quasi", [False, True])
def test_draws_have_the_moments_of_the_mixture(quasi):
    posterior, x, _ = one_output()
    result = PosteriorModel(posterior).posterior(x[:3])
    torch.manual_seed(0)
    shape = torch.Size([2**15])
    draws = SobolQMCNormalSampler(shape, seed=3)(result) if quasi else result.rsample(shape)
    joint = posterior.joint(x[:3])
    for scores in standard_scores(draws.flatten(1), joint.mean.flatten(), joint.covariance(0)):
        assert float(scores.abs().max()) < 4.5


def as_ridge(network, x, y, noise, prior):
    """Set the head to the most probable weights, for which the Laplace approximation is the exact posterior."""
    with torch.no_grad():
        features = torch.cat([network[:-1](x), torch.ones(len(x), 1)], 1)
        weights = ridge_weights(features, y, torch.full((y.shape[1],), noise), prior)
        network[-1].weight.copy_(weights[:, :-1])
        network[-1].bias.copy_(weights[:, -1])
    return network


@pytest.mark.parametrize("in_sequence", [False, True])
def test_conditioning_is_the_fit_to_all_data(in_sequence):
    """With a fixed body and `full`, the posterior of part of the data, given the rest, is the posterior of all data."""
    problem = make_problem(classes=1)
    x = problem.inputs
    y = torch.sin(x.sum(1, keepdim=True))
    options = {
        "likelihood": mola.likelihoods.Gaussian(noise=0.3),
        "structure": "full",
        "prior_precision": 0.8,
        "progress": False,
    }
    part = as_ridge(make_problem(classes=1).network, x[:25], y[:25], 0.3, 0.8)
    model = PosteriorModel(mola.fit(part, [(x[:25], y[:25])], **options))
    pieces = [slice(25, 30), slice(30, 40)] if in_sequence else [slice(25, 40)]
    for piece in pieces:
        model = model.condition_on_observations(x[piece], y[piece])
    whole = mola.fit(as_ridge(make_problem(classes=1).network, x, y, 0.3, 0.8), [(x, y)], **options)
    new = torch.randn(6, 3)
    joint = whole.joint(new)
    result = model.posterior(new)
    assert_close(result.mean, joint.mean, "float64")
    assert relative(result.covariances[0], joint.output_covariances(0)[0]) < 1e-9


def test_conditioning_multiplies_weights_by_densities():
    posterior, x, y = one_output()
    joint = posterior.joint(x[:5])
    noisy = joint.output_covariances(0) + torch.diag_embed(joint.noises[..., 0].T)
    densities = torch.distributions.MultivariateNormal(joint.means[..., 0].T, noisy).log_prob(y[:5, 0])
    conditioned = PosteriorModel(posterior).condition_on_observations(x[:5], y[:5]).posterior(x[5:8])
    assert_close(conditioned.weights, (posterior.weights.log() + densities).softmax(0), "float64")
    assert_close((posterior.weights.log() + densities).logsumexp(0), joint.log_prob(y[:5]), "float64")


def test_expected_improvement_of_one_network_is_the_analytic_one():
    model = PosteriorModel(one_output()[0].alone(0))
    points = torch.rand(6, 1, 2)
    best = float(model.posterior(points).mean.detach().median())
    sampler = SobolQMCNormalSampler(torch.Size([2**14]), seed=1)
    drawn = qLogExpectedImprovement(model, best_f=best, sampler=sampler)(points)
    exact = LogExpectedImprovement(model, best_f=best)(points)
    likely = exact > -4  # few draws improve on the best value elsewhere
    assert int(likely.sum()) >= 3
    assert float((drawn - exact)[likely].detach().abs().max()) < 0.05


def test_acquisition_functions_have_the_gradients_of_finite_differences():
    posterior, _, y = one_output()
    model = PosteriorModel(posterior)
    acquisition = qLogExpectedImprovement(model, best_f=float(y.max()) - 0.2)
    points = torch.rand(3, 2, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(acquisition(points).sum(), points)
    direction = torch.randn(3, 2, 2)
    with torch.no_grad():
        step = 1e-6
        values = [acquisition(points + sign * step * direction).sum() for sign in (1, -1)]
    numeric = float(values[0] - values[1]) / (2 * step)
    assert abs(numeric - float((gradient * direction).sum())) < 1e-4 * max(1.0, float(gradient.norm()))


def test_optimisation_finds_the_maximum_of_the_acquisition_function():
    posterior, x, y = one_output()
    model = PosteriorModel(posterior)
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    acquisition = qLogExpectedImprovement(model, best_f=float(y.max()))
    torch.manual_seed(0)
    _, value = optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=64)
    grid = torch.cartesian_prod(torch.linspace(0, 1, 25), torch.linspace(0, 1, 25))
    with torch.no_grad():
        best = max(float(acquisition(chunk[:, None]).max()) for chunk in grid.split(125))
    assert float(value) > best - 0.05
    both, _ = optimize_acqf(acquisition, bounds, q=2, num_restarts=2, raw_samples=16)
    assert both.shape == (2, 2)
    noisy = qLogNoisyExpectedImprovement(model, X_baseline=x[:5])
    assert optimize_acqf(noisy, bounds, q=1, num_restarts=2, raw_samples=16)[0].shape == (1, 2)


def test_several_targets_are_refused():
    network = make_problem().network
    posterior = mola.fit(network, [(torch.randn(20, 3), torch.randn(20, 4))], likelihood="gaussian", progress=False)
    with pytest.raises(ValueError, match="unpack"):
        PosteriorModel(posterior).posterior(torch.randn(2, 3))
