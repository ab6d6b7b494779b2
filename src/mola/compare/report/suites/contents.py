"""What a suite's report holds: tables and figures by name, only those that its records can fill."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mola.compare.report.style import Figure, Shape
from mola.compare.report.suites.ablation_tables import ablation_groups, ablation_table, settings_table, variants_table
from mola.compare.report.suites.confidence_figures import draw_histograms, draw_reliability
from mola.compare.report.suites.cost_table import cost_table
from mola.compare.report.suites.curve_figures import component_sweep, draw_ablation, draw_components, draw_shift
from mola.compare.report.suites.picture_figures import draw_examples, example_sets
from mola.compare.report.suites.reading import SuiteResults
from mola.compare.report.suites.score_tables import score_digest, score_table
from mola.compare.report.suites.tables import (
    METRIC_NAMES,
    difference_table,
    in_distribution_table,
    level_table,
    outlier_table,
)
from mola.compare.report.tables import Table

__all__ = ["TERMINAL", "suite_figures", "suite_tables"]

TERMINAL = ("outliers", "in-distribution", "cost")
"""Tables that are shown in the terminal; all of them are in the files."""


def suite_tables(suite: SuiteResults) -> dict[str, Table]:
    """All tables, in order."""
    tables: dict[str, Table | None] = {
        "outliers": outlier_table(suite),
        "difference": difference_table(suite),
        "scores": score_digest(suite),
        **{f"scores {one.name}": score_table(suite, one.name) for one in suite.of_role("outlier")},
        "in-distribution": in_distribution_table(suite),
        **{f"shift {metric}": level_table(suite, metric) for metric in METRIC_NAMES},
        "variants": variants_table(suite),
        **{f"ablation {group}": ablation_table(suite, group) for group in ablation_groups(suite)},
        "cost": cost_table(suite),
        "settings": settings_table(suite),
    }
    return {name: table for name, table in tables.items() if table is not None}


def suite_figures(suite: SuiteResults) -> dict[str, Callable[[Shape], Figure]]:
    """All figures, in order: what draws each in a shape."""
    figures: dict[str, Callable[[Shape], Figure]] = {}
    levels = len(suite.levels())
    if suite.main and suite.of_role("outlier"):
        figures["histograms"] = partial(draw_histograms, suite)
    if suite.main and levels > 1:
        figures["shift"] = partial(draw_shift, suite)
    if suite.main and levels:
        figures["reliability"] = partial(draw_reliability, suite)
    if example_sets(suite):
        figures["examples"] = partial(draw_examples, suite)
    for group in ablation_groups(suite):
        if group == "components" and component_sweep(suite):
            figures["components"] = partial(draw_components, suite)
        elif levels > 1:
            figures[group] = partial(draw_ablation, suite, group)
    return figures
