"""Regression in a comparison: predictions as rows of a tally, and errors, densities and intervals from them.

A central interval of probability p covers a target with distribution function u exactly where |2 u - 1| <= p, so one number for each
target, the smallest p whose interval covers it, gives the coverage of intervals of every probability.

The log-likelihood of D outputs is that of all outputs together; every other metric is a mean over outputs, and is also kept for
each of the first `MOST_OUTPUTS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mola import normal_mixtures
from mola.compare.measured import Lead, Measurement, leads, mean_of, root_mean_of
from mola.compare.record import LabelledResult, OutputResult, RegressionDetail
from mola.compare.tally import INPUT, Tally
from mola.prediction import RegressionPrediction

LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Probabilities of the intervals in tables."""

NOMINAL = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Probabilities of the intervals in figures; `LEVELS` are among them."""

INTERVAL = 0.9
"""Probability of the intervals of examples."""

MOST_OUTPUTS = 16
"""Outputs that are also shown separately."""

EXAMPLES = 300
"""Targets in a figure, at even distances in the data."""

SPREAD_BINS = 10
"""Groups of equally many inputs, by their predicted standard deviation."""

LOWER_IS_BETTER = ("rmse", "nll", "crps")


@dataclass(frozen=True)
class RegressionAnswer:
    """Predictions of a regression for a batch."""

    prediction: RegressionPrediction
    """n rows of D outputs, in the targets' units."""
    ood_score: Tensor | None = None
    """Outlier scores (n,), if the method has its own."""
    promised: Mapping[float, tuple[Tensor, Tensor]] | None = None
    """By coverage: ends (n, D) of calibrated intervals."""
    inputs: Tensor | None = None
    """(n,), input of each row, where rows are positions; None: each row is an input."""

    def columns(self, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return columns of a tally: "name[d]" of output d, "name[p]" of an interval of probability p.

        Args:
            labels: targets (n, D) in their own units, or (n,) where D is 1; None for unlabelled data.
        """
        prediction = self.prediction
        row: dict[str, Tensor] = {} if self.inputs is None else {INPUT: self.inputs}
        row["std[all]"] = prediction.std.mean(1)
        if labels is not None:
            row |= self._measured(labels[:, None] if labels.dim() == 1 else labels)
        # Outputs may have different units: the mean of logarithms ranks inputs alike in any units.
        row["variance"] = prediction.variance.log().mean(1)
        if self.ood_score is not None:
            row["ood score"] = self.ood_score
        return {name: column.detach().cpu().double() for name, column in row.items()}

    def _measured(self, targets: Tensor) -> dict[str, Tensor]:
        prediction = self.prediction
        values = targets.to(prediction.mean.device, torch.float64)
        squares, crps = (prediction.mean.double() - values).square(), prediction.crps(values).double()
        needed = (2 * prediction.cdf(values).double() - 1).abs()
        ends = {level: prediction.interval(level) for level in LEVELS}
        row = {
            "square[all]": squares.mean(1),
            "nll[all]": -prediction.log_prob(values),
            "crps[all]": crps.mean(1),
            **{f"held[{level}]": (needed <= level).double().mean(1) for level in NOMINAL},
            **{f"width[{level}]": (upper - lower).mean(1) for level, (lower, upper) in ends.items()},
        }
        for level, (lower, upper) in (self.promised or {}).items():
            ours = values.cpu()
            row[f"promised[{level}]"] = ((ours >= lower) & (ours <= upper)).double().mean(1)
            row[f"promised width[{level}]"] = (upper - lower).mean(1)
        lower, upper = ends[INTERVAL]
        mixture = (prediction.weights, prediction.component_mean, prediction.component_variance)
        parts = {
            "target": values,
            "mean": prediction.mean,
            "std": prediction.std,
            "lower": lower,
            "upper": upper,
            "square": squares,
            "nll": -normal_mixtures.log_density(*mixture, values),
            "crps": crps,
            "held": (needed <= INTERVAL).double(),
        }
        for place in range(min(MOST_OUTPUTS, values.shape[1])):
            row |= {f"{name}[{place}]": part[:, place] for name, part in parts.items()}
        return row


def regression_measured(tally: Tally) -> dict[str, Measurement]:
    """Metrics on labelled data: rmse, nll, crps, std, and coverage_90 and width_90 for each of `LEVELS` in percent."""
    names = {level: f"{level:.0%}".rstrip("%") for level in LEVELS}
    return {
        **_scores(tally, "all"),
        **{f"coverage_{name}": mean_of(tally[f"held[{level}]"], tally.groups) for level, name in names.items()},
        **{f"width_{name}": mean_of(tally[f"width[{level}]"], tally.groups) for level, name in names.items()},
    }


def _scores(tally: Tally, place: int | str) -> dict[str, Measurement]:
    return {
        "rmse": root_mean_of(tally[f"square[{place}]"], tally.groups),
        **{name: mean_of(tally[f"{name}[{place}]"], tally.groups) for name in ("nll", "crps", "std")},
    }


def regression_result(tally: Tally, outputs: Sequence[str]) -> LabelledResult:
    """Return all metrics of a method on labelled data, with their errors over data, and the details of reports.

    Args:
        tally: tally of `RegressionAnswer` rows.
        outputs: names of the outputs.
    """
    measured, shown = regression_measured(tally), dict(enumerate(outputs[:MOST_OUTPUTS]))
    curve = [(level, mean_of(tally[f"held[{level}]"], tally.groups)) for level in NOMINAL]
    by_output = {
        name: {**_scores(tally, place), "coverage_90": mean_of(tally[f"held[{place}]"], tally.groups)}
        for place, name in shown.items()
    }
    detail = RegressionDetail(
        coverage=[[level, one.value, one.error] for level, one in curve],
        spread={name: _spread(tally, place) for place, name in shown.items()},
        examples={name: _examples(tally, place) for place, name in shown.items()},
        outputs={name: OutputResult(_values(found), _errors(found)) for name, found in by_output.items()},
    )
    return LabelledResult(
        level=0.0,
        count=tally.count,
        metrics=_values(measured),
        reliability=[],
        histogram=[],
        errors=_errors(measured),
        regression=detail,
    )


def _values(found: Mapping[str, Measurement]) -> dict[str, float]:
    return {name: one.value for name, one in found.items()}


def _errors(found: Mapping[str, Measurement]) -> dict[str, float | None]:
    return {name: one.error for name, one in found.items()}


def _spread(tally: Tally, place: int) -> list[list[float]]:
    # For groups of rows by predicted standard deviation: count, its root mean square, root mean squared error.
    std, squares = tally[f"std[{place}]"], tally[f"square[{place}]"]
    # One group where all standard deviations are equal: more would be chance.
    bins = 1 if float(std.max() - std.min()) <= 1e-6 * float(std.max()) else min(SPREAD_BINS, len(std))
    return [
        [len(part), math.sqrt(float(std[part].square().mean())), math.sqrt(float(squares[part].mean()))]
        for part in torch.tensor_split(std.argsort(stable=True), bins)
    ]


def _examples(tally: Tally, place: int) -> list[list[float]]:
    # Target, mean, and the ends of the 90 % interval.
    count = tally.count
    chosen = torch.linspace(0, count - 1, min(count, EXAMPLES), dtype=torch.float64).round().long()
    columns = [tally[f"{name}[{place}]"][chosen] for name in ("target", "mean", "lower", "upper")]
    rows: list[list[float]] = torch.stack(columns, 1).tolist()
    return rows


def regression_leads(tallies: Mapping[str, Tally]) -> dict[str, Lead]:
    """Return which method leads on the same data, by rmse, nll and crps."""
    measured = {method: regression_measured(tally) for method, tally in tallies.items()}
    return leads(measured, dict.fromkeys(LOWER_IS_BETTER, "low"))


def differences(tallies: Mapping[str, Tally], own: str) -> dict[str, dict[str, tuple[float, float | None]]]:
    """Return each method's excess rmse, nll and crps over one method, datum by datum, with standard errors over data."""
    mine = regression_measured(tallies[own])
    found: dict[str, dict[str, tuple[float, float | None]]] = {}
    for method, tally in tallies.items():
        if method != own:
            gaps = {name: one.minus(mine[name]) for name, one in regression_measured(tally).items()}
            found[method] = {name: (gaps[name].value, gaps[name].error) for name in LOWER_IS_BETTER}
    return found
