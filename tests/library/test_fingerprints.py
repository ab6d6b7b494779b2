"""A fingerprint tells predictors and their settings apart. Predictions carry it, whatever is done with them."""

import copy
import pickle

import pytest
import torch

import molaplace as mola
from molaplace.errors import OptionError
from tests.library.problems import blob_loader, networks

LOADER = blob_loader()
OTHERS = blob_loader(1)
TARGETS = [(inputs, inputs @ inputs.new_ones(3, 4)) for inputs, _ in LOADER]
NETWORKS = networks(2)


def fit(models=NETWORKS, **options):
    return mola.fit(models, LOADER, progress=False, **options)


def test_whatever_changes_predictions_changes_the_fingerprint():
    posterior = fit()
    ensemble = mola.ensemble(NETWORKS)
    predictors = [
        posterior,
        posterior.tune(OTHERS, progress=False),
        posterior.with_prior_precision(2.0),
        posterior.with_temperature(0.5),
        posterior.with_pooling(0.5),
        posterior.with_distance_exponent(1.0),
        posterior.with_weights([0.25, 0.75]),
        posterior.with_weights("evidence"),
        posterior.with_link("mc"),
        posterior.add(OTHERS, progress=False),
        posterior.alone(0),
        posterior.alone(1),
        fit(structure="kron-exact"),
        fit(NETWORKS[::-1]),
        ensemble,
        ensemble.with_temperature(0.5),
        mola.ensemble(NETWORKS[::-1]),
        mola.Mixture([posterior, ensemble]),
        mola.Mixture([posterior, ensemble], [0.25, 0.75]),
    ]
    assert len({predictor.fingerprint for predictor in predictors}) == len(predictors)
    assert fit().fingerprint == posterior.fingerprint
    other = copy.deepcopy(NETWORKS)
    with torch.no_grad():
        for parameter in other[1].parameters():
            parameter.flatten()[1:] += 0.1
    assert mola.ensemble(other).fingerprint != ensemble.fingerprint


@pytest.mark.parametrize(
    "predictor",
    [
        fit(),
        mola.ensemble(NETWORKS),
        mola.Mixture([fit(), mola.ensemble(NETWORKS)]),
        mola.Mixture([mola.ensemble(NETWORKS, likelihood=mola.likelihoods.Gaussian(noise=0.5))]),
        mola.fit(NETWORKS, TARGETS, likelihood="gaussian", progress=False),
        mola.whole.fit(NETWORKS[0], LOADER, structure="diag", progress=False),
    ],
    ids=["posterior", "ensemble", "mixture", "regression mixture", "regression", "whole"],
)
def test_predictions_carry_it(predictor):
    assert predictor.fingerprint is not None
    prediction = predictor.predict(LOADER)
    versions = [prediction, prediction[3], prediction[:5], prediction.cpu(), pickle.loads(pickle.dumps(prediction))]
    assert {version.fingerprint for version in versions} == {predictor.fingerprint}
    assert mola.Mixture([lambda inputs: 0, predictor], likelihood=predictor.likelihood).fingerprint is None


REGRESSION = mola.fit(NETWORKS, TARGETS, likelihood="gaussian", progress=False)
LABELS = torch.cat([labels for _, labels in LOADER])


@pytest.mark.parametrize(
    ("predictor", "decide"),
    [
        (fit(), lambda prediction: mola.alarm_threshold(prediction, 0.1)),
        (fit(), lambda prediction: mola.abstain_threshold(prediction, prediction.label, 0.1)),
        (fit(), lambda prediction: mola.prediction_sets(prediction, LABELS)),
        (REGRESSION, lambda prediction: mola.alarm_threshold(prediction, 0.1)),
        (REGRESSION, lambda prediction: mola.prediction_intervals(prediction, torch.cat([t for _, t in TARGETS]))),
    ],
    ids=["alarm", "abstain", "sets", "alarm for regression", "intervals"],
)
def test_decisions_refuse_predictions_of_another_predictor(tmp_path, predictor, decide):
    decision = pickle.loads(pickle.dumps(decide(predictor.predict(LOADER))))
    for same in (predictor, mola.load(predictor.save(tmp_path), NETWORKS)):
        decision(same.predict(OTHERS))
    with pytest.raises(OptionError, match="another predictor"):
        decision(predictor.with_temperature(2.0).predict(OTHERS))
    if isinstance(decision, float):  # comparing numbers remains possible, and unknown predictors are not refused
        scores = predictor.predict(OTHERS).ood_score
        assert (scores > decision).shape == scores.shape
