"""Measure the prior on the pooling coefficient on small validation sets: `python benchmarks/small_validation.py --data DIR ...`.

The default rule and the temperature-scaled ensemble are tuned on the same n validation data, drawn at random, and compared by their log
loss on all test data. The rule is run with and without its prior on the pooling coefficient. The data are two synthetic classes (90:10)
with five small networks, new ones for every five draws, and the suites MNIST, CIFAR-10 and CLINC150, whose activations are read from
the cache of the laboratory's `bench` (`--cache`); missing ones are computed.
Writes `benchmarks/results/small_validation.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import record
import torch
from default_rule import GROUP, probabilities, rows_of
from suites import MNIST_NETWORKS, StoredSuite, open_suite
from torch import Tensor, nn

import molaplace as mola
from molaplace.calibration import fit_temperature
from molaplace.errors import collect_warnings
from molaplace.metrics import negative_log_likelihood
from molaplace.rules import calibrated
from molaplace.rules.held_out import HeldOut
from molaplace.rules.priors import negative_log_prior
from molaplace_lab.suite import DataOptions

PRIORS: dict[str, Callable[..., Any]] = {
    "none": lambda log_temperature, pooling=1.0: negative_log_prior(log_temperature),
    "prior": negative_log_prior,
}
"""The rule's negative log prior without and with the term of the pooling coefficient."""

TITLES = {"classes": "two classes, 90 : 10", "mnist": "MNIST", "cifar10": "CIFAR-10", "clinc": "CLINC150"}
"""Names of the data on the command line and in tables."""

DRAWS = 5
"""Validation sets drawn for each group of networks by default."""

PROBLEMS, PROBLEM_SIZES = 20, (20, 50, 100, 500)
"""Number of synthetic problems, and their numbers of validation data."""

SUITE_SIZES = (20, 50, 100, 200, 500, 2000)
"""Numbers of validation data of the suites."""

WIDTH, RARE, SHIFT = 8, 0.1, 2.5
"""Number of inputs, share of the second class, and distance between the classes in each of two inputs."""

TRAIN, TEST, STEPS = 200, 20_000, 150
"""Numbers of training and test data, and of training steps."""


class Case(NamedTuple):
    """A posterior before tuning, and the data from which validation sets are drawn."""

    posterior: mola.MoLA
    validation: HeldOut
    test: HeldOut


def draw_classes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs and labels of two Gaussian classes, one of them rare."""
    labels = (torch.rand(count, generator=generator) < RARE).long()
    inputs = torch.randn(count, WIDTH, generator=generator)
    inputs[:, :2] += SHIFT * labels[:, None]
    return inputs, labels


def train(seed: int, inputs: Tensor, labels: Tensor) -> nn.Module:
    """Train a small network until it is overconfident."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 2))
    optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimiser.step()
    return network.eval()


def problems() -> Iterator[Case]:
    """Make the synthetic problems."""
    for problem in range(PROBLEMS):
        generator = torch.Generator().manual_seed(problem)
        data = draw_classes(TRAIN, generator)
        networks = [train(GROUP * problem + index, *data) for index in range(GROUP)]
        posterior = mola.fit(networks, [data], progress=False)
        held_out = [
            posterior.read([draw_classes(count, generator)], "held-out data", labelled=True)
            for count in (DRAWS * max(PROBLEM_SIZES), TEST)
        ]
        yield Case(posterior, *held_out)


def groups(suite: StoredSuite) -> Iterator[Case]:
    """Fit each group of networks of a suite."""
    for first in range(0, len(suite.networks) - GROUP + 1, GROUP):
        stored = suite.read(slice(first, first + GROUP))
        posterior = mola.fit(stored["validation"].heads, stored["train"], progress=False)
        held_out = [posterior.read(stored[name], name, labelled=True) for name in ("validation", "test")]
        yield Case(posterior, *held_out)


def scaled_loss(validation: HeldOut, test: HeldOut) -> float:
    """Return the log loss of the temperature-scaled ensemble on the test data."""
    assert validation.labels is not None
    assert test.labels is not None
    temperature = fit_temperature(torch.stack(list(validation.outputs)), validation.labels)
    probs = (torch.stack(list(test.outputs)) / temperature).softmax(-1).mean(0)
    return negative_log_likelihood(probs, test.labels)


def compare(data: str, cases: Iterator[Case], sizes: tuple[int, ...], draws: int) -> list[dict[str, Any]]:
    """Return, for each size and prior, statistics of the log loss relative to the temperature-scaled ensemble, in per cent."""
    excess: dict[tuple[int, str], list[float]] = {(size, prior): [] for size in sizes for prior in PRIORS}
    pooled: dict[tuple[int, str], list[bool]] = {key: [] for key in excess}
    for index, case in enumerate(cases):
        assert case.test.labels is not None
        orders = [
            torch.randperm(len(case.validation), generator=torch.Generator().manual_seed(draws * index + draw))
            for draw in range(draws)
        ]
        for size in sizes:
            for order in orders[: len(case.validation) // size]:  # the whole validation set is drawn once
                validation = rows_of(case.validation, order[:size])
                baseline = scaled_loss(validation, case.test)
                for prior, function in PRIORS.items():
                    with patch.object(calibrated, "negative_log_prior", function), collect_warnings():
                        tuned = case.posterior.tune(validation, rule="calibrated", progress=False)
                    loss = negative_log_likelihood(probabilities(tuned, case.test), case.test.labels)
                    excess[size, prior].append(100 * (loss / baseline - 1))
                    pooled[size, prior].append(tuned.pooling < 1)
        print(data, index, flush=True)
    return [
        {
            "data": data,
            "validation": size,
            "prior": prior,
            "draws": len(values),
            "mean": float(np.mean(values)),
            "quantile_95": float(np.quantile(values, 0.95)),
            "worst": max(values),
            "pooled": float(np.mean(pooled[size, prior])),
        }
        for (size, prior), values in excess.items()
    ]


def main() -> None:
    """Compare the two priors on the chosen data, and keep the other rows of the last record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--cifar10", type=Path, help="folder of ResNet-20s")
    parser.add_argument("--clinc", type=Path, help="folder of the networks of the CLINC150 suite")
    parser.add_argument("--cache", type=Path, default=Path("activations"), help="folder of activations")
    parser.add_argument("--draws", type=int, default=DRAWS, help="validation sets for each group of networks")
    parser.add_argument("--groups", type=int, help="number of groups of five networks; by default all")
    parser.add_argument("--only", nargs="*", choices=TITLES, default=list(TITLES), help="data to draw from")
    arguments = parser.parse_args()
    plain = DataOptions(arguments.data)
    places = {
        "mnist": (MNIST_NETWORKS, plain),
        "cifar10": (arguments.cifar10, DataOptions(arguments.data, normalisation="imagenet")),
        "clinc": (arguments.clinc, plain),
    }
    rows = record.read("small_validation")["rows"] if record.exists("small_validation") else []
    for name in arguments.only:
        title = TITLES[name]
        if name == "classes":
            compared = compare(title, problems(), PROBLEM_SIZES, arguments.draws)
        else:
            networks, options = places[name]
            count = None if arguments.groups is None else GROUP * arguments.groups
            suite = open_suite(name, networks, options, arguments.cache, count, ("train", "validation", "test"))
            compared = compare(title, groups(suite), SUITE_SIZES, arguments.draws)
        rows = [row for row in rows if row["data"] != title] + compared
        rows.sort(key=lambda row: list(TITLES.values()).index(row["data"]))
        record.write("small_validation", {"rows": rows})


if __name__ == "__main__":
    main()
