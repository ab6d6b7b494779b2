"""Tables of an evaluation."""

from __future__ import annotations

from mola.jobs.evaluation import Evaluation
from mola.report.tables import Column, Number, Table, make_table

__all__ = ["evaluation_tables", "short"]


def short(name: str, names: tuple[str, ...]) -> str:
    """What a set is called where there is little room: the last part of its path, if that tells it from the others."""
    last = name.rstrip("/").split("/")[-1]
    return last if last and sum(other.rstrip("/").split("/")[-1] == last for other in names) == 1 else name


def evaluation_tables(result: Evaluation) -> list[Table]:
    """In distribution and, where there are outliers, out of it."""
    return [_inside(result), *([_outside(result)] if result.outside else [])]


def _inside(result: Evaluation) -> Table:
    accuracy = next(iter(result.methods.values())).scores["accuracy"]
    noise = 100 * (accuracy * (1 - accuracy) / result.count) ** 0.5
    columns = [
        Column("accuracy %", better="high", digits=2),
        Column("NLL", better="low", digits=4),
        Column("Brier", better="low", digits=4),
        Column("ECE %", better="low", digits=2),
        Column("mean conf. %", digits=2),
    ]
    values = {
        name: (
            100 * one.scores["accuracy"],
            one.scores["nll"],
            one.scores["brier"],
            100 * one.scores["ece"],
            100 * one.scores["confidence"],
        )
        for name, one in result.methods.items()
    }
    caption = (
        f"{result.count:,} inputs of {result.test}: chance alone moves an accuracy by {noise:.2f} points. NLL: log loss. ECE: "
        f"expected calibration error, 15 bins."
    )
    return make_table("On the test data", caption, columns, values)


def _outside(result: Evaluation) -> Table:
    columns = [
        column
        for name in result.outside
        for group in [short(name, result.outside)]
        for column in (
            Column("MMC", group=group, better="low"),
            Column("AUROC", group=group, better="high"),
            Column("FPR95", group=group, better="low"),
        )
    ]
    values = {
        method: [
            number
            for one in result_of.outside.values()
            for number in (100 * one.confidence, 100 * one.auroc, 100 * one.fpr95)
        ]
        for method, result_of in result.methods.items()
    }
    aside: dict[str, list[Number]] = {}
    for method, result_of in result.methods.items():
        if all(one.ood_auroc is not None for one in result_of.outside.values()):
            row: list[Number] = []
            for one in result_of.outside.values():
                row += [None, 100 * (one.ood_auroc or 0.0), 100 * (one.ood_fpr95 or 0.0)]
            aside[f"{method}, ood_score"] = row
    caption = (
        "In %. MMC: mean confidence. AUROC: how well outliers are told from the test data by low confidence; 50 is guessing. FPR95: "
        "outliers that pass where 95 % of the test data do. Last rows: by ood_score instead."
    )
    return make_table("Out of distribution", caption, columns, values, aside=aside)
