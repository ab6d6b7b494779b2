"""What methods cost: time to fit, time to predict, memory; measured side by side in one run."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
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
        train: training data; fitted on the first `images` and on half of them, and extended to all along a straight line,
            so that what is paid once is not multiplied. Tuning is not included.
        test: data to predict; the first `images`.
        progress: told what is being done, and which share is done.
        images: how many of each.

    Returns:
        The document for `cost.json`.
    """
    models = [network.load() for network in networks]
    fitting, testing = _first(train, images), _first(test, images)
    half = fitting[: max(1, len(fitting) // 2)]
    fits = {"LLLA": models[:1], "MoLA": models}
    ready = {
        "MAP": mola.ensemble(models[0]),
        "DE": mola.ensemble(models),
        **{name: mola.fit(model, fitting, progress=False) for name, model in fits.items()},
    }
    fit_times: dict[str, list[float]] = {name: [] for name in fits}
    predict_times: dict[str, list[float]] = {name: [] for name in ready}
    for repeat in range(REPEATS):
        for index, (name, posterior) in enumerate(ready.items()):
            progress(f"cost of {name}", (repeat + index / len(ready)) / REPEATS)
            if name in fits:
                whole, part = (
                    _seconds(partial(mola.fit, fits[name], data, progress=False)) for data in (fitting, half)
                )
                fit_times[name].append(_extended(part, whole, _count(half), _count(fitting), train.count))
            predict_times[name].append(_seconds(partial(_predict, posterior, testing)))
    rows = [
        {
            "method": name,
            "fit_seconds": statistics.median(fit_times[name]) if name in fits else None,
            "predict_seconds": statistics.median(predict_times[name]),
            "bytes": _bytes(posterior),
        }
        for name, posterior in ready.items()
    ]
    settings = {
        "components": len(models),
        "train_images": train.count,
        "measured_on": _count(fitting),
        "predicted_images": _count(testing),
        "repeats": REPEATS,
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


def _count(batches: Sequence[tuple[Tensor, Tensor]]) -> int:
    return sum(len(labels) for _, labels in batches)


def _extended(part: float, whole: float, fewer: int, more: int, all_of_them: int) -> float:
    """Time for all data along the line through two measurements."""
    if more == fewer:
        return whole * all_of_them / more
    slope = (whole - part) / (more - fewer)
    return whole + slope * (all_of_them - more)


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
