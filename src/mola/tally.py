"""Tables of predictions, collected over batches and processes, with a row for each input, label or position.

Memory grows with the number of rows, but not with the number of features or classes. The rows of one input are not independent, so
each row of multi-label data and of dense outputs has the index of its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mola.distributed import Team
from mola.errors import DataError
from mola.measurement import Measurement, calibration_error, mean_of
from mola.network import Layout, drawn_positions
from mola.prediction import Field, RegressionPrediction

INPUT = "input"
"""Name of the column that holds the index of each row's input, used if an input can have several rows."""


@dataclass
class Tally:
    """A table of numbers that grows batch by batch."""

    columns: tuple[str, ...] = ()
    parts: list[Tensor] = field(default_factory=list)
    """Rows (n, columns) of each batch, in float64."""
    inputs: int = 0
    """Number of inputs, counted only if each row has the index of its input."""

    @classmethod
    def of(cls, batches: Iterable[Mapping[str, Tensor]]) -> Tally:
        """Return a table with the rows of all batches."""
        tally = cls()
        for columns in batches:
            tally.add(columns)
        return tally

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """Add the columns (n,) of a batch, whose column `INPUT` starts at 0."""
        row = dict(columns)
        if (own := row.get(INPUT)) is not None and len(own):
            row[INPUT] = own + self.inputs
            self.inputs += int(own.max()) + 1
        self.columns = tuple(row)
        self.parts.append(torch.stack([column.detach().double().cpu() for column in row.values()], dim=1))

    def gather(self, team: Team) -> Tally:
        """Return the rows of all processes, in every process."""
        if team.size == 1:
            return self
        # A process without data has no columns, so it takes the column names from another process.
        columns = next((one for one in team.collect(list(self.columns)) if one), None)
        if columns is None:
            raise DataError("the data are empty in every process. Pass at least one batch.")
        own = torch.cat(self.parts) if self.parts else None
        if own is not None and INPUT in columns:  # make the indices unique over processes
            place = columns.index(INPUT)
            own[:, place] = own[:, place] * team.size + team.rank
        return Tally(tuple(columns), [team.gather(own)], sum(team.collect(self.inputs)))

    @property
    def groups(self) -> Tensor | None:
        """Index (n,) of each row's input, or None if each row is an input."""
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
        """Return the classification metrics for labelled data, from the scores of a `Predictive`."""
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
    """Return dense predictions and labels with one row for each position that is not ignored, and the index (m,) of each row's input.

    Predictions that are not dense are returned unchanged, with None for the inputs.

    Args:
        prediction: predictions for a batch.
        labels: labels of the batch. Positions without a label (NaN or `ignore_index`) are ignored.
        where: name of the batch in error messages.
        ignore_index: label of ignored positions.
        positions: number of positions to draw from each input; "all" uses every position.
        first: number of inputs before this batch; the draw depends only on the index of an input.
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
        if labels.dim() == 2:  # some labels of a position may be missing
            labels, known = torch.where(known, labels.double(), torch.nan), known.any(1)
    kept = [own.nonzero().flatten() for own in known.view(layout.inputs, layout.count)]
    if isinstance(positions, int):
        kept = [own[drawn_positions(len(own), positions, first + index)] for index, own in enumerate(kept)]
    rows = torch.cat([own + index * layout.count for index, own in enumerate(kept)])

    def flat(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        further = values.dim() - len(layout.sizes) - 1
        if further == 2:  # a field with an axis of K networks
            return torch.stack([layout.by_position(one).flatten(0, 1)[rows.to(one.device)] for one in values])
        return (layout.by_position(values).flatten(0, 1) if further else values.flatten())[rows.to(values.device)]

    names = ["component_mean", "component_variance", "component_noise"] if regression else ["probs", "logit_mean"]
    fields: dict[str, Field] = {name: flat(getattr(prediction, name)) for name in (*names, "ood_score")}
    shared = {name: getattr(prediction, name) for name in ("ood_score_name", "likelihood")}
    if regression:
        shared["weights"] = prediction.weights
    return type(prediction)(fields, **shared), None if labels is None else labels[rows], rows // layout.count
