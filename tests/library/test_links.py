"""Links against Monte Carlo, against each other, and at the edges of floating point."""

import math
import sys

import pytest
import torch

import molaplace as mola
from molaplace.errors import OptionError
from molaplace.likelihoods import BERNOULLI, GAUSSIAN, Categorical
from molaplace.links import LINKS, Bridge, CentredProbit, MeanField, MonteCarlo, Probit, as_link
from tests.conftest import CLOSED_FORM_LINKS, make_problem
from tests.forked_python import run_python

ALL_LINKS = [*CLOSED_FORM_LINKS, "mc"]

softmax = Categorical().probabilities


class AnySpread:
    """Any covariance (C, C), the same for each of n data, by the protocol that links use."""

    def __init__(self, covariance, count):
        self.full = covariance
        self.count = count
        centre = torch.eye(len(covariance), dtype=covariance.dtype) - 1 / len(covariance)
        self.centred = centre @ covariance @ centre
        values, vectors = torch.linalg.eigh(self.centred)
        self.root = vectors * values.clamp_min(0).sqrt()
        self.noise_size = len(covariance)

    def covariance(self, *, centred=False):
        return (self.centred if centred else self.full).expand(self.count, -1, -1)

    def variance(self, *, centred=False):
        return self.covariance(centred=centred).diagonal(dim1=1, dim2=2)

    def marginal_deviations(self, noise):
        return (noise @ self.root.T).expand(self.count, -1, -1)


def probabilities(link, mean, covariance, inverse_link=softmax):
    mean = torch.as_tensor(mean)
    return as_link(link)(mean, AnySpread(torch.as_tensor(covariance), len(mean)), inverse_link)


def random_covariance(classes, seed=0):
    root = torch.randn(classes, classes, generator=torch.Generator().manual_seed(seed))
    return root @ root.T


@pytest.mark.parametrize("name", ALL_LINKS)
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8, 1e60])
def test_safe_for_huge_logits_and_variances(name, scale):
    extremes = torch.tensor([[1e4, -1e4, 0.0], [1e4, 1e4, -1e4], [0.0, 0.0, 0.0], [-1e4, -1e4, -1e4]])
    probs = probabilities(name, extremes, scale * torch.eye(3))
    assert bool(torch.isfinite(probs).all())
    assert torch.allclose(probs.sum(1), torch.ones(4))
    assert probs[0].argmax() == 0 or scale > 1e8
    assert torch.allclose(probs[2], torch.full((3,), 1 / 3), atol=0.1 if name == "mc" else 1e-12)


@pytest.mark.parametrize("name", ["probit", "probit-centred", "mean-field", "mc"])
def test_without_variance_it_is_the_softmax(name):
    mean = torch.randn(20, 5)
    assert torch.allclose(probabilities(name, mean, torch.zeros(5, 5)), torch.softmax(mean, 1), atol=1e-14)
    assert torch.allclose(as_link(name)(mean, None, softmax), torch.softmax(mean, 1), atol=1e-14)


@pytest.mark.parametrize("name", ["probit-centred", "mean-field", "bridge", "mc"])
def test_links_by_contrasts_ignore_a_common_shift(name):
    mean = torch.randn(20, 5)
    covariance = random_covariance(5)
    plain = probabilities(name, mean, covariance)
    assert torch.allclose(plain, probabilities(name, mean + 3.0, covariance + 100.0), atol=1e-9)


def test_formulas_written_out():
    mean = torch.randn(1, 4)
    covariance = random_covariance(4)
    m = mean[0]
    z = torch.stack([m[i] / math.sqrt(1 + math.pi / 8 * covariance[i, i]) for i in range(4)])
    assert torch.allclose(probabilities(Probit(), mean, covariance)[0], torch.softmax(z, 0))
    centre = torch.eye(4) - 0.25
    centred = centre @ m
    variances = (centre @ covariance @ centre).diagonal()
    expected = torch.softmax(centred / (1 + math.pi / 8 * variances).sqrt(), 0)
    assert torch.allclose(probabilities(CentredProbit(), mean, covariance)[0], expected)
    pairs = torch.zeros(4)
    for i in range(4):
        for j in range(4):
            spread = covariance[i, i] + covariance[j, j] - 2 * covariance[i, j]
            pairs[i] += torch.exp(-(m[i] - m[j]) / torch.sqrt(1 + math.pi / 8 * spread))
    assert torch.allclose(probabilities(MeanField(), mean, covariance)[0], (1 / pairs) / (1 / pairs).sum())
    # The bridge with a covariance for which its own projection and the projection on contrasts agree.
    covariance = centre @ covariance @ centre + 2.0
    ones = torch.ones(4)
    total = ones @ covariance @ ones
    projected = covariance - torch.outer(covariance @ ones, ones @ covariance) / total
    shifted = m - covariance @ ones * m.sum() / total
    alpha = (1 - 2 / 4 + shifted.exp() / 16 * (-shifted).exp().sum()) / projected.diagonal()
    assert torch.allclose(probabilities(Bridge(), mean, covariance)[0], alpha / alpha.sum())


@pytest.mark.parametrize("over", ["logits", "weights"])
def test_monte_carlo_converges_to_the_integral(structure, over):
    """Against weights drawn from the posterior."""
    problem = make_problem(classes=3)
    posterior = mola.fit(problem.network, problem.loader, structure=structure, prior_precision=0.5)
    inputs = torch.randn(4, 3)
    drawn = posterior.sample(10_000, generator=torch.Generator().manual_seed(5)).weights
    brute = torch.softmax(torch.einsum("np,scp->snc", problem.features(inputs), drawn), 2).mean(0)
    actual = posterior.with_link(MonteCarlo(10_000, over=over))(inputs)
    assert float((actual - brute).abs().max()) < 5 * 0.5 / 10_000**0.5 * 2**0.5


@pytest.mark.parametrize("link", [*LINKS, Bridge(normalised=True), MonteCarlo(20, "weights")])
def test_links_see_the_gaussian_of_the_quotient(structure, link):
    """Half of the weights give at any features what the weights give at half of the features."""
    problem = make_problem()
    posterior = mola.fit(problem.network, problem.loader, structure=structure, prior_precision=2.0, link=link)
    (component,) = posterior.components
    phi = problem.features()
    mean = phi @ problem.weights.T
    spread = component.spread(component.project(phi), 2.0)
    halved = posterior.link(mean / 2, component.spread(component.project(phi / 2), 2.0), softmax)
    two = torch.full((len(phi), 1), 2.0)
    four = torch.tensor([[4.0]])
    for quotient in (spread.with_divided_logits(two), spread.with_divided_logits(four).with_divided_logits(1 / two)):
        assert torch.allclose(posterior.link(mean / 2, quotient, softmax), halved, atol=1e-10)
    whole = posterior.link(mean, spread, softmax)
    assert torch.allclose(whole, halved, atol=1e-10) == (link == Bridge(normalised=True))


PEAK = """
import warnings, torch, molaplace as mola
warnings.simplefilter("ignore")
torch.manual_seed(0)
x = torch.randn(64, 512)
links = mola.links.MonteCarlo(16, over="weights")
network = torch.nn.Linear(512, 1000)
posterior = mola.fit(network, [(x, torch.arange(64))], structure="kron-diag", link=links, distances=False, progress=False)
posterior.with_link("probit")(x[:1])

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024

open("/proc/self/clear_refs", "w").write("5")  # forget the peak of the fit
before = peak()
posterior(x[:1])
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are reset in /proc")
def test_draws_of_wide_layers_are_made_a_few_at_a_time():
    """Each draw has 512,000 weights (4 MB), so all 16 together, with their intermediate results, take more than 200 MB."""
    done = run_python("-c", PEAK)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 100


def test_many_draws_of_weights_are_a_mean_over_one_stream_of_draws(structure):
    """A narrow layer whose draws fill memory only after some 20,000: the estimate is unbiased across the chunks."""
    problem = make_problem()
    posterior = mola.fit(problem.network, problem.loader, structure=structure, prior_precision=0.5, progress=False)
    x = problem.inputs[:3]
    reference = posterior.with_link(MonteCarlo(2**16))(x)
    values = posterior.with_link(MonteCarlo(40_000, "weights"))(x)
    assert float((values - reference).abs().max()) < 6 * 0.5 / 40_000**0.5
    free = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(posterior.with_link(MonteCarlo(40_000, "weights"))(free)[:, 0].sum(), free)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("over", ["logits", "weights"])
def test_gradients_where_all_features_are_zero(structure, over):
    """Without a bias, the logits have no variance there. The gradient is that of the softmax, since the draws are symmetric."""
    torch.manual_seed(0)
    network = torch.nn.Linear(3, 4, bias=False)
    inputs = torch.randn(30, 3)
    labels = torch.arange(30) % 4
    posterior = mola.fit(network, [(inputs, labels)], structure=structure, link=MonteCarlo(4096, over), progress=False)
    origin = torch.zeros(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(posterior(origin)[:, 0].sum(), origin)
    (expected,) = torch.autograd.grad(network(origin).softmax(-1)[:, 0].sum(), origin)
    assert bool(gradient.isfinite().all())
    by_logits = over == "logits" and structure != "full"  # the mean of drawn weights differs from the trained weights
    assert float((gradient - expected).abs().max()) < (1e-10 if by_logits else 6 / 4096**0.5)


class TestWrongUse:
    @pytest.mark.parametrize("likelihood", [BERNOULLI, GAUSSIAN])
    def test_links_that_do_not_apply(self, likelihood):
        with pytest.raises(OptionError, match=likelihood.name):
            as_link("bridge", likelihood)

    @pytest.mark.parametrize("options", [{"samples": 0}, {"samples": 1.5}, {"over": "noise"}, {"seed": -1}])
    def test_monte_carlo(self, options):
        with pytest.raises(OptionError, match=next(iter(options))):
            MonteCarlo(**options)
