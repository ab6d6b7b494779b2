"""Everything `mola report` leaves on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import mola
from mola.compare.report.demo import prepare_folder
from mola.compare.report.formats import as_markdown, latex_document
from mola.compare.report.suites.contents import suite_figures, suite_tables
from mola.compare.report.suites.kept_figures import drawing_key, kept_or_drawn
from mola.compare.report.suites.page import SuiteReport, render_page
from mola.compare.report.suites.reading import SuiteResults, read_suite
from mola.compare.report.suites.words import FIGURE_WORDS, findings
from mola.compare.store import Store
from mola.errors import OptionError
from mola.options import one_of

__all__ = ["read_suites", "write_report"]


def read_suites(results: str | Path, names: Sequence[str] = ()) -> list[SuiteResults]:
    """Read suites before anything is written, so that what is wrong with them is told at once.

    Args:
        results: folder of the store.
        names: of suites; none means all that have results.

    Returns:
        The suites, each once, in the order asked for.
    """
    store = Store(results)
    known = store.suites()
    chosen = list(dict.fromkeys(one_of(name, known, "suite") for name in names)) or known
    return [read_suite(store, name) for name in chosen]


def write_report(
    suites: Sequence[SuiteResults], directory: Path, progress: Callable[[str, float], None] = lambda doing, done: None
) -> Path:
    """Write `index.html`, `tables.md`, `tables.tex`, and each figure as `figures/<suite>-<name>.svg` and `.png`.

    A figure whose numbers have not changed since it was drawn there is not drawn again.

    Args:
        suites: what was read.
        directory: where to; files of an earlier report are replaced.
        progress: told what is being drawn, and which share is done.

    Returns:
        The page.

    Raises:
        OptionError: if a file cannot be written.
    """
    pictures = prepare_folder(directory)
    drawers = [(suite, suite_figures(suite)) for suite in suites]
    total, done = sum(len(figures) for _, figures in drawers), 0
    reports = []
    page = directory / "index.html"
    try:
        for suite, figures in drawers:
            drawn, key = {}, drawing_key(suite.fingerprint)
            for name, make in figures.items():
                progress(f"drawing {suite.name}, {name}", done / max(total, 1))
                drawn[name] = kept_or_drawn(_file_name(suite, name), make, key, pictures)
                done += 1
            reports.append(SuiteReport(suite, suite_tables(suite), drawn))
        sections = [(report.suite.title, list(report.tables.values())) for report in reports]
        (directory / "tables.md").write_text(_markdown(reports), encoding="utf-8")
        (directory / "tables.tex").write_text(latex_document(sections), encoding="utf-8")
        page.write_text(render_page(reports, _made_by(suites)), encoding="utf-8")
    except OSError as error:
        message = (
            f"cannot write the report to {directory} ({error.strerror}): make room, or choose another output folder."
        )
        raise OptionError(message) from error
    progress("done", 1.0)
    return page


def _file_name(suite: SuiteResults, name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in f"{suite.name}-{name}")


def _made_by(suites: Sequence[SuiteResults]) -> str:
    return f"Made by `mola report {' '.join(suite.name for suite in suites)}` with mola {mola.__version__}, from stored results alone."


def _markdown(reports: Sequence[SuiteReport]) -> str:
    lines = []
    for report in reports:
        suite = report.suite
        lines += [f"## {suite.title}", ""]
        lines += [f"> **Compare with care:** {warning}\n" for warning in suite.warnings]
        lines += [f"* **{finding.title}.** {finding.text}" for finding in findings(suite)]
        lines.append("")
        lines += [as_markdown(table) for table in report.tables.values()]
        for name, figure in report.figures.items():
            title = FIGURE_WORDS.get(name, (name, ""))[0]
            lines += [f"![{title}](figures/{figure.name}.svg)", ""]
        lines += [f"* {note}" for note in suite.notes] + [""]
    return "\n".join(lines)
