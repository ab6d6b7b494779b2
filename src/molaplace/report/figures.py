"""Names, titles and captions of the figures for a comparison on the user's data, and the functions that draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from molaplace.evaluation import Evaluation
from molaplace.evaluation.comparison import RegressionDetail
from molaplace.report.curves import GUIDE, Line, Panel, draw_panels, draw_reliability
from molaplace.report.numbers import Numbers
from molaplace.report.pictures import MOST_SETS, draw_histograms
from molaplace.report.style import DOTTED, INK, Figure, Planned, colours, strokes

RELIABILITY = (
    "Calibration",
    "Accuracy and mean confidence of the predictions in each confidence bin. Vertical lines are 95 % intervals for independent "
    "predictions. Overconfident predictions lie below the dashed line.",
)
EQUAL_ERRORS = "All bins of a method have the same number of expected errors."
SHARES = "Share of inputs by confidence, on a square-root scale. A good method is less confident on outliers than on test data."

MOST_PANELS = 2
"""Maximum number of regression outputs in one figure."""


def evaluation_figures(evaluation: Evaluation) -> dict[str, Planned]:
    """Return the figures for a comparison on the user's data, keyed by name, in page order."""
    if evaluation.regression:
        networks = [method for method in evaluation.methods if method.startswith(("MAP", "DE"))]
        others = [method for method in evaluation.methods if method == "MAP" or method not in networks]
        panels = {"networks alone": networks, "with Laplace": others} if networks else {"": others}
        coverage = "Share of the test targets inside central intervals. Methods whose intervals are too narrow lie below the dashed line."
        predicted = "Predicted means and 90 % intervals for some of the test data."
        return {
            "coverage": Planned("Coverage of intervals", coverage, partial(draw_coverage, evaluation, panels)),
            "predicted": Planned("Predictions and targets", predicted, partial(draw_predicted, evaluation)),
        }
    bins = {method: {"test data": result.reliability} for method, result in evaluation.on_test.items()}
    title, caption = RELIABILITY
    figures = {
        "reliability": Planned(title, f"{caption} {EQUAL_ERRORS}", partial(draw_reliability, bins, strokes(bins)))
    }
    if evaluation.of_role("outlier"):
        figures["confidence"] = Planned("Confidence in outliers", SHARES, partial(comparison_histograms, evaluation))
    if evaluation.decisions is not None:
        risk = (
            "Error rate of the most confident predictions against coverage. Each cross marks a threshold, chosen on the validation "
            "data, that keeps the error rate below the dotted line with 95 % certainty."
        )
        figures["decisions"] = Planned("Fewer answers, fewer errors", risk, partial(draw_decisions, evaluation))
    return figures


def comparison_histograms(evaluation: Evaluation) -> Figure:
    """Draw histograms of confidence on the test data and on the first few outlier sets of an evaluation."""
    histograms = {
        method: {name: on_set.histogram for name, on_set in (result.labelled | result.outliers).items()}
        for method, result in evaluation.methods.items()
    }
    outliers = evaluation.of_role("outlier")[:MOST_SETS]
    return draw_histograms(Numbers(evaluation.methods), evaluation.test, outliers, histograms, strokes(histograms))


def draw_decisions(evaluation: Evaluation) -> Figure:
    """Plot risk against coverage for every method, and mark the thresholds chosen on the validation data."""
    decisions = evaluation.decisions
    styles = strokes(evaluation.methods)
    assert decisions is not None  # this figure is drawn only if there are decisions
    lines = []
    for method, points in decisions.curves.items():
        coverage, risk = 100 * np.array(points).T
        lines.append(Line(coverage, risk, method, styles[method]))
    for answers in decisions.answers:
        if answers.answered is not None and answers.realised is not None:
            cross = {"marker": "x", "markersize": 8, "markeredgewidth": 1.8, "color": INK}
            lines.append(Line([0, 101], [100 * answers.promised] * 2, "", {**GUIDE, "linestyle": DOTTED}))
            lines.append(Line([100 * answers.answered], [100 * answers.realised], "", cross))
    settings = {
        "xlabel": "answered inputs, %",
        "ylabel": "error rate of the answers, %",
        "xlim": (0, 101),
        "ylim": (0, None),
    }
    return draw_panels([Panel("", lines, settings)])


# --- regression ------------------------------------------------------------------------------------------------------


def _details(evaluation: Evaluation) -> dict[str, RegressionDetail]:
    details = {method: result.regression for method, result in evaluation.on_test.items()}
    return {method: detail for method, detail in details.items() if detail is not None}


def _output_title(evaluation: Evaluation, output: str) -> str:
    return f"output {output}" if len(evaluation.classes) > 1 else ""


def draw_coverage(evaluation: Evaluation, panels: Mapping[str, Sequence[str]]) -> Figure:
    """Plot the observed against the nominal coverage of central intervals; `panels` maps panel titles to the methods to plot."""
    details = _details(evaluation)
    styles = strokes(evaluation.methods)
    settings = {"xlim": (0, 1), "ylim": (0, 1), "xlabel": "nominal coverage", "ylabel": "share of targets inside"}
    drawn_panels = []
    for title, methods in panels.items():
        lines = [Line([0, 1], [0, 1], "", GUIDE)]
        for method in methods:
            rows = [[number or 0.0 for number in row] for row in details[method].coverage]
            level, covered, error = np.array(rows).T
            lines.append(Line(level, covered, method, styles[method], error))
        drawn_panels.append(Panel(title, lines, settings))
    return draw_panels(drawn_panels)


def draw_predicted(evaluation: Evaluation) -> Figure:
    """Plot the posterior's predictions and 90 % intervals against the targets."""
    examples = _details(evaluation)[evaluation.subject].examples
    colour = colours(evaluation.methods)[evaluation.subject]
    panels = []
    for output in list(examples)[:MOST_PANELS]:
        target, mean, lower, upper = np.array(examples[output], dtype=float).T
        ends = [min(target.min(), mean.min()), max(target.max(), mean.max())]
        # The intervals are drawn as vertical segments of one line, separated by NaN.
        broken = np.stack([lower, upper, np.full_like(lower, np.nan)], axis=1).ravel()
        lines = [
            Line(ends, ends, "", GUIDE),
            Line(np.repeat(target, 3), broken, "90 % interval", {"color": colour, "alpha": 0.35, "linewidth": 0.9}),
            Line(
                target, mean, evaluation.subject, {"color": colour, "linestyle": "", "marker": ".", "markersize": 3.5}
            ),
        ]
        panels.append(Panel(_output_title(evaluation, output), lines, {"xlabel": "true", "ylabel": "predicted"}))
    return draw_panels(panels)
