"""Decisions with guarantees: alarms, abstention, prediction sets and prediction intervals."""

from molaplace.decisions.abstain import AnswerThreshold, abstain_threshold
from molaplace.decisions.alarm import AlarmThreshold, alarm_threshold
from molaplace.decisions.calibration import Calibration
from molaplace.decisions.intervals import PredictionIntervals, prediction_intervals
from molaplace.decisions.sets import PredictionSets, prediction_sets

__all__ = [
    "AlarmThreshold",
    "AnswerThreshold",
    "Calibration",
    "PredictionIntervals",
    "PredictionSets",
    "abstain_threshold",
    "alarm_threshold",
    "prediction_intervals",
    "prediction_sets",
]
