"""Predictions batch by batch for engines that divide data themselves: Ray Data, Spark, Dask, or your own loop."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mola import export, hub
from mola.app.jobs.columns import FIELDS
from mola.app.jobs.folder import alarm, open_posterior
from mola.errors import DataError, OptionError, StorageError
from mola.posterior import MoLA
from mola.saving.files import DOCUMENT

DTYPES = ("float32", "float64", "float16", "int64", "int32", "uint8")
SPARK_TYPES = {"i": "long", "f": "double", "b": "boolean", "O": "string"}
"""Spark's types of columns, by NumPy's kinds."""


@dataclass(frozen=True)
class BatchPredictor:
    """A posterior as a function from batches to columns, to be mapped over partitions by any engine.

    It holds names only, so it is pickled in a few bytes; each process reads the posterior when it gets its first batch, and keeps
    it until the files change. Takes pandas frames, Arrow tables, mappings of NumPy arrays, and arrays of inputs, and
    gives the same kind (a mapping for arrays) with the columns of `mola predict`: "label", "class" where classes have names,
    "confidence", "entropy", "epistemic", "aleatoric", "ood_score", "distance" where it is known, and "outlying" where there is a
    threshold. Inputs are passed to the networks unchanged: preprocess them like the training data.

    Args:
        source: a path that every process can read: a folder of `mola fit --bundle`, a folder of `mola.hub.save`, or a file of
            `mola.export.onnx` or `mola.export.torch_export`.
        inputs: the input columns: one column of arrays, or several columns of numbers in the order of the networks' inputs. Not
            needed for batches that are arrays.
        keep: columns to copy to the output, such as a key.
        shape: shape of one input; None uses the shape of the cells, or of a row of the columns.
        dtype: type of the inputs.
        probabilities: add a column "probs" with a list of one number for each class.
        build: for a folder of a hub, a function that makes a network: see `mola.hub.load`. It is pickled by its name.
        trust: True if you trust the author of the source: for files of `mola.export.torch_export`, and for a folder that names
            functions to call.
        batch_size: inputs per forward pass, independent of the engine's batches.
    """

    source: str | Path
    inputs: str | Sequence[str] = ()
    keep: Sequence[str] = ()
    shape: Sequence[int] | None = None
    dtype: str = "float32"
    probabilities: bool = False
    build: Callable[[], nn.Module] | None = None
    trust: bool = False
    batch_size: int = 1024

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", str(self.source))
        for name in ("inputs", "keep"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        if self.batch_size < 1:
            raise OptionError(f"batch_size must be at least 1, got {self.batch_size}.")
        if self.dtype not in DTYPES:
            raise OptionError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}.")

    def __call__(self, batch: Any) -> Any:
        """Return the predictions of a batch.

        Args:
            batch: a pandas frame, an Arrow table, a mapping of arrays, or an array of inputs (n, ...). It may be empty.

        Returns:
            The same kind with the columns of `keep` and those of the predictions; a mapping for an array. Frames keep their
            index.
        """
        if isinstance(batch, (np.ndarray, Tensor)):
            return self._predict(batch.detach().cpu().numpy() if isinstance(batch, Tensor) else batch)
        library = type(batch).__module__.partition(".")[0]
        if library == "pandas":
            found = self._columns(batch.columns, lambda name: batch[name].to_numpy())
            return self._as_frame(batch, found)
        if library == "pyarrow":
            found = self._columns(batch.schema.names, lambda name: batch[name].to_numpy(zero_copy_only=False))
            return self._as_arrow(batch, found)
        if isinstance(batch, Mapping):
            found = self._columns(batch, lambda name: np.asarray(batch[name]))
            return {name: batch[name] for name in self.keep} | found
        raise DataError(
            f"expected a pandas frame, an Arrow table, a mapping of arrays or an array; got {type(batch).__name__}."
        )

    def over(self, frames: Iterable[Any]) -> Iterator[Any]:
        """Yield the predictions of successive batches, as Spark's `mapInPandas` expects."""
        return map(self, frames)

    def spark_schema(self, keep: Mapping[str, str] | None = None) -> str:
        """Return Spark's schema of the columns, such as "id long, label long, confidence double".

        Args:
            keep: Spark's types of the columns of `keep`, by name.
        """
        given = dict(keep or {})
        if set(given) != set(self.keep):
            raise OptionError(
                f"expected the types of {', '.join(self.keep) or 'no column'}, got {', '.join(given) or 'none'}."
            )
        kinds = {name: given[name] for name in self.keep}
        for name, values in self._predict(np.empty(0)).items():
            kinds[name] = "array<double>" if values.ndim > 1 else SPARK_TYPES[values.dtype.kind]
        return ", ".join(f"{name} {kind}" for name, kind in kinds.items())

    def _as_frame(self, batch: Any, found: Mapping[str, NDArray[Any]]) -> Any:
        pandas: Any = sys.modules["pandas"]
        # Texts and lists stay objects: pandas would give texts another type in an empty frame, and partitions must agree.
        cells = {
            name: pandas.Series(list(values), index=batch.index, dtype=object if values.ndim > 1 else values.dtype)
            for name, values in found.items()
        }
        return pandas.concat([batch[list(self.keep)], pandas.DataFrame(cells, index=batch.index)], axis=1)

    def _as_arrow(self, batch: Any, found: Mapping[str, NDArray[Any]]) -> Any:
        arrow: Any = sys.modules["pyarrow"]
        cells = {name: batch[name] for name in self.keep}
        for name, values in found.items():
            # Given, not guessed from the cells: an empty batch has none, and partitions must agree.
            kind = arrow.string() if values.dtype == object else arrow.from_numpy_dtype(values.dtype)
            cells[name] = arrow.array(values.tolist(), arrow.list_(kind) if values.ndim > 1 else kind)
        made = arrow.RecordBatch if isinstance(batch, arrow.RecordBatch) else arrow.Table
        return made.from_pydict(cells)

    def _columns(self, names: Iterable[str], read: Callable[[str], NDArray[Any]]) -> dict[str, NDArray[Any]]:
        if not self.inputs:
            raise DataError("inputs: name the columns that hold the inputs, BatchPredictor(source, inputs=[...]).")
        known = list(names)
        missing = [name for name in (*self.inputs, *self.keep) if name not in known]
        if missing:
            raise DataError(f"the batch has no column {missing[0]!r}; it has {', '.join(map(repr, known)) or 'none'}.")
        columns = [read(name) for name in self.inputs]
        listed = f"the column{'s' if len(columns) > 1 else ''} {', '.join(map(str, self.inputs))}"
        for cells in columns:
            absent = [row for row, cell in enumerate(cells) if cell is None] if cells.dtype == object else []
            if absent:
                raise DataError(f"{listed}: row {absent[0]} of the batch is None: leave such rows out.")
        try:
            rows = np.stack(columns, axis=1) if len(columns) > 1 else _stacked(columns[0])
            rows = rows[:, None] if rows.ndim == 1 else rows
            rows = rows.astype("float64") if rows.dtype == object else rows
        except (ValueError, TypeError) as error:
            raise DataError(f"{listed} cannot be converted to {self.dtype} inputs of one shape: {error}") from error
        found = self._predict(rows)
        clash = [name for name in self.keep if name in found]
        if clash:
            raise OptionError(f"keep: {clash[0]!r} is also the name of a column of the predictions: rename yours.")
        return found

    def _predict(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        loaded = self._loaded()
        if not len(rows):
            empty = {name: torch.empty(0) for name in ("label", *loaded.names)}
            return self._named([empty | {"probs": torch.empty(0, len(loaded.classes or ()))}], loaded)
        try:
            rows = rows if self.shape is None else rows.reshape(len(rows), *self.shape)
            with np.errstate(invalid="ignore", over="ignore"):
                # Copied: engines hand out arrays that may not be written to, which torch warns of.
                made = np.array(rows, dtype=self.dtype)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"inputs of shape {rows.shape} and type {rows.dtype} cannot be converted to {self.dtype} of shape {self.shape}: "
                f"{error}"
            ) from error
        good = np.isfinite(made) if made.dtype.kind == "f" else made == rows
        if not good.all():
            bad = int(np.nonzero(~good.reshape(len(rows), -1).all(1))[0][0])
            what = "is not finite" if made.dtype.kind == "f" else f"has numbers that {self.dtype} cannot hold"
            raise DataError(f"row {bad} of the batch {what}: leave such rows out before they are predicted.")
        return self._named(
            [loaded.predict(part) for part in torch.split(torch.from_numpy(made), self.batch_size)], loaded
        )

    def _named(self, parts: Sequence[Mapping[str, Tensor]], loaded: _Loaded) -> dict[str, NDArray[Any]]:
        found = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
        columns: dict[str, NDArray[Any]] = {"label": found["label"].astype(np.int64)}
        if loaded.classes is not None:
            columns["class"] = np.array(loaded.classes, dtype=object)[columns["label"]]
        columns |= {name: found[name].astype(np.float64) for name in loaded.names}
        if loaded.threshold is not None:
            columns["outlying"] = columns["ood_score"] > loaded.threshold
        if self.probabilities:
            columns["probs"] = found["probs"].astype(np.float64)
        return columns

    def _loaded(self) -> _Loaded:
        source = Path(str(self.source))
        names = (DOCUMENT, hub.CONFIG) if source.is_dir() else ("",)
        times = tuple((source / name).stat().st_mtime_ns for name in names if (source / name).exists())
        if not times:
            raise StorageError(
                f"{source} is neither a folder of mola fit or mola.hub.save nor an exported file, as seen from this "
                f"process: put it where all processes can read it."
            )
        # A function by its name: engines that send it along make it anew for every batch.
        build = self.build and f"{self.build.__module__}:{getattr(self.build, '__qualname__', self.build)}"
        key = (str(source), build, self.trust)
        with _LOADING:  # several threads of one process read once
            if key not in _READ or _READ[key][0] != times:
                _READ[key] = (times, _load(source, self.build, self.trust))
            return _READ[key][1]


@dataclass(frozen=True)
class _Loaded:
    # A source that this process has read.
    predict: Callable[[Tensor], dict[str, Tensor]]
    """Maps inputs to "probs" (n, C), "label" and other fields (n,)."""
    classes: tuple[str, ...] | None
    names: tuple[str, ...]
    """Names of the other fields."""
    threshold: float | None = None
    """Outlier score above which inputs are outlying."""


_LOADING = Lock()
_READ: dict[tuple[str, str | None, bool], tuple[tuple[int, ...], _Loaded]] = {}
"""Sources that this process has read, with the times of their files."""


def _stacked(cells: NDArray[Any]) -> NDArray[Any]:
    # Cells that are arrays, or arrays of arrays as Arrow and Spark have nested lists, as one array.
    if cells.dtype != object or not len(cells) or not isinstance(cells[0], (np.ndarray, list, tuple)):
        return cells
    return np.stack([_stacked(np.asarray(cell)) for cell in cells])


def _load(path: Path, build: Any, trust: bool) -> _Loaded:
    if path.is_file():
        exported = export.load(path, trust=trust)
        lacking = [name for name in ("probs", "label") if name not in exported.outputs]
        if lacking:
            raise StorageError(f"{path} was exported without {' and '.join(lacking)}: export it with all outputs.")
        names = tuple(name for name in exported.outputs if name not in ("probs", "label"))
        threshold = exported.document.get("ood_threshold") if "ood_score" in names else None
        return _Loaded(exported, tuple(exported.classes), names, threshold)
    if hub.is_hub_folder(path):
        posterior = hub.load(path, build)  # checks the folder's own document, too
        return _of_posterior(posterior, tuple(json.loads((path / hub.CONFIG).read_bytes())["classes"]), None)
    fitted = open_posterior(path, trust=trust)
    return _of_posterior(fitted.posterior, fitted.classes, alarm(fitted, None))


def _of_posterior(posterior: MoLA, classes: tuple[str, ...] | None, threshold: float | None) -> _Loaded:
    names = tuple(name for name in FIELDS[1:] if name != "distance" or posterior.has_distances)

    def predict(inputs: Tensor) -> dict[str, Tensor]:
        found = posterior.predict(inputs)
        return {name: getattr(found, name) for name in ("probs", "label", *names)}

    return _Loaded(predict, classes, names, threshold)
