"""Cost of the methods: time to fit, time to predict and memory, measured side by side in one run."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import mola
from mola.baselines import Mimo, MultiSwag
from mola.lab.activations import Network, Progress
from mola.lab.runner import environment
from mola.lab.suite import Budget, Source, SwagBudget
from mola.lab.training.passes import has_statistics, recompute_statistics
from mola.lab.training.swag import fit_swag, sgd_epoch

REPEATS = 5

FEWER = 16
"""Methods that draw many networks for each prediction are measured on so many times fewer images, and extended."""

Loader = Sequence[tuple[Tensor, Tensor]]


class _Predictor(Protocol):
    def __call__(self, inputs: Any, /) -> Any: ...

    def save(self, directory: str, /) -> Any: ...


@dataclass(frozen=True)
class _Work:
    # A part of a fit, done `times` times, and measured on a loader and on half of it.
    do: Callable[[Loader], object]
    loader: Loader
    times: int = 1
    whole: list[float] = field(default_factory=list)
    half: list[float] = field(default_factory=list)

    def measure(self) -> None:
        self.whole.append(_seconds(partial(self.do, self.loader)))
        self.half.append(_seconds(partial(self.do, _half(self.loader))))

    def seconds(self, count: int) -> float:
        """Return the time on `count` data, along the line through both medians: fixed costs are not multiplied."""
        whole, half = statistics.median(self.whole), statistics.median(self.half)
        more, fewer = _count(self.loader), _count(_half(self.loader))
        if more == fewer:
            return self.times * whole * count / more
        # Medians before the line: the noise of one measurement is multiplied by count / more.
        return self.times * (whole + max(0.0, whole - half) / (more - fewer) * (count - more))


@dataclass(frozen=True)
class _Entry:
    # A method: the work to fit it, its predictor, and the networks that are kept besides the predictor's files.
    name: str
    predict: _Predictor
    networks: Sequence[nn.Module]
    fit: Sequence[_Work] = ()
    test: Loader = ()
    seconds: list[float] = field(default_factory=list)


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
    """Measure time and memory of all methods on real networks, the whole forward passes included.

    Repeats are interleaved, so that all methods share the conditions of a busy machine; medians are reported, of CPU time with one
    thread. Tuning and the training of the networks are not included. SWAG takes the suite's number of snapshots and draws, each a pass
    over all training images.

    Denormal numbers are flushed to zero meanwhile: they slow a processor down many times, and weight decay leaves thousands in some
    networks, but none in SWAG's draws from these.

    Args:
        networks: K trained networks.
        train: training data; fitted on the first `images` and on half of them, and extended to all along a straight line.
        test: data to predict; the first `images`.
        budget: budget of SWAG and MIMO; None leaves these out.
        progress: called with the current step and the share of the work that is done.
        images: number of images of each set.
        repeats: number of measurements.

    Returns:
        The document for `cost.json`.
    """
    fitting, testing = _first(train, images), _first(test, images)
    short = _first(test, max(1, images // FEWER))
    flushed = torch.set_flush_denormal(True)
    try:
        entries = _entries([network.load() for network in networks], fitting, testing, short, budget)
        for repeat in range(repeats):
            for index, entry in enumerate(entries):
                progress(f"cost of {entry.name}", (repeat + index / len(entries)) / repeats)
                for work in entry.fit:
                    work.measure()
                seconds = _seconds(partial(_predict, entry.predict, entry.test))
                entry.seconds.append(seconds * _count(testing) / _count(entry.test))
    finally:
        torch.set_flush_denormal(False)
    rows = [
        {
            "method": entry.name,
            "fit_seconds": sum(work.seconds(train.count) for work in entry.fit) if entry.fit else None,
            "predict_seconds": statistics.median(entry.seconds),
            "bytes": _bytes(entry),
        }
        for entry in entries
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


def _entries(
    models: list[nn.Module], fitting: Loader, testing: Loader, short: Loader, budget: Budget | None
) -> list[_Entry]:
    def fitted(name: str, given: Sequence[nn.Module], **options: Any) -> _Entry:
        def fit(batches: Loader) -> mola.MoLA:
            return mola.fit(given, batches, progress=False, **options)

        return _Entry(name, fit(fitting), given, [_Work(fit, fitting)], testing)

    def by_distance(entry: _Entry) -> _Entry:
        assert isinstance(entry.predict, mola.MoLA)
        predict = entry.predict.with_distance_exponent(1.0)  # any exponent costs the same
        return replace(entry, name=f"{entry.name} (distance)", predict=predict, seconds=[])

    laplace = [fitted("LLLA", models[:1]), fitted("MoLA", models)]
    entries = [
        _Entry("MAP", mola.ensemble(models[:1]), models[:1], test=testing),
        _Entry("DE", mola.ensemble(models), models, test=testing),
        *laplace,
        *(by_distance(entry) for entry in laplace),
    ]
    if budget is None:
        return entries
    swag = budget.swag
    # SWAGs of the real size from few tiny steps: their predictions take as long, and activations stay finite.
    swags = [
        fit_swag(
            model,
            fitting[:1],
            learning_rate=1e-9,
            epochs=swag.snapshots,
            rank=swag.snapshots,
            samples=swag.samples,
            progress=False,
        )
        for model in models
    ]
    mimo = Mimo(models[0], budget.mimo.members, example=fitting[0][0])

    def walked(name: str, predictor: _Predictor, given: Sequence[nn.Module]) -> _Entry:
        part = fitting[: max(2, len(fitting) // 4)]  # training costs three times as much as predicting
        return _Entry(name, predictor, (), [work for model in given for work in _swag_work(model, part, swag)], short)

    return [
        *entries,
        walked("SWAG", swags[0], models[:1]),
        walked("MultiSWAG", MultiSwag(swags), models),
        _Entry("MIMO", mimo, (), test=testing),
        fitted("MIMO-MoLA", mimo.networks, structure="full"),
    ]


def _swag_work(model: nn.Module, batches: Loader, budget: SwagBudget) -> list[_Work]:
    # An epoch for every snapshot, and a pass for the BatchNorm statistics of every draw.
    network = copy.deepcopy(model).requires_grad_(True)
    optimiser = torch.optim.SGD(network.parameters(), lr=1e-9, momentum=0.9)
    work = [_Work(partial(sgd_epoch, network, optimiser=optimiser), batches, budget.snapshots)]
    if has_statistics(network):
        work.append(_Work(partial(recompute_statistics, network), batches, budget.samples))
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
    # With one thread, CPU time excludes other processes on a busy machine.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


def _predict(predictor: _Predictor, batches: Loader) -> None:
    with torch.no_grad():
        for inputs, _ in batches:
            predictor(inputs)


def _bytes(entry: _Entry) -> int:
    # Heads may share a trunk, which is counted once.
    tensors = {id(one): one for network in entry.networks for one in (*network.parameters(), *network.buffers())}
    networks = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if isinstance(entry.predict, mola.MoLA) and entry.predict.structure is None:
        return networks
    with tempfile.TemporaryDirectory() as folder:
        path = entry.predict.save(folder)
        return networks + sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
