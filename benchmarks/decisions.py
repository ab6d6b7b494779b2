"""Whether decisions keep their promises on real predictions: many splits, and what remains under shift.

    python benchmarks/decisions.py CACHE --clinc DATA_FULL_JSON [--splits 1000]

CACHE is the folder of activations that `mola bench mnist` and `mola bench cifar10` leave (their flag --cache). Five networks are
fitted, and tuned on the validation set of the suite. The predictions of the test set are then divided at random, many times: one part
calibrates, the other shows what became of the promises. CLINC150 is embedded and trained on as docs/howto/text-features.md does it;
its test sentences are divided.

- `answers`: the error rate of answers above `mola.abstain_threshold`. The promise is about the true error rate above the threshold, so
  calibration data are also drawn with replacement: then the true rate is known, that of all test data above it, and `violations`
  is the share of draws whose rate is higher than promised; it must not exceed one minus the certainty. `realised` is over the other
  part of plain splits, `above` the share of splits where that part came out above the promise, chance in that part included.
- `sets`: coverage and size of `mola.prediction_sets`; `worst_class` is the coverage of the class that is covered least.
- `alarms`: the rate of alarms at `mola.alarm_threshold`.
- `tuned_on_same`: the same promises if the posterior is tuned anew on each calibration part: what `mola fit` does.
- `shift`: promises made on test data, and what the shifted data or outliers show, with and without the alarm as a gate.
"""

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import outlier_score
import record
import torch
from torch import Tensor, nn

import mola
from mola.decisions.abstain import threshold_of
from mola.decisions.calibration import Calibration
from mola.decisions.sets import sets_of
from mola.errors import DataError, MolaWarning
from mola.posterior import MoLA
from mola.tuning.candidates import HeldOut

CERTAINTY = 0.95
FALSE_ALARMS = (0.01, 0.05)
SIZED = 20
"""Splits of which set sizes are measured."""
BESIDE = 100
"""Splits for the methods that stand beside the mixture: how much they answer, and how large their sets are."""
RETUNED = 10
"""Splits on which the posterior is tuned anew."""
SHIFTED = 10
"""Splits whose promises are taken to shifted data."""


@dataclass(frozen=True)
class Case:
    """A data set: how many data calibrate, which error rates are asked for, and which sets are shifted or outlying."""

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
    "clinc150": Case("clinc150", 2250, (0.02, 0.05), (), ("out of scope",)),
}


@dataclass(frozen=True)
class Said:
    """What a method says of a set."""

    probs: Tensor
    labels: Tensor | None
    score: Tensor | None = None

    def calibration(self) -> Calibration:
        assert self.labels is not None
        return Calibration.of(self.probs, self.labels)


def said_of(posterior: MoLA, data: HeldOut) -> dict[str, Said]:
    """A single network, the ensemble and the mixture of one set."""
    logits, probs, score = posterior.of_held_out(data, slice(0, len(data)))
    alone = torch.softmax(logits.double(), -1)
    return {
        "MAP": Said(alone[0], data.labels),
        "DE": Said(alone.mean(0), data.labels),
        "MoLA": Said(probs.double(), data.labels, score.double()),
    }


def from_cache(folder: Path, case: Case) -> tuple[MoLA, HeldOut, dict[str, HeldOut]]:
    """A fitted and tuned posterior, the test set, and the shifted and outlying sets."""
    files = outlier_score.catalogue(folder)
    width = outlier_score.SUITES[case.name][0]

    def parts(name: str) -> list[dict[str, Tensor]]:
        names = [f"{index:02}.safetensors" for index in range(outlier_score.COMPONENTS)]
        return outlier_score.read([files[name, network, width] for network in names])

    posterior = outlier_score.fitted(parts("train"))
    posterior = posterior.tune(outlier_score.held_out(parts("validation"), labelled=True), progress=False)
    others = {name: outlier_score.held_out(parts(name), labelled=True) for name in case.shifted}
    others |= {name: outlier_score.held_out(parts(name), labelled=False) for name in case.outliers}
    return posterior, outlier_score.held_out(parts("test"), labelled=True), others


def from_sentences(path: Path) -> tuple[MoLA, HeldOut, dict[str, HeldOut]]:
    """The same for CLINC150, by the recipe of docs/howto/text-features.md."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    folder = Path(str(distribution("wordllama").locate_file("wordllama")))
    table = load_file(folder / "weights/l2_supercat_256.safetensors")["embedding.weight"].astype(np.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizers/l2_supercat_tokenizer_config.json"))
    data = json.loads(path.read_text(encoding="utf-8"))
    intents = {intent: place for place, intent in enumerate(sorted({intent for _, intent in data["train"]}))}

    def rows(part: str) -> tuple[Tensor, Tensor]:
        tokens = [tokenizer.encode(text, add_special_tokens=False).ids for text, _ in data[part]]
        embedded = torch.from_numpy(np.stack([table[ids].mean(0) for ids in tokens]))
        return embedded, torch.tensor([intents.get(intent, 0) for _, intent in data[part]])

    train, val, test, outside = (rows(part) for part in ("train", "val", "test", "oos_test"))
    networks = []
    for seed in range(5):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 150))
        optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
        for _ in range(20):
            for some in torch.randperm(len(train[0])).split(256):
                optimiser.zero_grad()
                nn.functional.cross_entropy(network(train[0][some]), train[1][some]).backward()
                optimiser.step()
        networks.append(network.eval())

    def seen(part: tuple[Tensor, Tensor], *, labelled: bool) -> HeldOut:
        with torch.no_grad():
            hidden = [network[:2](part[0]) for network in networks]
            logits = [network[2](one) for network, one in zip(networks, hidden, strict=True)]
        features = [torch.cat([one, torch.ones(len(one), 1)], 1) for one in hidden]
        return HeldOut(features, logits, part[1] if labelled else None)

    posterior = mola.fit(networks, [train], progress=False).tune(seen(val, labelled=True), progress=False)
    return posterior, seen(test, labelled=True), {"out of scope": seen(outside, labelled=False)}


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
    """Promised and realised error rates of answers."""
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
            threshold = threshold_of(known.rows(rows), rate, CERTAINTY, score=score)
        except DataError:
            without += 1
            continue
        violations += bool(true_rate[above(float(threshold))] > rate)
    realised, share, exceeded, none = [], [], 0, 0
    for rows, rest in splits.plain():
        try:
            threshold = threshold_of(known.rows(rows), rate, CERTAINTY, score=score)
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
    """Promised and realised coverage, and how large sets are."""
    held, worst, sizes, empty = [], [], [], []
    options = {"penalty": 0.01, "free": 2} if method == "raps" else {}
    scores = -known.true_probability if method == "lac" else known.mass_above + known.true_probability
    if method == "raps":
        scores = scores + 0.01 * (known.true_rank - 2).clamp_min(0)
    for place, (rows, rest) in enumerate(splits.plain()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MolaWarning)
            made = sets_of(known.rows(rows), coverage, method, by=by, **options)
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
    """Promised and realised false alarms."""
    found = [
        float((score[rest] > mola.alarm_threshold(score[rows], rate)).double().mean()) for rows, rest in splits.plain()
    ]
    return {"promised": rate, "realised": mean_and_error(found), "spread": float(f"{np.std(found, ddof=1):.5g}")}


def part_of(data: HeldOut, rows: Tensor) -> HeldOut:
    assert data.labels is not None
    return HeldOut([one[rows] for one in data.features], [one[rows] for one in data.logits], data.labels[rows])


def tuned_on_same(posterior: MoLA, test: HeldOut, case: Case, count: int) -> dict[str, Any]:
    """All promises, if the posterior is tuned on the data that calibrate."""
    realised: dict[str, list[float]] = {"coverage": [], "false alarms": []}
    wrong: dict[float, list[float]] = {rate: [] for rate in case.error_rates}
    for rows, rest in Splits(len(test), case.calibration, count).plain():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MolaWarning)
            tuned = posterior.tune(part_of(test, rows), progress=False)
        mine, other = said_of(tuned, part_of(test, rows))["MoLA"], said_of(tuned, part_of(test, rest))["MoLA"]
        known, new = mine.calibration(), other.calibration()
        assert mine.score is not None
        assert other.score is not None
        limit = sets_of(known, 0.9).threshold
        realised["coverage"].append(float((-new.true_probability <= limit).double().mean()))
        alarm = mola.alarm_threshold(mine.score, 0.05)
        realised["false alarms"].append(float((other.score > alarm).double().mean()))
        for rate in case.error_rates:
            try:
                threshold = float(threshold_of(known, rate, CERTAINTY))
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


def under_shift(case: Case, test: Said, others: dict[str, Said], rate: float, count: int) -> list[dict[str, Any]]:
    """What shifted data and outliers make of promises that were given on test data."""
    known = test.calibration()
    assert test.score is not None
    found: dict[str, dict[str, list[float]]] = {}

    def note(name: str, **values: float) -> None:
        for key, value in values.items():
            found.setdefault(name, {}).setdefault(key, []).append(value)

    for rows, rest in Splits(len(known), case.calibration, count).plain():
        mine = known.rows(rows)
        alarm = mola.alarm_threshold(test.score[rows], 0.05)
        made = sets_of(mine, 0.9)
        gated_score = torch.where(test.score[rows] > alarm, -math.inf, mine.confidence)
        try:
            plain = float(threshold_of(mine, rate, CERTAINTY))
            gated = float(threshold_of(mine, rate, CERTAINTY, score=gated_score))
        except DataError:
            continue
        unseen = Said(test.probs[rest], known.label[rest], test.score[rest])
        for name, said in {"test": unseen, **others}.items():
            assert said.score is not None
            confidence, label = said.probs.max(1)
            rings = said.score > alarm
            held = made(said.probs)
            answered, passed = confidence > plain, (confidence > gated) & ~rings
            note(
                name,
                alarms=float(rings.double().mean()),
                answered=float(answered.double().mean()),
                answered_gated=float(passed.double().mean()),
                size=float(held.sum(1).double().mean()),
                empty=float((held.sum(1) == 0).double().mean()),
            )
            if said.labels is not None and name not in case.outliers:
                wrong = label != said.labels
                inside = held[torch.arange(len(held)), said.labels]
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
    case: Case, posterior: MoLA, test: HeldOut, others: dict[str, HeldOut], count: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """All numbers of a case."""
    said = said_of(posterior, test)
    splits = Splits(len(test), case.calibration, count)
    found: dict[str, Any] = {
        "calibration": case.calibration,
        "test": len(test) - case.calibration,
        "classes": said["MoLA"].probs.shape[1],
        "answers": [],
        "sets": [],
        "alarms": [],
    }
    for method, one in said.items():
        known, own = one.calibration(), method == "MoLA"
        some = splits if own else Splits(len(test), case.calibration, min(count, BESIDE))
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
    score = said["MoLA"].score
    assert score is not None
    found["alarms"] = [alarms(score, splits, rate) for rate in FALSE_ALARMS]
    tell("tuned on the same data")
    found["tuned_on_same"] = tuned_on_same(posterior, test, case, min(count, RETUNED))
    tell("shifted data")
    far = {name: said_of(posterior, one)["MoLA"] for name, one in others.items()}
    found["shift"] = under_shift(case, said["MoLA"], far, case.error_rates[-1], min(count, SHIFTED))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="activations of `mola bench mnist` and `mola bench cifar10`")
    parser.add_argument("--clinc", type=Path, help="data_full.json of CLINC150")
    parser.add_argument("--splits", type=int, default=1000)
    parser.add_argument("--cases", default="mnist,cifar10,clinc150")
    parser.add_argument("--name", default="decisions", help="of the results")
    options = parser.parse_args()
    began = time.perf_counter()
    document: dict[str, Any] = {"splits": options.splits, "certainty": CERTAINTY, "cases": {}}
    # Cases of the same number of splits that were measured before, and are not asked for now, stay.
    if (record.RESULTS / f"{options.name}.json").exists() and (before := record.read(options.name))[
        "splits"
    ] == options.splits:
        document["cases"] = {name: one for name, one in before["cases"].items() if name not in options.cases.split(",")}
    for name in options.cases.split(","):
        case = CASES[name]

        def tell(what: str, name: str = name) -> None:
            print(f"{time.perf_counter() - began:6.0f} s  {name}: {what}", file=sys.stderr, flush=True)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MolaWarning)
            ready = from_sentences(options.clinc) if name == "clinc150" else from_cache(options.cache, case)
        document["cases"][name] = measure(case, *ready, options.splits, tell)
        document["environment"] = record.environment()
        record.write(options.name, document)


if __name__ == "__main__":
    main()
