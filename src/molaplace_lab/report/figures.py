"""Names, titles and captions of the figures of a suite, and the functions that draw them."""

from __future__ import annotations

from functools import partial

from molaplace.report import curve_figures as curves
from molaplace.report.curve_figures import draw_panels, estimates_panel
from molaplace.report.figures import ABLATED, RELIABILITY, SHARES
from molaplace.report.numbers import BY_CONFIDENCE, Numbers, On, levels_of, shared_outliers
from molaplace.report.picture_figures import MOST_SETS, draw_examples, draw_histograms, example_sets
from molaplace.report.style import Figure, Planned
from molaplace.report.tables import SHIFT_METRICS
from molaplace_lab.report.reading import SuiteResults
from molaplace_lab.report.tables import GROUP_TITLES, ablation_groups

BANDS = "Lines show means over runs; bands show one standard error."


def suite_figures(suite: SuiteResults) -> dict[str, Planned]:
    """Return the figures for a suite, keyed by name, in page order; figures whose records are missing are omitted."""
    figures: dict[str, Planned] = {}
    levels, outliers = levels_of(suite), suite.of_role("outlier")
    if suite.runs and outliers:
        histograms = partial(draw_histograms, suite, outliers[:MOST_SETS])
        figures["histograms"] = Planned("Confidence in outliers", f"{SHARES} All runs are pooled.", histograms)
    if suite.runs and len(levels) > 1:
        shift = partial(curves.draw_against_level, suite, suite.runs, tuple(SHIFT_METRICS), suite.axis)
        figures["shift"] = Planned("Under shift", BANDS, shift)
    if suite.runs and levels:
        # The panels show the test set (level 0) and the middle and highest levels of shift.
        shown = sorted({levels[0], levels[len(levels) // 2], levels[-1]})
        titles = ["test", *(f"{suite.shift_title}, {level:g}" for level in shown[1:])]
        panels = {title: (level, list(suite.runs)) for title, level in zip(titles, shown, strict=True)}
        figures["reliability"] = Planned(*RELIABILITY, partial(curves.draw_reliability_panels, suite, panels))
    if example_sets(suite):
        caption = "The first images of each set, with each method's confidence in the first run."
        figures["examples"] = Planned("Example images", caption, partial(draw_examples, suite))
    for group in ablation_groups(suite):
        along = partial(curves.draw_against_level, suite, suite.groups[group], ABLATED, suite.axis)
        make = partial(draw_components, suite) if group == "components" else along
        if group == "components" or len(levels) > 1:
            figures[group] = Planned(GROUP_TITLES.get(group, group), BANDS, make)
    return figures


def draw_components(suite: SuiteResults) -> Figure:
    """Plot metrics on test data, shifted data and outliers against the number of components, with one line per family."""
    methods = suite.groups["components"]
    numbers = Numbers(methods)
    # `sweep` maps each number of components to one method per family; "DE K=2" belongs to the family "DE".
    sweep: dict[float, dict[str, str]] = {}
    for method, records in methods.items():
        sweep.setdefault(int(records[0].settings.get("components", 1)), {})[method.split(" K=")[0]] = method
    sweep = dict(sorted(sweep.items()))
    families = list(dict.fromkeys(family for members in sweep.values() for family in members))
    quantities: dict[str, On] = {}
    for metric in ("log_likelihood", "ece", "confidence", "accuracy"):
        name = "ECE" if metric == "ece" else SHIFT_METRICS[metric].name
        quantities |= {f"{name}, test": On("test", metric), f"{name}, shifted": numbers.shifted(metric)}
    outliers = tuple(one.name for one in shared_outliers(suite, methods))
    quantities["mean confidence, outliers"] = On(outliers, "confidence")
    quantities["AUROC, outliers"] = On(outliers, "auroc", BY_CONFIDENCE)
    panels = []
    for title, quantity in quantities.items():
        found = numbers(quantity)
        by_count = {count: {family: found[one] for family, one in members.items()} for count, members in sweep.items()}
        panels.append(estimates_panel(title, by_count, families, {"xlabel": "components"}))
    return draw_panels([panel for panel in panels if panel.lines], 2.4)
