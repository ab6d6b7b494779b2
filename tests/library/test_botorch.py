"""Regression posteriors as models of BoTorch: moments, exact conditioning, acquisition functions and their optimisation."""

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, MissingExtraError, OptionError
from tests.closeness import assert_close
from tests.conftest import STRUCTURES, make_problem
from tests.library.problems import relative
from tests.library.test_joint import GAUSSIAN, settled, standard_scores, two_networks
from tests.reference.gaussian import ridge_weights

pytest.importorskip(
    "botorch", reason="NO BOTORCH: pip install 'molaplace[botorch]' to run the tests of Bayesian optimisation."
)
pytestmark = pytest.mark.filterwarnings("ignore")  # BoTorch and its dependencies warn about themselves

from botorch.acquisition import LogExpectedImprovement, qKnowledgeGradient, qLogExpectedImprovement  # noqa: E402
from botorch.acquisition.logei import qLogNoisyExpectedImprovement  # noqa: E402
from botorch.optim import optimize_acqf  # noqa: E402
from botorch.sampling import SobolQMCNormalSampler  # noqa: E402

from molaplace.botorch import PosteriorModel  # noqa: E402


def model_of(structure="kron", scaled=True):
    posterior, x, y = two_networks(GAUSSIAN, structure)
    posterior = settled(posterior) if scaled else posterior
    return posterior, PosteriorModel(posterior), x, y


def one_output(count=30, seed=0):
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
        networks, [(x, y)], likelihood=mola.likelihoods.Gaussian(noise=0.05), structure="full", progress=False
    )
    return fitted, x, y


@pytest.mark.parametrize("structure", STRUCTURES)
def test_batches_have_the_moments_of_the_joint_prediction(structure):
    posterior, model, x, _ = model_of(structure)
    batches = x[:12].view(2, 2, 3, 3)
    result = model.posterior(batches)
    noisy = model.posterior(batches, observation_noise=True)
    for first in range(2):
        for second in range(2):
            joint = posterior.joint(batches[first, second])
            assert_close(result.mean[first, second], joint.mean, "float64")
            for output in range(4):
                assert_close(result.variance[first, second][:, output], joint.covariance(output).diagonal(), "float64")
                for component in range(2):
                    matrix = result.covariances[component][first, second, output]
                    assert_close(matrix, joint.output_covariances(output)[component], "float64")
            noise = torch.einsum("k,qkm->qm", posterior.weights, joint.noises)
            difference = noisy.variance[first, second] - result.variance[first, second]
            assert_close(difference, noise, "float64", scale=float(noisy.variance.detach().max()))
    chosen = model.posterior(batches, output_indices=[2])
    assert_close(chosen.mean[..., 0], result.mean[..., 2], "float64")
    assert_close(chosen.variance[..., 0], result.variance[..., 2], "float64")


@pytest.mark.parametrize("quasi", [False, True])
def test_draws_have_the_moments_of_the_mixture(quasi):
    posterior, model, x, _ = model_of()
    result = model.posterior(x[:2])
    torch.manual_seed(0)
    shape = torch.Size([2**15])
    draws = SobolQMCNormalSampler(shape, seed=3)(result) if quasi else result.rsample(shape)
    joint = posterior.joint(x[:2])
    for scores in standard_scores(draws.flatten(1), joint.mean.flatten(), joint.covariance().reshape(8, 8)):
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
    problem = make_problem()
    x = problem.inputs
    y = torch.sin(x.sum(1, keepdim=True) + torch.arange(4))
    options = {
        "likelihood": mola.likelihoods.Gaussian(noise=0.3),
        "structure": "full",
        "prior_precision": 0.8,
        "progress": False,
    }
    part = as_ridge(make_problem().network, x[:25], y[:25], 0.3, 0.8)
    model = PosteriorModel(mola.fit(part, [(x[:25], y[:25])], **options))
    pieces = [slice(25, 30), slice(30, 40)] if in_sequence else [slice(25, 40)]
    for piece in pieces:
        model = model.condition_on_observations(x[piece], y[piece])
    whole = mola.fit(as_ridge(make_problem().network, x, y, 0.3, 0.8), [(x, y)], **options)
    new = torch.randn(6, 3)
    joint = whole.joint(new)
    result = model.posterior(new)
    assert_close(result.mean, joint.mean, "float64")
    for output in range(4):
        assert relative(result.covariances[0][output], joint.output_covariances(output)[0]) < 1e-9


def test_conditioning_multiplies_weights_by_densities():
    posterior, model, x, y = model_of()
    conditioned = model.condition_on_observations(x[:5], y[:5])
    densities = torch.stack([posterior.joint(x[:5]).log_prob(y[:5])])
    logs = []
    for index in range(2):
        joint = posterior.joint(x[:5])
        total = posterior.weights[index].log()
        for output in range(4):
            covariance = joint.output_covariances(output)[index] + torch.diag(joint.noises[:, index, output])
            normal = torch.distributions.MultivariateNormal(joint.means[:, index, output], covariance)
            total = total + normal.log_prob(y[:5, output])
        logs.append(total)
    assert_close(torch.stack(logs).logsumexp(0), densities[0], "float64")
    assert_close(conditioned.log_weights, torch.stack(logs).log_softmax(0), "float64")
    twice = model.condition_on_observations(x[:2], y[:2]).condition_on_observations(x[2:5], y[2:5])
    assert_close(twice.log_weights, conditioned.log_weights, "search")
    assert_close(twice.posterior(x[5:8]).mean, conditioned.posterior(x[5:8]).mean, "search")


def test_conditioning_in_batches_is_conditioning_one_by_one():
    _, model, x, y = model_of()
    observed = torch.stack([y[:2], y[2:4], y[4:6]])
    batched = model.condition_on_observations(x[:2], observed)
    assert batched.batch_shape == (3,)
    result = batched.posterior(x[5:8])
    for index in range(3):
        single = model.condition_on_observations(x[:2], observed[index]).posterior(x[5:8])
        assert_close(result.mean[index], single.mean, "float64")
        assert_close(result.variance[index], single.variance, "float64")


def test_fantasies_are_draws_of_the_targets():
    _, model, x, _ = model_of()
    fantasies = model.fantasize(x[:2], SobolQMCNormalSampler(torch.Size([64]), seed=0))
    assert fantasies.batch_shape == (64,)
    assert fantasies.posterior(x[3:5]).mean.shape == (64, 2, 4)
    before = model.posterior(x[:2]).variance
    assert bool((fantasies.posterior(x[:2]).variance.mean(0) < before).all())


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


def test_the_knowledge_gradient_is_positive():
    model = PosteriorModel(one_output()[0])
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    torch.manual_seed(0)
    acquisition = qKnowledgeGradient(model, num_fantasies=8)
    candidate, value = optimize_acqf(acquisition, bounds, q=1, num_restarts=2, raw_samples=32, options={"maxiter": 40})
    assert candidate.shape == (1, 2)
    grid = torch.cartesian_prod(torch.linspace(0, 1, 30), torch.linspace(0, 1, 30))
    with torch.no_grad():
        best = float(model.posterior(grid).mean.max())
    assert float(value) > best - 1e-3


def test_what_is_no_normal_regression_is_refused():
    classifier, *_ = two_networks()
    with pytest.raises(OptionError, match="regression"):
        PosteriorModel(classifier)
    network = make_problem().network
    with pytest.raises(OptionError, match="plain ensemble"):
        PosteriorModel(mola.ensemble(network, likelihood=mola.likelihoods.Gaussian(noise=0.1)))
    _, model, x, y = model_of()
    with pytest.raises(DataError):
        model.condition_on_observations(x[:3], y[:2])
    with pytest.raises(OptionError):
        model.condition_on_observations(x[:3], y[:3], weight=1)


def test_without_botorch_the_extra_is_named(monkeypatch):
    import importlib
    import sys

    monkeypatch.setitem(sys.modules, "botorch.models.model", None)
    monkeypatch.delitem(sys.modules, "molaplace.botorch")
    with pytest.raises(MissingExtraError, match=r"molaplace\[botorch\]"):
        importlib.import_module("molaplace.botorch")
