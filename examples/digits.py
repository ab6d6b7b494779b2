"""Handwritten digits: fit, tune, predict, rotate the digits, save and load.

    python examples/digits.py

Trains five small networks on scikit-learn's digits (8 x 8 pixels, no download), fits a posterior, and compares it with one network and
the plain ensemble, on test digits and on digits rotated until they are unreadable. Takes about ten seconds. Needs `pip install
'molaplace[lab]'`.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import molaplace as mola
from molaplace import metrics
from molaplace.demo import rotate
from molaplace.report.style import COLOURS

NETWORKS = 5
ANGLES = range(0, 181, 30)
STYLES = {
    "MAP": {"color": COLOURS["MAP"]},
    "deep ensemble": {"color": COLOURS["DE"]},
    "MoLA": {"color": COLOURS["MoLA"]},
    "MoLA, tuned for NLL": {"color": COLOURS["MoLA"], "linestyle": "--"},
    "MAP, 1 - confidence": {"color": COLOURS["MAP"], "linestyle": "--"},
    "MoLA, 1 - confidence": {"color": COLOURS["MoLA"], "linestyle": "--"},
    "MoLA, ood_score": {"color": COLOURS["MoLA"]},
}


def train(seed: int, images, labels) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for _ in range(60):
        for rows in torch.randperm(len(images)).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(images[rows]), labels[rows]).backward()
            optimiser.step()
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("example-results"), help="folder for the figure and the posterior"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # small networks run faster on one thread

    pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = pixels.float().reshape(-1, 1, 8, 8) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))
    train_set, val_set, test_set = (TensorDataset(images[rows], labels[rows]) for rows in order.split([1000, 297, 500]))

    # Replace these networks with your own trained networks.
    networks = [train(NETWORKS * options.seed + member, *train_set.tensors) for member in range(NETWORKS)]

    # Fit in one pass over the training data, then tune on the validation data, once with the default rule and once for log loss alone.
    train_loader, val_loader, test_loader = (DataLoader(some, 256) for some in (train_set, val_set, test_set))
    mixture = mola.fit(networks, train_loader, val_loader)
    by_loss = mixture.tune(val_loader, rule="nll")
    print(f"{mixture.tuning}\n")

    methods = {
        "MAP": mola.ensemble(networks[0]),
        "deep ensemble": mola.ensemble(networks),
        "MoLA": mixture,
        "MoLA, tuned for NLL": by_loss,
    }
    test_images, test_labels = test_set.tensors
    print(mola.evaluate(methods, test_loader))

    # Most rotated digits are unreadable. Confidence should fall with accuracy, and to some extent it does.
    rotated = [rotate(test_images, angle) for angle in ANGLES]
    confidence = {name: [metrics.mean_confidence(method(at)) for at in rotated] for name, method in methods.items()}
    accuracy = [metrics.accuracy(mixture(at), test_labels) for at in rotated]
    print(f"\n{'confidence % at angle':22}" + "".join(f"{angle:7}°" for angle in ANGLES))
    for name, values in {**confidence, "accuracy of MoLA": accuracy}.items():
        print(f"{name:22}" + "".join(f"{100 * value:8.1f}" for value in values))

    # The OOD score detects more outliers than the confidence does.
    # At 0 degrees, the digits are compared with themselves, so the AUROC is 50 % (chance level).
    auroc = {}
    for name, method, score in (
        ("MAP, 1 - confidence", methods["MAP"], lambda prediction: 1 - prediction.confidence),
        ("MoLA, 1 - confidence", mixture, lambda prediction: 1 - prediction.confidence),
        ("MoLA, ood_score", mixture, lambda prediction: prediction.ood_score),
    ):
        upright = score(method.predict(test_images))
        auroc[name] = [metrics.auroc(upright, score(method.predict(at))) for at in rotated]
    print(f"\n{'AUROC % at angle':22}" + "".join(f"{angle:7}°" for angle in ANGLES))
    for name, values in auroc.items():
        print(f"{name:22}" + "".join(f"{100 * value:8.1f}" for value in values))

    # Print the fields of individual predictions.
    print(
        f"\n{'three digits':16}{'truth':>8}{'label':>8}{'confidence':>12}{'aleatoric':>11}{'epistemic':>11}{'ood_score':>11}"
    )
    for title, angle in (("upright", 0), ("rotated by 60°", 60)):
        some = mixture.predict(rotate(test_images[:3], angle))
        columns = (some.confidence, some.aleatoric, some.epistemic, some.ood_score)
        for truth, label, *numbers in zip(test_labels[:3], some.label, *columns, strict=True):
            print(
                f"{title:16}{truth:8}{label:8}{numbers[0]:12.3f}" + "".join(f"{number:11.3f}" for number in numbers[1:])
            )

    # The files are safetensors and JSON; pickle is not used. Loading checks that these networks are the ones that were fitted.
    folder = mixture.save(options.output / "digits-posterior")
    loaded = mola.load(folder, networks)
    print(f"\nWrote {folder}; same predictions after loading: {torch.equal(loaded(test_images), mixture(test_images))}")
    draw(confidence, accuracy, auroc, options.output / "digits.png")


def draw(confidence, accuracy, auroc, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, values in confidence.items():
        left.plot(ANGLES, values, marker="o", markersize=4, label=name, **STYLES[name])
    left.plot(ANGLES, accuracy, color="black", linestyle=":", label="accuracy of MoLA")
    left.set(title="Mean confidence", ylim=(0, 1.02))
    for name, values in auroc.items():
        right.plot(ANGLES, values, marker="o", markersize=4, label=name, **STYLES[name])
    right.set(title="OOD detection of rotated digits: AUROC", ylim=(0, 1.02))
    for panel in (left, right):
        panel.set(xlabel="rotation (degrees)", xticks=ANGLES)
        panel.legend(frameon=False, loc="lower right" if panel is right else "center")
    figure.savefig(path, dpi=120)
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
