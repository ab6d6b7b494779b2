"""Functions of the user's own code, named as `package.module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from mola.errors import OptionError


def is_path(name: str) -> bool:
    """Whether a name with a colon is a path, such as one on a drive of Windows, or `data/at:noon`."""
    return any(sign in name for sign in "/\\")


def split_name(name: str) -> tuple[str, str]:
    """Module and function of a name.

    Args:
        name: `package.module:function`.

    Returns:
        Both.
    """
    # The last colon: a path of Windows has one after the drive.
    module, _, function = name.rpartition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        hint = (
            " Modules are named, not files: run this in the folder of models.py, and name models:build."
            if is_path(name)
            else ""
        )
        raise OptionError(f"expected a function as package.module:function, got {name!r}.{hint}")
    return module, function


def import_function(name: str) -> Any:
    """What a name stands for; modules in the current folder are found as well.

    Args:
        name: `package.module:function`.

    Returns:
        The function, whatever it is. Importing raises whatever the user's code raises.
    """
    module_name, attribute = split_name(name)
    with _here_first() as here:
        module = importlib.import_module(module_name)
        function = getattr(module, attribute)
        is_here = _lies_in(sys.modules[module_name.partition(".")[0]], here)
    # The user's code may import more when it runs. Last, so that no folder that lies here is taken for an installed package.
    if is_here and here not in sys.path:
        sys.path.append(here)
    return function


def import_builder(name: str) -> Callable[[], nn.Module]:
    """The function that makes a network; modules in the current folder are found as well.

    Args:
        name: `package.module:function`, a function without arguments, or a class.

    Returns:
        The function, which checks that it makes a network.
    """
    module_name, attribute = split_name(name)
    try:
        function = import_function(name)
    except ImportError as error:
        message = f"cannot import {module_name!r} for the network {name!r}: {error}."
        raise OptionError(message) from error
    except AttributeError as error:
        message = f"module {module_name!r} has no {attribute!r}: expected a function that makes the network."
        raise OptionError(message) from error

    def build() -> nn.Module:
        with _here_first():
            network = function()
        if not isinstance(network, nn.Module):
            raise OptionError(f"{name} made a {type(network).__name__}; expected an nn.Module.")
        return network

    return build


@contextmanager
def _here_first() -> Iterator[str]:
    # Look for modules in the current folder first, as Python does for a script that lies there; and only meanwhile.
    here = str(Path.cwd())
    known = here in sys.path
    if not known:
        sys.path.insert(0, here)
    try:
        yield here
    finally:
        if not known:
            with suppress(ValueError):  # the user's code may have changed it as well
                sys.path.remove(here)


def _lies_in(module: Any, folder: str) -> bool:
    places = list(getattr(module, "__path__", ())) or [getattr(module, "__file__", None) or ""]
    return any(Path(place).parent == Path(folder) for place in places)
