"""Measure what `mola.watch` promises: false alarms, delays, expected accuracy, time and memory.

    python benchmarks/watch.py --data DIR --cifar10 DIR --clinc150 DIR --imagenet DIR [--cache DIR] [--only PART ...] [--suites SUITE ...]
    python benchmarks/watch.py --quick

- `false_alarms`: share of 1,000 streams of 10,000 exchangeable inputs that ever raise an alarm, with 200 and 2,000 validation data, for
    the ranks among all scores so far, for ranks in the fixed validation set, for MAPIE's jumper martingale on the same scores, and for a
    Kolmogorov-Smirnov test of each day's 500 inputs against the validation data.
- `tuned`: the same on real scores, if the posterior is tuned on the validation data with which the stream is compared.
- `delays`: inputs until the alarm after 2,000 calm inputs of the test set, for shifts and for outliers mixed in.
- `accuracy`: estimates of accuracy without labels, on networks that were (the first five of MNIST) and were not used to choose the
    share of strange inputs above which no estimate is made. For CIFAR-10, these are ResNet-20s 05 to 09, because prototypes on the
    first five had suggested the estimate, with 57 sets of 1,000 corrupted images; for ImageNet, EfficientNet-Lite0 and Lite1 in five
    rotations of a cross-fit; run this part in the folder examples/, whose imagenet_networks.py builds them.
- `cost`: processor time of `update` relative to prediction with ResNet-20, and memory over ten million inputs.

The exit status is 1 if there are more false alarms than chance allows, or if `update` takes more than 1 % of the prediction of 128
inputs or more. The results are the entries of benchmarks/results/watch.json; parts that are not run keep theirs. With --quick, small
versions of the parts without data take a minute, and no file is written.
"""

import argparse
import math
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from decisions import trained
from scipy.optimize import linear_sum_assignment
from scipy.stats import ks_2samp
from suites import MNIST_NETWORKS, StoredSuite, open_suite

import molaplace as mola
from molaplace.calibration import fit_temperature
from molaplace.errors import MolaWarning
from molaplace.images import Images
from molaplace.monitoring import alarm as alarms
from molaplace.monitoring.accuracy import MOST_STRANGE, ConfidenceThreshold
from molaplace.monitoring.baseline import Baseline
from molaplace.monitoring.evidence import Evidence
from molaplace.monitoring.ranks import ScoreCounts, uniform_draws
from molaplace.monitoring.stream import WatchOptions
from molaplace.monitoring.watching import Watch
from molaplace_lab.activations import ActivationCache, Network, open_networks
from molaplace_lab.corruptions.catalogue import CORRUPTIONS, corrupt
from molaplace_lab.data.clinc150 import embed, load_clinc150
from molaplace_lab.models import build_network
from molaplace_lab.networks import open_named
from molaplace_lab.suite import DataOptions, Source
from molaplace_lab.suites.image_sources import image_source, test_images
from molaplace_lab.suites.registry import SUITES

Array = np.ndarray[Any, Any]

ALPHAS = (0.05, 0.01)
COMPONENTS = 5
DAY = 500
"""Number of inputs in each daily test."""
CALM = 2000
"""Number of inputs before a change."""
LONGEST = 8000
"""Number of inputs after a change."""
JUMP = 0.01
"""MAPIE's default."""
TRAIN_IMAGES = 10_000
"""Number of CIFAR-10 training images to which the posterior of the networks 05 to 09 is fitted."""
OUTLIERS = 2000
"""Number of images in each outlier set for these networks."""
SHIFTED = 400
"""Number of ImageNet images that are corrupted, at each severity, for all rotations together."""
SHIFTED_OUTLIERS = 150
"""Number of images in each outlier set for ImageNet."""


# --- tests to compare -------------------------------------------------------------------------------------------------


def p_values_of(validation: Array, stream: Array, seed: int) -> Array:
    """Return the p-values of the stream, with ranks among all scores so far."""
    counts, _ = ScoreCounts().add(validation, np.zeros(len(validation)))
    return counts.add(stream, uniform_draws(seed, 0, len(stream)))[1]


def peak_of(p_values: Array) -> float:
    """Return the logarithm of the largest capital."""
    return Evidence.none(alarms.BETS).add(alarms.log_factors(p_values)).log_peak


def crossing(p_values: Array, alpha: float, first: int = 0) -> int | None:
    """Return the number of inputs after which the capital reaches 1 / alpha, or None; the first inputs do not count as an alarm."""
    limit = -math.log(alpha)
    evidence = Evidence.none(alarms.BETS).add(alarms.log_factors(p_values[:first]))
    if evidence.log_peak >= limit:
        return 0  # a false alarm
    for start in range(first, len(p_values), 250):
        chunk = alarms.log_factors(p_values[start : start + 250])
        following = evidence.add(chunk)
        if following.log_peak >= limit:
            low, high = 0, chunk.shape[1]
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if evidence.add(chunk[:, :middle]).log_peak >= limit else (middle, high)
            return start + high - first
        evidence = following
    return None


def jumper(p_values: Array) -> Array:
    """Return the capital of MAPIE's jumper martingale (R, n) for p-values (R, n) of several streams."""
    wealth = np.full((len(p_values), 3), 1 / 3)
    capital = np.empty_like(p_values)
    for index, column in enumerate(p_values.T):
        mixed = (1 - JUMP) * wealth + JUMP / 3 * wealth.sum(1, keepdims=True)
        wealth = mixed * (1 + np.array([-1.0, 0.0, 1.0]) * (column[:, None] - 0.5))
        capital[:, index] = wealth.sum(1)
    return capital


def agrees_with_mapie() -> bool | None:
    """Return whether `jumper` computes what MAPIE computes, or None if MAPIE is not installed."""
    try:
        from mapie.exchangeability_testing import OnlineMartingaleTest
    except ImportError:
        return None
    p_values = np.random.default_rng(0).random(500)
    peer = OnlineMartingaleTest(task="classification", warn=False)
    capital = [peer.update_simple_jumper_martingale(value) for value in p_values]
    return bool(np.allclose(capital, jumper(p_values[None])[0], rtol=1e-12))


def days_until(validation: Array, stream: Array, alpha: float) -> int | None:
    """Return the number of inputs until the first daily test rejects, or None."""
    for start in range(0, len(stream) - DAY + 1, DAY):
        if ks_2samp(validation, stream[start : start + DAY]).pvalue < alpha:
            return start + DAY
    return None


# --- false alarms -----------------------------------------------------------------------------------------------------


def false_alarms(replays: int, length: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Count the streams of exchangeable scores that ever raise an alarm."""
    rows = []
    for size in (200, 2000):
        peaks: list[float] = []
        fixed_peaks: list[float] = []
        daily: dict[float, list[bool]] = {alpha: [] for alpha in ALPHAS}
        whole: list[Array] = []
        for seed in range(replays):
            draw = np.random.default_rng(seed)
            scores = draw.normal(size=size + length)
            validation, stream = scores[:size], scores[size:]
            peaks.append(peak_of(p_values_of(validation, stream, seed)))
            above = size - np.searchsorted(np.sort(validation), stream)
            fixed_peaks.append(peak_of((above + draw.random(length)) / (size + 1)))
            for alpha in ALPHAS:
                daily[alpha].append(days_until(validation, stream, alpha) is not None)
            if seed < 200:  # MAPIE's ranks and bets begin with the validation data
                whole.append(ScoreCounts().add(scores, uniform_draws(seed, 0, len(scores)))[1])
            if seed % 100 == 99:
                say(f"false alarms, {size} validation data, replay {seed + 1}")
        capital = jumper(np.stack(whole))[:, 100:].max(1)
        for alpha in ALPHAS:
            limit = -math.log(alpha)
            rows.append(
                {
                    "validation": size,
                    "alpha": alpha,
                    "replays": replays,
                    "inputs": length,
                    "watch": float(np.mean(np.array(peaks) >= limit)),
                    "fixed": float(np.mean(np.array(fixed_peaks) >= limit)),
                    "mapie": float(np.mean(capital > 1 / alpha)),
                    "mapie_replays": len(whole),
                    "daily": float(np.mean(daily[alpha])),
                }
            )
    return rows


# --- real predictions -------------------------------------------------------------------------------------------------


Columns = dict[str, Array]
"""Of a data set: "probs" of the posterior and "scaled" of the ensemble with a temperature (n, C), "score", "distance", "agreement" of
members, and "labels"."""


def predicted(posterior: mola.MoLA, scaled: Any, batches: Any, labels: Any) -> Columns:
    """Predict a set with the posterior and with the temperature-scaled ensemble."""
    parts: list[tuple[Array, ...]] = []
    for features in batches:
        prediction = posterior.predict(features)
        chosen = prediction.logit_mean.argmax(-1).T
        same = (chosen[:, None] == chosen).double().sum((0, 1)) - len(chosen)
        agreement = same / (len(chosen) * (len(chosen) - 1))
        assert prediction.distance is not None
        values = (prediction.probs, scaled(features), prediction.ood_score, prediction.distance, agreement)
        parts.append(tuple(value.detach().double().numpy() for value in values))
    names = ("probs", "scaled", "score", "distance", "agreement")
    columns = {name: np.concatenate(part) for name, part in zip(names, zip(*parts, strict=True), strict=True)}
    return columns | {"labels": labels.numpy()}


def from_suite(suite: StoredSuite, group: int = 0) -> tuple[mola.MoLA, Any, dict[str, Columns]]:
    """Fit and tune a posterior for one group of at most five networks, and predict every set."""
    stored = suite.read(slice(COMPONENTS * group, COMPONENTS * (group + 1)))
    train = stored.pop("train")
    validation = stored["validation"]
    posterior = mola.fit(train.heads, train, validation, progress=False)
    temperature = fit_temperature(validation.logits(), validation.labels)
    scaled = mola.ensemble([head.scaled(temperature) for head in train.heads])
    sets = {
        name: predicted(posterior, scaled, (features for features, _ in activations), activations.labels)
        for name, activations in stored.items()
    }
    return posterior, validation, sets


SEVERITIES = (1, 3, 5)
"""Severities of the corruptions of which each makes a set of its own."""

BASE = ("train", "validation", "test", "svhn", "cifar100")


def open_mnist(options: argparse.Namespace) -> StoredSuite:
    return open_suite("mnist", MNIST_NETWORKS, DataOptions(options.data), options.cache, 2 * COMPONENTS)


def open_cifar10(options: argparse.Namespace) -> StoredSuite:
    """Open the networks 00 to 04 and the sets on which delays are measured."""
    data = DataOptions(options.data, normalisation="imagenet")
    sets = (*BASE, *(f"severity {level}" for level in range(1, 6)))
    return open_suite("cifar10", options.cifar10, data, options.cache, COMPONENTS, sets)


def open_corrupted_cifar10(options: argparse.Namespace) -> StoredSuite:
    """Open the networks 05 to 09 and, for each of 19 corruptions at three severities, 1,000 test images."""
    data = DataOptions(options.data, normalisation="imagenet", train=TRAIN_IMAGES, outliers=OUTLIERS)
    suite = SUITES["cifar10"]
    label, build = suite.builder("resnet-20")
    networks = open_networks(sorted(options.cifar10.glob("*.safetensors"))[COMPONENTS : 2 * COMPONENTS], build, label)
    images = test_images("cifar10", data).evenly(1000)

    def corrupted(images: Images, kind: str, level: int) -> Images:
        return Images(corrupt(images.pixels, kind, level), images.labels)

    made = {
        f"{kind}, severity {level}": image_source(
            data,
            "imagenet",
            f"{kind}, severity {level}",
            f"CIFAR-10 with {kind} at severity {level}",
            "shift",
            images,
            change=partial(corrupted, kind=kind, level=level),
            changed_by=("one corruption", kind, level),
            level=level,
        )
        for kind in CORRUPTIONS
        for level in SEVERITIES
    }
    sources = {name: source for name, source in suite.make_sources(data).items() if name in BASE} | made
    return open_stored(options, networks, [sources])[0]


def open_stored(
    options: argparse.Namespace, networks: list[Network], folds: list[dict[str, Source]]
) -> list[StoredSuite]:
    """Compute the missing activations of the networks on the sets of each fold."""
    cache = ActivationCache(options.cache)
    whole = {source.checksum: source for fold in folds for source in ((part.whole or part) for part in fold.values())}
    cache.compute(networks, list(whole.values()), lambda doing, done: None)
    return [StoredSuite(networks, fold, cache) for fold in folds]


def open_imagenet(options: argparse.Namespace) -> list[StoredSuite]:
    """Open two EfficientNet-Lites and the rotations of a cross-fit, with a fifth of the images corrupted."""
    data = DataOptions(
        options.imagenet,
        normalisation="none",
        image_size=256,
        cross_fit=True,
        shifted=SHIFTED,
        outliers=SHIFTED_OUTLIERS,
    )
    networks = open_named("imagenet_networks:lite0,imagenet_networks:lite1")
    make_folds = SUITES["imagenet"].make_folds
    assert make_folds is not None
    left_out = ("kmnist", *(f"severity {level}" for level in range(1, 6) if level not in SEVERITIES))
    folds = [{name: source for name, source in fold.items() if name not in left_out} for fold in make_folds(data)]
    return open_stored(options, networks, folds)


def tuned(posterior: mola.MoLA, suite: StoredSuite, splits: int, replays: int) -> dict[str, Any]:
    """Count false alarms if the posterior was tuned on the validation data: on random splits of validation and test data together."""
    stored = suite.read(slice(COMPONENTS))
    parts = [stored["validation"], stored["test"]]
    features = torch.cat([rows for part in parts for rows, _ in part])
    labels = torch.cat([part.labels for part in parts])
    size = len(parts[0].labels)
    peaks = []
    for split in range(splits):
        order = torch.from_numpy(np.random.default_rng(split).permutation(len(labels)))
        chosen = order[:size]
        retuned = posterior.tune([(features[chosen], labels[chosen])], progress=False)
        scores = retuned.predict([features]).ood_score.double().numpy()
        for replay in range(replays):
            rest = np.random.default_rng((split, replay)).permutation(order[size:].numpy())
            peaks.append(peak_of(p_values_of(scores[chosen.numpy()], scores[rest], replay)))
    shares = {str(alpha): float(np.mean(np.array(peaks) >= -math.log(alpha))) for alpha in ALPHAS}
    return {"splits": splits, "orders": replays, "validation": size, "inputs": len(labels) - size, "watch": shares}


# --- delays -----------------------------------------------------------------------------------------------------------


def delays(
    suite_name: str, sets: Mapping[str, Columns], replays: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure how many inputs pass between a change and the alarm, at alpha = 0.01."""
    alpha = 0.01
    validation = sets["validation"]["score"]
    test = sets["test"]["score"]
    outliers = "svhn" if suite_name == "cifar10" else "fashion-mnist"
    changes = {name: (sets[name]["score"], 1.0) for name in sets if name.startswith(("severity", "rotation"))}
    changes |= {f"{share:.0%} {outliers}": (sets[outliers]["score"], share) for share in (0.01, 0.05, 0.2)}
    rows = []
    for name, (scores, share) in changes.items():
        measured: dict[str, list[float]] = {"watch": [], "mapie": [], "daily": []}
        whole = []
        false = dict.fromkeys(measured, 0)
        for replay in range(replays):
            draw = np.random.default_rng(replay)
            order = draw.permutation(test)
            calm, usual = order[:CALM], order[CALM:]
            changed = np.where(draw.random(LONGEST) < share, draw.choice(scores, LONGEST), draw.choice(usual, LONGEST))
            stream = np.concatenate([calm, changed])
            delay = crossing(p_values_of(validation, stream, replay), alpha, CALM)
            measured["watch"].append(math.inf if delay is None else delay)
            false["watch"] += delay == 0
            everything = np.concatenate([draw.permutation(validation), stream])
            whole.append(ScoreCounts().add(everything, uniform_draws(replay, 0, len(everything)))[1])
            false["daily"] += days_until(validation, calm, alpha) is not None
            delay = days_until(validation, changed, alpha)
            measured["daily"].append(math.inf if delay is None else delay)
        for capital in jumper(np.stack(whole)):
            before = len(validation) + CALM
            false["mapie"] += bool((capital[100:before] > 1 / alpha).any())
            reached = np.flatnonzero(capital[before:] > 1 / alpha)
            measured["mapie"].append(float(reached[0]) + 1 if len(reached) else math.inf)
        row: dict[str, Any] = {"suite": suite_name, "change": name, "replays": replays}
        for test_name, values in measured.items():
            median = float(np.quantile(values, 0.5, method="higher"))
            row[test_name] = None if math.isinf(median) else median
            row[f"{test_name}_seen"] = float(np.isfinite(values).mean())
            row[f"{test_name}_false"] = false[test_name] / replays
        rows.append(row)
        say(f"delays: {suite_name}, {name}")
    return rows


# --- accuracy ---------------------------------------------------------------------------------------------------------


def transported(probs: Array, shares: Array) -> float:
    """Return COT: the mean probability of the best assignment of labels in the proportions of the validation data."""
    count = len(probs)
    ends = np.round(np.cumsum(shares) * count).astype(int)
    labels = np.repeat(np.arange(len(shares)), np.diff(ends, prepend=0))
    rows, columns = linear_sum_assignment(-probs[:, labels])
    return float(probs[rows, labels[columns]].mean())


METHODS = {
    "mean confidence": "probs",
    "mean confidence, DE-T": "scaled",
    "DoC, DE-T": "scaled",
    "DoC": "probs",
    "agreement (GDE)": "probs",
    "ATC, DE-T": "scaled",
    "ATC": "probs",
    "COT": "probs",
}
"""Methods, and the predictor whose accuracy each of them estimates: the posterior, or the ensemble with a temperature."""


class Estimators:
    """The methods, calibrated on the validation data of one posterior."""

    def __init__(self, validation: Columns) -> None:
        self.correct = {
            name: (validation[name].argmax(1) == validation["labels"]).astype(float) for name in ("probs", "scaled")
        }
        self.confidence = {name: validation[name].max(1) for name in self.correct}
        self.thresholds = {
            name: ConfidenceThreshold.fit(self.confidence[name][:, None], self.correct[name][:, None])
            for name in self.correct
        }
        self.shares = np.bincount(validation["labels"], minlength=validation["probs"].shape[1]) / len(
            validation["labels"]
        )
        self.baseline = Baseline.of_columns(
            validation["score"], self.confidence["probs"][:, None], self.correct["probs"][:, None]
        )

    def estimates(self, columns: Columns) -> dict[str, float]:
        """Return the estimate of each method."""
        values = {"agreement (GDE)": float(columns["agreement"].mean())}
        if len(columns["labels"]) <= 1000:
            values["COT"] = transported(columns["probs"], self.shares)
        for suffix, name in (("", "probs"), (", DE-T", "scaled")):
            confidence = columns[name].max(1)
            mean = float(confidence.mean())
            values[f"mean confidence{suffix}"] = mean
            fall = float(self.confidence[name].mean()) - mean
            values[f"DoC{suffix}"] = float(self.correct[name].mean()) - fall
            values[f"ATC{suffix}"] = float(self.thresholds[name].shares(confidence[:, None]).mean())
        return values


def accuracy_sets(suite: str, sets: Mapping[str, Columns], seed: int) -> Iterator[tuple[str, str, Columns]]:
    """Yield the kind, the name and the columns of each set whose accuracy is estimated."""
    draw = np.random.default_rng(seed)

    def part(columns: Columns, rows: Any) -> Columns:
        return {name: values[rows] for name, values in columns.items()}

    def some(columns: Columns, count: int) -> Columns:
        return part(columns, draw.permutation(len(columns["labels"]))[:count])

    def of_classes(columns: Columns, labels: Array) -> Columns:
        return part(columns, np.flatnonzero(np.isin(columns["labels"], labels))[:1000])

    def joined(parts: list[Columns]) -> Columns:
        return {name: np.concatenate([columns[name] for columns in parts]) for name in parts[0]}

    test = sets["test"]
    for size in (50, 200, 1000, 5000):
        for repeat in range(4):
            if size <= len(test["labels"]):
                yield f"test, {size} inputs", f"{size}, {repeat}", some(test, size)
    classes = np.unique(test["labels"])
    few = 2 if len(test["labels"]) / len(classes) > 10 else len(classes) // 10  # ImageNet has two images of each class
    title = "two classes" if few == 2 else "a tenth of the classes"
    size = min(1000, len(test["labels"]) // 2)
    for repeat in range(6):  # a few classes only, and classes in geometric proportions
        chosen = draw.choice(classes, few, replace=False)
        yield title, f"{repeat}", of_classes(test, chosen)
        weights = 0.6 ** draw.permutation(min(len(classes), 10)).astype(float)
        chance = weights[test["labels"] % len(weights)]
        rows = draw.choice(len(test["labels"]), size, replace=False, p=chance / chance.sum())
        yield "other proportions", f"{repeat}", part(test, rows)
    for level in SEVERITIES:
        corrupted = {name: columns for name, columns in sets.items() if name.endswith(f"severity {level}")}
        for name, columns in corrupted.items():
            if len(corrupted) > 1:
                yield "corruption", name, columns
        if corrupted:
            mixture = joined(list(corrupted.values()))
            mixture = some(mixture, len(mixture["labels"]))  # in random order
            yield "mixed corruptions", f"severity {level}", part(mixture, slice(5000))
            if few == 2:
                pair = draw.choice(classes, 2, replace=False)
                yield "corruption, two classes", f"severity {level}", of_classes(mixture, pair)
    for name in sets:
        if name.startswith("rotation"):
            for repeat in range(3):
                yield "rotation", f"{name}, {repeat}", some(sets[name], 1000)
    outside = {
        "cifar10": ("svhn", "cifar100"),
        "mnist": ("fashion-mnist", "kmnist"),
        "clinc150": ("out of scope",),
        "imagenet": ("svhn", "notmnist"),
    }
    for name in outside[suite]:
        others = sets[name] | {"labels": np.full(len(sets[name]["labels"]), -1)}  # never right
        count = min(1000, len(others["labels"]))
        for share in (0.05, 0.2, 0.5, 1.0):
            strange = round(share * count)
            kind = f"{share:.0%} outliers" if share < 1 else "outliers alone"
            yield kind, f"{name}, {share}", joined([some(test, count - strange), some(others, strange)])


def accuracy(suite: str, group: int, sets: Mapping[str, Columns]) -> list[dict[str, Any]]:
    """Estimate the accuracy on every set; `group` numbers the networks or, for ImageNet, the rotations."""
    estimators = Estimators(sets["validation"])
    threshold = estimators.baseline.confidence
    assert threshold is not None
    rows = []
    for kind, name, columns in accuracy_sets(suite, sets, group if suite == "imagenet" else 0):
        truth = {
            predictor: float((columns[predictor].argmax(1) == columns["labels"]).mean())
            for predictor in ("probs", "scaled")
        }
        shares = threshold.shares(columns["probs"].max(1)[:, None])
        expected = threshold.estimate(shares, np.zeros(len(shares), dtype=bool))
        assert expected.low is not None
        assert expected.high is not None
        errors = {
            method: round(value - truth[METHODS[method]], 5) for method, value in estimators.estimates(columns).items()
        }
        beyond = {
            f"{level}": {
                name: columns[name] > np.quantile(sets["validation"][name], level) for name in ("score", "distance")
            }
            for level in (0.95, 0.99)
        }
        rows.append(
            {
                "suite": suite,
                "group": group,
                "kind": kind,
                "set": name,
                "inputs": len(columns["labels"]),
                "truth": round(truth["probs"], 5),
                "strange": round(float((columns["score"] > estimators.baseline.strange).mean()), 5),
                "beyond": {
                    level: [
                        round(float(masks.mean()), 5)
                        for masks in (by["score"], by["distance"], by["score"] | by["distance"])
                    ]
                    for level, by in beyond.items()
                },
                "covered": expected.low <= truth["probs"] <= expected.high,
                "errors": errors,
            }
        )
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean absolute error of each method in points, over all sets of a kind, and of ATC with and without its refusals."""
    table = []
    keys = dict.fromkeys((row["suite"], row["chosen"], row["kind"]) for row in rows)
    for suite, chosen, kind in keys:
        members = [row for row in rows if (row["suite"], row["chosen"], row["kind"]) == (suite, chosen, kind)]
        entry: dict[str, Any] = {"suite": suite, "chosen": chosen, "kind": kind, "sets": len(members)}
        for method in METHODS:
            errors = [abs(row["errors"][method]) for row in members if method in row["errors"]]
            entry[method] = 100 * float(np.mean(errors)) if errors else None
        answered = [row for row in members if row["strange"] <= MOST_STRANGE]
        entry["refused"] = 1 - len(answered) / len(members)
        for name, selected in (
            ("answered", answered),
            ("withheld", [row for row in members if row["strange"] > MOST_STRANGE]),
        ):
            errors = [100 * abs(row["errors"]["ATC"]) for row in selected]
            entry[f"{name} error"] = float(np.mean(errors)) if errors else None
            entry[f"{name} worst"] = float(np.max(errors)) if errors else None
        entry["covered"] = float(np.mean([row["covered"] for row in answered])) if answered else None
        table.append(entry)
    return table


def from_clinc(data: Path) -> dict[str, Columns]:
    """Train five small networks on CLINC150, and predict its sets."""
    requests = load_clinc150(data)
    names = {"train": "train", "validation": "val", "test": "test", "out of scope": "oos_test"}
    parts: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
        name: (embed(requests[part].sentences), torch.tensor(requests[part].labels)) for name, part in names.items()
    }
    posterior, test, others = trained(parts | {"held out": parts["validation"]}, 256, 150, 20)
    sets = {"validation": others["held out"], "test": test, "out of scope": others["out of scope"]}
    validation = sets["validation"]
    assert validation.labels is not None
    temperature = fit_temperature(posterior.predict(validation.features).logit_mean.transpose(0, 1), validation.labels)
    scaled = mola.ensemble([network.scaled(temperature) for network in posterior.networks])
    return {name: predicted(posterior, scaled, iter([rows.features]), rows.labels) for name, rows in sets.items()}


# --- cost -------------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the least processor time of some repeats, which other processes disturb least."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def cost(quick: bool) -> dict[str, Any]:
    """Compare `update` with the prediction of a batch by ResNet-20, and follow the memory over a long stream."""
    torch.manual_seed(0)
    network = build_network("resnet-20", 10).eval()
    images = torch.randn(1000, 3, 32, 32)
    labels = torch.randint(10, (1000,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MolaWarning)
        posterior = mola.fit(network, [(images[:500], labels[:500])], [(images[500:], labels[500:])], progress=False)
        watch = mola.watch(posterior, [(images[500:], labels[500:])])
    times = []
    for batch in (32, 128, 256, 1000):
        inputs = images[:batch]
        prediction = posterior.predict(inputs).computed()
        predict = seconds(lambda inputs=inputs: posterior.predict(inputs).computed(), 2 if quick else 5)
        update = seconds(lambda prediction=prediction: watch.update(prediction), 5 if quick else 20)
        times.append({"batch": batch, "predict": predict, "update": update, "share": update / predict})
    draw = np.random.default_rng(0)
    validation = draw.normal(size=2000)
    correct = (draw.random((2000, 1)) < 0.9).astype(float)
    stream = Watch.of(Baseline.of_columns(validation, draw.random((2000, 1)), correct), WatchOptions())
    memory = []
    batch = 10_000
    total = 200_000 if quick else 10_000_000
    probs = torch.full((batch, 2), 0.5, dtype=torch.float64)
    began = time.process_time()
    for count in range(batch, total + 1, batch):
        stream.update(mola.Prediction({"probs": probs, "ood_score": torch.from_numpy(draw.normal(size=batch))}))
        if count in (100_000, 1_000_000, total):
            tensors = stream.pack()[1]
            memory.append(
                {
                    "inputs": count,
                    "state_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
                    "largest_resident_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                    "bins": len(stream.streams[0].scores.bins),
                    "alarm": bool(stream.alarm),
                }
            )
    per_input = (time.process_time() - began) / total
    return {"times": times, "memory": memory, "seconds_per_input": per_input}


def broken(document: dict[str, Any]) -> list[str]:
    """Return the promises that the measurements contradict: more false alarms than chance allows, or `update` above 1 % of prediction."""
    promises = []
    for row in document.get("false_alarms", []):
        error = math.sqrt(row["alpha"] * (1 - row["alpha"]) / row["replays"])
        if row["watch"] > row["alpha"] + 4 * error:
            promises.append(f"{row['watch']:.1%} false alarms at alpha = {row['alpha']:g}")
    for row in document.get("cost", {}).get("times", []):
        if row["batch"] >= 128 and row["share"] > 0.01:
            promises.append(f"update takes {row['share']:.1%} of the prediction of {row['batch']} inputs")
    return promises


# --- the run ----------------------------------------------------------------------------------------------------------


MEASURED = ("mnist", "cifar10", "clinc150", "imagenet")
"""Suites in the order of the record."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--cifar10", type=Path, help="folder of at least ten ResNet-20s for CIFAR-10")
    parser.add_argument(
        "--imagenet", type=Path, help="folder of ImageNet, SVHN and notMNIST, for two EfficientNet-Lites"
    )
    parser.add_argument("--clinc150", type=Path, help="folder of CLINC150")
    parser.add_argument("--cache", type=Path, default=Path("activations"), help="folder of the activations")
    parser.add_argument("--only", nargs="*", default=[], help="parts to run; by default, all")
    parser.add_argument(
        "--suites",
        nargs="*",
        default=MEASURED,
        help="suites to measure; rows of others are kept",
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", MolaWarning)

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    def wanted(part: str) -> bool:
        return not options.only or part in options.only

    document = record.read("watch") if record.exists("watch") and not options.quick else {}
    if wanted("false_alarms"):
        document["mapie_agrees"] = agrees_with_mapie()
        document["false_alarms"] = false_alarms(20 if options.quick else 1000, 2000 if options.quick else 10_000, say)
    if wanted("cost"):
        document["cost"] = cost(options.quick)
    for part in ("delays", "accuracy"):
        if wanted(part):
            document[part] = [row for row in document.get(part, []) if row["suite"] not in options.suites]

    def estimate(name: str, group: int, sets: Mapping[str, Columns]) -> None:
        chosen = name == "mnist" and group == 0  # the share `MOST_STRANGE` was chosen on these
        document["accuracy"] += [row | {"chosen": chosen} for row in accuracy(name, group, sets)]
        say(f"accuracy: {name}, {group}")

    if "mnist" in options.suites and options.data is not None and any(map(wanted, ("tuned", "delays", "accuracy"))):
        suite = open_mnist(options)
        for group in range(2):
            posterior, _, sets = from_suite(suite, group)
            if wanted("delays") and group == 1:
                document["delays"] += delays("mnist", sets, 50, say)
            if wanted("tuned") and group == 0:
                document["tuned"] = tuned(posterior, suite, 25, 8)
            if wanted("accuracy"):
                estimate("mnist", group, sets)
    if "cifar10" in options.suites and options.data is not None:
        if wanted("delays"):
            document["delays"] += delays("cifar10", from_suite(open_cifar10(options))[2], 50, say)
        if wanted("accuracy"):
            estimate("cifar10", 1, from_suite(open_corrupted_cifar10(options))[2])
    if "clinc150" in options.suites and options.clinc150 is not None and wanted("accuracy"):
        estimate("clinc150", 0, from_clinc(options.clinc150))
    if "imagenet" in options.suites and options.imagenet is not None and wanted("accuracy"):
        folds = open_imagenet(options)
        for fold, suite in enumerate(folds):
            estimate("imagenet", fold, from_suite(suite)[2])
        counts = {name: suite.sources[name].count for name in ("train", "validation", "test")}
        document["imagenet"] = {"folds": len(folds), "classes": counts["validation"], **counts}
    for part in ("delays", "accuracy"):
        document.get(part, []).sort(key=lambda row: MEASURED.index(row["suite"]))
    if "accuracy" in document:
        document["accuracy_summary"] = summary(document["accuracy"])
    document["environment"] = record.environment("scipy", "mapie")
    if options.quick:
        print(document)
    else:
        record.write("watch", document)
    for promise in broken(document):
        say(f"BROKEN: {promise}")
    return int(bool(broken(document)))


if __name__ == "__main__":
    sys.exit(main())
