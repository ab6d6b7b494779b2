"""`mola explore`: a local page to play with a posterior."""

from __future__ import annotations

import socket
import time
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from mola.app.cli.progress import showing_progress
from mola.app.cli.shared import Computing, Opening
from mola.app.jobs.job import RUN
from mola.app.options import option
from mola.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class ExploreOptions(Opening, Computing):
    """The options of `mola explore`."""

    posterior: Path | None = option(
        None, "Folder that `mola fit` wrote", argument=True, metavar="POSTERIOR", shown="the digits demo"
    )
    reference: str | None = option(
        None, "Data for examples and OOD scores", metavar="DATA", shown="the validation data of the fit"
    )
    error_rate: float | None = option(
        None, "Selective prediction: largest share of wrong answers", shown="0.05, where that can be guaranteed"
    )
    certainty: float | None = option(None, "Confidence level for --error-rate", shown="0.95")
    port: int | None = option(
        None, "Port of the page", minimum=1, maximum=65535, shown="the first free one from 7860 on"
    )
    browser: bool = option(True, "Do not open the page in a browser")
    seed: int = option(0, "Seed of the digits demo", panel=RUN, minimum=0, maximum=2**31 - 1)


def explore(options: ExploreOptions) -> None:
    """Change a picture on a local page, and watch the confidence.

    Compares a single network (MAP), the deep ensemble (DE) and MoLA while you rotate, blur or draw a picture: their classes and
    confidence, MoLA's uncertainty, the outlier score beside those of the validation data, and the decision. Without a folder, opens
    the digits demo. Only this machine can reach the page. Ctrl-C ends it.

        mola explore posterior
    """
    from mola.app.explore.page import HOST, Explorer, launch
    from mola.app.explore.subject import digits_subject, open_subject
    from mola.compare.demo_result import DemoSettings

    posterior, port, quiet = options.posterior, options.port, options.quiet
    if posterior is None and (options.reference, options.error_rate, options.certainty) != (None, None, None):
        raise OptionError(
            "--reference, --error-rate and --certainty need a posterior's folder; the digits demo has its own."
        )
    with socket.socket() as probe:  # before the work rather than after it
        if port is not None and probe.connect_ex((HOST, port)) == 0:
            raise OptionError(f"port {port} of {HOST} is in use: choose another with --port, or leave it out.")
    with showing_progress(quiet=quiet) as progress:
        if posterior is None:
            subject = digits_subject(progress, DemoSettings(seed=options.seed))
        else:
            subject = open_subject(
                posterior,
                progress,
                reference=options.reference,
                directory=options.data,
                device=options.device,
                trust=options.trust,
                network=options.network,
                error_rate=options.error_rate,
                certainty=options.certainty,
            )
        page, address = launch(Explorer(subject), port)
    if not quiet:
        console = Console(highlight=False)
        for note in subject.notes:
            console.print(f"note: {escape(note)}", soft_wrap=True)
        console.print(f"Explore [bold]{escape(address)}[/bold] (Ctrl-C ends it)", soft_wrap=True)
    try:
        if options.browser:
            webbrowser.open(address)
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        pass
    finally:
        page.close()
