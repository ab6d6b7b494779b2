"""Fitting end to end: any iterable is a loader, any network is left as it was, and heads may be named."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import molaplace as mola
from molaplace.errors import DataError, HeadError
from molaplace.network import Resized
from tests.library.problems import LOADER, X, Y
from tests.witness import unchanged

pytestmark = pytest.mark.filterwarnings(
    "ignore:only .* of the labels:molaplace.errors.MolaWarning", "ignore:the prior prec:molaplace.errors.MolaWarning"
)


def make_network(width=4):
    layers = nn.Linear(5, width), nn.BatchNorm1d(width), nn.Dropout(), nn.Tanh(), nn.Linear(width, 3)
    return nn.Sequential(*layers).double()


@pytest.fixture
def networks():
    return [make_network(4).train(), make_network(6).eval()]


def sums(posterior):
    return [component.layer.sums.tensors for component in posterior.components]


def close(actual, expected):
    for left, right in zip(sums(actual), sums(expected), strict=True):
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            torch.testing.assert_close(tensor, right[name], rtol=1e-12, atol=1e-12)


# --- loaders ----------------------------------------------------------------------------------------------------------


class Once:
    """An iterable that may be read once."""

    opened = False

    def __iter__(self):
        assert not self.opened, "read twice"
        self.opened = True
        return iter(LOADER)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


LOADERS = {
    "list": lambda: LOADER,
    "tuple": lambda: tuple(LOADER),
    "generator": lambda: (batch for batch in LOADER),
    "read once": Once,
    "DataLoader": lambda: DataLoader(TensorDataset(X, Y), batch_size=6),
    "shuffling DataLoader": lambda: DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True),
    "iterable dataset": lambda: DataLoader(Stream(), batch_size=6),
    "lists": lambda: [list(batch) for batch in LOADER],
    "mappings": lambda: [{"input": x, "labels": y} for x, y in LOADER],
}


@pytest.mark.parametrize("kind", LOADERS)
def test_any_iterable_is_a_loader_and_is_read_once_for_all_networks(kind, networks):
    with torch.random.fork_rng():  # a shuffling loader draws
        posterior = mola.fit(networks, LOADERS[kind]())
    assert posterior.components[0].layer.sums.count == 20
    close(posterior, mola.fit(networks, [(X, Y)]))


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind != "tuple"])  # to predict, a tuple is one batch
def test_any_iterable_serves_to_tune_reweight_and_predict(kind, networks):
    posterior = mola.fit(networks, LOADER)
    rule = mola.rules.Threshold(confidence=0.36)
    expected = posterior.tune(LOADER, rule=rule)
    stacked = posterior.reweight(LOADER)
    with unchanged(*networks), torch.random.fork_rng():
        tuned = posterior.tune(LOADERS[kind](), rule=rule)
        reweighted = posterior.reweight(LOADERS[kind]())
        probs = posterior.predict(LOADERS[kind]()).probs
    assert tuned.prior_precision == pytest.approx(expected.prior_precision, rel=1e-9)
    torch.testing.assert_close(reweighted.weights, stacked.weights, rtol=0, atol=1e-6)
    order = [posterior.predict(X).probs, probs]
    if kind == "shuffling DataLoader":
        order = [values[values[:, 0].argsort()] for values in order]
    torch.testing.assert_close(*order, rtol=1e-12, atol=1e-12)


def fails(at, error):
    for index, batch in enumerate(LOADER):
        if index == at:
            raise error
        yield batch


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt("disk"), RuntimeError("disk")], ids=repr)
def test_an_exception_of_the_loader_comes_through_and_all_is_restored(at, error, networks):
    with unchanged(*networks), pytest.raises(type(error), match="disk") as caught:
        mola.fit(networks, fails(at, error))
    assert caught.value is error
    posterior = mola.fit(networks, LOADER)
    for read in (posterior.tune, posterior.reweight, posterior.predict):
        with unchanged(*networks), pytest.raises(type(error), match="disk"):
            read(fails(at, error))


def test_each_network_runs_once_on_each_batch(networks):
    """The heads are found in the pass over the first batch."""
    calls = []
    for index, network in enumerate(networks):
        network.register_forward_hook(lambda *_, index=index: calls.append(index))
    mola.fit(networks, LOADER)
    assert sorted(calls) == sorted([*range(len(networks))] * len(LOADER))


@pytest.mark.parametrize("at", range(1, 9))
def test_an_exception_of_any_pass_leaves_every_network_as_it_was(at, networks):
    passes = 0

    def strike(*_):
        nonlocal passes
        passes += 1
        if passes == at:
            raise RuntimeError("struck")

    for network in networks:
        network[0].register_forward_hook(strike)
    with unchanged(*networks), pytest.raises((RuntimeError, DataError), match="struck"):
        mola.fit(networks, LOADER)
    assert passes == at


def test_results_do_not_depend_on_the_random_state(networks):
    random.seed(3)
    first = mola.fit(networks, LOADER, link="mc").predict(X)
    random.seed(4)
    torch.manual_seed(99)
    again = mola.fit(networks, LOADER, link="mc").predict(X)
    assert torch.equal(again.probs, first.probs)
    assert torch.equal(again.mutual_information, first.mutual_information)


# --- networks ---------------------------------------------------------------------------------------------------------


def test_one_name_for_all_or_one_for_each():
    first = nn.Sequential()
    second = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    first.add_module("body", nn.Linear(5, 4))
    first.add_module("head", nn.Linear(4, 3))
    posterior = mola.fit([first, second], LOADER, head=["head", "1"])
    assert [component.head.name for component in posterior.components] == ["head", "1"]
    assert mola.fit(first, LOADER, head="head").components[0].head.name == "head"
    with pytest.raises(HeadError, match=r"networks\[1\].*'head'.*is not a module"):
        mola.fit([first, second], LOADER, head="head")


def test_networks_for_images_of_different_sizes_in_one_mixture():
    x = torch.rand(12, 3, 8, 8)
    y = torch.arange(12) % 3
    networks = [
        Resized(nn.Sequential(nn.Flatten(), nn.Linear(3 * size**2, 5), nn.Tanh(), nn.Linear(5, 3)), size, crop=0.75)
        for size in (4, 6)
    ]
    posterior = mola.fit(networks, [(x, y)])
    inner = [mola.fit(network.network, [(network.inputs(x), y)]) for network in networks]
    expected = torch.stack(
        [posterior_alone(network.inputs(x)) for posterior_alone, network in zip(inner, networks, strict=True)]
    ).mean(0)
    torch.testing.assert_close(posterior(x), expected)
