"""HTML pages from the templates beside this file. They need nothing else: styles and figures inside, no script, no request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mola.compare.demo_result import DemoResult
from mola.compare.record import Comparison
from mola.compare.report import words
from mola.compare.report.number_tables import number_tables, output_table
from mola.compare.report.reading import SuiteResults
from mola.compare.report.rendering import Drawn
from mola.compare.report.single_run_tables import class_table, demo_tables, evaluation_tables
from mola.compare.report.style import INK, strokes
from mola.compare.report.suite_tables import ablation_groups
from mola.compare.report.tables import Table

SCREENS = (700, 900, 1100, 1300)
"""Widths in pixels up to which a hint can be shown; page.css has a rule for each."""

PHONE = 44
"""Characters of a table's row that fit on a phone, where letters are smaller and long names wrap."""

LETTER, PADDING, MARGINS, PAGE = 8.1, 22.4, 40, 1100
"""Pixels: of a letter in a table, around a cell, around the page, and of a folded part of the page at its widest."""

UNBROKEN = re.compile(r"\b[A-Z][A-Za-z]*(?:-[A-Z0-9]\w*)+")
"""Names that must not be broken at their hyphens, such as MAP-T and CIFAR-10-C."""


@dataclass(frozen=True)
class SuiteReport:
    """A suite with everything made from it."""

    suite: SuiteResults
    tables: dict[str, Table]
    figures: dict[str, Drawn]

    def named(self, beginning: str) -> list[Table]:
        """The tables whose names begin so."""
        return [table for name, table in self.tables.items() if name.startswith(beginning)]


def demo_page(result: DemoResult, figures: Mapping[str, Drawn]) -> str:
    """The demo, for a reader who was not there.

    Args:
        result: what it found.
        figures: by name, in the order in which they are to stand.

    Returns:
        A complete HTML document.
    """
    return _render(
        "demo",
        result=result,
        headlines=words.demo_headlines(result),
        tables=demo_tables(result.comparison),
        sizes={one.role: one.count for one in result.comparison.sets.values()},
        figures=[(drawn, *words.DEMO_FIGURES[name]) for name, drawn in figures.items()],
        remarks=words.demo_remarks(result),
    )


def evaluation_page(comparison: Comparison, figures: Mapping[str, Drawn]) -> str:
    """A comparison on a user's own data.

    Args:
        comparison: what was found.
        figures: by name, in the order in which they are to stand.

    Returns:
        A complete HTML document.
    """
    told, outliers = [], comparison.of_role("outlier")
    for name, drawn in figures.items():
        kind, _, index = name.partition("-")
        title, caption = words.EVALUATION_FIGURES[kind]
        told.append((drawn, title.format(outliers[int(index)].title) if index else title, caption))
    numbers = comparison.regression
    return _render(
        "evaluation",
        comparison=comparison,
        outliers=len(outliers),
        findings=words.evaluation_findings(comparison),
        tables=number_tables(comparison) if numbers else evaluation_tables(comparison),
        classes=output_table(comparison) if numbers else class_table(comparison),
        figures=told,
        described=words.NUMBER_METHODS if numbers else words.METHODS,
        remarks=words.evaluation_remarks(comparison),
    )


def suites_page(reports: Sequence[SuiteReport], made_by: str) -> str:
    """Several suites.

    Args:
        reports: one for each suite, in order.
        made_by: the command and the version that made it.

    Returns:
        A complete HTML document.
    """
    return _render("suites", reports=reports, made_by=made_by, FIGURES=words.SUITE_FIGURES)


def _render(template: str, **context: object) -> str:
    environment = Environment(
        loader=PackageLoader("mola.compare.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"strokes": strokes, "METHODS": words.METHODS}
    environment.filters |= {
        "ablation_groups": ablation_groups,
        "findings": words.suite_findings,
        "inline_svg": _inline_svg,
        "prose": _prose,
        "remarks": words.suite_remarks,
        "scroll_hint": _scroll_hint,
    }
    return environment.get_template(f"{template}.html.jinja").render(context)


def _prose(text: str) -> Markup:
    # Running text, in which a number stays with its error and its unit, a method's name in one piece; commands are set
    # as code.
    joined = re.sub(
        r"(?<=\d) (?=%)| (?=\N{PLUS-MINUS SIGN} \d)|(?<=\N{PLUS-MINUS SIGN}) (?=\d)", "\N{NO-BREAK SPACE}", text
    )
    unbroken = UNBROKEN.sub(r'<span class="unbroken">\g<0></span>', str(escape(joined)))
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", unbroken))


def _inline_svg(svg: str, label: str) -> Markup:
    # An SVG element as part of the page: sized by it, in its text colour, and named for those who cannot see it.
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(?:width|height|xmlns(?::\w+)?|version)="[^"]*"', "", opening)
    return Markup(f'{opening} role="img" aria-label="{escape(label)}">{rest}'.replace(INK, "currentColor"))


def _scroll_hint(table: Table) -> str:
    letters = table.name_width + sum(table.widths)
    pixels = LETTER * letters + PADDING * (1 + len(table.columns)) + 10 * len(table.groups)
    if pixels > PAGE:
        return "always"
    if letters + 3 * len(table.columns) <= PHONE:
        return ""
    return f"below-{min(screen for screen in SCREENS if screen >= min(pixels + MARGINS, SCREENS[-1]))}"
