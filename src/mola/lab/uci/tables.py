"""Tables of the UCI records and published numbers, in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mola.lab.uci.comparison import GAP_METHODS, METHODS
from mola.lab.uci.data import SETS

ALIKE = 0.01
"""Differences of negative log-likelihood on a split, in nats, that count as equal: the price of the distance rule."""

DUELS = (("MoLA", "DE"), ("MoLA (distance)", "DE"), ("MoLA (distance)", "MoLA"))
"""Pairs of methods that are compared split by split."""


@dataclass(frozen=True)
class Estimate:
    """A mean over splits, its standard error, and how many splits there are."""

    mean: float
    error: float
    count: int

    def __str__(self) -> str:
        if math.isnan(self.error):
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} \u00b1 {self.error:.2f}"


def _published(*numbers: float) -> list[Estimate]:
    return [Estimate(mean, error, 20) for mean, error in zip(numbers[::2], numbers[1::2], strict=True)]


PUBLISHED: dict[str, list[Estimate]] = {
    "bostonHousing": _published(3.01, 0.18, 2.97, 0.85, 3.28, 1.00, 2.57, 0.09, 2.46, 0.25, 2.41, 0.25),
    "concrete": _published(5.67, 0.09, 5.23, 0.53, 6.03, 0.58, 3.16, 0.02, 3.04, 0.09, 3.06, 0.18),
    "energy": _published(1.80, 0.05, 1.66, 0.19, 2.09, 0.29, 2.04, 0.02, 1.99, 0.09, 1.38, 0.22),
    "kin8nm": _published(0.10, 0.00, 0.10, 0.00, 0.09, 0.00, -0.90, 0.01, -0.95, 0.03, -1.20, 0.02),
    "naval-propulsion-plant": _published(0.01, 0.00, 0.01, 0.00, 0.00, 0.00, -3.73, 0.01, -3.80, 0.05, -5.63, 0.05),
    "power-plant": _published(4.12, 0.03, 4.02, 0.18, 4.11, 0.17, 2.84, 0.01, 2.80, 0.05, 2.79, 0.04),
    "protein-tertiary-structure": _published(4.73, 0.01, 4.36, 0.04, 4.71, 0.06, 2.97, 0.00, 2.89, 0.01, 2.83, 0.02),
    "wine-quality-red": _published(0.64, 0.01, 0.62, 0.04, 0.64, 0.04, 0.97, 0.01, 0.93, 0.06, 0.94, 0.12),
    "yacht": _published(1.02, 0.05, 1.11, 0.38, 1.58, 0.48, 1.63, 0.02, 1.55, 0.12, 1.18, 0.21),
}
"""RMSE and NLL of probabilistic backpropagation, Monte Carlo dropout and deep ensembles whose networks predict their variance, over 20
splits (protein 5): table 1 of Lakshminarayanan et al. (2017)."""


def estimates(
    records: Sequence[Mapping[str, Any]], score: str, *, gaps: bool = False
) -> dict[str, dict[str, Estimate]]:
    """Return mean and standard error over splits, by set and method, for sets with records.

    Args:
        records: records of `read_records`.
        score: such as "rmse" or "nll".
        gaps: use the splits that hold out the middle of a feature instead of the published splits.
    """
    found: dict[str, dict[str, list[float]]] = {name: {} for name in SETS}
    for record in records:
        if record["split"].startswith("gap") == gaps:
            for method, scores in record["methods"].items():
                found[record["set"]].setdefault(method, []).append(float(scores[score]))
    return {name: {method: _mean(values) for method, values in one.items()} for name, one in found.items() if one}


def _mean(values: Sequence[float]) -> Estimate:
    count = len(values)
    error = statistics.stdev(values) / math.sqrt(count) if count > 1 else math.nan
    return Estimate(statistics.fmean(values), error, count)


def as_good(found: Mapping[str, Mapping[str, Estimate]], method: str) -> list[str]:
    """List the sets in which a method's mean is within one standard error, its own or the best method's, of the best mean."""
    good = []
    for name, methods in found.items():
        best = min(methods.values(), key=lambda one: one.mean)
        own = methods[method]
        room = max(one.error for one in (best, own) if not math.isnan(one.error)) if own.count > 1 else 0.0
        if own.mean <= best.mean + room:
            good.append(name)
    return good


def score_table(records: Sequence[Mapping[str, Any]], score: str, *, gaps: bool = False) -> str:
    """Make a table with a row for each set and a column for each method, the best in bold."""
    found = estimates(records, score, gaps=gaps)
    methods = [name for name in (GAP_METHODS if gaps else METHODS) if any(name in one for one in found.values())]
    rows = []
    for name, scores in found.items():
        best = min(one.mean for one in scores.values())
        count = max(one.count for one in scores.values())
        rows.append([name, str(count), *[_cell(scores.get(method), best) for method in methods]])
    return _markdown(["set", "splits", *methods], rows)


def gap_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Make a table of the splits that hold out the middle of a feature.

    NLL is a median over splits, since the worst feature dominates the mean; coverage of 90 % intervals, and the ratio of the standard
    deviation to that on validation rows, are means.
    """
    rows = []
    for name, own in _gaps(records).items():
        for method in GAP_METHODS:
            values = [one[method] for one in own]
            median = statistics.median(one["nll"] for one in values)
            coverage = statistics.fmean(one["coverage"] for one in values)
            wider = statistics.fmean(one["std"] / one["std_inside"] for one in values)
            rows.append([name, str(len(values)), method, f"{median:.2f}", f"{100 * coverage:.0f} %", f"{wider:.2f}"])
    header = ["set", "features", "method", "median NLL", "90 % intervals hold", "times as wide as inside"]
    return _markdown(header, rows)


def gap_findings(records: Sequence[Mapping[str, Any]]) -> str:
    """Make a table of these splits: the numbers of splits on which a method has lower, about equal or higher NLL."""
    totals, rows = [[0, 0, 0] for _ in DUELS], []
    for name, own in _gaps(records).items():
        cells = []
        for (one, other), total in zip(DUELS, totals, strict=True):
            counts = [0, 0, 0]
            for methods in own:
                apart = methods[one]["nll"] - methods[other]["nll"]
                counts[0 if apart < -ALIKE else 2 if apart > ALIKE else 1] += 1
            total[:] = [a + b for a, b in zip(total, counts, strict=True)]
            cells.append("{} / {} / {}".format(*counts))
        rows.append([name, *cells])
    rows.append(["all", *["**{} / {} / {}**".format(*total) for total in totals]])
    return _markdown(["set", *[f"{one} against {other}" for one, other in DUELS]], rows)


def published_table(sets: Sequence[str]) -> str:
    """Make a table of the published numbers."""
    header = ["set", "RMSE: PBP", "MC dropout", "deep ensembles", "NLL: PBP", "MC dropout", "deep ensembles"]
    return _markdown(header, [[name, *map(str, PUBLISHED[name])] for name in sets])


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(header)}", *lines[1:]])


def _gaps(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    # Methods of the splits with a gap, by set.
    own = {
        name: [one["methods"] for one in records if one["set"] == name and one["split"].startswith("gap")]
        for name in SETS
    }
    return {name: methods for name, methods in own.items() if methods}


def _cell(value: Estimate | None, best: float) -> str:
    if value is None:
        return "\N{EN DASH}"
    digits = 4 if abs(value.mean) < 0.05 else 3 if abs(value.mean) < 0.3 else 2
    error = "" if math.isnan(value.error) else f" \u00b1 {value.error:.{digits}f}"
    text = f"{value.mean:.{digits}f}{error}"
    return f"**{text}**" if value.mean == best else text
