"""`molaplace watch`: predict new inputs, compare them with the validation data, and keep a state, a log and a page.

The state holds the watch, the digests of all inputs and the lines of the log. The state, the log and the page are written together, once
at the end of a run, so a run that is killed has counted nothing.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from molaplace.cli.folder import PosteriorFolder
from molaplace.cli.job import NAME
from molaplace.data.dataset import Dataset, InputBatch, Loader, SkippedInputs, as_loader_batch, read_batches
from molaplace.data.preprocessing import Preprocessing
from molaplace.distributed import Team
from molaplace.errors import OptionError, StorageError
from molaplace.monitoring.baseline import LEVELS, Baseline
from molaplace.monitoring.stream import WatchOptions, columns_of
from molaplace.monitoring.watching import KIND, SCHEMA, Watch
from molaplace.options import counted
from molaplace.progress import Progress, no_progress
from molaplace.report.watch_page import LARGEST, watch_page
from molaplace.saving.bundle import SCORE
from molaplace.saving.files import check_folder, check_writable, encode, file_name, marker_of, read_folder, replacing
from molaplace.saving.schema import Optional

PAGE = ".html"
"""Ending of the page."""

LINE = {
    "time": str,
    **dict.fromkeys(("inputs", "size"), int),
    "scores": [float],
    "alarm": bool,
    **dict.fromkeys(("evidence", "threshold"), float),
    "began": Optional(int),
    **dict.fromkeys(("accuracy", "low", "high", "strange"), Optional(float)),
    "reason": Optional(str),
    "strangest": [{"name": str, "score": float}],
}
"""Schema of a line, which describes a run."""

NAMED = 3
"""Number of inputs of a run that a sentence and a line of the log name."""

PICTURES = 12
"""Largest number of inputs of a run that the page shows."""
STRANGEST = "Strangest inputs of this run"
CONTRIBUTIONS = "Inputs of this run that are the strongest evidence of the change"

LARGEST_PICTURE = 160
"""Largest side of these pictures, in pixels."""


@dataclass(frozen=True)
class InputScore:
    """An input of a run, with its outlier score."""

    name: str
    score: float
    digest: int


@dataclass(frozen=True)
class WatchLog:
    """What the state of a log holds."""

    watch: Watch
    digests: frozenset[int] = frozenset()
    """Digests of the names and contents of all inputs."""
    lines: tuple[dict[str, Any], ...] = ()

    @classmethod
    def read(cls, log: Path, new: Watch) -> WatchLog:
        """Read the state of a log, or begin one with a new watch; raise `StorageError` if the state belongs to another watch."""
        folder = state_of(log)
        if not folder.exists():
            if log.exists():
                raise StorageError(
                    f"{log} exists, but {folder}, which holds the ranks of its scores, is missing. Restore it, or choose another --log."
                )
            return cls(new)
        document, tensors = read_folder(folder, KIND, {**SCHEMA, "lines": [LINE]})
        watch = Watch.unpack(document, tensors)
        differences = watch.differences(new)
        if differences:
            raise StorageError(
                f"{log} was begun with another posterior, other validation data or other options. What differs: "
                f"{', '.join(differences)}. Choose another --log."
            )
        return cls(watch, frozenset(tensors["digests"].tolist()), tuple(document["lines"]))

    def write(self, log: Path, run: str, page: str | None) -> None:
        """Write the state, the log, the options of the run, and the page unless it is None."""
        state = f"{state_of(log).name}/{file_name(KIND)}"
        names = (state, log.name, log.with_suffix(PAGE).name, f"{log.name}.toml")
        document, tensors = self.watch.pack()
        tensors["digests"] = torch.tensor(sorted(self.digests), dtype=torch.int64, device="cpu")
        lines = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in self.lines)
        kept = log.with_suffix(PAGE).read_text(encoding="utf-8") if page is None else page
        with replacing(log.parent, KIND, names, marker=marker_of(log.name)) as new:
            (new / state).parent.mkdir()
            (new / state).write_bytes(encode({**document, "lines": list(self.lines)}, tensors))
            for name, text in zip(names[1:], (lines, kept, run), strict=True):
                (new / name).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class WatchRun:
    """A run of `molaplace watch`."""

    watch: Watch
    sentences: list[str]
    """The alarm, the accuracy and the inputs to look at, in words."""
    skipped: SkippedInputs


def state_of(log: Path) -> Path:
    """Return the folder of the state of a log, which `Watch.load` reads."""
    return log.with_name(f"{log.name}.state")


def check_log(log: Path) -> None:
    """Raise an error before any work begins if the files cannot be written."""
    check_writable(log)
    if log.suffix.lower() == PAGE:
        raise OptionError(f"must not end in {PAGE}, which is the ending of the page beside it.", argument="log")
    names = (log.name, log.with_suffix(PAGE).name, f"{log.name}.toml", f"{state_of(log).name}/{file_name(KIND)}")
    check_folder(log.parent, KIND, names, marker=marker_of(log.name))


def run_watch(
    fitted: PosteriorFolder,
    inputs: str,
    path: Path,
    *,
    alpha: float = 0.01,
    recent: int = 1000,
    val: str | None = None,
    strict: bool = False,
    run: str = "",
    progress: Progress = no_progress,
) -> WatchRun:
    """Predict the inputs that are not in the log, count them in the order of their digests, and write the files.

    `run` is the text of the run file, and `val` names labelled data to compare with, by default those stored in the folder.
    """
    settings = WatchOptions(alpha=alpha, recent=recent, window=max(10_000, recent))
    new = Watch.of(validation_baseline(fitted, val, strict=strict), settings)
    source = fitted.open_dataset(inputs, labelled=False, by_user=True)
    skipped = SkippedInputs()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        log = WatchLog.read(path, new)
        first = log.watch.count
        columns, added = _predict(fitted, source, strict, log, skipped, progress)
        title, highlights = STRANGEST, added
        if added:
            one = log.watch.streams[0].add(columns, None, new.baseline, settings)
            watch = Watch(log.watch.baseline, settings, (one,))
            log = WatchLog(watch, log.digests | {entry.digest for entry in added}, (*log.lines, _line(watch, added)))
            title, highlights = _highlights(watch, first, added)
        sentences = [_alarm_sentence(log), _accuracy_sentence(log.watch), _inputs_sentence(title, highlights)]
        page = None
        if added or not path.with_suffix(PAGE).exists():  # a run without new inputs keeps the page of the last run
            baseline = log.watch.baseline
            pictures = _pictures(source, fitted.preprocessing, highlights)
            page = watch_page(log.lines, baseline.quantiles, baseline.accuracy, sentences, title, pictures)
        log.write(path, run, page)
    progress("done", 1.0)
    return WatchRun(log.watch, sentences, skipped)


@contextmanager
def _locked(log: Path) -> Iterator[None]:
    lock = FileLock(log.with_name(f".{log.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise StorageError(
            f"another process is writing to {log}. Wait until it has finished, or choose another --log."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _predict(
    fitted: PosteriorFolder,
    source: Dataset,
    strict: bool,
    log: WatchLog,
    skipped: SkippedInputs,
    progress: Progress,
) -> tuple[dict[str, Any], list[InputScore]]:
    # Return the columns of the inputs that are not in the log, and their names and scores, both in the order of the digests. The files may
    # be sorted by class; in this order, which is pseudo-random, that is no change.
    names: dict[int, str] = {}
    parts: list[dict[str, Any]] = []
    used = 0
    for batch in read_batches(source, Team.single(), lambda share: progress("watching", share)):
        if strict:
            batch.check_strict()
        skipped.add(source.name, batch)
        if batch.inputs is None:
            continue
        usable = _usable_names(batch)
        used += len(usable)
        rows = []
        for row, digest in enumerate(_digests(usable, batch.inputs)):
            if digest not in log.digests and digest not in names:
                names[digest] = usable[row]
                rows.append(row)
        if rows:
            new = batch._replace(inputs=tree_map(itemgetter(rows), batch.inputs), labels=None)
            (prediction,) = fitted.posterior.predict_batches([as_loader_batch(new)])
            parts.append(columns_of(prediction, log.watch.baseline))
    skipped.require_some(used, source.name)
    digests = np.array(list(names), dtype=np.int64)
    order = np.argsort(digests)
    columns = {name: np.concatenate([part[name] for part in parts])[order] for name in (parts[0] if parts else ())}
    scores = columns.get("score", np.zeros(0)).tolist()
    return columns, [
        InputScore(names[digest], score, digest) for digest, score in zip(digests[order].tolist(), scores, strict=True)
    ]


def _highlights(watch: Watch, first: int, inputs: list[InputScore]) -> tuple[str, list[InputScore]]:
    # Scores that are too low may raise the alarm too, and then the strangest inputs are not its reason.
    contributions = watch.streams[0].contributions(first) if watch.alarm else ()
    if contributions:
        return CONTRIBUTIONS, [inputs[entry.position - first] for entry in contributions][:PICTURES]
    return STRANGEST, sorted(inputs, key=lambda entry: -entry.score)[:PICTURES]


def _usable_names(batch: InputBatch) -> list[str]:
    return [name for name, error in zip(batch.names, batch.errors, strict=True) if error is None]


def validation_baseline(fitted: PosteriorFolder, val: str | None, *, strict: bool = False) -> Baseline:
    """Return the baseline of the named validation data, or of the columns that `molaplace fit` stored."""
    if val is not None:
        source = fitted.open_dataset(val, labelled=True, by_user=True)
        return Baseline.read(fitted.posterior, Loader(source, SkippedInputs(), strict))
    columns = fitted.columns
    if SCORE not in columns or fitted.posterior.is_dense:
        why = (
            "for dense outputs"
            if fitted.posterior.is_dense
            else "because the posterior was fitted without validation data"
        )
        raise OptionError(
            f"must name labelled data {why}; {fitted.folder / NAME} has none to compare with.", argument="val"
        )
    confidence = None
    correct = None
    if fitted.posterior.likelihood.classification:
        missing = np.zeros(len(columns[SCORE]))
        confidence = columns["confidence"].numpy()[:, None] if "confidence" in columns else missing[:, None]
        if "true_rank" in columns:
            correct = (columns["true_rank"].numpy() == 1).astype(float)[:, None]
    baseline = Baseline.of_columns(columns[SCORE].numpy(), confidence, correct)
    return replace(baseline, fingerprint=fitted.posterior.fingerprint)


def _digests(names: Sequence[str], inputs: Any) -> list[int]:
    # Return a digest of the name and the content of each input, as a whole number of 63 bits.
    digests = []
    for row, name in enumerate(names):
        digest = hashlib.blake2b(name.encode(), digest_size=8)
        for tensor in tree_leaves(inputs):
            digest.update(tensor[row].contiguous().numpy().data)
        digests.append(int.from_bytes(digest.digest()) >> 1)
    return digests


def _line(watch: Watch, inputs: list[InputScore]) -> dict[str, Any]:
    strangest = sorted(inputs, key=lambda entry: -entry.score)[:NAMED]
    alarm = watch.alarm
    accuracy = watch.accuracy
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "inputs": watch.count,
        "size": len(inputs),
        "scores": np.quantile([entry.score for entry in inputs], LEVELS).tolist(),
        "alarm": alarm.raised,
        "evidence": alarm.now,
        "threshold": alarm.threshold,
        "began": alarm.began,
        "accuracy": accuracy.value,
        "low": accuracy.low,
        "high": accuracy.high,
        "strange": accuracy.strange,
        "reason": accuracy.reason,
        "strangest": [{"name": entry.name, "score": entry.score} for entry in strangest],
    }


def _alarm_sentence(log: WatchLog) -> str:
    alarm = log.watch.alarm
    level = f"evidence {_capital(alarm.evidence)}, alarm at {_capital(alarm.threshold)}"
    if alarm.began is None:
        return f"No alarm: {counted(alarm.count, 'input')} so far, without sufficient evidence of a change ({level})."
    line = next(line for line in log.lines if line["inputs"] > alarm.began)
    return (
        f"ALARM: the inputs no longer look like the validation data. The change began near input {alarm.began + 1:,} of "
        f"{alarm.count:,}, in the run of {line['time'][:10]} ({level})."
    )


def _capital(logarithm: float) -> str:
    power = logarithm / math.log(10)
    if power > LARGEST:
        return f"above 1e{LARGEST:.0f}"
    return f"{math.exp(logarithm):,.3g}" if power < 4 else f"1e{power:.0f}"


def _accuracy_sentence(watch: Watch) -> str:
    accuracy = watch.accuracy
    recent = f"the last {counted(accuracy.count, 'input')}"
    if accuracy.value is not None and accuracy.low is not None and accuracy.high is not None:
        known = f"{100 * (watch.baseline.accuracy or 0):.1f} % on the validation data"
        interval = f"95 % interval {100 * accuracy.low:.1f} to {100 * accuracy.high:.1f} %"
        caution = (
            "; it assumes inputs like the validation data, up to a moderate shift. After an alarm, check it with labels"
        )
        return (
            f"Expected accuracy of {recent}: {100 * accuracy.value:.1f} % ({interval}; {known})"
            f"{caution if watch.alarm else ''}."
        )
    reasons = {
        "few inputs": "they are too few",
        "strange inputs": f"{100 * (accuracy.strange or 0):.0f} % of them are stranger than 99 % of the validation data",
        "regression": "this is a regression, whose intervals can be checked once targets arrive",
    }
    why = reasons.get(accuracy.reason or "", "the correctness of the validation data is unknown. Pass --val")
    return f"The accuracy on {recent} cannot be estimated: {why}."


def _inputs_sentence(title: str, inputs: Sequence[InputScore]) -> str:
    if not inputs:
        return "New inputs: none, because all inputs of this run were in the log before."
    names = ", ".join(f"{entry.name} ({entry.score:.1f})" for entry in inputs[:NAMED])
    return f"{title}, with their outlier scores: {names}."


def _pictures(source: Dataset, preparation: Preprocessing, inputs: Sequence[InputScore]) -> list[dict[str, Any]]:
    # Which inputs are shown is known only once all have been read, so these few are read again.
    urls: dict[int, str | None] = dict.fromkeys(entry.digest for entry in inputs)
    missing = set(urls)
    for batch in source.batches():
        if not missing:
            break
        if not isinstance(batch.inputs, Tensor):
            continue
        for row, digest in enumerate(_digests(_usable_names(batch), batch.inputs)):
            if digest in missing:
                missing.remove(digest)
                urls[digest] = _picture(batch.inputs[row], preparation)
    return [{"name": entry.name, "score": entry.score, "url": urls[entry.digest]} for entry in inputs]


def _picture(values: Tensor, preparation: Preprocessing) -> str | None:
    # A data URL, or None if the input is no picture.
    from PIL import Image

    pixels = preparation.pixels(values)
    if pixels is None:
        return None
    image = Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).numpy())
    image.thumbnail((LARGEST_PICTURE, LARGEST_PICTURE))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
