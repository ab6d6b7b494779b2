"""Reading the results of suites from a store."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from molaplace.errors import StorageError
from molaplace.evaluation import Role, SetInfo
from molaplace.options import one_of
from molaplace_lab.examples import Pictures
from molaplace_lab.records import COST, SUITE, Record, Store
from molaplace_lab.report.runs import Numbers

MAIN = "main"
"""Name of the group that contains the methods compared by a suite; all other groups are ablations."""

METHOD_ORDER = (
    *("MAP", "MAP-T", "DE", "DE-T", "DE-L", "JUCAL", "DE-SVS", "DE-SMS", "MC dropout", "MC dropout-T"),
    *("SWAG", "MultiSWAG", "MIMO"),
    *("LLLA", "LLLA (distance)", "LLLA (calibrated)", "MIMO-MoLA"),
    *("MoLA", "MoLA (NLL)", "MoLA (distance)", "MoLA (calibrated)", "MoLA (all layers)", "MoLA (subnetwork)"),
)
"""Known methods in table order. Tables list unknown methods last, sorted by name."""

SCORE_ORDER = (
    "max probability",
    "entropy",
    "GEN",
    "mutual information",
    "ood score",
    "distance",
    "energy",
    "maximum logit",
    "ViM",
    "Mahalanobis",
    "relative Mahalanobis",
    "Mahalanobis++",
    "nearest neighbours",
)


@dataclass(frozen=True, kw_only=True)
class SuiteResults:
    """Results of a suite: a comparison of methods over several runs, together with ablations."""

    name: str
    title: str
    sets: dict[str, SetInfo]
    """Data sets by name: first the test set, then the shifted sets in order of level, then the outlier sets."""
    pictures: dict[str, Pictures]
    """The first few images of each set that contains images, by set name."""
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    network: str
    components: int
    threshold: float | None
    shift_title: str
    axis: str
    groups: dict[str, dict[str, tuple[Record, ...]]]
    """Records by group and method, sorted by run. The group `MAIN` contains the compared methods."""
    cost: dict[str, Any]
    """Content of `cost.json`: "rows" (in the order of the methods), "settings" and "environment"."""
    overlap: float
    """In a cross-fit, whose runs share data, the ratio of test examples to examples used for fitting and tuning; 0 if every run has
    its own networks."""

    def numbers(self, group: str = MAIN) -> Numbers:
        """Return the numbers of the methods in a group."""
        return Numbers(self.groups.get(group, {}), self.overlap)

    @property
    def runs(self) -> dict[str, tuple[Record, ...]]:
        """Records of the compared methods, keyed by method."""
        return self.groups.get(MAIN, {})

    def of_role(self, role: Role) -> list[SetInfo]:
        """Return the sets that have the given role."""
        return [info for info in self.sets.values() if info.role == role]

    @property
    def test(self) -> SetInfo:
        """The test set."""
        return self.of_role("test")[0]

    @property
    def run_count(self) -> int:
        """Number of runs of the compared methods."""
        return len({record.run for records in self.runs.values() for record in records})


def known_scores(suite: SuiteResults) -> list[str]:
    """Return the outlier scores in the records: first the known scores in table order, then all others in alphabetical order."""
    results = [result for records in suite.runs.values() for record in records for result in record.outliers.values()]
    scores = {score for result in results for score in result.scores}
    return [score for score in SCORE_ORDER if score in scores] + sorted(scores - set(SCORE_ORDER))


def read_suites(results: str | Path, names: Sequence[str] = ()) -> list[SuiteResults]:
    """Read the suites with the given names or, by default, all suites that have results."""
    store = Store(results)
    known = store.suites()
    chosen = list(dict.fromkeys(one_of(name, known, "suite") for name in names)) or known
    return [_read_suite(store, name) for name in chosen]


def _read_suite(store: Store, name: str) -> SuiteResults:
    document = store.read_document(name, SUITE) or {}
    cost = store.read_document(name, COST) or {"rows": [], "settings": {}, "environment": {}}
    records = sorted(store.records(name), key=lambda record: (record.group, *_rank(record.method), record.run))
    if not records:
        raise StorageError(
            f"{store.directory / name} contains no records. Run `python -m molaplace_lab bench {name}` first."
        )
    groups: dict[str, dict[str, tuple[Record, ...]]] = {}
    for record in records:
        methods = groups.setdefault(record.group, {})
        methods[record.method] = (*methods.get(record.method, ()), record)
    sets = _sets(document, records)
    shift = document["shift"] or {"title": "shifted data", "axis": "level"}
    return SuiteResults(
        name=name,
        **{key: document[key] for key in ("title", "network", "components", "threshold")},
        shift_title=shift["title"],
        axis=shift["axis"],
        sets=sets,
        pictures={
            pictured: _pictures(images, sets[pictured].role)
            for pictured, images in document["examples"].items()
            if pictured in sets
        },
        classes=tuple(document["classes"]),
        notes=tuple(document["notes"]),
        groups=groups,
        cost={**cost, "rows": sorted(cost["rows"], key=lambda row: _rank(row["method"]))},
        overlap=_overlap(document),
    )


def _overlap(document: dict[str, Any]) -> float:
    if not document.get("experiment", {}).get("options", {}).get("cross_fit"):
        return 0.0
    count = {name: info["count"] for name, info in document["sets"].items()}
    return float(count["test"] / (count["train"] + count["validation"]))


def _rank(method: str) -> tuple[int, list[str]]:
    # Numbers within names are compared as numbers, so that K=2 comes before K=10.
    parts = [f"{int(part):09d}" if part.isdigit() else part for part in re.split(r"(\d+)", method)]
    return (METHOD_ORDER.index(method) if method in METHOD_ORDER else len(METHOD_ORDER), parts)


def _sets(document: dict[str, Any], records: list[Record]) -> dict[str, SetInfo]:
    titles = {name: described["title"] for name, described in document["sets"].items()}
    sets: dict[str, SetInfo] = {}
    for record in records:
        for name, result in record.labelled.items():
            role: Role = "test" if name == "test" else "shift"
            sets.setdefault(name, SetInfo(name, titles.get(name, name), role, result.count, result.level))
        for name, outliers in record.outliers.items():
            sets.setdefault(name, SetInfo(name, titles.get(name, name), "outlier", outliers.count))
    order = [name for name in titles if name in sets] + [name for name in sets if name not in titles]
    roles = ("test", "shift", "outlier")
    return {
        name: sets[name] for name in sorted(order, key=lambda name: (roles.index(sets[name].role), sets[name].level))
    }


def _pictures(images: dict[str, Any], role: Role) -> Pictures:
    pixels = np.frombuffer(base64.b64decode(images["pixels"]), dtype=np.uint8)
    labels = images.get("label")
    return Pictures(
        pixels.reshape(images["shape"]).transpose(0, 2, 3, 1), tuple(labels) if labels and role != "outlier" else None
    )
