"""Draw the figures of a toy problem in docs/method.md: `python docs/figures/modes.py`.

Five small networks are trained on two moons, each to a mode of the same posterior (full batches, weight decay = prior precision / N).
The figures show this posterior along the straight lines between the modes, the last layer's posterior around each mode with its
Laplace approximation, and the confidence of four predictors over the plane. The numbers are written to
`benchmarks/results/modes.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import molaplace as mola
from molaplace.demo import two_moons
from molaplace.perceptrons import mlp
from molaplace.report.pictures import draw_maps
from molaplace.report.style import COLOURS, INK, Figure, as_png, drawing, quiet_axes

ROOT = Path(__file__).resolve().parent.parent.parent
MODES, POINTS, PRECISION = 5, 200, 0.1
EPOCHS = 4000
STEPS = 41
"""Number of points along each line between two modes."""
SCALES = (0.3, 1.9)
"""Smallest and largest factor by which the last layer's weights are multiplied around each mode."""
REACH, SIZE, FAR = 8.0, 161, 6.0
"""Half the side length of the map, its number of points per side, and the radius beyond which points count as far from the data."""

TITLE_COLOURS = {**COLOURS, "MoLA": COLOURS["paper"]}
"""Colours of the maps' titles; MoLA is tuned by the paper's rule."""


def log_posterior(network: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the log posterior of all weights up to a constant: the log-likelihood plus the log density of the Gaussian prior."""
    squares = sum((weight.square().sum() for weight in network.parameters()), torch.zeros(()))
    return -nn.functional.cross_entropy(network(inputs), labels, reduction="sum") - PRECISION / 2 * squares


def train(seed: int, inputs: Tensor, labels: Tensor) -> nn.Sequential:
    """Train a network to a mode of the posterior."""
    torch.manual_seed(seed)
    network = mlp(2, (16, 16), 2).double()
    optimiser = torch.optim.Adam(network.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS)
    for _ in range(EPOCHS):
        optimiser.zero_grad()
        (-log_posterior(network, inputs, labels)).backward()
        optimiser.step()
        schedule.step()
    return network


def along_lines(networks: Sequence[nn.Module], inputs: Tensor, labels: Tensor) -> np.ndarray:
    """Return the log posterior (modes - 1, STEPS) along the straight lines between consecutive modes."""
    walker = mlp(2, (16, 16), 2).double()
    ends = [parameters_to_vector(network.parameters()).detach() for network in networks]
    values = []
    for start, end in pairwise(ends):
        for share in torch.linspace(0, 1, STEPS, dtype=torch.float64):
            vector_to_parameters(torch.lerp(start, end, share), walker.parameters())
            values.append(float(log_posterior(walker, inputs, labels).detach()))
    return np.array(values).reshape(len(ends) - 1, STEPS)


def around_mode(network: nn.Sequential, inputs: Tensor, labels: Tensor) -> dict[str, np.ndarray]:
    """Return the last layer's posterior and its Laplace approximation as functions of the scale of the weights (1 at the mode)."""
    with torch.no_grad():
        features = torch.cat([network[:-1](inputs), torch.ones(len(inputs), 1, dtype=torch.float64)], dim=1)
        weights = torch.cat([network[-1].weight, network[-1].bias[:, None]], dim=1)
    probs, logits = torch.softmax(features @ weights.T, dim=1), features @ weights.T
    # w'(H + lambda I)w is the curvature of the negative log posterior along the weight vector w.
    spread = (probs * logits.square()).sum(1) - (probs * logits).sum(1).square()
    precision = float(spread.sum() + PRECISION * weights.square().sum())
    scales = np.linspace(*SCALES, 241)
    exact = np.array(
        [
            -float(nn.functional.cross_entropy(scale * logits, labels, reduction="sum"))
            - PRECISION / 2 * scale**2 * float(weights.square().sum())
            for scale in scales
        ]
    )
    true, laplace = np.exp(exact - exact.max()), np.exp(-precision * (scales - 1) ** 2 / 2)
    return {
        "scales": scales,
        "true": true / np.trapezoid(true, scales),
        "laplace": laplace / np.trapezoid(laplace, scales),
    }


def draw_modes(wide: bool, lines: np.ndarray, local: Sequence[dict[str, np.ndarray]], peaks: Sequence[float]) -> Figure:
    """Draw the posterior between the modes in the top row and around each mode in the bottom row."""
    figure = Figure(figsize=(10.4, 4.6) if wide else (4.4, 4.9), layout="constrained")
    modes = local if wide else local[:3]
    grid = figure.add_gridspec(2, len(modes), height_ratios=(1.25, 1))
    above = figure.add_subplot(grid[0, :])
    quiet_axes(above)
    for index, values in enumerate(lines[: len(modes) - 1]):
        above.plot(np.linspace(index, index + 1, STEPS), values, color=INK, linewidth=1.4)
    above.scatter(range(len(modes)), peaks[: len(modes)], marker="*", s=170, color=INK, zorder=3)
    above.set_xticks(range(len(modes)), [f"mode {index + 1}" for index in range(len(modes))])
    above.set_ylabel("log posterior (nats)")
    above.set_title("Modes of one posterior" + (", with valleys between them" if wide else ""))
    for index, mode in enumerate(modes):
        panel = figure.add_subplot(grid[1, index])
        quiet_axes(panel)
        panel.fill_between(mode["scales"], mode["true"], color=COLOURS["MAP"], alpha=0.35, linewidth=0)
        panel.plot(mode["scales"], mode["laplace"], color=COLOURS["LLLA"])
        panel.scatter([1], [0], marker="*", s=170, color=INK, zorder=3, clip_on=False)
        panel.set_yticks([])
        panel.set_ylim(bottom=0)
        panel.set_xlim(*SCALES)
        panel.set_xticks([0.5, 1, 1.5], ["½", "1", "1½"])
        if index == len(modes) // 2:
            panel.set_xlabel("scale of the last layer's weights")
        if index == 0:
            panel.set_title("Around each mode")
    parts = ("star: a trained network", "grey: the last layer's posterior", "orange: its Laplace approximation")
    figure.supxlabel((" \N{MIDDLE DOT} " if wide else "\n").join(parts), fontsize=8)
    return figure


def main() -> None:
    """Train the networks, draw the figures and write the numbers."""
    torch.set_num_threads(1)
    data, held_out = two_moons(POINTS, seed=0), two_moons(POINTS, seed=1)
    inputs, labels = data.inputs.double(), data.labels
    batches, validation = [(inputs, labels)], [(held_out.inputs.double(), held_out.labels)]
    networks = [train(seed, inputs, labels) for seed in range(MODES)]
    peaks = [float(log_posterior(network, inputs, labels).detach()) for network in networks]
    lines = along_lines(networks, inputs, labels)
    local = [around_mode(network, inputs, labels) for network in networks]
    predictors = {
        "MAP": mola.ensemble(networks[0]),
        "DE": mola.ensemble(networks),
        "LLLA": mola.fit(networks[0], batches, validation, rule="threshold", progress=False),
        "MoLA": mola.fit(networks, batches, validation, rule="threshold", progress=False),
    }
    axis = torch.linspace(-REACH, REACH, SIZE, dtype=torch.float64)
    plane = torch.cartesian_prod(axis, axis).flip(1)
    with torch.no_grad():
        maps = {
            name: predictor(plane).max(1).values.reshape(SIZE, SIZE).numpy() for name, predictor in predictors.items()
        }
    far = (plane.norm(dim=1) > FAR).reshape(SIZE, SIZE).numpy()
    with drawing():
        for wide, ending in ((True, ""), (False, "-narrow")):
            folder = ROOT / "docs" / "images"
            (folder / f"modes{ending}.png").write_bytes(as_png(draw_modes(wide, lines, local, peaks)))
            columns, size = (4, 2.6) if wide else (2, 2.2)
            figure = draw_maps(maps, inputs, labels, REACH, TITLE_COLOURS, columns=columns, size=size)
            (folder / f"confidence{ending}.png").write_bytes(as_png(figure))
    numbers = {
        "points": POINTS,
        "weights": sum(weight.numel() for weight in networks[0].parameters()),
        "training_prior_precision": PRECISION,
        "log_posterior_at_modes": peaks,
        "lowest_between_modes": [float(values.min()) for values in lines],
        "shallowest_valley_nats": min(
            min(first, second) - float(values.min())
            for (first, second), values in zip(pairwise(peaks), lines, strict=True)
        ),
        "total_variation_laplace": [
            float(np.trapezoid(abs(mode["true"] - mode["laplace"]), mode["scales"]) / 2) for mode in local
        ],
        "mean_validation_confidence": {
            name: mola.metrics.mean_confidence(predictor(validation[0][0])) for name, predictor in predictors.items()
        },
        "validation_accuracy": {
            name: float((predictor(validation[0][0]).argmax(1) == held_out.labels).double().mean())
            for name, predictor in predictors.items()
        },
        "mean_far_confidence": {name: float(values[far].mean()) for name, values in maps.items()},
        "tuned_prior_precision": {name: predictors[name].prior_precision[0] for name in ("LLLA", "MoLA")},
    }
    numbers["largest_total_variation"] = max(numbers["total_variation_laplace"])
    path = ROOT / "benchmarks" / "results" / "modes.json"
    path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
