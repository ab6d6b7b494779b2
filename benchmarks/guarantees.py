"""Simulate the guarantees of all decisions on exchangeable data from known distributions.

    python benchmarks/guarantees.py [--draws 500] [--quick]

Each cell of the simulation is one decision with one method, number of validation data and guaranteed rate. In each draw, a threshold
is calibrated on validation data, and a rate is measured on new data from the same distribution:

- `alarm`: the share of new inputs without an alarm; the guarantee is one minus the false-alarm rate.
- `sets`, `intervals`: the share of new data that are covered.
- `abstain`: whether the true error rate of the answers, which is known in closed form, is at most the guaranteed error rate. The share
    of such draws must be at least the certainty. A draw in which no threshold is found has no answers, and thus no errors.

No predictor is calibrated: probabilities are too confident, and normal distributions have targets with heavy tails. Without ties
between scores, conformal coverage is not only at least the nominal coverage, but exactly `ceil((n + 1) coverage) / (n + 1)` on
average over draws. Cells with ties use predictions from a few discrete values.

The exit status is 1 if a cell falls short of its guarantee, or differs from the exact coverage, by more than `LIMIT` standard errors.
With --quick, there are few draws, and no file is written.
"""

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import record
import torch
from torch import Generator

import molaplace as mola
from molaplace.errors import DataError, MolaWarning

NEW = 100
"""Number of new data in each draw."""

CLASSES = 5
TOO_CONFIDENT = 1.7
"""Factor by which the logits of a predictor exceed those of the distribution of the labels."""

DRAWS, QUICK = 500, 50

LIMIT = 4.5
"""Number of standard errors by which chance alone moves one of 100 cells in fewer than one of 1,000 runs."""


@dataclass(frozen=True)
class Cell:
    """A decision with one method, number of validation data and guarantee."""

    decision: str
    method: str
    count: int
    """Number of validation data."""
    guarantee: float
    """Lower bound on the expected rate."""
    rate: Callable[[Generator], float]
    """Function that calibrates a threshold on validation data, and returns the rate on new data."""
    exact: float | None = None
    """Expected rate, if it is known."""


def conformal(count: int, coverage: float) -> float:
    """Return the expected coverage of a conformal threshold from `count` scores without ties."""
    return math.ceil(round((count + 1) * coverage, 9)) / (count + 1)


# --- alarm --------------------------------------------------------------------------------------------------------------


def without_alarm(count: int, rate: float, ties: bool, generator: Generator) -> float:
    """Return the share of new scores at or below the threshold."""
    scores = torch.randn(count + NEW, generator=generator)
    scores = scores.round() if ties else scores
    return float((scores[count:].double() <= mola.alarm_threshold(scores[:count], rate)).double().mean())


def alarm_cells() -> Iterator[Cell]:
    """Yield cells of the alarm."""
    for count in (20, 100, 1000):
        for rate in (0.05, 0.2):
            yield Cell(
                "alarm", "", count, 1 - rate, partial(without_alarm, count, rate, False), conformal(count, 1 - rate)
            )
            yield Cell("alarm", "ties", count, 1 - rate, partial(without_alarm, count, rate, True))


# --- sets ---------------------------------------------------------------------------------------------------------------


def covered_labels(count: int, coverage: float, ties: bool, options: dict[str, Any], generator: Generator) -> float:
    """Return the share of new labels, or of new labels of the rarest class, that are in their sets."""
    logits = torch.randn(count + NEW, CLASSES, generator=generator)
    logits = logits.round() if ties else logits
    logits[:, 0] -= 1.0  # the rarest class
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    probs = (TOO_CONFIDENT * logits).softmax(1).double()
    sets = mola.prediction_sets(probs[:count], labels[:count], coverage, generator=generator, **options)
    included = sets(probs[count:], generator=generator).gather(1, labels[count:, None]).squeeze(1)
    if options.get("by") == "class":
        included = included[labels[count:] == 0]
    return float(included.double().mean()) if len(included) else math.nan


def set_cells() -> Iterator[Cell]:
    """Yield cells of prediction sets."""
    methods: dict[str, dict[str, Any]] = {name: {"method": name} for name in ("lac", "aps", "raps")}
    methods |= {f"{name}, randomised": {"method": name, "randomised": True} for name in ("aps", "raps")}
    for coverage in (0.6, 0.9):
        for count in (20, 100, 500):
            for name, options in methods.items():
                exact = conformal(count, coverage)
                yield Cell(
                    "sets", name, count, coverage, partial(covered_labels, count, coverage, False, options), exact
                )
            for name, options in {"lac": {"method": "lac"}, "aps": {"method": "aps"}}.items():
                yield Cell(
                    "sets", f"{name}, ties", count, coverage, partial(covered_labels, count, coverage, True, options)
                )
        others = {"lac, by class": {"by": "class"}, "lac, at least one": {"at_least_one": True}}
        for name, options in others.items():
            yield Cell("sets", name, 500, coverage, partial(covered_labels, 500, coverage, False, options))


# --- intervals ----------------------------------------------------------------------------------------------------------


def covered_targets(count: int, coverage: float, options: dict[str, Any], generator: Generator) -> float:
    """Return the share of new targets, or of new data with all targets, that are in their intervals."""
    total = count + NEW
    means = torch.randn(2, total, 2, generator=generator, dtype=torch.float64)
    variances = torch.randn(2, total, 2, generator=generator, dtype=torch.float64).exp()
    means, variances = means.transpose(0, 1), variances.transpose(0, 1)
    fields = {"component_mean": means, "component_variance": variances, "component_noise": variances}
    fields["ood_score"] = torch.zeros(total)
    weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
    prediction = mola.RegressionPrediction(fields, weights=weights)
    ratio = torch.randn(2, total, 2, generator=generator, dtype=torch.float64)
    targets = prediction.mean + 0.5 * ratio[0] / ratio[1].abs().clamp_min(1e-3)  # almost a Cauchy distribution
    intervals = mola.prediction_intervals(prediction[:count], targets[:count], coverage, **options)
    lower, upper = intervals(prediction[count:])
    covered = (lower <= targets[count:]) & (targets[count:] <= upper)
    return float((covered.all(1) if options.get("joint") else covered[:, 0]).double().mean())


def interval_cells() -> Iterator[Cell]:
    """Yield cells of prediction intervals."""
    methods = {name: {"method": name} for name in ("quantile", "normalised")}
    methods["normalised, joint"] = {"method": "normalised", "joint": True}
    for coverage in (0.6, 0.9):
        for count in (20, 100, 500):
            for name, options in methods.items():
                rate = partial(covered_targets, count, coverage, options)
                yield Cell("intervals", name, count, coverage, rate, conformal(count, coverage))


# --- abstention ---------------------------------------------------------------------------------------------------------


def keeps_error_rate(count: int, error_rate: float, certainty: float, steps: int, generator: Generator) -> float:
    """Return 1 if the true error rate of the answers is at most the guaranteed one, and 0 otherwise.

    Confidences are uniform on `steps` values from 1/2 to 1, and a prediction is wrong with probability `1 - confidence`. With many
    steps, there are no ties.
    """
    values = torch.arange(1, steps + 1, dtype=torch.float64) / (2 * steps) + 0.5
    confidence = values[torch.randint(steps, (count,), generator=generator)]
    wrong = torch.rand(count, generator=generator, dtype=torch.float64) > confidence
    probs = torch.stack([confidence, 1 - confidence], 1)
    try:
        threshold = mola.abstain_threshold(probs, wrong.long(), error_rate, certainty)
    except DataError:
        return 1.0
    answered = values[values > float(threshold)]
    return float(not len(answered) or float((1 - answered).mean()) <= error_rate)


def abstention_cells() -> Iterator[Cell]:
    """Yield cells of abstention."""
    for count in (100, 400, 2000):
        for error_rate in (0.05, 0.2):
            for certainty in (0.8, 0.95):
                for name, steps in (("", 100_000), ("ties", 20)):
                    rate = partial(keeps_error_rate, count, error_rate, certainty, steps)
                    yield Cell("abstain", f"{error_rate:.0%} errors{', ties' if name else ''}", count, certainty, rate)


# --- measurement --------------------------------------------------------------------------------------------------------


def cells() -> list[Cell]:
    """Return all cells."""
    return [*alarm_cells(), *set_cells(), *interval_cells(), *abstention_cells()]


def measure(cell: Cell, draws: int, seed: int) -> dict[str, Any]:
    """Return the mean rate over draws, and its differences from the guarantee and from the exact rate in standard errors."""
    generator = torch.Generator().manual_seed(seed)
    rates = np.array([cell.rate(generator) for _ in range(draws)])
    rates = rates[~np.isnan(rates)]
    mean = float(rates.mean())
    # If (almost) all rates are equal, they say little about their variance: use that of one failure in as many draws.
    error = math.sqrt(max(float(rates.var(ddof=1)), 1 / len(rates)) / len(rates))
    return {
        "decision": cell.decision,
        "method": cell.method,
        "count": cell.count,
        "guarantee": cell.guarantee,
        "exact": cell.exact,
        "rate": mean,
        "error": error,
        "short": max(0.0, (cell.guarantee - mean) / error),
        "off": None if cell.exact is None else abs(mean - cell.exact) / error,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=DRAWS, help="draws of validation and new data for each cell")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} draws; write no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    draws = QUICK if options.quick else options.draws
    began = time.perf_counter()
    rows = []
    for seed, cell in enumerate(cells()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MolaWarning)  # classes with few validation data
            rows.append(measure(cell, draws, seed))
        if not options.quick:
            print(f"{time.perf_counter() - began:6.0f} s  {rows[-1]}", file=sys.stderr, flush=True)
    broken = [row for row in rows if row["short"] > LIMIT or (row["off"] or 0.0) > LIMIT]
    for row in broken:
        print(f"BROKEN {row}")
    print(f"{len(rows)} cells of {draws} draws: {len(broken)} broken")
    if not options.quick:
        record.write("guarantees", {"environment": record.environment(), "draws": draws, "new": NEW, "rows": rows})
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
