"""`mola predict`: from a posterior's folder and data to a row for each input."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mola.app.jobs.folder import PosteriorFolder
from mola.app.jobs.material import Progress
from mola.app.jobs.portions import COLUMNS, Portion, in_order, portions
from mola.app.jobs.rows import Account
from mola.app.jobs.scores import alarm
from mola.app.jobs.shards import in_turns
from mola.app.jobs.writers import open_writer
from mola.distributed import Team
from mola.errors import DataError, OptionError

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
        threshold: outlier score above which inputs are called outlying; None without validation data.
        outlying: share of the inputs that are; None without a threshold.
        labels: how many inputs were given each class.
        seconds: that predicting and writing took.
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
    team: Team | None = None,
) -> PredictResult | None:
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
        team: the processes that do it together, each on its own batches, with rank 0 writing. None is this one alone.

    Returns:
        What was done, on rank 0, and None on the others.

    Raises:
        OptionError: if the output would take the place of the data.
        DataError: if no input can be used.
    """
    began = time.perf_counter()
    if output.exists() and Path(data).expanduser().exists() and output.samefile(Path(data).expanduser()):
        message = f"{output} holds the data, and would be overwritten with predictions: choose another --output."
        raise OptionError(message)
    together = Team.alone() if team is None else team
    source = fitted.open_set(data, labelled=False, directory=directory, said=True)
    names = _class_names(fitted)
    threshold = alarm(fitted, false_alarm_rate)
    account = Account()
    sums, outlying, chosen = np.zeros(3), 0, np.zeros(len(names), dtype=np.int64)
    columns = len(names) if probabilities else 0
    progress("predicting", 0.0)
    with together.work("predicting"), ExitStack() as stack:
        own = portions(
            fitted.posterior,
            in_turns(source, together),
            strict=strict,
            outputs=columns,
            seed=seed,
            tell=lambda share: progress("predicting", share),
        )
        writer = stack.enter_context(open_writer(output, names, columns)) if together.first else None
        for portion in in_order(own, together):
            assert writer is not None  # only rank 0 is given any
            account.add(source.name, portion.rows())
            for record in records(portion, names, threshold):
                writer.add(record)
            sums += portion.numbers[:, 1:4].sum(0)
            outlying += 0 if threshold is None else int((portion.numbers[:, 4] > threshold).sum())
            chosen += np.bincount(portion.numbers[:, 0].astype(np.int64), minlength=len(names))
        count = int(chosen.sum())
        if together.first and count == 0:
            first = next(iter(account.left_out.get(source.name, {}).items()), None)
            why = "" if first is None else f" The first: {first[0]}: {first[1]}."
            message = f"{data} holds no input that can be used.{why}"
            raise DataError(message)
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
    )


def _class_names(fitted: PosteriorFolder) -> tuple[str, ...]:
    return fitted.classes or tuple(str(index) for index in range(fitted.outputs))


def records(portion: Portion, names: tuple[str, ...], threshold: float | None) -> Iterator[dict[str, Any]]:
    """A record for each input of a portion, used or not, in their order.

    Args:
        portion: what is known of a batch.
        names: of the classes.
        threshold: outlier score above which an input is outlying, if that is known.

    Yields:
        The records: texts and numbers by name, None where there is nothing.
    """
    numbers = iter(portion.numbers.tolist())
    for name, error in zip(portion.names, portion.errors, strict=True):
        label, confidence, entropy, epistemic, score, *probs = [None] * len(COLUMNS) if error else next(numbers)
        yield {
            "name": name,
            "label": None if label is None else int(label),
            "class": None if label is None else names[int(label)],
            "confidence": confidence,
            "entropy": entropy,
            "epistemic": epistemic,
            "ood_score": score,
            "outlying": None if threshold is None or score is None else score > threshold,
            "error": error,
            "probabilities": probs or None,
        }
