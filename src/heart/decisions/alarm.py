r"""When to raise an alarm: an outlier score above which inputs of the usual kind come as rarely as asked for.

The split-conformal rank of `mola.decisions.ranks`, applied to the outlier scores of validation data: no labels, and no outliers,
are needed. That false alarms are rare says nothing of how many outliers are caught; that depends on what they are (Bates et al.,
2023).
"""

from __future__ import annotations

from typing import Any

from heart.decisions.ranks import as_numbers, checked_share, conformal_rank, data_needed
from heart.errors import DataError
from heart.options import counted


def alarm_threshold(scores: Any, false_alarm_rate: float) -> float:
    r"""The outlier score above which to raise an alarm, so that false alarms are no more frequent than asked for.

    Let :math:`s_{(1)} \le \dots \le s_{(n)}` be the scores of n validation data. The threshold is

    .. math:: s_{(k)}, \quad k = \lceil (n + 1)(1 - \alpha) \rceil

    the split-conformal quantile. A further datum is as likely to take any of the n + 1 places among the sorted scores, if
    it is exchangeable with them, so it comes after the k-th with probability :math:`1 - k / (n + 1) \le \alpha`: for every n
    and whatever the distribution of the scores. With ties it is less; without, it is above :math:`\alpha - 1 / (n + 1)`.
    The plain quantile of the scores promises nothing: among n = 19, the largest is passed by 1 in 20.

    This is the mean over draws of the validation data. For those at hand, the rate of a continuous score is a draw of
    Beta(n + 1 - k, k), whose standard deviation is about :math:`\sqrt{\alpha (1 - \alpha) / n}`.

    Validation data must be like the data to come: not used in training, nor for early stopping. Tuning on them does no harm to
    `Prediction.ood_score` of a `mola.MoLA`: it does not depend on the prior precision, and of the validation data it takes no more
    than the mean and the spread of three scores.

    Args:
        scores: (n,), of validation data; higher = more outlying. A tensor, an array or a list.
        false_alarm_rate: alpha, such as 0.05 for one alarm in twenty data of the usual kind.

    Returns:
        The threshold: an alarm is a score *above* it. `OptionError` if the rate is not between 0 and 1.
    """
    _checked_rate(false_alarm_rate)
    values = as_numbers(scores, "scores must hold one number for each validation datum")
    if values.ndim != 1 or bool(values.isnan().any()):
        raise DataError(
            f"scores must hold one number for each validation datum and none nan; got shape {tuple(values.shape)} with "
            f"{int(values.isnan().sum())} nan."
        )
    return float(values.sort().values[alarm_rank(len(values), false_alarm_rate) - 1])


def alarm_rank(count: int, false_alarm_rate: float) -> int:
    """Which of the sorted scores of n validation data is the threshold for an alarm; see `alarm_threshold`.

    Args:
        count: n.
        false_alarm_rate: alpha.

    Returns:
        From 1 to n; `OptionError` if the rate is not between 0 and 1.
    """
    rate = _checked_rate(false_alarm_rate)
    rank = conformal_rank(count, rate)
    if rank > count:
        raise DataError(
            f"{counted(count, 'validation score')} {'is' if count == 1 else 'are'} too few for a false-alarm rate of {rate:g}: "
            f"their largest is passed by one datum in {count + 1}. Give at least {data_needed(rate)} scores, or allow a rate of "
            f"at least 1/{count + 1}."
        )
    return rank


def _checked_rate(false_alarm_rate: float) -> float:
    return checked_share(false_alarm_rate, "false_alarm_rate", "5 % is 0.05.")
