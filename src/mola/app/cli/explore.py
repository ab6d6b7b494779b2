"""`mola explore`: a local page to play with a posterior."""

from __future__ import annotations

import socket
import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mola.app.cli.progress import showing_progress
from mola.app.cli.shared_options import RUN, Certainty, Data, Device, Network, Quiet, Threads, Trust, set_threads
from mola.errors import OptionError


def explore(
    posterior: Annotated[
        Path | None,
        typer.Argument(help="Folder that `mola fit` wrote.  [default: the digits demo, trained on the spot]"),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="DATA", help="Data for examples and outlier scores.  [default: the validation data of the fit]"
        ),
    ] = None,
    error_rate: Annotated[
        float | None,
        typer.Option(help="Largest share of wrong answers.  [default: 0.05, where that can be guaranteed]"),
    ] = None,
    certainty: Certainty = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the page.  [default: the first free one from 7860 on]")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    data: Data = None,
    network: Network = None,
    trust: Trust = False,
    device: Device = "cpu",
    threads: Threads = None,
    quiet: Quiet = False,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the digits demo.", rich_help_panel=RUN)] = 0,
) -> None:
    """Change a picture on a local page, and watch the confidence.

    Compares a single network (MAP), the deep ensemble (DE) and MoLA while you rotate, blur or draw a picture: their classes and
    confidence, MoLA's uncertainty, the outlier score beside those of the validation data, and the decision. Without a folder, opens
    the digits demo. Only this machine can reach the page. Ctrl-C ends it.

        mola explore posterior
    """
    from mola.app.explore.page import HOST, Explorer, launch
    from mola.app.explore.subject import digits_subject, open_subject
    from mola.compare.demo_result import DemoSettings

    if posterior is None and (reference, error_rate, certainty) != (None, None, None):
        raise OptionError(
            "--reference, --error-rate and --certainty need a posterior's folder; the digits demo has its own."
        )
    with socket.socket() as probe:  # before the work rather than after it
        if port is not None and probe.connect_ex((HOST, port)) == 0:
            raise OptionError(f"port {port} of {HOST} is in use: choose another with --port, or leave it out.")
    set_threads(threads)
    with showing_progress(quiet=quiet) as progress:
        if posterior is None:
            subject = digits_subject(progress, DemoSettings(seed=seed))
        else:
            subject = open_subject(
                posterior,
                progress,
                reference=reference,
                directory=None if data is None else str(data),
                device=device,
                trust=trust,
                network=network or (),
                error_rate=error_rate,
                certainty=certainty,
            )
        page, address = launch(Explorer(subject), port)
    if not quiet:
        console = Console(highlight=False)
        for note in subject.notes:
            console.print(f"note: {escape(note)}", soft_wrap=True)
        console.print(f"Explore [bold]{escape(address)}[/bold] (Ctrl-C ends it)", soft_wrap=True)
    try:
        if browser:
            webbrowser.open(address)
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        pass
    finally:
        page.close()
