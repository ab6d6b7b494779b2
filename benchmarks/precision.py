"""Float32 against float64: the same networks, fitted and asked in both, compared in probabilities.

    python benchmarks/precision.py [--quick]

Networks in float32 (sums and eigenproblems are float64 always) and their exact copies in float64. Ordinary features, and nearly
singular ones: features that are combinations of a few others, features that are almost always 0 or almost constant, and logits
so large that the curvature almost vanishes. Prior precisions from 1e-6 to 100. Fails where probabilities differ by more than 1e-4.
"""

import argparse
import copy
import sys
from collections.abc import Iterator
from typing import Any

import record
import torch
from torch import Tensor, nn

import mola

BAR = 1e-4
PRIORS = (1e-6, 1e-3, 1.0, 100.0)
INPUTS = 32


class Trunk(nn.Module):
    """Features of some kind."""

    def __init__(self, features: int, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, nn.Linear(INPUTS, features)
        self.register_buffer("mixing", torch.randn(8, features))
        self.register_buffer("sizes", torch.logspace(-6, 2, features))

    def forward(self, inputs: Tensor) -> Tensor:
        """Features (n, P)."""
        hidden = torch.relu(self.first(inputs))
        if self.kind == "combinations of 8":
            return hidden[:, :8] @ self.mixing
        if self.kind == "sizes from 1e-6 to 100":
            return hidden * self.sizes
        if self.kind == "almost constant":
            return 1 + 1e-4 * hidden
        return hidden


def network(features: int, classes: int, kind: str) -> nn.Module:
    torch.manual_seed(features + classes)
    made = nn.Sequential(Trunk(features, kind), nn.Linear(features, classes))
    with torch.no_grad():
        logits = made(torch.randn(256, INPUTS))
        # Confident, as trained networks are: logits a few units apart, or a hundred.
        made[1].weight.mul_((30 if kind == "certain" else 3) / float((logits - logits.mean(1, keepdim=True)).std()))
    return made.eval()


KINDS = ("ordinary", "combinations of 8", "sizes from 1e-6 to 100", "almost constant", "certain")
CASES = (
    ("full", 32, 10),
    ("kron", 256, 10),
    ("kron-exact", 256, 10),
    ("kron-diag", 256, 10),
    ("diag", 256, 10),
    ("kron", 512, 1000),
    ("kron-exact", 512, 1000),
    ("kron-diag", 512, 1000),
    ("diag", 512, 1000),
)
QUICK = (("kron", 64, 10), ("kron-diag", 64, 10))


def largest_difference(structure: str, features: int, classes: int, kind: str) -> dict[str, float]:
    """Over all prior precisions and inputs, by prior precision."""
    single = network(features, classes, kind)
    double = copy.deepcopy(single).double()
    inputs, labels = torch.randn(2 * features, INPUTS), torch.randint(classes, (2 * features,))
    asked = torch.cat([torch.randn(64, INPUTS), 10 * torch.randn(64, INPUTS)])
    posteriors = [
        mola.fit(
            one,
            [(some.to(kind_of), named) for some, named in zip(inputs.split(256), labels.split(256), strict=True)],
            structure=structure,
            progress=False,
        )
        for one, kind_of in ((single, torch.float32), (double, torch.float64))
    ]
    found = {}
    for prior in PRIORS:
        one, two = (posterior.with_prior_precision(prior) for posterior in posteriors)
        found[f"{prior:g}"] = float((one(asked).double() - two(asked.double())).abs().max())
    return found


def rows(cases: tuple[tuple[str, int, int], ...]) -> Iterator[dict[str, Any]]:
    for structure, features, classes in cases:
        for kind in KINDS:
            found = largest_difference(structure, features, classes, kind)
            yield {
                "structure": structure,
                "features": features,
                "classes": classes,
                "kind": kind,
                "largest": max(found.values()),
                "by_prior_precision": found,
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small matrices; writes no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = []
    print(f"{'structure':11} {'P':>5} {'C':>5} {'features':24} largest difference of probabilities")
    for row in rows(QUICK if options.quick else CASES):
        measured.append(row)
        print(
            f"{row['structure']:11} {row['features']:5} {row['classes']:5} {row['kind']:24} {row['largest']:.1e}",
            flush=True,
        )
    if not options.quick:
        record.write("precision", {"bar": BAR, "environment": record.environment("mola-torch"), "rows": measured})
    above = [row for row in measured if row["largest"] > BAR]
    for row in above:
        print(
            f"above {BAR:g}: {row['structure']}, P={row['features']}, C={row['classes']}, {row['kind']}: {row['largest']:.1e}"
        )
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
