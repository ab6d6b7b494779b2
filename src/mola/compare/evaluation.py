"""A comparison of one run as plain JSON values: `numbers.json` of `mola evaluate` and of the demo."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mola.compare.record import Comparison


def short(name: str, names: tuple[str, ...]) -> str:
    """Return the last part of a set's path, if no other set shares it."""
    last = name.rstrip("/").split("/")[-1]
    return last if last and sum(other.rstrip("/").split("/")[-1] == last for other in names) == 1 else name


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Return sets, results of each method as in the records of suites, leads and decisions; empty entries are left out."""
    document = asdict(comparison)
    records = {one["method"]: one for one in document["records"]}
    kept = ("sets", "leads", "differences", "decisions", "notes", "left_out", "made")
    plain: dict[str, Any] = _filled(
        {
            "format": "mola-evaluation",
            "version": 1,
            "methods": {
                name: {entry: one[entry] for entry in ("chosen", "labelled", "outliers")}
                for name, one in records.items()
            },
            **{entry: document[entry] for entry in kept},
        }
    )
    return plain


def _filled(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _filled(one) for name, one in value.items() if one is not None and one not in ({}, [], (), "")}
