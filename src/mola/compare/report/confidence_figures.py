"""Figures of confidence: reliability diagrams, and histograms of outliers over those of the test data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mola.compare.demo_result import METHODS, TEST, DemoResult
from mola.compare.evaluation import CONFIDENCE_BINS as EVALUATION_BINS
from mola.compare.evaluation import Evaluation
from mola.compare.record import CONFIDENCE_BINS, Record
from mola.compare.report.estimate import at_level, estimate, mmc, outlier_score
from mola.compare.report.reading import SetInfo, SuiteResults
from mola.compare.report.single_run_tables import SCORE_NAMES, short
from mola.compare.report.style import INK, Axes, Figure, Shape, canvas, colours, explain, quiet_axes, strokes
from mola.compare.tally import SCORES
from mola.reliability import Curve, draw_reliability

__all__ = [
    "demo_histograms",
    "demo_reliability",
    "evaluation_histograms",
    "evaluation_reliability",
    "evaluation_scores",
    "suite_histograms",
    "suite_reliability",
]

LEGEND_ROW = 0.17
"""Inches that a row of the legend takes."""

MOST_SETS = 4
"""Sets of outliers that are drawn."""

Array = NDArray[np.float64]

# --- reliability --------------------------------------------------------------------------------------------------------


def _reliability(panels: Mapping[str, Mapping[str, Curve]], shape: Shape) -> Figure:
    """Accuracy against confidence, a panel for each title."""
    rows = -(-max(len(curves) for curves in panels.values()) // 2)
    grid = (1, len(panels)) if shape.wide else (len(panels), 1)
    figure, axes = canvas(shape, *grid, 3.6 + LEGEND_ROW * rows)
    for panel, (title, curves) in zip(axes, panels.items(), strict=True):
        quiet_axes(panel)
        draw_reliability(panel, curves, INK)
        panel.set_title(title)
        # Below: inside, it would hide curves of methods that are never unsure.
        panel.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=7.5, handlelength=1.8, columnspacing=1.0
        )
    return figure


def suite_reliability(suite: SuiteResults, shape: Shape) -> Figure:
    """On the test set, in the middle of the shift and at its end; all runs together."""
    levels, drawn = suite.levels(), strokes(suite.main)
    panels: dict[str, dict[str, Curve]] = {}
    for level in sorted({levels[0], levels[len(levels) // 2], levels[-1]}):
        curves: dict[str, Curve] = {}
        for method, records in suite.main.items():
            bins, error = _pooled_bins(records, level), estimate(records, at_level(level, "ece"), 100)
            if bins is not None:
                label = method if error is None else f"{method}, ECE {error.mean:.1f}%"
                curves[label] = (bins, drawn[method])
        panels["test" if level == levels[0] else f"{suite.shift_title}, {level:g}"] = curves
    return _reliability(panels, shape)


def _pooled_bins(records: Sequence[Record], level: float) -> Array | None:
    """Sums over runs, and over sets of the same level."""
    bins = [
        np.asarray(result.reliability, dtype=np.float64)
        for record in records
        for result in record.labelled.values()
        if result.level == level and result.reliability
    ]
    if not bins or any(one.shape != bins[0].shape for one in bins):
        return None
    return np.sum(bins, axis=0)


def evaluation_reliability(result: Evaluation, shape: Shape) -> Figure:
    """Plain networks beside Laplace approximations."""
    groups = {
        "networks, and temperatures": [name for name in result.methods if name.startswith(("MAP", "DE"))],
        "with Laplace": [name for name in result.methods if name in ("MAP", "LLLA", "MoLA")],
    }
    drawn, methods = strokes(result.methods), result.methods
    panels: dict[str, dict[str, Curve]] = {
        title: {
            f"{name}, ECE {100 * methods[name].scores['ece']:.2f}%": (methods[name].reliability, drawn[name])
            for name in names
        }
        for title, names in groups.items()
    }
    return _reliability(panels, shape)


def demo_reliability(result: DemoResult, shape: Shape) -> Figure:
    """As the digits are, and rotated."""
    digits, drawn = result.digits, strokes(METHODS)
    panels: dict[str, dict[str, Curve]] = {
        "test digits" if angle == 0 else f"rotated by {angle}°": {
            f"{method}, ECE {100 * digits.rotated[angle][method].ece:.1f}%": (
                digits.reliability[angle][method],
                drawn[method],
            )
            for method in METHODS
        }
        for angle in (0, 15, 30)
    }
    return _reliability(panels, shape)


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
    """A grid of panels.

    Args:
        cells: by row and column; None where a method has no such score.
        painted: colours of the methods, which are either the rows or the columns.
        shape: of the figure.
        explained: how to read it.
        confidence: whether the horizontal axes are confidences, from 0 to 1.

    Returns:
        The figure.
    """
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


def _told(outliers: str, test: str) -> tuple[str, str, str]:
    return f"filled: {outliers}", "dashed: their mean confidence", f"outline: {test}"


def suite_histograms(suite: SuiteResults, shape: Shape) -> Figure:
    """For every method and set of outliers: confidence in them, over confidence in the test set; all runs together."""
    outliers = suite.of_role("outlier")
    sets = outliers[:MOST_SETS] if shape.wide else [outliers[0], outliers[-1]][: len(outliers)]
    cells = {
        (method, one.title): _pooled_overlap(records, one) for method, records in suite.main.items() for one in sets
    }
    return _overlaps(cells, colours(suite.main), shape, *_told("the outliers named at the top", "the test data"))


def _pooled_overlap(records: Sequence[Record], one: SetInfo) -> Overlap:
    confidence, auroc = estimate(records, mmc(one.name)), estimate(records, outlier_score(one.name))
    words = [] if confidence is None else [f"mean {confidence.mean:.2f}"]
    words += [] if auroc is None else [f"AUROC {auroc.mean:.3f}"]
    return Overlap(
        np.linspace(0.0, 1.0, CONFIDENCE_BINS + 1),
        _shares([record.outliers[one.name].histogram for record in records if one.name in record.outliers]),
        _shares([record.labelled["test"].histogram for record in records if "test" in record.labelled]),
        ", ".join(words),
        None if confidence is None else confidence.mean,
    )


def _shares(histograms: Sequence[Sequence[int]]) -> Array | None:
    total = np.sum(np.asarray(histograms, dtype=np.float64), axis=0) if histograms else np.zeros(0)
    return total / total.sum() if total.sum() > 0 else None


def evaluation_histograms(result: Evaluation, shape: Shape) -> Figure:
    """For every method: confidence in the test data, under confidence in each set of outliers."""
    edges, painted = np.linspace(0.0, 1.0, EVALUATION_BINS + 1), colours(result.methods)
    cells: dict[tuple[str, str], Overlap | None] = {}
    for method, one in result.methods.items():
        for name in result.outside[: MOST_SETS if shape.wide else 2]:
            out = one.outside[name]
            words = f"mean {out.confidence:.2f}, AUROC {out.scores['max probability'].auroc:.3f}"
            found = Overlap(edges, out.histogram, one.histogram, words, out.confidence)
            cells[method, short(name, result.outside)] = found
        if not result.outside:
            cells[method, ""] = Overlap(edges, None, one.histogram, f"mean {one.scores['confidence']:.2f}")
    told = _told("the outliers named at the top", "the test data") if result.outside else ("share of the test data",)
    return _overlaps(cells, painted, shape, *told)


def evaluation_scores(result: Evaluation, name: str, shape: Shape) -> Figure:
    """Every method by every score on one set of outliers; on a phone the networks alone beside the posterior."""
    methods = list(result.methods) if shape.wide else [result.baseline, result.own]
    scores = {method: result.methods[method].outside[name].scores for method in methods}
    known = [score for score in SCORES if any(score in found for found in scores.values())]
    pairs = [(method, score) for method in methods for score in known]
    if not shape.wide:
        pairs = [(method, score) for score in known for method in methods]
    cells: dict[tuple[str, str], Overlap | None] = {}
    for method, score in pairs:
        place = (method, SCORE_NAMES[score]) if shape.wide else (SCORE_NAMES[score], method)
        one = scores[method].get(score)
        cells[place] = None if one is None else Overlap(one.edges, one.outside, one.inside, f"AUROC {one.auroc:.3f}")
    told = (f"filled: {short(name, result.outside)}", "outline: the test data", "more outlying to the right")
    return _overlaps(cells, colours(result.methods), shape, *told, confidence=False)


def demo_histograms(result: DemoResult, shape: Shape) -> Figure:
    """For every method: confidence in the test digits, under confidence in patches and in noise, near and far."""
    digits, edges = result.digits, np.linspace(0.0, 1.0, 26)
    near, other, far, *_ = digits.detection
    cells: dict[tuple[str, str], Overlap | None] = {}
    for method in METHODS:
        test, *outliers = (
            np.histogram(digits.confidences[kind][method], edges)[0] / len(digits.confidences[kind][method])
            for kind in (TEST, near, other, far)
        )
        for kind, shares in zip((near, other, far), outliers, strict=True):
            found = digits.detection[kind][method]
            words = f"mean {found.confidence:.2f}, AUROC {found.auroc:.2f}"
            if shape.wide or kind != other:
                cells[method, kind] = Overlap(edges, shares, test, words, found.confidence)
    return _overlaps(cells, colours(METHODS), shape, *_told("the inputs named at the top", "the test digits"))
