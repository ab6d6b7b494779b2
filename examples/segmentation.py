"""Segmentation: the per-pixel confidence of MAP, a deep ensemble and MoLA, both in distribution and under shift.

    python examples/segmentation.py

Draws discs, squares and triangles, trains three small U-Nets to label every pixel, and fits a posterior over their last layers,
which are 1x1 convolutions. Evaluates all methods on test pictures, on shifted copies (dimmer and noisier), and on pictures with rings,
a shape absent from the training data. Prints a table and draws maps of the confidence, the epistemic uncertainty and the distance.
In the table, distances are medians over pixels, and the column `rings` shows the AUROC, which measures how well the OOD score
separates the pixels of rings from all others. Takes about a minute. Needs `pip install 'molaplace[cli]'`.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn import functional

import molaplace as mola
from molaplace.metrics import (
    accuracy,
    auroc,
    expected_calibration_error,
    mean_confidence,
    negative_log_likelihood,
)

NETWORKS, SIZE, CLASSES = 3, 48, 4
NAMES = ("background", "disc", "square", "triangle")
RING = -100  # label that fit and tune ignore


def shapes(count: int, seed: int, *, rings: bool = False) -> tuple[Tensor, Tensor]:
    """Return pictures of shape (n, 3, H, W), with values from about 0 to 1, and class labels of shape (n, H, W)."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator)

    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    wave = torch.sin(columns * uniform(0.1, 0.4) + rows * uniform(0.1, 0.4) + uniform(0, 6))
    pictures = 0.35 + 0.08 * wave[:, None] + 0.1 * torch.rand(count, 3, 1, 1, generator=generator)
    labels = torch.zeros(count, SIZE, SIZE, dtype=torch.int64)
    kinds = range(1, CLASSES + 1) if rings else range(1, CLASSES)
    for kind in kinds:
        x, y, radius = columns - uniform(8, SIZE - 8), rows - uniform(8, SIZE - 8), uniform(5, 9)
        length = (x**2 + y**2).sqrt()
        inside = {
            1: length < radius,
            2: torch.maximum(x.abs(), y.abs()) < 0.85 * radius,
            3: (y < 0.7 * radius) & (y > 2 * x.abs() - radius),
            4: (length < radius + 1) & (length > radius - 2.5),
        }[kind]
        colour = 0.5 + 0.5 * torch.rand(count, 3, 1, 1, generator=generator)
        pictures = torch.where(inside[:, None], colour, pictures)
        labels = torch.where(inside, kind if kind < CLASSES else RING, labels)
    return pictures + 0.03 * torch.randn(pictures.shape, generator=generator), labels


def shifted(pictures: Tensor, seed: int) -> Tensor:
    """Return the same pictures in poor light: dimmer, with less contrast and more noise."""
    noise = torch.randn(pictures.shape, generator=torch.Generator().manual_seed(seed))
    return 0.2 + 0.45 * pictures + 0.12 * noise


def block(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU())


class UNet(nn.Module):
    """A three-level U-Net whose head is a 1x1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(3, 16), block(16, 24), block(24, 32)])
        self.up = nn.ModuleList([block(32 + 24, 24), block(24 + 16, 16)])
        self.head = nn.Conv2d(16, CLASSES, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the logits, of shape (n, C, H, W)."""
        maps = []
        for level in self.down:
            pictures = level(functional.max_pool2d(pictures, 2) if maps else pictures)
            maps.append(pictures)
        for level, skip in zip(self.up, reversed(maps[:-1]), strict=True):
            pictures = level(torch.cat([functional.interpolate(pictures, scale_factor=2.0), skip], 1))
        return self.head(pictures)


def train(seed: int, pictures: Tensor, labels: Tensor, steps: int) -> nn.Module:
    torch.manual_seed(seed)
    network = UNet()
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=steps)
    for _ in range(steps):
        some = torch.randint(len(pictures), (8,))
        optimiser.zero_grad()
        functional.cross_entropy(network(pictures[some]), labels[some]).backward()
        optimiser.step()
        schedule.step()
    return network.eval()


def draw(methods: dict[str, mola.MoLA], sets: dict[str, tuple[Tensor, Tensor]], path: Path) -> None:
    """Draw a row for each set: one picture, its labels and its maps."""
    figure, panels = plt.subplots(len(sets), 6, figsize=(11, 2 * len(sets)), squeeze=False)
    plain, careful = methods["MAP"], methods["MoLA, distance"]
    for index, (name, (pictures, labels)) in enumerate(sets.items()):
        row = panels[index]
        picture = pictures[:1]
        truth = labels[0]
        prediction = careful.predict(picture)
        maps = {
            "picture": picture[0].permute(1, 2, 0).clamp(0, 1),
            "labels": torch.where(truth < 0, torch.nan, truth.double()),
            "confidence, MAP": plain.predict(picture).confidence[0],
            "confidence, MoLA": prediction.confidence[0],
            "epistemic, MoLA": prediction.epistemic[0],
            "distance, MoLA": prediction.distance[0].log10(),
        }
        limits = {"labels": (0, CLASSES - 1), "epistemic, MoLA": (0, 0.4), "distance, MoLA": (-0.5, 0.7)}
        for panel, (title, values) in zip(row, maps.items(), strict=True):
            low, high = limits.get(title, (0.25, 1))
            colours = {"labels": "tab10", "confidence, MAP": "cividis", "confidence, MoLA": "cividis"}
            panel.imshow(values, cmap=colours.get(title, "magma"), vmin=low, vmax=high, interpolation="nearest")
            panel.set(xticks=[], yticks=[], title="" if index else title)
        row[0].set_ylabel(name)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def study(seed: int, steps: int) -> tuple[dict[str, mola.MoLA], dict[str, tuple[Tensor, Tensor]]]:
    """Train the networks; return the methods and the labelled test sets."""
    train_set, val_set, test_set = (shapes(60, seed + part) for part in range(3))
    networks = [train(seed + member, *train_set, steps) for member in range(NETWORKS)]
    loader = list(zip(train_set[0].split(20), train_set[1].split(20), strict=True))

    # Treat each picture as one datum, since its pixels are not independent.
    posterior = mola.fit(networks, loader, [val_set], positions="average", progress=False)
    methods = {
        "MAP": mola.ensemble(networks[0]),
        "deep ensemble": mola.ensemble(networks),
        "MoLA": posterior,
        "MoLA, distance": posterior.tune([val_set], rule=mola.rules.Distance(price=0.01), progress=False),
    }
    sets = {
        "test": test_set,
        "shifted": (shifted(test_set[0], seed), test_set[1]),
        "with rings": shapes(60, seed + 3, rings=True),
    }
    return methods, sets


def measured(method: mola.MoLA, pictures: Tensor, labels: Tensor) -> dict[str, float | None]:
    """Return metrics for pixels of known classes, and the AUROC of the OOD score for detecting rings."""
    prediction = method.predict([pictures[:30], pictures[30:]])
    scores = prediction.ood_score.flatten()
    truth = labels.flatten()
    known = truth >= 0
    probs = prediction.probs.movedim(prediction.axis, -1).flatten(0, -2)[known]
    truth = truth[known]
    return {
        "accuracy": accuracy(probs, truth),
        "confidence": mean_confidence(probs),
        "nll": negative_log_likelihood(probs, truth),
        "ece": expected_calibration_error(probs, truth),
        "distance": None if prediction.distance is None else float(prediction.distance.median()),
        "rings": None if known.all() else auroc(scores[known], scores[~known]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("example-results"), help="folder for the figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300, help="training steps per network")
    options = parser.parse_args()
    methods, sets = study(10 * options.seed, options.steps)

    columns = {"accuracy": ".3f", "confidence": ".3f", "nll": ".3f", "ece": ".3f", "distance": ".2f", "rings": ".3f"}
    print(f"{'':26}" + "".join(f"{name:>11}" for name in columns))
    for name, method in methods.items():
        for kind, pictures in sets.items():
            row = measured(method, *pictures)
            cells = ["" if row[column] is None else format(row[column], form) for column, form in columns.items()]
            print(f"{name:15}{kind:11}" + "".join(f"{cell:>11}" for cell in cells))

    options.output.mkdir(parents=True, exist_ok=True)
    draw(methods, sets, options.output / "segmentation.png")
    print(f"The maps are in {options.output / 'segmentation.png'}.")


if __name__ == "__main__":
    main()
