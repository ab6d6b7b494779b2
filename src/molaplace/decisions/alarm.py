"""Alarms for outliers: a threshold on OOD scores that bounds the rate of false alarms.

The threshold is the split-conformal quantile (`mola.decisions.ranks`) of the OOD scores of validation data. Neither labels nor
outliers are needed. The rate of false alarms says nothing about the share of outliers detected, which depends on how much their
scores differ from those of the validation data (Bates et al., 2023).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from molaplace.decisions.ranks import as_numbers, conformal_quantiles, data_needed
from molaplace.decisions.threshold import OWN, Threshold
from molaplace.errors import DataError
from molaplace.options import check_share, counted
from molaplace.outliers import warn_if_training_data
from molaplace.prediction import Prediction, RegressionPrediction


class AlarmThreshold(Threshold):
    """A threshold on the OOD score or on a score of your own: raise an alarm if `threshold(prediction)` is true."""

    false_alarm_rate: float
    """Upper bound on the rate of false alarms."""

    def __call__(self, prediction: Prediction | RegressionPrediction | Any) -> Tensor:
        """Return a mask of the inputs that raise an alarm, of shape (n,).

        Args:
            prediction: a prediction, or scores (n,) if the threshold was chosen for scores. A prediction of another predictor, or of the
                same one with other settings, raises `OptionError`.
        """
        if isinstance(prediction, (Prediction, RegressionPrediction)):
            self._check(prediction)
            prediction = prediction.ood_score
        return self._above(prediction)

    def __repr__(self) -> str:
        return (
            f"AlarmThreshold({float(self):.6g}: at most {self.false_alarm_rate:.3g} of {self.score} scores like the {self.count} "
            f"validation scores are above it)"
        )


def alarm_threshold(scores: Prediction | RegressionPrediction | Any, false_alarm_rate: float) -> AlarmThreshold:
    """Find the OOD score above which to raise an alarm, so that the rate of false alarms is at most the given rate.

    The guarantee holds on average over draws of the validation data, for any number n and any distribution of the scores.
    The rate of false alarms varies between validation sets, with a standard deviation of about sqrt(alpha (1 - alpha) / n), where
    alpha is `false_alarm_rate`. The plain quantile of the scores gives no such guarantee: for example, the largest of n = 19 scores is
    exceeded by one in 20 new scores on average.

    The validation data must not have been used for training or early stopping. Tuning a `mola.MoLA` on the same data has a negligible
    effect on `Prediction.ood_score`. The score does not depend on the prior precision and uses only the means and standard deviations
    of three scores on the validation data.

    Args:
        scores: a prediction for validation data, whose `ood_score` is used; or scores (n,) of your own, higher for outliers, as a
            tensor, array or list.
        false_alarm_rate: largest acceptable rate alpha of false alarms, such as 0.05 for one alarm per twenty in-distribution inputs.

    Returns:
        The threshold as a number. Raise an alarm for scores *above* it. Called with a prediction, it returns the alarms, and refuses
        predictions of another predictor.
    """
    name = OWN
    fingerprint = None
    if isinstance(scores, (Prediction, RegressionPrediction)):
        name = scores.ood_score_name
        fingerprint = scores.fingerprint
        scores = scores.ood_score
    values = as_numbers(scores, "scores")
    if values.ndim > 1 and name != OWN:
        raise DataError(
            f"must be one number for each input, but the predictions have one for each position, of shape {tuple(values.shape)}. "
            f"Positions of an input are not independent, so average them: mola.alarm_threshold("
            f"prediction.ood_score.flatten(1).mean(1), {false_alarm_rate!r}).",
            argument="scores",
        )
    if values.ndim != 1 or bool(values.isnan().any()):
        raise DataError(
            f"must be one number for each validation data point, none of them NaN; got shape {tuple(values.shape)} with "
            f"{int(values.isnan().sum())} NaN.",
            argument="scores",
        )
    warn_if_training_data(values, name, "the validation data")
    count = len(values)
    rate = check_share(false_alarm_rate, "false_alarm_rate", "5 % is 0.05.")
    if count < data_needed(rate):
        raise DataError(
            f"{counted(count, 'validation score')} {'is' if count == 1 else 'are'} too few for a false-alarm rate of {rate:g}: on "
            f"average, one in {count + 1} new scores exceeds the largest of them. Pass at least {data_needed(rate)} scores, or allow "
            f"a rate of at least 1/{count + 1}."
        )
    return AlarmThreshold(
        float(conformal_quantiles(values, rate)),
        score=name,
        count=count,
        fingerprint=fingerprint,
        false_alarm_rate=rate,
    )
