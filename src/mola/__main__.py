"""The `mola` command, also as `python -m mola`."""

from __future__ import annotations

import sys
import warnings
from typing import TextIO

from mola.errors import MolaError, MolaWarning

INTERRUPTED = 130
"""Exit code of a program that the user stopped."""


def main() -> None:
    """Run the command line. What goes wrong on purpose is one line on stderr and exit code 1, not a traceback."""
    warnings.showwarning = _show_warning
    try:
        from mola.app.cli import app

        app()
    except MolaError as error:
        sys.stderr.write(f"mola: {error}\n")
        sys.exit(1)
    except OSError as error:
        # A full disk, a folder without permission: nothing the program could have known.
        if error.filename is None and error.strerror is None:
            raise
        place = "" if error.filename is None else f" ({error.filename})"
        sys.stderr.write(f"mola: {error.strerror}{place}. What was finished before is kept.\n")
        sys.exit(1)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            sys.stderr.write("mola: stopped. The same command goes on where it can.\n")
        raise


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    # Warnings of this library are for the user of the command: no file name, no line of code.
    if issubclass(category, MolaWarning):
        sys.stderr.write(f"mola: note: {message}\n")
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        (file or sys.stderr).write(text)


if __name__ == "__main__":
    main()
