"""The demo: train networks, compare methods on scikit-learn's digits and on distant inputs, and map their confidence on two moons."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import molaplace as mola
from molaplace.calibration import temperature_scaled
from molaplace.evaluation.answers import Answer, outlier_scores
from molaplace.evaluation.demo_result import (
    DEFAULT,
    PAPER,
    TEST,
    Array,
    DemoResult,
    DemoSettings,
    DistanceResult,
    MoonsResult,
)
from molaplace.evaluation.record import Comparison, Pictures, Record, SetInfo
from molaplace.evaluation.results import (
    EXAMPLES,
    examples_of,
    labelled_leads,
    labelled_result,
    outlier_leads,
    outlier_result,
)
from molaplace.evaluation.tally import Tally
from molaplace.metrics import mean_confidence
from molaplace.posterior import MoLA
from molaplace_lab.data.embedded import CLASSES, SIDE, Digits, load_digits, natural_patches, two_moons, uniform_noise
from molaplace_lab.data.transforms import ANGLES, rotate
from molaplace_lab.methods import LastLayer, noting
from molaplace_lab.training import Recipe, digits_mlp, mlp, train_ensemble

FAR = 1000.0
"""Factor by which the inputs in the far-away sets are scaled."""

TIMES = "\N{MULTIPLICATION SIGN}"

SHOWN = (0, 45, 90)
"""Rotation angles, in degrees, of the example digits."""

NEAR = ("patches of photographs", "noise")
"""Outlier sets with the same range of values as the digits."""


def demo_methods(networks: Sequence[nn.Module], train: Iterable[Any], validation: Iterable[Any]) -> dict[str, MoLA]:
    """Return one network, the ensemble, the temperature-scaled ensemble, and MoLA with the paper's rule and with the default rule."""
    with noting():
        posterior = mola.fit(networks, train, progress=False)
        return {
            "MAP": mola.ensemble(networks[:1]),
            "DE": mola.ensemble(networks),
            "DE-T": temperature_scaled(networks, validation),
            PAPER: posterior.tune(validation, rule="threshold", progress=False),
            DEFAULT: posterior.tune(validation, progress=False),
        }


def compare_on_digits(methods: Mapping[str, MoLA], digits: Digits, outliers: Mapping[str, Tensor]) -> Comparison:
    """Score fitted methods on the original and rotated test digits, and on outliers."""
    names = {angle: TEST if angle == 0 else f"rotated by {angle}°" for angle in ANGLES}
    turned = {name: rotate(digits.test.inputs, angle) for angle, name in names.items()}

    def answer(method: MoLA, name: str, inputs: Tensor) -> Answer:
        if name in turned and name != TEST:
            probs = method(inputs)
            return Answer(probs, outlier_scores(probs))
        found = method.predict(inputs)
        own = None if method.structure is None else found.ood_score
        return Answer(found.probs, outlier_scores(found.probs, found.logit_mean, method.weights, own))

    tallies = {
        name: {method: Tally.of([answer(one, name, inputs).columns(labels)]) for method, one in methods.items()}
        for sets, labels in ((turned, digits.test.labels), (outliers, None))
        for name, inputs in sets.items()
    }
    inside = tallies[TEST]
    levels = {name: float(angle) for angle, name in names.items()}
    sets = [
        SetInfo("train", "train", "train", len(digits.train)),
        SetInfo("validation", "validation", "validation", len(digits.val)),
        *(SetInfo(name, name, "shift" if level else "test", len(digits.test), level) for name, level in levels.items()),
        *(SetInfo(name, name, "outlier", len(inputs)) for name, inputs in outliers.items()),
    ]
    records = [
        Record(
            suite="demo",
            method=method,
            chosen=LastLayer.tuned(one),
            labelled={name: labelled_result(tallies[name][method], level) for name, level in levels.items()},
            outliers={name: outlier_result(inside[method], tallies[name][method]) for name in outliers},
            examples={name: examples_of(found[method]) for name, found in tallies.items()},
        )
        for method, one in methods.items()
    ]
    leads = {name: labelled_leads(tallies[name]) for name in turned}
    notes = [f"{name}: {note}" for name, one in methods.items() if one.tuning is not None for note in one.tuning.notes]
    shown = {names[angle]: turned[names[angle]] for angle in SHOWN} | {name: outliers[name] for name in NEAR}
    return Comparison(
        title="digits",
        sets={one.name: one for one in sets},
        records=tuple(records),
        classes=tuple(str(label) for label in range(CLASSES)),
        leads=leads | {name: outlier_leads(inside, tallies[name]) for name in outliers},
        pictures={name: _pictures(inputs[:EXAMPLES]) for name, inputs in shown.items()},
        notes=tuple(notes),
        made={"parameters": sum(parameter.numel() for parameter in methods["MAP"].networks[0].parameters())},
    )


def _pictures(inputs: Tensor) -> Pictures:
    return Pictures((255 * inputs.clamp(0, 1)).round().to(torch.uint8).permute(0, 2, 3, 1).numpy())


SCALES = np.logspace(0, 6, 25)
PRECISIONS = np.logspace(-16, 4, 41)


def walk_away(methods: Mapping[str, MoLA], kinds: Mapping[str, Tensor]) -> DistanceResult:
    """Scale noise and test digits by up to a million, and compare the confidence with its exact limit and the theorem's bound."""

    def limit(method: MoLA, inputs: Tensor) -> float:
        return mean_confidence(method.far_field_limit(inputs))

    def bound(method: MoLA, inputs: Tensor) -> float:
        return float(method.confidence_bound(inputs).mean())

    def curve(method: MoLA, inputs: Tensor) -> Array:
        return np.array([mean_confidence(method(float(scale) * inputs)) for scale in SCALES])

    tuned = {name: method for name, method in methods.items() if method.structure is not None}
    # With a distance exponent, the bound differs between inputs; like the limit, it falls to 1/C.
    even = {name: method for name, method in tuned.items() if method.distance_exponent == 0}
    at = [methods[PAPER].with_prior_precision(float(precision)) for precision in PRECISIONS]
    return DistanceResult(
        scales=SCALES,
        curves={kind: {name: curve(one, x) for name, one in methods.items()} for kind, x in kinds.items()},
        limits={kind: {name: limit(one, x) for name, one in tuned.items()} for kind, x in kinds.items()},
        bounds={kind: {name: bound(one, x) for name, one in even.items()} for kind, x in kinds.items()},
        precisions=PRECISIONS,
        test_confidence=np.array([mean_confidence(posterior(kinds[TEST])) for posterior in at]),
        limit=np.array([limit(posterior, kinds["noise"]) for posterior in at]),
        bound=np.array([bound(posterior, kinds["noise"]) for posterior in at]),
    )


POINTS = 200
REACH = 12.0
"""Half the side length of the maps; the data lie within a distance of 2 of the origin."""


def map_moons(settings: DemoSettings, on_epoch: Callable[[int, int], None]) -> MoonsResult:
    """Train an ensemble on two moons, fit and tune a posterior, and map each method's confidence far beyond the data."""
    data, val = two_moons(POINTS, seed=2 * settings.seed), two_moons(POINTS, seed=2 * settings.seed + 1)
    recipe = Recipe(epochs=settings.moons_epochs, batch_size=POINTS // 2, learning_rate=1e-2)
    # Without biases, the predicted class would be constant along a ray from the origin.
    build = partial(mlp, 2, (64, 64), 2)
    networks = train_ensemble(build, data, recipe, members=settings.members, seed=settings.seed, on_epoch=on_epoch)
    methods = demo_methods(networks, data.batches(), val.batches())
    size = settings.map_size
    axis = torch.linspace(-REACH, REACH, size, dtype=torch.float32)
    plane = torch.cartesian_prod(axis, axis).flip(1)  # rows run from bottom to top, and each row from left to right
    maps = {
        name: np.asarray(method(plane).double().max(1).values.reshape(size, size).numpy())
        for name, method in methods.items()
    }
    return MoonsResult(
        points=data.inputs.double().numpy(),
        labels=data.labels.numpy(),
        reach=REACH,
        maps=maps,
    )


Progress = Callable[[str, float], None]
"""Function that is called with a description of the current step and the completed share of the work, from 0 to 1."""

TRAINED, FITTED, WALKED, MAPPED = 0.6, 0.7, 0.8, 0.97
"""Progress after each part of the demo, as a measured fraction of the total time."""


def run_demo(settings: DemoSettings, progress: Progress = lambda doing, done: None) -> DemoResult:
    """Run the whole comparison. Repeated runs with the same settings give identical numbers."""

    def during(words: str, begin: float, end: float, epochs: int) -> Callable[[int, int], None]:
        def on_epoch(member: int, epoch: int) -> None:
            progress(words, begin + (end - begin) * (member + epoch / epochs) / settings.members)

        return on_epoch

    start, seed, members = time.perf_counter(), settings.seed, settings.members
    progress("reading the data", 0.0)
    with one_thread():
        digits = load_digits(seed)
        recipe, trained = Recipe(epochs=settings.epochs), during("training networks", 0.0, TRAINED, settings.epochs)
        networks = train_ensemble(digits_mlp, digits.train, recipe, members=members, seed=seed, on_epoch=trained)
        progress("fitting, tuning and scoring", TRAINED)
        methods = demo_methods(networks, digits.train.batches(), digits.val.batches())
        made = [make(settings.outliers, SIDE, seed=seed) for make in (natural_patches, uniform_noise)]
        near = dict(zip(NEAR, made, strict=True))
        far = {f"noise {TIMES}{FAR:.0f}": FAR * near["noise"], f"digits {TIMES}{FAR:.0f}": FAR * digits.test.inputs}
        comparison = compare_on_digits(methods, digits, near | far)
        progress("walking away from the data", FITTED)
        distance = walk_away(methods, {"noise": near["noise"], TEST: digits.test.inputs})
        moons = map_moons(settings, during("mapping two moons", WALKED, MAPPED, settings.moons_epochs))
    versions = {"molaplace": mola.__version__, "torch": torch.__version__, "Python": platform.python_version()}
    return DemoResult(settings, comparison, distance, moons, time.perf_counter() - start, versions)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with a single thread, because small networks lose more time to synchronisation than they gain from parallelism."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
