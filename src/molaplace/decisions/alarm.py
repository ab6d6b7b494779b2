"""Alarms for outliers: a threshold on OOD scores that bounds the rate of false alarms.

The threshold is the split-conformal quantile (`mola.decisions.ranks`) of the OOD scores of validation data. Neither labels nor
outliers are needed. The rate of false alarms says nothing about the share of outliers detected, which depends on how much their
scores differ from those of the validation data (Bates et al., 2023).
"""

from __future__ import annotations

from typing import Any

from molaplace.decisions.ranks import as_numbers, conformal_quantiles, data_needed
from molaplace.errors import DataError
from molaplace.options import check_share, counted
from molaplace.prediction import Prediction, RegressionPrediction


def alarm_threshold(scores: Any, false_alarm_rate: float) -> float:
    """Find the OOD score above which to raise an alarm, so that the rate of false alarms is at most the given rate.

    The guarantee holds on average over draws of the validation data, for any number n and any distribution of the scores.
    The rate of false alarms varies between validation sets, with a standard deviation of about sqrt(alpha (1 - alpha) / n), where
    alpha is `false_alarm_rate`. The plain quantile of the scores gives no such guarantee: for example, the largest of n = 19 scores is
    exceeded by one in 20 new scores on average.

    The validation data must not have been used for training or early stopping. Tuning a `mola.MoLA` on the same data has a negligible
    effect on `Prediction.ood_score`. The score does not depend on the prior precision and uses only the means and standard deviations
    of three scores on the validation data.

    Args:
        scores: OOD scores (n,) of validation data, higher for outliers, as a tensor, array or list; or a `Prediction` with an
            `ood_score`.
        false_alarm_rate: largest acceptable rate alpha of false alarms, such as 0.05 for one alarm per twenty in-distribution inputs.

    Returns:
        The threshold. Raise an alarm for scores *above* it.
    """
    if isinstance(scores, (Prediction, RegressionPrediction)):
        scores = scores.ood_score
    values = as_numbers(scores, "scores")
    if values.ndim != 1 or bool(values.isnan().any()):
        raise DataError(
            f"must be one number for each validation data point, none of them NaN; got shape {tuple(values.shape)} with "
            f"{int(values.isnan().sum())} NaN.",
            argument="scores",
        )
    count = len(values)
    rate = check_share(false_alarm_rate, "false_alarm_rate", "5 % is 0.05.")
    if count < data_needed(rate):
        raise DataError(
            f"{counted(count, 'validation score')} {'is' if count == 1 else 'are'} too few for a false-alarm rate of {rate:g}: on "
            f"average, one in {count + 1} new scores exceeds the largest of them. Pass at least {data_needed(rate)} scores, or allow "
            f"a rate of at least 1/{count + 1}."
        )
    return float(conformal_quantiles(values, rate))
