"""Read an exported file back, and run it.

PyTorch's reader of `.pt2` files does more than read: it unpickles constants and old kinds of weights, evaluates the expressions of
sizes, and compiles guards and names as Python. So such a file is read only if the user trusts its author.
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

from mola.errors import DataError, OptionError, StorageError, importing
from mola.export.graph import Signature
from mola.network import Inputs
from mola.saving.schema import Optional, check, parse

FORMAT_VERSION = 1
PREFIX = "mola."
"""Begins the names of a file's properties."""

PROPERTIES = "mola.json"
"""Name of the entry with the properties in the archive of a `.pt2` file."""

THRESHOLDS = ("ood_threshold", "answer_threshold", "set_threshold")
"""Thresholds of decisions. They are not part of the graph, so they can be changed later."""

SCHEMA: dict[str, Any] = {
    "format_version": int,
    "signature": {"kind": str, "names": [str]},
    "outputs": [str],
    "classes": [str],
    "networks": [str],
    **{name: Optional(float) for name in THRESHOLDS},
}

Run: TypeAlias = "Callable[[Sequence[Tensor]], Mapping[str, Tensor]]"
"""A file: from input tensors to outputs by name."""

DECISIONS = (
    ("outlying", "ood_threshold", "ood_score"),
    ("answer", "answer_threshold", "confidence"),
    ("set", "set_threshold", "probs"),
)
"""Each decision with its threshold and the output that is compared with it."""


class LoadedExport:
    """An exported file, ready to run: call it with a batch, as the posterior. Made by `mola.export.load`.

    Args:
        run: from tensors to outputs by name.
        document: what the file records about itself.

    Attributes:
        classes: names of the classes.
        outputs: names of the outputs.
    """

    def __init__(self, run: Run, document: dict[str, Any]) -> None:
        self._run = run
        self.document: dict[str, Any] = document
        self.classes: list[str] = document["classes"]
        self.outputs: list[str] = document["outputs"]
        self.signature: Signature = Signature(document["signature"]["kind"], tuple(document["signature"]["names"]))

    def __call__(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the outputs of a batch by name, in main memory, in the shapes of the fields of a prediction.

        Args:
            inputs: a tensor, tuple or mapping like the example of the export, also of NumPy arrays.
        """
        tensors = self.signature.tensors(inputs)
        try:
            return dict(self._run(tensors))
        except Exception as error:
            shapes = {name: tuple(one.shape) for name, one in zip(self.signature.names, tensors, strict=True)}
            kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
            raise DataError(
                f"the exported file does not accept inputs of shapes {shapes} and types {kinds}: {reason(error)}"
            ) from error

    def decide(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decide by the thresholds of the file; change `document` to use others.

        Args:
            outputs: outputs of a call: "ood_score", "confidence" and "probs", as far as thresholds exist for them.

        Returns:
            Booleans by name, for each threshold that the file has: "outlying" (n,), "answer" (n,), which is false for outliers, and
            "set" (n, C).
        """
        found: dict[str, Tensor] = {}
        for name, threshold, output in DECISIONS:
            limit = self.document[threshold]
            if limit is None:
                continue
            if output not in outputs:
                raise DataError(
                    f"the file has {threshold}, which needs the output {output!r}: export the file with it."
                )
            values = outputs[output].double()
            found[name] = values >= limit if name == "set" else values > limit
        if "answer" in found and "outlying" in found:
            found["answer"] &= ~found["outlying"]
        return found


def load(path: str | Path, *, trust: bool = False) -> LoadedExport:
    """Read a file of `mola.export.onnx` (with onnxruntime) or `mola.export.torch_export`, recognised by its content.

    Args:
        path: file to read.
        trust: whether you trust the author of the file. Only a `.pt2` file needs it: PyTorch's reader can run code from it.
    """
    path = Path(path)
    if not path.is_file():
        raise StorageError(
            f"{path}: there is no such file. Pass a file of mola.export.onnx or mola.export.torch_export."
        )
    content = path.read_bytes()
    if content[:2] == b"PK":  # a zip archive, as torch writes them
        if not trust:
            raise OptionError(
                f"{path} is a program of torch.export, and PyTorch's reader can run code from such a file. If you trust its author, "
                f"read it with mola.export.load(path, trust=True). An ONNX file needs no trust."
            )
        run, properties = read_program(content, path)
    else:
        run, properties = read_onnx(content, path)
    return LoadedExport(run, document_of(properties, path))


def document_of(properties: Mapping[str, str], path: object) -> dict[str, Any]:
    """Return the description in the properties of a file; `StorageError` if it was not written by this mola."""
    document = {
        name.removeprefix(PREFIX): parse(value, f"{path}: property {name}")
        for name, value in properties.items()
        if name.startswith(PREFIX)
    }
    if "format_version" not in document:
        raise StorageError(f"{path} was not exported by mola: it has no property {PREFIX}format_version.")
    if document["format_version"] != FORMAT_VERSION:
        raise StorageError(
            f"{path} has format version {document['format_version']!r}, and this mola reads {FORMAT_VERSION}. Update mola, or run "
            f"the file without it."
        )
    check(document, SCHEMA, "")
    return document


def require(package: str) -> Any:
    """Import a package of the extra `export`."""
    with importing("ONNX export", package, "export"):
        return importlib.import_module(package)


def read_onnx(content: bytes, path: object) -> tuple[Run, dict[str, str]]:
    """Return the graph, in onnxruntime on the CPU, and the properties of an ONNX file."""
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise StorageError(f"{path} is not an ONNX file that this onnxruntime can run: {reason(error)}.") from error
    inputs, outputs = ([one.name for one in found] for found in (session.get_inputs(), session.get_outputs()))

    def run(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        arrays = [np.ascontiguousarray(tensor.detach().cpu().numpy()) for tensor in tensors]
        found = session.run(outputs, dict(zip(inputs, arrays, strict=True)))
        return {name: torch.from_numpy(value) for name, value in zip(outputs, found, strict=True)}

    return run, session.get_modelmeta().custom_metadata_map


def read_program(content: bytes, path: object) -> tuple[Run, dict[str, str]]:
    """Return the program and the properties of a `.pt2` file that is trusted: reading it can run code."""
    extra = {PROPERTIES: ""}
    try:
        with quietly():
            module = torch.export.load(io.BytesIO(content), extra_files=extra).module()
        properties = json.loads(extra[PROPERTIES] or "{}")
    except Exception as error:  # the reader raises a dozen kinds on damaged files
        raise StorageError(
            f"{path} is not a program of torch.export that this torch reads: {reason(error)}."
        ) from error

    def run(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: value.cpu() for name, value in module(*tensors).items()}

    return run, properties


def reason(error: BaseException) -> str:
    """Return the first line of the original error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the warnings and notes of torch's exporters, which are not for users of this library."""
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
