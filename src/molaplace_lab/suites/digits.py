"""The suite for scikit-learn's handwritten digits. It runs in about a minute and requires no data files."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from molaplace.demo import digits_network, load_digits, natural_patches, uniform_noise
from molaplace.evaluation import Role
from molaplace.images import Images
from molaplace_lab.suite import Budget, DataOptions, MimoBudget, Source, Suite, SwagBudget
from molaplace_lab.suites.image_sources import image_source, rotations, training
from molaplace_lab.training import Recipe

OUTLIERS = 500
"""Default number of images in each outlier set."""


def _images(inputs: Tensor, labels: Tensor | None = None) -> Images:
    known_labels = torch.zeros(len(inputs), dtype=torch.int64) if labels is None else labels
    return Images((255 * inputs).round().to(torch.uint8), known_labels)


@cache
def _digits() -> list[Images]:
    # Return the training, validation and test images.
    digits = load_digits(0)
    return [_images(part.inputs, part.labels) for part in (digits.train, digits.val, digits.test)]


def _sources(options: DataOptions) -> dict[str, Source]:
    train, validation, whole_test = _digits()
    test = whole_test.evenly(options.test)
    parts: dict[Role, Images] = {"train": train.evenly(options.train), "validation": validation, "test": test}
    count = options.outliers or OUTLIERS
    outliers = {"natural patches": natural_patches(count), "noise": uniform_noise(count)}
    return {
        **{role: image_source(options, "none", role, f"digits {role}", role, images) for role, images in parts.items()},
        **rotations(options, "digits", test, "bilinear"),
        **{
            name: image_source(options, "none", name, name, "outlier", _images(inputs))
            for name, inputs in outliers.items()
        },
    }


DIGITS = Suite(
    name="digits",
    title="Handwritten digits",
    builders={"mlp": digits_network},
    classes=tuple("0123456789"),
    recipe=Recipe(epochs=60),
    threshold=None,
    shift={"title": "Rotated digits", "axis": "angle in degrees"},
    make_sources=_sources,
    options=frozenset({"train", "test", "shifted", "outliers"}),
    training_data=training(lambda options: _digits()[0], "none"),
    budget=Budget(SwagBudget(learning_rate=1e-2, snapshots=20, batch_size=64), MimoBudget(epochs=20)),
)
