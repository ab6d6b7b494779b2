"""Figures of confidence: reliability diagrams, and histograms of outliers over those of the test data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mola.compare.record import Comparison, Record, SetInfo
from mola.compare.report.estimate import On, at_level, estimate
from mola.compare.report.single_run_tables import SCORE_NAMES
from mola.compare.report.style import INK, Axes, Figure, Shape, canvas, colours, explain, quiet_axes, strokes
from mola.compare.tally import ALL_SCORES
from mola.reliability import Curve, draw_reliability

LEGEND_ROW = 0.17
"""Inches that a row of the legend takes."""

MOST_SETS = 4
"""Sets of outliers that are drawn."""

Array = NDArray[np.float64]

# --- reliability --------------------------------------------------------------------------------------------------------


def draw_reliability_panels(
    comparison: Comparison, panels: Mapping[str, tuple[float, Sequence[str]]], shape: Shape, digits: int = 1
) -> Figure:
    """Accuracy against confidence, all runs together.

    Args:
        comparison: what was found.
        panels: by title: the level of shift, and the methods.
        shape: of the figure.
        digits: of the calibration errors in the legends.

    Returns:
        The figure.
    """
    legend_rows = -(-max(len(methods) for _, methods in panels.values()) // 2)
    grid = (1, len(panels)) if shape.wide else (len(panels), 1)
    figure, axes = canvas(shape, *grid, 3.6 + LEGEND_ROW * legend_rows)
    runs, drawn = comparison.runs, strokes(comparison.runs)
    for panel, (title, (level, methods)) in zip(axes, panels.items(), strict=True):
        curves: dict[str, Curve] = {}
        for method in methods:
            bins, error = _pooled_bins(runs[method], level), estimate(runs[method], at_level(level, "ece"), 100)
            if bins is not None:
                label = method if error is None else f"{method}, ECE {error.mean:.{digits}f}%"
                curves[label] = (bins, drawn[method])
        quiet_axes(panel)
        draw_reliability(panel, curves, INK)
        panel.set_title(title)
        # Below: inside, it would hide curves of methods that are never unsure.
        panel.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=7.5, handlelength=1.8, columnspacing=1.0
        )
    return figure


def _pooled_bins(records: Sequence[Record], level: float) -> Array | None:
    bins = [
        np.asarray(result.reliability, dtype=np.float64)
        for record in records
        for result in record.labelled.values()
        if result.level == level and result.reliability
    ]
    if not bins or any(one.shape != bins[0].shape for one in bins):
        return None
    return np.sum(bins, axis=0)


# --- histograms ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """Two histograms over the same bins, as shares; the less they overlap, the better outliers are told apart."""

    edges: ArrayLike
    outliers: ArrayLike | None
    test: ArrayLike | None
    words: str
    mean: float | None = None
    """Mean confidence in the outliers."""


def _overlaps(
    cells: Mapping[tuple[str, str], Overlap | None],
    painted: Mapping[str, str],
    shape: Shape,
    *explained: str,
    confidence: bool = True,
) -> Figure:
    # Cells are None where a method has no such score; `painted` are colours of the methods, the rows or the columns.
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    figure, panels = canvas(shape, len(rows), len(columns), 1.4, sharex=confidence, sharey=True)
    for place, (panel, ((row, column), overlap)) in enumerate(zip(panels, cells.items(), strict=True)):
        if place < len(columns):
            panel.set_title(column, pad=17)
        if place % len(columns) == 0:
            panel.set_ylabel(row, fontweight="bold")
        if confidence and place >= len(panels) - len(columns):
            panel.set_xlabel("confidence")
        panel.set_xticks(*([0, 0.5, 1], ["0", "0.5", "1"]) if confidence else ([],))
        # The last bin holds most of the test data; on a square-root scale the others can still be seen.
        panel.set_yscale("function", functions=(np.sqrt, np.square))
        panel.set_ylim(0, 1)
        panel.set_yticks([0, 0.1, 0.5, 1], ["0", "0.1", "0.5", "1"])
        if overlap is None:
            panel.text(0.5, 0.5, "has none", transform=panel.transAxes, ha="center", va="center", fontsize=8)
        else:
            _overlap(panel, overlap, painted[row if row in painted else column])
        if confidence:
            panel.set_xlim(0, 1)
    explain(figure, shape, *explained)
    return figure


def _overlap(panel: Axes, overlap: Overlap, colour: str) -> None:
    quiet_axes(panel)
    if overlap.outliers is not None:
        panel.stairs(overlap.outliers, overlap.edges, color=colour, fill=True, alpha=0.75)
    if overlap.test is not None:
        panel.stairs(overlap.test, overlap.edges, color=INK, linewidth=1.0)
    if overlap.mean is not None:
        panel.axvline(overlap.mean, color=colour, linestyle=(0, (2, 1.5)), linewidth=1.3)
    # Above the panel: inside, it would hide bars of methods that are rarely sure.
    panel.text(0.0, 1.04, overlap.words, transform=panel.transAxes, va="bottom", fontsize=8)


def draw_histograms(comparison: Comparison, sets: Sequence[SetInfo], shape: Shape) -> Figure:
    """For every method: confidence in each set of outliers, over confidence in the test set; all runs together."""
    test = comparison.of_role("test")
    cells: dict[tuple[str, str], Overlap | None] = {
        (method, "" if one in test else one.title): _pooled_overlap(records, test, one)
        for method, records in comparison.runs.items()
        for one in sets or test
    }
    told = ["filled: the data named at the top", "dashed: their mean confidence", "outline: the test data"]
    return _overlaps(cells, colours(comparison.runs), shape, *(told if sets else ["share of the test data"]))


def _pooled_overlap(records: Sequence[Record], test: Sequence[SetInfo], one: SetInfo) -> Overlap:
    confidence, auroc = estimate(records, On(one.name, "confidence")), estimate(records, On(one.name, "auroc"))
    words = [] if confidence is None else [f"mean {confidence.mean:.2f}"]
    words += [] if auroc is None else [f"AUROC {auroc.mean:.3f}"]
    inside = [
        record.labelled[known.name].histogram for record in records for known in test if known.name in record.labelled
    ]
    outside = [record.outliers[one.name].histogram for record in records if one.name in record.outliers]
    edges = np.linspace(0.0, 1.0, len([*outside, *inside, []][0]) + 1)
    mean = confidence.mean if confidence is not None and outside else None
    return Overlap(edges, _shares(outside), _shares(inside), ", ".join(words), mean)


def _shares(histograms: Sequence[Sequence[int]]) -> Array | None:
    total = np.sum(np.asarray(histograms, dtype=np.float64), axis=0) if histograms else np.zeros(0)
    return total / total.sum() if total.sum() > 0 else None


def draw_score_histograms(comparison: Comparison, name: str, shape: Shape) -> Figure:
    """Every method by every score on one set of outliers; on a phone the networks alone beside the posterior."""
    methods = list(comparison.methods) if shape.wide else [comparison.baseline, comparison.own]
    found = {method: comparison.methods[method].outliers[name] for method in methods}
    known = [score for score in ALL_SCORES if any(score in one.scores for one in found.values())]
    pairs = [(method, score) for method in methods for score in known]
    if not shape.wide:
        pairs = [(method, score) for score in known for method in methods]
    cells: dict[tuple[str, str], Overlap | None] = {}
    for method, score in pairs:
        place = (method, SCORE_NAMES[score]) if shape.wide else (SCORE_NAMES[score], method)
        one = found[method].score_histograms.get(score)
        words = f"AUROC {found[method].scores[score]['auroc']:.3f}" if one is not None else ""
        cells[place] = None if one is None else Overlap(one.edges, one.outside, one.inside, words)
    told = (f"filled: {comparison.sets[name].title}", "outline: the test data", "more outlying to the right")
    return _overlaps(cells, colours(comparison.methods), shape, *told, confidence=False)
