"""Several labels for each input: scikit-learn's digits, asked whether they are even, above four, and have a loop.

    python benchmarks/labels.py benchmarks/results/labels.json

Each of ten runs shares the digits out anew and trains five networks by binary cross-entropy, with a tenth of the labels missing.
The methods are measured on test digits, on the same digits turned by 45 degrees (a shifted twin: their labels are as before, and the
networks have never seen them), and by how well they tell photographs from digits. About a minute.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import torch
from torch import Tensor

import mola
from mola import metrics
from mola.lab.data.embedded import load_digits, natural_patches
from mola.lab.data.transforms import rotate
from mola.lab.training import Labelled, Recipe, train_mlps

NAMES = ("even", "above four", "loop")
LOOPS = torch.tensor([0, 6, 8, 9])
NETWORKS, ANGLE, MISSING = 5, 45.0, 0.1


def labels_of(digits: Tensor) -> Tensor:
    """Three labels (n, 3), 0 or 1, of each digit."""
    return torch.stack([digits % 2 == 0, digits > 4, torch.isin(digits, LOOPS)], 1).double()


def measured(method: mola.Mixture, inputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Numbers over labels: each label of each input counts as one."""
    prediction = method.predict(inputs)
    yes, truth = prediction.probs.flatten(), labels.flatten().long()
    pair = torch.stack([1 - yes, yes], 1)
    return {
        "accuracy": metrics.accuracy(pair, truth),
        "nll": metrics.negative_log_likelihood(pair, truth),
        "ece": metrics.expected_calibration_error(pair, truth),
        "confidence": float(prediction.confidence.mean()),
        "auroc": float(metrics.auroc_of_labels(prediction.probs, labels).mean()),
        "average_precision": float(metrics.average_precision_of_labels(prediction.probs, labels).mean()),
    }


def one_run(seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Every method on every set, for one way to share out the digits."""
    digits = load_digits(seed)
    train, val, test = (
        Labelled(part.inputs.double(), labels_of(part.labels)) for part in (digits.train, digits.val, digits.test)
    )
    generator = torch.Generator().manual_seed(seed)
    holes = train.labels.clone()
    holes[torch.rand(holes.shape, generator=generator, dtype=torch.float64) < MISSING] = torch.nan
    seen = Labelled(train.inputs.flatten(1), holes)
    recipe = Recipe(40, 50, 1e-2, 1e-2)
    networks = train_mlps(64, (64,), len(NAMES), seen, recipe, members=NETWORKS, seed=seed, loss="binary-cross-entropy")
    loaders = {"train_loader": seen.batches(), "val_loader": Labelled(val.inputs.flatten(1), val.labels).batches()}
    options = {"likelihood": "bernoulli", "progress": False}
    methods = {
        "MAP": mola.ensemble(networks[0], likelihood="bernoulli"),
        "DE": mola.ensemble(networks, likelihood="bernoulli"),
        "DE-T": mola.temperature_scaled(networks, loaders["val_loader"], likelihood="bernoulli", progress=False),
        "LLLA": mola.fit(networks[0], **loaders, rule="nll", **options),
        "MoLA": mola.fit(networks, **loaders, rule="nll", **options),
        "MoLA (threshold)": mola.fit(networks, **loaders, **options),
        "MoLA (distance)": mola.fit(networks, **loaders, rule="distance", **options),
    }
    turned = rotate(test.inputs.reshape(-1, 1, 8, 8), ANGLE)
    photographs = natural_patches(500, 8, seed=seed).double()
    found = {}
    for name, method in methods.items():
        far, near = (method.predict(some.flatten(1)) for some in (photographs, test.inputs))
        found[name] = {
            "test": measured(method, test.inputs.flatten(1), test.labels),
            "turned": measured(method, turned.flatten(1), test.labels),
            "photographs": {
                "confidence": float(far.confidence.mean()),
                "auroc": metrics.auroc(near.ood_score, far.ood_score),
            },
        }
    return found


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", mola.MolaWarning
        )  # searches that end at a limit; the numbers show what they found
        runs = [one_run(seed) for seed in range(options.runs)]
    summary: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for method, sets in runs[0].items():
        for where, numbers in sets.items():
            for name in numbers:
                values = torch.tensor([run[method][where][name] for run in runs], dtype=torch.float64)
                error = float(values.std() / len(values) ** 0.5) if len(values) > 1 else 0.0
                summary.setdefault(method, {}).setdefault(where, {})[name] = {
                    "mean": float(f"{float(values.mean()):.6g}"),
                    "error": float(f"{error:.3g}"),
                }
    document = {"runs": options.runs, "networks": NETWORKS, "angle": ANGLE, "missing": MISSING, "methods": summary}
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    for where in ("test", "turned", "photographs"):
        names = list(summary["MAP"][where])
        print(f"\n{where:18}" + "".join(f"{name:>18}" for name in names))
        for method, sets in summary.items():
            print(f"{method:18}" + "".join(f"{one['mean']:11.4f}±{one['error']:.4f}" for one in sets[where].values()))


if __name__ == "__main__":
    main()
