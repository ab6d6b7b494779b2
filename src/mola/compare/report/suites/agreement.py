"""Whether records can be compared: the same data, the same networks, the same runs."""

from __future__ import annotations

from collections.abc import Sequence

from mola.compare.record import Record

__all__ = ["disagreements", "listed"]

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
    return [*_foreign(suite, records), *_data(records), *_networks(records), *_runs(records), *_sets(records)]


def _foreign(suite: str, records: Sequence[Record]) -> list[str]:
    strangers = sorted({record.method for record in records if record.suite != suite})
    return [f"Records of another suite lie in this folder: {', '.join(strangers)}."] if strangers else []


def _data(records: Sequence[Record]) -> list[str]:
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


def _networks(records: Sequence[Record]) -> list[str]:
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


def _runs(records: Sequence[Record]) -> list[str]:
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


def _sets(records: Sequence[Record]) -> list[str]:
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
