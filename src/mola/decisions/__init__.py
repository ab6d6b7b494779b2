"""Decisions with guarantees: alarms, abstention, prediction sets and prediction intervals."""

from mola.decisions.abstain import AnswerThreshold, abstain_threshold
from mola.decisions.alarm import alarm_threshold
from mola.decisions.calibration import Calibration
from mola.decisions.intervals import PredictionIntervals, prediction_intervals
from mola.decisions.sets import PredictionSets, prediction_sets

__all__ = [
    "AnswerThreshold",
    "Calibration",
    "PredictionIntervals",
    "PredictionSets",
    "abstain_threshold",
    "alarm_threshold",
    "prediction_intervals",
    "prediction_sets",
]
