"""Figures of what happens far away from the data."""

from __future__ import annotations

from mola.compare.demo_result import METHODS, DemoResult
from mola.compare.report.style import COLOURS, INK, Axes, Figure, Shape, canvas, quiet_axes

__all__ = ["draw_distance"]

DOTTED = (0, (1, 1.6))
DASHED = (0, (5, 2.5))


def draw_distance(result: DemoResult, shape: Shape) -> Figure:
    """Confidence against distance with limit and bound, and both against the prior precision."""
    kinds = list(result.distance.curves)
    count = len(kinds) + 1
    figure, panels = canvas(shape, *((1, count) if shape.wide else (count, 1)), 3.5 if shape.wide else 3.0)
    for panel, kind in zip(panels, kinds, strict=False):
        _by_distance(panel, result, kind)
    _by_precision(panels[-1], result)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=8 if shape.wide else 2,
        fontsize=8,
        columnspacing=1.4,
        handlelength=2.4,
    )
    return figure


def _by_distance(panel: Axes, result: DemoResult, kind: str) -> None:
    distance = result.distance
    quiet_axes(panel)
    for method in METHODS:
        panel.plot(distance.scales, distance.curves[kind][method], color=COLOURS[method], label=method)
    for method, limit in distance.limits[kind].items():
        panel.axhline(limit, color=COLOURS[method], linestyle=DOTTED, linewidth=1.4, label=f"limit, {method}")
    for offset, (method, bound) in enumerate(distance.bounds[kind].items()):
        # Two bounds that both round to 1 would hide each other: their dashes take turns.
        dashes = (5 * offset, (4, 6))
        panel.axhline(bound, color=COLOURS[method], linestyle=dashes, linewidth=1.6, label=f"bound, {method}")
    panel.set_xscale("log")
    panel.minorticks_off()
    panel.set_xlim(distance.scales[0], distance.scales[-1])
    # From 1 down to a little below the least confident: what matters is how far below 1 a curve stays.
    lowest = min(float(curve.min()) for curve in distance.curves[kind].values())
    panel.set_ylim(1 - 1.25 * (1 - lowest), 1 + 0.08 * (1 - lowest))
    panel.set_title(f"{kind}, scaled away")
    panel.set_xlabel("scale δ of the input")
    panel.set_ylabel("mean confidence")


def _by_precision(panel: Axes, result: DemoResult) -> None:
    distance, colour = result.distance, COLOURS["MoLA"]
    quiet_axes(panel)
    panel.plot(distance.precisions, distance.bound, color=colour, linestyle=DASHED, label="bound")
    panel.plot(distance.precisions, distance.limit, color=colour, linestyle=DOTTED, label="limit, noise")
    panel.plot(distance.precisions, distance.test_confidence, color=INK, linewidth=1.2, label="test digits")
    chosen = result.digits.prior_precision["MoLA"]
    panel.axvline(chosen, color=INK, linewidth=0.8, alpha=0.6)
    panel.annotate(
        f"tuned: λ = {chosen:.2g}", (chosen, 0.03), xytext=(-4, 0), textcoords="offset points", ha="right", fontsize=8
    )
    panel.set_xscale("log")
    panel.minorticks_off()
    panel.set_xlim(distance.precisions[0], distance.precisions[-1])
    panel.set_ylim(0, 1.04)
    panel.set_title("MoLA at other prior precisions")
    panel.set_xlabel("prior precision λ")
    panel.set_ylabel("mean confidence")
    # Between the bound's rise and the test digits', the one place that no curve crosses.
    panel.legend(fontsize=8, loc="center", bbox_to_anchor=(0.49, 0.72), labelspacing=0.4, handlelength=2.0)
