"""What methods say of numbers, as rows for a tally, and what follows from these: errors, densities, and intervals.

A central interval of probability p holds a target whose distribution function is u exactly where |2 u - 1| <= p. So one number for
each target, the least p whose interval holds it, says how often intervals of every probability do.

Where there are D outputs, the log-likelihood is that of all of them together; everything else is a mean over outputs, and what is
known of each of the first `MOST_OUTPUTS` is kept as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mola import normal_mixtures
from mola.compare.measured import Lead, Measurement, lead, mean_of, root_mean_of
from mola.compare.record import LabelledResult, NumbersDetail, OutputResult
from mola.compare.tally import INPUT, Tally
from mola.prediction import RegressionPrediction

LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Probabilities of the intervals that tables show."""

NOMINAL = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Probabilities of the intervals that figures show; those of the tables are among them."""

USUAL = 0.9
"""Probability of the intervals that examples are drawn with."""

MOST_OUTPUTS = 16
"""Outputs that are also shown each by itself."""

EXAMPLES = 300
"""Targets that a figure shows, at even distances in the data."""

SPREAD_BINS = 10
"""Groups of equally many inputs, by their predicted standard deviation."""

LOWER_IS_BETTER = ("rmse", "nll", "crps")


@dataclass(frozen=True)
class NumbersAnswer:
    """What a method says of a batch whose outputs are numbers."""

    prediction: RegressionPrediction
    """Of n rows with D outputs, in the targets' units."""
    ood_score: Tensor | None = None
    """(n,), where the method has a score of its own."""
    promised: Mapping[float, tuple[Tensor, Tensor]] | None = None
    """By coverage: ends (n, D) of intervals that hold targets so often, where that was calibrated."""
    inputs: Tensor | None = None
    """(n,), which input of the batch each row is of, where rows are positions; None: each is an input."""

    def columns(self, labels: Tensor | None = None) -> dict[str, Tensor]:
        """What is kept of each row.

        Args:
            labels: targets (n, D) in their own units, or (n,) where D is 1; None where there are none.

        Returns:
            Numbers by name; of one output d as "name[d]", of one probability p as "name[p]".
        """
        said = self.prediction
        row: dict[str, Tensor] = {} if self.inputs is None else {INPUT: self.inputs}
        std = said.std
        row["std[all]"] = std.mean(1)
        if labels is not None:
            row |= self._measured(labels[:, None] if labels.dim() == 1 else labels)
        # Of outputs in different units, the mean of logarithms: it ranks inputs alike in any units.
        row["variance"] = said.variance.log().mean(1)
        if self.ood_score is not None:
            row["ood score"] = self.ood_score
        return {name: column.detach().cpu().double() for name, column in row.items()}

    def _measured(self, targets: Tensor) -> dict[str, Tensor]:
        said = self.prediction
        values = targets.to(said.mean.device, torch.float64)
        squares, crps = (said.mean.double() - values).square(), said.crps(values).double()
        needed = (2 * said.cdf(values).double() - 1).abs()
        ends = {level: said.interval(level) for level in LEVELS}
        row = {
            "square[all]": squares.mean(1),
            "nll[all]": -said.log_prob(values),
            "crps[all]": crps.mean(1),
            **{f"held[{level}]": (needed <= level).double().mean(1) for level in NOMINAL},
            **{f"width[{level}]": (upper - lower).mean(1) for level, (lower, upper) in ends.items()},
        }
        for level, (lower, upper) in (self.promised or {}).items():
            ours = values.cpu()
            row[f"promised[{level}]"] = ((ours >= lower) & (ours <= upper)).double().mean(1)
            row[f"promised width[{level}]"] = (upper - lower).mean(1)
        each = -normal_mixtures.log_density(said.weights, said.component_mean, said.component_variance, values)
        lower, upper = ends[USUAL]
        parts = {
            "target": values,
            "mean": said.mean,
            "std": said.std,
            "lower": lower,
            "upper": upper,
            "square": squares,
            "nll": each,
            "crps": crps,
            "needed": needed,
        }
        for place in range(min(MOST_OUTPUTS, values.shape[1])):
            row |= {f"{name}[{place}]": part[:, place] for name, part in parts.items()}
        return row


def numbers_measured(tally: Tally) -> dict[str, Measurement]:
    """The numbers of a method on data with targets, with what each datum contributes to them.

    Args:
        tally: of `NumbersAnswer`.

    Returns:
        "rmse", "nll", "crps", "std", and for each of `LEVELS` in percent "coverage_90" and "width_90".
    """
    groups = tally.groups
    found = {
        "rmse": root_mean_of(tally["square[all]"], groups),
        "nll": mean_of(tally["nll[all]"], groups),
        "crps": mean_of(tally["crps[all]"], groups),
        "std": mean_of(tally["std[all]"], groups),
    }
    for level in LEVELS:
        found[f"coverage_{level:.0%}".rstrip("%")] = mean_of(tally[f"held[{level}]"], groups)
    for level in LEVELS:
        found[f"width_{level:.0%}".rstrip("%")] = mean_of(tally[f"width[{level}]"], groups)
    return found


def output_measured(tally: Tally, place: int) -> dict[str, Measurement]:
    """The same of one output: "rmse", "nll", "crps", "std", and how often 90 % intervals hold it, "coverage_90"."""
    groups = tally.groups
    return {
        "rmse": root_mean_of(tally[f"square[{place}]"], groups),
        "nll": mean_of(tally[f"nll[{place}]"], groups),
        "crps": mean_of(tally[f"crps[{place}]"], groups),
        "std": mean_of(tally[f"std[{place}]"], groups),
        "coverage_90": mean_of((tally[f"needed[{place}]"] <= USUAL).double(), groups),
    }


def numbers_result(tally: Tally, outputs: Sequence[str]) -> LabelledResult:
    """Everything that a report shows of a method on data with targets.

    Args:
        tally: of `NumbersAnswer`.
        outputs: their names.

    Returns:
        The numbers, with their errors over data.
    """
    measured, shown = numbers_measured(tally), outputs[:MOST_OUTPUTS]
    each = {name: output_measured(tally, place) for place, name in enumerate(shown)}
    curve = [(level, mean_of(tally[f"held[{level}]"], tally.groups)) for level in NOMINAL]
    detail = NumbersDetail(
        coverage=[[level, one.value, one.error] for level, one in curve],
        spread={name: _spread(tally, place) for place, name in enumerate(shown)},
        examples={name: _examples(tally, place) for place, name in enumerate(shown)},
        outputs={
            name: OutputResult(
                {key: one.value for key, one in found.items()}, {key: one.error for key, one in found.items()}
            )
            for name, found in each.items()
        },
    )
    return LabelledResult(
        level=0.0,
        count=tally.count,
        metrics={name: one.value for name, one in measured.items()},
        reliability=[],
        histogram=[],
        errors={name: one.error for name, one in measured.items()},
        numbers=detail,
    )


def _spread(tally: Tally, place: int) -> list[list[float]]:
    # For groups of rows by predicted standard deviation: how many, its root mean square, and the root mean squared
    # error.
    std, squares = tally[f"std[{place}]"], tally[f"square[{place}]"]
    order = std.argsort(stable=True)
    # Where all are the same, groups would be chance: there is one.
    bins = 1 if float(std.max() - std.min()) <= 1e-6 * float(std.max()) else min(SPREAD_BINS, len(std))
    parts = torch.tensor_split(order, bins)
    return [
        [len(part), math.sqrt(float(std[part].square().mean())), math.sqrt(float(squares[part].mean()))]
        for part in parts
    ]


def _examples(tally: Tally, place: int) -> list[list[float]]:
    # Target, mean, and the ends of the 90 % interval.
    count = tally.count
    chosen = torch.linspace(0, count - 1, min(count, EXAMPLES), dtype=torch.float64).round().long()
    columns = [tally[f"{name}[{place}]"][chosen] for name in ("target", "mean", "lower", "upper")]
    rows: list[list[float]] = torch.stack(columns, 1).tolist()
    return rows


def numbers_leads(tallies: Mapping[str, Tally]) -> dict[str, Lead]:
    """Which of several methods leads on the same data, by rmse, nll and crps."""
    measured = {method: numbers_measured(tally) for method, tally in tallies.items()}
    return {
        name: lead({(method,): found[name] for method, found in measured.items()}, "low") for name in LOWER_IS_BETTER
    }


def differences(tallies: Mapping[str, Tally], own: str) -> dict[str, dict[str, tuple[float, float | None]]]:
    """How much larger the numbers of the other methods are than those of one, datum by datum.

    Args:
        tallies: by method, of the same data.
        own: the one.

    Returns:
        By method and by "rmse", "nll" and "crps": the difference, and its standard error over data.
    """
    mine = numbers_measured(tallies[own])
    found: dict[str, dict[str, tuple[float, float | None]]] = {}
    for method, tally in tallies.items():
        if method != own:
            gaps = {name: one.minus(mine[name]) for name, one in numbers_measured(tally).items()}
            found[method] = {name: (gaps[name].value, gaps[name].error) for name in LOWER_IS_BETTER}
    return found
