"""Stored features and logits of K networks for a data set, read in slices because a large set may not fit in memory.

Each network has one safetensors file per set or, if the set is large, one file per slice of the set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from molaplace.errors import DataError, OptionError, StorageError
from molaplace.saving.files import partial_file

BATCH = 1024
"""Number of rows per batch during fitting and prediction."""

NUMBERS_AT_ONCE = 2**23
"""Maximum number of feature values per network in a slice."""

WHOLE = ("weight", "bias")
"""Names of the head's tensors, which are stored whole rather than row by row."""


def write_rows(
    path: Path,
    batches: Sequence[Mapping[str, Tensor]],
    count: int,
    whole: Mapping[str, Tensor],
    metadata: dict[str, str],
) -> None:
    """Write batches (`count` rows in total) and the tensors in `whole` to one safetensors file, creating its folder if necessary."""
    rows = {name: torch.cat([batch[name].detach().cpu() for batch in batches]) for name in batches[0]}
    num_rows = len(next(iter(rows.values())))
    if num_rows != count:
        raise DataError(f"expected {count} data in {metadata.get('set', 'the set')}, got {num_rows}.")
    with partial_file(path) as partial:
        head = {name: tensor.detach().cpu().contiguous() for name, tensor in whole.items()}
        save_file({**rows, **head}, partial, metadata)


class TensorFile:
    """A data set stored in safetensors files; `paths` lists the files in row order, and `content` names the data in error messages."""

    def __init__(self, paths: Path | Sequence[Path], content: str = "activations") -> None:
        self.parts: list[Any] = []
        for path in [paths] if isinstance(paths, Path) else paths:
            try:
                self.parts.append(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise StorageError(
                    f"{path} is not a complete {content} file: {error}. Delete it, and it will be recomputed."
                ) from error

    def __contains__(self, name: str) -> bool:
        return name in self.parts[0].keys()  # noqa: SIM118  (not a mapping)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor with one row per data point, counting the rows of all files."""
        count = sum(part.get_slice(name).get_shape()[0] for part in self.parts)
        return count, *self.parts[0].get_slice(name).get_shape()[1:]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows `start` to `stop` (exclusive) of a tensor, or the whole tensor if its name is in `WHOLE`."""
        if name in WHOLE:
            whole: Tensor = self.parts[0].get_tensor(name)
            return whole
        slices: list[Tensor] = []
        first = 0
        last = self.shape(name)[0] if stop is None else stop
        for part in self.parts:
            rows = part.get_slice(name)
            count = rows.get_shape()[0]
            low, high = (min(max(end - first, 0), count) for end in (start, last))
            if low < high or not slices:
                slices.append(rows[low : max(low, high)])
            first += count
        return torch.cat(slices)

    def rows(self, name: str, row_indices: Sequence[int]) -> Tensor:
        """Return the rows of a tensor at the indices `row_indices`, in the given order; consecutive rows are read together."""
        if len(row_indices) == 0:
            return self.read(name, 0, 0)
        breaks = [index for index, (start, following) in enumerate(pairwise(row_indices), 1) if following != start + 1]
        runs = zip([0, *breaks], [*breaks, len(row_indices)], strict=True)
        return torch.cat([self.read(name, row_indices[start], row_indices[end - 1] + 1) for start, end in runs])


class HeadOnly(nn.Module):
    """The last layer of one network, as a module that takes the stored features of all networks, shape (n, K, P).

    P is the number of features of the widest network. The features of narrower networks are padded with zeros.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, index: int) -> None:
        super().__init__()
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
        self.head.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
        self.index = index

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of this network."""
        logits: Tensor = self.head(features[:, self.index, : self.head.in_features])
        return logits

    def scaled(self, temperature: float) -> HeadOnly:
        """Return a head whose logits are divided by a temperature."""
        bias = None if self.head.bias is None else self.head.bias.detach() / temperature
        return HeadOnly(self.head.weight.detach() / temperature, bias, self.index).eval()


@dataclass(frozen=True)
class ActivationSlice:
    """Features and logits of K networks for a slice of the data."""

    features: Tensor
    """Features, shape (n, K, P); the features of narrower networks are padded with zeros."""
    logits: Tensor
    """Logits, shape (n, K, C)."""
    labels: Tensor
    widths: tuple[int, ...]
    """Number of features of each network."""

    def by_network(self) -> list[Tensor]:
        """Return the features of each network without padding."""
        return [self.features[:, index, :width] for index, width in enumerate(self.widths)]

    def batches(self) -> list[Tensor]:
        """Return the features in batches, as inputs for `HeadOnly`."""
        return list(torch.split(self.features, BATCH))


@dataclass(frozen=True)
class StoredActivations:
    """Stored features and logits of K networks for one data set; iterating yields (features, labels) batches for `HeadOnly`."""

    files: tuple[TensorFile, ...]
    row_indices: Sequence[int]
    """Indices of the rows to read from the files, in reading order."""

    @classmethod
    def open(cls, paths: Sequence[Path | Sequence[Path]]) -> StoredActivations:
        """Open the file (or files, in row order) of each network; all files must contain activations for the same set."""
        files = tuple(TensorFile(paths_of_network) for paths_of_network in paths)
        outputs = [file.shape("logits")[1] for file in files]
        if len(set(outputs)) > 1:
            raise OptionError(
                f"all networks of a mixture must have the same classes; got {outputs} outputs. Leave out the networks that differ."
            )
        return cls(files, range(files[0].shape("labels")[0]))

    def only(self, networks: slice) -> StoredActivations:
        """Return the stored activations of the networks selected by a slice."""
        return StoredActivations(self.files[networks], self.row_indices)

    def at(self, row_indices: Sequence[int]) -> StoredActivations:
        """Return the stored activations for the data at the indices `row_indices`, in the given order."""
        return StoredActivations(self.files, tuple(row_indices))

    @cached_property
    def heads(self) -> tuple[HeadOnly, ...]:
        """The last layers of the K networks, as modules that take the stored features as input."""
        return tuple(
            HeadOnly(file.read("weight"), file.read("bias") if "bias" in file else None, index).eval()
            for index, file in enumerate(self.files)
        )

    @cached_property
    def labels(self) -> Tensor:
        """Class of each data point, shape (n,)."""
        return self.files[0].rows("labels", self.row_indices)

    @property
    def count(self) -> int:
        """Number of examples."""
        return len(self.row_indices)

    def slices(self) -> Iterator[ActivationSlice]:
        """Yield all data in slices of bounded size; every slice except the last consists of full batches."""
        widths = tuple(file.shape("features")[1] for file in self.files)
        rows_per_slice = max(1, NUMBERS_AT_ONCE // max(widths) // BATCH) * BATCH
        for start in range(0, self.count, rows_per_slice):
            indices = self.row_indices[start : start + rows_per_slice]
            features, logits = ([file.rows(name, indices) for file in self.files] for name in ("features", "logits"))
            padded = [functional.pad(tensor, (0, max(widths) - tensor.shape[1])) for tensor in features]
            labels = self.labels[start : start + rows_per_slice]
            yield ActivationSlice(torch.stack(padded, dim=1), torch.stack(logits, dim=1), labels, widths)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in self.slices():
            yield from zip(part.batches(), torch.split(part.labels, BATCH), strict=True)

    def logits(self) -> Tensor:
        """Return the logits for all data at once, shape (K, n, C); use this only for small sets, such as the validation set."""
        return torch.stack([file.rows("logits", self.row_indices) for file in self.files])
