"""Reports on disk: HTML pages from the templates in this package, figures, tables and numbers.

Styles and figures are inlined, so pages load no other files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from molaplace.evaluation import Evaluation
from molaplace.options import counted
from molaplace.progress import Progress, no_progress
from molaplace.report import words
from molaplace.report.comparison_tables import detail_table, evaluation_tables
from molaplace.report.figures import evaluation_figures
from molaplace.report.style import INK, Drawn, Planned, render, strokes
from molaplace.report.tables import as_html, as_markdown
from molaplace.saving.files import replacing

PAGE = "index.html"
RUN_FILE = "run.toml"
EVALUATION = "evaluation"


def write_evaluation(evaluation: Evaluation, directory: Path, *, overwrite: bool = False) -> Path:
    """Write the page of an evaluation to a folder, and return the path of the page; see `molaplace.saving.files.Marker.replaceable`."""
    with replacing(directory, EVALUATION, (PAGE,), overwrite=overwrite) as folder:
        write_page(evaluation, folder)
    return directory / PAGE


def write_page(evaluation: Evaluation, folder: Path, progress: Progress = no_progress) -> None:
    """Write `index.html`, `numbers.json`, `tables.md`, and `figures/<name>.svg` and `.png` to an empty folder."""
    tables = [*evaluation_tables(evaluation), detail_table(evaluation)]
    lines = [f"* **{title}.** {text}" for title, text in words.evaluation_findings(evaluation).items()]
    lines += ["", *[as_markdown(table) for table in tables if table is not None]]
    lines += [*[f"* {remark}" for remark in words.evaluation_remarks(evaluation)], ""]
    figures = draw_figures(evaluation_figures(evaluation), folder, progress)
    page = evaluation_page(evaluation, list(figures.values()))
    write_texts({"numbers.json": as_json(evaluation.document()), "tables.md": "\n".join(lines), PAGE: page}, folder)


def draw_figures(figures: Mapping[str, Planned], directory: Path, progress: Progress) -> dict[str, Drawn]:
    """Draw figures into the folder `figures` of a directory."""
    folder = directory / "figures"
    drawn: dict[str, Drawn] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for index, (name, planned) in enumerate(figures.items()):
        progress(f"drawing {name}", index / len(figures))
        drawn[name] = render(name, planned)
        drawn[name].write(folder)
    progress("done", 1.0)
    return drawn


def write_texts(texts: Mapping[str, str], directory: Path) -> None:
    """Write the files of a report, keyed by name."""
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")


def as_json(numbers: dict[str, Any]) -> str:
    """Return plain values as the text of a JSON file."""
    return json.dumps(numbers, indent=2, ensure_ascii=False) + "\n"


# --- pages -----------------------------------------------------------------------------------------------------------


def evaluation_page(evaluation: Evaluation, figures: Sequence[Drawn]) -> str:
    """Return the HTML page for a comparison on the user's data."""
    return render_page(
        "evaluation",
        evaluation=evaluation,
        outliers=len(evaluation.of_role("outlier")),
        findings=words.evaluation_findings(evaluation),
        tables=evaluation_tables(evaluation),
        detail=detail_table(evaluation),
        figures=figures,
        described=words.REGRESSION_DESCRIPTIONS if evaluation.regression else words.DESCRIPTIONS,
        remarks=words.evaluation_remarks(evaluation),
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
    # Text in backticks becomes a code element; a number stays on one line with its error and its unit.
    joined = re.sub(r" (?=[±%])|(?<=±) ", "\N{NO-BREAK SPACE}", text)
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(joined))))


def _duration(seconds: float) -> str:
    return counted(round(seconds), "second") if seconds >= 1 else "less than a second"


def _inline_svg(svg: str, label: str) -> Markup:
    # The page sets the size and the text colour; the label is for screen readers.
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(?:width|height|xmlns(?::\w+)?|version)="[^"]*"', "", opening)
    return Markup(f'{opening} role="img" aria-label="{escape(label)}">{rest}'.replace(INK, "currentColor"))
