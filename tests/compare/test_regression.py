"""What is said of numbers, as rows and as results: against slow and obvious versions of the same."""

from __future__ import annotations

import math

import pytest
import torch

from mola.compare import Answer, Tally, mean_of
from mola.compare.measured import Measurement, area_between, mean_area_of_labels, root_mean_of
from mola.compare.regression import (
    LEVELS,
    NOMINAL,
    RegressionAnswer,
    differences,
    regression_measured,
    regression_result,
)
from mola.compare.results import outlier_leads, outlier_result
from mola.likelihoods import BERNOULLI
from mola.prediction import RegressionPrediction


def said(count, outputs=2, components=3, seed=0, wide=1.0):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(components, count, outputs, generator=generator, dtype=torch.float64)
    noise = wide * (0.3 + torch.rand(components, count, outputs, generator=generator, dtype=torch.float64))
    weights = torch.softmax(torch.randn(components, generator=generator, dtype=torch.float64), 0)
    score = torch.randn(count, generator=generator, dtype=torch.float64)
    targets = torch.randn(count, outputs, generator=generator, dtype=torch.float64)
    fields = {"component_mean": means, "component_variance": 1.5 * noise, "component_noise": noise, "ood_score": score}
    return RegressionPrediction(fields, weights=weights, ood_score_name="distance"), targets


def tally_of(prediction, targets=None, **more):
    tally = Tally()
    tally.add(RegressionAnswer(prediction, prediction.ood_score, **more), targets)
    return tally


@pytest.mark.parametrize("outputs", [1, 3])
def test_rows_of_numbers_are_what_the_prediction_says(outputs):
    prediction, targets = said(200, outputs)
    tally = tally_of(prediction, targets)
    found = regression_measured(tally)
    assert found["rmse"].value == pytest.approx(float((prediction.mean - targets).square().mean().sqrt()))
    assert found["nll"].value == pytest.approx(-float(prediction.log_prob(targets).mean()))
    assert found["crps"].value == pytest.approx(float(prediction.crps(targets).mean()))
    for level in LEVELS:
        lower, upper = prediction.interval(level)
        held = ((targets >= lower) & (targets <= upper)).double().mean()
        assert found[f"coverage_{100 * level:g}"].value == pytest.approx(float(held))
        assert found[f"width_{100 * level:g}"].value == pytest.approx(float((upper - lower).mean()))
    result = regression_result(tally, [str(place) for place in range(outputs)])
    for level, held, _ in result.regression.coverage:
        lower, upper = prediction.interval(level)
        assert held == pytest.approx(float(((targets >= lower) & (targets <= upper)).double().mean()))
    assert [row[0] for row in result.regression.coverage] == list(NOMINAL)
    for place in range(outputs):
        own = result.regression.outputs[str(place)]
        assert own.metrics["rmse"] == pytest.approx(float((prediction.mean - targets)[:, place].square().mean().sqrt()))
    # The marginal likelihoods of one output are the joint one.
    if outputs == 1:
        assert own.metrics["nll"] == pytest.approx(result.metrics["nll"])
    groups = result.regression.spread["0"]
    assert sum(row[0] for row in groups) == 200
    assert sum(row[0] * row[2] ** 2 for row in groups) / 200 == pytest.approx(
        float((prediction.mean - targets)[:, 0].square().mean())
    )


def test_the_error_of_a_root_is_that_of_many_draws():
    """Over fresh samples of the same size, the root mean square spreads as its error says."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2000, 300, generator=generator, dtype=torch.float64)
    found = [root_mean_of(draw.square()) for draw in draws]
    spread = torch.tensor([one.value for one in found]).std()
    assert float(spread) == pytest.approx(sum(one.error for one in found) / len(found), rel=0.06)


def test_errors_of_groups_are_those_of_many_draws():
    """Rows of one input go up and down together: the error by groups is right, and that of rows by themselves too small."""
    generator = torch.Generator().manual_seed(1)
    groups = torch.arange(40).repeat_interleave(10)
    values = [
        torch.randn(40, generator=generator, dtype=torch.float64)[groups]
        + 0.2 * torch.randn(400, generator=generator, dtype=torch.float64)
        for _ in range(1000)
    ]
    spread = float(torch.tensor([float(one.mean()) for one in values]).std())
    by_group = sum(mean_of(one, groups).error for one in values) / len(values)
    by_row = sum(mean_of(one).error for one in values) / len(values)
    assert spread == pytest.approx(by_group, rel=0.08)
    assert by_row < spread / 2


def test_groups_of_one_are_no_groups():
    values = torch.randn(50, dtype=torch.float64)
    assert mean_of(values, torch.arange(50)).error == pytest.approx(mean_of(values).error)
    near, far = torch.randn(40, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    plain = area_between(near, far)
    assert area_between(near, far, (torch.arange(40), torch.arange(30))).error == pytest.approx(plain.error)
    assert mean_of(values, torch.zeros(50, dtype=torch.int64)).error is None
    pair = Measurement(1.0, (values,), (torch.arange(50),)).minus(mean_of(values))
    assert pair.error == pytest.approx(0.0)


def test_inputs_are_counted_over_batches():
    prediction, targets = said(12)
    inputs = torch.tensor([0, 0, 1, 1, 1, 2])
    whole = Tally()
    for part in (slice(0, 6), slice(6, 12)):
        whole.add(RegressionAnswer(prediction[part], inputs=inputs), targets[part])
    assert whole.groups.tolist() == [0, 0, 1, 1, 1, 2, 3, 3, 4, 4, 4, 5]
    assert whole.inputs == 6


def test_labels_of_one_input_belong_together():
    probs = torch.rand(5, 3, dtype=torch.float64)
    labels = (torch.rand(5, 3) > 0.5).double()
    labels[1, 2] = math.nan
    tally = Tally()
    tally.add(Answer(probs, likelihood=BERNOULLI), labels)
    known = ~labels.isnan()
    assert tally.count == int(known.sum())
    assert tally.inputs == 5
    assert torch.bincount(tally.groups).tolist() == known.sum(1).tolist()


def test_differences_are_taken_datum_by_datum():
    prediction, targets = said(300)
    other = said(300, seed=0, wide=1.3)[0]
    tallies = {"DE": tally_of(other, targets), "MoLA": tally_of(prediction, targets)}
    value, error = differences(tallies, "MoLA")["DE"]["nll"]
    gaps = -(other.log_prob(targets) - prediction.log_prob(targets))
    assert value == pytest.approx(float(gaps.mean()))
    assert error == pytest.approx(float(gaps.std()) / math.sqrt(300))
    assert differences(tallies, "MoLA")["DE"]["rmse"][0] == pytest.approx(0.0)


def test_outliers_are_told_by_variance_and_by_the_score():
    inside, targets = said(150)
    outside, _ = said(90, seed=3, wide=4.0)
    near, far = tally_of(inside, targets), tally_of(outside)
    found = outlier_result(near, far, errors=True)
    assert set(found.scores) == {"variance", "ood score"}
    assert found.confidence is None
    assert found.std == pytest.approx(float(outside.std.mean()))
    pairs = outside.variance.log().mean(1)[:, None] > inside.variance.log().mean(1)
    assert found.scores["variance"]["auroc"] == pytest.approx(float(pairs.double().mean()))
    assert outlier_leads({"MoLA": near}, {"MoLA": far})["auroc"].best == ("MoLA", "variance")


def test_the_area_of_one_label_has_delongs_error():
    generator = torch.Generator().manual_seed(2)
    truth = (torch.rand(400, generator=generator) > 0.6).double()
    yes = torch.sigmoid(truth + torch.randn(400, generator=generator, dtype=torch.float64))
    found = mean_area_of_labels(yes, truth, torch.zeros(400, dtype=torch.int64), None)
    known = area_between(yes[truth == 0], yes[truth == 1])
    assert found.value == pytest.approx(known.value)
    assert found.error == pytest.approx(known.error, rel=0.01)


def test_labels_that_copy_each_other_are_worth_one():
    """A second label that repeats the first leaves mean area and error as they are: errors count inputs."""
    generator = torch.Generator().manual_seed(3)
    truth = (torch.rand(200, generator=generator) > 0.5).double()
    yes = torch.sigmoid(truth + torch.randn(200, generator=generator, dtype=torch.float64))
    labels, inputs = torch.arange(2).repeat_interleave(200), torch.arange(200).repeat(2)
    one = mean_area_of_labels(yes, truth, torch.zeros(200, dtype=torch.int64), torch.arange(200))
    two = mean_area_of_labels(yes.repeat(2), truth.repeat(2), labels, inputs)
    assert (two.value, two.error) == pytest.approx((one.value, one.error))
