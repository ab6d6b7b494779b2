"""Mixtures of Laplace approximations: honest confidence for trained PyTorch classifiers, after the fact."""

from mola.baselines.dropout import McDropout as McDropout
from mola.baselines.mimo import Mimo as Mimo
from mola.baselines.mimo_mola import mimo_mola as mimo_mola
from mola.baselines.multi_swag import multi_swag as multi_swag
from mola.baselines.scaled import TemperatureScaled as TemperatureScaled
from mola.baselines.scaled import temperature_scaled as temperature_scaled
from mola.baselines.swag import Swag as Swag
from mola.baselines.temperature import fit_member_temperatures as fit_member_temperatures
from mola.baselines.temperature import fit_pooled_temperature as fit_pooled_temperature
from mola.baselines.temperature import fit_temperature as fit_temperature
from mola.errors import BoundError as BoundError
from mola.errors import DataError as DataError
from mola.errors import HeadError as HeadError
from mola.errors import MissingExtraError as MissingExtraError
from mola.errors import MolaError as MolaError
from mola.errors import MolaWarning as MolaWarning
from mola.errors import OptionError as OptionError
from mola.errors import StorageError as StorageError
from mola.errors import StructureTooLargeError as StructureTooLargeError
from mola.fitting import ensemble as ensemble
from mola.fitting import fit as fit
from mola.fitting import load as load
from mola.laplace import Diag as Diag
from mola.laplace import Full as Full
from mola.laplace import Kron as Kron
from mola.laplace import KronExact as KronExact
from mola.laplace import Structure as Structure
from mola.links import Bridge as Bridge
from mola.links import CentredProbit as CentredProbit
from mola.links import Link as Link
from mola.links import MeanField as MeanField
from mola.links import MonteCarlo as MonteCarlo
from mola.links import Probit as Probit
from mola.mixture import Mixture as Mixture
from mola.mixture import Predictor as Predictor
from mola.posterior import MoLA as MoLA
from mola.prediction import Prediction as Prediction
from mola.prior import ConfidenceThreshold as ConfidenceThreshold
from mola.prior import Evidence as Evidence
from mola.prior import OutlierExposure as OutlierExposure
from mola.prior import Rule as Rule
from mola.prior import ValidationScore as ValidationScore
from mola.sampling import WeightSamples as WeightSamples
from mola.tuning import Tuning as Tuning

__version__ = "0.1.0"
