"""Mixtures of Laplace approximations: calibrated uncertainty for trained PyTorch networks."""

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from molaplace import (
        calibration,
        data,
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
    from molaplace.decisions import abstain_threshold, alarm_threshold, prediction_intervals, prediction_sets
    from molaplace.evaluation.baselines import baselines
    from molaplace.evaluation.evaluate import evaluate
    from molaplace.features import fit_features
    from molaplace.fitting import ensemble, fit
    from molaplace.loading import load, load_bundle
    from molaplace.mixture import Mixture
    from molaplace.monitoring.watching import Watch, watch
    from molaplace.network.views import adapters
    from molaplace.posterior import MoLA
    from molaplace.prediction import Prediction, RegressionPrediction
    from molaplace.sklearn import MolaClassifier, MolaRegressor

__version__ = "0.1.0"

__all__ = [
    "Mixture",
    "MoLA",
    "MolaClassifier",
    "MolaRegressor",
    "Prediction",
    "RegressionPrediction",
    "Watch",
    "abstain_threshold",
    "adapters",
    "alarm_threshold",
    "baselines",
    "calibration",
    "data",
    "distributed",
    "ensemble",
    "errors",
    "evaluate",
    "export",
    "fit",
    "fit_features",
    "hub",
    "images",
    "likelihoods",
    "links",
    "load",
    "load_bundle",
    "prediction_intervals",
    "prediction_sets",
    "rules",
    "structures",
    "watch",
    "whole",
]

_HOMES = ("errors", "rules", "structures", "links", "likelihoods", "calibration")
_NAMES = {
    "Mixture": "mixture",
    "MoLA": "posterior",
    "MolaClassifier": "sklearn",
    "MolaRegressor": "sklearn",
    "Prediction": "prediction",
    "RegressionPrediction": "prediction",
    "Watch": "monitoring.watching",
    "abstain_threshold": "decisions",
    "adapters": "network.views",
    "alarm_threshold": "decisions",
    "baselines": "evaluation",
    "ensemble": "fitting",
    "evaluate": "evaluation",
    "fit": "fitting",
    "fit_features": "features",
    "load": "loading",
    "load_bundle": "loading",
    "prediction_intervals": "decisions",
    "prediction_sets": "decisions",
    "watch": "monitoring.watching",
}


def __getattr__(name: str) -> object:
    # Everything is imported on first use, so that a command's help does not wait for torch.
    if name in _NAMES:
        return getattr(importlib.import_module(f"molaplace.{_NAMES[name]}"), name)
    if name.startswith("_"):
        raise AttributeError(f"module 'molaplace' has no attribute {name!r}")
    if importlib.util.find_spec(f"molaplace.{name}") is not None:
        return importlib.import_module(f"molaplace.{name}")
    homes = (home for home in _HOMES if hasattr(importlib.import_module(f"molaplace.{home}"), name))
    hint = next((f"; it is mola.{home}.{name}" for home in homes), "")
    raise AttributeError(f"module 'molaplace' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
