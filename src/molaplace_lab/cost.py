"""The cost of each method: fit time, prediction time and memory, measured together in one run."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import molaplace as mola
from molaplace.progress import Progress
from molaplace_lab.activations import Network
from molaplace_lab.mimo import Mimo
from molaplace_lab.runner import environment
from molaplace_lab.suite import Budget, Source, SwagBudget
from molaplace_lab.swag import (
    Moments,
    class_probabilities,
    draw_network,
    fit_moments,
    norm_layers,
    recompute_statistics,
    swag_loss,
)
from molaplace_lab.training import train_epoch

REPEATS = 5

FEWER = 16
"""Factor by which the number of test images is reduced for methods that draw many networks for each prediction."""

Loader = Sequence[tuple[Tensor, Tensor]]
Work = tuple[Callable[[Loader], object], Loader, int]
"""One part of a fit: a function, the loader passed to it, and the number of calls."""


@dataclass(frozen=True)
class _Method:
    name: str
    predictor: Any
    networks: Sequence[nn.Module]
    """Networks that are stored in addition to the predictor's files."""
    test: Loader
    fit: Sequence[Work] = ()
    tensors: Sequence[Tensor] = ()
    """Tensors that are stored in addition to the networks."""


def measure_cost(
    networks: Sequence[Network],
    train: Source,
    test: Source,
    budget: Budget | None,
    progress: Progress,
    *,
    images: int = 2000,
    repeats: int = REPEATS,
) -> dict[str, Any]:
    """Measure the time and memory used by all methods on real networks, including forward passes; return the document for `cost.json`.

    Repetitions of different methods are interleaved, so that the load on the machine affects all methods equally. The results are
    medians of CPU time if PyTorch uses a single thread, and of wall-clock time otherwise. Methods are fitted on the first `images`
    training images and again on half of them, and the time is extrapolated linearly to all images. The time for tuning and for
    training the original networks is not included. SWAG uses the numbers of snapshots and draws specified in the budget. Each
    snapshot, and each draw from a network with BatchNorm, requires a pass over all training images. Without a budget, SWAG and MIMO
    are omitted.

    Denormal numbers, which can make a processor many times slower, are flushed to zero during the measurement. Otherwise, the
    comparison would be unfair: weight decay leaves thousands of denormal weights in some networks, whereas SWAG's draws contain none.
    """
    fitting = _first(train, images)
    testing = _first(test, images)
    short = _first(test, max(1, images // FEWER))
    times: dict[tuple[str, int | str, int], list[float]] = defaultdict(list)
    flushed = torch.set_flush_denormal(True)
    try:
        methods = _methods([network.load() for network in networks], fitting, testing, short, budget)
        for repeat in range(repeats):
            for index, method in enumerate(methods):
                progress(f"cost of {method.name}", (repeat + index / len(methods)) / repeats)
                for part, (work, loader, _) in enumerate(method.fit):
                    for share in (loader, _half(loader)):
                        times[method.name, part, _count(share)].append(_seconds(partial(work, share)))
                times[method.name, "predict", 0].append(_seconds(partial(_predict, method.predictor, method.test)))
        # Posteriors keep the flushed weights of their heads, so they must be saved before denormal weights reappear.
        sizes = {method.name: _bytes(method) for method in methods}
    finally:
        torch.set_flush_denormal(False)
    # Take medians before extrapolating, because extrapolation amplifies measurement noise.
    median = {key: statistics.median(values) for key, values in times.items()}

    def extended(name: str, part: int, loader: Loader) -> float:
        # Extrapolate along a line through the times for the whole loader and for half of it, so that fixed costs are not multiplied.
        more = _count(loader)
        fewer = _count(_half(loader))
        whole = median[name, part, more]
        half = median[name, part, fewer]
        if more == fewer:
            return whole * train.count / more
        return whole + max(0.0, whole - half) / (more - fewer) * (train.count - more)

    rows = [
        {
            "method": method.name,
            "fit_seconds": sum(
                calls * extended(method.name, part, loader) for part, (_, loader, calls) in enumerate(method.fit)
            )
            or None,
            "predict_seconds": median[method.name, "predict", 0] * _count(testing) / _count(method.test),
            "bytes": sizes[method.name],
        }
        for method in methods
    ]
    settings = {
        "components": len(networks),
        "train_images": train.count,
        "measured_on": _count(fitting),
        "predicted_images": _count(testing),
    }
    if budget is not None:
        settings |= {
            "SWAG_predicted_images": _count(short),
            "SWAG_snapshots": budget.swag.snapshots,
            "SWAG_draws": budget.swag.samples,
            "MIMO_heads": budget.mimo.members,
        }
    made = {"repeats": repeats, "tiny_numbers": "zero" if flushed else "as they are"}
    return {"settings": settings | made, "rows": rows, "environment": environment()}


def _methods(
    models: list[nn.Module], fitting: Loader, testing: Loader, short: Loader, budget: Budget | None
) -> list[_Method]:
    def fitted(name: str, members: Sequence[nn.Module], **options: Any) -> _Method:
        def fit(batches: Loader) -> mola.MoLA:
            return mola.fit(members, batches, progress=False, **options)

        return _Method(name, fit(fitting), members, testing, [(fit, fitting, 1)])

    laplace = [fitted("LLLA", models[:1]), fitted("MoLA", models)]
    methods = [
        _Method("MAP", mola.ensemble(models[:1]), models[:1], testing),
        _Method("DE", mola.ensemble(models), models, testing),
        *laplace,
        *(
            # The cost does not depend on the exponent.
            replace(method, name=f"{method.name} (distance)", predictor=method.predictor.with_distance_exponent(1.0))
            for method in laplace
        ),
    ]
    if budget is None:
        return methods
    # Measure SWAG's training on a quarter of the batches, because it is slower than prediction.
    part = fitting[: max(2, len(fitting) // 4)]
    work = _swag_work(models[0], part, budget.swag)
    swags = [_swag(model, fitting[:1], budget.swag) for model in models]
    draws = [partial(class_probabilities, network) for networks, _ in swags for network in networks]
    tensors = [tensor for _, moments in swags for tensor in moments.tensors().values()]
    single = budget.swag.samples
    work_of_all = [(run, loader, calls * len(models)) for run, loader, calls in work]
    mimo = Mimo(models[0], budget.mimo.members, example=fitting[0][0])
    return [
        *methods,
        _Method("SWAG", mola.Mixture(draws[:single]), (), short, work, tensors[: len(tensors) // len(models)]),
        _Method("MultiSWAG", mola.Mixture(draws), (), short, work_of_all, tensors),
        _Method("MIMO", mimo.eval(), [mimo], testing),
        fitted("MIMO-MoLA", mimo.networks, structure="full"),
    ]


def _swag(model: nn.Module, batches: Loader, budget: SwagBudget) -> tuple[list[nn.Module], Moments]:
    # To time predictions, fit a full-size SWAG on a single batch, with tiny steps that keep activations finite.
    network = copy.deepcopy(model)
    count = budget.snapshots
    moments = fit_moments(network, batches, learning_rate=1e-9, epochs=count, rank=count, progress=False)
    draws = [draw_network(network, moments, 0, index, 0.5) for index in range(budget.samples)]
    return [draw.eval() for draw in draws], moments


def _swag_work(model: nn.Module, batches: Loader, budget: SwagBudget) -> list[Work]:
    # Measure one epoch per snapshot, and one pass per draw to recompute its BatchNorm statistics.
    network = copy.deepcopy(model).requires_grad_(True)
    optimiser = torch.optim.SGD(network.parameters(), lr=1e-9, momentum=0.9)

    def epoch(loader: Loader) -> None:
        train_epoch(network, loader, optimiser, swag_loss(network), "an epoch")

    work: list[Work] = [(epoch, batches, budget.snapshots)]
    if norm_layers(network):
        work.append((partial(recompute_statistics, network), batches, budget.samples))
    return work


def _first(source: Source, images: int) -> list[tuple[Tensor, Tensor]]:
    batches: list[tuple[Tensor, Tensor]] = []
    for batch in source.open():
        batches.append(batch)
        if _count(batches) >= images:
            break
    return batches


def _count(batches: Loader) -> int:
    return sum(len(labels) for _, labels in batches)


def _half(batches: Loader) -> Loader:
    return batches[: max(1, len(batches) // 2)]


def _seconds(work: Callable[[], object]) -> float:
    # With one thread, CPU time excludes the time taken by other processes on a busy machine.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


def _predict(predictor: Any, batches: Loader) -> None:
    with torch.no_grad():
        for inputs, _ in batches:
            predictor(inputs)


def _bytes(method: _Method) -> int:
    # Heads may share a trunk, which must be counted only once.
    tensors = {
        id(tensor): tensor for network in method.networks for tensor in (*network.parameters(), *network.buffers())
    }
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*tensors.values(), *method.tensors))
    if not isinstance(method.predictor, mola.MoLA) or method.predictor.structure is None:
        return size
    with tempfile.TemporaryDirectory() as folder:
        path = method.predictor.save(folder)
        return size + sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
