"""Storage of results in a folder, with one atomically written JSON file per suite, method and run.

results/<suite>/suite.json            description and example images of the suite
results/<suite>/<method>/run-0.json   one record
results/<suite>/cost.json             time and memory of one run
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from molaplace.errors import StorageError
from molaplace.saving.schema import SEAL
from molaplace_lab.files import read_json, write_json
from molaplace_lab.record import FORMAT, VERSION, Record

COST, SUITE = "cost.json", "suite.json"

AGAIN = "Delete it and run the suite again. The other records are kept."


class Store:
    """A folder that contains the results of all suites."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def suites(self) -> list[str]:
        """Return the names of the suites that have results."""
        names = sorted(path.parent.name for path in self.directory.glob(f"*/{SUITE}"))
        if not names:
            raise StorageError(
                f"{self.directory} contains no results. Create results: python -m molaplace_lab bench <suite> --results {self.directory}"
            )
        return names

    def path(self, suite: str, method: str, run: int) -> Path:
        """Return the path of a record."""
        return self.directory / suite / _slug(method) / f"run-{run}.json"

    def write(self, record: Record) -> Path:
        """Write a record, replacing any existing record of the same suite, method and run."""
        path = self.path(record.suite, record.method, record.run)
        write_json(path, record.to_json())
        return path

    def read(self, suite: str, method: str, run: int) -> Record | None:
        """Return a record, or None if it does not exist."""
        path = self.path(suite, method, run)
        return read_record(path) if path.exists() else None

    def paths(self, suite: str) -> list[Path]:
        """Return the paths of all records in a suite."""
        return sorted((self.directory / suite).glob("*/run-*.json"))

    def records(self, suite: str) -> list[Record]:
        """Return all records of a suite, sorted by path."""
        return [read_record(path) for path in self.paths(suite)]

    def forget(self, suite: str) -> None:
        """Remove the records and documents of a suite, but keep all other files."""
        for path in (*self.paths(suite), *(self.directory / suite / name for name in (SUITE, COST))):
            path.unlink(missing_ok=True)

    def write_document(self, suite: str, name: str, document: dict[str, Any]) -> Path:
        """Write `suite.json` or `cost.json`."""
        path = self.directory / suite / name
        write_json(path, {"format": FORMAT, "version": VERSION, **document})
        return path

    def read_document(self, suite: str, name: str) -> dict[str, Any] | None:
        """Return the content of `suite.json` or `cost.json`, or None if the file does not exist."""
        path = self.directory / suite / name
        return _read(path) if path.exists() else None


def _slug(method: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", method.lower().replace("=", "")).strip("-")


def read_record(path: Path) -> Record:
    """Read a record from a file, or raise a `StorageError` that names the file."""
    return Record.from_json(_read(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except StorageError as error:
        raise StorageError(f"{error} {AGAIN}") from error
    if document.get("format") != FORMAT or SEAL not in document:
        raise StorageError(f"{path} is not a benchmark result: expected format {FORMAT!r} and a checksum.")
    if document.get("version") != VERSION:
        raise StorageError(
            f"{path} has version {document.get('version')!r}; this release of molaplace reads version {VERSION}. "
            f"Write new results to another folder, or delete this file and run the suite again."
        )
    return document
