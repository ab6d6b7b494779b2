"""Two moons: the confidence of MAP, a deep ensemble, LLLA and MoLA, near the data and far from them.

    python examples/two_moons.py

Trains five small networks on two interleaved half circles, and compares the confidence of the methods over the plane. Prints a
table and draws a confidence map for each method. Takes about five seconds. Needs `pip install 'molaplace[cli]'`.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_moons
from torch import nn

import molaplace as mola

NETWORKS = 5
REACH = 8.0  # half the side length of the maps; the data lie within a radius of 2


def moons(count: int, seed: int):
    points, labels = make_moons(count, noise=0.2, random_state=seed)
    return torch.tensor(points - [0.5, 0.25], dtype=torch.float32), torch.tensor(labels)


def train(seed: int, points, labels) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(points), labels).backward()
        optimiser.step()
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("example-results"), help="folder for the figure")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # small networks run faster on one thread

    train_set, val_set, test_set = (moons(200, seed=3 * options.seed + part) for part in range(3))
    networks = [train(NETWORKS * options.seed + member, *train_set) for member in range(NETWORKS)]

    # Fit in one pass over the training data, then tune on the validation data. Any iterable of batches can serve as a loader.
    methods = {
        "MAP": mola.ensemble(networks[0]),
        "deep ensemble": mola.ensemble(networks),
        "LLLA": mola.fit(networks[0], [train_set], [val_set]),
        "MoLA": (posterior := mola.fit(networks, [train_set], [val_set], rule="threshold")),
        "MoLA, distance": posterior.tune([val_set], rule="distance"),
    }

    # Print the confidence on the test data and on circles of increasing radius.
    angles = torch.linspace(0, 2 * torch.pi, 361)[:-1]
    circle = torch.stack([angles.cos(), angles.sin()], dim=1)
    inputs, labels = test_set
    print("Accuracy and mean confidence in %:\n")
    print(f"{'':16}{'accuracy':>10}{'test data':>12}{'radius 5':>12}{'radius 10':>12}{'radius 100':>12}")
    for name, method in methods.items():
        probs = method(inputs)
        accuracy = float((probs.argmax(1) == labels).float().mean())
        row = [float(method(at).amax(1).mean()) for at in (inputs, 5 * circle, 10 * circle, 100 * circle)]
        print(f"{name:16}{100 * accuracy:10.1f}" + "".join(f"{100 * value:12.1f}" for value in row))

    options.output.mkdir(parents=True, exist_ok=True)
    draw(methods, train_set, options.output / "two_moons.png")


@torch.no_grad()
def draw(methods, data, path: Path) -> None:
    axis = torch.linspace(-REACH, REACH, 161)
    plane = torch.cartesian_prod(axis, axis).flip(1)
    points, labels = data
    figure, panels = plt.subplots(1, len(methods), figsize=(16, 3.7), sharey=True, layout="constrained")
    for panel, (name, method) in zip(panels, methods.items(), strict=True):
        confidence = method(plane).amax(1).reshape(len(axis), len(axis))
        image = panel.imshow(
            confidence.numpy(), extent=(-REACH, REACH, -REACH, REACH), origin="lower", vmin=0.5, vmax=1.0, cmap="Blues"
        )
        panel.scatter(*points.T, c=labels, cmap="spring", s=7, edgecolors="black", linewidths=0.2)
        panel.set_title(name)
    figure.colorbar(image, ax=panels, label="confidence", shrink=0.9)
    figure.savefig(path, dpi=120)
    print(f"\nWrote {path}")


if __name__ == "__main__":
    main()
