"""Whether a `.pt2` file is tensors and a graph, and nothing else.

PyTorch's reader does more than read: it unpickles constants and old kinds of weights, evaluates the expressions of sizes,
and compiles guards and names as Python. So what a file may hold is listed here, and all else is refused before it is read.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import torch

from mola.errors import StorageError

__all__ = ["without_code"]

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
