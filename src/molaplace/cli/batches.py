"""Batch predictions for engines that partition the data: Ray Data, Spark, Dask, or your own loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from molaplace import export
from molaplace.cli.decisions import alarm
from molaplace.cli.folder import open_posterior
from molaplace.cli.prediction_table import FIELDS
from molaplace.errors import DataError, StorageError
from molaplace.saving.files import DOCUMENT

SPARK_TYPES = {"i": "long", "f": "double", "b": "boolean", "O": "string"}
"""Spark column type for each kind of NumPy dtype."""


@dataclass(frozen=True)
class BatchPredictor:
    """A posterior as a function that maps batches to columns. Engines such as Spark can apply it to their partitions.

    A batch is a pandas DataFrame or a mapping from names to NumPy arrays. The result has the same type as the batch and the same
    columns as the output of `molaplace predict`. Inputs are passed to the networks unchanged. Each process loads the posterior when it
    receives its first batch.

    Args:
        source: path that every process can read: a folder written by `molaplace fit --bundle`, or a file written by
            `mola.export.onnx` or `mola.export.torch_export`.
        inputs: names of the input columns. Pass one column of arrays, or several columns of numbers in the order of the networks'
            inputs.
        keep: columns to copy to the output, such as a key.
        shape: shape of one input; by default, the shape of a cell or, with several columns, of a row.
        dtype: NumPy type to which the inputs are converted.
        probabilities: whether to add a "probs" column that lists the probability of each class.
        trust: whether you trust the author of `source`. Files written by `mola.export.torch_export`, and folders that name
            functions, require trust because they can run code.
        batch_size: number of inputs per forward pass, independent of the engine's batches.
    """

    source: str | Path
    inputs: str | Sequence[str]
    keep: str | Sequence[str] = ()
    shape: Sequence[int] | None = None
    dtype: str = "float32"
    probabilities: bool = False
    trust: bool = False
    batch_size: int = 1024

    def __post_init__(self) -> None:
        for name in ("inputs", "keep"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))

    def __call__(self, batch: Any) -> Any:
        """Return the predictions for a batch, which may be empty. Frames keep their index."""
        if not isinstance(batch, Mapping) and not hasattr(batch, "columns"):
            raise DataError(f"expected a pandas DataFrame or a mapping of arrays, got {type(batch).__name__}.")
        missing = [name for name in (*self.inputs, *self.keep) if name not in batch]
        if missing:
            raise DataError(f"the batch has no column {missing[0]!r}; it has {', '.join(map(repr, batch))}.")
        found = self._predict(self._rows([np.asarray(batch[name]) for name in self.inputs]))
        if isinstance(batch, Mapping):
            return {name: batch[name] for name in self.keep} | found
        import pandas

        # Columns of strings and lists are given the dtype `object`. In an empty frame, pandas would infer another dtype, but all
        # partitions need the same dtypes.
        cells = {name: [*values] if values.ndim > 1 else values for name, values in found.items()}
        kinds = {name: object for name, values in found.items() if values.ndim > 1 or values.dtype == object}
        frame = pandas.DataFrame(cells, index=batch.index).astype(kinds)
        return pandas.concat([batch[list(self.keep)], frame], axis=1)

    def spark_schema(self, keep: Mapping[str, str] | None = None) -> str:
        """Return the Spark schema of the columns, such as "id long, label long"; `keep` maps each copied column to its type."""
        kinds = dict(keep or {})
        for name, values in self._predict(np.empty(0)).items():
            kinds[name] = "array<double>" if values.ndim > 1 else SPARK_TYPES[values.dtype.kind]
        return ", ".join(f"{name} {kind}" for name, kind in kinds.items())

    def _rows(self, columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
        try:
            rows: NDArray[Any] = np.stack(columns, axis=1) if len(columns) > 1 else np.array(columns[0].tolist())
            shape: Sequence[int] = self.shape or rows.shape[1:] or (1,)
            rows = rows.reshape(len(rows), *shape).astype(self.dtype)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"the inputs {', '.join(self.inputs)} cannot be converted to {self.dtype} arrays of the same shape: {error}"
            ) from error
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=tuple(range(1, rows.ndim))))
        if len(bad):
            raise DataError(f"row {bad[0]} of the batch contains NaN or infinity. Remove such rows before prediction.")
        return rows

    def _predict(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        loaded = self._loaded()
        parts = [loaded.predict(part) for part in torch.split(torch.from_numpy(rows), self.batch_size) if len(part)]
        empty = {name: torch.empty(0) for name in ("label", *loaded.names)}
        parts = parts or [empty | {"probs": torch.empty(0, len(loaded.classes or ()))}]
        found = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
        columns: dict[str, NDArray[Any]] = {"label": found["label"].astype(np.int64)}
        if loaded.classes is not None:
            columns["class"] = np.array(loaded.classes, dtype=object)[columns["label"]]
        columns |= {name: found[name].astype(np.float64) for name in loaded.names}
        if loaded.threshold is not None:
            columns["outlying"] = columns["ood_score"] > loaded.threshold
        return columns | ({"probs": found["probs"].astype(np.float64)} if self.probabilities else {})

    def _loaded(self) -> _Loaded:
        source = Path(self.source)
        file = source / DOCUMENT if source.is_dir() else source
        if not file.exists():
            raise StorageError(
                f"{source} does not exist or is not visible to this process. Pass a folder written by `molaplace fit` or "
                f"an exported file that all processes can read."
            )
        return _load(source, file.stat().st_mtime_ns, self.trust)


class _Loaded(NamedTuple):
    predict: Callable[[Tensor], dict[str, Tensor]]
    """Function that maps inputs to "probs" (n, C), "label" (n,) and other fields (n,)."""
    classes: tuple[str, ...] | None
    names: tuple[str, ...]
    threshold: float | None = None


@cache
def _load(path: Path, changed: int, trust: bool) -> _Loaded:
    # `changed`, the modification time, is part of the cache key, so that a modified file is read again.
    if path.is_file():
        exported = export.load(path, trust=trust)
        if not {"probs", "label"} <= set(exported.outputs):
            raise StorageError(f"{path} was exported without probs or label. Export the posterior with all outputs.")
        names = tuple(name for name in exported.outputs if name not in ("probs", "label"))
        threshold = exported.document.get("ood_threshold") if "ood_score" in names else None
        return _Loaded(exported, tuple(exported.classes), names, threshold)
    fitted = open_posterior(path, trust=trust)
    names = tuple(name for name in FIELDS[1:] if name != "distance" or fitted.posterior.has_distances)

    def predict(inputs: Tensor) -> dict[str, Tensor]:
        found = fitted.posterior.predict(inputs)
        return {name: getattr(found, name) for name in ("probs", "label", *names)}

    return _Loaded(predict, fitted.classes, names, alarm(fitted, None))
