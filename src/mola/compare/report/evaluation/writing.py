"""Everything `mola evaluate` leaves on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from mola.compare.evaluation import Evaluation
from mola.compare.report.demo import prepare_folder
from mola.compare.report.evaluation.figures import evaluation_figures
from mola.compare.report.evaluation.page import render_page
from mola.compare.report.evaluation.tables import FEW, class_table, evaluation_tables
from mola.compare.report.evaluation.words import findings, remarks
from mola.compare.report.figures import render, write_figure
from mola.compare.report.formats import as_markdown
from mola.errors import OptionError

__all__ = ["write_evaluation"]


def write_evaluation(
    result: Evaluation, directory: Path, progress: Callable[[str, float], None] = lambda doing, done: None
) -> Path:
    """Write `index.html`, `numbers.json`, `tables.md`, and each figure as `figures/<name>.svg` and `.png`.

    Args:
        result: what was found.
        directory: where to; files of an earlier run are replaced.
        progress: told what is being drawn, and which share is done.

    Returns:
        The page.

    Raises:
        OptionError: if a file cannot be written.
    """
    pictures = prepare_folder(directory)
    page = directory / "index.html"
    drawn, makers = [], evaluation_figures(result)
    try:
        for index, (name, make) in enumerate(makers.items()):
            progress(f"drawing {name}", index / len(makers))
            drawn.append(render(name, make))
            write_figure(drawn[-1], pictures)
        numbers = json.dumps(result.plain(), indent=2, ensure_ascii=False)
        (directory / "numbers.json").write_text(numbers + "\n", encoding="utf-8")
        (directory / "tables.md").write_text(_markdown(result), encoding="utf-8")
        page.write_text(render_page(result, drawn), encoding="utf-8")
    except OSError as error:
        message = f"cannot write the report to {directory} ({error.strerror}): choose another --output."
        raise OptionError(message) from error
    progress("done", 1.0)
    return page


def _markdown(result: Evaluation) -> str:
    lines = [f"* **{title}.** {text}" for title, text in findings(result)]
    lines += ["", *[as_markdown(table) for table in [*evaluation_tables(result), class_table(result, FEW)]]]
    return "\n".join([*lines, *[f"* {one}" for one in remarks(result)], ""])
