"""Confirm the default rule on networks that were not used to choose it: `python benchmarks/default_rule.py --data DIR --cifar10 DIR`.

The constants of the rule were chosen on the first two groups of five networks in the MNIST and CIFAR-10 suites, with each
suite's own split of the test images into validation and test data. This script compares the rule with temperature-scaled
ensembles, both on these groups and, with a different split, on the other groups. It varies the number of networks (1, 2, 3 or
5) and the number of validation images (200, 500 or 2000). Activations are read from the cache of the laboratory's `bench` (`--cache`);
missing ones are computed. Writes `benchmarks/results/default_rule.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import record
import torch
from suites import MNIST_NETWORKS, StoredSuite, open_suite
from torch import Tensor

import molaplace as mola
from molaplace.calibration import fit_temperature
from molaplace.metrics import auroc, expected_calibration_error, negative_log_likelihood
from molaplace.network import Layout
from molaplace.rules.held_out import HeldOut
from molaplace_lab.suite import DataOptions

GROUP = 5
HALF = 2
SEED = 7
"""Number of networks in a group, number of groups used to choose the rule, and seed of the split for the other groups."""

SETTINGS = ((5, 2000), (3, 2000), (2, 2000), (1, 2000), (5, 500), (5, 200))
"""Settings to compare: (number of networks, number of validation images)."""


def with_rows(data: HeldOut, features: Sequence[Tensor], outputs: Sequence[Tensor], labels: Tensor) -> HeldOut:
    """Replace the rows of the held-out data."""
    return replace(data, features=features, outputs=outputs, labels=labels, layout=Layout.of(outputs[0], -1))


def rows_of(data: HeldOut, indices: Tensor) -> HeldOut:
    """Select rows of the held-out data by index."""
    assert data.labels is not None
    features = [values[indices] for values in data.features]
    return with_rows(data, features, [values[indices] for values in data.outputs], data.labels[indices])


def split(validation: HeldOut, test: HeldOut, seed: int | None) -> tuple[HeldOut, HeldOut]:
    """Return the suite's own split or, given a seed, a random split with the same sizes."""
    if seed is None:
        return validation, test
    assert validation.labels is not None
    assert test.labels is not None
    both = with_rows(
        validation,
        [torch.cat(pair) for pair in zip(validation.features, test.features, strict=True)],
        [torch.cat(pair) for pair in zip(validation.outputs, test.outputs, strict=True)],
        torch.cat([validation.labels, test.labels]),
    )
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(seed))
    return rows_of(both, order[: len(validation)]), rows_of(both, order[len(validation) :])


def probabilities(posterior: mola.MoLA, data: HeldOut) -> Tensor:
    """Compute the predicted probabilities for all rows."""
    return torch.cat([posterior.distribution_of(rows).point() for rows in data.chunks()])


def measured(
    posterior: mola.MoLA, sets: dict[str, HeldOut], shifted: Sequence[str], outliers: Sequence[str]
) -> dict[str, float]:
    """Compute log loss and ECE on test data, mean log loss under shift, and mean AUROC for detecting outliers by confidence."""
    probs = {name: probabilities(posterior, data) for name, data in sets.items()}
    losses = {name: negative_log_likelihood(probs[name], sets[name].labels) for name in ("test", *shifted)}  # type: ignore[arg-type]
    inside = -probs["test"].amax(1)
    return {
        "test_nll": losses["test"],
        "test_ece": expected_calibration_error(probs["test"], sets["test"].labels),  # type: ignore[arg-type]
        "shifted_nll": sum(losses[name] for name in shifted) / len(shifted),
        "auroc": sum(auroc(inside, -probs[name].amax(1)) for name in outliers) / len(outliers),
    }


def compare(suite_name: str, suite: StoredSuite) -> list[dict[str, Any]]:
    """Compare the rules on all groups of networks in one suite."""
    rows = []
    outliers = suite.names("outlier")
    for group in range(len(suite.networks) // GROUP):
        seed = None if group < HALF else SEED
        for count, images in SETTINGS:
            stored = suite.read(slice(GROUP * group, GROUP * group + count))
            heads = stored["validation"].heads
            posterior = mola.fit(heads, stored["train"], progress=False)
            read = {
                name: posterior.read(
                    [batch[0] for batch in batches] if name in outliers else batches, name, labelled=None
                )
                for name, batches in stored.items()
                if name != "train"
            }
            validation, read["test"] = split(read.pop("validation"), read["test"], seed)
            validation = rows_of(validation, torch.arange(images))
            logits = torch.stack(list(validation.outputs))
            assert validation.labels is not None
            ensemble = mola.fit(heads, stored["train"], progress=False, distances=False).with_prior_precision(1e12)
            methods = {
                "DE-T": ensemble.with_temperature(fit_temperature(logits, validation.labels)),
                "DE-L": ensemble.with_pooling(0).with_temperature(fit_temperature(logits.mean(0), validation.labels)),
                "default": posterior.tune(validation, progress=False),
            }
            where = {"suite": suite_name, "half": "chosen" if seed is None else "confirmed", "group": group}
            for method, predictor in methods.items():
                numbers = measured(predictor, read, suite.names("shift"), outliers)
                rows.append({**where, "networks": count, "validation": images, "method": method, **numbers})
    return rows


def main() -> None:
    """Compare the rules on both suites."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--cifar10", type=Path, required=True, help="folder of ResNet-20s")
    parser.add_argument("--cache", type=Path, default=Path("activations"), help="folder of activations")
    arguments = parser.parse_args()
    mnist = open_suite("mnist", MNIST_NETWORKS, DataOptions(arguments.data), arguments.cache)
    options = DataOptions(arguments.data, normalisation="imagenet")
    cifar10 = open_suite("cifar10", arguments.cifar10, options, arguments.cache)
    record.write("default_rule", {"rows": compare("mnist", mnist) + compare("cifar10", cifar10)})


if __name__ == "__main__":
    main()
