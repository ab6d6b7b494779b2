"""Prediction sets contain the truth with the given probability: exactly, by leaving one out, and by definition."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import molaplace as mola
from molaplace.decisions.calibration import Calibration
from molaplace.errors import DataError, MolaWarning, OptionError


def data(count, classes=4, seed=0, ties=False):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(count, classes, generator=generator, dtype=torch.float64), 1)
    if ties:
        probs = (8 * probs).round() + 0.5
        probs = probs / probs.sum(1, keepdim=True)
    labels = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return probs, labels


def slow_scores(method, row, penalty, free):
    """Scores of one input, class by class."""
    order = sorted(range(len(row)), key=lambda c: (-row[c], c))
    scores = {}
    for index, c in enumerate(order):
        if method == "lac":
            scores[c] = -row[c]
        else:
            scores[c] = sum(row[other] for other in order[:index]) + row[c]
            if method == "raps":
                scores[c] += penalty * max(0, index + 1 - free)
    return [scores[c] for c in range(len(row))]


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_the_definition(method):
    probs, labels = data(60)
    sets = mola.prediction_sets(probs[:40], labels[:40], 0.8, method, penalty=0.1, free=2)
    calibration = sorted(
        slow_scores(method, row, 0.1, 2)[label]
        for row, label in zip(probs[:40].tolist(), labels[:40].tolist(), strict=True)
    )
    limit = calibration[math.ceil(41 * 0.8) - 1]
    expected = [[score <= limit + 1e-12 for score in slow_scores(method, row, 0.1, 2)] for row in probs[40:].tolist()]
    assert sets(probs[40:]).tolist() == expected


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("coverage", [0.5, 0.77, 0.9])
@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_the_promise_is_kept_exactly(method, coverage, ties):
    """Each datum in turn is the new one, and all others calibrate: the promise for exchangeable data, without sampling error."""
    probs, labels = data(61, ties=ties)
    held = 0
    for index in range(61):
        others = torch.arange(61) != index
        sets = mola.prediction_sets(probs[others], labels[others], coverage, method, penalty=0.05, free=1)
        held += int(sets(probs[index : index + 1])[0, labels[index]])
    exact = Fraction(coverage).limit_denominator(1000)
    assert Fraction(held, 61) >= exact
    if not ties and method == "lac":
        assert held == math.ceil(61 * exact)


def test_the_promise_is_kept_for_each_class():
    probs, labels = data(120, classes=3, seed=1)
    probs[labels == 2] = probs[labels == 2].flip(1)  # the predictor is bad for one class
    held = np.zeros(120, dtype=bool)
    for index in range(120):
        others = np.arange(120) != index
        sets = mola.prediction_sets(probs[others], labels[others], 0.8, by="class")
        held[index] = bool(sets(probs[index : index + 1])[0, labels[index]])
    assert all(held[labels == label].mean() >= 0.8 for label in range(3))
    plain = mola.prediction_sets(probs, labels, 0.8)(probs)[torch.arange(120), labels]
    assert plain[labels == 2].double().mean() < 0.8  # on average only


def test_randomised_sets_have_the_coverage_that_was_asked_for():
    """And no more: without randomisation the last class is held whole."""
    generator = torch.Generator().manual_seed(0)
    probs, labels = data(20_000, seed=2)
    every = torch.arange(10_000)
    coverage_and_size = {}
    for randomised in (False, True):
        sets = mola.prediction_sets(
            probs[:10_000], labels[:10_000], 0.7, "aps", randomised=randomised, generator=generator
        )
        held = sets(probs[10_000:], generator=generator)
        coverage_and_size[randomised] = (
            float(held[every, labels[10_000:]].double().mean()),
            float(held.sum(1).double().mean()),
        )
    assert coverage_and_size[True][0] == pytest.approx(0.7, abs=4 * math.sqrt(2 * 0.21 / 10_000))
    assert coverage_and_size[True][1] < coverage_and_size[False][1]


def test_empty_and_whole_sets():
    probs = torch.tensor([[0.98, 0.02], [0.95, 0.05], [0.9, 0.1], [0.85, 0.15]] * 10)
    labels = torch.zeros(40, dtype=torch.int64)
    unsure = torch.tensor([[0.6, 0.4], [0.2, 0.8], [0.99, 0.01]])
    sets = mola.prediction_sets(probs, labels, 0.9)
    assert sets.least_probability == pytest.approx(0.85)
    assert sets(unsure).tolist() == [[False, False], [False, False], [True, False]]
    filled = mola.prediction_sets(probs, labels, 0.9, at_least_one=True)
    assert filled(unsure).tolist() == [[True, False], [False, True], [True, False]]
    with pytest.warns(MolaWarning, match="at least 9 .* fewer: 1"):
        whole = mola.prediction_sets(probs, labels, 0.9, by="class")
    assert whole(unsure)[:, 1].all()  # nothing is known of class 1: it cannot be ruled out
    assert replace(whole, at_least_one=True)(unsure).equal(whole(unsure)), (
        "no set is empty, even without the most probable class"
    )


def test_probabilities_in_bfloat16_are_those_of_their_values():
    """Rounded to eight bits, the rows sum to 1 only roughly."""
    probs, labels = data(200)
    rounded = probs.bfloat16()
    assert float((rounded.double().sum(1) - 1).abs().max()) > 1e-3
    assert mola.prediction_sets(rounded, labels)(rounded).equal(mola.prediction_sets(rounded.double(), labels)(rounded))


@pytest.mark.parametrize(("coverage", "needed"), [(0.9, 9), (0.95, 19), (0.99, 99), (0.5, 1)])
def test_too_few_data_are_refused_with_the_number_needed(coverage, needed):
    probs, labels = data(needed)
    if needed > 1:
        with pytest.raises(DataError, match=f"Pass at least {needed} data"):
            mola.prediction_sets(probs[1:], labels[1:], coverage)
    assert mola.prediction_sets(probs, labels, coverage).count == needed


def test_wrong_use_is_refused():
    probs, labels = data(50)
    plain, by_class = (mola.prediction_sets(probs, labels, 0.5, by=by) for by in (None, "class"))
    for error, words, options in (
        (OptionError, r"90 % is 0\.9", {"coverage": 90}),
        (OptionError, "method must be", {"method": "thr"}),
        (OptionError, "cannot be randomised", {"randomised": True}),
        (OptionError, "by must be", {"by": "klass"}),
        (OptionError, "penalty must be", {"method": "raps", "penalty": -1}),
    ):
        with pytest.raises(error, match=words):
            mola.prediction_sets(probs, labels, **options)
    for error, words, call in (
        (DataError, r"mola\.Prediction.*got a DataLoader", lambda: plain(DataLoader(probs))),
        (
            DataError,
            r"mola\.Prediction.*got a DataLoader",
            lambda: mola.abstain_threshold(DataLoader(probs), labels, 0.5),
        ),
        (
            DataError,
            r"mola\.Prediction.*got a DataLoader",
            lambda: mola.abstain_threshold(probs, labels, 0.9)(DataLoader(probs)),
        ),
        (DataError, "4 classes; got 3", lambda: plain(torch.full((2, 3), 1 / 3))),
        (OptionError, "least_probability exists only", lambda: by_class.least_probability),
    ):
        with pytest.raises(error, match=words):
            call()


def test_columns_make_the_same_calibration_again():
    probs, labels = data(30)
    first = Calibration.of(probs, labels)
    again = Calibration.of_columns(first.columns(), 4)
    assert all(torch.equal(getattr(again, name), column) for name, column in first.columns().items())
    assert torch.equal(first.correct, probs.argmax(1) == labels)
    for name, column in (("label", first.label + 4), ("confidence", first.confidence[1:]), ("true_rank", first.label)):
        with pytest.raises(DataError, match="expected"):
            Calibration.of_columns(first.columns() | {name: column}, 4)


REFERENCE = json.loads((Path(__file__).parent / "conformal_reference.json").read_text(encoding="utf-8"))
"""What MAPIE and TorchCP gave: `benchmarks/peers.py --frozen` prints the file."""

OURS = {
    "TorchCP lac": {"method": "lac"},
    "TorchCP aps": {"method": "aps"},
    "TorchCP raps": {"method": "raps", "penalty": 0.05, "free": 1},
    "TorchCP lac by class": {"method": "lac", "by": "class"},
    "MAPIE lac": {"method": "lac"},
    "MAPIE aps randomised": {"method": "aps", "randomised": True},
}


@pytest.mark.parametrize("name", OURS)
def test_sets_are_those_of_other_libraries(name):
    probs, new = (torch.tensor(REFERENCE[key], dtype=torch.float64) for key in ("probs", "new"))
    # MAPIE subtracts its random part of the last class, we add ours.
    draws = [1 - torch.tensor(numbers, dtype=torch.float64) for numbers in REFERENCE["uniform"]]
    with mock.patch("torch.rand", side_effect=lambda *shape, **_: draws.pop(0).reshape(shape)):
        sets = mola.prediction_sets(probs, REFERENCE["labels"], REFERENCE["coverage"], **OURS[name])
        members = sets(new)
    assert ["".join("01"[member] for member in row) for row in members.int().tolist()] == REFERENCE["sets"][name]
