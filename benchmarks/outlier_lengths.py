"""What the page on outliers says of variances and scores: five pretrained CIFAR-10 ResNet-20s against SVHN and CIFAR-100.

    python benchmarks/outlier_lengths.py --data DIR --networks DIR [--cache DIR]

Folders as in `cifar10.py` beside this file. Measures, for `kron` and `kron-exact` at the prior precision that the threshold
rule chooses, which share of a logit's variance is common to all classes, and how well the mean variance of an input's logits
tells outliers apart; then the plain norm of the features, the entropy of the plain ensemble, and the outlier score with its
maximum taken in either order.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mola
from mola.metrics import auroc
from mola.uncertainty import entropy, far_field_score

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
from cifar10 import Examples, load

SETS = ("test", "SVHN", "CIFAR-100")


def variances(posterior: mola.MoLA, data: Examples) -> tuple[Tensor, Tensor]:
    """For each input, the mean over components and classes of a logit's variance, and of its part common to all classes."""
    whole, common = [], []
    with torch.no_grad():
        for batch in data:
            moments = [component.moments(batch[0]) for component in posterior.components]
            whole.append(torch.stack([one.variance.mean(1) for one in moments]))
            common.append(torch.stack([(one.variance - one.contrast_variance).mean(1) for one in moments]))
    return torch.cat(whole, dim=1).double(), torch.cat(common, dim=1).double()


def scores(posterior: mola.MoLA, data: Examples) -> dict[str, Tensor]:
    """Outlier scores (n,) of each input."""
    lengths, means, norms = [], [], []
    with torch.no_grad():
        for batch in data:
            moments = [component.moments(batch[0]) for component in posterior.components]
            lengths.append(torch.stack([one.spread.length() for one in moments]))
            means.append(torch.stack([one.mean for one in moments]))
            norms.append(batch[0].norm(dim=2).mean(1))
    mean, length = torch.cat(means, dim=1), torch.cat(lengths, dim=1)
    alone = torch.ones(1).to(mean)
    members = [far_field_score(mean[[k]], length[[k]], alone) for k in range(len(mean))]
    return {
        "maximum of the average": far_field_score(mean, length, posterior.weights.to(mean)),
        "average of the maxima": torch.stack(members).mean(0),
        "plain feature norm": torch.cat(norms),
        "entropy of the ensemble": entropy(torch.softmax(mean.double(), dim=-1).mean(0)),
    }


def told_apart(values: dict[str, Tensor]) -> dict[str, float]:
    """AUROC of a score, for each set of outliers."""
    return {name: auroc(values["test"], values[name]) for name in SETS[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--networks", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    heads, examples = load(options.data, options.networks, count=5, cache=options.cache)
    rows: list[dict[str, Any]] = []
    for structure in ("kron", "kron-exact"):
        posterior = mola.fit(heads, examples["train"], examples["validation"], structure=structure)
        found = {name: variances(posterior, examples[name]) for name in SETS}
        rows.append(
            {
                "structure": structure,
                "prior_precision": posterior.prior_precision[0],
                "common_share": {name: float((common / whole).mean()) for name, (whole, common) in found.items()},
                "variance_auroc": told_apart({name: whole.mean(0) for name, (whole, _) in found.items()}),
            }
        )
    each = {name: scores(posterior, examples[name]) for name in SETS}
    document = {
        "environment": record.environment("mola-torch"),
        "settings": {"networks": 5, "train": 50_000, "rule": "threshold"},
        "rows": rows,
        "scores": [
            {"score": name, "auroc": told_apart({key: each[key][name] for key in SETS})} for name in each["test"]
        ],
    }
    record.write("outlier_lengths", document)
    for row in [*document["rows"], *document["scores"]]:
        print(row)


if __name__ == "__main__":
    main()
