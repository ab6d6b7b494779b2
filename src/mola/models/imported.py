"""Networks of the user's own code, named as `package.module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from mola.errors import OptionError

__all__ = ["import_builder"]


def import_builder(name: str) -> Callable[[], nn.Module]:
    """The function that a name stands for; modules in the current folder are found as well.

    Args:
        name: `package.module:function`, a function without arguments, or a class.

    Returns:
        The function, which checks that it makes a network.

    Raises:
        OptionError: if there is no such module or function.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        message = f"expected a network as package.module:function, got {name!r}."
        raise OptionError(message)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        message = f"cannot import {module_name!r} for the network {name!r}: {error}."
        raise OptionError(message) from error
    except AttributeError as error:
        message = f"module {module_name!r} has no {attribute!r}: expected a function that makes the network."
        raise OptionError(message) from error

    def build() -> nn.Module:
        network = function()
        if not isinstance(network, nn.Module):
            message = f"{name} made a {type(network).__name__}; expected an nn.Module."
            raise OptionError(message)
        return network

    return build
