"""The UCI regression sets in the form that earlier papers used: numbers in a text file, and published splits.

The folder of a set contains `data.txt` (rows of numbers), `index_features.txt` and `index_target.txt` (column indices),
and `index_test_0.txt`, ... (indices of test rows), as published with "Dropout as a Bayesian Approximation" (Gal and Ghahramani, 2016).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import DataError
from molaplace.options import one_of

PROTEIN = "protein-tertiary-structure"
"""Name of the set that has 5 splits and whose networks have 100 hidden units."""

SETS = (
    "bostonHousing",
    "concrete",
    "energy",
    "kin8nm",
    "naval-propulsion-plant",
    "power-plant",
    PROTEIN,
    "wine-quality-red",
    "yacht",
)
"""The nine data sets from Hernández-Lobato and Adams (2015) that are available as text. The tenth set, which has half a million rows,
is omitted."""


@dataclass(frozen=True)
class Split:
    """Training and test rows, standardised by the mean and standard deviation of the training rows."""

    train: tuple[Tensor, Tensor]
    """Standardised inputs (n, P) and targets (n, 1)."""
    test: tuple[Tensor, Tensor]
    """Inputs (m, P), standardised like the training inputs, and targets (m, 1) in their original units."""
    location: float
    """Mean of the training targets."""
    scale: float
    """Standard deviation of the training targets."""


@dataclass(frozen=True)
class UciSet:
    """A data set with inputs (N, P), targets (N, 1) and the test rows of each published split."""

    name: str
    inputs: Tensor
    targets: Tensor
    tests: tuple[Tensor, ...]

    @property
    def hidden(self) -> int:
        """Number of hidden units, as in earlier papers."""
        return 100 if self.name == PROTEIN else 50

    @cached_property
    def checksum(self) -> str:
        """Checksum of the numbers and the splits."""
        digest = hashlib.sha256()
        for tensor in (self.inputs, self.targets, *self.tests):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def split(self, number: int) -> Split:
        """Return the published split with the given index, counting from 0."""
        return self._divide(self.tests[number])

    def gap(self, feature: int) -> Split:
        """Return a split whose test rows are the middle third of the rows when sorted by a feature (Foong et al., 2019)."""
        order = self.inputs[:, feature].argsort(stable=True)
        third = len(order) // 3
        return self._divide(order[third : len(order) - third])

    def _divide(self, test: Tensor) -> Split:
        training = torch.ones(len(self.inputs), dtype=torch.bool)
        training[test] = False
        inputs = self.inputs[training]
        targets = self.targets[training]
        mean = inputs.mean(0)
        spread = inputs.std(0, correction=0)
        spread = torch.where(spread > 0, spread, 1)
        location = float(targets.mean())
        scale = float(targets.std(correction=0))
        return Split(
            ((inputs - mean) / spread, (targets - location) / scale),
            ((self.inputs[test] - mean) / spread, self.targets[test]),
            location,
            scale,
        )


def read_uci(folder: str | Path, name: str) -> UciSet:
    """Read one of `SETS` with its published splits, as float64, from a folder that contains a subfolder for each set."""
    set_folder = Path(folder) / one_of(name, SETS, "set")
    rows = _numbers(set_folder / "data.txt", 2)
    features, target = (_indices(set_folder / f"index_{part}.txt", rows.shape[1]) for part in ("features", "target"))
    if len(target) != 1:
        raise DataError(f"{set_folder / 'index_target.txt'}: expected one column, got {len(target)}.")
    files = sorted(set_folder.glob("index_test_*.txt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    if not files:
        raise DataError(
            f"{set_folder} contains no index_test_0.txt, which defines the first published split. Copy the published files to this folder."
        )
    tests = tuple(torch.from_numpy(_indices(path, len(rows))) for path in files)
    inputs = np.ascontiguousarray(rows[:, features])
    targets = np.ascontiguousarray(rows[:, target])
    return UciSet(name, torch.from_numpy(inputs), torch.from_numpy(targets), tests)


def _numbers(path: Path, dimensions: Literal[1, 2]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    try:
        numbers = np.loadtxt(path, dtype=np.float64, ndmin=dimensions)
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist. Expected one folder per set, each with data.txt, index_features.txt, index_target.txt and "
            f"index_test_0.txt, ..., as published with 'Dropout as a Bayesian Approximation' (Gal and Ghahramani, 2016)."
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: expected rows of numbers, got {error}") from error
    if not numbers.size or not np.isfinite(numbers).all():
        raise DataError(f"{path}: expected finite numbers only.")
    return numbers


def _indices(path: Path, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    numbers = _numbers(path, 1)
    indices = numbers.astype(np.int64)
    if (
        (indices != numbers).any()
        or indices.min() < 0
        or indices.max() >= count
        or len(np.unique(indices)) < len(indices)
    ):
        raise DataError(f"{path}: expected distinct whole numbers from 0 to {count - 1}.")
    return indices
