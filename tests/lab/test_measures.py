"""Numbers that suites ask beyond the metrics: laws, and comparison with scipy and with trying every threshold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from molaplace.evaluation import outlier_scores
from molaplace.uncertainty import entropy
from molaplace_lab.measures import BatchPrediction, best_threshold, human_labels, rank_correlation, rejection

VALUES = st.lists(st.integers(-3, 3), min_size=3, max_size=30)


@given(VALUES, st.randoms(use_true_random=False))
def test_rank_correlation_is_spearmans_with_ties(values, random):
    other = values.copy()
    random.shuffle(other)
    first = torch.tensor(values).double()
    second = torch.tensor(other).double()
    correlation = rank_correlation(first, second)
    if len(set(values)) == 1:
        assert correlation == 0
    else:
        assert correlation == pytest.approx(spearmanr(values, other).statistic, abs=1e-12)
        assert rank_correlation(first.exp(), second**3) == pytest.approx(
            correlation, abs=1e-12
        )  # only the order counts


SCORES = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=12)


@given(SCORES, st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_no_threshold_treats_more_inputs_rightly(known, unknown):
    inside = torch.tensor([score for score, _ in known]).double()
    right = torch.tensor([good for _, good in known])
    outside = torch.tensor(unknown).double()

    def well(threshold):
        return int((right & (inside <= threshold)).sum() + (outside > threshold).sum())

    assert well(best_threshold(inside, right, outside)) == max(well(step / 2 - 1) for step in range(20))


def answers(**sets):
    """What a method says: probabilities and labels by set, in batches of three."""

    def ask(name, scores):
        probs, labels = sets[name]
        pairs = zip(probs.split(3), labels.split(3), strict=True)
        return ((BatchPrediction(some, outlier_scores(some)), some_labels) for some, some_labels in pairs)

    return ask


def test_people_agree_with_themselves():
    counts = torch.tensor([[50, 0, 0], [30, 20, 0], [20, 20, 10], [49, 1, 0], [0, 40, 10]])
    shares = counts.double() / 50
    labels = counts.argmax(1)
    agreement = human_labels(counts, answers(test=(shares, labels)))
    assert agreement["divergence"] == pytest.approx(0, abs=1e-12)
    assert agreement["cross-entropy"] == pytest.approx(float(entropy(shares).mean()))
    assert agreement["correlation, entropy"] == pytest.approx(1)
    sure = torch.nn.functional.one_hot(labels, 3).double()
    sure = 0.98 * sure + 0.02 / 3
    other = human_labels(counts, answers(test=(sure, labels)))
    # No other probabilities have a lower cross-entropy, and those that are equally sure of all order nothing.
    assert other["cross-entropy"] > agreement["cross-entropy"]
    assert abs(other["correlation, entropy"]) < 1


def test_rejection_counts_what_is_answered_and_what_is_not():
    sure = torch.tensor([0.9, 0.05, 0.05])
    unsure = torch.tensor([0.4, 0.3, 0.3])
    known = torch.stack([sure] * 3)
    unknown = torch.stack([unsure] * 2)
    test = torch.stack([sure, sure, unsure, sure])
    rates = rejection(
        ("validation", "strange"),
        ("test", "outside"),
        answers(
            validation=(known, torch.zeros(3).long()),
            strange=(unknown, torch.zeros(2).long()),
            test=(test, torch.tensor([0, 1, 0, 0])),
            outside=(torch.stack([unsure, sure, unsure]), torch.zeros(3).long()),
        ),
    )
    for score in ("max probability", "entropy"):
        assert rates[f"in-scope accuracy, {score}"] == 2 / 4  # one is wrong, one is rejected
        assert rates[f"out-of-scope recall, {score}"] == pytest.approx(2 / 3)
