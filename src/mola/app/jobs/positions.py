"""Outputs at many positions as rows to compare: some positions of each input, the same for all methods.

Neighbouring positions are alike, so a few hundred of each input say about as much as all of them, and memory stays that of so many
rows for each input, however large images are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mola.network import Layout, drawn_positions
from mola.prediction import Prediction, RegressionPrediction

COMPARED = 256
"""Positions of each input that methods are compared on, drawn at random; all, where there are not more."""


def layout_of(said: Prediction | RegressionPrediction, outputs: Tensor) -> Layout:
    """Where positions stand in a prediction.

    Args:
        said: a prediction at many positions.
        outputs: one of its fields that has an axis of outputs, such as probabilities (n, C, H, W).

    Returns:
        The layout.
    """
    return Layout.of(outputs, said.axis)


@dataclass(frozen=True)
class DrawnRows:
    """Which positions of a batch are compared."""

    layout: Layout
    rows: Tensor
    """(m,), of all positions of the batch, input by input."""

    @property
    def inputs(self) -> Tensor:
        """(m,): which input each is of."""
        return self.rows // self.layout.count

    def of_map(self, values: Tensor) -> Tensor:
        """Of one number at each position, (n, H, W) or (n, T): (m,)."""
        return values.flatten()[self.rows.to(values.device)]

    def of_outputs(self, values: Tensor) -> Tensor:
        """Of C numbers at each position, in the layout of the outputs: (m, C); of K networks (K, m, C)."""
        if values.dim() > len(self.layout.sizes) + 2:
            return torch.stack([self.of_outputs(one) for one in values])
        return self.layout.by_position(values).flatten(0, 1)[self.rows.to(values.device)]


def draw_rows(layout: Layout, labels: Tensor | None, ignore_index: int, start: int) -> DrawnRows:
    """Draw positions of each input, of those that count.

    Args:
        layout: of the batch.
        labels: (n * positions,), or (n * positions, C) where each output has its own; None where there are none: all count.
        ignore_index: the label of positions that do not count. NaN is one, too.
        start: how many inputs came before this batch: which positions are drawn depends on the place of an input alone.

    Returns:
        The rows; there may be none.
    """
    found = []
    for index in range(layout.inputs):
        places = torch.arange(layout.count)
        if labels is not None:
            own = labels[index * layout.count : (index + 1) * layout.count].reshape(layout.count, -1)
            known = (own != ignore_index) & ~own.isnan() if own.is_floating_point() else own != ignore_index
            places = places[known.any(1).cpu()]
        chosen = drawn_positions(len(places), COMPARED, start + index)
        found.append(index * layout.count + places[chosen])
    return DrawnRows(layout, torch.cat(found) if found else torch.zeros(0, dtype=torch.int64))
