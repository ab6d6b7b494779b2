"""The `mola` command, also as `python -m mola`."""

from __future__ import annotations

import sys

from mola.errors import MolaError

__all__ = ["main"]


def main() -> None:
    """Run the command line. What goes wrong on purpose is one line on stderr and exit code 1, not a traceback."""
    try:
        from mola.cli import app

        app()
    except MolaError as error:
        sys.stderr.write(f"mola: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
