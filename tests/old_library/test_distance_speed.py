"""Short cuts of cooling by distance, each against the long way that it saves: cost must not change what is chosen or said."""

import pytest
import torch
from torch import nn

import mola
from mola import metrics
from mola.cooling import Cooling, Usual
from mola.laplace import LogitMoments, Scale
from mola.links import LINKS, divided_and_cooled
from mola.network import Features, Head, RowBuffer
from mola.network.fingerprint import Watch
from mola.tuning.data_checks import other_order
from mola.tuning.distance import FINEST
from mola.tuning.rules import PAPER_GRID, Search, _smallest, log_grid
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


# --- candidates on held-out data ----------------------------------------------------------------------------------------


class Kept:
    """A rule that chooses nothing, and keeps what rules are given."""

    def choose(self, problem, val_loader):
        self.problem, self.data = problem, problem.read(val_loader, "validation loader", True)
        return mola.Tuning("kept", (1.0,) * len(problem.spectra))


def kept(posterior, loader):
    """The posterior that knows what is usual of these data, the problem, and what was read of them."""
    rule = Kept()
    tuned = posterior.tune(loader, rule, progress=False)
    return tuned, rule.problem, rule.data


def labelled_case(likelihood, structure="kron", count=60, **options):
    """Two networks of different widths, fitted, with validation data of which some are far or long; some labels are missing."""
    networks = [nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 4)) for width in (8, 5)]
    inputs = torch.randn(200 + count, 3)
    inputs[-20:-10] = 4 * inputs[:10]  # in the direction of training data
    inputs[-10:] *= 0.05
    with torch.no_grad():
        logits = torch.stack([network(inputs) for network in networks]).mean(0)
    if likelihood == "categorical":
        labels = torch.distributions.Categorical(logits=logits).sample()
    else:
        labels = torch.bernoulli(logits.sigmoid())
        labels[::7, 1], labels[3::11, 2], labels[5] = torch.nan, -100, torch.nan
    options = {"structure": structure, "likelihood": likelihood, "progress": False} | options
    return mola.fit(networks, [(inputs[:200], labels[:200])], **options), inputs[200:], labels[200:]


def scores_by_hand(probs, labels):
    """Scores of probabilities (n, C): of classes (n,), or of yes or no (n, C), one question after the other."""
    if labels.dim() == 2:
        known = ~(labels.isnan() | (labels == -100))
        probs, labels = torch.stack([1 - probs[known], probs[known]], 1), labels[known].long()
    confidence = metrics.mean_confidence(probs)
    nll, brier = metrics.negative_log_likelihood(probs, labels), metrics.brier(probs, labels)
    return {
        "confidence": confidence,
        "nll": nll,
        "brier": brier,
        "ece": metrics.expected_calibration_error(probs, labels),
    }


COOLINGS = {
    "exponents": [(1.0, 0.0), (1.0, 0.3), (1.0, 2.0), (1.0, 60.0)],
    "exponents, sharpened": [(0.7, 0.0), (0.7, 0.3), (0.7, 2.0)],
    "temperatures": [(0.5, 0.0), (1.0, 0.0), (2.0, 0.0)],
    "both": [(1.0, 0.0), (0.5, 1.0), (2.0, 1.0)],
}


@pytest.mark.parametrize("portions", ["one", "several", "several, nothing kept"])
@pytest.mark.parametrize(
    ("likelihood", "link"),
    [
        ("categorical", "probit"),
        ("categorical", "probit-centered"),
        ("categorical", "bridge"),
        ("bernoulli", "probit"),
    ],
)
def test_coolings_tried_together_score_as_a_loop_over_them(likelihood, link, portions, monkeypatch):
    """Data that are no farther than usual are tried once for all exponents, and apart from the others."""
    if portions != "one":
        monkeypatch.setattr("mola.tuning.candidates.LOGITS_AT_ONCE", 4 * 17)
    if portions == "several, nothing kept":
        monkeypatch.setattr("mola.tuning.candidates.FEW_NUMBERS", 0)
    posterior, inputs, labels = labelled_case(likelihood, link=link, weights="evidence")
    tuned, problem, data = kept(posterior, [(inputs, labels)])
    at = (0.3, 20.0)
    plain = tuned.with_prior_precision(at)
    for _ in range(2):  # what was kept of the first time serves the second
        for name, coolings in COOLINGS.items():
            found = problem.cooled_curve(data, at, coolings)
            for index, (temperature, exponent) in enumerate(coolings):
                one = plain.with_temperature(temperature).with_distance_exponent(exponent)
                expected = scores_by_hand(one(inputs), labels)
                assert {key: float(values[index]) for key, values in found.items()} == pytest.approx(
                    expected, rel=1e-9
                ), name
    assert (tuned.with_distance_exponent(1.0)(inputs) != tuned(inputs)).any(1).double().mean() < 0.9  # some are usual


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_was_kept_of_other_prior_precisions_or_data_is_not_used(structure):
    posterior, inputs, labels = labelled_case("categorical", structure)
    tuned, problem, first = kept(posterior, [(inputs, labels)])
    second = kept(posterior, [(inputs[:25], labels[:25])])[2]
    low, high = (0.01, 30.0), (1.0, 1.0)
    # From each to the next, one thing changes.
    for data, at, exponent in (
        (first, low, 0.5),
        (first, high, 0.5),
        (first, high, 0.0),
        (first, low, 0.0),
        (second, low, 0.0),
        (second, low, 0.5),
        (first, low, 0.5),
    ):
        found = problem.cooled_curve(data, at, [(1.0, exponent)])
        one = tuned.with_prior_precision(at).with_distance_exponent(exponent)
        expected = scores_by_hand(one(inputs[: len(data)]), labels[: len(data)])
        assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("which", ["one datum", "all alike", "all short", "all long"])
def test_data_of_one_kind_are_cooled_as_they_would_be_among_others(which):
    """Of those that are cooled alike, and of the others, there may be none; the long may be near."""
    posterior, inputs, labels = labelled_case("categorical")
    tuned, problem, _ = kept(posterior, [(inputs, labels)])
    kinds = {"one datum": inputs[:1], "all alike": inputs[:1].expand(9, 3), "all short": inputs[-10:]}
    some = kinds.get(which, 9 * inputs[:40])
    own = labels[: len(some)]
    other = kept(posterior, [(some, own)])[2]  # usual is what it was on the data that were read first
    found = problem.cooled_curve(other, (1.0, 1.0), [(1.0, 0.0), (1.0, 1.5)])
    for index, exponent in enumerate((0.0, 1.5)):
        expected = scores_by_hand(tuned.with_prior_precision(1.0).with_distance_exponent(exponent)(some), own)
        assert {name: float(values[index]) for name, values in found.items()} == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("link", ["probit", "bridge"])
def test_posteriors_are_made_once_for_all_portions_of_the_data(link, monkeypatch):
    """Also where they are too large to keep from one search to the next."""
    monkeypatch.setattr("mola.tuning.candidates.LOGITS_AT_ONCE", 4 * 7)
    monkeypatch.setattr("mola.tuning.candidates.FEW_NUMBERS", 0)
    posterior, inputs, labels = labelled_case("categorical", link=link)
    _, problem, data = kept(posterior, [(inputs, labels)])
    made, kind = [], type(problem.spectra[0])
    plain = kind.posterior
    monkeypatch.setattr(kind, "posterior", lambda self, precision: made.append(self) or plain(self, precision))
    problem.cooled_curve(data, (1.0, 1.0), [(1.0, 0.0), (1.0, 1.0)])
    assert len(made) == len(problem.spectra)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_one_score_is_its_column_of_the_whole_curve(likelihood, structure):
    posterior, inputs, labels = labelled_case(likelihood, structure)
    _, problem, data = kept(posterior, [(inputs, labels)])
    grid, coolings = PAPER_GRID[::9], COOLINGS["both"]
    for tried in (
        lambda **only: problem.curve(data, grid, **only),
        lambda **only: problem.curve(data, grid, 0.6, **only),
        lambda **only: problem.cooled_curve(data, (0.3, 20.0), coolings, **only),
    ):
        whole = tried()
        assert whole.keys() == {"confidence", "nll", "brier", "ece"}
        for score, column in whole.items():
            found = tried(only=score)
            assert found.keys() == {score}
            assert torch.equal(found[score], column), score


# --- grids that grow ----------------------------------------------------------------------------------------------------

SMALL = 14
"""Candidates in a decade, of which few are tried where a score is smooth."""


@pytest.mark.parametrize("seed", range(12))
def test_a_grid_that_grows_finds_the_minimum_wherever_it_lies(seed):
    """Single valleys of random place and shape, most of them outside of the first grid."""
    generator = torch.Generator().manual_seed(seed)
    place = float(torch.empty(1).uniform_(-14, 11, generator=generator))
    left, right = torch.empty(2).uniform_(0.1, 3, generator=generator).tolist()
    asked = []

    def evaluate(grid):
        asked.extend(grid)
        away = torch.tensor(grid, dtype=torch.float64).log10() - place
        return {"nll": 1 + torch.where(away < 0, left * away.square(), right * away.abs()).log1p()}

    every = Search(evaluate, None)
    best = _smallest(every, "nll", meant=True)
    tried_of_all = len(asked)
    asked.clear()
    few = Search(evaluate, None, "nll")
    assert _smallest(few, "nll", meant=True) == best
    assert few.grid == every.grid
    assert len(asked) == len(set(asked))
    decades = (len(few.grid) - len(PAPER_GRID)) // SMALL
    assert len(asked) <= 36 + 4 * decades + 2 * SMALL < tried_of_all + 2 * SMALL


@pytest.mark.parametrize("score", ["nll", "brier"])
@pytest.mark.parametrize("away", [1e-3, 1e3], ids=["up", "down"])
def test_a_grid_that_grows_chooses_what_all_candidates_do(away, score):
    """From grids of a decade that lie some decades below what is best, or above it."""
    grown = 0
    for seed in range(6):
        posterior, data = case(seed, count=150)
        best = posterior.tune(data, score, progress=False).prior_precision[0]
        rule = mola.ValidationScore(score, grid=log_grid(best * away / 3, best * away * 3, 15))
        every = posterior.tune(data, rule, progress=False)
        few = posterior.tune(data, mola.Distance(price=0.1, rule=rule), progress=False)
        assert few.prior_precision == every.prior_precision
        assert few.temperature == every.temperature
        assert few.tuning.notes[:-1] == every.tuning.notes  # what the rule by itself says, then the price
        grown += every.prior_precision[0] not in rule.grid
    assert grown >= 4
