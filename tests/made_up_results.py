"""A store of benchmark results made by formulas: what a report must show of it can be worked out by hand."""

from __future__ import annotations

import base64
import math
from itertools import product
from pathlib import Path

import numpy as np

from molaplace.evaluation import LabelledResult, OutlierResult
from molaplace.evaluation.comparison import CONFIDENCE_BINS
from molaplace_lab.examples import Examples
from molaplace_lab.records import Record, Store

QUALITY = {"MAP": 0, "MAP-T": 1, "DE": 2, "DE-T": 3, "LLLA": 4, "MoLA": 6, "MoLA (distance)": 5}
"""A method is better by a fixed step for each of these."""

OUTLIERS = {"fashion-mnist": "FMNIST", "emnist-letters": "EMNIST", "kmnist": "KMNIST"}
SCORES = ("max probability", "entropy", "mutual information", "ood score")
SPREAD = (-0.002, 0.0, 0.004)
"""Added to every number of a run: mean 2/3 of 0.001, known standard error."""


def labelled(level: float, step: float, quality: float, run: int) -> LabelledResult:
    """`step` counts levels."""
    nll = 0.10 + 0.2 * step - 0.01 * quality + SPREAD[run]
    accuracy = 0.99 - 0.05 * step
    confidence = accuracy + 0.02 - 0.003 * quality
    metrics = {
        "accuracy": accuracy,
        "log_likelihood": -nll,
        "nll": nll,
        "brier": nll / 2,
        "ece": 0.02 + 0.03 * step - 0.002 * quality,
        "ece100": 0.021,
        "ece_legacy": 0.05,
        "mce": 0.2,
        "mce_legacy": 0.3,
        "confidence": confidence,
        "aurc": 0.001,
    }
    centres = (np.arange(15) + 0.5) / 15
    counts = np.round(1000 * centres**2)
    reliability = [[float(n), float(n * c), float(round(n * c**1.2))] for n, c in zip(counts, centres, strict=True)]
    histogram = [int(20 * (index / 49) ** 4) for index in range(CONFIDENCE_BINS)]
    return LabelledResult(level, 8000, metrics, reliability, histogram)


def outliers(place: int, quality: float, run: int) -> OutlierResult:
    scores = {}
    for index, name in enumerate(SCORES):
        auroc = 0.90 + 0.01 * place + 0.005 * quality + 0.003 * index + SPREAD[run]
        scores[name] = {"auroc": auroc, "aupr_in": auroc - 0.01, "aupr_out": auroc - 0.02, "fpr95": 1 - auroc}
    histogram = [30 - abs(index - 25) for index in range(CONFIDENCE_BINS)]
    return OutlierResult(10000, 0.8 - 0.05 * quality + SPREAD[run], scores, histogram)


def record(suite: str, method: str, group: str, run: int, quality: float, levels: list[float], **settings) -> Record:
    sets = {"test": 0.0} | {f"shift {level:g}": level for level in levels[1:]}
    networks = [f"network-{run}-{index}" for index in range(settings.get("components", 1))]
    return Record(
        suite=suite,
        method=method,
        group=group,
        run=run,
        settings=settings,
        networks=networks,
        data={name: f"data-{name}" for name in (*sets, *OUTLIERS)},
        chosen={"prior_precision": [0.5 * (1 + run)], "notes": ["the grid was long"] if method == "MoLA" else []},
        seconds={"fit": 1.0, "predict": 0.5},
        labelled={name: labelled(level, levels.index(level), quality, run) for name, level in sets.items()},
        outliers={name: outliers(index, quality, run) for index, name in enumerate(OUTLIERS)},
        examples={
            name: Examples([0.99 - 0.1 * quality / 7] * 8, [index % 10 for index in range(8)])
            for name in ("test", f"shift {levels[-1]:g}", "kmnist")
        },
        environment={"molaplace": "1.0", "torch": "2.6", "threads": 1},
    )


def picture(label: bool) -> dict:
    pixels = (np.arange(8 * 28 * 28) % 256).astype(np.uint8)
    pictures = {"shape": [8, 1, 28, 28], "pixels": base64.b64encode(pixels.tobytes()).decode()}
    return pictures | ({"label": [0, 1, 2, 3, 4, 5, 6, 0]} if label else {})


def make_store(
    directory: Path, suite: str = "mnist", runs: int = 3, *, ablations: bool = True, cost: bool = True
) -> Store:
    store = Store(directory)
    levels = [0.0, 15.0, 30.0, 45.0] if suite != "cifar10" else [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    titles = {"test": "test"} | {f"shift {level:g}": f"shifted by {level:g}" for level in levels[1:]} | OUTLIERS
    store.write_document(
        suite,
        "suite.json",
        {
            "suite": suite,
            "title": suite.upper(),
            "network": "lenet",
            "components": 5,
            "runs": runs,
            "threshold": 0.98,
            "shift": {"name": "shift", "title": "Shifted data", "axis": "level", "levels": levels},
            "sets": {name: {"title": title, "role": "any", "count": 1} for name, title in titles.items()},
            "examples": {
                "test": picture(True),
                f"shift {levels[-1]:g}": picture(True),
                "kmnist": picture(False),
            },
            "classes": list("0123456789"),
            "notes": ["frost is synthetic & <so> labelled"],
        },
    )
    methods = [
        (method, "main", quality, {"components": 1 if method.startswith(("MAP", "LLLA")) else 5, "link": "probit"})
        for method, quality in QUALITY.items()
    ]
    if ablations:
        for structure, (index, link) in product(("diag", "kron", "full"), enumerate(("mc", "probit"))):
            settings = {"structure": structure, "link": link, "components": 1}
            methods.append((f"LLLA {structure} {link}", "variants", index, settings))
        for components, (family, quality) in product(range(1, 5), (("DE", 2), ("MoLA", 6))):
            better = quality + 3 * (1 - math.exp(1 - components))
            methods.append((f"{family} K={components}", "components", better, {"components": components}))
        for rule in ("threshold", "evidence"):
            methods.append((f"MoLA {rule}", "rules", len(rule) / 3, {"rule": rule, "components": 5}))
    for run, (method, group, quality, settings) in product(range(runs), methods):
        store.write(record(suite, method, group, run, quality, levels, **settings))
    if cost:
        rows = [
            {"method": "MAP", "fit_seconds": None, "predict_seconds": 2.0, "bytes": 1_000_000},
            {"method": "MoLA", "fit_seconds": 30.0, "predict_seconds": 8.0, "bytes": 6_000_000},
            {"method": "LLLA", "fit_seconds": 10.0, "predict_seconds": 2.1, "bytes": 1_500_000},
        ]
        store.write_document(
            suite, "cost.json", {"settings": {"batch": 128}, "rows": rows, "environment": {"torch": "2.6"}}
        )
    return store
