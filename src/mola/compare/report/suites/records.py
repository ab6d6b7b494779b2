"""A suite's records, read one by one: what cannot be read is left out and named."""

from __future__ import annotations

from pathlib import Path

from mola.compare.record import CONFIDENCE_BINS, Record
from mola.compare.store import Store
from mola.errors import StorageError

__all__ = ["readable_records"]


def readable_records(store: Store, suite: str) -> tuple[list[Record], list[str]]:
    """The records that can be read, in the order of their files, and a warning for each of the others.

    Args:
        store: the folder of results.
        suite: its name.

    Returns:
        Records, and sentences that name the files left out.

    Raises:
        StorageError: if there are no records, or none that can be read.
    """
    place = store.directory / suite
    records: list[Record] = []
    warnings: list[str] = []
    for path in sorted(place.glob("*/run-*.json")):
        try:
            records.append(_read(store, suite, path))
        except StorageError as error:
            warnings.append(f"Left out, so its method lacks a run here: {error}")
    if not records and warnings:
        message = f"{place}: none of {len(warnings)} records can be read. {warnings[0]}"
        raise StorageError(message)
    if not records:
        message = f"{place} holds no records yet: run `mola bench {suite}` first."
        raise StorageError(message)
    return records, warnings


def _read(store: Store, suite: str, path: Path) -> Record:
    document = store.read_document(suite, str(path.relative_to(store.directory / suite)))
    try:
        record = Record.from_json(document or {})
    except StorageError as error:
        message = f"{path}: {error} Delete it and run the suite again: the rest is kept."
        raise StorageError(message) from error
    histograms = [result.histogram for result in record.labelled.values()]
    histograms += [result.histogram for result in record.outliers.values()]
    if any(len(histogram) not in (0, CONFIDENCE_BINS) for histogram in histograms):
        message = f"{path}: expected histograms of {CONFIDENCE_BINS} bins. Delete it and run the suite again."
        raise StorageError(message)
    if any(len(row) != 3 for result in record.labelled.values() for row in result.reliability):
        message = f"{path}: expected three numbers for each bin of reliability. Delete it and run the suite again."
        raise StorageError(message)
    return record
