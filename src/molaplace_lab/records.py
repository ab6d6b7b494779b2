"""Records: the settings, checksums and results of one method in one run. Reports are written from records alone.

A folder of results contains a JSON file (`mola-bench`, version 1) for each suite, method and run:

results/<suite>/suite.json            description and example images of the suite
results/<suite>/<method>/run-0.json   one record
results/<suite>/cost.json             time and memory of one run

Per-class results, and standard errors over the data points of a set, exist only in single-run comparisons. Suites compute standard
errors over runs instead.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from molaplace.errors import StorageError
from molaplace.evaluation import LabelledResult, OutlierResult
from molaplace_lab.examples import Examples
from molaplace_lab.files import read_document, write_document

FORMAT = "mola-bench"
VERSION = 1

SUITE = "suite.json"
COST = "cost.json"

LABELLED = ("level", "count", "metrics", "reliability", "histogram", "types")
OUTLIERS = ("count", "confidence", "scores", "histogram")
"""Entries of the results in a suite's file."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Settings and results of one method in one run."""

    suite: str
    method: str
    """Name shown in tables, unique within the suite."""
    group: str = "main"
    """Group of the method: "main", or the name of an ablation."""
    run: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the method: structure, link, rule, weights and number of components."""
    networks: list[str] = field(default_factory=list)
    """Checksums of the networks used."""
    data: dict[str, str] = field(default_factory=dict)
    """Checksums of the data sets used, by name."""
    chosen: dict[str, Any]
    """Tuned values: "prior_precision" (a list), "temperature", "distance_exponent", "weights", "rule" (a description) and "notes".
    The entry "ood_score" is the name of the posterior's outlier score."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time in seconds taken to "fit" (including tuning) and to "predict". In suites, both steps start from stored activations."""
    labelled: dict[str, LabelledResult]
    """Results on the labelled sets, by set name, starting with the test set."""
    outliers: dict[str, OutlierResult]
    examples: dict[str, Examples] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, dict[str, float]] = field(default_factory=dict)
    """Additional measures that the suite defines, keyed by name. Files omit this entry if it is empty."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values for a suite's file, without the entries that only single-run comparisons have."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for entry, names in (("labelled", LABELLED), ("outliers", OUTLIERS)):
            document[entry] = {
                name: {key: result[key] for key in names if key != "types" or result[key]}
                for name, result in document[entry].items()
            }
        if not self.measures:
            del document["measures"]
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Record:
        """Create a record from JSON values returned by `to_json`."""
        values = {field.name: document[field.name] for field in fields(cls) if field.name in document}
        results = {"labelled": LabelledResult, "outliers": OutlierResult, "examples": Examples}
        for entry, result in results.items():
            values[entry] = {name: result(**described) for name, described in document[entry].items()}
        return cls(**values)


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
        write_document(path, record.to_json())
        return path

    def read(self, suite: str, method: str, run: int) -> Record | None:
        """Return a record, or None if it does not exist."""
        path = self.path(suite, method, run)
        return Record.from_json(_read(path)) if path.exists() else None

    def paths(self, suite: str) -> list[Path]:
        """Return the paths of all records in a suite."""
        return sorted((self.directory / suite).glob("*/run-*.json"))

    def records(self, suite: str) -> list[Record]:
        """Return all records of a suite, sorted by path."""
        return [Record.from_json(_read(path)) for path in self.paths(suite)]

    def forget(self, suite: str) -> None:
        """Remove the records and documents of a suite, but keep all other files."""
        for path in (*self.paths(suite), *(self.directory / suite / name for name in (SUITE, COST))):
            path.unlink(missing_ok=True)

    def write_document(self, suite: str, name: str, document: dict[str, Any]) -> Path:
        """Write `suite.json` or `cost.json`."""
        path = self.directory / suite / name
        write_document(path, {"format": FORMAT, "version": VERSION, **document})
        return path

    def read_document(self, suite: str, name: str) -> dict[str, Any] | None:
        """Return the content of `suite.json` or `cost.json`, or None if the file does not exist."""
        path = self.directory / suite / name
        return _read(path) if path.exists() else None


def _slug(method: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", method.lower().replace("=", "")).strip("-")


def _read(path: Path) -> dict[str, Any]:
    return read_document(path, FORMAT, VERSION)
