"""The `molaplace` command, which can also be run as `python -m molaplace`."""

from __future__ import annotations

import signal
import sys
import warnings
from typing import TextIO

from molaplace.errors import MolaError, MolaWarning


def main() -> None:
    """Run the `molaplace` command; on an expected error, print a one-line message to stderr and exit with code 1."""
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that temporary files are removed
    try:
        from molaplace.cli import run

        sys.exit(run(sys.argv[1:]))
    except MolaError as error:
        sys.stderr.write(f"molaplace: {error}\n")
        sys.exit(1)
    except OSError as error:
        # For example, the disk is full or the folder is not writable.
        if error.filename is None and error.strerror is None:
            raise
        file = "" if error.filename is None else f" ({error.filename})"
        sys.stderr.write(f"molaplace: {error.strerror}{file}. Completed files are kept.\n")
        sys.exit(1)
    except KeyboardInterrupt:  # interrupted before a command began
        sys.exit(130)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    # Show the library's own warnings without the file name and source line.
    if issubclass(category, MolaWarning):
        sys.stderr.write(f"molaplace: note: {message}\n")
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        (file or sys.stderr).write(text)


if __name__ == "__main__":
    main()
