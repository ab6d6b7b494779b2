"""Draw the first figure in the README and on the front page: `python docs/figures/two_moons.py` (takes a few seconds).

Five small networks are trained on two moons. The figure shows maps of the confidence of one network (MAP), the ensemble (DE), MoLA
with the paper's rule and MoLA with the default rule. The numbers are written to `benchmarks/results/two_moons.json`.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from torch import nn

import molaplace as mola
from molaplace.demo import two_moons
from molaplace.errors import MolaWarning
from molaplace.metrics import mean_confidence, negative_log_likelihood
from molaplace.perceptrons import mlp
from molaplace.report.pictures import draw_maps
from molaplace.report.style import COLOURS, as_png, drawing
from molaplace_lab.training import Recipe, member_seeds, train

ROOT = Path(__file__).resolve().parent.parent.parent
NETWORKS, POINTS, EPOCHS = 5, 200, 150
REACH, SIZE, FAR = 8.0, 241, 6.0
"""Half the side length of the map, its number of points per side, and the radius beyond which points count as far from the data."""

TITLES = {
    "MAP": ("one network", COLOURS["MAP"]),
    "DE": ("ensemble", COLOURS["DE"]),
    "MoLA": ("MoLA, the paper's rule", COLOURS["paper"]),
    "MoLA (calibrated)": ("MoLA, the default", COLOURS["MoLA"]),
}


def build() -> nn.Sequential:
    """Return an untrained network."""
    return mlp(2, (64, 64), 2)


def main() -> None:
    """Train the networks, draw the figure and write the numbers."""
    torch.set_num_threads(1)
    data = two_moons(POINTS, seed=0)
    held_out = two_moons(POINTS, seed=1)
    recipe = Recipe(epochs=EPOCHS, batch_size=POINTS // 2, learning_rate=1e-2)
    networks = [train(build, data, recipe, seed=seed) for seed in member_seeds(NETWORKS, 0)]
    validation = held_out.batches()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MolaWarning)  # the toy problem has few validation examples
        posterior = mola.fit(networks, data.batches(), progress=False)
        predictors = {
            "MAP": mola.ensemble(networks[0]),
            "DE": mola.ensemble(networks),
            "MoLA": posterior.tune(validation, rule="threshold", progress=False),
            "MoLA (calibrated)": posterior.tune(validation, progress=False),
        }
    axis = torch.linspace(-REACH, REACH, SIZE, dtype=torch.float32)
    plane = torch.cartesian_prod(axis, axis).flip(1)
    with torch.no_grad():
        maps = {
            name: predictor(plane).double().max(1).values.reshape(SIZE, SIZE).numpy()
            for name, predictor in predictors.items()
        }
    far = (plane.norm(dim=1) > FAR).reshape(SIZE, SIZE).numpy()
    with drawing():
        titled = {title: maps[name] for name, (title, _) in TITLES.items()}
        for columns, size, ending in ((4, 2.6, ""), (2, 2.2, "-narrow")):
            figure = draw_maps(
                titled, data.inputs, data.labels, REACH, dict(TITLES.values()), columns=columns, size=size
            )
            (ROOT / "docs" / "images" / f"two-moons{ending}.png").write_bytes(as_png(figure))
    predictions = {name: predictor(held_out.inputs) for name, predictor in predictors.items()}
    cooled = predictors["MoLA (calibrated)"]
    numbers = {
        "points": POINTS,
        "far": FAR,
        "mean_far_confidence": {name: float(values[far].mean()) for name, values in maps.items()},
        "mean_validation_confidence": {name: mean_confidence(probs) for name, probs in predictions.items()},
        "validation_nll": {
            name: negative_log_likelihood(probs, held_out.labels) for name, probs in predictions.items()
        },
        "tuned_prior_precision": {name: predictors[name].prior_precision[0] for name in ("MoLA", "MoLA (calibrated)")},
        "temperature": cooled.temperature,
        "distance_exponent": cooled.distance_exponent,
    }
    path = ROOT / "benchmarks" / "results" / "two_moons.json"
    path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
