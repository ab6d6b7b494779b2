"""Predictions batch by batch for engines that divide data themselves: Ray Data, Spark, Dask, or a loop of one's own."""

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
from mola.app.jobs.folder import alarm, open_posterior
from mola.errors import DataError, OptionError, StorageError
from mola.posterior import MoLA
from mola.saving.files import DOCUMENT

Columns = dict[str, NDArray[Any]]

KINDS = {"i": "long", "f": "double", "b": "boolean", "O": "string"}
"""Spark's names of the types of columns, by NumPy's kinds."""


@dataclass(frozen=True)
class Loaded:
    """What a process has read of a source."""

    answer: Callable[[Tensor], dict[str, Tensor]]
    """From inputs to "probs" (n, C) and columns (n,)."""
    classes: tuple[str, ...] | None
    names: tuple[str, ...]
    """Of the columns."""
    threshold: float | None = None
    """Outlier score above which inputs are outlying."""


@dataclass(frozen=True)
class BatchPredictor:
    """A posterior as a function from batches to columns, to be mapped over partitions by any engine.

    It holds names only, so it is pickled in a few bytes; each process reads the posterior when it gets its first batch, and keeps
    it until the files change. Takes pandas frames, Arrow tables, mappings of NumPy arrays, and arrays of inputs, and
    gives the same kind (a mapping for arrays) with the columns of `mola predict`: "label", "class" where classes have names,
    "confidence", "entropy", "epistemic", "aleatoric", "ood_score", "distance" where it is known, and "outlying" where there is a
    threshold. Inputs go to the networks as they are: prepare them as the training data were.

    Args:
        source: what every process can read: a folder of `mola fit --bundle`, a folder of `mola.hub.save`, or a file of
            `mola.export.onnx` or `mola.export.torch_export`.
        inputs: the columns that hold the inputs: one whose cells are arrays, or several of numbers, in the order in which the
            networks take them. Not needed for batches that are arrays.
        keep: columns that are handed on, such as a key.
        shape: of one input; None takes the cells as they are, or a row of the columns.
        dtype: of the inputs.
        probabilities: whether to add a column "probabilities" with a list of one number a class.
        build: for a folder of a hub, what makes a network: see `mola.hub.load`. It is pickled by its name.
        trust: whether you trust whoever made the source: for files of `mola.export.torch_export`, and for a folder that names
            functions to call.
        batch_size: inputs that networks see at once, whatever the engine's batches are.
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
        if self.shape is not None:
            object.__setattr__(self, "shape", tuple(self.shape))
        if self.batch_size < 1:
            raise OptionError(f"batch_size must be at least 1, got {self.batch_size}.")
        if self.dtype not in TYPES:
            raise OptionError(f"dtype must be one of {', '.join(TYPES)}; got {self.dtype!r}.")

    def __call__(self, batch: Any) -> Any:
        """The predictions of a batch.

        Args:
            batch: a pandas frame, an Arrow table, a mapping of arrays, or an array of inputs (n, ...). It may be empty.

        Returns:
            The same kind with the columns of `keep` and those of the predictions; a mapping for an array. Frames keep their
            index.
        """
        if isinstance(batch, (np.ndarray, Tensor)):
            return self._columns(batch.detach().cpu().numpy() if isinstance(batch, Tensor) else batch)
        library = type(batch).__module__.partition(".")[0]
        if library == "pandas":
            return self._frame(batch)
        if library == "pyarrow":
            return self._arrow(batch)
        if isinstance(batch, Mapping):
            found = self._predicted(batch, batch, lambda name: np.asarray(batch[name]))
            return {name: batch[name] for name in self.keep} | found
        raise DataError(
            f"expected a pandas frame, an Arrow table, a mapping of arrays or an array; got {type(batch).__name__}."
        )

    def over(self, frames: Iterable[Any]) -> Iterator[Any]:
        """The predictions of batches one after the other: what Spark's `mapInPandas` takes."""
        return map(self, frames)

    def spark_schema(self, keep: Mapping[str, str] | None = None) -> str:
        """Spark's words for the columns.

        Args:
            keep: Spark's types of the columns of `keep`, by name.

        Returns:
            Such as "id long, label long, confidence double".
        """
        given = dict(keep or {})
        if set(given) != set(self.keep):
            raise OptionError(
                f"expected the types of {', '.join(self.keep) or 'no column'}, got {', '.join(given) or 'none'}."
            )
        found = self._empty()
        kinds = {name: "array<double>" if one.ndim > 1 else KINDS[one.dtype.kind] for name, one in found.items()}
        return ", ".join(f"{name} {kind}" for name, kind in ({name: given[name] for name in self.keep} | kinds).items())

    def _frame(self, batch: Any) -> Any:
        pandas: Any = sys.modules["pandas"]
        found = self._predicted(batch, batch.columns, lambda name: batch[name].to_numpy())
        # Texts and lists stay objects: pandas would give texts another type in an empty frame, and partitions must agree.
        cells = {
            name: pandas.Series(list(one), index=batch.index, dtype=object if one.ndim > 1 else one.dtype)
            for name, one in found.items()
        }
        made = pandas.DataFrame(cells, index=batch.index)
        return pandas.concat([batch[list(self.keep)], made], axis=1) if self.keep else made

    def _arrow(self, batch: Any) -> Any:
        arrow: Any = sys.modules["pyarrow"]
        found = self._predicted(batch, batch.schema.names, lambda name: batch[name].to_numpy(zero_copy_only=False))
        cells = {}
        for name, one in found.items():
            # Said, not guessed from the cells: an empty batch has none, and partitions must agree.
            kind = arrow.string() if one.dtype == object else arrow.from_numpy_dtype(one.dtype)
            cells[name] = arrow.array(one.tolist(), arrow.list_(kind)) if one.ndim > 1 else arrow.array(one, kind)
        made = arrow.RecordBatch if isinstance(batch, arrow.RecordBatch) else arrow.Table
        return made.from_pydict({name: batch[name] for name in self.keep} | cells)

    def _predicted(self, batch: Any, names: Iterable[str], read: Callable[[str], NDArray[Any]]) -> Columns:
        if not self.inputs:
            raise DataError("inputs: name the columns that hold the inputs, BatchPredictor(source, inputs=[...]).")
        known = list(names)
        missing = [name for name in (*self.inputs, *self.keep) if name not in known]
        if missing:
            raise DataError(f"the batch has no column {missing[0]!r}; it has {', '.join(map(repr, known)) or 'none'}.")
        columns = [read(name) for name in self.inputs]
        if not len(columns[0]):
            return self._without_clash(self._empty())
        listed = f"the column{'s' if len(columns) > 1 else ''} {', '.join(map(str, self.inputs))}"
        absent = next(
            (row for one in columns if one.dtype == object for row, cell in enumerate(one) if cell is None), None
        )
        if absent is not None:
            raise DataError(
                f"{listed}: row {absent} of the batch is None: leave such rows out before they are predicted."
            )
        try:
            if len(columns) == 1:
                cells = columns[0]
                rows = _stacked(cells)
                rows = rows[:, None] if rows.ndim == 1 else rows
            else:
                rows = np.stack(columns, axis=1)
            rows = rows.astype("float64") if rows.dtype == object else rows
        except (ValueError, TypeError) as error:
            raise DataError(f"{listed} cannot be made {self.dtype} inputs of one shape: {error}") from error
        return self._without_clash(self._columns(rows))

    def _without_clash(self, found: Columns) -> Columns:
        clash = [name for name in self.keep if name in found]
        if clash:
            raise OptionError(
                f"keep: {clash[0]!r} is also the name of a column of the predictions: rename yours before."
            )
        return found

    def _columns(self, rows: NDArray[Any]) -> Columns:
        if not len(rows):
            return self._empty()
        try:
            rows = rows if self.shape is None else rows.reshape(len(rows), *self.shape)
            with np.errstate(invalid="ignore", over="ignore"):
                # Copied: engines hand out arrays that may not be written to, which torch warns of.
                made = np.array(rows, dtype=self.dtype)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"inputs of shape {rows.shape} and type {rows.dtype} cannot be made {self.dtype} of shape {self.shape}: {error}"
            ) from error
        if made.dtype.kind in "iu" and not np.array_equal(made, rows):
            bad = int(np.nonzero((made != rows).reshape(len(rows), -1).any(1))[0][0])
            raise DataError(
                f"row {bad} of the batch has numbers that {self.dtype} cannot hold: {np.ravel(rows[bad])[:4].tolist()} ..."
            )
        inputs = torch.from_numpy(made)
        if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
            bad = int((~torch.isfinite(inputs.flatten(1)).all(1)).nonzero()[0])
            raise DataError(f"row {bad} of the batch is not finite: leave such rows out before they are predicted.")
        loaded = self._loaded()
        parts = [loaded.answer(part) for part in torch.split(inputs, self.batch_size)]
        found = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
        return self._named(found, loaded)

    def _named(self, found: Columns, loaded: Loaded) -> Columns:
        columns: Columns = {"label": found["label"].astype(np.int64)}
        if loaded.classes is not None:
            columns["class"] = np.array(loaded.classes, dtype=object)[columns["label"]]
        for name in loaded.names:
            columns[name] = found[name].astype(np.float64)
        if loaded.threshold is not None:
            columns["outlying"] = columns["ood_score"] > loaded.threshold
        if self.probabilities:
            columns["probabilities"] = found["probs"].astype(np.float64)
        return columns

    def _empty(self) -> Columns:
        loaded = self._loaded()
        none = {name: np.empty(0) for name in ("label", *loaded.names)}
        return self._named(none | {"probs": np.empty((0, len(loaded.classes or ())))}, loaded)

    def _loaded(self) -> Loaded:
        source = Path(str(self.source))
        names = (DOCUMENT, hub.CONFIG) if source.is_dir() else ("",)
        times = tuple((source / name).stat().st_mtime_ns for name in names if (source / name).exists())
        if not times:
            raise StorageError(
                f"{source} is neither a folder of mola fit or mola.hub.save nor an exported file, as seen from this "
                f"process: put it where all processes can read it."
            )
        # A function by its name: engines that send it along make it anew for every batch.
        name = (
            "" if self.build is None else f"{self.build.__module__}:{getattr(self.build, '__qualname__', self.build)}"
        )
        key = (str(self.source), name, self.trust)
        with LOADING:  # several threads of one process read once
            if key not in READ or READ[key][0] != times:
                READ[key] = (times, _load(source, self.build, self.trust))
            return READ[key][1]


def _stacked(cells: NDArray[Any]) -> NDArray[Any]:
    # Cells that are arrays, or arrays of arrays as Arrow and Spark have nested lists, as one array.
    if cells.dtype != object or not len(cells) or not isinstance(cells[0], (np.ndarray, list, tuple)):
        return cells
    return np.stack([_stacked(np.asarray(cell)) for cell in cells])


TYPES = ("float32", "float64", "float16", "int64", "int32", "uint8")

LOADING = Lock()

READ: dict[tuple[str, str, bool], tuple[tuple[int, ...], Loaded]] = {}
"""What this process has read: by source, function and trust, the times of its files and what they held."""


def _load(path: Path, build: Any, trust: bool) -> Loaded:
    if path.is_file():
        exported = export.load(path, trust=trust)
        lacking = [name for name in ("probs", "label") if name not in exported.outputs]
        if lacking:
            raise StorageError(f"{path} was exported without {' and '.join(lacking)}: export it with all outputs.")
        names = tuple(name for name in exported.outputs if name not in ("probs", "label"))
        threshold = exported.document.get("ood_threshold") if "ood_score" in names else None
        return Loaded(exported, tuple(exported.classes), names, threshold)
    if hub.is_hub_folder(path):
        posterior = hub.load(path, build)  # checks the folder's own document, too
        return _of_posterior(posterior, tuple(json.loads((path / hub.CONFIG).read_bytes())["classes"]))
    fitted = open_posterior(path, trust=trust)
    return _of_posterior(fitted.posterior, fitted.classes, alarm(fitted, None))


def _of_posterior(posterior: MoLA, classes: tuple[str, ...] | None, threshold: float | None = None) -> Loaded:
    names = (
        "confidence",
        "entropy",
        "epistemic",
        "aleatoric",
        "ood_score",
        *(("distance",) if posterior.has_distances else ()),
    )

    def answer(inputs: Tensor) -> dict[str, Tensor]:
        found = posterior.predict(inputs)
        return {"probs": found.probs, "label": found.label} | {name: getattr(found, name) for name in names}

    return Loaded(answer, classes, names, threshold)
