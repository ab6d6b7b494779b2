"""`mola predict`: from a posterior's folder and data to a file with a row for each input, as CSV, JSON lines or npz.

Process r of R takes batches r, r + R, r + 2R, ...; after each round rank 0 collects the results and writes them in the order of
the data. No process holds more than a batch, an archive's columns wait in temporary files, and no file system has to be shared.
"""

from __future__ import annotations

import base64
import csv
import json
import math
import tempfile
import time
import zipfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from mola.app.jobs.decisions import Decisions, decide, make_decisions
from mola.app.jobs.folder import PosteriorFolder
from mola.app.jobs.job import Progress
from mola.app.jobs.numbers import PROBABILITY
from mola.app.jobs.rows import Account, Rows, Set
from mola.app.jobs.sets import in_turns
from mola.decisions.intervals import PredictionIntervals
from mola.distributed import Team
from mola.errors import DataError, OptionError
from mola.posterior import MoLA
from mola.prediction import RegressionPrediction
from mola.saving.files import partial_file

COLUMNS = ("label", "confidence", "entropy", "epistemic", "aleatoric", "ood_score", "distance")
"""Numbers of each input, before its probabilities; nan where one is unknown, as distances fitted with --no-distances."""
NUMBERS, SCORE = COLUMNS[1:], COLUMNS.index("ood_score")
FIELDS = ("name", "label", "class", *NUMBERS, "outlying", "error")
FORMATS = (".csv", ".jsonl", ".npz")
OF_EACH = ("mean", "std", "lower", "upper", "epistemic", "aleatoric")
"""Of each output of a regression: mean, standard deviation, ends of the 90 % interval, and both parts of the variance."""
BETWEEN = "|"
"""Between the classes of a set, or the labels that are yes, in a cell of a table."""
COPIED = 2**16
"""Rows or bytes that are moved at a time."""


@dataclass(frozen=True)
class PredictResult:
    """What `mola predict` did.

    Attributes:
        output: the file that was written.
        count: inputs that were predicted.
        account: inputs that were not.
        confidence: mean over the inputs.
        entropy: likewise, in nats.
        epistemic: likewise.
        threshold: outlier score above which inputs are called outlying; None without validation data.
        outlying: share of the inputs that are; None without a threshold.
        labels: how many inputs were given each class.
        seconds: that predicting and writing took.
        decisions: thresholds by which inputs were answered and sets were made, as plain values.
        answered: share of the inputs that are answered; None if no error rate was asked for.
        set_size: mean number of classes in the sets; None if no coverage was asked for.
        empty: share of sets that are empty.
    """

    output: Path
    count: int
    account: Account
    confidence: float
    entropy: float
    epistemic: float
    threshold: float | None
    outlying: float | None
    labels: dict[str, int]
    seconds: float
    decisions: dict[str, Any] = field(default_factory=dict)
    answered: float | None = None
    set_size: float | None = None
    empty: float | None = None

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "output": str(self.output),
            "count": self.count,
            "confidence": self.confidence,
            "entropy": self.entropy,
            "epistemic": self.epistemic,
            "threshold": self.threshold,
            "outlying": self.outlying,
            "labels": self.labels,
            "seconds": self.seconds,
            **({} if self.answered is None else {"answered": self.answered}),
            **({} if self.set_size is None else {"set_size": self.set_size, "empty": self.empty}),
            **({"decisions": self.decisions} if self.decisions else {}),
            **self.account.plain(),
        }


def run_predict(
    fitted: PosteriorFolder,
    data: str,
    output: Path,
    progress: Progress = lambda doing, done: None,
    *,
    probabilities: bool = False,
    strict: bool = False,
    directory: str | None = None,
    seed: int | None = None,
    false_alarm_rate: float | None = None,
    error_rate: float | None = None,
    certainty: float | None = None,
    coverage: float | None = None,
    by_class: bool = False,
    team: Team | None = None,
) -> PredictResult | NumbersResult | None:
    """Predict every input of a set, batch by batch, and write a row for each as soon as it is known.

    Inputs that cannot be used have a row too, with the reason.

    Args:
        fitted: an opened posterior.
        data: as the user names them.
        output: a file that ends in .csv, .jsonl or .npz.
        progress: told what is being done, and which share of the work is done.
        probabilities: whether rows have the probabilities of all classes.
        strict: whether an input that cannot be used is an error.
        directory: that holds the built-in sets.
        seed: of links that draw; None uses the link's own.
        false_alarm_rate: how often inputs like the validation data may be called outlying; None is 0.05.
        error_rate: how often answers may be wrong: rows say whether to answer; None does not.
        certainty: of the error rate; None is 0.95.
        coverage: how often sets are to hold the true class: rows have a set of classes; None has none. Where outputs are numbers,
            how often intervals are to hold the target: "lower" and "upper" are theirs; None writes the posterior's own 90 % intervals.
        by_class: whether each class is to be held so often.
        team: the processes that do it together, each on its own batches, with rank 0 writing. None is this one alone.

    Returns:
        What was done, on rank 0, and None on the others.
    """
    began = time.perf_counter()
    if output.exists() and Path(data).expanduser().exists() and output.samefile(Path(data).expanduser()):
        raise OptionError(
            f"{output} holds the data, and would be overwritten with predictions: choose another --output."
        )
    fitted.refuse_positions("mola predict writes a row for each input")
    if probabilities:
        fitted.refuse_probabilities()
    decisions = make_decisions(
        fitted,
        false_alarm_rate=false_alarm_rate,
        error_rate=error_rate,
        certainty=certainty,
        coverage=coverage,
        by_class=by_class,
    )
    if not fitted.posterior.likelihood.discrete:
        return _run_numbers(
            fitted, data, output, progress, strict=strict, directory=directory, decisions=decisions, team=team
        )
    together = Team.single() if team is None else team
    source = fitted.open_set(data, labelled=False, directory=directory, said=True)
    names = _class_names(fitted)
    threshold = decisions.alarm
    account = Account()
    several = not fitted.posterior.likelihood.mutually_exclusive
    sums, outlying, count, chosen = np.zeros(3), 0, 0, np.zeros(len(names), dtype=np.int64)
    answered, held, empty = 0, 0, 0
    columns = len(names) if probabilities or several else 0
    progress("predicting", 0.0)
    with ExitStack() as stack:
        own = portions(
            fitted.posterior,
            in_turns(source, together),
            strict=strict,
            outputs=len(names) if probabilities or several or decisions.sets is not None else 0,
            seed=seed,
            tell=lambda share: progress("predicting", share),
        )
        fields = (*FIELDS, *decided(decisions))
        writer = stack.enter_context(open_writer(output, names, columns, fields)) if together.first else None
        for portion in in_order(own, together, Portion):
            assert writer is not None  # only rank 0 is given any
            account.add(source.name, portion.rows())
            for record in records(portion, names, decisions, several=several):
                writer.add(record if probabilities or several else record | {"probabilities": None})
                answered += record.get("answer") is True
                if record.get("set") is not None:
                    held, empty = held + len(record["set"]), empty + (not record["set"])
            sums += portion.numbers[:, 1:4].sum(0)
            outlying += 0 if threshold is None else int((portion.numbers[:, SCORE] > threshold).sum())
            count += len(portion.numbers)
            if several:
                chosen += (portion.numbers[:, len(COLUMNS) :] > YES).sum(0)
            else:
                chosen += np.bincount(portion.numbers[:, 0].astype(np.int64), minlength=len(names))
        if together.first and count == 0:
            first = next(iter(account.left_out.get(source.name, {}).items()), None)
            why = "" if first is None else f" The first: {first[0]}: {first[1]}."
            raise DataError(f"{data} holds no input that can be used.{why}")
    progress("done", 1.0)
    if not together.first:
        return None
    confidence, entropy, epistemic = (sums / count).tolist()
    return PredictResult(
        output=output,
        count=count,
        account=account,
        confidence=confidence,
        entropy=entropy,
        epistemic=epistemic,
        threshold=threshold,
        outlying=None if threshold is None else outlying / count,
        labels={name: int(number) for name, number in zip(names, chosen, strict=True)},
        seconds=time.perf_counter() - began,
        decisions=decisions.plain(),
        answered=None if decisions.answer is None else answered / count,
        set_size=None if decisions.sets is None else held / count,
        empty=None if decisions.sets is None else empty / count,
    )


@dataclass(frozen=True)
class NumbersResult:
    """What `mola predict` did, where outputs are numbers.

    Attributes:
        output: the file that was written.
        count: inputs that were predicted.
        account: inputs that were not.
        std: mean standard deviation, over inputs and outputs.
        epistemic: mean share of the variance that more data would remove.
        threshold: outlier score above which inputs are called outlying; None without validation data.
        outlying: share of the inputs that are; None without a threshold.
        seconds: that predicting and writing took.
        decisions: how intervals were calibrated, as plain values; empty where they are the posterior's own.
        width: mean length of the intervals, over inputs and outputs.
    """

    output: Path
    count: int
    account: Account
    std: float
    epistemic: float
    threshold: float | None
    outlying: float | None
    seconds: float
    decisions: dict[str, Any] = field(default_factory=dict)
    width: float = 0.0

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        names = ("count", "std", "epistemic", "width", "threshold", "outlying", "seconds")
        own = {name: getattr(self, name) for name in names}
        decided = {"decisions": self.decisions} if self.decisions else {}
        return {"output": str(self.output), **own, **decided, **self.account.plain()}


def _run_numbers(
    fitted: PosteriorFolder,
    data: str,
    output: Path,
    progress: Progress,
    *,
    strict: bool,
    directory: str | None,
    decisions: Decisions,
    team: Team | None,
) -> NumbersResult | None:
    # `run_predict` where outputs are numbers: their columns are those of `OF_EACH`, named by the output where there are
    # several.
    began = time.perf_counter()
    together = Team.single() if team is None else team
    source = fitted.open_set(data, labelled=False, directory=directory, said=True)
    threshold, account = decisions.alarm, Account()
    likelihood: Any = fitted.posterior.likelihood
    width = likelihood.num_uncertain(fitted.outputs)
    names = (fitted.classes or tuple(map(str, range(width))))[:width]
    columns = [kind if width == 1 else f"{kind}_{name}" for name in names for kind in OF_EACH]
    fields = ("name", *columns, "ood_score", "distance", "outlying", "error")
    sums, outlying, count, wide = np.zeros(2), 0, 0, 0.0
    progress("predicting", 0.0)
    with ExitStack() as stack:
        own = portions(
            fitted.posterior,
            in_turns(source, together),
            strict=strict,
            outputs=len(columns) + 2 - len(COLUMNS),
            seed=None,
            tell=lambda share: progress("predicting", share),
            intervals=decisions.intervals,
        )
        writer = stack.enter_context(open_writer(output, names, 0, fields)) if together.first else None
        for portion in in_order(own, together, Portion):
            assert writer is not None  # only rank 0 is given any
            account.add(source.name, portion.rows())
            numbers = iter(portion.numbers.tolist())
            for name, error in zip(portion.names, portion.errors, strict=True):
                values = [None] * (len(columns) + 2) if error else next(numbers)
                score, distance = values[-2:]
                last = {
                    "ood_score": score,
                    "distance": None if distance is None or math.isnan(distance) else distance,
                    "outlying": None if threshold is None or score is None else score > threshold,
                    "error": error,
                }
                writer.add({"name": name, **dict(zip(columns, values, strict=False)), **last})
            every = portion.numbers[:, : len(columns)].reshape(-1, width, len(OF_EACH))
            sums += [every[:, :, 1].mean(1).sum(), (every[:, :, 4] / every[:, :, 1] ** 2).mean(1).sum()]
            wide += float((every[:, :, 3] - every[:, :, 2]).mean(1).sum())
            outlying += 0 if threshold is None else int((portion.numbers[:, -2] > threshold).sum())
            count += len(portion.numbers)
        if together.first and count == 0:
            first = next(iter(account.left_out.get(source.name, {}).items()), None)
            why = "" if first is None else f" The first: {first[0]}: {first[1]}."
            raise DataError(f"{data} holds no input that can be used.{why}")
    progress("done", 1.0)
    if not together.first:
        return None
    std, epistemic = (sums / count).tolist()
    share = None if threshold is None else outlying / count
    seconds = time.perf_counter() - began
    return NumbersResult(
        output, count, account, std, epistemic, threshold, share, seconds, decisions.plain(), wide / count
    )


def decided(decisions: Decisions) -> tuple[str, ...]:
    """Fields that records have besides `FIELDS`, by what was asked for."""
    asked = {"answer": decisions.answer, "set": decisions.sets}
    return tuple(name for name, one in asked.items() if one is not None)


def _class_names(fitted: PosteriorFolder) -> tuple[str, ...]:
    return fitted.classes or tuple(str(index) for index in range(fitted.outputs))


YES = 0.5
"""Probability above which a label is yes."""


def records(
    portion: Portion, names: tuple[str, ...], decisions: Decisions, *, several: bool = False
) -> Iterator[dict[str, Any]]:
    """A record for each input of a portion, used or not, in their order.

    Args:
        portion: what is known of a batch, with probabilities if there are sets.
        names: of the classes.
        decisions: when an input is outlying or answered, and which classes a set holds.
        several: whether inputs have several labels, each yes or no: "class" then names those that are yes, and "label" counts them.

    Yields:
        The records: texts and numbers by name, None where there is nothing.
    """
    threshold = decisions.alarm
    numbers = iter(portion.numbers.tolist())
    sets = None
    if decisions.sets is not None and len(portion.numbers):
        sets = iter(decisions.sets(portion.numbers[:, len(COLUMNS) :]).tolist())
    for name, error in zip(portion.names, portion.errors, strict=True):
        values: list[Any] = [None] * len(COLUMNS) if error else next(numbers)
        label, confidence, entropy, epistemic, aleatoric, score, distance, *probs = values
        found = None if label is None else names[int(label)] if not several else _found(names, probs)
        record = {
            "name": name,
            "label": None if label is None else int(label),
            "class": found,
            "confidence": confidence,
            "entropy": entropy,
            "epistemic": epistemic,
            "aleatoric": aleatoric,
            "ood_score": score,
            "distance": None if distance is None or math.isnan(distance) else distance,
            "outlying": None if threshold is None or score is None else score > threshold,
            "error": error,
        }
        if decisions.answer is not None:
            record["answer"] = None if confidence is None else decide(decisions, confidence, score) == "answer"
        if decisions.sets is not None:
            held = None if error or sets is None else next(sets)
            record["set"] = None if held is None else [one for one, inside in zip(names, held, strict=True) if inside]
        yield {**record, "probabilities": probs or None}


@dataclass(frozen=True)
class Portion:
    """What is known of a batch.

    Attributes:
        names: of all inputs.
        errors: for each, why it was left out, or None.
        notes: on inputs that were used.
        numbers: for each that was used (m, 7), or (m, 7 + C) with probabilities.
    """

    names: list[str]
    errors: list[str | None]
    notes: tuple[tuple[str, str], ...]
    numbers: NDArray[np.float64]

    def plain(self) -> dict[str, Any]:
        """As JSON, the numbers to the last bit."""
        numbers = np.ascontiguousarray(self.numbers)
        return {
            "names": self.names,
            "errors": self.errors,
            "notes": self.notes,
            "shape": numbers.shape,
            "numbers": base64.b64encode(numbers.tobytes()).decode("ascii"),
        }

    @classmethod
    def of_plain(cls, document: dict[str, Any]) -> Portion:
        """From what `plain` gave."""
        numbers = np.frombuffer(base64.b64decode(document["numbers"]), np.float64).reshape(document["shape"])
        notes = tuple((name, words) for name, words in document["notes"])
        return cls(document["names"], document["errors"], notes, numbers)

    def rows(self) -> Rows:
        """Names, errors and notes, for an account."""
        return Rows(self.names, self.errors, None, None, self.notes)


def _found(names: Sequence[str], probs: Sequence[float | None]) -> str:
    # The labels that are yes, as a cell names them.
    return BETWEEN.join(name for name, value in zip(names, probs, strict=True) if value is not None and value > YES)


def _portion(rows: Rows, prediction: Any, outputs: int, intervals: PredictionIntervals | None = None) -> Portion:
    # `outputs`: how many probabilities to keep.
    numbers = np.zeros((0, len(COLUMNS) + outputs))
    if isinstance(prediction, RegressionPrediction):
        lower, upper = prediction.interval(PROBABILITY) if intervals is None else intervals(prediction)
        columns = (prediction.mean, prediction.std, lower, upper, prediction.epistemic, prediction.aleatoric)
        # Output by output, and then what is known of the input.
        each = torch.stack([column.double().cpu() for column in columns], 2).flatten(1)
        unknown = torch.full((len(prediction),), math.nan)
        last = (prediction.ood_score, unknown if prediction.distance is None else prediction.distance)
        numbers = torch.cat([each, *(one.double().cpu()[:, None] for one in last)], 1).numpy()
    elif prediction is not None:
        unknown = prediction.probs.new_full((len(prediction),), math.nan)
        values = [getattr(prediction, name) for name in COLUMNS]
        if not prediction.likelihood.mutually_exclusive:
            # How many are yes, and the means over labels of what is known of each.
            values = [prediction.label.sum(1), *(one.mean(1) for one in values[1:SCORE]), *values[SCORE:]]
        parts = [(unknown if one is None else one).double()[:, None] for one in values]
        numbers = torch.cat([*parts, *([prediction.probs.double()] if outputs else [])], dim=1).numpy()
    return Portion(rows.names, rows.errors, rows.notes, numbers)


def portions(
    posterior: MoLA,
    source: Set,
    *,
    strict: bool,
    outputs: int,
    seed: int | None,
    tell: Callable[[float], None] = lambda share: None,
    intervals: PredictionIntervals | None = None,
) -> Iterator[Portion]:
    """Predict a set batch by batch.

    Args:
        posterior: that predicts.
        source: the set, or this process's part.
        strict: whether an input that cannot be used is an error.
        outputs: how many probabilities to keep of each input: all or none.
        seed: of links that draw; None uses the link's own.
        tell: told which share of the set has been read, where its size is known.
        intervals: where outputs are numbers: those to write in place of the posterior's own.

    Returns:
        A portion for each batch, in order; `DataError` for an input that cannot be used, if this is strict.
    """

    def make(rows: Rows, prediction: Any) -> Portion:
        return _portion(rows, prediction, outputs, intervals)

    return predicted(posterior, source, make, strict=strict, seed=seed, tell=tell)


Made = TypeVar("Made")


def predicted(
    posterior: MoLA,
    source: Set,
    make: Callable[[Rows, Any], Made],
    *,
    strict: bool,
    seed: int | None = None,
    tell: Callable[[float], None] = lambda share: None,
) -> Iterator[Made]:
    """What is made of each batch of a set and its prediction.

    Args:
        posterior: that predicts.
        source: the set, or this process's part.
        make: of a batch and its prediction, which is None if no input of it could be used.
        strict: whether an input that cannot be used is an error.
        seed: of links that draw; None uses the link's own.
        tell: told which share of the set has been read, where its size is known.

    Yields:
        What was made, in order; `DataError` for an input that cannot be used, if this is strict.
    """
    pending = deque[Rows]()

    def feed() -> Iterator[Any]:
        seen = 0
        for rows in source:
            bad = next(((name, error) for name, error in zip(rows.names, rows.errors, strict=True) if error), None)
            if strict and bad is not None:
                raise DataError(f"{bad[0]}: {bad[1]} (and --strict leaves nothing out).")
            pending.append(rows)
            seen += len(rows.names)
            tell(min(1.0, seen / (source.count or 2 * seen)))
            if rows.inputs is not None:
                yield rows.inputs if isinstance(rows.inputs, Mapping) else (rows.inputs,)

    batches = feed()
    first = next(batches, None)
    if first is not None:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for prediction in posterior.predict_batches(chain([first], batches), generator=generator):
            while pending:
                rows = pending.popleft()
                used = rows.inputs is not None
                yield make(rows, prediction if used else None)
                if used:
                    break
    for rows in pending:
        yield make(rows, None)


class Sent(Protocol):
    """What processes send each other as JSON."""

    def plain(self) -> dict[str, Any]:
        """As JSON."""

    @classmethod
    def of_plain(cls, document: dict[str, Any]) -> Self:
        """From what `plain` gave."""


SentT = TypeVar("SentT", bound=Sent)


def in_order(own: Iterator[SentT], team: Team, kind: type[SentT]) -> Iterator[SentT]:
    """On rank 0 the portions of all processes, in the order of the data; on the others nothing.

    Args:
        own: those of this process, whose set is divided by `in_turns`.
        team: the processes.
        kind: of portion.

    Yields:
        One portion after the other.
    """
    if team.size == 1:
        yield from own
        return
    more = True
    while more:
        portion = next(own, None)
        everyone = team.collect(None if portion is None else portion.plain())
        # Batches are dealt in turns: once a process has none, the others have had their last.
        more = None not in everyone
        for document in everyone if team.first else ():
            if document is not None:
                yield kind.of_plain(document)


def discard(held: ExitStack) -> None:
    """Leave contexts as after an error: files that were being written are removed."""
    error = OSError("discarded")
    held.__exit__(OSError, error, None)


class Writer(ABC):
    """Writes records to a file beside the one that is wanted, which it becomes when all went well.

    Args:
        path: the file that is wanted.
        classes: their names, for headings.
        probabilities: how many of them each record has; 0 for none.
        fields: names of what a record holds beside them.
    """

    def __init__(self, path: Path, classes: Sequence[str], probabilities: int, fields: Sequence[str] = FIELDS) -> None:
        self.path, self.classes, self.probabilities, self.fields = path, list(classes), probabilities, tuple(fields)
        self._held = ExitStack()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.partial = self._held.enter_context(partial_file(path))
            self.begin()
        except OSError as error:
            discard(self._held)
            raise OptionError(f"cannot write {path} ({error.strerror}): choose another --output.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.end(whole=kind is None)
        except BaseException:
            discard(self._held)
            raise
        if kind is None:
            self._held.close()
        else:
            discard(self._held)

    @abstractmethod
    def begin(self) -> None:
        """Open what is needed."""

    @abstractmethod
    def add(self, record: Mapping[str, Any]) -> None:
        """Write one record: `FIELDS` by name, None where there is nothing, and "probabilities"."""

    @abstractmethod
    def end(self, *, whole: bool) -> None:
        """Close what was opened; `whole` says whether the file is wanted."""


class CsvWriter(Writer):
    """A heading, and a line for each input."""

    def begin(self) -> None:
        """Write the heading."""
        self._stream = open(self.partial, "w", newline="", encoding="utf-8")  # noqa: SIM115 - closed by `end`
        self._writer = csv.writer(self._stream, lineterminator="\n")
        self._writer.writerow([*self.fields, *(f"p_{name}" for name in self.classes[: self.probabilities])])

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a line."""
        values = record.get("probabilities") or [None] * self.probabilities
        known = [_cell(record.get(name)) for name in self.fields]
        self._writer.writerow(known + [_cell(value) for value in values])

    def end(self, *, whole: bool) -> None:
        """Close the file."""
        self._stream.close()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return BETWEEN.join(value)
    return f"{value:.9g}" if isinstance(value, float) else str(value)


class JsonLinesWriter(Writer):
    """An object for each input; what there is not is left out."""

    def begin(self) -> None:
        """Open the file."""
        self._stream = open(self.partial, "w", encoding="utf-8")  # noqa: SIM115 - closed by `end`

    def add(self, record: Mapping[str, Any]) -> None:
        """Write an object."""
        known = {name: value for name, value in record.items() if value is not None}
        self._stream.write(json.dumps(known, ensure_ascii=False) + "\n")

    def end(self, *, whole: bool) -> None:
        """Close the file."""
        self._stream.close()


class NpzWriter(Writer):
    """An array for each field: nan, -1, empty texts and empty sets where there is nothing; and the classes' names."""

    def begin(self) -> None:
        """Open a file for each column."""
        self._folder = tempfile.TemporaryDirectory(prefix="mola-")
        self._columns: dict[str, IO[bytes]] = {}
        self._widest: dict[str, int] = {"name": 1, "error": 1}
        self.count = 0
        names = [name for name in self.fields if name != "class"] + (["probabilities"] if self.probabilities else [])
        for name in names:
            self._columns[name] = open(Path(self._folder.name) / name, "w+b")  # noqa: SIM115 - closed by `end`

    def add(self, record: Mapping[str, Any]) -> None:
        """Append to each column."""
        self.count += 1
        for name, column in self._columns.items():
            value = record.get(name)
            if name in self._widest:
                text = value or ""
                self._widest[name] = max(self._widest[name], len(text))
                column.write(json.dumps(text).encode() + b"\n")
            elif name == "label":
                column.write(np.int64(-1 if value is None else value).tobytes())
            elif name == "set":
                column.write(np.isin(self.classes, value or []).astype(np.bool_).tobytes())
            elif name in ("outlying", "answer"):
                column.write(np.int8(-1 if value is None else value).tobytes())
            elif name == "probabilities":
                column.write(np.asarray(value or [np.nan] * self.probabilities, dtype=np.float64).tobytes())
            else:
                column.write(np.float64(np.nan if value is None else value).tobytes())

    def end(self, *, whole: bool) -> None:
        """Pack the columns into one archive."""
        try:
            if whole:
                with zipfile.ZipFile(self.partial, "w", zipfile.ZIP_DEFLATED) as archive:
                    for name, column in self._columns.items():
                        self._pack(archive, name, column)
                    with archive.open("classes.npy", "w") as target:
                        np.lib.format.write_array(target, np.array(self.classes, dtype=np.str_), allow_pickle=False)
        finally:
            for column in self._columns.values():
                column.close()
            self._folder.cleanup()

    def _pack(self, archive: zipfile.ZipFile, name: str, column: IO[bytes]) -> None:
        column.seek(0)
        kinds: dict[str, np.dtype[Any]] = {
            "label": np.dtype(np.int64),
            "outlying": np.dtype(np.int8),
            "answer": np.dtype(np.int8),
            "set": np.dtype(np.bool_),
        }
        dtype: np.dtype[Any] = (
            np.dtype(f"<U{self._widest[name]}") if name in self._widest else kinds.get(name, np.dtype(np.float64))
        )
        wide = {"probabilities": self.probabilities, "set": len(self.classes)}
        shape = (self.count, wide[name]) if name in wide else (self.count,)
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        with archive.open(f"{name}.npy", "w", force_zip64=True) as target:
            np.lib.format.write_array_header_1_0(target, header)
            if name in self._widest:
                for texts in _texts(column):
                    target.write(np.array(texts, dtype=dtype).tobytes())
            else:
                while content := column.read(COPIED):
                    target.write(content)


def _texts(column: IO[bytes]) -> Iterator[list[str]]:
    texts: list[str] = []
    for line in column:
        texts.append(json.loads(line))
        if len(texts) == COPIED:
            yield texts
            texts = []
    if texts:
        yield texts


def open_writer(path: Path, classes: Sequence[str], probabilities: int, fields: Sequence[str] = FIELDS) -> Writer:
    """What writes a file, by the ending of its name.

    Args:
        path: the file that is wanted.
        classes: their names, for headings.
        probabilities: how many of them each record has; 0 for none.
        fields: names of what a record holds beside them.

    Returns:
        The writer.
    """
    kinds: dict[str, type[CsvWriter | JsonLinesWriter | NpzWriter]] = {
        ".csv": CsvWriter,
        ".jsonl": JsonLinesWriter,
        ".npz": NpzWriter,
    }
    if path.suffix not in kinds:
        raise OptionError(f"{path} has the ending {path.suffix!r}: expected one of {', '.join(FORMATS)}.")
    return kinds[path.suffix](path, classes, probabilities, fields)
