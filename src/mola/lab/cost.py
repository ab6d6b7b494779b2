"""What methods cost: time to fit, time to predict, memory; measured side by side in one run."""

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
from mola.baselines import Mimo, MultiSwag, Swag
from mola.lab.activations import Network, Progress
from mola.lab.runner import environment
from mola.lab.suite import Budget, Source, SwagBudget
from mola.lab.training.passes import has_statistics, recompute_statistics
from mola.lab.training.swag import fit_swag, sgd_epoch

REPEATS = 5

FEWER = 16
"""Methods that draw many networks for each prediction, or train, are measured on so many times fewer images, and extended."""

Loader = Sequence[tuple[Tensor, Tensor]]


class _Kept(Protocol):
    def __call__(self, inputs: Any, /) -> Any: ...

    def save(self, directory: str, /) -> Any: ...


@dataclass(frozen=True)
class _Work:
    do: Callable[[Loader], object]
    some: Loader
    times: int = 1
    """How often it is done."""
    on_some: list[float] = field(default_factory=list)
    on_half: list[float] = field(default_factory=list)

    @property
    def half(self) -> Loader:
        return self.some[: max(1, len(self.some) // 2)]

    def measure(self) -> None:
        self.on_some.append(_seconds(partial(self.do, self.some)))
        self.on_half.append(_seconds(partial(self.do, self.half)))

    def seconds(self, count: int) -> float:
        """On `count` data, along the line through both medians: what is paid once is not multiplied."""
        whole, part = statistics.median(self.on_some), statistics.median(self.on_half)
        more, fewer = _count(self.some), _count(self.half)
        if more == fewer:
            return self.times * whole * count / more
        # Medians before the line: noise of one measurement is multiplied by count / more.
        return self.times * (whole + max(0.0, whole - part) / (more - fewer) * (count - more))


@dataclass(frozen=True)
class _Entry:
    # One method: what it takes to fit it, what predicts, and what must be kept for that.

    name: str
    predict: _Kept
    networks: Sequence[nn.Module]
    """What is kept besides what `save` writes."""
    fit: Sequence[_Work] = ()
    test: Loader = ()


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
    """Time and memory of all methods on real networks, the whole forward passes included.

    Repeats are interleaved, so that all methods see the same neighbours on a busy machine; medians are reported, of CPU time
    where one thread works. Tuning is not included, and neither is the training of the networks. SWAG takes the suite's
    number of snapshots and draws, the paper's, each a pass over all training images in batches of the networks' own size.

    Numbers too small for a float's full precision are taken for zero while this runs: a processor takes many times as long for
    them, and weight decay leaves thousands in some networks, but none in SWAG's draws from these.

    Args:
        networks: K trained networks.
        train: training data; fitted on the first `images` and on half of them, and extended to all along a straight line.
        test: data to predict; the first `images`.
        budget: how long SWAG walks, how often it draws, how many heads MIMO has; None leaves these out.
        progress: told what is being done, and which share is done.
        images: how many of each.
        repeats: how often each is measured.

    Returns:
        The document for `cost.json`.
    """
    flushed = torch.set_flush_denormal(True)
    try:
        measured = _measured(networks, train, test, budget, progress, images, repeats)
    finally:
        torch.set_flush_denormal(False)
    measured["settings"]["tiny_numbers"] = "zero" if flushed else "as they are"
    return measured


def _measured(
    networks: Sequence[Network],
    train: Source,
    test: Source,
    budget: Budget | None,
    progress: Progress,
    images: int,
    repeats: int,
) -> dict[str, Any]:
    fitting, testing = _first(train, images), _first(test, images)
    short = _first(test, max(1, images // FEWER))
    entries = _entries([network.load() for network in networks], fitting, testing, short, budget)
    predictions: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for repeat in range(repeats):
        for index, entry in enumerate(entries):
            progress(f"cost of {entry.name}", (repeat + index / len(entries)) / repeats)
            for work in entry.fit:
                work.measure()
            seconds = _seconds(partial(_predict, entry.predict, entry.test))
            predictions[entry.name].append(seconds * _count(testing) / _count(entry.test))
    rows = [
        {
            "method": entry.name,
            "fit_seconds": sum(work.seconds(train.count) for work in entry.fit) if entry.fit else None,
            "predict_seconds": statistics.median(predictions[entry.name]),
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
    settings["repeats"] = repeats
    return {"settings": settings, "rows": rows, "environment": environment()}


def _entries(
    models: list[nn.Module], fitting: Loader, testing: Loader, short: Loader, budget: Budget | None
) -> list[_Entry]:
    def fitted(name: str, given: Sequence[nn.Module], **options: Any) -> _Entry:
        def fit(batches: Loader) -> mola.MoLA:
            return mola.fit(given, batches, progress=False, **options)

        return _Entry(name, fit(fitting), given, [_Work(fit, fitting)], testing)

    def cooled(entry: _Entry) -> _Entry:
        assert isinstance(entry.predict, mola.MoLA)
        # Any exponent costs the same.
        return replace(entry, name=f"{entry.name} (distance)", predict=entry.predict.with_distance_exponent(1.0))

    laplace = [fitted("LLLA", models[:1]), fitted("MoLA", models)]
    entries = [
        _Entry("MAP", mola.ensemble(models[:1]), models[:1], test=testing),
        _Entry("DE", mola.ensemble(models), models, test=testing),
        *laplace,
        *(cooled(entry) for entry in laplace),
    ]
    if budget is None:
        return entries
    swag_budget = budget.swag
    swags = [_swag(model, fitting[:1], swag_budget) for model in models]
    mimo = Mimo(models[0], budget.mimo.members, example=fitting[0][0])

    def walked(name: str, predictor: _Kept, given: Sequence[nn.Module]) -> _Entry:
        part = fitting[: max(2, len(fitting) // 4)]  # training costs three times as much as predicting
        return _Entry(
            name, predictor, (), [work for model in given for work in _walks(model, part, swag_budget)], short
        )

    return [
        *entries,
        walked("SWAG", swags[0], models[:1]),
        walked("MultiSWAG", MultiSwag(swags), models),
        _Entry("MIMO", mimo, (), test=testing),
        fitted("MIMO-MoLA", mimo.networks, structure="full"),
    ]


def _swag(model: nn.Module, batch: Loader, budget: SwagBudget) -> Swag:
    # A SWAG as large as a real one, from as few steps as will do: its predictions take as long.
    # The smallest rate: the weights must stay such that activations are finite.
    return fit_swag(
        model,
        batch,
        learning_rate=1e-9,
        epochs=budget.snapshots,
        rank=budget.snapshots,
        samples=budget.samples,
        progress=False,
    )


def _walks(model: nn.Module, batches: Loader, budget: SwagBudget) -> list[_Work]:
    # SWAG of one network: an epoch for every snapshot, and a pass for the BatchNorm statistics of every draw.
    network = copy.deepcopy(model).requires_grad_(True)
    optimiser = torch.optim.SGD(network.parameters(), lr=1e-9, momentum=0.9)
    walks = [_Work(partial(sgd_epoch, network, optimiser=optimiser), batches, budget.snapshots)]
    if has_statistics(network):
        walks.append(_Work(partial(recompute_statistics, network), batches, budget.samples))
    return walks


def _first(source: Source, images: int) -> list[tuple[Tensor, Tensor]]:
    batches, count = [], 0
    for inputs, labels in source.open():
        batches.append((inputs, labels))
        count += len(labels)
        if count >= images:
            break
    return batches


def _count(batches: Loader) -> int:
    return sum(len(labels) for _, labels in batches)


def _seconds(work: Callable[[], object]) -> float:
    # Of one thread, CPU time is what it would take alone: neighbours on a busy machine do not count.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


def _predict(predictor: _Kept, batches: Loader) -> None:
    with torch.no_grad():
        for inputs, _ in batches:
            predictor(inputs)


def _bytes(entry: _Entry) -> int:
    # Heads may share a trunk, which is kept once.
    tensors = {id(one): one for network in entry.networks for one in (*network.parameters(), *network.buffers())}
    networks = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if isinstance(entry.predict, mola.MoLA) and entry.predict.structure is None:
        return networks
    with tempfile.TemporaryDirectory() as folder:
        path = entry.predict.save(folder)
        return networks + sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
