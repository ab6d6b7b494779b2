"""The bars on cooling by distance: what it may cost, with trained networks on real data.

`python benchmarks/fit_overhead.py --bars distance` runs this. Whole calls, one network, one thread, CPU time. LeNets
get batches of 512, as the paper's evaluation has them, and of 128 beside, which no bar judges: a pass over 128 images takes 4 ms, and
some fifty small operations beside it cost what they cost:

* fit: `mola.fit` over training data against the bare pass of the network over the same batches;
* predict: a posterior that is cooled by distance against the deep ensemble (`mola.ensemble`) of the same network;
* tune: `posterior.tune(rule="distance")` on 2000 validation data against the bare pass over them. The posterior is new each time, so
  that its eigenproblem and the distances are solved in it.

Each figure is the median of repeats in turns, with quartiles. Beside it stands what is added outside the network in the same calls,
1 + time outside / time inside, and that is judged: two bare passes of the same network may differ by a twentieth on a machine that is
not one's own, more than what is to be shown. (It is blind to what the calls do to the network's own speed; the median is not.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pairing import Inside, timed
from safetensors.torch import load_file
from torch import Tensor, nn

import mola
from mola.component import Component
from mola.lab.data.catalogue import load_images
from mola.lab.data.images import normalisation
from mola.lab.models import lenet, resnet20

VALIDATION = 2000
EXPONENT = 1.5

Loader = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Suite:
    """A network with its data, how much of them is read, and the bars."""

    name: str
    network: Callable[[], nn.Module]
    data: str
    normalise: str
    folder: str
    """Of the networks, below the folder of networks."""
    training: int
    repeats: int
    predicted: int
    """Data in a turn of predictions."""
    batch: int
    bars: dict[str, float]
    """By work; works without one are told, and not judged."""


def _lenet(batch: int, bars: dict[str, float]) -> Suite:
    return Suite("LeNet / MNIST", lenet, "mnist", "none", "mnist", 60_000, 5, 3840, batch, bars)


SUITES = (
    _lenet(512, {"fit": 1.06, "predict over DE": 1.06, "tune": 1.1}),
    _lenet(128, {}),
    # A part of the training data: what is done once weighs more than it would over all of them.
    Suite(
        "ResNet-20 / CIFAR-10",
        resnet20,
        "cifar10",
        "imagenet",
        "resnet20",
        2048,
        7,
        512,
        128,
        {"fit": 1.03, "predict over DE": 1.03, "tune": 1.1},
    ),
)


def measure(data: Path | None, networks: Path, only: str, *, quick: bool) -> list[dict[str, Any]]:
    """All figures, each printed as it is known; quick: on a tenth of the training data, with fewer repeats."""
    print(f"{'':22} batch {'':16} {'median':>7} {'[quartiles]':18} {'added':>7} {'bar':>6}")
    rows = []
    for suite in SUITES:
        if only in suite.name:
            if quick:
                suite = replace(suite, training=suite.training // 10, repeats=max(1, suite.repeats // 2))
            for row in _of(suite, data, networks / suite.folder):
                rows.append(row)
                print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    low, high = row["quartiles"]
    judged = "" if row["bar"] is None else f"{row['bar']:6.2f} {'met' if row['met'] else 'MISSED'}"
    return (
        f"{row['setting']:22} {row['batch']:5} {row['work']:16} {row['median']:7.3f} [{low:.3f}, {high:.3f}]{'':4} "
        f"{row['added']:7.3f} {judged}"
    )


def _of(suite: Suite, data: Path | None, folder: Path) -> list[dict[str, Any]]:
    network = suite.network()
    network.load_state_dict(load_file(folder / "00.safetensors"))
    network.eval()
    training = _loader(suite, data, "train", suite.training)
    validation = _loader(suite, data, "test", VALIDATION)
    posterior = mola.fit(network, training[: 2560 // suite.batch], progress=False)
    posterior.tune(validation, rule="distance", progress=False)  # what torch does once is no part of it
    cooled, ensemble = posterior.with_distance_exponent(EXPONENT), mola.ensemble(network)
    batches = [inputs for inputs, _ in training[: suite.predicted // suite.batch]]
    fitted: list[mola.MoLA] = []

    def tune() -> None:
        _new(fitted[-1]).tune(validation, rule="distance", progress=False)

    works: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
        "fit": (
            lambda: fitted.append(mola.fit(network, training, progress=False)),
            lambda: _bare(network, training),
            suite.repeats,
        ),
        "predict over DE": (
            lambda: [cooled(inputs) for inputs in batches],
            lambda: [ensemble(inputs) for inputs in batches],
            4 * suite.repeats + 1,
        ),
        "tune": (tune, lambda: _bare(network, validation), 2 * suite.repeats + 1),
    }
    return [_row(suite, work, network, *what) for work, what in works.items()]


def _row(
    suite: Suite, work: str, network: nn.Module, tested: Callable[[], Any], plain: Callable[[], Any], repeats: int
) -> dict[str, Any]:
    ratios, added = [], []
    for repeat in range(repeats):
        found = {}
        for name in ("tested", "plain") if repeat % 2 else ("plain", "tested"):
            with Inside([network]) as inside:
                total = timed(tested if name == "tested" else plain)[1]
            found[name] = (total, inside.total[1])
        ratios.append(found["tested"][0] / found["plain"][0])
        outside = [1 + (total - own) / own for total, own in found.values()]
        one = dict(zip(found, outside, strict=True))
        added.append(one["tested"] / (one["plain"] if work == "predict over DE" else 1))
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    bar, outside_the_network = suite.bars.get(work), float(np.median(added))
    return {
        "setting": suite.name,
        "batch": suite.batch,
        "work": work,
        "median": middle,
        "quartiles": [low, high],
        "added": outside_the_network,
        "repeats": repeats,
        "bar": bar,
        "met": bar is None or outside_the_network <= bar,
    }


def _loader(suite: Suite, data: Path | None, split: str, count: int) -> Loader:
    images = load_images(suite.data, split, data)
    inputs, labels = normalisation(suite.normalise)(images.pixels[:count]), images.labels[:count]
    return list(zip(inputs.split(suite.batch), labels.split(suite.batch), strict=True))


def _bare(network: nn.Module, loader: Loader) -> None:
    with torch.no_grad():
        for inputs, _ in loader:
            network(inputs)


def _new(posterior: mola.MoLA) -> mola.MoLA:
    """The same posterior with nothing solved yet."""
    components = []
    for one in posterior.components:
        assert one.curvature is not None
        components.append(Component(one.network, one.head, replace(one.curvature), one.precision))
    return mola.MoLA(components, posterior.link)
