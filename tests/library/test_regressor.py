"""The scikit-learn regressor: scikit-learn's own checks, and what it promises beyond them."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.utils.estimator_checks import parametrize_with_checks

import mola
from mola.errors import OptionError


@parametrize_with_checks([mola.MolaRegressor(hidden=(16,), members=2, epochs=25)])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def quick(**settings):
    return mola.MolaRegressor(**{"hidden": (16,), "members": 2, "epochs": 30, "random_state": 0, **settings})


@pytest.fixture(scope="module")
def diabetes():
    rows, targets = load_diabetes(return_X_y=True)
    return train_test_split(rows, targets, test_size=0.3, random_state=0)


@pytest.mark.parametrize("rule", ["nll", "distance", "evidence", None])
def test_intervals_have_their_coverage(diabetes, rule):
    train, test, targets, truth = diabetes
    regressor = quick(rule=rule).fit(train, targets)
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
    regressor = quick().fit(train, both)
    mean, std = regressor.predict(test, return_std=True)
    assert mean.shape == std.shape == (len(test), 2)
    assert np.corrcoef(mean[:, 0], mean[:, 1])[0, 1] < -0.9


def test_the_same_seed_gives_the_same_bits_and_settings_are_kept(diabetes):
    train, test, targets, _ = diabetes
    one, other = quick().fit(train, targets), clone(quick()).fit(train, targets)
    assert np.array_equal(one.predict(test), other.predict(test))
    assert one.ood_score(test).shape == (len(test),)
    assert cross_val_score(quick(rule="evidence"), train, targets, cv=3).mean() > 0.2
    assert float(quick(noise=50.0).fit(train, targets).posterior_.noise[0]) == 50.0
    with pytest.raises(OptionError, match="validation_fraction"):
        quick(validation_fraction=1.5).fit(train, targets)


def test_constant_targets():
    rows = np.random.default_rng(0).normal(size=(40, 3))
    mean, std = quick().fit(rows, np.full(40, 7.0)).predict(rows, return_std=True)
    assert np.allclose(mean, 7.0, atol=0.1)
    assert np.isfinite(std).all()
