"""Tables of one run, of `mola evaluate` or of the demo: errors are those of the data, and bold is what leads clearly on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from mola.compare.measured import CLEAR
from mola.compare.record import Comparison, SetInfo, SetResult
from mola.compare.report.estimate import On, estimate
from mola.compare.report.tables import Column, Number, Shown, Table, make_table, records_table
from mola.compare.tally import ALL_SCORES, SCORES
from mola.options import counted

SCORE_NAMES = {
    "max probability": "max prob.",
    "entropy": "entropy",
    "energy": "energy",
    "maximum logit": "max logit",
    "ood score": "ood_score",
    "variance": "variance",
}
"""How scores are called where there is little room."""

FEW = 10
"""Classes in a short list."""

BOLD = (
    f"Bold: leads every other method{{}} by more than {CLEAR:g} standard errors of their difference, which is taken input by "
    f"input; where nothing is bold, no lead is clear."
)


def set_words(one: SetInfo) -> str:
    """How much there is of a set: "300 inputs of test.npz", or "900 labels of 300 inputs of test.npz"."""
    if one.inputs is None:
        return f"{counted(one.count, 'input')} of {one.name}"
    return f"{counted(one.count, one.parts)} of {counted(one.inputs, 'input')} of {one.name}"


def _labelled(name: str, shown: Iterable[tuple[str, Column, float]]) -> list[Shown]:
    return [Shown(column, On(name, metric), factor) for metric, column, factor in shown]


# --- mola evaluate ------------------------------------------------------------------------------------------------------

TEST_DATA = (
    ("accuracy", Column("accuracy %", better="high", digits=2), 100),
    ("nll", Column("NLL", better="low", digits=4), 1),
    ("brier", Column("Brier", better="low", digits=4), 1),
    ("ece", Column("ECE %", better="low", digits=2), 100),
    ("confidence", Column("mean conf. %", digits=2), 100),
)


LABELS = (
    ("auroc", Column("AUROC %", better="high", digits=2), 100),
    ("average_precision", Column("AP %", better="high", digits=2), 100),
    ("miou", Column("mean IoU %", better="high", digits=2), 100),
)
"""Where inputs have several labels, and where outputs are at many positions."""


def evaluation_tables(comparison: Comparison) -> list[Table]:
    """In distribution, and against each set of outliers."""
    test = comparison.test
    caption = (
        f"{set_words(test)}, with standard errors: how far chance alone moves a number on so many "
        f"inputs. {BOLD.format('')} NLL: log loss. ECE: expected calibration error, 15 bins."
    )
    several = [one for one in LABELS if one[0] in comparison.methods[comparison.own].labelled[test.name].metrics]
    if several and several[0][0] == "miou":
        caption += " Mean IoU: intersection over union of each class, averaged."
    elif several:
        caption += (
            " AUROC and average precision (AP): the mean over labels, each by itself; ECE: of the more probable answer."
        )
    shown = _labelled(test.name, (*TEST_DATA, *several))
    inside = records_table("On the test data", caption, comparison.runs, shown, leads=comparison.leads)
    outside = [table for one in comparison.of_role("outlier") for table in outlier_tables(comparison, one)]
    return [inside, *decision_tables(comparison), *outside]


def decision_tables(comparison: Comparison) -> list[Table]:
    """Promises that were made on the validation data, and what the test data show of them."""
    found = comparison.decisions
    if found is None:
        return []
    values: dict[str, list[Number]] = {
        "alarms on usual data": [100 * found.false_alarm_rate, 100 * found.alarms, None],
    }
    for one in found.answers:
        realised, answered = (None if number is None else 100 * number for number in (one.realised, one.answered))
        values[f"wrong answers, at most {one.promised:.0%}"] = [100 * one.promised, realised, answered]
    if found.sets is not None:
        values[f"sets that miss, at most {1 - found.sets.promised:.0%}"] = [
            100 * (1 - found.sets.promised),
            100 * (1 - found.sets.realised),
            None,
        ]
    impossible = [one for one in found.answers if one.threshold is None]
    caption = (
        f"Thresholds were set on the validation data; the test data show what became of the promises, give or take chance. Wrong "
        f"answers: promised with a certainty of {found.answers[0].certainty:.0%}, for inputs that do not ring the alarm."
    )
    caption += f" {impossible[-1].why[:1].upper()}{impossible[-1].why[1:]}" if impossible else ""
    columns = [Column("promised %"), Column("on test data %", digits=2), Column("answered %")]
    tables = [make_table("Decisions", caption, columns, values)]
    if found.sets is not None:
        tables.append(_set_table(found.sets, comparison.own))
    return tables


def _set_table(sets: SetResult, method: str) -> Table:
    worst = sorted(sets.classes, key=lambda name: sets.classes[name])[:FEW]
    values: dict[str, list[Number]] = {name: [100 * sets.classes[name]] for name in worst}
    shares = ", ".join(f"{100 * share:.1f} % {_classes(size)}" for size, share in sets.sizes.items() if share > 0)
    caption = (
        f"Sets of {method} that hold the true class {100 * sets.promised:g} % of the time, over all classes: {sets.size:.2f} classes "
        f"on average; {shares}. Classes that are held least often first; to hold each so often: `mola predict --by-class`."
    )
    return make_table("Prediction sets by class", caption, [Column("held %")], values)


def _classes(size: str) -> str:
    return {"0": "are empty", "1": "hold one", "more": "hold more"}.get(size, f"hold {size}")


def outlier_tables(comparison: Comparison, one: SetInfo, sure: Shown | None = None) -> tuple[Table, Table]:
    """Mean confidence, or what else is shown first, and AUROC; and, as both would be too wide side by side, false positives."""
    told = (
        "MMC: mean confidence in them."
        if sure is None
        else "Standard deviation: mean over them, in the targets' units."
    )
    how = (
        "Every method is shown by every score that it has; energy and largest logit come from the logits alone, so LLLA has MAP's and "
        "MoLA has the ensemble's."
        if sure is None
        else "By the variance of the prediction, which is the same for all inputs where a network alone has constant noise; and by "
        "the outlier score."
    )
    caption = (
        f"{set_words(one)}, with standard errors. {told} AUROC: how well a score tells them from the test data; 50 is guessing. {how} "
        f"{BOLD.format(', by whichever score,')}"
    )
    below = "FPR95: outliers that pass where 95 % of the test data do. Errors and bold as above."
    sure = sure or Shown(Column("MMC %", better="low"), On(one.name, "confidence"), 100)
    areas = _by_score(comparison, one.name, "auroc", Column("", "AUROC %", "high"))
    rates = _by_score(comparison, one.name, "fpr95", Column("", "FPR95 %", "low"))
    runs, leads = comparison.runs, comparison.leads
    return (
        records_table(f"Outliers: {one.title}", caption, runs, [sure, *areas], leads=leads),
        records_table(f"Outliers that pass: {one.title}", below, runs, rates, leads=leads),
    )


def _by_score(comparison: Comparison, name: str, metric: str, like: Column) -> list[Shown]:
    quantities = [On(name, metric, score) for score in ALL_SCORES]
    known = [
        one for on in quantities for runs in comparison.runs.values() if (one := estimate(runs, on, 100)) is not None
    ]
    # A second digit means something where all errors are below a tenth of a point.
    digits = 2 if all(one.error is not None and one.error < 0.1 for one in known) else 1
    return [Shown(replace(like, name=SCORE_NAMES[on.score], digits=digits), on, 100) for on in quantities]


def worst_classes(comparison: Comparison) -> list[str]:
    """Classes of the test data, those that the posterior is wrong about most often first."""
    found = comparison.methods[comparison.own].labelled[comparison.test.name].classes
    return sorted(found, key=lambda name: (found[name].accuracy, -found[name].count))


def class_table(comparison: Comparison, most: int | None = None) -> Table:
    """Every class, or the worst of them: how many inputs, how often right, how sure.

    Args:
        comparison: what was found.
        most: how many rows; None is all.

    Returns:
        The table, worst classes first.
    """
    methods, order = [comparison.baseline, comparison.own], worst_classes(comparison)
    # A label is counted once for each input that has it known, a class once for each position that has it.
    unit = "position" if comparison.test.parts == "position" else "input"
    columns = [Column(f"{unit}s", digits=0)]
    results = [comparison.methods[method].labelled[comparison.test.name].classes for method in methods]
    shown = {"accuracy": "accuracy %", "confidence": "mean conf. %"}
    if any(one.ece is not None for one in results[0].values()):  # labels that are yes or no
        shown |= {"auroc": "AUROC %", "average_precision": "AP %", "ece": "ECE %"}
    if any(one.iou is not None for one in results[0].values()):  # pixels, or tokens
        shown |= {"iou": "IoU %"}
    columns += [Column(method, group) for group in shown.values() for method in methods]

    def percent(value: float | None) -> Number:
        return None if value is None else 100 * value

    values: dict[str, list[Number]] = {
        name: [
            float(results[0][name].count),
            *(percent(getattr(found[name], measure)) for measure in shown for found in results),
        ]
        for name in order[:most]
    }
    one, many = ("class", "classes") if "auroc" not in shown else ("label", "labels")
    title = (
        f"{one.capitalize()} by {one}"
        if len(values) == len(order)
        else f"The worst {len(values)} of {len(order)} {many}"
    )
    least = min(results[0][name].count for name in values)
    caption = (
        f"{many.capitalize()} that {comparison.own} gets wrong most often first. Mean confidence far above accuracy: overconfident "
        f"there. A {one} of {counted(least, unit)} can be off by {100 * 0.5 / least**0.5:.0f} points by chance."
    )
    return make_table(title, caption, columns, values)


# --- the demo -----------------------------------------------------------------------------------------------------------

TEST_DIGITS = (
    ("accuracy", Column("accuracy %"), 100),
    ("nll", Column("NLL", better="low", digits=3), 1),
    ("brier", Column("Brier", better="low", digits=3), 1),
    ("ece", Column("ECE %", better="low"), 100),
    ("confidence", Column("mean conf. %"), 100),
)

TABLE_ANGLES = (15, 30, 45)


def demo_tables(comparison: Comparison) -> list[Table]:
    """In distribution, under rotation, and against outliers: by confidence, and by every score."""
    test, outliers, runs, leads = comparison.test, comparison.of_role("outlier"), comparison.runs, comparison.leads
    turned = [one for one in comparison.of_role("shift") if one.level in TABLE_ANGLES]
    inside = (
        f"{test.count} test digits, with standard errors. NLL: log loss. ECE: expected calibration error, 15 bins. "
        f"{BOLD.format('')}"
    )
    rotated = [
        Shown(Column(title, f"{one.level:g}°", better, digits), On(one.name, metric), factor)
        for one in turned
        for metric, title, better, digits, factor in ROTATED
    ]
    below = f"The test digits, turned counter-clockwise. MAP and LLLA are the first network alone. {BOLD.format('')}"
    sure = [
        Shown(Column(title, one.title, better), On(one.name, metric), 100)
        for one in outliers
        for metric, title, better in DETECTED
    ]
    outside = (
        f"In %. MMC: mean confidence. AUROC: how well outliers are told from test digits by low confidence; 50 is guessing. "
        f"{BOLD.format('')}"
    )
    by_confidence = {one.name: {**leads[one.name], "auroc": leads[one.name]["max probability"]} for one in outliers}
    return [
        records_table("In distribution", inside, runs, _labelled(test.name, TEST_DIGITS), leads=leads),
        records_table("Under rotation", below, runs, rotated, leads=leads),
        records_table("Out of distribution, by confidence", outside, runs, sure, leads=by_confidence),
        _every_score(comparison),
    ]


ROTATED: tuple[tuple[str, str, Literal["low"] | None, int, float], ...] = (
    ("accuracy", "acc. %", None, 1, 100),
    ("nll", "NLL", "low", 2, 1),
    ("ece", "ECE %", "low", 1, 100),
)

DETECTED: tuple[tuple[str, str, Literal["low", "high"]], ...] = (
    ("confidence", "MMC", "low"),
    ("auroc", "AUROC", "high"),
)


def _every_score(comparison: Comparison) -> Table:
    sets, leads = comparison.of_role("outlier"), comparison.leads
    rows = [
        (method, score)
        for method, record in comparison.methods.items()
        for score in SCORES
        if score in record.outliers[sets[0].name].scores
    ]
    values: dict[str, list[Number]] = {
        f"{method}, {score}": [estimate(comparison.runs[method], On(one.name, "auroc", score), 100) for one in sets]
        for method, score in rows
    }
    best = {(", ".join(name), place) for place, one in enumerate(sets) for name in leads[one.name]["auroc"].clear}
    caption = (
        f"AUROC in %, every method by every score that it has. Energy and maximum logit come from the logits alone, so LLLA has "
        f"MAP's and MoLA has DE's; the ood score is made of far field, energy and distance from the training classes. "
        f"{BOLD.format(', by whichever score,')}"
    )
    columns = [Column(one.title, better="high") for one in sets]
    return make_table("Out of distribution, by every score", caption, columns, values, best=best)
