"""Decisions with guarantees: when to raise an alarm, when to answer, which labels, which interval."""

from heart.decisions.abstain import AnswerThreshold, abstain_threshold
from heart.decisions.alarm import alarm_threshold
from heart.decisions.calibration import Calibration
from heart.decisions.intervals import PredictionIntervals, prediction_intervals
from heart.decisions.sets import PredictionSets, prediction_sets

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
