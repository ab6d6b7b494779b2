"""Choosing the prior precision: each rule against doing it by hand."""

import copy
import functools
import math
import warnings

import pytest
import torch

import mola
from mola import metrics
from mola.likelihood import CATEGORICAL
from mola.links import Probit
from mola.tuning.rules import log_grid, maximise
from tests.conftest import CLOSED_FORM_LINKS, make_problem
from tests.library.test_laws import data, loader, networks

GRID = log_grid(1e-4, 1e3, 9)


class Counted(list):
    """A loader that counts how often it is read."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


@functools.cache
def trained_once():
    inputs, _ = data(count=300)
    labels = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
    members = networks(3)
    for member in members:
        optimiser = torch.optim.Adam(member.parameters(), lr=0.05)
        for _ in range(400):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(member(inputs[:200]), labels[:200]).backward()
            optimiser.step()
    return members, inputs, labels


@pytest.fixture
def trained():
    """Three networks that fit their data: validation confidence means something."""
    members, inputs, labels = copy.deepcopy(trained_once())
    return members, loader(inputs[:200], labels[:200], 50), Counted(loader(inputs[200:], labels[200:], 40))


def by_hand(posterior, validation, score):
    """Every candidate, the slow way: a new posterior and a pass over the data for each."""
    inputs, labels = (torch.cat(parts) for parts in zip(*validation, strict=True))
    return [score(posterior.with_prior_precision(value)(inputs), labels) for value in GRID]


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
@pytest.mark.parametrize("link", [*CLOSED_FORM_LINKS, "mc"])
def test_threshold_together_equals_by_hand(trained, structure, link):
    members, train, validation = trained
    posterior = mola.fit(members, train, structure=structure, link=link)
    confidences = by_hand(posterior, validation, lambda probs, _: metrics.mean_confidence(probs))
    threshold = sorted(confidences)[len(GRID) // 2]
    tuned = posterior.tune(validation, mola.ConfidenceThreshold(threshold - 1e-12, grid=GRID))
    curve = dict(zip(tuned.tuning.curve["prior_precision"], tuned.tuning.curve["confidence"], strict=True))
    assert torch.allclose(torch.tensor([curve[value] for value in GRID]), torch.tensor(confidences), atol=1e-12)
    expected = min(value for value, found in curve.items() if found >= threshold - 1e-12)
    assert tuned.prior_precision == (expected,) * 3
    assert min(curve) == GRID[0] or confidences[0] >= threshold - 1e-12


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
def test_in_a_tie_one_class_is_predicted_and_not_whichever_is_right(trained):
    members, train, validation = trained
    for member in members:
        member[-1].weight.data.zero_()
        member[-1].bias.data.zero_()
    tuned = mola.fit(members, train, progress=False).tune(
        validation, mola.ValidationScore("ece", grid=GRID), progress=False
    )
    labels = torch.cat([some for _, some in validation])
    share = float((labels == 0).double().mean())
    assert 0.1 < share < 0.4
    assert tuned.tuning.curve["ece"] == pytest.approx([abs(1 / 4 - share)] * len(tuned.tuning.curve["ece"]))


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
@pytest.mark.parametrize("score", ["nll", "brier", "ece"])
def test_validation_score_together_equals_by_hand(trained, structure, score):
    members, train, validation = trained
    functions = {
        "nll": metrics.negative_log_likelihood,
        "brier": metrics.brier,
        "ece": metrics.expected_calibration_error,
    }
    posterior = mola.fit(members, train, structure=structure, weights=[0.5, 0.25, 0.25])
    expected = torch.tensor(by_hand(posterior, validation, functions[score]))
    tuned = posterior.tune(validation, mola.ValidationScore(score, grid=GRID))
    curve = dict(zip(tuned.tuning.curve["prior_precision"], tuned.tuning.curve[score], strict=True))
    assert torch.allclose(torch.tensor([curve[value] for value in GRID]), expected, atol=1e-10)
    assert curve[tuned.prior_precision[0]] == min(curve.values())


@pytest.mark.parametrize(
    "rule", [mola.ConfidenceThreshold(0.6), mola.ValidationScore("brier")], ids=["threshold", "score"]
)
@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
def test_validation_data_are_read_once(trained, structure, rule):
    members, train, validation = trained
    posterior = mola.fit(members, train, structure=structure)
    passes = []
    handle = members[0].register_forward_hook(lambda *_: passes.append(1))
    posterior.tune(validation, rule)
    handle.remove()
    assert validation.reads == 1
    assert len(passes) == len(validation)


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
def test_default_threshold_lies_below_the_networks_own_accuracy(trained):
    members, train, validation = trained
    tuned = mola.fit(members, train, validation)
    inputs, labels = (torch.cat(parts) for parts in zip(*validation, strict=True))
    accuracy = sum(metrics.accuracy(member(inputs), labels) for member in members) / 3
    confidence = metrics.mean_confidence(tuned(inputs))
    assert accuracy - 0.01 <= confidence < accuracy + 0.02
    below = tuned.prior_precision[0] / 10 ** (1 / 14)
    assert metrics.mean_confidence(tuned.with_prior_precision(below)(inputs)) < accuracy - 0.01


def test_the_grid_grows_past_an_end_that_wins_and_says_so(trained):
    members, train, validation = trained
    posterior = mola.fit(members, train)
    with pytest.warns(mola.MolaWarning, match="went on to") as caught:
        tuned = posterior.tune(validation, mola.ConfidenceThreshold(0.6, grid=log_grid(1.0, 10.0, 5)))
    assert caught[0].filename == __file__
    wide = posterior.tune(validation, mola.ConfidenceThreshold(0.6, grid=log_grid(1e-9, 10.0, 141)))
    assert tuned.prior_precision[0] < 1.0
    assert math.isclose(tuned.prior_precision[0], wide.prior_precision[0], rel_tol=0.2)
    assert "went on to" in tuned.tuning.notes[0]
    assert f"Took {tuned.prior_precision[0]:.3g}: the prior says next to nothing" in tuned.tuning.notes[0]
    assert "set the prior precision yourself" in tuned.tuning.notes[0]
    with pytest.warns(mola.MolaWarning, match="went on to"):
        upward = posterior.tune(validation, mola.ConfidenceThreshold(0.6, grid=log_grid(1e-12, 1e-11, 5)))
    assert upward.prior_precision[0] > 1e-11
    assert "close to the plain ensemble's" in upward.tuning.notes[0]


def test_a_threshold_nothing_meets_is_a_clear_warning(trained):
    members, train, validation = trained
    posterior = mola.fit(members, train)
    with pytest.warns(mola.MolaWarning) as caught:
        tuned = posterior.tune(validation, mola.ConfidenceThreshold(0.99999))
    assert any("no prior precision gives a mean confidence of at least 1.0000" in str(w.message) for w in caught)
    inputs = torch.cat([batch[0] for batch in validation])
    assert torch.allclose(tuned(inputs), mola.ensemble(members)(inputs), atol=1e-4)


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
def test_data_taken_in_portions_give_the_same_curve(trained, structure, monkeypatch):
    members, train, validation = trained
    posterior = mola.fit(members, train, structure=structure)
    rule = mola.ConfidenceThreshold(0.9, grid=log_grid(1e-9, 1e9, 9))
    whole = posterior.tune(validation, rule).tuning.curve
    monkeypatch.setattr("mola.tuning.candidates.PROJECTED_AT_ONCE", 1000)
    parts = posterior.tune(validation, rule).tuning.curve
    for name, values in whole.items():
        assert torch.allclose(torch.tensor(values), torch.tensor(parts[name]), rtol=1e-12), name


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
@pytest.mark.parametrize("link", ["probit", "probit-centered"])
@pytest.mark.parametrize("at_once", [1, 300])
def test_candidates_taken_together_give_the_curve_of_each(trained, structure, link, at_once, monkeypatch):
    members, train, validation = trained
    posterior = mola.fit(members, train, structure=structure, link=link)
    validation = [(inputs[:5], labels[:5]) for inputs, labels in validation[:2]]
    rule = mola.ConfidenceThreshold(0.9, grid=log_grid(1e-9, 1e9, 9))
    whole = posterior.tune(validation, rule).tuning.curve
    monkeypatch.setattr("mola.tuning.candidates.LOGITS_AT_ONCE", at_once)
    parts = posterior.tune(validation, rule).tuning.curve
    for name, values in whole.items():
        assert torch.allclose(torch.tensor(values), torch.tensor(parts[name]), rtol=1e-12), name


@pytest.mark.parametrize("contrast", [False, True])
def test_variances_at_several_precisions_are_those_at_each(trained, structure, contrast):
    members, train, _ = trained
    spectrum = mola.fit(members[0], train, structure=structure).components[0].curvature.spectrum
    projected = spectrum.project(torch.randn(7, spectrum.features, dtype=torch.float64))
    precisions = [1e-6, 0.3, 50.0]
    found = spectrum.variances(projected, precisions, contrast=contrast)
    for one, precision in zip(found, precisions, strict=True):
        torch.testing.assert_close(one.T, spectrum.variance(projected, precision, contrast=contrast))


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
def test_a_link_of_ones_own_that_needs_variances_alone_is_tuned_too(trained):
    class Halved(Probit):
        def __call__(self, moments, seed=None):
            return CATEGORICAL.probabilities(moments.mean / (2 * (1 + moments.variance)))

    members, train, validation = trained
    posterior = mola.fit(members, train).with_link(Halved())
    grid = log_grid(1e-4, 1e3, 20)
    tuned = posterior.tune(validation, mola.ValidationScore("nll", grid=grid))
    curve = tuned.tuning.curve
    assert tuned.temperature < 1, "halved logits are sharpened, and the curve is that at the temperature"
    inputs, labels = (torch.cat(parts) for parts in zip(*validation, strict=True))
    tried = {value: tuned.with_prior_precision(value)(inputs).double() for value in (grid[3], grid[15])}
    for value, probs in tried.items():
        expected = -probs.gather(1, labels[:, None]).log().mean()
        assert curve["nll"][curve["prior_precision"].index(value)] == pytest.approx(float(expected), rel=1e-5)


def test_a_short_cut_that_there_is_not_is_refused():
    with pytest.raises(mola.OptionError, match="got 'temperature'"):
        type("Odd", (Probit,), {"cooled_by": "temperature"})


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
def test_growth_stops_where_the_prior_does_not_matter_any_more(trained):
    """The diagonal posterior has a floor under its variance: below some lambda nothing changes."""
    members, train, validation = trained
    posterior = mola.fit(members, train, structure="diag")
    tuned = posterior.tune(validation, mola.ConfidenceThreshold(0.3))
    assert 1e-20 < tuned.prior_precision[0] < 1e-6
    inputs = torch.cat([batch[0] for batch in validation])
    assert torch.allclose(tuned(inputs), posterior.with_prior_precision(1e-24)(inputs), atol=1e-6)


def test_brier_threshold_must_be_met_too(trained):
    members, train, validation = trained
    posterior = mola.fit(members, train)
    plain = posterior.tune(validation, mola.ConfidenceThreshold(0.5, grid=log_grid(1e-9, 1e3, 60)))
    curve = plain.tuning.curve
    limit = curve["brier"][30]
    both = posterior.tune(validation, mola.ConfidenceThreshold(0.5, brier=limit, grid=log_grid(1e-9, 1e3, 60)))
    expected = next(
        precision
        for precision, confidence, brier in zip(
            curve["prior_precision"], curve["confidence"], curve["brier"], strict=True
        )
        if confidence >= 0.5 and brier <= limit
    )
    assert both.prior_precision[0] == expected > plain.prior_precision[0]


def dense_maximum(objective):
    """Golden-section search, far from the code under test."""
    low, high = math.log(1e-8), math.log(1e8)
    ratio = (5**0.5 - 1) / 2
    for _ in range(70):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (left, high) if objective(math.exp(left)) < objective(math.exp(right)) else (low, right)
    return math.exp((low + high) / 2)


def test_evidence_is_maximised_to_convergence(structure):
    problem = make_problem()
    posterior = mola.fit(problem.network, problem.loader, structure=structure)
    tuned = posterior.tune(rule=mola.Evidence())
    expected = dense_maximum(lambda value: float(posterior.with_prior_precision(value).log_evidence()[0]))
    assert math.isclose(tuned.prior_precision[0], expected, rel_tol=1e-5)
    best = float(tuned.log_evidence()[0])
    for factor in (0.99, 1.01):
        moved = posterior.with_prior_precision(tuned.prior_precision[0] * factor)
        assert float(moved.log_evidence()[0]) < best


def test_evidence_shared_and_apart(structure):
    inputs, labels = data()
    posterior = mola.fit(networks(3), loader(inputs, labels, 7), structure=structure)
    shared, apart = posterior.tune(rule=mola.Evidence()), posterior.tune(rule=mola.Evidence(shared=False))
    assert len(set(shared.prior_precision)) == 1
    assert len(set(apart.prior_precision)) == 3
    for index, member in enumerate(posterior.networks):
        alone = mola.fit(member, loader(inputs, labels, 7), structure=structure).tune(rule=mola.Evidence())
        assert math.isclose(apart.prior_precision[index], alone.prior_precision[0], rel_tol=1e-9)
    assert float(apart.log_evidence().sum()) > float(shared.log_evidence().sum())
    moved = posterior.with_prior_precision(shared.prior_precision[0] * 1.02)
    assert float(moved.log_evidence().sum()) < float(shared.log_evidence().sum())


def test_maximise_finds_a_known_maximum():
    found = maximise(lambda value: -((value.log() - math.log(3.7)) ** 2))
    assert math.isclose(found, 3.7, rel_tol=1e-10)


def test_maximise_says_when_there_is_none():
    with pytest.warns(mola.MolaWarning, match="no interior maximum"):
        maximise(lambda value: value.log())


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
def test_outlier_exposure_lowers_confidence_outside(trained):
    members, train, validation = trained
    posterior = mola.fit(members, train)
    outliers = [30 * torch.randn(50, 3)]
    plain = posterior.tune(validation, mola.ValidationScore("nll"))
    exposed = posterior.tune(validation, mola.OutlierExposure(outliers, weight=10.0))
    assert exposed.prior_precision[0] < plain.prior_precision[0]
    assert float(exposed(outliers[0]).max(1).values.mean()) < float(plain(outliers[0]).max(1).values.mean())
    inside = torch.cat([batch[0] for batch in validation])
    labels = torch.cat([batch[1] for batch in validation])

    def objective(posterior):
        uniform = -posterior(outliers[0]).log().mean()
        return metrics.negative_log_likelihood(posterior(inside), labels) + 10.0 * float(uniform)

    curve = exposed.tuning.curve
    best = min(curve["objective"])
    assert math.isclose(objective(exposed), best, rel_tol=1e-9)
    assert objective(exposed) <= objective(plain)


def test_tuning_returns_a_new_value_that_shares_the_networks(trained):
    members, train, validation = trained
    posterior = mola.fit(members, train)
    tuned = posterior.tune(validation, mola.ConfidenceThreshold(0.6, grid=log_grid(1e-9, 1e3, 60)))
    assert posterior.prior_precision == (1.0,) * 3
    assert posterior.tuning is None
    assert all(a is b for a, b in zip(tuned.networks, members, strict=True))
    assert tuned.components[0].curvature is posterior.components[0].curvature


def test_evidence_takes_no_data(trained):
    members, train, validation = trained
    with pytest.raises(mola.OptionError, match="training data alone"):
        mola.fit(members, train).tune(validation, mola.Evidence())


def test_rules_that_need_data_say_so(trained):
    members, train, _ = trained
    with pytest.raises(mola.OptionError, match="needs validation data"):
        mola.fit(members, train).tune()


def test_unknown_score_is_refused():
    with pytest.raises(mola.OptionError, match=r"one of nll, brier, ece, crps; got"):
        mola.ValidationScore("auc")


def test_a_choice_is_told_in_words_and_not_in_pages_of_numbers():
    members, inputs, labels = trained_once()
    posterior = mola.fit(members, [(inputs[:200], labels[:200])], [(inputs[200:], labels[200:])], progress=False)
    told = str(posterior.tuning)
    first, *notes = told.splitlines()
    assert first == f"prior precision {posterior.prior_precision[0]:.3g}, by {posterior.tuning.rule}"
    assert notes == list(posterior.tuning.notes)
    assert "curve" not in repr(posterior.tuning)
    apart = posterior.tune(rule=mola.Evidence(shared=False)).tuning
    assert str(apart).count(",") == len(members), "one prior precision for each component"


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
def test_the_target_confidence_is_told_with_where_it_comes_from(trained):
    members, train, validation = trained
    inputs, labels = (torch.cat(parts) for parts in zip(*validation, strict=True))
    accuracy = sum(float((member(inputs).argmax(1) == labels).double().mean()) for member in members) / len(members)
    rule = mola.fit(members, train).tune(validation).tuning.rule
    assert (
        f"target confidence {100 * accuracy - 1:.4g} %, the single networks' mean accuracy {100 * accuracy:.4g} % less 1 point"
        in rule
    )
    given = mola.fit(members, train).tune(validation, mola.ConfidenceThreshold(0.7, brier=0.9)).tuning.rule
    assert given == "ConfidenceThreshold: target confidence 70 %, as given; Brier score at most 0.9"
    wider = mola.ConfidenceThreshold(margin=0.025).words(0.9)
    assert wider.endswith("target confidence 87.5 %, the single networks' mean accuracy 90 % less 2.5 points")


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
def test_few_validation_data_are_named_where_chance_is_larger_than_the_margin(trained):
    members, train, validation = trained
    inputs, labels = (torch.cat(parts) for parts in zip(*validation, strict=True))
    right = torch.stack([member(inputs).argmax(1) == labels for member in members]).double().mean(0)
    error = float(right.std(correction=0)) / math.sqrt(len(right))
    for margin, said in ((0.99 * error, True), (1.01 * error, False)):
        notes = mola.fit(members, train).tune(validation, mola.ConfidenceThreshold(margin=margin)).tuning.notes
        assert any(note.startswith("few validation data") for note in notes) == said
    few = inputs[:3], members[0](inputs[:3]).argmax(1)
    notes = mola.fit(members[0], train).tune([few]).tuning.notes
    assert any(note.startswith("few validation data: the mean accuracy 100 % is known to 20 points") for note in notes)
    given = mola.fit(members, train).tune(validation, mola.ConfidenceThreshold(0.7)).tuning.notes
    assert not any(note.startswith("few validation data") for note in given), "it was not read off the data"


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("threshold", mola.ConfidenceThreshold()),
        ("nll", mola.ValidationScore("nll")),
        ("brier", mola.ValidationScore("brier")),
        ("ece", mola.ValidationScore("ece")),
        ("evidence", mola.Evidence()),
    ],
)
def test_a_rule_may_be_named(trained, name, rule):
    members, train, validation = trained
    data = None if name == "evidence" else validation
    posterior = mola.fit(members, train)
    assert posterior.tune(data, rule=name).tuning == posterior.tune(data, rule=rule).tuning


def test_an_unknown_name_of_a_rule_is_refused_with_the_nearest(trained):
    members, train, validation = trained
    with pytest.raises(mola.OptionError, match=r"rule must be one of threshold, nll, .*'nil'.*mean 'nll'"):
        mola.fit(members, train).tune(validation, rule="nil")


def test_what_takes_long_is_said_after_the_first_candidate(monkeypatch):
    problem = make_problem()
    posterior = mola.fit(problem.network, problem.loader, link="mean-field")
    rule = mola.ValidationScore("nll", grid=(0.1, 1.0, 10.0))
    monkeypatch.setattr(
        "mola.tuning.rules.LARGEST", 1.0
    )  # no growth, and no other warning but that of an end that wins
    monkeypatch.setattr("mola.tuning.rules.SMALLEST", 1.0)
    for patience, said in ((1e9, False), (0.0, True)):
        monkeypatch.setattr("mola.tuning.candidates.PATIENCE", patience)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior.tune(problem.loader, rule, progress=False)
        told = [str(one.message) for one in caught if "will take about" in str(one.message)]
        assert len(told) == said, told
    assert "link 'mean-field'" in told[0]
    assert "each of 2 more prior precisions" in told[0]
