"""A suite's stored records, read and checked: what cannot be read is left out and named, and so is what cannot be compared."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mola.compare.record import CONFIDENCE_BINS, Comparison, Pictures, Record, Role, SetInfo
from mola.compare.store import Store
from mola.errors import StorageError
from mola.options import one_of
from mola.saving.schema import Optional, check

MAIN = "main"

ORDER = (
    "MAP",
    "MAP-T",
    "DE",
    "DE-T",
    "SWAG",
    "MultiSWAG",
    "MIMO",
    "LLLA",
    "LLLA (distance)",
    "MIMO-MoLA",
    "MoLA",
    "MoLA (NLL)",
    "MoLA (distance)",
    "MoLA (all layers)",
    "MoLA (subnetwork)",
)
"""Methods that are known; any other follows them, by name."""

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


@dataclass(frozen=True)
class CostRow:
    """What a method costs."""

    method: str
    fit_seconds: float | None
    predict_seconds: float
    bytes: int


@dataclass(frozen=True, kw_only=True)
class SuiteResults(Comparison):
    """Everything that is known of a suite: the comparison of its methods, over several runs, and what was varied."""

    name: str
    network: str
    components: int
    threshold: float | None
    shift_title: str
    axis: str
    groups: dict[str, dict[str, tuple[Record, ...]]]
    """By group and method, in order; records by run. The methods compared are the group `MAIN`."""
    cost: tuple[CostRow, ...]
    cost_document: dict[str, Any]
    warnings: tuple[str, ...]
    fingerprint: str
    """Checksum of all the suite's files."""

    @property
    def runs(self) -> dict[str, tuple[Record, ...]]:
        """All records of the methods compared, by method."""
        return self.groups.get(MAIN, {})

    @property
    def run_count(self) -> int:
        """Number of runs of the methods compared."""
        return len({record.run for records in self.runs.values() for record in records})


def read_suites(results: str | Path, names: Sequence[str] = ()) -> list[SuiteResults]:
    """Read suites before anything is written, so that what is wrong with them is told at once.

    Args:
        results: folder of the store.
        names: of suites; none means all that have results.

    Returns:
        The suites, each once, in the order asked for.
    """
    store = Store(results)
    known = store.suites()
    chosen = list(dict.fromkeys(one_of(name, known, "suite") for name in names)) or known
    return [read_suite(store, name) for name in chosen]


def read_suite(store: Store, name: str) -> SuiteResults:
    """Read a suite; `StorageError` names a document that is broken, or says that no record can be read.

    Args:
        store: the folder of results.
        name: of the suite.

    Returns:
        What is known of it.
    """
    one_of(name, store.suites(), "suite")
    place = store.directory / name
    document = store.read_document(name, "suite.json") or {}
    _check(document, SUITE_SCHEMA, f"{place / 'suite.json'}")
    found, unread = _readable_records(store, name)
    overlap = _overlap(document)
    records = [replace(record, overlap=overlap) for record in found]
    cost = store.read_document(name, "cost.json")
    if cost is not None:
        _check(cost, COST_SCHEMA, f"{place / 'cost.json'}")
    sets, groups = _sets(document, records), _grouped(records)
    shift = document["shift"] or {"title": "shifted data", "axis": "level"}
    cost_rows = [CostRow(*(row[key] for key in COST_SCHEMA["rows"][0])) for row in (cost or {"rows": []})["rows"]]
    return SuiteResults(
        name=name,
        title=document["title"],
        network=document["network"],
        components=document["components"],
        threshold=document["threshold"],
        shift_title=shift["title"],
        axis=shift["axis"],
        sets=sets,
        pictures={
            one: _pictures(
                given, f"{place / 'suite.json'}: the images of {one!r}", labelled=sets[one].role != "outlier"
            )
            for one, given in document["examples"].items()
            if one in sets
        },
        classes=tuple(document["classes"]),
        notes=tuple(document["notes"]),
        groups=groups,
        records=tuple(record for runs in groups.get(MAIN, {}).values() for record in runs),
        cost=tuple(sorted(cost_rows, key=lambda row: _rank(row.method))),
        cost_document={key: (cost or {}).get(key, {}) for key in ("settings", "environment")},
        warnings=(*unread, *disagreements(name, records)),
        fingerprint=_fingerprint(place),
    )


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


def known_scores(suite: SuiteResults) -> list[str]:
    """The scores that records hold: the known ones in their order, others after them."""
    found = {
        score
        for records in suite.runs.values()
        for record in records
        for result in record.outliers.values()
        for score in result.scores
    }
    return [score for score in SCORE_ORDER if score in found] + sorted(found - set(SCORE_ORDER))


def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.json")):
        digest.update(f"{path.relative_to(folder)} ".encode() + path.read_bytes())
    return digest.hexdigest()


def _check(document: dict[str, Any], schema: dict[str, Any], place: str) -> None:
    try:
        check(document, schema, "")
    except StorageError as error:
        raise StorageError(f"{place}: {error} Run the suite again: records are kept.") from error


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


def _overlap(document: dict[str, Any]) -> float:
    # Of the runs of a cross-fit, test data for each of the others, see `Record.overlap`; 0 where runs have networks of
    # their own.
    experiment = document.get("experiment")
    options = experiment.get("options") if isinstance(experiment, dict) else None
    if not (isinstance(options, dict) and options.get("cross_fit")):
        return 0.0
    tested, *others = (document["sets"].get(role, {}).get("count") for role in ("test", "train", "validation"))
    if not all(isinstance(count, int) and count > 0 for count in (tested, *others)):
        raise StorageError(
            "expected how many data test, train and validation have, of a cross-fit. Run the suite again: records are kept."
        )
    return float(tested / sum(others))


def _rank(method: str) -> tuple[int, list[str | int]]:
    # Numbers in names are compared as numbers: K=2 comes before K=10.
    parts = [f"{int(part):09d}" if part.isdigit() else part for part in re.split(r"(\d+)", method)]
    return (ORDER.index(method) if method in ORDER else len(ORDER), list(parts))


def _grouped(records: Iterable[Record]) -> dict[str, dict[str, tuple[Record, ...]]]:
    groups: dict[str, dict[str, list[Record]]] = {}
    for record in sorted(records, key=lambda record: (*_rank(record.method), record.run)):
        groups.setdefault(record.group, {}).setdefault(record.method, []).append(record)
    return {
        group: {method: tuple(found) for method, found in methods.items()} for group, methods in sorted(groups.items())
    }


def _pictures(given: dict[str, Any], place: str, *, labelled: bool) -> Pictures:
    shape = given["shape"]
    try:
        content = base64.b64decode(given["pixels"], validate=True)
    except binascii.Error as error:
        raise StorageError(f"{place} are not base64 ({error}). Run the suite again: records are kept.") from error
    if len(shape) != 4 or shape[1] not in (1, 3) or math.prod(shape) != len(content):
        raise StorageError(
            f"{place}: expected {shape} to be (n, 1 or 3, height, width) and to match the pixels, got {len(content)} bytes."
        )
    labels = given.get("label") if labelled else None
    pixels = np.frombuffer(content, dtype=np.uint8).reshape(shape).transpose(0, 2, 3, 1)
    return Pictures(pixels, tuple(labels) if isinstance(labels, list) and len(labels) >= shape[0] else None)


# --- records that can be read ----------------------------------------------------------------------------------------


def _readable_records(store: Store, suite: str) -> tuple[list[Record], list[str]]:
    place = store.directory / suite
    records: list[Record] = []
    warnings: list[str] = []
    for path in sorted(place.glob("*/run-*.json")):
        try:
            records.append(_read_record(store, suite, path))
        except StorageError as error:
            warnings.append(f"Left out, so its method lacks a run here: {error}")
    if not records and warnings:
        raise StorageError(f"{place}: none of {len(warnings)} records can be read. {warnings[0]}")
    if not records:
        raise StorageError(f"{place} holds no records yet: run `mola bench {suite}` first.")
    return records, warnings


def _read_record(store: Store, suite: str, path: Path) -> Record:
    document = store.read_document(suite, str(path.relative_to(store.directory / suite)))
    try:
        record = Record.from_json(document or {})
    except StorageError as error:
        raise StorageError(f"{path}: {error} Delete it and run the suite again: the rest is kept.") from error
    histograms = [result.histogram for result in record.labelled.values()]
    histograms += [result.histogram for result in record.outliers.values()]
    if any(len(histogram) not in (0, CONFIDENCE_BINS) for histogram in histograms):
        raise StorageError(f"{path}: expected histograms of {CONFIDENCE_BINS} bins. Delete it and run the suite again.")
    if any(len(row) != 3 for result in record.labelled.values() for row in result.reliability):
        raise StorageError(
            f"{path}: expected three numbers for each bin of reliability. Delete it and run the suite again."
        )
    return record


# --- records that can be compared ------------------------------------------------------------------------------------

OWN_WEIGHTS = ("SWAG", "MIMO")
"""Methods with these words in their names bring weights of their own."""


def disagreements(suite: str, records: Sequence[Record]) -> list[str]:
    """What a reader must know before comparing the records.

    Args:
        suite: where the records were found.
        records: all of them.

    Returns:
        Sentences; none if all is well.
    """
    return [
        *_other_suites(suite, records),
        *_same_data(records),
        *_same_networks(records),
        *_same_runs(records),
        *_same_sets(records),
    ]


def _other_suites(suite: str, records: Sequence[Record]) -> list[str]:
    strangers = sorted({record.method for record in records if record.suite != suite})
    return [f"Records of another suite lie in this folder: {', '.join(strangers)}."] if strangers else []


def _same_data(records: Sequence[Record]) -> list[str]:
    words = []
    for run in sorted({record.run for record in records}):
        seen: dict[str, dict[str, list[str]]] = {}
        for record in records:
            if record.run == run:
                for name, checksum in record.data.items():
                    seen.setdefault(name, {}).setdefault(checksum, []).append(record.method)
        for name, by_checksum in seen.items():
            if len(by_checksum) > 1:
                odd = sorted(by_checksum.values(), key=len)[0]
                words.append(
                    f"Run {run}: {listed(odd)} saw other data than the rest in the set {name!r} (checksums differ). "
                    f"Their numbers cannot be compared: run the suite again for all methods."
                )
    return words


def _same_networks(records: Sequence[Record]) -> list[str]:
    words = []
    for group, run in sorted({(record.group, record.run) for record in records}):
        same = [
            record
            for record in records
            if (record.group, record.run) == (group, run) and not any(word in record.method for word in OWN_WEIGHTS)
        ]
        if not same:
            continue
        reference = max(same, key=lambda record: len(record.networks))
        odd = [record.method for record in same if not set(record.networks) <= set(reference.networks)]
        if odd:
            words.append(
                f"Run {run}: {listed(odd)} used networks that {reference.method} did not (checksums differ). "
                f"Differences between them are not due to the methods alone."
            )
    return words


def _same_runs(records: Sequence[Record]) -> list[str]:
    words = []
    for group in sorted({record.group for record in records}):
        runs: dict[str, set[int]] = {}
        for record in records:
            if record.group == group:
                runs.setdefault(record.method, set()).add(record.run)
        every = set().union(*runs.values())
        for method, done in runs.items():
            if done != every:
                words.append(
                    f"{method} has {len(done)} of {len(every)} runs: its means are over other runs than the rest's."
                )
    return words


def _same_sets(records: Sequence[Record]) -> list[str]:
    words = []
    for group in sorted({record.group for record in records}):
        sets = {
            (record.method, record.run): {*record.labelled, *record.outliers}
            for record in records
            if record.group == group
        }
        every = set().union(*sets.values())
        lacking: dict[str, list[str]] = {}
        for (method, run), found in sets.items():
            if found != every:
                lacking.setdefault(", ".join(sorted(every - found)), []).append(f"{method} (run {run})")
        words += [f"{listed(who)}: not evaluated on {what}." for what, who in lacking.items()]
    return words


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first few names, and how many more."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
