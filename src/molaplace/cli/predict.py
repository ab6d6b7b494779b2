"""`molaplace predict`: predict with the posterior in a folder, and write one row of predictions for each input.

Process r of R handles batches r, r + R, r + 2R and so on. After each round, rank 0 collects the results and writes them in the
order of the data. Each process holds at most one batch, and the processes need no shared file system.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from molaplace.cli.decisions import Decisions
from molaplace.cli.folder import PosteriorFolder
from molaplace.cli.prediction_table import PredictionTable
from molaplace.cli.writers import ARRAYS, OutputBatch, open_writer
from molaplace.data.dataset import InputBatch, SkippedInputs, as_loader_batch, read_batches
from molaplace.distributed import Team
from molaplace.errors import OptionError
from molaplace.options import counted
from molaplace.posterior import MoLA
from molaplace.progress import Progress, no_progress


def summary_sentence(summary: dict[str, Any]) -> str:
    """Return the summary of `run_predict` as a sentence."""
    if "std" in summary:
        words = f"mean standard deviation {summary['std']:.4g}, mean interval width {summary['width']:.4g}"
    else:
        words = f"mean confidence {summary['confidence']:.3f}, mean entropy {summary['entropy']:.3f} (epistemic part "
        words += f"{summary['epistemic']:.3f})"
    for name, text in (("outlying", "outlying"), ("answer", "to answer")):
        words += f", {100 * summary[name]:.1f} % {text}" if name in summary else ""
    words += f", {summary['set_size']:.2f} classes per set on average" if "set_size" in summary else ""
    at = f" at {counted(summary['positions'], 'position')}" if "positions" in summary else ""
    return f"Predicted {counted(summary['count'], 'input')}{at} in {summary['seconds']:.1f} s: {words}."


def run_predict(
    fitted: PosteriorFolder,
    inputs: str,
    output: Path,
    decisions: Decisions,
    *,
    probabilities: bool = False,
    strict: bool = False,
    progress: Progress = no_progress,
    team: Team | None = None,
) -> dict[str, Any] | None:
    """Make predictions for a set, batch by batch, and write each batch as soon as it is ready.

    Unusable inputs also get a row, which states the reason. Rank 0 of a team writes the file and returns a summary as plain
    values: counts, the means of the quantities that `PredictionTable.sums` adds up, thresholds, and the inputs that were left out.
    All other ranks return None.
    """
    began = time.perf_counter()
    _check_likelihood(fitted, output, probabilities=probabilities)
    posterior = fitted.posterior
    team = team or Team.single()
    several = posterior.likelihood.classification and not posterior.likelihood.mutually_exclusive
    everything = probabilities or (several and not posterior.is_dense)
    columns = PredictionTable(fitted.output_names, decisions, everything)
    source = fitted.open_dataset(inputs, labelled=False, by_user=True)
    skipped = SkippedInputs()
    sums: Counter[str] = Counter()
    progress("predicting", 0.0)
    with ExitStack() as stack:
        writer = stack.enter_context(open_writer(output, columns.names)) if team.first else None
        batches = read_batches(source, team, lambda share: progress("predicting", share))
        predicted = _predicted_batches(posterior, batches, columns, arrays=output.suffix == ARRAYS)
        for batch in _in_order(predicted, team):
            assert writer is not None  # `_in_order` yields batches only on rank 0
            if strict:
                batch.rows.check_strict()
            skipped.add(source.name, batch.rows)
            sums.update(batch.sums or {})
            writer.add(batch)
        if team.first:
            skipped.require_some(sums["count"], source.name)
    progress("done", 1.0)
    if not team.first:
        return None
    count = sums.pop("count")
    positions = sums.pop("positions")
    summary = {
        "output": str(output),
        "count": count,
        **{name: value / positions for name, value in sums.items()},
        "threshold": decisions.alarm,
        "decisions": decisions.plain(),
        "seconds": time.perf_counter() - began,
        "left_out": skipped.left_out,
    }
    if posterior.is_dense:
        summary["positions"] = positions
    return summary


def _check_likelihood(fitted: PosteriorFolder, output: Path, *, probabilities: bool) -> None:
    posterior = fitted.posterior
    likelihood = fitted.posterior.likelihood
    if probabilities and not likelihood.classification:
        raise OptionError(
            f"--probabilities applies only to classification, but {fitted.folder} contains a regression posterior. Omit "
            f"--probabilities. Rows contain the mean, the standard deviation and an interval."
        )
    if probabilities and posterior.is_dense and output.suffix != ARRAYS:
        raise OptionError(f"for dense outputs, --probabilities can be written only to {ARRAYS} files; got {output}.")


def _predicted_batches(
    posterior: MoLA, batches: Iterator[InputBatch], columns: PredictionTable, *, arrays: bool
) -> Iterator[OutputBatch]:
    for rows in batches:
        without_tensors = rows._replace(inputs=None, labels=None)
        if rows.inputs is None:
            yield OutputBatch(without_tensors)
            continue
        for prediction in posterior.predict_batches([as_loader_batch(rows._replace(labels=None))]):
            fields = columns.fields(prediction)
            content = columns.arrays(fields) if arrays else columns.table(fields, prediction.axis)
            yield OutputBatch(without_tensors, content, columns.sums(fields))


def _in_order(batches: Iterator[OutputBatch], team: Team) -> Iterator[OutputBatch]:
    # On rank 0, yield the batches of all processes in the order of the data; on other ranks, yield nothing.
    more = True
    while more:
        collected = team.collect(next(batches, None))
        # Batches are assigned to the processes in turn. A round in which a process has no batch is the last.
        more = None not in collected
        yield from (batch for batch in collected if team.first and batch is not None)
