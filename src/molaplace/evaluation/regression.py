"""Regression in comparisons: predictions as columns of a tally, and the metrics and intervals computed from these columns.

Let u be the predicted distribution function evaluated at a target. A central interval of probability p covers the target if and only
if |2 u - 1| <= p. One number per target, |2 u - 1|, therefore determines the coverage of intervals of any probability.

The log-likelihood is computed jointly over all D outputs. Every other metric is averaged over the outputs. Results are also stored
separately for each of the first `MOST_OUTPUTS` outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molaplace import normal_mixtures
from molaplace.evaluation.measurement import Measurement, root_mean_of
from molaplace.evaluation.record import OutputResult, RegressionDetail
from molaplace.evaluation.tally import INPUT, Tally
from molaplace.prediction import RegressionPrediction

LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Coverage probabilities of the intervals shown in tables."""

NOMINAL = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Coverage probabilities of the intervals shown in figures, including all `LEVELS`."""

INTERVAL = 0.9
"""Coverage probability of the intervals shown in examples."""

MOST_OUTPUTS = 16
"""Maximum number of outputs for which separate results are stored."""

EXAMPLES = 300
"""Maximum number of targets shown in a figure; the targets are evenly spaced in the data set."""

SPREAD_BINS = 10
"""Number of equal-sized groups into which inputs are split by their predicted standard deviation."""


@dataclass(frozen=True)
class RegressionAnswer:
    """Predictions of a regression model for a batch."""

    prediction: RegressionPrediction
    """Prediction with n rows and D outputs, in the units of the targets."""
    ood_score: Tensor | None = None
    """Outlier scores (n,), or None if the method has no outlier score."""
    promised: Mapping[float, tuple[Tensor, Tensor]] | None = None
    """Lower and upper ends of the calibrated intervals, each of shape (n, D), keyed by coverage."""
    inputs: Tensor | None = None
    """Index of each row's input, shape (n,), if the rows are positions; None if each row is an input."""

    def columns(self, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the columns of a tally; the targets in `labels`, if known, have shape (n, D), or (n,) if D = 1.

        Column "name[d]" belongs to output d, and column "name[p]" belongs to the intervals of probability p.
        """
        prediction = self.prediction
        row: dict[str, Tensor] = {} if self.inputs is None else {INPUT: self.inputs}
        row["std[all]"] = prediction.std.mean(1)
        if labels is not None:
            row |= self._measured(labels[:, None] if labels.dim() == 1 else labels)
        # Outputs may have different units, but a ranking by the mean logarithm does not depend on the units.
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


def regression_metrics(tally: Tally) -> dict[str, Measurement]:
    """Return rmse, nll, crps, std, and the coverage and width of intervals at each of `LEVELS`, under names such as coverage_90."""
    names = {level: f"{level:.0%}".rstrip("%") for level in LEVELS}
    return {
        **_scores(tally, "all"),
        **{f"coverage_{name}": tally.mean(f"held[{level}]") for level, name in names.items()},
        **{f"width_{name}": tally.mean(f"width[{level}]") for level, name in names.items()},
    }


def _scores(tally: Tally, place: int | str) -> dict[str, Measurement]:
    return {
        "rmse": root_mean_of(tally[f"square[{place}]"], tally.groups),
        **{name: tally.mean(f"{name}[{place}]") for name in ("nll", "crps", "std")},
    }


def regression_detail(tally: Tally, outputs: Sequence[str]) -> RegressionDetail:
    """Return the coverage at each nominal probability, and the metrics, spread and examples for each output."""
    shown = dict(enumerate(outputs[:MOST_OUTPUTS]))
    curve = [(level, tally.mean(f"held[{level}]")) for level in NOMINAL]
    by_output = {
        name: {**_scores(tally, place), "coverage_90": tally.mean(f"held[{place}]")} for place, name in shown.items()
    }
    return RegressionDetail(
        coverage=[[level, one.value, one.error] for level, one in curve],
        spread={name: _spread(tally, place) for place, name in shown.items()},
        examples={name: _examples(tally, place) for place, name in shown.items()},
        outputs={
            name: OutputResult(
                {metric: one.value for metric, one in found.items()},
                {metric: one.error for metric, one in found.items()},
            )
            for name, found in by_output.items()
        },
    )


def _spread(tally: Tally, place: int) -> list[list[float]]:
    # For each group, return its size, the root mean square of its predicted standard deviations, and its root mean squared error.
    std, squares = tally[f"std[{place}]"], tally[f"square[{place}]"]
    # If all standard deviations are equal, use one group, because the errors of several groups would differ only by chance.
    bins = 1 if float(std.max() - std.min()) <= 1e-6 * float(std.max()) else min(SPREAD_BINS, len(std))
    return [
        [len(part), math.sqrt(float(std[part].square().mean())), math.sqrt(float(squares[part].mean()))]
        for part in torch.tensor_split(std.argsort(stable=True), bins)
    ]


def _examples(tally: Tally, place: int) -> list[list[float]]:
    # For each example, return the target, the mean, and both ends of the 90 % interval.
    count = tally.count
    chosen = torch.linspace(0, count - 1, min(count, EXAMPLES), dtype=torch.float64).round().long()
    columns = [tally[f"{name}[{place}]"][chosen] for name in ("target", "mean", "lower", "upper")]
    rows: list[list[float]] = torch.stack(columns, 1).tolist()
    return rows
