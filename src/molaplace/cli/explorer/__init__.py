"""A local web page for exploring a posterior: the user changes a picture and compares MAP, the deep ensemble and MoLA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from molaplace.cli.job import RUN
from molaplace.cli.option_groups import PosteriorOptions
from molaplace.cli.options import option


@dataclass(frozen=True, kw_only=True)
class ExploreOptions(PosteriorOptions):
    """Options for `molaplace explore`."""

    posterior: Path | None = option(
        None, "Folder written by `molaplace fit`; by default, the digits demo", argument=True
    )
    port: int | None = option(
        None, "Port on which to serve the page", minimum=1, maximum=65535, shown="first free port from 7860 upwards"
    )
    browser: bool = option(True, "Open the page in a browser")
    quiet: bool = option(False, "Print nothing", panel=RUN)
    seed: int = option(0, "Random seed for the digits demo", panel=RUN, minimum=0, maximum=2**31 - 1)
