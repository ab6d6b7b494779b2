"""Load an exported file and run it.

PyTorch's `.pt2` reader can run code from the files that it reads. It unpickles constants and old weight formats, evaluates size
expressions, and compiles guards and names as Python code. A `.pt2` file is therefore read only with `trust=True`.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import DataError, OptionError, StorageError, importing
from molaplace.export.graph import Signature
from molaplace.likelihoods import LIKELIHOODS
from molaplace.network import Inputs
from molaplace.numerics import as_tensor
from molaplace.prediction import Prediction, RegressionPrediction
from molaplace.saving.files import read_file
from molaplace.saving.schema import Optional, check, parse

FORMAT_VERSION = 1
PREFIX = "molaplace."
"""Prefix of the property names in an exported file."""

PROPERTIES = "molaplace.json"
"""Name of the archive entry that holds the properties of a `.pt2` file."""

THRESHOLDS = ("ood_threshold", "answer_threshold", "set_threshold")
"""Thresholds for decisions. They are not part of the graph, so they can be changed after export."""

SCHEMA: dict[str, Any] = {
    "format_version": int,
    "signature": {"kind": str, "names": [str]},
    "outputs": [str],
    "classes": [str],
    "networks": [str],
    "likelihood": str,
    "ood_score": str,
    "fingerprint": str,
    "channels_first": bool,
    "weights": [float],
    **{name: Optional(float) for name in THRESHOLDS},
}

Run: TypeAlias = "Callable[[Sequence[Tensor]], Mapping[str, Tensor]]"
"""A function that runs an exported file, mapping input tensors to outputs keyed by name."""

DECISIONS = (
    ("outlying", "ood_threshold", "ood_score"),
    ("answer", "answer_threshold", "confidence"),
    ("set", "set_threshold", "probs"),
)
"""For each decision: its name, its threshold, and the output that is compared with the threshold."""


class LoadedExport:
    """An exported model that is ready to run, as returned by `mola.export.load`. Call it with a batch, as you would the posterior.

    Args:
        run: function that maps tensors to outputs keyed by name.
        document: description stored in the file.

    Attributes:
        classes: names of the classes.
        outputs: names of the outputs.
        fingerprint: fingerprint of the exported posterior, which predictions carry.
    """

    def __init__(self, run: Run, document: dict[str, Any]) -> None:
        self._run = run
        self.document: dict[str, Any] = document
        self.classes: list[str] = document["classes"]
        self.outputs: list[str] = document["outputs"]
        self.fingerprint: str = document["fingerprint"]
        self.signature: Signature = Signature(document["signature"]["kind"], tuple(document["signature"]["names"]))

    def __call__(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the outputs for a batch, keyed by name; they are on the CPU and shaped like the fields of a prediction.

        Args:
            inputs: a tensor, tuple or mapping with the same structure as the example used for the export; NumPy arrays are accepted.
        """
        tensors = self.signature.tensors(inputs)
        try:
            return dict(self._run(tensors))
        except DataError:
            raise
        except Exception as error:
            shapes = {name: tuple(values.shape) for name, values in zip(self.signature.names, tensors, strict=True)}
            kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
            raise DataError(
                f"the exported file does not accept inputs with shapes {shapes} and dtypes {kinds}: {reason(error)}"
            ) from error

    def predict_batch(self, inputs: Inputs) -> Prediction | RegressionPrediction:
        """Return the prediction for one batch, as the posterior's `predict` does, for thresholds and for `mola.watch`."""
        return self.prediction_of(self(inputs))

    def prediction_of(self, outputs: Mapping[str, Any]) -> Prediction | RegressionPrediction:
        """Return the prediction with the given outputs of this file, which may be tensors or arrays that a server computed.

        Args:
            outputs: outputs keyed by name, with at least "probs" and "ood_score" or, for regression, "ood_score", "component_mean",
                "component_variance" and "component_noise", which are exported only if they are listed.
        """
        likelihood = LIKELIHOODS[self.document["likelihood"]]()
        regression = not likelihood.classification
        needed = ["ood_score", *(name for name in RegressionPrediction.names if "component" in name)]
        missing = [name for name in (needed if regression else ["probs", "ood_score"]) if name not in outputs]
        if missing:
            raise DataError(
                f"must contain {', '.join(missing)} for a prediction. Export the posterior with outputs=[...] that include them.",
                argument="outputs",
            )
        fields: dict[str, Any] = {name: as_tensor(values) for name, values in outputs.items()}
        options = {
            "ood_score_name": self.document["ood_score"],
            "likelihood": likelihood,
            "axis": 1 if self.document["channels_first"] else -1,
            "fingerprint": self.fingerprint,
        }
        if regression:
            weights = torch.tensor(self.document["weights"], dtype=torch.float64, device="cpu")
            return RegressionPrediction(fields, weights=weights, **options)
        if "aleatoric" not in fields:
            # What was not exported is unknown.
            entropy = Prediction({"probs": fields["probs"]}, **options).entropy
            fields["aleatoric"] = entropy - fields.get("epistemic", torch.nan)
        return Prediction(fields, **options)

    def decide(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply the thresholds stored in `document`; to use other thresholds, edit them there first.

        Args:
            outputs: outputs of a call, including every output that has a threshold in the file: "ood_score", "confidence" or "probs".

        Returns:
            Boolean tensors, one for each threshold in the file: "outlying" and "answer" of shape (n,), and "set" of shape (n, C).
            "answer" is false for outliers. NaN is outlying, is not answered, and excludes no class.
        """
        decisions: dict[str, Tensor] = {}
        for name, threshold, output in DECISIONS:
            limit = self.document[threshold]
            if limit is None:
                continue
            if output not in outputs:
                raise DataError(
                    f"the file sets {threshold}, but the output {output!r} to which it applies is missing. Include this output "
                    f"when exporting the posterior."
                )
            values = outputs[output].double()
            decisions[name] = (
                values > limit if name == "answer" else ~(values < limit) if name == "set" else ~(values <= limit)
            )
        if "answer" in decisions and "outlying" in decisions:
            decisions["answer"] &= ~decisions["outlying"]
        return decisions


def load(path: str | Path, *, trust: bool = False) -> LoadedExport:
    """Load a file written by `mola.export.onnx` or `mola.export.torch_export`. ONNX files are run with onnxruntime.

    Args:
        path: file to read; the format is detected from the content.
        trust: whether you trust the author of the file. This matters only for `.pt2` files: PyTorch's reader can run code from such a
            file.
    """
    path = Path(path)
    content = read_file(path)
    if content[:2] == b"PK":  # a zip archive, the format that torch.export writes
        if not trust:
            raise OptionError(
                f"{path} is a torch.export file, and PyTorch's reader can run code from such a file. If you trust its "
                f"author, read it with mola.export.load(path, trust=True). ONNX files do not require trust."
            )
        run, properties = read_program(content, path)
    else:
        run, properties = read_onnx(content, path)
    return LoadedExport(run, document_of(properties, path))


def document_of(properties: Mapping[str, str], path: object) -> dict[str, Any]:
    """Return the description stored in a file's properties; raise `StorageError` if this version of molaplace cannot read it."""
    document = {
        name.removeprefix(PREFIX): parse(value, f"{path}: property {name}")
        for name, value in properties.items()
        if name.startswith(PREFIX)
    }
    if "format_version" not in document:
        raise StorageError(f"{path} was not exported by molaplace: it lacks the property {PREFIX}format_version.")
    if document["format_version"] != FORMAT_VERSION:
        raise StorageError(
            f"{path} has format version {document['format_version']!r}, but this version of molaplace reads only format version "
            f"{FORMAT_VERSION}. Update molaplace, or run the file without molaplace."
        )
    check(document, SCHEMA, "")
    return document


def require(package: str) -> Any:
    """Import a package that belongs to the `export` extra."""
    with importing("ONNX export", package, "export"):
        return importlib.import_module(package)


def read_onnx(content: bytes, path: object) -> tuple[Run, dict[str, str]]:
    """Return two values: a function that runs an ONNX file in onnxruntime on the CPU, and the file's properties."""
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise StorageError(
            f"{path} is not an ONNX file that this version of onnxruntime can run: {reason(error)}."
        ) from error
    inputs = [value.name for value in session.get_inputs()]
    outputs = [value.name for value in session.get_outputs()]

    def run(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        if any(len(tensor) == 0 for tensor in tensors):
            raise DataError("an ONNX file needs batches of at least one row, got an empty batch.")
        arrays = [np.ascontiguousarray(tensor.detach().cpu().numpy()) for tensor in tensors]
        results = session.run(outputs, dict(zip(inputs, arrays, strict=True)))
        return {name: torch.from_numpy(values) for name, values in zip(outputs, results, strict=True)}

    return run, session.get_modelmeta().custom_metadata_map


def read_program(content: bytes, path: object) -> tuple[Run, dict[str, str]]:
    """Return two values: a function that runs a trusted `.pt2` file, and the file's properties. Reading the file can run code."""
    extra = {PROPERTIES: ""}
    try:
        with quietly():
            module = torch.export.load(io.BytesIO(content), extra_files=extra).module()
        properties = json.loads(extra[PROPERTIES] or "{}")
    except Exception as error:  # the reader raises many kinds of errors for damaged files
        raise StorageError(
            f"{path} is not a torch.export file that this version of PyTorch can read: {reason(error)}."
        ) from error

    def run(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: value.cpu() for name, value in module(*tensors).items()}

    return run, properties


def reason(error: BaseException) -> str:
    """Return the type of an error's root cause and the first line of its message."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the warnings and log messages of PyTorch's exporters, which users of this library do not need."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
