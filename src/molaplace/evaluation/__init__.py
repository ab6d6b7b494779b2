"""Evaluation: columns for each datum, metrics with standard errors, and comparisons of predictors."""

from molaplace.evaluation.evaluate import Estimate, Evaluation, evaluate

__all__ = ["Estimate", "Evaluation", "evaluate"]
