"""Draw the figure of a toy problem in docs/regression.md: `python docs/figures/gap.py` (takes a few seconds).

Five small networks learn a curve from data on both sides of a gap. The figure shows the means and 90 % intervals of the
ensemble, MoLA and MoLA scaled by distance, within the range of the data, in the gap and beyond the data. The numbers are written to
`benchmarks/results/gap.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor

import molaplace as mola
from molaplace.demo import LabelledData
from molaplace.report.style import INK, colours
from molaplace_lab.training import Recipe, train_mlps

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = {"deep ensemble": "DE", "MoLA": "MoLA", "MoLA by distance": "MoLA (distance)"}
"""Names of the methods whose colours are used."""


def curve(x: Tensor) -> Tensor:
    """Return the values of the function that the networks learn."""
    return torch.sin(2 * x) + 0.3 * x


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs in the intervals from -3 to -1 and from 1 to 3, and their noisy targets."""
    generator = torch.Generator().manual_seed(seed)
    side = torch.where(torch.rand(count, 1, generator=generator) < 0.5, -1.0, 1.0)
    x = side * (1 + 2 * torch.rand(count, 1, generator=generator))
    return x, curve(x) + 0.15 * torch.randn(count, 1, generator=generator)


def draw(
    predictions: dict[str, mola.RegressionPrediction], grid: Tensor, train: tuple[Tensor, Tensor], wide: bool
) -> Figure:
    """Draw one panel per method."""
    figure = Figure(figsize=(9.0, 2.9) if wide else (4.4, 6.6), facecolor="white", layout="constrained")
    rows, columns = (1, len(predictions)) if wide else (len(predictions), 1)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True)
    for panel, (name, prediction) in zip(panels, predictions.items(), strict=True):
        lower, upper = prediction.interval(0.9)
        x = grid[:, 0]
        (colour,) = colours([NAMES[name]]).values()
        panel.fill_between(x, lower[:, 0], upper[:, 0], color=colour, alpha=0.3, linewidth=0)
        noise = 1.645 * prediction.aleatoric.sqrt()
        for sign in (-1, 1):
            panel.plot(x, (prediction.mean + sign * noise)[:, 0], color=colour, linewidth=0.7, linestyle=(0, (4, 3)))
        panel.plot(x, prediction.mean[:, 0], color=colour, linewidth=2)
        panel.plot(x, curve(grid)[:, 0], color=INK, linewidth=1)
        panel.scatter(*(part[:, 0] for part in train), s=4, color=INK, alpha=0.5, linewidths=0)
        panel.set_title(name, color=colour, fontsize=10)
        panel.set_ylim(-5, 5)
        panel.set_xlim(float(x[0]), float(x[-1]))
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Train the networks, compute predictions, draw the figure and write the numbers."""
    torch.set_num_threads(1)
    train, held = data(240, 0), data(80, 1)
    recipe = Recipe(epochs=200, batch_size=32, learning_rate=1e-2, weight_decay=1e-4, optimiser="adam")
    networks = train_mlps(1, (50,), 1, LabelledData(*train), recipe, members=5, seed=0, loss="squared-error")
    plain = mola.calibration.scale_noise(mola.ensemble(networks, likelihood="gaussian"), [held])
    common = {"structure": "kron-exact", "likelihood": "gaussian", "progress": False}
    methods = {
        "deep ensemble": plain,
        "MoLA": mola.fit(networks, [train], [held], **common),
        "MoLA by distance": mola.fit(networks, [train], [held], rule="distance", **common),
    }
    grid = torch.linspace(-6, 6, 601)[:, None]
    predictions = {name: posterior.predict(grid) for name, posterior in methods.items()}
    regions = {
        "inside": torch.tensor([[-2.0], [2.0]]),
        "gap": torch.tensor([[0.0]]),
        "beyond": torch.tensor([[-6.0], [6.0]]),
    }
    numbers = {
        name: {region: float(posterior.predict(x).std.mean()) for region, x in regions.items()}
        | {"nll": float(-posterior.predict(held[0]).log_prob(held[1]).mean())}
        for name, posterior in methods.items()
    }
    target = ROOT / "benchmarks" / "results" / "gap.json"
    target.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    mpl.rcParams.update({"font.size": 9, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK})
    for wide in (True, False):
        path = ROOT / "docs" / "images" / ("gap.png" if wide else "gap-narrow.png")
        draw(predictions, grid, train, wide).savefig(path, dpi=160)


if __name__ == "__main__":
    main()
