"""Choosing the prior precision: each rule against doing it by hand."""

import copy
import functools
import math

import pytest
import torch

import molaplace as mola
from molaplace import metrics
from molaplace.errors import DataError, MolaWarning, OptionError
from molaplace.likelihoods import as_likelihood
from molaplace.links import Probit
from molaplace.rules import RULES, Evidence, Outliers, Score, Threshold
from molaplace.rules.objective import Objective
from molaplace.rules.search import PrecisionSearch, grid_value
from molaplace.settings import Settings
from tests.closeness import assert_close
from tests.conftest import CLOSED_FORM_LINKS, make_problem
from tests.library.problems import data, loader, networks, train

GRID = tuple(10.0**power for power in torch.linspace(-4, 3, 9).tolist())
SCORES = {"nll": metrics.negative_log_likelihood, "brier": metrics.brier, "ece": metrics.expected_calibration_error}

quiet = pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")


@functools.cache
def trained_once():
    inputs, _ = data(count=300)
    labels = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
    members = networks(3)
    for member in members:
        train(member, inputs[:200], labels[:200], 400, 0.05)
    return members, inputs, labels


@pytest.fixture
def trained():
    """Three networks that fit their data: validation confidence means something."""
    members, inputs, labels = copy.deepcopy(trained_once())
    return members, loader(inputs[:200], labels[:200], 50), list(loader(inputs[200:], labels[200:], 40))


def joined(validation):
    return [torch.cat(parts) for parts in zip(*list.__iter__(validation), strict=True)]


def by_hand(posterior, validation, score):
    """Every candidate, the slow way: a new posterior and a prediction for each."""
    inputs, labels = joined(validation)
    return torch.tensor([score(posterior.with_prior_precision(value)(inputs), labels) for value in GRID])


def timid(members, by):
    """The same networks with logits divided by a number: as accurate, and less confident."""
    made = copy.deepcopy(members)
    with torch.no_grad():
        for network in made:
            for parameter in network[-1].parameters():
                parameter /= by
    return made


class TestByHand:
    @quiet
    @pytest.mark.parametrize("link", [*CLOSED_FORM_LINKS, "mc"])
    def test_threshold(self, trained, structure, link):
        members, batches, validation = trained
        posterior = mola.fit(members, batches, structure=structure, link=link)
        confidences = by_hand(posterior, validation, lambda probs, _: metrics.mean_confidence(probs))
        threshold = float(confidences.median()) - 1e-12
        tuned = posterior.tune(validation, rule=Threshold(threshold, grid=GRID))
        curve = tuned.tuning.curve
        assert curve["prior_precision"] == GRID
        assert torch.allclose(torch.tensor(curve["confidence"]), confidences, atol=1e-12)
        expected = min(value for value, actual in zip(GRID, confidences, strict=True) if actual >= threshold)
        assert tuned.prior_precision == (expected,) * 3

    @quiet
    @pytest.mark.parametrize("weights", ["uniform", "evidence"])
    @pytest.mark.parametrize("link", ["probit", "probit-centred", "mean-field", "mc"])
    def test_candidates_together_are_those_one_by_one(self, trained, structure, link, weights):
        """Prior precision, temperature, pooling and distance, each against a posterior of its own."""
        members, batches, validation = trained
        posterior = mola.fit(members, batches, structure=structure, link=link, weights=weights)
        data = posterior.read(validation, "validation loader", labelled=True)
        settings = {
            "prior_precision": [[0.1] * 3, [0.2, 1.0, 5.0], [30.0] * 3],
            "temperature": [1.0, 0.5, 2.0],
            "pooling": [1.0, 0.3, 0.0],
            "distance_exponent": [0.0, 1.0, 2.0],
            "onset": [1.0, 1.0, 1.5],
        }
        candidates = [Settings(tuple(row[0]), *row[1:]) for row in zip(*settings.values(), strict=True)]
        actual = Objective([(posterior, data)]).mean_scores(candidates)
        inputs, labels = joined(validation)
        for index in range(3):
            precision, temperature, pooling, exponent, onset = (values[index] for values in settings.values())
            candidate = posterior.with_prior_precision(precision).with_temperature(temperature).with_pooling(pooling)
            probs = candidate.with_distance_exponent(exponent, onset=onset)(inputs)
            for name, function in SCORES.items():
                assert float(actual[name][index]) == pytest.approx(function(probs, labels), abs=1e-10), name

    @quiet
    def test_brier_threshold_must_be_met_too(self, trained):
        members, batches, validation = trained
        posterior = mola.fit(members, batches)
        grid = [grid_value(index) for index in range(-60, 100, 2)]
        plain = posterior.tune(validation, rule=Threshold(0.5, grid=grid))
        curve = plain.tuning.curve
        limit = curve["brier"][40]
        both = posterior.tune(validation, rule=Threshold(0.5, brier=limit, grid=grid))
        rows = zip(curve["prior_precision"], curve["confidence"], curve["brier"], strict=True)
        expected = next(value for value, confidence, brier in rows if confidence >= 0.5 and brier <= limit)
        assert both.prior_precision[0] == expected > plain.prior_precision[0]

    @quiet
    def test_outliers(self, trained):
        members, batches, validation = trained
        posterior = mola.fit(members, batches)
        outliers = [30 * torch.randn(50, 3)]
        labelled = [(outliers[0], torch.full((50,), 99))]  # labels of another data set
        plain = posterior.tune(validation, rule=Score("nll"))
        exposed = posterior.tune(validation, rule=Outliers(labelled, weight=10.0))
        assert exposed.prior_precision[0] < plain.prior_precision[0]
        assert float(exposed(outliers[0]).max(1).values.mean()) < float(plain(outliers[0]).max(1).values.mean())
        inputs, labels = joined(validation)

        def objective(candidate):
            uniform = -candidate(outliers[0]).log().mean()
            return metrics.negative_log_likelihood(candidate(inputs), labels) + 10.0 * float(uniform)

        assert objective(exposed) == pytest.approx(min(exposed.tuning.curve["objective"]), rel=1e-9)
        assert objective(exposed) <= objective(plain)


class TestSearch:
    @quiet
    @pytest.mark.parametrize("rule", [Threshold(), Score("nll"), Score("brier")], ids=["threshold", "nll", "brier"])
    def test_the_search_finds_the_best_of_the_whole_grid(self, trained, structure, rule):
        members, batches, validation = trained
        posterior = mola.fit(members, batches, structure=structure)
        grid = [grid_value(index) for index in range(-100, 120)]
        fast = posterior.tune(validation, rule=rule)
        slow = posterior.tune(validation, rule=type(rule)(**(vars(rule) | {"grid": grid})))
        if isinstance(rule, Threshold):
            assert fast.prior_precision[0] == pytest.approx(slow.prior_precision[0], rel=1e-9)
        else:
            assert min(fast.tuning.curve[rule.score]) <= (1 + 1e-6) * min(slow.tuning.curve[rule.score])

    def test_the_default_grid_grows_past_an_end_that_wins(self, trained):
        members, batches, validation = trained
        posterior = mola.fit(members, batches)
        with pytest.warns(MolaWarning, match="outside the grid"):
            low = posterior.tune(validation, rule=Threshold(0.3))
        assert low.prior_precision[0] < 1e-4
        assert any("outside the grid" in note for note in low.tuning.notes)
        confidence = low.tuning.curve["confidence"]
        assert 0.3 <= min(value for value in confidence if value >= 0.3) < 0.31

    def test_the_grid_is_not_extended_over_a_plateau_to_rounding_errors(self):
        def evaluate(precisions):
            return {"nll": torch.tensor([1e-6 * math.log(value) - (value < 1e-20) for value in precisions])}

        assert PrecisionSearch(evaluate).minimise("nll")["prior_precision"] < 1e-20
        assert PrecisionSearch(evaluate).minimise("nll", absolute=1e-3)["prior_precision"] > 1e-8

    def test_a_threshold_that_nothing_meets_is_a_warning(self, trained):
        members, batches, validation = trained
        with pytest.warns(MolaWarning, match="no effect"):
            tuned = mola.fit(members, batches).tune(validation, rule=Threshold(0.99999))
        inputs, _ = joined(validation)
        assert torch.allclose(tuned(inputs), mola.ensemble(members)(inputs), atol=1e-4)


class TestThreshold:
    @quiet
    def test_the_target_is_never_below_chance(self, trained):
        members, batches, validation = trained
        posterior = mola.fit(members[0], batches)
        always_wrong = [(inputs, posterior(inputs).argmin(1)) for inputs, _ in validation]
        target, origin, _ = Threshold().target(posterior.read(always_wrong, "validation loader", labelled=True))
        assert target == 1 / 4
        assert "chance level" in origin

    @quiet
    def test_the_default_lies_below_the_networks_own_accuracy(self, trained):
        members, batches, validation = trained
        tuned = mola.fit(members, batches, validation, rule="threshold")
        inputs, labels = joined(validation)
        accuracy = sum(metrics.accuracy(member(inputs), labels) for member in members) / 3
        assert accuracy - 0.01 <= metrics.mean_confidence(tuned(inputs)) < accuracy + 0.02
        below = tuned.prior_precision[0] / (grid_value(1) / grid_value(0)) * 0.999
        assert metrics.mean_confidence(tuned.with_prior_precision(below)(inputs)) < accuracy - 0.01
        assert f"{accuracy:.2%}" in tuned.tuning.rule
        assert f"{accuracy - 0.01:.2%}" in tuned.tuning.rule

    @quiet
    def test_few_validation_data_are_named_where_chance_is_larger_than_the_margin(self, trained):
        members, batches, validation = trained
        for margin, is_named in ((1e-4, True), (0.3, False)):
            notes = mola.fit(members, batches).tune(validation, rule=Threshold(margin=margin)).tuning.notes
            assert any("validation set is small" in note for note in notes) == is_named


class TestTemperature:
    @quiet
    @pytest.mark.parametrize("score", ["nll", "brier"])
    @pytest.mark.parametrize("grid", [None, (0.5, 1.0, 2.0)])
    def test_underconfident_networks_are_sharpened_and_the_curve_is_at_the_temperature(self, trained, score, grid):
        members, batches, validation = trained
        posterior = mola.fit(timid(members, 8), batches)
        tuned = posterior.tune(validation, rule=Score(score, grid=grid))
        assert 0.1 <= tuned.temperature < 0.7
        assert any("underconfident" in note for note in tuned.tuning.notes)
        inputs, labels = joined(validation)
        curve = tuned.tuning.curve
        chosen = tuned.prior_precision[0]
        index = curve["prior_precision"].index(chosen)
        assert curve[score][index] == min(curve[score])
        assert SCORES[score](tuned(inputs), labels) == pytest.approx(curve[score][index], rel=1e-9)
        plain = tuned.with_temperature(1.0)
        assert SCORES[score](tuned(inputs), labels) < SCORES[score](plain(inputs), labels)

    @quiet
    @pytest.mark.parametrize("rule", ["nll", "brier", "ece"])
    def test_overconfident_networks_are_not_sharpened(self, trained, rule):
        members, batches, validation = trained
        assert mola.fit(timid(members, 0.25), batches).tune(validation, rule=rule).temperature == 1

    @quiet
    def test_a_link_of_ones_own_is_tuned_too(self, trained):
        class Halved(Probit):
            def __call__(self, mean, spread, inverse_link, seed=None):
                return inverse_link(mean / (2 * (1 + spread.variance())))

        members, batches, validation = trained
        tuned = mola.fit(members, batches, link=Halved()).tune(validation, rule=Score("nll", grid=GRID))
        assert tuned.temperature < 1
        inputs, labels = joined(validation)
        for index in (2, 6):
            probs = tuned.with_prior_precision(GRID[index])(inputs)
            expected = metrics.negative_log_likelihood(probs, labels)
            assert tuned.tuning.curve["nll"][index] == pytest.approx(expected, rel=1e-9)


class TestEvidence:
    def test_it_is_maximised_to_convergence(self, structure):
        problem = make_problem()
        posterior = mola.fit(problem.network, problem.loader, structure=structure)
        tuned = posterior.tune(rule=Evidence())
        best = float(tuned.log_evidence()[0])
        for factor in (1e-3, 0.99, 1.01, 1e3):
            neighbour = posterior.with_prior_precision(tuned.prior_precision[0] * factor)
            assert float(neighbour.log_evidence()[0]) < best
        at = torch.tensor(tuned.prior_precision[0], requires_grad=True)
        posterior.components[0].log_evidence(at).backward()
        assert abs(float(at.grad * at.detach())) < 1e-4

    def test_shared_and_apart(self, structure):
        inputs, labels = data()
        posterior = mola.fit(networks(3), loader(inputs, labels, 7), structure=structure)
        shared = posterior.tune(rule=Evidence())
        apart = posterior.tune(rule=Evidence(shared=False))
        assert len(set(shared.prior_precision)) == 1
        assert len(set(apart.prior_precision)) == 3
        for precision, member in zip(apart.prior_precision, posterior.networks, strict=True):
            alone = mola.fit(member, loader(inputs, labels, 7), structure=structure).tune(rule=Evidence())
            assert precision == pytest.approx(alone.prior_precision[0], rel=1e-9)
        assert float(apart.log_evidence().sum()) > float(shared.log_evidence().sum())
        for factor in (0.98, 1.02):
            neighbour = posterior.with_prior_precision(shared.prior_precision[0] * factor)
            assert float(neighbour.log_evidence().sum()) < float(shared.log_evidence().sum())


class TestValues:
    @quiet
    def test_a_rule_resets_what_another_chose(self, trained):
        members, batches, validation = trained
        posterior = mola.fit(members, batches).with_temperature(0.5).with_pooling(0.5).with_distance_exponent(1.0)
        tuned = posterior.tune(validation, rule="threshold")
        assert (tuned.temperature, tuned.pooling, tuned.distance_exponent) == (1, 1, 0)

    @quiet
    def test_a_rule_of_ones_own(self, trained):
        def fixed(objective):
            assert len(objective.data) == 100
            return mola.rules.Tuning("fixed", objective.settings.at_precision(2.0, pooling=0.5))

        members, batches, validation = trained
        tuned = mola.fit(members, batches).tune(validation, rule=fixed)
        assert tuned.prior_precision == (2.0,) * 3
        assert tuned.pooling == 0.5


class TestWrongUse:
    @pytest.mark.parametrize(
        ("make", "word"),
        [
            (lambda: Score("auc"), "score"),
            (lambda: Threshold(1.5), "confidence"),
            (lambda: Threshold(margin=95), "margin"),
            (lambda: Threshold(brier=-1), "brier"),
            (lambda: Outliers([], weight=-1), "weight"),
        ],
    )
    def test_options(self, make, word):
        with pytest.raises(OptionError, match=word):
            make()


@quiet
@pytest.mark.parametrize(
    "rule", [name for name, rule in RULES.items() if rule.applies_to(as_likelihood("categorical"))]
)
def test_every_rule_is_deterministic_and_saved(trained, rule, tmp_path):
    members, batches, validation = trained
    posterior = mola.fit(members, batches)
    data = validation if RULES[rule].needs_data else None
    tuned = posterior.tune(data, rule=rule)
    again = posterior.tune(data, rule=rule)
    inputs = joined(validation)[0]
    assert tuned.tuning == again.tuning
    assert tuned.tuning.summary
    assert torch.equal(tuned(inputs), again(inputs))
    loaded = mola.load(tuned.save(tmp_path), members)
    assert loaded.tuning == tuned.tuning
    assert_close(loaded(inputs), tuned(inputs))


@quiet
class TestDataReadBefore:
    """Validation data that were read once serve every posterior over the same networks, and no other."""

    def test_another_structure_and_an_ensemble(self, trained):
        members, batches, validation = trained
        read = mola.fit(members, batches).read(validation, "validation loader", labelled=True)
        diag = mola.fit(members, batches, structure="diag")
        assert diag.tune(read).settings == diag.tune(validation).settings
        assert torch.equal(
            mola.ensemble(members).reweight(read).weights, mola.ensemble(members).reweight(validation).weights
        )

    @pytest.mark.parametrize("change", ["tune", "reweight"])
    def test_other_networks_and_likelihoods_are_refused(self, trained, change):
        members, batches, validation = trained
        posterior = mola.fit(members, batches)
        several = [(inputs, torch.nn.functional.one_hot(labels, 4).double()) for inputs, labels in validation]
        binary = mola.fit(members, several, likelihood="bernoulli")
        others = {
            "with other networks": mola.fit(copy.deepcopy(members), batches),
            r"other networks.*networks\[1\]": mola.fit([members[0], members[2], members[1]], batches),
            "with 2 networks": mola.fit(members[:2], batches),
            "'bernoulli'": binary,
        }
        for reason, other in others.items():
            data = several if other is binary else validation
            read = other.read(data, "validation loader", labelled=True)
            with pytest.raises(DataError, match=reason):
                getattr(posterior, change)(read)


def test_rows_that_do_not_fit_into_memory_are_projected_once_in_each_call(trained, monkeypatch):
    members, batches, validation = trained
    posterior = mola.fit(members, batches)
    data = posterior.read(validation, "validation loader", labelled=True)
    candidates = [posterior.settings.at_precision(1.0)]
    kept = Objective([(posterior, data)])
    expected = kept.scores(candidates)["nll"]
    monkeypatch.setattr("molaplace.rules.objective.MOST_PROJECTED", 1)
    objective = Objective([(posterior, data)])
    for _ in range(2):
        assert torch.equal(objective.scores(candidates)["nll"], expected)
