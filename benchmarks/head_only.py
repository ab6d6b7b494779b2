"""Measure where the CPU time of a head-only fit with few classes goes.

    python benchmarks/head_only.py

The network is a single linear layer, so there is no forward pass to wait for. The results, in CPU seconds on one thread, are stored in
benchmarks/results/head_only.json.
"""

import time
from collections.abc import Callable

import record
import torch
from torch import Tensor, nn

import molaplace as mola

COUNT = 20_000
FEATURES = 512
CLASSES = 10
BATCH = 1_000
REPEATS = 5


def seconds(work: Callable[[], object]) -> float:
    """Return the shortest CPU time of several repetitions."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return round(min(times), 4)


def grams(batches: list[Tensor]) -> None:
    """Add up the Gram matrices of the batches."""
    total = batches[0].new_zeros(batches[0].shape[1], batches[0].shape[1])
    for batch in batches:
        total += batch.T @ batch


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(COUNT, FEATURES)
    labels = torch.randint(CLASSES, (COUNT,))
    network = nn.Linear(FEATURES, CLASSES)
    loader = list(zip(inputs.split(BATCH), labels.split(BATCH), strict=True))
    batches = [batch.double() for batch, _ in loader]
    row = {
        "data": COUNT,
        "features": FEATURES,
        "classes": CLASSES,
        "fit": seconds(lambda: mola.fit(network, loader, progress=False)),
        "fit_without_distances": seconds(lambda: mola.fit(network, loader, progress=False, distances=False)),
        "gram_float64": seconds(lambda: grams(batches)),
        "gram_float32": seconds(lambda: grams([batch for batch, _ in loader])),
    }
    print(row)
    record.write("head_only", {"environment": record.environment(), "times": row})


if __name__ == "__main__":
    main()
