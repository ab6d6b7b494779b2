"""Records: the settings, checksums and results of one method in one run. Reports are written from records alone.

Suites store records as JSON (`mola-bench`, version 1). Per-class results, and standard errors over the data points of a set, exist
only in single-run comparisons. Suites compute standard errors over runs instead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from molaplace.errors import StorageError
from molaplace.evaluation import CONFIDENCE_BINS, Examples, LabelledResult, OutlierResult
from molaplace.saving.schema import check

FORMAT = "mola-bench"
VERSION = 1


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
    overlap: float = 0.0
    """In a cross-fit, whose runs share data, the ratio of test examples to examples used for fitting and tuning; 0 if every run has
    its own networks. Files omit this entry because it follows from the settings in the suite's document."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values for a suite's file, without the entries that only single-run comparisons have."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for name in ("labelled", "outliers"):
            document[name] = {
                one: {key: value for key, value in result.items() if key in ENTRIES[name] and (key != "types" or value)}
                for one, result in document[name].items()
            }
        del document["overlap"]
        if not self.measures:
            del document["measures"]
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Record:
        """Create a record from JSON values returned by `to_json`."""
        check(document, SCHEMA, "")
        for name, known in ENTRIES.items():
            if unknown := sorted({entry for one in document[name].values() for entry in one} - known):
                raise StorageError(f"the record is damaged: {name!r} has unknown entries {unknown[:3]}.")
        results = [*document["labelled"].values(), *document["outliers"].values()]
        if any(len(one["histogram"]) not in (0, CONFIDENCE_BINS) for one in results):
            raise StorageError(f"the record is damaged: expected histograms with {CONFIDENCE_BINS} bins.")
        for name, one in document["labelled"].items():
            check(one.get("types", {}), NUMBERS, f"labelled.{name}.types")
            if any(len(row) != 3 for row in one["reliability"]):
                raise StorageError("the record is damaged: expected three numbers for each reliability bin.")
        check(document.get("measures", {}), NUMBERS, "measures")
        made = {"labelled": LabelledResult, "outliers": OutlierResult, "examples": Examples}
        plain = {one.name: document[one.name] for one in fields(cls) if one.name in SCHEMA}
        plain |= {kind: {name: make(**one) for name, one in document[kind].items()} for kind, make in made.items()}
        return cls(**plain, measures=document.get("measures", {}))


NUMBERS: dict[Any, Any] = {str: {str: float}}

SCHEMA: dict[str, Any] = {
    "suite": str,
    "method": str,
    "group": str,
    "run": int,
    "settings": {},
    "networks": [str],
    "data": {str: str},
    "chosen": {},
    "seconds": {str: float},
    "labelled": {
        str: {
            "level": float,
            "count": int,
            "metrics": {str: float},
            "reliability": [[float]],
            "histogram": [int],
        }
    },
    "outliers": {str: {"count": int, "confidence": float, "scores": {str: {str: float}}, "histogram": [int]}},
    "examples": {str: {"confidence": [float], "label": [int]}},
    "environment": {},
}


ENTRIES: dict[str, set[str]] = {name: set(SCHEMA[name][str]) for name in ("labelled", "outliers", "examples")}
ENTRIES["labelled"].add("types")
"""Names of the entries that each type of result may have in a suite's record."""
