"""Links against Monte Carlo, against each other, and at the edges of floating point."""

import math

import pytest
import torch

import mola
from mola.laplace import LogitMoments, Spread
from mola.links import LINKS, as_link
from tests.closeness import assert_close
from tests.conftest import CLOSED_FORM_LINKS, make_problem

ALL_LINKS = [*CLOSED_FORM_LINKS, "mc"]


class Gaussian(Spread):
    """Any covariance (C, C), the same for each of n data."""

    def __init__(self, covariance, count):
        classes, self.count = len(covariance), count
        self.full = covariance
        centre = torch.eye(classes, dtype=covariance.dtype) - 1 / classes
        self.contrast = centre @ covariance @ centre
        values, vectors = torch.linalg.eigh(self.contrast)
        self.root = vectors * values.clamp_min(0).sqrt()

    @property
    def noise_size(self):
        return len(self.full)

    def variance(self):
        return self.full.diagonal().expand(self.count, -1)

    def contrast_variance(self):
        return self.contrast.diagonal().expand(self.count, -1)

    def contrast_covariance(self):
        return self.contrast.expand(self.count, -1, -1)

    def perturb(self, noise):
        return (noise @ self.root.T).expand(self.count, -1, -1)

    def __getitem__(self, rows):
        return Gaussian(self.full, len(range(self.count)[rows]))


def moments(mean, covariance):
    mean = torch.as_tensor(mean)
    return LogitMoments(mean, Gaussian(torch.as_tensor(covariance), len(mean)))


def random_covariance(classes, scale=1.0, seed=0):
    root = torch.randn(classes, classes, generator=torch.Generator().manual_seed(seed))
    return scale * root @ root.T


@pytest.mark.parametrize("name", ALL_LINKS)
def test_probabilities_are_probabilities(name):
    probs = as_link(name)(moments(torch.randn(20, 5), random_covariance(5)))
    assert bool((probs >= 0).all())
    assert torch.allclose(probs.sum(1), torch.ones(20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALL_LINKS)
def test_safe_for_huge_logits_and_variances(name, dtype):
    extremes = torch.tensor([[1e4, -1e4, 0.0], [1e4, 1e4, -1e4], [0.0, 0.0, 0.0], [-1e4, -1e4, -1e4]], dtype=dtype)
    for scale in (1e-8, 1.0, 1e8):
        given = moments(extremes, scale * torch.eye(3, dtype=dtype))
        probs = as_link(name)(given)
        assert bool(torch.isfinite(probs).all())
        assert_close(probs.sum(1), torch.ones(4))
        assert probs[0].argmax() == 0
        if name == "mc":
            assert_close(probs[2], torch.full((3,), 1 / 3), "draws")
        else:
            assert_close(probs[2], torch.full((3,), 1 / 3))


@pytest.mark.parametrize("name", ["probit", "probit-centered", "mean-field", "mc"])
def test_without_variance_it_is_the_softmax(name):
    mean = torch.randn(20, 5)
    probs = as_link(name)(moments(mean, torch.zeros(5, 5)))
    assert torch.allclose(probs, torch.softmax(mean, 1), atol=1e-14)


@pytest.mark.parametrize("name", ["probit-centered", "mean-field", "bridge", "mc"])
def test_links_that_see_what_the_softmax_sees_ignore_a_common_shift(name):
    mean, covariance = torch.randn(20, 5), random_covariance(5)
    plain = as_link(name)(moments(mean, covariance))
    shifted = as_link(name)(moments(mean + 3.0, covariance + 100.0))  # 100 * ones: common-mode variance
    assert torch.allclose(plain, shifted, atol=1e-9)


def test_the_probit_does_not():
    mean, covariance = torch.randn(20, 5), random_covariance(5)
    plain = mola.Probit()(moments(mean, covariance))
    cooled = mola.Probit()(moments(mean, covariance + 100.0))
    assert float((plain - cooled).abs().max()) > 0.01


def test_formulas_written_out():
    mean, covariance = torch.randn(1, 4), random_covariance(4)
    m = mean[0]
    z = torch.stack([m[i] / math.sqrt(1 + math.pi / 8 * covariance[i, i]) for i in range(4)])
    assert torch.allclose(mola.Probit()(moments(mean, covariance))[0], torch.softmax(z, 0))
    pairs = torch.zeros(4)
    for i in range(4):
        for j in range(4):
            spread = covariance[i, i] + covariance[j, j] - 2 * covariance[i, j]
            pairs[i] += torch.exp(-(m[i] - m[j]) / torch.sqrt(1 + math.pi / 8 * spread))
    assert torch.allclose(mola.MeanField()(moments(mean, covariance))[0], (1 / pairs) / (1 / pairs).sum())
    # The bridge with a covariance for which its own projection and the projection on contrasts agree.
    centre = torch.eye(4) - 0.25
    covariance = centre @ covariance @ centre + 2.0
    ones = torch.ones(4)
    total = ones @ covariance @ ones
    projected = covariance - torch.outer(covariance @ ones, ones @ covariance) / total
    shifted = m - covariance @ ones * m.sum() / total
    alpha = (1 - 2 / 4 + shifted.exp() / 16 * (-shifted).exp().sum()) / projected.diagonal()
    assert torch.allclose(mola.Bridge()(moments(mean, covariance))[0], alpha / alpha.sum())


def test_binary_mean_field_is_close_to_the_integral():
    mean = torch.tensor([[0.0, 2.0], [0.0, -1.0], [0.0, 4.0]])
    covariance = torch.diag(torch.tensor([0.0, 3.0]))
    exact = mola.MonteCarlo(samples=400_000)(moments(mean, covariance))
    assert float((mola.MeanField()(moments(mean, covariance)) - exact).abs().max()) < 0.01


@pytest.mark.parametrize("over", ["logits", "weights"])
def test_monte_carlo_converges_to_the_integral(structure, over):
    """Against the integral by brute force: weights drawn from the dense covariance."""
    problem = make_problem(classes=3)
    posterior = mola.fit(problem.network, problem.loader, structure=structure, prior_precision=0.5)
    inputs = torch.randn(4, 3)
    drawn = posterior.sample(10_000, generator=torch.Generator().manual_seed(5)).weights
    brute = torch.softmax(torch.einsum("np,scp->snc", problem.features(inputs), drawn), 2).mean(0)
    found = posterior.with_link(mola.MonteCarlo(10_000, over=over))(inputs)
    assert float((found - brute).abs().max()) < 5 * 0.5 / 10_000**0.5 * 2**0.5


def test_mean_field_beats_probit_where_the_common_mode_is_large():
    problem = make_problem(classes=5)
    posterior = mola.fit(problem.network, problem.loader, structure="full", prior_precision=0.05)
    inputs = torch.randn(60, 3)
    judge = posterior.with_link(mola.MonteCarlo(20_000))(inputs)
    error = {name: float((posterior.with_link(name)(inputs) - judge).abs().mean()) for name in CLOSED_FORM_LINKS}
    assert error["mean-field"] < error["probit"]
    assert error["probit-centered"] < error["probit"]


class TestSeeds:
    def test_the_seed_decides(self):
        given = moments(torch.randn(20, 5), random_covariance(5))
        first, again = mola.MonteCarlo(50, seed=1)(given), mola.MonteCarlo(50, seed=1)(given)
        other = mola.MonteCarlo(50, seed=2)(given)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    @pytest.mark.parametrize("over", ["logits", "weights"])
    def test_the_generator_is_really_used(self, problem, structure, over):
        posterior = mola.fit(problem.network, problem.loader, structure=structure).with_link(
            mola.MonteCarlo(20, over=over)
        )
        inputs = torch.randn(9, 3)

        def with_seed(seed):
            generator = torch.Generator().manual_seed(seed)
            called = posterior(inputs, generator=generator)
            predicted = posterior.predict(inputs, generator=torch.Generator().manual_seed(seed)).probs
            assert torch.equal(called, predicted)
            return called

        assert torch.equal(with_seed(1), with_seed(1))
        assert not torch.equal(with_seed(1), with_seed(2))
        generator = torch.Generator().manual_seed(1)
        assert not torch.equal(posterior(inputs, generator=generator), posterior(inputs, generator=generator))

    @pytest.mark.parametrize("over", ["logits", "weights"])
    def test_a_datum_s_draws_do_not_depend_on_its_batch(self, problem, structure, over, monkeypatch):
        posterior = mola.fit(problem.network, problem.loader, structure=structure).with_link(
            mola.MonteCarlo(64, over=over)
        )
        inputs = torch.randn(9, 3)
        together = posterior(inputs)
        apart = torch.cat([posterior(part) for part in inputs.split(2)])
        assert torch.allclose(together, apart, atol=1e-14)
        monkeypatch.setattr("mola.laplace.moments.DRAWS_AT_ONCE", 300)
        if over == "logits":
            assert torch.allclose(posterior(inputs), together, atol=1e-14)

    def test_samples_of_weights_follow_the_generator(self, problem, structure):
        posterior = mola.fit(problem.network, problem.loader, structure=structure)
        first = posterior.sample(5, generator=torch.Generator().manual_seed(3))
        again = posterior.sample(5, generator=torch.Generator().manual_seed(3))
        assert torch.equal(first.weights, again.weights)
        assert not torch.equal(first.weights, posterior.sample(5, generator=torch.Generator().manual_seed(4)).weights)


def test_links_by_name_are_what_they_say():
    assert {name: type(as_link(name)).name for name in LINKS} == {name: name for name in LINKS}
    link = mola.MonteCarlo(7)
    assert as_link(link) is link
