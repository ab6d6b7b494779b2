"""Errors carry the argument and the place they are about, and their messages are composed from these."""

import pickle
import warnings

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, MissingExtraError, MolaWarning, OptionError, located, warn
from molaplace.images import normalisation
from molaplace.options import one_of

NETWORK = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
X = torch.randn(8, 3)
LOADER = [(X, torch.arange(8) % 2)]


def test_a_place_is_named_once():
    with pytest.raises(DataError) as caught, located("batch 3 of the training loader"):
        raise DataError("labels are missing", place="batch 3 of the training loader, networks[1]")
    assert str(caught.value) == "batch 3 of the training loader, networks[1]: labels are missing"


def test_places_are_composed_from_the_outside_in():
    with pytest.raises(DataError) as caught, located("batch 3 of the training loader"), located("networks[1]"):
        raise DataError("must be finite.", argument="labels")
    assert caught.value.place == "batch 3 of the training loader, networks[1]"
    assert str(caught.value) == "batch 3 of the training loader, networks[1]: labels must be finite."
    again = pickle.loads(pickle.dumps(caught.value))  # as from the workers of a DataLoader
    assert (str(again), again.argument, again.place) == (str(caught.value), "labels", caught.value.place)
    with pytest.raises(DataError) as caught:
        mola.fit(NETWORK, [*LOADER, (X * torch.nan, LOADER[0][1])])
    assert caught.value.place == "batch 1 of the training loader, networks[0]"
    with pytest.raises(OptionError, match=r"^order must be one of a, b; got 'c'") as caught, located("elsewhere"):
        one_of("c", ("a", "b"), "order")
    assert caught.value.place is None


SIMILAR_NAMES = {
    "probit-centred": lambda: mola.fit(NETWORK, LOADER, link="probit-centered"),
    "bernoulli": lambda: mola.fit(NETWORK, LOADER, likelihood="bernouli"),
    "nll": lambda: mola.fit(NETWORK, LOADER).tune(LOADER, rule="nnl"),
    "evidence": lambda: mola.fit(NETWORK, LOADER, weights="evidense"),
    "uniform": lambda: mola.Mixture([NETWORK], "unifrom"),
    "cifar10": lambda: normalisation("CIFAR-10"),
}


@pytest.mark.parametrize("name", SIMILAR_NAMES)
def test_a_name_that_is_almost_right_is_answered_with_the_right_one(name):
    with pytest.raises(OptionError, match=f"Did you mean '{name}'"):
        SIMILAR_NAMES[name]()


def test_a_missing_extra_is_pickled():
    error = pickle.loads(pickle.dumps(MissingExtraError("a page", "plotly", "report")))
    assert "pip install 'molaplace[report]'" in str(error)


@pytest.mark.parametrize("package", ["molaplace", "molaplace_lab"])
def test_a_warning_points_to_the_code_outside_the_packages(package):
    names = {"__name__": f"{package}.module", "warn": warn}
    exec("def inner():\n    warn('careful')\ndef outer():\n    inner()", names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names["outer"]()
    assert caught[0].category is MolaWarning
    assert caught[0].filename == __file__
