"""Outlier scores where features saturate: small networks with `tanh` and with ReLU before the last layer, and inputs far away.

    python benchmarks/saturated_features.py

Eight inputs, normal; four linear functions of them with noise say what is true: which is largest (a class), or which
are positive (four labels). Three networks with one kind of activation in both hidden layers; the rule is "distance".
Far inputs are test inputs times ten, and test inputs moved by eight along all axes. AUROC of each score, mean and
standard error over seeds; the ensemble's confidence beside it.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import record
import torch
from torch import Tensor, nn

import mola
from mola.metrics import auroc

INPUTS, OUTPUTS, NETWORKS, SEEDS = 8, 4, 3, 10
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "ReLU": nn.ReLU}
LIKELIHOODS = ("categorical", "bernoulli")


def trained(activation: Callable[[], nn.Module], likelihood: str, seed: int, x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Linear(INPUTS, 32), activation(), nn.Linear(32, 16), activation(), nn.Linear(16, OUTPUTS)
    )
    loss = nn.CrossEntropyLoss() if likelihood == "categorical" else nn.BCEWithLogitsLoss()
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(400):
        optimiser.zero_grad()
        loss(network(x), y).backward()
        optimiser.step()
    return network.eval()


def sure(probs: Tensor, likelihood: str) -> Tensor:
    """How sure of its answer, on average over labels."""
    return probs.max(1).values if likelihood == "categorical" else torch.maximum(probs, 1 - probs).mean(1)


def measured(activation: str, likelihood: str, seed: int) -> dict[str, dict[str, float]]:
    """AUROC by kind of far input and score."""
    source = torch.Generator().manual_seed(seed)
    functions = torch.randn(INPUTS, OUTPUTS, generator=source) / INPUTS**0.5

    def data(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, INPUTS, generator=source)
        values = x @ functions + 0.3 * torch.randn(count, OUTPUTS, generator=source)
        return x, values.argmax(1) if likelihood == "categorical" else (values > 0).float()

    train, validation, test = data(600), data(300), data(300)[0]
    networks = [trained(ACTIVATIONS[activation], likelihood, NETWORKS * seed + one, *train) for one in range(NETWORKS)]
    posterior = mola.fit(networks, [train], [validation], rule="distance", likelihood=likelihood, progress=False)
    ensemble = mola.ensemble(networks, likelihood=likelihood)

    def scores(x: Tensor) -> dict[str, Tensor]:
        said = posterior.predict(x)
        assert said.far_field is not None
        assert said.distance is not None
        return {
            "ood_score": said.ood_score,
            "far field": said.far_field,
            "distance": said.distance,
            "confidence, MoLA (distance)": -sure(said.probs, likelihood),
            "confidence, DE": -sure(ensemble(x), likelihood),
        }

    usual = scores(test)
    return {
        kind: {name: auroc(usual[name], values) for name, values in scores(far).items()}
        for kind, far in {"times ten": 10 * test, "moved by eight": test + 8}.items()
    }


def main() -> None:
    rows: list[dict[str, Any]] = []
    for activation, likelihood in itertools.product(ACTIVATIONS, LIKELIHOODS):
        runs = [measured(activation, likelihood, seed) for seed in range(SEEDS)]
        for kind, first in runs[0].items():
            for score in first:
                values = np.array([run[kind][score] for run in runs])
                row = {"activation": activation, "likelihood": likelihood, "far": kind, "score": score}
                row |= {"auroc": values.mean(), "standard_error": values.std(ddof=1) / SEEDS**0.5}
                rows.append(row | {"lowest": values.min(), "highest": values.max()})
                print(
                    f"{activation:5} {likelihood:12} {kind:15} {score:28} {rows[-1]['auroc']:.3f} ± {rows[-1]['standard_error']:.3f}"
                )
    record.write("saturated_features", {"seeds": SEEDS, "environment": record.environment("mola-torch"), "rows": rows})


if __name__ == "__main__":
    main()
