"""`molaplace explore`: explore a posterior interactively on a local web page."""

from __future__ import annotations

import socket
import time
import webbrowser

from rich.console import Console
from rich.markup import escape

from molaplace.cli.explorer import ExploreOptions
from molaplace.cli.progress import showing_progress
from molaplace.errors import OptionError


def explore(options: ExploreOptions) -> None:
    """Change an image on a local web page and watch the confidence change.

    Compares a single network (MAP), the deep ensemble (DE) and MoLA as you rotate, blur or draw an image. Shows the predicted
    classes, the confidence, MoLA's uncertainty, and the OOD score relative to the validation data. Without a folder, opens the
    digits demo. The page is accessible only from this machine. Press Ctrl-C to stop.

        molaplace explore posterior
    """
    from molaplace.cli.explorer.page import HOST, Explorer, launch
    from molaplace.cli.explorer.subject import digits_subject, open_subject
    from molaplace.demo.run import DemoSettings

    posterior = options.posterior
    port = options.port
    quiet = options.quiet
    with socket.socket() as probe:  # check the port before any work begins
        if port is not None and probe.connect_ex((HOST, port)) == 0:
            raise OptionError(f"port {port} on {HOST} is in use. Choose another port with --port, or omit --port.")
    with showing_progress(quiet=quiet) as progress:
        settings = DemoSettings(seed=options.seed)
        subject = digits_subject(progress, settings) if posterior is None else open_subject(options, progress)
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
