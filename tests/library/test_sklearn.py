"""The scikit-learn estimators: scikit-learn's own checks, and what they promise beyond them."""

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, make_blobs
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import molaplace as mola
from molaplace.errors import DataError, MolaWarning, OptionError
from molaplace.perceptrons import train_mlps
from molaplace.rules.objective import Objective
from molaplace.rules.rule import rule_of
from molaplace.sklearn import batch_size_for
from tests.forked_python import run_python

SMALL = {"hidden": (16,), "members": 1, "epochs": 15, "folds": 2}


@parametrize_with_checks([mola.MolaClassifier(**SMALL), mola.MolaRegressor(**SMALL)])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def quick(**settings):
    return mola.MolaClassifier(
        **{"hidden": (16,), "members": 2, "epochs": 20, "rule": "evidence", "random_state": 0, **settings}
    )


def blobs(count=120, seed=0):
    rows, labels = make_blobs(count, centers=3, n_features=4, cluster_std=3.0, random_state=seed)
    return rows, np.array(["ape", "bee", "cat"])[labels]


def test_it_is_the_posterior_of_its_networks_on_standardised_rows():
    """Everything again by hand, from the rows that were set aside to the probabilities."""
    rows, labels = blobs()
    model = quick().fit(rows, labels)
    assert model.classes_.tolist() == ["ape", "bee", "cat"]
    scaled = torch.tensor(StandardScaler().fit_transform(rows))
    targets = torch.tensor(np.searchsorted(model.classes_, labels))
    networks = [network[1:] for network in model.posterior_.networks]  # without the standardisation
    posterior = mola.fit(networks, [(scaled, targets)], progress=False).tune(rule=mola.rules.Evidence())
    torch.testing.assert_close(model.posterior_(torch.tensor(rows)), posterior(scaled), rtol=1e-10, atol=0)
    np.testing.assert_allclose(model.predict_proba(rows), posterior(scaled).detach().numpy(), rtol=1e-10)
    np.testing.assert_allclose(model.ood_score(rows), posterior.predict(scaled).ood_score.numpy(), rtol=1e-8)
    assert (model.predict(rows) == model.classes_[posterior(scaled).argmax(1).numpy()]).all()
    torch.testing.assert_close(model.prediction(rows).probs, posterior(scaled).detach(), rtol=1e-10, atol=0)


def test_each_row_is_held_out_once_and_classes_are_spread_over_the_folds():
    labels = np.repeat([0, 1, 2, 3], [1, 10, 30, 102])
    folds = quick(folds=4)._folds(labels, np.random.RandomState(0))
    assert folds[0] == -1, "the only row of its class"
    for label, count in ((1, 10), (2, 30), (3, 102)):
        counts = np.bincount(folds[labels == label], minlength=4)
        assert counts.sum() == count
        assert counts.max() - counts.min() <= 1
    assert np.bincount(folds[1:]).tolist() == [36, 36, 35, 35]


def test_the_last_batch_is_at_least_half_as_large_as_the_others():
    for rows in range(1, 20_000):
        size = batch_size_for(rows)
        assert rows - (math.ceil(rows / size) - 1) * size >= size / 2, rows


def by_hand(rows, labels, model, loss, likelihood):
    """The posteriors of all folds and their held-out rows, and the posterior of all rows."""
    random = np.random.RandomState(0)
    seed = random.randint(2**31 - 1)
    folds = torch.from_numpy(model._folds(labels, random))
    inputs = torch.tensor(StandardScaler().fit_transform(rows))
    targets = torch.tensor(labels)

    def fit(rows):
        networks = train_mlps(
            inputs[rows], targets[rows], 3, loss, hidden=(16,), members=2, seed=seed, epochs=20,
            batch_size=batch_size_for(len(targets[rows])), learning_rate=model.learning_rate, weight_decay=model.weight_decay,
        )  # fmt: skip
        return mola.fit(networks, [(inputs[rows], targets[rows])], likelihood=likelihood, progress=False)

    parts = [(fit(folds != fold), inputs[folds == fold], targets[folds == fold]) for fold in range(model.folds)]
    return parts, fit(slice(None)), inputs


def test_cross_fitted_settings_minimise_the_loss_of_networks_that_did_not_see_the_rows():
    """By hand: the log loss of all rows, each predicted without it, is smallest at the chosen prior precision and temperature."""
    rows, labels = blobs()
    model = quick(rule="nll", folds=3).fit(rows, labels)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    parts, final, inputs = by_hand(rows, np.searchsorted(model.classes_, labels), model, loss, "categorical")
    tuned = model.posterior_
    expected = final.with_prior_precision(tuned.prior_precision).with_temperature(tuned.temperature)
    np.testing.assert_allclose(model.predict_proba(rows), expected(inputs).detach().numpy(), rtol=1e-6)

    def held_out_loss(precision, temperature):
        losses = []
        for posterior, inputs, targets in parts:
            candidate = posterior.with_prior_precision(precision).with_temperature(temperature)
            losses.append(-candidate(inputs).detach()[range(len(targets)), targets].log())
        return float(torch.cat(losses).mean())

    precision = tuned.prior_precision[0]
    best = held_out_loss(precision, tuned.temperature)
    assert best == pytest.approx(min(model.tuning_.curve["nll"]), rel=1e-6)
    for factor in (0.1, 10.0):
        assert best <= held_out_loss(factor * precision, tuned.temperature) + 1e-9
    scores = []
    for posterior, inputs, targets in parts:
        data = posterior.read([(inputs, targets)], "held-out rows", labelled=True)
        scores.append(posterior.reference_on(data).score)
    reference = np.mean(scores, axis=0)
    np.testing.assert_allclose(tuned.reference.score, reference, rtol=1e-6)


def test_one_fold_of_cross_fitting_is_tuning():
    """The joined objective of one mixture chooses what `tune` chooses."""
    rows, labels = blobs()
    targets = np.searchsorted(np.unique(labels), labels)
    parts, _, _ = by_hand(rows, targets, quick(folds=2), torch.nn.CrossEntropyLoss(reduction="none"), "categorical")
    posterior, inputs, labels = parts[0]
    data = posterior.read([(inputs, labels)], "held-out rows", labelled=True)
    start = posterior.with_parts(reference=posterior.reference_on(data))
    for rule in (
        "calibrated",
        "threshold",
        mola.rules.Distance(price=0.05),
        mola.rules.Outliers([(5 * inputs, labels)]),
    ):
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", MolaWarning)
            tuned = posterior.tune(data, rule=rule, progress=False)
            joined = rule_of(rule)(Objective([(start, data)]))
        assert joined.settings == tuned.settings


@pytest.mark.parametrize("noise", [None, 1.5])
def test_the_joined_objective_has_the_scores_of_all_parts_and_the_sum_of_their_evidence(noise):
    rows, labels = blobs(90)
    targets = rows[:, :3] if noise else np.searchsorted(np.unique(labels), labels)
    loss = (
        (lambda outputs, values: (outputs - values).square().sum(1))
        if noise
        else torch.nn.CrossEntropyLoss(reduction="none")
    )
    parts, _, _ = by_hand(rows, targets, quick(folds=3), loss, "gaussian" if noise else "categorical")
    pairs = []
    for posterior, inputs, values in parts:
        data = posterior.read([(inputs, values)], "held-out rows", labelled=True)
        pairs.append((posterior.with_parts(reference=posterior.reference_on(data)), data))
    joined = Objective(pairs)
    objectives = [Objective([pair]) for pair in pairs]
    factors = (noise,) * joined.num_networks if noise else ()
    candidates = [joined.settings.at_precision(value, noise_factor=factors) for value in (0.5, 20.0)]
    scores = joined.scores(candidates)
    for name, values in scores.items():
        assert torch.equal(values, torch.cat([objective.scores(candidates)[name] for objective in objectives], 1))
    assert scores["nll"].shape == (2, 90)
    assert torch.equal(joined.data.labels, torch.cat([values for _, _, values in parts]))
    total = sum(objective.log_evidence(candidates[0]) for objective in objectives)
    torch.testing.assert_close(joined.log_evidence(candidates[0]), total, rtol=1e-12, atol=0)
    logs = torch.cat([objective.relative_log_distances() for objective in objectives])
    assert torch.equal(joined.relative_log_distances(), logs)
    loader = [(torch.tensor(rows[:7]), torch.tensor(targets[:7]))]
    far = joined.read(loader, "outlier loader")
    expected = [objective.scores(candidates, entropies, objective.read(loader, "")) for objective in objectives]
    assert torch.equal(
        joined.scores(candidates, entropies, far)["score"], torch.cat([part["score"] for part in expected], 1)
    )


def entropies(predictive, _):
    return {"score": predictive.outlier_score()}


def test_scaling_by_distance_is_taken_over():
    """Exponent and temperature as chosen; held-out rows are as many times as far as training rows, for whichever networks."""
    rows, labels = blobs()
    model = quick(rule=mola.rules.Distance(price=0.05)).fit(rows, labels)
    posterior = model.posterior_
    tuning = model.tuning_
    assert tuning.rule.startswith("Distance")
    assert posterior.settings == tuning.settings
    assert posterior.distance_exponent > 0
    near = model.prediction(rows)
    far = model.prediction(30 * rows)
    assert 0.5 < float(near.distance.median()) < 1.5
    assert float(far.distance.median()) > float(near.distance.median())
    without = posterior.with_distance_exponent(0.0)(torch.from_numpy(30 * rows))
    assert float(far.confidence.mean()) < float(without.detach().amax(1).mean()) - 0.1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden": (8, -1)}, "hidden must be"),
        ({"hidden": True}, "hidden must be"),
        ({"learning_rate": "adaptive"}, "learning_rate must be"),
        ({"weight_decay": -1}, "weight_decay must be"),
        ({"members": 0}, "members must be"),
        ({"folds": 1}, "folds must be at least 2.*evidence"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_fit(settings, words):
    with pytest.raises(OptionError, match=words):
        quick(**{"rule": "nll", **settings}).fit(*blobs(30))


def test_data_that_cannot_be_used_are_refused():
    with pytest.raises(DataError, match=r"at least 2 classes, got 1 class"):
        quick().fit(np.eye(3), ["a"] * 3)
    with pytest.raises(DataError, match=r"class with at least 2 rows.*evidence"):
        quick(rule="nll").fit(np.eye(3), ["a", "b", "c"])
    quick().fit(np.eye(3), ["a", "b", "c"])
    with pytest.raises(DataError, match=r"X must have columns whose variance.*column 1.*1e\+300.*impute"):
        quick().fit([[0, 0], [1, 1], [0, 1e300]], ["a", "b", "b"])
    with pytest.raises(DataError, match=r"y must vary in every column, but column 1 is constant"):
        quick_regressor().fit(np.eye(3), [[0, 1], [1, 1], [2, 1]])
    with pytest.raises(TypeError, match="sample_weight"):
        quick().fit(*blobs(30), sample_weight=np.ones(30))


def test_units_offsets_and_constant_features_have_no_effect():
    """Also an offset that float32 could not hold: the features are one part in 10^9 of it."""
    rows, labels = blobs()
    model = quick().fit(rows, labels)
    rescaled_model = quick().fit(rows * 1e-3 + 1e6, labels)
    np.testing.assert_allclose(
        rescaled_model.predict_proba(rows * 1e-3 + 1e6), model.predict_proba(rows), rtol=1e-3, atol=1e-5
    )
    constant = np.full((len(rows), 1), 0.1)
    with_constant = quick().fit(np.hstack([rows, constant]), labels)
    assert (
        with_constant.ood_score(np.hstack([rows, constant + 30])) > with_constant.ood_score(np.hstack([rows, constant]))
    ).all()


def test_units_of_targets_have_no_effect(diabetes):
    train, test, targets, _ = diabetes
    regressor = quick_regressor(epochs=10, folds=2)
    mean, std = regressor.fit(train[:100], targets[:100]).predict(test, return_std=True)
    for unit in (1e-20, 1e20):
        rescaled = regressor.fit(train[:100], unit * targets[:100]).predict(test, return_std=True)
        np.testing.assert_allclose(rescaled, [unit * mean, unit * std], rtol=1e-4)


def test_rows_in_the_extremes_of_float64_are_far_and_uncertain():
    """Rows that mark missing values by the largest number must neither be NaN nor stop the others of their batch."""
    rows, labels = blobs()
    model = quick(rule="calibrated").fit(rows, labels)
    extremes = np.vstack([rows[:1], np.full(4, 1e200), np.full(4, -np.finfo(float).max)])
    probs = model.predict_proba(extremes)
    np.testing.assert_allclose(probs[0], model.predict_proba(rows[:1])[0], rtol=1e-10)
    np.testing.assert_allclose(probs[1:], 1 / 3, atol=1e-3)
    assert (model.ood_score(extremes)[1:] > 10 + model.ood_score(rows).max()).all()


def test_the_posterior_takes_the_rows_of_the_table():
    """What a user does with `posterior_`: watch it and evaluate it beside estimators, on rows as they are, in any number type."""
    rows, labels = blobs()
    model = quick(rule="calibrated").fit(rows, labels)
    inputs = torch.tensor(rows, dtype=torch.float32)
    targets = torch.tensor(np.searchsorted(model.classes_, labels))
    torch.testing.assert_close(model.posterior_(inputs), torch.tensor(model.predict_proba(rows)), rtol=1e-4, atol=1e-5)
    results = mola.evaluate({"posterior": model.posterior_, "estimator": model.predict_proba}, [(inputs, targets)])
    assert results["posterior", "test"]["nll"].value == pytest.approx(
        results["estimator", "test"]["nll"].value, rel=1e-4
    )
    watch = mola.watch(model.posterior_, [(inputs, targets)])
    watch.update(model.prediction(1e3 * rows))
    assert watch.alarm


def test_searches_and_seeds():
    rows, labels = blobs(90)
    search = GridSearchCV(quick(), {"members": [1, 2]}, cv=2, scoring="neg_log_loss").fit(rows, labels)
    best = search.best_estimator_
    assert search.best_score_ > -np.log(3)
    np.testing.assert_array_equal(clone(best).fit(rows, labels).predict_proba(rows), best.predict_proba(rows))
    rows.flags.writeable = False
    reversed_rows = clone(best).fit(rows, labels).predict_proba(rows[::-1])
    np.testing.assert_allclose(reversed_rows[::-1], best.predict_proba(rows), rtol=1e-10)
    other = clone(best).set_params(random_state=1).fit(rows, labels)
    assert not np.array_equal(other.predict_proba(rows), best.predict_proba(rows))


def test_sensible_on_a_real_table_and_aware_of_what_is_none():
    """Breast cancer: far below the log-loss of guessing (0.66); rows shuffled within columns are told from real ones."""
    rows, labels = load_breast_cancer(return_X_y=True)
    train, test, known, unseen = train_test_split(rows, labels, test_size=0.3, stratify=labels, random_state=0)
    model = mola.MolaClassifier(folds=3, random_state=0).fit(train, known)
    assert log_loss(unseen, model.predict_proba(test)) < 0.13
    truth = np.repeat([0, 1], len(test))
    for strange in (np.random.default_rng(0).permuted(test, axis=0), 100 * test):
        assert roc_auc_score(truth, np.r_[model.ood_score(test), model.ood_score(strange)]) > 0.9


def test_multi_label_data():
    rows, _ = blobs()
    labels = (rows[:, :3] > 0).astype(int)
    model = quick(epochs=40).fit(rows, labels)
    assert model.predict_proba(rows).shape == labels.shape
    assert (model.predict(rows) == labels).mean() > 0.8
    assert quick(rule="nll").fit(rows, labels).posterior_.likelihood.name == "bernoulli"


def quick_regressor(**settings):
    return mola.MolaRegressor(
        **{"hidden": (16,), "members": 2, "epochs": 30, "folds": 3, "random_state": 0, **settings}
    )


@pytest.fixture(scope="module")
def diabetes():
    rows, targets = load_diabetes(return_X_y=True)
    return train_test_split(rows, targets, test_size=0.3, random_state=0)


@pytest.mark.parametrize("rule", ["nll", "distance", "evidence", None])
def test_intervals_have_their_coverage(diabetes, rule):
    train, test, targets, truth = diabetes
    regressor = quick_regressor(rule=rule).fit(train, targets)
    assert regressor.score(test, truth) > 0.3
    lower, upper = regressor.predict_interval(test, 0.8)
    assert 0.6 < np.mean((truth >= lower) & (truth <= upper)) < 0.95
    mean, std = regressor.predict(test, return_std=True)
    assert np.allclose(mean, regressor.predict(test))
    assert std.shape == mean.shape == truth.shape
    far = regressor.predict(100 * test, return_std=True)[1]
    assert (far > 3 * std).all()


def test_several_targets_keep_their_axis(diabetes):
    train, test, targets, _ = diabetes
    both = np.stack([targets, -3 * targets + 7], 1)
    regressor = quick_regressor().fit(train, both)
    mean, std = regressor.predict(test, return_std=True)
    assert mean.shape == std.shape == (len(test), 2)
    assert np.corrcoef(mean[:, 0], mean[:, 1])[0, 1] < -0.9


def test_fixed_noise_is_kept(diabetes):
    train, _, targets, _ = diabetes
    assert float(quick_regressor(noise=50.0).fit(train, targets).posterior_.noise[0]) == 50.0


def test_constant_targets():
    rows = np.random.default_rng(0).normal(size=(40, 3))
    mean, std = quick_regressor().fit(rows, np.full(40, 7.0)).predict(rows, return_std=True)
    assert np.allclose(mean, 7.0, atol=0.1)
    assert np.isfinite(std).all()


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ([0.0, 1.0], "cross-fitting with 1 row of 2: the noise cannot be estimated from a single training example"),
        ([0.0, 0.0, 1.0], r"cross-fitting with 2 rows of 3: the target is constant \(0\) in all 2"),
    ],
)
def test_too_few_rows_for_the_noise_are_counted(targets, words):
    with pytest.raises(DataError, match=words):
        quick_regressor().fit(np.arange(len(targets))[:, None], targets)


def test_without_scikit_learn_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import molaplace as mola\n"
        "assert 'MolaClassifier' in dir(mola)\n"
        "try:\n    mola.MolaClassifier\n"
        "except mola.errors.MissingExtraError as error:\n    print(error)"
    )
    printed = run_python("-c", code).stdout
    assert "pip install 'molaplace[sklearn]'" in printed
    with pytest.raises(AttributeError, match="no attribute 'MolaClasifier'"):
        _ = mola.MolaClasifier
