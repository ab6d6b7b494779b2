"""Rules for tuning a posterior, mostly on validation data."""

from mola.tuning import Calibrated, Distance, Evidence, Outliers, Rule, Score, Threshold, Tuning

__all__ = ["Calibrated", "Distance", "Evidence", "Outliers", "Rule", "Score", "Threshold", "Tuning"]
