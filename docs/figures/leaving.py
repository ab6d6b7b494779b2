"""Draw the figure of a toy problem in docs/outliers.md: `python docs/figures/leaving.py` (takes a few seconds).

Five small networks are trained on scikit-learn's handwritten digits. The test digits then fade step by step into patches of
photographs.
The figure shows the accuracy and the mean confidence of one network (MAP), the ensemble (DE) and MoLA with the paper's rule.
The numbers are written to `benchmarks/results/leaving.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits, load_sample_image
from torch import Tensor, nn

import molaplace as mola
from molaplace.report.style import COLOURS, INK

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = tuple(round(step / 16, 4) for step in range(17))
"""Weight of the photograph in the blended image at each step."""
EXAMPLE = 16
"""Index of the test digit that is shown above the curves."""
NAMES = {
    "MAP": ("one network", COLOURS["MAP"]),
    "DE": ("ensemble", COLOURS["DE"]),
    "MoLA": ("MoLA", COLOURS["paper"]),
}


def train(seed: int, images: Tensor, labels: Tensor) -> nn.Module:
    """Train a small network with AdamW."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for _ in range(60):
        for rows in torch.randperm(len(images)).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(images[rows]), labels[rows]).backward()
            optimiser.step()
    return network


def photographs(count: int) -> Tensor:
    """Return greyscale patches (count, 64) of scikit-learn's two photographs, reduced to a quarter of their width and height."""
    generator = torch.Generator().manual_seed(1)
    pieces = []
    for name in ("china.jpg", "flower.jpg"):
        whole = torch.tensor(load_sample_image(name)).float().mean(2) / 255
        small = nn.functional.avg_pool2d(whole[None, None], 4)[0, 0]
        for _ in range(count // 2):
            top, left = (int(torch.randint(size - 8, (1,), generator=generator)) for size in small.shape)
            pieces.append(small[top : top + 8, left : left + 8].flatten())
    return torch.stack(pieces)


def draw(confidence: dict[str, list[float]], accuracy: list[float], pictures: Sequence[Tensor], wide: bool) -> Figure:
    """Draw a row of images in which one digit fades, with the curves below it."""
    width, height, top = (8.0, 3.7, 0.82) if wide else (4.4, 4.3, 0.83)
    figure = Figure(figsize=(width, height), facecolor="white")
    left, right, bottom = (0.1, 0.8, 0.08) if wide else (0.13, 0.72, 0.1)
    axes = figure.add_axes((left, bottom, right - left, top - bottom))
    axes.set_xlim(-0.07, 1.07)
    columns = range(0, len(STEPS), 2 if wide else 4)
    size = 0.13 * height if wide else 0.1 * height  # inches
    for column in columns:
        middle = left + (right - left) * (STEPS[column] + 0.07) / 1.14
        panel = figure.add_axes((middle - size / width / 2, top + 0.015, size / width, size / height))
        panel.imshow(pictures[column].reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        panel.set_xticks([])
        panel.set_yticks([])
        panel.spines[:].set_color("#c8ced4")
    for name, values in confidence.items():
        axes.plot(STEPS, values, color=NAMES[name][1], linewidth=2.6)
    axes.plot(STEPS, accuracy, color=INK, linewidth=1.4, linestyle=(0, (4, 3)))
    ends = [(*NAMES[name], values[-1]) for name, values in confidence.items()]
    for name, colour, end in [*ends, ("accuracy", INK, accuracy[-1])]:
        words = f"{name}, {100 * end:.0f} %" if wide else f"{name},\n{100 * end:.0f} %"
        axes.text(1.06, end, words, color=colour, va="center", weight="bold", linespacing=1.0)
    axes.set_ylim(0, 1.03)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["a digit", "", "half and half" if wide else "half", "", "a photograph"])
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    if wide:
        axes.set_ylabel("mean confidence")
    axes.grid(axis="y", color=INK, alpha=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Train the networks, predict the classes of faded digits, draw the figure and write the numbers."""
    torch.set_num_threads(1)
    pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = pixels.float() / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train_rows, val_rows, test_rows = order.split([1000, 297, 500])
    networks = [train(seed, images[train_rows], labels[train_rows]) for seed in range(5)]
    batches, validation = ([(images[rows], labels[rows])] for rows in (train_rows, val_rows))
    methods = {
        "MAP": mola.ensemble(networks[0]),
        "DE": mola.ensemble(networks),
        "MoLA": mola.fit(networks, batches, validation, rule="threshold", progress=False),
    }
    digits, pieces = images[test_rows], photographs(len(test_rows))
    sets = [torch.lerp(digits, pieces, step) for step in STEPS]
    confidence = {
        name: [mola.metrics.mean_confidence(predictor(x)) for x in sets] for name, predictor in methods.items()
    }
    accuracy = {
        name: [mola.metrics.accuracy(predictor(x), labels[test_rows]) for x in sets]
        for name, predictor in methods.items()
    }
    settings = {"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
    with mpl.rc_context(settings):
        for wide, name in ((True, "leaving.png"), (False, "leaving-narrow.png")):
            figure = draw(confidence, accuracy["MoLA"], [x[EXAMPLE] for x in sets], wide)
            figure.savefig(ROOT / "docs" / "images" / name, dpi=160, metadata={"Software": None})
    numbers = {"photograph_share": STEPS, "mean_confidence": confidence, "accuracy": accuracy}
    path = ROOT / "benchmarks" / "results" / "leaving.json"
    path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
