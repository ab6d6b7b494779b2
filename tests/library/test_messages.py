"""Messages of the library: names that are almost right, a tuple as input, and rules that lack their data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.cli.networks import build_networks
from molaplace.errors import OptionError
from molaplace.images import NORMALISATIONS, normalisation
from molaplace.likelihoods import CATEGORICAL
from molaplace.links import LINKS, as_link
from molaplace.rules import RULES, as_rule
from molaplace.structures import STRUCTURES, as_structure
from molaplace.weights import check_weighting

TAKERS = {
    "structure": (STRUCTURES, as_structure),
    "link": (LINKS, lambda name: as_link(name, CATEGORICAL)),
    "rule": (RULES, lambda name: as_rule(name, CATEGORICAL)),
    "weights": (("uniform", "evidence"), lambda name: check_weighting(name, 2)),
    "mixture": (("uniform",), lambda name: mola.Mixture([nn.Identity()], name)),
    "score": (("brier",), lambda name: mola.rules.Score(name)),
    "draws": (("logits", "weights"), lambda name: mola.links.MonteCarlo(over=name)),
    "normalisation": (NORMALISATIONS, normalisation),
    "network": (("mlp",), lambda name: build_networks([name])),
    "outputs": (
        ("probs", "confidence"),
        lambda name: mola.export.graph.check_outputs([name], mola.ensemble(nn.Linear(2, 2))),
    ),
}


@pytest.fixture
def parts():
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2)]
    inputs = torch.randn(60, 4)
    labels = networks[0](inputs).argmax(1)
    return networks, [(inputs[:40], labels[:40])], [(inputs[40:], labels[40:])]


@pytest.mark.parametrize("taker", TAKERS)
def test_a_name_that_is_almost_right_is_answered_with_the_right_one(taker):
    known, take = TAKERS[taker]
    for name in known:
        for wrong in (name.upper() + "x", name[1:] + name[0] if len(name) > 4 else name + "s"):
            if wrong in known:
                continue
            with pytest.raises(OptionError, match=r"Did you mean '.*'\?") as caught:
                take(wrong)
            assert repr(wrong) in str(caught.value) or wrong in str(caught.value)


def test_a_tuple_that_the_network_does_not_take_is_explained():
    with pytest.raises(mola.errors.DataError, match=r"elements of a tuple .*pass only the inputs"):
        mola.ensemble(nn.Linear(3, 2)).predict((torch.randn(4, 3), torch.arange(4)))


def unread():
    raise AssertionError("the training data were read")
    yield


@pytest.mark.parametrize(
    "fit", [mola.fit, lambda *a, **k: mola.whole.fit(*a, structure="diag", **k)], ids=["last", "whole"]
)
def test_a_rule_that_lacks_something_is_refused_before_the_training_data_are_read(parts, fit):
    networks, _, val = parts
    for rule in (
        *(name for name in RULES if name not in ("evidence", "crps")),
        mola.rules.Threshold(),
        mola.rules.Outliers([]),
    ):
        with pytest.raises(OptionError, match=r"needs validation data"):
            fit(networks, unread(), rule=rule)
    for rule in ("evidence", mola.rules.Evidence()):
        with pytest.raises(OptionError, match="training data"):
            fit(networks, unread(), val, rule=rule)
    with pytest.raises(OptionError, match="Did you mean 'nll'"):
        fit(networks, unread(), val, rule="nnl")
    assert fit(networks, parts[1]).tuning is None, "no rule and no data: nothing is tuned"
