"""Every structure against its dense definition, in float64."""

import pytest
import torch
from torch import nn

import mola
from mola.laplace import STRUCTURES as KNOWN
from mola.likelihood import OutputCurvature
from tests.conftest import STRUCTURES, make_problem
from tests.reference import dense

PRIORS = (1e-3, 0.7, 50.0)


def relative(found, expected) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def fitted(problem, structure, prior=0.7):
    return mola.fit(problem.network, problem.loader, structure=structure, prior_precision=prior)


def spectrum_of(posterior):
    return posterior.components[0].curvature.spectrum


def dense_covariance(problem, structure, prior):
    precision = dense.precision(structure, problem.weights, problem.features(), problem.labels, prior)
    return torch.linalg.inv(precision)


def test_full_factors_equal_the_hessian_by_autograd(problem):
    factors = fitted(problem, "full").components[0].curvature.factors
    expected = dense.hessian(problem.weights, problem.features(), problem.labels)
    assert relative(factors.hessian.reshape(expected.shape), expected) < 1e-12


def test_diag_factors_equal_its_diagonal(problem):
    factors = fitted(problem, "diag").components[0].curvature.factors
    expected = dense.hessian(problem.weights, problem.features(), problem.labels).diagonal()
    assert relative(factors.diagonal.flatten(), expected) < 1e-12


def test_kron_factors_equal_sums_by_a_loop(problem):
    factors = fitted(problem, "kron").components[0].curvature.factors
    a, b = dense.kron_factors(problem.weights, problem.features())
    assert relative(factors.output / factors.count, a) < 1e-12
    assert relative(factors.gram / factors.count, b) < 1e-12


@pytest.mark.parametrize("prior", PRIORS)
def test_logit_moments_equal_the_dense_ones(problem, structure, prior):
    posterior = spectrum_of(fitted(problem, structure)).posterior(prior)
    covariance = dense_covariance(problem, structure, prior)
    inputs = torch.randn(5, 3)
    features = problem.features(inputs)
    expected = torch.stack([dense.logit_covariance(covariance, phi, 4) for phi in features])
    centre = torch.eye(4) - 1 / 4
    contrast = centre @ expected @ centre
    assert relative(posterior.covariance(features), expected) < 1e-10
    assert relative(posterior.variance(features), expected.diagonal(dim1=1, dim2=2)) < 1e-10
    assert relative(posterior.contrast_covariance(features), contrast) < 1e-10
    assert relative(posterior.contrast_variance(features), contrast.diagonal(dim1=1, dim2=2)) < 1e-10


@pytest.mark.parametrize("prior", PRIORS)
def test_projected_variances_equal_the_posterior_s(problem, structure, prior):
    spectrum = spectrum_of(fitted(problem, structure))
    posterior = spectrum.posterior(prior)
    features = problem.features(torch.randn(5, 3))
    projected = spectrum.project(features)
    assert relative(spectrum.variance(projected, prior), posterior.variance(features)) < 1e-10
    assert relative(spectrum.variance(projected, prior, contrast=True), posterior.contrast_variance(features)) < 1e-10


@pytest.mark.parametrize("prior", PRIORS)
def test_log_evidence_equals_the_dense_one(problem, structure, prior):
    found = fitted(problem, structure, prior).log_evidence()
    precision = dense.precision(structure, problem.weights, problem.features(), problem.labels, prior)
    expected = dense.log_evidence(precision, problem.weights, problem.features(), problem.labels, prior)
    assert relative(found, expected) < 1e-10


def test_marginal_covariance_of_a_class(problem, structure):
    spectrum = spectrum_of(fitted(problem, structure))
    covariance = dense_covariance(problem, structure, 0.7)
    width = problem.weights.shape[1]
    for c in range(4):
        block = covariance[c * width : (c + 1) * width, c * width : (c + 1) * width]
        assert relative(spectrum.class_covariance(0.7, c), block) < 1e-10
        smallest = torch.linalg.eigvalsh(block)[0]
        assert relative(spectrum.smallest_class_variance(0.7)[c], smallest) < 1e-10


def test_sample_covariance_converges_to_the_posterior_s(problem, structure):
    count = 15_000
    generator = torch.Generator().manual_seed(1)
    drawn = fitted(problem, structure).sample(count, generator=generator).weights.flatten(1)
    covariance = dense_covariance(problem, structure, 0.7)
    # Whitened draws: the mean is 0 and the covariance is I, each entry to within a few standard errors.
    white = (drawn - problem.weights.flatten()) @ torch.linalg.inv(torch.linalg.cholesky(covariance)).T
    assert float(white.mean(0).abs().max()) < 6 / count**0.5
    found = white.T @ white / count
    assert float((found - torch.eye(len(found))).abs().max()) < 6 * 2**0.5 / count**0.5


def test_drawn_logits_have_the_contrast_covariance(problem, structure):
    posterior = spectrum_of(fitted(problem, structure)).posterior(0.7)
    features = problem.features(torch.randn(3, 3))
    noise = torch.randn(50_000, posterior.noise_size)
    deviations = posterior.perturb(features, noise)
    centred = deviations - deviations.mean(2, keepdim=True)
    found = centred.transpose(1, 2) @ centred / len(noise)
    expected = posterior.contrast_covariance(features)
    assert relative(found, expected) < 0.04


def test_kron_exact_is_the_hessian_for_one_datum():
    problem = make_problem(count=1)
    expected = dense.hessian(problem.weights, problem.features(), problem.labels)
    factors = fitted(problem, "kron-exact").components[0].curvature.factors
    assert relative(torch.kron(factors.output, factors.gram) / factors.count, expected) < 1e-12


def test_kron_exact_is_the_hessian_where_the_output_curvature_is_constant():
    problem = make_problem()
    with torch.no_grad():
        problem.network[-1].weight.zero_()
        problem.network[-1].bias.copy_(torch.tensor([0.3, -1.0, 0.0, 2.0]))
    found = fitted(problem, "kron-exact").log_evidence()
    expected = fitted(problem, "full").log_evidence()
    assert relative(found, expected) < 1e-12


def test_damped_covariance_lies_below_the_exact_one(problem):
    damped, exact = dense_covariance(problem, "kron", 0.7), dense_covariance(problem, "kron-exact", 0.7)
    assert float(torch.linalg.eigvalsh(exact - damped).min()) > -1e-12
    features = problem.features()
    variances = [
        spectrum_of(fitted(problem, name)).posterior(0.7).variance(features) for name in ("kron", "kron-exact")
    ]
    assert bool((variances[0] <= variances[1]).all())


@pytest.mark.parametrize("beta", [0.5, 0.95])
def test_running_average_is_algorithm_1_to_the_letter(problem, beta):
    posterior = mola.fit(problem.network, problem.loader, structure=mola.Kron(running_average=beta))
    factors = posterior.components[0].curvature.factors
    a, b = torch.zeros(4, 4), torch.zeros(2 * (problem.weights.shape[1],))
    for inputs, _ in problem.loader:
        batch_a, batch_b = dense.kron_factors(problem.weights, problem.features(inputs))
        a, b = beta * a + (1 - beta) * batch_a, beta * b + (1 - beta) * batch_b
    assert relative(factors.output / factors.count, a) < 1e-12
    assert relative(factors.gram / factors.count, b) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_null_direction_stays_null_in_low_precision(dtype):
    problem = make_problem(count=2000)
    network = problem.network.to(dtype)
    loader = [(inputs.to(dtype), labels) for inputs, labels in problem.loader]
    kron = mola.fit(network, loader, structure="kron").components[0].curvature.factors
    full = mola.fit(network, loader, structure="full").components[0].curvature.factors
    assert float((kron.output @ torch.ones(4)).abs().max()) < 1e-12 * float(kron.output.abs().max())
    assert float(full.hessian.sum(2).abs().max()) < 1e-12 * float(full.hessian.abs().max())


def test_common_mode_variance_is_the_prior_s_alone(problem):
    features = problem.features(torch.randn(5, 3))
    for name in ("kron-exact", "full"):
        for prior in (1e-12, 1e-6, 1.0):
            posterior = spectrum_of(fitted(problem, name)).posterior(prior)
            ones = torch.full((4,), 0.5)
            common = torch.einsum("i,nij,j->n", ones, posterior.covariance(features), ones)
            assert relative(common, features.square().sum(1) / prior) < 1e-9
            # The visible part does not know of it, though it is up to 1e12 times smaller.
            visible = spectrum_of(fitted(problem, name)).posterior(1e-3).contrast_variance(features)
            assert float(visible.max()) < 1e6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_buffers_are_rebuilt_not_cast(problem, structure, dtype):
    spectrum = spectrum_of(fitted(problem, structure, 1e-9))
    features = problem.features(torch.randn(5, 3))
    exact = spectrum.posterior(1e-9).variance(features)
    moved = spectrum.posterior(1e-9).to(dtype)
    assert moved.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative(moved.variance(features.to(moved.dtype)).double(), exact) < 1e-5
    assert relative(moved.double().variance(features), exact) < 1e-14


class Bernoulli:
    """Independent outputs: what a likelihood without a common shift looks like to the structures."""

    name = "bernoulli"
    hides_shift = False

    def curvature(self, outputs):
        probs = torch.sigmoid(outputs)
        return OutputCurvature(separate=probs * (1 - probs), coupling=None)

    def visible(self, outputs):
        return torch.eye(outputs, dtype=torch.float64)


@pytest.mark.parametrize("name", STRUCTURES)
def test_another_likelihood_needs_no_change_in_the_structures(name):
    problem = make_problem()
    features, weights = problem.features(), problem.weights
    likelihood, built = Bernoulli(), KNOWN[name]()
    factors = built.sums(features, likelihood.curvature(features @ weights.T), None)
    found = built.spectrum(factors, likelihood).posterior(0.7)

    def loss(flat):
        return nn.functional.softplus(features @ flat.view_as(weights).T).sum()

    hessian = torch.autograd.functional.hessian(loss, weights.flatten())
    size, count = weights.numel(), len(features)
    if name == "diag":
        hessian = torch.diag(hessian.diagonal())
    elif name != "full":
        blocks = (torch.diag(factors.separate) if name == "kron-diag" else factors.output), factors.gram
        hessian = torch.kron(*blocks) / count
        assert relative(blocks[0].diagonal(), likelihood.curvature(features @ weights.T).separate.sum(0)) < 1e-12
    if name in ("kron", "kron-diag"):
        left = blocks[0] / count**0.5 + 0.7**0.5 * torch.eye(4)
        right = factors.gram / count**0.5 + 0.7**0.5 * torch.eye(len(factors.gram))
        covariance = torch.linalg.inv(torch.kron(left, right))
    else:
        covariance = torch.linalg.inv(hessian + 0.7 * torch.eye(size))
    expected = torch.stack([dense.logit_covariance(covariance, phi, 4) for phi in features])
    assert relative(found.covariance(features), expected) < 1e-10
    assert relative(found.contrast_covariance(features), expected) < 1e-10


def test_full_in_blocks_of_rows_equals_full_at_once(monkeypatch):
    problem = make_problem(count=50)
    whole = mola.fit(problem.network, problem.batches(50), structure="full").components[0].curvature.factors
    monkeypatch.setattr("mola.laplace.full.ROW_BYTES", 3000)
    parts = mola.fit(problem.network, problem.batches(50), structure="full").components[0].curvature.factors
    assert relative(parts.hessian, whole.hessian) < 1e-13


def test_full_uses_no_loop_over_data(monkeypatch):
    """Matrix products of a fit by `full` grow with the classes, not with the data."""
    problem = make_problem(count=400)
    calls = {"count": 0}
    original = torch.Tensor.baddbmm_

    def counting(*arguments):
        calls["count"] += 1
        return original(*arguments)

    monkeypatch.setattr(torch.Tensor, "baddbmm_", counting)
    mola.fit(problem.network, problem.batches(400), structure="full")
    assert 0 < calls["count"] < 20
