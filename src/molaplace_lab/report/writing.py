"""Write the report of suites: the figures, the tables, and the page, from the template in this package and those of `molaplace.report`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import PackageLoader

import molaplace as mola
from molaplace.progress import Progress, no_progress
from molaplace.report.style import Drawn
from molaplace.report.tables import Table, as_markdown
from molaplace.report.words import DESCRIPTIONS
from molaplace.report.writing import PAGE, draw_figures, page_environment, render_page, write_texts
from molaplace.saving.files import replacing
from molaplace_lab.report.figures import suite_figures, suite_strokes
from molaplace_lab.report.reading import SuiteResults
from molaplace_lab.report.runs import LEADS
from molaplace_lab.report.tables import ablation_groups, suite_tables

SUITE_DESCRIPTIONS = {
    **DESCRIPTIONS,
    "MoLA": "all networks, each with a Laplace approximation of its last layer, tuned by the paper's rule",
    "JUCAL": "the networks' mean logits and their disagreement, each with a factor chosen by validation log loss",
    "DE-SVS": "the mean of the logits with structured vector scaling",
    "DE-SMS": "the mean of the logits with structured matrix scaling",
    "SWAG": "a Gaussian fitted to the weights from the last training steps",
    "MultiSWAG": "a mixture of SWAGs",
    "MIMO": "one network that makes several predictions in one forward pass",
    "LLLA (distance)": "MoLA (distance) with the first network only",
    "LLLA (calibrated)": "MoLA (calibrated) with the first network only",
    "MIMO-MoLA": "MIMO with a Laplace approximation of each head",
    "MoLA (calibrated)": "MoLA tuned by the default rule: temperature, pooling, prior precision and distance exponent",
    "MoLA (NLL)": "MoLA tuned by validation log loss",
    "MoLA (distance)": "MoLA with logits divided by the distance of the features from the training classes",
    "MoLA (all layers)": "all networks, each with a linearised Laplace approximation of all its weights (K-FAC)",
    "MoLA (subnetwork)": "all networks, each with a Laplace approximation of the 1000 weights with the largest variance",
}
"""Descriptions of the methods of suites, whose MoLA is tuned by the paper's rule."""


@dataclass(frozen=True)
class SuiteReport:
    """The results of a suite, together with the tables and figures made from them."""

    suite: SuiteResults
    tables: dict[str, Table]
    figures: dict[str, Drawn]

    def tables_beginning(self, beginning: str) -> list[Table]:
        """Return the tables whose names begin with the given prefix."""
        return [table for name, table in self.tables.items() if name.startswith(beginning)]


def suite_remarks(suite: SuiteResults) -> list[str]:
    """Return the remarks shown below the results of a suite: data, tuning and computing time."""
    records = [record for methods in suite.groups.values() for runs in methods.values() for record in runs]
    sets = "; ".join(f"{info.title} {info.count}" for info in suite.sets.values() if info.role != "shift")
    notes = dict.fromkeys(str(note) for record in records for note in record.chosen.get("notes", []))
    seconds = sum(sum(record.seconds.values()) for record in records)
    return [
        f"Data: {sets}.",
        *suite.notes,
        *notes,
        f"Fitting, tuning and prediction for {len(records)} records took {seconds:.0f} seconds, excluding the networks' "
        f"forward passes.",
    ]


def suites_page(reports: Sequence[SuiteReport], made_by: str) -> str:
    """Return one HTML page for several suites, with `made_by` as the footer."""
    environment = page_environment(PackageLoader("molaplace_lab.report"))
    environment.globals |= {"DESCRIPTIONS": SUITE_DESCRIPTIONS, "LEADS": LEADS, "strokes": suite_strokes}
    environment.filters |= {"ablation_groups": ablation_groups, "remarks": suite_remarks}
    return render_page("suites", environment, reports=reports, made_by=made_by)


def write_report(suites: Sequence[SuiteResults], directory: Path, progress: Progress = no_progress) -> Path:
    """Write `index.html`, `tables.md`, and `figures/<suite>-<name>.svg` and `.png`; return the path of the page."""
    planned = {suite.name: suite_figures(suite) for suite in suites}
    files = {(suite, name): _file_name(suite, name) for suite, figures in planned.items() for name in figures}
    made_by = f"Made by `python -m molaplace_lab report {' '.join(planned)}` with molaplace {mola.__version__}."
    with replacing(directory, "report", (PAGE,)) as folder:
        drawn = draw_figures({file: planned[suite][name] for (suite, name), file in files.items()}, folder, progress)
        reports = [
            SuiteReport(
                suite, suite_tables(suite), {name: drawn[files[suite.name, name]] for name in planned[suite.name]}
            )
            for suite in suites
        ]
        texts = {
            "tables.md": "\n".join([LEADS, "", *(line for report in reports for line in _markdown(report))]),
            PAGE: suites_page(reports, made_by),
        }
        write_texts(texts, folder)
    return directory / PAGE


def _file_name(suite: str, name: str) -> str:
    return re.sub(r"[^\w]|_", "-", f"{suite}-{name}")


def _markdown(report: SuiteReport) -> list[str]:
    suite = report.suite
    lines = [f"## {suite.title}", "", *[as_markdown(table) for table in report.tables.values()]]
    for figure in report.figures.values():
        lines += [f"![{figure.title}](figures/{figure.name}.svg)", ""]
    return [*lines, *[f"* {note}" for note in suite.notes], ""]
