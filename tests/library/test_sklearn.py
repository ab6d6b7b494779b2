"""The scikit-learn classifier: scikit-learn's own checks, and what it promises beyond them."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibrationDisplay
from sklearn.datasets import load_breast_cancer, make_blobs
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import mola
from mola.errors import DataError, OptionError
from mola.training import Recipe, train_ensemble, train_mlps
from mola.training.labelled import Labelled
from mola.training.mlps import mlp
from tests.closeness import assert_close
from tests.forked_python import run_python


# More of these does not change what is checked.
@parametrize_with_checks([mola.MolaClassifier(hidden=(16,), members=2, epochs=25)])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def quick(**settings):
    return mola.MolaClassifier(**{"hidden": (16,), "members": 2, "epochs": 20, "random_state": 0, **settings})


def blobs(count=120, seed=0):
    rows, labels = make_blobs(count, centers=3, n_features=4, cluster_std=3.0, random_state=seed)
    return rows, np.array(["ape", "bee", "cat"])[labels]


def test_networks_trained_side_by_side_are_those_trained_one_by_one():
    data = Labelled(torch.randn(70, 5), torch.randint(3, (70,)))
    recipe = Recipe(6, 32, 1e-2)
    before = torch.get_rng_state()
    together = train_mlps(5, (8, 6), 3, data, recipe, members=3, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    alone = train_ensemble(lambda: mlp(5, (8, 6), 3), data, recipe, members=3, seed=4)
    for one, other in zip(together, alone, strict=True):
        assert not one.training
        for name, value in one.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-10, atol=1e-12)
    with pytest.raises(DataError, match="no training data"):
        train_mlps(5, (8,), 3, Labelled(data.inputs[:0], data.labels[:0]), recipe, members=1, seed=0)
    with pytest.raises(DataError, match=r"loss is .* lower the learning rate"):
        train_mlps(5, (8,), 3, Labelled(data.inputs * float("inf"), data.labels), recipe, members=1, seed=0)


def test_it_is_the_posterior_of_its_networks_on_standardised_rows():
    """Everything again by hand, from the rows that were set aside to the probabilities."""
    rows, labels = blobs()
    model = quick().fit(rows, labels)
    assert model.classes_.tolist() == ["ape", "bee", "cat"]
    scaled = torch.tensor(StandardScaler().fit_transform(rows))
    targets = torch.tensor(np.searchsorted(model.classes_, labels))
    posterior = mola.fit(model.posterior_.networks, [(scaled, targets)]).tune(rule=mola.Evidence())
    np.testing.assert_allclose(model.predict_proba(rows), posterior(scaled).numpy(), rtol=1e-10)
    np.testing.assert_allclose(model.ood_score(rows), posterior.predict(scaled).ood_score.numpy(), rtol=1e-8)
    assert (model.predict(rows) == model.classes_[posterior(scaled).argmax(1).numpy()]).all()
    torch.testing.assert_close(model.prediction(rows).probs, posterior(scaled), rtol=1e-10, atol=0)


def test_the_same_share_of_every_class_is_set_aside_and_never_all_of_it():
    labels = np.repeat([0, 1, 2, 3], [100, 10, 2, 1])
    aside = quick(validation_fraction=0.3)._set_aside(labels, np.random.RandomState(0))
    assert [int(aside[labels == label].sum()) for label in range(4)] == [30, 3, 1, 0]
    rows = np.random.RandomState(0).randn(len(labels), 3) + labels[:, None]
    model = quick(rule="nll", validation_fraction=0.3).fit(rows, labels)
    assert model.posterior_.components[0].curvature.factors.count == 113


def test_the_prior_precision_is_chosen_by_networks_that_did_not_see_the_data_set_aside():
    """By hand: networks on the rest, tuned on what they did not see; its choice on networks that saw everything."""
    rows, labels = blobs()
    model = quick(rule="brier").fit(rows, labels)
    random = np.random.RandomState(0)
    seed = random.randint(2**31 - 1)
    targets = np.searchsorted(model.classes_, labels)
    aside = torch.from_numpy(quick()._set_aside(targets, random))
    data = Labelled(torch.tensor(StandardScaler().fit_transform(rows)), torch.tensor(targets))
    recipe = Recipe(20, 32)
    rest = Labelled(data.inputs[~aside], data.labels[~aside])
    networks = train_ensemble(lambda: mlp(4, (16,), 3), rest, recipe, members=2, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mola.MolaWarning)
        tuned = mola.fit(networks, [(rest.inputs, rest.labels)]).tune(
            [(data.inputs[aside], data.labels[aside])], rule=mola.ValidationScore("brier")
        )
    assert_close(model.posterior_.prior_precision, tuned.prior_precision)
    assert model.tuning_.rule == tuned.tuning.rule
    final = train_ensemble(lambda: mlp(4, (16,), 3), data, recipe, members=2, seed=seed)
    expected = mola.fit(final, [(data.inputs, data.labels)]).with_prior_precision(tuned.prior_precision)
    expected = expected.with_temperature(tuned.temperature)
    assert_close(model.predict_proba(rows), expected(data.inputs))


@pytest.mark.parametrize("rule", ["nll", "brier", "ece", "threshold", mola.ConfidenceThreshold(0.8)])
def test_rules_are_those_of_tune(rule):
    rows, labels = blobs()
    model = quick(rule=rule).fit(rows, labels)
    assert model.tuning_.rule.startswith("ConfidenceThreshold" if "hres" in str(rule) else "ValidationScore")
    assert quick(rule=None, prior_precision=0.5).fit(rows, labels).posterior_.prior_precision == (0.5, 0.5)


@pytest.mark.parametrize("rule", ["distance", mola.Distance(price=0.05)])
def test_caution_by_distance_is_taken_over(rule):
    """Exponent and temperature as chosen; held-out rows are as many times as far as training rows, for whichever networks."""
    rows, labels = blobs()
    model = quick(rule=rule).fit(rows, labels)
    posterior, tuning = model.posterior_, model.tuning_
    assert tuning.rule.startswith("Distance")
    assert (posterior.temperature, posterior.distance_exponent) == (tuning.temperature, tuning.distance_exponent)
    assert posterior.distance_exponent > 0
    near, far = model.prediction(rows), model.prediction(30 * rows)
    assert 0.5 < float(near.distance.median()) < 1.5
    assert float(far.distance.median()) > float(near.distance.median())
    without = posterior.with_distance_exponent(0.0)(torch.from_numpy((30 * rows - model.mean_) / model.scale_))
    assert float(far.confidence.mean()) < float(without.amax(1).mean()) - 0.1
    again = pickle.loads(pickle.dumps(model))
    assert_close(again.predict_proba(rows), model.predict_proba(rows))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden": ()}, "hidden must be one or more widths"),
        ({"hidden": (8, -1)}, "hidden must be one or more widths"),
        ({"members": 0}, "members must be"),
        ({"epochs": 0}, "epochs, batch_size"),
        ({"rule": "nil"}, "rule must be one of .*'nll'"),
        ({"structure": "cron"}, "structure must be one of"),
        ({"validation_fraction": 0.0}, 'between 0 and 1.*rule="evidence"'),
        ({"validation_fraction": 1.0}, "between 0 and 1"),
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
    with pytest.raises(TypeError, match="sample_weight"):
        quick().fit(*blobs(30), sample_weight=np.ones(30))


def test_units_and_offsets_of_features_do_not_matter():
    """Also those that float32 could not hold: one part in 10^9 of a large offset."""
    rows, labels = blobs()
    model, moved = quick().fit(rows, labels), quick().fit(rows * 1e-3 + 1e6, labels)
    np.testing.assert_allclose(moved.predict_proba(rows * 1e-3 + 1e6), model.predict_proba(rows), rtol=1e-3, atol=1e-5)


def test_a_constant_feature_changes_nothing():
    rows, labels = blobs()
    constant = np.hstack([rows, np.full((len(rows), 1), 0.1)])
    model = quick().fit(constant, labels)
    assert model.scale_[-1] == 1.0
    assert np.isfinite(model.predict_proba(constant)).all()


def test_pipelines_searches_copies_and_displays(tmp_path):
    rows, labels = blobs(90)
    scores = cross_val_score(make_pipeline(StandardScaler(), quick()), rows, labels, cv=3, scoring="neg_log_loss")
    assert scores.min() > -np.log(3)
    search = GridSearchCV(quick(), {"hidden": [(4,), (16,)], "members": [1, 2]}, cv=2, scoring="neg_log_loss")
    search.fit(rows, labels)
    best = search.best_estimator_
    again = pickle.loads(pickle.dumps(best))
    assert_close(again.predict_proba(rows), best.predict_proba(rows))
    twin = clone(best).fit(rows, labels)
    assert_close(twin.predict_proba(rows), best.predict_proba(rows))
    assert not np.array_equal(
        clone(best).set_params(random_state=1).fit(rows, labels).predict_proba(rows), best.predict_proba(rows)
    )
    import matplotlib

    matplotlib.use("Agg")
    display = CalibrationDisplay.from_estimator(quick().fit(rows, labels == "ape"), rows, labels == "ape", n_bins=4)
    assert len(display.prob_true) >= 2
    matplotlib.pyplot.close("all")


def test_sensible_on_a_real_table_and_aware_of_what_is_none():
    """Breast cancer: far below the log-loss of guessing (0.66); rows shuffled within columns are told from real ones."""
    rows, labels = load_breast_cancer(return_X_y=True)
    train, test, known, asked = train_test_split(rows, labels, test_size=0.3, stratify=labels, random_state=0)
    model = mola.MolaClassifier(random_state=0).fit(train, known)
    assert log_loss(asked, model.predict_proba(test)) < 0.2
    shuffled = np.random.default_rng(0).permuted(test, axis=0)
    truth = np.repeat([0, 1], len(test))
    assert roc_auc_score(truth, np.r_[model.ood_score(test), model.ood_score(shuffled)]) > 0.9


def test_without_scikit_learn_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import mola\n"
        "assert 'MolaClassifier' in dir(mola)\n"
        "try:\n    mola.MolaClassifier\n"
        "except mola.MissingExtraError as error:\n    print(error)"
    )
    said = run_python("-c", code).stdout
    assert "pip install 'mola-torch[sklearn]'" in said
    with pytest.raises(AttributeError, match="no attribute 'MolaClasifier'"):
        _ = mola.MolaClasifier
