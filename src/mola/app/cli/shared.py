"""Options that several commands share, and how commands end."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from mola.app.jobs.job import RUN
from mola.app.jobs.rows import Account
from mola.app.options import option
from mola.errors import OptionError

LEFT_OUT = 3
"""Exit code of a command that did its work but left inputs out."""

MORE, DECISIONS = "More options", "Decisions, calibrated on the validation data"


@dataclass(frozen=True, kw_only=True)
class Quiet:
    """For commands that print."""

    quiet: bool = option(False, "Print nothing", panel=RUN, kept=False)


@dataclass(frozen=True, kw_only=True)
class Computing(Quiet):
    """For commands that compute."""

    threads: int | None = option(None, "Threads to compute with", panel=RUN, minimum=1, shown="torch's", kept=False)


@dataclass(frozen=True, kw_only=True)
class Reporting(Computing):
    """For commands with a summary and a run file."""

    as_json: bool = option(False, "Print a summary as JSON, and nothing else", flags=("--json",), panel=RUN, kept=False)
    config: Path | None = option(
        None, "Options from an earlier run's TOML file; flags win", metavar="FILE", panel=RUN, kept=False
    )


@dataclass(frozen=True, kw_only=True)
class Device:
    """For commands that run networks."""

    device: str = option("cpu", "Device to compute on, such as cuda", panel=RUN, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class Opening(Device):
    """For commands that open a posterior's folder."""

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
        shown="those that the folder names",
    )
    trust: bool = option(
        False,
        "Trust the folder: read its .pt2 files and call the functions that it names, which can run code",
        panel=MORE,
        kept=False,
    )


@dataclass(frozen=True, kw_only=True)
class Deciding:
    """For commands with calibrated decisions."""

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


def check_report_folder(output: Path) -> None:
    """Refuse, before any work, a folder for a report that cannot be written or holds other files and no report."""
    check_writable(output)
    if output.is_file():
        raise OptionError(f"{output} is a file; expected a folder for the report: choose another --output.")
    found = sorted(path.name for path in output.iterdir() if not path.name.startswith(".")) if output.exists() else []
    if set(found) - {"figures"} and "index.html" not in found:
        raise OptionError(
            f"{output} holds other files ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''}) and no report: choose "
            f"another --output."
        )


def check_writable(path: Path) -> None:
    """Refuse, before any work, a file or folder that cannot be made."""
    above = next(one for one in (path, *path.absolute().parents) if one.is_dir() or (one != path and one.exists()))
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise OptionError(f"cannot write {path}: {above} is not a writable folder. Choose another --output.")


def finish(account: Account, summary: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    """Report inputs that were left out, or print the summary as JSON; exit with code 3 where inputs were left out."""
    if as_json:
        typer.echo(json.dumps(summary, indent=2, ensure_ascii=False))
    elif not quiet:
        console = Console(stderr=True, highlight=False)
        for line in account.lines():
            console.print(escape(line), style="yellow" if not line.startswith(" ") else "dim", soft_wrap=True)
    if len(account):
        raise typer.Exit(LEFT_OUT)


def scaling_words(found: Mapping[str, Any]) -> list[str]:
    """Settings of the scaling of logits that are not neutral, in words."""
    neutral = {"temperature": 1.0, "pooling": 1.0, "distance_exponent": 0.0}
    return [f"{name.replace('_', ' ')} {found[name]:.4g}" for name, value in neutral.items() if found[name] != value]
