"""Whether a `.pt2` file is tensors and a graph, and nothing else.

PyTorch's reader does more than read: it unpickles constants and old kinds of weights, evaluates the expressions of sizes,
and compiles guards and names as Python. So what a file may hold is listed here, and all else is refused before it is read.

A fitted posterior as a file of torch.export: all of PyTorch's operations, without the networks' Python code.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola.errors import StorageError
from mola.export.graph import OUTPUTS
from mola.export.information import as_properties
from mola.export.tracing import Settings, Written, check_agreement, check_path, quietly, reason, trace, write_file
from mola.network import Inputs
from mola.posterior import MoLA

__all__ = ["export_torch", "read_program", "without_code"]

PART = re.compile(
    r"[^/]+/(archive_format|archive_version|byteorder|\.data/\w+|extra/[^/]+|models/\w+\.json|data/sample_inputs/\w+\.pt|"
    r"data/(weights|constants)/\w+_config\.json|data/weights/weight_\d+|data/constants/tensor_\d+)"
)
TENSOR = re.compile(r"(weight|tensor)_\d+")
SIZE = (
    r"Symbol|Integer|Rational|Mul|Add|Pow|Max|Min|Mod|FloorDiv|CleanDiv|positive|nonnegative|integer|True|False|"
    r"'[a-z]+\d+'|[suz]\d+|\d+|[(),=*+/<> -]"
)
TEXTS = {
    "expr_str": re.compile(f"(?:{SIZE})*"),
    "guards_code": re.compile(r"(?:L\['\w+'\]|\[\d+\]|\.size\(\)|and|or|not|\d+|[()<>=!*+/% -])*"),
    "name": re.compile(r"[\w.]*"),
    "forward_arg_names": re.compile(r"\w+"),
    "target": re.compile(r"torch\.ops\.\w+\.\w+(\.\w+)?|torch\.sym_\w+|_operator\.\w+|math\.\w+"),
}
"""Texts of a graph that PyTorch evaluates, compiles or looks up, by their keys."""


def without_code(content: bytes, path: object) -> bytes:
    """The same archive, packed anew from the parts that were looked at; refused if one of them could run code of its own.

    An archive can be made so that two readers find different parts in it, at the same names: only what is packed here is what
    PyTorch will find.

    Args:
        content: all of a `.pt2` file.
        path: where it came from, for the message.

    Returns:
        An archive to be read instead.

    Raises:
        StorageError: if it holds more than tensors and a graph, or claims to be larger than it is.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = archive.namelist()
        if sum(one.file_size for one in archive.infolist()) > len(content):
            message = f"{path} claims to hold more than its {len(content):,} bytes, which torch.export does not write: it is damaged."
            raise StorageError(message)
        # Of two parts with one name, PyTorch might read the one that was not looked at.
        found = [name for name in names if not PART.fullmatch(name) or names.count(name) > 1]
        for name in names:
            if name.endswith("_config.json"):
                found += _other_than_tensors(json.loads(archive.read(name)))
            elif "/models/" in name:
                found += [f"{key} {text!r}" for key, text in _texts(json.loads(archive.read(name)))]
            elif "/data/sample_inputs/" in name and not _is_tensors(archive.read(name)):
                found.append(name)
        if not found:
            with zipfile.ZipFile(packed, "w") as target:
                for name in names:
                    target.writestr(name, archive.read(name))
    if found:
        message = (
            f"{path} holds more than tensors and a graph ({found[0][:80]}), which can run code when it is read. Export it "
            f"again, from plain tensors."
        )
        raise StorageError(message)
    return packed.getvalue()


def _other_than_tensors(config: dict[str, Any]) -> list[str]:
    return [
        name
        for name, entry in config["config"].items()
        if entry["use_pickle"] is not False or not TENSOR.fullmatch(entry["path_name"])
    ]


def _is_tensors(sample: bytes) -> bool:
    """Whether example inputs are none, or can be read without running code."""
    try:
        return not sample or torch.load(io.BytesIO(sample), weights_only=True) is not None
    except Exception:
        return False


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Texts in a graph that are not of their form, with their keys."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _texts(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part, key)
    elif isinstance(value, str) and key in TEXTS and not TEXTS[key].fullmatch(value):
        yield key, value


PROPERTIES = "mola.json"
"""Name of the file inside the file that holds its properties."""


def export_torch(
    posterior: MoLA,
    path: str | Path,
    example: Inputs,
    *,
    classes: Sequence[str] | None = None,
    outputs: Sequence[str] = OUTPUTS,
    float16: bool = False,
    preparation: nn.Module | None = None,
    metadata: Mapping[str, Any] | None = None,
    ood_threshold: float | None = None,
    check: bool = True,
) -> Written:
    """Write a posterior as one `.pt2` file, for `torch.export.load` or `mola.load_exported`; see `mola.export_onnx`.

    Args:
        posterior: made by `mola.fit`, `mola.ensemble` or `mola.load`; it and its networks are not changed.
        path: of the file; what was there before stays until all is written.
        example: one batch of inputs: a tensor, a tuple or a mapping.
        classes: names, in the order of the networks' outputs.
        outputs: which of `mola.export.OUTPUTS`.
        float16: networks in half precision. Inputs and outputs stay in float32, and so does the Bayesian head.
        preparation: a module that the input goes through first, such as `mola.export.Pixels`.
        metadata: of your own: strings, or JSON.
        ood_threshold: score above which you call an input an outlier.
        check: run the file against the posterior before it is written.

    Returns:
        Path, size, inputs, outputs and the largest differences; `ExportError` if a network cannot be traced or the file
        disagrees, `DataError` and `OptionError` for arguments, `StorageError` for the path.
    """
    path = check_path(path)
    settings = Settings(classes, outputs, float16, preparation, metadata, ood_threshold)
    properties = as_properties({}, metadata)
    traced = trace(posterior, example, settings)
    properties |= as_properties(traced.document, None)
    buffer = io.BytesIO()
    with quietly():
        torch.export.save(traced.program, buffer, extra_files={PROPERTIES: json.dumps(properties)})
    content = buffer.getvalue()
    differences = None
    if check:
        module = read_program(content, path)[0].module()
        differences = check_agreement(traced, example, lambda tensors: run_program(module, tensors), "torch.export")
    return write_file(path, content, traced, differences)


def run_program(module: nn.Module, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs by name."""
    with torch.no_grad():
        outputs: dict[str, Tensor] = module(*tensors)
    return {name: value.cpu() for name, value in outputs.items()}


def read_program(content: bytes, path: object) -> tuple[torch.export.ExportedProgram, dict[str, str]]:
    """A program and its properties, from the bytes of a `.pt2` file that holds tensors and a graph, and no code.

    Args:
        content: all of the file.
        path: where it came from, for the message.

    Returns:
        The program, and strings by name (none for a program of somebody else).

    Raises:
        StorageError: if the file is no such program, or loading it would run code of its own.
    """
    try:
        content = without_code(content, path)
        extra = {PROPERTIES: ""}
        with quietly():
            program = torch.export.load(io.BytesIO(content), extra_files=extra)
        properties = json.loads(extra[PROPERTIES] or "{}")
    except StorageError:
        raise
    except Exception as error:
        message = f"{path} is not a program of torch.export that this torch reads: {reason(error)}."
        raise StorageError(message) from error
    return program, properties
