"""Options as users give them. Names and numbers are read once, here, and everything after works with what they mean."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import TypeVar

from mola.errors import OptionError

__all__ = ["is_real", "one_of", "resolve", "whole_number"]

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


def is_real(value: object) -> bool:
    """Whether it is a number, numpy's included, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole_number(value: object, argument: str, least: int = 1) -> int:
    """A count.

    Args:
        value: what the user gave, also a number of numpy's.
        argument: name of the argument, for the message.
        least: that will do.

    Returns:
        The number.

    Raises:
        OptionError: if it is no whole number, or less.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        message = f"{argument} must be a whole number of at least {least}, got {value!r}."
        raise OptionError(message)
    return int(value)
