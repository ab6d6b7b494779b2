"""Errors raised by this library. Each message states what was expected, what was given, and what to do.

Every error that this library deliberately raises derives from `MolaError`; `except mola.errors.MolaError` catches these errors and no
others. Each error also derives from the matching built-in exception (`ValueError`, `MemoryError`, ...).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = ("molaplace", "molaplace_lab")
"""Packages whose frames are not the user's code."""


CONTROLS = dict.fromkeys(
    {*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {ord("\t"), ord("\n")},
    "\N{REPLACEMENT CHARACTER}",
)
"""Replacements of control characters, by which text can move the cursor, recolour a terminal or reverse what follows it."""


def printable(text: str) -> str:
    """Replace control characters, except tabs and newlines, in text that may come from a stranger's file."""
    return text.translate(CONTROLS)


class MolaError(Exception):
    """Base class of every error that this library raises deliberately.

    Attributes:
        message: what was expected, what was given and what to do, without the argument's name and the place.
        argument: name of the Python argument that the message is about, or None. The message continues the sentence that begins with it.
        place: batch, network or file in which the error occurred, such as "batch 3 of the training loader, networks[1]", or None.
    """

    def __init__(self, message: str = "", *, argument: str | None = None, place: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.argument = argument
        self.place = place

    def __str__(self) -> str:
        sentence = self.message if self.argument is None else f"{self.argument} {self.message}"
        return printable(sentence if self.place is None else f"{self.place}: {sentence}")


class OptionError(MolaError, ValueError):
    """An argument has an invalid value."""


class HeadError(MolaError, ValueError):
    """The network's last linear layer cannot be found, or its output is not the network's output."""


class DataError(MolaError, ValueError):
    """A loader, batch, label or activation is invalid.

    Attributes:
        rows: indices of the inputs in the batch that are NaN or infinite, or for which a network's outputs are; empty for other errors.
    """

    rows: tuple[int, ...] = ()


class BoundError(MolaError, ValueError):
    """The assumptions of a theoretical bound do not hold."""


class StructureTooLargeError(MolaError, MemoryError):
    """A curvature structure would not fit in memory."""


class ExportError(MolaError, RuntimeError):
    """A posterior cannot be exported as a graph, or the graph's outputs differ from the posterior's predictions."""


class StorageError(MolaError, ValueError):
    """A file is damaged, was written by other software or by a newer version of this library, or belongs to a different network."""


class MissingExtraError(MolaError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs {package}, which is not installed. Install it with: pip install 'molaplace[{extra}]' "
            f"(in a clone of the repository: pip install '.[{extra}]')"
        )
        self.args = (feature, package, extra)  # the arguments with which pickle makes the error again


class MolaWarning(UserWarning):
    """A warning issued by this library."""


@contextmanager
def importing(feature: str, package: str, extra: str) -> Iterator[None]:
    """Raise `MissingExtraError` if an import inside the block fails."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(feature, package, extra) from error


@contextmanager
def located(place: str) -> Iterator[None]:
    """Put `place` before the place of any `DataError` or `HeadError` raised inside the block, unless it is there already.

    Errors of other code, such as a network's, get it as a note.
    """
    try:
        yield
    except (DataError, HeadError) as error:
        if error.place is None:
            error.place = place
        elif not error.place.startswith(place):
            error.place = f"{place}, {error.place}"
        raise
    except MolaError:
        raise
    except Exception as error:
        error.add_note(f"Place: {place}.")
        raise


def warn(message: str) -> None:
    """Issue a warning that points to the line of the user's code that called this library."""
    frame = sys._getframe(1)
    depth = 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in PACKAGES:
        frame = frame.f_back
        depth += 1
    warnings.warn(printable(message), MolaWarning, stacklevel=depth)


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect this library's warnings in a list that is filled when the context exits; other warnings are shown as usual."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MolaWarning)
        yield messages
    for warning in caught:
        if issubclass(warning.category, MolaWarning):
            messages.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def warned(message: str) -> str:
    """Issue a warning, and return its text, for example for the notes of a tuning."""
    warn(message)
    return message
