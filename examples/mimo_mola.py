"""MIMO-MoLA: an ensemble inside one network, with a Laplace approximation for each head.

    python examples/mimo_mola.py

A MIMO network takes three digits at once and has a head for each digit. At test time, it is given the same digit three times, and its
heads form an ensemble at the cost of one network. `mola.fit` fits a Laplace approximation to each head. This example compares one
network, MIMO and MIMO-MoLA on digits, photographs and noise. Takes about ten seconds. Needs a clone and `pip install 'molaplace[lab]'`.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import molaplace as mola
from molaplace import metrics
from molaplace.demo import natural_patches, uniform_noise
from molaplace_lab.mimo import Mimo, train_mimo

MEMBERS = 3
EPOCHS = 60


def build() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=5e-3)


class Shuffled:
    """A loader that reshuffles the data in every epoch, like `DataLoader(..., shuffle=True)` but faster for small tensors."""

    def __init__(self, images, labels) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels) // 50

    def __iter__(self):
        for rows in torch.randperm(len(self.labels)).split(50):
            yield self.images[rows], self.labels[rows]


def train_one(loader) -> nn.Module:
    network = build()
    optimiser = adam(network.parameters())
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(inputs), labels).backward()
            optimiser.step()
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # small networks run faster on one thread
    torch.manual_seed(options.seed)

    pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = pixels.float().reshape(-1, 1, 8, 8) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))
    train_set, val_set, test_set = ((images[rows], labels[rows]) for rows in order.split([1000, 297, 500]))
    shuffled = Shuffled(*train_set)

    # Build one network with three inputs and three heads from this architecture, and train it from scratch.
    mimo = Mimo(build(), members=MEMBERS, example=images[:2], seed=options.seed)
    train_mimo(
        mimo, shuffled, epochs=EPOCHS, batch_repetition=2, input_repetition=0.5, optimiser=adam, seed=options.seed
    )

    # Fit a Laplace approximation to each head. The paper uses a full covariance here, but "kron" (its Algorithm 1) detects more
    # outliers.
    methods = {
        "one network": mola.ensemble(train_one(shuffled)),
        "MIMO": mola.ensemble(mimo.networks),
        "MIMO-MoLA": mola.fit(mimo.networks, [train_set], [val_set], structure="full"),
        "MIMO-MoLA, kron": mola.fit(mimo.networks, [train_set], [val_set]),
    }
    outliers = [natural_patches(500, 8, seed=options.seed), uniform_noise(500, 8, seed=options.seed)]

    # Without a covariance, the OOD score is 1 - confidence; with a covariance, it is the far-field score.
    print(f"{'':18}{'digits':^32}{'confidence %':^20}{'AUROC by ood_score %':^22}")
    print(f"{'':18}{'accuracy %':>12}{'NLL':>8}{'conf. %':>10}" + f"{'photos':>12}{'noise':>9}" * 2)
    for name, method in methods.items():
        inside, *outside = (method.predict(some) for some in (test_set[0], *outliers))
        sure = [100 * float(prediction.confidence.mean()) for prediction in outside]
        told_apart = [100 * metrics.auroc(inside.ood_score, prediction.ood_score) for prediction in outside]
        print(
            f"{name:18}{100 * metrics.accuracy(inside.probs, test_set[1]):12.1f}"
            f"{metrics.negative_log_likelihood(inside.probs, test_set[1]):8.3f}{100 * float(inside.confidence.mean()):10.1f}"
            f"{sure[0]:12.1f}{sure[1]:9.1f}{told_apart[0]:12.1f}{told_apart[1]:9.1f}"
        )

    posterior = methods["MIMO-MoLA"]
    with torch.no_grad():
        sums = posterior(test_set[0]).sum(1)
    single, whole = (sum(parameter.numel() for parameter in network.parameters()) for network in (build(), mimo))
    print(f"\nMIMO has {whole:,} weights; {MEMBERS} networks would have {MEMBERS * single:,}.")
    print(f"The probabilities of MIMO-MoLA sum to 1 to within {float((sums - 1).abs().max()):.0e}.")


if __name__ == "__main__":
    main()
