"""`mola explore`: a local page to play with a posterior."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mola.app.cli.progress import showing_progress
from mola.app.cli.shared_options import (
    RUN,
    Certainty,
    Data,
    Device,
    Network,
    Quiet,
    Threads,
    Trust,
    set_threads,
)
from mola.errors import OptionError

LOCAL = ("127.0.0.1", "localhost", "::1")


def explore(
    posterior: Annotated[
        Path | None,
        typer.Argument(help="Folder that `mola fit` wrote.  [default: the digits demo, trained on the spot]"),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="DATA", help="Data whose outlier scores to compare with.  [default: the validation data of the fit]"
        ),
    ] = None,
    error_rate: Annotated[
        float | None,
        typer.Option(
            help="Share of answers that may be wrong, for what would be answered.  [default: 0.05, if it can be promised]"
        ),
    ] = None,
    certainty: Certainty = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve the page on; 0 takes a free one.")] = 7860,
    host: Annotated[
        str, typer.Option(help="Address to serve the page on; 0.0.0.0 admits other machines.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    data: Data = None,
    network: Network = None,
    trust: Trust = False,
    device: Device = "cpu",
    threads: Threads = None,
    quiet: Quiet = False,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the digits demo.", rich_help_panel=RUN)] = 0,
) -> None:
    """Play with a posterior on a local page: turn, blur or draw a picture, and watch its confidence.

    Shows what a single network (MAP), the deep ensemble (DE) and MoLA say of it, where MoLA's doubt comes from, how outlying
    the picture is beside the validation data, and whether it would be answered, handed over, or called strange. Without a
    folder, opens on the digits demo. Ctrl-C ends it.

        mola explore posterior
    """
    # Before the work rather than after it: a missing extra, a port that is taken.
    import mola.app.explore.page  # noqa: F401
    from mola.app.explore.opinions import Explorer
    from mola.app.explore.server import listen, make_app, serve
    from mola.app.explore.subject import digits_subject, open_subject
    from mola.compare.demo_result import DemoSettings

    if posterior is None:
        _refuse_reference(reference)
        _refuse_rates(error_rate, certainty)
    listening = listen(host, port)
    address = f"http://{'[' + host + ']' if ':' in host else host}:{listening.getsockname()[1]}/"
    set_threads(threads)
    try:
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
            app = make_app(Explorer(subject), everyone=host not in LOCAL)
        console = Console(highlight=False)

        def ready() -> None:
            if not quiet:
                for note in subject.notes:
                    console.print(f"note: {escape(note)}", soft_wrap=True)
                console.print(f"Explore [bold]{escape(address)}[/bold] (Ctrl-C ends it)", soft_wrap=True)
            if browser:
                threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

        serve(app, listening, ready)
    finally:
        listening.close()


def _refuse_rates(error_rate: float | None, certainty: float | None) -> None:
    if error_rate is not None or certainty is not None:
        raise OptionError("--error-rate and --certainty go with a posterior's folder: the digits demo has its own.")


def _refuse_reference(reference: str | None) -> None:
    if reference is not None:
        raise OptionError("--reference goes with a posterior's folder: the digits demo has its own.")
