"""Fair comparisons: the same scores for every method, errors against slow references, and bold only where a lead is clear."""

import itertools
import math

import pytest
import torch

from mola import metrics
from mola.compare import SCORES, Answer, Tally, area_between, mean_of
from mola.compare.measured import calibration_error, lead, pass_rate
from mola.compare.report.estimate import Estimate, is_clear, leaders
from mola.compare.results import labelled_result, outlier_result
from tests.closeness import assert_close


def answers(count=60, members=3, classes=4, seed=0):
    """Answers of a plain ensemble, and of one with a score of its own, on the same inputs."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(members, count, classes, generator=generator)
    weights = torch.softmax(torch.randn(members, generator=generator), 0)
    probs = torch.einsum("k,knc->nc", weights, torch.softmax(logits, -1))
    own = torch.randn(count, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    return Answer(probs, logits, weights), Answer(probs, logits, weights, own), labels


# --- errors -----------------------------------------------------------------------------------------------------------------


def delong(inliers, outliers):
    """Variance of several AUROCs by DeLong's formulas, pair by pair: (s, s) from scores (s, n) and (s, m)."""
    wins = (outliers[:, None, :] > inliers[:, :, None]).double()
    wins += 0.5 * (outliers[:, None, :] == inliers[:, :, None]).double()
    return torch.cov(wins.mean(2)) / inliers.shape[1] + torch.cov(wins.mean(1)) / outliers.shape[1]


@pytest.mark.parametrize("ties", [False, True])
def test_errors_of_auroc_and_of_differences_are_delongs(ties):
    generator = torch.Generator().manual_seed(1)
    near, far = (torch.randn(2, size, generator=generator).double() for size in (83, 47))
    near[1] += near[0]
    far = far + torch.tensor([[1.0], [1.5]])
    far[1] += far[0]
    if ties:
        near, far = (2 * near).round(), (2 * far).round()
    expected = delong(near, far)
    first, second = (area_between(*pair) for pair in zip(near, far, strict=True))
    for index, one in enumerate((first, second)):
        assert one.value == pytest.approx(metrics.auroc(near[index], far[index]), abs=1e-12)
        assert one.error == pytest.approx(float(expected[index, index].sqrt()), rel=1e-9)
    spread = expected[0, 0] + expected[1, 1] - 2 * expected[0, 1]
    assert first.minus(second).error == pytest.approx(float(spread.sqrt()), rel=1e-9)
    assert first.minus(second).error < math.hypot(first.error, second.error), "methods go up and down together"


def resampled(make, *samples, times=2000):
    """Standard deviation over bootstrap samples: slow, and true to whatever the number is."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(times):
        drawn = [one[:, torch.randint(one.shape[1], (one.shape[1],), generator=generator)] for one in samples]
        found.append(make(*drawn))
    return torch.tensor(found, dtype=torch.float64).std()


@pytest.mark.parametrize("name", ["auroc", "fpr95", "ece", "nll"])
def test_errors_are_what_resampling_finds(name):
    generator = torch.Generator().manual_seed(3)
    near, far = (torch.randn(1, size, generator=generator).double() for size in (600, 400))
    far = far + 1.5
    sure = torch.rand(1, 600, generator=generator).double()
    right = (torch.rand(1, 600, generator=generator).double() < 0.7 * sure).double()
    labelled = torch.cat([sure, right])
    made = {
        "auroc": (area_between, lambda a, b: metrics.auroc(a[0], b[0]), (near, far)),
        "fpr95": (pass_rate, lambda a, b: metrics.fpr_at_tpr(a[0], b[0]), (near, far)),
        "ece": (
            lambda a: calibration_error(*a, 15),
            lambda a: metrics.calibration_gap(metrics.bin_sums(a[0], a[1], 15)),
            (labelled,),
        ),
        "nll": (lambda a: mean_of(a), lambda a: float(a.mean()), (near.exp(),)),
    }
    measure, value, samples = made[name]
    found = measure(*(one if name == "ece" else one[0] for one in samples))
    assert found.value == pytest.approx(value(*samples), abs=1e-12)
    assert found.error == pytest.approx(float(resampled(value, *samples)), rel=0.12)


# --- which lead is clear ----------------------------------------------------------------------------------------------------


def paired(shift, noise, seed=0, count=400):
    """Two losses of the same data: a large common part, and a difference of known size."""
    generator = torch.Generator().manual_seed(seed)
    common, own = (torch.randn(count, generator=generator).double() for _ in range(2))
    own = (own - own.mean()) / own.std()
    return mean_of(10 * common), mean_of(10 * common + shift + noise * own)


@pytest.mark.parametrize(("times", "clear"), [(1.9, False), (2.1, True), (-2.1, True)])
def test_what_decides_is_the_error_of_the_difference(times, clear):
    error = 1 / 400**0.5
    one, other = paired(times * error, 1.0)
    found = lead({("one",): one, ("other",): other}, "low")
    assert found.best == (("one",) if times > 0 else ("other",))
    assert found.clear == ((found.best,) if clear else ())
    assert found.error == pytest.approx(error)
    assert one.error > 5 * error, "by the errors of the two numbers nothing could be told"


def test_a_method_does_not_compete_with_itself_nor_with_its_copy():
    values = torch.arange(100.0).double()
    close = values - 1e-3 + 0.1 * torch.randn(100, generator=torch.Generator().manual_seed(0)).double()
    found = lead(
        {
            ("DE", "energy"): mean_of(values),
            ("MoLA", "energy"): mean_of(values.clone()),
            ("MoLA", "entropy"): mean_of(close),
            ("MAP", "energy"): mean_of(values - 5 + 0.1 * close),
        },
        "high",
    )
    assert found.best[1] in ("energy", "entropy")
    assert ("MAP", "energy") not in found.clear
    copies = lead({("DE",): mean_of(values), ("MoLA",): mean_of(values), ("MAP",): mean_of(values - 1)}, "high")
    assert copies.clear == (("DE",), ("MoLA",)), "the same numbers are marked alike"
    assert copies.level == (("MoLA",),)
    assert copies.rival == ("MAP",)
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


@pytest.mark.parametrize(
    ("freedom", "times"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (7, 2.36462), (30, 2.04227)]
)
def test_few_runs_are_judged_by_students_t(freedom, times):
    """Quantiles of 95 % from the tables, where two standard errors of many data are 95.45 %."""
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


# --- tallies ----------------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_a_direct_computation():
    plain, own, _ = answers()
    found = own.scores()
    assert tuple(found) == SCORES
    probs, logits = own.probs.double(), own.logits.double()
    weights = own.weights.double()
    expected = {
        "max probability": 1 - probs.amax(1),
        "entropy": -(probs * probs.log()).sum(1),
        "energy": -(weights[:, None] * torch.logsumexp(logits, -1)).sum(0),
        "maximum logit": -(weights[:, None] * logits.amax(-1)).sum(0),
        "ood score": own.ood_score.double(),
    }
    for name in SCORES:
        assert torch.allclose(found[name], expected[name], atol=1e-12), name
    assert tuple(plain.scores()) == SCORES[:-1]
    assert tuple(Answer(own.probs).scores()) == SCORES[:2]


def test_results_by_class_are_those_of_its_data():
    _, answer, labels = answers()
    tally = Tally()
    tally.add(answer, labels)
    found = labelled_result(tally, classes=list("abcdef")).classes
    assert list(found) == list("abcd"), "a class without data has no result"
    for label, one in enumerate(found.values()):
        mine = labels == label
        assert one.count == int(mine.sum())
        assert_close(one.accuracy, (answer.probs[mine].argmax(1) == label).double().mean())
        assert_close(one.confidence, answer.probs[mine].amax(1).mean())


def test_every_pair_of_methods_is_compared():
    """A lead over the second is not enough where the third is less certain."""
    steady = torch.zeros(100, dtype=torch.float64)
    wild = torch.tensor([-50.0, 49.0] * 50, dtype=torch.float64)
    found = {("best",): mean_of(steady + 1), ("second",): mean_of(steady), ("third",): mean_of(wild)}
    assert lead(found, "high").clear == ()
    assert lead(found, "high").rival == ("third",)
    for order in itertools.permutations(found):
        assert lead({name: found[name] for name in order}, "high").rival == ("third",)


def test_results_are_the_metrics_of_all_data_at_once():
    """Batches and columns of a tally against `mola.metrics` on all probabilities, and AUROC against all pairs."""
    _, own, labels = answers(300)
    _, far, _ = answers(170, seed=5)
    inside, outside = Tally(), Tally()
    for rows in torch.split(torch.arange(300), 64):
        inside.add(Answer(own.probs[rows], own.logits[:, rows], own.weights, own.ood_score[rows]), labels[rows])
    outside.add(far)
    found, out = labelled_result(inside, 30.0, errors=True), outlier_result(inside, outside, errors=True)
    direct = {
        "accuracy": metrics.accuracy,
        "log_likelihood": metrics.log_likelihood,
        "nll": metrics.negative_log_likelihood,
        "brier": metrics.brier,
        "ece": metrics.expected_calibration_error,
    }
    assert {name: found.metrics[name] for name in direct} == {
        name: metric(own.probs, labels) for name, metric in direct.items()
    }
    assert found.metrics["ece100"] == metrics.expected_calibration_error(own.probs, labels, bins=100)
    assert found.metrics["mce"] == metrics.largest_gap(metrics.bin_confidences(own.probs, labels))
    confidence, predicted = own.probs.double().max(1)
    legacy = metrics.bin_sums_legacy(confidence, predicted == labels, 100)
    assert found.metrics["ece_legacy"] == metrics.calibration_gap(legacy)
    assert found.metrics["mce_legacy"] == metrics.largest_gap(legacy)
    wrong = 1 - own.probs.max(1).values
    assert found.metrics["aurc"] == metrics.area_under_risk_coverage(wrong, own.probs.argmax(1) == labels)
    assert (found.count, found.level, sum(found.histogram)) == (300, 30.0, 300)
    for name, scores in out.scores.items():
        near, beyond = own.scores()[name], far.scores()[name][:, None]
        wins = (beyond > near).double().mean() + (beyond == near).double().mean() / 2
        assert scores["auroc"] == pytest.approx(float(wins), rel=1e-12)
        assert out.errors[name]["auroc"] == pytest.approx(area_between(near, beyond[:, 0]).error)
    assert out.confidence == metrics.mean_confidence(far.probs)
