"""The page of suites, rendered from the template in this package and those of `molaplace.report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import PackageLoader

from molaplace.report.page import page_environment, render_page
from molaplace.report.style import Drawn
from molaplace.report.tables import Table
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
        "remarks": suite_remarks,
    }
    return render_page("suites", environment, reports=reports, made_by=made_by)


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
