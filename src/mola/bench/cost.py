"""What methods cost: time to fit, time to predict, memory; measured side by side in one run."""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mola
from mola.bench.activations import Network, Progress
from mola.bench.runner import environment
from mola.bench.suite import Source

__all__ = ["measure_cost"]

REPEATS = 5


def measure_cost(
    networks: Sequence[Network], train: Source, test: Source, progress: Progress, *, images: int = 2000
) -> dict[str, Any]:
    """Time and memory of MAP, DE, LLLA and MoLA on real networks, the whole forward passes included.

    Repeats are interleaved, so that all methods see the same neighbours on a busy machine; medians are reported.

    Args:
        networks: K trained networks.
        train: training data; the first `images` are fitted on, and the time is scaled to all of them.
        test: data to predict; the first `images`.
        progress: told what is being done, and which share is done.
        images: how many of each.

    Returns:
        The document for `cost.json`.
    """
    models = [network.load() for network in networks]
    fitting, testing = _first(train, images), _first(test, images)
    contestants: dict[str, tuple[Callable[[], mola.MoLA], bool]] = {
        "MAP": (lambda: mola.ensemble(models[0]), False),
        "DE": (lambda: mola.ensemble(models), False),
        "LLLA": (lambda: mola.fit(models[0], fitting, progress=False), True),
        "MoLA": (lambda: mola.fit(models, fitting, progress=False), True),
    }
    ready = {name: make() for name, (make, _) in contestants.items()}
    fit_times: dict[str, list[float]] = {name: [] for name in contestants}
    predict_times: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(REPEATS):
        for index, (name, (make, fits)) in enumerate(contestants.items()):
            progress(f"cost of {name}", (repeat + index / len(contestants)) / REPEATS)
            if fits:
                fit_times[name].append(_seconds(make))
            predict_times[name].append(_seconds(lambda name=name: _predict(ready[name], testing)))  # type: ignore[misc]
    scale = train.count / sum(len(labels) for _, labels in fitting)
    rows = [
        {
            "method": name,
            "fit_seconds": scale * statistics.median(fit_times[name]) if fit_times[name] else None,
            "predict_seconds": statistics.median(predict_times[name]),
            "bytes": _bytes(posterior),
        }
        for name, posterior in ready.items()
    ]
    settings = {
        "components": len(models),
        "train_images": train.count,
        "measured_on": sum(len(labels) for _, labels in fitting),
        "predicted_images": sum(len(labels) for _, labels in testing),
        "repeats": REPEATS,
        "peak_process_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    return {"settings": settings, "rows": rows, "environment": environment()}


def _first(source: Source, images: int) -> list[tuple[Tensor, Tensor]]:
    batches, count = [], 0
    for inputs, labels in source.open():
        batches.append((inputs, labels))
        count += len(labels)
        if count >= images:
            break
    return batches


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _predict(posterior: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for inputs, _ in batches:
            posterior(inputs)


def _bytes(posterior: mola.MoLA) -> int:
    """The networks' numbers, and what the approximation adds to them on disk."""
    networks = sum(
        tensor.numel() * tensor.element_size()
        for network in posterior.networks
        for tensor in (*network.parameters(), *network.buffers())
    )
    if posterior.structure is None:
        return networks
    with tempfile.TemporaryDirectory() as folder:
        return networks + sum(path.stat().st_size for path in posterior.save(folder).iterdir())
