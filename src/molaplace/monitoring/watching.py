"""Watch a deployed model: an alarm that may be read at any time, accuracy without labels, and accuracy from late labels.

A `Watch` reads predictions batch by batch. Its results do not depend on how the stream is divided into batches, and its memory does not
grow with the stream: it keeps the number of scores in each bin, the capital of some bets, and a window of recent inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import DataError, OptionError, StorageError, located
from molaplace.monitoring import alarm as alarms
from molaplace.monitoring.accuracy import STRANGE, ConfidenceThreshold, ExpectedAccuracy
from molaplace.monitoring.alarm import Alarm, Contribution
from molaplace.monitoring.evidence import Evidence
from molaplace.monitoring.labelled import SHARES, LabelledAccuracy, confidence_sequence, log_fall_factors
from molaplace.monitoring.ranks import Array, ScoreCounts, uniform_draws
from molaplace.network import IGNORE_INDEX, as_batch
from molaplace.options import check_share, counted, whole_number
from molaplace.prediction import Prediction, RegressionPrediction
from molaplace.predictor import Predictor
from molaplace.saving.files import read_folder, write_folder
from molaplace.saving.schema import Optional

KIND = "watch"
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of the scores that are stored for the validation data."""

INTERVAL = 0.9
"""Nominal coverage of the intervals that are checked when the targets of a regression arrive."""

MOST_POSITIONS = 256
"""Number of positions of each validation input that are read if the outputs are dense."""

MOST_CONTRIBUTIONS = 10


# --- what is read from predictions ------------------------------------------------------------------------------------


def _rows(values: Any) -> Array:
    # Return a tensor (n, ...) as an array (n, q).
    array = torch.as_tensor(values).detach().cpu().numpy()
    return array.reshape(len(array), -1)


def _scores(prediction: Any) -> Array:
    # One score for each input: for dense outputs, the mean over the positions.
    return _rows(prediction.ood_score).astype(np.float64).mean(1)


def _answers(prediction: Any) -> Array:
    # What labels are compared with: predicted labels (n, q) or, for regression, the ends of intervals (n, 2, q).
    if isinstance(prediction, RegressionPrediction):
        return np.stack([_rows(end) for end in prediction.interval(INTERVAL)], axis=1)
    return _rows(prediction.label).astype(np.int32)


def _correctness(answers: Array, labels: Any) -> Array:
    # Whether each answer is right, 0 or 1, as an array (n, q); NaN where the label is missing.
    try:
        truth = _rows(labels).astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"must be numbers, got a {type(labels).__name__}.", argument="labels") from error
    expected = (len(answers), answers.shape[-1])
    if truth.shape != expected:
        raise DataError(
            f"must have one row for each of {counted(expected[0], 'input')} and {counted(expected[1], 'value')} in each row; got shape "
            f"{tuple(torch.as_tensor(labels).shape)}.",
            argument="labels",
        )
    if answers.ndim == 3:
        return np.where(np.isnan(truth), np.nan, (answers[:, 0] <= truth) & (truth <= answers[:, 1]))
    return np.where(np.isnan(truth) | (truth == IGNORE_INDEX), np.nan, answers == truth)


def _mean_known(correct: Array) -> Array:
    # Mean (n,) over the known values of each input; NaN if none is known.
    known = ~np.isnan(correct)
    sums = np.where(known, correct, 0).sum(1)
    return np.where(known.any(1), sums / np.maximum(known.sum(1), 1), np.nan)


# --- validation data --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Baseline:
    """What a watch knows about the validation data."""

    scores: ScoreCounts
    """Counts of the outlier scores."""
    quantiles: tuple[float, ...]
    """Quantiles of the scores, at the levels 0.05, 0.25, 0.5, 0.75 and 0.95."""
    strange: float
    """Score that 99 % of the validation data do not exceed."""
    regression: bool = False
    accuracy: float | None = None
    """Accuracy or, for regression, coverage of intervals; None without labels."""
    confidence: ConfidenceThreshold | None = None
    """Threshold on the confidence; None for regression and without labels."""

    @classmethod
    def of_columns(
        cls, scores: Array, confidence: Array | None, correct: Array | None, *, pooled: bool = False
    ) -> Baseline:
        """Return the baseline of validation data with scores (m,), confidences (m, q) and correctness (m, q), NaN where unknown."""
        counts, _ = ScoreCounts().add(scores, np.zeros(len(scores)))
        quantiles = tuple(np.quantile(scores, LEVELS).tolist())
        baseline = cls(counts, quantiles, float(np.quantile(scores, STRANGE)), regression=confidence is None)
        if correct is None or np.isnan(correct).all():
            return baseline
        if confidence is None:
            return replace(baseline, accuracy=float(np.nanmean(correct)))
        threshold = ConfidenceThreshold.fit(confidence, correct, pooled=pooled)
        return replace(baseline, accuracy=threshold.accuracy, confidence=threshold)

    @classmethod
    def read(cls, posterior: Predictor, loader: Iterable[Any]) -> Baseline:
        """Predict the validation data batch by batch, and keep what a watch needs."""
        scores: list[Array] = []
        confidences: list[Array] = []
        corrects: list[Array] = []
        pooled = False
        for index, raw in enumerate(loader):
            place = f"batch {index} of the validation loader"
            batch = as_batch(raw, place)
            prediction = posterior.predict_batch(batch.inputs).cpu()
            answers = _answers(prediction)
            with located(place):
                missing = np.full((len(answers), answers.shape[-1]), np.nan)
                correct = missing if batch.labels is None else _correctness(answers, batch.labels)
            positions = np.arange(correct.shape[1])
            if isinstance(prediction, Prediction) and prediction.probs.dim() > 2:
                pooled = True
                positions = np.linspace(0, len(positions) - 1, min(len(positions), MOST_POSITIONS)).astype(int)
            scores.append(_scores(prediction))
            corrects.append(correct[:, positions])
            if isinstance(prediction, Prediction):
                confidences.append(_rows(prediction.confidence).astype(np.float64)[:, positions])
        if not scores:
            raise DataError("the validation loader is empty. Pass at least one batch.")
        columns = np.concatenate(confidences) if confidences else None
        return cls.of_columns(np.concatenate(scores), columns, np.concatenate(corrects), pooled=pooled)


@dataclass(frozen=True)
class WatchOptions:
    """The options of a watch."""

    alpha: float = 0.01
    """Largest probability of a false alarm over the whole life of the stream, for each of the two alarms."""
    tolerance: float = 0.05
    """Fall in accuracy, from 0 to 1, that the alarm of `labelled` tolerates."""
    recent: int = 1000
    """Number of inputs for which `accuracy` is estimated."""
    window: int = 10_000
    """Number of recent inputs that are kept, and whose labels may still arrive."""
    seed: int = 0
    """Seed of the draws that break ties."""

    def __post_init__(self) -> None:
        check_share(self.alpha, "alpha", "1 % is 0.01.")
        check_share(self.tolerance, "tolerance", "5 points are 0.05.")
        whole_number(self.recent, "recent")
        whole_number(self.window, "window")
        whole_number(self.seed, "seed", 0)
        if self.recent > self.window:
            raise OptionError(f"must be at most window = {self.window}, got {self.recent}.", argument="recent")


# --- one stream -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """What is known about one stream of inputs."""

    name: str
    scores: ScoreCounts
    """Counts of all scores so far, including those of the validation data."""
    evidence: Evidence = field(default_factory=lambda: Evidence.none(alarms.BETS))
    """Evidence that the stream has left the validation data."""
    fall: Evidence = field(default_factory=lambda: Evidence.none(len(SHARES)))
    """Evidence that accuracy has fallen."""
    correct: float = 0.0
    """Sum of the correctness of the inputs with labels."""
    window: Mapping[str, Array] = field(default_factory=dict)
    """Columns of the most recent inputs: "score", "p_value", "share" of confident predictions, "correct" (NaN without a label), and
    "answers"."""

    @property
    def count(self) -> int:
        """Number of inputs."""
        return self.evidence.count

    @property
    def first(self) -> int:
        """Position of the first input in the window."""
        return self.count - len(self.window.get("score", ()))

    def add(self, prediction: Any, labels: Any, baseline: Baseline, options: WatchOptions) -> Stream:
        """Return the stream after further inputs, with their labels if known."""
        scores = _scores(prediction)
        draws = uniform_draws(options.seed, self.count, len(scores))
        counts, p_values = self.scores.add(scores, draws)
        shares = np.zeros(len(scores))
        if baseline.confidence is not None:
            shares = baseline.confidence.shares(_rows(prediction.confidence))
        answers = _answers(prediction)
        outcomes = np.full(len(scores), np.nan) if labels is None else _mean_known(_correctness(answers, labels))
        columns = {"score": scores, "p_value": p_values, "share": shares, "correct": np.full(len(scores), np.nan)}
        if not _is_dense(prediction):
            columns["answers"] = answers
        window = {
            name: np.concatenate([self.window.get(name, values[:0]), values])[-options.window :]
            for name, values in columns.items()
        }
        stream = replace(self, scores=counts, evidence=self.evidence.add(alarms.log_factors(p_values)), window=window)
        return stream.judged(self.count + np.arange(len(scores)), outcomes, baseline, options)

    def judged(self, positions: Array, outcomes: Array, baseline: Baseline, options: WatchOptions) -> Stream:
        """Return the stream with the correctness (n,) of the inputs at some positions; NaN where the label is missing."""
        known = ~np.isnan(outcomes)
        if not known.any():
            return self
        correct = self.window["correct"].copy()
        inside = known & (positions >= self.first)
        correct[positions[inside] - self.first] = outcomes[inside]
        fall = self.fall
        if baseline.accuracy is not None:
            fall = fall.add(log_fall_factors(outcomes[known], baseline.accuracy - options.tolerance))
        total = self.correct + float(outcomes[known].sum())
        return replace(self, window={**self.window, "correct": correct}, fall=fall, correct=total)


def _is_dense(prediction: Any) -> bool:
    outputs = prediction.mean if isinstance(prediction, RegressionPrediction) else prediction.probs
    return bool(outputs.dim() > 2)


# --- the watch --------------------------------------------------------------------------------------------------------


class Watch:
    """A stream of inputs, or several merged streams, compared with validation data. Created by `mola.watch`, `load` or `merge`."""

    def __init__(self, baseline: Baseline, options: WatchOptions, streams: tuple[Stream, ...]) -> None:
        self.baseline = baseline
        self.options = options
        self.streams = streams

    @classmethod
    def of(cls, baseline: Baseline, options: WatchOptions, name: str = "") -> Watch:
        """Return a watch that has not seen any inputs."""
        return cls(baseline, options, (Stream(name, baseline.scores),))

    @property
    def count(self) -> int:
        """Number of inputs so far."""
        return sum(stream.count for stream in self.streams)

    def update(self, prediction: Any = None, *, labels: Any = None, positions: Any = None) -> Watch:
        """Add further inputs, or the labels of earlier inputs, and return the watch.

        The inputs must come in the order in which they arrive, or in random order: a folder sorted by class is not exchangeable.

        Args:
            prediction: predictions for the next inputs, of any number.
            labels: labels of these inputs or, without a prediction, of earlier inputs: class indices (n,), labels (n, C) or, for
                regression, targets (n,) or (n, D). NaN or -100 marks a missing label.
            positions: positions (n,) of the earlier inputs, counted from 0 over the whole stream. They may be omitted if there are
                labels for all inputs in the window that have none yet, in order.
        """
        if len(self.streams) > 1:
            raise OptionError(
                "a merged watch cannot be updated. Update the watch of each process, and merge them again."
            )
        stream = self.streams[0]
        if prediction is None:
            self.streams = (self._with_labels(stream, labels, positions),)
            return self
        kind = RegressionPrediction if self.baseline.regression else Prediction
        if not isinstance(prediction, kind):
            raise OptionError(
                f"must be a mola.{kind.__name__}, like the predictions for the validation data; got a {type(prediction).__name__}.",
                argument="prediction",
            )
        if positions is not None:
            raise OptionError(
                "are for labels without a prediction. New inputs have the next positions.", argument="positions"
            )
        if len(prediction):
            self.streams = (stream.add(prediction, labels, self.baseline, self.options),)
        return self

    def _with_labels(self, stream: Stream, labels: Any, positions: Any) -> Stream:
        if labels is None:
            raise OptionError("pass predictions for new inputs, labels for earlier inputs, or both.")
        if "answers" not in stream.window:
            raise OptionError(
                "cannot arrive later for dense outputs, or before the first prediction. Pass them with the predictions.",
                argument="labels",
            )
        waiting = np.isnan(stream.window["correct"])
        if positions is None:
            indices = np.flatnonzero(waiting)
            if len(labels) != len(indices):
                raise OptionError(
                    f"must be given for {counted(len(labels), 'label')}, because {counted(len(indices), 'recent input')} of "
                    f"{stream.count:,} have no label yet.",
                    argument="positions",
                )
        else:
            indices = _rows(positions)[:, 0].astype(np.int64) - stream.first
            within = (indices >= 0) & (indices < len(waiting))
            if not within.all():
                raise OptionError(
                    f"must be from {stream.first:,} to {stream.count - 1:,}, the inputs in the window; got "
                    f"{int((indices + stream.first)[~within][0]):,}. Choose a larger window if labels take longer.",
                    argument="positions",
                )
            if len(np.unique(indices)) < len(indices) or not waiting[indices].all():
                raise OptionError("contain an input twice, or an input that already has a label.", argument="positions")
        outcomes = _mean_known(_correctness(stream.window["answers"][indices], labels))
        return stream.judged(indices + stream.first, outcomes, self.baseline, self.options)

    # --- what can be read at any time ---------------------------------------------------------------------------------

    @property
    def alarm(self) -> Alarm:
        """Whether the stream has left the validation data. It may be read after every batch."""
        stream = max(self.streams, key=lambda stream: stream.evidence.log_peak)
        evidence = stream.evidence
        threshold = math.log(len(self.streams) / self.options.alpha)
        raised = evidence.log_peak >= threshold
        return Alarm(
            raised=raised,
            evidence=evidence.log_peak,
            threshold=threshold,
            now=evidence.log_value,
            count=self.count,
            began=evidence.began if raised else None,
            contributions=_contributions(stream) if raised else (),
            stream=stream.name,
        )

    @property
    def accuracy(self) -> ExpectedAccuracy:
        """Expected accuracy of the recent inputs, without labels, or the reason why it is unknown."""
        columns = [stream.window for stream in self.streams if stream.count]
        recent = {
            name: np.concatenate([column[name][-self.options.recent :] for column in columns] or [np.zeros(0)])
            for name in ("share", "score")
        }
        strange = recent["score"] > self.baseline.strange
        if self.baseline.confidence is not None:
            return self.baseline.confidence.estimate(recent["share"], strange)
        reason = "regression" if self.baseline.regression else "no labelled validation data"
        share = float(strange.mean()) if len(strange) else None
        return ExpectedAccuracy(None, None, None, len(strange), share, reason)

    @property
    def labelled(self) -> LabelledAccuracy:
        """Accuracy on the inputs whose labels are known or, for regression, coverage of the 90 % prediction intervals."""
        count = sum(stream.fall.count for stream in self.streams)
        total = sum(stream.correct for stream in self.streams)
        low, high = confidence_sequence(total, count, self.options.alpha)
        fall = max((stream.fall for stream in self.streams), key=lambda evidence: evidence.log_peak)
        threshold = math.log(len(self.streams) / self.options.alpha)
        accuracy = self.baseline.accuracy
        return LabelledAccuracy(
            value=total / count if count else None,
            low=low,
            high=high,
            count=count,
            least=None if accuracy is None else accuracy - self.options.tolerance,
            evidence=fall.log_peak,
            threshold=threshold,
            began=fall.began if fall.log_peak >= threshold else None,
        )

    def __repr__(self) -> str:
        alarm = self.alarm
        accuracy = self.accuracy
        state = f"alarm, the change began at input {alarm.began:,}" if alarm else "no alarm"
        expected = accuracy.reason if accuracy.value is None else f"expected accuracy {accuracy.value:.1%}"
        return f"Watch({counted(self.count, 'input')}: {state}, {expected})"

    # --- several processes, and files ---------------------------------------------------------------------------------

    def merge(self, *others: Watch) -> Watch:
        """Return a watch over the streams of several processes, which can be read but not updated.

        The alarm is raised if the evidence of one of m streams reaches m / alpha. The order does not matter.
        """
        if not all(self.same_origin(other) for other in others):
            raise OptionError("only watches with the same validation data and options can be merged.")
        streams = [stream for watch in (self, *others) for stream in watch.streams]
        return Watch(self.baseline, self.options, tuple(sorted(streams, key=_order)))

    def same_origin(self, other: Watch) -> bool:
        """Return True if both watches compare with the same validation data, with the same options."""
        return _plain(self.baseline) == _plain(other.baseline) and self.options == other.options

    def save(self, directory: str | Path) -> Path:
        """Write the watch to a folder, and return the folder. A watch saved there before is readable until the new one is complete."""
        return write_folder(directory, *self.pack())

    @classmethod
    def load(cls, directory: str | Path) -> Watch:
        """Read a watch from a folder written by `save`; raise `StorageError` if it is damaged."""
        return cls.unpack(*read_folder(directory, KIND, SCHEMA))

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the watch as a JSON-serialisable document and tensors."""
        arrays = {f"baseline.{name}": array for name, array in _arrays(self.baseline.scores).items()}
        streams = []
        for index, stream in enumerate(self.streams):
            for part in ("scores", "evidence", "fall"):
                named = _arrays(getattr(stream, part))
                arrays |= {f"streams.{index}.{part}.{name}": array for name, array in named.items()}
            arrays |= {f"streams.{index}.window.{name}": array for name, array in stream.window.items()}
            evidence = {part: _numbers(getattr(stream, part)) for part in ("evidence", "fall")}
            streams.append({"name": stream.name, "correct": stream.correct, **evidence})
        document = {
            "kind": KIND,
            "options": asdict(self.options),
            "baseline": _numbers(self.baseline),
            "streams": streams,
        }
        return document, {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    @classmethod
    def unpack(cls, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Watch:
        """Rebuild a watch from the document and tensors returned by `pack`."""

        def part(prefix: str) -> dict[str, Any]:
            return {
                name.removeprefix(prefix): tensor.numpy() for name, tensor in tensors.items() if name.startswith(prefix)
            }

        try:
            numbers = dict(document["baseline"])
            numbers["quantiles"] = tuple(numbers["quantiles"])
            if numbers["confidence"] is not None:
                pairs = {name: tuple(numbers["confidence"][name]) for name in ("thresholds", "fractions")}
                numbers["confidence"] = ConfidenceThreshold(**(numbers["confidence"] | pairs))
            baseline = Baseline(ScoreCounts(**part("baseline.")), **numbers)
            streams = tuple(
                Stream(
                    name=entry["name"],
                    scores=ScoreCounts(**part(f"streams.{index}.scores.")),
                    evidence=Evidence(**part(f"streams.{index}.evidence."), **entry["evidence"]),
                    fall=Evidence(**part(f"streams.{index}.fall."), **entry["fall"]),
                    correct=entry["correct"],
                    window=part(f"streams.{index}.window."),
                )
                for index, entry in enumerate(document["streams"])
            )
            return cls(baseline, WatchOptions(**document["options"]), streams)
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"the saved watch is incomplete: {error}. Start a new watch.") from error


EVIDENCE = {"count": int, "log_value": float, "log_peak": float, "began": int, "leader": int}
SCHEMA = {
    "options": {"alpha": float, "tolerance": float, "recent": int, "window": int, "seed": int},
    "baseline": {
        "quantiles": [float],
        "strange": float,
        "regression": bool,
        "accuracy": Optional(float),
        "confidence": Optional(
            {
                **{name: [float] for name in ("thresholds", "fractions")},
                **dict.fromkeys(("wrong_above", "right_below", "variance", "accuracy"), float),
                "count": int,
            }
        ),
    },
    "streams": [{"name": str, "correct": float, "evidence": EVIDENCE, "fall": EVIDENCE}],
}


def _arrays(value: Any) -> dict[str, Array]:
    members = {member.name: getattr(value, member.name) for member in fields(value)}
    return {name: member for name, member in members.items() if isinstance(member, np.ndarray)}


def _numbers(value: Any) -> dict[str, Any]:
    # The fields of a dataclass that are neither arrays nor counts of scores, as plain values.
    members = {member.name: getattr(value, member.name) for member in fields(value)}
    numbers = {name: member for name, member in members.items() if not isinstance(member, (np.ndarray, ScoreCounts))}
    return {
        name: asdict(member) if is_dataclass(member) and not isinstance(member, type) else member
        for name, member in numbers.items()
    }


def _plain(baseline: Baseline) -> dict[str, Any]:
    return _numbers(baseline) | {name: array.tolist() for name, array in _arrays(baseline.scores).items()}


def _order(stream: Stream) -> tuple[Any, ...]:
    # An order of streams that depends only on their content.
    return stream.name, stream.count, stream.evidence.log_peak, stream.evidence.log_value, stream.correct


def _contributions(stream: Stream) -> tuple[Contribution, ...]:
    evidence = stream.evidence
    since = max(evidence.began - stream.first, 0)
    gains = alarms.log_factors(stream.window["p_value"][since:])[evidence.leader]
    strongest = np.argsort(-gains, kind="stable")[:MOST_CONTRIBUTIONS]
    scores = stream.window["score"][since:]
    return tuple(
        Contribution(int(index) + since + stream.first, float(scores[index]), float(gains[index]), stream.name)
        for index in strongest
        if gains[index] > 0
    )


def watch(
    posterior: Predictor,
    val_loader: Iterable[Any],
    *,
    alpha: float = 0.01,
    tolerance: float = 0.05,
    recent: int = 1000,
    window: int = 10_000,
    seed: int = 0,
    name: str = "",
) -> Watch:
    """Start to watch a deployed model: compare a stream of predictions with those for validation data.

    Labels of the validation data are optional; without them, there is no expected accuracy. The networks must not have been trained on
    the data, which must resemble the inputs as they were when all was well.

    Args:
        posterior: any predictor: a posterior, an ensemble or a mixture.
        val_loader: iterable of batches, of inputs alone or of (inputs, labels).
        alpha: largest probability of a false alarm over the whole life of the stream, for each of the two alarms.
        tolerance: fall in accuracy, from 0 to 1, that the alarm of `watch.labelled` tolerates.
        recent: number of inputs for which `watch.accuracy` is estimated.
        window: number of recent inputs that are kept, and whose labels may still arrive.
        seed: seed of the draws that break ties between scores.
        name: name of the stream, for the streams of several processes.

    Returns:
        A `Watch`. Call `watch.update(prediction)` for each batch, and read `alarm`, `accuracy` and `labelled` at any time.
    """
    options = WatchOptions(alpha, tolerance, recent, window, seed)
    return Watch.of(Baseline.read(posterior, val_loader), options, name)
