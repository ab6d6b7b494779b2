"""Records: the settings, checksums and results of one method in one run. Reports are written from records alone.

Suites store records as JSON (`mola-bench`, version 1). Per-class results, and standard errors over the data points of a set, exist
only in single-run comparisons. Suites compute standard errors over runs instead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from molaplace.evaluation import Examples, LabelledResult, OutlierResult

FORMAT = "mola-bench"
VERSION = 1

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
        for entry, kept in (("labelled", LABELLED), ("outliers", OUTLIERS)):
            document[entry] = {
                name: {key: result[key] for key in kept if key != "types" or result[key]}
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
