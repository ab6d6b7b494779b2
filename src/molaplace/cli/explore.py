"""`molaplace explore`: explore a posterior interactively on a local web page."""

from __future__ import annotations

import socket
import time
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from molaplace.cli.options import RUN, PosteriorOptions, option
from molaplace.cli.terminal import showing_progress
from molaplace.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class ExploreOptions(PosteriorOptions):
    """Options for `molaplace explore`."""

    posterior: Path | None = option(
        None, "Folder written by `molaplace fit`; by default, the digits demo", argument=True
    )
    port: int | None = option(
        None,
        "Port on which to serve the page",
        minimum=1,
        maximum=65535,
        default_text="first free port from 7860 upwards",
    )
    browser: bool = option(True, "Open the page in a browser")
    quiet: bool = option(False, "Print nothing", panel=RUN, stored=False)
    seed: int = option(0, "Random seed for the digits demo", panel=RUN, minimum=0, maximum=2**31 - 1)


def explore(options: ExploreOptions) -> None:
    """Change an image on a local web page and watch the confidence change.

    Compares a single network (MAP), the deep ensemble (DE) and MoLA as you rotate, blur or draw an image. Shows the predicted
    classes, the confidence, MoLA's uncertainty, and the OOD score relative to the validation data. Without a folder, opens the
    digits demo. The page is accessible only from this machine. Press Ctrl-C to stop.

        molaplace explore posterior
    """
    from molaplace.cli.explorer.page import HOST, Explorer, launch
    from molaplace.cli.explorer.subject import digits_subject, folder_subject
    from molaplace.cli.folder import open_posterior
    from molaplace.demo.run import DemoSettings

    posterior = options.posterior
    port = options.port
    quiet = options.quiet
    with socket.socket() as probe:  # check the port before any work begins
        if port is not None and probe.connect_ex((HOST, port)) == 0:
            raise OptionError(f"port {port} on {HOST} is in use. Choose another port with --port, or omit --port.")
    with showing_progress(quiet=quiet) as progress:
        if posterior is None:
            subject = digits_subject(progress, DemoSettings(seed=options.seed))
        else:
            progress("loading networks", 0.0)
            subject = folder_subject(
                open_posterior(posterior, options.device, trust=options.trust, network=options.network)
            )
        page, address = launch(Explorer(subject), port)
    if not quiet:
        console = Console(highlight=False)
        for note in subject.notes:
            console.print(f"note: {escape(note)}", soft_wrap=True)
        console.print(f"Open [bold]{escape(address)}[/bold] to explore (press Ctrl-C to stop)", soft_wrap=True)
    try:
        if options.browser:
            webbrowser.open(address)
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        pass
    finally:
        page.close()
