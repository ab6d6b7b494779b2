"""The numbers of records as data frames, estimates over runs from them, and tables of these estimates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from mola.compare.measured import Lead
from mola.compare.record import Comparison, LabelledResult, Record, SetInfo
from mola.compare.report.estimate import Estimate
from mola.compare.report.tables import Column, Number, Table, make_table
from mola.metrics import least_area_under_risk_coverage

COLUMNS = ["method", "run", "set", "level", "type", "score", "metric", "value", "error"]

BY_CONFIDENCE = "max probability"
"""The outlier score of tables that show one score."""

EXCESS = "excess_aurc"
"""AURC less the smallest AURC that the number of errors allows."""


def numbers_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Every number of some records, one in each row.

    Columns: method and run; set, or name of a measure; level and type of shift; outlier score; metric; value and, where it is
    known, its standard error over data.
    """
    rows: list[tuple[object, ...]] = []
    for record in records:
        who = (record.method, record.run)
        for name, found in record.labelled.items():
            place = (*who, name, found.level)
            metrics = {**found.metrics, **_excess(found)}
            rows += [(*place, "", "", metric, value, found.errors.get(metric)) for metric, value in metrics.items()]
            for kind, typed in found.types.items():
                rows += [(*place, kind, "", metric, value, None) for metric, value in typed.items()]
        for name, out in record.outliers.items():
            place = (*who, name, 0.0)
            rows.append((*place, "", "", "confidence", out.confidence, out.confidence_error))
            rows.append((*place, "", "", "std", out.std, out.std_error))
            for score, scored in out.scores.items():
                errors = out.errors.get(score, {})
                rows += [(*place, "", score, metric, value, errors.get(metric)) for metric, value in scored.items()]
        for measure, given in record.measures.items():
            rows += [(*who, measure, 0.0, "", "", metric, value, None) for metric, value in given.items()]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return frame.astype({"value": float, "error": float})


def _excess(result: LabelledResult) -> dict[str, float]:
    if not {"aurc", "accuracy"} <= result.metrics.keys():
        return {}
    wrong = round((1 - result.metrics["accuracy"]) * result.count)
    return {EXCESS: result.metrics["aurc"] - least_area_under_risk_coverage(result.count, wrong)}


@dataclass(frozen=True)
class On:
    """A metric on a set, or its mean over several sets: unknown unless every set has it."""

    sets: str | tuple[str, ...]
    metric: str
    score: str = ""
    """Outlier score of "auroc", "fpr95" and the like."""
    kind: str = ""
    """Type of shift."""


class Numbers:
    """The numbers of some methods: estimates over runs, or with the error over data for one run."""

    def __init__(self, methods: Mapping[str, Sequence[Record]]) -> None:
        records = [replace(record, method=name) for name, found in methods.items() for record in found]
        self.methods = tuple(methods)
        self.overlap = max((record.overlap for record in records), default=0.0)
        levels = {(name, one.level) for record in records for name, one in record.labelled.items()}
        self.levels = sorted({level for _, level in levels})
        self._sets = {level: tuple(sorted(name for name, own in levels if own == level)) for level in self.levels}
        keys = ["set", "type", "score", "metric"]
        frame = numbers_frame(records).drop_duplicates(["method", "run", *keys])
        self._values, self._errors = (
            frame.pivot(index=["method", "run"], columns=keys, values=column) for column in ("value", "error")
        )

    def __call__(self, quantity: On, factor: float = 1.0) -> dict[str, Estimate | None]:
        """Estimates by method, times a factor; None where a method has no such number."""
        values, errors = self._read(quantity)
        by_run: dict[str, dict[int, float]] = {method: {} for method in self.methods}
        for (method, run), value in values.dropna().items():
            by_run[method][run] = value
        found = {method: Estimate.over(own, self.overlap) for method, own in by_run.items()}
        for method, one in found.items():
            if one is not None and one.runs == 1:
                error = errors[method, next(iter(one.by_run))]
                one = replace(one, error=None if pd.isna(error) else float(error))
            found[method] = None if one is None else one.scaled(factor)
        return found

    def _read(self, quantity: On) -> tuple[pd.Series, pd.Series]:
        # Values and errors by method and run.
        sets = (quantity.sets,) if isinstance(quantity.sets, str) else quantity.sets
        keys = [(name, quantity.kind, quantity.score, quantity.metric) for name in sets]
        nothing = pd.Series(float("nan"), index=self._values.index)
        if not keys or any(key not in self._values.columns for key in keys):
            return nothing, nothing
        errors = self._errors[keys[0]] if len(keys) == 1 else nothing
        return sum(self._values[key] for key in keys) / len(keys), errors

    def at_level(self, level: float, metric: str, kind: str = "") -> On:
        """A metric at a level of shift: the mean over the sets of that level."""
        return On(self._sets.get(level, ()), metric, kind=kind)

    def shifted(self, metric: str) -> On:
        """A metric on shifted data: the mean over all shifted sets."""
        return On(tuple(name for level in self.levels if level for name in self._sets[level]), metric)


@dataclass(frozen=True)
class Shown:
    """A column of a table, its number, and the factor to its unit."""

    column: Column
    quantity: On
    factor: float = 1.0


def on_set(name: str, columns: Mapping[str, Column]) -> list[Shown]:
    """Metrics on one set, by name; columns with a "%" in their name are in per cent."""
    return [Shown(column, On(name, metric), 100 if "%" in column.name else 1) for metric, column in columns.items()]


def records_table(
    title: str,
    caption: str,
    numbers: Numbers,
    shown: Sequence[Shown],
    aside: Mapping[str, Sequence[Number]] | None = None,
    leads: Mapping[str, Mapping[str, Lead]] | None = None,
) -> Table:
    """Methods by numbers of their records.

    Args:
        title: of the table.
        caption: how to read it.
        numbers: of the methods.
        shown: the columns. A column without numbers is omitted, unless there are further rows.
        aside: further rows, which do not compete.
        leads: by set and metric, which method leads in a comparison of one run; see `Comparison.leads`.
    """
    found = [(one, values) for one in shown if any((values := numbers(one.quantity, one.factor)).values()) or aside]
    best = {
        (method, index)
        for index, (one, _) in enumerate(found)
        for method in numbers.methods
        if leads and isinstance(one.quantity.sets, str)
        if (lead := leads.get(one.quantity.sets, {}).get(one.quantity.metric)) is not None
        if {(method,), (method, one.quantity.score)} & set(lead.clear)
    }
    return make_table(
        title,
        caption,
        [one.column for one, _ in found],
        {method: [values[method] for _, values in found] for method in numbers.methods},
        aside,
        best if leads else None,
    )


def levels_of(comparison: Comparison) -> list[float]:
    """Levels of shift, 0 (the test set) among them."""
    return sorted({one.level for one in comparison.sets.values() if one.role in ("test", "shift")})


def shared_outliers(comparison: Comparison, methods: Mapping[str, Sequence[Record]]) -> list[SetInfo]:
    """Sets of outliers that all records have: means over different sets could not be compared."""
    records = [record for found in methods.values() for record in found]
    return [one for one in comparison.of_role("outlier") if all(one.name in record.outliers for record in records)]


LEADS = "Bold: leads every other method, run by run, by more than chance (Student's t, 95 %)."
"""How to read bold numbers in the tables of suites."""


def runs_words(methods: Mapping[str, Sequence[Record]]) -> str:
    """The caption's sentence about the number of runs: "4 runs", "2 to 4 runs", or "5 rotations" of a cross-fit."""
    counts = [len(records) for records in methods.values()]
    if max(counts) == 1:
        return "One run: the spread is unknown and nothing is bold."
    counted = " to ".join(str(count) for count in dict.fromkeys((min(counts), max(counts))))
    if any(record.overlap > 0 for records in methods.values() for record in records):
        counted += " rotations of a cross-fit, corrected for shared data (Nadeau and Bengio, 2003)"
    else:
        counted += " runs"
    return f"Mean \N{PLUS-MINUS SIGN} standard error over {counted}."
