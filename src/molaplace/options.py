"""Checks and conversions of the names and numbers that users pass as options."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import TypeVar

from molaplace.errors import OptionError

Kind = TypeVar("Kind")


def resolve(value: str | Kind, kind: type[Kind], known: Mapping[str, type[Kind]], argument: str) -> Kind:
    """Return the object with the given name and default settings; if an object of the right kind is given, return it unchanged.

    Any other value raises `OptionError`.
    """
    if isinstance(value, kind):
        return value
    return known[one_of(value, known, argument, f"a {kind.__name__} object")]()


def one_of(name: object, known: Collection[str], argument: str, otherwise: str | None = None) -> str:
    """Return the name if it is known, or raise an `OptionError` that lists the known names, followed by the text `otherwise`."""
    if isinstance(name, str) and name in known:
        return name
    names = f"one of {', '.join(known)}" if len(known) > 1 else repr(next(iter(known)))
    more = "" if otherwise is None else f", or {otherwise}"
    raise OptionError(f"must be {names}{more}; got {name!r}.{did_you_mean(name, known)}", argument=argument)


SYNONYMS = {
    **dict.fromkeys(("kfac", "k-fac", "kronecker"), "kron"),
    "regression": "gaussian",
    **dict.fromkeys(("softmax", "multiclass", "multi-class"), "categorical"),
    **dict.fromkeys(("multilabel", "multi-label"), "bernoulli"),
}
"""Common synonyms, used only for hints."""


def did_you_mean(name: object, known: Collection[str]) -> str:
    """Return a "Did you mean" hint with the most similar known name, or "" if no name is similar."""
    if not isinstance(name, str):
        return ""
    synonym = SYNONYMS.get(name.lower())
    similar = [synonym] if synonym in known else difflib.get_close_matches(name.lower(), known, 1)
    return f" Did you mean {similar[0]!r}?" if similar else ""


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """Return a count and its noun, such as "1 network" or "3 networks"; `plural` is needed only if it is irregular."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def listed(names: Sequence[object], most: int) -> str:
    """Return the first names, separated by commas, followed by "..." if there are more than `most` names."""
    return ", ".join(map(str, names[:most])) + (", ..." if len(names) > most else "")


def is_real(value: object) -> bool:
    """Return True for a Python or NumPy number that is not a Boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole_number(value: object, argument: str, least: int = 1) -> int:
    """Return the value as an `int`; raise `OptionError` unless it is a Python or NumPy integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise OptionError(f"must be a whole number of at least {least}, got {value!r}.", argument=argument)
    return int(value)


def check_share(value: object, argument: str, remedy: str) -> float:
    """Return the value as a `float`; raise `OptionError`, whose message ends with `remedy`, unless it is between 0 and 1, both excluded."""
    share = float(value) if is_real(value) else math.nan  # type: ignore[arg-type]
    if not 0 < share < 1:
        raise OptionError(f"must be above 0 and below 1, got {value!r}. {remedy}", argument=argument)
    return share


def check_number(value: object, argument: str, low: float, high: float, remedy: str) -> float:
    """Return the value as a `float`; raise `OptionError`, whose message ends with `remedy`, unless it is a number from `low` to `high`.

    A tensor or array of one value is a number.
    """
    try:
        single = value.item() if hasattr(value, "item") else value
        number = math.nan if isinstance(single, (bool, str, bytes)) else float(single)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not low <= number <= high:
        raise OptionError(f"must be a number between {low:g} and {high:g}, got {value!r}. {remedy}", argument=argument)
    return number
