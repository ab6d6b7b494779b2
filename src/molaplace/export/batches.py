"""An exported classifier as a function from batches to columns, for engines that divide data themselves: Ray Data, Spark and Dask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from molaplace.errors import DataError, StorageError
from molaplace.export.reading import LoadedExport, load

FIELDS = ("confidence", "entropy", "epistemic", "aleatoric", "ood_score", "distance")
"""Fields of a prediction with one number for each input, in the order of the columns."""

SPARK_TYPES = {"i": "long", "f": "double", "b": "boolean", "O": "string"}
"""Spark column type for each kind of NumPy dtype."""


@dataclass(frozen=True)
class BatchPredictor:
    """Map batches to columns of predictions and decisions. Engines such as Spark can apply it to their partitions.

    A batch is a pandas DataFrame or a mapping from names to NumPy arrays; the result has the same type. Inputs are passed to the networks
    unchanged. Each process loads the file when it receives its first batch.

    Args:
        file: file written by `mola.export.onnx` or `mola.export.torch_export` that every process can read.
        inputs: names of the input columns: one column of arrays, or several columns of numbers in the order of the networks' inputs.
        keep: names of columns to copy to the output, such as a key.
        shape: shape of one input; by default, the shape of a cell or, with several columns, of a row.
        dtype: NumPy type to which the inputs are converted.
        probabilities: whether to add a "probs" column that lists the probability of each class.
        trust: whether you trust the author of a file written by `mola.export.torch_export`, which can run code.
    """

    file: str | Path
    inputs: Sequence[str]
    keep: Sequence[str] = ()
    shape: Sequence[int] | None = None
    dtype: str = "float32"
    probabilities: bool = False
    trust: bool = False

    def __call__(self, batch: Any) -> Any:
        """Return the predictions for a batch, which may be empty. Frames keep their index."""
        missing = [name for name in (*self.inputs, *self.keep) if name not in batch]
        if missing:
            raise DataError(f"the batch has no column {missing[0]!r}; it has {', '.join(map(repr, batch))}.")
        columns = self._columns([np.asarray(batch[name]) for name in self.inputs])
        if isinstance(batch, Mapping):
            return {name: batch[name] for name in self.keep} | columns
        import pandas

        # All partitions need the same dtypes. In an empty frame, pandas would not make columns of strings and lists objects.
        objects = {name: object for name, values in columns.items() if values.ndim > 1 or values.dtype == object}
        frame = pandas.DataFrame({name: list(values) for name, values in columns.items()}, index=batch.index)
        dtypes = {name: values.dtype for name, values in columns.items()} | objects
        return pandas.concat([batch[list(self.keep)], frame.astype(dtypes)], axis=1)

    def spark_schema(self, keep: Mapping[str, str] | None = None) -> str:
        """Return the Spark schema of the columns, such as "id long, label long"; `keep` maps each copied column to its type."""
        columns = self._columns([np.empty(0)])
        kinds = {name: (SPARK_TYPES[values.dtype.kind], values.ndim) for name, values in columns.items()}
        types = {name: f"array<{kind}>" if ndim > 1 else kind for name, (kind, ndim) in kinds.items()}
        return ", ".join(f"{name} {kind}" for name, kind in (dict(keep or {}) | types).items())

    def _columns(self, inputs: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
        path = Path(self.file)
        model = _load(path, path.stat().st_mtime_ns if path.exists() else 0, self.trust)
        outputs = {name: torch.empty(0, device="cpu") for name in model.outputs}
        outputs["probs"] = torch.empty(0, len(model.classes), device="cpu")
        if len(inputs[0]):
            outputs = model(self._rows(inputs))
        columns: dict[str, NDArray[Any]] = {"label": outputs["label"].numpy().astype(np.int64)}
        if model.classes:
            columns["class"] = np.array([*model.classes, None], dtype=object)[columns["label"]]  # None for the label -1
        columns |= {name: outputs[name].double().numpy() for name in FIELDS if name in outputs}
        columns |= {name: values.numpy() for name, values in model.decide(outputs).items()}
        return columns | ({"probs": outputs["probs"].double().numpy()} if self.probabilities else {})

    def _rows(self, columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
        try:
            rows: NDArray[Any] = np.stack(columns, axis=1) if len(columns) > 1 else np.array(columns[0].tolist())
            return rows.reshape(len(rows), *(self.shape or rows.shape[1:] or (1,))).astype(self.dtype)
        except (ValueError, TypeError) as error:
            names = ", ".join(self.inputs)
            raise DataError(f"the inputs {names} are not {self.dtype} arrays of the same shape: {error}") from error


@cache
def _load(path: Path, modified: int, trust: bool) -> LoadedExport:  # a modified file is read again
    exported = load(path, trust=trust)
    if not {"probs", "label"} <= set(exported.outputs):
        raise StorageError(f"{path} has no outputs probs and label. Export a classifier with all outputs.")
    return exported
