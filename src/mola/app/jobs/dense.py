"""Dense outputs as rows to compare: some positions of each input, the same for all methods.

Neighbouring positions are correlated, so a few hundred of each input give about the same numbers as all of them, in bounded memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mola.network import Layout, drawn_positions
from mola.prediction import Field, Prediction, RegressionPrediction

COMPARED = 256
"""Largest number of positions of each input on which methods are compared, drawn at random."""

COMPARED_FIELDS = {
    Prediction: ("probs", "logit_mean", "ood_score"),
    RegressionPrediction: ("component_mean", "component_variance", "component_noise", "ood_score", "distance"),
}


@dataclass(frozen=True)
class DrawnRows:
    """Positions of a batch that are compared."""

    layout: Layout
    rows: Tensor
    """(m,), indices of positions, input by input."""

    @property
    def inputs(self) -> Tensor:
        """Input (m,) of each position."""
        return self.rows // self.layout.count

    def of(self, values: Tensor) -> Tensor:
        """Return a map (n, H, W) or (n, T) as (m,); in the layout of the outputs as (m, C), and of K networks as (K, m, C)."""
        further = values.dim() - len(self.layout.sizes) - 1
        if further == 2:
            return torch.stack([self.of(one) for one in values])
        rows = self.layout.by_position(values).flatten(0, 1) if further else values.flatten()
        return rows[self.rows.to(values.device)]

    def of_prediction(self, prediction: Any) -> Any:
        """Return a prediction of these positions, as rows."""
        values = {name: getattr(prediction, name) for name in COMPARED_FIELDS[type(prediction)]}
        fields: dict[str, Field] = {name: None if one is None else self.of(one) for name, one in values.items()}
        shared = {name: getattr(prediction, name) for name in ("ood_score_name", "likelihood")}
        if isinstance(prediction, RegressionPrediction):
            shared["weights"] = prediction.weights
        return type(prediction)(fields, **shared)


def draw_rows(prediction: Any, labels: Tensor | None, ignore_index: int, start: int) -> DrawnRows:
    """Draw positions of each input whose label counts; a batch may have none.

    NaN and `ignore_index` do not count. `start` is the number of inputs before this batch: the draw depends on the index of an
    input alone.
    """
    outputs = prediction.probs if isinstance(prediction, Prediction) else prediction.component_mean[0]
    layout = Layout.of(outputs, prediction.axis)
    given = None if labels is None else layout.labels(labels, outputs.shape[prediction.axis], "the labels")
    found = [torch.zeros(0, dtype=torch.int64)]
    for index in range(layout.inputs):
        places = torch.arange(layout.count)
        if given is not None:
            own = given[index * layout.count : (index + 1) * layout.count].reshape(layout.count, -1)
            known = (own != ignore_index) & ~own.isnan() if own.is_floating_point() else own != ignore_index
            places = places[known.any(1).cpu()]
        found.append(index * layout.count + places[drawn_positions(len(places), COMPARED, start + index)])
    return DrawnRows(layout, torch.cat(found))
