"""Write measurements as JSON, together with the software versions and the type of machine, but without paths."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment(*packages: str) -> dict[str, Any]:
    """Return the versions of Python and the packages, the type of machine, and its current load."""
    versions = {}
    for package in ("torch", "numpy", *packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "python": platform.python_version(),
        "packages": versions,
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def exists(name: str) -> bool:
    """Return True if the record exists."""
    return (RESULTS / f"{name}.json").exists()


def read(name: str) -> dict[str, Any]:
    """Return the last measurement."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def write(name: str, document: dict[str, Any]) -> None:
    """Write results/NAME.json atomically, with each row of a table on its own line."""
    RESULTS.mkdir(exist_ok=True)
    unfinished = RESULTS / f"{name}.json.partial"
    entries = [f"{json.dumps(key)}: {_value(value)}" for key, value in document.items()]
    unfinished.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")
    unfinished.replace(RESULTS / f"{name}.json")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n]"
    return json.dumps(value)
