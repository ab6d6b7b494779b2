"""Evaluate predictors: scores of each datum, metrics with standard errors, and comparisons of several methods.

`evaluate` makes a table of metrics. Its parts serve other comparisons: `PredictionColumns` collects the scores of each datum,
`measured` and `separation` turn them into metrics with standard errors, and `labelled_result` and `outlier_result` into plain values
for reports and records.
"""

from molaplace.evaluation.baselines import baselines
from molaplace.evaluation.catalogue import METRICS
from molaplace.evaluation.columns import (
    CLASSIFICATION_SCORES,
    Columns,
    PredictionColumns,
    outlier_scores,
    regression_scores,
)
from molaplace.evaluation.comparison import (
    Evaluation,
    LabelledResult,
    MethodResult,
    OutlierResult,
    Role,
    SetInfo,
)
from molaplace.evaluation.estimates import Estimate, Measurement, measured, separation
from molaplace.evaluation.evaluate import collect, evaluate
from molaplace.evaluation.leads import CLEAR, TIE, Lead, labelled_leads, lead, outlier_leads
from molaplace.evaluation.results import (
    compare,
    labelled_result,
    outlier_result,
    set_info,
)

__all__ = [
    "CLASSIFICATION_SCORES",
    "CLEAR",
    "METRICS",
    "TIE",
    "Columns",
    "Estimate",
    "Evaluation",
    "LabelledResult",
    "Lead",
    "Measurement",
    "MethodResult",
    "OutlierResult",
    "PredictionColumns",
    "Role",
    "SetInfo",
    "baselines",
    "collect",
    "compare",
    "evaluate",
    "labelled_leads",
    "labelled_result",
    "lead",
    "measured",
    "outlier_leads",
    "outlier_result",
    "outlier_scores",
    "regression_scores",
    "separation",
    "set_info",
]
