"""Tables of scores, collected from all batches and processes, with one row for each input, label or position.

Memory use grows with the number of rows, but not with the number of features or classes. Rows that belong to the same input are not
independent, so for multi-label data and dense outputs, each row holds the index of its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from molaplace.distributed import Team
from molaplace.errors import DataError
from molaplace.evaluation.measurement import Measurement, calibration_error, mean_of
from molaplace.network import Layout, drawn_positions
from molaplace.prediction import Field, RegressionPrediction

INPUT = "input"
"""Name of the column that holds the index of each row's input; used only if an input can have several rows."""


@dataclass
class Tally:
    """A table of numbers that grows batch by batch."""

    columns: tuple[str, ...] = ()
    parts: list[Tensor] = field(default_factory=list)
    """Rows of each batch: a float64 tensor of shape (n, columns)."""
    inputs: int = 0
    """Number of inputs, counted only if the table has the column `INPUT`."""

    @classmethod
    def of(cls, batches: Iterable[Mapping[str, Tensor]]) -> Tally:
        """Return a table that contains the rows of all batches."""
        tally = cls()
        for columns in batches:
            tally.add(columns)
        return tally

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """Append the columns of a batch, each of shape (n,). Input indices in the column `INPUT` start at 0 in each batch."""
        row = dict(columns)
        if (own := row.get(INPUT)) is not None and len(own):
            row[INPUT] = own + self.inputs
            self.inputs += int(own.max()) + 1
        self.columns = tuple(row)
        self.parts.append(torch.stack([column.detach().double().cpu() for column in row.values()], dim=1))

    def gather(self, team: Team) -> Tally:
        """Return, in every process, a table that contains the rows of all processes."""
        if team.size == 1:
            return self
        # A process without data has no columns, so it takes the column names from another process.
        columns = next((one for one in team.collect(list(self.columns)) if one), None)
        if columns is None:
            raise DataError("no process has any data. Pass at least one batch.")
        own = torch.cat(self.parts) if self.parts else None
        if own is not None and INPUT in columns:  # make the indices unique across processes
            place = columns.index(INPUT)
            own[:, place] = own[:, place] * team.size + team.rank
        return Tally(tuple(columns), [team.gather(own)], sum(team.collect(self.inputs)))

    @property
    def groups(self) -> Tensor | None:
        """Index of each row's input, of shape (n,), or None if each row is a separate input."""
        return self[INPUT].long() if INPUT in self.columns else None

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(len(part) for part in self.parts)

    def __getitem__(self, column: str) -> Tensor:
        index = self.columns.index(column)
        return torch.cat([part[:, index] for part in self.parts])

    def mean(self, column: str) -> Measurement:
        """Return the mean of a column as a measurement."""
        return mean_of(self[column], self.groups)

    def classified(self) -> dict[str, Measurement]:
        """Return the classification metrics for labelled data, computed from the scores of a `Predictive`."""
        return {
            "accuracy": self.mean("correct"),
            "nll": self.mean("nll"),
            "brier": self.mean("brier"),
            "ece": calibration_error(self["confidence"], self["correct"], groups=self.groups),
            "confidence": self.mean("confidence"),
        }


def rows_of(
    prediction: Any,
    labels: Tensor | None,
    where: str,
    *,
    ignore_index: int,
    positions: str | int = "all",
    first: int = 0,
) -> tuple[Any, Tensor | None, Tensor | None]:
    """Flatten dense predictions and labels to m rows, one per position that is not ignored, and return each row's input index (m,).

    Predictions that are not dense are returned unchanged, with None in place of the indices.

    Args:
        prediction: predictions for a batch.
        labels: labels of the batch. Positions without a label (NaN or `ignore_index`) are ignored.
        where: name of the batch, used in error messages.
        ignore_index: label that marks positions to ignore.
        positions: number of positions to draw from each input, or "all" for every position.
        first: number of inputs before this batch. Each input's index in the data is the seed for drawing its positions.
    """
    regression = isinstance(prediction, RegressionPrediction)
    outputs = prediction.component_mean[0] if regression else prediction.probs
    if outputs.dim() == 2:
        return prediction, labels, None
    layout = Layout.of(outputs, prediction.axis)
    known = torch.ones(layout.inputs * layout.count, dtype=torch.bool)
    if labels is not None:
        labels = layout.labels(labels.cpu(), outputs.shape[prediction.axis], where)
        known = (labels != ignore_index) & ~labels.isnan()
        if labels.dim() == 2:  # some of a position's labels may be missing
            labels, known = torch.where(known, labels.double(), torch.nan), known.any(1)
    kept = [own.nonzero().flatten() for own in known.view(layout.inputs, layout.count)]
    if isinstance(positions, int):
        kept = [own[drawn_positions(len(own), positions, first + index)] for index, own in enumerate(kept)]
    rows = torch.cat([own + index * layout.count for index, own in enumerate(kept)])

    def flat(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        further = values.dim() - len(layout.sizes) - 1
        if further == 2:  # the field has an axis for the K networks
            return torch.stack([layout.by_position(one).flatten(0, 1)[rows.to(one.device)] for one in values])
        return (layout.by_position(values).flatten(0, 1) if further else values.flatten())[rows.to(values.device)]

    names = ["component_mean", "component_variance", "component_noise"] if regression else ["probs", "logit_mean"]
    fields: dict[str, Field] = {name: flat(getattr(prediction, name)) for name in (*names, "ood_score")}
    shared = {name: getattr(prediction, name) for name in ("ood_score_name", "likelihood")}
    if regression:
        shared["weights"] = prediction.weights
    return type(prediction)(fields, **shared), None if labels is None else labels[rows], rows // layout.count
