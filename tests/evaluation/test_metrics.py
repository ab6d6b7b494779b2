"""Metrics against independent implementations."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from molaplace import metrics
from molaplace.errors import DataError, OptionError
from tests.conftest import require_shared


@pytest.fixture(params=["random", "tied"])
def graded(request):
    """Predictions whose confidence falls with difficulty, as they are or with few distinct confidences."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(1500, 4, generator=generator)
    labels = torch.distributions.Categorical(logits=logits / 2).sample()
    probs = torch.softmax(logits, 1)
    if request.param == "tied":
        # Multiples of 1/16, exact in binary, many of them on the edges of 4 bins.
        best = (probs.amax(1) * 16).round() / 16
        rest = ((1 - best) / 3)[:, None].expand(-1, 4).clone()
        probs = rest.scatter(1, logits.argmax(1, keepdim=True), best[:, None])
    return probs, labels


def dense_bins(confidence, correct, member):
    """ECE and MCE by a loop over masks."""
    expected, largest, counted = 0.0, 0.0, sum(int(mask.sum()) for mask in member)
    for mask in member:
        if mask.any():
            gap = abs(confidence[mask].mean() - correct[mask].mean())
            expected, largest = expected + mask.sum() / counted * gap, max(largest, gap)
    return expected, largest


@pytest.mark.parametrize("bins", [4, 100])
def test_bins_are_closed_on_the_right(graded, bins):
    probs, labels = (value.numpy() for value in graded)
    confidence, correct = probs.max(1), probs.argmax(1) == labels
    edges = np.arange(bins + 1) / bins
    member = [(confidence > low) & (confidence <= high) for low, high in pairwise(edges)]
    expected, largest = dense_bins(confidence, correct, member)
    assert metrics.expected_calibration_error(*graded, bins) == pytest.approx(expected, abs=1e-12)
    sums = metrics.bin_confidences(*graded, bins)
    assert metrics.largest_gap(sums) == pytest.approx(largest, abs=1e-12)
    certain, wrong = torch.eye(5)[[0] * 100], torch.ones(100, dtype=torch.long)
    assert metrics.expected_calibration_error(certain, wrong, bins) == 1, "a confidence of 1 counts"


@pytest.mark.parametrize("bins", [16, 100])
def test_legacy_errors_leave_out_the_surest(graded, bins):
    probs, labels = (value.numpy() for value in graded)
    confidence, correct = probs.max(1), probs.argmax(1) == labels
    edges = np.histogram(confidence, bins, range=(0, 1))[1]
    index = np.digitize(confidence, edges)
    expected, largest = dense_bins(confidence, correct, [index == i for i in range(bins)])
    assert (index >= bins).sum() > 10
    sums = metrics.bin_sums_legacy(torch.from_numpy(confidence), torch.from_numpy(correct), bins)
    assert metrics.calibration_gap(sums) == pytest.approx(expected, abs=1e-12)
    assert metrics.largest_gap(sums) == pytest.approx(largest, abs=1e-12)


@pytest.fixture(params=["random", "tied", "all equal"])
def scores(request):
    generator = torch.Generator().manual_seed(4)
    inside, outside = torch.randn(401, generator=generator), torch.randn(230, generator=generator) + 1
    decimals = {"random": 12, "tied": 1, "all equal": -2}[request.param]
    return inside.round(decimals=decimals), outside.round(decimals=decimals)


def test_auroc_and_average_precision_are_scikit_learns(scores):
    truth, both = torch.tensor([0] * 401 + [1] * 230), torch.cat(scores)
    assert metrics.auroc(*scores) == pytest.approx(roc_auc_score(truth, both))
    assert metrics.aupr_out(*scores) == pytest.approx(average_precision_score(truth, both))
    assert metrics.aupr_in(*scores) == pytest.approx(average_precision_score(1 - truth, -both))


@pytest.mark.parametrize(("tpr", "percent"), [(0.0, 100), (0.5, 50), (0.95, 5), (0.951, 4.9), (1.0, 0)])
def test_fpr_at_tpr_is_the_papers(scores, tpr, percent):
    confidence, other = (-value.numpy() for value in scores)
    assert metrics.fpr_at_tpr(*scores, tpr) == (other >= np.percentile(confidence, percent)).mean()


def test_fpr_at_tpr_is_not_moved_off_a_tie_by_rounding():
    """The 0.57 quantile of 0, 1, ..., 100 is 57 itself, although 0.57 * 100 is 56.99999999999999."""
    assert 0.57 * 100 < 57
    assert metrics.fpr_at_tpr(torch.arange(101.0), torch.tensor([57.0, 58.0]), 0.57) == 0.5


@pytest.mark.parametrize("tpr", [0.01, 0.5, 0.95, 0.951, 1.0])
def test_fpr_with_outliers_as_positives_is_openoods(scores, tpr):
    """Their two lines: the first point of scikit-learn's curve, outliers positive, at which enough of them are found."""
    inside, outside = scores
    false, true, _ = roc_curve([0] * 401 + [1] * 230, torch.cat([inside, outside]).numpy())
    assert metrics.fpr_at_tpr_out(*scores, tpr) == pytest.approx(false[np.argmax(true >= tpr)])


def test_scores_that_cannot_be_compared_are_refused():
    good = torch.arange(3.0)
    for function in (metrics.auroc, metrics.aupr_in, metrics.aupr_out, metrics.fpr_at_tpr, metrics.fpr_at_tpr_out):
        with pytest.raises(DataError, match=r"outlier_scores must be.*NaN values: 1"):
            function(good, torch.tensor([1.0, math.nan]))
        with pytest.raises(DataError, match=r"inlier_scores must be.*shape \(0,\)"):
            function(good[:0], good)
    with pytest.raises(OptionError, match="tpr must be between 0 and 1"):
        metrics.fpr_at_tpr(good, good, 95)
    with pytest.raises(DataError, match="one uncertainty per prediction"):
        metrics.area_under_risk_coverage(good, torch.ones(4))


def test_risk_and_coverage_by_a_loop(graded):
    probs, labels = graded
    uncertainty, correct = 1 - probs.amax(1), probs.argmax(1) == labels
    curves = []
    generator = np.random.default_rng(0)
    for _ in range(200):  # orders among equals
        order = np.lexsort((generator.random(1500), uncertainty.numpy()))
        wrong = ~correct.numpy()[order]
        curves.append([wrong[: count + 1].mean() for count in range(0, 1500, 50)])
    coverage, risk = metrics.risk_coverage_curve(uncertainty, correct)
    assert torch.equal(coverage, torch.arange(1, 1501) / 1500)
    spread = np.std(curves, axis=0) / np.sqrt(200)
    assert np.all(np.abs(np.mean(curves, axis=0) - risk[::50].numpy()) <= 4 * spread + 1e-12)
    assert metrics.area_under_risk_coverage(uncertainty, correct) == pytest.approx(float(risk.mean()))


def test_the_least_risk_rejects_all_errors_first(graded):
    probs, labels = graded
    correct = probs.argmax(1) == labels
    least = metrics.area_under_risk_coverage((~correct).double(), correct)
    assert metrics.least_area_under_risk_coverage(len(correct), int((~correct).sum())) == pytest.approx(least)
    # For many data it is r + (1 - r) log(1 - r) (Geifman et al., 2019).
    rate = 0.3
    expected = rate + (1 - rate) * math.log(1 - rate)
    assert metrics.least_area_under_risk_coverage(100_000, 30_000) == pytest.approx(expected, abs=1e-5)
    assert metrics.least_area_under_risk_coverage(10, 0) == 0
    assert metrics.least_area_under_risk_coverage(10, 10) == 1


@pytest.mark.real_data
def test_published_values_of_a_real_network():
    """A ResNet-110 on CIFAR-10: accuracy, NLL, Brier and ECE as published (Kull et al., 2019)."""
    path = require_shared("logits/resnet110_cifar10.npz")
    with np.load(path) as file:
        arrays = dict(file)
    probs = torch.softmax(torch.from_numpy(arrays["test_logits"]).double(), 1)
    labels = torch.from_numpy(arrays["test_labels"]).long()
    assert len(labels) == 10_000
    assert metrics.accuracy(probs, labels) == pytest.approx(0.9356)
    assert metrics.negative_log_likelihood(probs, labels) == pytest.approx(0.35827, abs=5e-6)
    assert metrics.brier(probs, labels) == pytest.approx(0.11019, abs=5e-6)
    assert metrics.expected_calibration_error(probs, labels, 15) == pytest.approx(0.04750, abs=5e-6)
    assert metrics.expected_calibration_error(probs, labels, 100) == pytest.approx(0.04838, abs=5e-6)
