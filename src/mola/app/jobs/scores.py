"""Outlier scores of the validation data, kept beside a posterior: what a threshold for an alarm is made of.

`mola fit` writes them, sorted, to a file whose name holds its own checksum, before the `job.toml` that names it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

from mola.errors import DataError, OptionError, StorageError, warn
from mola.saving import storage
from mola.schema import check
from mola.uncertainty import alarm_rank, alarm_threshold

if TYPE_CHECKING:
    from mola.app.jobs.folder import PosteriorFolder

__all__ = ["FALSE_ALARMS", "alarm", "keep_scores", "usual_alarm"]

FALSE_ALARMS = 0.05
"""The false-alarm rate, where the user asks for no other."""

MOST = 100_000
"""Scores that are kept; of more, about so many at even distances, the largest, and the threshold at the usual rate."""

FILE = re.compile(r"scores-[0-9a-f]{16}\.safetensors")
"""Names of their files; others in the folder are not ours to remove."""

ENTRY = {"count": int, "scores": {"file": str, "sha256": str}}


def keep_scores(folder: Path, scores: NDArray[np.float64]) -> dict[str, Any]:
    """Write the scores into a posterior's folder.

    Args:
        folder: that exists.
        scores: (n,), of the validation data.

    Returns:
        What `job.toml` says of them.
    """
    count = len(scores)
    ranks = np.arange(1, count + 1)
    if count > MOST:
        # With the usual one, so that asking for 0.05 gives the threshold that not asking gives.
        even = np.linspace(1, count, MOST).round().astype(np.int64)
        ranks = np.union1d(even, [alarm_rank(count, FALSE_ALARMS)])
    values = torch.from_numpy(np.sort(scores)[ranks - 1].copy())
    content = save({"scores": values, "ranks": torch.from_numpy(ranks.astype(np.int64))})
    checksum = hashlib.sha256(content).hexdigest()
    name = f"scores-{checksum[:16]}.safetensors"
    storage.write_atomically(folder / name, content)
    return {"file": name, "sha256": checksum}


def remove_others(folder: Path, name: str | None) -> None:
    """Remove the scores of posteriors that this one replaced."""
    for path in folder.iterdir():
        if FILE.fullmatch(path.name) and path.name != name:
            path.unlink(missing_ok=True)


def usual_alarm(scores: NDArray[np.float64]) -> tuple[float, float]:
    """The threshold at the usual false-alarm rate, and that rate: of fewer than 19 scores, the smallest that they allow."""
    rate = max(FALSE_ALARMS, 1 / (len(scores) + 1))
    return alarm_threshold(scores, rate), rate


def alarm(fitted: PosteriorFolder, false_alarm_rate: float | None) -> float | None:
    """The outlier score above which inputs are called outlying.

    Args:
        fitted: an opened posterior.
        false_alarm_rate: that the user asks for; None is 0.05.

    Returns:
        The threshold; None if there were no validation data.

    Raises:
        OptionError: if a rate is asked for, and the posterior has no scores, or too few of them.
    """
    validation = fitted.document["result"].get("validation")
    if validation is None:
        if false_alarm_rate is None:
            return None
        message = (
            f"--false-alarm-rate: {fitted.folder} was fitted without validation data, so that nothing is known of usual outlier "
            f"scores. Fit again with --val: mola fit --config {fitted.folder / 'job.toml'} --val DATA"
        )
        raise OptionError(message)
    if "scores" not in validation:
        if false_alarm_rate is None:
            warn(
                f"{fitted.folder} was fitted by an older version: its outlier threshold is the plain 95 % quantile of the validation "
                f"scores, which promises no false-alarm rate. Fit again for one that does: mola fit --config "
                f"{fitted.folder / 'job.toml'}"
            )
            return float(validation["outlier_threshold"])
        message = (
            f"--false-alarm-rate: {fitted.folder} was fitted by an older version, which did not keep the validation scores. Fit "
            f"again: mola fit --config {fitted.folder / 'job.toml'}"
        )
        raise OptionError(message)
    if false_alarm_rate is None:
        return float(validation["outlier_threshold"])
    scores, ranks, count = _read(fitted.folder, validation)
    try:
        wanted = alarm_rank(count, false_alarm_rate)
    except DataError as error:
        message = f"--false-alarm-rate: {error}"
        raise OptionError(message) from error
    # The next one that was kept: a larger threshold, so that false alarms are no more frequent than asked for.
    return float(scores[int(torch.searchsorted(ranks, wanted))])


def _read(folder: Path, validation: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    check(validation, ENTRY, "result.validation")
    entry, count = validation["scores"], validation["count"]
    path = folder / Path(entry["file"].replace("\\", "/")).name  # inside the folder, whatever the document says
    if not path.is_file():
        message = f"{path} is missing: job.toml points to it. Copy the whole folder, or fit again."
        raise StorageError(message)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        message = f"{path} is truncated or corrupt: its checksum is not the one in job.toml. Copy the folder again, or fit again."
        raise StorageError(message)
    try:
        tensors = load(content)
        scores, ranks = tensors["scores"], tensors["ranks"]
    except (SafetensorError, ValueError, KeyError) as error:
        message = f"{path} does not hold validation scores: {error}"
        raise StorageError(message) from error
    sound = scores.ndim == 1 and scores.shape == ranks.shape and scores.dtype == torch.float64
    if not (sound and len(scores) and ranks.dtype == torch.int64 and int(ranks[-1]) == count):
        message = f"{path} does not hold the {count} validation scores of job.toml."
        raise StorageError(message)
    return scores, ranks, count
