"""The structure that knows the class factor by its diagonal: where it is exact, how far off it can be, and what it never makes."""

import math

import pytest
import torch
from torch import nn

import mola
from mola.bounds import class_bounds
from mola.laplace import STRUCTURES as KNOWN
from mola.laplace.kron_diag import KronDiagFactors, graph_of_degrees
from mola.laplace.symmetric import pack
from mola.likelihood import CATEGORICAL, OutputCurvature, laplacian
from tests.conftest import make_problem
from tests.reference import dense


def relative(found, expected) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def matrix_of(degrees):
    total, nodes = graph_of_degrees(degrees)
    return total * (torch.diag(nodes) - torch.outer(nodes, nodes))


def both(problem, prior=0.7):
    fits = (mola.fit(problem.network, problem.loader, structure=name, prior_precision=prior) for name in PAIR)
    return [one.components[0].curvature.spectrum for one in fits]


PAIR = ("kron", "kron-diag")


class TestGraph:
    @pytest.mark.parametrize("classes", [2, 3, 4, 10, 1000])
    @pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
    def test_has_the_degrees_it_was_given(self, classes, sharpness):
        probs = torch.softmax(sharpness * torch.randn(50, classes), 1)
        degrees = laplacian(probs.T @ probs).diagonal()
        found = matrix_of(degrees)
        assert relative(found.diagonal(), degrees) < 1e-9
        assert float(found.sum(1).abs().max()) < 1e-12 * float(degrees.max())
        assert float(torch.linalg.eigvalsh(found)[0]) > -1e-12 * float(degrees.max())

    def test_agrees_with_the_slow_way(self):
        degrees = torch.rand(7)
        assert relative(matrix_of(degrees), dense.same_diagonal(degrees)) < 1e-10

    @pytest.mark.parametrize("weights", [[0.9, 0.05, 0.05], [0.6, 0.2, 0.1, 0.1], [0.5, 0.5], [1e-9, 0.3, 0.7]])
    def test_is_exact_for_one_softmax_however_dominant_a_class(self, weights):
        probs = torch.tensor(weights) / math.fsum(weights)
        exact = torch.diag(probs) - torch.outer(probs, probs)
        assert relative(matrix_of(exact.diagonal()), exact) < 1e-8

    def test_of_a_star_is_the_star(self):
        """Every class is confused with the first and with no other: the graph with these degrees is a limit."""
        edges = torch.zeros(5, 5)
        edges[0, 1:] = edges[1:, 0] = torch.tensor([0.1, 0.2, 0.3, 0.4])
        assert relative(matrix_of(laplacian(edges).diagonal()), laplacian(edges)) < 1e-6

    def test_of_nothing_is_nothing(self):
        total, nodes = graph_of_degrees(torch.zeros(4))
        assert total == 0
        assert torch.equal(nodes, torch.full((4,), 0.25))
        assert torch.equal(matrix_of(torch.tensor([1.0, 1.0, 0.0]))[2], torch.zeros(3))


class TestAgainstKron:
    def test_is_kron_for_two_classes(self):
        problem = make_problem(classes=2)
        kron, diag = both(problem)
        features = problem.features(torch.randn(5, 3))
        for prior in (1e-6, 0.7, 50.0):
            assert relative(
                diag.posterior(prior).covariance(features), kron.posterior(prior).covariance(features)
            ) < 1e-10  # fmt: skip
            at = torch.tensor(prior)
            assert relative(diag.log_determinant(at), kron.log_determinant(at)) < 1e-10

    def test_is_kron_for_one_datum(self):
        kron, diag = both(make_problem(count=1))
        features = make_problem().features()
        assert relative(diag.posterior(0.1).covariance(features), kron.posterior(0.1).covariance(features)) < 1e-9

    def test_is_kron_where_the_output_curvature_is_constant(self):
        problem = make_problem(classes=6)
        with torch.no_grad():
            problem.network[-1].weight.zero_()
        kron, diag = both(problem)
        features = problem.features()
        assert relative(diag.posterior(0.1).covariance(features), kron.posterior(0.1).covariance(features)) < 1e-10

    @pytest.mark.parametrize("seed", range(5))
    def test_is_as_near_as_the_module_says(self, seed):
        """The order between the two covariances, with the eigenvalues of the normalised class factor."""
        problem = make_problem(seed=seed, classes=7)
        a, _ = dense.kron_factors(problem.weights, problem.features())
        scaled = a / (a.diagonal().sqrt()[:, None] * a.diagonal().sqrt())
        spectrum = torch.linalg.eigvalsh(scaled)
        _, nodes = graph_of_degrees(a.diagonal())
        low, high = float(spectrum[1]) * (1 - float(nodes.max())), float(spectrum[-1])
        assert 0 < low <= 1 <= high <= 2 + 1e-12
        near = dense.same_diagonal(a.diagonal())
        assert float(torch.linalg.eigvalsh(a - low * near)[0]) > -1e-12
        assert float(torch.linalg.eigvalsh(high * near - a)[0]) > -1e-12
        features = problem.features()
        for prior in (1e-4, 1.0):
            kron, diag = (one.posterior(prior) for one in both(problem, prior))
            ratio = kron.variance(features) / diag.variance(features)
            assert 1 / high - 1e-12 <= float(ratio.min())
            assert float(ratio.max()) <= 1 / low + 1e-12

    def test_has_the_same_far_field_bound_up_to_that(self):
        problem = make_problem()
        bounds = [
            mola.fit(problem.network, problem.loader, structure=name).confidence_bound(problem.inputs) for name in PAIR
        ]
        found = mola.fit(problem.network, problem.loader, structure="kron-diag")(1e6 * problem.inputs)
        assert bool((found.max(1).values <= bounds[1] + 1e-12).all())
        assert float((bounds[0] - bounds[1]).abs().max()) < 0.05

    def test_the_outlier_score_is_kron_s(self):
        problem = make_problem()
        scores = [
            mola.fit(problem.network, problem.loader, structure=name).predict(problem.inputs).ood_score for name in PAIR
        ]
        assert relative(*scores) < 1e-12


def test_a_likelihood_with_both_parts_against_its_dense_form():
    structure, problem = KNOWN["kron-diag"](), make_problem()
    features = problem.features()
    mixed = OutputCurvature(separate=torch.rand(40, 4), coupling=CATEGORICAL.curvature(torch.randn(40, 4)).coupling)
    factors = structure.sums(features, mixed, None)
    restored = structure.restore(factors.count, None, factors.saved())
    a = dense.same_diagonal(factors.degrees / 40) + torch.diag(factors.separate) / 40
    u = torch.linalg.inv(40**0.5 * a + 0.3**0.5 * torch.eye(4))
    for one in (factors, restored):
        spectrum = structure.spectrum(one)
        found = spectrum.posterior(0.3).covariance(features)
        assert relative(found / found[:, :1, :1], (u / u[0, 0]).expand_as(found)) < 1e-10
        assert relative(spectrum.class_log_determinant(torch.tensor(0.3)), -torch.linalg.slogdet(u)[1]) < 1e-10
        assert torch.equal(spectrum.posterior(0.3).contrast_covariance(features), found)


def test_parts_that_some_batches_lack_add_up():
    structure, features = KNOWN["kron-diag"](), make_problem().features()
    coupled = structure.sums(features, CATEGORICAL.curvature(torch.randn(40, 4)), None)
    apart = structure.sums(features, OutputCurvature(separate=torch.rand(40, 4), coupling=None), None)
    for sums in (coupled + apart, apart + coupled):
        assert torch.equal(sums.degrees, coupled.degrees)
        assert torch.equal(sums.separate, apart.separate)


def test_a_network_that_is_certain_of_everything():
    """All degrees are 0 in float64: nothing is known of any class, and nothing breaks."""
    problem = make_problem()
    with torch.no_grad():
        problem.network[-1].weight.mul_(1e6)
    found = mola.fit(problem.network, problem.loader, structure="kron-diag", prior_precision=1e-4)
    assert bool(found(problem.inputs).isfinite().all())
    assert bool(found.log_evidence().isfinite().all())


@pytest.mark.parametrize("degree", [0.1, 1e-16, 1e-25, 1e-300, 5e-324])
@pytest.mark.parametrize("prior", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_degrees_of_any_size_beside_any_prior(degree, prior):
    """Where degrees are equal, A is theirs times a centring, and U's variances can be written down."""
    classes, count = 7, 3
    factors = KronDiagFactors(count, None, torch.full((classes,), count * degree), pack(count * torch.eye(2)))
    spectrum = KNOWN["kron-diag"]().spectrum(factors)
    curvature = count**0.5 * degree * classes / (classes - 1)
    expected = (1 - 1 / classes) / (curvature + prior**0.5)
    assert relative(spectrum.class_variance(prior, contrast=True), torch.full((classes,), expected)) < 1e-12
    assert relative(spectrum.class_matrix(prior).diagonal(), torch.full((classes,), expected)) < 1e-12
    with_hidden = torch.full((classes,), expected + 1 / (classes * prior**0.5))
    assert relative(spectrum.class_variance(prior), with_hidden) < 1e-12


class TestVeryManyClasses:
    CLASSES = 20_000

    @pytest.fixture
    def wide(self):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, self.CLASSES)).float()
        inputs = torch.randn(8, 5, dtype=torch.float32)
        labels = torch.randint(self.CLASSES, (8,))
        return network, inputs, labels

    @pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")
    @pytest.mark.parametrize("structure", ["kron-diag", "diag"])
    def test_no_tensor_is_as_large_as_c_by_c(self, wide, structure, tmp_path):
        """Fit, tune, evidence, predict, sample, save and load, with every tensor that torch makes looked at."""
        network, inputs, labels = wide
        largest = 0

        class Watch(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function, types, arguments=(), options=None):
                nonlocal largest
                result = function(*arguments, **(options or {}))
                if isinstance(result, torch.Tensor):
                    largest = max(largest, result.numel())
                return result

        loader = list(zip(inputs.split(4), labels.split(4), strict=True))
        with Watch():
            posterior = mola.fit(network, loader, structure=structure, progress=False)
            posterior = posterior.tune(loader, mola.ValidationScore("nll", [1e-3, 1.0, 1e3]), progress=False)
            posterior.log_evidence()
            prediction = posterior.predict(inputs)
            posterior.with_link("probit-centered")(inputs)
            posterior.sample(2, generator=torch.Generator().manual_seed(0))
            posterior.confidence_bound(inputs)
            posterior.save(tmp_path / "wide")
            again = mola.load(tmp_path / "wide", models=network)
        assert torch.equal(again(inputs), posterior(inputs))
        assert torch.allclose(prediction.probs.sum(1), torch.ones(8, dtype=torch.float32))
        assert 0 < largest < self.CLASSES**2 // 20

    @pytest.mark.parametrize("structure", ["kron", "kron-exact"])
    def test_kron_says_what_to_take_instead(self, structure, monkeypatch, wide):
        """Before the pass, and not by running out of memory in it."""
        network, inputs, _ = wide
        monkeypatch.setattr("mola.laplace.kron.free_memory", lambda: 7 * 10**9)
        with pytest.raises(mola.StructureTooLargeError, match=r"20000 x 20000 .* takes 8\.0 GB .* 'kron-diag'"):
            mola.fit(network, [inputs], structure=structure, progress=False)
        monkeypatch.setattr("mola.laplace.kron.free_memory", lambda: 9 * 10**9)
        KNOWN[structure]().check_size([17], self.CLASSES)
        with pytest.raises(mola.StructureTooLargeError, match=r"2 networks.*'diag'"):
            KNOWN[structure]().check_size([40_000, 16], 10)

    def test_mean_field_says_why_it_cannot(self, wide):
        network, inputs, _ = wide
        posterior = mola.fit(network, [inputs], structure="kron-diag", link="mean-field", progress=False)
        with pytest.raises(mola.OptionError, match=r"20000 x 20000 pairs.*probit"):
            posterior(inputs)


def test_class_bounds_equal_the_sum_over_pairs():
    largest = torch.tensor([0.0, 0.3, 5.0, 40.0, 800.0])
    for c, found in enumerate(class_bounds(largest)):
        others = math.fsum(math.exp(-float(largest[i] + largest[c])) for i in range(5) if i != c)
        assert abs(float(found) - 1 / (1 + others)) < 1e-15
