"""Tables of an evaluation: every method by the same numbers, with their errors, and bold only where a lead is clear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mola.compare.evaluation import Evaluation
from mola.compare.report.estimate import Estimate
from mola.compare.report.tables import BOLD, Column, Number, Table, make_table
from mola.compare.tally import SCORES
from mola.options import counted

__all__ = ["FEW", "SCORE_NAMES", "class_table", "evaluation_tables", "short", "worst_classes"]

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


def short(name: str, names: tuple[str, ...]) -> str:
    """What a set is called where there is little room: the last part of its path, if that tells it from the others."""
    last = name.rstrip("/").split("/")[-1]
    return last if last and sum(other.rstrip("/").split("/")[-1] == last for other in names) == 1 else name


def evaluation_tables(result: Evaluation) -> list[Table]:
    """In distribution, and against each set of outliers."""
    return [_inside(result), *(table for name in result.outside for table in _outside(result, name))]


def _number(value: float, error: float | None, factor: float = 1.0) -> Estimate:
    return Estimate(value, error, 1).scaled(factor)


def _inside(result: Evaluation) -> Table:
    columns = {
        "accuracy": (Column("accuracy %", better="high", digits=2), 100),
        "nll": (Column("NLL", better="low", digits=4), 1),
        "brier": (Column("Brier", better="low", digits=4), 1),
        "ece": (Column("ECE %", better="low", digits=2), 100),
        "confidence": (Column("mean conf. %", digits=2), 100),
    }
    values = {
        method: [_number(one.scores[name], one.errors[name], factor) for name, (_, factor) in columns.items()]
        for method, one in result.methods.items()
    }
    places = list(columns)
    best = {(method, places.index(name)) for name, found in result.leads.items() for (method,) in found.clear}
    caption = (
        f"{counted(result.count, 'input')} of {result.test}, with standard errors: how far chance alone moves a number on so many "
        f"inputs. {BOLD.format('')} NLL: log loss. ECE: expected calibration error, 15 bins."
    )
    return make_table("On the test data", caption, [column for column, _ in columns.values()], values, best=best)


def _outside(result: Evaluation, name: str) -> tuple[Table, Table]:
    """Mean confidence and AUROC; and, as both would be too wide side by side, false positives."""
    outside = {method: one.outside[name] for method, one in result.methods.items()}
    leads, title = result.outside_leads[name], short(name, result.outside)
    sure = {method: [_number(one.confidence, one.confidence_error, 100)] for method, one in outside.items()}
    areas = _by_score(result, name, "auroc")
    rates = _by_score(result, name, "fpr95")
    columns = _score_columns(areas, group="AUROC %", better="high")
    count = next(iter(outside.values())).count
    caption = (
        f"{counted(count, 'input')} of {name}, with standard errors. MMC: mean confidence in them. AUROC: how well a score tells them "
        f"from the test data; 50 is guessing. Every method is shown by every score that it has; energy and largest logit come from "
        f"the logits alone, so LLLA has MAP's and MoLA has the ensemble's. {BOLD.format(', by whichever score,')}"
    )
    apart = make_table(
        f"Outliers: {title}",
        caption,
        [Column("MMC %", better="low"), *columns],
        {method: [*sure[method], *areas[method].values()] for method in outside},
        best={(method, 0) for (method,) in leads["confidence"].clear}
        | {(method, 1 + list(areas[method]).index(score)) for method, score in leads["auroc"].clear},
    )
    passing = make_table(
        f"Outliers that pass: {title}",
        "FPR95: outliers that pass where 95 % of the test data do. Errors and bold as above.",
        _score_columns(rates, group="FPR95 %", better="low"),
        {method: list(row.values()) for method, row in rates.items()},
        best={(method, list(rates[method]).index(score)) for method, score in leads["fpr95"].clear},
    )
    return apart, passing


def _by_score(result: Evaluation, name: str, what: str) -> dict[str, dict[str, Estimate | None]]:
    """A number by method and score, in %: None where a method has no such score; the same scores for all."""
    found = {
        method: {score: vars(one) for score, one in result_of.outside[name].scores.items()}
        for method, result_of in result.methods.items()
    }
    known = [score for score in SCORES if any(score in scores for scores in found.values())]
    return {
        method: {
            score: _number(scores[score][what], scores[score][f"{what}_error"], 100) if score in scores else None
            for score in known
        }
        for method, scores in found.items()
    }


def _score_columns(
    numbers: Mapping[str, Mapping[str, Estimate | None]], group: str, better: Literal["low", "high"]
) -> list[Column]:
    known = [one for row in numbers.values() for one in row.values() if one is not None]
    # A second digit means something where all errors are below a tenth of a point.
    fine = 2 if all(one.error is not None and one.error < 0.1 for one in known) else 1
    return [
        Column(SCORE_NAMES[score], group=group, better=better, digits=fine) for score in next(iter(numbers.values()))
    ]


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
    methods = [result.baseline, result.own]
    order = worst_classes(result)
    shown = order[:most]
    columns = [Column("inputs", digits=0)]
    columns += [Column(method, group="accuracy %") for method in methods]
    columns += [Column(method, group="mean conf. %") for method in methods]
    values = {name: _class_row(result, name, methods) for name in shown}
    title = "Class by class" if len(shown) == len(order) else f"The worst {len(shown)} of {len(order)} classes"
    least = min(result.methods[result.own].classes[name].count for name in shown)
    caption = (
        f"Classes that {result.own} gets wrong most often first. Mean confidence far above accuracy: overconfident there. A class of "
        f"{counted(least, 'input')} can be off by {100 * 0.5 / least**0.5:.0f} points by chance."
    )
    return make_table(title, caption, columns, values)


def _class_row(result: Evaluation, name: str, methods: list[str]) -> list[Number]:
    found: list[Mapping[str, float]] = [vars(result.methods[method].classes[name]) for method in methods]
    return [
        float(found[0]["count"]),
        *(100 * one["accuracy"] for one in found),
        *(100 * one["confidence"] for one in found),
    ]
