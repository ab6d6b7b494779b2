"""Names, titles and captions of the figures in each report, and the functions that draw them."""

from __future__ import annotations

from functools import partial

from molaplace.evaluation.demo_result import DemoResult
from molaplace.evaluation.record import Comparison
from molaplace.report import curve_figures as curves
from molaplace.report.picture_figures import MOST_SETS, demo_moons, draw_examples, draw_histograms
from molaplace.report.style import Planned

RELIABILITY = (
    "Calibration",
    "Accuracy against confidence, in bins of equal width. Overconfident predictions lie below the dashed line.",
)
SHARES = "Share of inputs by confidence, on a square-root scale. A good method is less confident on outliers than on test data."

ABLATED = ("log_likelihood", "ece", "confidence")
"""Metrics plotted against the level of shift in ablations and in the demo."""


def demo_figures(result: DemoResult) -> dict[str, Planned]:
    """Return the demo's figures, keyed by name, in page order."""
    comparison = result.comparison
    outliers, names = comparison.of_role("outlier")[:3], list(comparison.methods)
    panels = {"test digits": (0.0, names), "rotated by 15°": (15.0, names), "rotated by 30°": (30.0, names)}
    turning = partial(curves.draw_against_level, comparison, comparison.runs, ABLATED, "rotation (degrees)")
    inputs = "The first inputs of each kind. Patches and noise have the same size and value range as the digits."
    rotation = (
        "Beyond 45°, every method is overconfident, but the log-likelihood falls further for some than for others."
    )
    distance = (
        "Inputs are multiplied by δ. A single network becomes certain, whereas MoLA approaches the dotted limits, which lie below "
        "the theorem's bound. The last panel shows the limit and the bound for other prior precisions."
    )
    plane = "Confidence around the two moons, in a window six times as wide as the data."
    return {
        "examples": Planned("The inputs", inputs, partial(draw_examples, comparison)),
        "histograms": Planned("Confidence in outliers", SHARES, partial(draw_histograms, comparison, outliers)),
        "reliability": Planned(*RELIABILITY, partial(curves.draw_reliability_panels, comparison, panels)),
        "rotation": Planned("Rotated digits", rotation, turning),
        "distance": Planned("Far from the data", distance, partial(curves.demo_distance, result)),
        "moons": Planned("Confidence over the plane", plane, partial(demo_moons, result)),
    }


def evaluation_figures(comparison: Comparison) -> dict[str, Planned]:
    """Return the figures for a comparison on the user's data, keyed by name, in page order."""
    alone = [one for one in comparison.methods if one.startswith(("MAP", "DE"))]
    beside = [one for one in comparison.methods if one in ("MAP", "LLLA", "MoLA")]
    if comparison.regression:
        panels = {"networks alone": alone, "with Laplace": beside}
        held = "Share of the test targets inside central intervals. Methods whose intervals are too narrow lie below the dashed line."
        spread = (
            "Test data in groups of equal size, sorted by predicted standard deviation. A cross marks a method whose standard "
            "deviation is constant."
        )
        some = "Predicted means and 90 % intervals for some of the test data."
        return {
            "coverage": Planned("Coverage of intervals", held, partial(curves.draw_coverage, comparison, panels)),
            "spread": Planned("Standard deviation and error", spread, partial(curves.draw_spread, comparison)),
            "predicted": Planned("Predictions and targets", some, partial(curves.draw_predicted, comparison)),
        }
    outliers = comparison.of_role("outlier")[:MOST_SETS]
    at_zero = {"networks, with and without temperature": (0.0, alone), "with Laplace": (0.0, beside)}
    figures = {
        "reliability": Planned(*RELIABILITY, partial(curves.draw_reliability_panels, comparison, at_zero)),
        "confidence": Planned("Distribution of confidence", SHARES, partial(draw_histograms, comparison, outliers)),
    }
    if comparison.decisions is not None:
        risk = (
            "Error rate of the most confident predictions against coverage. Each cross marks a threshold, chosen on the validation "
            "data, that keeps the error rate below the dotted line with 95 % certainty."
        )
        make = partial(curves.evaluation_decisions, comparison)
        figures["decisions"] = Planned("Fewer answers, fewer errors", risk, make)
    return figures
