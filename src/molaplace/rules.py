"""Rules for tuning a posterior, mostly on validation data."""

from molaplace.tuning import Calibrated, Distance, Evidence, Outliers, Rule, Score, Threshold, Tuning

__all__ = ["Calibrated", "Distance", "Evidence", "Outliers", "Rule", "Score", "Threshold", "Tuning"]
