"""What is said of numbers, as rows and as results: against slow and obvious versions of the same."""

from __future__ import annotations

import math

import pytest
import torch

from molaplace.evaluation import PredictionColumns, labelled_result, measured, outlier_leads, outlier_result
from molaplace.evaluation.columns import LEVELS, NOMINAL_LEVELS, DenseRows
from molaplace.evaluation.leads import differences
from molaplace.likelihoods import BERNOULLI
from molaplace.prediction import RegressionPrediction


def make_prediction(count, outputs=2, components=3, seed=0, wide=1.0):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(count, components, outputs, generator=generator, dtype=torch.float64)
    noise = wide * (0.3 + torch.rand(count, components, outputs, generator=generator, dtype=torch.float64))
    weights = torch.softmax(torch.randn(components, generator=generator, dtype=torch.float64), 0)
    score = torch.randn(count, generator=generator, dtype=torch.float64)
    targets = torch.randn(count, outputs, generator=generator, dtype=torch.float64)
    fields = {"component_mean": means, "component_variance": 1.5 * noise, "component_noise": noise, "ood_score": score}
    return RegressionPrediction(fields, weights=weights, ood_score_name="distance"), targets


def tally_of(prediction, targets=None):
    columns = PredictionColumns()
    columns.add(prediction, targets, detail=True)
    return columns


@pytest.mark.parametrize("outputs", [1, 3])
def test_rows_of_numbers_are_what_the_prediction_says(outputs):
    prediction, targets = make_prediction(200, outputs)
    tally = tally_of(prediction, targets)
    metrics = measured(tally)
    assert metrics["rmse"].value == pytest.approx(float((prediction.mean - targets).square().mean().sqrt()))
    assert metrics["nll"].value == pytest.approx(-float(prediction.log_prob(targets).mean()))
    assert metrics["crps"].value == pytest.approx(float(prediction.crps(targets).mean()))
    for level in LEVELS:
        lower, upper = prediction.interval(level)
        held = ((targets >= lower) & (targets <= upper)).double().mean()
        assert metrics[f"coverage_{100 * level:g}"].value == pytest.approx(float(held))
        assert metrics[f"width_{100 * level:g}"].value == pytest.approx(float((upper - lower).mean()))
    result = labelled_result(tally, classes=[str(index) for index in range(outputs)])
    for level, held, _ in result.regression.coverage:
        lower, upper = prediction.interval(level)
        assert held == pytest.approx(float(((targets >= lower) & (targets <= upper)).double().mean()))
    assert [row[0] for row in result.regression.coverage] == list(NOMINAL_LEVELS)
    for index in range(outputs):
        output_result = result.regression.outputs[str(index)]
        assert output_result.metrics["rmse"] == pytest.approx(
            float((prediction.mean - targets)[:, index].square().mean().sqrt())
        )
    # The marginal likelihoods of one output are the joint one.
    if outputs == 1:
        assert output_result.metrics["nll"] == pytest.approx(result.metrics["nll"])


def test_rows_belong_to_inputs():
    """Positions are counted over batches, and the known labels of an input are its rows."""
    prediction, targets = make_prediction(12)
    rows = DenseRows(torch.tensor([0, 0, 1, 1, 1, 2]), 4)
    dense = PredictionColumns()
    for part in (slice(0, 6), slice(6, 12)):
        dense.add(prediction[part], targets[part], dense_rows=rows)
    assert dense.data.groups.tolist() == dense.scores.groups.tolist() == [0, 0, 1, 1, 1, 2, 4, 4, 5, 5, 5, 6]
    labels = (torch.rand(5, 3) > 0.5).double()
    labels[1, 2] = math.nan
    several = PredictionColumns()
    several.add_probabilities(torch.rand(5, 3), labels, likelihood=BERNOULLI)
    assert torch.bincount(several.data.groups).tolist() == [3, 2, 3, 3, 3]
    assert len(several.scores) == 5
    assert (dense.count, several.count) == (8, 5)


def test_differences_are_taken_datum_by_datum():
    prediction, targets = make_prediction(300)
    other = make_prediction(300, seed=0, wide=1.3)[0]
    tallies = {"DE": tally_of(other, targets), "MoLA": tally_of(prediction, targets)}
    value, error = differences(tallies, "MoLA")["DE"]["nll"]
    gaps = -(other.log_prob(targets) - prediction.log_prob(targets))
    assert value == pytest.approx(float(gaps.mean()))
    assert error == pytest.approx(float(gaps.std()) / math.sqrt(300))
    assert differences(tallies, "MoLA")["DE"]["rmse"][0] == pytest.approx(0.0)


def test_outliers_are_told_by_variance_and_by_the_score():
    inside, targets = make_prediction(150)
    outside, _ = make_prediction(90, seed=3, wide=4.0)
    near, far = tally_of(inside, targets), tally_of(outside)
    result = outlier_result(near, far)
    assert set(result.scores) == {"variance", "ood score"}
    assert result.confidence is None
    assert result.std == pytest.approx(float(outside.std.mean()))
    pairs = outside.variance.log().mean(1)[:, None] > inside.variance.log().mean(1)
    assert result.scores["variance"]["auroc"] == pytest.approx(float(pairs.double().mean()))
    assert outlier_leads({"MoLA": near}, {"MoLA": far})["auroc"].best == ("MoLA", "variance")
