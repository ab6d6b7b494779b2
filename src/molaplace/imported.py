"""Functions and classes of the user's code, imported by a name of the form `package.module:function`.

A file that comes from a stranger may name a function, such as the one that builds a bundle's networks, and importing a module runs it. A
function that the user names on the command line needs no consent; a function that only a file names needs `--trust`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molaplace.errors import OptionError
from molaplace.options import did_you_mean

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


def split_name(name: str) -> tuple[str, str]:
    """Split `package.module:function` into the module and the function; raise `OptionError` for any other form."""
    # Split at the last colon, because a Windows path has a colon after the drive letter.
    module, _, function = name.rpartition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        hint = (
            " Pass the name of a module, not a file; for example, run the command in the folder with models.py, and pass models:build."
            if is_path(name)
            else ""
        )
        raise OptionError(f"expected a function in the form package.module:function; got {name!r}.{hint}")
    return module, function


def import_function(name: str) -> Callable[..., Any]:
    """Import `package.module:function`, which may be in the current folder.

    Raises:
        OptionError: the module or the function does not exist, or importing it fails.
    """
    module_name, attribute = split_name(name)
    with _current_folder_first() as folder:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or module_name
            if missing != module_name and not module_name.startswith(f"{missing}."):
                raise OptionError(f"cannot import {name!r}: it imports {missing!r}, which is not installed.") from error
            raise OptionError(
                f"cannot import {name!r}: there is no module {missing!r} in {folder} or among the installed packages. Run the command in "
                f"the folder that contains it."
            ) from error
        except Exception as error:  # the user's code may raise any exception
            raise OptionError(f"cannot import {name!r} ({type(error).__name__}: {error}).") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise OptionError(
            f"module {module_name!r} has no function {attribute!r}.{did_you_mean(attribute, dir(module))}"
        )
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
