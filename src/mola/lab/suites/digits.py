"""Handwritten digits of scikit-learn: the whole suite in a minute, without files."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mola.compare.record import Role
from mola.lab.data.embedded import SIDE, load_digits, natural_patches, uniform_noise
from mola.lab.data.images import Images, normalisation
from mola.lab.data.transforms import ANGLES
from mola.lab.suite import Budget, DataOptions, MimoBudget, Shift, Source, Suite, SwagBudget, TrainingData
from mola.lab.suites.image_sources import image_source, rotations
from mola.lab.training import Labelled, Recipe, digits_mlp

OUTLIERS = 500
"""Default number of images in each set of outliers."""


def _images(inputs: Tensor, labels: Tensor | None = None) -> Images:
    given = torch.zeros(len(inputs), dtype=torch.int64) if labels is None else labels
    return Images((255 * inputs).round().to(torch.uint8), given)


@cache
def _digits() -> tuple[Images, Images, Images]:
    digits = load_digits(0)
    train, val, test = (_images(part.inputs, part.labels) for part in (digits.train, digits.val, digits.test))
    return train, val, test


def _sources(options: DataOptions) -> dict[str, Source]:
    train, validation, whole_test = _digits()
    test = whole_test.evenly(options.test)
    parts: dict[Role, Images] = {"train": train.evenly(options.train), "validation": validation, "test": test}
    count = options.outliers or OUTLIERS
    outliers = {"natural patches": natural_patches(count, SIDE), "noise": uniform_noise(count, SIDE)}
    return {
        **{role: image_source(options, "none", role, f"digits {role}", role, one) for role, one in parts.items()},
        **rotations(options, "digits", test, "bilinear"),
        **{
            name: image_source(options, "none", name, name, "outlier", _images(inputs))
            for name, inputs in outliers.items()
        },
    }


def _training(options: DataOptions, recipe: Recipe) -> TrainingData:
    train = _digits()[0].evenly(options.train)
    return TrainingData(Labelled(train.pixels, train.labels), normalisation("none"))


DIGITS = Suite(
    name="digits",
    title="Handwritten digits",
    builders={"mlp": digits_mlp},
    classes=tuple("0123456789"),
    recipe=Recipe(epochs=60),
    threshold=None,
    shift=Shift("rotation", "Rotated digits", "angle in degrees", tuple(float(angle) for angle in ANGLES)),
    make_sources=_sources,
    training_data=_training,
    budget=Budget(SwagBudget(learning_rate=1e-2, snapshots=20, batch_size=64), MimoBudget(epochs=20)),
)
