"""Standard errors of metrics against DeLong's formulas and resampling, and groups of dependent data."""

import math

import pytest
import torch

from molaplace import metrics
from molaplace.evaluation.estimates import (
    area_between,
    calibration_error,
    mean_area_of_labels,
    mean_of,
    pass_rate,
    risk_area,
    root_mean_of,
)


def draws(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def delong(inliers, outliers):
    """Variance of several AUROCs by DeLong's formulas, pair by pair: (s, s) from scores (s, n) and (s, m)."""
    wins = (outliers[:, None, :] > inliers[:, :, None]).double()
    wins += 0.5 * (outliers[:, None, :] == inliers[:, :, None]).double()
    return torch.cov(wins.mean(2)) / inliers.shape[1] + torch.cov(wins.mean(1)) / outliers.shape[1]


@pytest.mark.parametrize("ties", [False, True])
def test_errors_of_auroc_and_of_differences_are_delongs(ties):
    near, far = draws((2, 83), (2, 47), seed=1)
    near[1] += near[0]
    far = far + torch.tensor([[1.0], [1.5]])
    far[1] += far[0]
    if ties:
        near, far = (2 * near).round(), (2 * far).round()
    expected = delong(near, far)
    first, second = (area_between(*pair) for pair in zip(near, far, strict=True))
    for index, estimate in enumerate((first, second)):
        assert estimate.value == pytest.approx(metrics.auroc(near[index], far[index]), abs=1e-12)
        assert estimate.error == pytest.approx(float(expected[index, index].sqrt()), rel=1e-9)
    spread = expected[0, 0] + expected[1, 1] - 2 * expected[0, 1]
    assert first.minus(second).error == pytest.approx(float(spread.sqrt()), rel=1e-9)
    assert first.minus(second).error < math.hypot(first.error, second.error), "methods go up and down together"


def labelled_bins(sure, right):
    return metrics.calibration_gap(metrics.bin_sums(sure, right))


MEASURES = {  # a measurement and its value, from scores of inliers and outliers, or from confidence and correctness
    "auroc": (area_between, metrics.auroc),
    "fpr95": (pass_rate, metrics.fpr_at_tpr),
    "ece": (calibration_error, labelled_bins),
    "ece of bins that are too sure and too unsure": (
        lambda sure, right: calibration_error(sure.square(), right),
        lambda sure, right: labelled_bins(sure.square(), right),
    ),
    "aurc": (
        lambda sure, right: risk_area(1 - sure, right),
        lambda sure, right: metrics.area_under_risk_coverage(1 - sure, right),
    ),
    "aurc with ties": (
        lambda sure, right: risk_area(1 - (5 * sure).round(), right),
        lambda sure, right: metrics.area_under_risk_coverage(1 - (5 * sure).round(), right),
    ),
    "mean": (lambda sure, _: mean_of(sure.exp()), lambda sure, _: float(sure.exp().mean())),
    "root": (lambda sure, _: root_mean_of(sure.square()), lambda sure, _: float(sure.square().mean().sqrt())),
}


@pytest.mark.parametrize("name", MEASURES)
def test_errors_are_those_of_a_bootstrap(name):
    generator = torch.Generator().manual_seed(3)
    paired = name not in ("auroc", "fpr95")
    near, far = draws(600, 400, seed=3)
    far = far + 1.5
    if paired:
        near = torch.rand(600, generator=generator, dtype=torch.float64)
        far = (torch.rand(600, generator=generator, dtype=torch.float64) < 0.7 * near).double()
    measure, value = MEASURES[name]
    estimate = measure(near, far)
    values = []
    assert estimate.value == pytest.approx(value(near, far), abs=1e-12)
    for _ in range(2000):
        rows = torch.randint(len(near), (len(near),), generator=generator)
        others = rows if paired else torch.randint(len(far), (len(far),), generator=generator)
        values.append(value(near[rows], far[others]))
    assert estimate.error == pytest.approx(float(torch.tensor(values).std()), rel=0.12)


def test_errors_of_groups_are_those_of_many_draws():
    """Rows of one input go up and down together: the error by groups is right, and that of single rows too small."""
    groups = torch.arange(40).repeat_interleave(10)
    shared, noise = draws((1000, 40), (1000, 400), seed=1)
    values = shared[:, groups] + 0.2 * noise
    by_group, by_row = (sum(mean_of(row, partition).error for row in values) / 1000 for partition in (groups, None))
    assert float(values.mean(1).std()) == pytest.approx(by_group, rel=0.08)
    assert by_row < by_group / 2


def test_groups_of_one_are_no_groups():
    near, far = draws(40, 30)
    assert mean_of(near, torch.arange(40)).error == pytest.approx(mean_of(near).error)
    grouped = area_between(near, far, (torch.arange(40), torch.arange(30)))
    assert grouped.error == pytest.approx(area_between(near, far).error)
    assert math.isnan(mean_of(near, torch.zeros(40, dtype=torch.int64)).error)
    assert mean_of(near, torch.arange(40)).minus(mean_of(near)).error == 0
    assert mean_of(near, 3 * torch.arange(40)).error == pytest.approx(mean_of(near).error), "indices may have gaps"


def test_the_area_of_labels_counts_inputs():
    """A label alone has DeLong's error, and a second label that repeats it changes neither the area nor the error."""
    (noise,) = draws(400, seed=2)
    truth = (torch.rand(400, generator=torch.Generator().manual_seed(2)) > 0.6).double()
    yes, inputs = torch.sigmoid(truth + noise), torch.arange(400)
    known = area_between(yes[truth == 0], yes[truth == 1])
    single = mean_area_of_labels(yes, truth, torch.zeros(400), inputs)
    assert single.value == pytest.approx(known.value)
    assert single.error == pytest.approx(known.error, rel=0.01)
    labels = torch.arange(2).repeat_interleave(400)
    repeated = mean_area_of_labels(yes.repeat(2), truth.repeat(2), labels, inputs.repeat(2))
    assert (repeated.value, repeated.error) == pytest.approx((single.value, single.error))
    assert mean_area_of_labels(yes, torch.ones(400), torch.zeros(400), inputs) is None


def test_the_error_of_the_area_of_labels_is_that_of_leaving_out_one_input():
    """Labels of one input depend on each other: here the second label is likely where the first is not."""
    shared, *noise = draws(300, 300, 300, seed=4)
    scores = torch.stack([shared + noise[0], noise[1] - shared])
    truth = (scores + 1.5 * torch.stack([shared, -shared]) + torch.stack(draws(300, 300, seed=5)) > 0.3).double()
    labels = torch.arange(2)[:, None].expand(2, 300)
    inputs = torch.arange(300).expand(2, 300)

    def area(left_out=-1):
        mask = inputs != left_out
        return mean_area_of_labels(scores[mask], truth[mask], labels[mask], inputs[mask])

    without_one = torch.tensor([area(index).value for index in range(300)])
    jackknife = math.sqrt(299 / 300 * float((without_one - without_one.mean()).square().sum()))
    assert area().error == pytest.approx(jackknife, rel=0.02)
