"""Options that are a name or an object: names are read once, here, and everything after works with objects."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import TypeVar

from mola.errors import OptionError

__all__ = ["one_of", "resolve"]

Kind = TypeVar("Kind")


def resolve(value: str | Kind, kind: type[Kind], known: Mapping[str, type[Kind]], argument: str) -> Kind:
    """The object of that name with its default settings, or the object itself.

    Args:
        value: a name, or an object.
        kind: what the object must be.
        known: classes by name.
        argument: what the option is called, for the message.

    Returns:
        An object of that kind.

    Raises:
        OptionError: listing the known names, if this is neither.
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, str) or value not in known:
        message = f"{argument} must be one of {sorted(known)} or a {kind.__name__} object, got {value!r}."
        raise OptionError(message)
    return known[value]()


def one_of(name: str, known: Collection[str], argument: str) -> str:
    """The name itself, if it is known.

    Args:
        name: what was asked for.
        known: what there is.
        argument: what the option is called, for the message.

    Returns:
        The name.

    Raises:
        OptionError: listing the known names, with the nearest one.
    """
    if name in known:
        return name
    near = difflib.get_close_matches(str(name), known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    message = f"{argument} must be one of {', '.join(known)}; got {name!r}.{hint}"
    raise OptionError(message)
