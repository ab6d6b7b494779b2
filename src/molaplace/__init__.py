"""Mixtures of Laplace approximations: calibrated uncertainty for trained PyTorch networks."""

import importlib
from typing import TYPE_CHECKING

from molaplace.decisions import abstain_threshold, alarm_threshold, prediction_intervals, prediction_sets
from molaplace.fitting import ensemble, fit
from molaplace.loading import load
from molaplace.mixture import Mixture
from molaplace.posterior import MoLA
from molaplace.prediction import Prediction, RegressionPrediction

if TYPE_CHECKING:
    from molaplace import (
        calibration,
        distributed,
        errors,
        export,
        hub,
        images,
        likelihoods,
        links,
        rules,
        structures,
        whole,
    )
    from molaplace.evaluation import evaluate
    from molaplace.sklearn import MolaClassifier, MolaRegressor

__version__ = "0.1.0"

__all__ = [
    "Mixture",
    "MoLA",
    "MolaClassifier",
    "MolaRegressor",
    "Prediction",
    "RegressionPrediction",
    "abstain_threshold",
    "alarm_threshold",
    "calibration",
    "distributed",
    "ensemble",
    "errors",
    "evaluate",
    "export",
    "fit",
    "hub",
    "images",
    "likelihoods",
    "links",
    "load",
    "prediction_intervals",
    "prediction_sets",
    "rules",
    "structures",
    "whole",
]

_MODULES = (
    "calibration",
    "distributed",
    "errors",
    "export",
    "hub",
    "images",
    "likelihoods",
    "links",
    "rules",
    "structures",
    "whole",
)
_HOMES = ("errors", "rules", "structures", "links", "likelihoods", "calibration")
_LAZY = {
    "MolaClassifier": "molaplace.sklearn",
    "MolaRegressor": "molaplace.sklearn",
    "evaluate": "molaplace.evaluation",
}


def __getattr__(name: str) -> object:
    # Modules that the core does not need are imported on first use.
    if name in _MODULES:
        return importlib.import_module(f"molaplace.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    homes = (
        home
        for home in _HOMES
        if not name.startswith("_") and hasattr(importlib.import_module(f"molaplace.{home}"), name)
    )
    place = next((f"; it is mola.{home}.{name}" for home in homes), "")
    raise AttributeError(f"module 'molaplace' has no attribute {name!r}{place}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_LAZY})
