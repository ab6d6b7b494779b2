"""Networks in float32 against their exact copies in float64: posteriors agree in probabilities, also near singularity."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

import mola
from mola.laplace import ClassDistance, ClassGeometry, ClassSums
from mola.likelihood import CATEGORICAL
from tests.conftest import STRUCTURES

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("precision_benchmark", FOLDER / "precision.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_default_dtype(torch.float32)
    return module


@pytest.mark.parametrize(
    "kind", ["ordinary", "combinations of 8", "sizes from 1e-6 to 100", "almost constant", "certain"]
)
def test_every_structure_at_small_size(benchmark, structure, kind):
    found = benchmark.largest_difference(structure, 24, 10, kind)
    assert len(found) == 4
    assert max(found.values()) < 1e-4


@pytest.mark.parametrize("structure", [name for name in STRUCTURES if name != "full"])
def test_a_thousand_classes(benchmark, structure):
    """With the harder kind of features, whose factor is singular; every kind: the test above."""
    assert max(benchmark.largest_difference(structure, 48, 1000, "combinations of 8").values()) < 1e-4


def test_the_comparison_can_fail(benchmark):
    """A posterior of other data is told apart by far more than the bar."""
    network = benchmark.network(24, 10, "ordinary")
    inputs = torch.randn(48, benchmark.INPUTS)
    one, two = (mola.fit(network, [some], progress=False, prior_precision=1e-3) for some in (inputs, 3 * inputs))
    assert float((one(inputs) - two(inputs)).abs().max()) > 1e-2


def test_a_singular_factor_is_singular(benchmark):
    network = copy.deepcopy(benchmark.network(24, 10, "combinations of 8"))
    posterior = mola.fit(network, [torch.randn(48, benchmark.INPUTS)], progress=False)
    values = posterior.components[0].curvature.spectrum.feature_values
    assert int((values > 1e-10 * values.max()).sum()) == 9  # eight, and the constant


@pytest.mark.parametrize("classes", [2, 10, 33, 1000])
@pytest.mark.parametrize("scale", [0.1, 10.0, 1000.0])
def test_scores_and_curvature_at_once_are_those_apart(classes, scale):
    outputs, labels = scale * torch.randn(50, classes), torch.randint(classes, (50,))
    scores, curvature = CATEGORICAL.scored_curvature(outputs, labels)
    torch.testing.assert_close(
        scores, torch.log_softmax(outputs, 1).gather(1, labels[:, None])[:, 0], rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(curvature.coupling, torch.softmax(outputs, 1), rtol=1e-12, atol=1e-300)
    torch.testing.assert_close(curvature.degrees(), curvature.diagonal().sum(0), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("spread", [0.3, 0.01])
@pytest.mark.parametrize("kept", [2**23, 0], ids=["one table", "in portions"])
def test_distances_of_tight_classes(spread, kept, monkeypatch):
    """Trained networks have them: class means lie thousands of standard deviations apart, with squares of 1e7, and distances of 5."""
    monkeypatch.setattr("mola.laplace.distance.KEPT", kept)
    means, labels = torch.randn(10, 24).relu(), torch.randint(10, (800,))
    features = means[labels] + spread * torch.logspace(0, -2, 24) * torch.randn(800, 24)
    sums = ClassSums.empty(24, 10, torch.device("cpu"))
    sums.absorb(features.clone(), labels, predicted=False)
    exact = ClassDistance(ClassGeometry(sums))
    rounded = features.float()
    expected, found = (one.logs(rounded.to(one.dtype))[0] for one in (exact, exact.to(exact.device, torch.float32)))
    assert float((found - expected).abs().max()) < 2e-3 * (1e-2 if spread > 0.1 else 1)
