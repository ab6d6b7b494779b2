"""The reports of several suites as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mola.compare.report.figures import Drawn
from mola.compare.report.markup import document, figure_markup, table_markup
from mola.compare.report.suites.ablation_tables import ablation_groups
from mola.compare.report.suites.palette import strokes
from mola.compare.report.suites.reading import SuiteResults
from mola.compare.report.suites.remarks import every_remark
from mola.compare.report.suites.tables import METRIC_NAMES
from mola.compare.report.suites.words import FIGURE_WORDS, METHOD_WORDS, findings
from mola.compare.report.tables import Table

__all__ = ["SuiteReport", "render_page"]


@dataclass(frozen=True)
class SuiteReport:
    """A suite with everything made from it."""

    suite: SuiteResults
    tables: dict[str, Table]
    figures: dict[str, Drawn]


def render_page(reports: Sequence[SuiteReport], made_by: str) -> str:
    """The page.

    Args:
        reports: one for each suite, in order.
        made_by: the command and the version that made it.

    Returns:
        A complete HTML document.
    """
    titles = ", ".join(report.suite.title for report in reports)
    parts = [
        "<h1>How sure should a network be?</h1>",
        f'<p class="lead">Mixtures of Laplace approximations and what they are compared with, on {escape(titles)}: accuracy and '
        f"calibration in distribution, under shift, and against inputs that belong to no class.</p>",
    ]
    if len(reports) > 1:
        links = "".join(
            f'<li><a href="#{escape(report.suite.name)}">{escape(report.suite.title)}</a></li>' for report in reports
        )
        parts.append(f'<nav><ul class="suites">{links}</ul></nav>')
    parts += [_suite(report) for report in reports]
    parts.append(f"<footer>{escape(made_by)}</footer>")
    return document(f"mola report: {titles}", "page.css suites/suites.css", "\n".join(parts))


def _suite(report: SuiteReport) -> str:
    suite = report.suite
    runs = "one run" if suite.runs == 1 else f"{suite.runs} runs"
    tuned = f" Prior precisions keep a mean validation confidence of {suite.threshold:g}." if suite.threshold else ""
    parts = [
        f"<h2>{escape(suite.title)}</h2>",
        f'<p class="lead">{escape(suite.network)}, {runs}, {suite.components} components each.{tuned}</p>',
        _warnings(suite.warnings),
        _findings(suite),
        _methods(suite),
        *_main_exhibits(report),
        *_ablations(report),
        _shown(report, "cost"),
        _folded("Settings, and what was tuned", [report.tables["settings"]]),
        _small_print(suite),
    ]
    return f'<section id="{escape(suite.name)}">' + "\n".join(part for part in parts if part) + "</section>"


def _main_exhibits(report: SuiteReport) -> list[str]:
    tables = report.tables
    scores = [table for name, table in tables.items() if name.startswith("scores ")]
    levels = [tables[f"shift {metric}"] for metric in METRIC_NAMES if f"shift {metric}" in tables]
    return [
        _shown(report, "outliers"),
        _folded("Ours minus the paper's", [tables["difference"]] if "difference" in tables else []),
        _figure(report, "histograms"),
        _shown(report, "scores"),
        _folded("Every score on every set: AUROC, AUPR, FPR95", scores),
        _shown(report, "in-distribution"),
        _figure(report, "shift"),
        _folded("The same in numbers", levels),
        _figure(report, "reliability"),
        _figure(report, "examples"),
    ]


def _ablations(report: SuiteReport) -> list[str]:
    parts = []
    for group in ablation_groups(report.suite):
        parts.append(_figure(report, group) or f"<h3>{escape(group)}</h3>")
        if group == "variants" and "variants" in report.tables:
            parts.append(_titled(report.tables["variants"]))
            parts.append(_folded("In distribution and against outliers", [report.tables["ablation variants"]]))
        else:
            parts.append(table_markup(report.tables[f"ablation {group}"]))
    return parts


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    listed = "".join(f"<li>{escape(warning)}</li>" for warning in warnings)
    return f'<div class="warning" role="note"><strong>Compare with care</strong><ul>{listed}</ul></div>'


def _findings(suite: SuiteResults) -> str:
    told = "".join(f"<dt>{escape(finding.title)}</dt><dd>{escape(finding.text)}</dd>" for finding in findings(suite))
    return f'<dl class="findings">{told}</dl>' if told else ""


def _methods(suite: SuiteResults) -> str:
    drawn = strokes(suite.main)
    rows = [
        f"<dt>{_swatch(drawn[name])}{escape(name)}</dt><dd>{escape(METHOD_WORDS.get(name, ''))}</dd>"
        for name in suite.main
    ]
    return '<dl class="methods">' + "".join(rows) + "</dl>" if rows else ""


def _swatch(stroke: Mapping[str, Any]) -> str:
    """Filled, or hollow for a method whose lines are dashed."""
    kind, colour = ("swatch", stroke["color"]) if stroke["linestyle"] == "-" else ("swatch second", "transparent")
    return f'<span class="{kind}" style="background:{colour};border-color:{stroke["color"]}"></span>'


def _shown(report: SuiteReport, name: str) -> str:
    if name not in report.tables:
        return ""
    table = report.tables[name]
    return f"<h3>{escape(table.title)}</h3>{table_markup(table)}"


def _titled(table: Table) -> str:
    return f"<h4>{escape(table.title)}</h4>{table_markup(table)}"


def _folded(summary: str, tables: Sequence[Table]) -> str:
    if not tables:
        return ""
    inside = "".join(_titled(table) for table in tables)
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def _figure(report: SuiteReport, name: str) -> str:
    figure = report.figures.get(name)
    if figure is None:
        return ""
    title, caption = FIGURE_WORDS.get(name, (name, FIGURE_WORDS["variants"][1]))
    return figure_markup(figure, title, caption, heading="h3")


def _small_print(suite: SuiteResults) -> str:
    records = [record for methods in suite.groups.values() for found in methods.values() for record in found]
    sets = "; ".join(f"{one.title} {one.count}" for one in suite.sets.values() if one.role != "shift")
    remarks = [f"Data: {sets}.", *suite.notes, *every_remark(records)]
    environment = _environment(record.environment for record in records)
    if environment:
        remarks.append(f"Environment: {environment}.")
    measured = _environment([suite.cost_document["environment"]])
    if measured:
        remarks.append(f"Cost measured with: {measured}.")
    seconds = sum(sum(record.seconds.values()) for record in records)
    remarks.append(
        f"{len(records)} records; {seconds:.0f} seconds to fit, tune and predict, "
        "without the forward passes of the networks that were given."
    )
    listed = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    return f'<h3>Small print</h3><ul class="small">{listed}</ul>'


def _environment(environments: Iterable[Mapping[str, Any]]) -> str:
    """Each entry with all its values."""
    found: dict[str, list[str]] = {}
    for environment in environments:
        for key, value in environment.items():
            text = ", ".join(f"{one} {two}" for one, two in value.items()) if isinstance(value, dict) else str(value)
            if text not in found.setdefault(key, []):
                found[key].append(text)
    return "; ".join(f"{key} {' or '.join(values)}" for key, values in found.items())
