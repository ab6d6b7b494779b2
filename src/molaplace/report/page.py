"""HTML pages, rendered from the templates in this package. Styles and figures are inlined, so pages load no other files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from molaplace.evaluation import Comparison
from molaplace.options import counted
from molaplace.report import words
from molaplace.report.comparison_tables import detail_table, evaluation_tables
from molaplace.report.style import INK, Drawn, strokes
from molaplace.report.tables import as_html


def evaluation_page(comparison: Comparison, figures: Sequence[Drawn]) -> str:
    """Return the HTML page for a comparison on the user's data."""
    return render_page(
        "evaluation",
        comparison=comparison,
        outliers=len(comparison.of_role("outlier")),
        findings=words.evaluation_findings(comparison),
        tables=evaluation_tables(comparison),
        detail=detail_table(comparison),
        figures=figures,
        described=words.REGRESSION_DESCRIPTIONS if comparison.regression else words.DESCRIPTIONS,
        remarks=words.evaluation_remarks(comparison),
    )


def render_page(template: str, environment: Environment | None = None, **context: object) -> str:
    """Return a page rendered from the template `<template>.html.jinja` of the environment (by default, `page_environment()`)."""
    environment = page_environment() if environment is None else environment
    return environment.get_template(f"{template}.html.jinja").render(context)


def page_environment(*loaders: BaseLoader) -> Environment:
    """Return an environment with this package's templates and, before them, those of the given loaders."""
    environment = Environment(
        loader=ChoiceLoader([*loaders, PackageLoader("molaplace.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"strokes": strokes, "DESCRIPTIONS": words.DESCRIPTIONS}
    environment.filters |= {"as_html": as_html, "duration": _duration, "inline_svg": _inline_svg, "prose": _prose}
    return environment


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
