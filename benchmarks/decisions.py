"""Test the guarantees for abstention, prediction sets and alarms on real predictions, over many random splits and under shift.

    python benchmarks/decisions.py --data DIR --cifar10 DIR [--cache DIR] [--splits 1000]
    python benchmarks/decisions.py --quick

For MNIST and CIFAR-10, a posterior for the first five networks is fitted to the activations that the laboratory's `bench` stored (--cache)
and tuned on the suite's validation set. The predictions for the test set are then split at random many times. In each split,
one part is used for calibration, and the guarantees are measured on the other part. For CLINC150, small networks are trained on
the mean of each request's token vectors. With --quick, the benchmark uses scikit-learn's digits and small networks and writes
no file.

- `answers`: the error rate of answers whose confidence exceeds the threshold from `mola.abstain_threshold`. The guarantee
    concerns the true error rate above the threshold. To make this rate known, calibration data are also drawn with replacement
    from the test data; the true rate is then the error rate of all test predictions whose confidence exceeds the threshold.
    `violations` is the share of draws in which the true rate is too high; this share must not exceed one minus the certainty.
    `realised` is the error rate on the other part of plain splits, and `above` is the share of splits in which this rate is too
    high, partly by chance.
- `sets`: coverage and size of `mola.prediction_sets`.
- `alarms`: the alarm rate at the threshold from `mola.alarm_threshold`.
- `tuned_on_same`: the same guarantees if the posterior is tuned again on each calibration part, as in `molaplace fit`.
- `shift`: thresholds set on test data and applied to shifted data and outliers, once to all inputs and once only to those
    without an alarm.

The exit status is 1 if MoLA's `violations` exceed one minus the certainty by more than chance can explain, or if coverage is
too low or an alarm rate too high by more than 4 standard errors.
"""

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from suites import MNIST_NETWORKS, StoredSuite, open_suite
from torch import Tensor, nn

import molaplace as mola
from molaplace.decisions.abstain import abstain_threshold
from molaplace.decisions.calibration import Calibration
from molaplace.decisions.sets import prediction_sets
from molaplace.errors import DataError, MolaWarning
from molaplace_lab.activations_file import HeadOnly
from molaplace_lab.data.clinc150 import embed, load_clinc150
from molaplace_lab.suite import DataOptions

CERTAINTY = 0.95
COMPONENTS = 5
FALSE_ALARMS = (0.01, 0.05)
SIZED = 20
"""Number of splits in which set sizes are measured."""
BESIDE = 100
"""Number of splits used for MAP and DE."""
RETUNED = 10
"""Number of splits in which the posterior is retuned on the calibration part."""
SHIFTED = 10
"""Number of splits whose thresholds are tested on shifted data."""


@dataclass(frozen=True)
class Case:
    """A data set, the size of its calibration part, the error rates to guarantee, and the names of its shifted and outlier sets."""

    name: str
    calibration: int
    error_rates: tuple[float, ...]
    shifted: tuple[str, ...]
    outliers: tuple[str, ...]


CASES = {
    "mnist": Case(
        "mnist",
        4000,
        (0.002, 0.005),
        tuple(f"rotation {angle}" for angle in (15, 30, 45, 60, 90)),
        ("fashion-mnist", "emnist-letters", "kmnist", "notmnist"),
    ),
    "cifar10": Case(
        "cifar10",
        4000,
        (0.01, 0.02, 0.05),
        tuple(f"severity {level}" for level in range(1, 6)),
        ("svhn", "cifar100", "tinyimagenet", "mnist"),
    ),
    "digits": Case("digits", 500, (0.05,), (), ("noise",)),
    "clinc150": Case("clinc150", 2250, (0.02, 0.05), (), ("out of scope",)),
}


@dataclass(frozen=True)
class Rows:
    """A loader that yields batches of a data set: the features from K networks, of shape (n, K, P), and any labels."""

    features: Tensor
    labels: Tensor | None

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.features), 2000):
            rows = slice(start, start + 2000)
            yield self.features[rows] if self.labels is None else (self.features[rows], self.labels[rows])

    def __len__(self) -> int:
        return -(-len(self.features) // 2000)

    def part(self, rows: Tensor) -> "Rows":
        """Return the rows with the given indices."""
        return Rows(self.features[rows], None if self.labels is None else self.labels[rows])


Ready = tuple[mola.MoLA, Rows, dict[str, Rows]]
"""A fitted and tuned posterior, the test set, and the shifted and outlier sets, keyed by name."""


@dataclass(frozen=True)
class Outputs:
    """One method's probabilities and OOD scores on a data set, and the labels of that set."""

    probs: Tensor
    labels: Tensor | None
    score: Tensor | None = None

    def calibration(self) -> Calibration:
        assert self.labels is not None
        return Calibration.of(self.probs, self.labels)


def outputs_of(posterior: mola.MoLA, data: Rows) -> dict[str, Outputs]:
    """Predict the labels of a set with a single network, the ensemble and the mixture."""
    prediction = posterior.predict(data.features)
    alone = torch.softmax(prediction.logit_mean.double(), -1)
    return {
        "MAP": Outputs(alone[:, 0], data.labels),
        "DE": Outputs(alone.mean(1), data.labels),
        "MoLA": Outputs(prediction.probs.double(), data.labels, prediction.ood_score.double()),
    }


def from_suite(suite: StoredSuite) -> Ready:
    """Fit a posterior to the stored activations of a suite, and tune it."""
    stored = suite.read(slice(COMPONENTS))
    posterior = mola.fit(stored["train"].heads, stored.pop("train"), stored.pop("validation"), progress=False)
    sets = {
        name: Rows(
            torch.cat([features for features, _ in activations]),
            None if name in suite.names("outlier") else activations.labels,
        )
        for name, activations in stored.items()
    }
    return posterior, sets.pop("test"), sets


def trained(parts: dict[str, tuple[Tensor, Tensor | None]], hidden: int, classes: int, epochs: int) -> Ready:
    """Train small networks on vectors, and fit and tune a posterior. Sets other than train, validation and test have no labels."""
    inputs, labels = parts["train"]
    assert labels is not None
    networks = []
    for seed in range(COMPONENTS):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(inputs.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, classes))
        optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
        for _ in range(epochs):
            for some in torch.randperm(len(inputs)).split(256):
                optimiser.zero_grad()
                nn.functional.cross_entropy(network(inputs[some]), labels[some]).backward()
                optimiser.step()
        networks.append(network.eval())
    with torch.no_grad():
        sets = {
            name: Rows(torch.stack([network[:2](x) for network in networks], 1), y) for name, (x, y) in parts.items()
        }
    heads = [HeadOnly(network[2].weight, network[2].bias, index) for index, network in enumerate(networks)]
    posterior = mola.fit(heads, sets.pop("train"), sets.pop("validation"), progress=False)
    return posterior, sets.pop("test"), sets


def from_sentences(folder: Path) -> Ready:
    """Train networks on CLINC150, with each request represented by the mean of its token vectors."""
    requests = load_clinc150(folder)
    parts: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name, part in (("train", "train"), ("validation", "val"), ("test", "test"), ("out of scope", "oos_test")):
        known = None if part == "oos_test" else torch.tensor(requests[part].labels)
        parts[name] = embed(requests[part].sentences), known
    return trained(parts, 256, 150, 20)


def from_digits() -> Ready:
    """Train networks on scikit-learn's digits, with noise added so that they make some errors."""
    from sklearn.datasets import load_digits

    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    torch.manual_seed(0)
    order = torch.randperm(len(pixels))
    inputs = pixels[order].float() / 16 + 0.5 * torch.randn(len(pixels), 64)
    cut = {"train": slice(500), "validation": slice(500, 700), "test": slice(700, None)}
    parts: dict[str, tuple[Tensor, Tensor | None]] = {
        name: (inputs[rows], labels[order][rows]) for name, rows in cut.items()
    }
    return trained(parts | {"noise": (2 * torch.randn(500, 64), None)}, 64, 10, 30)


def prepare(case: Case, data: Path, cifar10: Path, cache: Path) -> Ready:
    if case.name == "digits":
        return from_digits()
    if case.name == "clinc150":
        return from_sentences(data)
    networks, normalisation = (cifar10, "imagenet") if case.name == "cifar10" else (MNIST_NETWORKS, None)
    sets = ("train", "validation", "test", *case.shifted, *case.outliers)
    return from_suite(
        open_suite(case.name, networks, DataOptions(data, normalisation=normalisation), cache, COMPONENTS, sets)
    )


def mean_and_error(values: list[float]) -> list[float]:
    """Return the mean over splits and its standard error, to five significant digits."""
    known = np.array(values)
    error = known.std(ddof=1) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return [float(f"{number:.5g}") for number in (known.mean(), error)]


class Splits:
    """Random splits of `total` data points, with a calibration part of `size` points."""

    def __init__(self, total: int, size: int, count: int) -> None:
        self.total = total
        self.size = size
        self.count = count

    def plain(self) -> Any:
        draw = np.random.default_rng(0)
        for _ in range(self.count):
            order = torch.from_numpy(draw.permutation(self.total))
            yield order[: self.size], order[self.size :]

    def drawn(self) -> Any:
        draw = np.random.default_rng(1)
        for _ in range(self.count):
            yield torch.from_numpy(draw.integers(0, self.total, self.size))


def answer_threshold(known: Calibration, rate: float, **options: Any) -> float | None:
    """Return the abstention threshold, or None if no threshold meets the guarantee."""
    try:
        return float(abstain_threshold(known, None, rate, CERTAINTY, **options))
    except DataError:
        return None


def answers(known: Calibration, splits: Splits, rate: float) -> dict[str, Any]:
    """Compare the realised error rate of answers with the nominal rate."""
    order = known.confidence.argsort(descending=True)
    ordered = known.confidence[order]
    # Compute the error rate of the k most confident predictions, for every k.
    true_rate = torch.cat([torch.zeros(1).double(), (~known.correct)[order].double().cumsum(0)])
    true_rate /= torch.arange(len(order) + 1).clamp_min(1)
    drawn = [answer_threshold(known.select(rows), rate) for rows in splits.drawn()]
    violations = sum(bool(true_rate[(ordered > limit).sum()] > rate) for limit in drawn if limit is not None)
    realised = []
    share = []
    for rows, rest in splits.plain():
        threshold = answer_threshold(known.select(rows), rate)
        if threshold is not None:
            answered = known.confidence[rest] > threshold
            wrong = (~known.correct[rest][answered]).double()
            realised.append(float(wrong.mean()) if len(wrong) else 0.0)
            share.append(float(answered.double().mean()))
    return {
        "splits": splits.count,
        "score": "confidence",
        "promised": rate,
        "certainty": CERTAINTY,
        "violations": violations / splits.count,
        "no_threshold": drawn.count(None) / splits.count,
        "realised": mean_and_error(realised) if realised else None,
        "answered": mean_and_error(share) if share else None,
        "above": float(np.sum(np.array(realised) > rate)) / splits.count,
    }


def sets(known: Calibration, probs: Tensor, splits: Splits, coverage: float) -> dict[str, Any]:
    """Compare the realised coverage with the nominal coverage, and measure the mean set size."""
    held = []
    sizes = []
    for draw, (rows, rest) in enumerate(splits.plain()):
        made = prediction_sets(known.select(rows), None, coverage)
        held.append(float((-known.true_probability[rest] <= made.threshold).double().mean()))
        if draw < SIZED:
            sizes.append(float(made(probs[rest]).sum(1).double().mean()))
    common = {"splits": splits.count, "kind": "lac", "by": "all", "promised": coverage}
    return {**common, "realised": mean_and_error(held), "size": mean_and_error(sizes)}


def alarms(score: Tensor, splits: Splits, rate: float) -> dict[str, Any]:
    """Compare the realised false-alarm rate with the nominal rate."""
    rates = [
        float((score[rest] > mola.alarm_threshold(score[rows], rate)).double().mean()) for rows, rest in splits.plain()
    ]
    return {"promised": rate, "realised": mean_and_error(rates)}


def tuned_on_same(posterior: mola.MoLA, test: Rows, case: Case, count: int) -> dict[str, Any]:
    """Test all guarantees for a posterior that is itself tuned on the calibration data."""
    realised: dict[str, list[float]] = {"coverage": [], "false alarms": []}
    wrong: dict[float, list[float]] = {rate: [] for rate in case.error_rates}
    for rows, rest in Splits(len(test.features), case.calibration, count).plain():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MolaWarning)
            tuned = posterior.tune(test.part(rows), progress=False)
        tested = outputs_of(tuned, test.part(rows))["MoLA"]
        other = outputs_of(tuned, test.part(rest))["MoLA"]
        known = tested.calibration()
        new = other.calibration()
        assert tested.score is not None
        assert other.score is not None
        limit = prediction_sets(known, None, 0.9).threshold
        realised["coverage"].append(float((-new.true_probability <= limit).double().mean()))
        alarm = mola.alarm_threshold(tested.score, 0.05)
        realised["false alarms"].append(float((other.score > alarm).double().mean()))
        for rate in case.error_rates:
            if (threshold := answer_threshold(known, rate)) is not None:
                wrong[rate].append(float((~new.correct[new.confidence > threshold]).double().mean()))
    return {
        "splits": count,
        "coverage": {"promised": 0.9, "realised": mean_and_error(realised["coverage"])},
        "false_alarms": {"promised": 0.05, "realised": mean_and_error(realised["false alarms"])},
        "answers": [
            {"promised": rate, "realised": mean_and_error(rates), "above": float(np.mean(np.array(rates) > rate))}
            for rate, rates in wrong.items()
            if rates
        ],
    }


def under_shift(case: Case, test: Outputs, others: dict[str, Outputs], rate: float, count: int) -> list[dict[str, Any]]:
    """Measure how well guarantees calibrated on test data hold on shifted data and outliers."""
    known = test.calibration()
    assert test.score is not None
    measurements: dict[str, dict[str, list[float]]] = {}

    def note(name: str, **values: float) -> None:
        for key, value in values.items():
            measurements.setdefault(name, {}).setdefault(key, []).append(value)

    for rows, rest in Splits(len(known), case.calibration, count).plain():
        outputs = known.select(rows)
        alarm = mola.alarm_threshold(test.score[rows], 0.05)
        made = prediction_sets(outputs, None, 0.9)
        gated_score = torch.where(test.score[rows] > alarm, -math.inf, outputs.confidence)
        plain = answer_threshold(outputs, rate)
        gated = answer_threshold(outputs, rate, score=gated_score)
        if plain is None or gated is None:
            continue
        unseen = Outputs(test.probs[rest], known.label[rest], test.score[rest])
        for name, found_outputs in {"test": unseen, **others}.items():
            assert found_outputs.score is not None
            confidence, label = found_outputs.probs.max(1)
            rings = found_outputs.score > alarm
            held = made(found_outputs.probs)
            answered = confidence > plain
            passed = (confidence > gated) & ~rings
            note(
                name,
                alarms=float(rings.double().mean()),
                answered=float(answered.double().mean()),
                answered_gated=float(passed.double().mean()),
                size=float(held.sum(1).double().mean()),
                empty=float((held.sum(1) == 0).double().mean()),
            )
            if found_outputs.labels is not None and name not in case.outliers:
                wrong = label != found_outputs.labels
                inside = held[torch.arange(len(held)), found_outputs.labels]
                note(
                    name,
                    all_wrong=float(wrong.double().mean()),
                    error=float(wrong[answered].double().mean()),
                    error_gated=float(wrong[passed].double().mean()) if bool(passed.any()) else 0.0,
                    coverage=float(inside.double().mean()),
                    coverage_gated=float(inside[~rings].double().mean()) if bool((~rings).any()) else math.nan,
                )
    return [
        {
            "set": name,
            "error_rate": rate,
            **{key: float(f"{np.nanmean(values):.5g}") for key, values in numbers.items()},
        }
        for name, numbers in measurements.items()
    ]


def measure(
    case: Case, posterior: mola.MoLA, test: Rows, others: dict[str, Rows], count: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Compute all results for a case."""
    found_outputs = outputs_of(posterior, test)
    splits = Splits(len(test.features), case.calibration, count)
    results: dict[str, Any] = {
        "calibration": case.calibration,
        "test": len(test.features) - case.calibration,
        "classes": found_outputs["MoLA"].probs.shape[1],
        "answers": [],
        "sets": [],
        "alarms": [],
    }
    for method, outputs in found_outputs.items():
        known = outputs.calibration()
        some = splits if method == "MoLA" else Splits(len(test.features), case.calibration, min(count, BESIDE))
        for rate in case.error_rates:
            tell(f"{method}, answers at {rate:g}")
            results["answers"].append({"method": method, **answers(known, some, rate)})
        for coverage in (0.9, 0.99):
            tell(f"{method}, sets at {coverage:g}")
            results["sets"].append({"method": method, **sets(known, outputs.probs, some, coverage)})
    score = found_outputs["MoLA"].score
    assert score is not None
    results["alarms"] = [alarms(score, splits, rate) for rate in FALSE_ALARMS]
    tell("tuned on the same data")
    results["tuned_on_same"] = tuned_on_same(posterior, test, case, min(count, RETUNED))
    tell("shifted data")
    far = {name: outputs_of(posterior, outputs)["MoLA"] for name, outputs in others.items()}
    results["shift"] = under_shift(case, found_outputs["MoLA"], far, case.error_rates[-1], min(count, SHIFTED))
    return results


def broken(results: dict[str, Any]) -> list[str]:
    """List the guarantees that are violated by more than chance can explain."""
    wrong = []
    for row in results["answers"]:
        chance = math.sqrt(CERTAINTY * (1 - CERTAINTY) / row["splits"])
        if row["method"] == "MoLA" and row["violations"] > 1 - CERTAINTY + 4 * chance:
            wrong.append(f"answers at {row['promised']:g}: {row['violations']:.3f} of the draws above")
    for row in results["sets"]:
        mean, error = row["realised"]
        if mean < row["promised"] - 4 * error:
            wrong.append(f"sets, {row['method']} {row['kind']}: coverage {mean:.4f}, not {row['promised']:g}")
    for row in results["alarms"]:
        mean, error = row["realised"]
        if mean > row["promised"] + 4 * error:
            wrong.append(f"alarms: {mean:.4f}, not {row['promised']:g}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--cifar10", type=Path, help="folder of ResNet-20s")
    parser.add_argument("--cache", type=Path, default=Path("activations"), help="folder of activations")
    parser.add_argument("--splits", type=int, default=1000)
    parser.add_argument("--cases", default="mnist,cifar10,clinc150")
    parser.add_argument("--quick", action="store_true", help="use digits and 50 splits; write no file")
    options = parser.parse_args()
    if options.quick:
        options.cases = "digits"
        options.splits = 50
    elif options.data is None or options.cifar10 is None:
        parser.error("pass --data and --cifar10, or --quick")
    began = time.perf_counter()
    wrong = []
    document: dict[str, Any] = {"splits": options.splits, "certainty": CERTAINTY, "cases": {}}
    # Keep cases that were recorded earlier with the same number of splits.
    if record.exists("decisions") and (before := record.read("decisions"))["splits"] == options.splits:
        document["cases"] = before["cases"]
    for name in options.cases.split(","):
        case = CASES[name]

        def tell(what: str, name: str = name) -> None:
            print(f"{time.perf_counter() - began:6.0f} s  {name}: {what}", file=sys.stderr, flush=True)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MolaWarning)
            ready = prepare(case, options.data, options.cifar10, options.cache)
        document["cases"][name] = measure(case, *ready, options.splits, tell)
        wrong += [f"{name}, {message}" for message in broken(document["cases"][name])]
        if not options.quick:
            document["environment"] = record.environment()
            record.write("decisions", document)
    for message in wrong:
        print(f"BROKEN {message}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
