"""Functions and classes of the user's code, imported by a name of the form `package.module:function`.

A file that comes from a stranger may name a function, such as the one that builds a bundle's networks, and importing a module runs it. A
function that the user names on the command line needs no consent; a function that only a file names needs `--trust`.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molaplace.errors import OptionError

if TYPE_CHECKING:
    from torch import nn


def is_path(name: str) -> bool:
    """Return True if a name with a colon is a path, such as `data/at:noon` or a path on a Windows drive."""
    return any(sign in name for sign in "/\\")


def is_function_name(name: str) -> bool:
    """Return True for a name of the form `package.module:function`, and False for paths and the digits."""
    if ":" not in name or is_path(name) or name.startswith("digits:"):
        return False
    return not Path(name).expanduser().exists()


def require_trust(names: Iterable[str], source: Path, flag: str, *, trust: bool) -> None:
    """Raise `OptionError` if a file names a function and the user does not trust it. Nothing is imported."""
    for name in names:
        if is_function_name(name) and not trust:
            raise not_trusted(name, source, flag)


def not_trusted(name: str, source: Path, flag: str) -> OptionError:
    """Return the error for a function that only a file names."""
    return OptionError(
        f"{source} names {name}. Importing this function could run a stranger's code. If you trust {source}, add --trust (in Python, "
        f"trust=True); if this is your own code, you can also name it: {flag} {name}."
    )


def import_function(name: str) -> Callable[..., Any]:
    """Import `package.module:function`, which may be in the current folder; raise `OptionError` if that fails."""
    with _current_folder_first() as folder:
        try:
            function = pkgutil.resolve_name(name)
        except Exception as error:  # the user's code may raise any exception
            raise OptionError(
                f"cannot import {name!r} ({type(error).__name__}: {error}). Expected package.module:function, in {folder} or installed."
            ) from error
    if not callable(function):
        raise OptionError(f"{name!r} is not a function. Expected package.module:function.")
    # The user's code may import more modules when it runs. The current folder is added at the end of the path, so that its subfolders
    # do not hide installed packages.
    if folder not in sys.path:
        sys.path.append(folder)
    return function


def import_builder(name: str) -> Callable[[], nn.Module]:
    """Import a class, or a function without arguments, that builds a network; see `import_function`."""
    from torch import nn

    function = import_function(name)

    def build() -> nn.Module:
        with _current_folder_first():
            network = function()
        if not isinstance(network, nn.Module):
            raise OptionError(f"{name} returned {type(network).__name__}; expected a network (nn.Module).")
        return network

    return build


@contextmanager
def _current_folder_first() -> Iterator[str]:
    # Search for modules in the current folder first, as Python does for a script in this folder.
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield folder
    finally:
        with suppress(ValueError):  # the user's code may already have removed the folder
            sys.path.remove(folder)
