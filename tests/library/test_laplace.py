"""Every structure against its dense definition, in float64."""

import pytest
import torch

import molaplace as mola
from tests.conftest import make_problem
from tests.library.problems import relative
from tests.reference import dense

PRIORS = (1e-3, 0.7, 50.0)


def fitted(problem, structure, prior=0.7):
    return mola.fit(problem.network, problem.loader, structure=structure, prior_precision=prior)


def layer_of(problem, structure, prior=0.7):
    return fitted(problem, structure, prior).components[0].layer


def dense_covariance(problem, structure, prior):
    precision = dense.precision(structure, problem.weights, problem.features(), problem.labels, prior)
    return torch.linalg.inv(precision)


@pytest.mark.parametrize("prior", PRIORS)
def test_moments_of_logits_and_evidence_are_the_dense_ones(problem, structure, prior):
    posterior = fitted(problem, structure, prior)
    curvature = posterior.components[0].layer.curvature
    precision = dense.precision(structure, problem.weights, problem.features(), problem.labels, prior)
    features = problem.features(torch.randn(5, 3))
    expected = torch.stack([dense.logit_covariance(torch.linalg.inv(precision), phi, 4) for phi in features])
    centre = torch.eye(4) - 1 / 4
    for centred, truth in ((False, expected), (True, centre @ expected @ centre)):
        assert relative(curvature.covariance(curvature.project(features), prior, centred=centred), truth) < 1e-10
        assert (
            relative(
                curvature.variance(curvature.project(features), prior, centred=centred), truth.diagonal(dim1=1, dim2=2)
            )
            < 1e-10
        )
    evidence = dense.log_evidence(precision, problem.weights, problem.features(), problem.labels, prior)
    assert relative(posterior.log_evidence()[0], evidence) < 1e-10


def test_log_evidence_has_the_derivative_of_differences(problem, structure):
    (component,) = fitted(problem, structure).components
    at = torch.tensor(0.7, requires_grad=True)
    component.log_evidence(at).backward()
    with torch.no_grad():
        above, below = (component.log_evidence(torch.tensor(0.7 + step)) for step in (1e-5, -1e-5))
    assert float(at.grad) == pytest.approx(float(above - below) / 2e-5, rel=1e-6)


def test_marginal_covariance_of_a_class(problem, structure):
    curvature = layer_of(problem, structure).curvature
    covariance = dense_covariance(problem, structure, 0.7)
    width = problem.weights.shape[1]
    for c in range(4):
        block = covariance[c * width : (c + 1) * width, c * width : (c + 1) * width]
        assert relative(curvature.class_covariance(0.7, c), block) < 1e-10
        assert relative(curvature.smallest_class_variance(0.7)[c], torch.linalg.eigvalsh(block)[0]) < 1e-10


def test_mahalanobis_is_relative_to_the_mean_outer_product(problem, structure):
    trained = problem.features()
    queries = problem.features(torch.randn(5, 3))
    moment = trained.T @ trained / len(trained)
    if structure == "diag":
        moment = torch.diag(moment.diagonal())
    expected = (queries @ torch.linalg.inv(moment) * queries).sum(1).sqrt()
    assert (
        relative(layer_of(problem, structure).curvature.feature_factor.mahalanobis(queries), expected) < 1e-6
    )  # up to its ridge


def test_draws_of_weights_have_the_posterior_s_moments(problem, structure):
    count = 15_000
    drawn = fitted(problem, structure).sample(count, generator=torch.Generator().manual_seed(1)).weights.flatten(1)
    root = torch.linalg.cholesky(dense_covariance(problem, structure, 0.7))
    # Whitened draws: the mean is 0 and the covariance is I, each entry to within a few standard errors.
    white = torch.linalg.solve_triangular(root, (drawn - problem.weights.flatten()).T, upper=False)
    assert float(white.mean(1).abs().max()) < 6 / count**0.5
    assert float((white @ white.T / count - torch.eye(len(white))).abs().max()) < 6 * 2**0.5 / count**0.5


def test_draws_of_logits_have_the_centred_covariance(problem, structure):
    curvature = layer_of(problem, structure).curvature
    features = problem.features(torch.randn(3, 3))
    noise = torch.randn(50_000, curvature.noise_size)
    deviations = curvature.marginal_deviations(curvature.project(features), 0.7, noise)
    centred = deviations - deviations.mean(2, keepdim=True)
    actual = centred.mT @ centred / len(noise)
    assert relative(actual, curvature.covariance(curvature.project(features), 0.7, centred=True)) < 0.04


@pytest.mark.parametrize("name", ["kron-exact", "full"])
@pytest.mark.parametrize("prior", [1e-12, 1e-6, 1.0])
def test_the_common_shift_has_the_prior_s_variance_alone(problem, name, prior):
    """However much larger it is than what the data determine."""
    curvature = layer_of(problem, name).curvature
    features = problem.features(torch.randn(5, 3))
    ones = torch.full((4,), 0.5)
    common = torch.einsum("i,nij,j->n", ones, curvature.covariance(curvature.project(features), prior), ones)
    assert relative(common, features.square().sum(1) / prior) < 1e-9
    hidden = torch.einsum("nij,j->ni", curvature.covariance(curvature.project(features), prior, centred=True), ones)
    assert float(hidden.abs().max()) < 1e-9 * float(
        curvature.variance(curvature.project(features), prior, centred=True).max()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shift_stays_hidden_for_networks_in_low_precision(structure, dtype):
    problem = make_problem(count=500)
    network = problem.network.to(dtype)
    loader = [(inputs.to(dtype), labels) for inputs, labels in problem.loader]
    curvature = mola.fit(network, loader, structure=structure).components[0].layer.curvature
    features = torch.randn(5, 7)
    covariance = curvature.covariance(curvature.project(features), 1e-12, centred=True)
    assert float(covariance.sum(1).abs().max()) < 1e-9 * float(covariance.abs().max())


@pytest.mark.parametrize("beta", [0.5, 0.95])
def test_a_running_average_is_algorithm_1_to_the_letter(problem, beta):
    structure = mola.structures.Kron(running_average=beta)
    layer = mola.fit(problem.network, problem.loader, structure=structure).components[0].layer
    a = torch.zeros(4, 4)
    b = torch.zeros(2 * (problem.weights.shape[1],))
    for inputs, _ in problem.loader:
        batch_a, batch_b = dense.kron_factors(problem.weights, problem.features(inputs))
        a = beta * a + (1 - beta) * batch_a
        b = beta * b + (1 - beta) * batch_b
    root = len(problem.inputs) ** 0.5
    prior = 0.7**0.5
    left, right = (torch.linalg.inv(root * factor + prior * torch.eye(len(factor))) for factor in (a, b))
    features = problem.features()
    scale = (features @ right * features).sum(1)
    assert (
        relative(layer.curvature.covariance(layer.curvature.project(features), 0.7), scale[:, None, None] * left)
        < 1e-10
    )


def test_a_running_average_takes_a_batch_as_a_whole(problem):
    loader = [(torch.randn(5000, 3), torch.randint(4, (5000,)))]
    structure = mola.structures.Kron(running_average=0.5)
    gram = mola.fit(problem.network, loader, structure=structure).components[0].layer.sums.tensors["gram"]
    whole = mola.fit(problem.network, loader).components[0].layer.sums.tensors["gram"]
    assert relative(gram, 0.5 * whole) < 1e-12
