"""Four methods on handwritten digits: as they are, rotated, and against inputs that are no digits.

How sure the methods are of inputs that are scaled away from the data, and what theory says about it.

Four methods on two moons: how sure they are everywhere in the plane.

The demo: train, fit, tune, compare. Everything it needs comes with scikit-learn.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import mola
from mola import metrics
from mola.compare import Answer, Lead, Measured, Tally, area_between, lead, mean_of
from mola.compare.demo_result import (
    TEST,
    Array,
    DemoResult,
    DemoSettings,
    Detection,
    DigitsResult,
    DistanceResult,
    Examples,
    MoonsResult,
    Scores,
)
from mola.compare.four_methods import Contestants, four_methods
from mola.lab.data.embedded import CLASSES, SIDE, Digits, load_digits, natural_patches, two_moons, uniform_noise
from mola.lab.data.transforms import rotate
from mola.metrics import mean_confidence
from mola.posterior import MoLA
from mola.training import Recipe, train_ensemble
from mola.training.labelled import Labelled
from mola.training.mlps import digits_mlp, mlp

__all__ = [
    "ANGLES",
    "FAR",
    "Progress",
    "build_network",
    "compare_on_digits",
    "map_moons",
    "one_thread",
    "outlier_sets",
    "plane_points",
    "run_demo",
    "walk_away",
]

ANGLES = tuple(range(0, 181, 15))
"""Degrees, as for the paper's rotated MNIST."""

FAR = 1000.0
"""How many times farther from the origin than the data the far-away sets lie."""

TIMES = "\N{MULTIPLICATION SIGN}"

EXAMPLES = 8


def build_network() -> nn.Sequential:
    """The network of the demo."""
    return digits_mlp(CLASSES)


@dataclass(frozen=True)
class OutlierSets:
    """Inputs that are no digits, by name."""

    near: dict[str, Tensor]
    """In the digits' own value range."""
    far: dict[str, Tensor]
    """Scaled away from the data."""

    def items(self) -> list[tuple[str, Tensor]]:
        """All of them."""
        return [*self.near.items(), *self.far.items()]


def outlier_sets(test: Labelled, count: int, seed: int) -> OutlierSets:
    """Natural patches and noise; far away, the same noise and the test digits themselves."""
    noise = uniform_noise(count, SIDE, seed=seed)
    return OutlierSets(
        near={"natural patches": natural_patches(count, SIDE, seed=seed), "noise": noise},
        far={f"noise {TIMES}{FAR:.0f}": FAR * noise, f"digits {TIMES}{FAR:.0f}": FAR * test.inputs},
    )


def compare_on_digits(
    networks: Sequence[nn.Module], digits: Digits, outliers: OutlierSets
) -> tuple[DigitsResult, Contestants]:
    """Fit, tune and score the four methods.

    Args:
        networks: trained on `digits.train`.
        digits: the data.
        outliers: inputs that are no digits.

    Returns:
        The comparison, and the methods themselves for what else one would ask them.
    """
    contestants = four_methods(networks, digits.train.batches(), digits.val.batches())
    methods, tuned = contestants.predictors, contestants.tuned()
    rotated: dict[int, dict[str, Scores]] = {}
    leads: dict[int, dict[str, Lead]] = {}
    reliability: dict[int, dict[str, Array]] = {}
    turned = {angle: rotate(digits.test.inputs, angle) for angle in ANGLES}
    for angle, inputs in turned.items():
        probs = {name: method(inputs) for name, method in methods.items()}
        measured = {name: _measured(values, digits.test.labels) for name, values in probs.items()}
        rotated[angle] = {name: _scores(found) for name, found in measured.items()}
        leads[angle] = {
            score: lead({(name,): found[score] for name, found in measured.items()}, "low")
            for score in ("nll", "brier", "ece")
        }
        reliability[angle] = {
            name: metrics.bin_confidences(values, digits.test.labels, bins=10).numpy() for name, values in probs.items()
        }
    sets = dict([(TEST, digits.test.inputs), *outliers.items()])
    tallies = {
        kind: {name: _tally(method, inputs, own=name in tuned) for name, method in methods.items()}
        for kind, inputs in sets.items()
    }
    detection = {kind: _detection(tallies[TEST], tallies[kind]) for kind, _ in outliers.items()}
    shown = {TEST: digits.test.inputs, "rotated by 45°": turned[45], "rotated by 90°": turned[90], **outliers.near}
    result = DigitsResult(
        sizes={"train": len(digits.train), "val": len(digits.val), "test": len(digits.test)},
        parameters=sum(parameter.numel() for parameter in networks[0].parameters()),
        prior_precision={name: posterior.prior_precision[0] for name, posterior in tuned.items()},
        rule={name: posterior.tuning.rule for name, posterior in tuned.items() if posterior.tuning is not None},
        notes=contestants.notes,
        rotated=rotated,
        reliability=reliability,
        detection={kind: found for kind, (found, _) in detection.items()},
        leads=leads,
        detection_leads={kind: found for kind, (_, found) in detection.items()},
        confidences={
            kind: {name: tally["confidence"].numpy() for name, tally in by_method.items()}
            for kind, by_method in tallies.items()
        },
        examples={kind: _examples(methods, inputs) for kind, inputs in shown.items()},
    )
    return result, contestants


def _measured(probs: Tensor, labels: Tensor) -> dict[str, Measured]:
    tally = Tally()
    tally.add(Answer(probs), labels)
    return tally.measured()


def _scores(found: dict[str, Measured]) -> Scores:
    return Scores(
        **{name: one.value for name, one in found.items()}, errors={name: one.error for name, one in found.items()}
    )


def _tally(method: MoLA, inputs: Tensor, *, own: bool) -> Tally:
    """A method on unlabelled inputs, with the outlier score that it has of its own, if it has one."""
    found, tally = method.predict(inputs), Tally()
    tally.add(Answer(found.probs, found.logit_mean, method.weights, found.ood_score if own else None))
    return tally


def _confidence(method: MoLA, inputs: Tensor) -> Array:
    return np.asarray(method(inputs).double().max(1).values.numpy())


def _detection(inside: dict[str, Tally], outside: dict[str, Tally]) -> tuple[dict[str, Detection], dict[str, Lead]]:
    """Every method by every score that it has, and who leads."""
    sure = {name: mean_of(tally["confidence"]) for name, tally in outside.items()}
    areas: dict[tuple[str, ...], Measured] = {
        (name, score): area_between(inside[name][score], far)
        for name, tally in outside.items()
        for score, far in tally.scores.items()
    }
    found = {
        name: Detection(
            sure[name].value,
            sure[name].error,
            areas[name, "max probability"].value,
            {score: (areas[name, score].value, areas[name, score].error) for score in tally.scores},
        )
        for name, tally in outside.items()
    }
    leads = {
        "confidence": lead({(name,): one for name, one in sure.items()}, "low"),
        "auroc": lead({(name,): areas[name, "max probability"] for name in outside}, "high"),
        "any": lead(areas, "high"),
    }
    return found, leads


def _examples(methods: dict[str, MoLA], inputs: Tensor) -> Examples:
    few = inputs[:EXAMPLES]
    confidence = {name: _confidence(method, few) for name, method in methods.items()}
    return Examples(few.squeeze(1).double().numpy(), confidence)


SCALES = np.logspace(0, 6, 25)
PRECISIONS = np.logspace(-16, 4, 41)


def walk_away(contestants: Contestants, kinds: Mapping[str, Tensor], test: Tensor, probe: str) -> DistanceResult:
    """Scale inputs by up to a million, and compare with the exact limit and the Theorem's bound.

    Args:
        contestants: the four methods, of networks without biases.
        kinds: inputs to scale, by name.
        test: in-distribution inputs.
        probe: which of `kinds` to follow over the prior precisions.

    Returns:
        Confidence by distance, and far away by prior precision.
    """
    methods, tuned = contestants.predictors, contestants.tuned()
    curves = {
        kind: {name: _curve(method, inputs) for name, method in methods.items()} for kind, inputs in kinds.items()
    }
    limits = {kind: {name: _limit(method, inputs) for name, method in tuned.items()} for kind, inputs in kinds.items()}
    bounds = {kind: {name: _bound(method, inputs) for name, method in tuned.items()} for kind, inputs in kinds.items()}
    at = [methods["MoLA"].with_prior_precision(float(precision)) for precision in PRECISIONS]
    return DistanceResult(
        scales=SCALES,
        curves=curves,
        limits=limits,
        bounds=bounds,
        precisions=PRECISIONS,
        test_confidence=np.array([mean_confidence(posterior(test)) for posterior in at]),
        limit=np.array([_limit(posterior, kinds[probe]) for posterior in at]),
        bound=np.array([_bound(posterior, kinds[probe]) for posterior in at]),
    )


def _curve(method: MoLA, inputs: Tensor) -> Array:
    return np.array([mean_confidence(method(float(scale) * inputs)) for scale in SCALES])


def _limit(method: MoLA, inputs: Tensor) -> float:
    return mean_confidence(method.far_field_limit(inputs))


def _bound(method: MoLA, inputs: Tensor) -> float:
    return float(torch.mean(method.confidence_bound(inputs)))


POINTS = 200
REACH = 12.0
"""The data lie within 2 of the origin."""


def _build() -> nn.Sequential:
    # With biases, unlike the digits' networks: without, the predicted class is the same all along a ray from the origin.
    return mlp(2, (64, 64), 2)


def plane_points(reach: float, size: int) -> Tensor:
    """Points (size * size, 2) of the square from -reach to reach, row by row from the lowest, each from left to right."""
    axis = torch.linspace(-reach, reach, size, dtype=torch.float32)
    return torch.cartesian_prod(axis, axis).flip(1)


def map_moons(settings: DemoSettings, on_epoch: Callable[[int, int], None]) -> MoonsResult:
    """Train an ensemble on two moons, fit and tune, and map confidence far beyond the data.

    Args:
        settings: seed, number of networks, epochs, and size of the maps.
        on_epoch: called after every epoch with the member's index and its number of epochs done.

    Returns:
        The data and one map for each method.
    """
    train, val = two_moons(POINTS, seed=2 * settings.seed), two_moons(POINTS, seed=2 * settings.seed + 1)
    recipe = Recipe(epochs=settings.moons_epochs, batch_size=POINTS // 2, learning_rate=1e-2)
    networks = train_ensemble(_build, train, recipe, members=settings.members, seed=settings.seed, on_epoch=on_epoch)
    contestants = four_methods(networks, train.batches(), val.batches())
    size = settings.map_size
    plane = plane_points(REACH, size)
    maps = {
        name: np.asarray(method(plane).double().max(1).values.reshape(size, size).numpy())
        for name, method in contestants.predictors.items()
    }
    return MoonsResult(
        points=train.inputs.double().numpy(),
        labels=train.labels.numpy(),
        reach=REACH,
        maps=maps,
        prior_precision={name: posterior.prior_precision[0] for name, posterior in contestants.tuned().items()},
        notes=contestants.notes,
    )


Progress = Callable[[str, float], None]
"""Told what is being done, and which share of all the work is done, from 0 to 1."""

TRAINED, FITTED, WALKED, MAPPED = 0.6, 0.7, 0.8, 0.97
"""Share of the work done after each part, as measured."""


def run_demo(settings: DemoSettings, progress: Progress = lambda doing, done: None) -> DemoResult:
    """Run the whole comparison. The same settings give the same numbers.

    Args:
        settings: seed and sizes.
        progress: told how far the work is.

    Returns:
        What was found.
    """
    seconds: dict[str, float] = {}
    progress("reading the data", 0.0)
    with one_thread():
        with _timed(seconds, "train"):
            digits = load_digits(settings.seed)
            outliers = outlier_sets(digits.test, settings.outliers, settings.seed)

            def trained(member: int, epoch: int) -> None:
                done = (member + epoch / settings.epochs) / settings.members
                progress(f"training network {member + 1} of {settings.members}", TRAINED * done)

            networks = train_ensemble(
                build_network,
                digits.train,
                Recipe(epochs=settings.epochs),
                members=settings.members,
                seed=settings.seed,
                on_epoch=trained,
            )
        with _timed(seconds, "fit, tune and score"):
            progress("fitting, tuning and scoring", TRAINED)
            on_digits, contestants = compare_on_digits(networks, digits, outliers)
        with _timed(seconds, "walk away from the data"):
            progress("walking away from the data", FITTED)
            kinds = {"noise": outliers.near["noise"], "test digits": digits.test.inputs}
            distance = walk_away(contestants, kinds, digits.test.inputs, probe="noise")
        with _timed(seconds, "two moons"):

            def mapped(member: int, epoch: int) -> None:
                done = (member + epoch / settings.moons_epochs) / settings.members
                progress("mapping two moons", WALKED + (MAPPED - WALKED) * done)

            moons = map_moons(settings, mapped)
    versions = {"mola": mola.__version__, "torch": torch.__version__, "Python": platform.python_version()}
    return DemoResult(settings, on_digits, distance, moons, seconds, versions)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread inside: networks this small lose more by sharing work than they gain, ten times more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - start
