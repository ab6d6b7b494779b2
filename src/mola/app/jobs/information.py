"""`mola info`: what a posterior's folder holds, without building networks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mola.app.jobs.folder import read_folder
from mola.app.jobs.job import NAME
from mola.app.jobs.networks import checksum
from mola.errors import StorageError
from mola.saving import storage

__all__ = ["read_information"]


def read_information(folder: Path) -> dict[str, Any]:
    """What a folder holds and how it was made, its files checked.

    Args:
        folder: of `mola fit` or `posterior.save`.

    Returns:
        Plain values. `StorageError` if the folder is none, or is damaged.

    Raises:
        StorageError: if the folder holds something else than a posterior.
    """
    document, tensors = storage.read(folder)
    kind = document.get("kind", "posterior")
    if kind != "posterior":
        message = f"{folder} holds a saved {kind}, not a posterior. {storage.how_to_load(kind)}"
        raise StorageError(message)
    tuning = document.get("tuning")
    found: dict[str, Any] = {
        "folder": str(folder),
        "components": len(document["components"]),
        "structure": document["structure"]["name"],
        "link": document["link"]["name"],
        "weights": document["weights"],
        "weighting": document["weighting"],
        "prior_precision": [part["prior_precision"] for part in document["components"]],
        "rule": None if tuning is None else tuning["rule"],
        "notes": [] if tuning is None else tuning["notes"],
        "outputs": document["classes"],
        "features": [part["features"] for part in document["components"]],
        "heads": [part["head"] for part in document["components"]],
        "network_numbers": [part["network"]["numbers"] for part in document["components"]],
        "train_count": document["components"][0]["count"],
        "bytes": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        "tensors": len(tensors),
        "sha256": document["tensors"]["sha256"],
    }
    if "job" not in document and not (folder / NAME).is_file():
        return {**found, "job": None}
    job, whole = read_folder(folder)
    result = whole["result"]
    return {
        **found,
        "classes": result["classes"],
        "networks": list(job.network),
        "weight_files": [
            {"path": os.path.normpath(folder / name), "state": _state(folder / name, expected)}
            for name, expected in zip(result["files"], result["sha256"], strict=False)
        ],
        "inputs": result["inputs"],
        "intake": result["intake"],
        "train": job.train,
        "val": job.val,
        "validation": result.get("validation"),
        "left_out": result.get("left_out", 0),
        "versions": result.get("versions", {}),
        "job": str(folder / NAME),
    }


def _state(path: Path, expected: str) -> str:
    if not path.is_file():
        return "missing"
    return "as fitted" if checksum(path) == expected else "changed"
