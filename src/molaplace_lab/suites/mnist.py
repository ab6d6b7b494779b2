"""The MNIST suite: rotated digits, and outliers from other sets of 28 x 28 greyscale images."""

from __future__ import annotations

from functools import partial

from molaplace_lab.models import build_network
from molaplace_lab.suite import DataOptions, Source, Suite
from molaplace_lab.suites.image_sources import in_distribution, load, outlier_sources, rotations, test_images, training
from molaplace_lab.training import RECIPES

OUTLIERS = {"fashion-mnist": "FMNIST", "emnist-letters": "EMNIST", "kmnist": "KMNIST", "notmnist": "notMNIST"}


def _sources(options: DataOptions) -> dict[str, Source]:
    return {
        **in_distribution("mnist", "MNIST", "none", options),
        **rotations(options, "MNIST", test_images("mnist", options), "nearest"),
        **outlier_sources(options, "none", OUTLIERS),
    }


MNIST = Suite(
    name="mnist",
    title="MNIST",
    builders={"lenet": lambda: build_network("lenet", 10)},
    classes=tuple("0123456789"),
    recipe=RECIPES["mnist"],
    threshold=0.98,
    shift={"title": "Rotated MNIST", "axis": "angle in degrees"},
    make_sources=_sources,
    options=frozenset({"train", "test", "shifted", "outliers", "normalisation"}),
    training_data=training(partial(load, "mnist", "train"), "none"),
)
"""The paper's experiments with rotated MNIST and with outliers. The paper's threshold of 0.98 applies to networks with an accuracy of
99.2 %."""
