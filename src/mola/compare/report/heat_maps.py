"""Heat maps: how two methods differ, by type of shift and level."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mola.compare.report.estimate import Estimate
from mola.compare.report.reading import SuiteResults
from mola.compare.report.style import COLOURS, INK, Axes, Figure, Shape, canvas
from mola.compare.report.suite_tables import BY_TYPE, PAPERS_RULE, compared_by_type, type_differences

ROW = 0.25
"""Inches of a type's row."""


def suite_types(suite: SuiteResults, shape: Shape) -> Figure:
    """What the method that is compared with the paper's rule gains or loses, for every type of shift and level."""
    panels = {metric: type_differences(suite, metric) for metric in BY_TYPE}
    count = max(len(found) for found in panels.values())
    height = 1.1 + ROW * count
    figure, axes = canvas(shape, *((1, len(panels)) if shape.wide else (len(panels), 1)), height)
    for panel, (metric, found) in zip(axes, panels.items(), strict=True):
        title, digits, _ = BY_TYPE[metric]
        _draw(panel, found, digits)
        panel.set_title(f"{title}\n{compared_by_type(suite)} minus {PAPERS_RULE}", fontsize=9)
        panel.set_xlabel(suite.axis)
    return figure


def _draw(panel: Axes, found: Mapping[str, Mapping[float, Estimate | None]], digits: int) -> None:
    levels = list(next(iter(found.values())))
    gaps = np.array([[np.nan if one is None else one.mean for one in row.values()] for row in found.values()])
    widest = max([10.0**-digits, *np.abs(gaps[~np.isnan(gaps)])])
    for row, values in enumerate(gaps):
        for column, gap in enumerate(values):
            if np.isnan(gap):
                continue
            # Weak differences are pale; the deepest stay light enough for the numbers on them.
            colour = COLOURS["DE"] if gap < 0 else COLOURS["LLLA"]
            share = 0.65 * abs(gap) / widest
            panel.axhspan(
                row, row + 1, column / len(levels), (column + 1) / len(levels), color=colour, alpha=share, lw=0
            )
            panel.text(column + 0.5, row + 0.5, f"{gap:+z.{digits}f}", ha="center", va="center", fontsize=7, color=INK)
    panel.set_xlim(0, len(levels))
    panel.set_ylim(len(gaps), 0)
    panel.set_xticks([place + 0.5 for place in range(len(levels))], [f"{level:g}" for level in levels])
    panel.set_yticks(
        [place + 0.5 for place in range(len(gaps))], [kind.replace("_", " ") for kind in found], fontsize=8
    )
    panel.tick_params(length=0)
    for side in panel.spines.values():
        side.set_visible(False)
