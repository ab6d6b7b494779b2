"""Means over runs, and which lead over other methods is clear."""

import pytest
import torch

from molaplace_lab.report.runs import RunMean, is_clear, leaders


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
    means = {name: RunMean.over(dict(enumerate(values))) for name, values in runs.items()}
    assert leaders(means, "high") == marked
    negated = {name: mean.scaled(-2) for name, mean in means.items()}
    assert leaders(negated, "low") == marked
    assert leaders({**means, "unknown": None}, "high") == marked


@pytest.mark.parametrize(("freedom", "times"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (30, 2.04227)])
def test_few_runs_are_judged_by_students_t(freedom, times):
    """Quantiles of 95 % from the tables; two standard errors of many data are 95.45 %."""
    assert not is_clear(RunMean(times, 1.0, freedom + 1))
    assert is_clear(RunMean(-1.11 * times, 1.0, freedom + 1))


def test_differences_of_estimates_are_those_of_the_runs_that_both_have():
    first = RunMean.over({0: 1.0, 1: 2.0, 3: 5.0})
    second = RunMean.over({1: 1.5, 2: 9.0, 3: 3.5})
    gap = first.minus(second)
    assert gap.value == pytest.approx(1.0)
    assert gap.error == pytest.approx(0.5)
    assert gap.runs == 2


def test_rotations_that_share_images_do_not_pass_for_independent_runs():
    """Five rotations, each on two of five parts: runs taken for independent would understate the variance of their mean by 8/3."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4000, 5, generator=generator, dtype=torch.float64)
    rotations = torch.stack([(parts[:, (3 + turn) % 5] + parts[:, (4 + turn) % 5]) / 2 for turn in range(5)], dim=1)
    true = float(rotations.mean(1).var())
    naive, corrected = (
        sum(RunMean.over(dict(enumerate(row)), overlap).error ** 2 for row in rotations.tolist()) / len(rotations)
        for overlap in (0.0, 2 / 3)
    )
    assert naive == pytest.approx(true * 3 / 8, rel=0.1)
    assert true < corrected < 2 * true
    # What leads clearly in independent runs need not do so here; the correction stays through differences and units.
    values = {"a": [3.0, 3.2, 3.1, 3.4, 3.3], "b": [2.5, 3.1, 2.9, 3.2, 2.6]}
    alone, sharing = (
        {name: RunMean.over(dict(enumerate(of_method)), overlap).scaled(100) for name, of_method in values.items()}
        for overlap in (0.0, 2 / 3)
    )
    assert leaders(alone, "high") == ["a"]
    assert leaders(sharing, "high") == []
    gap = sharing["a"].minus(sharing["b"])
    assert gap.error == pytest.approx(alone["a"].minus(alone["b"]).error * (1 + 5 * 2 / 3) ** 0.5)
