"""Five pretrained CIFAR-10 ResNet-20s: calibration and outlier detection of MAP, deep ensemble, LLLA and MoLA.

    python benchmarks/real_cifar10.py --data DIR --networks DIR

Folders as in `cifar10.py` beside this file. Writes one JSON with every figure and prints a table. About ten minutes on two
cores, most of it the networks' passes over the images (`--cache` keeps what they give).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import mola
from mola import metrics
from mola.likelihoods import CATEGORICAL
from mola.outliers import max_probability_score

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cifar10 import Examples, load

EVALUATED = ("test", "SVHN", "CIFAR-100")
STRUCTURES = ("kron", "kron-exact", "diag", "full")
RULES = {"threshold": mola.rules.Threshold(), "NLL": mola.rules.Score("nll"), "distance": mola.rules.Distance()}


def figures(probs: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
    """Accuracy, log-loss, Brier score, ECE and mean confidence in distribution; AUROC and mean confidence outside."""
    test = probs["test"]
    result = {
        "accuracy": metrics.accuracy(test, labels),
        "nll": metrics.negative_log_likelihood(test, labels),
        "brier": metrics.brier(test, labels),
        "ece": metrics.expected_calibration_error(test, labels),
        "confidence": metrics.mean_confidence(test),
    }
    for name in EVALUATED[1:]:
        inside, outside = (max_probability_score(one, CATEGORICAL) for one in (test, probs[name]))
        result[f"{name} auroc"] = metrics.auroc(inside, outside)
        result[f"{name} confidence"] = metrics.mean_confidence(probs[name])
    return result


def predicted(posterior: mola.MoLA, data: dict[str, Examples]) -> dict[str, float]:
    """The figures of a posterior, those of its outlier score included."""
    predictions = {name: posterior.predict(data[name]) for name in EVALUATED}
    row = figures({name: one.probs for name, one in predictions.items()}, data["test"].labels)
    if posterior.structure is not None:
        for name in EVALUATED[1:]:
            inside, outside = predictions["test"], predictions[name]
            row[f"{name} auroc, entropy"] = metrics.auroc(inside.entropy, outside.entropy)
            row[f"{name} auroc, ood_score"] = metrics.auroc(inside.ood_score, outside.ood_score)
            row[f"{name} auroc, far field"] = metrics.auroc(inside.far_field, outside.far_field)
    return row


def evaluate(
    heads: Sequence[nn.Module], data: dict[str, Examples], structures: Sequence[str] = STRUCTURES
) -> dict[str, dict[str, float]]:
    """Every method's figures: one network (MAP, LLLA) and all of them (DE, MoLA)."""
    rows: dict[str, dict[str, float]] = {}
    for single, several, members in (("MAP", "LLLA", heads[:1]), ("DE", "MoLA", heads)):
        rows[single] = predicted(mola.ensemble(members), data)
        scaled = mola.baselines.temperature_scaled(members, data["validation"], progress=False)
        probs = {name: scaled.predict(data[name]).probs for name in EVALUATED}
        rows[f"{single}, temperature"] = figures(probs, data["test"].labels)
        for structure in structures:
            posterior = mola.fit(members, data["train"], structure=structure, progress=False)
            for name, rule in RULES.items():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", mola.errors.MolaWarning)  # that the grid grew shows in the result
                    tuned = posterior.tune(data["validation"], rule=rule)
                precision = {"prior_precision": tuned.prior_precision[0]}
                rows[f"{several} {structure}, {name}"] = predicted(tuned, data) | precision
    return rows


def table(rows: dict[str, dict[str, float]]) -> str:
    """The rows as Markdown."""
    lines = ["| method | λ | test NLL | ECE % | SVHN | CIFAR-100 |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        precision = f"{row['prior_precision']:.2g}" if "prior_precision" in row else ""
        outside = " | ".join(f"{100 * row[f'{one} auroc']:.1f}" for one in EVALUATED[1:])
        lines.append(f"| {name} | {precision} | {row['nll']:.3f} | {100 * row['ece']:.1f} | {outside} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--networks", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="folder to keep the networks' features in")
    parser.add_argument("--count", type=int, default=5, help="number of networks")
    parser.add_argument("--train", type=int, default=50_000, help="training images to fit on")
    parser.add_argument("--outliers", type=int, default=10_000, help="images of each outlier set at most")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "real_cifar10.json")
    options = parser.parse_args()
    sizes = {"count": options.count, "train": options.train, "outliers": options.outliers}
    rows = evaluate(*load(options.data, options.networks, **sizes, cache=options.cache))
    environment = {"mola": mola.__version__, "torch": torch.__version__, "python": platform.python_version()}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(
        json.dumps({"settings": sizes, "environment": environment, "rows": rows}, indent=1) + "\n"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
