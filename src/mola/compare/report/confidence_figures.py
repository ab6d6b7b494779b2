"""Figures of confidence: reliability diagrams, and histograms of outliers over those of the test data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mola.compare.record import Comparison, Record, SetInfo
from mola.compare.report.numbers import BY_CONFIDENCE, Numbers, On
from mola.compare.report.single_run_tables import SCORE_NAMES
from mola.compare.report.style import INK, Axes, Figure, canvas, colours, quiet_axes, shared_legend, strokes
from mola.compare.tally import ALL_SCORES
from mola.reliability import Curve, draw_reliability

MOST_SETS = 4
"""Sets of outliers in a figure."""

Array = NDArray[np.float64]


def draw_reliability_panels(comparison: Comparison, panels: Mapping[str, tuple[float, Sequence[str]]]) -> Figure:
    """Accuracy over confidence, all runs together.

    Args:
        comparison: the records.
        panels: by title, the level of shift and the methods.
    """
    figure, axes = canvas(-(-len(panels) // 2), 2, 3.4)
    drawn = strokes(comparison.runs)
    for panel, (title, (level, methods)) in zip(axes, panels.items(), strict=False):
        found = {method: _pooled_bins(comparison.runs[method], level) for method in methods}
        curves: dict[str, Curve] = {name: (bins, drawn[name]) for name, bins in found.items() if bins is not None}
        quiet_axes(panel)
        draw_reliability(panel, curves, INK)
        panel.set_title(title, fontsize=9)
    shared_legend(figure, axes, len(panels))
    return figure


def _pooled_bins(records: Sequence[Record], level: float) -> Array | None:
    bins = [
        np.asarray(result.reliability, dtype=np.float64)
        for record in records
        for result in record.labelled.values()
        if result.level == level and result.reliability
    ]
    return np.sum(bins, axis=0) if bins and all(one.shape == bins[0].shape for one in bins) else None


@dataclass(frozen=True)
class Overlap:
    """Two histograms over the same bins, as shares; less overlap separates outliers better."""

    edges: ArrayLike
    outliers: ArrayLike | None
    test: ArrayLike | None
    words: str
    mean: float | None = None
    """Mean confidence in the outliers."""


def _overlaps(
    cells: Mapping[tuple[str, str], Overlap | None], painted: Mapping[str, str], explained: str, *, confidence: bool
) -> Figure:
    # Cells by method and column; None where a method has no such score.
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    figure, panels = canvas(len(rows), len(columns), 1.35, sharex=confidence, sharey=True)
    for place, (panel, ((row, column), overlap)) in enumerate(zip(panels, cells.items(), strict=True)):
        if place < len(columns):
            panel.set_title(column, pad=15, fontsize=9)
        if place % len(columns) == 0:
            panel.set_ylabel(row, fontweight="bold", fontsize=8)
        if confidence and place >= len(panels) - len(columns):
            panel.set_xlabel("confidence")
        panel.set_xticks(*([0, 0.5, 1], ["0", "0.5", "1"]) if confidence else ([],))
        # Most of the test data are in the last bin; a square-root scale shows the others, too.
        panel.set_yscale("function", functions=(np.sqrt, np.square))
        panel.set_ylim(0, 1)
        panel.set_yticks([0, 0.1, 0.5, 1], ["0", "0.1", "0.5", "1"])
        if overlap is None:
            panel.text(0.5, 0.5, "no such score", transform=panel.transAxes, ha="center", va="center", fontsize=7)
        else:
            _draw_overlap(panel, overlap, painted[row])
        if confidence:
            panel.set_xlim(0, 1)
    figure.supxlabel(explained, fontsize=8)
    return figure


def _draw_overlap(panel: Axes, overlap: Overlap, colour: str) -> None:
    quiet_axes(panel)
    if overlap.outliers is not None:
        panel.stairs(overlap.outliers, overlap.edges, color=colour, fill=True, alpha=0.75)
    if overlap.test is not None:
        panel.stairs(overlap.test, overlap.edges, color=INK, linewidth=1.0)
    if overlap.mean is not None:
        panel.axvline(overlap.mean, color=colour, linestyle=(0, (2, 1.5)), linewidth=1.3)
    # Above the panel: inside, it would hide bars.
    panel.text(0.0, 1.04, overlap.words, transform=panel.transAxes, va="bottom", fontsize=7)


def draw_histograms(comparison: Comparison, sets: Sequence[SetInfo]) -> Figure:
    """For every method: confidence in each set of outliers, over confidence in the test set; all runs together."""
    test, numbers = comparison.of_role("test"), Numbers(comparison.runs)
    cells: dict[tuple[str, str], Overlap | None] = {
        (method, "" if one in test else one.title): _pooled_overlap(numbers, method, records, test, one)
        for method, records in comparison.runs.items()
        for one in sets or test
    }
    explained = "filled: outliers \N{MIDDLE DOT} dashed: their mean confidence \N{MIDDLE DOT} outline: test data"
    return _overlaps(cells, colours(comparison.runs), explained if sets else "share of the test data", confidence=True)


def _pooled_overlap(
    numbers: Numbers, method: str, records: Sequence[Record], test: Sequence[SetInfo], one: SetInfo
) -> Overlap:
    confidence, auroc = (
        numbers(on)[method] for on in (On(one.name, "confidence"), On(one.name, "auroc", BY_CONFIDENCE))
    )
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


def draw_score_histograms(comparison: Comparison, name: str) -> Figure:
    """Every method by every score on one set of outliers."""
    found = {method: record.outliers[name] for method, record in comparison.methods.items()}
    known = [score for score in ALL_SCORES if any(score in one.scores for one in found.values())]
    cells: dict[tuple[str, str], Overlap | None] = {}
    for method, result in found.items():
        for score in known:
            one = result.score_histograms.get(score)
            words = "" if one is None else f"AUROC {result.scores[score]['auroc']:.3f}"
            cells[method, SCORE_NAMES[score]] = (
                None if one is None else Overlap(one.edges, one.outside, one.inside, words)
            )
    title = comparison.sets[name].title
    explained = f"filled: {title} \N{MIDDLE DOT} outline: the test data \N{MIDDLE DOT} more outlying to the right"
    return _overlaps(cells, colours(comparison.methods), explained, confidence=False)
