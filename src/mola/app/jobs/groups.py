"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mola.app.jobs.job import RUN
from mola.app.options import option

MORE, DECISIONS = "More options", "Decisions, calibrated on the validation data"


@dataclass(frozen=True, kw_only=True)
class Quiet:
    """Options of commands that print."""

    quiet: bool = option(False, "Print nothing", panel=RUN, kept=False)


@dataclass(frozen=True, kw_only=True)
class Computing(Quiet):
    """Options of commands that compute."""

    threads: int | None = option(None, "Threads to compute with", panel=RUN, minimum=1, shown="torch's", kept=False)


@dataclass(frozen=True, kw_only=True)
class Reporting(Computing):
    """Options of commands with a summary and a run file."""

    as_json: bool = option(False, "Print a summary as JSON, and nothing else", flags=("--json",), panel=RUN, kept=False)
    config: Path | None = option(
        None, "Options from an earlier run's TOML file; flags win", metavar="FILE", panel=RUN, kept=False
    )


@dataclass(frozen=True, kw_only=True)
class Device:
    """Options of commands that run networks."""

    device: str = option("cpu", "Device to compute on, such as cuda", panel=RUN, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class Opening(Device):
    """Options of commands that open a posterior's folder."""

    data: str | None = option(
        None,
        "Folder of the built-in data sets, also MOLA_DATA",
        metavar="DIR",
        envvar="MOLA_DATA",
        panel=MORE,
    )
    network: tuple[str, ...] = option(
        (),
        "The networks, named as for `mola fit`",
        metavar="NAME",
        panel=MORE,
        shown="the files named in the folder",
    )
    trust: bool = option(
        False,
        "Trust the folder: call the functions that it names, which can run code",
        panel=MORE,
        kept=False,
    )


@dataclass(frozen=True, kw_only=True)
class Deciding:
    """Options of commands with calibrated decisions."""

    false_alarm_rate: float | None = option(
        None, "Share of in-distribution inputs that may be flagged as OOD", shown="0.05", panel=DECISIONS
    )
    error_rate: float | None = option(
        None, "Selective prediction: answer so that at most this share of the answers is wrong", panel=DECISIONS
    )
    certainty: float | None = option(None, "Confidence level for --error-rate", shown="0.95", panel=DECISIONS)
    coverage: float | None = option(
        None,
        "Conformal prediction sets (intervals for regression) that contain this share of the true labels",
        panel=DECISIONS,
    )

    def rates(self) -> dict[str, Any]:
        """Return the arguments of `mola.app.jobs.decisions.make_decisions`."""
        names = ("false_alarm_rate", "error_rate", "certainty", "coverage")
        return {name: getattr(self, name) for name in names}
