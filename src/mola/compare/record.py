"""What a method did in one run of a suite: numbers only, the same in memory and in JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mola.errors import StorageError
from mola.schema import check

__all__ = ["CONFIDENCE_BINS", "FORMAT", "VERSION", "Examples", "LabelledResult", "OutlierResult", "Record"]

FORMAT = "mola-bench"
VERSION = 1

CONFIDENCE_BINS = 50
"""Equal-width bins of the confidence histograms, from 0 to 1."""


@dataclass(frozen=True)
class LabelledResult:
    """A method on labelled data: the test set, or a shifted one."""

    level: float
    """How far the data are shifted (degrees, severity); 0 for the test set."""
    count: int
    metrics: dict[str, float]
    """By name, as in `mola.lab.runner.METRICS`."""
    reliability: list[list[float]]
    """For each of 15 bins of confidence: count, sum of confidences, correct predictions. Empty in ablations."""
    histogram: list[int]
    """Number of predictions in each of `CONFIDENCE_BINS` bins of confidence. Empty in ablations."""


@dataclass(frozen=True)
class OutlierResult:
    """A method on data that belong to no class."""

    count: int
    confidence: float
    """Mean of the largest probability (MMC)."""
    scores: dict[str, dict[str, float]]
    """By outlier score, told apart from the test set: "auroc", "aupr_in", "aupr_out", "fpr95"."""
    histogram: list[int]


@dataclass(frozen=True)
class Examples:
    """A method on the suite's example images of one set, in their order."""

    confidence: list[float]
    label: list[int]
    """The class predicted."""


@dataclass(frozen=True)
class Record:
    """One method, one run."""

    suite: str
    method: str
    """The name shown in tables; unique within the suite."""
    group: str
    """"main", or the ablation it belongs to."""
    run: int
    settings: dict[str, Any]
    """What makes the method: structure, link, rule, weights, number of components."""
    networks: list[str]
    """Checksums of the networks used."""
    data: dict[str, str]
    """Checksum of every set used, by name."""
    chosen: dict[str, Any]
    """What was tuned: "prior_precision" (a list), "temperature", "weights", and "notes"."""
    seconds: dict[str, float]
    """Time to "fit" (tuning included) and to "predict", from stored activations."""
    labelled: dict[str, LabelledResult]
    """By set: "test" first."""
    outliers: dict[str, OutlierResult]
    examples: dict[str, Examples] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Record:
        """Read what `to_json` gave.

        Raises:
            StorageError: if the form is another.
        """
        check(document, SCHEMA, "")
        for name, kind in (("labelled", LabelledResult), ("outliers", OutlierResult), ("examples", Examples)):
            known = {one.name for one in fields(kind)}
            strange = sorted({entry for one in document[name].values() for entry in one} - known)
            if strange:
                message = f"the record is garbled: unknown entries {strange[:3]} under {name!r}."
                raise StorageError(message)
        return cls(
            **{name: document[name] for name in PLAIN},
            labelled={name: LabelledResult(**one) for name, one in document["labelled"].items()},
            outliers={name: OutlierResult(**one) for name, one in document["outliers"].items()},
            examples={name: Examples(**one) for name, one in document["examples"].items()},
        )


PLAIN = ("suite", "method", "group", "run", "settings", "networks", "data", "chosen", "seconds", "environment")

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
