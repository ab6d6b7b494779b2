"""Reliability diagrams and histograms of confidence, pooled over runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mola.compare.record import CONFIDENCE_BINS, Record
from mola.compare.report.style import INK, Axes, Figure, Shape, canvas, explain, quiet_axes
from mola.compare.report.suites.palette import colours, strokes
from mola.compare.report.suites.quantities import at_level, estimate, mmc, outlier_score
from mola.compare.report.suites.reading import SetInfo, SuiteResults

__all__ = ["draw_histograms", "draw_reliability", "reliability_levels"]

FEWEST = 0.001
"""Share of the predictions that a bin must hold to be drawn in a reliability diagram."""

LEGEND_ROW = 0.17
"""Inches that a row of the legend takes."""

Array = NDArray[np.float64]


def reliability_levels(suite: SuiteResults) -> list[float]:
    """The test set, the middle of the shift and its end."""
    levels = suite.levels()
    return sorted({levels[0], levels[len(levels) // 2], levels[-1]})


def draw_reliability(suite: SuiteResults, shape: Shape) -> Figure:
    """Accuracy against confidence: on the test set, and shifted."""
    levels = reliability_levels(suite)
    figure, panels = canvas(
        shape, *((1, len(levels)) if shape.wide else (len(levels), 1)), 3.6 + LEGEND_ROW * -(-len(suite.main) // 2)
    )
    drawn = strokes(suite.main)
    for panel, level in zip(panels, levels, strict=True):
        quiet_axes(panel)
        panel.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        for method, records in suite.main.items():
            bins = _pooled_bins(records, level)
            error = estimate(records, at_level(level, "ece"), 100)
            if bins is None:
                continue
            count, confidence, correct = bins[bins[:, 0] >= max(5.0, FEWEST * bins[:, 0].sum())].T
            label = method if error is None else f"{method}, ECE {error.mean:.1f}%"
            panel.plot(confidence / count, correct / count, linewidth=1.2, label=label, **drawn[method])
            area = 6 + 160 * count / count.sum()
            colour = drawn[method]["color"]
            panel.scatter(confidence / count, correct / count, s=area, color=colour, alpha=0.75, linewidths=0, zorder=3)
        panel.set_title("test" if level == levels[0] else f"{suite.shift_title}, {level:g}")
        panel.set_xlabel("confidence")
        panel.set_ylabel("accuracy")
        panel.set_xlim(0, 1.03)
        panel.set_ylim(0, 1.03)
        # At the top: what the square leaves of its room is then left for the legend.
        panel.set_aspect("equal", anchor="N")
        # Below: inside, it would hide curves of methods that are never unsure.
        panel.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=7.5, handlelength=1.8, columnspacing=1.0
        )
    return figure


def _pooled_bins(records: Sequence[Record], level: float) -> Array | None:
    """Sums over runs, and over sets of the same level: counts, confidences, correct predictions."""
    bins = [
        np.asarray(result.reliability, dtype=np.float64)
        for record in records
        for result in record.labelled.values()
        if result.level == level and result.reliability
    ]
    if not bins or any(one.shape != bins[0].shape for one in bins):
        return None
    return np.sum(bins, axis=0)


def draw_histograms(suite: SuiteResults, shape: Shape) -> Figure:
    """For every method and set of outliers: confidence in them, over confidence in the test set."""
    outliers = suite.of_role("outlier")
    sets = outliers[:4] if shape.wide else [outliers[0], outliers[-1]][: len(outliers)]
    methods = list(suite.main)
    figure, panels = canvas(shape, len(methods), len(sets), 1.5, sharex=True, sharey=True)
    painted = colours(methods)
    for row, method in enumerate(methods):
        for column, one in enumerate(sets):
            panel = panels[row * len(sets) + column]
            _histogram_panel(panel, suite.main[method], one, painted[method])
            if row == 0:
                panel.set_title(one.title, pad=17)
            if column == 0:
                panel.set_ylabel(method, fontweight="bold")
            if row == len(methods) - 1:
                panel.set_xlabel("confidence")
    explain(
        figure,
        shape,
        "filled: the outliers named at the top",
        "dashed: their mean confidence",
        "outline: the test data",
    )
    return figure


def _histogram_panel(panel: Axes, records: Sequence[Record], one: SetInfo, colour: str) -> None:
    quiet_axes(panel)
    edges = np.linspace(0.0, 1.0, CONFIDENCE_BINS + 1)
    filled = _shares([record.outliers[one.name].histogram for record in records if one.name in record.outliers])
    outline = _shares([record.labelled["test"].histogram for record in records if "test" in record.labelled])
    if filled is not None:
        panel.stairs(filled, edges, color=colour, fill=True, alpha=0.75)
    if outline is not None:
        panel.stairs(outline, edges, color=INK, linewidth=1.0)
    confidence, auroc = estimate(records, mmc(one.name)), estimate(records, outlier_score(one.name))
    words = []
    if confidence is not None:
        panel.axvline(confidence.mean, color=colour, linestyle=(0, (2, 1.5)), linewidth=1.3)
        words.append(f"mean {confidence.mean:.2f}")
    if auroc is not None:
        words.append(f"AUROC {auroc.mean:.3f}")
    # Above the panel: inside, it would hide bars of methods that are rarely sure.
    panel.text(0.0, 1.04, ", ".join(words), transform=panel.transAxes, va="bottom", fontsize=8)
    panel.set_xlim(0, 1)
    panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    # The last bin holds most of the test data; on a square-root scale the others can still be seen.
    panel.set_yscale("function", functions=(np.sqrt, np.square))
    panel.set_ylim(0, 1)
    panel.set_yticks([0, 0.1, 0.5, 1], ["0", "0.1", "0.5", "1"])


def _shares(histograms: Sequence[Sequence[int]]) -> Array | None:
    total = np.sum(np.asarray(histograms, dtype=np.float64), axis=0) if histograms else np.zeros(0)
    return total / total.sum() if total.sum() > 0 else None
