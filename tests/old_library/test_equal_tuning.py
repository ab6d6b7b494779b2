"""Links that predict alike are tuned alike: whatever class they are, by every rule, for every structure."""

import warnings

import pytest
import torch

import mola
from mola.links import LINKS
from tests.conftest import STRUCTURES, make_problem

GRID = (1e-4, 1e-2, 0.3, 4.0, 1e3)

LINKS_TO_COPY = {name: kind() for name, kind in LINKS.items()} | {
    "mc": mola.MonteCarlo(samples=20),
    "normalised bridge": mola.Bridge(normalised=True),
}

WHOLE = ({"structure": "kron"}, {"structure": "diag"}, {"structure": "full"}, {"structure": "full", "subnetwork": 20})


class Copy(mola.Link):
    """Says what another link says, and nothing about how."""

    name = "copy"

    def __init__(self, link):
        self.link = link

    def __call__(self, moments, seed=None):
        return self.link(moments, seed)


def subclass(link):
    """The same link as one of its own class with its own `__call__`."""
    kind = type(link)
    body = {"__call__": lambda self, moments, seed=None: kind.__call__(self, moments, seed)}
    return type("Own", (kind,), body)(**vars(link))


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch):
    """A grid grows by few candidates, and not far: how the search goes does not depend on the link."""
    for name, value in (("STEPS", 2), ("SMALLEST", 1e-5), ("LARGEST", 1e4)):
        monkeypatch.setattr(f"mola.tuning.rules.{name}", value)


def copies(link):
    return Copy(link), subclass(link)


def rules(outliers):
    return [
        (mola.ConfidenceThreshold(grid=GRID), True),
        (mola.ConfidenceThreshold(confidence=0.4, brier=1.5, grid=GRID), True),
        *((mola.ValidationScore(score, grid=GRID), True) for score in ("nll", "brier", "ece")),
        (mola.OutlierExposure(outliers, grid=GRID), True),
        (mola.Evidence(), False),
    ]


def tuned(posterior, rule, loader, *, with_data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mola.MolaWarning)  # a grid may grow
        return posterior.tune(loader if with_data else None, rule, progress=False)


def check(posterior, link, inputs, loader, every_rule):
    original = posterior.with_link(link)
    expected = [tuned(original, rule, loader, with_data=with_data) for rule, with_data in every_rule]
    for copy in copies(link):
        other = posterior.with_link(copy)
        assert torch.equal(other(inputs), original(inputs))
        for (rule, with_data), first in zip(every_rule, expected, strict=True):
            second = tuned(other, rule, loader, with_data=with_data)
            assert second.prior_precision == first.prior_precision, (rule, copy)
            assert second.tuning.curve.keys() == first.tuning.curve.keys()
            for name, values in first.tuning.curve.items():
                assert second.tuning.curve[name] == pytest.approx(values, rel=1e-9, abs=1e-12), (rule, name, copy)


@pytest.mark.parametrize("name", LINKS_TO_COPY)
def test_last_layers(structure, name):
    first, second = make_problem(seed=0), make_problem(seed=1)
    loader = first.loader
    posterior = mola.fit([first.network, second.network], loader, structure=structure)
    every = rules([3 * first.inputs[:9]])
    # A rule sees scores, whatever the structure that they come from: all rules with one, one of them with each other.
    given = every if structure == "kron" else [every[STRUCTURES.index(structure) + 1]]
    check(posterior, LINKS_TO_COPY[name], first.inputs, loader, given)


@pytest.mark.parametrize("options", WHOLE, ids=str)
@pytest.mark.parametrize("name", LINKS_TO_COPY)
def test_whole_networks(options, name):
    problem = make_problem(count=11)
    loader = problem.batches(6)
    posterior = mola.fit_whole(problem.network, loader, progress=False, **options)
    few = [(mola.ConfidenceThreshold(confidence=0.4, grid=GRID), True), (mola.ValidationScore("nll", grid=GRID), True)]
    check(posterior, LINKS_TO_COPY[name], problem.inputs, loader, few)


def test_bounds_ask_what_a_link_does_not_what_it_is():
    """A probit's subclass with a rule of its own has no proven bound; a copy that says that it cools like the probit has."""
    problem = make_problem(bias=False)
    posterior = mola.fit(problem.network, problem.loader)

    class Cooled(Copy):
        cooled_by = "variance"

        def __call__(self, moments, seed=None):
            return super().__call__(moments, seed)

    cooled = posterior.with_link(Cooled(mola.Probit()))
    assert torch.equal(cooled.confidence_bound(problem.inputs), posterior.confidence_bound(problem.inputs))
    for link in copies(mola.Probit()):
        with pytest.raises(mola.BoundError, match="proven for link 'probit'"):
            posterior.with_link(link).confidence_bound(problem.inputs)
