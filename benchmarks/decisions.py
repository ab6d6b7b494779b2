"""Guarantees of abstention, prediction sets and alarms on real predictions: over many splits, and under shift.

    python benchmarks/decisions.py CACHE --clinc DATA_FULL_JSON [--splits 1000]
    python benchmarks/decisions.py --quick

CACHE is the folder of activations that `mola bench mnist` and `mola bench cifar10` leave (their flag --cache). Five networks are
fitted, and tuned on the validation set of the suite. The predictions of the test set are then divided at random, many times: one part
calibrates, the other shows what became of the guarantees. CLINC150 is embedded by means of token vectors.
--quick uses scikit-learn's digits and small networks, and writes no file.

- `answers`: the error rate of answers above `mola.abstain_threshold`. The guarantee is about the true error rate above the threshold,
  so calibration data are also drawn with replacement: then the true rate is known, that of all test data above it, and `violations` is
  the share of draws whose rate is too high; it must not exceed one minus the certainty. `realised` is over the other part of plain
  splits, `above` the share of splits where that part came out above the rate, chance in that part included.
- `sets`: coverage and size of `mola.prediction_sets`; `worst_class` is the coverage of the class that is covered least.
- `alarms`: the rate of alarms at `mola.alarm_threshold`.
- `tuned_on_same`: the same guarantees if the posterior is tuned anew on each calibration part, as `mola fit` does.
- `shift`: guarantees from test data on shifted data and outliers, with and without the alarm as a gate.

Exits with 1 if `violations` of MoLA's answers exceed one minus the certainty by more than chance, or coverage or alarms are off by
more than 4 standard errors.
"""

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from safetensors import safe_open
from torch import Tensor, nn

import mola
from mola.decisions.abstain import abstain_threshold
from mola.decisions.calibration import Calibration
from mola.decisions.sets import prediction_sets
from mola.errors import DataError, MolaWarning

CERTAINTY, COMPONENTS = 0.95, 5
FALSE_ALARMS = (0.01, 0.05)
SIZED = 20
"""Splits of which set sizes are measured."""
BESIDE = 100
"""Splits for MAP and DE: how much they answer, and how large their sets are."""
RETUNED = 10
"""Splits on which the posterior is tuned anew."""
SHIFTED = 10
"""Splits whose guarantees are tried on shifted data."""


@dataclass(frozen=True)
class Case:
    """A data set: number of calibration data, error rates, and names of the shifted and outlying sets."""

    name: str
    calibration: int
    error_rates: tuple[float, ...]
    shifted: tuple[str, ...]
    outliers: tuple[str, ...]
    width: int = 0
    """Number of features, by which a suite's files are found."""


CASES = {
    "mnist": Case(
        "mnist",
        4000,
        (0.002, 0.005),
        tuple(f"rotation {angle}" for angle in (15, 30, 45, 60, 90)),
        ("fashion-mnist", "emnist-letters", "kmnist", "notmnist"),
        84,
    ),
    "cifar10": Case(
        "cifar10",
        4000,
        (0.01, 0.02, 0.05),
        tuple(f"severity {level}" for level in range(1, 6)),
        ("svhn", "cifar100", "tinyimagenet", "mnist"),
        64,
    ),
    "digits": Case("digits", 500, (0.05,), (), ("noise",)),
    "clinc150": Case("clinc150", 2250, (0.02, 0.05), (), ("out of scope",)),
}


@dataclass(frozen=True)
class Rows:
    """Features (n, K, P) of K networks, and labels of a set: a loader."""

    features: Tensor
    labels: Tensor | None

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.features), 2000):
            rows = slice(start, start + 2000)
            yield self.features[rows] if self.labels is None else (self.features[rows], self.labels[rows])

    def __len__(self) -> int:
        return -(-len(self.features) // 2000)

    def part(self, rows: Tensor) -> "Rows":
        """Some of them."""
        return Rows(self.features[rows], None if self.labels is None else self.labels[rows])


class StoredHead(nn.Module):
    """The last layer of network k on stored features (n, K, P)."""

    def __init__(self, linear: nn.Linear, index: int) -> None:
        super().__init__()
        self.linear, self.index = linear, index

    def forward(self, features: Tensor) -> Tensor:
        """Logits of this network."""
        return self.linear(features[:, self.index])


Ready = tuple[mola.MoLA, Rows, dict[str, Rows]]
"""A fitted and tuned posterior, the test set, and the shifted and outlying sets."""


@dataclass(frozen=True)
class Outputs:
    """Probabilities, labels and outlier scores of one method on a set."""

    probs: Tensor
    labels: Tensor | None
    score: Tensor | None = None

    def calibration(self) -> Calibration:
        assert self.labels is not None
        return Calibration.of(self.probs, self.labels)


def outputs_of(posterior: mola.MoLA, data: Rows) -> dict[str, Outputs]:
    """A single network, the ensemble and the mixture on one set."""
    prediction = posterior.predict(data.features)
    alone = torch.softmax(prediction.logit_mean.double(), -1)
    return {
        "MAP": Outputs(alone[0], data.labels),
        "DE": Outputs(alone.mean(0), data.labels),
        "MoLA": Outputs(prediction.probs.double(), data.labels, prediction.ood_score.double()),
    }


def from_cache(folder: Path, case: Case) -> Ready:
    """From the activations of a suite."""
    files = {}
    for path in sorted(folder.glob("*/*.safetensors")):
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            files[about.get("set"), about.get("network"), file.get_slice("features").get_shape()[1]] = path

    def read(name: str, *wanted: str) -> list[list[Tensor]]:
        found = []
        for index in range(COMPONENTS):
            with safe_open(files[name, f"{index:02}.safetensors", case.width], "pt") as file:
                found.append([file.get_tensor(one) for one in wanted])
        return found

    def rows(name: str, *, labelled: bool = True) -> Rows:
        features = torch.stack([one[0] for one in read(name, "features")], 1)
        return Rows(features, read(name, "labels")[0][0] if labelled else None)

    heads = []
    for index, (weight, bias) in enumerate(read("train", "weight", "bias")):
        linear = nn.Linear(*weight.T.shape)
        linear.load_state_dict({"weight": weight, "bias": bias})
        heads.append(StoredHead(linear, index))
    posterior = mola.fit(heads, rows("train"), rows("validation"), progress=False)
    others = {name: rows(name) for name in case.shifted}
    others |= {name: rows(name, labelled=False) for name in case.outliers}
    return posterior, rows("test"), others


def trained(parts: dict[str, tuple[Tensor, Tensor | None]], hidden: int, classes: int, epochs: int) -> Ready:
    """Small networks, trained on vectors; sets beyond train, validation and test have no labels."""
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
    heads = [StoredHead(network[2], index) for index, network in enumerate(networks)]
    posterior = mola.fit(heads, sets.pop("train"), sets.pop("validation"), progress=False)
    return posterior, sets.pop("test"), sets


def from_sentences(path: Path) -> Ready:
    """CLINC150: each request is the mean of the vectors of its tokens."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    folder = Path(str(distribution("wordllama").locate_file("wordllama")))
    table = load_file(folder / "weights/l2_supercat_256.safetensors")["embedding.weight"].astype(np.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizers/l2_supercat_tokenizer_config.json"))
    data = json.loads(path.read_text(encoding="utf-8"))
    intents = {intent: place for place, intent in enumerate(sorted({intent for _, intent in data["train"]}))}
    parts: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name, part in (("train", "train"), ("validation", "val"), ("test", "test"), ("out of scope", "oos_test")):
        tokens = [tokenizer.encode(text, add_special_tokens=False).ids for text, _ in data[part]]
        known = None if part == "oos_test" else torch.tensor([intents[intent] for _, intent in data[part]])
        parts[name] = torch.from_numpy(np.stack([table[ids].mean(0) for ids in tokens])), known
    return trained(parts, 256, 150, 20)


def from_digits() -> Ready:
    """scikit-learn's digits with noise, so that there are errors."""
    from sklearn.datasets import load_digits

    pixels, labels = (torch.from_numpy(one) for one in load_digits(return_X_y=True))
    torch.manual_seed(0)
    order = torch.randperm(len(pixels))
    inputs = pixels[order].float() / 16 + 0.5 * torch.randn(len(pixels), 64)
    cut = {"train": slice(500), "validation": slice(500, 700), "test": slice(700, None)}
    parts: dict[str, tuple[Tensor, Tensor | None]] = {
        name: (inputs[rows], labels[order][rows]) for name, rows in cut.items()
    }
    return trained(parts | {"noise": (2 * torch.randn(500, 64), None)}, 64, 10, 30)


def mean_and_error(values: list[float]) -> list[float]:
    """Mean and its standard error over splits, to five digits."""
    known = np.array(values)
    error = known.std(ddof=1) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return [float(f"{number:.5g}") for number in (known.mean(), error)]


class Splits:
    """Random parts of n data: which calibrate."""

    def __init__(self, total: int, size: int, count: int) -> None:
        self.total, self.size, self.count = total, size, count

    def plain(self) -> Any:
        draw = np.random.default_rng(0)
        for _ in range(self.count):
            order = torch.from_numpy(draw.permutation(self.total))
            yield order[: self.size], order[self.size :]

    def drawn(self) -> Any:
        draw = np.random.default_rng(1)
        for _ in range(self.count):
            yield torch.from_numpy(draw.integers(0, self.total, self.size))


def answers(known: Calibration, splits: Splits, rate: float, score: str) -> dict[str, Any]:
    """Nominal and realised error rates of answers."""
    surety = known.confidence if score == "confidence" else -known.entropy
    order = surety.argsort(descending=True)
    ordered = surety[order]
    # Error rate of all data above any threshold: by how many are above it.
    true_rate = torch.cat([torch.zeros(1).double(), (~known.correct)[order].double().cumsum(0)])
    true_rate /= torch.arange(len(surety) + 1).clamp_min(1)

    def above(threshold: float) -> int:
        return int((ordered > (threshold if score == "confidence" else -threshold)).sum())

    violations = without = 0
    for rows in splits.drawn():
        try:
            threshold = abstain_threshold(known.rows(rows), None, rate, CERTAINTY, score=score)
        except DataError:
            without += 1
            continue
        violations += bool(true_rate[above(float(threshold))] > rate)
    realised, share, exceeded, none = [], [], 0, 0
    for rows, rest in splits.plain():
        try:
            threshold = abstain_threshold(known.rows(rows), None, rate, CERTAINTY, score=score)
        except DataError:
            none += 1
            continue
        side = surety[rest] > (float(threshold) if score == "confidence" else -float(threshold))
        wrong = float((~known.correct[rest][side]).double().mean()) if bool(side.any()) else 0.0
        realised.append(wrong)
        share.append(float(side.double().mean()))
        exceeded += wrong > rate
    best = int((true_rate <= rate).nonzero()[-1])
    return {
        "splits": splits.count,
        "score": score,
        "promised": rate,
        "certainty": CERTAINTY,
        "violations": violations / splits.count,
        "no_threshold": without / splits.count,
        "realised": mean_and_error(realised) if realised else None,
        "answered": mean_and_error(share) if share else None,
        "above": exceeded / splits.count,
        "no_threshold_in_splits": none / splits.count,
        "possible": best / len(surety),
        "all_answered": float((~known.correct).double().mean()),
    }


def sets(
    known: Calibration, probs: Tensor, splits: Splits, coverage: float, method: str, by: str | None
) -> dict[str, Any]:
    """Nominal and realised coverage, and how large sets are."""
    held, worst, sizes, empty = [], [], [], []
    options = {"penalty": 0.01, "free": 2} if method == "raps" else {}
    scores = -known.true_probability if method == "lac" else known.mass_above + known.true_probability
    if method == "raps":
        scores = scores + 0.01 * (known.true_rank - 2).clamp_min(0)
    for place, (rows, rest) in enumerate(splits.plain()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MolaWarning)
            made = prediction_sets(known.rows(rows), None, coverage, method, by=by, **options)
        limit = made.threshold[known.label[rest]] if by else made.threshold
        inside = (scores[rest] <= limit).double()
        held.append(float(inside.mean()))
        counts = torch.bincount(known.label[rest], minlength=known.classes)
        each = torch.bincount(known.label[rest], inside, known.classes) / counts.clamp_min(1)
        worst.append(float(each[counts > 0].min()))
        if place < SIZED:
            shown = made(probs[rest]).sum(1).double()
            sizes.append(float(shown.mean()))
            empty.append(float((shown == 0).double().mean()))
    return {
        "splits": splits.count,
        "kind": method,
        "by": by or "all",
        "promised": coverage,
        "realised": mean_and_error(held),
        "worst_class": mean_and_error(worst),
        "size": mean_and_error(sizes),
        "empty": mean_and_error(empty),
    }


def alarms(score: Tensor, splits: Splits, rate: float) -> dict[str, Any]:
    """Nominal and realised false alarms."""
    found = [
        float((score[rest] > mola.alarm_threshold(score[rows], rate)).double().mean()) for rows, rest in splits.plain()
    ]
    return {"promised": rate, "realised": mean_and_error(found), "spread": float(f"{np.std(found, ddof=1):.5g}")}


def tuned_on_same(posterior: mola.MoLA, test: Rows, case: Case, count: int) -> dict[str, Any]:
    """All guarantees, if the posterior is tuned on the calibration data."""
    realised: dict[str, list[float]] = {"coverage": [], "false alarms": []}
    wrong: dict[float, list[float]] = {rate: [] for rate in case.error_rates}
    for rows, rest in Splits(len(test.features), case.calibration, count).plain():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MolaWarning)
            tuned = posterior.tune(test.part(rows), progress=False)
        mine, other = outputs_of(tuned, test.part(rows))["MoLA"], outputs_of(tuned, test.part(rest))["MoLA"]
        known, new = mine.calibration(), other.calibration()
        assert mine.score is not None
        assert other.score is not None
        limit = prediction_sets(known, None, 0.9).threshold
        realised["coverage"].append(float((-new.true_probability <= limit).double().mean()))
        alarm = mola.alarm_threshold(mine.score, 0.05)
        realised["false alarms"].append(float((other.score > alarm).double().mean()))
        for rate in case.error_rates:
            try:
                threshold = float(abstain_threshold(known, None, rate, CERTAINTY))
            except DataError:
                continue
            side = new.confidence > threshold
            wrong[rate].append(float((~new.correct[side]).double().mean()))
    return {
        "splits": count,
        "coverage": {"promised": 0.9, "realised": mean_and_error(realised["coverage"])},
        "false_alarms": {"promised": 0.05, "realised": mean_and_error(realised["false alarms"])},
        "answers": [
            {"promised": rate, "realised": mean_and_error(found), "above": float(np.mean(np.array(found) > rate))}
            for rate, found in wrong.items()
            if found
        ],
    }


def under_shift(case: Case, test: Outputs, others: dict[str, Outputs], rate: float, count: int) -> list[dict[str, Any]]:
    """Guarantees from test data on shifted data and outliers."""
    known = test.calibration()
    assert test.score is not None
    found: dict[str, dict[str, list[float]]] = {}

    def note(name: str, **values: float) -> None:
        for key, value in values.items():
            found.setdefault(name, {}).setdefault(key, []).append(value)

    for rows, rest in Splits(len(known), case.calibration, count).plain():
        mine = known.rows(rows)
        alarm = mola.alarm_threshold(test.score[rows], 0.05)
        made = prediction_sets(mine, None, 0.9)
        gated_score = torch.where(test.score[rows] > alarm, -math.inf, mine.confidence)
        try:
            plain = float(abstain_threshold(mine, None, rate, CERTAINTY))
            gated = float(abstain_threshold(mine, None, rate, CERTAINTY, score=gated_score))
        except DataError:
            continue
        unseen = Outputs(test.probs[rest], known.label[rest], test.score[rest])
        for name, found_outputs in {"test": unseen, **others}.items():
            assert found_outputs.score is not None
            confidence, label = found_outputs.probs.max(1)
            rings = found_outputs.score > alarm
            held = made(found_outputs.probs)
            answered, passed = confidence > plain, (confidence > gated) & ~rings
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
        for name, numbers in found.items()
    ]


def measure(
    case: Case, posterior: mola.MoLA, test: Rows, others: dict[str, Rows], count: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """All numbers of a case."""
    found_outputs = outputs_of(posterior, test)
    splits = Splits(len(test.features), case.calibration, count)
    found: dict[str, Any] = {
        "calibration": case.calibration,
        "test": len(test.features) - case.calibration,
        "classes": found_outputs["MoLA"].probs.shape[1],
        "answers": [],
        "sets": [],
        "alarms": [],
    }
    for method, one in found_outputs.items():
        known, own = one.calibration(), method == "MoLA"
        some = splits if own else Splits(len(test.features), case.calibration, min(count, BESIDE))
        for rate in case.error_rates:
            tell(f"{method}, answers at {rate:g}")
            found["answers"].append({"method": method, **answers(known, some, rate, "confidence")})
        if own:
            found["answers"].append({"method": method, **answers(known, some, case.error_rates[-1], "entropy")})
        kinds: list[tuple[float, str, str | None]] = [(0.9, "lac", None), (0.99, "lac", None)]
        if own:
            kinds += [(0.9, "aps", None), (0.9, "raps", None), (0.9, "lac", "class")]
        for coverage, kind, by in kinds:
            if by == "class" and case.calibration / known.classes < 1.5 / (1 - coverage):
                continue  # too few of each class
            tell(f"{method}, sets at {coverage:g} by {kind}")
            found["sets"].append({"method": method, **sets(known, one.probs, some, coverage, kind, by)})
    score = found_outputs["MoLA"].score
    assert score is not None
    found["alarms"] = [alarms(score, splits, rate) for rate in FALSE_ALARMS]
    tell("tuned on the same data")
    found["tuned_on_same"] = tuned_on_same(posterior, test, case, min(count, RETUNED))
    tell("shifted data")
    far = {name: outputs_of(posterior, one)["MoLA"] for name, one in others.items()}
    found["shift"] = under_shift(case, found_outputs["MoLA"], far, case.error_rates[-1], min(count, SHIFTED))
    return found


def broken(found: dict[str, Any]) -> list[str]:
    """Guarantees that do not hold within chance."""
    wrong = []
    for row in found["answers"]:
        chance = math.sqrt(CERTAINTY * (1 - CERTAINTY) / row["splits"])
        if row["method"] == "MoLA" and row["violations"] > 1 - CERTAINTY + 4 * chance:
            wrong.append(f"answers at {row['promised']:g}: {row['violations']:.3f} of the draws above")
    for row in found["sets"]:
        mean, error = row["realised"]
        if mean < row["promised"] - 4 * error:
            wrong.append(f"sets, {row['method']} {row['kind']}: coverage {mean:.4f}, not {row['promised']:g}")
    for row in found["alarms"]:
        mean, error = row["realised"]
        if mean > row["promised"] + 4 * error:
            wrong.append(f"alarms: {mean:.4f}, not {row['promised']:g}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cache", type=Path, nargs="?", help="activations of `mola bench mnist` and `mola bench cifar10`"
    )
    parser.add_argument("--clinc", type=Path, help="data_full.json of CLINC150")
    parser.add_argument("--splits", type=int, default=1000)
    parser.add_argument("--cases", default="mnist,cifar10,clinc150")
    parser.add_argument("--quick", action="store_true", help="digits, 50 splits; writes no file")
    options = parser.parse_args()
    if options.quick:
        options.cases, options.splits = "digits", 50
    elif options.cache is None:
        parser.error("CACHE is needed, or --quick")
    began, wrong = time.perf_counter(), []
    document: dict[str, Any] = {"splits": options.splits, "certainty": CERTAINTY, "cases": {}}
    # Cases of the same number of splits that were measured before stay.
    if record.exists("decisions") and (before := record.read("decisions"))["splits"] == options.splits:
        document["cases"] = before["cases"]
    for name in options.cases.split(","):
        case = CASES[name]

        def tell(what: str, name: str = name) -> None:
            print(f"{time.perf_counter() - began:6.0f} s  {name}: {what}", file=sys.stderr, flush=True)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MolaWarning)
            ready = {"clinc150": lambda: from_sentences(options.clinc), "digits": from_digits}.get(
                name, lambda case=case: from_cache(options.cache, case)
            )()
        document["cases"][name] = measure(case, *ready, options.splits, tell)
        wrong += [f"{name}, {one}" for one in broken(document["cases"][name])]
        if not options.quick:
            document["environment"] = record.environment()
            record.write("decisions", document)
    for one in wrong:
        print(f"BROKEN {one}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
