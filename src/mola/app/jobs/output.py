"""Where a posterior may be written, said before the work is done."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mola.app.jobs.job import NAME
from mola.errors import OptionError, StorageError
from mola.saving import storage

__all__ = ["BUNDLED", "holds_posterior"]

BUNDLED = "weights"
"""Folder for copies of the weights, inside a posterior's folder."""

LEFT_BEHIND = re.compile(r"\..*|(factors|scores)-[0-9a-f]{16}\.safetensors")
"""Names of what a system hides, and of what an interrupted fit leaves."""


def holds_posterior(output: Path, checkpoint: Path | None) -> bool:
    """Whether a posterior of ours is in the folder, which a new one may replace; anything else must not be written into.

    Args:
        output: the folder, which may not exist yet.
        checkpoint: the folder of an interrupted fit, which may be inside.

    Returns:
        Whether there is one.

    Raises:
        OptionError: if the path is a file or cannot be made, or a folder that holds something else.
    """
    if not output.exists():
        above = next(path for path in output.absolute().parents if path.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            message = f"{output} cannot be made: {above} is no folder that can be written to. Choose another --output."
            raise OptionError(message)
        return False
    if not output.is_dir():
        message = f"{output} is a file; expected a folder to write the posterior to."
        raise OptionError(message)
    try:
        kind = storage.kind_of(output)
    except StorageError as error:
        message = f"{error} It is not replaced: choose another --output, or remove it."
        raise OptionError(message) from error
    if kind not in (None, "posterior"):
        message = f"{output} holds a saved {kind}, which is not replaced by a posterior: choose another --output."
        raise OptionError(message)
    # What an interrupted fit leaves is no stranger's; nor is a job to be done there. Only whole names of ours: a user's own
    # scores-2024.csv is a stranger's.
    known = (NAME, BUNDLED) if checkpoint is None else (NAME, BUNDLED, checkpoint.name)
    strange = sorted(
        path.name for path in output.iterdir() if path.name not in known and not LEFT_BEHIND.fullmatch(path.name)
    )
    if kind is None and strange:
        message = (
            f"{output} holds no posterior but {', '.join(strange[:3])}{', ...' if len(strange) > 3 else ''}: choose another "
            f"--output, a new folder or that of an older posterior."
        )
        raise OptionError(message)
    return kind is not None
