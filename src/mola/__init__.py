"""Mixtures of Laplace approximations: honest confidence for trained PyTorch classifiers, after the fact."""

import importlib
from typing import TYPE_CHECKING

from mola.baselines.dropout import McDropout as McDropout
from mola.baselines.mimo import Mimo as Mimo
from mola.baselines.mimo import mimo_mola as mimo_mola
from mola.baselines.noise import scale_noise as scale_noise
from mola.baselines.swag import MultiSwag as MultiSwag
from mola.baselines.swag import Swag as Swag
from mola.baselines.swag import multi_swag as multi_swag
from mola.baselines.temperature import TemperatureScaled as TemperatureScaled
from mola.baselines.temperature import fit_member_temperatures as fit_member_temperatures
from mola.baselines.temperature import fit_pooled_temperature as fit_pooled_temperature
from mola.baselines.temperature import fit_temperature as fit_temperature
from mola.baselines.temperature import temperature_scaled as temperature_scaled
from mola.component import WeightSamples as WeightSamples
from mola.decisions import AnswerThreshold as AnswerThreshold
from mola.decisions import PredictionIntervals as PredictionIntervals
from mola.decisions import PredictionSets as PredictionSets
from mola.decisions import abstain_threshold as abstain_threshold
from mola.decisions import alarm_threshold as alarm_threshold
from mola.decisions import prediction_intervals as prediction_intervals
from mola.decisions import prediction_sets as prediction_sets
from mola.distributed import Team as Team
from mola.distributed import join as join
from mola.distributed import shard as shard
from mola.errors import BoundError as BoundError
from mola.errors import DataError as DataError
from mola.errors import DistributedError as DistributedError
from mola.errors import ExportError as ExportError
from mola.errors import HeadError as HeadError
from mola.errors import MissingExtraError as MissingExtraError
from mola.errors import MolaError as MolaError
from mola.errors import MolaWarning as MolaWarning
from mola.errors import OptionError as OptionError
from mola.errors import StorageError as StorageError
from mola.errors import StructureTooLargeError as StructureTooLargeError
from mola.export import export_onnx as export_onnx
from mola.export import export_torch as export_torch
from mola.export import load_exported as load_exported
from mola.fitting import ensemble as ensemble
from mola.fitting import fit as fit
from mola.fitting import load as load
from mola.laplace import Diag as Diag
from mola.laplace import Full as Full
from mola.laplace import Kron as Kron
from mola.laplace import KronDiag as KronDiag
from mola.laplace import KronExact as KronExact
from mola.laplace import Structure as Structure
from mola.likelihood import Bernoulli as Bernoulli
from mola.likelihood import Categorical as Categorical
from mola.likelihood import Gaussian as Gaussian
from mola.likelihood import Likelihood as Likelihood
from mola.links import Bridge as Bridge
from mola.links import CentredProbit as CentredProbit
from mola.links import Link as Link
from mola.links import MeanField as MeanField
from mola.links import MonteCarlo as MonteCarlo
from mola.links import Probit as Probit
from mola.mixture import Mixture as Mixture
from mola.mixture import Predictor as Predictor
from mola.network.resized import Resized as Resized
from mola.posterior import MoLA as MoLA
from mola.prediction import Prediction as Prediction
from mola.regression import RegressionMoLA as RegressionMoLA
from mola.regression_prediction import RegressionPrediction as RegressionPrediction
from mola.tuning.candidates import Tuning as Tuning
from mola.tuning.distance import Distance as Distance
from mola.tuning.rules import ConfidenceThreshold as ConfidenceThreshold
from mola.tuning.rules import Evidence as Evidence
from mola.tuning.rules import OutlierExposure as OutlierExposure
from mola.tuning.rules import Rule as Rule
from mola.tuning.rules import ValidationScore as ValidationScore
from mola.whole.component import WeightDraws as WeightDraws
from mola.whole.fitting import fit_whole as fit_whole
from mola.whole.posterior import WholeMoLA as WholeMoLA

if TYPE_CHECKING:
    from mola.app.jobs.batches import BatchPredictor as BatchPredictor
    from mola.hub import load_from_hub_folder as load_from_hub_folder
    from mola.hub import save_to_hub_folder as save_to_hub_folder
    from mola.sklearn import MolaClassifier as MolaClassifier
    from mola.sklearn import MolaRegressor as MolaRegressor

__version__ = "0.1.0"

_ON_FIRST_USE = {
    "BatchPredictor": "mola.app.jobs.batches",
    "MolaClassifier": "mola.sklearn",
    "MolaRegressor": "mola.sklearn",
    "load_from_hub_folder": "mola.hub",
    "save_to_hub_folder": "mola.hub",
}
"""Names that need more than the core, and where they are."""


def __getattr__(name: str) -> object:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'mola' has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_FIRST_USE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
