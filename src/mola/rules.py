"""Rules that tune a posterior on validation data."""

from mola.tuning.rules import Distance, Evidence, Outliers, Rule, Score, Threshold, Tuning

__all__ = ["Distance", "Evidence", "Outliers", "Rule", "Score", "Threshold", "Tuning"]
