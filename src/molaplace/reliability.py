"""Draw reliability diagrams, which plot accuracy against confidence, on any matplotlib axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN_COUNT, MIN_SHARE = 5, 0.001
"""A bin is drawn only if it contains at least this many predictions and at least this fraction of all predictions. The accuracy
in smaller bins is mostly noise. The calibration error includes all bins."""

Curve = tuple[ArrayLike, Mapping[str, Any]]
"""The data of a curve, and matplotlib options for its line. The data are a (bins, 3) tensor: the number of predictions, the summed
confidence and the number of correct predictions in each bin."""


def draw_reliability(panel: Axes, curves: Mapping[str, Curve], ink: str = "0.3", min_count: int = MIN_COUNT) -> None:
    """Plot accuracy against confidence. The area of each dot shows the share of predictions in its bin.

    Args:
        panel: axes to draw on.
        curves: curves to draw, keyed by label; a curve is omitted if none of its bins can be drawn.
        ink: colour of the diagonal, which marks perfect calibration.
        min_count: minimum number of predictions that a bin must contain to be drawn.
    """
    panel.plot([0, 1], [0, 1], color=ink, linewidth=0.8, linestyle=(0, (4, 3)))
    for label, (given, stroke) in curves.items():
        bins = np.asarray(given, dtype=np.float64).reshape(-1, 3)
        count, confidence, correct = bins[bins[:, 0] >= max(min_count, MIN_SHARE * bins[:, 0].sum())].T
        if len(count):
            x, y, area = confidence / count, correct / count, 6 + 160 * count / count.sum()
            panel.plot(x, y, linewidth=1.2, label=label, **stroke)
            panel.scatter(x, y, s=area, color=stroke["color"], alpha=0.75, linewidths=0, zorder=3)
    panel.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.03), ylim=(0, 1.03))
    panel.set_aspect("equal", anchor="N")  # anchored at the top, to leave space for a legend below
