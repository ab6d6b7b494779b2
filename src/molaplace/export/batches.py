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

from molaplace.errors import DataError, OptionError, StorageError
from molaplace.export.reading import load
from molaplace.posterior import MoLA

FIELDS = ("confidence", "entropy", "epistemic", "aleatoric", "ood_score", "distance")
"""Fields of a prediction with one number for each input, in the order of the columns."""

SPARK_TYPES = {"i": "long", "f": "double", "b": "boolean", "O": "string"}
"""Spark column type for each kind of NumPy dtype."""


@dataclass(frozen=True)
class BatchPredictor:
    """A classifier's posterior as a function that maps batches to columns. Engines such as Spark can apply it to their partitions.

    A batch is a pandas DataFrame or a mapping from names to NumPy arrays. The result has the same type as the batch and the same
    columns as the output of `molaplace predict`. Inputs are passed to the networks unchanged. Each process loads the posterior when it
    receives its first batch.

    Args:
        source: file written by `mola.export.onnx` or `mola.export.torch_export` that every process can read, or a function without
            arguments that returns a posterior, such as one that calls `mola.load`.
        inputs: names of the input columns. Pass one column of arrays, or several columns of numbers in the order of the networks'
            inputs.
        keep: columns to copy to the output, such as a key.
        shape: shape of one input; by default, the shape of a cell or, with several columns, of a row.
        dtype: NumPy type to which the inputs are converted.
        probabilities: whether to add a "probs" column that lists the probability of each class.
        trust: whether you trust the author of `source`. Files written by `mola.export.torch_export` require trust because they
            can run code.
        classes: names of the classes; by default, the names in the file. Without names, there is no "class" column.
        ood_threshold: OOD score above which the "outlying" column is true; by default, the threshold in the file. Without a
            threshold, there is no "outlying" column.
        batch_size: number of inputs per forward pass, independent of the engine's batches.
    """

    source: str | Path | Callable[[], MoLA]
    inputs: str | Sequence[str]
    keep: str | Sequence[str] = ()
    shape: Sequence[int] | None = None
    dtype: str = "float32"
    probabilities: bool = False
    trust: bool = False
    batch_size: int = 1024
    classes: Sequence[str] | None = None
    ood_threshold: float | None = None

    def __post_init__(self) -> None:
        for field in ("inputs", "keep"):
            names = getattr(self, field)
            object.__setattr__(self, field, (names,) if isinstance(names, str) else tuple(names))

    def __call__(self, batch: Any) -> Any:
        """Return the predictions for a batch, which may be empty. Frames keep their index."""
        if not isinstance(batch, Mapping) and not hasattr(batch, "columns"):
            raise DataError(f"expected a pandas DataFrame or a mapping of arrays, got {type(batch).__name__}.")
        missing = [name for name in (*self.inputs, *self.keep) if name not in batch]
        if missing:
            raise DataError(f"the batch has no column {missing[0]!r}; it has {', '.join(map(repr, batch))}.")
        columns = self._predict(self._rows([np.asarray(batch[name]) for name in self.inputs]))
        if isinstance(batch, Mapping):
            return {name: batch[name] for name in self.keep} | columns
        import pandas

        # Columns of strings and lists are given the dtype `object`. In an empty frame, pandas would infer another dtype, but all
        # partitions need the same dtypes.
        cells = {name: [*values] if values.ndim > 1 else values for name, values in columns.items()}
        dtypes = {name: object for name, values in columns.items() if values.ndim > 1 or values.dtype == object}
        frame = pandas.DataFrame(cells, index=batch.index).astype(dtypes)
        return pandas.concat([batch[list(self.keep)], frame], axis=1)

    def spark_schema(self, keep: Mapping[str, str] | None = None) -> str:
        """Return the Spark schema of the columns, such as "id long, label long"; `keep` maps each copied column to its type."""
        types = dict(keep or {})
        for name, values in self._predict(np.empty(0)).items():
            types[name] = "array<double>" if values.ndim > 1 else SPARK_TYPES[values.dtype.kind]
        return ", ".join(f"{name} {kind}" for name, kind in types.items())

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
        model = self._load()
        classes = self.classes or model.classes
        threshold = model.threshold if self.ood_threshold is None else self.ood_threshold
        parts = [model.predict(part) for part in torch.split(torch.from_numpy(rows), self.batch_size) if len(part)]
        if not parts:
            empty = {name: torch.empty(0, device="cpu") for name in ("label", *model.fields)}
            parts = [empty | {"probs": torch.empty(0, len(classes), device="cpu")}]
        fields = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
        columns: dict[str, NDArray[Any]] = {"label": fields["label"].astype(np.int64)}
        if classes:
            columns["class"] = np.array([*classes, None], dtype=object)[columns["label"]]  # None for the label -1
        columns |= {name: fields[name].astype(np.float64) for name in model.fields}
        if threshold is not None:
            columns["outlying"] = columns["ood_score"] > threshold
        return columns | ({"probs": fields["probs"].astype(np.float64)} if self.probabilities else {})

    def _load(self) -> _Model:
        if callable(self.source):
            return _call(self.source)
        path = Path(self.source)
        if not path.is_file():
            raise StorageError(
                f"{path} does not exist or is not visible to this process. Pass a file written by mola.export.onnx or "
                f"mola.export.torch_export that all processes can read."
            )
        return _read(path, path.stat().st_mtime_ns, self.trust)


class _Model(NamedTuple):
    predict: Callable[[Tensor], Mapping[str, Tensor]]
    """Function that maps inputs to "probs" (n, C), "label" (n,) and `fields` (n,)."""
    fields: tuple[str, ...]
    classes: tuple[str, ...] = ()
    threshold: float | None = None


@cache
def _read(path: Path, modified: int, trust: bool) -> _Model:
    # `modified` is part of the cache key, so that a modified file is read again.
    exported = load(path, trust=trust)
    if not {"probs", "label"} <= set(exported.outputs):
        raise StorageError(f"{path} was exported without probs or label. Export the posterior with all outputs.")
    fields = tuple(name for name in FIELDS if name in exported.outputs)
    threshold = exported.document.get("ood_threshold") if "ood_score" in fields else None
    return _Model(exported, fields, tuple(exported.classes), threshold)


@cache
def _call(source: Callable[[], MoLA]) -> _Model:
    posterior = source()
    if not isinstance(posterior, MoLA) or not posterior.likelihood.mutually_exclusive:
        raise OptionError(f"source must return a posterior of classifiers; got {type(posterior).__name__}.")
    fields = tuple(name for name in FIELDS if name != "distance" or posterior.has_distances)

    def predict(inputs: Tensor) -> dict[str, Tensor]:
        prediction = posterior.predict(inputs)
        return {name: getattr(prediction, name) for name in ("probs", "label", *fields)}

    return _Model(predict, fields)
