"""Short cuts of cooling by distance, each against the long way that it saves: cost must not change what is chosen or said."""

import pytest
import torch
from torch import nn

import mola
from mola.cooling import Cooling, Usual
from mola.laplace import LogitMoments, Scale
from mola.links import LINKS, divided_and_cooled
from mola.network import Features, Head, RowBuffer
from mola.network.fingerprint import Watch
from mola.tuning.data_checks import other_order
from mola.tuning.distance import FINEST
from mola.tuning.rules import PAPER_GRID, Search
from tests.conftest import STRUCTURES, make_problem

pytestmark = pytest.mark.filterwarnings("ignore::mola.MolaWarning")  # small problems, at the ends of grids


def case(seed, count=90, structure="kron"):
    """Two networks that are surer than they are right, fitted, with validation data."""
    networks = [make_problem(seed=seed + 10 * index).network for index in range(2)]
    inputs = torch.randn(300 + count, 3)
    with torch.no_grad():
        logits = torch.stack([0.7 * network(inputs) for network in networks]).mean(0)
    labels = torch.distributions.Categorical(logits=logits).sample()
    posterior = mola.fit(networks, [(inputs[:300], labels[:300])], structure=structure, progress=False)
    return posterior, [(inputs[300:], labels[300:])]


def test_dividing_and_cooling_in_one_step_is_both_in_turn():
    mean, divisor = 4 * torch.randn(7, 4), 1 + 3 * torch.rand(7)
    spread = case(0)[0].components[0].prepare().at(torch.randn(7, 7))
    for name in ("probit", "probit-centered"):
        link, moments = LINKS[name](), LogitMoments(mean, spread)
        expected = link(moments.divided(divisor))
        assert torch.allclose(divided_and_cooled(link, moments, divisor), expected, rtol=0, atol=1e-14), name


def test_many_coolings_at_once_are_each_by_itself():
    generator = torch.Generator().manual_seed(3)
    distance, length = 2 * torch.randn(2, 3, 50, generator=generator, dtype=torch.float64)
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    usual = Usual((Scale(1.5, 2.0), Scale(0.7, 1.0), Scale(3.0, 0.4)))
    coolings = [(1.0, 0.0), (0.6, 0.0), (1.0, 0.125), (0.8, 2.5), (2.0, 100.0)]
    found = Cooling(usual=usual).divisors_at(coolings, distance, length, weights)
    for index, (temperature, exponent) in enumerate(coolings):
        cooling = Cooling(temperature, exponent, usual)
        expected = (
            torch.full_like(distance, temperature) if exponent == 0 else cooling.from_logs(distance, length, weights)
        )
        assert torch.allclose(found[index], expected, rtol=1e-14, atol=0), (temperature, exponent)


@pytest.mark.parametrize("size", [1e-30, 1e-24, 1.0, 1e18, 1e25])
@pytest.mark.parametrize("bias", [True, False])
def test_whether_features_fit_is_what_a_look_at_each_datum_says(size, bias):
    network = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.ReLU(), nn.Linear(6, 5, bias=bias)).float().eval()
    data = [(torch.randn(60, 4).float(), torch.arange(60) % 5)]
    posterior = mola.fit(network, data, progress=False).components[0].prepare()
    features = (torch.rand(9, 6) + 0.1).float()
    features[3] *= size
    features[5] = 0
    features = torch.cat([features, torch.ones(9, 1).float()], 1) if bias else features
    least, most = posterior.reach
    largest = features.abs().amax(1)
    expected = bool(((largest == 0) | ((largest >= least) & (largest <= most))).all())
    assert posterior.at(features).fits() == expected


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("rule", ["nll", "brier"])
def test_few_candidates_choose_what_all_of_them_do(structure, rule):
    for seed in range(3):
        posterior, data = case(seed, structure=structure)
        every = posterior.tune(data, rule, progress=False)
        few = posterior.tune(data, mola.Distance(price=0.1, rule=rule), progress=False)
        assert few.prior_precision == every.prior_precision
        assert few.temperature == every.temperature


def test_each_valley_of_a_curve_is_looked_at():
    asked = []

    def evaluate(grid):
        asked.extend(grid)
        position = torch.tensor(grid, dtype=torch.float64).log10()
        # Two valleys: the wide one is the lower where every ninth candidate stands, the narrow one in truth.
        return {"nll": (0.2 * (position + 2)).square() - 0.5 * torch.exp(-2 * (position - 2).square())}

    every = int(evaluate(PAPER_GRID)["nll"].argmin())
    asked.clear()
    search = Search(evaluate, None, "nll")
    assert int(search.curve["nll"].argmin()) == every
    assert len(asked) == len(set(asked)) < 40
    tried = [search.grid.index(one) for one in asked]
    assert torch.isfinite(search.curve["nll"]).nonzero().flatten().tolist() == sorted(tried)


def test_the_exponent_is_the_last_of_the_finest_grid_that_meets_the_price():
    posterior, data = case(1, 200)
    tuned = posterior.tune(data, mola.Distance(price=0.002), progress=False)
    chosen, (inputs, labels) = tuned.distance_exponent, data[0]
    assert 0 < chosen < 8
    assert chosen / FINEST == round(chosen / FINEST)

    def loss(exponent):
        probs = tuned.with_distance_exponent(exponent)(inputs)
        return float(-probs[torch.arange(len(labels)), labels].log().mean())

    limit = 1.002 * loss(0.0)
    assert loss(chosen) <= limit < loss(chosen + FINEST)


def test_the_constant_is_written_again_after_somebody_has_had_the_rows():
    buffer = RowBuffer(Head("", nn.Linear(4, 3)), 10)
    for start in (0, 3):
        kept = buffer.put(Features(torch.randn(3, 4), torch.randn(3, 3)), start)
        assert bool((kept.features[:, -1] == 1).all())
    buffer.first(6).features.zero_()
    buffer.handed_out()
    assert bool((buffer.put(Features(torch.randn(2, 4), torch.randn(2, 3))).features[:, -1] == 1).all())


def test_a_layer_that_was_exchanged_is_still_noticed():
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    watch = Watch(network)
    assert watch.changed() == []
    network[0] = nn.Linear(4, 4)
    assert watch.changed() == ["0.weight", "0.bias"]


def test_another_order_is_found_by_pairs_that_occur():
    labels = torch.arange(300) % 3
    found = other_order(torch.stack([labels, (labels + 1) % 3], 1))
    assert found is not None
    assert dict(found.outputs) == {0: 1, 1: 2, 2: 0}
    assert other_order(torch.stack([labels, labels], 1)) is None
