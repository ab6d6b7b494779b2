"""The demo: train, fit, tune, compare. Everything it needs comes with scikit-learn."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import mola
from mola.bench.demo_result import DemoResult, DemoSettings
from mola.bench.digits import build_network, compare_on_digits, outlier_sets
from mola.bench.distance import walk_away
from mola.bench.moons import map_moons
from mola.data.digits import load_digits
from mola.training import Recipe, train_ensemble

__all__ = ["Progress", "one_thread", "run_demo"]

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
