"""Fit one posterior with several processes: each process reads part of the data, and the sums from all processes are added.

    python examples/torchrun_fit.py                               # alone
    torchrun --nproc-per-node=2 examples/torchrun_fit.py          # two processes on this machine

Both commands give the same posterior. A Laplace approximation is computed from sums over the data, so each process can sum over its
own part. To use several machines, pass `--nnodes` and `--rdzv-endpoint` to torchrun. Takes about ten seconds. Needs `pip
install 'molaplace[cli]'`.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import molaplace as mola

NETWORKS = 3


def train(seed: int, images, labels) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimiser.step()
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("example-results"), help="folder for the posterior")
    options = parser.parse_args()
    torch.set_num_threads(1)  # each process uses one core

    pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = order.split([1000, 297, 500])
    train_set, val_set, test_set = (TensorDataset(pixels[rows] / 16, labels[rows]) for rows in parts)

    with mola.distributed.join() as team:  # the processes that torchrun started, or this process alone
        # Every process needs the same networks. Normally, you would load their weights from files; here, equal seeds give
        # equal networks in every process. molaplace compares checksums and rejects networks that differ.
        networks = [train(seed, *train_set.tensors) for seed in range(NETWORKS)]

        # Each datum goes to exactly one process. All processes then fit, tune and predict together.
        loaders = [DataLoader(team.shard(some), batch_size=100) for some in (train_set, val_set, test_set)]
        posterior = mola.fit(networks, *loaders[:2], team=team)
        prediction = posterior.predict(loaders[2], team=team)  # every process gets all test rows, in order

        if team.first:  # only one process writes and prints
            accuracy = (prediction.label == test_set.tensors[1]).double().mean()
            print(f"{team}: this process read {len(loaders[0].dataset)} of {len(train_set)} training images")
            print(f"prior precision    {posterior.prior_precision[0]:.12g}")
            print(f"log evidence       {', '.join(f'{value:.9f}' for value in posterior.log_evidence())}")
            print(f"test accuracy      {accuracy:.4f}")
            print(f"mean confidence    {prediction.confidence.mean():.12f}")
            print(f"Wrote {posterior.save(options.output / f'posterior-of-{team.size}')}")


if __name__ == "__main__":
    main()
