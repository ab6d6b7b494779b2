"""What is different with a thousand classes and few data for the sums: ranks, spectra, confidence; from stored activations.

Reads what `mola bench imagenet --cross-fit` stored, for each network and rotation: the rank of the feature factor A and of the class
factor B, how much of A lies along its largest direction (the mean feature vector, common to all images) and how many directions hold
99 % of the rest; how sure the networks are and how often they are right; and the best temperature.

    python benchmarks/imagenet_facts.py --data DIR --cache activations --networks NAMES [--image-size 256] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import torch

import mola
from mola.baselines.temperature import fit_temperature
from mola.lab.activations import Activations
from mola.lab.named_networks import open_named
from mola.lab.suite import DataOptions
from mola.lab.suites.imagenet import IMAGENET

TOLERANCE = 1e-10
"""Of the largest eigenvalue: below it, an eigenvalue counts as 0."""


def spectrum(sums: torch.Tensor) -> torch.Tensor:
    """Eigenvalues of a symmetric matrix, the largest first."""
    return torch.linalg.eigvalsh(sums).flip(0).clamp(min=0)


def effective(values: torch.Tensor, share: float = 0.99) -> int:
    """How many of the largest values hold this share of the sum."""
    return int((values.cumsum(0) < share * values.sum()).sum()) + 1


def facts(features: torch.Tensor, logits: torch.Tensor) -> dict[str, float]:
    """Of one network's training data."""
    rows = torch.cat([features, torch.ones(len(features), 1)], dim=1).double()
    probs = logits.double().softmax(1)
    a = rows.T @ rows / len(rows)
    b = torch.diag(probs.mean(0)) - probs.T @ probs / len(probs)
    mean = rows.mean(0)
    values, curvature = spectrum(a), spectrum(b)
    return {
        "data": len(rows),
        "features": rows.shape[1],
        "classes": logits.shape[1],
        "rank A": int((values > TOLERANCE * values[0]).sum()),
        "rank B": int((curvature > TOLERANCE * curvature[0]).sum()),
        "share of the largest direction of A": float(values[0] / values.sum()),
        "share of A along the mean": float((mean @ a @ mean) / (mean @ mean) / values.sum()),
        "directions with 99 % of the rest of A": effective(values[1:]),
        "directions with 99 % of B": effective(curvature),
        "trace of B": float(curvature.sum()),
    }


def main() -> None:
    """Read, compute, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("activations"))
    parser.add_argument("--networks", required=True)
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--rotations", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/imagenet_facts.json"))
    options = parser.parse_args()
    chosen = DataOptions(
        options.data, image_size=options.image_size, normalisation="none", cross_fit=True, outliers=1, shifted=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mola.MolaWarning)
        folds = IMAGENET.make_folds(chosen).sources
    kept, networks = Activations(options.cache), open_named(options.networks, IMAGENET.outputs)
    found = []
    for rotation in range(options.rotations):
        fold = folds[rotation]
        sums, tune = (kept.read(networks, fold[name]) for name in ("train", "validation"))
        seen = [list(sums.only(index).slices()) for index in range(len(networks))]
        for index, network in enumerate(networks):
            features = torch.cat([part.features[:, 0] for part in seen[index]])
            logits = torch.cat([part.logits[:, 0] for part in seen[index]])
            held, labels = tune.logits()[index], tune.labels
            sure, guess = held.softmax(1).max(1)
            found.append(
                {
                    "rotation": rotation,
                    "network": network.label,
                    **facts(features, logits),
                    "accuracy": float((guess == labels).double().mean()),
                    "confidence": float(sure.mean()),
                    "temperature": fit_temperature(held, labels),
                }
            )
        held = tune.logits()
        probs = held.softmax(-1).mean(0)
        sure, guess = probs.max(1)
        found.append(
            {
                "rotation": rotation,
                "network": "mixture",
                "accuracy": float((guess == tune.labels).double().mean()),
                "confidence": float(sure.mean()),
                "temperature": fit_temperature(held, tune.labels),
            }
        )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"rows": found}, indent=1) + "\n")
    for row in found:
        print(row)


if __name__ == "__main__":
    main()
