"""Under any default device of torch, here "meta", whose tensors hold no values, every result is the one without it."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.numerics import sobol_normals
from tests.library.problems import blobs, loader, trained
from tests.library.test_gaussian import data as regression_data
from tests.library.test_gaussian import network as regression_network

pytestmark = pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")


@contextmanager
def default_device(name: str) -> Iterator[None]:
    sobol_normals.cache_clear()  # other tests may have drawn on the CPU
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.fixture(params=["categorical", "bernoulli", "gaussian", "dense"])
def problem(request):
    """Networks, labelled batches (training, validation, test), and the likelihood."""
    inputs, labels = blobs(seed=1, count=300)
    networks = [trained(seed) for seed in range(2)]
    likelihood = request.param
    if likelihood == "bernoulli":
        labels = nn.functional.one_hot(labels, 4).double()
    elif likelihood == "gaussian":
        inputs, labels = regression_data(2, 300)
        networks = [regression_network(2, seed) for seed in range(2)]
    elif likelihood == "dense":
        inputs = inputs.reshape(25, 12, 3)
        labels = labels.reshape(25, 12)
        likelihood = "categorical"
    size = len(inputs) // 5
    parts = [loader(x, y, size) for x, y in zip(inputs.split(2 * size), labels.split(2 * size), strict=False)]
    return networks, parts, likelihood


def decisions(posterior, prediction, batches):
    """Everything decided from a prediction, with thresholds from the same data."""
    labels = torch.cat([y for _, y in batches])
    yield "alarm", mola.alarm_threshold(prediction.ood_score, 0.1)
    if isinstance(prediction, mola.RegressionPrediction):
        for method in ("quantile", "normalised"):
            yield from enumerate(mola.prediction_intervals(prediction, labels, 0.8, method)(prediction))
        yield "CRPS", prediction.crps(labels)
        yield "CRPS of an array", prediction.crps(labels.numpy())
        yield "densities", prediction.log_prob(labels.tolist())
        yield "cdf", prediction.cdf(0.3)
        yield "interval", torch.stack(prediction.interval(0.8))
    elif labels.dim() == 1:
        threshold = mola.abstain_threshold(prediction, labels, 0.4, 0.8)
        yield "abstention", torch.stack([threshold(prediction), threshold(prediction.probs.numpy())])
        for method, randomised in (("lac", False), ("aps", True), ("raps", True)):
            draws = torch.Generator("cpu").manual_seed(3)
            sets = mola.prediction_sets(prediction, labels, 0.8, method, randomised=randomised, generator=draws)
            yield method, sets(prediction, generator=draws)


def everything(networks, parts, likelihood, folder):
    """All results of a session: fit, tune, predict, decide, evaluate, save and load, by name."""
    train, validation, test = parts
    fitted = mola.fit(networks, train, likelihood=likelihood, progress=False)
    posterior = fitted.tune(validation, progress=False)  # by the default rule
    yield "settings", posterior.settings
    yield "evidence", posterior.log_evidence()
    yield "sample", posterior.sample(5, generator=torch.Generator("cpu").manual_seed(0)).weights
    inputs = test[0][0]
    prediction = posterior.predict(test, progress=False)
    yield from prediction.numpy().items()
    yield "repr", repr(prediction)
    yield "call", posterior(inputs)
    yield "other link", posterior.with_link("mc")(inputs) if likelihood != "gaussian" else 0
    if prediction.ood_score.dim() == 1:
        yield from decisions(posterior, prediction, test)
    ensemble = mola.ensemble(networks, likelihood=posterior.likelihood)
    yield "evaluation", repr(mola.evaluate({"MoLA": posterior, "DE": ensemble}, test, progress=False))
    yield "loaded", mola.load(posterior.save(folder), networks)(inputs)


def test_every_result_is_the_same_under_a_default_device(problem, tmp_path):
    with default_device("meta"):
        actual = list(everything(*problem, tmp_path / "meta"))
    expected = list(everything(*problem, tmp_path / "plain"))
    assert len(expected) > 12
    for (name, value), (expected_name, expected_value) in zip(actual, expected, strict=True):
        assert name == expected_name
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, expected_value), name
        elif isinstance(value, np.ndarray):
            assert np.array_equal(value, expected_value), name
        else:
            assert value == expected_value, name


def test_estimators_train_on_the_cpu():
    rows = np.random.default_rng(0).normal(size=(60, 3))
    model = mola.MolaClassifier(hidden=(4,), members=2, epochs=2, random_state=0)
    with default_device("meta"):
        actual = model.fit(rows, rows[:, 0] > 0).predict_proba(rows)
    assert np.array_equal(actual, model.fit(rows, rows[:, 0] > 0).predict_proba(rows))
