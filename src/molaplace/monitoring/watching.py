"""Watch a deployed model: an alarm that may be read at any time, accuracy without labels, and accuracy from late labels.

A `Watch` reads predictions batch by batch. Its results do not depend on how the stream is divided into batches, and its memory does not
grow with the stream: it keeps the number of scores in each bin, the capital of some bets, and a window of recent inputs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import OptionError, StorageError
from molaplace.fingerprints import check_fingerprint
from molaplace.monitoring.accuracy import ConfidenceThreshold, ExpectedAccuracy
from molaplace.monitoring.alarm import Alarm
from molaplace.monitoring.baseline import Baseline, as_rows, predicted_values
from molaplace.monitoring.evidence import Evidence
from molaplace.monitoring.labelled import VALIDATION_SHARE, LabelledAccuracy, RecentAccuracy, confidence_sequence
from molaplace.monitoring.ranks import Array, ScoreCounts
from molaplace.monitoring.stream import Stream, WatchOptions, columns_of, digests_of
from molaplace.options import counted
from molaplace.prediction import Prediction, RegressionPrediction
from molaplace.predictor import Predictor
from molaplace.saving.files import read_folder, write_folder
from molaplace.saving.schema import Optional

KIND = "watch"

FROM_OUTPUTS = " For the outputs of an exported file, pass exported.prediction_of(outputs), with exported = mola.export.load(path)."


class Watch:
    """A stream of inputs, or several merged streams, compared with validation data. Created by `mola.watch`, `load` or `merge`.

    Threads may share a watch: each update is counted once, in some order, and every reading is of one moment.
    """

    def __init__(self, baseline: Baseline, options: WatchOptions, streams: tuple[Stream, ...]) -> None:
        self.baseline = baseline
        self.options = options
        self.streams = streams
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    @classmethod
    def of(cls, baseline: Baseline, options: WatchOptions, name: str = "") -> Watch:
        """Return a watch that has not seen any inputs."""
        return cls(baseline, options, (Stream(name, baseline.scores),))

    @property
    def count(self) -> int:
        """Number of inputs so far."""
        return sum(stream.count for stream in self.streams)

    def update(self, prediction: Any = None, *, labels: Any = None, positions: Any = None, ids: Any = None) -> Watch:
        """Add further inputs, or the labels of earlier inputs, and return the watch.

        The inputs must come in the order in which they arrive, or in random order: a folder sorted by class is not exchangeable.

        Args:
            prediction: predictions for the next inputs, of any number, by the predictor with which the watch was created.
            labels: labels of these inputs or, without a prediction, of earlier inputs: class indices (n,), labels (n, C) or, for
                regression, targets (n,) or (n, D). NaN or -100 (or the posterior's `ignore_index`) marks a missing label. For the next
                tokens of a language model, position t holds the token at t + 1: only labels in loaders are shifted for you.
            positions: positions (n,) of the earlier inputs, counted from 0 over the whole stream. They may be omitted if there are
                labels for all inputs in the window that have none yet, in order.
            ids: names (n,) of the inputs, such as the ids of requests: strings or non-negative whole numbers. Inputs that have ids are
                found by them when their labels arrive, whatever was lost or reordered in between. Pass ids instead of positions.
        """
        if len(self.streams) > 1:
            raise OptionError(
                "a merged watch cannot be updated. Update the watch of each process, and merge them again."
            )
        digests = None if ids is None else digests_of(ids)
        if prediction is None:
            with self._lock:
                self.streams = (self._with_labels(self.streams[0], labels, positions, digests),)
            return self
        kind = RegressionPrediction if self.baseline.regression else Prediction
        if not isinstance(prediction, kind):
            raise OptionError(
                f"must be a mola.{kind.__name__}, like the predictions for the validation data; got a {type(prediction).__name__}."
                f"{FROM_OUTPUTS if isinstance(prediction, Mapping) else ''}",
                argument="prediction",
            )
        check_fingerprint(prediction, self.baseline.fingerprint, "this watch")
        if positions is not None:
            raise OptionError(
                "are for labels without a prediction. New inputs have the next positions.", argument="positions"
            )
        if digests is not None and len(digests) != len(prediction):
            raise OptionError(
                f"must be one for each of {counted(len(prediction), 'input')}, got {len(digests)}.", argument="ids"
            )
        if len(prediction):
            # Everything that does not depend on earlier inputs is computed before other threads have to wait.
            columns = columns_of(prediction, self.baseline)
            if digests is not None:
                columns["id"] = digests
            outcomes = None if labels is None else self.baseline.outcomes(predicted_values(prediction), labels)
            with self._lock:
                self.streams = (self.streams[0].add(columns, outcomes, self.baseline, self.options),)
        return self

    def _with_labels(self, stream: Stream, labels: Any, positions: Any, ids: Array | None) -> Stream:
        if labels is None:
            raise OptionError("pass predictions for new inputs, labels for earlier inputs, or both.")
        if "predicted" not in stream.window:
            raise OptionError(
                "cannot arrive later for dense outputs, or before the first prediction. Pass them with the predictions.",
                argument="labels",
            )
        waiting = np.isnan(stream.window["correct"])
        argument = "positions" if ids is None else "ids"
        if positions is not None and ids is not None:
            raise OptionError("cannot be combined with ids, which say the same.", argument="positions")
        if ids is not None:
            indices = _indices_of(ids, stream)
        elif positions is None:
            indices = np.flatnonzero(waiting)
            if len(labels) != len(indices):
                raise OptionError(
                    f"must be given for {counted(len(labels), 'label')}, because {counted(len(indices), 'recent input')} of "
                    f"{stream.count:,} have no label yet.",
                    argument="positions",
                )
        else:
            numbers = as_rows(positions)[:, 0] if len(positions) else np.zeros(0)
            if not (numbers % 1 == 0).all():
                raise OptionError(f"must be whole numbers, got {numbers[numbers % 1 != 0][0]:g}.", argument="positions")
            indices = numbers.astype(np.int64) - stream.first
            within = (indices >= 0) & (indices < len(waiting))
            if not within.all():
                raise OptionError(
                    f"must be from {stream.first:,} to {stream.count - 1:,}, the inputs in the window; got "
                    f"{int((indices + stream.first)[~within][0]):,}. Choose a larger window if labels take longer.",
                    argument="positions",
                )
        if len(np.unique(indices)) < len(indices) or not waiting[indices].all():
            raise OptionError("contain an input twice, or an input that already has a label.", argument=argument)
        outcomes = self.baseline.outcomes(stream.window["predicted"][indices], labels)
        return stream.with_outcomes(indices + stream.first, outcomes, self.baseline, self.options)

    # --- what can be read at any time ---------------------------------------------------------------------------------

    @property
    def alarm(self) -> Alarm:
        """Whether the stream has left the validation data. It may be read after every batch."""
        streams = self.streams
        stream = max(streams, key=lambda stream: stream.evidence.log_peak)
        evidence = stream.evidence
        threshold = math.log(len(streams) / self.options.alpha)
        raised = evidence.log_peak >= threshold
        return Alarm(
            raised=raised,
            evidence=evidence.log_peak,
            threshold=threshold,
            now=evidence.log_value,
            count=stream.count,
            began=evidence.began if raised else None,
            contributions=stream.contributions() if raised else (),
            stream=stream.name,
        )

    @property
    def accuracy(self) -> ExpectedAccuracy:
        """Expected accuracy of the recent inputs, without labels, or the reason why it is unknown."""
        streams = self.streams
        recent = {name: self._recent([stream.window.get(name) for stream in streams]) for name in ("share", "score")}
        strange = recent["score"] > self.baseline.strange
        if self.baseline.confidence is not None:
            return self.baseline.confidence.estimate(recent["share"], strange)
        reason = "regression" if self.baseline.regression else "no labelled validation data"
        share = float(strange.mean()) if len(strange) else None
        return ExpectedAccuracy(None, None, None, len(strange), share, reason)

    @property
    def labelled(self) -> LabelledAccuracy:
        """Accuracy on the inputs whose labels are known or, for regression, coverage of the 90 % prediction intervals."""
        streams = self.streams
        count = sum(stream.labelled for stream in streams)
        total = sum(stream.correct for stream in streams)
        low, high = confidence_sequence(total, count, self.options.alpha)
        columns = [stream.window["correct"] for stream in streams if stream.labelled]
        columns = [column[~np.isnan(column)] for column in columns]
        fall = max((stream.fall for stream in streams), key=lambda evidence: evidence.log_peak)
        threshold = math.log(len(streams) / ((1 - VALIDATION_SHARE) * self.options.alpha))
        return LabelledAccuracy(
            value=total / count if count else None,
            low=low,
            high=high,
            count=count,
            least=self.baseline.least_accuracy(self.options.alpha, self.options.tolerance),
            evidence=fall.log_peak,
            threshold=threshold,
            began=fall.began if fall.log_peak >= threshold else None,
            recent=RecentAccuracy.of(self._recent(columns), self.options.alpha),
        )

    def _recent(self, columns: Sequence[Array | None]) -> Array:
        # Return the last `recent` values of all streams together. Their order in time is unknown, so all have the same share.
        known = [column for column in columns if column is not None]
        share = math.ceil(self.options.recent / max(len(known), 1))
        return np.concatenate([np.zeros(0), *(column[-share:] for column in known)])

    def __repr__(self) -> str:
        alarm = self.alarm
        accuracy = self.accuracy
        state = f"alarm, the change began at input {alarm.began:,}" if alarm else "no alarm"
        if alarm and len(self.streams) > 1:
            state += f" of the {alarm.count:,} in stream {alarm.stream!r}"
        expected = accuracy.reason if accuracy.value is None else f"expected accuracy {accuracy.value:.1%}"
        caution = ", which assumes at most a moderate shift: check it with labels"
        if not alarm or accuracy.value is None:
            caution = ""
        return f"Watch({counted(self.count, 'input')}: {state}, {expected}{caution})"

    # --- several processes, and files ---------------------------------------------------------------------------------

    def merge(self, *others: Watch) -> Watch:
        """Return a watch over the streams of several processes, which can be read but not updated.

        The alarm is raised if the evidence of one of m streams reaches m / alpha, and `alarm` then describes this stream. The accuracy
        is that of the last `recent` / m inputs of each stream. The order does not matter.
        """
        if any(self.differences(other) for other in others):
            raise OptionError("only watches with the same validation data and options can be merged.")
        streams = [stream for watch in (self, *others) for stream in watch.streams]
        if len({stream.source or id(stream) for stream in streams}) < len(streams):
            raise OptionError(
                "a stream can be merged only once, but two of these watches are copies of one, perhaps at different times. Pass each "
                "watch once, and begin a watch for each process before its first input."
            )
        return Watch(self.baseline, self.options, tuple(sorted(streams, key=_order)))

    def differences(self, other: Watch) -> list[str]:
        """Return what the other watch does not share, in words: options with both values, the posterior, or the validation data."""
        differences = []
        for name, value in asdict(self.options).items():
            other_value = getattr(other.options, name)
            if value != other_value:
                differences.append(f"{name} ({value}, not {other_value})")
        scores = self.baseline.scores
        other_scores = other.baseline.scores
        if self.baseline.fingerprint != other.baseline.fingerprint:
            differences.append("the posterior")
        elif not (  # arrays have no single truth value, so the counts of scores are compared on their own
            self.baseline == replace(other.baseline, scores=scores)
            and np.array_equal(scores.bins, other_scores.bins)
            and np.array_equal(scores.counts, other_scores.counts)
        ):
            differences.append("the validation data")
        return differences

    def save(self, directory: str | Path, *, overwrite: bool = False) -> Path:
        """Write the watch to a folder, and return the folder. A watch saved there before is readable until the new one is complete.

        A folder with other files but no watch is refused unless `overwrite` is True; see `MoLA.save`.
        """
        return write_folder(directory, *self.pack(), overwrite=overwrite)

    @classmethod
    def load(cls, directory: str | Path) -> Watch:
        """Read a watch from a folder written by `save`; raise `StorageError` if it is damaged."""
        return cls.unpack(*read_folder(directory, KIND, SCHEMA))

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the watch as a JSON-serialisable document and tensors."""
        tensors = {}

        def without_arrays(value: Any, name: str) -> Any:
            if isinstance(value, np.ndarray):
                tensors[name] = torch.from_numpy(value)
                return None
            if isinstance(value, Mapping):
                return {key: without_arrays(member, f"{name}.{key}") for key, member in value.items()}
            return value

        streams = {f"{index}": asdict(stream) for index, stream in enumerate(self.streams)}
        parts = {"options": asdict(self.options), "baseline": asdict(self.baseline), "streams": streams}
        return {"kind": KIND} | {name: without_arrays(part, name) for name, part in parts.items()}, tensors

    @classmethod
    def unpack(cls, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Watch:
        """Rebuild a watch from the document and tensors returned by `pack`."""

        def with_arrays(value: Any, name: str) -> Any:
            if name in tensors:
                return tensors[name].numpy()
            if isinstance(value, Mapping):
                return {key: with_arrays(member, f"{name}.{key}") for key, member in value.items()}
            return tuple(value) if isinstance(value, list) else value

        try:
            options, numbers, entries = (
                with_arrays(document[name], name) for name in ("options", "baseline", "streams")
            )
            confidence = numbers["confidence"] and ConfidenceThreshold(**numbers["confidence"])
            baseline = Baseline(**numbers | {"scores": ScoreCounts(**numbers["scores"]), "confidence": confidence})
            kinds = {"scores": ScoreCounts, "evidence": Evidence, "fall": Evidence}
            streams = tuple(
                Stream(**entry | {name: kind(**entry[name]) for name, kind in kinds.items()})
                for entry in entries.values()
            )
            return cls(baseline, WatchOptions(**options), streams)
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
        "labelled": int,
        "choices": Optional(int),
        "ignore_index": float,
        "fingerprint": Optional(str),
        "confidence": Optional(
            {
                "thresholds": [Optional(float)],
                "fractions": [float],
                **dict.fromkeys(("wrong_above", "right_below", "variance", "accuracy"), float),
                "count": int,
            }
        ),
    },
    "streams": {
        str: {"name": str, "source": str, "correct": float, "labelled": int, "evidence": EVIDENCE, "fall": EVIDENCE}
    },
}


def _indices_of(ids: Array, stream: Stream) -> Array:
    # Return the places in the window of the inputs with the given ids.
    known = stream.window.get("id", np.zeros(0, dtype=np.int64))
    order = np.argsort(known, kind="stable")
    places = np.searchsorted(known[order], ids)
    found = np.zeros(len(ids), dtype=bool)
    inside = places < len(known)
    found[inside] = known[order][places[inside]] == ids[inside]
    if not found.all():
        raise OptionError(
            f"must be those of inputs in the window, but {int((~found).sum())} of {len(ids)} are unknown, the first at index "
            f"{int((~found).argmax())}. The inputs were not counted, had no ids, or were longer ago than the last "
            f"{len(stream.window['score']):,}.",
            argument="ids",
        )
    return order[places]


def _order(stream: Stream) -> tuple[Any, ...]:
    # An order of streams that depends only on their content.
    return stream.name, stream.count, stream.evidence.log_peak, stream.evidence.log_value, stream.correct


def watch(
    posterior: Predictor | Any,
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
        posterior: any predictor: a posterior, an ensemble, a mixture, or an exported file from `mola.export.load`. A file has the
            fingerprint of its posterior, so either may be watched by a watch that was begun with the other.
        val_loader: iterable of batches, of inputs alone or of (inputs, labels).
        alpha: largest probability of a false alarm over the whole life of the stream, for each of the two alarms.
        tolerance: fall in accuracy, from 0 to 1, that the alarm of `watch.labelled` tolerates.
        recent: number of inputs for which `watch.accuracy` is estimated.
        window: number of recent inputs that are kept, and whose labels may still arrive.
        seed: seed of the draws that break ties between scores.
        name: name of the stream, for the streams of several processes.

    Returns:
        A `Watch`. Call `watch.update(prediction)` for each batch, and read `alarm`, `accuracy` and `labelled` at any time. Inputs must
        come in order of arrival or in random order, not sorted by class.
    """
    if not hasattr(posterior, "predict_batch"):
        raise OptionError(
            f"must be a posterior, an ensemble or a mixture; got a {type(posterior).__name__}. For networks, pass mola.ensemble(networks); "
            f"for mola.MolaClassifier, pass its posterior_.",
            argument="posterior",
        )
    options = WatchOptions(alpha, tolerance, recent, window, seed)
    if isinstance(posterior, Predictor):
        posterior.check_unchanged()
    return Watch.of(Baseline.read(posterior, val_loader), options, name)
