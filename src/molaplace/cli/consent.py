"""Consent to run code that a file names, such as `package.module:function` in a posterior's document or in a run file.

The file may come from a stranger, and importing a module runs it. A function that the user names on the command line needs no
consent; a function that only a file names needs `--trust`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from molaplace.errors import OptionError
from molaplace.imported import is_function_name


def require_trust(names: Iterable[str], source: Path, flag: str, *, trust: bool) -> None:
    """Raise `OptionError` if a file names a function and the user does not trust it. Nothing is imported."""
    for name in names:
        if is_function_name(name) and not trust:
            raise OptionError(
                f"{source} names {name}. Importing this function could run a stranger's code. If you trust {source}, add --trust; if "
                f"this is your own code, you can also name it: {flag} {name}."
            )
