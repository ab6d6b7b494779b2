"""The demo: train networks, compare methods on scikit-learn's digits and on distant inputs, and map their confidence on two moons.

Unless stated otherwise, dictionaries of results are keyed by the names in `DEMO_METHODS`, in the same order.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import molaplace as mola
from molaplace.data.digits import Digits, load_digits
from molaplace.demo.data import (
    LOSS,
    WEIGHT_DECAY,
    natural_patches,
    rotate,
    train_digits,
    two_moons,
    uniform_noise,
)
from molaplace.errors import collect_warnings
from molaplace.evaluation import (
    NUM_EXAMPLES,
    Evaluation,
    Pictures,
    SetInfo,
    collect,
    compare,
)
from molaplace.metrics import mean_confidence
from molaplace.numerics import one_thread
from molaplace.perceptrons import train_mlps
from molaplace.posterior import MoLA
from molaplace.progress import Progress, no_progress, part

SINGLE, ENSEMBLE, PAPER, DEFAULT = "one network", "scaled ensemble", "MoLA, paper's rule", "MoLA"

DEMO_METHODS = {
    SINGLE: "the first network, unchanged",
    ENSEMBLE: "the mean of the networks' probabilities, with a temperature tuned on the validation digits",
    PAPER: "the networks, each with a Laplace approximation of its last layer, tuned by the rule of the paper",
    DEFAULT: "the same mixture, tuned by the default rule of molaplace",
}
"""Descriptions of the methods, by name."""

Array = NDArray[np.float64]

TEST = "test digits"
"""Name of the in-distribution set."""

ANGLES = tuple(range(0, 181, 15))
"""Rotation angles, in degrees, of the test digits."""

PICTURED_ANGLES = (0, 30)
"""Rotation angles, in degrees, of the example digits."""

PATCHES, NOISE = "patches of photographs", "noise"
"""Names of the outlier sets. Both have the same size and the same range of values as the digits."""

SCALES = np.logspace(0, 6, 25)

POINTS = 200

REACH = 8.0
"""Half the side length of the maps; the data lie within a distance of 2 of the origin."""

TRAINED, FITTED, WALKED, MAPPED = 0.4, 0.6, 0.75, 0.97
"""Progress after each part of the demo, as a fraction of the total time."""


@dataclass(frozen=True)
class DemoSettings:
    """Random seed and sizes used in the demo."""

    seed: int = 0
    members: int = 5
    """Number of networks in the ensemble."""
    epochs: int = 60
    outliers: int = 500
    """Number of inputs in each out-of-distribution set."""
    moons_epochs: int = 150
    map_size: int = 181
    """Number of grid points along each side of a confidence map."""


@dataclass(frozen=True)
class DistanceResult:
    """Confidence on inputs that are multiplied by increasing factors to move them away from the data."""

    scales: Array
    curves: dict[str, dict[str, Array]]
    """Mean confidence at each scale, by type of input and method."""
    limits: dict[str, dict[str, float]]
    """Mean of the exact far-field limit, by type of input and method, for methods with a Laplace approximation."""
    bounds: dict[str, dict[str, float]]
    """Mean of the theorem's bound, by type of input and method, for methods without a distance exponent."""


@dataclass(frozen=True)
class MoonsResult:
    """Confidence maps of the plane around the two moons."""

    points: Array
    """Training inputs, shape (n, 2)."""
    labels: NDArray[np.int64]
    reach: float
    """Half the side length of the square that the maps cover: both axes run from -reach to reach."""
    maps: dict[str, Array]
    """Confidence maps by method, each of shape (size, size); the first axis is y, from bottom to top."""


@dataclass(frozen=True)
class DemoResult:
    """All results of the demo."""

    settings: DemoSettings
    networks: Sequence[nn.Module]
    """The networks trained on the digits."""
    comparison: Evaluation
    """Comparison of the methods on test digits, rotated digits, and inputs that are not digits."""
    distance: DistanceResult
    moons: MoonsResult
    seconds: float
    versions: dict[str, str]
    """Versions of molaplace, torch and Python."""

    def numbers(self) -> dict[str, Any]:
        """Return the settings and results, except the curves and maps, as plain JSON values for `numbers.json`."""
        return {
            "settings": asdict(self.settings),
            "versions": self.versions,
            "seconds": self.seconds,
            **self.comparison.document(),
            "far_field": {"limit": self.distance.limits, "bound": self.distance.bounds},
        }


def demo_methods(networks: Sequence[nn.Module], train: Iterable[Any], validation: Iterable[Any]) -> dict[str, MoLA]:
    """Return the fitted and tuned methods."""
    with collect_warnings():
        posterior = mola.fit(networks, train, progress=False)
        plain = mola.baselines(posterior, validation, progress=False)
        tuned = posterior.tune(validation, progress=False)
    return {SINGLE: plain["MAP"], ENSEMBLE: plain["DE-T"], PAPER: plain["MoLA (paper)"], DEFAULT: tuned}


# --- digits ----------------------------------------------------------------------------------------------------------


def compare_on_digits(methods: Mapping[str, MoLA], digits: Digits, outliers: Mapping[str, Tensor]) -> Evaluation:
    """Score fitted methods on the original and rotated test digits, and on outliers."""
    names = {angle: TEST if angle == 0 else f"rotated by {angle}°" for angle in ANGLES}
    rotated = {name: rotate(digits.test.inputs, angle) for angle, name in names.items()}
    columns = {
        name: collect(methods, [(inputs, digits.test.labels)], name, labelled=name in rotated)
        for name, inputs in {**rotated, **outliers}.items()
    }
    sets = [
        SetInfo("train", "train", "train", len(digits.train)),
        SetInfo("validation", "validation", "validation", len(digits.val)),
        *(
            SetInfo(name, name, "shift" if angle else "test", len(digits.test), float(angle))
            for angle, name in names.items()
        ),
        *(SetInfo(name, name, "outlier", len(inputs)) for name, inputs in outliers.items()),
    ]
    labels = tuple(digits.test.labels[:NUM_EXAMPLES].tolist())
    pictures = {names[angle]: Pictures(_pixels(rotated[names[angle]]), labels) for angle in PICTURED_ANGLES}
    return compare(
        "digits",
        sets,
        columns,
        methods,
        subject=DEFAULT,
        pictures=pictures | {PATCHES: Pictures(_pixels(outliers[PATCHES]))},
        made={"parameters": sum(parameter.numel() for parameter in methods[SINGLE].networks[0].parameters())},
    )


def _pixels(inputs: Tensor) -> NDArray[np.uint8]:
    return (255 * inputs[:NUM_EXAMPLES]).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


# --- far from the data -----------------------------------------------------------------------------------------------


def walk_away(methods: Mapping[str, MoLA], kinds: Mapping[str, Tensor]) -> DistanceResult:
    """Scale noise and test digits by up to a million, and compare the confidence with its exact limit and the theorem's bound."""

    def limit(method: MoLA, inputs: Tensor) -> float:
        return mean_confidence(method.far_field_limit(inputs))

    def bound(method: MoLA, inputs: Tensor) -> float:
        return float(method.confidence_bound(inputs).mean())

    def curve(method: MoLA, inputs: Tensor) -> Array:
        return np.array([mean_confidence(method(float(scale) * inputs)) for scale in SCALES])

    with_laplace = {name: method for name, method in methods.items() if method.structure is not None}
    # With a distance exponent, the bound differs between inputs; like the limit, it falls to 1/C.
    bounded = {name: method for name, method in with_laplace.items() if method.distance_exponent == 0}
    return DistanceResult(
        scales=SCALES,
        curves={kind: {name: curve(method, x) for name, method in methods.items()} for kind, x in kinds.items()},
        limits={kind: {name: limit(method, x) for name, method in with_laplace.items()} for kind, x in kinds.items()},
        bounds={kind: {name: bound(method, x) for name, method in bounded.items()} for kind, x in kinds.items()},
    )


def map_moons(settings: DemoSettings, on_epoch: Callable[[int], None]) -> MoonsResult:
    """Train an ensemble on two moons, fit and tune a posterior, and map each method's confidence far beyond the data."""
    data = two_moons(POINTS, seed=2 * settings.seed)
    validation = two_moons(POINTS, seed=2 * settings.seed + 1)
    networks = train_mlps(
        data.inputs,
        data.labels,
        2,
        LOSS,
        hidden=(64, 64),
        members=settings.members,
        seed=settings.seed,
        epochs=settings.moons_epochs,
        batch_size=POINTS // 2,
        learning_rate=1e-2,
        weight_decay=WEIGHT_DECAY,
        bias=True,  # without biases, the predicted class would be constant along a ray from the origin
        on_epoch=on_epoch,
    )
    methods = demo_methods(networks, data.batches(), validation.batches())
    size = settings.map_size
    axis = torch.linspace(-REACH, REACH, size, dtype=torch.float32, device="cpu")
    plane = torch.cartesian_prod(axis, axis).flip(1)  # rows run from bottom to top, and each row from left to right
    with torch.no_grad():
        confidence = {name: method(plane).double().amax(1).reshape(size, size) for name, method in methods.items()}
    return MoonsResult(
        points=data.inputs.double().numpy(),
        labels=data.labels.numpy(),
        reach=REACH,
        maps={name: values.numpy() for name, values in confidence.items()},
    )


# --- everything ------------------------------------------------------------------------------------------------------


def run_demo(settings: DemoSettings, progress: Progress = no_progress) -> DemoResult:
    """Run the whole comparison. Repeated runs with the same settings give identical numbers."""
    training = part(progress, 0.0, TRAINED)
    mapping = part(progress, WALKED, MAPPED)
    start = time.perf_counter()
    seed = settings.seed
    progress("reading the data", 0.0)
    with one_thread():
        digits = load_digits(seed)
        networks = train_digits(
            digits.train,
            members=settings.members,
            seed=seed,
            epochs=settings.epochs,
            on_epoch=lambda epoch: training("training networks", epoch / settings.epochs),
        )
        progress("fitting, tuning and scoring", TRAINED)
        methods = demo_methods(networks, digits.train.batches(), digits.val.batches())
        noise = uniform_noise(settings.outliers, seed=seed)
        outliers = {PATCHES: natural_patches(settings.outliers, seed=seed), NOISE: noise}
        comparison = compare_on_digits(methods, digits, outliers)
        progress("walking away from the data", FITTED)
        distance = walk_away(methods, {NOISE: noise, TEST: digits.test.inputs})
        moons = map_moons(settings, lambda epoch: mapping("mapping two moons", epoch / settings.moons_epochs))
    versions = {"molaplace": mola.__version__, "torch": torch.__version__, "Python": platform.python_version()}
    return DemoResult(settings, networks, comparison, distance, moons, time.perf_counter() - start, versions)
