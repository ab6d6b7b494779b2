"""Handwritten digits that come with scikit-learn: everything in a minute, without files."""

from __future__ import annotations

from functools import cache

import torch

from mola.compare.record import Role
from mola.lab.data.embedded import SIDE, load_digits, natural_patches, uniform_noise
from mola.lab.data.images import Images, normalisation
from mola.lab.demo import ANGLES, build_network
from mola.lab.suite import Budget, DataOptions, MimoBudget, Shift, Source, Suite, SwagBudget, TrainingData
from mola.lab.suites.image_sources import image_source, limited, rotated
from mola.lab.training import Labelled, Recipe

OUTLIERS = 500
"""Images in each set of outliers, unless the user asks for another number."""


@cache
def _digits() -> tuple[Images, Images, Images]:
    digits = load_digits(0)

    def images(data: Labelled) -> Images:
        return Images((255 * data.inputs).round().to(torch.uint8), data.labels)

    return images(digits.train), images(digits.val), images(digits.test)


def _sources(options: DataOptions) -> dict[str, Source]:
    train, validation, whole_test = _digits()
    test = limited(whole_test, options.test)
    parts: dict[Role, Images] = {
        "train": limited(train, options.train),
        "validation": validation,
        "test": test,
    }
    sources: dict[str, Source] = {}
    for role, images in parts.items():
        sources[role] = image_source(options, "none", role, f"digits {role}", role, images)
    for angle in ANGLES[1:]:
        name = f"rotation {angle}"
        sources[name] = image_source(
            options,
            "none",
            name,
            f"digits turned by {angle}°",
            "shift",
            test,
            change=rotated(angle, "bilinear"),
            changed_by=("rotation", angle, "bilinear"),
            level=angle,
        )
    count = options.outliers or OUTLIERS
    for name, inputs in (("natural patches", natural_patches(count, SIDE)), ("noise", uniform_noise(count, SIDE))):
        images = Images((255 * inputs).round().to(torch.uint8), torch.zeros(len(inputs), dtype=torch.int64))
        sources[name] = image_source(options, "none", name, name, "outlier", images)
    return sources


def _training(options: DataOptions, recipe: Recipe) -> TrainingData:
    train = limited(_digits()[0], options.train)
    return TrainingData(Labelled(train.pixels, train.labels), normalisation("none"))


DIGITS = Suite(
    name="digits",
    title="Handwritten digits",
    builders={"mlp": build_network},
    classes=tuple("0123456789"),
    recipe=Recipe(epochs=60),
    threshold=None,
    shift=Shift("rotation", "Rotated digits", "angle in degrees", tuple(float(angle) for angle in ANGLES)),
    make_sources=_sources,
    training_data=_training,
    budget=Budget(SwagBudget(learning_rate=1e-2, snapshots=20, batch_size=64), MimoBudget(epochs=20)),
)
