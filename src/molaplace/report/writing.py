"""Functions that write reports to disk: the page, the figures, the tables and the numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from molaplace.errors import OptionError
from molaplace.evaluation import Comparison
from molaplace.progress import Progress, no_progress
from molaplace.report import words
from molaplace.report.comparison_tables import detail_table, evaluation_tables
from molaplace.report.figures import evaluation_figures
from molaplace.report.page import evaluation_page
from molaplace.report.style import Drawn, Planned, render
from molaplace.report.tables import as_markdown


def write_evaluation(
    comparison: Comparison, numbers: dict[str, Any], directory: Path, progress: Progress = no_progress
) -> Path:
    """Write `index.html`, `numbers.json`, `tables.md`, and `figures/<name>.svg` and `.png`; return the path of the page."""
    tables = [*evaluation_tables(comparison), detail_table(comparison)]
    lines = [f"* **{finding.title}.** {finding.text}" for finding in words.evaluation_findings(comparison)]
    lines += ["", *[as_markdown(table) for table in tables if table is not None]]
    lines += [*[f"* {remark}" for remark in words.evaluation_remarks(comparison)], ""]
    with writing_to(directory):
        figures = draw_figures(evaluation_figures(comparison), directory, progress)
        page = evaluation_page(comparison, list(figures.values()))
        return write_texts(
            {"numbers.json": as_json(numbers), "tables.md": "\n".join(lines), "index.html": page}, directory
        )


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


def write_texts(texts: Mapping[str, str], directory: Path) -> Path:
    """Write the files of a report, keyed by name, and return the path of the page."""
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory / "index.html"


def as_json(numbers: dict[str, Any]) -> str:
    """Return plain values as the text of a JSON file."""
    return json.dumps(numbers, indent=2, ensure_ascii=False) + "\n"


@contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Turn errors of the file system into an `OptionError` that names the directory."""
    try:
        yield
    except OSError as error:
        raise OptionError(
            f"cannot write the report to {directory} ({error.strerror}): free some disk space or choose another output folder."
        ) from error
