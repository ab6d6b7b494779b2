"""Fair comparisons: the same scores for every method, results of all data, and bold only where a lead is clear."""

import itertools

import pytest
import torch

from molaplace import metrics
from molaplace.evaluation.answers import SCORES, Answer, outlier_scores
from molaplace.evaluation.leads import lead
from molaplace.evaluation.measurement import area_between, mean_of
from molaplace.evaluation.results import labelled_result, outlier_result
from molaplace.evaluation.tally import Tally
from molaplace.report.estimate import Estimate, is_clear, leaders
from tests.closeness import assert_close


def ensemble(count=60, members=3, classes=4, seed=0):
    """Probabilities, logits, weights, a score and labels of some inputs."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(members, count, classes, generator=generator)
    weights = torch.softmax(torch.randn(members, generator=generator), 0)
    probs = torch.einsum("k,knc->nc", weights, torch.softmax(logits, -1))
    own = torch.randn(count, generator=generator)
    return probs, logits, weights, own, torch.randint(classes, (count,), generator=generator)


# --- which lead is clear ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "clear"), [(1.9, False), (2.1, True), (-2.1, True)])
def test_what_decides_is_the_error_of_the_difference(times, clear):
    """Two losses of the same data: a large common part, and a difference of known size."""
    common, own = torch.randn(2, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = 1 / 400**0.5
    one, other = mean_of(10 * common), mean_of(10 * common + times * error + (own - own.mean()) / own.std())
    found = lead({("one",): one, ("other",): other}, "low")
    assert found.best == (("one",) if times > 0 else ("other",))
    assert found.clear == ((found.best,) if clear else ())
    assert found.error == pytest.approx(error)
    assert one.error > 5 * error, "by the errors of the two numbers nothing could be told"


def test_a_method_does_not_compete_with_itself_nor_with_its_copy():
    values = torch.arange(100.0).double()
    own = {("MoLA", "energy"): mean_of(values), ("MoLA", "entropy"): mean_of(values - 1e-3)}
    found = lead({**own, ("MAP", "energy"): mean_of(values - 5)}, "high")
    assert (found.best, found.clear) == (("MoLA", "energy"), tuple(own)), "both scores of MoLA lead MAP"
    copies = lead({("DE",): mean_of(values), ("MoLA",): mean_of(values), ("MAP",): mean_of(values - 1)}, "high")
    assert copies.clear == (("DE",), ("MoLA",)), "the same numbers are marked alike"
    assert (copies.level, copies.rival) == ((("MoLA",),), ("MAP",))
    alone = lead({("DE",): mean_of(values), ("MoLA",): mean_of(values)}, "high")
    assert (alone.rival, alone.clear) == (None, ())


@pytest.mark.parametrize(
    ("runs", "marked"),
    [
        ({"a": [3.0, 5.0, 9.0], "b": [2.0, 4.1, 7.9]}, ["a"]),
        ({"a": [3.0, 5.0, 9.0], "b": [2.0, 6.0, 7.0]}, []),
        ({"a": [3.0, 5.0, 9.0], "b": [3.0, 5.0, 9.0], "c": [1.0, 3.0, 7.0]}, ["a", "b"]),
        ({"a": [3.0, 5.0, 9.0], "b": [3.0, 5.0, 9.0]}, []),
        ({"a": [3.0], "b": [1.0]}, []),
        ({"a": [3.0, 3.1, 3.2], "b": [2.0]}, ["a"]),
        ({"a": [3.0, 5.0, 9.0], "b": [4.0]}, []),
        ({"a": [9.0], "b": [3.0, 3.1, 3.2]}, ["a"]),
        ({"a": [3.0, 5.0]}, []),
    ],
)
def test_over_runs_what_decides_is_the_difference_run_by_run(runs, marked):
    found = {name: Estimate.over(dict(enumerate(values))) for name, values in runs.items()}
    assert leaders(found, "high") == marked
    turned = {name: one.scaled(-2) for name, one in found.items()}
    assert leaders(turned, "low") == marked
    assert leaders({**found, "unknown": None}, "high") == marked


@pytest.mark.parametrize(("freedom", "times"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (30, 2.04227)])
def test_few_runs_are_judged_by_students_t(freedom, times):
    """Quantiles of 95 % from the tables; two standard errors of many data are 95.45 %."""
    assert not is_clear(Estimate(times, 1.0, freedom + 1))
    assert is_clear(Estimate(-1.11 * times, 1.0, freedom + 1))


def test_differences_of_estimates_are_those_of_the_runs_that_both_have():
    one, other = Estimate.over({0: 1.0, 1: 2.0, 3: 5.0}), Estimate.over({1: 1.5, 2: 9.0, 3: 3.5})
    gap = one.minus(other)
    assert gap.mean == pytest.approx(1.0)
    assert gap.error == pytest.approx(0.5)
    assert gap.runs == 2


def test_rotations_that_share_images_do_not_pass_for_independent_runs():
    """Five rotations, each on two of five parts: runs taken for independent would understate the variance of their mean by 8/3."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4000, 5, generator=generator, dtype=torch.float64)
    rotations = torch.stack([(parts[:, (3 + turn) % 5] + parts[:, (4 + turn) % 5]) / 2 for turn in range(5)], dim=1)
    true = float(rotations.mean(1).var())
    naive, corrected = (
        sum(Estimate.over(dict(enumerate(row)), overlap).error ** 2 for row in rotations.tolist()) / len(rotations)
        for overlap in (0.0, 2 / 3)
    )
    assert naive == pytest.approx(true * 3 / 8, rel=0.1)
    assert true < corrected < 2 * true
    # What leads clearly in independent runs need not do so here; the correction stays through differences and units.
    values = {"a": [3.0, 3.2, 3.1, 3.4, 3.3], "b": [2.5, 3.1, 2.9, 3.2, 2.6]}
    alone, sharing = (
        {name: Estimate.over(dict(enumerate(found)), overlap).scaled(100) for name, found in values.items()}
        for overlap in (0.0, 2 / 3)
    )
    assert leaders(alone, "high") == ["a"]
    assert leaders(sharing, "high") == []
    gap = sharing["a"].minus(sharing["b"])
    assert gap.error == pytest.approx(alone["a"].minus(alone["b"]).error * (1 + 5 * 2 / 3) ** 0.5)


def test_every_pair_of_methods_is_compared():
    """A lead over the second is not enough if the third is less certain."""
    steady = torch.zeros(100, dtype=torch.float64)
    wild = torch.tensor([-50.0, 49.0] * 50, dtype=torch.float64)
    found = {("best",): mean_of(steady + 1), ("second",): mean_of(steady), ("third",): mean_of(wild)}
    for order in itertools.permutations(found):
        one = lead({name: found[name] for name in order}, "high")
        assert (one.rival, one.clear) == (("third",), ())


# --- results ----------------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_a_direct_computation():
    probs, logits, weights, own, _ = ensemble()
    found = outlier_scores(probs, logits, weights, own)
    exact, lifted, shares = probs.double(), logits.double(), weights.double()[:, None]
    expected = {
        "max probability": 1 - exact.amax(1),
        "entropy": -(exact * exact.log()).sum(1),
        "energy": -(shares * torch.logsumexp(lifted, -1)).sum(0),
        "maximum logit": -(shares * lifted.amax(-1)).sum(0),
        "ood score": own.double(),
    }
    assert tuple(found) == tuple(expected) == SCORES
    for name, one in expected.items():
        assert_close(found[name], one, "float64", name=name)
    assert tuple(outlier_scores(probs)) == SCORES[:2]


def test_results_are_the_metrics_of_all_data_at_once():
    """Batches and columns of a tally against `mola.metrics` on all probabilities, and AUROC against all pairs."""
    probs, *more, labels = ensemble(300)
    far, *others, _ = ensemble(170, seed=5)
    scores, beyond = outlier_scores(probs, *more), outlier_scores(far, *others)
    inside, outside = Tally(), Tally()
    for rows in torch.split(torch.arange(300), 64):
        answer = Answer(probs[rows], {name: one[rows] for name, one in scores.items()})
        inside.add(answer.columns(labels[rows]))
    outside.add(Answer(far, beyond).columns())
    found = labelled_result(inside, 30.0, classes=list("abcdef"))
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
    assert found.metrics == direct
    assert (found.count, found.level, sum(found.histogram)) == (300, 30.0, 300)
    assert list(found.classes) == list("abcd"), "a class without data has no result"
    for label, one in enumerate(found.classes.values()):
        mine = labels == label
        assert one["count"] == int(mine.sum())
        assert_close(one["accuracy"], (predicted[mine] == label).double().mean())
        assert_close(one["confidence"], confidence[mine].mean())
    out = outlier_result(inside, outside)
    for name, one in out.scores.items():
        wins = (beyond[name][:, None] > scores[name]).double() + (beyond[name][:, None] == scores[name]).double() / 2
        assert one["auroc"] == pytest.approx(float(wins.mean()), rel=1e-12)
        assert out.errors[name]["auroc"] == pytest.approx(area_between(scores[name], beyond[name]).error)
    assert out.confidence == metrics.mean_confidence(far)
