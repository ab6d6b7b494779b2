"""Batches of a user's data. Unusable inputs are reported and left out; the rest become tensors.

A set yields `InputBatch`: the names of all inputs in a batch, an error for each unusable input, and the usable inputs as tensors.
Fitting and evaluation read rows through a `Loader`, whose `SkippedInputs` records the inputs that were left out. Prediction writes a
row for each input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from molaplace.data.preprocessing import Preprocessing
from molaplace.distributed import Team
from molaplace.errors import DataError, printable
from molaplace.network import Inputs
from molaplace.options import counted


class InputBatch(NamedTuple):
    """A batch: the names of all inputs, and the usable inputs as tensors."""

    names: list[str]
    errors: list[str | None]
    """For each input, the reason why it was left out, or None."""
    inputs: Inputs
    """Usable inputs; None if all inputs have errors."""
    labels: Tensor | None
    """Labels of the usable inputs, if the set has labels."""

    def check_strict(self) -> None:
        """Raise `DataError` for the first input that has an error."""
        for name, error in zip(self.names, self.errors, strict=True):
            if error is not None:
                raise DataError(f"{name}: {error} (with --strict, no input may be left out).")


@dataclass(frozen=True, kw_only=True)
class Dataset(ABC):
    """A data set specified by the user."""

    name: str
    preprocessing: Preprocessing
    labels: Tensor | None = None
    """Labels of all inputs, if the set holds its labels in memory."""
    classes: tuple[str, ...] | None = None
    """Class names, if the set provides them."""
    count: int | None = None
    """Number of inputs, if known."""
    has_pixels: bool = False
    """True if the inputs are images stored as bytes, which are divided by 255 and normalised."""

    @abstractmethod
    def batches(self, first: int = 0, step: int = 1) -> Iterator[InputBatch]:
        """Yield the batches with indices `first`, `first + step`, ..., so that several processes can share a set."""


@dataclass
class SkippedInputs:
    """Record of inputs that were left out, keyed by set and name. Each input is counted once, even if the data are read repeatedly."""

    left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, where: str, rows: InputBatch) -> None:
        """Record the unusable inputs in a batch."""
        for name, error in zip(rows.names, rows.errors, strict=True):
            if error is not None:
                self.left_out.setdefault(where, {})[name] = error

    def __len__(self) -> int:
        return sum(len(errors) for errors in self.left_out.values())

    def require_some(self, count: int, where: str) -> None:
        """Raise `DataError`, giving the first reason, if no input in a set is usable."""
        if count == 0:
            first = next(
                (f" The first error: {name}: {why}." for name, why in self.left_out.get(where, {}).items()), ""
            )
            raise DataError(f"{where} contains no usable inputs.{first}")

    def lines(self, most: int = 5) -> list[str]:
        """Return lines that list the first few inputs left out of each set and count the rest."""
        lines = []
        for where, entries in self.left_out.items():
            lines.append(f"{where}: {counted(len(entries), 'input')} left out")
            lines += [f"  {name}: {words}" for name, words in list(entries.items())[:most]]
            if len(entries) > most:
                lines.append(f"  and {len(entries) - most} more")
        return [printable(line) for line in lines]

    def together(self, team: Team) -> SkippedInputs:
        """Return one record that combines the records of all processes."""
        whole = SkippedInputs()
        for part in team.collect(self):
            for where, entries in part.left_out.items():
                whole.left_out.setdefault(where, {}).update(entries)
        return whole


@dataclass(frozen=True)
class Loader:
    """The usable inputs of a set as a loader for `mola.fit`, `tune` and `predict`."""

    source: Dataset
    skipped: SkippedInputs = field(default_factory=SkippedInputs)
    """Record of unusable inputs."""
    strict: bool = False
    """True if unusable inputs raise an error."""
    labelled: bool = True
    """True if labels are required."""
    on_share: Callable[[float], None] = lambda share: None
    """Callback that receives the fraction of the set that has been read."""
    team: Team = field(default_factory=Team.single)
    """Processes that divide the set's batches among themselves."""

    def __iter__(self) -> Iterator[Any]:
        used = 0
        for rows in read_batches(self.source, self.team, self.on_share):
            if self.strict:
                rows.check_strict()
            self.skipped.add(self.source.name, rows)
            if rows.inputs is None:
                continue
            if self.labelled and rows.labels is None:
                raise DataError(f"{self.source.name} has no labels. Pass data with labels.")
            used += rows.errors.count(None)
            yield as_loader_batch(rows)
        if self.team.size == 1:  # with several processes, a process may have no usable inputs
            self.skipped.require_some(used, self.source.name)


def read_batches(source: Dataset, team: Team, on_share: Callable[[float], None]) -> Iterator[InputBatch]:
    """Yield the batches for this process and report the fraction of the set that has been read, or 0.5 if its size is unknown."""
    count = 0
    for rows in source.batches(team.rank, team.size):
        count += len(rows.names) * team.size
        on_share(min(1.0, count / (source.count or 2 * count)))
        yield rows


def as_loader_batch(batch: InputBatch) -> Any:
    """Return inputs and labels in the form that a loader yields: a tuple, or a mapping that contains the labels."""
    if isinstance(batch.inputs, Mapping):
        return dict(batch.inputs) if batch.labels is None else {**batch.inputs, "labels": batch.labels}
    return (batch.inputs,) if batch.labels is None else (batch.inputs, batch.labels)


def finite_rows(names: Sequence[str], inputs: Inputs, labels: Tensor | None, dtype: torch.dtype) -> InputBatch:
    """Convert tensors to rows of the given floating-point type, omitting inputs with non-finite values. Labels are not checked."""
    errors: list[str | None] = [None] * len(names)
    for tensor in tree_leaves(inputs):
        if tensor.is_floating_point():
            bad = (~tensor.isfinite()).reshape(len(tensor), -1).sum(1)
            for index in torch.nonzero(bad).flatten().tolist():
                count = int(bad[index])
                errors[index] = (
                    f"contains {count} {'value that is' if count == 1 else 'values that are'} NaN or infinite"
                )
    usable = torch.tensor([error is None for error in errors], device="cpu")
    if not bool(usable.any()):
        return InputBatch(list(names), errors, None, None)

    def prepared(tensor: Tensor) -> Tensor:
        selected = tensor[usable.to(tensor.device)]
        return selected.to(dtype) if selected.is_floating_point() else selected

    usable_labels = None if labels is None else labels.cpu()[usable]
    return InputBatch(list(names), errors, tree_map(prepared, inputs), usable_labels)
