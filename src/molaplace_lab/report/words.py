"""Sentences for the reports of suites: findings derived from the numbers, and remarks."""

from __future__ import annotations

from molaplace.evaluation import SAME
from molaplace.report.numbers import Quantity
from molaplace.report.words import Finding
from molaplace_lab.report.reading import SuiteResults
from molaplace_lab.report.runs import BY_CONFIDENCE, Numbers, is_clear, shared_outliers

COMPARED = (("MoLA", "DE"), ("MoLA (calibrated)", "DE-T"))
"""Pairs of a method and the ensemble with which it is compared."""


def suite_findings(suite: SuiteResults) -> list[Finding]:
    """Return findings about clear differences between MoLA and the ensembles."""
    if not suite.runs:
        return []
    numbers = Numbers(suite.runs)
    findings = [
        _compared(suite, numbers, method, base) for method, base in COMPARED if {method, base} <= suite.runs.keys()
    ]
    return [finding for finding in findings if finding is not None]


def _compared(suite: SuiteResults, numbers: Numbers, method: str, base: str) -> Finding | None:
    outliers = tuple(outlier_set.name for outlier_set in shared_outliers(suite.sets, suite.runs))
    # Each entry consists of a name, a quantity, a sign (1 if higher is better), the number of decimals and a unit factor.
    quantities = (
        ("log loss on test data", Quantity("test", "nll"), -1, 4, 1),
        ("calibration error on test data (%)", Quantity("test", "ece"), -1, 2, 100),
        ("log loss on shifted data", numbers.shifted("nll"), -1, 3, 1),
        ("calibration error on shifted data (%)", numbers.shifted("ece"), -1, 1, 100),
        ("mean confidence in outliers (%)", Quantity(outliers, "confidence"), -1, 1, 100),
        ("AUROC of confidence (%)", Quantity(outliers, "auroc", BY_CONFIDENCE), 1, 1, 100),
    )
    better: list[str] = []
    worse: list[str] = []
    same: list[str] = []
    for name, quantity, sign, digits, factor in quantities:
        estimates = numbers(quantity, factor)
        if (mine := estimates[method]) is None or (theirs := estimates[base]) is None:
            continue
        gap = mine.minus(theirs)
        if abs(gap.value) < SAME:
            same.append(name)
        elif is_clear(gap):
            words = f"{name} {mine.value:.{digits}f} against {theirs.value:.{digits}f}"
            (better if sign * gap.value > 0 else worse).append(words)
    parts = [f"{method} equals {base} in {', '.join(same)}."] if same else []
    parts += [f"Clearly better than {base}: {'; '.join(better)}."] if better else []
    parts += [f"Clearly worse: {'; '.join(worse)}."] if worse else []
    return Finding(f"{method} and {base}", " ".join(parts)) if parts else None


def suite_remarks(suite: SuiteResults) -> list[str]:
    """Return the remarks shown below the results of a suite: data, tuning and computing time."""
    records = [record for methods in suite.groups.values() for found in methods.values() for record in found]
    sets = "; ".join(f"{one.title} {one.count}" for one in suite.sets.values() if one.role != "shift")
    notes = {str(note): None for record in records for note in record.chosen.get("notes", [])}
    seconds = sum(sum(record.seconds.values()) for record in records)
    return [
        f"Data: {sets}.",
        *suite.notes,
        *notes,
        f"Fitting, tuning and prediction for {len(records)} records took {seconds:.0f} seconds, excluding the networks' "
        f"forward passes.",
    ]
