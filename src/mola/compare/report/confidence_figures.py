"""Figures of confidence: reliability diagrams, and histograms of outliers over those of the test data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mola.compare.record import Comparison, Record, SetInfo
from mola.compare.report.numbers import BY_CONFIDENCE, Numbers, On
from mola.compare.report.style import INK, Axes, Figure, canvas, colours, quiet_axes, shared_legend, strokes
from mola.reliability import Curve, draw_reliability

MOST_SETS = 4
"""Sets of outliers in a figure."""

Array = NDArray[np.float64]


def draw_reliability_panels(comparison: Comparison, panels: Mapping[str, tuple[float, Sequence[str]]]) -> Figure:
    """Draw accuracy over confidence, all runs together.

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


def draw_histograms(comparison: Comparison, sets: Sequence[SetInfo]) -> Figure:
    """For every method: confidence in each set of outliers, over confidence in the test set; all runs together."""
    test, numbers, painted = comparison.of_role("test"), Numbers(comparison.runs), colours(comparison.runs)
    shown = list(sets or test)
    figure, panels = canvas(len(comparison.runs), len(shown), 1.35, sharex=True, sharey=True)
    cells = [(method, one) for method in comparison.runs for one in shown]
    for place, (panel, (method, one)) in enumerate(zip(panels, cells, strict=True)):
        if place < len(shown):
            panel.set_title(one.title if sets else "", pad=15, fontsize=9)
        if place % len(shown) == 0:
            panel.set_ylabel(method, fontweight="bold", fontsize=8)
        if place >= len(panels) - len(shown):
            panel.set_xlabel("confidence")
        panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        # Most of the test data are in the last bin; a square-root scale shows the others, too.
        panel.set_yscale("function", functions=(np.sqrt, np.square))
        panel.set_ylim(0, 1)
        panel.set_yticks([0, 0.1, 0.5, 1], ["0", "0.1", "0.5", "1"])
        quiet_axes(panel)
        records = comparison.runs[method]
        outside = [record.outliers[one.name].histogram for record in records if one.name in record.outliers]
        inside = [
            record.labelled[two.name].histogram for record in records for two in test if two.name in record.labelled
        ]
        _stairs(panel, outside, color=painted[method], fill=True, alpha=0.75)
        _stairs(panel, inside, color=INK, linewidth=1.0)
        confidence, auroc = (
            numbers(on)[method] for on in (On(one.name, "confidence"), On(one.name, "auroc", BY_CONFIDENCE))
        )
        if confidence is not None and outside:
            panel.axvline(confidence.mean, color=painted[method], linestyle=(0, (2, 1.5)), linewidth=1.3)
        words = [] if confidence is None else [f"mean {confidence.mean:.2f}"]
        words += [] if auroc is None else [f"AUROC {auroc.mean:.3f}"]
        # Above the panel: inside, the words would hide bars.
        panel.text(0.0, 1.04, ", ".join(words), transform=panel.transAxes, va="bottom", fontsize=7)
        panel.set_xlim(0, 1)
    explained = "filled: outliers \N{MIDDLE DOT} dashed: their mean confidence \N{MIDDLE DOT} outline: test data"
    figure.supxlabel(explained if sets else "share of the test data", fontsize=8)
    return figure


def _stairs(panel: Axes, histograms: Sequence[Sequence[int]], **style: Any) -> None:
    total = np.sum(np.asarray(histograms, dtype=np.float64), axis=0) if histograms else np.zeros(0)
    if total.sum() > 0:
        panel.stairs(total / total.sum(), np.linspace(0.0, 1.0, len(total) + 1), **style)
