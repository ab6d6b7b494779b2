"""`mola predict`: from a posterior's folder and data to a row for each input."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mola.errors import DataError, OptionError
from mola.jobs.folder import Fitted
from mola.jobs.material import Progress
from mola.jobs.rows import Account, Rows
from mola.jobs.writers import open_writer
from mola.prediction import Prediction

__all__ = ["PredictResult", "records", "run_predict"]


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
        outlying: share of the inputs whose outlier score is above what 95 % of the validation data stay below; None without these.
        labels: how many inputs were given each class.
        seconds: that predicting and writing took.
    """

    output: Path
    count: int
    account: Account
    confidence: float
    entropy: float
    epistemic: float
    outlying: float | None
    labels: dict[str, int]
    seconds: float

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "output": str(self.output),
            "count": self.count,
            "confidence": self.confidence,
            "entropy": self.entropy,
            "epistemic": self.epistemic,
            "outlying": self.outlying,
            "labels": self.labels,
            "seconds": self.seconds,
            **self.account.plain(),
        }


def run_predict(
    fitted: Fitted,
    data: str,
    output: Path,
    progress: Progress = lambda doing, done: None,
    *,
    probabilities: bool = False,
    strict: bool = False,
    directory: str | None = None,
    seed: int | None = None,
) -> PredictResult:
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

    Returns:
        What was done; `DataError` if no input can be used.

    Raises:
        OptionError: if the output would take the place of the data.
    """
    began = time.perf_counter()
    if output.exists() and Path(data).expanduser().exists() and output.samefile(Path(data).expanduser()):
        message = f"{output} holds the data, and would be overwritten with predictions: choose another --output."
        raise OptionError(message)
    source = fitted.open_set(data, labelled=False, directory=directory)
    names = _class_names(fitted)
    threshold = (fitted.document["result"].get("validation") or {}).get("outlier_threshold")
    account, pending = Account(), deque[Rows]()
    seen, sums, outlying, chosen = 0, np.zeros(3), 0, np.zeros(len(names), dtype=np.int64)

    def feed() -> Iterator[Any]:
        nonlocal seen
        used = False
        for rows in source:
            bad = next(((name, error) for name, error in zip(rows.names, rows.errors, strict=True) if error), None)
            if strict and bad is not None:
                message = f"{bad[0]}: {bad[1]} (and --strict leaves nothing out)."
                raise DataError(message)
            account.add(source.name, rows)
            pending.append(rows)
            seen += len(rows.names)
            progress("predicting", min(1.0, seen / (source.count or 2 * seen)))
            if rows.inputs is not None:
                used = True
                yield rows.inputs if isinstance(rows.inputs, Mapping) else (rows.inputs,)
        if not used:
            first = next(iter(account.left_out.get(source.name, {}).items()), None)
            why = "" if first is None else f" The first: {first[0]}: {first[1]}."
            message = f"{data} holds no input that can be used.{why}"
            raise DataError(message)

    progress("predicting", 0.0)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    with open_writer(output, names, len(names) if probabilities else 0) as writer:
        for prediction in fitted.posterior.predict_batches(feed(), generator=generator):
            while pending:
                rows = pending.popleft()
                for record in records(rows, prediction, names, threshold, probabilities=probabilities):
                    writer.add(record)
                if rows.inputs is not None:
                    break
            sums += [
                float(one.double().sum()) for one in (prediction.confidence, prediction.entropy, prediction.epistemic)
            ]
            outlying += 0 if threshold is None else int((prediction.ood_score > threshold).sum())
            chosen += np.bincount(prediction.label.numpy(), minlength=len(names))
        for rows in pending:
            for record in records(rows, None, names, threshold, probabilities=probabilities):
                writer.add(record)
    count = int(chosen.sum())
    confidence, entropy, epistemic = (sums / count).tolist()
    progress("done", 1.0)
    return PredictResult(
        output=output,
        count=count,
        account=account,
        confidence=confidence,
        entropy=entropy,
        epistemic=epistemic,
        outlying=None if threshold is None else outlying / count,
        labels={name: int(number) for name, number in zip(names, chosen, strict=True)},
        seconds=time.perf_counter() - began,
    )


def _class_names(fitted: Fitted) -> tuple[str, ...]:
    return fitted.classes or tuple(str(index) for index in range(fitted.outputs))


def records(
    rows: Rows, prediction: Prediction | None, names: tuple[str, ...], threshold: float | None, *, probabilities: bool
) -> Iterator[dict[str, Any]]:
    """A record for each input of a batch, used or not, in their order.

    Args:
        rows: the batch.
        prediction: of those that could be used; not looked at if there are none.
        names: of the classes.
        threshold: outlier score above which an input is outlying, if that is known.
        probabilities: whether to add those of all classes.

    Yields:
        The records: texts and numbers by name, None where there is nothing.
    """
    columns: Iterator[tuple[Any, ...]] = iter(())
    if prediction is not None and rows.inputs is not None:
        score = prediction.ood_score.double()
        parts = [prediction.label, prediction.confidence, prediction.entropy, prediction.epistemic, score]
        listed = [part.tolist() for part in parts]
        listed.append([None] * len(score) if threshold is None else (score > threshold).tolist())
        listed.append(prediction.probs.tolist() if probabilities else [None] * len(score))
        columns = zip(*listed, strict=True)
    for name, error in zip(rows.names, rows.errors, strict=True):
        label, confidence, entropy, epistemic, ood_score, outlying, probs = (
            next(columns) if error is None else [None] * 7
        )
        yield {
            "name": name,
            "label": label,
            "class": None if label is None else names[label],
            "confidence": confidence,
            "entropy": entropy,
            "epistemic": epistemic,
            "ood_score": ood_score,
            "outlying": outlying,
            "error": error,
            "probabilities": probs,
        }
