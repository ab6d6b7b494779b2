"""Tables of one run, of `mola evaluate` or of the demo: errors are those of the data, and bold is what leads clearly on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mola.compare.demo_result import METHODS, DemoResult
from mola.compare.evaluation import Evaluation
from mola.compare.measured import CLEAR, Lead
from mola.compare.report.estimate import Estimate
from mola.compare.report.tables import Column, Number, Table, make_table
from mola.compare.tally import SCORES
from mola.options import counted

__all__ = ["BOLD", "FEW", "SCORE_NAMES", "class_table", "demo_tables", "evaluation_tables", "short", "worst_classes"]

SCORE_NAMES = {
    "max probability": "max prob.",
    "entropy": "entropy",
    "energy": "energy",
    "maximum logit": "max logit",
    "ood score": "ood_score",
}
"""How scores are called where there is little room."""

FEW = 10
"""Classes in a short list."""

BOLD = (
    f"Bold: leads every other method{{}} by more than {CLEAR:g} standard errors of their difference, which is taken input by "
    f"input; where nothing is bold, no lead is clear."
)

Key = tuple[str, ...]
"""Which number it is: a metric, with the score or the set where there are several."""

Found = tuple[float, float | None]
"""A number and its standard error."""

Columns = dict[Key, tuple[Column, float]]
"""By the key of a number: its column, and the factor to its unit."""


def short(name: str, names: tuple[str, ...]) -> str:
    """What a set is called where there is little room: the last part of its path, if that tells it from the others."""
    last = name.rstrip("/").split("/")[-1]
    return last if last and sum(other.rstrip("/").split("/")[-1] == last for other in names) == 1 else name


def _table(
    title: str,
    caption: str,
    shown: Columns,
    numbers: Mapping[str, Mapping[Key, Found]],
    leads: Mapping[Key, Lead],
) -> Table:
    """Methods by numbers.

    Args:
        title: of the table.
        caption: of the table.
        shown: columns by the key of a number, each with the factor to its unit.
        numbers: by method and key; None is shown where a method has none.
        leads: by the first of a key, who leads by it; the rest of the key is the score, where there are several.

    Returns:
        The table.
    """
    values: dict[str, list[Number]] = {
        method: [Estimate(*row[key], 1).scaled(factor) if key in row else None for key, (_, factor) in shown.items()]
        for method, row in numbers.items()
    }
    places = list(shown)
    best = {
        (method, places.index((*key, *score)))
        for key, found in leads.items()
        for method, *score in found.clear
        if (*key, *score) in shown
    }
    return make_table(title, caption, [column for column, _ in shown.values()], values, best=best)


# --- mola evaluate ------------------------------------------------------------------------------------------------------


def evaluation_tables(result: Evaluation) -> list[Table]:
    """In distribution, and against each set of outliers."""
    return [_test_data(result), *(table for name in result.outside for table in _outside(result, name))]


def _test_data(result: Evaluation) -> Table:
    caption = (
        f"{counted(result.count, 'input')} of {result.test}, with standard errors: how far chance alone moves a number on so many "
        f"inputs. {BOLD.format('')} NLL: log loss. ECE: expected calibration error, 15 bins."
    )
    shown: Columns = {
        ("accuracy",): (Column("accuracy %", better="high", digits=2), 100),
        ("nll",): (Column("NLL", better="low", digits=4), 1),
        ("brier",): (Column("Brier", better="low", digits=4), 1),
        ("ece",): (Column("ECE %", better="low", digits=2), 100),
        ("confidence",): (Column("mean conf. %", digits=2), 100),
    }
    numbers: dict[str, dict[Key, Found]] = {
        method: {(name,): (value, one.errors[name]) for name, value in one.scores.items()}
        for method, one in result.methods.items()
    }
    return _table("On the test data", caption, shown, numbers, {(name,): one for name, one in result.leads.items()})


def _outside(result: Evaluation, name: str) -> tuple[Table, Table]:
    """Mean confidence and AUROC; and, as both would be too wide side by side, false positives."""
    outside = {method: one.outside[name] for method, one in result.methods.items()}
    leads: dict[Key, Lead] = {(what,): one for what, one in result.outside_leads[name].items()}
    numbers: dict[str, dict[Key, Found]] = {
        method: {("confidence",): (one.confidence, one.confidence_error)} for method, one in outside.items()
    }
    for method, one in outside.items():
        for score, found in one.scores.items():
            numbers[method]["auroc", score] = (found.auroc, found.auroc_error)
            numbers[method]["fpr95", score] = (found.fpr95, found.fpr95_error)
    title = short(name, result.outside)
    caption = (
        f"{counted(next(iter(outside.values())).count, 'input')} of {name}, with standard errors. MMC: mean confidence in them. "
        f"AUROC: how well a score tells them from the test data; 50 is guessing. Every method is shown by every score that it has; "
        f"energy and largest logit come from the logits alone, so LLLA has MAP's and MoLA has the ensemble's. "
        f"{BOLD.format(', by whichever score,')}"
    )
    sure: Columns = {("confidence",): (Column("MMC %", better="low"), 100)}
    areas = _score_columns(numbers, "auroc", Column("", "AUROC %", "high"))
    rates = _score_columns(numbers, "fpr95", Column("", "FPR95 %", "low"))
    below = "FPR95: outliers that pass where 95 % of the test data do. Errors and bold as above."
    return (
        _table(f"Outliers: {title}", caption, sure | areas, numbers, leads),
        _table(f"Outliers that pass: {title}", below, rates, numbers, leads),
    )


def _score_columns(numbers: Mapping[str, Mapping[Key, Found]], what: str, like: Column) -> Columns:
    """A column for each score that a method has."""
    errors = [
        100 * error if error is not None else 1.0
        for row in numbers.values()
        for key, (_, error) in row.items()
        if key[0] == what
    ]
    # A second digit means something where all errors are below a tenth of a point.
    digits = 2 if all(error < 0.1 for error in errors) else 1
    return {
        (what, score): (Column(SCORE_NAMES[score], like.group, like.better, digits), 100)
        for score in SCORES
        if any((what, score) in row for row in numbers.values())
    }


def worst_classes(result: Evaluation) -> list[str]:
    """Classes of the test data, those that the posterior is wrong about most often first."""
    found = result.methods[result.own].classes
    return sorted(found, key=lambda name: (found[name].accuracy, -found[name].count))


def class_table(result: Evaluation, most: int | None = None) -> Table:
    """Every class, or the worst of them: how many inputs, how often right, how sure.

    Args:
        result: the comparison.
        most: how many rows; None is all.

    Returns:
        The table, worst classes first.
    """
    methods, order = [result.baseline, result.own], worst_classes(result)
    columns = [Column("inputs", digits=0)]
    columns += [Column(method, group) for group in ("accuracy %", "mean conf. %") for method in methods]
    values: dict[str, list[Number]] = {}
    for name in order[:most]:
        found = [result.methods[method].classes[name] for method in methods]
        values[name] = [
            float(found[0].count),
            *(100 * one.accuracy for one in found),
            *(100 * one.confidence for one in found),
        ]
    title = "Class by class" if len(values) == len(order) else f"The worst {len(values)} of {len(order)} classes"
    least = min(result.methods[result.own].classes[name].count for name in values)
    caption = (
        f"Classes that {result.own} gets wrong most often first. Mean confidence far above accuracy: overconfident there. A class of "
        f"{counted(least, 'input')} can be off by {100 * 0.5 / least**0.5:.0f} points by chance."
    )
    return make_table(title, caption, columns, values)


# --- the demo -----------------------------------------------------------------------------------------------------------

TABLE_ANGLES = (15, 30, 45)


def demo_tables(result: DemoResult) -> list[Table]:
    """In distribution, under rotation, and against outliers: by confidence, and by every score."""
    return [_test_digits(result), _rotated(result), _outliers(result), _scores(result)]


def _labelled(result: DemoResult, angles: tuple[int, ...]) -> dict[str, dict[Key, Found]]:
    """By method, metric and angle."""
    return {
        method: {
            (score, f"{angle}°"): (getattr(found, score), error)
            for angle in angles
            for found in [result.digits.rotated[angle][method]]
            for score, error in found.errors.items()
        }
        for method in METHODS
    }


def _leads(found: Mapping[Any, Mapping[str, Lead]], unit: str = "") -> dict[Key, Lead]:
    return {(what, f"{place}{unit}"): one for place, leads in found.items() for what, one in leads.items()}


def _test_digits(result: DemoResult) -> Table:
    shown: Columns = {
        ("accuracy", "0°"): (Column("accuracy %"), 100),
        ("nll", "0°"): (Column("NLL", better="low", digits=3), 1),
        ("brier", "0°"): (Column("Brier", better="low", digits=3), 1),
        ("ece", "0°"): (Column("ECE %", better="low"), 100),
        ("confidence", "0°"): (Column("mean conf. %"), 100),
    }
    caption = (
        f"{result.digits.sizes['test']} test digits, with standard errors. NLL: log loss. ECE: expected calibration error, 15 bins. "
        f"{BOLD.format('')}"
    )
    return _table("In distribution", caption, shown, _labelled(result, (0,)), _leads(result.digits.leads, "°"))


def _rotated(result: DemoResult) -> Table:
    shown: Columns = {
        (score, f"{angle}°"): (Column(title, f"{angle}°", better, digits), factor)
        for angle in TABLE_ANGLES
        for score, title, better, digits, factor in ROTATED
    }
    caption = f"The test digits, turned counter-clockwise. MAP and LLLA are the first network alone. {BOLD.format('')}"
    return _table("Under rotation", caption, shown, _labelled(result, TABLE_ANGLES), _leads(result.digits.leads, "°"))


ROTATED: tuple[tuple[str, str, Literal["low"] | None, int, float], ...] = (
    ("accuracy", "acc. %", None, 1, 100),
    ("nll", "NLL", "low", 2, 1),
    ("ece", "ECE %", "low", 1, 100),
)


def _outliers(result: DemoResult) -> Table:
    detection = result.digits.detection
    shown: Columns = {
        key: column
        for kind in detection
        for key, column in {
            ("confidence", kind): (Column("MMC", kind, "low"), 100.0),
            ("auroc", kind): (Column("AUROC", kind, "high"), 100.0),
        }.items()
    }
    numbers: dict[str, dict[Key, Found]] = {
        method: {
            key: found
            for kind, by_method in detection.items()
            for key, found in {
                ("confidence", kind): (by_method[method].confidence, by_method[method].confidence_error),
                ("auroc", kind): by_method[method].scores["max probability"],
            }.items()
        }
        for method in METHODS
    }
    caption = (
        f"In %. MMC: mean confidence. AUROC: how well outliers are told from test digits by low confidence; 50 is guessing. "
        f"{BOLD.format('')}"
    )
    leads = _leads(result.digits.detection_leads)
    return _table("Out of distribution, by confidence", caption, shown, numbers, leads)


def _scores(result: DemoResult) -> Table:
    detection, leads = result.digits.detection, result.digits.detection_leads
    rows = [(method, score) for method, found in next(iter(detection.values())).items() for score in found.scores]
    values: dict[str, list[Number]] = {
        f"{method}, {score}": [Estimate(*found[method].scores[score], 1).scaled(100) for found in detection.values()]
        for method, score in rows
    }
    best = {(", ".join(name), place) for place, kind in enumerate(detection) for name in leads[kind]["any"].clear}
    caption = (
        f"AUROC in %, every method by every score that it has. Energy and maximum logit come from the logits alone, so LLLA has "
        f"MAP's and MoLA has DE's; the ood score reads the direction of the features and not their length. "
        f"{BOLD.format(', by whichever score,')}"
    )
    columns = [Column(kind, better="high") for kind in detection]
    return make_table("Out of distribution, by every score", caption, columns, values, best=best)
