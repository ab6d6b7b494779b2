"""The reliability diagram: how often predictions are right, against how sure they are. Drawn on any panel of matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEWEST = 5
"""Predictions that a bin must hold to be drawn: fewer say nothing about accuracy. They still count in the calibration error."""

SHARE = 0.001
"""Share of all predictions that it must hold as well."""

Curve = tuple[ArrayLike, Mapping[str, Any]]
"""For each bin of confidence its count, the sum of its confidences and its correct predictions; and how to draw the line."""


def draw_reliability(panel: Axes, curves: Mapping[str, Curve], ink: str = "0.3", fewest: int = FEWEST) -> None:
    """Draw accuracy over confidence; the area of a dot is the share of the predictions in its bin.

    Args:
        panel: where to draw.
        curves: by label. One without a bin to draw is left out.
        ink: colour of the diagonal, on which confidence is neither too high nor too low.
        fewest: predictions that a bin must hold to be drawn.
    """
    panel.plot([0, 1], [0, 1], color=ink, linewidth=0.8, linestyle=(0, (4, 3)))
    for label, (given, stroke) in curves.items():
        bins = np.asarray(given, dtype=np.float64).reshape(-1, 3)
        count, confidence, correct = bins[bins[:, 0] >= max(fewest, SHARE * bins[:, 0].sum())].T
        if len(count):
            x, y, area = confidence / count, correct / count, 6 + 160 * count / count.sum()
            panel.plot(x, y, linewidth=1.2, label=label, **stroke)
            panel.scatter(x, y, s=area, color=stroke["color"], alpha=0.75, linewidths=0, zorder=3)
    panel.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.03), ylim=(0, 1.03))
    # At the top: what the square leaves of its room is then left for a legend below.
    panel.set_aspect("equal", anchor="N")
