"""Settings of a mixture: numbers within bounds, by name, in files, and as rules choose them."""

import json
from dataclasses import replace

import numpy
import pytest
import torch

import molaplace as mola
from molaplace.errors import OptionError
from molaplace.rules import Tuning
from molaplace.saving.schema import from_json
from molaplace.settings import Settings
from tests.library.problems import data

SETTINGS = Settings((0.5, 2.0), temperature=0.7, pooling=0.25, distance_exponent=1.5, onset=1.2)


def test_one_prior_precision_is_shared_by_all_networks():
    assert SETTINGS.at_precision(5.0) == replace(SETTINGS, prior_precision=(5.0, 5.0))
    assert SETTINGS.at_precision(5.0, pooling=1.0) == replace(SETTINGS, prior_precision=(5.0, 5.0), pooling=1.0)


@pytest.mark.parametrize("precision", [1.0, torch.tensor(1.0)])
def test_prior_precisions_are_one_number_for_each_network(precision):
    with pytest.raises(OptionError) as caught:
        Settings(precision)
    assert caught.value.argument == "prior_precision"


def test_json():
    assert from_json(Settings, json.loads(json.dumps(SETTINGS.as_json()))) == SETTINGS
    assert SETTINGS.changed() == {"temperature": 0.7, "pooling": 0.25, "distance_exponent": 1.5, "onset": 1.2}
    assert replace(SETTINGS, distance_exponent=0.0).changed() == {"temperature": 0.7, "pooling": 0.25}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("pooling", 2),
        ("distance_exponent", -1),
        ("onset", "1"),
        ("prior_precision", (1.0, True)),
    ],
)
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(OptionError, match="between") as caught:
        replace(SETTINGS, **{field: value})
    assert caught.value.argument == field


def fitted():
    networks = [torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)) for _ in range(2)]
    return mola.fit(networks, [data()], progress=False)


def test_any_setting_is_replaced_by_name():
    posterior = fitted()
    changed = posterior.with_settings(prior_precision=2.0, temperature=0.7, pooling=0.25)
    assert changed.settings == posterior.with_prior_precision(2.0).with_temperature(0.7).with_pooling(0.25).settings
    with pytest.raises(OptionError, match="a plain ensemble has none"):
        mola.ensemble(posterior.networks).with_settings(prior_precision=2.0)


CHANGES = ("with_temperature", "with_pooling", "with_distance_exponent", "with_prior_precision")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("value", [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]]), numpy.array([0.5])])
def test_tensors_of_one_number_are_numbers(change, value, tmp_path):
    posterior = fitted()
    x, _ = data(count=5)
    changed = getattr(posterior, change)(value)
    expected = getattr(posterior, change)(0.5)
    assert changed.settings == expected.settings
    assert torch.equal(changed(x), expected(x))
    assert mola.load(changed.save(tmp_path / "posterior"), posterior.networks).settings == expected.settings


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([0.5, 0.6, 0.7]),
        torch.tensor([]),
        torch.tensor([[0.5, 0.6], [0.5, 0.6]]),
        torch.tensor([torch.nan]),
        torch.tensor(torch.nan),
        float("nan"),
        torch.tensor([True]),
        torch.tensor([0.5j]),
        "0.5",
    ],
)
def test_anything_else_is_no_setting(change, value):
    with pytest.raises(OptionError) as caught:
        getattr(fitted(), change)(value)
    assert caught.value.argument in ("temperature", "pooling", "distance_exponent", "prior_precision")


def test_an_onset_is_one_number():
    posterior = fitted()
    assert posterior.with_distance_exponent(1.0, onset=torch.tensor([2.0])).settings.onset == 2.0
    with pytest.raises(OptionError, match="onset"):
        posterior.with_distance_exponent(1.0, onset=torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize(
    "rule",
    [
        lambda objective: objective.settings,
        lambda objective: Tuning("grid", [objective.settings.at_precision(value) for value in (0.5, 2.0)]),
        lambda objective: Tuning("constant", {"prior_precision": 1.0}),
        lambda objective: Tuning("first", Settings((1.0,))),
    ],
    ids=["settings", "candidates", "dictionary", "one network"],
)
def test_a_rule_chooses_one_candidate(rule):
    with pytest.raises(OptionError) as caught:
        fitted().tune([data()], rule=rule, progress=False)
    assert caught.value.argument == "rule"
