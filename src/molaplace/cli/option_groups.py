"""Options shared by several commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molaplace.cli.job import RUN
from molaplace.cli.options import option

MORE = "More options"
DECISIONS = "Decisions, calibrated on the validation data"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options for commands that run long computations, and write a summary and a run file."""

    quiet: bool = option(False, "Print nothing", panel=RUN, stored=False)
    threads: int | None = option(None, "Number of threads", panel=RUN, minimum=1, shown="PyTorch's", stored=False)
    as_json: bool = option(False, "Print only a summary as JSON", flags=("--json",), panel=RUN, stored=False)
    config: Path | None = option(
        None, "TOML file with the options of an earlier run; flags override it", panel=RUN, stored=False
    )


@dataclass(frozen=True, kw_only=True)
class PosteriorOptions:
    """Options for commands that open a posterior's folder."""

    device: str = option("cpu", "Device to compute on, such as cuda", panel=RUN)
    network: tuple[str, ...] = option(
        (), "Networks, named as in `molaplace fit`", panel=MORE, shown="the networks named in the folder"
    )
    trust: bool = option(
        False, "Trust the folder: import and run the functions that it names", panel=MORE, stored=False
    )


@dataclass(frozen=True, kw_only=True)
class DecisionOptions:
    """Options for commands that make calibrated decisions."""

    false_alarm_rate: float | None = option(
        None, "Fraction of in-distribution inputs that may be flagged as OOD", shown="0.05", panel=DECISIONS
    )
    error_rate: float | None = option(None, "Selective prediction: maximum fraction of wrong answers", panel=DECISIONS)
    certainty: float | None = option(None, "Confidence level for --error-rate", shown="0.95", panel=DECISIONS)
    coverage: float | None = option(
        None,
        "Conformal sets (for regression, intervals) that contain the true value for this fraction of inputs",
        panel=DECISIONS,
    )

    def rates(self) -> dict[str, Any]:
        """Return the arguments for `molaplace.cli.decisions.make_decisions`."""
        names = ("false_alarm_rate", "error_rate", "certainty", "coverage")
        return {name: getattr(self, name) for name in names}
