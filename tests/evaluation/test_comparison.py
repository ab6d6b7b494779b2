"""Fair comparisons: the same scores for every method, results of all data, and bold only where a lead is clear."""

import itertools

import pytest
import torch

import molaplace as mola
from molaplace import metrics
from molaplace.evaluation import (
    CLASSIFICATION_SCORES,
    PredictionColumns,
    labelled_result,
    lead,
    outlier_leads,
    outlier_result,
    outlier_scores,
)
from molaplace.evaluation.estimates import area_between, mean_of
from molaplace.evaluation.results import set_result
from tests.closeness import assert_close


def ensemble(count=60, members=3, classes=4, seed=0):
    """Probabilities, logits, weights, a score and labels of some inputs."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(members, count, classes, generator=generator)
    weights = torch.softmax(torch.randn(members, generator=generator), 0)
    probs = torch.einsum("k,knc->nc", weights, torch.softmax(logits, -1))
    ood_score = torch.randn(count, generator=generator)
    return probs, logits.transpose(0, 1), weights, ood_score, torch.randint(classes, (count,), generator=generator)


# --- which lead is clear ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "clear"), [(1.9, False), (2.1, True), (-2.1, True)])
def test_what_decides_is_the_error_of_the_difference(times, clear):
    """Two losses of the same data: a large common part, and a difference of known size."""
    common, noise = torch.randn(2, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = 1 / 400**0.5
    first = mean_of(10 * common)
    second = mean_of(10 * common + times * error + (noise - noise.mean()) / noise.std())
    leader = lead({("one",): first, ("other",): second}, "low")
    assert leader.best == (("one",) if times > 0 else ("other",))
    assert leader.clear == ((leader.best,) if clear else ())
    assert leader.error == pytest.approx(error)
    assert first.error > 5 * error, "by the errors of the two numbers nothing could be told"


def test_a_method_does_not_compete_with_itself_nor_with_its_copy():
    values = torch.arange(100.0).double()
    leading = {("MoLA", "energy"): mean_of(values), ("MoLA", "entropy"): mean_of(values - 1e-3)}
    leader = lead({**leading, ("MAP", "energy"): mean_of(values - 5)}, "high")
    assert (leader.best, leader.clear) == (("MoLA", "energy"), tuple(leading)), "both scores of MoLA lead MAP"
    copies = lead({("DE",): mean_of(values), ("MoLA",): mean_of(values), ("MAP",): mean_of(values - 1)}, "high")
    assert copies.clear == (("DE",), ("MoLA",)), "the same numbers are marked alike"
    assert (copies.level, copies.rival) == ((("MoLA",),), ("MAP",))
    flipped = lead({("DE",): mean_of(values), ("MoLA",): mean_of(values.flip(0))}, "high")
    assert (flipped.level, len(flipped.rival)) == ((), 1), "equal means of different values are no copies"
    alone = lead({("DE",): mean_of(values), ("MoLA",): mean_of(values)}, "high")
    assert (alone.rival, alone.clear) == (None, ())


def test_every_pair_of_methods_is_compared():
    """A lead over the second is not enough if the third is less certain."""
    steady = torch.zeros(100, dtype=torch.float64)
    wild = torch.tensor([-50.0, 49.0] * 50, dtype=torch.float64)
    estimates = {("best",): mean_of(steady + 1), ("second",): mean_of(steady), ("third",): mean_of(wild)}
    for order in itertools.permutations(estimates):
        leader = lead({name: estimates[name] for name in order}, "high")
        assert (leader.rival, leader.clear) == (("third",), ())


def test_on_outliers_low_confidence_leads_and_few_missed_outliers():
    spread = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def columns(confidence):
        table = PredictionColumns()
        table.add_probabilities(torch.stack([confidence, 1 - confidence], 1))
        return table

    inliers = columns(0.8 + 0.2 * spread)
    outliers = {"sure": columns(0.75 + 0.2 * spread.flip(0)), "doubtful": columns(0.5 + 0.2 * spread)}
    leads = outlier_leads(dict.fromkeys(outliers, inliers), outliers)
    assert {name: leader.best[0] for name, leader in leads.items()} == dict.fromkeys(leads, "doubtful")
    assert {"confidence", "max probability", "auroc", "fpr95"} <= leads.keys()


# --- decisions ---------------------------------------------------------------------------------------------------------------


def test_the_coverage_of_sets_is_counted_by_class():
    probs, *_, labels = ensemble(200)
    sets = torch.rand(200, 4, generator=torch.Generator().manual_seed(1)) < torch.tensor([0.2, 0.9, 0.5, 0.7])
    columns = PredictionColumns()
    columns.add(mola.Prediction({"probs": probs}), labels, scores=outlier_scores(probs), sets=sets)
    result = set_result(columns.data, 0.9, "abcd")
    covered = sets[torch.arange(200), labels].double()
    assert (result.promised, result.realised) == (0.9, pytest.approx(float(covered.mean())))
    assert (result.size, result.empty) == (float(sets.double().sum(1).mean()), float((~sets.any(1)).double().mean()))
    assert result.classes == {name: float(covered[labels == label].mean()) for label, name in enumerate("abcd")}


# --- results ----------------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_a_direct_computation():
    probs, logits, weights, ood_score, _ = ensemble()
    scores = outlier_scores(probs, logits, weights, ood_score)
    exact, lifted, shares = probs.double(), logits.double(), weights.double()
    expected = {
        "max probability": 1 - exact.amax(1),
        "entropy": -(exact * exact.log()).sum(1),
        "energy": -(shares * torch.logsumexp(lifted, -1)).sum(1),
        "maximum logit": -(shares * lifted.amax(-1)).sum(1),
        "ood score": ood_score.double(),
    }
    assert tuple(scores) == tuple(expected) == CLASSIFICATION_SCORES
    for name, score in expected.items():
        assert_close(scores[name], score, "float64", name=name)
    assert tuple(outlier_scores(probs)) == CLASSIFICATION_SCORES[:2]


def test_results_are_the_metrics_of_all_data_at_once():
    """Batches and columns of a tally against `mola.metrics` on all probabilities, and AUROC against all pairs."""
    probs, *more, labels = ensemble(300)
    far, *others, _ = ensemble(170, seed=5)
    scores, beyond = outlier_scores(probs, *more), outlier_scores(far, *others)
    inside = PredictionColumns()
    for rows in torch.split(torch.arange(300), 64):
        inside.add_probabilities(probs[rows], labels[rows], {name: score[rows] for name, score in scores.items()})
    outside = PredictionColumns()
    outside.add_probabilities(far, None, beyond)
    result = labelled_result(inside, 30.0, classes=list("abcdef"))
    confidence, predicted = probs.double().max(1)
    legacy = metrics.bin_sums_legacy(confidence, predicted == labels, 100)
    direct = {
        "accuracy": metrics.accuracy(probs, labels),
        "log_likelihood": -metrics.negative_log_likelihood(probs, labels),
        "nll": metrics.negative_log_likelihood(probs, labels),
        "brier": metrics.brier(probs, labels),
        "ece": metrics.expected_calibration_error(probs, labels),
        "ece100": metrics.expected_calibration_error(probs, labels, bins=100),
        "ece_legacy": metrics.calibration_gap(legacy),
        "mce": metrics.largest_gap(metrics.bin_confidences(probs, labels)),
        "mce_legacy": metrics.largest_gap(legacy),
        "confidence": metrics.mean_confidence(probs),
        "aurc": metrics.area_under_risk_coverage(1 - probs.max(1).values, predicted == labels),
    }
    assert result.metrics == direct
    assert (result.count, result.level, sum(result.histogram)) == (300, 30.0, 300)
    assert list(result.classes) == list("abcd"), "a class without data has no result"
    for label, measures in enumerate(result.classes.values()):
        mine = labels == label
        assert measures["count"] == int(mine.sum())
        assert_close(measures["accuracy"], (predicted[mine] == label).double().mean())
        assert_close(measures["confidence"], confidence[mine].mean())
    out = outlier_result(inside, outside)
    for name, measures in out.scores.items():
        wins = (beyond[name][:, None] > scores[name]).double() + (beyond[name][:, None] == scores[name]).double() / 2
        assert measures["auroc"] == pytest.approx(float(wins.mean()), rel=1e-12)
        assert out.errors[name]["auroc"] == pytest.approx(area_between(scores[name], beyond[name]).error)
    assert out.confidence == metrics.mean_confidence(far)


def test_types_of_shift_take_turns():
    probs, *_, labels = ensemble(91)
    columns = PredictionColumns()
    columns.add_probabilities(probs, labels)
    by_type = labelled_result(columns, types=["fog", "snow", "rain"]).types
    assert list(by_type) == ["fog", "snow", "rain"]
    for first, values in enumerate(by_type.values()):
        expected = {
            "accuracy": metrics.accuracy(probs[first::3], labels[first::3]),
            "nll": metrics.negative_log_likelihood(probs[first::3], labels[first::3]),
            "ece": metrics.expected_calibration_error(probs[first::3], labels[first::3]),
        }
        assert values == pytest.approx(expected, rel=1e-5)


def test_bins_of_a_reliability_diagram_have_equal_numbers_of_expected_errors():
    probs, *_, labels = ensemble(500)
    columns = PredictionColumns()
    columns.add_probabilities(probs, labels, outlier_scores(probs))
    count, confidence, correct = torch.tensor(labelled_result(columns, equal_errors=True).reliability).double().T
    most, predicted = probs.double().max(1)
    assert_close(
        torch.stack([count.sum(), confidence.sum(), correct.sum()]), [500.0, most.sum(), (predicted == labels).sum()]
    )
    errors = count - confidence
    assert (errors - errors.mean()).abs().max() < 1, "a prediction at the edge of a bin has at most one expected error"
    assert (torch.diff(confidence / count) > 0).all()
    sure = PredictionColumns()
    sure.add_probabilities(torch.eye(4)[labels], labels, outlier_scores(torch.eye(4)[labels]))
    assert labelled_result(sure, equal_errors=True).reliability == [[500.0, 500.0, 500.0]]
