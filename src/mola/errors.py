"""The errors that this library raises; each message has three parts: what was expected, what was given, and what to do.

Every error raised on purpose derives from `MolaError`, so `except mola.errors.MolaError` catches all of them and nothing
else. Kinds also derive from the built-in a Python user would reach for (`ValueError`, `MemoryError`, ...).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class MolaError(Exception):
    """Base of every error this library raises on purpose."""


class OptionError(MolaError, ValueError):
    """An argument has a value that cannot be used."""


class HeadError(MolaError, ValueError):
    """The network's last linear layer cannot be found, or is not what the network returns."""


class DataError(MolaError, ValueError):
    """A loader, batch, label or activation is invalid."""


class BoundError(MolaError, ValueError):
    """The assumptions of a theoretical statement do not hold."""


class StructureTooLargeError(MolaError, MemoryError):
    """A curvature structure would not fit in memory."""


class ExportError(MolaError, RuntimeError):
    """A network or a posterior cannot be written as a graph, or the graph gives other numbers."""


class StorageError(MolaError, ValueError):
    """A file is truncated, foreign, newer than this library, or belongs to another network."""


class MissingExtraError(MolaError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs {package}, which is not installed. Install it with: pip install 'mola-torch[{extra}]' "
            f"(in a clone of the repository: pip install '.[{extra}]')"
        )


class MolaWarning(UserWarning):
    """Something worth knowing that does not stop the work."""


@contextmanager
def importing(feature: str, package: str, extra: str) -> Iterator[None]:
    """Raise `MissingExtraError` if an import inside fails."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(feature, package, extra) from error


@contextmanager
def located(place: str) -> Iterator[None]:
    """Put `place` in front of the message of errors about data or heads that are raised inside."""
    try:
        yield
    except (DataError, HeadError) as error:
        separator = "," if str(error).startswith("networks[") else ":"
        raise type(error)(f"{place}{separator} {error}") from error.__cause__


def warn(message: str) -> None:
    """Warn, pointing at the line outside this library that made the call."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "mola":
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, MolaWarning, stacklevel=depth)
