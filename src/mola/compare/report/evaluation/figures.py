"""Figures of an evaluation: reliability, and histograms of confidence and of outlier scores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mola.compare.evaluation import CONFIDENCE_BINS, Evaluation
from mola.compare.report.evaluation.tables import SCORE_NAMES, short
from mola.compare.report.style import INK, Figure, Shape, canvas, explain, quiet_axes
from mola.compare.report.suites.palette import colours, strokes
from mola.compare.tally import SCORES

__all__ = ["evaluation_figures"]

FEWEST = 5
"""Predictions that a bin must hold to be drawn in a reliability diagram."""

MOST_SETS = 4
"""Sets of outliers that are drawn."""


def evaluation_figures(result: Evaluation) -> dict[str, Callable[[Shape], Figure]]:
    """What draws each figure, by name, in the order of the page."""
    return {
        "reliability": lambda shape: draw_reliability(result, shape),
        "confidence": lambda shape: draw_confidence(result, shape),
        **{
            f"scores-{index}": lambda shape, name=name: draw_scores(result, name, shape)  # type: ignore[misc]
            for index, name in enumerate(result.outside[:MOST_SETS])
        },
    }


def draw_reliability(result: Evaluation, shape: Shape) -> Figure:
    """Accuracy against confidence, plain networks beside Laplace approximations."""
    groups = [
        [name for name in result.methods if name.startswith(("MAP", "DE"))],
        [name for name in result.methods if name in ("MAP", "LLLA", "MoLA")],
    ]
    figure, panels = canvas(shape, *((1, 2) if shape.wide else (2, 1)), 4.4)
    drawn = strokes(result.methods)
    for panel, methods, title in zip(panels, groups, ("networks, and temperatures", "with Laplace"), strict=True):
        quiet_axes(panel)
        panel.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        for method in methods:
            bins = np.asarray(result.methods[method].reliability)
            # A bin of a few predictions says nothing about accuracy: it is left out here, but not from the ECE.
            count, confidence, correct = bins[bins[:, 0] >= FEWEST].T
            if len(count) == 0:
                continue
            label = f"{method}, ECE {100 * result.methods[method].scores['ece']:.2f}%"
            panel.plot(confidence / count, correct / count, linewidth=1.2, label=label, **drawn[method])
            area, colour = 6 + 160 * count / count.sum(), drawn[method]["color"]
            panel.scatter(confidence / count, correct / count, s=area, color=colour, alpha=0.75, linewidths=0, zorder=3)
        panel.set_title(title)
        panel.set_xlabel("confidence")
        panel.set_ylabel("accuracy")
        panel.set_xlim(0, 1.03)
        panel.set_ylim(0, 1.03)
        panel.set_aspect("equal", anchor="N")
        panel.legend(loc="upper left", fontsize=8, handlelength=1.8, labelspacing=0.3)
    return figure


def draw_confidence(result: Evaluation, shape: Shape) -> Figure:
    """For every method: confidence in the test data, under confidence in each set of outliers."""
    methods, sets = list(result.methods), list(result.outside[:MOST_SETS])
    if not shape.wide:
        sets = sets[:2]
    columns = max(1, len(sets))
    figure, panels = canvas(shape, len(methods), columns, 1.5, sharex=True, sharey=True)
    painted, edges = colours(methods), np.linspace(0.0, 1.0, CONFIDENCE_BINS + 1)
    for index, panel in enumerate(panels):
        method, column = methods[index // columns], index % columns
        one = result.methods[method]
        quiet_axes(panel)
        words = f"mean {one.scores['confidence']:.2f}"
        if sets:
            out = one.outside[sets[column]]
            panel.stairs(out.histogram, edges, color=painted[method], fill=True, alpha=0.75)
            panel.axvline(out.confidence, color=painted[method], linestyle=(0, (2, 1.5)), linewidth=1.3)
            words = f"mean {out.confidence:.2f}, AUROC {out.scores['max probability'].auroc:.3f}"
        panel.stairs(one.histogram, edges, color=INK, linewidth=1.0)
        panel.text(0.0, 1.04, words, transform=panel.transAxes, va="bottom", fontsize=8)
        if index < columns and sets:
            panel.set_title(short(sets[column], result.outside), pad=17)
        if column == 0:
            panel.set_ylabel(method, fontweight="bold")
        if index >= len(panels) - columns:
            panel.set_xlabel("confidence")
        panel.set_xlim(0, 1)
        panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        # The last bin holds most of the test data; on a square-root scale the others can still be seen.
        panel.set_yscale("function", functions=(np.sqrt, np.square))
        panel.set_ylim(0, 1)
        panel.set_yticks([0, 0.1, 0.5, 1], ["0", "0.1", "0.5", "1"])
    if sets:
        explain(figure, shape, "filled: the outliers named at the top", "dashed: their mean", "outline: the test data")
    else:
        explain(figure, shape, "share of the test data")
    return figure


def draw_scores(result: Evaluation, name: str, shape: Shape) -> Figure:
    """Every method by every score on one set of outliers; on a phone the networks alone beside the posterior."""
    methods = list(result.methods) if shape.wide else [result.baseline, result.own]
    known = [score for score in SCORES if any(score in result.methods[one].outside[name].scores for one in methods)]
    pairs = [(method, score) for method in methods for score in known]
    if not shape.wide:
        pairs = [(method, score) for score in known for method in methods]
    rows, columns = (len(methods), len(known)) if shape.wide else (len(known), len(methods))
    figure, panels = canvas(shape, rows, columns, 1.25, sharey=True)
    painted = colours(result.methods)
    for index, (panel, (method, score)) in enumerate(zip(panels, pairs, strict=True)):
        row, column = divmod(index, columns)
        over, beside = (SCORE_NAMES[score], method) if shape.wide else (method, SCORE_NAMES[score])
        if row == 0:
            panel.set_title(over, pad=16)
        if column == 0:
            panel.set_ylabel(beside, fontweight="bold")
        found = result.methods[method].outside[name].scores.get(score)
        panel.set_xticks([])
        panel.set_yscale("function", functions=(np.sqrt, np.square))
        panel.set_ylim(0, 1)
        panel.set_yticks([0, 0.1, 0.5, 1], ["0", "0.1", "0.5", "1"])
        if found is None:
            panel.text(0.5, 0.5, "has none", transform=panel.transAxes, ha="center", va="center", fontsize=8)
            continue
        quiet_axes(panel)
        panel.stairs(found.outside, found.edges, color=painted[method], fill=True, alpha=0.75)
        panel.stairs(found.inside, found.edges, color=INK, linewidth=1.0)
        words = f"AUROC {found.auroc:.3f}"
        panel.text(0.0, 1.04, words, transform=panel.transAxes, va="bottom", fontsize=8)
    explain(
        figure, shape, f"filled: {short(name, result.outside)}", "outline: the test data", "more outlying to the right"
    )
    return figure
