"""Measure alarms on inputs in the wrong units: `python benchmarks/wrong_units.py --data DIR --cifar10 DIR`.

Test images of MNIST and CIFAR-10, after normalisation, are multiplied by constants. The alarm is calibrated on validation images for 5 %
false alarms. The AUROC of `ood_score` on the outliers of both suites is measured with several weights of the excess norms in its third
term. Activations are read from the cache of the laboratory's `bench` (`--cache`); missing ones are computed. Writes
`benchmarks/results/wrong_units.json`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

import record
import torch
from default_rule import GROUP
from suites import MNIST_NETWORKS, StoredSuite, open_suite
from torch import Tensor

import molaplace as mola
from molaplace.metrics import auroc
from molaplace.rules.held_out import HeldOut
from molaplace.settings import EXCESS_WEIGHT
from molaplace_lab.suite import DataOptions

FACTORS = (0.01, 0.1, 0.5, 2.0, 3.0, 10.0, 100.0, 1e4, 1e8)
IMAGES = 1000
"""Number of test images multiplied by the factors."""

WEIGHTS = (EXCESS_WEIGHT, 1.0, 0.0)
"""Weights of the excess norms in the score's third term."""


def scores(posterior: mola.MoLA, data: HeldOut) -> Tensor:
    """Return the outlier scores of all rows."""
    return torch.cat([posterior.predict_from_features(rows.phi, rows.outputs).ood_score for rows in data.chunks()])


def measure(title: str, suite: StoredSuite) -> list[dict[str, Any]]:
    """Return the rates of alarms for each factor, and the AUROC on each set of outliers."""
    stored = suite.read(slice(0, GROUP))
    outliers = suite.names("outlier")
    batches_of_test = list(suite.sources["test"].read(range(IMAGES)))
    fitted = mola.fit(stored["validation"].heads, stored["train"], progress=False)
    held_out = {
        name: fitted.read([batch[0] for batch in batches] if name in outliers else batches, name, labelled=None)
        for name, batches in stored.items()
        if name in ("validation", "test", *outliers)
    }
    networks = [network.load() for network in suite.networks[:GROUP]]
    reader = mola.fit(networks, batches_of_test, distances=False, progress=False)  # finds the features of new images
    for factor in FACTORS:
        held_out[f"{factor:g}"] = reader.read(
            [factor * inputs for inputs, _ in batches_of_test], "images", labelled=None
        )
    rows = []
    for weight in WEIGHTS:
        with patch("molaplace.settings.EXCESS_WEIGHT", weight):
            posterior = fitted.tune(held_out["validation"], progress=False)
            threshold = mola.alarm_threshold(scores(posterior, held_out["validation"]), 0.05)
            inside = scores(posterior, held_out["test"])
            row: dict[str, Any] = {
                "suite": title,
                "weight": weight,
                "false_alarms": float((inside > threshold).double().mean()),
            }
            row["auroc"] = {
                outlier_set: auroc(inside, scores(posterior, held_out[outlier_set])) for outlier_set in outliers
            }
            raised = {f"{factor:g}": scores(posterior, held_out[f"{factor:g}"]) > threshold for factor in FACTORS}
            rows.append(row | {"alarms": {factor: float(alarms.double().mean()) for factor, alarms in raised.items()}})
    return rows


def main() -> None:
    """Measure both suites."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--cifar10", type=Path, required=True, help="folder of ResNet-20s")
    parser.add_argument("--cache", type=Path, default=Path("activations"), help="folder of activations")
    arguments = parser.parse_args()
    mnist = open_suite("mnist", MNIST_NETWORKS, DataOptions(arguments.data), arguments.cache, GROUP)
    options = DataOptions(arguments.data, normalisation="imagenet")
    cifar10 = open_suite("cifar10", arguments.cifar10, options, arguments.cache, GROUP)
    record.write("wrong_units", {"rows": measure("MNIST", mnist) + measure("CIFAR-10", cifar10)})


if __name__ == "__main__":
    main()
