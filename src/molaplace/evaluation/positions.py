"""Dense predictions as rows: one row for each position that is not ignored, with the input to which it belongs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from molaplace.network import Layout, drawn_positions
from molaplace.prediction import Field, Prediction, RegressionPrediction


class DenseRows(NamedTuple):
    """The inputs to which the rows of a flattened dense prediction belong."""

    inputs: Tensor
    """Index of each row's input in the batch, shape (n,)."""
    num_inputs: int
    """Number of inputs in the batch."""


def flatten_positions(
    prediction: Any,
    labels: Tensor | None,
    where: str,
    *,
    ignore_index: int,
    positions: str | int,
    first: int,
) -> tuple[Any, Tensor | None, DenseRows | None]:
    """Flatten dense predictions and labels to m rows, one per position that is not ignored, and return each row's input.

    Predictions that are not dense are returned unchanged, with None in place of the rows' inputs.

    Args:
        prediction: predictions for a batch.
        labels: labels of the batch. Positions without a label (NaN or `ignore_index`) are ignored.
        where: name of the batch, used in error messages.
        ignore_index: label that marks positions to ignore.
        positions: number of positions to draw from each input, or "all" for every position.
        first: number of inputs before this batch. Each input's index in the data is the seed for drawing its positions.
    """
    regression = isinstance(prediction, RegressionPrediction)
    outputs = prediction.component_mean[:, 0] if regression else prediction.probs
    if outputs.dim() == 2:
        return prediction, labels, None
    layout = Layout.of(outputs, prediction.axis)
    known = torch.ones(layout.inputs * layout.count, dtype=torch.bool, device="cpu")
    if labels is not None:
        labels = layout.labels(labels.cpu(), outputs.shape[prediction.axis], where)
        known = (labels != ignore_index) & ~labels.isnan()
        if labels.dim() == 2:  # some of a position's labels may be missing
            labels = torch.where(known, labels.double(), torch.nan)
            known = known.any(1)
    by_input = [mask.nonzero().flatten() for mask in known.view(layout.inputs, layout.count)]
    if isinstance(positions, int):
        by_input = [
            indices[drawn_positions(len(indices), positions, first + index)] for index, indices in enumerate(by_input)
        ]
    rows = torch.cat([indices + index * layout.count for index, indices in enumerate(by_input)])

    def flat(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        num_extra_axes = values.dim() - len(layout.sizes) - 1
        if num_extra_axes == 2:  # the field has an axis for the K networks
            parts = [layout.by_position(part).flatten(0, 1)[rows.to(part.device)] for part in values.unbind(1)]
            return torch.stack(parts, 1)
        return (layout.by_position(values).flatten(0, 1) if num_extra_axes else values.flatten())[
            rows.to(values.device)
        ]

    names = ["component_mean", "component_variance", "component_noise"] if regression else ["probs", "logit_mean"]
    fields: dict[str, Field] = {name: flat(getattr(prediction, name)) for name in (*names, "ood_score")}
    shared = {name: getattr(prediction, name) for name in ("ood_score_name", "likelihood")}
    if regression:
        shared["weights"] = prediction.weights
    flattened = (RegressionPrediction if regression else Prediction)(fields, **shared)
    return flattened, None if labels is None else labels[rows], DenseRows(rows // layout.count, layout.inputs)
