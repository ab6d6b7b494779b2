"""Metrics against independent implementations."""

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torchmetrics.functional.classification import multiclass_calibration_error

from mola import metrics


@pytest.fixture
def predictions():
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(3 * torch.randn(2000, 5, generator=generator), 1)
    return probs, torch.randint(5, (2000,), generator=generator)


@pytest.mark.parametrize("bins", [10, 15, 100])
def test_calibration_error_counts_every_prediction(predictions, bins):
    probs, labels = predictions
    theirs = multiclass_calibration_error(probs, labels, num_classes=5, n_bins=bins, norm="l1")
    assert metrics.expected_calibration_error(probs, labels, bins) == pytest.approx(
        float(theirs), abs=1e-6
    )  # theirs is in float32
    certain = torch.eye(5)[torch.zeros(100, dtype=torch.long)]
    assert metrics.expected_calibration_error(certain, torch.ones(100, dtype=torch.long), bins) == 1.0


def test_scores_by_their_definitions(predictions):
    probs, labels = predictions
    chosen = [float(row[label]) for row, label in zip(probs, labels, strict=True)]
    assert metrics.negative_log_likelihood(probs, labels) == pytest.approx(
        -sum(math.log(value) for value in chosen) / 2000
    )
    one_hot = torch.eye(5)[labels]
    assert metrics.brier(probs, labels) == pytest.approx(float(((probs - one_hot) ** 2).sum() / 2000))
    assert metrics.accuracy(probs, labels) == pytest.approx(float((probs.argmax(1) == labels).double().mean()))
    assert metrics.mean_confidence(probs) == pytest.approx(float(probs.amax(1).mean()))


@pytest.mark.parametrize("digits", [1, 12])
def test_auroc_with_and_without_ties(digits):
    generator = torch.Generator().manual_seed(1)
    inside = torch.randn(300, generator=generator).round(decimals=digits)
    outside = (torch.randn(500, generator=generator) + 0.7).round(decimals=digits)
    truth = [0] * 300 + [1] * 500
    assert metrics.auroc(inside, outside) == pytest.approx(roc_auc_score(truth, torch.cat([inside, outside]).numpy()))
