"""The structure that has the class factor by its diagonal: where it is exact, how far off it can be, and what it never makes."""

import math

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.structures import STRUCTURES as KNOWN
from molaplace.structures.base import laplacian
from molaplace.structures.kron_diag import graph_of_degrees
from molaplace.sums import Sums
from tests.closeness import assert_close
from tests.conftest import make_problem
from tests.library.problems import relative
from tests.reference import dense

PAIR = ("kron", "kron-diag")

pytestmark = pytest.mark.filterwarnings("ignore:.*have no training data")


def matrix_of(degrees):
    total, nodes = graph_of_degrees(degrees)
    return total * (torch.diag(nodes) - torch.outer(nodes, nodes))


def both(problem):
    fits = (mola.fit(problem.network, problem.loader, structure=name) for name in PAIR)
    return [fit.components[0].layer.curvature for fit in fits]


class TestGraph:
    @pytest.mark.parametrize("classes", [2, 3, 4, 10, 1000])
    @pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
    def test_has_the_degrees_it_was_given(self, classes, sharpness):
        probs = torch.softmax(sharpness * torch.randn(50, classes), 1)
        degrees = laplacian(probs.T @ probs).diagonal()
        actual = matrix_of(degrees)
        assert relative(actual.diagonal(), degrees) < 1e-9
        assert float(actual.sum(1).abs().max()) < 1e-12 * float(degrees.max())
        assert float(torch.linalg.eigvalsh(actual)[0]) > -1e-12 * float(degrees.max())

    @pytest.mark.parametrize("weights", [[0.9, 0.05, 0.05], [0.6, 0.2, 0.1, 0.1], [0.5, 0.5], [1e-9, 0.3, 0.7]])
    def test_is_exact_for_one_softmax_however_dominant_a_class(self, weights):
        probs = torch.tensor(weights) / math.fsum(weights)
        exact = torch.diag(probs) - torch.outer(probs, probs)
        assert relative(matrix_of(exact.diagonal()), exact) < 1e-8


class TestAgainstKron:
    @pytest.mark.parametrize("case", ["two classes", "one datum", "constant curvature"])
    def test_is_kron_where_the_module_says(self, case):
        problem = make_problem(
            classes={"two classes": 2, "constant curvature": 6}.get(case, 4), count=1 if case == "one datum" else 40
        )
        if case == "constant curvature":
            with torch.no_grad():
                problem.network[-1].weight.zero_()
        kron, diag = both(problem)
        features = torch.randn(5, 7)
        for prior in (1e-6, 0.7, 50.0):
            assert (
                relative(diag.covariance(diag.project(features), prior), kron.covariance(kron.project(features), prior))
                < 1e-9
            )
            at = torch.tensor(prior)
            assert relative(diag.log_determinant(at), kron.log_determinant(at)) < 1e-9

    @pytest.mark.parametrize("seed", range(5))
    def test_is_as_near_as_the_module_says(self, seed):
        """The order between the two covariances, with the eigenvalues of the normalised class factor."""
        problem = make_problem(seed=seed, classes=7)
        a, _ = dense.kron_factors(problem.weights, problem.features())
        spectrum = torch.linalg.eigvalsh(a / (a.diagonal().sqrt()[:, None] * a.diagonal().sqrt()))
        _, nodes = graph_of_degrees(a.diagonal())
        low = float(spectrum[1]) * (1 - float(nodes.max()))
        high = float(spectrum[-1])
        assert 0 < low <= 1 <= high <= 2 + 1e-12
        near = dense.same_diagonal(a.diagonal())
        assert float(torch.linalg.eigvalsh(a - low * near)[0]) > -1e-12
        assert float(torch.linalg.eigvalsh(high * near - a)[0]) > -1e-12
        kron, diag = both(problem)
        for prior in (1e-4, 1.0):
            ratio = kron.variance(kron.project(problem.features()), prior) / diag.variance(
                diag.project(problem.features()), prior
            )
            assert 1 / high - 1e-12 <= float(ratio.min())
            assert float(ratio.max()) <= 1 / low + 1e-12


@pytest.mark.parametrize("degree", [0.1, 1e-16, 1e-25, 1e-300, 5e-324])
@pytest.mark.parametrize("prior", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_degrees_of_any_size_beside_any_prior(degree, prior):
    """Where degrees are equal, A is a multiple of the centring matrix, and U's variances can be written down."""
    classes = 7
    count = 3
    sums = Sums({"degrees": torch.full((classes,), count * degree), "gram": count * torch.eye(2)}, count)
    curvature = KNOWN["kron-diag"]().solve(sums)
    expected = (1 - 1 / classes) / (count**0.5 * degree * classes / (classes - 1) + prior**0.5)
    truth = torch.full((classes,), expected)
    z = curvature.project(torch.eye(2)[:1])
    along = 1 / (count**0.5 + prior**0.5)  # of V, which is a multiple of the identity
    assert relative(curvature.variance(z, prior, centred=True)[0], along * truth) < 1e-12
    assert relative(curvature.covariance(z, prior, centred=True)[0].diagonal(), along * truth) < 1e-12
    assert relative(curvature.variance(z, prior)[0], along * (truth + 1 / (classes * prior**0.5))) < 1e-12


class TestVeryManyClasses:
    CLASSES = 20_000

    @pytest.fixture
    def wide(self):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, self.CLASSES)).float()
        return network, torch.randn(8, 5, dtype=torch.float32), torch.randint(self.CLASSES, (8,))

    @pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
    @pytest.mark.parametrize("structure", ["kron-diag", "diag"])
    def test_no_tensor_is_as_large_as_c_by_c(self, wide, structure, tmp_path):
        """Fit, tune, evidence, predict, sample, save and load."""
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
            rule = mola.rules.Score("nll", [1e-3, 1.0, 1e3])
            posterior = posterior.tune(loader, rule=rule, progress=False)
            posterior.log_evidence()
            prediction = posterior.predict(inputs)
            posterior.with_link("probit-centred")(inputs)
            posterior.sample(2, generator=torch.Generator().manual_seed(0))
            posterior.confidence_bound(inputs)
            posterior.save(tmp_path / "wide")
            loaded = mola.load(tmp_path / "wide", network)
        assert_close(loaded(inputs), posterior(inputs))
        assert torch.allclose(prediction.probs.sum(1), torch.ones(8, dtype=torch.float32))
        assert 0 < largest < self.CLASSES**2 // 20
