"""The document of `mola evaluate`: a comparison on a user's data as plain values, `numbers.json`, version 2."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mola.compare.record import Comparison, OutlierResult, Record


def short(name: str, names: tuple[str, ...]) -> str:
    """The last part of a set's path, if no other set shares it."""
    last = name.rstrip("/").split("/")[-1]
    return last if last and sum(other.rstrip("/").split("/")[-1] == last for other in names) == 1 else name


def evaluation_document(comparison: Comparison) -> dict[str, Any]:
    """A comparison of one run as plain values."""
    methods, test = comparison.methods, comparison.test.name
    chosen = {
        f"{words} of {name}": value[0] if isinstance(value, list) and (entry != "noise" or len(value) == 1) else value
        for entry, words in CHOSEN
        for name, one in methods.items()
        if (value := one.chosen.get(entry)) is not None
    }
    leads = {name: {key: asdict(one) for key, one in found.items()} for name, found in comparison.leads.items()}
    return {
        "format": "mola-evaluation",
        "version": 2,
        "test": test,
        "count": comparison.test.count,
        **(
            {}
            if comparison.test.inputs is None
            else {"inputs": comparison.test.inputs, "counted": comparison.test.parts}
        ),
        "methods": {name: _method(one, test) for name, one in methods.items()},
        "leads": leads[test],
        "outside_leads": {
            one.name: {key: leads[one.name][key] for key in ("confidence", "auroc", "fpr95") if key in leads[one.name]}
            for one in comparison.of_role("outlier")
        },
        **(
            {}
            if not comparison.differences
            else {"differences": comparison.differences, "differences_from": comparison.own}
        ),
        **({} if comparison.decisions is None else {"decisions": asdict(comparison.decisions)}),
        "components": comparison.made["components"],
        "chosen": chosen,
        "notes": comparison.notes,
        "left_out": comparison.left_out,
        "noted": comparison.noted,
        "made": {name: value for name, value in comparison.made.items() if name != "components"},
    }


CHOSEN = (("prior_precision", "prior precision"), ("temperature", "temperature"), ("noise", "noise"))
"""Tuned values of a method, and their names."""

LABELS = ("auroc", "average_precision", "miou")
"""Scores of multi-label data, averaged over labels, and of dense outputs, averaged over classes."""


def _method(record: Record, test: str) -> dict[str, Any]:
    found = record.labelled[test]
    if found.regression is not None:
        return {
            "scores": found.metrics,
            "errors": found.errors,
            **asdict(found.regression),
            "outside": {name: _outside(one) for name, one in record.outliers.items()},
        }
    return {
        "scores": {name: found.metrics[name] for name in (*found.errors, *LABELS) if name in found.metrics},
        "errors": found.errors,
        "reliability": found.reliability,
        "histogram": _shares(found.histogram, found.count),
        "classes": {
            name: {key: value for key, value in asdict(one).items() if value is not None}
            for name, one in found.classes.items()
        },
        "outside": {name: _outside(one) for name, one in record.outliers.items()},
    }


def _outside(result: OutlierResult) -> dict[str, Any]:
    sure = {"confidence": result.confidence, "confidence_error": result.confidence_error}
    return {
        "count": result.count,
        **(sure if result.confidence is not None else {"std": result.std, "std_error": result.std_error}),
        "scores": {
            name: {
                "auroc": result.scores[name]["auroc"],
                "auroc_error": result.errors[name]["auroc"],
                "fpr95": result.scores[name]["fpr95"],
                "fpr95_error": result.errors[name]["fpr95"],
                **asdict(histogram),
            }
            for name, histogram in result.score_histograms.items()
        },
        **({"histogram": _shares(result.histogram, result.count)} if result.histogram else {}),
    }


def _shares(histogram: list[int], count: int) -> list[float]:
    # 25 bins of confidence, each two bins of a record.
    return [sum(pair) / count for pair in zip(histogram[::2], histogram[1::2], strict=True)]
