"""Read suites from a store and check them; records that cannot be read or compared are reported."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mola.compare.record import Comparison, Pictures, Record, Role, SetInfo
from mola.compare.store import COST, SUITE, Store, read_record
from mola.errors import StorageError
from mola.options import one_of
from mola.saving.schema import Optional, check

MAIN = "main"
"""The group of the methods that a suite compares; other groups are ablations."""

METHODS = {
    "MAP": "the first network unchanged",
    "MAP-T": "MAP with a temperature, tuned on the validation data",
    "DE": "the deep ensemble: the mean of all networks' probabilities",
    "DE-T": "DE with a temperature, tuned on the validation data",
    "DE-L": "the mean of all networks' logits, with a temperature",
    "SWAG": "a Gaussian fitted to the last steps of training",
    "MultiSWAG": "a mixture of SWAGs",
    "MIMO": "one network that makes several predictions at once",
    "LLLA": "the first network with a Laplace approximation of its last layer",
    "LLLA (distance)": "MoLA (distance) of the first network alone",
    "LLLA (calibrated)": "MoLA (calibrated) of the first network alone",
    "MIMO-MoLA": "MIMO, each of its outputs with a Laplace approximation",
    "MoLA": "all networks, each with a Laplace approximation of its last layer, tuned by the paper's rule",
    "MoLA (NLL)": "MoLA, tuned by validation log loss",
    "MoLA (distance)": "MoLA, its logits divided by the distance of the features from the training classes",
    "MoLA (calibrated)": "MoLA by the default rule: temperature, pooling, prior precision and distance tuned for calibration",
    "MoLA (all layers)": "all networks, each with a linearised Laplace approximation of all its weights (K-FAC)",
    "MoLA (subnetwork)": "all networks, each with a Laplace approximation of its 1000 weights of largest variance",
}
"""Known methods in the order of tables; others follow by name."""

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

SUITE_SCHEMA: dict[str, Any] = {
    "title": str,
    "network": str,
    "components": int,
    "threshold": Optional(float),
    "shift": Optional({"name": str, "title": str, "axis": str}),
    "sets": {str: {"title": str, "role": str}},
    "examples": {str: {"shape": [int], "pixels": str}},
    "classes": [str],
    "notes": [str],
}

COST_SCHEMA: dict[str, Any] = {
    "rows": [{"method": str, "fit_seconds": Optional(float), "predict_seconds": float, "bytes": int}],
    "settings": {},
    "environment": {},
}

AGAIN = "Run the suite again: records are kept."


@dataclass(frozen=True, kw_only=True)
class SuiteResults(Comparison):
    """A suite: the comparison of its methods over several runs, and its ablations."""

    name: str
    network: str
    components: int
    threshold: float | None
    shift_title: str
    axis: str
    groups: dict[str, dict[str, tuple[Record, ...]]]
    """By group and method, in order; records by run. The methods compared are the group `MAIN`."""
    cost: dict[str, Any]
    """Content of `cost.json`: "rows" by method in order, "settings" and "environment"."""
    warnings: tuple[str, ...]

    @property
    def runs(self) -> dict[str, tuple[Record, ...]]:
        """All records of the methods compared, by method."""
        return self.groups.get(MAIN, {})

    @property
    def run_count(self) -> int:
        """Number of runs of the methods compared."""
        return len({record.run for records in self.runs.values() for record in records})


def known_scores(suite: SuiteResults) -> list[str]:
    """Return the outlier scores of the records: the known ones in order, then others."""
    results = [result for records in suite.runs.values() for record in records for result in record.outliers.values()]
    found = {score for result in results for score in result.scores}
    return [score for score in SCORE_ORDER if score in found] + sorted(found - set(SCORE_ORDER))


def read_suites(results: str | Path, names: Sequence[str] = ()) -> list[SuiteResults]:
    """Read suites, each once; without names, all that have results."""
    store = Store(results)
    known = store.suites()
    chosen = list(dict.fromkeys(one_of(name, known, "suite") for name in names)) or known
    return [_read_suite(store, name) for name in chosen]


def _read_suite(store: Store, name: str) -> SuiteResults:
    place = store.directory / name
    document = store.read_document(name, SUITE) or {}
    _check(document, SUITE_SCHEMA, place / SUITE)
    found, unread = _readable_records(store, name)
    overlap = _overlap(document, place / SUITE)
    ordered = sorted(found, key=lambda record: (*_rank(record.method), record.run))
    records = [replace(record, overlap=overlap) for record in ordered]
    cost = store.read_document(name, COST) or {"rows": [], "settings": {}, "environment": {}}
    _check(cost, COST_SCHEMA, place / COST)
    sets, groups = _sets(document, records), _grouped(records)
    shift = document["shift"] or {"title": "shifted data", "axis": "level"}
    return SuiteResults(
        name=name,
        **{key: document[key] for key in ("title", "network", "components", "threshold")},
        shift_title=shift["title"],
        axis=shift["axis"],
        sets=sets,
        pictures={
            one: _pictures(given, f"{place / SUITE}: the images of {one!r}", labelled=sets[one].role != "outlier")
            for one, given in document["examples"].items()
            if one in sets
        },
        classes=tuple(document["classes"]),
        notes=tuple(document["notes"]),
        groups=groups,
        records=tuple(record for runs in groups.get(MAIN, {}).values() for record in runs),
        cost={**cost, "rows": sorted(cost["rows"], key=lambda row: _rank(row["method"]))},
        warnings=(*unread, *disagreements(name, records)),
    )


def _check(document: dict[str, Any], schema: dict[str, Any], path: Path) -> None:
    try:
        check(document, schema, "")
    except StorageError as error:
        raise StorageError(f"{path}: {error} {AGAIN}") from error


def _sets(document: dict[str, Any], records: list[Record]) -> dict[str, SetInfo]:
    roles: tuple[Role, ...] = ("test", "shift", "outlier")
    found: dict[str, SetInfo] = {}
    for record in records:
        for name, labelled in record.labelled.items():
            found.setdefault(name, SetInfo(name, name, roles[name != "test"], labelled.count, labelled.level))
        for name, outliers in record.outliers.items():
            found.setdefault(name, SetInfo(name, name, "outlier", outliers.count))
    known = document["sets"]
    order = [name for name in known if name in found] + [name for name in found if name not in known]
    titled = [replace(found[name], title=known[name]["title"]) if name in known else found[name] for name in order]
    return {one.name: one for one in sorted(titled, key=lambda one: (roles.index(one.role), one.level))}


def _overlap(document: dict[str, Any], path: Path) -> float:
    # See `Record.overlap`.
    experiment = document.get("experiment")
    options = experiment.get("options") if isinstance(experiment, dict) else None
    if not (isinstance(options, dict) and options.get("cross_fit")):
        return 0.0
    tested, *others = (document["sets"].get(role, {}).get("count") for role in ("test", "train", "validation"))
    if not all(isinstance(count, int) and count > 0 for count in (tested, *others)):
        raise StorageError(f"{path}: expected the sizes of test, train and validation of a cross-fit. {AGAIN}")
    return float(tested / sum(others))


def _rank(method: str) -> tuple[int, list[str]]:
    # Numbers in names are compared as numbers: K=2 comes before K=10.
    parts = [f"{int(part):09d}" if part.isdigit() else part for part in re.split(r"(\d+)", method)]
    return (list(METHODS).index(method) if method in METHODS else len(METHODS), parts)


def _grouped(records: Iterable[Record]) -> dict[str, dict[str, tuple[Record, ...]]]:
    groups: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        groups.setdefault(record.group, {}).setdefault(record.method, []).append(record)
    return {
        group: {method: tuple(found) for method, found in methods.items()} for group, methods in sorted(groups.items())
    }


def _pictures(given: dict[str, Any], place: str, *, labelled: bool) -> Pictures:
    shape = given["shape"]
    try:
        content = base64.b64decode(given["pixels"], validate=True)
    except binascii.Error as error:
        raise StorageError(f"{place} are not base64 ({error}). {AGAIN}") from error
    if len(shape) != 4 or shape[1] not in (1, 3) or math.prod(shape) != len(content):
        raise StorageError(
            f"{place}: expected pixels of a shape (n, 1 or 3, height, width), got {shape} and {len(content)} bytes. {AGAIN}"
        )
    labels = given.get("label") if labelled else None
    pixels = np.frombuffer(content, dtype=np.uint8).reshape(shape).transpose(0, 2, 3, 1)
    return Pictures(pixels, tuple(labels) if isinstance(labels, list) and len(labels) >= shape[0] else None)


def _readable_records(store: Store, suite: str) -> tuple[list[Record], list[str]]:
    place = store.directory / suite
    records: list[Record] = []
    warnings: list[str] = []
    for path in store.paths(suite):
        try:
            records.append(read_record(path))
        except StorageError as error:
            warnings.append(f"Left out, so that its method lacks a run: {error}")
    if not records and warnings:
        raise StorageError(f"{place}: none of {len(warnings)} records can be read. {warnings[0]}")
    if not records:
        raise StorageError(f"{place} holds no records yet: run `mola bench {suite}` first.")
    return records, warnings


# --- records that can be compared ------------------------------------------------------------------------------------

OWN_WEIGHTS = ("SWAG", "MIMO")
"""Parts of the names of methods that train their own weights."""


def disagreements(suite: str, records: Sequence[Record]) -> list[str]:
    """Return warnings about records of a suite that cannot be compared with the others."""
    strangers = sorted({record.method for record in records if record.suite != suite})
    words = [f"This folder contains records of another suite: {', '.join(strangers)}."] if strangers else []
    for run in sorted({record.run for record in records}):
        words += _different_data(run, [record for record in records if record.run == run])
    for group in sorted({record.group for record in records}):
        words += _different_work([record for record in records if record.group == group])
    return words


def _different_data(run: int, records: Sequence[Record]) -> list[str]:
    words = []
    for name in dict.fromkeys(name for record in records for name in record.data):
        by_checksum: dict[str, list[str]] = {}
        for record in records:
            if name in record.data:
                by_checksum.setdefault(record.data[name], []).append(record.method)
        if len(by_checksum) > 1:
            odd = min(by_checksum.values(), key=len)
            words.append(
                f"Run {run}: the set {name!r} of {listed(odd)} has another checksum. Their numbers cannot be compared: run the "
                f"suite again for all methods."
            )
    return words


def _different_work(records: Sequence[Record]) -> list[str]:
    # Records of one group that differ in networks, runs or sets.
    words = []
    every = sorted({record.run for record in records})
    for run in every:
        own = [one for one in records if one.run == run and not any(word in one.method for word in OWN_WEIGHTS)]
        reference = max(own, key=lambda record: len(record.networks), default=None)
        odd = [one.method for one in own if reference and not set(one.networks) <= set(reference.networks)]
        if reference and odd:
            words.append(
                f"Run {run}: {listed(odd)} used networks that {reference.method} did not (checksums differ). Differences are not "
                f"due to the methods alone."
            )
    fewer: dict[int, list[str]] = {}
    for method in dict.fromkeys(record.method for record in records):
        fewer.setdefault(len({record.run for record in records if record.method == method}), []).append(method)
    words += [
        f"{listed(methods)}: {count} of {len(every)} runs, so that means are over fewer runs."
        for count, methods in fewer.items()
        if count < len(every)
    ]
    all_sets = {name for record in records for name in (*record.labelled, *record.outliers)}
    lacking: dict[str, dict[str, None]] = {}  # methods, each once, by the sets that they lack
    for record in records:
        if absent := all_sets - record.labelled.keys() - record.outliers.keys():
            lacking.setdefault(", ".join(sorted(absent)), {})[record.method] = None
    return words + [f"{listed(list(methods))}: not evaluated on {what}." for what, methods in lacking.items()]


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return the first few names, and the number of others."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
