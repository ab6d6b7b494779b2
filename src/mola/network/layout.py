"""Outputs at many positions, as pixels of an image or tokens of a text: how they become rows, and rows such outputs again.

A 1x1 convolution is a linear layer on every pixel, and a linear layer on a sequence is one on every token. So the rest of the
library sees rows of features, outputs and labels, one for each position, and needs not know where they stand:

* channels first: outputs (n, C, H, W) of a convolution, with labels (n, H, W);
* channels last: outputs (n, T, C) of a linear layer, with labels (n, T).

Labels that belong to each output by itself have the shape of the outputs. Rows are ordered by input, and within an input as
positions lie in memory: the last axis fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mola.errors import DataError, OptionError
from mola.options import is_real, whole_number

IGNORED = -100
"""The label of positions that do not count: that of PyTorch's losses."""


@dataclass(frozen=True)
class Positions:
    """That a head gives outputs at many positions of each input, and how they are used in a fit."""

    axes: int
    """How many axes the positions have: 1 for a sequence, 2 for an image."""
    used: str | int = "all"
    """In the sums: "all", "average" (each input counts as one datum), or so many of each input."""
    ignore_index: int = IGNORED
    """The label of positions that are left out."""

    def as_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"axes": self.axes, "used": self.used, "ignore_index": self.ignore_index}


def check_positions(positions: str | int) -> str | int:
    """Which positions of each input a fit uses.

    Args:
        positions: "all", "average", or a number.

    Returns:
        The same.
    """
    if positions in ("all", "average"):
        return positions
    if not is_real(positions):
        raise OptionError(
            f"positions must be 'all', 'average' or a number of positions to draw from each input, got {positions!r}."
        )
    return whole_number(positions, "positions")


class Portion(NamedTuple):
    """Some positions of some inputs: all of several inputs, or a stretch of one."""

    inputs: slice
    positions: slice


@dataclass(frozen=True)
class Layout:
    """Where outputs, and what belongs to them, stand."""

    inputs: int
    """n"""
    sizes: tuple[int, ...]
    """Of the axes of positions: (H, W) or (T,)."""
    axis: int
    """Of the classes in the outputs: 1, or -1."""

    @staticmethod
    def of(outputs: Tensor, axis: int) -> Layout:
        """The layout of outputs whose classes stand at an axis: 1 or -1."""
        sizes = outputs.shape[2:] if axis == 1 else outputs.shape[1:-1]
        return Layout(outputs.shape[0], tuple(sizes), axis)

    @property
    def count(self) -> int:
        """Number of positions of one input."""
        return math.prod(self.sizes)

    @property
    def rows(self) -> int:
        """Number of positions of all inputs."""
        return self.inputs * self.count

    def by_position(self, values: Tensor) -> Tensor:
        """Outputs or features in this layout as (n, positions, width): a view, wherever their memory allows it."""
        return values.movedim(self.axis, -1).flatten(1, -2)

    def shape(self, width: int) -> tuple[int, ...]:
        """Of outputs of so many classes."""
        return (
            (self.inputs, width, *self.sizes)
            if self.axis == 1
            else (
                self.inputs,
                *self.sizes,
                width,
            )
        )

    def outputs(self, rows: Tensor) -> Tensor:
        """Rows (n positions, C) in the layout of the outputs."""
        values = rows.reshape(-1, *self.sizes, rows.shape[-1])
        return values.movedim(-1, 1) if self.axis == 1 else values

    def map(self, rows: Tensor) -> Tensor:
        """One number for each row (n positions,) as (n, H, W) or (n, T)."""
        return rows.reshape(-1, *self.sizes)

    def labels(self, labels: Tensor, outputs: int, where: str) -> Tensor:
        """Labels as (n, positions), or (n, positions, C) where each output has its own.

        Args:
            labels: as the loader yielded them.
            outputs: C, those that labels are of.
            where: words for the error message.

        Returns:
            A view, wherever their memory allows it.
        """
        plain = (self.inputs, *self.sizes)
        if labels.shape == plain:
            return labels.flatten(1)
        if labels.shape == self.shape(outputs):
            return self.by_position(labels)
        remedy = ""
        if labels.shape == (self.inputs, 1, *self.sizes):
            remedy = " If they are class indices, remove the axis of size 1: labels.squeeze(1)."
        elif labels.shape[:1] == plain[:1] and labels.dim() == len(plain):
            remedy = " Bring the labels to the size of the outputs first, taking the nearest position."
        raise DataError(
            f"{where}: expected a label for each position, of shape {plain}, or one for each output there, of shape "
            f"{self.shape(outputs)}; got labels of shape {tuple(labels.shape)}.{remedy}"
        )

    def portions(self, rows: int) -> Iterator[Portion]:
        """All positions, at most so many rows at a time.

        Args:
            rows: at least 1.

        Yields:
            Several whole inputs, or a part of one.
        """
        whole = rows // max(1, self.count)
        if whole > 0:
            for start in range(0, self.inputs, whole):
                yield Portion(slice(start, min(start + whole, self.inputs)), slice(0, self.count))
            return
        for index in range(self.inputs):
            for start in range(0, self.count, rows):
                yield Portion(slice(index, index + 1), slice(start, min(start + rows, self.count)))

    def check_same(self, other: Layout, what: str) -> None:
        """Refuse outputs at other positions.

        Args:
            other: their layout.
            what: whose they are, for the message.
        """
        if (self.inputs, self.sizes) != (other.inputs, other.sizes):
            raise DataError(
                f"{what} has outputs at {other.inputs} x {other.sizes} positions, and the first network at "
                f"{self.inputs} x {self.sizes}: a mixture needs the same positions from each."
            )


def chosen_positions(count: int, most: int, index: int) -> Tensor:
    """Which of the positions of an input are used, drawn without replacement.

    Args:
        count: how many there are.
        most: how many to draw; all, where there are not more.
        index: of the input among all that were read: it alone decides, and not the batch that the input came in.

    Returns:
        Positions in ascending order.
    """
    if count <= most:
        return torch.arange(count, device="cpu")
    generator = torch.Generator("cpu").manual_seed(index)
    return torch.randperm(count, generator=generator, device="cpu")[:most].sort().values
