"""Warnings and errors of the laboratory, in the library's own kinds."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from molaplace.errors import MissingExtraError, MolaWarning, OptionError


def warn(message: str) -> None:
    """Warn the user."""
    warnings.warn(message, MolaWarning, stacklevel=3)


@contextmanager
def importing(feature: str, package: str, extra: str) -> Iterator[None]:
    """Raise `MissingExtraError` if an import inside the block fails."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(feature, package, extra) from error


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect the library's warnings in a list that is filled when the context exits; other warnings are shown as usual."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MolaWarning)
        yield messages
    for warning in caught:
        if issubclass(warning.category, MolaWarning):
            messages.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def one_of(name: str, known: Collection[str], argument: str) -> str:
    """Return the name if it is known, or raise an `OptionError` that lists the known names."""
    if name in known:
        return name
    names = f"one of {', '.join(known)}" if len(known) > 1 else repr(next(iter(known)))
    similar = difflib.get_close_matches(name.lower(), known, 1)
    hint = f" Did you mean {similar[0]!r}?" if similar else ""
    raise OptionError(f"must be {names}; got {name!r}.{hint}", argument=argument)
