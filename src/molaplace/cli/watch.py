"""`molaplace watch`: predict new inputs, compare them with the validation data, and keep a log and a page."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.markup import escape
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from molaplace.cli.folder import PosteriorFolder, open_posterior
from molaplace.cli.job import NAME
from molaplace.cli.options import MORE, PosteriorOptions, RunOptions, as_document, check_writable, option, to_toml
from molaplace.cli.terminal import showing_progress
from molaplace.cli.watch_log import WatchLog, state_of
from molaplace.data.dataset import Dataset, InputBatch, Loader, SkippedInputs, as_loader_batch, read_batches
from molaplace.distributed import Team
from molaplace.errors import OptionError
from molaplace.monitoring.baseline import LEVELS, Baseline
from molaplace.monitoring.ranks import Array
from molaplace.monitoring.stream import WatchOptions, columns_of
from molaplace.monitoring.watching import KIND, Watch
from molaplace.options import counted
from molaplace.progress import Progress
from molaplace.saving.bundle import SCORE
from molaplace.saving.files import check_folder, file_name, marker_of, replacing

ALARM = 3
"""Exit code of a run whose stream has left the validation data."""

PAGE = ".html"
"""Ending of the page."""

BATCH = 256
"""Number of inputs of a line in the log."""

NAMES_IN_LINE = 3
"""Number of the strangest inputs of a batch that its line in the log names."""

PICTURES = 12
"""Largest number of inputs of a run that the page shows."""
STRANGEST = "Strangest inputs of this run"
CONTRIBUTIONS = "Inputs of this run that are the strongest evidence of the change"

LARGEST_PICTURE = 160
"""Largest side of these pictures, in pixels."""


@dataclass(frozen=True, kw_only=True)
class WatchCommandOptions(PosteriorOptions, RunOptions):
    """Options for `molaplace watch`."""

    posterior: Path = option(help="Folder written by `molaplace fit`", argument=True)
    inputs: str = option(
        help="New inputs, in any order: a folder of images, .npz, .npy, .csv, or package.module:function",
        argument=True,
    )
    log: Path = option(Path("watch.jsonl"), "Log to append to, a line for each batch; the page is written beside it")
    alpha: float = option(0.01, "Probability of a false alarm over the whole life of the log")
    recent: int = option(1000, "Number of recent inputs whose accuracy is estimated", minimum=1)
    val: str | None = option(
        None, "Labelled data to compare with", panel=MORE, default_text="validation data stored in the folder"
    )
    strict: bool = option(False, "Stop at the first input that cannot be used", panel=MORE)


@dataclass(frozen=True)
class InputScore:
    """An input of a run, with its outlier score."""

    name: str
    score: float
    digest: int


@dataclass(frozen=True)
class Highlights:
    """The inputs of a run that the user should look at; none if the run has no new inputs."""

    title: str
    """What these inputs are."""
    inputs: list[InputScore]


def watch(options: WatchCommandOptions) -> None:
    """Watch new inputs: raise an alarm if they change, and estimate the accuracy without labels.

    Run the command for each delivery of new inputs, with the same --log. It appends a line for each batch, writes a page with the course
    over time, and prints whether the inputs still look like the validation data, how accurate the predictions are, and which
    inputs are strangest. If nothing changes, the probability that any run ever raises an alarm is at most --alpha. An alarm stays until
    you begin a new log. Inputs that are in the log already, with the same name and content, are passed over, so a delivery may be
    repeated or grow. The new inputs of a run are counted in a fixed pseudo-random order, so a folder may be sorted by class. The exit
    code is 3 if there is an alarm, and 0 if not.

        molaplace watch posterior new-images/ --log watch.jsonl
    """
    # Imported before any work begins, so that a missing package is reported early.
    from molaplace.report.watch_page import watch_page

    check_writable(options.log)
    if options.log.suffix.lower() == PAGE:
        raise OptionError(f"must not end in {PAGE}, which is the ending of the page beside it.", argument="log")
    page = options.log.with_suffix(PAGE)
    run = options.log.with_name(f"{options.log.name}.toml")
    marker = marker_of(options.log.name)
    check_folder(page.parent, KIND, (page.name, run.name), marker=marker)
    check_folder(state_of(options.log), KIND, (file_name(KIND),))
    skipped = SkippedInputs()
    with showing_progress(quiet=options.quiet) as progress:
        progress("loading networks", 0.0)
        fitted = open_posterior(options.posterior, options.device, trust=options.trust, network=options.network)
        source = fitted.open_dataset(options.inputs, labelled=False, by_user=True)
        log, highlights = run_watch(fitted, options, source, skipped, progress)
        sentences = [_alarm_sentence(log), _accuracy_sentence(log.watch), _highlights_sentence(highlights)]
        with replacing(page.parent, KIND, (page.name, run.name), marker=marker) as new:
            if highlights.inputs or not page.exists():
                baseline = log.watch.baseline
                pictures = _pictures(fitted, source, highlights.inputs)
                content = watch_page(
                    log.lines, baseline.quantiles, baseline.accuracy, sentences, highlights.title, pictures
                )
                (new / page.name).write_text(content, encoding="utf-8")
            else:  # a run without new inputs keeps the page of the last run
                shutil.copyfile(page, new / page.name)
            document = as_document(options, "watch", run.parent)
            (new / run.name).write_text(to_toml(document), encoding="utf-8")
        progress("done", 1.0)
    if options.as_json:
        readings = {name: asdict(getattr(log.watch, name)) for name in ("alarm", "accuracy")}
        click.echo(json.dumps({"inputs": log.watch.count, **readings, "left_out": skipped.left_out}, indent=2))
    elif not options.quiet:
        console = Console(highlight=False)
        for sentence in sentences:
            console.print(escape(sentence), soft_wrap=True)
        for line in skipped.lines():
            Console(stderr=True, highlight=False).print(escape(line), soft_wrap=True)
    if log.watch.alarm:
        raise click.exceptions.Exit(ALARM)


def run_watch(
    fitted: PosteriorFolder, options: WatchCommandOptions, source: Dataset, skipped: SkippedInputs, progress: Progress
) -> tuple[WatchLog, Highlights]:
    """Predict the new inputs and write them to the log in the order of their digests; return the closed log and the inputs to show."""
    baseline = _baseline(fitted, options)
    new = Watch.of(
        baseline, WatchOptions(alpha=options.alpha, recent=options.recent, window=max(10_000, options.recent))
    )
    names: dict[int, str] = {}
    parts: list[dict[str, Array]] = []
    used = 0
    with WatchLog(options.log, new) as log:
        first = log.watch.count
        for batch in read_batches(source, Team.single(), lambda share: progress("watching", share)):
            if options.strict:
                batch.check_strict()
            skipped.add(source.name, batch)
            if batch.inputs is None:
                continue
            usable = _usable_names(batch)
            used += len(usable)
            new_rows = []
            for row, digest in enumerate(_digests(usable, batch.inputs)):
                if digest not in log.digests and digest not in names:
                    names[digest] = usable[row]
                    new_rows.append(row)
            if not new_rows:
                continue
            batch = batch._replace(inputs=tree_map(itemgetter(new_rows), batch.inputs))
            (prediction,) = fitted.posterior.predict_batches([as_loader_batch(batch._replace(labels=None))])
            parts.append(columns_of(prediction, baseline))
        # The files may be sorted by class. In the order of the digests, which is pseudo-random, that is no change.
        columns = {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}
        digests = np.array(list(names), dtype=np.int64)
        inputs: list[InputScore] = []
        for rows in np.split(np.argsort(digests), range(BATCH, len(digests), BATCH)):
            if len(rows):
                batch_columns = {name: values[rows] for name, values in columns.items()}
                log.watch.streams = (log.watch.streams[0].add(batch_columns, None, baseline, log.watch.options),)
                added = [
                    InputScore(names[digest], score, digest)
                    for digest, score in zip(digests[rows].tolist(), batch_columns["score"].tolist(), strict=True)
                ]
                log.add(_line(log, added))
                inputs += added
    skipped.require_some(used, source.name)
    return log, _highlights(log.watch, first, inputs)


def _highlights(watch: Watch, first: int, inputs: list[InputScore]) -> Highlights:
    # Scores that are too low may raise the alarm too, and then the strangest inputs are not its reason.
    if watch.alarm:
        contributions = watch.streams[0].contributions(first)
        if contributions:
            return Highlights(CONTRIBUTIONS, [inputs[entry.position - first] for entry in contributions][:PICTURES])
    return Highlights(STRANGEST, sorted(inputs, key=lambda entry: -entry.score)[:PICTURES])


def _usable_names(batch: InputBatch) -> list[str]:
    return [name for name, error in zip(batch.names, batch.errors, strict=True) if error is None]


def _baseline(fitted: PosteriorFolder, options: WatchCommandOptions) -> Baseline:
    # The validation data of `--val`, or the columns that `molaplace fit` stored.
    if options.val is not None:
        source = fitted.open_dataset(options.val, labelled=True, by_user=True)
        return Baseline.read(fitted.posterior, Loader(source, SkippedInputs(), options.strict))
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


def _line(log: WatchLog, inputs: list[InputScore]) -> dict[str, Any]:
    strangest = sorted(inputs, key=lambda entry: -entry.score)[:NAMES_IN_LINE]
    alarm = log.watch.alarm
    accuracy = log.watch.accuracy
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "batch": len(log.lines) + 1,
        "inputs": log.watch.count,
        "size": len(inputs),
        "digests": [entry.digest for entry in inputs],
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
        f"{alarm.count:,}, in batch {line['batch']} of {line['time'][:10]} ({level})."
    )


def _capital(logarithm: float) -> str:
    from molaplace.report.watch_page import LARGEST

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


def _highlights_sentence(highlights: Highlights) -> str:
    if not highlights.inputs:
        return "New inputs: none, because all inputs of this run were in the log before."
    names = ", ".join(f"{entry.name} ({entry.score:.1f})" for entry in highlights.inputs[:NAMES_IN_LINE])
    return f"{highlights.title}, with their outlier scores: {names}."


def _pictures(fitted: PosteriorFolder, source: Dataset, inputs: list[InputScore]) -> list[dict[str, Any]]:
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
                urls[digest] = _picture(fitted, batch.inputs[row : row + 1])
    return [{"name": entry.name, "score": entry.score, "url": urls[entry.digest]} for entry in inputs]


def _picture(fitted: PosteriorFolder, inputs: Tensor) -> str | None:
    # A data URL, or None if the input is no picture.
    if inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
        return None
    preprocessing = fitted.preprocessing
    mean, std = (inputs.new_tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    pixels = (inputs[0] * std + mean).cpu()
    if pixels.min() < -0.01 or pixels.max() > 1.01:
        return None
    array = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    image = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    image.thumbnail((LARGEST_PICTURE, LARGEST_PICTURE))
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
