"""The page of suites, rendered from the template in this package and those of `molaplace.report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import PackageLoader

from molaplace.report.page import page_environment, render_page
from molaplace.report.style import Drawn
from molaplace.report.tables import Table
from molaplace_lab.report import words
from molaplace_lab.report.reading import METHODS, SuiteResults
from molaplace_lab.report.runs import LEADS
from molaplace_lab.report.tables import ablation_groups


@dataclass(frozen=True)
class SuiteReport:
    """The results of a suite, together with the tables and figures made from them."""

    suite: SuiteResults
    tables: dict[str, Table]
    figures: dict[str, Drawn]

    def named(self, beginning: str) -> list[Table]:
        """Return the tables whose names begin with the given prefix."""
        return [table for name, table in self.tables.items() if name.startswith(beginning)]


def suites_page(reports: Sequence[SuiteReport], made_by: str) -> str:
    """Return one HTML page for several suites, with `made_by` as the footer."""
    environment = page_environment(PackageLoader("molaplace_lab.report"))
    environment.globals |= {"METHODS": METHODS, "LEADS": LEADS}
    environment.filters |= {
        "ablation_groups": ablation_groups,
        "findings": words.suite_findings,
        "remarks": words.suite_remarks,
    }
    return render_page("suites", environment, reports=reports, made_by=made_by)
