"""An evaluation as one HTML page that needs nothing else: styles and figures inside, no script, no request."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mola.compare.evaluation import Evaluation
from mola.compare.report.evaluation.tables import class_table, evaluation_tables, short
from mola.compare.report.evaluation.words import (
    CAPTIONS,
    METHOD_WORDS,
    SCORES_CAPTION,
    SCORES_TITLE,
    TITLES,
    findings,
    remarks,
)
from mola.compare.report.figures import Drawn
from mola.compare.report.markup import document, figure_markup, table_markup
from mola.compare.report.suites.palette import colours

__all__ = ["render_page"]


def render_page(result: Evaluation, figures: Sequence[Drawn]) -> str:
    """Everything an evaluation found, for a reader who was not there.

    Args:
        result: what it found.
        figures: in the order in which they are to stand.

    Returns:
        A complete HTML document.
    """
    networks = "one network" if result.components == 1 else f"{result.components} networks"
    outside = f", and {len(result.outside)} set{'s' * (len(result.outside) > 1)} of outliers" if result.outside else ""
    parts = [
        "<h1>Can these networks be trusted?</h1>",
        f'<p class="lead">{networks[0].upper()}{networks[1:]} on {result.count:,} inputs of '
        f"<code>{escape(result.test)}</code>{outside}: as they are, and with what can be done after training.</p>",
        _methods(result),
        *[f"<p><strong>{escape(title)}.</strong> {escape(text)}</p>" for title, text in findings(result)],
        *[f"<h2>{escape(table.title)}</h2>{table_markup(table)}" for table in evaluation_tables(result)],
        *[_figure(figure, result) for figure in figures],
        f"<h2>Class by class</h2>{table_markup(class_table(result), tall=True)}",
        "<h2>Small print</h2><ul>" + "".join(f"<li>{escape(one)}</li>" for one in remarks(result)) + "</ul>",
        _footer(result),
    ]
    return document("mola evaluate: can these networks be trusted?", "page.css", "\n".join(parts))


def _methods(result: Evaluation) -> str:
    painted = colours(result.methods)
    rows = [
        f'<dt><span class="swatch" style="background:{painted[name]}"></span>{escape(name)}</dt>'
        f"<dd>{escape(METHOD_WORDS[name])}</dd>"
        for name in result.methods
    ]
    return '<dl class="methods">' + "".join(rows) + "</dl>"


def _figure(figure: Drawn, result: Evaluation) -> str:
    kind, _, index = figure.name.partition("-")
    if kind == "scores":
        name = short(result.outside[int(index)], result.outside)
        return figure_markup(figure, SCORES_TITLE.format(name), SCORES_CAPTION)
    return figure_markup(figure, TITLES[kind], CAPTIONS[kind])


def _footer(result: Evaluation) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.made["versions"].items())
    return (
        f"<footer>Made by <code>mola evaluate {escape(result.made['posterior'])}</code> in {result.made['seconds']:.0f} seconds, "
        f"with {escape(versions)}.</footer>"
    )
