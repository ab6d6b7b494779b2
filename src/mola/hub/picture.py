"""The reliability diagram of a model card."""

from __future__ import annotations

from pathlib import Path

from mola.hub.measuring import Measured

__all__ = ["draw_reliability"]


def draw_reliability(measured: Measured, path: Path) -> bool:
    """Draw accuracy over confidence, the area of a dot being the share of data in its bin.

    Args:
        measured: with bins.
        path: picture to write.

    Returns:
        Whether it was drawn: not without matplotlib, or without bins. The table beside it says the same.
    """
    if not measured.bins:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=1)
    counts, confidence, accuracy = zip(*measured.bins, strict=True)
    sizes = [12 + 400 * count / measured.count for count in counts]
    axes.plot(confidence, accuracy, color="#1f5fa8", linewidth=1, zorder=2)
    axes.scatter(confidence, accuracy, s=sizes, color="#1f5fa8", alpha=0.7, zorder=3)
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.02), title=measured.dataset)
    figure.savefig(path, dpi=110)
    return True
