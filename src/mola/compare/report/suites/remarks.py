"""What tuning remarked, with the methods that it is about."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mola.compare.record import Record
from mola.compare.report.suites.agreement import listed
from mola.compare.report.suites.reading import SuiteResults

__all__ = ["every_remark", "main_remarks"]

ROUTINE = "went on to"
"""In remarks that a search left its first grid: it found what it sought, so they are small print."""


def every_remark(records: Iterable[Record]) -> list[str]:
    """Each remark once, with its methods."""
    about: dict[str, list[str]] = {}
    for record in records:
        for note in _notes(record):
            methods = about.setdefault(note, [])
            if record.method not in methods:
                methods.append(record.method)
    return [f"{listed(methods)}: {note}" for note, methods in about.items()]


def main_remarks(suite: SuiteResults) -> list[str]:
    """What a reader must know of the methods compared; remarks that differ in numbers alone are told once."""
    told = []
    for method, records in suite.main.items():
        same: dict[str, list[str]] = {}
        for record in records:
            kinds = {re.sub(r"\d[\d.]*(?:e[+-]?\d+)?", "#", note): note for note in _notes(record)}
            for kind, note in kinds.items():
                same.setdefault(kind, []).append(note)
        for notes in same.values():
            if ROUTINE not in notes[0]:
                told.append(f"{method}{_where(notes, len(records))}: {notes[0]}")
    return told


def _where(notes: Sequence[str], runs: int) -> str:
    count = "" if runs == 1 else f", in {len(notes)} of {runs} runs"
    return count + (" (numbers of the first)" if len(set(notes)) > 1 else "")


def _notes(record: Record) -> list[str]:
    notes = record.chosen.get("notes", [])
    return [str(note) for note in ([notes] if isinstance(notes, str) else notes)]
