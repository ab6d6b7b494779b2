"""The same predictions give the same numbers by every door: `mola.metrics`, `mola.evaluate`, and the results of reports and records."""

from __future__ import annotations

import math

import pytest
import torch

import molaplace as mola
from molaplace import metrics
from molaplace.evaluation import PredictionColumns, labelled_result, measured, separation
from molaplace.evaluation.catalogue import CATALOGUE, OUTLIER_METRICS


def with_underflow(dtype):
    """Probabilities of 100 data, one of which has probability 0 for its label."""
    probs = torch.full((100, 2), 0.5, dtype=dtype)
    probs[:, 0] += torch.linspace(0, 0.4, 100, dtype=dtype)
    probs[:, 1] = 1 - probs[:, 0]
    probs[7] = torch.tensor([1.0, 0.0], dtype=dtype)
    labels = torch.zeros(100, dtype=torch.int64)
    labels[7] = 1
    return probs, labels


def by_columns(probs, labels, likelihood):
    """The log loss of a report or a record, from two batches."""
    columns = PredictionColumns()
    for rows in (slice(0, 30), slice(30, None)):
        columns.add_probabilities(probs[rows], labels[rows], likelihood=likelihood)
    return columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_probability_of_zero_costs_the_same_by_every_door(dtype):
    probs, labels = with_underflow(dtype)
    expected = float(-probs[torch.arange(100), labels].double().clamp_min(torch.finfo(dtype).tiny).log().mean())
    columns = by_columns(probs, labels, mola.likelihoods.Categorical())
    table = mola.evaluate(lambda inputs: probs[inputs[:, 0].long()], [(torch.arange(100.0)[:, None], labels)])
    losses = {
        "metrics": metrics.negative_log_likelihood(probs, labels),
        "evaluate": table["<lambda>", "test"]["nll"].value,
        "columns": measured(columns)["nll"].value,
        "result": labelled_result(columns).metrics["nll"],
    }
    assert losses == pytest.approx(dict.fromkeys(losses, expected), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_certain_wrong_label_costs_the_same_whichever_answer_is_yes(dtype):
    probs = torch.tensor([[0.0, 1.0], [0.2, 0.8], [1.0, 0.0]], dtype=dtype)
    labels = torch.tensor([[1.0, 1.0], [0.0, math.nan], [1.0, 1.0]])
    likelihood = mola.likelihoods.Bernoulli()
    loss = measured(by_columns(probs, labels, likelihood))["nll"].value
    flipped = measured(by_columns(1 - probs, 1 - labels, likelihood))["nll"].value
    table = mola.evaluate(lambda inputs: probs, [(torch.zeros(3, 1), labels)], likelihood=likelihood)
    assert loss == pytest.approx(flipped, rel=1e-6)
    assert loss == pytest.approx(table["<lambda>", "test"]["nll"].value, rel=1e-12)
    assert loss == pytest.approx((-2 * math.log(torch.finfo(dtype).eps) - math.log(0.8)) / 5, rel=1e-6)


def test_every_metric_of_the_table_is_that_of_the_results():
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(3 * torch.randn(200, 4, generator=generator), 1)
    labels = torch.randint(4, (200,), generator=generator)
    row = mola.evaluate(lambda inputs: probs, [(torch.zeros(200, 1), labels)])["<lambda>", "test"]
    result = labelled_result(by_columns(probs, labels, mola.likelihoods.Categorical()))
    for name in ("accuracy", "nll", "brier", "ece", "aurc", "confidence"):
        assert row[name].value == pytest.approx(result.metrics[name], rel=1e-12), name
    for name, error in result.errors.items():
        assert row[name].error == pytest.approx(error, rel=1e-12), name


def test_every_measured_metric_is_in_the_catalogue():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(50, 4, generator=generator)
    classes = by_columns(probs / probs.sum(1, keepdim=True), torch.randint(4, (50,)), mola.likelihoods.Categorical())
    labels = by_columns(probs, torch.bernoulli(probs, generator=generator), mola.likelihoods.Bernoulli())
    moments = torch.rand(50, 1, generator=generator)
    likelihood = mola.likelihoods.Gaussian(noise=0.1)
    regression = PredictionColumns()
    prediction = mola.RegressionPrediction.of_means(moments[:, None], torch.ones(1), likelihood)
    regression.add(prediction, moments + 0.1, detail=True)
    names = {name for columns in (classes, labels, regression) for name in measured(columns)}
    assert {"aurc", "auroc", "crps", "coverage_90", "width_50"} <= names <= CATALOGUE.keys()
    reported = labelled_result(labels).metrics.keys() | labelled_result(classes).metrics.keys()
    assert measured(labels).keys() | measured(classes).keys() <= reported <= CATALOGUE.keys()
    by_score = separation(classes, classes)
    assert {name for metrics in by_score.values() for name in metrics} <= OUTLIER_METRICS.keys()


def test_every_prediction_is_in_the_histogram_of_confidences():
    """The weights of ten networks sum to more than 1 in float32, and with them the confidence where all networks are certain."""
    certain = torch.nn.functional.one_hot(torch.arange(60) % 3).float()
    probs = mola.Mixture([lambda inputs: certain] * 10)(torch.zeros(60, 1))
    assert float(probs.max()) > 1
    result = labelled_result(by_columns(probs, torch.arange(60) % 3, mola.likelihoods.Categorical()))
    assert result.histogram[-1] == result.reliability[-1][0] == 60
