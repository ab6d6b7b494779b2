"""`python -m molaplace_lab`: train networks, run the paper's experiments on them, and report the results."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from molaplace.errors import MolaError, MolaWarning


def main() -> None:
    """Run a command; an expected error is printed as one line on stderr, with exit code 1."""
    from molaplace_lab.commands import app

    show_warning = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *location: Any) -> None:
        if issubclass(category, MolaWarning):
            sys.stderr.write(f"molaplace_lab: note: {message}\n")
        else:
            show_warning(message, category, *location)

    warnings.showwarning = show  # type: ignore[assignment]
    try:
        app()
    except MolaError as error:
        sys.stderr.write(f"molaplace_lab: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
