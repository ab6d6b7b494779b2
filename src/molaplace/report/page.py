"""HTML pages, rendered from the templates in this package. Styles and figures are inlined, so pages load no other files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from molaplace.evaluation.demo_result import DemoResult
from molaplace.evaluation.record import Comparison
from molaplace.options import counted
from molaplace.report import words
from molaplace.report.numbers import LEADS
from molaplace.report.reading import METHODS, SuiteResults
from molaplace.report.single_run_tables import demo_tables, detail_table, evaluation_tables
from molaplace.report.style import INK, Drawn, strokes
from molaplace.report.suite_tables import ablation_groups
from molaplace.report.tables import Table, as_html


@dataclass(frozen=True)
class SuiteReport:
    """The results of a suite, together with the tables and figures made from them."""

    suite: SuiteResults
    tables: dict[str, Table]
    figures: dict[str, Drawn]

    def named(self, beginning: str) -> list[Table]:
        """Return the tables whose names begin with the given prefix."""
        return [table for name, table in self.tables.items() if name.startswith(beginning)]


def demo_page(result: DemoResult, figures: Sequence[Drawn]) -> str:
    """Return the HTML page for the demo."""
    return _render(
        "demo",
        result=result,
        headlines=words.demo_headlines(result),
        tables=demo_tables(result.comparison),
        sizes={one.role: one.count for one in result.comparison.sets.values()},
        figures=figures,
        remarks=words.demo_remarks(result),
    )


def evaluation_page(comparison: Comparison, figures: Sequence[Drawn]) -> str:
    """Return the HTML page for a comparison on the user's data."""
    return _render(
        "evaluation",
        comparison=comparison,
        outliers=len(comparison.of_role("outlier")),
        findings=words.evaluation_findings(comparison),
        tables=evaluation_tables(comparison),
        detail=detail_table(comparison),
        figures=figures,
        described=words.REGRESSION_METHODS if comparison.regression else words.EVALUATION_METHODS,
        remarks=words.evaluation_remarks(comparison),
    )


def suites_page(reports: Sequence[SuiteReport], made_by: str) -> str:
    """Return one HTML page for several suites, with `made_by` as the footer."""
    return _render("suites", reports=reports, made_by=made_by)


def _render(template: str, **context: object) -> str:
    environment = Environment(
        loader=PackageLoader("molaplace.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"strokes": strokes, "METHODS": METHODS, "LEADS": LEADS}
    environment.filters |= {
        "as_html": as_html,
        "ablation_groups": ablation_groups,
        "duration": _duration,
        "findings": words.suite_findings,
        "inline_svg": _inline_svg,
        "prose": _prose,
        "remarks": words.suite_remarks,
    }
    return environment.get_template(f"{template}.html.jinja").render(context)


def _prose(text: str) -> Markup:
    # Text in backticks becomes a code element.
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _duration(seconds: float) -> str:
    return counted(round(seconds), "second") if seconds >= 1 else "less than a second"


def _inline_svg(svg: str, label: str) -> Markup:
    # The page sets the size and the text colour; the label is for screen readers.
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(?:width|height|xmlns(?::\w+)?|version)="[^"]*"', "", opening)
    return Markup(f'{opening} role="img" aria-label="{escape(label)}">{rest}'.replace(INK, "currentColor"))
