"""Figures of confidence: its histograms, its reliability, and how it follows a shift."""

from __future__ import annotations

import numpy as np

from mola.compare.demo_result import METHODS, TEST, Array, DemoResult
from mola.compare.report.style import COLOURS, INK, Axes, Figure, Shape, canvas, explain, quiet_axes

__all__ = ["draw_histograms", "draw_reliability", "draw_rotation"]

BINS = np.linspace(0.0, 1.0, 26)
RELIABILITY_ANGLES = (0, 15, 30)
FEWEST = 5
"""Predictions that a bin must hold to be drawn in a reliability diagram."""


def draw_histograms(result: DemoResult, shape: Shape) -> Figure:
    """For every method and set of outliers: confidence in them, over confidence in the test digits."""
    near, other, far, *_ = result.digits.detection
    sets = [near, other, far] if shape.wide else [near, far]
    cells = (
        [(kind, method) for kind in sets for method in METHODS]
        if shape.wide
        else [(kind, method) for method in METHODS for kind in sets]
    )
    rows, columns = (len(sets), len(METHODS)) if shape.wide else (len(METHODS), len(sets))
    figure, panels = canvas(shape, rows, columns, 1.65, sharex=True, sharey=True)
    for index, (panel, (kind, method)) in enumerate(zip(panels, cells, strict=True)):
        quiet_axes(panel)
        confidences, found = result.digits.confidences, result.digits.detection[kind][method]
        _histogram(panel, confidences[kind][method], color=COLOURS[method], alpha=0.75, fill=True)
        _histogram(panel, confidences[TEST][method], color=INK, fill=False)
        panel.axvline(found.confidence, color=COLOURS[method], linestyle=(0, (2, 1.5)), linewidth=1.3)
        text = f"mean {found.confidence:.2f}\nAUROC {found.auroc:.2f}"
        panel.text(0.05, 0.93, text, transform=panel.transAxes, va="top", fontsize=8)
        row, column = divmod(index, columns)
        if row == 0:
            panel.set_title(method if shape.wide else kind, color=COLOURS[method] if shape.wide else INK)
        if column == 0:
            panel.set_ylabel(kind if shape.wide else method, fontweight="bold")
        if row == rows - 1:
            panel.set_xlabel("confidence")
        panel.set_xlim(0, 1)
        panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        # The last bin holds most of the test digits; on a square-root scale the others can still be seen.
        panel.set_yscale("function", functions=(np.sqrt, np.square))
        panel.set_ylim(0, 1)
        panel.set_yticks([0, 0.1, 0.5, 1], ["0", "0.1", "0.5", "1"])
    named = "at the left" if shape.wide else "at the top"
    explain(
        figure, shape, f"filled: the inputs named {named}", "dashed: their mean confidence", "outline: the test digits"
    )
    return figure


def _histogram(panel: Axes, values: Array, *, color: str, fill: bool, alpha: float = 1.0) -> None:
    share = np.histogram(values, BINS)[0] / len(values)
    panel.stairs(share, BINS, color=color, fill=fill, alpha=alpha, linewidth=1.1)


def draw_reliability(result: DemoResult, shape: Shape) -> Figure:
    """Accuracy against confidence: as the digits are, and rotated."""
    figure, panels = canvas(shape, *((1, 3) if shape.wide else (3, 1)), 3.6)
    for panel, angle in zip(panels, RELIABILITY_ANGLES, strict=True):
        quiet_axes(panel)
        panel.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        for method in METHODS:
            count, confidence, correct = result.digits.reliability[angle][method].T
            # A bin of a few predictions says nothing about accuracy: it is left out here, but not from the ECE.
            enough = count >= FEWEST
            x, y = confidence[enough] / count[enough], correct[enough] / count[enough]
            ece = result.digits.rotated[angle][method].ece
            panel.plot(x, y, color=COLOURS[method], linewidth=1.2, label=f"{method}, ECE {100 * ece:.1f}%")
            area = 8 + 220 * count[enough] / count.sum()
            panel.scatter(x, y, s=area, color=COLOURS[method], alpha=0.8, linewidths=0, zorder=3)
        panel.set_title("test digits" if angle == 0 else f"rotated by {angle}°")
        panel.set_xlabel("confidence")
        panel.set_ylabel("accuracy")
        panel.set_xlim(0, 1.03)
        panel.set_ylim(0, 1.03)
        panel.set_aspect("equal")
        panel.legend(loc="upper left", fontsize=8, handlelength=1.2, borderpad=0.1, labelspacing=0.3)
    return figure


def draw_rotation(result: DemoResult, shape: Shape) -> Figure:
    """Confidence with accuracy, log loss and calibration error against the angle."""
    figure, panels = canvas(shape, *((1, 3) if shape.wide else (3, 1)), 3.1 if shape.wide else 2.6)
    angles = list(result.digits.rotated)
    titles = ("mean confidence", "log loss (NLL)", "calibration error (ECE)")
    for panel, title, score in zip(panels, titles, ("confidence", "nll", "ece"), strict=True):
        quiet_axes(panel)
        for method in METHODS:
            values = [getattr(result.digits.rotated[angle][method], score) for angle in angles]
            panel.plot(angles, values, color=COLOURS[method], marker="o", markersize=3, label=method)
        panel.set_title(title)
        panel.set_xlabel("rotation (degrees)")
        panel.set_xticks(range(0, 181, 45))
        panel.set_ylim(bottom=0)
    accuracy = [result.digits.rotated[angle]["MoLA"].accuracy for angle in angles]
    panels[0].plot(angles, accuracy, color=INK, linestyle=(0, (2, 1.5)), linewidth=1.2, label="accuracy of MoLA")
    panels[0].set_ylim(0, 1.03)
    panels[0].legend(fontsize=8, loc="lower left", ncols=1, labelspacing=0.3, handlelength=1.6)
    return figure
