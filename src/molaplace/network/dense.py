"""Convert dense outputs, such as one output for each pixel of an image or each token of a text, to rows and back.

A 1x1 convolution applies the same linear map to every pixel, as a linear layer on a sequence does to every token. Each position
therefore counts as a datum, and all other packages work only with rows of features, outputs and labels. Outputs of shape (n, C) have
only one position. Dense outputs have one of two layouts:

* channels first: outputs (n, C, H, W) of a convolution, with labels (n, H, W);
* channels last: outputs (n, T, C) of a linear layer, with labels (n, T).

If each output has its own label, the labels have the same shape as the outputs. Rows are ordered by input and then by position; the
last axis varies fastest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import DataError, OptionError
from molaplace.options import is_real

IGNORE_INDEX = -100
"""Label that marks positions to ignore; PyTorch's losses use the same default."""

Positions = str | int
"""Positions that a fit uses from each input: "all", "average" (all, with each input counted once), or the number to draw at random."""


def check_positions(positions: Positions) -> Positions:
    """Return `positions` if it is "all", "average" or an integer of at least 1; otherwise, raise `OptionError`."""
    if positions in ("all", "average") or (is_real(positions) and isinstance(positions, int) and positions >= 1):
        return positions
    raise OptionError(
        f"must be 'all', 'average' or the number of positions to draw from each input (at least 1), got {positions!r}.",
        argument="positions",
    )


@dataclass(frozen=True)
class Layout:
    """Order and sizes of the output axes.

    `inputs` is the number n of inputs, `sizes` is (H, W), (T,) or (), and `axis` is the class axis, 1 or -1.
    """

    inputs: int
    sizes: tuple[int, ...]
    axis: int

    @staticmethod
    def of(outputs: Tensor, axis: int) -> Layout:
        """Return the layout of outputs (n, C), or of dense outputs whose class axis is 1 or -1."""
        return Layout(outputs.shape[0], tuple(outputs.shape[2:] if axis == 1 else outputs.shape[1:-1]), axis)

    @property
    def count(self) -> int:
        """Number of positions in each input; 1 for outputs of shape (n, C)."""
        return math.prod(self.sizes)

    @property
    def num_rows(self) -> int:
        """Number of rows: one for each position of each input."""
        return self.inputs * self.count

    def shape(self, width: int) -> tuple[int, ...]:
        """Return the shape of outputs with `width` classes."""
        return (self.inputs, width, *self.sizes) if self.axis == 1 else (self.inputs, *self.sizes, width)

    def by_position(self, values: Tensor) -> Tensor:
        """Reshape dense outputs or features to (n, positions, width), as a view if possible; return others unchanged."""
        if not self.sizes:
            return values
        return values.movedim(self.axis, -1).reshape(values.shape[0], self.count, values.shape[self.axis])

    def restore(self, rows: Tensor) -> Tensor:
        """Reshape values (m,), rows (m, width) or rows of K networks (m, K, width) to the layout of the outputs, the inputs first."""
        values = rows.reshape(-1, *self.sizes, *rows.shape[1:])
        if rows.dim() == 3:
            values = values.movedim(-2, 1)
        return values.movedim(-1, -1 - len(self.sizes)) if self.axis == 1 and rows.dim() > 1 else values

    def labels(self, labels: Tensor, outputs: int, batch_name: str) -> Tensor:
        """Reshape labels of dense outputs to (m,), or to (m, width) if each output has its own label.

        `outputs` (the number of outputs at each position) and `batch_name` are used only in error messages.
        """
        label_shape = (self.inputs, *self.sizes)
        if labels.shape == label_shape:
            return labels.flatten()
        # The likelihood checks the width, because a heteroscedastic Gaussian has fewer targets than outputs.
        if labels.dim() == len(label_shape) + 1 and labels.shape == self.shape(labels.shape[self.axis]):
            return self.by_position(labels).flatten(0, 1)
        remedy = ""
        if labels.shape[:1] == label_shape[:1] and labels.dim() == len(label_shape):
            remedy = " Use nearest-neighbour interpolation to resize the labels to the size of the outputs."
        raise DataError(
            f"expected labels of shape {label_shape} (one for each position) or {self.shape(outputs)} (one for each output); got "
            f"labels of shape {tuple(labels.shape)}.{remedy}",
            place=batch_name,
        )


def drawn_positions(count: int, most: int, index: int) -> Tensor:
    """Draw up to `most` of `count` positions without replacement, and return them in ascending order.

    The seed is `index`, the index of the input in the data, so the draw does not depend on the batch size.
    """
    if count <= most:
        return torch.arange(count, device="cpu")
    # NumPy uses all bits of a seed. PyTorch uses the last 32, which are the same on every rank (`Team.unique`).
    positions = np.random.default_rng(index).choice(count, most, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(positions))
